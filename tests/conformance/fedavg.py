"""FedAvg: McMahan et al., AISTATS 2017; its drift, participation and server step as in the Per-FedAvg paper (arXiv 2002.07948)."""

from itertools import combinations

import numpy as np
import torch
import torch.nn.functional as F
from problems import COIN_START, COIN_X, Quadratic, blobs, coin, drawn, federation, mlp, quadratic, random_quadratics, run, weights
from small import algorithm

from conformance import FIXED_POINT, check, mutant
from perfed.evaluate import Protocol, adapted_models
from perfed.federate import Federation
from perfed.optimizers import SERVER


def far(a, b) -> float:
    """Largest difference of entries; infinite if one is not a number."""
    worst = np.abs(np.asarray(a) - np.asarray(b)).max()
    return float(worst) if np.isfinite(worst) else np.inf


def unlike(a: np.ndarray, b: np.ndarray) -> float:
    """0 if the two are bitwise equal, else more than 0."""
    return 0.0 if a.dtype == b.dtype and a.tobytes() == b.tobytes() else max(far(a, b), 1e-300)


def flat(params) -> np.ndarray:
    return np.concatenate([t.detach().numpy().ravel() for t in (params.values() if isinstance(params, dict) else params)])


def net_loss(p, x, y):
    """The network of problems.mlp, written again: 3 -> 4 -> 3, ELU, cross-entropy."""
    scores = F.elu(x @ p[0] + p[1]) @ p[2] + p[3]
    return F.nll_loss(F.log_softmax(scores, 1), y)


class EveryCohort(Federation):
    """Seed s always draws the s-th of all cohorts."""

    def cohorts(self, k):
        return np.array(list(combinations(range(self.n), self.active)))


N, D = 5, 4
A, B = random_quadratics(N, D)
BEST = np.linalg.solve(A, B[..., None])[..., 0]  # x_i*
START = [3.0] * D


def quadratics(algo, **options):
    return federation(algo, Quadratic(), list(map(quadratic, A, B)), START, **options)


@check("fedavg", "all users, one step = SGD on (1/n) sum f_i of a network", 1e-13)
def sgd():
    model, start = mlp()
    xs, ys = blobs([5, 8, 8, 6])
    x, y = torch.from_numpy(np.concatenate(xs)), torch.from_numpy(np.concatenate(ys))
    worst = 0.0
    for batch, backend in ((3, "loop"), (100, "vmap")):
        fed = federation(algorithm("fedavg", beta=0.3, tau=1, batch=batch), model, xs, start, ys=ys, backend=backend)
        p = [t.clone().requires_grad_() for t in start.values()]
        for k in range(3):
            f = sum(net_loss(p, x[pick], y[pick]) for pick in (drawn(fed, i, k, 1)["outer"][0] for i in range(4))) / 4
            p = [(t - 0.3 * g).detach().requires_grad_() for t, g in zip(p, torch.autograd.grad(f, p), strict=True)]
        worst = max(worst, far(weights(run(fed, 3)), flat(p)))
    return worst


@check("fedavg", "identical users, all data = gradient descent of K tau steps, whoever is drawn", 1e-13)
def centralised():
    model, start = mlp()
    (x,), (y,) = blobs([7])
    p = [t.clone().requires_grad_() for t in start.values()]
    for _ in range(2 * 3):
        f = net_loss(p, torch.from_numpy(x), torch.from_numpy(y))
        p = [(t - 0.2 * g).detach().requires_grad_() for t, g in zip(p, torch.autograd.grad(f, p), strict=True)]
    algo = algorithm("fedavg", beta=0.2, tau=3, batch=7)
    feds = [federation(algo, model, [x] * 5, start, ys=[y] * 5, active=active) for active in (5, 2)]
    return max(far(weights(run(fed, 2)), flat(p)) for fed in feds)


def fixed_point(tau: int):
    # tau full-batch steps take v to x_i* + (I - beta A_i)^tau (v - x_i*): the mean upload is w where sum Q_i w = sum Q_i x_i*,
    # Q_i = I - (I - beta A_i)^tau. One step: sum A_i w = sum b_i, the minimiser of f.
    beta = 0.4
    Q = np.stack([np.eye(D) - np.linalg.matrix_power(np.eye(D) - beta * a, tau) for a in A])
    fixed = np.linalg.solve(Q.sum(0), np.einsum("nij,nj->i", Q, BEST))
    fed = quadratics(algorithm("fedavg", beta=beta, tau=tau, batch=1), backend="vmap" if tau == 1 else "loop")
    return far(weights(run(fed, 80 if tau == 1 else 25)), fixed), np.linalg.norm(fixed - np.linalg.solve(A.sum(0), B.sum(0)))


@check("fedavg", "tau = 1: the minimiser of f on quadratics", 1e-10, FIXED_POINT)
def one_step():
    deviation, distance = fixed_point(1)
    return max(deviation, distance), distance  # here the two must be one


@check("fedavg", "tau = 6: w = (sum Q_i)^-1 sum Q_i x_i*, Q_i = I - (I - beta A_i)^tau", 1e-10, FIXED_POINT)
def several_steps():
    return fixed_point(6)


@check("fedavg", "aggregation=samples, tau = 1: the minimiser of sum (m_i/m) f_i", 1e-10, FIXED_POINT)
def by_samples():
    m = np.array([1, 2, 3, 1, 5])
    xs = [np.repeat(quadratic(a, b), k, 0) for a, b, k in zip(A, B, m, strict=True)]
    fed = federation(algorithm("fedavg", beta=0.4, tau=1, batch=9, aggregation="samples"), Quadratic(), xs, START)
    best = np.linalg.solve(np.einsum("n,nij->ij", m, A), m @ B)
    deviation = far(weights(run(fed, 80)), best)
    return deviation, deviation


@check("fedavg", "one round, tau steps: the mean of x_i* + (I - beta A_i)^tau (w - x_i*)", 1e-13)
def one_round():
    want = np.mean([x + np.linalg.matrix_power(np.eye(D) - 0.3 * a, 4) @ (START - x) for a, x in zip(A, BEST, strict=True)], 0)
    return far(weights(run(quadratics(algorithm("fedavg", beta=0.3, tau=4, batch=1)), 1)), want)


@check("fedavg", "a round averaged over all cohorts = the round of all users (uniform draws, uniform mean)", 1e-13)
def unbiased():
    algo = algorithm("fedavg", beta=0.3, tau=3, batch=1)
    every = run(quadratics(algo, active=2, seeds=range(10), kind=EveryCohort), 1)
    return far(every.state.server["w"]["w"].mean(0).numpy(), weights(run(quadratics(algo), 1)))


@check("fedavg", "users outside the cohort change nothing (bitwise)", 0)
def outsiders():
    algo = algorithm("fedavg", beta=0.3, tau=2, batch=1)
    fed = quadratics(algo, active=2)
    inside = fed.cohorts(0)[0]
    xs = [quadratic(a, b) if i in inside else quadratic(7 * a, -b) for i, (a, b) in enumerate(zip(A, B, strict=True))]
    return unlike(weights(run(fed, 1)), weights(run(federation(algo, Quadratic(), xs, START, active=2), 1)))


@check("fedavg", "relabelled users: the same w (all users, all data)", 1e-14)
def relabelled():
    model, start = mlp()
    xs, ys = blobs([5, 8, 7, 6])
    order = [2, 0, 3, 1]
    algo = algorithm("fedavg", beta=0.3, tau=2, batch=9)
    moved = federation(algo, model, [xs[i] for i in order], start, ys=[ys[i] for i in order])
    return far(weights(run(federation(algo, model, xs, start, ys=ys), 2)), weights(run(moved, 2)))


@check("fedavg", "server_lr: w + lr mean (v_i - w); momentum and Adam of the server by hand", 1e-14)
def server_step():
    # f_1 = w^2/2 - 3 w, f_2 = w^2/2 - 5 w, beta = .1: the mean upload is w - .1 (w - 4). From w = 2:
    # average, lr .25: 2 + .25 .2 = 2.05, then 2.05 + .25 .195 = 2.09875.
    # momentum .8, lr .5: v = -.2, w = 2.1; v = .8 (-.2) - .19 = -.35, w = 2.275.
    # FedAdam (Reddi et al. 2021), eps = .1, beta1 = .5, beta2 = .75, lr = .3, v_0 = eps^2: m = .1, v = .0175; the second step by formula.
    d = 0.2
    m, v, w = 0.1, 0.0175, 2 + 0.03 / (0.0175**0.5 + 0.1)
    d = 0.1 * (4 - w)
    m, v = 0.5 * m + 0.5 * d, 0.75 * v + 0.25 * d * d
    cases = [
        ("average", {"lr": 0.25}, 2.09875),
        ("momentum", {"lr": 0.5, "momentum": 0.8}, 2.275),
        ("adam", {"lr": 0.3, "beta1": 0.5, "beta2": 0.75, "eps": 0.1}, w + 0.3 * m / (v**0.5 + 0.1)),
    ]
    worst = 0.0
    for name, options, want in cases:
        xs = [quadratic(np.eye(1), [c]) for c in (3.0, 5.0)]
        fed = federation(algorithm("fedavg", beta=0.1, tau=1, batch=1), Quadratic(), xs, [2.0], server=SERVER[name](name=name, **options))
        worst = max(worst, far(weights(run(fed, 2)), [want]))
    return worst


@check("fedavg", "the mean of users with 1 and 3 examples: uniform and by samples (softmax coin)", 1e-15)
def weighted_mean():
    # softmax(0, 0) = (.5, .5): a step of 1 gives (.5, -.5) on label 0 and (-.5, .5) on label 1. One example of label 0 and three
    # of label 1: uniform 0; by samples (1 (.5, -.5) + 3 (-.5, .5)) / 4 = (-.25, .25).
    worst = 0.0
    for aggregation, want in (("uniform", [0.0, 0.0]), ("samples", [-0.25, 0.25])):
        xs, ys = [COIN_X, np.repeat(COIN_X, 3, 0)], [np.array([0]), np.array([1, 1, 1])]
        algo = algorithm("fedavg", beta=1.0, tau=1, batch=40, aggregation=aggregation)
        worst = max(worst, far(weights(run(federation(algo, coin(), xs, COIN_START, ys=ys), 1)), want))
    return worst


@check("fedavg", "fine-tuning by J steps: x_i* + (I - alpha A_i)^J (w - x_i*); J = 0 is the global model, J = 1 'FedAvg + update'", 1e-13)
def fine_tuned():
    fed = run(quadratics(algorithm("fedavg", beta=0.3, tau=2, batch=1)), 2)
    w = weights(fed)
    protocol = Protocol(label="clean", source="train", support=None, batch=None, repeats=1, steps=(0,), lr=0.25)
    worst = 0.0
    for user in range(N):
        for steps in (0, 1, 5):
            want = BEST[user] + np.linalg.matrix_power(np.eye(D) - 0.25 * A[user], steps) @ (w - BEST[user])
            worst = max(worst, far(adapted_models(fed, protocol, 0, user, steps)["global"]["w"].numpy(), want))
    return worst


@check("fedavg", "fine-tuning of the last layer: autodiff there, the other layers stay (bitwise)", 1e-14)
def last_layer():
    model, start = mlp()
    xs, ys = blobs([6, 9])
    fed = run(federation(algorithm("fedavg", beta=0.3, tau=2, batch=9), model, xs, start, ys=ys), 2)
    names = list(start)
    fed.task.adapted = frozenset(names[2:])
    protocol = Protocol(label="clean", source="train", support=None, batch=None, repeats=1, steps=(0,), lr=0.5)
    w = [fed.state.server["w"][name][0] for name in names]
    p = [t.clone().requires_grad_() for t in w]
    g = torch.autograd.grad(net_loss(p, torch.from_numpy(xs[1]), torch.from_numpy(ys[1])), p)
    got = adapted_models(fed, protocol, 0, 1, 1)["global"]
    changed = max(unlike(got[n].numpy(), t.numpy()) for n, t in zip(names[:2], w, strict=False))
    moved = max(far(got[n].numpy(), (t - 0.5 * gt).detach().numpy()) for n, t, gt in list(zip(names, p, g, strict=True))[2:])
    return moved if changed == 0 else np.inf


def stationary(name: str, tau: int, s: float, **options) -> float:
    """Deviation of the stationary E e^2 from Q/(2-Q) g2 (1-r)/(r(n-1)), exactly, over all cohorts; e = w - mean(c).

    f_i = (w - c_i)^2/2, directions s (w - c_i): a round is e' = (1 - Q) e + Q x, Q = 1 - (1 - beta s)^tau, x the cohort's mean
    of c_i - mean(c); E x = 0 and E x^2 = g2 (1-r)/(r(n-1)) for draws without replacement, g2 = mean (c_i - mean(c))^2.
    p and q of e' = p e + q are read off two starts; E e^2 = (mean q^2 + 2 p (mean q) E e) / (1 - p^2), E e = mean q / (1 - p).
    """
    c, beta, worst = np.array([-3.0, 1.0, 0.5, 4.0, 2.0]), 0.2, 0.0
    for active in (1, 2, 5):
        ends = []
        for e in (0.0, 1.0):
            algo = algorithm(name, beta=beta, tau=tau, batch=1, **options)
            xs = [quadratic(np.eye(1), [ci]) for ci in c]
            many = range(len(list(combinations(range(5), active))))
            fed = federation(algo, Quadratic(), xs, [c.mean() + e], active=active, seeds=many, kind=EveryCohort)
            ends.append(run(fed, 1).state.server["w"]["w"][:, 0].numpy() - c.mean())
        q, p = ends[0], (ends[1] - ends[0]).mean()
        second = (np.mean(q**2) + 2 * p * q.mean() * q.mean() / (1 - p)) / (1 - p**2)
        r, Q = active / 5, 1 - (1 - beta * s) ** tau
        want = Q / (2 - Q) * np.mean((c - c.mean()) ** 2) * (0 if r == 1 else (1 - r) / (r * 4))
        worst = max(worst, abs(second - want))
    return worst


@check("fedavg", "stationary E||grad f||^2 of partial participation: Q/(2-Q) g^2 (1-r)/(r(n-1)), Q = 1-(1-beta)^tau", 1e-11)
def participation():
    return max(stationary("fedavg", tau, 1.0) for tau in (1, 5))


def cost_error(name: str, grads: int, hvps: int, up: int = 31, down: int = 31, **options) -> float:
    """Largest deviation of a counted cost: 3 rounds, 2 of 6 users, 3 steps on a network of 31 numbers: 18 steps, 6 user rounds."""
    model, start = mlp()
    xs, ys = blobs([9, 10, 11, 12, 9, 9])
    fed = run(federation(algorithm(name, tau=3, batch=4, **options), model, xs, start, ys=ys, active=2), 3)
    cost = fed.costs[0]
    got = (cost.grads, cost.hvps, cost.losses, cost.floats_down, cost.floats_up, cost.steps, cost.user_rounds)
    return far(got, (18 * grads, 18 * hvps, 0, 6 * down, 6 * up, 18, 6))


@check("fedavg", "costs: 1 gradient a step, d numbers down and up a round", 0)
def costs():
    return cost_error("fedavg", 1, 0)


# ---------------------------------------------------------------- mutants: methods that take the place of the base class's


HERE = '    """All defaults of the base class: the plain gradient, the plain mean."""\n'


def with_method(name: str, code: str) -> None:
    mutant("fedavg", name, HERE, HERE + "\n" + "".join(f"    {line}\n" for line in code.splitlines()))


with_method(
    "the gradient has the wrong sign",
    """def direction(self, task, w, batches, info):
    return {k: -g for k, g in task.grad(w, batches["outer"]).items()}""",
)
with_method(
    "the gradient of the sum of the losses of a batch, not of their mean",
    """def direction(self, task, w, batches, info):
    return {k: g * batches["outer"].weight.sum() for k, g in task.grad(w, batches["outer"]).items()}""",
)
with_method(
    "the sum of the uploads, not their mean",
    """def average(self, uploads, cohort):
    return {k: cohort.active * t for k, t in super().average(uploads, cohort).items()}""",
)
with_method(
    "averages over all users, active or not",
    """def average(self, uploads, cohort):
    return {k: cohort.active / cohort.n * t for k, t in super().average(uploads, cohort).items()}""",
)
with_method(
    "always weights by the number of examples",
    """def average(self, uploads, cohort):
    return {k: (cohort.m.to(t.dtype) / cohort.m.sum()) @ t.flatten(1) for k, t in uploads.items()}""",
)
with_method(
    "never weights by the number of examples",
    """def average(self, uploads, cohort):
    return {k: t.mean(0) for k, t in uploads.items()}""",
)
with_method("one local step too few", "def local_steps(self, info):\n    return max(1, self.tau - 1)")
with_method("one local step too many", "def local_steps(self, info):\n    return self.tau + 1")
with_method("twice the step", "def step_size(self, info):\n    return 2 * self.beta")
with_method("the step of a round is divided by tau", "def step_size(self, info):\n    return self.beta / self.tau")
with_method(
    "every local step starts from the received model",
    """def send(self, task, down, user, local, info):
    return {k: down[k] + (t - down[k]) / self.tau for k, t in local.w.items()}, user""",
)
with_method(
    "the server adds the mean of the models instead of taking it",
    """def aggregate(self, task, server, uploads, cohort):
    new, replies = super().aggregate(task, server, uploads, cohort)
    return {**new, "w": {k: server["w"][k] + t for k, t in new["w"].items()}}, replies""",
)
with_method(
    "the server ignores its optimizer",
    """def aggregate(self, task, server, uploads, cohort):
    return {**server, "w": self.average(uploads, cohort)}, ()""",
)
with_method("counts what goes up twice", "def floats_up(self, upload, info):\n    return 2 * super().floats_up(upload, info)")
with_method(
    "evaluates the loss in every step",
    """def direction(self, task, w, batches, info):
    task.loss(w, batches["outer"])
    return task.grad(w, batches["outer"])""",
)
with_method(
    "adaptation ascends",
    """def moved(self, task, w, g, lr):
    return super().moved(task, w, g, -lr)""",
)
with_method(
    "adaptation of a part moves all",
    """def moved(self, task, w, g, lr):
    return {k: v - lr * g[k] for k, v in w.items()}""",
)
