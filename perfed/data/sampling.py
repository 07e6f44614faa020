"""Named random streams; the only randomness in training.

Every draw is a pure function of its key (seed, role, user, round, step): no generator state exists, so nothing has
to be saved, and a result depends neither on the order of users nor on the algorithm. Numbers come from a 64-bit
counter hash (the splitmix64 finaliser), evaluated for whole arrays at a time on the host.
"""

from __future__ import annotations

import math
import zlib
from decimal import Decimal
from typing import NamedTuple

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
LONG = 97
"""From so many examples on, rejecting repeats is cheaper than a permutation by sorted keys."""


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * _M1
    z = (z ^ (z >> np.uint64(27))) * _M2
    return z ^ (z >> np.uint64(31))


def key(*parts: int | str | np.ndarray) -> np.ndarray:
    """Hash integers, names and integer arrays (broadcast against each other) into uint64 keys."""
    out = np.uint64(0)
    with np.errstate(over="ignore"):
        for part in parts:
            if isinstance(part, str):
                part = zlib.crc32(part.encode())
            out = _mix((out ^ np.asarray(part).astype(np.int64).view(np.uint64)) + _GOLDEN)
    return np.asarray(out, dtype=np.uint64)


def uniforms(keys: np.ndarray, count: int, start: int = 0) -> np.ndarray:
    """``[..., count]`` floats in [0, 1): positions start .. start+count-1 of each key's stream."""
    with np.errstate(over="ignore"):
        position = np.arange(start + 1, start + count + 1, dtype=np.uint64) * _GOLDEN
        bits = _mix(np.asarray(keys, dtype=np.uint64)[..., None] + position)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def generator(*parts: int | str) -> np.random.Generator:
    """A numpy generator for set-up work (partition, initial weights), keyed like every other stream."""
    return np.random.Generator(np.random.Philox(key=int(key(*parts))))


def permuted(keys: np.ndarray, m: int | np.ndarray, size: int) -> np.ndarray:
    """Ordered uniform samples without replacement from {0, .., m-1}.

    keys [R] -> [R, min(size, m)] int64. A shorter draw of a key is the beginning of a longer one. ``m`` [R], one for each
    key, gives the same: each must be at least ``size`` and ``LONG``.
    """
    if not isinstance(m, np.ndarray):
        size = min(size, m)
        if m < LONG:
            return np.argsort(uniforms(keys, m), axis=1, kind="stable")[:, :size]
        m = np.full(len(keys), m)
    # The first `size` distinct values of an i.i.d. stream are a uniform ordered sample without replacement.
    width = size + 8 + size * size // int(m.min())
    while True:
        stream = (uniforms(keys, width) * m[:, None]).astype(np.int64)
        # Sorted by value and, where values are equal, by position: one number holds both, which sorts faster than by index.
        shift = width.bit_length()
        code = np.sort((stream << shift) | np.arange(width), axis=1)
        row, at = np.nonzero(code[:, 1:] >> shift == code[:, :-1] >> shift)
        new = np.ones(stream.shape, dtype=bool)
        new[row, code[row, at + 1] & ((1 << shift) - 1)] = False
        order = new.cumsum(axis=1)
        if order[:, -1].min() >= size:
            return stream[new & (order <= size)].reshape(-1, size)
        width *= 2


class Draw(NamedTuple):
    """Which examples a step reads: positions start .. start+size-1 of a stream's shuffled order of the user's data.

    Roles with different streams are independent; one stream and different starts give disjoint batches.
    ``part``: the draw is confined to the shares from .. to of the user's data, in an order that is shuffled once for
    the whole run (a support set that stays the same); each part has an example at least.
    """

    size: int
    stream: str
    start: int = 0
    part: tuple[float, float] | None = None

    def plenty(self) -> float:
        """So many examples are enough for users of different sizes to be drawn for in one call."""
        return max(LONG, self.start + self.size + 1) if self.part is None else math.inf

    def bounds(self, m: int) -> tuple[int, int]:
        """Positions from .. to (in the order of the run) of ``part`` for a user with m examples."""
        if self.part is None or m == 1:
            return 0, m
        low, high = (0 if share <= 0 else m if share >= 1 else min(max(int(share * m + 0.5), 1), m - 1) for share in self.part)
        return low, high


def draw(keys: np.ndarray, m: int | np.ndarray, what: Draw) -> np.ndarray:
    """keys [R] -> [R, min(size, m)] positions in a user's data. A batch of all the data is in order, unshuffled.

    ``m`` [R], one for each key: each must be at least :meth:`Draw.plenty`.
    """
    if not isinstance(m, np.ndarray) and what.start == 0 and what.size >= m:
        return np.broadcast_to(np.arange(m), (len(keys), m))
    return permuted(keys, m, what.start + what.size)[:, what.start :]


def cohort_size(n: int, r: float) -> int:
    """max(1, r n rounded half up in decimal): (100, 0.29) is 29 and (50, 0.29) is 15."""
    exact = Decimal(str(r)) * n + Decimal("0.5")
    return max(1, int(exact.to_integral_value(rounding="ROUND_FLOOR")))


def cohort(seed: int, k: int, n: int, active: int) -> np.ndarray:
    """[A] distinct user ids of round k, uniform without replacement, in ascending order."""
    return np.sort(permuted(np.atleast_1d(key(seed, "participation", k)), n, active)[0])
