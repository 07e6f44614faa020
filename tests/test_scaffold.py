"""SCAFFOLD: two rounds by hand, costs, states, FedAvg's bias. The recursion and its fixed points: tests/conformance/scaffold.py."""

import numpy as np
import pytest
import torch
from problems import Quadratic, federation, quadratic, random_quadratics, run, weights

from perfed import tree
from perfed.algorithms.fedavg import FedAvg
from perfed.algorithms.scaffold import Scaffold
from perfed.errors import UserError
from perfed.optimizers import Average

BACKENDS = ["vmap", "loop"]
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def pair(option, options=None, **fields):
    """f_1 = w^2/2 - 3 w and f_2 = w^2/2 - 5 w from w = 2; gradients w - 3 and w - 5."""
    algo = Scaffold(name="scaffold", option=option, **{"beta": 0.1, "tau": 2, "batch": 1, **fields})
    return federation(algo, Quadratic(), [quadratic(np.eye(1), [c]) for c in (3.0, 5.0)], [2.0], **(options or {}))


def held(fed):
    """(w, c, c_1, c_2)."""
    return [weights(fed)[0], float(fed.state.server["c"]["w"]), *fed.state.users["w"][0, :, 0].tolist()]


@every_backend
def test_option_two_by_hand(backend):
    # Round 0, c = c_i = 0: y_1 = 2.1, 2.19 and y_2 = 2.3, 2.57: w = 2.38. Mean gradients (2 - y)/.2: -.95 and -2.85; c = -1.9.
    fed = pair("II", {"backend": backend})
    np.testing.assert_allclose(held(run(fed, 1)), [2.38, -1.9, -0.95, -2.85], rtol=0, atol=1e-14)
    # Round 1, from 2.38. User 1, c - c_1 = -.95: -.62 - .95 = -1.57, y = 2.537; -.463 - .95 = -1.413, y = 2.6783.
    # User 2, c - c_2 = .95: -2.62 + .95 = -1.67, y = 2.547; -2.453 + .95 = -1.503, y = 2.6973. w = 2.6878.
    # c_1 = mean(-.62, -.463) = -.5415, c_2 = mean(-2.62, -2.453) = -2.5365, c = -1.539.
    np.testing.assert_allclose(held(run(fed, 1)), [2.6878, -1.539, -0.5415, -2.5365], rtol=0, atol=1e-14)


@every_backend
def test_option_one_by_hand_with_a_server_step(backend):
    # Round 0: dy = .38 as above, eta_g = .5: w = 2.19. c_i = gradients at the received 2: -1 and -3; c = -2.
    fed = pair("I", {"backend": backend, "server": Average(name="average", lr=0.5)})
    np.testing.assert_allclose(held(run(fed, 1)), [2.19, -2.0, -1.0, -3.0], rtol=0, atol=1e-14)
    # Round 1: c - c_1 = -1: -.81 - 1 = -1.81, y = 2.371; -.629 - 1, y = 2.5339. c - c_2 = 1: -2.81 + 1, y = 2.371; -2.629 + 1,
    # y = 2.5339. w = 2.19 + .5 .3439 = 2.36195; c_i = 2.19 - 3 and 2.19 - 5.
    np.testing.assert_allclose(held(run(fed, 1)), [2.36195, -1.81, -0.81, -2.81], rtol=0, atol=1e-14)


@every_backend
def test_option_two_divides_by_the_steps_that_were_taken(backend):
    # A plugin whose users take different numbers of steps: c_i is still the mean of the gradients that the user saw.
    class Uneven(Scaffold):
        def local_steps(self, info):
            return 1 + info.user

    algo = Uneven(name="scaffold", beta=0.1, tau=2, batch=1)
    fed = federation(algo, Quadratic(), [quadratic(np.eye(1), [c]) for c in (3.0, 5.0)], [2.0], backend=backend)
    np.testing.assert_allclose(held(run(fed, 1)), [(2.1 + 2.57) / 2, (-1 - 2.85) / 2, -1.0, -2.85], rtol=0, atol=1e-14)


@pytest.mark.parametrize("option, extra", [("I", 1), ("II", 0)])
def test_costs_state_and_candidates(option, extra):
    fed = run(pair(option, tau=3), 2)
    cost = fed.costs[0]
    assert (cost.steps, cost.grads, cost.hvps, cost.losses) == (12, 12 + 4 * extra, 0, 0)
    assert (cost.floats_down, cost.floats_up) == (8, 8)  # 2d each, 2 users, 2 rounds, d = 1
    assert cost.full_passes == 4 * extra
    assert (fed.algo.plain_sgd, fed.algo.full_data) == (not extra, bool(extra))
    shown = tree.at(fed.shown(), 0)
    assert list(shown) == ["w"] and list(fed.algo.candidates(shown, ())) == ["global"]


def test_a_user_that_was_never_drawn_has_no_control_variate():
    algo = Scaffold(name="scaffold", beta=0.1, tau=2, batch=1)
    fed = run(federation(algo, Quadratic(), [quadratic(np.eye(1), [4.0])] * 5, [2.0], active=1), 2)
    never = fed.times_sampled[0] == 0
    assert never.sum() >= 3
    assert (fed.state.users["w"][0, :, 0].numpy() != 0).tolist() == (~never).tolist()


def test_fedavg_is_biased_where_scaffold_is_not():
    # 2 of 5 users, 4 steps. FedAvg's fixed point has sum Q_i w = sum Q_i x_i, and with 2 of 5 it does not even settle.
    A, b = random_quadratics(5, 4)
    best = np.linalg.solve(A.sum(0), b.sum(0))
    common = dict(beta=0.2, tau=4, batch=1)
    xs = list(map(quadratic, A, b))
    ours = federation(Scaffold(name="scaffold", **common), Quadratic(), xs, [3.0] * 4, active=2)
    theirs = federation(FedAvg(name="fedavg", **common), Quadratic(), xs, [3.0] * 4)
    assert np.abs(weights(run(ours, 60)) - best).max() < 1e-4
    assert np.abs(weights(run(theirs, 60)) - best).max() > 5e-3


@pytest.mark.parametrize("option", ["I", "II"])
def test_float32_stays(option):
    fed = run(pair(option, {"dtype": torch.float32}), 2)
    assert all(t.dtype == torch.float32 for t in tree.leaves(fed.state))


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"option": "III"}, "option=III: one of I, II"),
        ({"aggregation": "samples"}, "aggregation=samples: one of uniform"),
    ],
)
def test_bad_values(fields, text):
    with pytest.raises(UserError, match=text):
        Scaffold(name="scaffold", **fields)
