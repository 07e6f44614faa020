"""What a round draws: who trains, on which batches, and the numbers that a method may know.

Everything is a pure function of its key (:mod:`perfed.data.sampling`), drawn on the host for all lanes at once; where rounds
are small, for some rounds at once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from perfed import tree
from perfed.algorithms.base import Algorithm
from perfed.data.partition import Owned, Partition
from perfed.data.sampling import Draw, cohort, draw, key, permuted, uniforms
from perfed.types import Batch, Info

AHEAD = 2**17
"""Positions that are drawn at once, of as many rounds as it takes: where rounds are small, numpy's calls cost more than their work."""
AHEAD_ROUNDS = 16


class Pool(NamedTuple):
    """All examples on the device, as stored; scaled when gathered: (x - offset) * scale."""

    x: Tensor  # [M, ...] uint8 or float
    y: Tensor  # [M] int64
    scale: Tensor  # broadcasts against one example
    shift: Tensor | None  # -offset * scale; None: no shift

    def batch(self, index: Tensor, weight: Tensor) -> Batch:
        """index, weight [...] -> Batch with x [..., *shape]."""
        x = self.x[index].to(self.scale.dtype) * self.scale
        return Batch(x if self.shift is None else x + self.shift, self.y[index], weight, index)


def make_pool(x: np.ndarray, y: np.ndarray, offset: np.ndarray, scale: np.ndarray, device: torch.device, dtype: torch.dtype) -> Pool:
    """Arrays of a data set (offset and scale a number, or one per channel of [M, C, H, W]) -> Pool."""
    tail = (1,) * (x.ndim - 2) if np.ndim(scale) else ()
    scale = np.asarray(scale, np.float64).reshape(np.shape(scale) + tail)
    shift = -np.asarray(offset, np.float64).reshape(np.shape(offset) + tail) * scale
    values = torch.from_numpy(x).to(device)
    return Pool(
        values if values.dtype == torch.uint8 else values.to(dtype),
        torch.from_numpy(y).to(device),
        torch.as_tensor(scale, dtype=dtype, device=device),
        torch.as_tensor(shift, dtype=dtype, device=device) if np.any(shift) else None,
    )


class SeedData(NamedTuple):
    """One seed: who owns what, and the keys of its streams."""

    partition: Partition
    members: np.ndarray  # ids of the users that take part in training, ascending
    sampling: int  # seed of participation and batches


class Lanes(NamedTuple):
    """Which seed (row of the stacks) and user each lane is. [L] each, host."""

    seed: np.ndarray
    user: np.ndarray


class Plan(NamedTuple):
    """What a round draws. ``index`` and ``weight``: by role, [L, B] for each step; None: not drawn yet."""

    lanes: Lanes
    chosen: np.ndarray  # [S, R], which lanes report
    info: dict[str, Tensor]  # [L, ...]
    index: dict[str, tuple[Tensor, ...]] | None = None
    weight: dict[str, tuple[Tensor, ...]] | None = None


def positions(
    owned: list[Owned], lanes: Lanes, keys: np.ndarray, what: Draw, width: int | None = None, orders: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """keys [L, T] -> pool positions [L, T, B] and weights [L, T, B] (0 on the padding of users with fewer than B).

    width: B; default the largest batch among these lanes. orders [L]: keys of the order in which a draw with ``part`` is cut.
    """
    start = np.array([owned[s].offsets[u] for s, u in zip(lanes.seed, lanes.user, strict=True)])
    m = np.array([owned[s].offsets[u + 1] for s, u in zip(lanes.seed, lanes.user, strict=True)]) - start
    width = width or int(min(what.size, (m - what.start).max()))
    rows, steps = keys.shape
    index = np.empty((rows, steps, width), dtype=np.int64)
    weight = np.ones((rows, steps, width), dtype=np.float32)
    many = m >= what.plenty()
    for group in ([many] if many.any() else []) + [m == size for size in np.unique(m[~many])]:
        lane = np.nonzero(group)[0]
        size = int(m[lane[0]])
        low, high = what.bounds(size)
        local = low + draw(keys[lane].ravel(), np.repeat(m[lane], steps) if many[lane[0]] else high - low, what)
        local = local.reshape(len(lane), steps, -1)
        got = local.shape[2]
        if what.part is not None:
            order = permuted(orders[lane], size, size)
            local = np.take_along_axis(order, local.reshape(len(lane), -1), axis=1).reshape(local.shape)
        index[lane, :, :got] = local + start[lane, None, None]
        index[lane, :, got:] = start[lane, None, None]
        weight[lane, :, got:] = 0
    for s in np.unique(lanes.seed):
        lane = lanes.seed == s
        index[lane] = owned[s].index[index[lane]]
    return index, weight


class Draws:
    """The part of a simulation that draws. What it needs of the rest is named here."""

    algo: Algorithm
    data: list[SeedData]
    pool: Pool
    n: int  # users that take part in training
    active: int
    chunk: int | None
    largest: int  # most examples of one who trains
    sizes: Tensor  # [S, N] int64
    counts: Tensor  # [S, N, C] int64
    device: torch.device
    dtype: torch.dtype
    _trained_on: tuple[list[Owned], Tensor, Tensor]  # what each who trains owns, and its sizes and counts

    def _whole(self) -> tuple[list[Owned], Tensor, Tensor]:
        """The data of all members as those of one user."""
        index = [np.concatenate([d.partition.train.of(u) for u in d.members]) for d in self.data]
        counts = torch.stack([self.counts[s][d.members].sum(0) for s, d in enumerate(self.data)])
        sizes = torch.tensor([len(i) for i in index])
        return [Owned(i, np.array([0, len(i)])) for i in index], sizes[:, None], counts[:, None]

    def cohorts(self, k: int) -> np.ndarray:
        """[S, A] ids of the active users of round k."""
        return np.stack([d.members[cohort(d.sampling, k, self.n, self.active)] for d in self.data])

    def batches(self, lanes: Lanes, k: int | np.ndarray, steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Pool positions and weights of ``steps`` steps: {role: [L, T, B]}. k: the round, or one for each lane."""
        owned, _, _ = self._trained_on
        seeds = np.array([d.sampling for d in self.data])[lanes.seed]
        orders = key(seeds, "part", lanes.user)
        at = np.array([self.algo.stream_step(t) for t in range(steps)])
        index, weight = {}, {}
        for role, what in self.algo.draws(self.active).items():
            keys = key(seeds[:, None], what.stream, lanes.user[:, None], np.reshape(k, (-1, 1)), at[None])
            low, high = what.bounds(self.largest)
            i, w = positions(owned, lanes, keys, what, min(what.size, high - low - what.start), orders)
            index[role] = torch.from_numpy(i).to(self.device)
            weight[role] = torch.from_numpy(w).to(self.device, self.dtype)
        return index, weight

    def lanes(self, k: int) -> tuple[Lanes, np.ndarray]:
        """Who trains in round k, seed by seed, and [S, R] which of these lanes report to the server."""
        seeds = np.arange(len(self.data))
        if self.algo.trains == "together":
            return Lanes(seeds, np.zeros_like(seeds)), seeds[:, None]
        active = self.cohorts(k)
        if self.algo.trains == "sampled":
            return Lanes(np.repeat(seeds, self.active), active.ravel()), np.arange(active.size).reshape(active.shape)
        members = np.stack([d.members for d in self.data])
        every = Lanes(np.repeat(seeds, self.n), members.ravel())
        if self.algo.reports == "all":
            return every, np.arange(members.size).reshape(members.shape)
        return every, np.stack([np.searchsorted(m, a) for m, a in zip(members, active, strict=True)]) + seeds[:, None] * self.n

    def info(self, lanes: Lanes, k: int | np.ndarray) -> dict[str, Tensor]:
        """The tensors of Info for each lane, [L, ...]. k: the round, or one for each lane."""
        _, sizes, counts = self._trained_on
        seeds = np.array([d.sampling for d in self.data])[lanes.seed]
        keys = [key(seeds, "tk", k), key(seeds, "coin", k), key(seeds, "chance", lanes.user, k)]
        t_k, coin, chance = uniforms(np.stack(keys), 1)[..., 0]
        seed, user = torch.from_numpy(lanes.seed), torch.from_numpy(lanes.user)
        fields = {
            "user": user,
            "round": torch.from_numpy(np.broadcast_to(k, seeds.shape).astype(np.int64)),
            "step": torch.zeros_like(user),
            "m": sizes[seed, user],
            "counts": counts[seed, user],
            "t_k": torch.from_numpy((t_k * self.algo.tau).astype(np.int64)),
            "coin": torch.from_numpy(coin),
            "chance": torch.from_numpy(chance),
        }
        return {name: value.to(self.device) for name, value in fields.items()}

    def _info(self, fields: dict[str, Tensor]) -> Info:
        return Info(n=self.n, active=self.active, tau=self.algo.tau, **fields)

    def plans(self, k: int) -> dict[int, Plan]:
        """What round k draws and, where rounds are small, some more after it: draws depend on nothing but their keys."""
        now = self.lanes(k)
        size = len(now[0].user)
        width = sum(what.size for what in self.algo.draws(self.active).values())
        whole = self._pieces(size) == 1  # else each piece draws for itself, to hold no more at once
        fit = AHEAD // max(1, size * width * self.algo.local_steps_at_most())
        ks = range(k, k + (min(max(1, fit), AHEAD_ROUNDS) if whole else 1))
        drawn = [now, *(self.lanes(j) for j in ks[1:])]
        every = Lanes(*(np.concatenate(part) for part in zip(*(lanes for lanes, _ in drawn), strict=True)))
        rounds = np.repeat(np.array(ks), size)
        info = self.info(every, rounds)
        index, weight = self._by_step(every, rounds, info, len(ks)) if whole else (None, None)
        out = {}
        for i, (lanes, chosen) in enumerate(drawn):
            here = tree.at(info, slice(i * size, (i + 1) * size))
            batches = [part and {role: steps[i] for role, steps in part.items()} for part in (index, weight)]
            out[ks[i]] = Plan(lanes, chosen, here, *batches)
        return out

    def _by_step(self, lanes: Lanes, k: int | np.ndarray, info: dict[str, Tensor], rounds: int = 1) -> list[dict[str, list]]:
        """Index and weight of the batches of ``rounds`` rounds: by role, for each round, for each step, [L, B].

        In this order in memory: strides that do not depend on the number of steps, for which a compiled step would be made anew.
        """
        steps = self.algo.local_steps(self._info(info))
        horizon = int(steps.max()) if torch.is_tensor(steps) else steps

        def sorted_by_step(part: Tensor) -> list[tuple[Tensor, ...]]:
            return [one.unbind(0) for one in part.unflatten(0, (rounds, -1)).transpose(1, 2).contiguous().unbind(0)]

        return [tree.map(sorted_by_step, parts) for parts in self.batches(lanes, k, horizon)] if horizon else [{}, {}]

    def _pieces(self, lanes: int) -> int:
        return math.ceil(lanes / (self.chunk or lanes))

    def everything(self, lanes: Lanes) -> Batch:
        """All training data of each lane's user, in his order, [L, M, ...]; M is the largest size among them."""
        owned, sizes, _ = self._trained_on
        width = int(sizes[lanes.seed, lanes.user].max())
        index, weight = positions(owned, lanes, np.zeros((len(lanes.user), 1), dtype=np.uint64), Draw(width, "all"))
        return self.pool.batch(torch.from_numpy(index[:, 0]).to(self.device), torch.from_numpy(weight[:, 0]).to(self.device, self.dtype))
