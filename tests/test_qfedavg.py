"""q-FedAvg: a round by hand, extreme losses, costs, bad values. Exact arithmetic and fixed points: tests/conformance/qfedavg.py."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from problems import Formula, federation, run, weights

from perfed import tree
from perfed.algorithms.qfedavg import QFedAvg
from perfed.errors import UserError

BACKENDS = ["vmap", "loop"]
every_backend = pytest.mark.parametrize("backend", BACKENDS)


@dataclass(kw_only=True)
class Parabola(Formula):
    """a (w - c)^2 / 2 + f; the example is (a, f, c)."""

    def value(self, w, x):
        return x[:, 0] * (w[0] - x[:, 2]) ** 2 / 2 + x[:, 1]


def pair(q, options=None, users=((1.0, 1.0, 0.0), (1.0, 2.0, 4.0)), **fields):
    algo = QFedAvg(name="qfedavg", q=q, **{"beta": 0.1, "tau": 1, "batch": 1, **fields})
    return federation(algo, Parabola(), [np.array([user]) for user in users], [2.0], **(options or {}))


@every_backend
@pytest.mark.parametrize(
    "q, want",
    # From w = 2: F = 3 and 4, dw = gradients 2 and -2, L = 10. Delta = 2 (3^q - 4^q), h_i = 4 q F^(q - 1) + 10 F^q.
    [
        (0.0, 2.0),
        (1.0, 2 + 2 / 78),  # Delta = -2, h = 34 + 44
        (2.0, 2 + 14 / 306),  # Delta = -14, h = (24 + 90) + (32 + 160)
        (0.5, 2 - 2 * (3**0.5 - 2) / (2 * 3**-0.5 + 10 * 3**0.5 + 1 + 20)),
    ],
)
def test_one_round_by_hand(q, want, backend):
    fed = run(pair(q, {"backend": backend}), 1)
    assert weights(fed)[0] == pytest.approx(want, abs=1e-14)


def test_the_loss_is_that_of_the_received_model_on_all_data():
    # Two examples, batches of one: F = 3.5 whichever is drawn. dw = -/+ 2 with h = 4 + 35 and Delta = +/- 7 (q = 1).
    algo = QFedAvg(name="qfedavg", beta=0.1, tau=1, batch=1)
    fed = run(federation(algo, Parabola(), [np.array([(1.0, 1.0, 0.0), (1.0, 2.0, 4.0)])], [2.0]), 1)
    assert abs(weights(fed)[0] - 2) == pytest.approx(7 / 39, abs=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("q", [0.0, 0.01, 1.0, 5.0, 100.0, 1e4])
@pytest.mark.parametrize("losses", [(0.0, 1.0), (0.0, 0.0), (1e4, 1e-6), (-3.0, 2.0)])
def test_no_loss_and_no_q_is_too_extreme(losses, q, dtype):
    fed = run(pair(q, {"dtype": dtype}, users=[(1.0, f, c) for f, c in zip(losses, (2.0, 2.5), strict=True)]), 3)
    w = weights(fed)[0]
    assert np.isfinite(w) and 2.0 <= w <= 2.5
    assert all(t.dtype == dtype for t in tree.leaves(fed.state))


def test_larger_q_evens_out_the_losses():
    # Least losses .2 and 2 at centres 0 and 4: the worse user gains as q grows.
    ends = [weights(run(pair(q, users=((1.0, 0.2, 0.0), (1.0, 2.0, 4.0)), beta=0.5), 60))[0] for q in (0.0, 1.0, 5.0)]
    gaps = [2.0 + (w - 4) ** 2 / 2 - 0.2 - w**2 / 2 for w in ends]
    assert gaps[0] == pytest.approx(1.8, abs=1e-9)  # at w = 2
    assert gaps[0] > gaps[1] > gaps[2] > 0


def test_costs_state_and_candidates():
    fed = run(pair(1.0, tau=3), 2)
    cost = fed.costs[0]
    assert (cost.steps, cost.grads, cost.losses, cost.full_passes) == (12, 12, 4, 4)
    assert (cost.floats_down, cost.floats_up) == (4, 8)  # d and d + 1, 2 users, 2 rounds, d = 1
    assert fed.state.users == ()  # a new user is judged like all others
    assert list(fed.algo.candidates(tree.at(fed.shown(), 0), ())) == ["global"]
    assert QFedAvg.own_server_step


@pytest.mark.parametrize("q", [-1.0, float("inf"), float("nan")])
def test_bad_values(q):
    with pytest.raises(UserError, match=f"q={q}: a finite number >= 0"):
        QFedAvg(name="qfedavg", q=q)
