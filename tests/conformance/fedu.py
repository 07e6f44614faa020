"""FedU: its step against numpy, what a Laplacian must satisfy, and the fixed point of its map."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from problems import Quadratic, blobs, federation, mlp, quadratic, random_quadratics, run
from small import algorithm, same

from conformance import FIXED_POINT, cannot, check, mutant

N, D = 5, 3
A, B = random_quadratics(N, D, seed=3)
EDGES = np.array([[0, 0.5, 0, 2, 0], [0.5, 0, 1, 0, 0.3], [0, 1, 0, 0.7, 0], [2, 0, 0.7, 0, 1.1], [0, 0.3, 0, 1.1, 0]])
SMALL = {"beta": 0.1, "tau": 3, "batch": 1, "lam": 0.07}


def fedu(edges=None, **fields):
    """FedU, on the graph ``edges`` if there is one."""
    return algorithm("fedu", **{**SMALL, **fields}, **({} if edges is None else {"graph": "file", "path": stored(edges)}))


def stored(edges: np.ndarray) -> str:
    with tempfile.NamedTemporaryFile(suffix=".npy", delete=False) as file:
        np.save(file, edges)
    return file.name


def line(algo, *, a=A, b=B, start=(0.3, -0.2, 0.5), edges=None, **options):
    """Users with w'A w/2 - b'w; on ``edges``, if given, which are read from a file that is removed at once."""
    fed = federation(algo, Quadratic(), [quadratic(*ab) for ab in zip(a, b, strict=True)], start, **options)
    if algo.graph == "file":
        Path(algo.path).unlink()
    return fed


def models(fed) -> np.ndarray:
    """[n, d]"""
    return fed.state.users["w"]["w"][0].numpy().copy()


def stepped(w: np.ndarray, users, beta=0.1, tau=3) -> np.ndarray:
    """tau gradient steps of some users from their rows of w."""
    w = w.copy()
    for _ in range(tau):
        for i in users:
            w[i] -= beta * (A[i] @ w[i] - B[i])
    return w


def pulled(w: np.ndarray, edges: np.ndarray, users, step: float) -> np.ndarray:
    """w_i - step sum_{j in users} a_ij (w_i - w_j), edge by edge, from one snapshot."""
    new = w.copy()
    for i in users:
        for j in users:
            new[i] -= step * edges[i, j] * (w[i] - w[j])
    return new


def followed(edges, algo, active, rounds, step, **options) -> float:
    """Largest deviation from the update rule over some rounds."""
    fed, worst = line(algo, active=active, **options), 0.0
    w = models(fed)
    for k in range(rounds):
        users = fed.cohorts(k)[0]
        w = pulled(stepped(w, users), edges, users, step)
        fed.round()
        worst = max(worst, np.abs(models(fed) - w).max(), np.abs(fed.state.server["w"]["w"][0].numpy() - w[users].mean(0)).max())
    return worst


@check("fedu", "update rule on a weighted graph, 3 of 5 users", tolerance=1e-13)
def rule():
    return followed(EDGES, fedu(EDGES), 3, 4, 0.1 * 3 * 0.07 * 2, backend="loop")


@check("fedu", "update rule on the complete graph, 3 of 5 users", tolerance=1e-13)
def rule_complete():
    return followed(np.ones((N, N)), fedu(edge_counting="unordered"), 3, 4, 0.1 * 3 * 0.07)


@check("fedu", "a matrix of ones is the complete graph", tolerance=1e-13)
def ones():
    one, other = (run(line(algo, active=4), 3) for algo in (fedu(np.ones((N, N))), fedu()))
    return np.abs(models(one) - models(other)).max()


@check("fedu", "lambda = 0 is local training, bitwise", tolerance=0)
def local():
    model, start = mlp()
    xs, ys = blobs([5, 9, 12, 7])
    both = (algorithm("fedu", lam=0.0, tau=2, batch=4), algorithm("local", tau=2, batch=4))
    one, other = (run(federation(algo, model, xs, start, ys=ys, active=3), 4) for algo in both)
    return 0.0 if same(one.state.users["w"], other.state.users) else 1.0


def pull(algo, tau=3, **options) -> tuple[np.ndarray, np.ndarray]:
    """(w before, what the server's step subtracts) in the second round, all users active."""
    fed = run(line(algo, **options), 1)
    w = stepped(models(fed), range(N), tau=tau)
    fed.round()
    return w, w - models(fed)


@check("fedu", "the step is beta tau times the gradient of (lam/2) sum_ij a_ij |w_i - w_j|^2", tolerance=1e-13)
def gradient():
    w, moved = pull(fedu(EDGES))
    at = torch.tensor(w, requires_grad=True)
    apart = (at[:, None] - at[None]).square().sum(2)
    ((0.07 / 2) * (torch.tensor(EDGES) * apart).sum()).backward()
    return np.abs(moved - 0.1 * 3 * at.grad.numpy()).max()


@check("fedu", "penalty = lam tr(W Lap W'): its gradient is 2 lam Lap W", tolerance=1e-13)
def trace():
    w, moved = pull(fedu(EDGES))
    return np.abs(moved - 0.1 * 3 * 2 * 0.07 * (np.diag(EDGES.sum(1)) - EDGES) @ w).max()


@check("fedu", "complete graph, ordered: L2GD's penalty with lambda = 2 n lam", tolerance=1e-13)
def l2gd():
    """sum_ij |w_i - w_j|^2 = 2 n sum_i |w_i - mean|^2, and the gradient of (L/2) sum_i |w_i - mean|^2 is L (w_i - mean)."""
    w, moved = pull(fedu())
    identity = ((w[:, None] - w[None]) ** 2).sum() - 2 * N * ((w - w.mean(0)) ** 2).sum()
    return max(abs(identity), np.abs(moved - 0.1 * 3 * (2 * N * 0.07) * (w - w.mean(0))).max())


@check("fedu", "coupling_lambda is 2 n lam when all n users are active", tolerance=1e-15)
def coupling():
    from perfed.algorithms.base import Facts

    return abs(fedu().coupling_lambda(Facts(N, N, 10, None)) - 2 * N * 0.07)


@check("fedu", "the step preserves the sum of the models", tolerance=1e-13)
def preserved():
    worst = 0.0
    for algo in (fedu(EDGES), fedu(), fedu(graph="random", lam=0.2), fedu(graph="knn", neighbours=2)):
        fed, w = line(algo, active=4), None
        for k in range(3):
            users = fed.cohorts(k)[0]
            w = stepped(models(fed), users)
            fed.round()
            worst = max(worst, np.abs((models(fed) - w)[users].sum(0)).max())
    return worst


@check("fedu", "components of a disconnected graph know nothing of each other, bitwise", tolerance=0)
def components():
    edges = EDGES.copy()
    edges[:2, 2:] = edges[2:, :2] = 0
    other = B.copy()
    other[2:] += 1
    one, two = (models(run(line(fedu(edges), b=b), 4)) for b in (B, other))
    tied = np.abs(models(run(line(fedu(EDGES)), 4)) - models(run(line(fedu(EDGES), b=other), 4)))[:2].max()
    return np.abs(one - two)[:2].max() + (np.abs(one - two)[2:].max() < 1e-3) + (tied < 1e-3)


@check("fedu", "not one user after the other: two users trade places", tolerance=1e-15)
def simultaneous():
    """f_i = 0 but for the first round's linear parts; with beta tau lam c = 1 and one edge w_1, w_2 become w_2, w_1."""
    algo = fedu(beta=0.5, tau=1, lam=1.0)
    fed = line(algo, a=np.zeros((2, 1, 1)), b=[[2.0], [-6.0]], start=[0.0])
    fed.round()  # before the pull 1 and -3
    return np.abs(models(fed)[:, 0] - [-3, 1]).max()


@check("fedu", "unordered with 2 lam is ordered with lam, bitwise", tolerance=0)
def counting():
    one, two = (models(run(line(algo, active=3), 3)) for algo in (fedu(EDGES), fedu(EDGES, edge_counting="unordered", lam=0.14)))
    return np.abs(one - two).max()


@check("fedu", "deviations from the mean shrink by 1 - beta tau lam c A: stable below 2, not above", tolerance=1e-9)
def stability():
    worst = 0.0
    for step in (1.9, 2.1):
        algo = fedu(beta=0.5, tau=1, lam=step / (0.5 * 2 * N))
        fed = line(algo, a=np.zeros((N, 1, 1)), b=np.zeros((N, 1)), start=[0.0])
        w = np.array([1.0, -2.0, 4.0, 0.5, -1.0])
        fed.state.users["w"]["w"][0, :, 0] = torch.tensor(w)
        run(fed, 5)
        worst = max(worst, np.abs(models(fed)[:, 0] - (w.mean() + (1 - step) ** 5 * (w - w.mean()))).max())
    return worst


def minimiser(lap: np.ndarray, lam: float) -> np.ndarray:
    """A_i w_i - b_i + 2 lam (Lap W)_i = 0 for all i."""
    big = np.zeros((N, D, N, D))
    for i in range(N):
        big[i, :, i] += A[i]
    big += 2 * lam * np.einsum("ij,ab->iajb", lap, np.eye(D))
    return np.linalg.solve(big.reshape(N * D, -1), B.ravel()).reshape(N, D)


def fixed(edges, tau, beta, rounds):
    """W = (I - s Lap) v with v_i = M_i w_i + (I - M_i) A_i^-1 b_i, M_i = (I - beta A_i)^tau, s = beta tau lam c: linear in W."""
    lam = 0.1
    full = np.ones((N, N)) - np.eye(N) if edges is None else edges
    lap = np.diag(full.sum(1)) - full
    mix = np.eye(N) - beta * tau * lam * 2 * lap
    M = np.stack([np.linalg.matrix_power(np.eye(D) - beta * a, tau) for a in A])
    rest = np.stack([(np.eye(D) - m) @ np.linalg.solve(a, b) for m, a, b in zip(M, A, B, strict=True)])
    big = np.eye(N * D) - np.einsum("ij,jab->iajb", mix, M).reshape(N * D, -1)
    want = np.linalg.solve(big, (mix @ rest).ravel()).reshape(N, D)
    fed = line(fedu(edges, beta=beta, tau=tau, lam=lam))
    if beta < 0.1:  # the map is linear: it is enough that the point stays where it is
        fed.state.users["w"]["w"][0] = torch.tensor(want)
    run(fed, rounds)
    return np.abs(models(fed) - want).max(), float(np.linalg.norm(want - minimiser(lap, lam)))


for _name, _edges in (("complete", None), ("weighted", EDGES)):
    for _tau in (1, 5, 10):

        @check("fedu", f"closed form on quadratics, {_name} graph, tau={_tau}, beta=.02", tolerance=1e-12, group=FIXED_POINT)
        def stays(tau=_tau, edges=_edges):
            return fixed(edges, tau, 0.02, 2)

    @check("fedu", f"closed form on quadratics, {_name} graph, tau=8, beta=.1, from w_0", tolerance=1e-9, group=FIXED_POINT)
    def reached(edges=_edges):
        return fixed(edges, 8, 0.1, 80)


mutant("fedu", "models are pushed apart", "w - step * laplacian(w), uploads", "w + step * laplacian(w), uploads")
mutant("fedu", "no penalty, as in the public code", "w - step * laplacian(w), uploads", "w, uploads")
mutant("fedu", "the step forgets tau", "step = self.beta * self.tau *", "step = self.beta *")
mutant("fedu", "every edge counts once", "step = self.beta * self.tau * self.lam * self.c", "step = self.beta * self.tau * self.lam")
mutant("fedu", "mean in place of the sum over the cohort", "len(w) * w - w.sum(0)", "w - w.mean(0)")
mutant("fedu", "the degree misses the graph", "a.sum(1, keepdim=True) * flat", "len(a) * flat")
mutant("fedu", "the degree alone: ridge to 0", "* flat - a @ flat)", "* flat)")
mutant("fedu", "rows of the first A users", "[cohort.user[:, None], cohort.user[None, :]]", "[: len(cohort.user), : len(cohort.user)]")
mutant("fedu", "users start from elsewhere", 'return Local(user["w"],', 'return Local(tree.scale(0.5, user["w"]),')
mutant("fedu", "the user keeps what he sent", 'return {**user, "w": reply}', "return user")
mutant("fedu", "coupling without the edge count", "self.c * facts.active * self.lam * mean", "facts.active * self.lam * mean")
mutant("fedu", "half a graph", "+ np.where(a < self.threshold, 0, a).T", "")

cannot("fedu", "the fixed point is the minimiser", "the pull acts once, after tau steps, at another point than the gradients")
cannot("fedu", "iterates of FedU and L2GD agree", "only their penalties, and so their minimisers, are equal")
cannot("fedu", "lambda_L2GD = 2 n lam in a round of A < n users", "absent users do not pull: it is 2 A lam, to the cohort's mean")
