"""Ditto: the global track is FedAvg, the personal one a proximal step method around the received model."""

from __future__ import annotations

import numpy as np
from problems import Quadratic, blobs, federation, mlp, quadratic, random_quadratics, run, weights
from small import algorithm

from conformance import FIXED_POINT, cannot, check, mutant
from perfed import tree
from perfed.evaluate import Protocol, adapted_models
from perfed.optimizers import Adam, Sgd

N, D = 5, 4
A, B = random_quadratics(N, D)  # eigenvalues in [.5, 2]
EYE = np.eye(D)
BEST = np.linalg.solve(A, B[..., None])[..., 0]
START = np.array([3.0, -1.0, 0.5, 2.0])
CLEAN = Protocol(label="clean", source="train", support=None, batch=None, repeats=1, steps=(0, 3), lr=0.3)


def gap(x, y) -> float:
    return float(np.abs(np.asarray(x) - np.asarray(y)).max())


def build(name="ditto", start=START, active=None, backend="vmap", **fields):
    algo = algorithm(name, batch=1, **fields)
    return federation(algo, Quadratic(), list(map(quadratic, A, B)), start, active=active, backend=backend)


def network(name, backend="vmap", local=None, **fields):
    """Users with more and fewer examples than a batch, 3 of 5 a round."""
    model, start = mlp()
    xs, ys = blobs([9, 4, 11, 12, 6])
    algo = algorithm(name, beta=0.3, tau=3, batch=5, **fields)
    return federation(algo, model, xs, start, ys=ys, active=3, backend=backend, local=local)


def own(fed) -> np.ndarray:
    return fed.state.users["v"]["w"][0].numpy()


def widest(a, b) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


def theta(w, lam):
    return np.linalg.solve(A + lam * EYE, (B + lam * w)[..., None])[..., 0]


def simulate(cohorts, *, beta, tau, lam, steps, lr):
    w, v = START.copy(), np.tile(START, (N, 1))
    for active in cohorts:
        uploads = []
        for i in active:
            wi = w.copy()
            for _ in range(tau):
                wi = wi - beta * (A[i] @ wi - B[i])
            for _ in range(steps):
                v[i] = v[i] - lr * (A[i] @ v[i] - B[i] + lam * (v[i] - w))
            uploads.append(wi)
        w = np.mean(uploads, 0)
    return w, v


@check("ditto", "both tracks by hand: received anchor, own steps and step size, users that rest keep v", tolerance=1e-12)
def iterates():
    worst = 0.0
    for backend, steps, lr in (("vmap", 2, 0.3), ("loop", 5, 0.2), ("vmap", None, None)):
        fed = build(active=2, backend=backend, beta=0.1, tau=3, lam=1.5, personal_steps=steps, personal_lr=lr)
        w, v = simulate([fed.cohorts(k)[0] for k in range(4)], beta=0.1, tau=3, lam=1.5, steps=steps or 3, lr=lr or 0.1)
        run(fed, 4)
        worst = max(worst, gap(weights(fed), w), gap(own(fed), v))
    return worst


OPTIMIZERS = {"sgd": None, "momentum": Sgd(name="sgd", momentum=0.5), "adam": Adam(name="adam")}

for _name, _local in OPTIMIZERS.items():

    @check("ditto", f"the global track is FedAvg bit for bit ({_name})", tolerance=0)
    def _is_fedavg(local=_local):
        worst = 0.0
        for backend in ("vmap", "loop"):
            for aggregation, steps in (("uniform", None), ("samples", 2)):
                more = {"backend": backend, "local": local, "aggregation": aggregation}
                one, other = run(network("fedavg", **more), 4), run(network("ditto", **more, personal_steps=steps), 4)
                worst = max(worst, widest(one.state.server["w"], other.state.server["w"]))
        return worst

    @check("ditto", f"lam = 0 is local training on the same batches, bit for bit ({_name})", tolerance=0)
    def _is_local(local=_local):
        worst = 0.0
        for backend in ("vmap", "loop"):
            one = run(network("local", backend=backend, local=local), 4)
            other = run(network("ditto", backend=backend, local=local, lam=0.0), 4)
            worst = max(worst, widest(one.state.users, other.state.users["v"]))
        return worst


@check("ditto", "lam to infinity: v_i is the received w", tolerance=1e-6)
def strong():
    # A step of size 1/lam lands at w - g/lam, |g| < 10.
    fed = build(beta=0.1, tau=3, lam=1e8, personal_lr=1e-8)
    run(fed, 2)
    received = weights(fed)
    return gap(run(fed, 1).state.users["v"]["w"][0].numpy(), received)


@check("ditto", "the error of v shrinks by I - personal_lr (A + lam I) a step, also past its stability bound", tolerance=1e-12)
def rate():
    worst, lam = 0.0, 1.0
    for lr in (0.3, 0.8):  # .8 (2 + 1) > 2: grows
        fed = run(build(beta=0.1, tau=1, lam=lam, personal_steps=6, personal_lr=lr), 1)
        limit = theta(START, lam)
        shrink = np.stack([np.linalg.matrix_power(EYE - lr * (Ai + lam * EYE), 6) for Ai in A])
        worst = max(worst, gap(own(fed), limit + np.einsum("nij,nj->ni", shrink, START - limit)))
    return worst


@check("ditto", "v_i = (A_i + lam I)^-1 (b_i + lam w) at FedAvg's fixed point", tolerance=1e-11, group=FIXED_POINT)
def fixed_point():
    # FedAvg: sum Q_i (w - x_i*) = 0 with Q_i = I - (I - beta A_i)^tau. The distance is that of the v_i to those at the minimiser.
    beta, tau, lam = 0.4, 4, 1.0
    Q = np.stack([EYE - np.linalg.matrix_power(EYE - beta * Ai, tau) for Ai in A])
    w = np.linalg.solve(Q.sum(0), np.einsum("nij,nj->i", Q, BEST))
    fed = run(build(beta=beta, tau=tau, lam=lam), 40)
    best = theta(np.linalg.solve(A.sum(0), B.sum(0)), lam)
    return max(gap(weights(fed), w), gap(own(fed), theta(w, lam))), gap(theta(w, lam), best)


@check("ditto", "v_i at FedAvg's fixed point is pFedMe's map there", tolerance=1e-11)
def pfedme_map():
    fed = run(build(beta=0.4, tau=4, lam=2.0, personal_lr=0.3), 40)
    other = build("pfedme", start=weights(fed), beta=0.1, tau=1, lam=2.0, p_lr=0.3, inner_steps=60)
    return gap(own(fed), run(other, 1).state.users["th"]["w"][0].numpy())


@check("ditto", "proximal adaptation goes on from v, or from w where a user never trained", tolerance=1e-12)
def adaptation():
    fed = run(build(active=2, beta=0.1, tau=2, lam=1.5, personal_lr=0.3), 2)
    w, worst = weights(fed), 0.0
    for i in range(N):
        v = own(fed)[i] if fed.times_sampled[0, i] else w
        for _ in range(3):
            v = v - 0.3 * (A[i] @ v - B[i] + 1.5 * (v - w))
        worst = max(worst, gap(adapted_models(fed, CLEAN, 0, i, 3)["personal"]["w"].numpy(), v))
    return worst


cannot("ditto", "(w, v) minimise one common objective", "v never feeds back: w is FedAvg's, whose fixed point for tau > 1 is no minimiser")

mutant("ditto", "pull has the wrong sign", "tree.axpy(self.lam, tree.sub", "tree.axpy(-self.lam, tree.sub")
mutant("ditto", "pull with factor 2", "tree.axpy(self.lam, tree.sub", "tree.axpy(2 * self.lam, tree.sub")
mutant("ditto", "anchor is the freshly trained w_i", "tree.sub(own.w, local.anchor)", "tree.sub(own.w, shared.w)")
mutant("ditto", "no pull", "tree.axpy(self.lam, tree.sub(own.w, local.anchor), g)", "g")
mutant("ditto", "gradient of the personal track at w_i", "tree.where(first, shared.w, own.w)", "shared.w")
mutant("ditto", "v starts each round from the received w", 'Track(user["v"], ', "Track(down, ")
mutant("ditto", "v goes up", "return local.shared.w, {", "return local.own.w, {")
mutant("ditto", "the shared model is kept as v", '{"v": local.own.w,', '{"v": local.shared.w,')
mutant("ditto", "personal steps read other batches", "step if step < self.tau else step - self.tau", "step")
mutant("ditto", "the global track moves in all steps", "shared=tree.where(first, moved, shared)", "shared=moved")
mutant(
    "ditto",
    "the personal optimizer's state advances in all steps",
    "own=tree.where(first, own, pulled)",
    "own=Track(tree.where(first, own.w, pulled.w), pulled.opt)",
)
mutant("ditto", "personal step size is beta", "pulled, own.opt, own.w, self.inner_step", "pulled, own.opt, own.w, self.beta")
mutant(
    "ditto", "adaptation without the pull", "        return self.lam\n\n    def stream_step", "        return 0.0\n\n    def stream_step"
)
mutant("ditto", "a user that never trained is judged at w_0", 'tree.where(user["rounds"] > 0, user["v"], w)', 'user["v"]')
