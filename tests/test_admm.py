"""ADMM by hand, its state, cold start, costs and warnings; its theory is in conformance/admm.py."""

import numpy as np
import pytest
from problems import Quadratic, federation, quadratic, run, weights
from small import algorithm

from perfed import tree
from perfed.algorithms.base import Facts
from perfed.errors import UserError

every_backend = pytest.mark.parametrize("backend", ["vmap", "loop"])
B = [8.0, 0.0]


def line(b=B, backend="vmap", active=None, **fields):
    """f_i = w^2/2 - b_i w from 0, lam = 1, one step of 1/2: x_i - (x_i - b_i + x_i - x - y_i)/2 = (b_i + x + y_i)/2, the exact solve."""
    fields = {"beta": 0.5, "tau": 1, "lam": 1.0, **fields}
    xs = [quadratic(np.eye(1), [c]) for c in b]
    return federation(algorithm("admm", **fields), Quadratic(), xs, [0.0], active=active, backend=backend)


def own(fed, name):
    return fed.state.users[name]["w"][0, :, 0].tolist()


@every_backend
def test_full_by_hand(backend):
    # Round 0: x_i = 4, 0; x = 2; y_i = -(4 - 2), -(0 - 2) = -2, 2.
    # Round 1: x_i = (8 + 2 - 2)/2, (0 + 2 + 2)/2 = 4, 2; x = mean(4 + 2, 2 - 2) = 3; y_i = -2 - 1, 2 + 1 = -3, 3.
    fed = line(backend=backend, scheme="full")
    for x, y, mean in (([4, 0], [-2, 2], 2), ([4, 2], [-3, 3], 3)):
        fed.round()
        assert (own(fed, "x"), own(fed, "y"), weights(fed).tolist()) == (x, y, [mean])


@every_backend
def test_partial_by_hand(backend):
    # All active, x = 0 was sent. Round 0: x_i = 4, 0; y_i = -(4 - 0), 0 = -4, 0; d_i = 4 + 4, 0 = 8, 0; x = (2/2) mean = 4.
    # Round 1: x_i = (8 + 4 - 4)/2, (0 + 4 + 0)/2 = 4, 2; y_i = -4 - (4 - 4), 0 - (2 - 4) = -4, 2; d_i = 0, 2 - 2 = 0, 0; x = 4.
    # That is the optimum, mean b; next x_i = (8 + 4 - 4)/2, (0 + 4 + 2)/2 = 4, 3.
    fed = line(backend=backend)
    for x, y, mean in (([4, 0], [-4, 0], 4), ([4, 2], [-4, 2], 4), ([4, 3], [-4, 3], 4)):
        fed.round()
        assert (own(fed, "x"), own(fed, "y"), weights(fed).tolist()) == (x, y, [mean])


@pytest.mark.parametrize("tracking, share", [(True, 1 / 4), (False, 1.0)])
def test_one_of_four(tracking, share):
    # One drawn user with b = 8: d = 8, as above. s/A = (A/n)/A = 1/4 or 1.
    fed = run(line([8.0] * 4, active=1, tracking=tracking), 1)
    assert weights(fed).tolist() == [8 * share]


def test_full_trains_all_users_whatever_r_is():
    one, two = (run(line([8.0, 0.0, 4.0], active=a, scheme="full"), 3) for a in (1, 3))
    assert weights(one).tolist() == weights(two).tolist() and own(one, "y") == own(two, "y")
    assert one.costs == two.costs and (one.times_sampled == 3).all()


def test_cold_start_is_the_consensus():
    fed = run(line([8.0] * 5, active=2), 2)
    rounds = fed.state.users["rounds"][0]
    np.testing.assert_array_equal(rounds.numpy(), fed.times_sampled[0])
    assert 0 in rounds.tolist()
    for i in range(5):
        models = fed.algo.candidates(tree.at(fed.shown(), 0), fed.users_at(0, i))
        assert list(models) == ["global", "personal"]
        assert float(models["global"]["w"]) == weights(fed)[0] != 0
        assert float(models["personal"]["w"]) == (own(fed, "x")[i] if rounds[i] else weights(fed)[0])


@pytest.mark.parametrize("scheme, users", [("partial", 2), ("full", 5)])
def test_costs(scheme, users):
    # d = 1 down and 1 up a round; the mean that the full scheme answers is what it would send next.
    cost = run(line([8.0] * 5, active=2, tau=3, scheme=scheme), 4).costs[0]
    assert (cost.grads, cost.hvps, cost.losses, cost.steps) == (users * 12, 0, 0, users * 12)
    assert cost.floats_down == cost.floats_up == users * 4


@pytest.mark.parametrize(
    "fields, message",
    [({"lam": 0.0}, "lam=0.0: a number > 0"), ({"lam": -1.0}, "lam=-1.0"), ({"scheme": "half"}, "scheme=half: one of partial, full")],
)
def test_bad_values(fields, message):
    with pytest.raises(UserError, match=message):
        algorithm("admm", **fields)


def test_notes():
    facts = Facts(10, 2, 100, 5.0)
    assert algorithm("admm", beta=0.1, lam=1.0).notes(facts) == []
    assert algorithm("admm", beta=0.1, lam=1.0).notes(facts._replace(smoothness=None)) == []
    (line,) = algorithm("admm", beta=0.1, lam=15.0).notes(facts)  # .1 (5 + 15) = 2
    assert line.startswith("warning: beta*(L + lam) = 2 ")
    (line,) = algorithm("admm", beta=0.1, tracking=False).notes(facts)
    assert line.startswith("warning: tracking=false")
    assert algorithm("admm", beta=0.1, tracking=False).notes(facts._replace(active=10)) == []
