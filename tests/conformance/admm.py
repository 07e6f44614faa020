"""Consensus ADMM against its equations in numpy, written with the other sign of the dual."""

import numpy as np
import torch
from problems import Quadratic, federation, quadratic, random_quadratics, run, weights
from small import algorithm, ranges, split
from small import federation as small_federation

from . import FIXED_POINT, cannot, check, mutant

N, D = 5, 3
A, B = random_quadratics(N, D, seed=4)
W0 = np.array([0.5, -0.3, 0.2])
OPTIMUM = np.linalg.solve(A.sum(0), B.sum(0))


def built(active=None, backend="vmap", **fields):
    xs = [quadratic(a, c) for a, c in zip(A, B, strict=True)]
    return federation(algorithm("admm", **fields), Quadratic(), xs, W0, active=active, seeds=(0, 1), backend=backend)


def own(fed, name, s=1):
    """x_i or y_i, [N, D]."""
    return fed.state.users[name]["w"][s].numpy()


class Plus:
    """The same in the usual sign: L = f_i(x_i) + <u_i, x_i - x> + lam/2 ||x_i - x||^2, so u_i = -y_i."""

    def __init__(self, beta, lam, tau, scheme, tracking=True):
        self.beta, self.lam, self.tau, self.scheme, self.tracking = beta, lam, tau, scheme, tracking
        self.x, self.u, self.z = np.tile(W0, (N, 1)), np.zeros((N, D)), W0.copy()

    def solve(self, i):
        v = self.x[i].copy()
        for _ in range(self.tau):
            v -= self.beta * (A[i] @ v - B[i] + self.lam * (v - self.z) + self.u[i])
        return v

    def round(self, active):
        if self.scheme == "full":
            self.x = np.stack([self.solve(i) for i in range(N)])
            self.z = (self.x + self.u / self.lam).mean(0)
            self.u = self.u + self.lam * (self.x - self.z)
            return
        moved = np.zeros(D)
        for i in active:
            before = self.x[i] + self.u[i] / self.lam
            self.x[i] = self.solve(i)
            self.u[i] = self.u[i] + self.lam * (self.x[i] - self.z)
            moved += self.x[i] + self.u[i] / self.lam - before
        self.z = self.z + moved / (N if self.tracking else len(active))


def against_plus(scheme, active, backend, tracking=True):
    fields = {"beta": 0.15, "lam": 0.4, "tau": 3, "scheme": scheme, "tracking": tracking}
    fed, plus, worst = built(active, backend, **fields), Plus(**fields), 0.0
    for k in range(5):
        plus.round(fed.cohorts(k)[1])
        fed.round()
        worst = max(worst, np.abs(weights(fed, 1) - plus.z).max())
        worst = max(worst, np.abs(own(fed, "x") - plus.x).max(), np.abs(own(fed, "y") + plus.u).max())
    assert np.abs(own(fed, "y")).max() > 1e-2
    return worst


@check("admm", "full: y -> -y is the usual convention, five rounds", tolerance=1e-13)
def plus_full():
    return max(against_plus("full", 2, "loop"), against_plus("full", N, "vmap"))


@check("admm", "partial: y -> -y is the usual convention, five rounds, 2 of 5 users", tolerance=1e-13)
def plus_partial():
    return max(against_plus("partial", 2, "loop"), against_plus("partial", 2, "vmap"))


@check("admm", "partial without tracking, five rounds, 2 of 5 users", tolerance=1e-13)
def plus_untracked():
    return against_plus("partial", 2, "vmap", tracking=False)


@check("admm", "with all users s = 1 is tracking", tolerance=0)
def all_users():
    one, two = (run(built(beta=0.1, lam=0.3, tracking=t), 3) for t in (True, False))
    return np.abs(weights(one) - weights(two)).max()


@check("admm", "full: sum y = 0 from the first server step on, whatever it was", tolerance=1e-13)
def duals():
    fed, worst = built(2, beta=0.15, lam=0.4, scheme="full"), 0.0
    anywhere = {"w": torch.from_numpy(np.random.default_rng(0).normal(size=(2, N, D)))}
    fed.state = fed.state._replace(users={**fed.state.users, "y": anywhere})
    for _ in range(5):
        fed.round()
        worst = max(worst, np.abs(own(fed, "y").sum(0)).max())
    return worst


@check("admm", "x = mean (x_i - y_i / lam) in every round, 2 of 5 users and full", tolerance=1e-13)
def tracking():
    worst = 0.0
    for scheme in ("partial", "full"):
        fed = built(2, beta=0.15, lam=0.4, scheme=scheme)
        for _ in range(6):
            fed.round()
            worst = max(worst, np.abs(weights(fed, 1) - (own(fed, "x") - own(fed, "y") / 0.4).mean(0)).max())
    return worst


@check("admm", "x = mean (x_i - y_i / lam) over the members where users are held out", tolerance=1e-13)
def members():
    data = np.concatenate([quadratic(a, c) for a, c in zip(A, B, strict=True)] * 2)
    seen = np.array([True, False, True, True, False])
    part = split(ranges([1] * N), ranges([1] * N, N), seen=seen)
    options = {"model": Quadratic(), "initial": [{"w": torch.from_numpy(W0)}], "active": 2}
    fed = small_federation(algorithm("admm", lam=0.4), data, np.zeros(2 * N), [part], **options)
    for _ in range(6):
        fed.round()
    z = own(fed, "x", 0) - own(fed, "y", 0) / 0.4
    assert np.abs(z[seen] - W0).max(1).min() > 1e-2
    return max(np.abs(weights(fed) - z[seen].mean(0)).max(), np.abs(z[~seen] - W0).max())


@check("admm", "many local steps are the exact solve", tolerance=1e-12)
def exact_solve():
    """x_i = (A_i + lam)^-1 (b_i + lam x + y_i), from any state; the fourth round of the full scheme."""
    fed = run(built(beta=0.4, lam=0.5, tau=120, scheme="full"), 3)
    x, y = weights(fed, 1), own(fed, "y").copy()
    fed.round()
    want = np.stack([np.linalg.solve(A[i] + 0.5 * np.eye(D), B[i] + 0.5 * x + y[i]) for i in range(N)])
    return np.abs(own(fed, "x") - want).max()


@check("admm", "y frozen at 0 is a proximal step, as in FedProx", tolerance=1e-13)
def proximal():
    """Users go on from their own x_i: x_i -= beta (g_i(x_i) + lam (x_i - x)); the server takes x + mean over n of the uploads."""
    fed, worst = built(beta=0.15, lam=0.4, tau=3, backend="loop"), 0.0
    for _ in range(3):
        zero = {"w": torch.zeros_like(fed.state.users["y"]["w"])}
        fed.state = fed.state._replace(users={**fed.state.users, "y": zero})
        v, z = own(fed, "x").copy(), weights(fed, 1)
        for _ in range(3):
            v = v - 0.15 * (np.einsum("nij,nj->ni", A, v) - B + 0.4 * (v - z))
        fed.round()
        worst = max(worst, np.abs(own(fed, "x") - v).max())
    return worst


def rest(wanted, rounds, **fields):
    """Deviation of x and of all x_i from ``wanted``, of y_i from grad f_i there; and the distance to the optimum."""
    fed = run(built(beta=0.4, lam=1.3, tau=5, **fields), rounds)
    worst = max(np.abs(weights(fed, 1) - wanted).max(), np.abs(own(fed, "x") - wanted).max())
    gradients = np.einsum("nij,j->ni", A, wanted) - B
    assert np.abs(gradients).max() > 0.1
    return max(worst, np.abs(own(fed, "y") - gradients).max()), np.abs(wanted - OPTIMUM).max()


@check("admm", "full: consensus at the optimum, y_i = grad f_i", tolerance=1e-9, group=FIXED_POINT)
def optimum_full():
    return rest(OPTIMUM, 60, scheme="full")


@check("admm", "2 of 5 users with tracking: consensus at the optimum, y_i = grad f_i", tolerance=1e-9, group=FIXED_POINT)
def optimum_partial():
    return rest(OPTIMUM, 170, active=2)


@check("admm", "4 of 5 users without tracking: biased away from w_0", tolerance=1e-9, group=FIXED_POINT)
def untracked():
    """x - w_0 = (n/A) (mean (x_i - y_i/lam) - w_0) is kept. At consensus mean y = lam (1 - A/n) (x - w_0), and y_i = grad f_i(x).

    So (mean A - c) x = mean b - c w_0 with c = lam (1 - A/n).
    """
    c = 1.3 * (1 - 4 / N)
    wanted = np.linalg.solve(A.mean(0) - c * np.eye(D), B.mean(0) - c * W0)
    return rest(wanted, 85, active=4, tracking=False)


cannot(
    "admm",
    "tracking=false with r < 1 ends at the consensus optimum",
    "x - w_0 is then n/A times the mean move of x_i - y_i/lam: sum y = 0 is lost, the limit minimises F - lam (1 - A/n)/2 ||x - w_0||^2",
)
cannot("admm", "sum y = 0 in every round with r < 1", "only drawn users change their duals; the tracking invariant takes its place")

mutant("admm", "the dual enters the solve with the wrong sign", "self.lam * (w - x) - y", "self.lam * (w - x) + y")
mutant("admm", "the penalty pushes away", "g + self.lam * (w - x)", "g - self.lam * (w - x)")
mutant("admm", "the penalty lacks lam", "g + self.lam * (w - x)", "g + (w - x)")
mutant("admm", "the penalty has no anchor", "g + self.lam * (w - x)", "g + self.lam * (w - 0 * x)")
mutant("admm", "the dual step has the wrong sign", "tree.axpy(-self.lam, tree.sub(own, x), y)", "tree.axpy(self.lam, tree.sub(own, x), y)")
mutant("admm", "the dual step has length 1", "tree.axpy(-self.lam, tree.sub(own, x), y)", "tree.axpy(-1.0, tree.sub(own, x), y)")
mutant("admm", "1/lam is forgotten in the upload", "d = tree.axpy(-1 / self.lam,", "d = tree.axpy(-1.0,")
mutant("admm", "the difference is taken from the received model", 'tree.sub(local.w, user["x"]))', "tree.sub(local.w, down))")
mutant("admm", "the solve starts from the received model", 'Local(user["x"], task', "Local(down, task")
mutant("admm", "full: the mean has the dual's wrong sign", 'tree.axpy(-1 / self.lam, user["y"]', 'tree.axpy(1 / self.lam, user["y"]')
mutant("admm", "full: the dual is not updated", '{**user, "y": self.dual(user["y"], user["x"], reply)}', "user")
mutant("admm", "partial: the dual reads the old x_i", 'self.dual(user["y"], local.w, down)', 'self.dual(user["y"], user["x"], down)')
mutant("admm", "partial: the dual is not kept", 'return d, {**user_after, "y": y}', "return d, user_after")
mutant("admm", "s is 1 with tracking", "cohort.active / cohort.n if", "1.0 if")
