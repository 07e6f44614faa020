"""Partial participation: the stationary size of the gradient, exactly and in a long simulation.

Users f_i = (w - c_i)^2/2, exact gradients. With e = w - mean(c) and s = (1 - alpha)^2 (exact, HF), 1 - alpha (FO), 1
(FedAvg), the direction of user i is s (w - c_i), so a round is

    e' = (1 - Q) e + Q x,   Q = 1 - (1 - beta s)^tau,   x = mean over the cohort of c_i - mean(c).

Drawing A = r n of n users without replacement gives E x = 0 and E x^2 = g2 (1 - r) / (r (n - 1)), g2 = mean (c_i - mean c)^2.
In the stationary state E e'^2 = E e^2, so E e^2 (1 - (1 - Q)^2) = Q^2 E x^2, and with Q^2 / (1 - (1 - Q)^2) = Q / (2 - Q)

    E e^2 = Q / (2 - Q)  g2 (1 - r) / (r (n - 1)).

grad F = s e for FedAvg's f (s = 1) and for Per-FedAvg's objective s = (1 - alpha)^2. The variance of x, and with it the
error, is 0 for r = 1. (Paper, theorem 4.5: its participation term lacks the factor tau in Q ~ beta tau.)
"""

from itertools import combinations

import numpy as np
import pytest
import torch
from problems import Quadratic, federation, quadratic, run

from perfed.algorithms.fedavg import FedAvg
from perfed.algorithms.perfedavg import PerFedAvg, PerFedAvgFO, PerFedAvgHF
from perfed.federate import Federation

C = np.array([-3.0, 1.0, 0.5, 4.0, 2.0])
BETA, ALPHA = 0.2, 0.3


class EveryCohort(Federation):
    """Seed s always draws the s-th of all cohorts."""

    def cohorts(self, k):
        return np.array(list(combinations(range(self.n), self.active)))


def stationary(n, active, tau, s):
    r, g2 = active / n, np.mean((C - C.mean()) ** 2)
    Q = 1 - (1 - BETA * s) ** tau
    return Q / (2 - Q) * g2 * (0 if r == 1 else (1 - r) / (r * (n - 1)))


def users():
    return [quadratic(np.eye(1), [c]) for c in C]


ALGORITHMS = [
    (FedAvg, {}, 1.0),
    (PerFedAvg, {"alpha": ALPHA}, (1 - ALPHA) ** 2),
    (PerFedAvgHF, {"alpha": ALPHA, "delta": 0.1}, (1 - ALPHA) ** 2),
    (PerFedAvgFO, {"alpha": ALPHA}, 1 - ALPHA),
]


@pytest.mark.parametrize("tau", [1, 5])
@pytest.mark.parametrize("active", [1, 2, 5])
@pytest.mark.parametrize("algo, options, s", ALGORITHMS)
def test_stationary_second_moment_exactly(algo, options, s, active, tau):
    # A round is affine: e' = p e + q for each cohort. p and q are read off two starts, the moments of the stationary
    # state follow from the recursion over all cohorts, each of probability 1 / (n choose A):
    #   E e = mean q / (1 - p),   E e^2 = (mean q^2 + 2 p (mean q) E e) / (1 - p^2).
    number = len(list(combinations(range(5), active)))
    ends = []
    for start in (0.0, 1.0):
        fed = federation(
            algo(name="a", beta=BETA, tau=tau, batch=1, **options),
            Quadratic(),
            users(),
            [C.mean() + start],
            active=active,
            seeds=range(number),
            kind=EveryCohort,
        )
        ends.append(run(fed, 1).state.server["w"]["w"][:, 0].numpy() - C.mean())
    q, p = ends[0], ends[1] - ends[0]
    np.testing.assert_allclose(p, (1 - BETA * s) ** tau, rtol=1e-11)
    p = p.mean()
    first = q.mean() / (1 - p)
    second = (np.mean(q**2) + 2 * p * q.mean() * first) / (1 - p**2)
    assert first == pytest.approx(0, abs=1e-12)
    assert second == pytest.approx(stationary(5, active, tau, s), abs=1e-11)
    if active < 5:
        assert second > 0.01


@pytest.mark.parametrize("active, tau", [(2, 3), (4, 6)])
def test_stationary_second_moment_in_a_long_run(active, tau):
    # The same with the cohorts that the engine draws: 30 seeds side by side. After 25 rounds the start is forgotten
    # ((1 - Q)^25, squared: .512^50 = 3e-15); each seed's time average of e^2 is an independent estimate, so the standard error
    # is their spread over sqrt(30): about 3 %. Five of them are allowed. Seeds are fixed: no flakiness.
    fed = federation(FedAvg(name="fedavg", beta=BETA, tau=tau, batch=1), Quadratic(), users(), [0.0], active=active, seeds=range(30))
    run(fed, 25)
    squares = []
    for _ in range(100):
        fed.round()
        squares.append((fed.state.server["w"]["w"][:, 0] - C.mean()) ** 2)
    each = torch.stack(squares).mean(0).numpy()
    want, error = stationary(5, active, tau, 1.0), each.std(ddof=1) / np.sqrt(30)
    assert error < 0.05 * want and abs(each.mean() - want) < 5 * error
    # Far off: Q read as beta (the paper's term, without tau), and the variance of draws with replacement.
    Q, r, g2 = 1 - (1 - BETA) ** tau, active / 5, np.mean((C - C.mean()) ** 2)
    assert abs(each.mean() - BETA / (2 - BETA) * g2 * (1 - r) / (r * 4)) > 6 * error
    assert abs(each.mean() - Q / (2 - Q) * g2 / active) > 6 * error


def test_the_formula_by_hand():
    # c: mean .9, squared deviations 15.21 + .01 + .16 + 9.61 + 1.21 = 26.2, g2 = 5.24. A = 2, tau = 1, beta = .2, s = 1:
    # .2/1.8 5.24 (.6 / (.4 4)) = 5.24/9 .375 = .2183333...
    assert stationary(5, 2, 1, 1.0) == pytest.approx(5.24 / 24, rel=1e-14)
    assert stationary(5, 5, 1, 1.0) == 0
