"""Centralised training and the posterior reweighted by class shares."""

from __future__ import annotations

import numpy as np
import torch
from problems import Quadratic, blobs, drawn, federation, mlp, quadratic, random_quadratics, run, weights
from small import advance, algorithm, cloud, ranges, split
from small import federation as small_federation

from perfed import tree
from perfed.models import MODELS

from . import FIXED_POINT, cannot, check, mutant

BETA = 0.3
SIZES = [1, 4, 2]
A, B = random_quadratics(sum(SIZES), 3, seed=5)
START = np.array([1.0, -2.0, 0.5])


def quadratics(name, **fields):
    """Three users with 1, 4 and 2 quadratics."""
    examples = [quadratic(*ab) for ab in zip(A, B, strict=True)]
    xs = [np.concatenate([examples[j] for j in part]) for part in ranges(SIZES)]
    return federation(algorithm(name, **{"beta": BETA, "tau": 2, "batch": 4, **fields}), Quadratic(), xs, START)


def nets(name, sizes, **fields):
    model, start = mlp()
    xs, ys = blobs(sizes)
    options = {key: fields.pop(key) for key in ("active", "backend") if key in fields}
    algo = algorithm(name, **{"beta": 0.3, "tau": 3, "batch": 4, **fields})
    return federation(algo, model, xs, start, ys=ys, **options)


def models(fed, user, s=0):
    return fed.algo.candidates(tree.at(fed.shown(), s), fed.users_at(s, user))


@check("pooled", "gradient descent on the mean over all examples", tolerance=1e-13)
def descent() -> float:
    # w_t = w* + (I - beta A)^t (w_0 - w*) with the means A, b over examples and A w* = b; t = 3 rounds of 2.
    mean = A.mean(0)
    best = np.linalg.solve(mean, B.mean(0))
    want = best + np.linalg.matrix_power(np.eye(3) - BETA * mean, 6) @ (START - best)
    return np.abs(weights(run(quadratics("pooled"), 3)) - want).max()


@check("pooled", "ends in the minimiser of the mean over all examples", tolerance=1e-9, group=FIXED_POINT)
def end() -> tuple[float, float]:
    best = np.linalg.solve(A.mean(0), B.mean(0))
    found = weights(run(quadratics("pooled"), 100))
    return np.abs(found - best).max(), np.abs(found - best).max()


@check("pooled", "full batches and tau=1: FedAvg weighted by samples", tolerance=1e-13)
def is_fedavg_by_samples() -> float:
    one, other = quadratics("pooled", tau=1), quadratics("fedavg", tau=1, aggregation="samples")
    return np.abs(weights(run(one, 5)) - weights(run(other, 5))).max()


@check("pooled", "a lone user: FedAvg, bit by bit", tolerance=0)
def alone() -> float:
    worst = 0.0
    for backend in ("vmap", "loop"):
        one, other = (run(nets(name, [11], backend=backend), 4) for name in ("pooled", "fedavg"))
        worst = max(worst, np.abs(weights(one) - weights(other)).max())
    return worst


@check("pooled", "a step reads batch A different examples of all users, A gradients' worth; FedAvg's sum", tolerance=0)
def examples() -> float:
    fed, other = (run(nets(name, [9, 30, 12, 25], active=3), 5) for name in ("pooled", "fedavg"))
    wrong, seen = 0, set()
    for k in range(5):
        for pick in drawn(fed, 0, k, 3)["outer"]:
            wrong += len(pick) != 12 or len(set(pick)) != 12 or max(pick) >= 76
            seen |= set(pick)
    owners = {int(np.searchsorted([9, 39, 51, 76], i, side="right")) for i in seen}
    wrong += owners != {0, 1, 2, 3} or (fed.times_sampled != 5).any()
    return float(wrong) + abs(fed.costs[0].grads - other.costs[0].grads)


@check("pooled", "no numbers are counted as sent", tolerance=0)
def nothing_sent() -> float:
    cost = run(nets("pooled", [9, 8]), 2).costs[0]
    return cost.floats_down + cost.floats_up


COUNTS = np.array([[6, 2, 1], [1, 1, 5], [3, 4, 2]])
LABELS = [np.repeat(np.arange(3), row) for row in COUNTS]


@check("pooled", "reweighted is the user's posterior p(x|y) p_i(y) / sum, exactly", tolerance=1e-12)
def bayes() -> float:
    # x is one of 4 symbols with the shares p(x|y), one-hot: the logits log p(x|y) + log p(y) are the pooled posterior.
    rng = np.random.default_rng(0)
    likelihood = rng.dirichlet(np.ones(4), 3).T  # [x, y]
    start = {
        "layer1.weight": torch.from_numpy(np.log(likelihood)),
        "layer1.bias": torch.from_numpy(np.log(COUNTS.sum(0) / COUNTS.sum())),
    }
    xs = [np.eye(4)[rng.integers(0, 4, len(y))] for y in LABELS]
    fed = federation(algorithm("pooled"), MODELS["logistic"](name="logistic"), xs, start, ys=LABELS)
    worst = 0.0
    for i, row in enumerate(COUNTS):
        scores = fed.task.model.apply(models(fed, i)["reweighted"], torch.eye(4, dtype=torch.float64))
        joint = likelihood * (row / row.sum())
        worst = max(worst, np.abs(torch.softmax(scores, 1).numpy() - joint / joint.sum(1, keepdims=True)).max())
    return worst


def held_out(**fields):
    """Four users, the last one held out; class 3 belongs to him alone, class 4 to nobody, and user 0 has none of classes 1 and 2."""
    counts = np.array([[5, 0, 0, 0, 0], [1, 3, 2, 0, 0], [0, 4, 4, 0, 0], [2, 1, 0, 3, 0]])
    y = np.concatenate([*(np.repeat(np.arange(5), row) for row in counts), np.zeros(4, int)])
    part = split(ranges(counts.sum(1)), ranges([1] * 4, counts.sum()), seen=[True, True, True, False])
    x, _ = cloud(len(y))
    return counts, small_federation(algorithm("pooled", **fields), x, y, [part], active=2, classes=5)


@check("pooled", "log p_i(y) - log p(y), p over members, with a floor for absent classes", tolerance=1e-14)
def shifts() -> float:
    worst = 0.0
    for floor in (0.5, 0.1):
        counts, fed = held_out(floor=floor)
        total = counts[:3].sum(0)
        for i in range(4):
            want = np.zeros(5)
            for y in range(3):  # classes 3 and 4 have no training user: their bias stays
                want[y] = np.log(max(counts[i, y], floor) / counts[i].sum()) - np.log(total[y] / total.sum())
            found = models(fed, i)
            added = found["reweighted"]["layer2.bias"] - found["global"]["layer2.bias"]
            worst = max(worst, np.abs(added.numpy() - want).max())
            others = [name for name in found["global"] if name != "layer2.bias"]
            worst = max(worst, *(float((found["reweighted"][n] - found["global"][n]).abs().max()) for n in others))
    return worst


@check("pooled", "rounds change no user's class shares", tolerance=0)
def kept() -> float:
    _, fed = held_out()
    before = {name: t.clone() for name, t in fed.state.users.items()}
    advance(fed, 2)
    return max(float((fed.state.users[name] - t).abs().max()) for name, t in before.items())


@check("pooled", "no reweighted model without an output bias or without cross-entropy", tolerance=0)
def left_out() -> float:
    x, y = cloud(20)
    part = split(ranges([8, 8]), ranges([2, 2], 16))
    without = [("logistic", {"bias": False}, False), ("langelaar", {"hidden": [4]}, False)]
    cases = [*without, ("logistic", {}, True), ("mlp", {"hidden": [4]}, True)]
    wrong = 0
    for name, fields, wanted in cases:
        fed = small_federation(algorithm("pooled"), x, y, [part], model=MODELS[name](name=name, **fields))
        wrong += ("reweighted" in models(fed, 0)) != wanted
    return wrong


mutant("pooled", "a step reads one user's batch", "self.batch * active", "self.batch")
mutant("pooled", "users are drawn", 'return "together"', 'return "sampled"')
mutant("pooled", "the pooled shares are added", "mine.log() - (total", "mine.log() + (total")
mutant("pooled", "the pooled shares are left out", "mine.log() - (total.clamp(min=1) / total.sum()).log()", "mine.log()")
mutant("pooled", "the shift is subtracted", "value + user[name]", "value - user[name]")
mutant("pooled", "held-out users count in the pooled shares", "counts[population.members].sum(0)", "counts.sum(0)")
mutant("pooled", "every class gets the floor on top", "counts.clamp(min=self.floor)", "(counts + self.floor)")
mutant("pooled", "classes that nobody has are shifted", "torch.where(total > 0,", "torch.where(total >= 0,")
mutant("pooled", "squared errors are taken for logits", "type(model).losses is not Model.losses", "False")
mutant("pooled", "the model is counted as sent", "upload, info):\n        return 0", "upload, info):\n        return 1")

cannot("pooled", "no personal model is better", "where users' labels contradict each other one model cannot fit all of them")
