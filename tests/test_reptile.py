"""Reptile: both schedules by hand, the horizon, costs, bad values. Equivalences and fixed points: tests/conformance/reptile.py."""

import numpy as np
import pytest
import torch
from problems import Quadratic, federation, quadratic, run, weights

from perfed import tree
from perfed.algorithms.reptile import Reptile
from perfed.errors import UserError
from perfed.optimizers import Adam, Average

BACKENDS = ["vmap", "loop"]
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def pair(options=None, **fields):
    """f_1 = w^2/2 - 3 w, f_2 = w^2/2 - 5 w from w = 2; a step of .1 each has the mean w - .1 (w - 4)."""
    algo = Reptile(name="reptile", **{"beta": 0.1, "tau": 1, "batch": 1, **fields})
    return federation(algo, Quadratic(), [quadratic(np.eye(1), [c]) for c in (3.0, 5.0)], [2.0], **(options or {}))


@every_backend
def test_constant_by_hand(backend):
    # 2 + .25 .1 2 = 2.05, then 2.05 + .025 1.95 = 2.09875
    fed = pair({"backend": backend}, eps=0.25)
    assert weights(run(fed, 1))[0] == pytest.approx(2.05, abs=1e-14)
    assert weights(run(fed, 1))[0] == pytest.approx(2.09875, abs=1e-14)


@every_backend
def test_linear_by_hand(backend):
    # eps_k = .5, .375, .25, .125 of 4 rounds: 4 - w shrinks by 1 - .1 eps_k; beyond the horizon nothing moves.
    fed, left = pair({"backend": backend}, eps=0.5, schedule="linear", rounds=4), 2.0
    for eps in (0.5, 0.375, 0.25, 0.125, 0.0, 0.0):
        left *= 1 - 0.1 * eps
        assert weights(run(fed, 1))[0] == pytest.approx(4 - left, abs=1e-14)


def test_server_step_multiplies():
    # eps .5 and server.lr .5: a quarter of the way.
    assert weights(run(pair({"server": Average(name="average", lr=0.5)}, eps=0.5), 1))[0] == pytest.approx(2.05, abs=1e-14)


def test_moments_of_adam_start_afresh():
    # Adam's first step is beta g / (|g| + eps): .1 2 / 2.5 = .08, half of it; then .1 1.96 / 2.46, half of it.
    algo = Reptile(name="reptile", eps=0.5, beta=0.1, tau=1, batch=1)
    fed = federation(algo, Quadratic(), [quadratic(np.eye(1), [4.0])], [2.0], local=Adam(name="adam", eps=0.5))
    assert weights(run(fed, 1))[0] == pytest.approx(2.04, abs=1e-14)
    assert weights(run(fed, 1))[0] == pytest.approx(2.04 + 0.098 / 2.46, abs=1e-14)


def test_only_the_linear_schedule_has_a_horizon():
    assert not Reptile(name="reptile").uses_horizon
    assert Reptile(name="reptile", schedule="linear", rounds=0).uses_horizon


def test_costs_state_and_candidates():
    fed = run(pair(tau=3), 2)
    cost = fed.costs[0]
    assert (cost.steps, cost.grads, cost.hvps, cost.losses) == (12, 12, 0, 0)
    assert (cost.floats_down, cost.floats_up, cost.full_passes) == (4, 4, 0)
    assert fed.state.users == ()  # a new user is judged like all others
    assert list(fed.algo.candidates(tree.at(fed.shown(), 0), ())) == ["global"]


def test_float32_stays():
    fed = run(pair({"dtype": torch.float32}, schedule="linear", rounds=4), 2)
    assert all(t.dtype == torch.float32 for t in tree.leaves(fed.state))


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"eps": 0.0}, r"eps=0.0: a number in \(0, 1\]"),
        ({"eps": 1.5}, r"eps=1.5: a number in \(0, 1\]"),
        ({"schedule": "cosine"}, "schedule=cosine: one of constant, linear"),
        ({"rounds": -1}, "rounds=-1: an integer >= 0"),
    ],
)
def test_bad_values(fields, text):
    with pytest.raises(UserError, match=text):
        Reptile(name="reptile", **fields)
