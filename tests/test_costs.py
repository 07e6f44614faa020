"""What a round costs, method by method: typed in from the papers, compared with what the engine counts.

d is the number of parameters. A row is for one user that trains in a round of tau = 3 steps: gradients, Hessian-vector products,
losses and passes over all his data; then numbers down and up, and numbers that he keeps from round to round.
"""

from __future__ import annotations

import numpy as np
import pytest
from small import algorithm, cloud, federation, ranges, split

from perfed import tree
from perfed.algorithms import ALGORITHMS

D = 3 * 5 + 5 + 5 * 3 + 3  # an mlp 3-5-3
LAST = 5 * 3 + 3
FIRST = 3 * 5 + 5
N, A, TAU = 5, 2, 3
SIZES = [9, 4, 7, 12, 5]

PER_USER = {
    # method: (fields, grads, hvps, losses, full passes, down, up, kept)
    "fedavg": ({}, TAU, 0, 0, 0, D, D, 0),
    "perfedavg_fo": ({}, 2 * TAU, 0, 0, 0, D, D, 0),
    "perfedavg_hf": ({}, 4 * TAU, 0, 0, 0, D, D, 0),
    "perfedavg": ({}, 2 * TAU, TAU, 0, 0, D, D, 0),
    "fedmeta": ({}, 2, 1, 0, 0, D, D, 0),  # one gradient a round
    "metasgd": ({}, 2, 1, 0, 0, 2 * D, 2 * D, 0),
    "reptile": ({}, TAU, 0, 0, 0, D, D, 0),
    "aruba": ({}, TAU, 0, 0, 0, 2 * D, 2 * D, 0),
    "aruba ": ({"isotropic": True}, TAU, 0, 0, 0, D + 1, D + 1, 0),
    "fedprox": ({}, TAU, 0, 0, 0, D, D, 0),
    "scaffold": ({}, TAU, 0, 0, 0, 2 * D, 2 * D, D),
    "scaffold ": ({"option": "I"}, TAU + 1, 0, 0, 1, 2 * D, 2 * D, D),
    "qfedavg": ({}, TAU, 0, 1, 1, D, D + 1, 0),
    "pfedme": ({"inner_steps": 5}, 5 * TAU, 0, 0, 0, D, D, D),
    "easgd": ({}, TAU, 0, 0, 0, D, D, D),
    "admm": ({}, TAU, 0, 0, 0, D, D, 2 * D),
    "fedu": ({}, TAU, 0, 0, 0, D, D, D),
    "mtl": ({"layers": "all"}, TAU, 0, 0, 0, D + 1, D, D),  # the others' weighted sum and his own weight
    "mtl ": ({"layers": "last"}, TAU, 0, 0, 0, LAST + 1, LAST, D),
    "apfl": ({}, 2 * TAU, 0, 0, 0, D, D, D),
    "apfl ": ({"adaptive": True}, 2 * TAU, 0, 0, 0, D, D, D + 1),
    "ditto": ({}, 2 * TAU, 0, 0, 0, D, D, D),
    "ditto ": ({"personal_steps": 1}, TAU + 1, 0, 0, 0, D, D, D),
    "local": ({}, TAU, 0, 0, 0, 0, 0, D),
    "partial": ({}, TAU, 0, 0, 0, D - LAST, D - LAST, LAST),
    "fedper": ({}, TAU, 0, 0, 0, D - LAST, D - LAST, LAST),
    "fedrep": ({"personal_steps": 2}, TAU + 2, 0, 0, 0, D - LAST, D - LAST, LAST),
    "fedbabu": ({}, TAU, 0, 0, 0, D - LAST, D - LAST, 0),
    "lgfedavg": ({}, TAU, 0, 0, 0, D - FIRST, D - FIRST, FIRST),
}
OTHERS = {"l2gd", "pooled", "mocha"}  # below


def trained(name: str, rounds: int = 2, **fields):
    x, y = cloud(sum(SIZES) + 3 * N)
    fed = federation(algorithm(name, **{"tau": TAU, **fields}), x, y, [split(ranges(SIZES), ranges([3] * N, sum(SIZES)))], active=A)
    for _ in range(rounds):
        fed.round()
    return fed


def counted(fed) -> tuple[int, ...]:
    c = fed.costs[0]
    return c.grads, c.hvps, c.losses, c.full_passes, c.floats_down, c.floats_up


def kept(fed) -> float:
    return sum(leaf[0].numel() for leaf in tree.leaves(fed.state.users) if leaf.is_floating_point()) / N


def test_every_method_has_a_row():
    assert {name.strip() for name in PER_USER} | OTHERS == set(ALGORITHMS)


@pytest.mark.parametrize("name", PER_USER)
def test_costs_of_a_round(name):
    fields, *want, state = PER_USER[name]
    fed = trained(name.strip(), **fields)
    assert counted(fed) == tuple(2 * A * value for value in want)
    assert kept(fed) == state


def test_all_users_compute_in_l2gd_and_real_communications_alone_are_counted():
    # T of the rounds comes from the coin: every user takes T steps, and gets and sends d numbers in the rounds with T > 0.
    fed = trained("l2gd", rounds=12)
    steps = fed.costs[0].grads // N
    assert fed.costs[0].grads == N * steps and kept(fed) == D
    taken = []
    from perfed.data.sampling import key, uniforms

    for k in range(12):
        u = float(uniforms(key(0, "coin", k), 1)[..., 0])
        taken.append(int(np.floor(np.log1p(-u) / np.log1p(-1 / TAU))))
    assert steps == sum(taken) and 0 in taken
    assert fed.costs[0].floats_up == fed.costs[0].floats_down == N * D * sum(t > 0 for t in taken)


def test_everyone_gets_the_model_in_pfedme_where_everyone_trains():
    fed = trained("pfedme", train_all=True, inner_steps=5)
    assert counted(fed) == (2 * N * 5 * TAU, 0, 0, 0, 2 * N * D, 2 * A * D)


def test_admm_with_all_users():
    assert counted(trained("admm", scheme="full")) == (2 * N * TAU, 0, 0, 0, 2 * N * D, 2 * N * D)


def test_pooled_counts_the_gradients_of_the_active_users_and_sends_nothing():
    fed = trained("pooled")
    assert counted(fed) == (2 * A * TAU, 0, 0, 0, 0, 0)


def test_mocha():
    # A linear model: F C + C numbers. Down also q_t, one number; a batch of dual steps counts as one gradient.
    fed = trained("mocha")
    d = 3 * 3 + 3
    c = fed.costs[0]
    assert (c.grads, c.hvps, c.losses, c.full_passes) == (2 * A * TAU, 0, 0, 2 * A)
    assert (c.floats_down, c.floats_up) == (2 * A * (d + 1), 2 * A * d)
    assert kept(fed) == d + max(SIZES) * 3  # w_t and the dual variables, C for each example
