"""Reptile: equal to FedAvg where it must be, the schedule, the MAML-like term of two steps, the fixed point."""

from __future__ import annotations

from itertools import product

import numpy as np
import torch
from problems import Quadratic, batch_of, blobs, federation, mlp, quadratic, random_quadratics, run, weights
from small import algorithm

from conformance import FIXED_POINT, check, mutant
from perfed.optimizers import Average, ServerAdam

N, D = 5, 4
A, B = random_quadratics(N, D)
USERS = list(map(quadratic, A, B))
START = np.full(D, 3.0)


def gap(one, two) -> float:
    """Largest difference of two servers' models."""
    return np.abs(weights(one) - weights(two)).max()


def network(algo, **options):
    model, start = mlp()
    xs, ys = blobs([9, 12, 5, 8, 7])
    return run(federation(algo, model, xs, start, ys=ys, active=3, **options), 3)


def local(i: int, w: np.ndarray, beta: float, tau: int) -> np.ndarray:
    """Plain gradient descent of user i."""
    for _ in range(tau):
        w = w - beta * (A[i] @ w - B[i])
    return w


@check("reptile", "eps=1 is FedAvg, bit for bit", tolerance=0)
def one_is_fedavg() -> float:
    common = dict(tau=3, batch=4, beta=0.3)
    return max(
        gap(
            network(algorithm("reptile", aggregation=how, **common), backend=backend),
            network(algorithm("fedavg", aggregation=how, **common), backend=backend),
        )
        for how, backend in product(("uniform", "samples"), ("vmap", "loop"))
    )


@check("reptile", "eps in (0, 1) is FedAvg with server.lr=eps, bit for bit", tolerance=0)
def part_is_server_step() -> float:
    common = dict(tau=3, batch=4, beta=0.3)
    return max(
        gap(
            network(algorithm("reptile", eps=eps, **common)),
            network(algorithm("fedavg", **common), server=Average(name="average", lr=eps)),
        )
        for eps in (0.3, 0.5, 0.9)
    )


@check("reptile", "w - target is handed to an adaptive server optimizer", tolerance=1e-13)
def adaptive_server() -> float:
    # eps (mean - w) is what FedAdam gets; with one user, beta .1, tau 1 and one dimension: target - w = .25 .1 (4 - w).
    # m = .5 m + .5 d, v = .75 v + .25 d^2, w += .3 m / (sqrt(v) + .1), v_0 = .01.
    server = ServerAdam(name="adam", lr=0.3, beta1=0.5, beta2=0.75, eps=0.1)
    algo = algorithm("reptile", eps=0.25, beta=0.1, tau=1, batch=1)
    fed = run(federation(algo, Quadratic(), [quadratic(np.eye(1), [4.0])], [2.0], server=server), 3)
    w, m, v = 2.0, 0.0, 0.01
    for _ in range(3):
        d = 0.25 * 0.1 * (4 - w)
        m, v = 0.5 * m + 0.5 * d, 0.75 * v + 0.25 * d * d
        w += 0.3 * m / (np.sqrt(v) + 0.1)
    return abs(weights(fed)[0] - w)


@check("reptile", "tau=1, eps=1 is gradient descent on the mean of the losses", tolerance=1e-13)
def one_step() -> float:
    fed = run(federation(algorithm("reptile", tau=1, beta=0.3, batch=1), Quadratic(), USERS, START), 5)
    w = START
    for _ in range(5):
        w = w - 0.3 * (A.mean(0) @ w - B.mean(0))
    return np.abs(weights(fed) - w).max()


@check("reptile", "w + eps_k mean(v - w) for both schedules, 2 of 5 users", tolerance=1e-13)
def rounds_by_hand() -> float:
    worst, rounds = 0.0, 4
    for schedule, backend in (("constant", "vmap"), ("linear", "vmap"), ("linear", "loop")):
        algo = algorithm("reptile", tau=3, beta=0.2, batch=1, eps=0.8, schedule=schedule, rounds=rounds)
        fed, w = federation(algo, Quadratic(), USERS, START, active=2, backend=backend), START
        for k in range(rounds):
            eps = 0.8 if schedule == "constant" else [0.8, 0.6, 0.4, 0.2][k]
            w = w + eps * np.mean([local(i, w, 0.2, 3) - w for i in fed.cohorts(k)[0]], axis=0)
            fed.round()
            worst = max(worst, np.abs(weights(fed) - w).max())
    return worst


@check("reptile", "the mean move of two steps is -beta (2 g - beta H g)", tolerance=1e-13)
def two_steps() -> float:
    # Batches of one example out of 3, drawn twice independently: E[g_2(w - beta g_1(w))] = g - beta H g, since g_2 is linear
    # and independent of g_1. All 9 pairs are listed.
    H, c = random_quadratics(3, D, seed=1)
    beta, eps = 0.15, 0.4
    algo = algorithm("reptile", tau=2, beta=beta, batch=1, eps=eps)
    fed = federation(algo, Quadratic(), [np.concatenate(list(map(quadratic, H, c)))], START)
    info = fed._info({name: t[0] for name, t in fed.info(fed.lanes(0)[0], 0).items()})
    cohort = fed._info(fed.info(fed.lanes(0)[0], 0))
    server = {"w": {"w": torch.from_numpy(START)}, "opt": ()}
    moves = []
    for pair in product(range(3), repeat=2):
        user = algo.receive(fed.task, algo.broadcast(server), (), info)
        for j in pair:
            user = algo.step(fed.task, user, {"outer": batch_of(fed, [j])}, info)
        upload, _ = algo.send(fed.task, server["w"], (), user, info)
        new, _ = algo.aggregate(fed.task, server, {name: t[None] for name, t in upload.items()}, cohort)
        moves.append(new["w"]["w"].numpy() - START)
    g = H.mean(0) @ START - c.mean(0)
    return np.abs(np.mean(moves, axis=0) + eps * beta * (2 * g - beta * H.mean(0) @ g)).max()


@check("reptile", "fixed point on quadratics for every eps", tolerance=1e-10, group=FIXED_POINT)
def fixed_point() -> tuple[float, float]:
    # tau steps take v to x_i + (I - beta A_i)^tau (v - x_i) with x_i = A_i^-1 b_i, so the mean move is mean Q_i (x_i - w),
    # Q_i = I - (I - beta A_i)^tau: it vanishes where sum Q_i w = sum Q_i x_i, whatever eps.
    beta, tau = 0.4, 6
    best = np.linalg.solve(A, B[..., None])[..., 0]
    Q = np.stack([np.eye(D) - np.linalg.matrix_power(np.eye(D) - beta * a, tau) for a in A])
    want = np.linalg.solve(Q.sum(0), np.einsum("nij,nj->i", Q, best))
    fed = run(federation(algorithm("reptile", tau=tau, beta=beta, batch=1, eps=0.5), Quadratic(), USERS, START), 60)
    return np.abs(weights(fed) - want).max(), np.linalg.norm(want - np.linalg.solve(A.sum(0), B.sum(0)))


mutant("reptile", "steps away from the mean", "torch.lerp(w, v, eps.to(w.dtype))", "torch.lerp(w, v, -eps.to(w.dtype))")
mutant("reptile", "eps and 1 - eps swapped", "torch.lerp(w, v, eps.to(w.dtype))", "torch.lerp(v, w, eps.to(w.dtype))")
mutant("reptile", "eps is left out", "torch.lerp(w, v, eps.to(w.dtype))", "v")
mutant("reptile", "eps applied twice", "return self.eps * left", "return self.eps**2 * left")
mutant("reptile", "eps starts from 1 whatever it is", "return self.eps * left", "return left")
mutant("reptile", "schedule rises from 0", "1 - k / self.rounds", "k / self.rounds")
mutant("reptile", "schedule is one round ahead", "1 - k / self.rounds", "1 - (k + 1) / self.rounds")
mutant("reptile", "schedule reaches 0 in the last round", "1 - k / self.rounds", "1 - k / (self.rounds - 1)")
mutant("reptile", "sum instead of mean", "self.average(uploads, cohort)", "tree.map(lambda t: t.sum(0), uploads)")
mutant("reptile", "server optimizer starts from the target", 'server["opt"], server["w"])', 'server["opt"], target)')
