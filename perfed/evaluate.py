"""Protocols: which model, adapted how, scored on what. Evaluating changes nothing.

    clean    adapt on the user's train data, score on all his untouched test data
    paper    adapt on a batch of the user's test data, score on all his test data (as in the Per-FedAvg paper, section 5)
    fewshot  adapt on a labelled support set taken from the test data, score on the disjoint rest

Adaptation batches come from the stream (seed, "adapt", user, repeat, step): the same for every method and every round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from perfed import tree
from perfed.binding import Method
from perfed.data.partition import Owned
from perfed.data.sampling import Draw, key, permuted
from perfed.draws import Lanes, positions
from perfed.errors import UserError
from perfed.federate import Federation
from perfed.types import Tree

_CHUNK_NUMBERS = 8_000_000  # inputs and parameters of one scored chunk; bounds the memory of an evaluation


@dataclass(frozen=True)
class Protocol:
    """A resolved protocol. ``batch`` None is all the adaptation data; ``steps`` holds 0 and every J to be scored."""

    label: str
    source: str  # train | test: where the adaptation data come from
    support: int | None  # size of a support set cut from the test data; None: nothing is cut
    batch: int | None
    repeats: int
    steps: tuple[int, ...]
    lr: float | None  # None: the step that the method learned

    def text(self) -> str:
        """One sentence for a caption."""
        size = "all" if self.batch is None else f"a batch of {self.batch}"
        if self.support is not None:
            size = "all" if self.batch is None or self.batch >= self.support else size
            size = f"{size} of the {self.support} support examples" if self.source == "test" else f"{size} of the train data"
            scored = f"scored on the test data without the {self.support} support examples"
        else:
            size, scored = f"{size} of the user's {self.source} data", "scored on all test data of the user"
        again = "" if self.repeats == 1 else f", mean of {self.repeats} draws"
        return f"protocol {self.label}: each step on {size}, {scored}{again}, unweighted mean over users"


class Scores(NamedTuple):
    """correct, loss [S, N, models, steps]: share of scored examples, mean over repeats; n_scored [S, N]."""

    models: tuple[str, ...]
    steps: tuple[int, ...]
    correct: np.ndarray
    loss: np.ndarray
    n_scored: np.ndarray


def check(protocol: Protocol, data: list[Owned]) -> None:
    """Refuse a support set that leaves a user nothing to score."""
    if protocol.support is not None:
        small = sorted({int(u) for owned in data for u in np.nonzero(owned.sizes <= protocol.support)[0]})
        if small:
            least = min(int(owned.sizes.min()) for owned in data)
            raise UserError(
                "protocol.support", protocol.support, f"at most {least - 1}: users {small[:10]} have no more test examples than that"
            )


def judge(fed: Federation, protocol: Protocol) -> Scores:
    """:func:`evaluate`, and mark the seeds whose scores are not finite as diverged."""
    scores = evaluate(fed, protocol)
    fed.mark(torch.from_numpy(~np.isfinite(scores.loss).all(axis=(1, 2, 3))).to(fed.device))
    return scores


def validate(fed: Federation, protocol: Protocol) -> Scores:
    """The same on the held-out validation data: adapt on train data, score all validation data, for selection only."""
    return evaluate(fed, replace(protocol, source="train", support=None, repeats=1), part="val")


def evaluate(fed: Federation, protocol: Protocol, part: str = "test") -> Scores:
    """Score every user (held-out ones too), before and after adaptation, for every candidate model of the method.

    ``part``: which of the user's data are scored. A user without any has the accuracy NaN.
    """
    seeds, users = len(fed.data), len(fed.sizes[0])
    tests = [getattr(d.partition, part) for d in fed.data]
    everyone = Lanes(np.repeat(np.arange(seeds), users), np.tile(np.arange(users), seeds))
    test_sizes = np.concatenate([owned.sizes for owned in tests])
    order = np.argsort(-test_sizes, kind="stable")  # lanes of like size share a chunk: little padding
    order = order[test_sizes[order] > 0]
    per_example = max(1, int(np.prod(fed.pool.x.shape[1:])))
    per_model = 3 * sum(value.numel() for value in fed.initial[0].values())  # the model, its gradient, the adapted one
    names: tuple[str, ...] = ()
    correct = loss = np.empty(0)
    done, shown = 0, fed.shown()
    while done < len(order):
        width = max(1, int(test_sizes[order[done]]))
        here = order[done : done + max(1, _CHUNK_NUMBERS // (width * per_example + per_model))]
        lanes = Lanes(everyone.seed[here], everyone.user[here])
        found = _chunk(fed, protocol, tests, lanes, shown)
        if not names:
            names = tuple(found)
            correct = np.full((seeds * users, len(names), len(protocol.steps)), np.nan)
            loss = correct.copy()
        for j, name in enumerate(names):
            correct[here, j], loss[here, j] = found[name]
        done += len(here)
    shape = (seeds, users, len(names), len(protocol.steps))
    n_scored = test_sizes - (protocol.support or 0)
    return Scores(names, protocol.steps, correct.reshape(shape), loss.reshape(shape), n_scored.reshape(seeds, users))


def _chunk(fed: Federation, protocol: Protocol, tests: list[Owned], lanes: Lanes, shown: Tree) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """{model: (correct, loss)}, each [L, steps], for some lanes."""
    size = len(lanes.user)
    seed, user = (torch.from_numpy(part).to(fed.device) for part in lanes)
    own = fed.own(lanes.seed)
    models = fed.map(lambda m, server, user: m.algo.candidates(server, user), size, own, tree.at(shown, seed), fed.users_at(seed, user))
    sums = {name: torch.zeros(2, size, len(protocol.steps), dtype=torch.float64) for name in models}
    fixed = None if protocol.support is not None else _scored(fed, tests, lanes, None)
    for repeat in range(protocol.repeats):
        support = _support(fed, protocol, tests, lanes, repeat)
        x, y, weight = fixed or _scored(fed, tests, lanes, support)
        for name, params in models.items():
            carry = fed.map(lambda m, p: m.algo.adapt_init(m.task, p), size, own, params)
            for t in range(max(protocol.steps) + 1):
                if t in protocol.steps and (t > 0 or repeat == 0 or support is not None):
                    at = protocol.steps.index(t)
                    again = protocol.repeats if t == 0 and support is None else 1  # not adapted: every repeat is the same
                    sums[name][:, :, at] += again * _score(fed, own, carry, x, y, weight).cpu()
                if t < max(protocol.steps):
                    batch = _adaptation(fed, protocol, tests, lanes, support, repeat, t)
                    carry = fed.map(lambda m, c, b: m.algo.adapt_step(m.task, c, b, m.adapt_lr(protocol.lr)), size, own, carry, batch)
    return {name: tuple((total / protocol.repeats).numpy()) for name, total in sums.items()}


def adapted_models(fed: Federation, protocol: Protocol, s: int, user: int, steps: int) -> dict[str, Tree]:
    """The models of one user of the seed in row s after ``steps`` adaptation steps (first repeat), by name."""
    lanes = Lanes(np.array([s]), np.array([user]))
    tests = [d.partition.test for d in fed.data]
    support = _support(fed, protocol, tests, lanes, 0)
    out, m = {}, fed.method(s)
    for name, params in m.algo.candidates(tree.at(fed.shown(), s), fed.users_at(s, user)).items():
        carry = m.algo.adapt_init(m.task, params)
        for t in range(steps):
            batch = tree.at(_adaptation(fed, protocol, tests, lanes, support, 0, t), 0)
            carry = m.algo.adapt_step(m.task, carry, batch, m.adapt_lr(protocol.lr))
        out[name] = m.algo.adapted(carry)
    return out


def _support(fed: Federation, protocol: Protocol, tests: list[Owned], lanes: Lanes, repeat: int) -> list[np.ndarray] | None:
    """For each lane the positions of its support set in the user's test data; None where nothing is cut."""
    if protocol.support is None:
        return None
    keys = _keys(fed, lanes, "support", repeat)[:, 0]
    return [permuted(keys[i : i + 1], int(tests[s].sizes[u]), protocol.support)[0] for i, (s, u) in _each(lanes)]


def _each(lanes: Lanes):
    return enumerate(zip(lanes.seed, lanes.user, strict=True))


def _keys(fed: Federation, lanes: Lanes, role: str, repeat: int, step: int = 0) -> np.ndarray:
    """[L, 1] keys of a stream."""
    seeds = np.array([d.sampling for d in fed.data])[lanes.seed]
    return np.asarray(key(seeds, role, lanes.user, repeat, step))[:, None]


def _scored(fed: Federation, tests: list[Owned], lanes: Lanes, support: list[np.ndarray] | None) -> tuple[Tensor, Tensor, Tensor]:
    """Padded inputs [L, B, ...], labels and weights [L, B] of what is scored."""
    mine = []
    for i, (s, u) in _each(lanes):
        index = tests[s].of(u)
        mine.append(index if support is None else np.delete(index, support[i]))
    width = max(len(m) for m in mine)
    index = np.stack([np.pad(m, (0, width - len(m)), mode="edge") for m in mine])
    weight = np.stack([np.arange(width) < len(m) for m in mine])
    batch = fed.pool.batch(torch.from_numpy(index).to(fed.device), torch.from_numpy(weight).to(fed.device, fed.dtype))
    return batch.x, batch.y, batch.weight


def _adaptation(
    fed: Federation, protocol: Protocol, tests: list[Owned], lanes: Lanes, support: list[np.ndarray] | None, repeat: int, step: int
) -> Tree:
    """The batch of one adaptation step, leading with L."""
    owned = fed.train if protocol.source == "train" else tests
    keys = _keys(fed, lanes, "adapt", repeat, step)
    if support is None or protocol.source == "train":
        every = max(int(o.sizes.max()) for o in owned)
        index, weight = positions(owned, lanes, keys, Draw(protocol.batch or every, "adapt"))
        index, weight = index[:, 0], weight[:, 0]
    else:
        count = min(protocol.batch or protocol.support, protocol.support)
        picked = [s[: count] if count == len(s) else s[permuted(keys[i], len(s), count)[0]] for i, s in enumerate(support)]
        index = np.stack([tests[s].of(u)[picked[i]] for i, (s, u) in _each(lanes)])
        weight = np.ones(index.shape)
    return fed.pool.batch(torch.from_numpy(index).to(fed.device), torch.from_numpy(weight).to(fed.device, fed.dtype))


def _score(fed: Federation, own: dict[str, Tensor], carry: Tree, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """[2, L] float64: share of correct predictions and mean loss."""

    def one(m: Method, carry: Tree, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        scores = m.task.model.apply(m.algo.adapted(carry), x)
        losses = m.task.model.losses(scores, y)
        # A score that is not finite predicts nothing: the argmax of NaN would be class 0.
        hits = ((scores.argmax(-1) == y) & torch.isfinite(scores).all(-1)).to(weight)
        return torch.stack([(weight * hits).sum(), (weight * losses).sum(), weight.sum()])

    hits, losses, counts = fed.map(one, len(y), own, carry, x, y, weight).to(torch.float64).T  # counts of examples are exact
    return torch.stack([hits, losses]) / counts
