"""q-FedAvg: the step in exact arithmetic, q = 0, homogeneity, large q, the floor, and fixed points."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, getcontext
from itertools import product

import numpy as np
import torch
from problems import Formula, blobs, federation, mlp, run, weights
from small import algorithm

from conformance import FIXED_POINT, check, mutant

getcontext().prec = 60


@dataclass(kw_only=True)
class Bowl(Formula):
    """a ||w - c||^2 / 2 + f; the example is (a, f, c). Gradient a (w - c)."""

    name: str = "bowl"

    def value(self, w, x):
        return x[:, 0] * (w - x[:, 2:]).square().sum(1) / 2 + x[:, 1]


# Five users in two dimensions: curvature, least loss, centre.
BOWLS = np.array([[1.0, 0.5, 1.0, 0.0], [0.6, 0.1, -1.0, 2.0], [1.7, 0.9, 0.5, -1.5], [0.8, 0.2, 3.0, 1.0], [1.3, 0.4, -2.0, -1.0]])
START = np.array([2.0, -1.0])
QS = (0.0, 0.01, 0.5, 1.0, 2.0, 5.0)


def bowls(q: float, rows=BOWLS, start=START, **options):
    fields = {"tau": 3, "beta": 0.2, "batch": 1, **{k: options.pop(k) for k in ("tau", "beta", "aggregation") if k in options}}
    return federation(algorithm("qfedavg", q=q, **fields), Bowl(), [row[None] for row in rows], start, **options)


def server_step(w: np.ndarray, rows: np.ndarray, q: float, beta: float, tau: int, weight=None, floor=True) -> np.ndarray:
    """The paper's quotient as it stands, in 60 digits: no F^q overflows there."""
    top, below = [Decimal(0)] * len(w), Decimal(0)
    q, L = Decimal(q), 1 / Decimal(beta)
    for (a, f, *c), p in zip(rows, weight or [1] * len(rows), strict=True):
        F = max(Decimal(a) * sum((Decimal(x) - Decimal(y)) ** 2 for x, y in zip(w, c, strict=True)) / 2 + Decimal(f), Decimal("1e-10"))
        shrink = 1 - (1 - Decimal(beta) * Decimal(a)) ** tau  # v = c + (1 - beta a)^tau (w - c)
        dw = [L * shrink * (Decimal(x) - Decimal(y)) for x, y in zip(w, c, strict=True)]
        top = [t + p * F**q * x for t, x in zip(top, dw, strict=True)]
        below += p * (q * F ** (q - 1) * sum(x * x for x in dw) + L * F**q)
    return np.array([float(Decimal(x) - t / below) for x, t in zip(w, top, strict=True)])


@check("qfedavg", "rounds in exact arithmetic, q from 0 to 5, 3 of 5 users", tolerance=1e-13)
def by_hand() -> float:
    worst = 0.0
    for q, backend in product(QS, ("vmap", "loop")):
        fed, w = bowls(q, active=3, backend=backend), START
        for k in range(3):
            w = server_step(w, BOWLS[fed.cohorts(k)[0]], q, 0.2, 3)
            fed.round()
            worst = max(worst, np.abs(weights(fed) - w).max())
    return worst


@check("qfedavg", "one user, one step: w - F grad / (q ||grad||^2 + F / beta)", tolerance=1e-15)
def one_user() -> float:
    # F^q grad / (q F^(q - 1) ||grad||^2 + F^q / beta), divided by F^(q - 1).
    worst = 0.0
    for q in QS:
        a, f, *c = BOWLS[0]
        grad = a * (START - c)
        loss = a * np.sum((START - c) ** 2) / 2 + f
        fed = run(bowls(q, BOWLS[:1], tau=1), 1)
        worst = max(worst, np.abs(weights(fed) - (START - loss * grad / (q * np.sum(grad**2) + loss / 0.2))).max())
    return worst


@check("qfedavg", "aggregation=samples weighs both sums by m_i", tolerance=1e-13)
def by_samples() -> float:
    # A user with m equal examples has the loss of one.
    sizes = [1, 3, 2, 5, 1]
    algo = algorithm("qfedavg", q=1.5, tau=3, beta=0.2, batch=9, aggregation="samples")
    fed, w = federation(algo, Bowl(), [np.repeat(row[None], m, 0) for row, m in zip(BOWLS, sizes, strict=True)], START), START
    for _ in range(3):
        w = server_step(w, BOWLS, 1.5, 0.2, 3, weight=sizes)
    return np.abs(weights(run(fed, 3)) - w).max()


@check("qfedavg", "q=0 is FedAvg up to round-off", tolerance=1e-13)
def zero() -> float:
    model, start = mlp()
    xs, ys = blobs([9, 12, 5, 8, 7])
    common = dict(tau=3, batch=4, beta=0.3)
    worst = 0.0
    for how, backend in product(("uniform", "samples"), ("vmap", "loop")):
        algos = (algorithm(name, aggregation=how, **common, **more) for name, more in (("qfedavg", {"q": 0.0}), ("fedavg", {})))
        one, two = (weights(run(federation(a, model, xs, start, ys=ys, active=3, backend=backend), 3)) for a in algos)
        worst = max(worst, np.abs(one - two).max())
    return worst


@check("qfedavg", "F is the loss of the received model on all data, whatever the batch", tolerance=1e-14)
def loss_of_the_received_model() -> float:
    model, start = mlp()
    xs, ys = blobs([9, 12, 5])
    fed = federation(algorithm("qfedavg", tau=3, batch=2, beta=0.3), model, xs, start, ys=ys, backend="loop")
    fed.price()  # the dry run sends as well
    seen, send = [], fed.algo.send
    fed.algo.send = lambda task, down, user, local, info: (seen.append(float(local.loss)), send(task, down, user, local, info))[1]
    fed.round()
    p, worst = list(start.values()), 0.0
    for x, y, found in zip(xs, ys, seen, strict=True):
        scores = torch.nn.functional.elu(torch.from_numpy(x) @ p[0] + p[1]) @ p[2] + p[3]
        want = (scores.logsumexp(1) - scores[torch.arange(len(y)), torch.from_numpy(y)]).mean()
        worst = max(worst, abs(float(want) - found))
    return worst


@check("qfedavg", "losses times c with beta / c: the same map, for every q", tolerance=1e-12)
def homogeneous() -> float:
    worst = 0.0
    for q, c in product((*QS, 30.0), (0.01, 7.0)):
        one, two = bowls(q, active=3), bowls(q, BOWLS * [c, c, 1, 1], active=3, beta=0.2 / c)
        worst = max(worst, np.abs(weights(run(one, 4)) - weights(run(two, 4))).max())
    return worst


@check("qfedavg", "q=300 with losses of 1e3 and of 1e-3, where F^q is out of range", tolerance=1e-12)
def large_q() -> float:
    worst = 0.0
    for scale in (1e3, 1e-3):
        rows = BOWLS * [scale, scale, 1, 1]
        fed = run(bowls(300.0, rows, beta=0.2 / scale), 1)
        worst = max(worst, np.abs(weights(fed) - server_step(START, rows, 300, 0.2 / scale, 3)).max())
    return worst


@check("qfedavg", "q -> infinity follows the worst user alone", tolerance=1e-12)
def worst_user() -> float:
    # The losses at START are 1.5, 5.5, 3.0, 2.2 and 10.8: the second largest counts (5.5 / 10.8)^5000 = 0.
    w = weights(run(bowls(5000.0), 1)) - START
    losses = BOWLS[:, 0] * ((START - BOWLS[:, 2:]) ** 2).sum(1) / 2 + BOWLS[:, 1]
    way = BOWLS[losses.argmax(), 2:] - START
    return abs(w @ way / np.linalg.norm(w) / np.linalg.norm(way) - 1)


@check("qfedavg", "a loss of 0 counts as 1e-10", tolerance=1e-13)
def floor() -> float:
    # The second user's data say (a, f, c) = (1, 0, START): loss and gradient are 0 there. The third one's loss is negative.
    rows = np.array([[1.0, 0.5, 1.0, 0.0], [1.0, 0.0, *START], [0.6, -9.0, -1.0, 2.0]])
    return max(np.abs(weights(run(bowls(q, rows), 1)) - server_step(START, rows, q, 0.2, 3)).max() for q in QS)


def root(slope, low: float, high: float) -> float:
    """Bisection for an increasing function."""
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return low


LINE = np.array([[1.0, 0.5, 1.0], [0.4, 0.3, -1.0], [1.6, 0.2, 0.5]])  # (a, f, c) in one dimension


def settled(tau: int, q: float) -> tuple[float, float]:
    # The quotient vanishes where sum F_i^q dw_i = 0, dw_i = (1 - (1 - beta a_i)^tau) (w - c_i) / beta. With tau = 1 that is
    # sum F_i^q grad f_i = 0, the gradient of the objective.
    a, f, c = LINE.T
    shrink = (1 - (1 - 0.3 * a) ** tau) / 0.3

    def total(w, factor):
        return np.sum((a * (w - c) ** 2 / 2 + f) ** q * factor * (w - c))

    want, best = root(lambda w: total(w, shrink), -1, 1), root(lambda w: total(w, a), -1, 1)
    fed = run(bowls(q, LINE, START[:1], beta=0.3, tau=tau), 80)
    return abs(weights(fed)[0] - want), abs(want - best)


@check("qfedavg", "one step, q=2: the minimiser of sum f^(q+1)", tolerance=1e-10, group=FIXED_POINT)
def settled_one() -> tuple[float, float]:
    return settled(1, 2.0)


@check("qfedavg", "five steps, q=2: sum F^q dw = 0", tolerance=1e-10, group=FIXED_POINT)
def settled_five() -> tuple[float, float]:
    return settled(5, 2.0)


mutant("qfedavg", "steps up", "tree.axpy(-1 / h, ", "tree.axpy(1 / h, ")
mutant("qfedavg", "dw without L", "tree.scale(1 / self.beta, ", "tree.scale(1.0, ")
mutant("qfedavg", "dw with the wrong sign", "tree.sub(down, local.w)", "tree.sub(local.w, down)")
mutant("qfedavg", "h without L F^q", " + power / self.beta", "")
mutant("qfedavg", "h with F^q instead of L F^q", "power / self.beta", "power")
mutant("qfedavg", "h without its first term", "self.q * part ** (self.q - 1) * norms / top + ", "")
mutant("qfedavg", "h without the factor q", "self.q * part ** (self.q - 1)", "part ** (self.q - 1)")
mutant("qfedavg", "h with F^q for F^(q - 1)", "part ** (self.q - 1)", "part ** self.q")
mutant("qfedavg", "norm not squared", "* norms / top", "* norms.sqrt() / top")
mutant("qfedavg", "h is not normalised as Delta is", "* norms / top", "* norms")
mutant("qfedavg", "Delta with F^(q + 1)", "power.reshape(", "(power * part).reshape(")
mutant("qfedavg", "no floor", "torch.clamp(task.loss(down, full), min=FLOOR)", "task.loss(down, full)")
mutant("qfedavg", "another floor", "FLOOR = 1e-10", "FLOOR = 1e-8")
