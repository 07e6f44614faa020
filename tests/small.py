"""Small federations, built by hand: no configuration, no files."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from perfed import tree
from perfed.algorithms import ALGORITHMS
from perfed.algorithms.base import Task
from perfed.data.partition import Owned, Partition
from perfed.data.sampling import generator
from perfed.draws import SeedData, make_pool
from perfed.federate import Federation
from perfed.models import MODELS
from perfed.optimizers import LOCAL, SERVER

torch.set_num_threads(1)

SMALL = {"tau": 3, "batch": 40, "alpha": 0.05, "beta": 0.1}
LINEAR = {"mocha"}  # methods of linear models alone
FIXED = {"fedmeta": {"tau": 1}, "metasgd": {"tau": 1}}  # one gradient a round is their definition


def algorithm(name: str, **fields: Any):
    """A registered algorithm with small constants; those that it has no field for are left out. ``fields`` always count."""
    cls, fields = ALGORITHMS[name], {**fields, **FIXED.get(name, {})}
    has = {f.name for f in dataclasses.fields(cls)}
    return cls(name=name, **{k: v for k, v in SMALL.items() if k in has and k not in fields}, **fields)


def owned(lists: Sequence[Sequence[int]]) -> Owned:
    """Pool positions user by user."""
    sizes = [len(part) for part in lists]
    return Owned(np.array([i for part in lists for i in part], dtype=np.int64), np.cumsum([0, *sizes], dtype=np.int64))


def split(train, test, val=None, seen=None) -> Partition:
    """Lists of pool positions, one per user -> Partition with one group."""
    n = len(train)
    seen = np.ones(n, dtype=bool) if seen is None else np.asarray(seen, dtype=bool)
    return Partition(owned(train), owned(val or [[]] * n), owned(test), np.zeros(n, dtype=np.int64), ("all",), seen)


def ranges(sizes: Sequence[int], start: int = 0) -> list[list[int]]:
    """[2, 3] -> [[0, 1], [2, 3, 4]], shifted by ``start``."""
    ends = start + np.cumsum([0, *sizes])
    return [list(range(a, b)) for a, b in zip(ends, ends[1:], strict=False)]


def cloud(count: int, features: int = 3, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """``count`` random vectors with labels that depend on them."""
    rng = generator(7, "cloud")
    x = rng.standard_normal((count, features))
    y = (x @ rng.standard_normal((features, classes)) + 0.3 * rng.standard_normal((count, classes))).argmax(1)
    return x, y.astype(np.int64)


def federation(
    algo,
    x,
    y,
    partitions: Sequence[Partition],
    *,
    seeds: Sequence[int] = (0,),
    active: int | None = None,
    classes: int = 3,
    model=None,
    initial=None,
    local=None,
    server=None,
    adapted=None,
    backend: str = "vmap",
    chunk: int | None = None,
    compiled: bool = False,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    **engine: Any,
) -> Federation:
    """One partition for each seed; ``active`` None is all members."""
    model = model or (MODELS["logistic"](name="logistic") if algo.name in LINEAR else MODELS["mlp"](name="mlp", hidden=[5]))
    x = np.asarray(x)
    if initial is None:
        initial = [model.init(x.shape[1:], classes, generator(seed, "init")) for seed in seeds]
    data = [SeedData(p, np.nonzero(p.seen)[0], seed) for p, seed in zip(partitions, seeds, strict=True)]
    pool = make_pool(x, np.asarray(y, dtype=np.int64), np.float64(0), np.float64(1), torch.device(device), dtype)
    return Federation(
        algo=algo,
        task=Task(model, local or LOCAL["sgd"](name="sgd"), server or SERVER["average"](name="average"), adapted),
        pool=pool,
        data=data,
        initial=initial,
        active=active or len(data[0].members),
        classes=classes,
        backend=backend,
        chunk=chunk,
        compiled=compiled,
        **engine,
    )


def advance(fed: Federation, rounds: int) -> Federation:
    for _ in range(rounds):
        fed.round()
    return fed


def coin(labels_train: Sequence[Sequence[int]], labels_test: Sequence[Sequence[int]], algo=None, **more: Any) -> Federation:
    """COIN of the public fault list: every input is 1, one linear layer 1 -> 2 without bias that starts at (0, 0)."""
    sizes_train, sizes_test = [len(p) for p in labels_train], [len(p) for p in labels_test]
    y = np.array([v for part in (*labels_train, *labels_test) for v in part], dtype=np.int64)
    part = split(ranges(sizes_train), ranges(sizes_test, sum(sizes_train)))
    algo = algo or algorithm("fedavg", tau=1, batch=100, beta=1.0)
    return federation(algo, np.ones((len(y), 1)), y, [part], classes=2, model=MODELS["logistic"](name="logistic", bias=False), **more)


def structure(t) -> Any:
    """Keys, kinds, shapes and dtypes of a tree."""
    if isinstance(t, dict):
        return {k: structure(v) for k, v in t.items()}
    if isinstance(t, tuple):
        return (type(t).__name__, *map(structure, t))
    return (tuple(t.shape), t.dtype) if isinstance(t, torch.Tensor) else type(t).__name__


def clone(t):
    return tree.map(torch.clone, t)


def same(a, b) -> bool:
    """Bitwise, NaN equal to NaN."""
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=True)
    return structure(a) == structure(b) and all(torch.equal(torch.nan_to_num(x, 123.0), torch.nan_to_num(y, 123.0)) for x, y in pairs)


def close(a, b, rtol: float = 1e-12, atol: float = 1e-13) -> None:
    """Equal structure, and entries within rtol, relative to the largest entry of each tensor."""
    assert structure(a) == structure(b)
    for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True):
        size = float(y.abs().max()) if y.numel() else 0.0
        torch.testing.assert_close(x, y, rtol=rtol, atol=max(atol, rtol * size))
