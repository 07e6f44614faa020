"""FedProx: the prox point of quadratics, its limits in mu, stability, stragglers, and averages by samples or alike."""

from __future__ import annotations

from itertools import product

import numpy as np
import torch
from problems import COIN_START, COIN_X, Quadratic, blobs, coin, federation, mlp, quadratic, random_quadratics, run, weights
from small import algorithm

from conformance import FIXED_POINT, check, mutant

N, D = 5, 4
A, B = random_quadratics(N, D)
USERS = list(map(quadratic, A, B))
START = np.full(D, 3.0)
EYE = np.eye(D)


def prox(i: int, w: np.ndarray, mu: float) -> np.ndarray:
    """argmin f_i(v) + mu/2 ||v - w||^2."""
    return np.linalg.solve(A[i] + mu * EYE, B[i] + mu * w)


def left(i: int, beta: float, mu: float, steps: int) -> np.ndarray:
    """What ``steps`` steps leave of the distance to the prox point."""
    return np.linalg.matrix_power(EYE - beta * (A[i] + mu * EYE), steps)


def after(i: int, w: np.ndarray, beta: float, mu: float, steps: int) -> np.ndarray:
    """A step is linear with the prox point x as fixed point, so v = x + (I - beta (A_i + mu I))^steps (w - x)."""
    x = prox(i, w, mu)
    return x + left(i, beta, mu, steps) @ (w - x)


@check("fedprox", "mu=0 is FedAvg, bit for bit", tolerance=0)
def no_pull() -> float:
    model, start = mlp()
    xs, ys = blobs([9, 12, 5, 8, 7])
    common = dict(tau=4, batch=4, beta=0.3)
    worst = 0.0
    for how, backend in product(("uniform", "samples"), ("vmap", "loop")):
        algos = (algorithm(name, aggregation=how, **common, **more) for name, more in (("fedprox", {"mu": 0.0}), ("fedavg", {})))
        one, two = (weights(run(federation(a, model, xs, start, ys=ys, active=3, backend=backend), 3)) for a in algos)
        worst = max(worst, np.abs(one - two).max())
    return worst


@check("fedprox", "one step is FedAvg's for every mu", tolerance=0)
def first_step() -> float:
    # The pull of the first step is mu (w - w) = 0.
    feds = [
        federation(algorithm(name, tau=1, beta=0.3, batch=1, **more), Quadratic(), USERS, START, active=2)
        for name, more in (("fedprox", {"mu": 5.0}), ("fedavg", {}))
    ]
    one, two = (weights(run(fed, 3)) for fed in feds)
    return np.abs(one - two).max()


@check("fedprox", "rounds of tau steps on quadratics, 2 of 5 users", tolerance=1e-12)
def rounds() -> float:
    worst = 0.0
    for mu, backend in ((0.7, "vmap"), (3.0, "loop")):
        fed = federation(algorithm("fedprox", tau=4, beta=0.2, batch=1, mu=mu), Quadratic(), USERS, START, active=2, backend=backend)
        w = START
        for k in range(4):
            w = np.mean([after(i, w, 0.2, mu, 4) for i in fed.cohorts(k)[0]], axis=0)
            fed.round()
            worst = max(worst, np.abs(weights(fed) - w).max())
    return worst


@check("fedprox", "many steps solve the user's problem: (A_i + mu I)^-1 (b_i + mu w)", tolerance=1e-12)
def exact_round() -> float:
    # beta (A_i + mu I) has eigenvalues in [.3 1.2, .3 2.7]: 200 steps leave .64^200.
    fed = run(federation(algorithm("fedprox", tau=200, beta=0.3, batch=1, mu=0.7), Quadratic(), USERS, START), 1)
    return np.abs(weights(fed) - np.mean([prox(i, START, 0.7) for i in range(N)], axis=0)).max()


@check("fedprox", "mu -> infinity: v - w = (b_i - A_i w) / mu + O(1 / mu^2)", tolerance=1e-5)
def no_progress() -> float:
    mu = 1e6
    fed = run(federation(algorithm("fedprox", tau=30, beta=1 / (mu + 1), batch=1, mu=mu), Quadratic(), USERS, START), 1)
    return np.abs(mu * (weights(fed) - START) - (B.mean(0) - A.mean(0) @ START)).max()


@check("fedprox", "stable where beta (L + mu) < 2, and not beyond", tolerance=1e-10)
def stability() -> float:
    # In one dimension tau steps leave (1 - beta (a + mu))^tau of the distance to the prox point: .9^60 and 1.1^60.
    worst, a, mu, b = 0.0, 1.5, 0.5, 1.0
    x = (b + mu * 3.0) / (a + mu)
    for rate in (1.9, 2.1):
        algo = algorithm("fedprox", tau=60, beta=rate / (a + mu), batch=1, mu=mu)
        fed = run(federation(algo, Quadratic(), [quadratic(a * np.eye(1), [b])], [3.0]), 1)
        want = (1 - rate) ** 60 * (3.0 - x)
        worst = max(worst, abs((weights(fed)[0] - x) / want - 1) if rate > 2 else abs(weights(fed)[0] - x - want))
    return worst


@check("fedprox", "stragglers take the steps that their draw tells", tolerance=1e-12)
def stragglers() -> float:
    # chance < s: 1 + floor(tau chance / s) steps. All cases occur in these rounds.
    worst, tau, share, seen = 0.0, 4, 0.6, set()
    for backend in ("vmap", "loop"):
        algo = algorithm("fedprox", tau=tau, beta=0.2, batch=1, mu=0.7, stragglers=share)
        fed, w = federation(algo, Quadratic(), USERS, START, active=4, backend=backend), START
        for k in range(8):
            lanes, _ = fed.lanes(k)
            draws = fed.info(lanes, k)["chance"].numpy()
            steps = [1 + int(tau * u // share) if u < share else tau for u in draws]
            seen |= {(u < share, s) for u, s in zip(draws, steps, strict=True)}
            w = np.mean([after(i, w, 0.2, 0.7, s) for i, s in zip(lanes.user, steps, strict=True)], axis=0)
            fed.round()
            worst = max(worst, np.abs(weights(fed) - w).max())
    return worst if len(seen) == 5 else float("inf")


@check("fedprox", "straggler steps are uniform on 1 .. tau", tolerance=0)
def law() -> float:
    # Draws at the midpoints of a grid of 1/1000: .3 of them are stragglers, in 6 equal parts; the other 700 take all 6 steps.
    algo = algorithm("fedprox", tau=6, stragglers=0.3)
    fed = federation(algo, Quadratic(), USERS, START)
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    steps = algo.local_steps(fed._info({**fed.info(fed.lanes(0)[0], 0), "chance": grid}))
    return np.abs(np.bincount(steps.numpy(), minlength=7) - [0, 50, 50, 50, 50, 50, 750]).max()


@check("fedprox", "fixed point on quadratics", tolerance=1e-10, group=FIXED_POINT)
def fixed_point() -> tuple[float, float]:
    # v_i - w = (I - R_i)(x_i(w) - w), R_i = (I - beta (A_i + mu I))^tau, and x_i(w) - w = M_i (b_i - A_i w), M_i = (A_i + mu I)^-1:
    # the mean vanishes where sum (I - R_i) M_i A_i w = sum (I - R_i) M_i b_i.
    beta, mu, tau = 0.3, 0.7, 6
    C = np.stack([(EYE - left(i, beta, mu, tau)) @ np.linalg.inv(A[i] + mu * EYE) for i in range(N)])
    want = np.linalg.solve(np.einsum("nij,njk->ik", C, A), np.einsum("nij,nj->i", C, B))
    fed = run(federation(algorithm("fedprox", tau=tau, beta=beta, batch=1, mu=mu), Quadratic(), USERS, START), 80)
    return np.abs(weights(fed) - want).max(), np.linalg.norm(want - np.linalg.solve(A.sum(0), B.sum(0)))


@check("fedprox", "fixed point with exact local solutions goes to the minimiser as mu grows", tolerance=1e-9, group=FIXED_POINT)
def large_mu() -> tuple[float, float]:
    # R_i = 0: sum M_i (A_i w - b_i) = 0, and mu M_i -> I.
    mu = 3.0  # what 14 steps leave of a distance is below (.75 / 4.25)^14
    M = np.linalg.inv(A + mu * EYE)
    want = np.linalg.solve(np.einsum("nij,njk->ik", M, A), np.einsum("nij,nj->i", M, B))
    fed = run(federation(algorithm("fedprox", tau=14, beta=1 / (mu + 1.25), batch=1, mu=mu), Quadratic(), USERS, START), 90)
    return np.abs(weights(fed) - want).max(), np.linalg.norm(want - np.linalg.solve(A.sum(0), B.sum(0)))


@check("fedprox", "averages by samples or alike, of the active users alone", tolerance=1e-15)
def averages() -> float:
    # COIN: a step of 1 from (0, 0) gives (.5, -.5) on label 0 and (-.5, .5) on label 1. One example of label 0 and three of
    # label 1: (1 (.5, -.5) + 3 (-.5, .5)) / 4 by samples, (0, 0) alike. 2 of 4 users with label 0: the mean of two, not a sum over 4.
    worst = 0.0
    for how, want in (("samples", [-0.25, 0.25]), ("uniform", [0.0, 0.0])):
        algo = algorithm("fedprox", beta=1.0, tau=1, mu=0.5, aggregation=how)
        xs, ys = [COIN_X, np.repeat(COIN_X, 3, 0)], [np.array([0]), np.array([1, 1, 1])]
        worst = max(worst, np.abs(weights(run(federation(algo, coin(), xs, COIN_START, ys=ys), 1)) - want).max())
        fed = run(federation(algo, coin(), [COIN_X] * 4, COIN_START, active=2), 1)
        worst = max(worst, np.abs(weights(fed) - [0.5, -0.5]).max())
    return worst


mutant("fedprox", "pull away from the anchor", "tree.axpy(self.mu, ", "tree.axpy(-self.mu, ")
mutant("fedprox", "pull of 2 mu: the penalty lost its half", "tree.axpy(self.mu, ", "tree.axpy(2 * self.mu, ")
mutant("fedprox", "no pull", "tree.axpy(self.mu, ", "tree.axpy(0.0, ")
mutant("fedprox", "pull to zero instead of the anchor", "tree.sub(local.w, local.anchor)", "local.w")
mutant("fedprox", "anchor and model swapped", "tree.sub(local.w, local.anchor)", "tree.sub(local.anchor, local.w)")
mutant("fedprox", "anchor follows the model", "return local._replace(w=w, opt=opt)", "return local._replace(w=w, opt=opt, anchor=w)")
mutant("fedprox", "gradient at the anchor", "task.grad(local.w, ", "task.grad(local.anchor, ")
mutant("fedprox", "stragglers may take no step", "1 + torch.floor(", "torch.floor(")
mutant("fedprox", "stragglers' steps from the draw itself", "info.chance / self.stragglers * self.tau", "info.chance * self.tau")
mutant("fedprox", "the others are the stragglers", "info.chance < self.stragglers", "info.chance >= self.stragglers")
