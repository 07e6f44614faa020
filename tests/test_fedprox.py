"""FedProx: the pull by hand, stragglers and their costs, the stability warning. Closed forms: tests/conformance/fedprox.py."""

import numpy as np
import pytest
from problems import COIN_START, COIN_X, Quadratic, coin, federation, quadratic, run, weights

from perfed import tree
from perfed.algorithms.base import Facts
from perfed.algorithms.fedprox import FedProx
from perfed.errors import UserError
from perfed.optimizers import Adam

BACKENDS = ["vmap", "loop"]
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def line(options=None, centres=(4.0,), **fields):
    """f_i = w^2/2 - c_i w from w = 2."""
    algo = FedProx(name="fedprox", **{"beta": 0.1, "tau": 2, "batch": 1, **fields})
    return federation(algo, Quadratic(), [quadratic(np.eye(1), [c]) for c in centres], [2.0], **(options or {}))


@every_backend
def test_the_pull_is_zero_at_first_then_not_and_its_anchor_is_new_each_round(backend):
    # Step 1: g = -2, no pull, v = 2.2 for every mu. Step 2: g = -1.8, pull .5 .2: v = 2.2 + .17 = 2.37 (2.38 without).
    one = line({"backend": backend}, tau=1, mu=0.5)
    assert weights(run(one, 1))[0] == pytest.approx(2.2, abs=1e-14)
    fed = line({"backend": backend}, mu=0.5)
    assert weights(run(fed, 1))[0] == pytest.approx(2.37, abs=1e-14)
    assert weights(run(line({"backend": backend}, mu=0.0), 1))[0] == pytest.approx(2.38, abs=1e-14)
    # Next round from the anchor 2.37: g = -1.63, v = 2.533; g = -1.467, pull .5 .163: v = 2.533 + .13855.
    assert weights(run(fed, 1))[0] == pytest.approx(2.67155, abs=1e-14)


def test_the_pull_is_part_of_what_adam_sees():
    # Adam with beta1 = beta2 = 0 steps by .1 u / (|u| + .5): u = -2: 2.08; u = -1.92 + .5 .08 = -1.88: 2.08 + .188 / 2.38.
    fed = line({"local": Adam(name="adam", beta1=0.0, beta2=0.0, eps=0.5)}, mu=0.5)
    assert weights(run(fed, 1))[0] == pytest.approx(2.08 + 0.188 / 2.38, abs=1e-14)


@every_backend
def test_all_are_stragglers(backend):
    # Every user takes 1 + floor(tau chance) steps, and costs count those alone.
    fed = line({"backend": backend}, centres=(1.0, 2.0, 3.0), tau=5, mu=0.0, stragglers=1.0)
    total = 0
    for k in range(5):
        w = weights(fed)[0]
        steps = [1 + int(5 * u) for u in fed.info(fed.lanes(k)[0], k)["chance"].tolist()]
        total += sum(steps)
        fed.round()
        assert weights(fed)[0] == pytest.approx(np.mean([c + 0.9**s * (w - c) for c, s in zip((1, 2, 3), steps, strict=True)]), abs=1e-14)
    cost = fed.costs[0]
    assert (cost.steps, cost.grads, cost.user_rounds) == (total, total, 15)
    assert 15 < total < 75


def test_costs_state_and_candidates():
    fed = run(line(centres=(1.0, 2.0, 3.0), tau=3), 2)
    cost = fed.costs[0]
    assert (cost.steps, cost.grads, cost.hvps, cost.losses, cost.full_passes) == (18, 18, 0, 0, 0)
    assert (cost.floats_down, cost.floats_up) == (6, 6)
    assert fed.state.users == ()  # a new user is judged like all others
    assert list(fed.algo.candidates(tree.at(fed.shown(), 0), ())) == ["global"]


@every_backend
@pytest.mark.parametrize("aggregation, want", [("samples", [-0.25, 0.25]), ("uniform", [0.0, 0.0])])
def test_b12_averages(aggregation, want, backend):
    # A step of 1 from (0, 0) gives (.5, -.5) on label 0 and (-.5, .5) on label 1; one example of label 0, three of label 1.
    xs, ys = [COIN_X, np.repeat(COIN_X, 3, 0)], [np.array([0]), np.array([1, 1, 1])]
    algo = FedProx(name="fedprox", beta=1.0, tau=1, batch=40, aggregation=aggregation)
    np.testing.assert_allclose(weights(run(federation(algo, coin(), xs, COIN_START, ys=ys, backend=backend), 1)), want, rtol=0, atol=1e-15)
    # 2 of 4 active: divided by 2, not by 4.
    fed = run(federation(algo, coin(), [COIN_X] * 4, COIN_START, active=2, backend=backend), 1)
    np.testing.assert_allclose(weights(fed), [0.5, -0.5], rtol=0, atol=1e-15)


def test_the_stability_warning():
    def notes(beta, mu, smoothness):
        return FedProx(name="fedprox", beta=beta, mu=mu).notes(Facts(n=10, active=2, rounds=5, smoothness=smoothness))

    assert FedProx.wants_smoothness
    assert notes(0.1, 9.0, 10.0) == []  # .1 19 < 2
    assert notes(0.1, 19.0, None) == []
    (text,) = notes(0.1, 10.0, 10.0)
    assert text.startswith("warning: beta (L + mu) = 2 with L >= 10")
    (text,) = notes(0.1, 30.0, None)
    assert text.startswith("warning: beta (L + mu) = 3")


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"mu": -0.1}, "mu=-0.1: a number >= 0"),
        ({"stragglers": 1.1}, r"stragglers=1.1: a share of users, in \[0, 1\]"),
        ({"stragglers": -0.1}, r"stragglers=-0.1: a share of users, in \[0, 1\]"),
    ],
)
def test_bad_values(fields, text):
    with pytest.raises(UserError, match=text):
        FedProx(name="fedprox", **fields)
