"""Meta-SGD: derivatives of the objective in w and a, the limit of a frozen step, steps that learn the inverse curvature."""

from __future__ import annotations

import numpy as np
import problems
import small
import torch
import torch.nn.functional as F
from problems import Polynomial, Quadratic, blobs, drawn, mlp, quadratic, run, weights

from perfed.evaluate import Protocol, adapted_models
from perfed.optimizers import Momentum, ServerAdam

from . import FIXED_POINT, check, mutant

NAME = "metasgd"


def metasgd(**fields):
    return small.algorithm(NAME, **{"tau": 1, **fields})


def steps(fed, s: int = 0) -> np.ndarray:
    """a as one vector."""
    return np.concatenate([t[s].numpy().ravel() for t in fed.state.server["a"].values()])


def network(algo, **options):
    model, start = mlp()
    xs, ys = blobs([11, 20, 16, 9])
    return problems.federation(algo, model, xs, start, ys=ys, **options), np.concatenate(xs), np.concatenate(ys)


def net_loss(p, x, y):
    """The network of problems.mlp, written again."""
    return F.nll_loss(F.log_softmax(F.elu(x @ p[0] + p[1]) @ p[2] + p[3], 1), y)


def gap(a, b) -> float:
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


def frozen_pair(clamp=False, **options):
    common = dict(batch=5, alpha=0.4, beta=0.3, tau=1, support=0.4)
    one, *_ = network(metasgd(learn=False, clamp=clamp, **common), **options)
    two, *_ = network(small.algorithm("fedmeta", **common), **options)
    return run(one, 3), run(two, 3)


@check(NAME, "a frozen at alpha is FedMeta's MAML", tolerance=1e-14)
def frozen():
    worst = 0.0
    for backend in ("vmap", "loop"):
        one, two = frozen_pair(active=2, backend=backend, clamp=True)
        worst = max(worst, gap(weights(one), weights(two)), gap(steps(one), 0.4))
    return worst


@check(NAME, "a frozen at alpha is FedMeta's MAML, server=adam", tolerance=1e-13)
def frozen_adam():
    one, two = frozen_pair(server=ServerAdam(name="adam"))
    return gap(weights(one), weights(two))


def _autograd(first_order: bool):
    """All users, three rounds, beta_a of its own: SGD on the mean over users of L_Q(w - a o g_S(w)) by autograd."""

    def measure():
        worst = 0.0
        for backend in ("vmap", "loop"):
            algo = metasgd(batch=5, alpha=0.4, beta=0.3, beta_a=0.7, support=0.4, first_order=first_order)
            fed, x, y = network(algo, backend=backend)
            x, y = torch.from_numpy(x), torch.from_numpy(y)
            w = [t[0].clone() for t in fed.state.server["w"].values()]
            a = [torch.full_like(t, 0.4) for t in w]
            for k in range(3):
                w, a = ([t.detach().requires_grad_() for t in p] for p in (w, a))
                total = 0
                for i in range(4):
                    S, Q = (drawn(fed, i, k, 1)[role][0] for role in ("inner", "outer"))
                    g = torch.autograd.grad(net_loss(w, x[S], y[S]), w, create_graph=not first_order)
                    total = total + net_loss([wi - ai * gi for wi, ai, gi in zip(w, a, g, strict=True)], x[Q], y[Q]) / 4
                d = torch.autograd.grad(total, [*w, *a])
                w = [t - 0.3 * v for t, v in zip(w, d[: len(w)], strict=True)]
                a = [t - 0.7 * v for t, v in zip(a, d[len(w) :], strict=True)]
            flat = [torch.cat([t.detach().flatten() for t in p]).numpy() for p in (w, a)]
            run(fed, 3)
            worst = max(worst, gap(weights(fed), flat[0]), gap(steps(fed), flat[1]))
        return worst

    return measure


check(NAME, "SGD on the objective by autograd, in w and a", tolerance=1e-12)(_autograd(False))
check(NAME, "first_order: SGD by autograd with g_S held", tolerance=1e-12)(_autograd(True))

# Three examples a w^4/4 + h w^2/2 - c w; with support=.34 one of them is the support set.
POLY = np.array([[0.5, 1.0, 0.3], [0.2, 0.6, -1.0], [0.9, 0.4, 0.8]])


def poly(w, rows):
    """Mean loss and gradient."""
    a, h, c = POLY[rows].T
    return np.mean(a * w**4 / 4 + h * w**2 / 2 - c * w), np.mean(a * w**3 + h * w - c)


def _difference(coordinate: int):
    def measure():
        at, h = np.array([0.7, 0.3]), 1e-5
        fed = problems.federation(metasgd(alpha=at[1], beta=1.0, support=0.34), Polynomial(), [POLY], [at[0]])
        S, Q = (drawn(fed, 0, 0, 1)[role][0] for role in ("inner", "outer"))
        objective = lambda v: poly(v[0] - v[1] * poly(v[0], S)[1], Q)[0]  # noqa: E731
        shift = h * np.eye(2)[coordinate]
        run(fed, 1)
        found = at[coordinate] - (weights(fed)[0], steps(fed)[0])[coordinate]
        return abs(found - (objective(at + shift) - objective(at - shift)) / (2 * h))

    return measure


check(NAME, "d/dw against a finite difference", tolerance=1e-8)(_difference(0))
check(NAME, "d/da against a finite difference", tolerance=1e-8)(_difference(1))


def one_dimension(algo, rounds, server=None):
    """f = h w^2/2 - c w with h = 2, c = 3, from w = 1; support and query set are the one example."""
    return run(problems.federation(algo, Quadratic(), [quadratic(2 * np.eye(1), [3.0])], [1.0], server=server), rounds)


def formulas(w, a):
    """g = 2 w - 3, q = 2 (w - a g) - 3 = (1 - 2 a) g; dw = (1 - 2 a) q, da = -g q."""
    g = 2 * w - 3
    q = (1 - 2 * a) * g
    return (1 - 2 * a) * q, -g * q


@check(NAME, "server=momentum works on w and a jointly", tolerance=1e-14)
def momentum():
    w, a, v = 1.0, 0.1, np.zeros(2)
    worst = 0.0
    for k in range(1, 5):
        dw, da = formulas(w, a)
        v = 0.8 * v + np.array([0.2 * dw, 0.05 * da])
        w, a = w - 0.5 * v[0], a - 0.5 * v[1]
        fed = one_dimension(metasgd(alpha=0.1, beta=0.2, beta_a=0.05), k, Momentum(name="momentum", lr=0.5, momentum=0.8))
        worst = max(worst, abs(weights(fed)[0] - w), abs(steps(fed)[0] - a))
    return worst


CURVATURE = np.array([0.8, 1.6])
ENDS = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])  # the users' minimisers


def shared():
    """Users with one diagonal Hessian, different minimisers: with a = 1 / h a step adapts each of them perfectly.

    In a the objective has the curvature h^3 mean((w - x)^2), between .5 and 5.2 here: beta_a = .3 converges.
    """
    xs = [quadratic(np.diag(CURVATURE), CURVATURE * x) for x in ENDS]
    fed = problems.federation(metasgd(alpha=0.1, beta=0.2, beta_a=0.3), Quadratic(), xs, [0.5, -0.5])
    return run(fed, 250)


@check(NAME, "one diagonal Hessian: a becomes its inverse", tolerance=1e-10, group=FIXED_POINT)
def inverse_curvature():
    # f(w - a (h w - b)) = h (1 - a h)^2 (w - x)^2 / 2 + const by coordinates: least at a = 1/h, whatever w is.
    return gap(steps(shared()), 1 / CURVATURE), 0.0


@check(NAME, "with a = 1/h one adaptation step ends at the user's minimiser", tolerance=1e-10)
def adaptation():
    fed = shared()
    protocol = Protocol(label="clean", source="train", support=None, batch=None, repeats=1, steps=(0, 1), lr=None)
    return max(gap(adapted_models(fed, protocol, 0, i, 1)["global"]["w"].numpy(), x) for i, x in enumerate(ENDS))


@check(NAME, "clamp holds a at 0 where it would turn negative", tolerance=1e-14)
def clamp():
    # f = w^2/2 -+ w at w = 0, one sign s for the support set and the other for the query set: g = -s, q = a s + s,
    # da = -g q = 1 + a = 1.1 and a = .1 - 1.1 = -1, or 0 with clamp.
    xs = [np.concatenate([quadratic(np.eye(1), [1.0]), quadratic(np.eye(1), [-1.0])])]
    worst = 0.0
    for on, want in ((True, 0.0), (False, -1.0)):
        algo = metasgd(alpha=0.1, beta=0.2, beta_a=1.0, support=0.5, clamp=on)
        fed = run(problems.federation(algo, Quadratic(), xs, [0.0]), 1)
        worst = max(worst, abs(steps(fed)[0] - want))
    return worst


mutant(NAME, "inner step uphill", "wi - ai * gi, w", "wi + ai * gi, w")
mutant(NAME, "curvature with the wrong sign", "dw = tree.sub(q, task", "dw = tree.axpy(1.0, q, task")
mutant(NAME, "curvature applied to q instead of a o q", "tree.map(torch.mul, a, q))", "q)")
mutant(NAME, "curvature on the query batch", 'task.hvp(w, batches["inner"]', 'task.hvp(w, batches["outer"]')
mutant(NAME, "da with the wrong sign", "-gi * qi", "gi * qi")
mutant(NAME, "da from q alone", "-gi * qi", "-qi")
mutant(NAME, "da from g at the wrong power", "-gi * qi", "-gi * gi * qi")
mutant(NAME, "beta_a ignored", "self.beta if self.beta_a is None else self.beta_a", "self.beta")
mutant(NAME, "a moves with w's gradient", "tree.axpy(-beta_a, da, a)", "tree.axpy(-beta_a, dw, a)")
mutant(NAME, "clamp ignored", "if self.clamp and self.learn", "if False")
mutant(NAME, "adaptation with a scalar step", "tree.map(torch.mul, carry.a, g), 1.0", "g, self.alpha")
mutant(NAME, "learn ignored", '{"w": w, "a": a} if self.learn else {"w": w}', '{"w": w, "a": a}')
