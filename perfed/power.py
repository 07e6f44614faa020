"""How many seeds an interval needs, and how much of the variance over seeds each source of chance makes.

Seeds needed: the smallest S with t(S-1, .975) s / sqrt(S) <= H, s the standard deviation over the seeds at hand (``stats.seeds_needed``).

Variance by source. A seed redraws the partition (P), the initial model (I), and user sampling and batches (B); ``partition_seed``,
``init_seed``, ``sampling_seed`` fix one of them for all seeds of a run. The model is additive: the accuracy of a seed is a constant plus
independent effects of P, I and B with variances v_P, v_I, v_B; what they do only together (interaction) counts to the source that varies.
The runs of one setting give two kinds of equations:

    within    runs in which the sources F are free: the sample variance over their seeds, pooled over such runs, estimates the sum of v
              over F
    between   runs that differ in the fixed value of one source X alone, over C values and S common seeds, are a crossed table Y[c, s]: with
              MS_e the mean square of what row and column means leave, var_c(mean_s Y) - MS_e / S estimates v_X (two-way analysis of
              variance; for S = 1 it is var_c(Y))

They are solved by least squares, weighted by the precision of each variance, under v >= 0. A source that the equations do not determine
has no number, and the command of the runs that are missing is printed.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from perfed import keys, stats
from perfed.errors import nearest, require
from perfed.pivot import Label, Pivot, Source, asked, of_cell, source
from perfed.results import Run
from perfed.tables import CHANCE, Grid, grid

Fixed = tuple[int | None, ...]
"""partition_seed, init_seed, sampling_seed of a run; None follows the seed."""
FREE: Fixed = (None, None, None)


REWEIGHTINGS = 10


@dataclass(frozen=True)
class Components:
    """``variance``: of each source, None where the runs do not determine it. ``df``: of each equation behind them."""

    variance: tuple[float | None, ...]
    df: tuple[int, ...]


def components(runs: Mapping[Fixed, Mapping[str, float]]) -> Components:
    """The variance of each source, in the order of CHANCE, from the numbers by seed of runs of one setting."""
    rows: list[tuple[float, ...]] = []
    values: list[float] = []
    weights: list[int] = []

    def add(sources: Sequence[int], value: float, df: int) -> None:
        rows.append(tuple(1.0 if i in sources else 0.0 for i in range(len(FREE))))
        values.append(value)
        weights.append(df)

    for free in itertools.product((True, False), repeat=len(FREE)):
        alike = {fixed: numbers for fixed, numbers in runs.items() if tuple(x is None for x in fixed) == free}
        spread = [(np.var(list(v.values()), ddof=1), len(v) - 1) for v in alike.values() if len(v) > 1]
        if spread and any(free):
            df = sum(d for _, d in spread)
            add([i for i, yes in enumerate(free) if yes], sum(v * d for v, d in spread) / df, df)
        for i in (i for i, yes in enumerate(free) if not yes):
            families: dict[Fixed, list[Mapping[str, float]]] = {}
            for fixed, numbers in alike.items():
                families.setdefault((*fixed[:i], None, *fixed[i + 1 :]), []).append(numbers)
            for family in families.values():
                common = [seed for seed in family[0] if all(seed in numbers for numbers in family)]
                if len(family) > 1 and common:
                    add([i], _between(np.array([[numbers[seed] for seed in common] for numbers in family])), len(family) - 1)
    return Components(_solved(np.array(rows), np.array(values), np.array(weights)), tuple(weights))


def _between(table: np.ndarray) -> float:
    """Variance of the row effects of a crossed table [C, S]; it may come out below 0."""
    count, seeds = table.shape
    means = table.mean(axis=1)
    if seeds == 1:
        return float(means.var(ddof=1))
    left = table - means[:, None] - table.mean(axis=0) + table.mean()
    return float(means.var(ddof=1) - (left**2).sum() / ((count - 1) * (seeds - 1)) / seeds)


def _solved(rows: np.ndarray, values: np.ndarray, weights: np.ndarray) -> tuple[float | None, ...]:
    """Weighted least squares under v >= 0: the best of the solutions with some v held at 0. Where the equations do not determine all
    sources there is no such bound to use, and a determined one below 0 counts as 0.

    A sample variance has the variance 2 v^2 / df, so an equation weighs df / v^2: v from the equation itself at first, then as solved.
    """
    if not len(values):
        return (None,) * len(FREE)
    floor = 1e-3 * max(float(np.abs(values).max()), 1e-300)
    found: tuple[float | None, ...] = ()
    fitted = values
    for _ in range(REWEIGHTINGS):
        found = _solved_once(rows, values, weights / np.maximum(fitted, floor) ** 2)
        fitted = values if None in found else rows @ np.array(found)
    return found


def _solved_once(rows: np.ndarray, values: np.ndarray, weights: np.ndarray) -> tuple[float | None, ...]:
    count = len(FREE)
    known = [np.linalg.matrix_rank(np.vstack([rows, np.eye(count)[i]])) == np.linalg.matrix_rank(rows) for i in range(count)]
    scale = np.sqrt(weights)
    if not all(known):
        plain = np.linalg.lstsq(rows * scale[:, None], values * scale, rcond=None)[0]
        return tuple(max(0.0, float(v)) if yes else None for v, yes in zip(plain, known, strict=True))
    best, least = np.zeros(count), float(((values * scale) ** 2).sum())
    for keep in itertools.chain.from_iterable(itertools.combinations(range(count), k) for k in range(1, count + 1)):
        some = rows[:, list(keep)] * scale[:, None]
        found = np.linalg.lstsq(some, values * scale, rcond=None)[0]
        error = float(((some @ found - values * scale) ** 2).sum())
        if (found >= -1e-15).all() and error <= least * (1 + 1e-12):
            best, least = np.zeros(count), error
            best[list(keep)] = np.maximum(found, 0)
    return tuple(map(float, best))


# ---------------------------------------------------------------- tables


def _by_chance(cell: Source) -> dict[Fixed, Source]:
    """The runs of a cell, apart by what is fixed for all seeds; all three free first."""
    parts: dict[Fixed, list[Run]] = {}
    for run in cell.runs:
        parts.setdefault(tuple(run.config.get(key) for key in CHANCE), []).append(run)
    order = sorted(parts, key=lambda fixed: [-1 if x is None else x for x in fixed])
    return {fixed: source(parts[fixed]) for fixed in order}


def _redrawn(fixed: Fixed) -> str:
    free = [text for text, value in zip(CHANCE.values(), fixed, strict=True) if value is None]
    return "all three" if len(free) == len(FREE) else ", ".join(free) or "nothing"


def needed_table(
    pivot: Pivot,
    half_width: float,
    cell: str = "accuracy",
    model: str | None = None,
    steps: int | None = None,
    reference: str | None = None,
) -> Grid:
    """How many seeds each cell needs for ± ``half_width`` (in the unit shown); with ``reference``, each paired difference to that column.

    ``pivot`` is arranged with the keys of CHANCE ignored. Raises UserError.
    """
    require(half_width > 0, "power", half_width, "a half-width > 0, in the unit of the cells")
    want = asked(cell, pivot.runs, model, steps)
    require(want.baseline is None and want.measure.better != 0, "cell", cell, "with power: a measure of a run that varies by chance")
    heads = [pivot.head(column) for column in pivot.columns]
    require(reference in (None, *heads), "reference", reference, f"a column: {', '.join(heads)}{nearest(str(reference), heads)}")
    rows, notes = [], []
    for row, column, whole in pivot.each():
        if pivot.head(column) == reference:
            continue
        other = _by_chance(pivot.at(row, pivot.columns[heads.index(reference)])) if reference else {}
        for fixed, part in _by_chance(whole).items():
            shown = of_cell(part, want)
            values, reason = shown.per_seed, shown.reason
            if reference and values is not None:
                base = of_cell(other.get(fixed, Source()), want)
                common = [seed for seed in values if base.per_seed and seed in base.per_seed]
                reason = base.reason or ("" if common else "no common seed")
                values = {seed: values[seed] - base.per_seed[seed] for seed in common} if common else None
            line = [*pivot.labels(row), *column, _redrawn(fixed)]
            if values is None or len(values) < 2:
                notes.append(f"-: {pivot.head(column)}, {pivot.name(row)}: {reason or 'one seed has no spread'}.")
                rows.append([*line, str(len(values or part.taken)), "-", "-", "-", "-"])
                continue
            _, half = stats.interval(list(values.values()))
            spread = float(np.std(list(values.values()), ddof=1))
            low, high = stats.spread_interval(spread, len(values) - 1)
            need, least, most = (stats.seeds_needed(want.measure.scale * s, half_width) for s in (spread, low, high))
            s = want.measure.number
            rows.append([*line, str(len(values)), s(half), f"{s(spread)} ({s(low)} to {s(high)})", f"{need:,}", f"{least:,} to {most:,}"])
    paired = f", paired difference to {reference}" if reference else ""
    caption = (
        f"{want.measure.what}{paired}: how many seeds ± {half_width:g} needs, the smallest S with t(S-1, .975) s / sqrt(S) <= "
        f"{half_width:g}. ±: the half-width of the 95 % Student-t interval over the seeds at hand; s: their standard deviation, in "
        "brackets its own 95 % interval (chi-square), because s is itself estimated; range: what S would be at these two ends. "
        "Redrawn: what differs between the seeds."
    )
    columns = [*pivot.heads(), *map(keys.shown, pivot.column_keys), "redrawn", "seeds", "±", "s", f"for ± {half_width:g}", "range"]
    return grid(columns, rows, caption, notes, len(pivot.heads()) + len(pivot.column_keys) + 1)


def variance_table(pivot: Pivot, cell: str = "accuracy", model: str | None = None, steps: int | None = None) -> Grid:
    """Standard deviation and share of the variance of each source, for each cell; notes hold the commands of missing runs."""
    want = asked(cell, pivot.runs, model, steps)
    rows: list[list[str]] = []
    notes: list[str] = []
    fewest: list[int] = []
    for row, column, whole in pivot.each():
        numbers = {fixed: of_cell(part, want).per_seed for fixed, part in _by_chance(whole).items()}
        numbers = {fixed: values for fixed, values in numbers.items() if values}
        found = components(numbers)
        total = sum(v for v in found.variance if v is not None) if None not in found.variance else None
        texts = []
        for variance in found.variance:
            share = f" ({100 * variance / total:.0f} %)" if variance is not None and total else ""
            texts.append("-" if variance is None else want.measure.number(variance**0.5) + share)
        together = numbers.get(FREE, {})
        observed = want.measure.number(float(np.std(list(together.values()), ddof=1))) if len(together) > 1 else "-"
        fewest += [min(found.df)] if total is not None else []
        rows.append([*pivot.labels(row), *column, *texts, "-" if total is None else want.measure.number(total**0.5), observed])
        notes += _missing(pivot, row, column, whole, found)
    worst = ""
    if fewest:
        low, high = stats.spread_interval(1.0, min(fewest))
        worst = f" With {min(fewest)} degrees of freedom a standard deviation that runs redraw alone is known to a factor of {low:.2f} to "
        worst += f"{high:.2f}, one found by subtraction less well."
    caption = (
        f"Where the spread over seeds comes from, as standard deviations ({want.measure.what[0].lower() + want.measure.what[1:]}) and "
        "shares of the variance: from runs in which only some of the three are redrawn, by an additive model (the sources act "
        "independently), least squares weighted by the precision of each variance. Sum: of the three by that model; "
        "measured: of the runs with all three redrawn." + worst
    )
    columns = [*pivot.heads(), *map(keys.shown, pivot.column_keys), *CHANCE.values(), "sum", "measured"]
    return grid(columns, rows, caption, notes, len(pivot.heads()) + len(pivot.column_keys))


def _missing(pivot: Pivot, row: Label, column: Label, cell: Source, found: Components) -> list[str]:
    """The command of the runs in which a source that is not determined is redrawn alone, for any shell."""
    whole = [run for run in cell.runs if run.complete and "algo" in run.config]
    run = max(whole, key=lambda run: len(run.result["seeds"]), default=None)
    missing = [key for key, variance in zip(CHANCE, found.variance, strict=True) if variance is None]
    if not missing or run is None:
        return []
    ends = [" ".join(f"{k}={run.config.get('seed', 0)}" for k in CHANCE if k != key) for key in missing]
    base = keys.command(run.config, **dict.fromkeys(CHANCE))
    words = f"printf '%s\\n' {' '.join(map(shlex.quote, ends))} | xargs -L1 {base}"
    lacking = ", ".join(CHANCE[key] for key in missing)
    return [f"-: {pivot.head(column)}, {pivot.name(row)}: {lacking}: needs runs that redraw one alone: {words}"]
