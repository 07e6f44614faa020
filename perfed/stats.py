"""Means, Student-t intervals, paired tests, how many seeds an interval needs, and the worst users; nothing else.

The unit of every interval is the seed: users are averaged first, within a seed. scipy is imported inside functions, and only
its small ``special`` part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np

CLAIMED_FROM = 5
"""Common seeds below which no cell is marked and no claim decided."""


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


def tost(difference: Paired, margin: float) -> float | None:
    """p value of two one-sided t tests (Schuirmann 1987): how likely the data are if the true difference is ``margin`` or more, either way.

    With d the difference and e its standard error it is P(T < -(margin - |d|) / e), T of n - 1 degrees of freedom. It is at most 0.05 where
    the 90 % interval of the difference lies within ±margin. None below two seeds. Raises ValueError unless margin > 0.
    """
    if not margin > 0:
        raise ValueError(f"a margin is > 0, got {margin}")
    if difference.half_width is None:
        return None
    from scipy.special import stdtr

    room = margin - abs(difference.difference)
    error = difference.half_width / t_quantile(0.975, difference.n - 1)
    if error == 0:
        return 0.0 if room > 0 else 1.0
    return float(stdtr(difference.n - 1, -room / error))


def verdict(difference: Paired, direction: str = ">") -> str:
    """``supported``, ``contradicted`` or ``undecided``: the claim "a > b" (or "a < b") by the 95 % interval of the paired difference a - b.

    Supported where the whole interval is on the claimed side of 0, contradicted where it is on the other; undecided where it holds 0, and
    below CLAIMED_FROM common seeds.
    """
    if direction not in (">", "<"):
        raise ValueError(f"direction is '>' or '<', got {direction!r}")
    if difference.n < CLAIMED_FROM or difference.half_width is None:
        return "undecided"
    toward = difference.difference if direction == ">" else -difference.difference
    if toward - difference.half_width > 0:
        return "supported"
    return "contradicted" if toward + difference.half_width < 0 else "undecided"


def seeds_needed(spread: float, half_width: float, level: float = 0.95) -> int:
    """The smallest S >= 2 with t(S-1, (1+level)/2) spread / sqrt(S) <= half_width; the left side falls as S grows.

    ``spread`` is the standard deviation over seeds, in the unit of ``half_width``. Raises ValueError unless half_width > 0 and spread >= 0.
    """
    if not (half_width > 0 and 0 <= spread < math.inf):
        raise ValueError(f"a half-width > 0 and a finite spread >= 0, got {half_width} and {spread}")

    def enough(count: int) -> bool:
        return t_quantile(0.5 + level / 2, count - 1) * spread / math.sqrt(count) <= half_width

    few, many = 1, 2
    while not enough(many):
        few, many = many, 2 * many
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if enough(middle) else (middle, many)
    return many


def spread_interval(spread: float, df: float, level: float = 0.95) -> tuple[float, float]:
    """Where the true standard deviation lies if ``spread`` was estimated with ``df`` degrees of freedom from normal values: chi-square."""
    from scipy.special import chdtri

    tail = (1 - level) / 2
    return spread * math.sqrt(df / float(chdtri(df, tail))), spread * math.sqrt(df / float(chdtri(df, 1 - tail)))


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
