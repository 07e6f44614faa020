"""L2GD by hand, its state, cold start, costs and warnings; its theory is in conformance/l2gd.py."""

import math

import numpy as np
import pytest
import torch
from problems import Quadratic, federation, quadratic, run, weights
from small import algorithm, ranges, split
from small import federation as small_federation

from perfed import tree
from perfed.algorithms.base import Facts
from perfed.draws import Lanes
from perfed.errors import UserError

every_backend = pytest.mark.parametrize("backend", ["vmap", "loop"])


def line(b, backend="vmap", active=None, coins=None, **fields):
    """f_i = w^2/2 - b_i w from 0: a step of 1/2 goes half way to b_i. ``coins``: those of the rounds, in place of the drawn ones; the
    last one stays."""
    fields = {"beta": 0.5, "tau": 2, "pull": 0.25, **fields}
    xs = [quadratic(np.eye(1), [c]) for c in b]
    fed = federation(algorithm("l2gd", **fields), Quadratic(), xs, [0.0], active=active, backend=backend)
    if coins is not None:
        drawn = fed.info

        def info(lanes, k):
            fields = drawn(lanes, k)
            return {**fields, "coin": torch.tensor(coins, dtype=torch.float64)[fields["round"].clamp(max=len(coins) - 1)]}

        fed.info = info
    return fed


def own(fed):
    return fed.state.users["x"]["w"][0, :, 0].tolist()


@every_backend
def test_three_rounds_by_hand(backend):
    # p = 1/2: a coin in [0, 1/2) gives no step, [1/2, 3/4) one, [3/4, 7/8) two. b = 8, 0, pull = 1/4.
    # Two steps: 6, 0; mean 3; 6 - 3/4, 3/4. No step: the same mean; 5.25 - .5625, .75 + .5625.
    # One step: (8 + 4.6875)/2 = 6.34375, .65625; mean 3.5; a quarter of the way there.
    fed = line([8.0, 0.0], backend, coins=[0.75, 0.25, 0.5])
    for x, mean in (([5.25, 0.75], 3), ([4.6875, 1.3125], 3), ([5.6328125, 1.3671875], 3.5)):
        fed.round()
        assert (own(fed), weights(fed).tolist()) == (x, [mean])
    cost = fed.costs[0]
    assert (cost.steps, cost.grads) == (6, 6)
    assert cost.floats_up == cost.floats_down == 4  # the second round has nothing to send
    assert fed.times_sampled.tolist() == [[2, 2]] and fed.state.users["rounds"].tolist() == [[3, 3]]


def test_subset_by_hand():
    # Two steps: all users at 6. Only the drawn one is averaged; its mean is its own model.
    fed = line([8.0, 4.0, 0.0, -4.0], active=2, coins=[0.75, 0.25], participation="subset")
    fed.round()
    x = np.array([6.0, 3.0, 0.0, -3.0])
    who = fed.cohorts(0)[0]
    mean = x[who].mean()
    x[who] += 0.25 * (mean - x[who])
    assert own(fed) == x.tolist() and weights(fed).tolist() == [mean]
    fed.round()  # no step, and still another mean of others: it is sent
    assert weights(fed)[0] == pytest.approx(x[fed.cohorts(1)[0]].mean(), abs=1e-15)
    assert fed.costs[0].floats_up == fed.costs[0].floats_down == 2 * 2
    assert (fed.costs[0].steps, fed.costs[0].user_rounds) == (8, 8)


def test_with_all_r_does_not_count():
    one, two = (run(line([8.0, 4.0, 0.0], active=a), 5) for a in (1, 3))
    assert own(one) == own(two) and one.costs == two.costs


def test_all_users_share_a_seed_s_coin():
    fed = line([1.0] * 4)
    seen = set()
    for k in range(8):
        lanes = Lanes(np.zeros(4, np.int64), np.arange(4))
        steps = fed.algo.local_steps(fed._info(fed.info(lanes, k)))
        assert steps.dtype == torch.int64 and (steps == steps[0]).all()
        seen.add(int(steps[0]))
    assert len(seen) > 2


def test_cold_start_is_the_mean():
    data = np.concatenate([quadratic(np.eye(1), [c]) for c in (8.0, 0.0, 5.0)] * 2)
    part = split(ranges([1] * 3), ranges([1] * 3, 3), seen=[True, True, False])
    start = {"w": torch.zeros(1, dtype=torch.float64)}
    fed = small_federation(algorithm("l2gd"), data, np.zeros(6), [part], model=Quadratic(), initial=[start])
    run(fed, 4)
    assert fed.state.users["rounds"].tolist() == [[4, 4, 0]]
    for i in range(3):
        models = fed.algo.candidates(tree.at(fed.shown(), 0), fed.users_at(0, i))
        assert list(models) == ["personal", "global"]
        assert float(models["global"]["w"]) == weights(fed)[0] != 0
        assert float(models["personal"]["w"]) == (weights(fed)[0] if i == 2 else own(fed)[i])


def test_p_is_one_over_tau_or_given():
    assert (algorithm("l2gd", tau=4).rate, algorithm("l2gd", tau=1, p=0.3).rate) == (0.25, 0.3)
    assert algorithm("l2gd", tau=10).local_steps_at_most() == 9  # (1 - p) / p
    assert algorithm("l2gd", p=0.9).local_steps_at_most() == 1


def test_a_rare_coin_ends():
    # The largest coin is 1 - 2^-53: 53 log 2 / -log(.9) = 348.7.
    fed = line([1.0], coins=[1 - 2.0**-53], tau=10)
    fed.round()
    assert fed.costs[0].steps == math.floor(53 * math.log(2) / -math.log(0.9)) == 348


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"p": 0.0}, r"p=0.0: null \(1 / tau\) or a number in \(0, 1\)"),
        ({"p": 1.0}, "p=1.0"),
        ({"tau": 1}, "tau=1: an integer >= 2, or give p"),
        ({"pull": 1.5}, r"pull=1.5: a number in \[0, 1\]"),
        ({"pull": -0.1}, "pull=-0.1"),
        ({"participation": "some"}, "participation=some: one of all, subset"),
    ],
)
def test_bad_values(fields, message):
    with pytest.raises(UserError, match=message):
        algorithm("l2gd", **fields)


def test_notes():
    # lam = .2 * .2 / (.8 * .1) = .5; coupling .5 * .1 * 5 * 100 * r, where all users are pulled r = 1, else 2/10.
    facts = Facts(10, 2, 100, 5.0)
    assert algorithm("l2gd", tau=5).notes(facts) == ["coupling lambda*beta*tau*rounds*r = 25 (lambda=0.5)"]
    assert algorithm("l2gd", tau=5, participation="subset").notes(facts) == ["coupling lambda*beta*tau*rounds*r = 5 (lambda=0.5)"]
    assert algorithm("l2gd", tau=5).notes(facts._replace(smoothness=5.1))[1].startswith("warning: beta*L = 0.51")
    assert algorithm("l2gd", tau=5, pull=0.6).notes(facts)[1].startswith("warning: pull = 0.6")
    assert algorithm("l2gd", pull=0.0).notes(facts)[0].startswith("warning: coupling")
