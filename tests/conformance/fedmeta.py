"""FedMeta with MAML: Per-FedAvg of one step, MAML written again, finite differences, the minimiser on quadratics."""

from __future__ import annotations

import numpy as np
import problems
import small
import torch
import torch.nn.functional as F
from problems import Polynomial, Quadratic, blobs, drawn, mlp, quadratic, random_quadratics, run, weights

from perfed.optimizers import Momentum, ServerAdam

from . import FIXED_POINT, cannot, check, mutant

NAME = "fedmeta"


def fedmeta(**fields):
    return small.algorithm(NAME, **{"tau": 1, **fields})


def network(algo, seed=0, **options):
    """Four users of a small network."""
    model, start = mlp(seed=seed)
    xs, ys = blobs([11, 20, 16, 9])
    return problems.federation(algo, model, xs, start, ys=ys, **options), np.concatenate(xs), np.concatenate(ys)


def net_loss(p, x, y):
    """The network of problems.mlp, written again."""
    return F.nll_loss(F.log_softmax(F.elu(x @ p[0] + p[1]) @ p[2] + p[3], 1), y)


def maml(fed, x, y, alpha, beta, rounds, users=4, first_order=False):
    """Textbook MAML on the federation's batches, the initial model taken from it."""
    x, y = torch.from_numpy(x), torch.from_numpy(y)
    p = [t[0].clone() for t in fed.state.server["w"].values()]
    for k in range(rounds):
        p = [t.detach().requires_grad_() for t in p]
        total = 0
        for i in range(users):
            S, Q = (drawn(fed, i, k, 1)[role][0] for role in ("inner", "outer"))
            g = torch.autograd.grad(net_loss(p, x[S], y[S]), p, create_graph=not first_order)
            total = total + net_loss([a - alpha * b for a, b in zip(p, g, strict=True)], x[Q], y[Q]) / users
        p = [a - beta * b for a, b in zip(p, torch.autograd.grad(total, p), strict=True)]
    return torch.cat([t.detach().flatten() for t in p]).numpy()


def gap(a, b) -> float:
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


@check(NAME, "support=null is Per-FedAvg with tau=1, hess_batch=inner, bitwise", tolerance=0)
def per_fedavg():
    worst = 0.0
    for backend in ("vmap", "loop"):
        options = dict(active=2, backend=backend, seeds=(0, 3))
        one, *_ = network(fedmeta(support=None, batch=5, alpha=0.4, beta=0.3), **options)
        two, *_ = network(small.algorithm("perfedavg", hess_batch="inner", tau=1, batch=5, alpha=0.4, beta=0.3), **options)
        run(one, 3), run(two, 3)
        worst = max(worst, *(gap(weights(one, s), weights(two, s)) for s in (0, 1)))
    return worst


@check(NAME, "first_order, support=null is first-order Per-FedAvg with tau=1, bitwise", tolerance=0)
def first_order_per_fedavg():
    one, *_ = network(fedmeta(support=None, first_order=True, batch=5, alpha=0.4, beta=0.3), active=2)
    two, *_ = network(small.algorithm("perfedavg_fo", tau=1, batch=5, alpha=0.4, beta=0.3), active=2)
    return gap(weights(run(one, 3)), weights(run(two, 3)))


@check(NAME, "alpha=0, support=null is FedAvg with tau=1, bitwise", tolerance=0)
def alpha_zero():
    one, *_ = network(fedmeta(support=None, batch=5, alpha=0.0, beta=0.3), active=2)
    two, *_ = network(small.algorithm("fedavg", tau=1, batch=5, beta=0.3), active=2)
    return gap(weights(run(one, 3)), weights(run(two, 3)))


def _maml(**fields):
    def measure():
        worst = 0.0
        for backend in ("vmap", "loop"):
            fed, x, y = network(fedmeta(batch=5, alpha=0.4, beta=0.3, **fields), backend=backend)
            want = maml(fed, x, y, 0.4, 0.3, 3, first_order=fields.get("first_order", False))
            worst = max(worst, gap(weights(run(fed, 3)), want))
        return worst

    return measure


check(NAME, "server=average is MAML written again, support sets", tolerance=1e-12)(_maml(support=0.4))
check(NAME, "server=average is MAML written again, support=null", tolerance=1e-12)(_maml(support=None))
check(NAME, "first_order is first-order MAML written again", tolerance=1e-12)(_maml(support=0.4, first_order=True))


# Three examples a w^4/4 + h w^2/2 - c w; with support=.34 one of them is the support set.
POLY = np.array([[0.5, 1.0, 0.3], [0.2, 0.6, -1.0], [0.9, 0.4, 0.8]])


def poly(w, rows):
    """Mean loss and gradient."""
    a, h, c = POLY[rows].T
    return np.mean(a * w**4 / 4 + h * w**2 / 2 - c * w), np.mean(a * w**3 + h * w - c)


@check(NAME, "direction against a finite difference of the objective", tolerance=1e-8)
def finite_difference():
    w, alpha, h = 0.7, 0.3, 1e-5
    fed = problems.federation(fedmeta(alpha=alpha, beta=1.0, support=0.34), Polynomial(), [POLY], [w])
    picks = drawn(fed, 0, 0, 1)
    objective = lambda v: poly(v - alpha * poly(v, picks["inner"][0])[1], picks["outer"][0])[0]  # noqa: E731
    return abs(w - weights(run(fed, 1))[0] - (objective(w + h) - objective(w - h)) / (2 * h))


def tasks(d=3):
    """Users with two examples each; with support=.5 one is the support set. Arrays by user and (support, query)."""
    A, b = random_quadratics(8, d, seed=4)
    xs = [np.concatenate([quadratic(A[i], b[i]), quadratic(A[i + 1], b[i + 1])]) for i in range(0, 8, 2)]
    return A.reshape(4, 2, d, d), b.reshape(4, 2, d), xs


def iterate(fields, exact: bool, rounds: int):
    """The model after many rounds, and M, c by user: the meta-gradient is M w - c.

    f_Q(w - alpha (A_S w - b_S)) has the gradient P_S (A_Q (P_S w + alpha b_S) - b_Q) with P_S = I - alpha A_S; without P_S in front
    if first order.
    """
    alpha, d = 0.3, 3
    A, b, xs = tasks(d)
    fed = problems.federation(fedmeta(alpha=alpha, beta=0.6, support=0.5, **fields), Quadratic(), xs, [2.0] * d)
    M, c = [], []
    for i in range(4):
        S, Q = (int(drawn(fed, i, 0, 1)[role][0][0]) - 2 * i for role in ("inner", "outer"))
        P = np.eye(d) - alpha * A[i, S]
        front = P if exact else np.eye(d)
        M.append(front @ A[i, Q] @ P)
        c.append(front @ (b[i, Q] - alpha * A[i, Q] @ b[i, S]))
    return weights(run(fed, rounds)), np.mean(M, axis=0), np.mean(c, axis=0)


@check(NAME, "quadratics: the iterates end at the minimiser of F", tolerance=1e-10, group=FIXED_POINT)
def minimiser():
    w, M, c = iterate({}, True, 150)
    best = np.linalg.solve(M, c)
    return gap(w, best), 0.0


@check(NAME, "quadratics: first order ends elsewhere, where its mean direction is 0", tolerance=1e-10, group=FIXED_POINT)
def first_order_root():
    w, M, c = iterate({"first_order": True}, False, 150)
    _, exact, target = iterate({}, True, 0)
    fixed = np.linalg.solve(M, c)
    return gap(w, fixed), gap(fixed, np.linalg.solve(exact, target))


def _server(server, steps):
    """One user, f = w^2/2 - 3 w, alpha = .5: dir = .25 (w - 3); pseudo-gradient beta dir with beta = .4, from w = 1."""

    def measure():
        fed = problems.federation(fedmeta(alpha=0.5, beta=0.4), Quadratic(), [quadratic(np.eye(1), [3.0])], [1.0], server=server)
        w, memory = 1.0, (0.0, 0.0 if isinstance(server, Momentum) else server.eps**2)
        worst = 0.0
        for _ in range(4):
            w, memory = steps(w, 0.4 * 0.25 * (w - 3), memory)
            worst = max(worst, abs(weights(run(fed, 1))[0] - w))
        return worst

    return measure


def momentum_step(w, g, memory):
    v = 0.8 * memory[0] + g
    return w - 0.5 * v, (v, 0.0)


def adam_step(w, g, memory):
    m, v = 0.5 * memory[0] + 0.5 * g, 0.75 * memory[1] + 0.25 * g * g
    return w - 0.3 * m / (np.sqrt(v) + 0.1), (m, v)


check(NAME, "server=momentum sees beta mean(dir)", tolerance=1e-14)(_server(Momentum(name="momentum", lr=0.5, momentum=0.8), momentum_step))
check(NAME, "server=adam sees beta mean(dir)", tolerance=1e-14)(
    _server(ServerAdam(name="adam", lr=0.3, beta1=0.5, beta2=0.75, eps=0.1), adam_step)
)

INNER = 'tree.axpy(-self.alpha, task.grad(w, batches["inner"]), w)'
OUTER = 'tree.axpy(-self.alpha, task.hvp(w, batches["inner"], q), q)'
mutant(NAME, "inner step uphill", INNER, INNER.replace("-self", "self"))
mutant(NAME, "curvature with the wrong sign", OUTER, OUTER.replace("-self", "self"))
mutant(NAME, "inner step on the query batch", INNER, INNER.replace("inner", "outer"))
mutant(NAME, "query gradient on the support batch", f'{INNER}, batches["outer"])', f'{INNER}, batches["inner"])')
mutant(NAME, "query gradient at w", f"task.grad({INNER}, ", "task.grad(w, ")
mutant(NAME, "curvature on the query batch", 'task.hvp(w, batches["inner"], q)', 'task.hvp(w, batches["outer"], q)')
mutant(
    NAME,
    "curvature at the adapted point",
    'task.hvp(w, batches["inner"], q)',
    f'task.hvp({INNER}, batches["inner"], q)',
)
mutant(NAME, "curvature without alpha", "else tree.axpy(-self.alpha, task.hvp", "else tree.axpy(-1.0, task.hvp")
mutant(NAME, "first_order switch inverted", "return q if self.first_order", "return q if not self.first_order")
cannot(
    NAME, "FedMeta with a support set equals Per-FedAvg", "their batches differ: fixed disjoint parts of a user's data against fresh draws"
)
