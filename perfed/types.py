"""Names shared by all modules, and the shape legend.

Shape legend: S seeds, N users, A active users of a round, L lanes (seeds x active users, flattened), T local steps,
B examples of a batch, C classes, F features.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

Params = dict[str, Tensor]
Tree = Any
"""A tensor, or a dict / tuple / NamedTuple of trees."""


class Batch(NamedTuple):
    """Examples of one user. ``loss = sum(weight * l) / sum(weight)``; padding has weight 0."""

    x: Tensor  # [B, ...] float
    y: Tensor  # [B] int64
    weight: Tensor  # [B] float
    index: Tensor  # [B] int64, position in the pool of examples (stable id of an example)


class State(NamedTuple):
    """Everything that survives a round. ``users`` leads with N, or is () for methods without user state."""

    server: Tree
    users: Tree


class Info(NamedTuple):
    """What a method may know about one user in one round. All tensors are scalars unless a shape is given."""

    user: Tensor  # int64, id of the user
    round: Tensor  # int64, k = 0 .. rounds-1
    step: Tensor  # int64, t = 0 .. tau-1
    n: int  # users that take part in training
    active: int  # A
    tau: int
    m: Tensor  # int64, training examples of the user
    counts: Tensor  # [C] int64, training examples per class
    t_k: Tensor  # int64, the round's common draw from {0, .., tau-1} (Remark 4.7)
    coin: Tensor  # float64 in [0, 1), the round's draw, common to all users
    chance: Tensor  # float64 in [0, 1), the round's draw of this user alone
