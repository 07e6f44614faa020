"""MOCHA: SDCA against numpy, the duality gap, direct solvers, and the Omega-step."""

from __future__ import annotations

import numpy as np
import torch
from problems import blobs, drawn, federation, run
from small import algorithm

from conformance import FIXED_POINT, cannot, check, mutant
from perfed.models import Logistic

N, C = 4, 3
XS, YS = blobs([6, 9, 1, 7], features=2, classes=C, seed=5)
FEATURES = [np.concatenate([x, np.ones((len(x), 1))], 1) for x in XS]  # the bias is the weight of a 1
SIGNS = [2.0 * (y[:, None] == np.arange(C)) - 1 for y in YS]
LAM, KAPPA = 0.5, 0.4


def problem(rounds=0, *, bias=True, xs=XS, ys=YS, active=None, backend="vmap", **fields):
    algo = algorithm("mocha", **{"lam": LAM, "kappa": KAPPA, "tau": 2, "batch": 4, "floor": 1e-3, **fields})
    start = {"layer1.weight": torch.zeros(2, C, dtype=torch.float64), "layer1.bias": torch.zeros(C, dtype=torch.float64)}
    start = start if bias else {"layer1.weight": start["layer1.weight"]}
    model = Logistic(name="logistic", bias=bias)
    return run(federation(algo, model, xs, start, ys=ys, active=active, backend=backend), rounds)


def joined(w) -> np.ndarray:
    """Stacked parameters -> [n, F + 1, C]."""
    return np.concatenate([w["layer1.weight"][0].numpy(), w["layer1.bias"][0].numpy()[:, None]], 1)


def duals(fed) -> list[np.ndarray]:
    return [fed.state.users["dual"][0, t, : len(YS[t])].numpy().copy() for t in range(N)]


def sums(a) -> np.ndarray:
    """v_t = sum_j a_tj x_tj"""
    return np.stack([x.T @ d for x, d in zip(FEATURES, a, strict=True)])


def sigma(relation: str) -> np.ndarray:
    """From the objective: the inverse of I - 11'/n + kappa I, with trace 1."""
    inverse = np.eye(N) if relation == "independent" else np.linalg.inv((1 + KAPPA) * np.eye(N) - 1 / N)
    return inverse / np.trace(inverse)


def primal_of(a, s) -> np.ndarray:
    return np.einsum("st,tfc->sfc", s, sums(a)) / LAM


def gap(w, a, s, loss) -> tuple[float, float]:
    """(P(w), D(a)) over all classes."""
    scores = [x @ v for x, v in zip(FEATURES, w, strict=True)]
    if loss == "hinge":
        value = sum(np.maximum(0, 1 - y * z).sum() for y, z in zip(SIGNS, scores, strict=True))
        conjugate = -sum((y * d).sum() for y, d in zip(SIGNS, a, strict=True))
    else:
        value = sum(((z - y) ** 2).sum() / 2 for y, z in zip(SIGNS, scores, strict=True))
        conjugate = sum((d**2 / 2 - y * d).sum() for y, d in zip(SIGNS, a, strict=True))
    v = sums(a)
    primal = value + LAM / 2 * np.einsum("st,sfc,tfc", np.linalg.inv(s), w, w)
    return primal, -conjugate - np.einsum("st,sfc,tfc", s, v, v) / (2 * LAM)


def ascent(start, s, order, loss, safe, view=None):
    """Exact coordinate ascent on D in place of MOCHA's subproblem if ``safe`` is 1 and every step sees every other."""
    a = [d.copy() for d in start]
    for t, js in order:
        w = primal_of(a, s)[t] if view is None else view[t] + safe * s[t, t] / LAM * (FEATURES[t].T @ (a[t] - start[t]))
        for j in js:
            x, y = FEATURES[t][j], SIGNS[t][j]
            q = safe * s[t, t] / LAM
            z = w.T @ x
            new = a[t][j] + (y - z - a[t][j]) / (1 + q * x @ x)
            if loss == "hinge":
                new = y * np.clip(y * a[t][j] + (1 - y * z) / (q * x @ x), 0, 1)
            w = w + q * np.outer(x, new - a[t][j])
            a[t][j] = new
    return a


def spread(s, users) -> float:
    """max_t sum_t' |Sigma_tt'| / Sigma_tt over some users"""
    part = np.abs(s[np.ix_(users, users)])
    return float((part.sum(1) / np.diag(part)).max())


def rounds_by_numpy(loss, relation, active, backend) -> float:
    """Some rounds, one example after the other, on the batches that the engine draws."""
    fed = problem(loss=loss, relation=relation, active=active, backend=backend)
    s, starts, worst = sigma(relation), np.cumsum([0, *map(len, YS)]), 0.0
    for k in range(3):
        users, a = fed.cohorts(k)[0], duals(fed)
        order = [(t, [i - starts[t] for picks in drawn(fed, t, k, 2)["outer"] for i in picks]) for t in users]
        a = ascent(a, s, order, loss, spread(s, users), view=primal_of(a, s))
        fed.round()
        w, v = primal_of(a, s), joined(fed.state.server["v"])
        worst = max(worst, *(np.abs(p - d).max() for p, d in zip(a, duals(fed), strict=True)), np.abs(v - sums(a)).max())
        worst = max(worst, np.abs(joined(fed.state.users["w"])[users] - w[users]).max())
    return worst


for _loss, _relation, _active, _backend in (
    ("squared", "mean", 3, "vmap"),
    ("hinge", "mean", 3, "vmap"),
    ("hinge", "independent", None, "loop"),
    ("squared", "mean", None, "loop"),
):

    @check("mocha", f"SDCA in numpy, {_loss}, {_relation}, {_active or 'all'} users, {_backend}", tolerance=1e-12)
    def rule(loss=_loss, relation=_relation, active=_active, backend=_backend):
        return rounds_by_numpy(loss, relation, active, backend)


@check("mocha", "the dual objective never falls, whoever takes part", tolerance=1e-12)
def ascends():
    worst, s = 0.0, sigma("mean")
    for loss in ("hinge", "squared"):
        fed, last = problem(loss=loss, active=3), 0.0
        for _ in range(6):
            fed.round()
            a = duals(fed)
            value = gap(primal_of(a, s), a, s, loss)[1]
            worst, last = max(worst, last - value), value
    return worst


@check("mocha", "users that are absent keep their dual variables and v, bitwise", tolerance=0)
def absent():
    fed, worst = problem(1, active=2), 0.0
    for k in (1, 2):
        away = np.setdiff1d(np.arange(N), fed.cohorts(k)[0])
        a, v = duals(fed), joined(fed.state.server["v"])
        fed.round()
        worst = max(worst, *(np.abs(duals(fed)[t] - a[t]).max() for t in away), np.abs(joined(fed.state.server["v"])[away] - v[away]).max())
    return worst


@check("mocha", "hinge: y a stays in [0, 1]", tolerance=0)
def box():
    a = duals(problem(5, loss="hinge", active=3))
    return max(max(-(y * d).min(), (y * d).max() - 1, 0) for y, d in zip(SIGNS, a, strict=True))


def ridge(s) -> np.ndarray:
    """X_t'(X_t w_t - y_t) + lam sum_t' (Sigma^-1)_tt' w_t' = 0 for all t."""
    d = 3
    big = LAM * np.einsum("st,ab->satb", np.linalg.inv(s), np.eye(d))
    for t in range(N):
        big[t, :, t] += FEATURES[t].T @ FEATURES[t]
    right = np.stack([x.T @ y for x, y in zip(FEATURES, SIGNS, strict=True)])
    return np.linalg.solve(big.reshape(N * d, -1), right.reshape(N * d, C)).reshape(N, d, C)


for _relation, _active, _rounds in (("mean", None, 120), ("mean", 2, 250), ("independent", None, 60)):

    @check("mocha", f"squared loss, {_relation}, {_active or 'all'} users: the linear system", tolerance=1e-9, group=FIXED_POINT)
    def system(relation=_relation, active=_active, rounds=_rounds):
        """Duality gap and primal; 'independent' is one ridge regression with the weight lam n for each user."""
        fed, s = problem(rounds, loss="squared", relation=relation, active=active, tau=3, batch=9), sigma(relation)
        want, w = ridge(s), np.einsum("st,tfc->sfc", s, joined(fed.state.server["v"])) / LAM
        if relation == "independent":
            own = [np.linalg.solve(x.T @ x + LAM * N * np.eye(3), x.T @ y) for x, y in zip(FEATURES, SIGNS, strict=True)]
            want = np.stack(own)
        primal, dual = gap(w, duals(fed), s, "squared")
        return max(np.abs(w - want).max(), abs(primal - dual)), np.abs(w - want).max()


@check("mocha", "hinge loss: long coordinate ascent in numpy; the duality gap closes", tolerance=1e-8, group=FIXED_POINT)
def vectors():
    s = sigma("mean")
    order = [(t, [j]) for t in range(N) for j in range(len(YS[t]))]
    best = [np.zeros((len(y), C)) for y in YS]
    for _ in range(400):
        best = ascent(best, s, order, "hinge", 1.0)
    want = primal_of(best, s)
    assert np.subtract(*gap(want, best, s, "hinge")) < 1e-9  # the oracle itself is an optimum
    fed = problem(200, loss="hinge", tau=3, batch=9)
    w = primal_of(duals(fed), s)
    return max(np.abs(w - want).max(), np.subtract(*gap(w, duals(fed), s, "hinge"))), np.abs(w - want).max()


@check("mocha", "without a bias: features alone", tolerance=1e-9, group=FIXED_POINT)
def no_bias():
    fed = problem(45, bias=False, loss="squared", relation="independent", tau=3, batch=9)
    own = [np.linalg.solve(x.T @ x + LAM * N * np.eye(2), x.T @ y) for x, y in zip(XS, SIGNS, strict=True)]
    far = np.abs(fed.state.users["w"]["layer1.weight"][0].numpy() - np.stack(own)).max()
    return far, far


@check("mocha", "mean: Sigma^-1 is (I - 11'/n) + kappa I up to a factor, trace 1", tolerance=1e-14)
def relation_of_the_mean():
    return np.abs(problem().state.server["sigma"][0].numpy() - sigma("mean")).max()


@check("mocha", "learned: Sigma = (W'W)^(1/2) / trace, PSD, trace 1", tolerance=1e-10)
def learned():
    """From the singular values of W, which is taken with the Sigma before the step: I/n, as omega_every = 2 and 2 rounds are run."""
    fed = problem(2, relation="learned", omega_every=2, floor=1e-6)
    s = fed.state.server["sigma"][0].numpy()
    u, root, _ = np.linalg.svd((joined(fed.state.server["v"]) / N / LAM).reshape(N, -1))
    return max(np.abs(s - (u * (root / root.sum())) @ u.T).max(), abs(np.trace(s) - 1), -np.linalg.eigvalsh(s).min(), 0)


@check("mocha", "learned: floor, and nothing but I/n before the first Omega-step", tolerance=1e-12)
def floored():
    """Floored at floor/n and scaled to trace 1: with one user that trained the others have floor/n / (1 + 3 floor/n)."""
    before = np.abs(problem(1, relation="learned", omega_every=2).state.server["sigma"][0].numpy() - np.eye(N) / N).max()
    values = np.linalg.eigvalsh(problem(1, relation="learned", omega_every=1, active=1, floor=0.2).state.server["sigma"][0].numpy())
    want = np.array([0.05, 0.05, 0.05, 1]) / 1.15
    return max(before, np.abs(values - want).max())


@check("mocha", "the Omega-step minimises tr(W Sigma^-1 W'): the square of the nuclear norm", tolerance=1e-9)
def nuclear():
    fed = problem(2, relation="learned", omega_every=2, floor=1e-6)
    w = (joined(fed.state.server["v"]) / N / LAM).reshape(N, -1)
    value = np.trace(w.T @ np.linalg.inv(fed.state.server["sigma"][0].numpy()) @ w)
    return abs(value / np.linalg.norm(w, "nuc") ** 2 - 1)


@check("mocha", "users with the same data have the same model", tolerance=1e-12)
def one_model():
    w = joined(problem(5, xs=[XS[1]] * N, ys=[YS[1]] * N, tau=3, batch=9).state.users["w"])
    return np.abs(w - w.mean(0)).max() + (np.abs(w).max() < 0.1)


mutant("mocha", "hinge: the margin has the wrong sign", "(1 - y * z) / curvature", "(1 + y * z) / curvature")
mutant("mocha", "hinge: no box", "y * torch.clamp(y * a + (1 - y * z) / curvature, 0, 1) - a", "y * (1 - y * z) / curvature")
mutant("mocha", "hinge: starts anew", "torch.clamp(y * a + (1", "torch.clamp((1")
mutant("mocha", "squared: the conjugate is missing", "(y - z - a) / (1 + curvature)", "(y - z) / (1 + curvature)")
mutant("mocha", "squared: step without the one", "(y - z - a) / (1 + curvature)", "(y - z - a) / (2 + curvature)")
mutant("mocha", "sigma' = 1", "safe = (sigma[:, row].abs().sum(1) / own).max()", "safe = own.max() / own.max()")
mutant("mocha", "curvature without Sigma_tt", '"q": safe * own / self.lam', '"q": safe / self.lam + 0 * own')
mutant("mocha", "w without 1 / lam", '"w": mix(sigma / self.lam, server["v"])', '"w": mix(sigma, server["v"])')
mutant("mocha", "examples of a batch do not see each other", "z = z + local.q * gram[:, j, None] * d", "z = z + 0 * d")
mutant("mocha", "a user does not see his last steps", "tree.axpy(local.q, local.dv, local.start)", "local.start")
mutant("mocha", "the bias is not a feature", "gram = gram + 1", "gram = gram + 0")
mutant("mocha", "dual variables are replaced", "index_put((at,), d, accumulate=True), dv=dv", "index_put((at,), d), dv=dv")
mutant("mocha", "v is replaced", "index_put((row,), d, accumulate=True), server", "index_put((row,), d), server")
mutant("mocha", "padding counts", "* batch.weight[j]", "* batch.weight[j] ** 0")
mutant("mocha", "the mean of ones, not of 1 / n", "torch.ones_like(eye) / n\n", "torch.ones_like(eye)\n")
mutant("mocha", "Sigma from ones, not from the identity", "sigma = eye / n", "sigma = (torch.ones_like(eye) + eye) / n")
mutant("mocha", "Sigma = W'W", "share = (root /", "root = root**2\n    share = (root /")
mutant("mocha", "Sigma without the trace", "return share / share.sum(), vectors", "return share * root.sum(), vectors")
mutant("mocha", "the Omega-step is a round late", "(cohort.round[0] + 1) % self.omega_every", "cohort.round[0] % self.omega_every")
mutant("mocha", "the model that is judged is the old one", "mix(sigma[row] / self.lam, v)", 'mix(sigma[row] / self.lam, server["v"])')

cannot("mocha", "a duality gap for networks", "no convex conjugate: algo=mtl takes gradient steps on the primal")
cannot("mocha", "with relation=learned a global minimum", "Sigma has a floor, and moves before W has converged")
