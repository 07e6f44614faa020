"""Per-FedAvg: limits, autodiff, error bounds, fixed points, exact enumeration, batches, costs.

Directions are read off a federation of one user after one step with beta = 1: w_0 - w_1.
"""

from itertools import combinations, product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from problems import (
    COIN_START,
    COIN_X,
    AbsCubic,
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

from perfed.algorithms.base import Facts
from perfed.algorithms.fedavg import FedAvg
from perfed.algorithms.perfedavg import PerFedAvg, PerFedAvgFO, PerFedAvgHF
from perfed.draws import Lanes
from perfed.errors import UserError
from perfed.federate import Federation

BACKENDS = ["vmap", "loop"]
VARIANTS = {"exact": PerFedAvg, "fo": PerFedAvgFO, "hf": PerFedAvgHF}
every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def make(variant, **options):
    return VARIANTS[variant](name=variant, **options)


def direction(algo, model, x, start, **options):
    """The first direction of a lone user with the data x; the algorithm must have beta = 1 and tau = 1."""
    fed = federation(algo, model, [x], start, **options)
    before = weights(fed)
    return before - weights(run(fed, 1))


# --- alpha = 0


@every_variant
@every_backend
@pytest.mark.parametrize("batches", ["independent", "disjoint"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_alpha_zero_is_fedavg_bitwise(variant, backend, batches, dtype):
    model, start = mlp(features=5, hidden=6)
    xs, ys = blobs([9, 14, 13, 20, 9, 16], features=5)  # 4 + 4 of 9 examples leave one for B'' when batches are disjoint
    common = dict(ys=ys, active=3, seeds=(0, 7), backend=backend, dtype=dtype)
    plain = federation(FedAvg(name="fedavg", beta=0.3, tau=3, batch=4), model, xs, start, **common)
    meta = federation(make(variant, alpha=0.0, beta=0.3, tau=3, batch=4, batches=batches), model, xs, start, **common)
    for _ in range(3):
        plain.round()
        meta.round()
        for s in range(2):
            a, b = weights(plain, s), weights(meta, s)
            assert a.dtype == (np.float32 if dtype is torch.float32 else np.float64)
            assert a.tobytes() == b.tobytes()
    assert np.abs(weights(plain) - torch.cat([t.flatten() for t in start.values()]).numpy()).max() > 0.05


@pytest.mark.parametrize(
    "algo",
    [
        PerFedAvgFO(name="fo", alpha=0.0, beta=0.3, tau=3, batch=4, inner_steps=3, extra_iterate=True),
        PerFedAvg(name="exact", alpha=0.0, beta=0.3, tau=3, batch=4, inner_steps=2, hess_batch="inner"),
        PerFedAvgHF(name="hf", alpha=0.0, beta=0.3, tau=3, batch=4, batch_inner=2, batch_hess=3, delta=0.5, delta_mode="absolute"),
    ],
)
def test_alpha_zero_is_fedavg_bitwise_with_other_switches(algo):
    model, start = mlp()
    xs, ys = blobs([9, 14, 13, 20])
    plain = federation(FedAvg(name="fedavg", beta=0.3, tau=3, batch=4), model, xs, start, ys=ys, active=2)
    meta = federation(algo, model, xs, start, ys=ys, active=2)
    assert weights(run(plain, 3)).tobytes() == weights(run(meta, 3)).tobytes()


# --- MAML, FO-MAML, HF-MAML: tau = 1, r = 1


def net_loss(p, x, y):
    """The network of problems.mlp, written again."""
    scores = F.elu(x @ p[0] + p[1]) @ p[2] + p[3]
    return F.nll_loss(F.log_softmax(scores, 1), y)


def maml(p, tasks, alpha, beta, variant, delta):
    """One step of (FO-, HF-) MAML; tasks are (inner x, inner y, outer x, outer y)."""
    total = [torch.zeros_like(t) for t in p]
    for xi, yi, xo, yo in tasks:
        p = [t.detach().requires_grad_() for t in p]
        g = torch.autograd.grad(net_loss(p, xi, yi), p, create_graph=variant == "exact")
        adapted = [t - alpha * gt for t, gt in zip(p, g, strict=True)]
        if variant == "exact":
            meta = torch.autograd.grad(net_loss(adapted, xo, yo), p)
        else:
            adapted = [t.detach().requires_grad_() for t in adapted]
            meta = u = torch.autograd.grad(net_loss(adapted, xo, yo), adapted)
        if variant == "hf":
            h = delta / torch.cat([t.flatten() for t in u]).norm()
            sides = [[(t + sign * h * ut).detach().requires_grad_() for t, ut in zip(p, u, strict=True)] for sign in (1, -1)]
            up, low = [torch.autograd.grad(net_loss(side, xi, yi), side) for side in sides]
            meta = [ut - alpha * (a - b) / (2 * h) for ut, a, b in zip(u, up, low, strict=True)]
        total = [s + t / len(tasks) for s, t in zip(total, meta, strict=True)]
    return [(t - beta * s).detach() for t, s in zip(p, total, strict=True)]


@every_variant
@every_backend
@pytest.mark.parametrize("batch", [4, 100])
def test_one_step_of_all_users_is_maml(variant, backend, batch):
    alpha, beta, delta = 0.4, 0.3, 1e-2
    model, start = mlp()
    xs, ys = blobs([6, 9, 9, 7])
    options = {} if variant == "fo" else {"hess_batch": "inner"}
    options |= {"delta": delta} if variant == "hf" else {}
    fed = federation(make(variant, alpha=alpha, beta=beta, tau=1, batch=batch, **options), model, xs, start, ys=ys, backend=backend)
    x, y = torch.from_numpy(np.concatenate(xs)), torch.from_numpy(np.concatenate(ys))
    p = list(start.values())
    for k in range(3):
        picks = [drawn(fed, i, k, 1) for i in range(4)]
        tasks = [(x[p_["inner"][0]], y[p_["inner"][0]], x[p_["outer"][0]], y[p_["outer"][0]]) for p_ in picks]
        p = maml(p, tasks, alpha, beta, variant, delta)
    np.testing.assert_allclose(weights(run(fed, 3)), torch.cat([t.flatten() for t in p]).numpy(), rtol=0, atol=1e-12)


def test_the_three_variants_differ_on_that_problem():
    # The test above could not tell exact from FO if the curvature term were lost in the noise.
    model, start = mlp()
    (x,), (y,) = blobs([9])
    full = [direction(make(v, alpha=0.4, beta=1.0, tau=1, batch=9, **o), model, x, start, ys=[y]) for v, o in VARIANT_OPTIONS]
    exact, fo, hf = full
    assert np.abs(exact - fo).max() > 1e-2
    assert 1e-8 < np.abs(exact - hf).max() < 1e-3


VARIANT_OPTIONS = [("exact", {}), ("fo", {}), ("hf", {"delta": 1e-2})]


# --- autodiff of the objective


@every_backend
@pytest.mark.parametrize("hess_batch", ["independent", "inner", "outer"])
def test_exact_direction_is_the_gradient_of_the_objective(hess_batch, backend):
    alpha = 0.5
    model, start = mlp()
    (x,), (y,) = blobs([8])
    algo = PerFedAvg(name="exact", alpha=alpha, beta=1.0, tau=1, batch=8, hess_batch=hess_batch)
    got = direction(algo, model, x, start, ys=[y], backend=backend)
    p = [t.clone().requires_grad_() for t in start.values()]
    xt, yt = torch.from_numpy(x), torch.from_numpy(y)
    g = torch.autograd.grad(net_loss(p, xt, yt), p, create_graph=True)
    objective = net_loss([t - alpha * gt for t, gt in zip(p, g, strict=True)], xt, yt)  # F(w) = f(w - alpha grad f(w))
    want = torch.cat([t.flatten() for t in torch.autograd.grad(objective, p)]).numpy()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("variant", ["exact", "fo"])
@pytest.mark.parametrize("batch", [4, 9])
def test_several_inner_steps(steps, variant, batch):
    alpha = 0.4
    model, start = mlp()
    (x,), (y,) = blobs([9])
    options = {"hess_batch": "inner"} if variant == "exact" else {}
    algo = make(variant, alpha=alpha, beta=1.0, tau=1, batch=batch, inner_steps=steps, **options)
    fed = federation(algo, model, [x], start, ys=[y])
    picks = drawn(fed, 0, 0, 1)
    roles = ["inner", "inner2", "inner3"][:steps]
    assert set(picks) == {"outer", *roles}
    if batch < 9:
        assert len({tuple(picks[role][0]) for role in picks}) == steps + 1  # every inner step has a batch of its own
    p = q = [t.clone().requires_grad_() for t in start.values()]
    for role in roles:
        g = torch.autograd.grad(net_loss(q, torch.from_numpy(x)[picks[role][0]], torch.from_numpy(y)[picks[role][0]]), q, create_graph=True)
        q = [t - alpha * gt for t, gt in zip(q, g, strict=True)]
    outer = net_loss(q, torch.from_numpy(x)[picks["outer"][0]], torch.from_numpy(y)[picks["outer"][0]])
    # Exact: through all steps, down to the start. FO: the gradient where the last step ended.
    want = torch.cat([t.flatten() for t in torch.autograd.grad(outer, p if variant == "exact" else q)]).numpy()
    np.testing.assert_allclose(weights(fed) - weights(run(fed, 1)), want, rtol=0, atol=1e-12)


def test_several_inner_steps_are_refused_where_they_have_no_meaning():
    with pytest.raises(UserError, match="inner_steps=2: 1 for perfedavg_hf"):
        PerFedAvgHF(name="hf", inner_steps=2)
    with pytest.raises(UserError, match="inner_steps=2: 1 unless hess_batch=inner"):
        PerFedAvg(name="exact", inner_steps=2)


# --- the difference quotient


@every_backend
@pytest.mark.parametrize("delta", [1e-3, 0.1, 2.0])
@pytest.mark.parametrize("g", [2.0, -2.0])
def test_hf_error_bound_is_met_with_equality(delta, g, backend):
    # f(w) = |w|^3/6 + g w at w = 0: f' = w|w|/2 + g, f'' = |w|, rho = 1. With g = 2, alpha = .5: the inner step goes to
    # -1, u = f'(-1) = -1/2 + 2 = 1.5; f''(0) = 0, so exact = u. The quotient is
    # [du|du|/2 + g - (-du|du|/2 + g)] / (2d) = d u|u|/2, so HF = u - alpha d u|u|/2: the error is alpha rho d u^2/2.
    common = dict(alpha=0.5, beta=1.0, tau=1, batch=1)
    u = 1.5 if g > 0 else -1.5
    x = np.array([[g]])
    exact = direction(PerFedAvg(name="exact", **common), AbsCubic(), x, [0.0], backend=backend)[0]
    hf = direction(PerFedAvgHF(name="hf", delta=delta, delta_mode="absolute", **common), AbsCubic(), x, [0.0], backend=backend)[0]
    assert exact == pytest.approx(u, abs=1e-14)
    assert abs(hf - exact) == pytest.approx(0.5 * 1.0 * delta * 1.5**2 / 2, rel=1e-9)
    assert hf == pytest.approx(u - 0.5 * delta * u * abs(u) / 2, abs=1e-12)


def test_relative_delta_is_the_norm_of_the_perturbation():
    # The same in two dimensions, g = (3, 4), w = 0, alpha = .1: the inner step goes to (-.3, -.4),
    # u = (3 - .045, 4 - .08) = (2.955, 3.92). With h = delta / ||u|| the quotient is h u|u|/2 in each coordinate.
    delta, u = 0.05, np.array([2.955, 3.92])
    algo = PerFedAvgHF(name="hf", alpha=0.1, beta=1.0, tau=1, batch=1, delta=delta)
    fed = federation(algo, AbsCubic(), [np.array([[3.0, 4.0]])], [0.0, 0.0], backend="loop", task=Spy)
    fed.price()
    fed.task.log.clear()
    run(fed, 1)
    np.testing.assert_allclose(-weights(fed), u - 0.1 * delta / np.linalg.norm(u) * u**2 / 2, rtol=0, atol=1e-12)
    points = [point.numpy() for _, point, _ in fed.task.log]
    assert len(points) == 4
    np.testing.assert_allclose(points[2], delta * u / np.linalg.norm(u), rtol=0, atol=1e-14)
    np.testing.assert_allclose(points[3], -delta * u / np.linalg.norm(u), rtol=0, atol=1e-14)


def test_absolute_delta_is_the_factor_of_the_perturbation():
    algo = PerFedAvgHF(name="hf", alpha=0.1, beta=1.0, tau=1, batch=1, delta=0.05, delta_mode="absolute")
    fed = federation(algo, AbsCubic(), [np.array([[3.0, 4.0]])], [0.0, 0.0], backend="loop", task=Spy)
    fed.price()
    fed.task.log.clear()
    run(fed, 1)
    u = np.array([2.955, 3.92])
    np.testing.assert_allclose(-weights(fed), u - 0.1 * 0.05 * u**2 / 2, rtol=0, atol=1e-12)
    np.testing.assert_allclose(fed.task.log[2][1].numpy(), 0.05 * u, rtol=0, atol=1e-14)


@pytest.mark.parametrize("mode", ["absolute", "relative"])
@pytest.mark.parametrize("delta", [1e-3, 1.0, 100.0])
def test_hf_is_exact_on_quadratics(mode, delta):
    # exact: u - alpha A u with u = A (w - alpha (A w - b)) - b
    A, b = random_quadratics(1, 4, seed=3)
    A, b, w = A[0], b[0], np.array([1.0, -2.0, 0.5, 3.0])
    algo = PerFedAvgHF(name="hf", alpha=0.3, beta=1.0, tau=1, batch=1, delta=delta, delta_mode=mode)
    u = A @ (w - 0.3 * (A @ w - b)) - b
    np.testing.assert_allclose(direction(algo, Quadratic(), quadratic(A, b), w), u - 0.3 * A @ u, rtol=0, atol=1e-11)


@pytest.mark.parametrize("delta", [1e-2, 0.1, 1.0])
def test_hf_error_on_a_quartic(delta):
    # f = w^4/4 at w = 2, alpha = .25: f' = 8, the inner step ends at 0... with alpha = .125 it ends at 1, u = 1.
    # f'' u = 3 w^2 = 12; the quotient is [(2 + d)^3 - (2 - d)^3] / (2d) = 12 + d^2: error delta^2 u^3.
    common = dict(alpha=0.125, beta=1.0, tau=1, batch=1)
    x = np.array([[1.0, 0.0, 0.0]])
    assert direction(PerFedAvg(name="exact", **common), Polynomial(), x, [2.0])[0] == pytest.approx(1 - 0.125 * 12, abs=1e-14)
    for mode in ("absolute", "relative"):  # |u| = 1: the two are one
        hf = direction(PerFedAvgHF(name="hf", delta=delta, delta_mode=mode, **common), Polynomial(), x, [2.0])[0]
        assert hf == pytest.approx(1 - 0.125 * (12 + delta**2), abs=1e-11)


def test_measured_hf_error_is_relative_to_the_curvature_term():
    # The same quartic before round 1: |quotient - f'' u| / |f'' u| = delta^2 / 12.
    algo = PerFedAvgHF(name="hf", alpha=0.125, tau=1, batch=1, delta=0.3)
    fed = federation(algo, Polynomial(), [np.array([[1.0, 0.0, 0.0]])], [2.0])
    assert fed.diagnose()[0]["hf_error"] == pytest.approx(0.09 / 12, rel=1e-10)


def test_hf_where_the_gradient_vanishes():
    # w = 0, f = w^2/2: u = 0 has no direction; the step must be 0, not 0/0.
    algo = PerFedAvgHF(name="hf", alpha=0.1, beta=1.0, tau=1, batch=1)
    for dtype in (torch.float32, torch.float64):
        assert direction(algo, Quadratic(), quadratic(np.eye(1), [0.0]), [0.0], dtype=dtype)[0] == 0.0


@every_backend
@pytest.mark.parametrize("hess_batch", ["independent", "inner", "outer"])
def test_both_gradients_of_the_quotient_read_one_batch(hess_batch, backend):
    # f_z = w'A w/2 - z'w: gradients A w - z differ between examples by constants, so that the noise of the quotient
    # cancels when both sides read one batch, and is (z - z')/(2 delta), hundreds here, when they read two.
    A, _ = random_quadratics(1, 3, seed=5)
    rng = np.random.default_rng(1)
    z, w = rng.normal(size=(6, 3)), np.array([1.0, 2.0, -1.0])
    x = np.concatenate([quadratic(A[0], zi) for zi in z])
    algo = PerFedAvgHF(name="hf", alpha=0.3, beta=1.0, tau=1, batch=1, hess_batch=hess_batch)
    fed = federation(algo, Quadratic(), [x], w, backend=backend, seeds=range(8))
    run(fed, 1)
    for s in range(8):
        picks = drawn(fed, 0, 0, 1, s)
        inner, outer = z[picks["inner"][0][0]], z[picks["outer"][0][0]]
        u = A[0] @ (w - 0.3 * (A[0] @ w - inner)) - outer
        np.testing.assert_allclose(w - weights(fed, s), u - 0.3 * A[0] @ u, rtol=0, atol=1e-10)


# --- fixed points on quadratics


@every_variant
@pytest.mark.parametrize("tau", [1, 6])
def test_fixed_points_on_quadratics(variant, tau):
    # P_i = I - alpha A_i. The direction of user i is M_i (w - x_i*), M_i = A_i P_i^2 (exact, HF) or A_i P_i (FO), so tau
    # steps multiply w - x_i* by (I - beta M_i)^tau and the fixed point is (sum Q_i)^-1 sum Q_i x_i*.
    n, d, alpha, beta = 5, 4, 0.2, 1.0 if tau == 1 else 0.5
    A, b = random_quadratics(n, d)
    fed = federation(make(variant, alpha=alpha, beta=beta, tau=tau, batch=1), Quadratic(), list(map(quadratic, A, b)), [3.0] * d)
    got = weights(run(fed, 50 if tau == 1 else 25))
    best = np.stack([np.linalg.solve(Ai, bi) for Ai, bi in zip(A, b, strict=True)])
    P = np.eye(d) - alpha * A
    M = A @ P if variant == "fo" else A @ P @ P
    Q = np.stack([np.eye(d) - np.linalg.matrix_power(np.eye(d) - beta * Mi, tau) for Mi in M])
    np.testing.assert_allclose(got, np.linalg.solve(Q.sum(0), np.einsum("nij,nj->i", Q, best)), rtol=0, atol=1e-10)
    minimiser = np.linalg.solve((A @ P @ P).mean(0), np.einsum("nij,nj->i", P @ P, b) / n)  # w* = M^-1 c
    fo_root = np.linalg.solve((A @ P).mean(0), np.einsum("nij,nj->i", P, b) / n)
    assert np.linalg.norm(minimiser - fo_root) > 0.05  # the error of FO that does not vanish
    if tau == 1:
        np.testing.assert_allclose(got, fo_root if variant == "fo" else minimiser, rtol=0, atol=1e-10)
    else:
        assert np.linalg.norm(got - minimiser) > 1e-2  # the drift of several local steps


@every_variant
@pytest.mark.parametrize("active", [1, 4])
def test_identical_users(variant, active):
    # All local iterates coincide, so r has no effect: K rounds of tau steps are K tau steps,
    # w = x* + (I - beta M)^(K tau) (w_0 - x*).
    alpha, beta, w = 0.2, 0.3, np.array([1.0, -2.0, 0.5])
    A, b = random_quadratics(1, 3, seed=2)
    A, b = A[0], b[0]
    algo = make(variant, alpha=alpha, beta=beta, tau=2, batch=1)
    fed = run(federation(algo, Quadratic(), [quadratic(A, b)] * 4, w, active=active), 3)
    P, best = np.eye(3) - alpha * A, np.linalg.solve(A, b)
    M = A @ P if variant == "fo" else A @ P @ P
    np.testing.assert_allclose(weights(fed), best + np.linalg.matrix_power(np.eye(3) - beta * M, 6) @ (w - best), rtol=0, atol=1e-11)


# --- all batches enumerated


# Loss of example z: a w^4/4 + h w^2/2 - c w.  g_z(w) = a w^3 + h w - c,  H_z(w) = 3 a w^2 + h.
EXAMPLES = {
    3: np.array([[0.3, 1.0, 0.7], [0.8, 0.2, -0.5], [0.1, 1.9, 1.1]]),
    4: np.array([[0.3, 1.0, 0.7], [0.8, 0.2, -0.5], [0.1, 1.9, 1.1], [0.5, -0.4, 0.2]]),
}
POINT, ALPHA, DELTA = 0.9, 0.25, 0.4


def moments(m, size):
    """Closed forms of E[dir], and MSE around grad F, over uniform independent subsets B, B', B'' of one size.

    u depends on (B, B') and the curvature on B'' alone, and the quotient of a cubic gradient is exactly
    H u + a (delta')^2 u^3, with delta' = delta (absolute): all moments factor.
    """
    a, h, c = EXAMPLES[m].T
    pick = [list(s) for s in combinations(range(m), size)]
    w = POINT
    mean = [(a[s].mean(), h[s].mean(), c[s].mean()) for s in pick]
    u = np.array([A * v**3 + H * v - C for Ai, Hi, Ci in mean for A, H, C in mean for v in [w - ALPHA * (Ai * w**3 + Hi * w - Ci)]])
    quartic = np.array([A for A, _, _ in mean])
    factor = 1 - ALPHA * np.array([3 * A * w**2 + H for A, H, _ in mean])
    A, H, C = a.mean(), h.mean(), c.mean()
    v = w - ALPHA * (A * w**3 + H * w - C)
    truth = (1 - ALPHA * (3 * A * w**2 + H)) * (A * v**3 + H * v - C)  # grad F(w) = (1 - alpha f''(w)) f'(w - alpha f'(w))
    k = ALPHA * DELTA**2
    first = {
        "fo": u.mean(),
        "exact": factor.mean() * u.mean(),
        "hf": factor.mean() * u.mean() - k * quartic.mean() * (u**3).mean(),
    }
    second = {
        "fo": (u**2).mean(),
        "exact": (factor**2).mean() * (u**2).mean(),
        "hf": (factor**2).mean() * (u**2).mean()
        - 2 * k * (factor * quartic).mean() * (u**4).mean()
        + k**2 * (quartic**2).mean() * (u**6).mean(),
    }
    return truth, first, {name: second[name] - 2 * truth * first[name] + truth**2 for name in first}


def enumerated(variant, m, size):
    """The direction of the code for every triple (B, B', B'') of subsets of one size."""
    options = {"delta": DELTA, "delta_mode": "absolute"} if variant == "hf" else {}
    fed = federation(make(variant, alpha=ALPHA, beta=1.0, tau=1, batch=size, **options), Polynomial(), [EXAMPLES[m]], [POINT])
    subsets = list(combinations(range(m), size))
    w = {"w": torch.tensor([POINT], dtype=torch.float64)}
    out = []
    for triple in product(subsets, repeat=3):
        batches = {role: batch_of(fed, s) for role, s in zip(("inner", "outer", "hess"), triple, strict=True)}
        out.append(float(fed.algo.meta_gradient(fed.task, w, batches)["w"][0]))
    return np.array(out)


@every_variant
@pytest.mark.parametrize("m, size", [(3, 1), (4, 1), (3, 2), (3, 3), (4, 4)])
def test_all_batches_enumerated(variant, m, size):
    truth, first, mse = moments(m, size)
    got = enumerated(variant, m, size)
    assert got.mean() == pytest.approx(first[variant], abs=1e-12)
    assert got.mean() - truth == pytest.approx(first[variant] - truth, abs=1e-12)
    assert ((got - truth) ** 2).mean() == pytest.approx(mse[variant], abs=1e-12)


def test_the_bias_of_fo_does_not_vanish_with_the_batch():
    # Exact: the bias falls with D and is 0 on all the data. FO keeps alpha f''(w) f'(w - alpha f'(w)), HF alpha delta^2 a u^3.
    truth, _, _ = moments(3, 3)
    bias = {v: [enumerated(v, 3, size).mean() - truth for size in (1, 2, 3)] for v in VARIANTS}
    # From D = 1 to 2 of 3 the variance of the inner gradient, and to leading order the bias, falls fourfold.
    assert 3 < bias["exact"][0] / bias["exact"][1] < 5 and abs(bias["exact"][1]) > 1e-4
    assert abs(bias["exact"][2]) < 1e-14
    # a, h, c = .4, 31/30, 13/30: f'(.9) = .2916 + .93 - .43333 = .788267, v = .9 - .197067 = .702933,
    # u = f'(v) = .4 v^3 + 31/30 v - 13/30 = .4319..., f''(.9) = .972 + 31/30 = 2.005333.
    v = 0.9 - 0.25 * (0.2916 + 0.93 - 13 / 30)
    u = 0.4 * v**3 + 31 / 30 * v - 13 / 30
    assert bias["fo"][2] == pytest.approx(0.25 * (0.972 + 31 / 30) * u, abs=1e-13)
    assert all(b > 0.15 for b in bias["fo"])
    assert bias["hf"][2] == pytest.approx(-0.25 * 0.4**2 * 0.4 * u**3, abs=1e-13)


def test_batches_of_the_engine_are_uniform_and_independent_triples():
    # What ties the enumeration to training: 27 triples of D = 1 of m = 3, 27,000 draws, 1,000 each. Chi-square with 26
    # degrees of freedom: mean 26, standard deviation 7.2; 70 is six of them. Seeds are fixed: no flakiness.
    fed = federation(make("exact", batch=1), Polynomial(), [EXAMPLES[3]], [POINT])
    index, _ = fed.batches(Lanes(np.array([0]), np.array([0])), 0, 27_000)
    triple = sum(index[role][0, :, 0] * scale for role, scale in (("inner", 1), ("outer", 3), ("hess", 9)))
    count = np.bincount(triple.numpy(), minlength=27)
    assert len(count) == 27 and ((count - 1000) ** 2 / 1000).sum() < 70


# --- batches


@pytest.mark.parametrize("m", [30, 200])
def test_batches_independent_disjoint_shared(m):
    sizes = dict(batch_inner=7, batch_outer=5, batch_hess=6)
    model, start = mlp()
    xs, ys = blobs([3, m])  # user 1 owns positions 3 .. m + 2
    picks = {}
    for kind in ("independent", "disjoint", "shared"):
        algo = PerFedAvg(name="exact", batches=kind, batch=9, **sizes)
        picks[kind] = drawn(federation(algo, model, xs, start, ys=ys), 1, 2, 50)
    plain = drawn(federation(FedAvg(name="fedavg", batch=5), model, xs, start, ys=ys), 1, 2, 50)["outer"]
    for kind, roles in picks.items():
        for t in range(50):
            sets = {role: roles[role][t] for role in ("inner", "outer", "hess")}
            assert {role: len(s) for role, s in sets.items()} == {"inner": 7, "outer": 5, "hess": 6}
            assert all(len(set(s)) == len(s) and s.min() >= 3 and s.max() < m + 3 for s in sets.values())
            np.testing.assert_array_equal(sets["outer"], plain[t])  # all methods and kinds read the batches of FedAvg
            together = set(sets["inner"]) | set(sets["outer"]) | set(sets["hess"])
            if kind == "disjoint":
                assert len(together) == 18
            if kind == "shared":
                assert len(together) == 7  # the shorter ones are the beginning of the longest
                np.testing.assert_array_equal(sets["outer"], sets["inner"][:5])
                np.testing.assert_array_equal(sets["hess"], sets["inner"][:6])
    overlaps = [len(set(a) & set(b)) for a, b in zip(picks["independent"]["inner"], picks["independent"]["outer"], strict=True)]
    # Mean overlap of independent draws: 7 5 / m, standard deviation about its root (less): within 5 of them over 50 steps.
    assert abs(np.mean(overlaps) - 35 / m) < 5 * np.sqrt(35 / m / 50)


@pytest.mark.parametrize("batches", ["independent", "disjoint", "shared"])
@pytest.mark.parametrize("variant, hess_batch", [("fo", "independent"), *product(("exact", "hf"), ("independent", "inner", "outer"))])
def test_every_gradient_reads_the_batch_of_its_role(variant, batches, hess_batch):
    options = {} if variant == "fo" else {"hess_batch": hess_batch, "batch_hess": 4 if hess_batch == "independent" else None}
    algo = make(variant, alpha=0.1, beta=0.1, tau=2, batch_inner=2, batch_outer=3, batches=batches, **options)
    model, start = mlp()
    xs, ys = blobs([12])
    fed = federation(algo, model, xs, start, ys=ys, backend="loop", task=Spy)
    fed.price()
    fed.task.log.clear()
    run(fed, 1)
    picks = drawn(fed, 0, 0, 2)
    assert [len(picks[role][0]) for role in ("inner", "outer")] == [2, 3]
    want = []
    for t in range(2):
        inner, outer = picks["inner"][t].tolist(), picks["outer"][t].tolist()
        want += [("grad", inner), ("grad", outer)]
        if variant != "fo":
            third = {"inner": inner, "outer": outer, "independent": picks["hess"][t].tolist() if hess_batch == "independent" else None}
            want += {"exact": [("hvp", third[hess_batch])], "hf": [("grad", third[hess_batch])] * 2}[variant]
            assert len(third[hess_batch]) == {"independent": 4, "inner": 2, "outer": 3}[hess_batch]
    assert [(what, index) for what, _, index in fed.task.log] == want


@every_variant
def test_curvature_is_taken_where_the_step_starts(variant):
    # HF: the two points are symmetric about w; exact: H(w), not H at the adapted point.
    model, start = mlp()
    xs, ys = blobs([12])
    fed = federation(make(variant, alpha=0.3, beta=0.1, tau=1, batch=4), model, xs, start, ys=ys, backend="loop", task=Spy)
    fed.price()
    fed.task.log.clear()
    w = weights(fed)
    run(fed, 1)
    points = [point.numpy() for _, point, _ in fed.task.log]
    np.testing.assert_array_equal(points[0], w)
    assert np.abs(points[1] - w).max() > 1e-3
    if variant == "exact":
        np.testing.assert_array_equal(points[2], w)
    if variant == "hf":
        np.testing.assert_allclose((points[2] + points[3]) / 2, w, rtol=0, atol=1e-15)


def test_batches_are_fresh_for_every_seed_user_round_and_step():
    # 5 of 200 examples, in order: two equal draws among these 16 have a probability below 1e-8.
    fed = federation(make("hf", batch=5), Polynomial(), [np.zeros((200, 3))] * 2, [0.0], seeds=(0, 1))
    batches = [drawn(fed, user, k, 2, s) for s, user, k in product((0, 1), (0, 1), (0, 3))]
    for role in ("inner", "outer", "hess"):
        assert len({tuple(index % 200) for batch in batches for index in batch[role]}) == 16


# --- step sizes


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inverse_root_schedule(backend, dtype):
    # beta_k = min(beta, c / sqrt(tau (k + 1))) with c = beta sqrt(100 tau): beta up to k = 99, then beta 10 / sqrt(k + 1).
    # On f = -w (gradient -1 everywhere) a round of tau steps adds tau beta_k.
    algo = PerFedAvgFO(name="fo", alpha=0.1, beta=0.5, tau=2, batch=1, schedule="inverse_root")
    fed = federation(algo, Polynomial(), [np.array([[0.0, 0.0, 1.0]])], [0.0], backend=backend, dtype=dtype)
    for k, beta in [(0, 0.5), (1, 0.5), (98, 0.5), (99, 0.5), (100, 0.49751859510499464), (399, 0.25), (9999, 0.05)]:
        fed.k = k
        before = weights(fed)[0]
        run(fed, 1)
        assert weights(fed)[0] - before == pytest.approx(2 * beta, abs=1e-6 if dtype is torch.float32 else 1e-13)
    assert fed.state.server["w"]["w"].dtype is dtype


# --- remark 4.7


class AtStep(Federation):
    """t_k is what the test says."""

    t_k = 0

    def info(self, lanes, k):
        fields = super().info(lanes, k)
        return {**fields, "t_k": torch.full_like(fields["t_k"], self.t_k)}


@every_backend
@every_variant
def test_extra_iterate_enumerated_over_t_k(variant, backend):
    # f_i = w^2/2 - c_i w, c = 1, 5: the direction is m (w - c_i) with m = (1 - alpha)^2, for FO m = 1 - alpha. From w, t
    # steps give c_i + q^t (w - c_i), q = 1 - beta m, so the mean iterate is wbar_t = 3 + q^t (w - 3); t_k uniform on
    # 0 .. tau-1 has the mean (1/tau) sum_t wbar_t.
    tau, alpha, beta = 4, 0.2, 0.3
    q = 1 - beta * (1 - alpha) ** (1 if variant == "fo" else 2)
    algo = make(variant, alpha=alpha, beta=beta, tau=tau, batch=1, extra_iterate=True)
    seen = []
    for t in range(tau):
        xs = [quadratic(np.eye(1), [c]) for c in (1.0, 5.0)]
        fed = federation(algo, Quadratic(), xs, [10.0], backend=backend, kind=AtStep)
        fed.t_k = t
        assert fed.state.server["extra"]["w"][0, 0] == 10.0  # before round 1 it is the initial model
        run(fed, 2)
        after = 3 + q**tau * 7  # the server's model after round 1, which round 2 starts from
        assert weights(fed)[0] == pytest.approx(3 + q ** (2 * tau) * 7, abs=1e-12)
        models = fed.algo.candidates({"w": fed.state.server["w"], "extra": fed.state.server["extra"]}, ())
        assert list(models) == ["global", "iterate"]
        seen.append(float(models["iterate"]["w"][0, 0]))
        assert seen[-1] == pytest.approx(3 + q**t * (after - 3), abs=1e-12)
        # d = 1: two users send w, and the iterate unless it is what the server sent.
        assert fed.costs[0].floats_up == 2 * 2 * (2 if t > 0 else 1)
        assert fed.costs[0].floats_down == 2 * 2
    assert np.mean(seen) == pytest.approx(np.mean([3 + q**t * (3 + q**tau * 7 - 3) for t in range(tau)]), abs=1e-12)


def test_t_k_is_common_to_a_round_and_uniform():
    fed = federation(make("fo", tau=4, batch=1), Polynomial(), [EXAMPLES[3]] * 5, [0.0], seeds=(0, 1))
    lanes = Lanes(np.repeat([0, 1], 5), np.tile(np.arange(5), 2))
    t_k = np.stack([fed.info(lanes, k)["t_k"].numpy().reshape(2, 5) for k in range(400)])
    assert (t_k == t_k[:, :, :1]).all()
    # 800 draws, 200 of each value, standard deviation sqrt(800 3/16) = 12.2: five of them.
    count = np.bincount(t_k[:, :, 0].ravel(), minlength=4)
    assert len(count) == 4 and np.abs(count - 200).max() < 62


# --- COIN


@every_backend
def test_b15_fo_steps_from_the_weights_before_adaptation(backend):
    # One example of label 0, W = (0, 0), p = (.5, .5): g = (-.5, .5). The inner step with alpha = ln 3 gives
    # (ln 3/2, -ln 3/2), softmax (3/4, 1/4), g = (-1/4, 1/4). From (0, 0): W = (.25, -.25).
    # From the adapted weights it would be (ln 3/2 + .25, ...) = (.799306, -.799306).
    algo = PerFedAvgFO(name="fo", alpha=float(np.log(3)), beta=1.0, tau=1, batch=40)
    fed = run(federation(algo, coin(), [COIN_X], COIN_START, backend=backend), 1)
    np.testing.assert_allclose(weights(fed), [0.25, -0.25], rtol=0, atol=1e-15)


def test_coin_exact():
    # The same with H(W) = (diag p - p p') = 1/4 [[1, -1], [-1, 1]] at (0, 0): H u = 1/2 u for u = (-1/4, 1/4), so
    # dir = (1 - ln 3 / 2) u and W = .25 (1 - ln 3/2) (1, -1).
    algo = PerFedAvg(name="exact", alpha=float(np.log(3)), beta=1.0, tau=1, batch=40)
    fed = run(federation(algo, coin(), [COIN_X], COIN_START), 1)
    np.testing.assert_allclose(weights(fed), 0.25 * (1 - np.log(3) / 2) * np.array([1, -1]), rtol=0, atol=1e-15)


# --- costs


# Gradients and Hessian-vector products per local step; numbers down and up per active user and round (d = 31 here).
COSTS = [
    (FedAvg(name="fedavg", tau=3, batch=4), 1, 0, 31, 31),
    (PerFedAvgFO(name="fo", tau=3, batch=4), 2, 0, 31, 31),
    (PerFedAvgHF(name="hf", tau=3, batch=4), 4, 0, 31, 31),
    (PerFedAvg(name="exact", tau=3, batch=4), 2, 1, 31, 31),
    (PerFedAvg(name="exact", tau=3, batch=4, inner_steps=3, hess_batch="inner"), 4, 3, 31, 31),
]


@every_backend
@pytest.mark.parametrize("algo, grads, hvps, down, up", COSTS)
def test_costs(algo, grads, hvps, down, up, backend):
    # 3 -> 4 -> 3: 3 4 + 4 + 4 3 + 3 = 31 parameters. 3 rounds, 2 of 6 users active, 3 steps: 18 steps, 6 user rounds.
    model, start = mlp()
    xs, ys = blobs([9, 10, 11, 12, 9, 9])
    fed = federation(algo, model, xs, start, ys=ys, active=2, backend=backend, seeds=(0, 1))
    fed.price()
    fed.task.calls.clear()
    run(fed, 3)
    for cost in fed.costs:
        assert (cost.grads, cost.hvps, cost.losses) == (18 * grads, 18 * hvps, 0)
        assert (cost.floats_down, cost.floats_up) == (6 * down, 6 * up)
        assert (cost.steps, cost.user_rounds) == (18, 6)
    # vmap calls the task once for all lanes of a step: 9 steps in 3 rounds. The loop calls it for each: 2 seeds x 18.
    calls = 9 if backend == "vmap" else 36
    assert (fed.task.calls["grads"], fed.task.calls["hvps"]) == (calls * grads, calls * hvps)
    assert fed.step_calls == calls
    np.testing.assert_array_equal(fed.times_sampled.sum(1), [6, 6])


def test_counting_does_not_disturb_training():
    model, start = mlp()
    xs, ys = blobs([9, 10])
    one, two = (federation(make("hf", tau=2, batch=4, beta=0.3), model, xs, start, ys=ys) for _ in range(2))
    two.price()
    run(one, 2)
    for _ in range(2):
        two.diagnose()
        two.round()
    assert weights(one).tobytes() == weights(two).tobytes()
    assert one.costs == two.costs


@pytest.mark.parametrize("variant", ["exact", "hf"])
@pytest.mark.parametrize("hess_batch", ["inner", "outer"])
def test_a_size_that_nothing_reads_is_refused(variant, hess_batch):
    with pytest.raises(UserError, match=f"^batch_hess=7: null with hess_batch={hess_batch}"):
        make(variant, hess_batch=hess_batch, batch_hess=7)


def test_the_least_delta():
    make("hf", delta=1e-5).check("float32")
    with pytest.raises(UserError, match="^delta=9e-06: at least 1e-05 in float32"):
        make("hf", delta=9e-6).check("float32")
    make("hf", delta=9e-6).check("float64")


@every_variant
def test_what_theory_warns_of(variant):
    facts = Facts(n=10, active=2, rounds=5, smoothness=200.0)
    algo = make(variant, alpha=0.01)
    assert algo.notes(facts) == [
        "warning: alpha*L = 2 with L >= 200 at w_0, and the paper assumes alpha <= 1/L: an inner step may overshoot"
    ]
    assert algo.notes(facts._replace(smoothness=100.0)) == []  # alpha = 1/L is allowed
    bent = algo.notes(facts._replace(smoothness=1.0, kinks=("relu",)))
    assert [line.partition(":")[2].partition(":")[0] for line in bent] == ([" the model calls relu"] if variant == "hf" else [])
