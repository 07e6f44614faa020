"""Arithmetic on trees: tensors nested in dicts, tuples and NamedTuples. Numbers pass through unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perfed.types import Tree


def map(f: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Apply ``f`` to corresponding tensors of trees of one structure."""
    if isinstance(tree, dict):
        return {k: map(f, v, *(r[k] for r in rest)) for k, v in tree.items()}
    if isinstance(tree, tuple):
        parts = [map(f, *items) for items in zip(tree, *rest, strict=True)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return f(tree, *rest) if isinstance(tree, Tensor) else tree


def leaves(tree: Tree) -> list[Tensor]:
    """The tensors of a tree, in a fixed order."""
    if isinstance(tree, dict):
        return [leaf for v in tree.values() for leaf in leaves(v)]
    if isinstance(tree, tuple):
        return [leaf for v in tree for leaf in leaves(v)]
    return [tree] if isinstance(tree, Tensor) else []


def axpy(a: float | Tensor, x: Tree, y: Tree) -> Tree:
    """y + a x."""
    return map(lambda xi, yi: yi + a * xi, x, y)


def scale(a: float | Tensor, x: Tree) -> Tree:
    """a x."""
    return map(lambda xi: a * xi, x)


def sub(x: Tree, y: Tree) -> Tree:
    """x - y."""
    return map(torch.sub, x, y)


def zeros(x: Tree) -> Tree:
    """Zeros of the same shapes."""
    return map(torch.zeros_like, x)


def where(mask: Tensor, x: Tree, y: Tree) -> Tree:
    """x where the mask holds, else y. The mask leads: its dimensions are the first ones of every tensor."""
    return map(lambda xi, yi: torch.where(mask.reshape(mask.shape + (1,) * (xi.ndim - mask.ndim)), xi, yi), x, y)


def dot(x: Tree, y: Tree) -> Tensor:
    """Inner product over all entries."""
    return sum((xi * yi).sum() for xi, yi in zip(leaves(x), leaves(y), strict=True))


def norm(x: Tree) -> Tensor:
    """Euclidean norm over all entries."""
    return dot(x, x).sqrt()


def mean(x: Tree, weight: Tensor) -> Tree:
    """sum_a weight_a x_a / sum_a weight_a over the leading axis; weight [A], of any dtype."""

    shares: dict[torch.dtype, Tensor] = {}

    def one(xi: Tensor) -> Tensor:
        if xi.dtype not in shares:
            share = weight.to(xi.dtype)
            shares[xi.dtype] = share / share.sum()
        return (shares[xi.dtype] @ xi.reshape(len(xi), -1)).reshape(xi.shape[1:])

    return map(one, x)


def at(tree: Tree, *index: Any) -> Tree:
    """``tensor[index]`` for every tensor."""
    return map(lambda t: t[index], tree)


def put(tree: Tree, index: tuple[Any, ...], values: Tree) -> Tree:
    """A copy of the tree in which ``tensor[index]`` holds the values."""
    return map(lambda t, v: t.index_put(index, v), tree, values)


def write(tree: Tree, index: tuple[Any, ...], values: Tree) -> None:
    """``tensor[index] = values`` in place, wherever the tensors lie."""
    for t, v in zip(leaves(tree), leaves(values), strict=True):
        t.index_put_(tuple(i.to(t.device) for i in index), v.to(t.device))


def numel(tree: Tree) -> int:
    """Number of entries."""
    return sum(leaf.numel() for leaf in leaves(tree))


def repeat(tree: Tree, count: int) -> Tree:
    """``count`` times the same along a new leading axis: a view, not to be written to."""
    return map(lambda t: t.expand(count, *t.shape), tree)


def stack(trees: list[Tree]) -> Tree:
    """Stack trees of one structure along a new leading axis."""
    return map(lambda *ts: torch.stack(ts), *trees)


def plain(tree: Tree) -> Tree:
    """The same with NamedTuples as dicts and tensors on the host: what torch's safe loading accepts."""
    if isinstance(tree, dict):
        return {k: plain(v) for k, v in tree.items()}
    if isinstance(tree, tuple):
        return plain(tree._asdict()) if hasattr(tree, "_fields") else [plain(v) for v in tree]
    return tree.detach().to("cpu", copy=True) if isinstance(tree, Tensor) else tree


def restore(like: Tree, stored: Tree) -> Tree:
    """Undo :func:`plain`, with the structure, devices and dtypes of ``like``."""
    if isinstance(like, dict):
        return {k: restore(v, stored[k]) for k, v in like.items()}
    if isinstance(like, tuple):
        values = list(stored.values()) if isinstance(stored, dict) else stored
        parts = [restore(v, s) for v, s in zip(like, values, strict=True)]
        return type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)
    return stored.to(like) if isinstance(like, Tensor) else stored
