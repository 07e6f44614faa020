"""Per-FedAvg, exact, first order (FO) and Hessian-free (HF); MAML, FO-MAML and HF-MAML as the case of one step of all users.

A. Fallah, A. Mokhtari, A. Ozdaglar, arXiv 2002.07948; C. Finn, P. Abbeel, S. Levine, ICML 2017.
A direction is read off a federation of one user after one step with beta = 1: w_0 - w_1.
"""

from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
import torch
from problems import (
    COIN_START,
    COIN_X,
    AbsCubic,
    Formula,
    Polynomial,
    Quadratic,
    Spy,
    batch_of,
    blobs,
    coin,
    drawn,
    federation,
    mlp,
    quadratic,
    random_quadratics,
    run,
    weights,
)
from small import algorithm

from conformance import FIXED_POINT, IDENTITY, cannot, check, mutant
from conformance.fedavg import cost_error, far, flat, net_loss, stationary, unlike
from perfed.evaluate import Protocol, adapted_models
from perfed.federate import Federation
from perfed.optimizers import Average

EXACT, FO, HF = VARIANTS = ("perfedavg", "perfedavg_fo", "perfedavg_hf")
BACKENDS = ("vmap", "loop")


def each(name: str, tolerance: float, group: str = IDENTITY, variants=VARIANTS):
    """Register a function of the variant once for each of them."""

    def add(f):
        for variant in variants:
            check(variant, name, tolerance, group)(lambda variant=variant: f(variant))
        return f

    return add


def direction(algo, model, x, start, **options) -> np.ndarray:
    fed = federation(algo, model, [x], start, **options)
    before = weights(fed)
    return before - weights(run(fed, 1))


def one(variant, **options):
    return algorithm(variant, **{"beta": 1.0, "tau": 1, "batch": 1, **options})


# ---------------------------------------------------------------- alpha = 0


@each("alpha = 0 is FedAvg, step for step (bitwise, both dtypes)", 0)
def alpha_zero(variant):
    model, start = mlp(features=5, hidden=6)
    xs, ys = blobs([9, 14, 13, 20, 9, 16], features=5)  # 4 + 4 of 9 leave one for B'' when batches are disjoint
    switches = [{}, {"batches": "disjoint"}, {"batches": "shared"}, {"batch_inner": 2, "extra_iterate": True}]
    switches += {
        EXACT: [{"hess_batch": "inner", "inner_steps": 2}],
        FO: [{"inner_steps": 3}],
        HF: [{"delta": 0.5, "delta_mode": "absolute"}],
    }[variant]
    worst = 0.0
    for i, switch in enumerate(switches):
        common = dict(ys=ys, active=3, seeds=(0, 7)[: 1 + i % 2], backend=BACKENDS[i == 1], dtype=torch.float32 if i % 2 else torch.float64)
        fields = dict(beta=0.3, tau=2, batch=4)
        plain = run(federation(algorithm("fedavg", **fields), model, xs, start, **common), 2)
        meta = run(federation(algorithm(variant, alpha=0.0, **fields, **switch), model, xs, start, **common), 2)
        worst = max(worst, *(unlike(weights(plain, s), weights(meta, s)) for s in range(len(common["seeds"]))))
    return worst


# ---------------------------------------------------------------- MAML


def maml(p, tasks, alpha, beta, variant, delta):
    """One step of MAML by autodiff, or of FO- or HF-MAML; tasks are (inner x, inner y, outer x, outer y)."""
    total = [torch.zeros_like(t) for t in p]
    for xi, yi, xo, yo in tasks:
        p = [t.detach().requires_grad_() for t in p]
        g = torch.autograd.grad(net_loss(p, xi, yi), p, create_graph=variant == EXACT)
        adapted = [t - alpha * gt for t, gt in zip(p, g, strict=True)]
        if variant == EXACT:
            meta = torch.autograd.grad(net_loss(adapted, xo, yo), p)
        else:
            adapted = [t.detach().requires_grad_() for t in adapted]
            meta = u = torch.autograd.grad(net_loss(adapted, xo, yo), adapted)
        if variant == HF:
            h = delta / torch.cat([t.flatten() for t in u]).norm()
            sides = [[(t + sign * h * ut).detach().requires_grad_() for t, ut in zip(p, u, strict=True)] for sign in (1, -1)]
            up, low = [torch.autograd.grad(net_loss(side, xi, yi), side) for side in sides]
            meta = [ut - alpha * (a - b) / (2 * h) for ut, a, b in zip(u, up, low, strict=True)]
        total = [s + t / len(tasks) for s, t in zip(total, meta, strict=True)]
    return [(t - beta * s).detach() for t, s in zip(p, total, strict=True)]


def maml_deviation(variant, reduction="mean"):
    alpha, beta, delta = 0.4, 0.3, 1e-2
    model, start = mlp()
    xs, ys = blobs([6, 9, 9, 7])
    x, y = torch.from_numpy(np.concatenate(xs)), torch.from_numpy(np.concatenate(ys))
    options = ({} if variant == FO else {"hess_batch": "inner"}) | ({"delta": delta} if variant == HF else {})
    factor, worst = 1 if reduction == "mean" else 4, 0.0
    for batch, backend in ((4, "vmap"), (100, "loop")):
        fed = federation(
            algorithm(variant, alpha=alpha, beta=beta / factor, tau=1, batch=batch, **options),
            model,
            xs,
            start,
            ys=ys,
            backend=backend,
            server=Average(name="average", lr=factor),
        )
        p = list(start.values())
        for k in range(2):
            picks = [drawn(fed, i, k, 1) for i in range(4)]
            tasks = [(x[d["inner"][0]], y[d["inner"][0]], x[d["outer"][0]], y[d["outer"][0]]) for d in picks]
            p = maml(p, tasks, alpha, beta, variant, delta)
        worst = max(worst, far(weights(run(fed, 2)), flat(p)))
    return worst


@each("all users, one step, B'' = B: (FO-, HF-) MAML over all tasks, by autodiff", 1e-12)
def is_maml(variant):
    return maml_deviation(variant)


@each("MAML that sums over its n tasks with step beta/n: server.lr = n", 1e-12)
def summed_maml(variant):
    return maml_deviation(variant, "sum")


# ---------------------------------------------------------------- directions


@check(EXACT, "all data: the direction is the gradient of w -> f(w - alpha grad f(w)) by autodiff", 1e-12)
def autodiff():
    alpha, worst = 0.5, 0.0
    model, start = mlp()
    (x,), (y,) = blobs([8])
    p = [t.clone().requires_grad_() for t in start.values()]
    xt, yt = torch.from_numpy(x), torch.from_numpy(y)
    g = torch.autograd.grad(net_loss(p, xt, yt), p, create_graph=True)
    want = flat(torch.autograd.grad(net_loss([t - alpha * gt for t, gt in zip(p, g, strict=True)], xt, yt), p))
    for i, hess_batch in enumerate(("independent", "inner", "outer")):
        got = direction(one(EXACT, alpha=alpha, batch=8, hess_batch=hess_batch), model, x, start, ys=[y], backend=BACKENDS[i % 2])
        worst = max(worst, far(got, want))
    return worst


@check(EXACT, "B'' = B: the direction is the gradient of w -> f(w - alpha g(w; B); B') by autodiff; the paper's own B'' is another", 1e-12)
def autodiff_of_batches():
    model, start = mlp()
    (x,), (y,) = blobs([9])
    x, y = torch.from_numpy(x), torch.from_numpy(y)
    found, apart = [], []
    for hess_batch in ("inner", "independent"):
        fed = federation(one(EXACT, alpha=0.5, batch=4, hess_batch=hess_batch), model, [x.numpy()], start, ys=[y.numpy()])
        picks = drawn(fed, 0, 0, 1)
        inner, outer = picks["inner"][0], picks["outer"][0]
        p = [t.clone().requires_grad_() for t in start.values()]
        g = torch.autograd.grad(net_loss(p, x[inner], y[inner]), p, create_graph=True)
        objective = net_loss([t - 0.5 * gt for t, gt in zip(p, g, strict=True)], x[outer], y[outer])
        want = flat(torch.autograd.grad(objective, p))
        apart.append(far(weights(fed) - weights(run(fed, 1)), want))
        found.append(np.abs(want).max())
    return apart[0] if apart[1] > 1e-3 * found[1] else np.inf


@each("S = 2, 3 inner steps: the chain rule by autodiff (exact), the gradient where the last one ends (FO)", 1e-12, variants=(EXACT, FO))
def several_inner_steps(variant):
    alpha, worst = 0.4, 0.0
    model, start = mlp()
    (x,), (y,) = blobs([9])
    x, y = torch.from_numpy(x), torch.from_numpy(y)
    for steps, batch in ((2, 4), (3, 4), (3, 9)):
        options = {"hess_batch": "inner"} if variant == EXACT else {}
        algo = one(variant, alpha=alpha, batch=batch, inner_steps=steps, **options)
        fed = federation(algo, model, [x.numpy()], start, ys=[y.numpy()])
        picks = {role: index[0] for role, index in drawn(fed, 0, 0, 1).items()}
        p = q = [t.clone().requires_grad_() for t in start.values()]
        for role in ("inner", "inner2", "inner3")[:steps]:
            g = torch.autograd.grad(net_loss(q, x[picks[role]], y[picks[role]]), q, create_graph=True)
            q = [t - alpha * gt for t, gt in zip(q, g, strict=True)]
        outer = net_loss(q, x[picks["outer"]], y[picks["outer"]])
        want = flat(torch.autograd.grad(outer, p if variant == EXACT else q))
        worst = max(worst, far(weights(fed) - weights(run(fed, 1)), want))
    return worst


N, D = 5, 4
A, B = random_quadratics(N, D)
BEST = np.linalg.solve(A, B[..., None])[..., 0]  # x_i*
W = np.array([1.0, -2.0, 0.5, 3.0])


def curvatures(alpha):
    """P_i = I - alpha A_i, A_i P_i, A_i P_i^2."""
    P = np.eye(D) - alpha * A
    return P, A @ P, A @ P @ P


@check(EXACT, "quadratics: F(w) = mean f_i(x_i*) + (w-x_i*)' A_i P_i^2 (w-x_i*)/2", 1e-13)
def objective():
    # F(w) is the mean of the losses after the step of size alpha that users adapt by.
    alpha = 0.3
    fed = federation(algorithm(EXACT, alpha=alpha, batch=1), Quadratic(), list(map(quadratic, A, B)), W)
    protocol = Protocol(label="clean", source="train", support=None, batch=None, repeats=1, steps=(0,), lr=fed.algo.inner_step)
    got = 0.0
    for i in range(N):
        adapted = adapted_models(fed, protocol, 0, i, 1)["global"]
        got += float(fed.task.loss(adapted, batch_of(fed, [i]))) / N
    d = W - BEST
    least = -np.einsum("ni,ni->n", B, BEST) / 2
    return far(got, np.mean(least + np.einsum("ni,nij,nj->n", d, curvatures(alpha)[2], d) / 2))


@each("quadratics: the mean direction is M w - c, M = mean A_i P_i^2, c = mean P_i^2 b_i (FO: A_i P_i, P_i b_i)", 1e-13)
def mean_direction(variant):
    alpha = 0.3
    P, first, second = curvatures(alpha)
    M, c = (first, P) if variant == FO else (second, P @ P)
    fed = federation(one(variant, alpha=alpha), Quadratic(), list(map(quadratic, A, B)), W)
    before = weights(fed)
    return far(before - weights(run(fed, 1)), M.mean(0) @ W - np.einsum("nij,nj->i", c, B) / N)


@check(EXACT, "the mean direction is the central difference of F on a network", 1e-8)
def finite_difference():
    # F by autodiff of the written-out network; the quotient's own error is ~ h^2 |F'''| and eps / h: 1e-9 at h = 1e-5.
    alpha, h = 0.5, 1e-5
    model, start = mlp()
    xs, ys = blobs([5, 8, 7])
    sizes = [t.numel() for t in start.values()]
    shapes = [t.shape for t in start.values()]

    def F(w):
        p = [t.reshape(shape).requires_grad_() for t, shape in zip(torch.from_numpy(w).split(sizes), shapes, strict=True)]
        total = 0.0
        for x, y in zip(xs, ys, strict=True):
            x, y = torch.from_numpy(x), torch.from_numpy(y)
            g = torch.autograd.grad(net_loss(p, x, y), p)
            total += float(net_loss([t - alpha * gt for t, gt in zip(p, g, strict=True)], x, y).detach()) / len(xs)
        return total

    fed = federation(one(EXACT, alpha=alpha, batch=9), model, xs, start, ys=ys)
    w = weights(fed)
    want = [(F(w + h * e) - F(w - h * e)) / (2 * h) for e in np.eye(len(w))]
    return far(w - weights(run(fed, 1)), want)


@each("softmax coin: one step from (0, 0), from the weights before adaptation", 1e-14)
def coin_step(variant):
    # One example of label 0: p = (.5, .5), g = (-.5, .5). alpha = ln 3 goes to (ln 3/2, -ln 3/2), softmax (3/4, 1/4), so u = (-1/4, 1/4).
    # FO: W = -u. H = 1/4 [[1, -1], [-1, 1]] at (0, 0), H u = u/2: exact W = -(1 - ln 3/2) u.
    # HF: grad f(+-h u) = (-(1 - s), 1 - s) with s = sigmoid(-+h/2) (margin W_0 - W_1 = -h/2 at +h u), so the quotient is
    # (s_+ - s_-)/(2 h) (1, -1) = -tanh(h/4)/(2 h) (1, -1) = u 2 tanh(h/4)/h, h = delta/|u|, |u| = sqrt(2)/4.
    u, log3, delta = np.array([-0.25, 0.25]), np.log(3), 1e-2
    h = delta / (np.sqrt(2) / 4)
    factor = {FO: 1.0, EXACT: 1 - log3 / 2, HF: 1 - log3 * 2 * np.tanh(h / 4) / h}[variant]
    options = {"delta": delta} if variant == HF else {}
    algo = one(variant, alpha=float(log3), batch=40, **options)
    worst = 0.0
    for backend in BACKENDS:
        worst = max(worst, far(weights(run(federation(algo, coin(), [COIN_X], COIN_START, backend=backend), 1)), -factor * u))
    return worst


# ---------------------------------------------------------------- the difference quotient


@check(HF, "f = |w|^3/6: the error is alpha rho delta ||u||^2 / 2, the bound with equality", 1e-9)
def bound_met():
    # f = |w|^3/6 + g w at w = 0: f' = w|w|/2 + g, f'' = |w|, rho = 1. g = 2, alpha = .5: the inner step goes to -1,
    # u = f'(-1) = 1.5; f''(0) = 0, so exact = u. The quotient is d u|u|/2: HF = u - alpha d u|u|/2.
    worst = 0.0
    for delta, sign, backend in product((1e-3, 0.1, 2.0), (1, -1), BACKENDS):
        x, u = np.array([[2.0 * sign]]), 1.5 * sign
        exact = direction(one(EXACT, alpha=0.5), AbsCubic(), x, [0.0], backend=backend)
        hf = direction(one(HF, alpha=0.5, delta=delta, delta_mode="absolute"), AbsCubic(), x, [0.0], backend=backend)
        worst = max(worst, far(hf, [u - 0.5 * delta * u * abs(u) / 2]), abs(far(hf, exact) / (0.5 * delta * 1.5**2 / 2) - 1))
    return worst


@check(HF, "||HF - exact|| <= alpha rho delta ||u||^2 / 2 at random points", 1e-12)
def bound_holds():
    # The same f in 3 dimensions at 24 points, absolute delta: the excess over the bound. u by hand.
    rng, alpha, worst = np.random.default_rng(3), 0.4, 0.0
    for delta in (0.01, 0.3, 1.0):
        for _ in range(8):
            w, g = rng.normal(size=3), rng.normal(size=3)
            v = w - alpha * (w * abs(w) / 2 + g)
            u = v * abs(v) / 2 + g
            exact = u - alpha * abs(w) * u
            hf = direction(one(HF, alpha=alpha, delta=delta, delta_mode="absolute"), AbsCubic(), g[None], w)
            worst = max(worst, np.linalg.norm(hf - exact) - alpha * delta * (u @ u) / 2)
    return worst


@check(HF, "quadratics: exact for every delta", 1e-11)
def exact_on_quadratics():
    A1, b1, worst = A[0], B[0], 0.0
    u = A1 @ (W - 0.3 * (A1 @ W - b1)) - b1
    for mode, delta in product(("absolute", "relative"), (1e-3, 1.0, 100.0)):
        got = direction(one(HF, alpha=0.3, delta=delta, delta_mode=mode), Quadratic(), quadratic(A1, b1), W)
        worst = max(worst, far(got, u - 0.3 * A1 @ u))
    return worst


@dataclass(kw_only=True)
class Cubic(Formula):
    """a w^3/6 + h w^2/2 - c w in one dimension; the example is (a, h, c). Gradient a w^2/2 + h w - c, Hessian a w + h."""

    def value(self, w, x):
        return x[:, 0] * w[0] ** 3 / 6 + x[:, 1] * w[0] ** 2 / 2 - x[:, 2] * w[0]


@check(HF, "cubic polynomials: exact for every delta (the central difference has no second-order term)", 1e-11)
def exact_on_cubics():
    a, h, c, w, alpha, worst = 2.0, 0.5, 1.5, 1.2, 0.3, 0.0
    v = w - alpha * (a * w**2 / 2 + h * w - c)
    u = a * v**2 / 2 + h * v - c
    for mode, delta in product(("absolute", "relative"), (1e-3, 1.0, 10.0)):
        got = direction(one(HF, alpha=alpha, delta=delta, delta_mode=mode), Cubic(), np.array([[a, h, c]]), [w])
        worst = max(worst, far(got, [u - alpha * (a * w + h) * u]))
    return worst


@check(HF, "quartics: the quotient is f'' u + delta^2 a u^3", 1e-11)
def quartic_error():
    # f = w^4/4 at w = 2, alpha = .125: the inner step ends at 1, u = 1, f'' u = 12, [(2+d)^3 - (2-d)^3]/(2d) = 12 + d^2; |u| = 1.
    worst = 0.0
    for mode, delta in product(("absolute", "relative"), (1e-2, 0.1, 1.0)):
        got = direction(one(HF, alpha=0.125, delta=delta, delta_mode=mode), Polynomial(), np.array([[1.0, 0.0, 0.0]]), [2.0])
        worst = max(worst, far(got, [1 - 0.125 * (12 + delta**2)]))
    return worst


@check(HF, "delta: relative, the norm of the perturbation; absolute, its factor", 1e-12)
def perturbation():
    # f = sum |w|^3/6 + g'w, g = (3, 4), w = 0, alpha = .1: u = (2.955, 3.92); with h the factor the quotient is h u|u|/2.
    u, delta, worst = np.array([2.955, 3.92]), 0.05, 0.0
    for mode, h in (("relative", delta / np.linalg.norm(u)), ("absolute", delta)):
        fed = federation(
            one(HF, alpha=0.1, delta=delta, delta_mode=mode), AbsCubic(), [np.array([[3.0, 4.0]])], [0.0, 0.0], backend="loop", task=Spy
        )
        fed.price()
        fed.task.log.clear()
        run(fed, 1)
        worst = max(worst, far(-weights(fed), u - 0.1 * h * u**2 / 2))
        points = sorted((point.numpy() for _, point, _ in fed.task.log[2:]), key=lambda p: -p[0])
        worst = max(worst, far(points, [h * u, -h * u]))
    return worst


@check(HF, "where the gradient vanishes the step is 0, not 0/0", 0)
def vanishing():
    worst = 0.0
    for dtype in (torch.float32, torch.float64):
        worst = max(worst, far(direction(one(HF, alpha=0.1), Quadratic(), quadratic(np.eye(1), [0.0]), [0.0], dtype=dtype), [0.0]))
    return worst


@check(HF, "one batch B'' for both gradients: its noise cancels (with two it is (z - z')/(2 delta))", 1e-10)
def one_batch():
    # f_z = w'A w/2 - z'w: gradients of two examples differ by a constant, so HF is exact only if both sides read one example.
    A1, _ = random_quadratics(1, 3, seed=5)
    z, w = np.random.default_rng(1).normal(size=(6, 3)), np.array([1.0, 2.0, -1.0])
    x, worst = np.concatenate([quadratic(A1[0], zi) for zi in z]), 0.0
    for backend, hess_batch in zip(("vmap", "loop", "vmap"), ("independent", "inner", "outer"), strict=True):
        fed = run(federation(one(HF, alpha=0.3, hess_batch=hess_batch), Quadratic(), [x], w, backend=backend, seeds=range(6)), 1)
        for s in range(6):
            picks = drawn(fed, 0, 0, 1, s)
            u = A1[0] @ (w - 0.3 * (A1[0] @ w - z[picks["inner"][0][0]])) - z[picks["outer"][0][0]]
            worst = max(worst, far(w - weights(fed, s), u - 0.3 * A1[0] @ u))
    return worst


@check(HF, "hf_error = ||HF - exact|| / ||H u||: delta^2/12 on the quartic", 1e-11)
def measured_error():
    fed = federation(one(HF, alpha=0.125, delta=0.3), Polynomial(), [np.array([[1.0, 0.0, 0.0]])], [2.0])
    return abs(fed.diagnose()[0]["hf_error"] - 0.09 / 12)


# ---------------------------------------------------------------- fixed points


def fixed_point(variant, tau):
    """Deviation of the state after many rounds from (sum Q_i)^-1 sum Q_i x_i*, that point, w* and the root of FO."""
    # The direction of user i is M_i (w - x_i*), M_i = A_i P_i^2 (exact, HF) or A_i P_i (FO).
    alpha, beta = 0.2, 1.0 if tau == 1 else 0.5
    P, first, second = curvatures(alpha)
    algo = algorithm(variant, alpha=alpha, beta=beta, tau=tau, batch=1)
    fed = run(federation(algo, Quadratic(), list(map(quadratic, A, B)), [3.0] * D), 50 if tau == 1 else 25)
    Q = np.stack([np.eye(D) - np.linalg.matrix_power(np.eye(D) - beta * M, tau) for M in (first if variant == FO else second)])
    fixed = np.linalg.solve(Q.sum(0), np.einsum("nij,nj->i", Q, BEST))
    minimiser = np.linalg.solve(second.mean(0), np.einsum("nij,nj->i", P @ P, B) / N)
    root = np.linalg.solve(first.mean(0), np.einsum("nij,nj->i", P, B) / N)
    return far(weights(fed), fixed), fixed, minimiser, root


@each("tau = 1: w* = M^-1 c of F (FO: w_FO = (mean A_i P_i)^-1 mean P_i b_i)", 1e-10, FIXED_POINT)
def minimiser(variant):
    deviation, fixed, best, root = fixed_point(variant, 1)
    return max(deviation, far(fixed, root if variant == FO else best)), np.linalg.norm(fixed - best)


@each("tau = 6: w = (sum Q_i)^-1 sum Q_i x_i*, Q_i = I - (I - beta M_i)^tau", 1e-10, FIXED_POINT)
def drift(variant):
    deviation, fixed, best, _ = fixed_point(variant, 6)
    return deviation, np.linalg.norm(fixed - best)


@each("identical users: x* + (I - beta M)^(K tau) (w_0 - x*), whoever is drawn", 1e-12)
def identical(variant):
    alpha, beta, worst = 0.2, 0.3, 0.0
    _, first, second = (m[0] for m in curvatures(alpha))
    power = np.linalg.matrix_power(np.eye(D) - beta * (first if variant == FO else second), 6)
    for active in (1, 4):
        algo = algorithm(variant, alpha=alpha, beta=beta, tau=2, batch=1)
        fed = run(federation(algo, Quadratic(), [quadratic(A[0], B[0])] * 4, W, active=active), 3)
        worst = max(worst, far(weights(fed), BEST[0] + power @ (W - BEST[0])))
    return worst


@each("users outside the cohort change nothing (bitwise)", 0)
def outsiders(variant):
    algo = algorithm(variant, alpha=0.2, beta=0.3, tau=2, batch=1)
    fed = federation(algo, Quadratic(), list(map(quadratic, A, B)), W, active=2)
    inside = fed.cohorts(0)[0]
    xs = [quadratic(a, b) if i in inside else quadratic(7 * a, -b) for i, (a, b) in enumerate(zip(A, B, strict=True))]
    return unlike(weights(run(fed, 1)), weights(run(federation(algo, Quadratic(), xs, W, active=2), 1)))


@each("relabelled users: the same w (all users, all data)", 1e-13)
def relabelled(variant):
    order = [2, 0, 4, 3, 1]
    algo = algorithm(variant, alpha=0.2, beta=0.3, tau=2, batch=1)
    a, b = (federation(algo, Quadratic(), list(map(quadratic, A[o], B[o])), W) for o in (range(N), order))
    return far(weights(run(a, 2)), weights(run(b, 2)))


@each("stationary E||w - w*||^2 of partial participation: Q/(2-Q) g^2 (1-r)/(r(n-1)), Q = 1-(1-beta s)^tau", 1e-11)
def participation(variant):
    # s = (1 - alpha)^2, for FO 1 - alpha
    options = {"alpha": 0.3, **({"delta": 0.1} if variant == HF else {})}
    return max(stationary(variant, tau, 0.7 if variant == FO else 0.49, **options) for tau in (1, 5))


# ---------------------------------------------------------------- all batches enumerated


EXAMPLES = {m: np.array([[0.5, 1.0, 2.0], [-0.3, 1.5, -0.7], [1.0, 0.6, 0.0], [0.2, 2.0, 1.1]])[:m] for m in (3, 4)}
POINT, ALPHA, DELTA = 0.9, 0.25, 0.4


def moments(m: int, size: int) -> dict[str, tuple[float, float, float]]:
    """{variant: (mean, bias, mean squared error)} over all triples of batches, f = a w^4/4 + h w^2/2 - c w, in closed form.

    The direction is u (1 - alpha f''(w; B'')) with u = f'(w - alpha f'(w; B); B'), for HF less alpha delta^2 a(B'') u^3, for FO u;
    B'' is independent of u, so moments are products. The mean of a batch enters through its mean a, h, c.
    """
    a, h, c = (np.array([EXAMPLES[m][list(s)].mean(0) for s in combinations(range(m), size)])).T
    w = POINT
    v = w - ALPHA * (a * w**3 + h * w - c)
    u = (a[:, None] * v**3 + h[:, None] * v - c[:, None]).ravel()
    factor = 1 - ALPHA * (3 * a * w**2 + h)
    k = ALPHA * DELTA**2 * a
    Am, Hm, Cm = EXAMPLES[m].mean(0)
    at = w - ALPHA * (Am * w**3 + Hm * w - Cm)
    truth = (1 - ALPHA * (3 * Am * w**2 + Hm)) * (Am * at**3 + Hm * at - Cm)  # grad F = (1 - alpha f'') f'(w - alpha f')
    first = {
        FO: u.mean(),
        EXACT: factor.mean() * u.mean(),
        HF: factor.mean() * u.mean() - k.mean() * (u**3).mean(),
    }
    second = {
        FO: (u**2).mean(),
        EXACT: (factor**2).mean() * (u**2).mean(),
        HF: (factor**2).mean() * (u**2).mean() - 2 * (factor * k).mean() * (u**4).mean() + (k**2).mean() * (u**6).mean(),
    }
    return {n: (first[n], first[n] - truth, second[n] - 2 * truth * first[n] + truth**2) for n in first}


def enumerated(variant: str, m: int, size: int) -> np.ndarray:
    """The direction of the code for every triple (B, B', B'')."""
    options = {"delta": DELTA, "delta_mode": "absolute"} if variant == HF else {}
    fed = federation(one(variant, alpha=ALPHA, batch=size, **options), Polynomial(), [EXAMPLES[m]], [POINT])
    w, out = {"w": torch.tensor([POINT], dtype=torch.float64)}, []
    info = fed._info({name: t[0] for name, t in fed.info(fed.lanes(0)[0], 0).items()})
    for triple in product(list(combinations(range(m), size)), repeat=3):
        batches = {role: batch_of(fed, s) for role, s in zip(("inner", "outer", "hess"), triple, strict=True)}
        out.append(float(fed.algo.direction(fed.task, w, batches, info)["w"][0]))
    return np.array(out)


@each("all batches enumerated (m = 3, 4; D = 1, 2, m): mean, bias, mean squared error of the direction", 1e-12)
def all_batches(variant):
    worst = 0.0
    for m, size in ((3, 1), (4, 1), (3, 2), (3, 3)):
        mean, bias, mse = moments(m, size)[variant]
        got = enumerated(variant, m, size)
        worst = max(worst, far([got.mean(), ((got - mean + bias) ** 2).mean()], [mean, mse]))
    return worst


@each("the bias on all data: 0 (exact), alpha f'' f'(w - alpha f') (FO, for every D), -alpha delta^2 a u^3 (HF)", 1e-12)
def bias_floor(variant):
    # a, h, c = .4, 31/30, 13/30: f'(.9) = .2916 + .93 - 13/30, f''(.9) = .972 + 31/30, u = f'(v)
    v = 0.9 - 0.25 * (0.2916 + 0.93 - 13 / 30)
    u = 0.4 * v**3 + 31 / 30 * v - 13 / 30
    truth = (1 - 0.25 * (0.972 + 31 / 30)) * u
    floor = {EXACT: 0.0, FO: 0.25 * (0.972 + 31 / 30) * u, HF: -0.25 * 0.4**2 * 0.4 * u**3}[variant]
    return abs(enumerated(variant, 3, 3).mean() - truth - floor)


# ---------------------------------------------------------------- which batch, which point


@each("every gradient reads the batch of its role, where it should", 1e-15)
def roles(variant):
    # Exact: g(w; B), g(w - alpha g; B'), H(w; B''). HF: the two points of the quotient are symmetric about w.
    model, start = mlp()
    xs, ys = blobs([12])
    wrong = 0.0
    kinds = ("independent",) if variant == FO else ("independent", "inner", "outer")
    for batches, kind in product(("independent", "disjoint", "shared"), kinds):
        options = {} if variant == FO else {"hess_batch": kind, "batch_hess": 4 if kind == "independent" else None}
        algo = algorithm(variant, alpha=0.1, beta=0.1, tau=2, batch_inner=2, batch_outer=3, batches=batches, **options)
        fed = federation(algo, model, xs, start, ys=ys, backend="loop", task=Spy)
        fed.price()
        fed.task.log.clear()
        w = weights(fed)
        run(fed, 1)
        picks = drawn(fed, 0, 0, 2)
        want = []
        for t in range(2):
            inner, outer = picks["inner"][t].tolist(), picks["outer"][t].tolist()
            third = {"inner": inner, "outer": outer, "independent": picks["hess"][t].tolist() if "hess" in picks else None}[kind]
            want += [("grad", inner), ("grad", outer), *{EXACT: [("hvp", third)], HF: [("grad", third)] * 2, FO: []}[variant]]
        if [(what, index) for what, _, index in fed.task.log] != want:
            return np.inf
        points = [point.numpy() for _, point, _ in fed.task.log]
        wrong = max(wrong, far(points[0], w))
        if variant != FO:
            wrong = max(wrong, far(points[2] if variant == EXACT else (points[2] + points[3]) / 2, w))
    return wrong


@each("batches: B' is FedAvg's; disjoint ones share no example, shared ones are beginnings of one draw", 0)
def draws(variant):
    model, start = mlp()
    xs, ys = blobs([3, 30])
    extra = {} if variant == FO else {"batch_hess": 6}
    plain = drawn(federation(algorithm("fedavg", batch=5), model, xs, start, ys=ys), 1, 2, 20)["outer"]
    wrong, overlap = 0, 0
    for kind in ("independent", "disjoint", "shared"):
        algo = algorithm(variant, batches=kind, batch=9, batch_inner=7, batch_outer=5, **extra)
        picks = drawn(federation(algo, model, xs, start, ys=ys), 1, 2, 20)
        sizes = {"inner": 7, "outer": 5, **({} if variant == FO else {"hess": 6})}
        wrong += set(picks) != set(sizes)
        for t in range(20):
            sets = {role: index[t] for role, index in picks.items()}
            wrong += {role: len(set(s)) for role, s in sets.items()} != sizes
            wrong += sets["outer"].tolist() != plain[t].tolist()
            union = len(set(np.concatenate(list(sets.values()))))
            wrong += kind == "disjoint" and union != sum(sizes.values())
            wrong += kind == "shared" and any(s.tolist() != sets["inner"][: len(s)].tolist() for s in sets.values())
            overlap += kind == "independent" and union < sum(sizes.values())
    return float(wrong) if overlap > 0 else np.inf  # independent batches do overlap


# ---------------------------------------------------------------- steps, remark 4.7, costs, the test step


@each("schedule=inverse_root: beta_k = min(beta, beta sqrt(100/(k+1)))", 1e-13)
def schedule(variant):
    # On f = -w the direction is -1 everywhere: a round of tau = 2 steps adds 2 beta_k.
    algo = algorithm(variant, alpha=0.1, beta=0.5, tau=2, batch=1, schedule="inverse_root")
    fed, worst = federation(algo, Polynomial(), [np.array([[0.0, 0.0, 1.0]])], [0.0]), 0.0
    for k, beta in [(0, 0.5), (98, 0.5), (99, 0.5), (100, 0.49751859510499464), (399, 0.25), (9999, 0.05)]:
        fed.k = k
        before = weights(fed)[0]
        worst = max(worst, abs(weights(run(fed, 1))[0] - before - 2 * beta))
    return worst


class AtStep(Federation):
    """t_k is what the check says."""

    t_k = 0

    def info(self, lanes, k):
        fields = super().info(lanes, k)
        return {**fields, "t_k": torch.full_like(fields["t_k"], self.t_k)}


@each("remark 4.7: all t_k enumerated give the iterates wbar_t, their mean, and d more numbers up unless t_k = 0", 1e-12)
def extra_iterate(variant):
    # f_i = w^2/2 - c_i w, c = 1, 5: t steps go to c_i + q^t (w - c_i), q = 1 - beta (1 - alpha)^2 (FO: 1 - alpha), so
    # wbar_t = 3 + q^t (w - 3); from 10, round 2 starts at 3 + 7 q^tau.
    tau, alpha, beta, worst, seen = 4, 0.2, 0.3, 0.0, []
    q = 1 - beta * (1 - alpha) ** (1 if variant == FO else 2)
    algo = algorithm(variant, alpha=alpha, beta=beta, tau=tau, batch=1, extra_iterate=True)
    for t in range(tau):
        fed = federation(algo, Quadratic(), [quadratic(np.eye(1), [c]) for c in (1.0, 5.0)], [10.0], backend=BACKENDS[t % 2], kind=AtStep)
        fed.t_k = t
        run(fed, 2)
        iterate = fed.algo.candidates(fed.state.server, ())["iterate"]["w"][0, 0]
        seen.append(float(iterate))
        worst = max(worst, abs(weights(fed)[0] - (3 + q ** (2 * tau) * 7)), abs(seen[-1] - (3 + q ** (t + tau) * 7)))
        worst = max(worst, abs(fed.costs[0].floats_up - 2 * 2 * (2 if t > 0 else 1)), abs(fed.costs[0].floats_down - 4))
    return max(worst, abs(np.mean(seen) - np.mean([3 + q ** (t + tau) * 7 for t in range(tau)])))


@each("costs: gradients 2 (HF 4, exact 2 and 1 Hessian-vector product) a step, d numbers down and up", 0)
def costs(variant):
    return cost_error(variant, 4 if variant == HF else 2, 1 if variant == EXACT else 0)


@each("the test step: w - alpha g_i(w), with the method's alpha", 1e-13)
def test_step(variant):
    alpha = 0.3
    fed = run(federation(algorithm(variant, alpha=alpha, beta=0.2, batch=1), Quadratic(), list(map(quadratic, A, B)), W), 1)
    w = weights(fed)
    protocol = Protocol(label="clean", source="train", support=None, batch=None, repeats=1, steps=(0,), lr=fed.algo.inner_step)
    return max(far(adapted_models(fed, protocol, 0, i, 1)["global"]["w"].numpy(), w - alpha * (A[i] @ w - B[i])) for i in range(N))


# ---------------------------------------------------------------- what cannot hold, and mutants


cannot(FO, "converges to the minimiser of F", "the error of the dropped curvature does not vanish, whatever the steps: w_FO != w*")
cannot(
    HF,
    "the quotient of section 5 of the paper, over delta instead of 2 delta",
    "it doubles the curvature term, (I - 2 alpha H) u; appendix H and Taylor's theorem have the 2",
)
cannot(HF, "independent batches in the quotient and a variance without delta", "the noise of the two gradients is divided by 2 delta")
cannot(EXACT, "= MAML by autodiff with a B'' of its own", "autodiff differentiates the inner gradient on its batch B: that is B'' = B")


def mutants(methods, *wrong):
    for method, (name, old, new) in product(methods, wrong):
        mutant(method, name, old, new)


INNER = "path.append(tree.axpy(-self.alpha, task.grad(path[-1], batches[role]), path[-1]))"
AVERAGE = "    @property\n    def inner_step(self):\n"
STEP = "new = super().step(task, local, batches, info)"
mutants(
    VARIANTS,
    ("the inner step ascends", INNER, INNER.replace("-self.alpha", "self.alpha")),
    ("beta for alpha in the inner step", INNER, INNER.replace("-self.alpha", "-self.beta")),
    ("the inner gradient reads B'", INNER, INNER.replace("batches[role]", 'batches["outer"]')),
    (
        "the sum of the uploads, not their mean",
        AVERAGE,
        """    def average(self, uploads, cohort):
        return tree.scale(cohort.active, super().average(uploads, cohort))

"""
        + AVERAGE,
    ),
    (
        "the step is taken from the adapted point",
        STEP,
        """at = self.inner(task, local.w, batches)[-1]
        new = local._replace(w=tree.axpy(-self.step_size(info), self.direction(task, local.w, batches, info), at))""",
    ),
    ("alpha for beta in the local step", "            return self.beta\n", "            return self.alpha or self.beta\n"),
    ("beta_k is not bounded by beta", ".sqrt(), max=1.0)", ".sqrt(), max=1e9)"),
    ("beta_k falls as 1/k", "(100 / (info.round.to(torch.float64) + 1)).sqrt()", "(100 / (info.round.to(torch.float64) + 1))"),
    ("beta_k a round late", "(info.round.to(torch.float64) + 1)", "info.round.to(torch.float64)"),
    ("disjoint batches overlap", 'start if self.batches == "disjoint" else 0)', "start // 2)"),
    ("remark 4.7: the iterate after t_k + 1 steps", "info.step + 1 == info.t_k", "info.step == info.t_k"),
    ("remark 4.7: t_k = 0 is sent too", " * (info.t_k > 0)", ""),
    ("remark 4.7: the iterate is the model", 'self.average(uploads["extra"], cohort)', 'self.average(uploads["w"], cohort)'),
    ("the test step has the step beta", "inner_step(self):\n        return self.alpha\n", "inner_step(self):\n        return self.beta\n"),
)
FIRST = 'return task.grad(self.inner(task, w, batches)[-1], batches["outer"])'
mutants(
    [FO],
    ("the gradient before adaptation (FedAvg)", FIRST, 'return task.grad(w, batches["outer"])'),
    ("the outer gradient reads B", FIRST, FIRST.replace('"outer"', '"inner"')),
    ("only the first inner step counts", FIRST, FIRST.replace("[-1]", "[1]")),
    ("the inner and the outer gradient are added", FIRST, 'return tree.axpy(1, task.grad(w, batches["inner"]), ' + FIRST[7:] + ")"),
)
CURVE = 'return batches["hess" if self.hess_batch == "independent" else self.hess_batch]'
mutants(
    [EXACT, HF],
    ("the curvature always reads B'", CURVE, 'return batches["outer"]'),
    ("the curvature always reads B", CURVE, 'return batches["inner"]'),
    ("B'' has the size of B", '"hess": self.batch_hess or self.batch', '"hess": self.batch_inner or self.batch'),
)
OUTER = 'u = task.grad(path[-1], batches["outer"])'
HVP = "tree.axpy(-self.alpha, task.hvp(w, self.curvature_batch(batches), u), u)"
CHAIN = "u = tree.axpy(-self.alpha, task.hvp(v, batches[role], u), u)"
mutants(
    [EXACT],
    ("the curvature term has the wrong sign", HVP, HVP.replace("-self.alpha", "self.alpha")),
    ("beta for alpha in the curvature term", HVP, HVP.replace("-self.alpha", "-self.beta")),
    ("the curvature term is doubled", HVP, HVP.replace("-self.alpha", "-2 * self.alpha")),
    ("no curvature term (FO)", HVP, "u"),
    ("the Hessian at the adapted point", HVP, HVP.replace("hvp(w,", "hvp(path[-1],")),
    ("the Hessian times the gradient at w", HVP, HVP.replace("(batches), u), u)", '(batches), task.grad(w, batches["outer"])), u)')),
    ("the outer gradient at w", OUTER, OUTER.replace("path[-1]", "w")),
    ("the outer gradient reads B", OUTER, OUTER.replace('"outer"', '"inner"')),
    ("the chain rule has the wrong sign", CHAIN, CHAIN.replace("-self.alpha", "self.alpha")),
    ("the chain rule reads the outer batch", CHAIN, CHAIN.replace("batches[role]", 'batches["outer"]')),
    ("the chain rule takes the factors in the wrong order", "in reversed(list(zip(", "in list((zip("),
    ("the chain rule's Hessians one step late", "zip(path[:-1]", "zip(path[1:]"),
)
QUOTIENT = "return tree.axpy(-self.alpha, self.quotient(task, w, self.curvature_batch(batches), u), u)"
LOW = "low = task.grad(tree.axpy(-delta, u, w), batch)"
HIGH = "up = task.grad(tree.axpy(delta, u, w), batch)"
mutants(
    [HF],
    ("no 2 in the denominator", "(a - b) / (2 * delta)", "(a - b) / delta"),
    ("the difference has the wrong sign", "(a - b) / (2 * delta)", "(b - a) / (2 * delta)"),
    ("the curvature term has the wrong sign", QUOTIENT, QUOTIENT.replace("-self.alpha", "self.alpha")),
    ("beta for alpha in the curvature term", QUOTIENT, QUOTIENT.replace("-self.alpha", "-self.beta")),
    ("no curvature term (FO)", QUOTIENT, "return u"),
    (
        "forward difference, with its own denominator",
        LOW + "\n        return tree.map(lambda a, b: (a - b) / (2 * delta), up, low)",
        "low = task.grad(w, batch)\n        return tree.map(lambda a, b: (a - b) / delta, up, low)",
    ),
    ("one side of the difference at w", LOW, "low = task.grad(w, batch)"),
    ("point and direction swapped", HIGH, HIGH.replace("u, w", "w, u")),
    ("the quotient at the adapted point", QUOTIENT, QUOTIENT.replace("task, w,", "task, self.inner(task, w, batches)[-1],")),
    (
        "independent batches in the quotient",
        QUOTIENT,
        """h = self.delta / (torch.clamp(tree.norm(u), min=1e-150) if self.delta_mode == "relative" else 1)
        up = task.grad(tree.axpy(h, u, w), self.curvature_batch(batches))
        low = task.grad(tree.axpy(-h, u, w), batches["outer" if self.hess_batch != "outer" else "inner"])
        return tree.map(lambda u, a, b: u - self.alpha * (a - b) / (2 * h), u, up, low)""",
    ),
    ("relative delta is absolute", "delta = self.delta / torch.clamp(norm, min=torch.finfo(norm.dtype).tiny ** 0.5)", "delta = self.delta"),
    ("absolute delta is relative", "else:\n            delta = self.delta\n", "else:\n            delta = self.delta / tree.norm(u)\n"),
    ("relative delta multiplies the norm", "self.delta / torch.clamp(norm,", "self.delta * torch.clamp(norm,"),
    ("0/0 where the gradient vanishes", "torch.clamp(norm, min=torch.finfo(norm.dtype).tiny ** 0.5)", "norm"),
    ("hf_error relative to u", "/ tree.norm(exact)}", "/ tree.norm(u)}"),
)
