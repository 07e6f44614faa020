"""Partial personalization and its presets: trajectories, fixed points, and what the switches reduce it to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from problems import Quadratic, blobs, drawn, federation, mlp, quadratic, random_quadratics, run
from small import algorithm

from perfed import tree
from perfed.optimizers import Adam, Sgd

from . import FIXED_POINT, cannot, check, mutant

N, BETA = 4, 0.3
PRESETS = {"fedper": {"personal": "last"}, "fedrep": {"personal": "last", "schedule": "alternate"}}
PRESETS |= {"fedbabu": {"personal": "none", "frozen": "last"}, "lgfedavg": {"personal": "first"}}


@dataclass(kw_only=True)
class Blocks(Quadratic):
    """w'A w/2 - b'w with w = (lower.w, upper.w)."""

    def apply(self, params, x):
        return self.value(torch.cat([params["lower.w"], params["upper.w"]]), x).unsqueeze(-1)


A, B = random_quadratics(N, 4, seed=3)
START = np.array([0.5, -1.0, 2.0, 0.25])
UPPER = np.array([False, False, True, True])


def blocks(name, active=N, backend="vmap", local=None, **fields):
    """A federation of quadratics in two blocks of two weights."""
    start = {"lower.w": torch.from_numpy(START[:2]), "upper.w": torch.from_numpy(START[2:])}
    algo = algorithm(name, **{"beta": BETA, "tau": 2, "batch": 1, **fields})
    return federation(algo, Blocks(), [quadratic(*ab) for ab in zip(A, B, strict=True)], start, active=active, backend=backend, local=local)


def judged(fed, s=0):
    """[N, d]: every user's first candidate."""
    models = []
    for i in range(fed.n):
        model = next(iter(fed.algo.candidates(tree.at(fed.shown(), s), fed.users_at(s, i)).values()))
        models.append(np.concatenate([t.numpy().ravel() for t in model.values()]))
    return np.stack(models)


def simulated(fed, rounds, own, still, tau=2, first=0, momentum=0.0):
    """The same by hand. own, still: masks of the weights; first: steps of the own weights alone (0: joint)."""
    z = np.tile(START, (N, 1))
    shared = ~own & ~still
    for k in range(rounds):
        cohort = fed.cohorts(k)[0]
        for i in cohort:
            v = np.zeros(4)
            for t in range(first + tau):
                moves = ~still if first == 0 else own & ~still if t < first else shared
                v[moves] = momentum * v[moves] + (A[i] @ z[i] - B[i])[moves]
                z[i, moves] -= BETA * v[moves]
        z[:, shared] = z[cohort][:, shared].mean(0)
    return z


def apart(fed, want):
    return np.abs(judged(fed) - want).max()


NONE = np.zeros(4, bool)


@check("partial", "joint steps (FedSim) of 2 of 4 users, by hand", tolerance=1e-13)
def joint() -> float:
    worst = 0.0
    for personal, own in (("last", UPPER), ("first", ~UPPER), (["upper"], UPPER), (["lower.w"], ~UPPER)):
        fed = run(blocks("partial", active=2, personal=personal, tau=3), 5)
        worst = max(worst, apart(fed, simulated(fed, 5, own, NONE, tau=3)))
    return worst


@check("partial", "alternating steps (FedAlt) of 2 of 4 users, by hand", tolerance=1e-13)
def alternate() -> float:
    fed = run(blocks("partial", active=2, schedule="alternate", personal_steps=3, backend="loop"), 5)
    return apart(fed, simulated(fed, 5, UPPER, NONE, first=3))


@check("partial", "alternating with momentum: a part's velocity rests while the other part moves", tolerance=1e-13)
def velocity() -> float:
    fed = run(blocks("partial", schedule="alternate", personal_steps=2, local=Sgd(name="sgd", momentum=0.5)), 3)
    return apart(fed, simulated(fed, 3, UPPER, NONE, first=2, momentum=0.5))


@check("partial", "frozen goes before personal: own lower block, upper block as it was", tolerance=1e-13)
def frozen_first() -> float:
    fed = run(blocks("partial", active=2, personal="all", frozen="last"), 4)
    return apart(fed, simulated(fed, 4, ~UPPER, UPPER))


def joint_fixed_point(tau):
    """(u, v_i) that stay: z -> P z + c, P = (I - beta A)^tau, c = (I - P) A^-1 b, on each user, u averaged.

    v_i = P_vu u + P_vv v_i + c_v gives v_i = (I - P_vv)^-1 (P_vu u + c_v); put into u = mean(P_uu u + P_uv v_i + c_u).
    """
    P = [np.linalg.matrix_power(np.eye(4) - BETA * a, tau) for a in A]
    c = [(np.eye(4) - p) @ np.linalg.solve(a, b) for p, a, b in zip(P, A, B, strict=True)]
    inverse = [np.linalg.inv(np.eye(2) - p[2:, 2:]) for p in P]
    G = np.mean([p[:2, :2] + p[:2, 2:] @ q @ p[2:, :2] for p, q in zip(P, inverse, strict=True)], 0)
    g = np.mean([ci[:2] + p[:2, 2:] @ q @ ci[2:] for p, q, ci in zip(P, inverse, c, strict=True)], 0)
    u = np.linalg.solve(np.eye(2) - G, g)
    return np.stack([np.concatenate([u, q @ (p[2:, :2] @ u + ci[2:])]) for p, q, ci in zip(P, inverse, c, strict=True)])


SCHUR = [a[:2, :2] - a[:2, 2:] @ np.linalg.solve(a[2:, 2:], a[2:, :2]) for a in A]
RIGHT = [b[:2] - a[:2, 2:] @ np.linalg.solve(a[2:, 2:], b[2:]) for a, b in zip(A, B, strict=True)]


def with_heads(u):
    """u beside the v_i that minimises f_i(u, .)."""
    return np.stack([np.concatenate([u, np.linalg.solve(a[2:, 2:], b[2:] - a[2:, :2] @ u)]) for a, b in zip(A, B, strict=True)])


def minimiser():
    """Of sum_i f_i(u, v_i): with v_i(u) put in, f_i has the gradient S_i u - r_i, S_i the Schur complement of A_vv."""
    return with_heads(np.linalg.solve(sum(SCHUR), sum(RIGHT)))


def alternate_fixed_point(tau):
    """v_i minimises f_i(u, .); tau steps move u by Q_i A_uu^-1 (S_i u - r_i), Q_i = I - (I - beta A_uu)^tau, and the mean is 0."""
    Q = [np.eye(2) - np.linalg.matrix_power(np.eye(2) - BETA * a[:2, :2], tau) for a in A]
    W = [q @ np.linalg.inv(a[:2, :2]) for q, a in zip(Q, A, strict=True)]
    u = np.linalg.solve(sum(w @ s for w, s in zip(W, SCHUR, strict=True)), sum(w @ r for w, r in zip(W, RIGHT, strict=True)))
    return with_heads(u)


@check("partial", "joint, tau=1: ends in the minimiser of sum f_i(u, v_i)", tolerance=1e-9, group=FIXED_POINT)
def joint_end_one() -> tuple[float, float]:
    fed = run(blocks("partial", tau=1), 300)
    return apart(fed, minimiser()), np.abs(judged(fed) - minimiser()).max()


@check("partial", "joint, tau=4", tolerance=1e-9, group=FIXED_POINT)
def joint_end() -> tuple[float, float]:
    want = joint_fixed_point(4)
    return apart(run(blocks("partial", tau=4), 150), want), np.abs(want - minimiser()).max()


@check("fedrep", "two head steps, one body step: ends in the minimiser of sum f_i(u, v_i)", tolerance=1e-9, group=FIXED_POINT)
def alternate_end_one() -> tuple[float, float]:
    fed = run(blocks("fedrep", tau=1, personal_steps=2), 300)
    return apart(fed, minimiser()), np.abs(judged(fed) - minimiser()).max()


@check("fedrep", "two head steps, four body steps", tolerance=1e-9, group=FIXED_POINT)
def alternate_end() -> tuple[float, float]:
    want = alternate_fixed_point(4)
    return apart(run(blocks("fedrep", tau=4, personal_steps=2), 150), want), np.abs(want - minimiser()).max()


@check("fedbabu", "FedAvg on f_i(., v_0): sum Q_i u = sum Q_i u_i*", tolerance=1e-9, group=FIXED_POINT)
def frozen_end() -> tuple[float, float]:
    # u_i* = A_uu^-1 (b_u - A_uv v_0), Q_i = I - (I - beta A_uu)^tau.
    tau, v = 3, START[2:]
    Q = [np.eye(2) - np.linalg.matrix_power(np.eye(2) - BETA * a[:2, :2], tau) for a in A]
    best = [np.linalg.solve(a[:2, :2], b[:2] - a[:2, 2:] @ v) for a, b in zip(A, B, strict=True)]
    u = np.linalg.solve(sum(Q), sum(q @ x for q, x in zip(Q, best, strict=True)))
    centre = np.linalg.solve(A[:, :2, :2].sum(0), sum(b[:2] - a[:2, 2:] @ v for a, b in zip(A, B, strict=True)))
    return apart(run(blocks("fedbabu", tau=tau), 150), np.tile([*u, *v], (N, 1))), np.abs(u - centre).max()


def nets(name, backend="vmap", local=None, active=2, **fields):
    """A small network on users of different sizes, batches smaller than their data."""
    model, start = mlp()
    xs, ys = blobs([9, 10, 11, 5])
    algo = algorithm(name, **{"beta": 0.3, "tau": 3, "batch": 6, **fields})
    return federation(algo, model, xs, start, ys=ys, active=active, backend=backend, local=local)


def difference(one, other):
    return float(np.abs(judged(one) - judged(other)).max())


OPTIMIZERS = (None, Sgd(name="sgd", momentum=0.9, weight_decay=0.01), Adam(name="adam"))


@check("partial", "personal=none is FedAvg, bit by bit", tolerance=0)
def is_fedavg() -> float:
    worst = 0.0
    for backend in ("vmap", "loop"):
        for local in OPTIMIZERS:
            more = {"backend": backend, "local": local, "aggregation": "samples"}
            worst = max(worst, difference(run(nets("partial", personal="none", **more), 4), run(nets("fedavg", **more), 4)))
    return worst


@check("partial", "personal=all is local training, bit by bit", tolerance=0)
def is_local() -> float:
    worst = 0.0
    for backend in ("vmap", "loop"):
        for local in OPTIMIZERS:
            more = {"backend": backend, "local": local}
            worst = max(worst, difference(run(nets("partial", personal="all", **more), 4), run(nets("local", **more), 4)))
    return worst


def is_preset(name):
    def measure() -> float:
        return difference(run(nets(name), 3), run(nets("partial", **PRESETS[name]), 3))

    return measure


for _name in PRESETS:
    check(_name, f"is partial with {PRESETS[_name]}, bit by bit", tolerance=0)(is_preset(_name))


def written_again(fed, rounds, own, still=(), first=0, tau=3):
    """The network of problems.mlp trained part by part with autograd, on the batches that were drawn."""
    model, start = mlp()
    x, y = fed.pool.x, fed.pool.y
    shared = [k for k in start if k not in own and k not in still]
    users = [{k: start[k] for k in own} for _ in range(fed.n)]
    u = {k: start[k] for k in shared}
    for k in range(rounds):
        sent = []
        for i in fed.cohorts(k)[0]:
            w = {**start, **u, **users[i]}
            picks = drawn(fed, i, k, first + tau)["outer"]
            for t, pick in enumerate(picks):
                p = {n: v.clone().requires_grad_() for n, v in w.items()}
                h = F.elu(x[pick] @ p["layer1.weight"] + p["layer1.bias"]) @ p["layer2.weight"] + p["layer2.bias"]
                g = dict(zip(p, torch.autograd.grad(F.cross_entropy(h, y[pick]), list(p.values())), strict=True))
                moves = [*own, *shared] if first == 0 else own if t < first else shared
                w = {n: v - 0.3 * g[n] if n in moves else v for n, v in w.items()}
            users[i] = {n: w[n] for n in own}
            sent.append({n: w[n] for n in shared})
        u = {n: torch.stack([s[n] for s in sent]).mean(0) for n in shared}
    return np.stack([torch.cat([{**start, **u, **mine}[n].flatten() for n in start]).numpy() for mine in users])


HEAD, BODY = ["layer2.weight", "layer2.bias"], ["layer1.weight", "layer1.bias"]


@check("fedper", "a network, written again with autograd", tolerance=1e-12)
def fedper_again() -> float:
    fed = run(nets("fedper"), 3)
    return apart(fed, written_again(fed, 3, HEAD))


@check("fedrep", "algorithm 1 on a network: head steps, then body steps, each on the next batch", tolerance=1e-12)
def fedrep_again() -> float:
    fed = run(nets("fedrep", personal_steps=2, backend="loop"), 3)
    return apart(fed, written_again(fed, 3, HEAD, first=2))


@check("fedbabu", "a network, written again with autograd; the head is the initial one", tolerance=1e-12)
def fedbabu_again() -> float:
    fed = run(nets("fedbabu"), 3)
    return apart(fed, written_again(fed, 3, [], still=HEAD))


@check("lgfedavg", "a network, written again with autograd", tolerance=1e-12)
def lgfedavg_again() -> float:
    fed = run(nets("lgfedavg"), 3)
    return apart(fed, written_again(fed, 3, BODY))


@check("partial", "a judged model has the model's names, in its order", tolerance=0)
def order() -> float:
    wanted = list(mlp()[1])
    wrong = 0
    for fields in ({"personal": "first"}, {"personal": ["layer1.bias", "layer2"]}, {"personal": "first", "frozen": ["layer2.weight"]}):
        fed = nets("partial", **fields)
        model = next(iter(fed.algo.candidates(tree.at(fed.shown(), 0), fed.users_at(0, 0)).values()))
        wrong += list(model) != wanted
    return wrong


@check("partial", "numbers sent: the shared part, down and up; one gradient a step", tolerance=0)
def sent() -> float:
    # The network has 3 4 + 4 = 16 numbers in the first layer and 4 3 + 3 = 15 in the last.
    cases = [({"personal": "last"}, 16, 3), ({"personal": "first"}, 15, 3), ({"personal": "all"}, 0, 3), ({"personal": "none"}, 31, 3)]
    cases += [({"personal": "none", "frozen": "last"}, 16, 3), ({"personal": ["layer1.bias"], "frozen": ["layer2.bias"]}, 24, 3)]
    cases += [({"schedule": "alternate", "personal_steps": 4}, 16, 7)]
    worst = 0
    for fields, numbers, steps in cases:
        cost = run(nets("partial", **fields), 2).costs[0]
        found = cost.floats_down, cost.floats_up, cost.grads, cost.steps
        worst = max(worst, *(abs(a - b) for a, b in zip(found, (4 * numbers, 4 * numbers, 4 * steps, 4 * steps), strict=True)))
    return worst


mutant("partial", "the step is twice as long", "part.opt, part.w, self.beta))", "part.opt, part.w, 2 * self.beta))")
mutant("partial", "the step goes uphill", "part.opt, part.w, self.beta))", "part.opt, part.w, -self.beta))")
mutant("partial", "the shared part moves first", "(first, ~first) if", "(~first, first) if")
mutant("partial", "one personal step too many", "info.step < self.personal_steps", "info.step <= self.personal_steps")
mutant("partial", "the personal steps are taken from tau", "else self.personal_steps + self.tau", "else self.tau")
mutant(
    "partial",
    "a part's optimizer moves out of turn",
    "tree.where(turn, new, part)",
    "Part(tree.where(turn, new.w, part.w), new.opt)",
)
mutant("partial", "the personal part is forgotten", "return local.shared.w, local.own.w", "return local.shared.w, user")
mutant("partial", "the server ignores what users sent", 'if server["w"] else (server, ())', 'if not server["w"] else (server, ())')
mutant("partial", "frozen parameters are averaged too", "not in mine | still", "not in mine")
mutant("partial", "the names lose their order", "{name: found[name] for name in order}", "found")
mutant("partial", "the other layers are taken for the first", "layer[name] == layer[next(", "layer[name] != layer[next(")
mutant("partial", "all that lies on the server counts as sent", 'tree.numel(down["w"])', "tree.numel(down)")
mutant("fedrep", "all parts move together", 'schedule: str = "alternate"', 'schedule: str = "joint"')
mutant("fedbabu", "the head is trained and averaged", 'frozen: Any = "last"', 'frozen: Any = "none"')
mutant("fedbabu", "the head is personal", 'personal: Any = "none"', 'personal: Any = "all"')
mutant("lgfedavg", "the last layer is personal", 'personal: Any = "first"', 'personal: Any = "last"')

cannot(
    "partial",
    "with tau > 1 the iterated map ends in the minimiser of sum f_i(u, v_i)",
    "users drift between averages as in FedAvg; the fixed point has a closed form of its own",
)
cannot(
    "partial",
    "joint and alternating schedules have one fixed point",
    "for tau > 1 they drift differently; they agree for tau = 1, in the minimiser",
)
