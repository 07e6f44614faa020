"""SCAFFOLD: the recursion in numpy, the mean of the control variates, the true optimum where FedAvg drifts."""

from __future__ import annotations

from itertools import product

import numpy as np
import torch
from problems import Quadratic, Spy, blobs, federation, mlp, quadratic, random_quadratics, run, weights
from small import algorithm

from conformance import FIXED_POINT, cannot, check, mutant
from perfed import tree
from perfed.optimizers import Average

N, D = 5, 4
A, B = random_quadratics(N, D)
USERS = list(map(quadratic, A, B))
START = np.full(D, 3.0)
OPTIMUM = np.linalg.solve(A.sum(0), B.sum(0))


def quadratics(option: str, **options):
    """2 of 5 users unless said otherwise."""
    fields = {"tau": 4, "beta": 0.2, **{k: options.pop(k) for k in ("tau", "beta") if k in options}}
    algo = algorithm("scaffold", option=option, batch=1, **fields)
    return federation(algo, Quadratic(), USERS, START, **{"active": 2, **options})


def recursion(fed, rounds: int, option: str, tau: int, beta: float, eta: float = 1.0):
    """Algorithm 1 with exact gradients: w, c and all c_i after each round."""
    w, c, ci = START, np.zeros(D), np.zeros((N, D))
    for k in range(rounds):
        active, dy, dc = fed.cohorts(k)[0], [], []
        for i in active:
            y, seen = w, []
            for _ in range(tau):
                seen.append(A[i] @ y - B[i])
                y = y - beta * (seen[-1] - ci[i] + c)
            # Option II in its other form: c_i - c + (w - y) / (tau beta) is the mean of the gradients on the way.
            new = A[i] @ w - B[i] if option == "I" else np.mean(seen, axis=0)
            dy.append(y - w)
            dc.append(new - ci[i])
        w, c = w + eta * np.mean(dy, axis=0), c + np.sum(dc, axis=0) / N
        ci = ci.copy()
        ci[active] += dc
        yield w, c, ci


@check("scaffold", "algorithm 1 on quadratics, options I and II, eta_g of 1 and .6, 2 of 5 users", tolerance=1e-12)
def by_hand() -> float:
    worst = 0.0
    for option, eta, backend in (("I", 1.0, "vmap"), ("II", 1.0, "vmap"), ("I", 0.6, "loop"), ("II", 0.6, "loop")):
        fed = quadratics(option, backend=backend, server=Average(name="average", lr=eta))
        for w, c, ci in recursion(fed, 6, option, 4, 0.2, eta):
            fed.round()
            server, users = fed.state
            found = (weights(fed), server["c"]["w"][0].numpy(), users["w"][0].numpy())
            worst = max(worst, *(np.abs(a - b).max() for a, b in zip(found, (w, c, ci), strict=True)))
    return worst


@check("scaffold", "c is the mean of all c_i, under partial participation", tolerance=1e-13)
def mean_of_controls() -> float:
    model, start = mlp()
    xs, ys = blobs([9, 12, 5, 8, 7])
    worst, size = 0.0, 0.0
    for option, backend in product(("I", "II"), ("vmap", "loop")):
        algo = algorithm("scaffold", option=option, tau=3, batch=4, beta=0.3)
        fed = federation(algo, model, xs, start, ys=ys, active=2, backend=backend)
        for _ in range(5):
            fed.round()
            for c, ci in zip(tree.leaves(fed.state.server["c"]), tree.leaves(fed.state.users), strict=True):
                worst, size = max(worst, float((ci[0].mean(0) - c[0]).abs().max())), max(size, float(c.abs().max()))
    return worst if size > 1e-2 else float("inf")


@check("scaffold", "users that are not drawn keep c_i", tolerance=0)
def stale() -> float:
    fed, worst = quadratics("II"), 0.0
    for k in range(4):
        before = fed.state.users["w"][0].clone()
        fed.round()
        away = np.setdiff1d(np.arange(N), fed.cohorts(k)[0])
        worst = max(worst, float((fed.state.users["w"][0] - before)[away].abs().max()))
    return worst


@check("scaffold", "option II keeps the mean gradient of the steps, option I the gradient of all data at w", tolerance=1e-13)
def what_controls_are() -> float:
    # The gradients are evaluated again, at the points and batches where the method asked for them.
    model, start = mlp()
    xs, ys = blobs([9, 12, 5])
    worst = 0.0
    for option, rounds in (("I", 2), ("II", 2)):
        algo = algorithm("scaffold", option=option, tau=3, batch=4, beta=0.3)
        fed = federation(algo, model, xs, start, ys=ys, backend="loop", task=Spy)
        fed.price()  # the dry run asks for gradients as well
        for _ in range(rounds):
            sent = weights(fed)
            fed.task.log.clear()
            fed.round()
            log = list(fed.task.log)
            for i in range(3):
                mine = range(sum(map(len, xs[:i])), sum(map(len, xs[: i + 1])))
                asked = [(at.numpy(), rows) for _, at, rows in log if set(rows) <= set(mine)]
                if option == "I":
                    asked = [(sent, list(mine))]
                mean = np.mean([gradient(start, at, fed, rows) for at, rows in asked], axis=0)
                kept = np.concatenate([t[0, i].numpy().ravel() for t in fed.state.users.values()])
                worst = max(worst, np.abs(kept - mean).max())
    return worst


def gradient(like, at: np.ndarray, fed, rows) -> np.ndarray:
    """The network of problems.mlp by hand: ELU, softmax, cross-entropy."""
    p, done = [], 0
    for t in like.values():
        p.append(torch.from_numpy(at[done : done + t.numel()]).reshape(t.shape).requires_grad_())
        done += t.numel()
    scores = torch.nn.functional.elu(fed.pool.x[rows] @ p[0] + p[1]) @ p[2] + p[3]
    loss = (scores.logsumexp(1) - scores[torch.arange(len(rows)), fed.pool.y[rows]]).mean()
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, p)]).numpy()


@check("scaffold", "c, c_i frozen at 0 is FedAvg", tolerance=1e-14)
def frozen() -> float:
    model, start = mlp()
    xs, ys = blobs([9, 12, 5, 8, 7])
    common = dict(tau=3, batch=4, beta=0.3)
    worst = 0.0
    for option in ("I", "II"):
        fed = federation(algorithm("scaffold", option=option, **common), model, xs, start, ys=ys, active=3)
        plain = federation(algorithm("fedavg", **common), model, xs, start, ys=ys, active=3)
        for _ in range(4):
            fed.round()
            plain.round()
            worst = max(worst, np.abs(weights(fed) - weights(plain)).max())
            server = {**fed.state.server, "c": tree.zeros(fed.state.server["c"])}
            fed.state = fed.state._replace(server=server, users=tree.zeros(fed.state.users))
    return worst


@check("scaffold", "identical users, all active, all their data: FedAvg", tolerance=1e-13)
def identical() -> float:
    # c = c_i at all times.
    model, start = mlp()
    (x,), (y,) = blobs([7])
    common = dict(tau=3, batch=7, beta=0.3)
    plain = weights(run(federation(algorithm("fedavg", **common), model, [x] * 4, start, ys=[y] * 4), 5))
    feds = (federation(algorithm("scaffold", option=o, **common), model, [x] * 4, start, ys=[y] * 4) for o in ("I", "II"))
    return max(np.abs(weights(run(fed, 5)) - plain).max() for fed in feds)


def optimum(option: str) -> tuple[float, float]:
    # Where w = argmin mean f_i and c_i = grad f_i(w), c = 0: every step of every user is beta (grad f_i(w) - c_i + c) = 0, so
    # that is a fixed point, the minimiser itself.
    fed = run(quadratics(option, tau=4, beta=0.1), 130)
    want = np.einsum("nij,j->ni", A, OPTIMUM) - B
    controls = max(np.abs(fed.state.users["w"][0].numpy() - want).max(), np.abs(fed.state.server["c"]["w"][0].numpy()).max())
    return max(np.abs(weights(fed) - OPTIMUM).max(), controls), 0.0


@check("scaffold", "option I, 2 of 5 users, 4 steps: the minimiser", tolerance=1e-10, group=FIXED_POINT)
def optimum_one() -> tuple[float, float]:
    return optimum("I")


@check("scaffold", "option II, 2 of 5 users, 4 steps: the minimiser", tolerance=1e-10, group=FIXED_POINT)
def optimum_two() -> tuple[float, float]:
    return optimum("II")


@check("scaffold", "FedAvg with the same steps, all users: a biased point", tolerance=1e-10, group=FIXED_POINT)
def fedavg_is_biased() -> tuple[float, float]:
    # sum Q_i w = sum Q_i x_i, Q_i = I - (I - beta A_i)^tau, x_i = A_i^-1 b_i; its distance to the minimiser is not 0.
    Q = np.stack([np.eye(D) - np.linalg.matrix_power(np.eye(D) - 0.1 * a, 4) for a in A])
    want = np.linalg.solve(Q.sum(0), np.einsum("nij,nj->i", Q, np.linalg.solve(A, B[..., None])[..., 0]))
    fed = run(federation(algorithm("fedavg", tau=4, beta=0.1, batch=1), Quadratic(), USERS, START), 80)
    return np.abs(weights(fed) - want).max(), np.linalg.norm(want - OPTIMUM)


cannot(
    "scaffold",
    "identical users are FedAvg under partial participation",
    "c moves by A/n of what the drawn users' c_i do, so c - c_i is not 0 before all users have been drawn",
)

mutant("scaffold", "correction with the wrong sign", 'tree.sub(down["c"], user), exact)', 'tree.sub(user, down["c"]), exact)')
mutant("scaffold", "correction without c", 'tree.sub(down["c"], user), exact)', "tree.scale(-1.0, user), exact)")
mutant("scaffold", "correction without c_i", 'tree.sub(down["c"], user), exact)', 'down["c"], exact)')
mutant("scaffold", "no correction", 'tree.sub(down["c"], user), exact)', "tree.zeros(user), exact)")
mutant("scaffold", "option II divides by one step", " / self.local_steps(info)", " / 1")
mutant("scaffold", "option II does not divide by beta", " / self.step_size(info) /", " /")
mutant("scaffold", "option II has the wrong sign of the move", "lambda d: -d /", "lambda d: d /")
mutant("scaffold", "option II keeps the correction inside", "else tree.sub(seen, local.shift)", "else seen")
mutant("scaffold", "option II adds the correction", "tree.sub(seen, local.shift)", "tree.axpy(1.0, local.shift, seen)")
mutant("scaffold", "option I reads another model", "exact = task.grad(w, full)", 'exact = task.grad(down["c"], full)')
mutant("scaffold", "users forget c_i", "tree.sub(new, user)}, new", "tree.sub(new, user)}, user")
mutant("scaffold", "dc is the new c_i", '"dc": tree.sub(new, user)', '"dc": new')
mutant("scaffold", "c moves by the mean of the drawn users", "cohort.active / cohort.n", "1.0")
mutant("scaffold", "c moves by 1 / n", "cohort.active / cohort.n", "1 / cohort.n")
mutant("scaffold", "dy subtracted", 'tree.map(torch.add, server["w"], dy)', 'tree.sub(server["w"], dy)')
