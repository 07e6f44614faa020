"""Primal multi-task learning: its steps against numpy, the penalty, the Omega-step, and the fixed point."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from problems import Quadratic, batch_of, blobs, drawn, federation, mlp, quadratic, random_quadratics, run
from small import algorithm, same

from conformance import FIXED_POINT, cannot, check, mutant
from perfed import tree

N, D = 5, 3
A, B = random_quadratics(N, D, seed=4)
MEAN = np.eye(N) - 1 / N
BETA, TAU, LAM = 0.1, 3, 0.4


def line(rounds=0, *, active=None, a=A, b=B, start=(0.3, -0.2, 0.5), backend="vmap", **fields):
    algo = algorithm("mtl", **{"beta": BETA, "tau": TAU, "batch": 1, "lam": LAM, "layers": "all", **fields})
    users = [quadratic(*ab) for ab in zip(a, b, strict=True)]
    return run(federation(algo, Quadratic(), users, start, active=active, backend=backend), rounds)


def models(fed) -> np.ndarray:
    """[n, d]"""
    return fed.state.users["w"]["w"][0].numpy().copy()


def gradients(w) -> np.ndarray:
    return np.einsum("nij,nj->ni", A, w) - B


def related(w: np.ndarray, floor: float) -> np.ndarray:
    """Sigma^-1 / n from the singular values of W; Sigma has trace 1, and trace 1 again after its eigenvalues are floored."""
    u, root, _ = np.linalg.svd(w)
    root = np.concatenate([root, np.zeros(N - len(root))])
    share = np.maximum(root / root.sum(), floor / N)
    return (u / (N * share / share.sum())) @ u.T


def followed(relation, active, backend, floor=0.1) -> float:
    """Largest deviation from the update rule over four rounds."""
    fed, worst = line(active=active, relation=relation, floor=floor, backend=backend), 0.0
    w, omega = models(fed), MEAN if relation == "mean" else np.eye(N)
    for k in range(4):
        users, old = fed.cohorts(k)[0], w.copy()
        for t in users:
            rest = omega[t] @ old - omega[t, t] * old[t]
            for _ in range(TAU):
                w[t] = w[t] - BETA * (A[t] @ w[t] - B[t] + LAM * (omega[t, t] * w[t] + rest))
        omega = MEAN if relation == "mean" else related(w, floor)
        fed.round()
        worst = max(worst, np.abs(models(fed) - w).max(), np.abs(fed.state.server["w"]["w"][0].numpy() - w).max())
        if relation == "learned":
            worst = max(worst, np.abs(fed.state.server["omega"][0].numpy() - omega).max())
    return worst


for _relation, _active, _backend in (("mean", 3, "vmap"), ("mean", 5, "loop"), ("learned", 3, "loop"), ("learned", 5, "vmap")):

    @check("mtl", f"update rule, {_relation}, {_active} of 5 users, {_backend}", tolerance=1e-11)
    def rule(relation=_relation, active=_active, backend=_backend):
        return followed(relation, active, backend)


def pull(relation) -> tuple[np.ndarray, np.ndarray]:
    """(w, what a step subtracts beyond beta times the gradient, over beta) in the third round; tau = 1, all users active."""
    fed = line(2, tau=1, relation=relation)
    w = models(fed)
    fed.round()
    return w, (w - models(fed)) / BETA - gradients(w)


@check("mtl", "mean: the penalty is L2GD's, (lam/2) sum_t |w_t - mean|^2", tolerance=1e-12)
def l2gd():
    """tr(W (I - 11'/n) W') = sum_t |w_t - mean|^2, with the gradient lam (w_t - mean)."""
    w, got = pull("mean")
    identity = np.trace(w.T @ MEAN @ w) - ((w - w.mean(0)) ** 2).sum()
    return max(abs(identity), np.abs(got - LAM * (w - w.mean(0))).max())


@check("mtl", "the penalty has a gradient: that of (lam/2) tr(W Omega W') by automatic differentiation", tolerance=1e-12)
def gradient():
    worst = 0.0
    for relation in ("mean", "learned"):
        w, got = pull(relation)
        at = torch.tensor(w, requires_grad=True)
        omega = torch.tensor(MEAN if relation == "mean" else related(w, 0.1))
        (LAM / 2 * torch.trace(at.T @ omega @ at)).backward()
        worst = max(worst, np.abs(got - at.grad.numpy()).max(), float(np.abs(got).max() < 1e-2))
    return worst


@check("mtl", "Omega is built from the identity: a W of which the columns add up to 0 is pulled too", tolerance=1e-12)
def identity():
    """f_t = 0; a penalty on |sum_t w_t|^2, as in public code, would leave W as it is. Here a step takes beta lam (w_t - 0) off."""
    fed = line(a=np.zeros((N, 1, 1)), b=np.zeros((N, 1)), start=[0.0], tau=1)
    w = np.array([2.0, -1.0, 0.5, -2.5, 1.0])
    for stored in (fed.state.users["w"]["w"], fed.state.server["w"]["w"]):
        stored[0, :, 0] = torch.tensor(w)
    return np.abs(models(run(fed, 1))[:, 0] - (1 - BETA * LAM) * w).max()


@check("mtl", "learned: Sigma is PSD with trace 1, and Omega is I while W is 0", tolerance=1e-12)
def trace():
    sigma = np.linalg.inv(line(3, relation="learned", active=3).state.server["omega"][0].numpy()) / N
    zero = line(1, relation="learned", a=np.zeros((N, 1, 1)), b=np.zeros((N, 1)), start=[0.0]).state.server["omega"][0].numpy()
    return max(abs(np.trace(sigma) - 1), max(0, -np.linalg.eigvalsh(sigma).min()), np.abs(zero - np.eye(N)).max())


@check("mtl", "the Omega-step minimises tr(W Sigma^-1 W'): the square of the nuclear norm", tolerance=1e-9)
def nuclear():
    """With d >= n no eigenvalue is 0, and a low floor does nothing. Omega = Sigma^-1 / n."""
    a, b = np.stack([np.eye(6)] * N), np.random.default_rng(0).normal(size=(N, 6))
    fed = line(2, relation="learned", floor=1e-6, a=a, b=b, start=np.zeros(6))
    w = models(fed)
    return abs(N * np.trace(w.T @ fed.state.server["omega"][0].numpy() @ w) / np.linalg.norm(w, "nuc") ** 2 - 1)


def network(**fields):
    model, start = mlp()
    xs, ys = blobs([5, 9, 12, 7])
    active = fields.pop("active", None)
    algo = algorithm(fields.pop("name", "mtl"), **{"tau": 2, "batch": 4, **fields})
    return federation(algo, model, xs, start, ys=ys, active=active)


@check("mtl", "lambda = 0 is local training, bitwise", tolerance=0)
def local():
    other = run(network(name="local", active=3), 4)
    every = (run(network(lam=0.0, layers=layers, active=3), 4) for layers in ("last", "all"))
    return sum(0.0 if same(one.state.users["w"], other.state.users) else 1.0 for one in every)


@check("mtl", "layers=last: the body takes plain gradient steps, the output layer feels the penalty", tolerance=1e-12)
def last():
    """The third round, tau = 1, against the gradient of the loss plus the penalty by automatic differentiation."""
    fed, worst = run(network(lam=0.7, tau=1), 2), 0.0
    w = tree.at(fed.state.users["w"], 0)
    old = tree.map(torch.clone, w)
    batches = [batch_of(fed, drawn(fed, t, 2, 1)["outer"][0]) for t in range(4)]
    fed.round()
    for t, batch in enumerate(batches):
        p = {k: v[t].clone().requires_grad_() for k, v in old.items()}
        h = F.elu(batch.x @ p["layer1.weight"] + p["layer1.bias"])
        loss = F.cross_entropy(h @ p["layer2.weight"] + p["layer2.bias"], batch.y)
        for name in ("layer2.weight", "layer2.bias"):
            every = torch.stack([p[name] if s == t else old[name][s] for s in range(4)])
            loss = loss + 0.35 * (every - every.mean(0)).square().sum()
        loss.backward()
        worst = max(worst, *(float((old[k][t] - 0.1 * v.grad - w[k][t]).abs().max()) for k, v in p.items()))
    apart = (old["layer2.bias"] - old["layer2.bias"].mean(0)).abs().max()
    return worst + float(apart < 1e-3)


@check("mtl", "users with the same data and tau = 1 feel no penalty: local training", tolerance=1e-12)
def alike():
    """For tau > 1 they do: rest_t is held during a round, and so damps the later steps."""
    common = {"a": np.stack([A[0]] * N), "b": np.stack([B[0]] * N), "tau": 1}
    return np.abs(models(line(4, **common)) - models(line(4, lam=0.0, **common))).max()


for _tau, _beta in ((1, 0.3), (5, 0.1)):

    @check("mtl", f"mean, all users, tau={_tau}: the minimiser", tolerance=1e-9, group=FIXED_POINT)
    def minimiser(tau=_tau, beta=_beta):
        """A_t w_t - b_t + lam (w_t - mean) = 0 for all t. At it every local step is 0, as rest_t is of that point."""
        big = LAM * np.einsum("st,ab->satb", MEAN, np.eye(D))
        for t in range(N):
            big[t, :, t] += A[t]
        want = np.linalg.solve(big.reshape(N * D, -1), B.ravel()).reshape(N, D)
        far = np.abs(models(line(150 if tau == 1 else 90, tau=tau, beta=beta)) - want).max()
        return far, far


mutant("mtl", "the penalty pushes apart", "g[k] + self.lam *", "g[k] - self.lam *")
mutant("mtl", "a detached penalty: local training", "g[k] + self.lam *", "g[k] + 0 * self.lam *")
mutant("mtl", "the others push apart", "local.w[k] + rest)", "local.w[k] - rest)")
mutant("mtl", "ridge: the others are missing", "local.w[k] + rest)", "local.w[k] + 0 * rest)")
mutant("mtl", "the others are counted with the user himself", "mix(omega * (1 - at), w)", "mix(omega, w)")
mutant("mtl", "Omega from ones, not from the identity", "omega = at - 1 / at.shape[1] if", "omega = (at + 1) / at.shape[1] if")
mutant("mtl", "the mean of the cohort's size", "at - 1 / at.shape[1]", "at - 1 / len(at)")
mutant("mtl", "Omega_tt is 1", '"weight": (omega * at).sum(1)', '"weight": at.sum(1)')
mutant("mtl", "Omega without the division by n", "(len(share) * share)", "share")
mutant("mtl", "Omega is Sigma", "vectors / (len(share) * share)", "vectors * (len(share) * share)")
mutant("mtl", "W is not stored", 'tree.put(server["w"], (row,), uploads)', 'server["w"]')
mutant("mtl", "all layers are regularised", 'if self.layers == "last" else', 'if self.layers == "none" else')

cannot("mtl", "a duality gap, or MOCHA's guarantees", "networks have no convex conjugate; linear models have algo=mocha")
cannot("mtl", "iterates of mtl and L2GD agree", "L2GD pulls at random times to the mean of that moment; only the penalties are equal")
