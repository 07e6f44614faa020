"""Pictures of a run as PNG files, drawn on matplotlib's Agg canvas itself: no display, no pyplot, no global state, nothing left open.

Lines differ in lightness, dash and marker, so that they can be told apart in grey. Every function writes its file atomically and raises on
failure; the caller guards, after the numbers are on disk.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perfed import stats
from perfed.results import atomic
from perfed.tables import GROUP_COLUMNS, judged

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

STYLES = (
    ("#08306b", "-", "o"),
    ("#8c8c8c", "--", "s"),
    ("#d95f02", "-.", "^"),
    ("#41ab5d", ":", "D"),
    ("#88419d", (0, (5, 1, 1, 1, 1, 1)), "v"),
)
"""Colour, dash and marker of the lines, in turn."""
BASELINE = {"color": "black", "linestyle": (0, (1, 2)), "linewidth": 1.4, "label": "majority class"}
NUMBERED = 30
"""A heat map with more rows or columns than this has no number in its cells."""


def _figure(width: float, height: float, title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    if title:
        figure.suptitle("\n".join(textwrap.wrap(title, int(width * 12))), fontsize=10)
    return figure


def _save(figure: Figure, path: Path | str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with atomic(path) as temporary:
        FigureCanvasAgg(figure).print_png(str(temporary))


def _finish(figure: Figure, axes: Any, bounds: Sequence[float] | None = None) -> None:
    """Grid and frame of every axes, one legend below them, and the y-axis cut to ``bounds`` and to 0..100 %."""
    entries: dict[str, Any] = {}
    for ax in np.atleast_1d(axes):
        ax.grid(color="0.9", linewidth=0.6)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
        entries.update((label, handle) for handle, label in zip(*ax.get_legend_handles_labels(), strict=True))
        low, high = ax.get_ylim() if bounds is None else bounds
        ax.set_ylim(max(low, -2.0), min(high, 102.0))
    if BASELINE["label"] in entries:
        entries[BASELINE["label"]] = entries.pop(BASELINE["label"])
    if entries:
        columns = max(1, int(figure.get_figwidth() * 11 // (max(map(len, entries)) + 6)))
        style = {"loc": "outside lower center", "ncols": min(columns, len(entries)), "frameon": False, "fontsize": 8}
        figure.legend(entries.values(), entries.keys(), **style)


def _band(table: DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """x, mean and half-width over the columns (seeds) of a frame indexed by x; None below two seeds."""
    pairs = [stats.interval(row) for row in table.to_numpy()]
    half = np.array([h for _, h in pairs], dtype=np.float64) if table.shape[1] > 1 else None
    return table.index.to_numpy(), np.array([m for m, _ in pairs]), half


def learning_curve(
    rounds: DataFrame, path: Path | str, title: str = "", *, majority: float | None = None, diverged: Collection[int] = ()
) -> None:
    """Accuracy in % against rounds, one line per judged model and steps (and for new users): mean over seeds with its 95 % t-band.

    ``rounds`` is rounds.csv. Seeds that diverged, have a non-finite accuracy or lack a round are left out, which the title says. Raises
    ValueError when none is left.
    """
    finite = rounds.groupby("seed")["accuracy"].agg(lambda a: len(a) * int(np.isfinite(a).all()))
    good = [seed for seed, count in finite.items() if count == finite.max() and count and seed not in set(diverged)]
    if not good:
        raise ValueError("no seed has a whole learning curve")
    lost = len(finite) - len(good)
    note = f" ({lost} of {len(finite)} seeds left out)" if lost else ""
    figure = _figure(6.4, 4.2, title + note)
    ax = figure.subplots()
    seen: list[float] = []
    kinds = rounds[["seen", "model", "steps"]].drop_duplicates().sort_values(["seen", "model", "steps"], ascending=[False, True, False])
    for (known, model, steps), (colour, dash, marker) in zip(kinds.itertuples(index=False), _cycle(len(kinds)), strict=True):
        lines = rounds[(rounds["seen"] == known) & (rounds["model"] == model) & (rounds["steps"] == steps) & rounds["seed"].isin(good)]
        x, mean, half = _band(100 * lines.pivot(index="round", columns="seed", values="accuracy"))
        label = ("" if known else "new users: ") + judged(model, int(steps))
        every = max(1, len(x) // 12)
        ax.plot(x, mean, color=colour, linestyle=dash, marker=marker, markevery=every, markersize=4, linewidth=1.6, label=label)
        seen += [*mean]
        if half is not None:
            if len(x) > 1:
                ax.fill_between(x, mean - half, mean + half, color=colour, alpha=0.15, linewidth=0)
            else:
                ax.errorbar(x, mean, yerr=half, color=colour, capsize=3)
            seen += [*(mean - half)[len(x) // 10 :], *(mean + half)[len(x) // 10 :]]
    if majority is not None:
        ax.axhline(100 * majority, **BASELINE)
        seen.append(100 * majority)
    ax.set(xlabel="round", ylabel=f"accuracy, %{f' ({len(good)} seeds, 95 % band)' if len(good) > 1 else ''}")
    ax.xaxis.get_major_locator().set_params(integer=True)
    pad = 0.05 * (max(seen) - min(seen)) + 0.5
    _finish(figure, ax, (min(seen) - pad, max(seen) + pad))
    _save(figure, path)


def _cycle(count: int) -> list[tuple[Any, Any, str]]:
    return [STYLES[i % len(STYLES)] for i in range(count)]


def per_user(users: DataFrame, path: Path | str, title: str = "", *, model: str | None = None, steps: int | None = None) -> None:
    """Accuracy of every user before and after adaptation, mean over seeds, sorted within his group by the accuracy after.

    ``users`` is users.csv; without ``model`` and ``steps`` the first judged model and its largest number of steps. A user whose group
    changes with the seed counts in each of them. More than GROUP_COLUMNS groups share one panel.
    """
    model = users["model"].iloc[0] if model is None else model
    mine = users[users["model"] == model]
    after = int(mine["steps"].max()) if steps is None else steps
    before = int(mine["steps"].min())
    mine = mine.assign(accuracy=100 * mine["correct"] / mine["n_test"])
    names = list(dict.fromkeys(mine["group"]))
    if len(names) > GROUP_COLUMNS:
        mine, names = mine.assign(group="all users"), ["all users"]
    mean = mine.groupby(["group", "user", "steps"])["accuracy"].mean().unstack("steps")
    seeds = mine["seed"].nunique()
    counts = [max(len(mean.loc[name]), 4) for name in names]
    figure = _figure(max(6.4, 2.2 * len(names)), 4.2, title)
    axes = figure.subplots(1, len(names), sharey=True, squeeze=False, width_ratios=[max(count, sum(counts) / 6) for count in counts])[0]
    for ax, name in zip(axes, names, strict=True):
        group = mean.loc[name].sort_values(after, kind="stable")
        x, size = np.arange(1, len(group) + 1), 36 if len(group) <= 60 else 8
        if after != before:
            if len(group) <= 60:
                ax.vlines(x, group[before], group[after], color="0.7", linewidth=1)
            ax.scatter(x, group[before], s=size, facecolors="white", edgecolors="0.35", linewidths=1, label=judged(model, before), zorder=2)
        ax.scatter(x, group[after], s=size, color=STYLES[0][0], label=judged(model, after), zorder=3)
        width = max(10, int(14 * figure.get_figwidth() * max(len(group), sum(counts) / 6) / sum(counts)))
        ax.set_title("\n".join([*textwrap.wrap(name, width), f"({len(group)} users)"]), fontsize=9)
        ax.set_xlabel("users, sorted", fontsize=9)
        ax.xaxis.get_major_locator().set_params(integer=True, nbins=max(2, min(8, len(group))))
        ax.set_xlim(0.3, len(group) + 0.7)
    axes[0].set_ylabel(f"accuracy, %{f' (mean over {seeds} seeds)' if seeds > 1 else ''}")
    _finish(figure, axes)
    _save(figure, path)


def heat_map(counts: Any, rows: Sequence[str], classes: Sequence[str], path: Path | str, title: str = "") -> None:
    """Examples per row (user group or user) and class, as the paper's Table 2; ``counts`` is [rows, classes]. Up to NUMBERED rows and
    columns show their numbers."""
    counts = np.asarray(counts)
    assert counts.shape == (len(rows), len(classes)), (counts.shape, len(rows), len(classes))
    numbered = max(counts.shape) <= NUMBERED
    digits = len(str(counts.max(initial=0)))
    cell = max(0.45, 0.1 * digits + 0.16) if numbered else 0.1
    margin = 1.3 + 0.075 * max(map(len, rows))
    figure = _figure(min(16.0, max(5.0, cell * len(classes) + margin)), min(16.0, max(1.9, 0.34 * len(rows) + 1.3)), title)
    ax = figure.subplots()
    image = ax.imshow(counts, cmap="Greys", aspect="auto", vmin=0)
    slant = numbered and max(map(len, classes)) > 11 * cell
    for axis, names, limit in ((ax.xaxis, classes, 60), (ax.yaxis, rows, 60)):
        every = -(-len(names) // limit)
        axis.set_ticks(range(0, len(names), every), list(names)[::every], fontsize=8 if len(names) <= NUMBERED else 6)
    if slant or len(classes) > NUMBERED:
        ax.tick_params(axis="x", rotation=90)
    ax.tick_params(length=0)
    ax.set_xlabel("class")
    if numbered:
        for (i, j), count in np.ndenumerate(counts):
            dark = count > 0.55 * max(1, counts.max(initial=0))
            ax.text(j, i, f"{count}", ha="center", va="center", fontsize=8, color="white" if dark else "0.6" if count == 0 else "black")
    figure.colorbar(image, ax=ax, label="examples", fraction=0.05, pad=0.02)
    _save(figure, path)


def adaptation_curve(cells: Sequence[Mapping[str, Any]], path: Path | str, title: str = "", *, majority: float | None = None) -> None:
    """Accuracy in % against the number of adaptation steps, with the 95 % intervals of the cells (result.json). Cells without a mean are
    left out.

    Raises ValueError when no cell has a mean.
    """
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for cell in cells:
        if cell["mean"] is not None:
            lines.setdefault(("" if cell["seen"] else "new users: ") + cell["model"], []).append(cell)
    if not lines:
        raise ValueError("no cell has a mean")
    figure = _figure(6.4, 4.2, title)
    ax = figure.subplots()
    for (label, line), (colour, dash, marker) in zip(lines.items(), _cycle(len(lines)), strict=True):
        line = sorted(line, key=lambda cell: cell["steps"])
        half = [100 * (cell["half_width"] or 0.0) for cell in line]
        style = {"color": colour, "linestyle": dash, "marker": marker, "markersize": 5, "linewidth": 1.6, "capsize": 3, "label": label}
        ax.errorbar([cell["steps"] for cell in line], [100 * cell["mean"] for cell in line], yerr=half if any(half) else None, **style)
    if majority is not None:
        ax.axhline(100 * majority, **BASELINE)
    ax.set(xlabel="adaptation steps", ylabel="accuracy, %")
    ax.xaxis.get_major_locator().set_params(integer=True)
    _finish(figure, ax)
    _save(figure, path)
