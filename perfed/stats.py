"""Means, Student-t intervals, paired tests and the worst users; nothing else.

The unit of every interval is the seed: users are averaged first, within a seed. scipy is imported inside functions, and only
its small ``special`` part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np


class Paired(NamedTuple):
    """Mean of ``a - b`` over ``n`` common seeds; half-width and two-sided p value are None below two seeds."""

    n: int
    difference: float
    half_width: float | None
    p: float | None


def interval(values: Any, level: float = 0.95) -> tuple[float, float | None]:
    """Mean over seeds and the half-width t(S-1, (1+level)/2) s / sqrt(S), with s the sample standard deviation.

    ``values`` is [S], or [S, N] (users are averaged first). One seed has no half-width (None). Raises ValueError for no value or a
    non-finite one: diverged seeds are never averaged.
    """
    seeds = np.asarray(values, dtype=np.float64)
    if seeds.size == 0 or not np.isfinite(seeds).all():
        raise ValueError(f"an interval needs finite values, got {seeds.tolist()}")
    if seeds.ndim == 2:
        seeds = seeds.mean(axis=1)
    if seeds.ndim != 1:
        raise ValueError(f"values must be [S] or [S, N], not of shape {seeds.shape}")
    count = len(seeds)
    mean = float(seeds.mean())
    if count == 1:
        return mean, None
    return mean, t_quantile(0.5 + level / 2, count - 1) * float(seeds.std(ddof=1)) / math.sqrt(count)


def t_quantile(p: float, df: int) -> float:
    """The ``p`` quantile of Student's t with ``df`` degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(df, p))


def paired(a: Mapping[Any, float], b: Mapping[Any, float], level: float = 0.95) -> Paired:
    """Paired t test of a - b over the common seeds of two maps from seed to mean. Raises ValueError where there is none."""
    common = [seed for seed in a if seed in b]
    difference = np.array([a[seed] - b[seed] for seed in common], dtype=np.float64)
    mean, half_width = interval(difference, level)
    if half_width is None:
        return Paired(1, mean, None, None)
    from scipy.special import stdtr

    error = float(difference.std(ddof=1)) / math.sqrt(len(common))
    if error == 0:
        p = 1.0 if mean == 0 else 0.0
    else:
        p = float(2 * stdtr(len(common) - 1, -abs(mean) / error))
    return Paired(len(common), mean, half_width, p)


def holm(p: Sequence[float]) -> list[float]:
    """p values adjusted by Holm's step-down method (Holm 1979), in the given order: max over j <= i of (m - j) p_(j), at most 1."""
    adjusted, running = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        running = max(running, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = running
    return adjusted


def worst_count(n: int, share: float = 0.1) -> int:
    """How many of ``n`` users are the worst ``share``: share * n, halves up, at least one."""
    return max(1, math.floor(Decimal(str(share)) * n + Decimal("0.5")))


def worst(accuracy: Any, share: float = 0.1) -> float:
    """Mean over the lowest ``worst_count`` of the users' accuracies [N]."""
    users = np.sort(np.asarray(accuracy, dtype=np.float64))
    return float(users[: worst_count(len(users), share)].mean())


def binomial_floor(accuracy: float, sizes: Any, share: float = 0.1) -> float:
    """Expected worst ``share`` if every user had the true accuracy ``accuracy`` (the pooled mean), given their test sizes [N].

    Only counting noise is left, so a measured worst 10 % below this floor is more than noise. Seeded Monte-Carlo of about 200,000
    binomial draws: the same value each time, with a standard error of about 0.001 for 20 users and less for more.
    """
    sizes = np.asarray(sizes, dtype=np.int64)
    draws = max(50, 200_000 // len(sizes))
    count = worst_count(len(sizes), share)
    hits = np.random.default_rng(0).binomial(sizes, min(1.0, max(0.0, accuracy)), size=(draws, len(sizes)))
    lowest = np.partition(hits / sizes, count - 1, axis=1)[:, :count]
    return float(lowest.mean())
