"""EASGD by hand, its state, cold start, costs and warnings; its theory is in conformance/easgd.py."""

import numpy as np
import pytest
import torch
from problems import Quadratic, federation, quadratic, run, weights
from small import algorithm

from perfed import tree
from perfed.algorithms.base import Facts
from perfed.errors import UserError
from perfed.optimizers import Adam, Sgd

every_backend = pytest.mark.parametrize("backend", ["vmap", "loop"])


def line(b, backend="vmap", active=None, **fields):
    """f_i = w^2/2 - b_i w from 0: a step of 1/2 goes half way to b_i."""
    xs = [quadratic(np.eye(1), [c]) for c in b]
    return federation(algorithm("easgd", beta=0.5, **fields), Quadratic(), xs, [0.0], active=active, backend=backend)


def own(fed):
    return fed.state.users["x"]["w"][0, :, 0].numpy()


@every_backend
def test_two_rounds_by_hand(backend):
    # beta_e = 1, A = 2: alpha_e = 1/2. tau = 2, b = 4, 0.
    # Round 0: all at 0, e = 0. User 0: 0 -> 2 -> 3; user 1 stays. Centre 0.
    # Round 1: e = 1.5, 0. User 0: 3 + .5 - 1.5 = 2, then 3; user 1: 0. Centre 1.5.
    # Round 2: e = .75, -.75. User 0: 3.5 - .75 = 2.75, then 3.375; user 1: .75, then .375. Centre 1.5.
    fed = line([4.0, 0.0], backend, tau=2, beta_e=1.0)
    for x, centre in (([3, 0], 0), ([3, 0], 1.5), ([3.375, 0.375], 1.5)):
        fed.round()
        np.testing.assert_array_equal(own(fed), x)
        np.testing.assert_array_equal(weights(fed), [centre])
    assert fed.state.users["rounds"].tolist() == [[3, 3]]


def test_one_active_user_pulls_with_all_of_beta_e():
    # A = 1: alpha_e = beta_e = 1/2. b = 4, tau = 1. Round 0: x = 2. Round 1: e = 1, x = 2 + 1 - 1 = 2, centre 1.
    fed = run(line([4.0], tau=1, beta_e=0.5), 2)
    assert (own(fed)[0], weights(fed)[0]) == (2.0, 1.0)


def test_users_that_are_not_drawn_neither_move_nor_pull():
    fed = line([4.0, 4.0, 4.0, 4.0], active=1, tau=1)
    for k in range(4):
        before, centre = own(fed).copy(), weights(fed)[0]
        (i,) = fed.cohorts(k)[0]
        fed.round()
        assert (np.delete(own(fed), i) == np.delete(before, i)).all() and own(fed)[i] != before[i]
        assert weights(fed)[0] == pytest.approx(centre + 0.9 * (before[i] - centre), abs=1e-15)


def test_cold_start_is_the_centre():
    fed = run(line([4.0] * 5, active=2, tau=2), 2)
    rounds = fed.state.users["rounds"][0]
    np.testing.assert_array_equal(rounds.numpy(), fed.times_sampled[0])
    assert set(rounds.tolist()) > {0}
    for i in range(5):
        models = fed.algo.candidates(tree.at(fed.shown(), 0), fed.users_at(0, i))
        assert list(models) == ["personal", "global"]
        assert float(models["global"]["w"]) == weights(fed)[0] != 0
        assert float(models["personal"]["w"]) == (own(fed)[i] if rounds[i] else weights(fed)[0])


def test_costs():
    fed = run(line([1.0] * 5, active=2, tau=3), 4)
    cost = fed.costs[0]
    assert (cost.grads, cost.hvps, cost.losses, cost.steps) == (24, 0, 0, 24)
    assert cost.floats_down == cost.floats_up == 4 * 2 * 1


@pytest.mark.parametrize("local", [Adam(name="adam"), Sgd(name="sgd", momentum=0.9)])
def test_other_local_optimizers_leave_the_force_alone(local):
    # Losses without a gradient: what moves is the force, in full.
    fed = federation(algorithm("easgd", tau=2, beta_e=1.0), Quadratic(), [quadratic(np.zeros((1, 1)), [0.0])] * 2, [0.0], local=local)
    users = {**fed.state.users, "x": {"w": torch.tensor([[[4.0], [-2.0]]], dtype=torch.float64)}}
    fed.state = fed.state._replace(users=users)
    fed.round()
    assert own(fed).tolist() == [2.0, -1.0] and weights(fed).tolist() == [1.0]


@pytest.mark.parametrize("value", [-0.1, 2.0, 90.0])
def test_beta_e_out_of_range(value):
    with pytest.raises(UserError, match=rf"beta_e={value}: a number in \[0, 2\)"):
        algorithm("easgd", beta_e=value)


def test_notes():
    # alpha_e = .9/9 = .1, rho = .1/.1 = 1, lambda = 1/4; coupling .25 * .1 * 4 * 100 * 9/30 = 3.
    algo = algorithm("easgd", beta=0.1, tau=4)
    assert algo.notes(Facts(30, 9, 100, None)) == ["coupling lambda*beta*tau*rounds*r = 3 (lambda=0.25)"]
    assert algo.notes(Facts(30, 9, 100, 15.0))[1:] == []  # beta L = 1.5: |1 - 1.5 - .1| = .6 and .4 * 1.1 > .09
    (warning,) = algo.notes(Facts(30, 9, 100, 19.0))[1:]  # beta L = 1.9: 0 * 1.1 < .09
    assert warning.startswith("warning: beta*L = 1.9") and "tau = 1" in warning
    (line,) = algorithm("easgd", beta_e=0.0).notes(Facts(30, 9, 100, None))
    assert line.startswith("warning: coupling")
