"""APFL: its ends are FedAvg and local training, and its steps are gradients of f_i(a v + (1 - a) w)."""

from __future__ import annotations

import numpy as np
import torch
from problems import Polynomial, Quadratic, blobs, federation, mlp, quadratic, random_quadratics, run, weights
from small import algorithm

from conformance import FIXED_POINT, cannot, check, mutant
from perfed import tree
from perfed.optimizers import Adam, Sgd

N, D = 5, 4
A, B = random_quadratics(N, D)  # eigenvalues in [.5, 2]
EYE = np.eye(D)
BEST = np.linalg.solve(A, B[..., None])[..., 0]
START = np.array([3.0, -1.0, 0.5, 2.0])


def gap(x, y) -> float:
    return float(np.abs(np.asarray(x) - np.asarray(y)).max())


def build(active=None, backend="vmap", **fields):
    algo = algorithm("apfl", batch=1, **fields)
    return federation(algo, Quadratic(), list(map(quadratic, A, B)), START, active=active, backend=backend)


def network(name, backend="vmap", local=None, active=3, **fields):
    """Users with more and fewer examples than a batch."""
    model, start = mlp()
    xs, ys = blobs([9, 4, 11, 12, 6])
    algo = algorithm(name, beta=0.3, tau=3, batch=5, **fields)
    return federation(algo, model, xs, start, ys=ys, active=active, backend=backend, local=local)


def own(fed) -> np.ndarray:
    return fed.state.users["v"]["w"][0].numpy()


def personal(fed, user):
    return fed.algo.candidates(tree.at(fed.state.server, 0), fed.users_at(0, user))["personal"]


def widest(a, b) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


def simulate(cohorts, *, beta, tau, mix, chain=True, adaptive=False):
    w, v, a = START.copy(), np.tile(START, (N, 1)), np.full(N, mix)
    for active in cohorts:
        uploads = []
        for i in active:
            wi = w.copy()
            for t in range(tau):
                g, h = A[i] @ wi - B[i], A[i] @ (a[i] * v[i] + (1 - a[i]) * wi) - B[i]
                at = a[i] - beta * (v[i] - wi) @ h
                wi, v[i] = wi - beta * g, v[i] - beta * (a[i] if chain else 1.0) * h
                if adaptive and t == 0:
                    a[i] = min(max(at, 0.0), 1.0)
            uploads.append(wi)
        w = np.mean(uploads, 0)
    return w, v, a


def deviation(rounds=6, backend="vmap", adaptive=False, v_step="chain", **fields) -> float:
    """Errors of w, all v_i, all a_i and all judged mixtures; 2 of 5 users a round, and one round in which some never trained."""
    worst = 0.0
    for count in (1, rounds):
        fed = build(active=2, backend=backend, adaptive=adaptive, v_step=v_step, **fields)
        w, v, a = simulate([fed.cohorts(k)[0] for k in range(count)], chain=v_step == "chain", adaptive=adaptive, **fields)
        run(fed, count)
        judged = [a[i] * (v[i] if fed.times_sampled[0, i] else w) + (1 - a[i]) * w for i in range(N)]
        got = [personal(fed, i)["w"].numpy() for i in range(N)]
        worst = max(worst, gap(weights(fed), w), gap(own(fed), v), gap(got, judged))
        if adaptive:
            worst = max(worst, gap(fed.state.users["mix"][0].numpy(), a))
    return worst


COMMON = {"beta": 0.1, "tau": 3, "mix": 0.3}


@check("apfl", "iterates and mixtures by hand, fixed weight", tolerance=1e-12)
def iterates():
    return max(deviation(backend=b, **COMMON) for b in ("vmap", "loop"))


@check("apfl", "iterates without the chain rule's factor", tolerance=1e-12)
def no_factor():
    return deviation(v_step="none", **COMMON)


@check("apfl", "iterates, adaptive weight, clipped at both ends", tolerance=1e-12)
def adaptive():
    worst, ends = 0.0, set()
    for mix, beta in ((0.3, 0.1), (0.9, 0.45), (0.05, 0.45)):
        fields = {"beta": beta, "tau": 3, "mix": mix}
        worst = max(worst, *(deviation(backend=b, adaptive=True, **fields) for b in ("vmap", "loop")))
        fed = run(build(active=2, adaptive=True, **fields), 6)
        a = fed.state.users["mix"][0].numpy()
        ends |= {end for end in (0.0, 1.0) if (a == end).any()}
        worst = max(worst, float(np.clip(a, 0, 1).tolist() != a.tolist()))
    return worst if ends == {0.0, 1.0} else float("inf")  # else the check would not have clipped


for _name, _local in {"sgd": None, "momentum": Sgd(name="sgd", momentum=0.5), "adam": Adam(name="adam")}.items():

    @check("apfl", f"the global track is FedAvg bit for bit ({_name})", tolerance=0)
    def _is_fedavg(local=_local):
        worst = 0.0
        for backend in ("vmap", "loop"):
            for aggregation, adaptive in (("uniform", False), ("samples", True)):
                more = {"backend": backend, "local": local, "aggregation": aggregation}
                one, other = run(network("fedavg", **more), 4), run(network("apfl", **more, adaptive=adaptive), 4)
                worst = max(worst, widest(one.state.server["w"], other.state.server["w"]))
        return worst

    @check("apfl", f"mix = 1: v and the mixture are local training's model, bit for bit ({_name})", tolerance=0)
    def _is_local(local=_local):
        worst = 0.0
        for backend in ("vmap", "loop"):
            one = run(network("local", backend=backend, local=local), 4)
            other = run(network("apfl", backend=backend, local=local, mix=1.0), 4)
            worst = max(worst, widest(one.state.users, other.state.users["v"]))
            for i in np.flatnonzero(other.times_sampled[0]):
                worst = max(worst, widest(one.users_at(0, i), personal(other, i)))
        return worst


@check("apfl", "mix = 0: v stays at w_0, the mixture is the global model, bit for bit", tolerance=0)
def frozen():
    worst = 0.0
    for backend in ("vmap", "loop"):
        fed = run(network("apfl", backend=backend, mix=0.0), 4)
        for i in range(N):
            worst = max(worst, widest(tree.at(fed.state.users["v"], 0, i), fed.initial[0]))
            worst = max(worst, widest(personal(fed, i), tree.at(fed.state.server["w"], 0)))
    return worst


@check("apfl", "v and a step along derivatives of f(a v + (1 - a) w)", tolerance=1e-14)
def derivatives():
    # f = p w^4/4 + h w^2/2 - c w is a polynomial: complex steps of 1e-40 give its derivatives without cancellation.
    p, h, c, beta = np.array([1.0, 0.5, 2.0]), np.array([1.0, -0.5, 0.3]), np.array([0.7, -1.2, 2.0]), 0.05
    algo = algorithm("apfl", beta=beta, tau=1, batch=1, mix=0.4, adaptive=True)
    fed = run(federation(algo, Polynomial(), [np.array([row]) for row in zip(p, h, c, strict=True)], [0.8]), 3)

    def f(v, a, w):
        u = a * v + (1 - a) * w
        return p * u**4 / 4 + h * u**2 / 2 - c * u

    def numbers():
        users = fed.state.users
        return users["v"]["w"][0, :, 0].numpy().copy(), users["mix"][0].numpy().copy(), weights(fed).copy()

    v, a, w = numbers()
    fed.round()
    v2, a2, w2 = numbers()
    e = 1e-40j
    dv, da, dw = f(v + e, a, w).imag / 1e-40, f(v, a + e, w).imag / 1e-40, f(v, 0.0, w + e).imag / 1e-40
    return max(gap(v2, v - beta * dv), gap(a2, a - beta * da), gap(w2, w - beta * dw.mean()))


@check("apfl", "a user that rests keeps v and a, and his mixture follows w", tolerance=0)
def resting():
    fed = run(network("apfl", active=2, adaptive=True), 3)
    before, models = fed.users_at(0, torch.arange(N)), [personal(fed, i) for i in range(N)]
    active = set(fed.cohorts(3)[0].tolist())
    fed.round()
    after, worst = fed.users_at(0, torch.arange(N)), 0.0
    for i in set(range(N)) - active:
        worst = max(worst, widest(tree.at(before, i), tree.at(after, i)))
        if widest(models[i], personal(fed, i)) == 0:
            return float("inf")
    return worst


def fixed_point(chain: bool) -> tuple[float, float]:
    """With w at FedAvg's fixed point, w_i,t = x_i* + (I - beta A_i)^t (w - x_i*), and v_i runs through an affine recursion

        v_{t+1} = (I - beta s a A_i) v_t - beta s (A_i (1 - a) w_{i,t} - b_i),   s = a or 1

    whose fixed point over tau steps solves (I - P^tau) v = sum_t P^(tau-1-t) c_t. The distance is that of the mixture to x_i*.
    """
    beta, tau, a = 0.6, 3, 0.6
    s = a if chain else 1.0
    Q = np.stack([EYE - np.linalg.matrix_power(EYE - beta * Ai, tau) for Ai in A])
    w = np.linalg.solve(Q.sum(0), np.einsum("nij,nj->i", Q, BEST))
    v = np.empty((N, D))
    for i in range(N):
        P, c = EYE - beta * s * a * A[i], np.zeros(D)
        for t in range(tau):
            wt = BEST[i] + np.linalg.matrix_power(EYE - beta * A[i], t) @ (w - BEST[i])
            c = P @ c - beta * s * ((1 - a) * A[i] @ wt - B[i])
        v[i] = np.linalg.solve(EYE - np.linalg.matrix_power(P, tau), c)
    fed = run(build(beta=beta, tau=tau, mix=a, v_step="chain" if chain else "none"), 110)
    return max(gap(weights(fed), w), gap(own(fed), v)), gap(a * v + (1 - a) * w, BEST)


@check("apfl", "fixed point of w and v", tolerance=1e-11, group=FIXED_POINT)
def with_chain():
    return fixed_point(True)


@check("apfl", "tau = 1: the mixture goes to the user's optimum, v to (x_i* - (1 - a) w)/a", tolerance=1e-11, group=FIXED_POINT)
def one_step():
    fed = run(build(beta=0.6, tau=1, mix=0.6), 330)
    w = np.linalg.solve(A.sum(0), B.sum(0))
    mixtures = [personal(fed, i)["w"].numpy() for i in range(N)]
    return max(gap(weights(fed), w), gap(own(fed), (BEST - 0.4 * w) / 0.6)), gap(mixtures, BEST)


@check("apfl", "fixed point of w and v without the chain rule's factor", tolerance=1e-11, group=FIXED_POINT)
def without_chain():
    return fixed_point(False)


cannot("apfl", "the fixed mixture minimises f_i for tau > 1", "v answers to the w_i of all local steps, the judged mixture has the final w")
cannot("apfl", "mix = 1 is local training for users that never trained", "their v is taken as w, the cold start; local training leaves w_0")

mutant("apfl", "weights exchanged", "torch.lerp(wi, vi, a), w, v", "torch.lerp(vi, wi, a), w, v")
mutant("apfl", "gradient at v, not at the mixture", 'task.grad(mixture(a, v, w), batches["outer"])', 'task.grad(v, batches["outer"])')
mutant("apfl", "chain and none exchanged", 'self.v_step == "chain"', 'self.v_step != "chain"')
mutant("apfl", "factor 1 - a", "tree.scale(a, h)", "tree.scale(1 - a, h)")
mutant("apfl", "a has the wrong sign", "a - self.beta * tree.dot", "a + self.beta * tree.dot")
mutant("apfl", "a reads the gradient at w", "tree.dot(tree.sub(v, w), h)", "tree.dot(tree.sub(v, w), g)")
mutant("apfl", "a reads v and w after the step", "tree.sub(v, w)", "tree.sub(new_v, new_w)")
mutant(
    "apfl",
    "a is not clipped",
    "moved = torch.clamp(a - self.beta * tree.dot(tree.sub(v, w), h), 0, 1)",
    "moved = a - self.beta * tree.dot(tree.sub(v, w), h)",
)
mutant("apfl", "a moves in every step", "torch.where(info.step == 0, moved, a)", "moved")
mutant("apfl", "v is overwritten by the mixture", '{"v": local.v,', '{"v": mixture(0.5, local.v, local.w),')
mutant("apfl", "v goes up", "return local.w, {", "return local.v, {")
mutant("apfl", "w takes the mixture's gradient", "task.local.update(g, local.opt", "task.local.update(h, local.opt")
mutant("apfl", "v starts each round from the received w", 'v = user["v"]\n', "v = down\n")
mutant("apfl", "a user that never trained is judged with w_0", 'tree.where(user["rounds"] > 0, user["v"], w)', 'user["v"]')
