"""Pictures as PNG and PDF, drawn on matplotlib's Agg canvas itself: no display, no pyplot, no global state, nothing left open.

Lines differ in lightness, dash and marker, so that they can be told apart in grey. Every function takes the path of the PNG and writes a
PDF of the same stem beside it, both atomically and to the same bytes each time; it raises on failure, and the caller guards, after the
numbers are on disk.
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
    ("#999999", "--", "s"),
    ("#cc4c02", "-.", "^"),
    ("#74c476", ":", "D"),
    ("#88419d", (0, (5, 1, 1, 1, 1, 1)), "v"),
    ("#000000", (0, (10, 3)), "X"),
    ("#fdae6b", (0, (3, 1)), "P"),
    ("#3182bd", (0, (8, 2, 2, 2)), "<"),
    ("#a6761d", (0, (1, 3)), "*"),
)
"""Colour, dash and marker of the first lines; :func:`style` goes on with other combinations of them."""
BASELINE = {"color": "black", "linestyle": (0, (1, 2)), "linewidth": 1.4, "label": "majority class"}
DPI = 150
"""Pixels per inch of the PNGs."""
NUMBERED = 30
"""A heat map with more rows or columns than this has no number in its cells."""
LARGE = 10_000
"""An x axis that reaches this far is numbered 20k, 5M."""
BLUR = 2.5
"""Standard deviation, in points of accuracy, of the kernel behind the shapes of :func:`distributions`."""


def style(i: int) -> dict[str, Any]:
    """Colour, dash and marker of line ``i``. No two of the first len(STYLES)^2 lines have the same dash and the same marker."""
    turn, k = divmod(i, len(STYLES))
    dash, marker = STYLES[(k + turn) % len(STYLES)][1], STYLES[(k + 2 * turn) % len(STYLES)][2]
    return {"color": STYLES[k][0], "linestyle": dash, "marker": marker, "markersize": 4.5, "linewidth": 1.6}


def _plain(text: str) -> str:
    """A name as it is: dollars enclose no mathematics."""
    return text.replace("$", r"\$")


def _label(text: str) -> str:
    """For a legend, which would leave out a name that starts with an underscore; :func:`_finish` takes the space away."""
    return " " + text


def _over(seeds: int, interval: str) -> str:
    """What a mean is over, and how its 95 % interval is drawn: ``mean over 3 seeds, 95 % band``."""
    return f"mean over {seeds} seeds, 95 % {interval}" if seeds > 1 else "1 seed, no interval"


def _inches(text: str, size: float) -> float:
    """Width of a line of text that is set in ``size`` points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    return text_to_path.get_text_width_height_descent(_plain(text), FontProperties(size=size), False)[0] / 72


def _wrapped(text: str, inches: float, size: float, lines: int = 6) -> str:
    """``text``, set in ``size`` points, in at most so many lines of that width; what is longer ends in an ellipsis."""
    text = " ".join(text.split())
    wide = _inches(text, size)
    if wide <= inches:
        return _plain(text)
    letters = max(4, int(0.9 * inches * len(text) / wide))
    return _plain("\n".join(textwrap.wrap(text, letters, max_lines=lines, placeholder="…")))


def _by_line(text: str, inches: float, size: float, lines: int = 6) -> str:
    """:func:`_wrapped`, each line of the text by itself."""
    return "\n".join(_wrapped(line, inches, size, lines) for line in text.split("\n"))


def _figure(width: float, height: float, title: str) -> Figure:
    """``height`` does not count the title's lines after the first. Each line of the title is wrapped by itself."""
    from matplotlib.figure import Figure

    title = _by_line(title, width - 0.2, 10)
    figure = Figure(figsize=(width, height + 0.17 * title.count("\n")), dpi=DPI, layout="constrained")
    if title:
        figure.suptitle(title, fontsize=10)
    return figure


def _save(figure: Figure, path: Path | str) -> None:
    """The PNG ``path``, and the PDF beside it with its fonts embedded as TrueType."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    assert Path(path).suffix == ".png", path
    canvas = FigureCanvasAgg(figure)
    with atomic(path) as png, atomic(Path(path).with_suffix(".pdf")) as pdf, rc_context({"pdf.fonttype": 42}):
        canvas.print_png(str(png), metadata={"Software": None})
        figure.set_layout_engine("none")  # the places found for the PNG
        canvas.print_figure(str(pdf), format="pdf", metadata={"CreationDate": None})


def _finish(figure: Figure, axes: Any, bounds: Sequence[float] | None = None) -> None:
    """Grid and frame of every axes, one legend below them, and the y-axis cut to ``bounds`` and to 0..100 %."""
    entries: dict[str, Any] = {}
    for ax in np.atleast_1d(axes):
        ax.grid(color="0.9", linewidth=0.6)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
        entries.update((label.removeprefix(" "), handle) for handle, label in zip(*ax.get_legend_handles_labels(), strict=True))
        low, high = ax.get_ylim() if bounds is None else bounds
        wider = max(0.0, 1.0 - (high - low)) / 2
        ax.set_ylim(max(low - wider, -2.0), min(high + wider, 102.0))
    if BASELINE["label"] in entries:
        entries[BASELINE["label"]] = entries.pop(BASELINE["label"])
    if entries:
        _legend(figure, entries)


def _legend(figure: Figure, entries: Mapping[str, Any]) -> None:
    """Below the axes, in as many columns as fit; the figure grows by its rows after the first."""
    width = figure.get_figwidth()
    labels = [_wrapped(label, width - 1.2, 8, lines=2) for label in entries]
    widest = max(_inches(line, 8) for label in labels for line in label.split("\n"))
    rows = -(-len(labels) // max(1, int((width - 0.2) // (widest + 0.85))))
    figure.set_figheight(figure.get_figheight() + 0.19 * (rows * (1 + max(label.count("\n") for label in labels)) - 1))
    look = {"loc": "outside lower center", "ncols": -(-len(labels) // rows), "frameon": False, "fontsize": 8, "handlelength": 4.5}
    figure.legend(entries.values(), labels, **look)


def lines(
    frame: DataFrame,
    path: Path | str,
    title: str = "",
    *,
    xlabels: Mapping[str, str],
    ylabel: str = "accuracy, %",
    log: Collection[str] = (),
    majority: float | None = None,
    bands: bool = True,
) -> None:
    """Means with their bands against x, one axes per panel, side by side with a common y axis, in % (fractions in ``frame``).

    ``frame`` has the columns panel, line, x, mean and half_width; panels and lines stand in the order of appearance, and a line looks the
    same in all panels. ``xlabels``: panel -> label of its x axis; one of several panels with another name
    has it as its title. ``log``: panels with
    a logarithmic x axis, which leaves out x <= 0. A half_width of NaN and ``bands=False`` draw no band. Means that are not finite are left
    out, which the panel's title says; ValueError where none is left.
    """
    mean, x = (frame[name].to_numpy(dtype=np.float64) for name in ("mean", "x"))
    drawn = ~(frame["panel"].isin(log).to_numpy() & (x <= 0))
    good = drawn & np.isfinite(mean)
    if not good.any():
        raise ValueError("no finite mean to draw")
    panels, names = list(dict.fromkeys(frame["panel"])), list(dict.fromkeys(frame["line"]))
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    width = 6.4 if columns == 1 else 1.0 + 3.1 * columns
    figure = _figure(width, 0.8 + 3.0 * rows if rows * columns > 1 else 4.2, title)
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    seen = [] if majority is None else [100 * majority]
    for ax, panel in zip(axes, panels, strict=False):
        broken = []
        if panel in log:
            ax.set_xscale("log")
        for i, name in enumerate(names):
            mine = ((frame["panel"] == panel) & (frame["line"] == name)).to_numpy()
            points = frame.loc[mine & good, ["x", "mean", "half_width"]].sort_values("x", kind="stable").to_numpy(dtype=np.float64)
            if (mine & drawn & ~good).any():
                broken.append(name)
            if len(points):
                seen += _draw(ax, name, i, points * (1, 100, 100), bands)
        if majority is not None:
            ax.axhline(100 * majority, **BASELINE)
        heading = [] if len(panels) == 1 or panel in ("", xlabels[panel]) else [panel]
        if broken:
            heading.append("not finite to the end: " + (", ".join(broken) if len(broken) < 3 else f"{len(broken)} of {len(names)} lines"))
        room = (width - 1.2) / columns
        ax.set_title("\n".join(_wrapped(text, room, 9, lines=3) for text in heading), fontsize=9)
        ax.set_xlabel(_wrapped(xlabels[panel], room, 10, lines=3))
        _number(ax, x[(frame["panel"] == panel).to_numpy() & good], panel in log)
    for ax in axes[::columns]:
        ax.set_ylabel(_by_line(ylabel, 2.8, 10, lines=3))
    for ax in axes[len(panels) :]:
        ax.remove()
    pad = 0.05 * (max(seen) - min(seen)) + 0.5
    _finish(figure, axes[: len(panels)], (min(seen) - pad, max(seen) + pad))
    _save(figure, path)


def _draw(ax: Any, name: str, i: int, points: np.ndarray, bands: bool) -> list[float]:
    """Line ``i`` through ``points`` [x, mean, half-width] with its band; the heights that should be seen."""
    x, mean, half = points.T
    look, every = style(i), max(1, len(x) // 8)
    ax.plot(x, mean, markevery=(i % every, every), label=_label(name), **look)
    whole = np.isfinite(half) & bands
    if len(x) == 1 and whole.any():
        ax.errorbar(x, mean, yerr=half, color=look["color"], capsize=3)
    elif whole.any():
        ax.fill_between(x, mean - half, mean + half, where=whole, color=look["color"], alpha=0.15, linewidth=0)
    late = whole & (np.arange(len(x)) >= len(x) // 10)  # the band of the first points may be wide
    return [*mean, *(mean - half)[late], *(mean + half)[late]]


def _number(ax: Any, x: np.ndarray, log: bool) -> None:
    """Numbers of an x axis: integers for integers, 20k for large ones, and on a logarithmic axis as many as fit."""
    from matplotlib import ticker

    if log:
        few = not len(x) or x.max() < 10 * x.min()
        ax.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=6))
        ax.xaxis.set_minor_formatter(ticker.NullFormatter())
        ax.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        return
    if len(set(x)) == 1:
        ax.xaxis.set_major_locator(ticker.FixedLocator(x[:1]))
    else:
        ax.xaxis.set_major_locator(ticker.MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=bool((x == np.rint(x)).all())))
    if x.max(initial=0) >= LARGE:
        ax.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))


def learning_curve(
    rounds: DataFrame,
    path: Path | str,
    title: str = "",
    *,
    majority: float | None = None,
    diverged: Collection[int] = (),
    primary: Mapping[str, Any] | None = None,
) -> None:
    """Accuracy in % against rounds, the lines of :func:`shown_curves`: mean over seeds with its 95 % t-band.

    ``rounds`` is rounds.csv. Seeds that diverged, have a non-finite accuracy or lack a round are left out, which the title says, as it does
    of lines. Raises ValueError when no seed is left.
    """
    import pandas as pd

    good, count = whole_seeds(rounds, diverged)
    if not good:
        raise ValueError("no seed has a whole learning curve")
    lost = count - len(good)
    shown, others = shown_curves(rounds, primary)
    parts = []
    for known, model, steps in shown:
        mine = rounds[(rounds["seen"] == known) & (rounds["model"] == model) & (rounds["steps"] == steps) & rounds["seed"].isin(good)]
        parts.append(curve(mine, ("" if known else "new users: ") + judged(model, steps)))
    ylabel = f"accuracy, %\n({_over(len(good), 'band')})"
    note = f" ({lost} of {count} seeds left out)" if lost else ""
    note += f"\n{len(shown)} of {len(shown) + others} curves; the others are in rounds.csv" if others else ""
    lines(pd.concat(parts), path, title + note, xlabels={"": "round"}, ylabel=ylabel, majority=majority)


def shown_curves(rounds: DataFrame, primary: Mapping[str, Any] | None = None) -> tuple[list[tuple[bool, str, int]], int]:
    """(seen, model, steps) of the lines of :func:`learning_curve`, and how many other curves rounds.csv holds: each judged model before
    adaptation and after the primary number of steps, new users for the primary model alone. ``primary``: model and steps, as in
    result.json; default: the first model and the most steps."""
    model, steps = (primary["model"], primary["steps"]) if primary else (rounds["model"].iloc[0], rounds["steps"].max())
    kinds = rounds[["seen", "model", "steps"]].drop_duplicates().sort_values(["seen", "model", "steps"], ascending=[False, True, False])
    shown = [(bool(seen), name, int(j)) for seen, name, j in kinds.itertuples(index=False) if j in (0, steps) and (seen or name == model)]
    return shown, len(kinds) - len(shown)


def whole_seeds(rounds: DataFrame, diverged: Collection[int] = ()) -> tuple[list[int], int]:
    """The seeds of a rounds.csv that did not diverge and have a finite accuracy in every round, and how many seeds there are."""
    finite = rounds.groupby("seed")["accuracy"].agg(lambda a: len(a) * int(np.isfinite(a).all()))
    return [int(s) for s, rows in finite.items() if rows == finite.max() and rows and s not in set(diverged)], len(finite)


def curve(rounds: DataFrame, line: str, panel: str = "") -> DataFrame:
    """One line of :func:`lines`: the mean of ``accuracy`` over seeds by round, from rows of rounds.csv with one judged model and steps."""
    table = rounds.pivot(index="round", columns="seed", values="accuracy")
    pairs = [stats.interval(row) for row in table.to_numpy()]
    frame = table.index.to_frame(index=False, name="x")
    half = [np.nan if h is None else h for _, h in pairs]
    return frame.assign(panel=panel, line=line, mean=[m for m, _ in pairs], half_width=half)


def per_user(users: DataFrame, path: Path | str, title: str = "", *, model: str | None = None, steps: int | None = None) -> None:
    """Accuracy of every user before and after adaptation, mean over the seeds in which he was seen in training, sorted within his group by
    the accuracy after. New users are left out, which the title says.

    ``users`` is users.csv; without ``model`` and ``steps`` the first judged model and its largest number of steps. A user whose group
    changes with the seed counts in each of them. More than GROUP_COLUMNS groups share one panel.
    """
    model = users["model"].iloc[0] if model is None else model
    seeds = users["seed"].nunique()
    if new := len(users.loc[~users["seen"], ["seed", "user"]].drop_duplicates()):
        over = "; a point is the mean over the seeds in which its user took part" if seeds > 1 else ""
        title += f"\nusers seen in training; new users ({new / seeds:.3g}{' a seed' if seeds > 1 else ''}) are left out{over}"
    mine = users[(users["model"] == model) & users["seen"]]
    after = int(mine["steps"].max()) if steps is None else steps
    before = int(mine["steps"].min())
    mine = mine.assign(accuracy=100 * mine["correct"] / mine["n_test"])
    names = list(dict.fromkeys(mine["group"]))
    if len(names) > GROUP_COLUMNS:
        mine, names = mine.assign(group="all users"), ["all users"]
    mean = mine.groupby(["group", "user", "steps"])["accuracy"].mean().unstack("steps")
    counts = [max(len(mean.loc[name]), 4) for name in names]
    shares = [max(count, sum(counts) / 6) for count in counts]
    figure = _figure(max(6.4, 2.2 * len(names)), 4.2, title)
    axes = figure.subplots(1, len(names), sharey=True, squeeze=False, width_ratios=shares)[0]
    for ax, name, share in zip(axes, names, shares, strict=True):
        group = mean.loc[name].sort_values(after, kind="stable")
        x, size = np.arange(1, len(group) + 1), 36 if len(group) <= 60 else 8
        if after != before:
            if len(group) <= 60:
                ax.vlines(x, group[before], group[after], color="0.7", linewidth=1)
            look = {"facecolors": "white", "edgecolors": "0.35", "linewidths": 1, "zorder": 2}
            ax.scatter(x, group[before], s=size, label=_label(judged(model, before)), **look)
        ax.scatter(x, group[after], s=size, color=STYLES[0][0], label=_label(judged(model, after)), zorder=3)
        room = (figure.get_figwidth() - 0.8) * share / sum(shares) - 0.15
        ax.set_title("\n".join([_wrapped(name, room, 9), f"({len(group)} user{'s' * (len(group) != 1)})"]), fontsize=9)
        ax.set_xlabel(_wrapped("users, sorted", room, 9), fontsize=9)
        every = next(step for step in (1, 2, 5, 10, 20, 50, 100, len(group)) if len(group) / step <= max(1, min(8, int(2.5 * room))))
        ax.set_xticks(range(every, len(group) + 1, every))
        ax.set_xlim(0.3, len(group) + 0.7)
    over = f"mean over {'up to ' if new else ''}{seeds} seeds" if seeds > 1 else "1 seed"
    axes[0].set_ylabel(f"accuracy of a user, %\n({over})")
    _finish(figure, axes)
    _save(figure, path)


def distributions(frame: DataFrame, path: Path | str, title: str = "", *, majority: float | None = None) -> None:
    """How the users' accuracies are distributed, one row per line (method), in the order of appearance.

    ``frame`` has the columns line and accuracy (a fraction), one row per seed and user. Each row of the picture shows the density (a
    Gaussian kernel of BLUR points, mirrored at 0 and 100 %, scaled to its own maximum), and below it a box with the middle half, the median
    and whiskers from the 5th to the 95th percentile. Accuracies that are not finite are left out, which the row's name says; ValueError
    where none is left.
    """
    names = list(dict.fromkeys(frame["line"]))
    values = [100 * frame.loc[frame["line"] == name, "accuracy"].to_numpy(dtype=np.float64) for name in names]
    finite = [np.sort(v[np.isfinite(v)]) for v in values]
    if not any(map(len, finite)):
        raise ValueError("no finite accuracy to draw")
    counts = {len(v) for v in finite}
    labels = []
    for name, v, good in zip(names, values, finite, strict=True):
        note = [f"{len(good):,} points"] if len(counts) > 1 else []
        note += [f"{len(v) - len(good):,} not finite"] if len(v) > len(good) else []
        labels.append("\n".join([_wrapped(name, 2.2, 9, lines=2), *([f"({', '.join(note)})"] if note else [])]))
    tall = np.array([max(0.6 if len(names) <= 8 else 0.45, 0.16 * (label.count("\n") + 1) + 0.08) for label in labels])
    figure = _figure(7.2, 1.1 + tall.sum(), title)
    ax = figure.subplots()
    floor = -np.cumsum(tall)  # the lower edge of each row, in inches
    grid = np.linspace(0, 100, 401)
    for v, low, height in zip(finite, floor, tall, strict=True):
        if not len(v):
            continue
        base, box = low + 0.38 * height, low + 0.2 * height
        density = sum(np.exp(-0.5 * ((grid[:, None] - point) / BLUR) ** 2).sum(1) for point in (v, -v, 200 - v))
        ax.fill_between(grid, base, base + 0.55 * height * density / density.max(), color="0.78", edgecolor="0.4", linewidth=0.7)
        tail, lower, middle, upper, head = np.percentile(v, [5, 25, 50, 75, 95])
        ax.plot([tail, head], [box, box], color=STYLES[0][0], linewidth=1, solid_capstyle="butt")
        ax.plot([lower, upper], [box, box], color=STYLES[0][0], linewidth=5, solid_capstyle="butt")
        ax.plot(middle, box, marker="o", markersize=5, markerfacecolor="white", markeredgecolor="black")
    _key(ax, majority)
    count = f"{counts.pop():,} per row" if len(counts) == 1 else "numbers in brackets"
    ax.set(xlim=(-1, 101), xlabel=f"accuracy of a user, % (a point is one user in one seed; {count})")
    ax.set_yticks(floor + tall / 2, labels, fontsize=9)
    ax.tick_params(axis="y", length=0)
    _finish(figure, ax)
    ax.set_ylim(floor[-1] - 0.05, 0.05)
    ax.grid(False, axis="y")
    _save(figure, path)


def _key(ax: Any, majority: float | None) -> None:
    """Entries of the legend of :func:`distributions`."""
    colour = STYLES[0][0]
    ax.fill_between([], [], color="0.78", edgecolor="0.4", linewidth=0.7, label=_label("share of points"))
    ax.plot([], [], color="white", marker="o", markersize=5, markerfacecolor="white", markeredgecolor="black", label=_label("median"))
    ax.plot([], [], color=colour, linewidth=5, solid_capstyle="butt", label=_label("middle half"))
    ax.plot([], [], color=colour, linewidth=1, label=_label("5 to 95 %"))
    if majority is not None:
        ax.axvline(100 * majority, **BASELINE)


def heat_map(counts: Any, rows: Sequence[str], classes: Sequence[str], path: Path | str, title: str = "") -> None:
    """Train examples a user, by row (user group or user) and class, as the paper's Table 2; ``counts`` is [rows, classes]. Up to NUMBERED
    rows and columns show their numbers."""
    counts = np.asarray(counts)
    texts = [[count_text(count) for count in row] for row in counts.tolist()]
    assert counts.shape == (len(rows), len(classes)), (counts.shape, len(rows), len(classes))
    numbered = max(counts.shape) <= NUMBERED
    sizes = {"x": 8 if len(classes) <= NUMBERED else 6, "y": 8 if len(rows) <= NUMBERED else 6}
    names = {axis: [_wrapped(name, 2.5, sizes[axis], lines=1) for name in of] for axis, of in (("x", classes), ("y", rows))}
    widest = {axis: max(_inches(name, 8) for name in of) for axis, of in names.items()}
    cell = max(0.45, 0.1 * max((len(text) for row in texts for text in row), default=0) + 0.16) if numbered else 0.1
    slant = len(classes) > NUMBERED or widest["x"] > 0.9 * cell
    width = min(16.0, max(5.0, cell * len(classes) + 1.4 + widest["y"]))
    figure = _figure(width, min(16.0, max(1.9, 0.34 * len(rows) + 1.3)) + slant * widest["x"], title)
    ax = figure.subplots()
    image = ax.imshow(counts, cmap="Greys", aspect="auto", vmin=0, vmax=max(1, counts.max(initial=0)))
    for axis, of in ((ax.xaxis, names["x"]), (ax.yaxis, names["y"])):
        every = -(-len(of) // 60)
        axis.set_ticks(range(0, len(of), every), of[::every], fontsize=sizes[axis.axis_name])
    if slant:
        ax.tick_params(axis="x", rotation=90)
    ax.tick_params(length=0)
    ax.set_xlabel("class")
    if numbered:
        for (i, j), count in np.ndenumerate(counts):
            dark = count > 0.55 * max(1, counts.max(initial=0))
            ax.text(j, i, texts[i][j], ha="center", va="center", fontsize=8, color="white" if dark else "0.6" if count == 0 else "black")
    figure.colorbar(image, ax=ax, label="train examples a user", fraction=0.05, pad=0.02)
    _save(figure, path)


def count_text(count: float) -> str:
    """A mean number of examples: ``34``, ``9.75``."""
    return f"{count:.2f}".rstrip("0").rstrip(".")


def adaptation_curve(
    cells: Sequence[Mapping[str, Any]],
    path: Path | str,
    title: str = "",
    *,
    majority: float | None = None,
    lr: float | None = None,
    primary: str | None = None,
) -> None:
    """Accuracy in % against the number of adaptation steps, with the 95 % intervals of the cells (result.json), set apart sideways. Cells
    without a mean are left out, and new users of other models than ``primary`` where that is given. ``lr``: the size of a step; None: the
    method's own.

    Raises ValueError when no cell has a mean.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for cell in cells:
        if cell["mean"] is not None and (cell["seen"] or primary in (None, cell["model"])):
            found.setdefault(("" if cell["seen"] else "new users: ") + cell["model"], []).append(cell)
    if not found:
        raise ValueError("no cell has a mean")
    figure = _figure(6.4, 4.2, title)
    ax = figure.subplots()
    apart = 0.007 * max(1, *(cell["steps"] for line in found.values() for cell in line))
    for i, (label, line) in enumerate(found.items()):
        line = sorted(line, key=lambda cell: cell["steps"])
        at = [cell["steps"] + apart * (i - (len(found) - 1) / 2) for cell in line]
        half = [100 * (cell["half_width"] or 0.0) for cell in line]
        mean = [100 * cell["mean"] for cell in line]
        ax.errorbar(at, mean, yerr=half if any(half) else None, capsize=3, label=_label(label), **style(i))
    if majority is not None:
        ax.axhline(100 * majority, **BASELINE)
    seeds = max(len(cell["per_seed"]) for line in found.values() for cell in line)
    size = "the method's own size" if lr is None else f"size {lr:g}"
    ax.set_xlabel(f"adaptation steps of {size}")
    ax.set_ylabel(f"accuracy, %\n({_over(seeds, 'interval')})")
    ax.xaxis.get_major_locator().set_params(integer=True)
    _finish(figure, ax)
    _save(figure, path)


def user_scatter(panels: Mapping[str, Sequence[Mapping[str, Any]]], path: Path | str, title: str = "", *, baseline: str = "local") -> Path:
    """Users of each method against the same users under ``baseline``, one panel a method; also as PDF beside the PNG, which is returned.

    ``panels``: name -> points with x (accuracy under the baseline), y (with the method), as fractions, and the user's ``group``. Points
    above the diagonal gain. A mark's area is the number of users at that point, since accuracies on few test data coincide. Raises
    ValueError without a point.
    """
    if not any(panels.values()):
        raise ValueError("no user to draw")
    groups = list(dict.fromkeys(point["group"] for points in panels.values() for point in points))
    groups = groups if len(groups) <= len(STYLES) else []
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = _figure(max(4.6, 3.3 * columns), 0.9 + 3.2 * rows, title)
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    seen = [100 * point[side] for points in panels.values() for point in points for side in ("x", "y")]
    pad = max(1.0, 0.06 * (max(seen) - min(seen)))
    bounds = (max(min(seen) - pad, -2.0), min(max(seen) + pad, 102.0))
    for ax, (name, points) in zip(axes, panels.items(), strict=False):
        ax.plot(bounds, bounds, color="black", linestyle=(0, (1, 2)), linewidth=1.2, label="equal", zorder=1)
        for k, group in enumerate(groups or [None]):
            counts: dict[tuple[float, float], int] = {}
            for point in points:
                if group is None or point["group"] == group:
                    at = (100 * point["x"], 100 * point["y"])
                    counts[at] = counts.get(at, 0) + 1
            if counts:
                x, y = zip(*counts, strict=True)
                look = {"color": STYLES[k][0], "marker": STYLES[k][2], "alpha": 0.45, "linewidths": 0, "zorder": 2 + k}
                ax.scatter(x, y, s=[22 * count for count in counts.values()], label=group if len(groups) > 1 else None, **look)
        above, below = (100 * sum(sign * (p["y"] - p["x"]) > 0 for p in points) / len(points) for sign in (1, -1))
        ax.set_title("\n".join([*textwrap.wrap(name, 40), f"{above:.0f} % above, {below:.0f} % below"]), fontsize=9)
        ax.set(xlim=bounds, ylim=bounds, aspect="equal")
        ax.set_xlabel(f"accuracy with {baseline}, %", fontsize=9)
    for ax in axes[::columns]:
        ax.set_ylabel("accuracy with the method, %", fontsize=9)
    for ax in axes[len(panels) :]:
        ax.remove()
    _finish(figure, axes[: len(panels)], bounds)
    _save(figure, path)
    return Path(path)
