"""ARUBA: b and G against the algorithm written again user by user, closed forms, limits, refinement."""

from __future__ import annotations

import numpy as np
import problems
import small
import torch
from problems import Quadratic, blobs, mlp, quadratic, random_quadratics, run, weights

from perfed import tree
from perfed.evaluate import Protocol, adapted_models

from . import FIXED_POINT, cannot, check, mutant

NAME = "aruba"
PROTOCOL = Protocol(label="clean", source="train", support=None, batch=None, repeats=1, steps=(0, 1), lr=None)


def aruba(**fields):
    return small.algorithm(NAME, **fields)


def gap(a, b) -> float:
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


def part(fed, name, s=0):
    """b or G of a formula problem: [d], or a number."""
    value = fed.state.server[name]
    return (value["w"] if isinstance(value, dict) else value)[s].numpy()


def written_again(A, b, w, cohorts, sizes=None, *, beta, tau, zeta=1.0, p=1.0, isotropic=False, backwards=False):
    """Algorithm 2, users one after the other; the user's loss is w'A_i w/2 - b_i'w. Returns phi, b, G."""
    eps = beta * zeta
    B, G, t = np.full_like(w, eps**2), np.full_like(w, zeta**2), 1
    for cohort in cohorts:
        eta = np.full_like(w, np.sqrt(B.sum() / G.sum())) if isotropic else np.sqrt(B / G)
        ends = []
        for i in cohort[::-1] if backwards else cohort:
            th, s = w.copy(), 0.0
            for _ in range(tau):
                g = A[i] @ th - b[i]
                th, s = th - eta * g, s + g * g
            ends.append(th)
            B = B + (th - w) ** 2 / 2 + eps**2 / (t + 1) ** p
            G = G + s + zeta**2 / (t + 1) ** p
            t += 1
        w = np.average(ends, axis=0, weights=None if sizes is None else np.asarray(sizes)[cohort])
    return (w, B.mean(), G.mean()) if isotropic else (w, B, G)


def _again(backend, seed=0, **fields):
    def measure():
        A, b = random_quadratics(5, 3, seed=2)
        start = np.array([1.0, -2.0, 0.5])
        algo = aruba(beta=0.2, tau=3, **fields)
        fed = problems.federation(algo, Quadratic(), list(map(quadratic, A, b)), start, active=3, seeds=(seed,), backend=backend)
        cohorts = [fed.cohorts(k)[0] for k in range(4)]
        run(fed, 4)
        found = weights(fed), part(fed, "b"), part(fed, "G")
        return max(
            gap(f, want)
            for backwards in (False, True)
            for f, want in zip(found, written_again(A, b, start, cohorts, beta=0.2, tau=3, backwards=backwards, **fields), strict=True)
        )

    return measure


check(NAME, "b, G, phi over 4 rounds, user by user, in either order", tolerance=1e-13)(_again("vmap", zeta=0.7, p=0.5))
check(NAME, "the same, p=1", tolerance=1e-13)(_again("loop"))
check(NAME, "the same, isotropic", tolerance=1e-13)(_again("vmap", isotropic=True, zeta=0.7, p=2.0))


@check(NAME, "aggregation=samples weighs phi alone", tolerance=1e-13)
def weighted():
    # Users repeat their example: the mean loss stays, only m_i differs.
    A, b = random_quadratics(3, 2, seed=5)
    xs = [np.repeat(quadratic(A[i], b[i]), i + 1, 0) for i in range(3)]
    fed = run(problems.federation(aruba(beta=0.2, tau=2, aggregation="samples"), Quadratic(), xs, [1.0, -1.0]), 3)
    want = written_again(A, b, np.array([1.0, -1.0]), [np.arange(3)] * 3, [1, 2, 3], beta=0.2, tau=2)
    return max(gap(weights(fed), want[0]), gap(part(fed, "b"), want[1]), gap(part(fed, "G"), want[2]))


@check(NAME, "one round, one user: closed form of b and G", tolerance=1e-14)
def one_round():
    # f = h w^2/2 from w: th = (1 - lr h)^tau w, the gradients are h (1 - lr h)^j w, a geometric series of squares;
    # t = 1: each term is halved.
    h, lr, tau, zeta = np.array([0.5, 2.0]), 0.3, 4, 0.8
    w, keep = np.array([1.5, -2.0]), 1 - lr * np.array([0.5, 2.0])
    fed = run(problems.federation(aruba(beta=lr, tau=tau, zeta=zeta), Quadratic(), [quadratic(np.diag(h), [0, 0])], w), 1)
    B = 1.5 * (lr * zeta) ** 2 + ((1 - keep**tau) * w) ** 2 / 2
    G = 1.5 * zeta**2 + h**2 * w**2 * (1 - keep ** (2 * tau)) / (1 - keep**2)
    return max(gap(part(fed, "b"), B), gap(part(fed, "G"), G), gap(weights(fed), keep**tau * w))


@check(NAME, "zero gradients keep eta at beta", tolerance=1e-12)
def zero_gradients():
    worst = 0.0
    for fields in ({}, {"isotropic": True}, {"p": 0.5, "zeta": 0.1}):
        fed = problems.federation(aruba(beta=0.3, **fields), Quadratic(), [quadratic(np.zeros((2, 2)), [0, 0])] * 5, [1.0, 2.0], active=3)
        for _ in range(30):
            fed.round()
            eta = tree.leaves(fed.algo.broadcast(tree.at(fed.state.server, 0))["eta"])[0]
            worst = max(worst, gap(eta.numpy(), 0.3), gap(weights(fed), [1.0, 2.0]))
    return worst


def network(algo, **options):
    model, start = mlp()
    xs, ys = blobs([11, 20, 16, 9])
    return problems.federation(algo, model, xs, start, ys=ys, **options)


@check(NAME, "b and G held: FedAvg with step beta, bitwise (beta = 1/2)", tolerance=0)
def frozen():
    # With beta = .5 the root of b/G is .5 exactly.
    worst = 0.0
    for backend in ("vmap", "loop"):
        for fields in ({}, {"isotropic": True}):
            fed = network(aruba(beta=0.5, batch=5, **fields), active=2, backend=backend)
            plain = network(small.algorithm("fedavg", beta=0.5, batch=5), active=2, backend=backend)
            held = {k: fed.state.server[k] for k in ("b", "G")}
            for _ in range(3):
                fed.round(), plain.round()
                fed.state = fed.state._replace(server={**fed.state.server, **held})
                worst = max(worst, gap(weights(fed), weights(plain)))
    return worst


@check(NAME, "isotropic with equal coordinates is per-coordinate", tolerance=1e-14)
def equal_coordinates():
    xs = [quadratic(h * np.eye(3), [c] * 3) for h, c in ((0.5, 1.0), (1.5, -2.0), (1.0, 0.3))]
    one, two = (run(problems.federation(aruba(beta=0.3, isotropic=iso), Quadratic(), xs, [2.0] * 3, active=2), 4) for iso in (True, False))
    return max(gap(weights(one), weights(two)), *(gap(part(one, k), part(two, k)) for k in ("b", "G")))


@check(NAME, "one coordinate: isotropic is per-coordinate", tolerance=1e-14)
def one_coordinate():
    xs = [quadratic(h * np.eye(1), [c]) for h, c in ((0.5, 1.0), (1.5, -2.0))]
    one, two = (run(problems.federation(aruba(beta=0.3, isotropic=iso), Quadratic(), xs, [2.0]), 4) for iso in (True, False))
    return gap(weights(one), weights(two))


@check(NAME, "eta stays positive on a network", tolerance=0)
def positive():
    least = np.inf
    for fields in ({}, {"isotropic": True}):
        fed = network(aruba(beta=0.3, batch=5, **fields), active=2)
        for _ in range(10):
            fed.round()
            least = min(least, *(float(t.min()) for t in tree.leaves(fed.algo.broadcast(tree.at(fed.state.server, 0))["eta"])))
    return 0.0 if least > 0 else 1.0


@check(NAME, "tau = 1, all users, diagonal Hessians: phi ends at the minimiser of the mean loss", tolerance=1e-10, group=FIXED_POINT)
def minimiser():
    # phi - eta o mean g = phi where the mean gradient is 0, whatever eta. eta keeps changing and falls like k^(-1/4) at most.
    rng = np.random.default_rng(1)
    h, b = rng.uniform(0.5, 2, (4, 3)), rng.normal(size=(4, 3))
    fed = problems.federation(
        aruba(beta=0.4, tau=1), Quadratic(), [quadratic(np.diag(hi), bi) for hi, bi in zip(h, b, strict=True)], [3.0] * 3
    )
    best = b.sum(0) / h.sum(0)
    return gap(weights(run(fed, 400)), best), 0.0


def refined_by_hand(fed, A, b, count, c, isotropic=False):
    """Steps of size sqrt(b/G') on the user's quadratic, G' = G + c (squared gradients so far)."""
    w, B, G = weights(fed), part(fed, "b").copy(), part(fed, "G").copy()
    for _ in range(count):
        g = A @ w - b
        w = w - np.sqrt(B / G) * g
        G = G + c * (np.mean(g * g) if isotropic else g * g)
    return w


def _refine(c, **fields):
    def measure():
        A, b = random_quadratics(3, 3, seed=8)
        algo = aruba(beta=0.2, tau=2, refine_c=c, **fields)
        fed = run(problems.federation(algo, Quadratic(), list(map(quadratic, A, b)), [1.0, -2.0, 0.5], active=2), 2)
        return max(
            gap(adapted_models(fed, PROTOCOL, 0, i, 3)["global"]["w"].numpy(), refined_by_hand(fed, A[i], b[i], 3, c or 0, **fields))
            for i in range(3)
        )

    return measure


check(NAME, "refinement: three steps of the learned size", tolerance=1e-14)(_refine(None))
check(NAME, "ARUBA++: G' grows after each step", tolerance=1e-14)(_refine(0.7))
check(NAME, "ARUBA++, isotropic", tolerance=1e-14)(_refine(0.7, isotropic=True))


@check(NAME, "ARUBA++ with c = 0 is ARUBA, bitwise", tolerance=0)
def no_growth():
    A, b = random_quadratics(3, 3, seed=8)
    out = []
    for c in (None, 0.0):
        algo = aruba(beta=0.2, tau=2, refine_c=c)
        fed = run(problems.federation(algo, Quadratic(), list(map(quadratic, A, b)), [1.0, -2.0, 0.5], active=2), 2)
        out.append(torch.stack([adapted_models(fed, PROTOCOL, 0, i, 3)["global"]["w"] for i in range(3)]).numpy())
    return gap(*out)


mutant(
    NAME,
    "local step uphill",
    "th = tree.sub(local.th, self.scaled(local.eta, g))",
    "th = tree.axpy(1.0, local.th, self.scaled(local.eta, g))",
)
mutant(NAME, "sum of gradients without the square", "tree.map(torch.square, g)", "tree.map(torch.abs, g)")
mutant(NAME, "only the last squared gradient", "tree.map(torch.add, local.s, self.squares(g))", "self.squares(g)")
mutant(NAME, "distance from 0, not from phi", "th - phi, uploads", "th - 0 * phi, uploads")
mutant(NAME, "b without the half", "bi + v / 2", "bi + v")
mutant(NAME, "eta without the root", "(bi / Gi).sqrt()", "bi / Gi")
mutant(NAME, "eta upside down", "(bi / Gi).sqrt()", "(Gi / bi).sqrt()")
mutant(NAME, "t counts rounds", 'server["t"] + reports', 'server["t"] + 1')
mutant(NAME, "all users of a round share one t", "1 + torch.arange(reports, ", "1 + 0 * torch.arange(reports, ")
mutant(NAME, "decay from t, not t + 1", 'after = server["t"] + 1 +', 'after = server["t"] +')
mutant(NAME, "G gathers the mean over users", "Gi + s.sum(0)", "Gi + s.mean(0)")
mutant(NAME, "zeta in the place of eps", "(self.eps**2 * decay)", "(self.zeta**2 * decay)")
mutant(NAME, "p ignored", "** -self.p", "** -1.0")
mutant(NAME, "eps without zeta", "return self.beta * self.zeta", "return self.beta")
mutant(
    NAME,
    "G' grows before the step",
    "self.scaled(step_of(carry.b, carry.G), g)",
    "self.scaled(step_of(carry.b, tree.axpy(self.refine_c or 0.0, self.squares(g), carry.G)), g)",
)
mutant(NAME, "isotropic: sum of squares beside means", "/ tree.numel(x)", "/ 1")
cannot(
    NAME, "zero gradients keep eta at beta bitwise", "the root of beta^2 is beta only for some floats, such as 1 and 1/2: 1e-12 is asserted"
)
