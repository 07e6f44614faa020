"""The picture of a tuning: validation accuracy against every swept key, a panel for each method and key.

Drawn like the pictures of ``perfed.figures``: lines differ in lightness, dash and marker, so that they can be told apart in grey.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from perfed.figures import STYLES
from perfed.results import atomic

LOG_FROM = 4
"""Positive values whose largest is so many times the smallest get a log axis; so does a step size."""
STEP_SIZES = ("alpha", "beta", "lr", "p_lr", "personal_lr")


def sensitivity(trials: Mapping[str, Sequence[Mapping[str, Any]]], path: Path | str, title: str = "") -> None:
    """Write ``path`` (PNG) and the same picture as PDF beside it.

    ``trials``: by method, one mapping for each trial: ``values`` (key -> value), ``score`` (mean validation accuracy in [0, 1], or None),
    ``spread`` (lowest and highest seed, or None), ``status`` (DONE, DIVERGED, FAILED) and ``chosen``. A line joins the trials that differ
    in the panel's key alone. A trial without a score is a cross at the foot of the panel; the chosen one has a ring.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_pdf import FigureCanvasPdf
    from matplotlib.figure import Figure

    panels = [(method, key) for method, mine in trials.items() for key in mine[0]["values"]]
    most = max(len(mine[0]["values"]) for mine in trials.values())
    columns = most if len(trials) > 1 and most > 1 else min(3, len(panels))
    if len(trials) > 1 and most == 1:
        places = {panel: divmod(i, columns) for i, panel in enumerate(panels)}
    else:  # a row for each method
        order = list(trials)
        places = {(m, k): divmod(i, columns) if len(trials) == 1 else (order.index(m), list(trials[m][0]["values"]).index(k))
                  for i, (m, k) in enumerate(panels)}  # fmt: skip
    rows = 1 + max(row for row, _ in places.values())
    figure = Figure(figsize=(max(4.6, 3.9 * columns), 2.9 * rows + 0.7), dpi=150, layout="constrained")
    if title:
        figure.suptitle("\n".join(textwrap.wrap(title, int(figure.get_figwidth() * 12))), fontsize=10)
    axes = figure.subplots(rows, columns, squeeze=False)
    used = set(places.values())
    for place in np.ndindex(rows, columns):
        axes[place].set_visible(place in used)
    for (method, key), place in places.items():
        _panel(axes[place], method, key, trials[method])
    for name, canvas in ((Path(path), FigureCanvasAgg), (Path(path).with_suffix(".pdf"), FigureCanvasPdf)):
        with atomic(name) as temporary:
            if canvas is FigureCanvasAgg:
                canvas(figure).print_png(str(temporary))
            else:
                canvas(figure).print_pdf(str(temporary), metadata={"CreationDate": None})


def _panel(ax: Any, method: str, key: str, trials: Sequence[Mapping[str, Any]]) -> None:
    values = list(dict.fromkeys(trial["values"][key] for trial in trials))
    numeric = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
    where = {v: float(v) if numeric else float(i) for i, v in enumerate(values)}
    if numeric and min(values) > 0 and len(values) > 1:
        if max(values) >= LOG_FROM * min(values) or key.rpartition(".")[2] in STEP_SIZES:
            ax.set_xscale("log")
    lines: dict[tuple, list[Mapping[str, Any]]] = {}
    for trial in trials:
        lines.setdefault(tuple((k, v) for k, v in trial["values"].items() if k != key), []).append(trial)
    scores = [100 * t["score"] for t in trials if t["score"] is not None]
    low, high = (min(scores), max(scores)) if scores else (0.0, 100.0)
    pad = 0.06 * (high - low) + 0.5
    lost = any(t["score"] is None for t in trials)
    foot = low - (3 if lost else 1) * pad
    for i, (others, mine) in enumerate(lines.items()):
        colour, dash, marker = STYLES[i % len(STYLES)]
        mine = sorted(mine, key=lambda t: where[t["values"][key]])
        known = [t for t in mine if t["score"] is not None]
        x, y = [where[t["values"][key]] for t in known], [100 * t["score"] for t in known]
        style = {"color": colour, "linestyle": dash if numeric else "none", "marker": marker, "markersize": 5, "linewidth": 1.6}
        ax.plot(x, y, label=", ".join(f"{k}={v}" for k, v in others), **style)
        if any(t["spread"] for t in known):
            ends = [[100 * bound for bound in t["spread"]] for t in known]
            ax.vlines(x, [e[0] for e in ends], [e[1] for e in ends], color=colour, linewidth=1)
        for t in mine:
            at = where[t["values"][key]]
            if t["score"] is None:
                ax.plot([at], [foot + pad], marker="x", markersize=7, markeredgewidth=1.6, color=colour, linestyle="none")
                ax.annotate(t["status"].lower(), (at, foot + pad), (0, 5), textcoords="offset points", ha="center", fontsize=7)
            elif t["chosen"]:
                ax.plot([at], [100 * t["score"]], marker="o", markersize=12, markerfacecolor="none", markeredgecolor="black")
    ax.xaxis.set_major_locator(_fixed([where[v] for v in values]))
    ax.xaxis.set_minor_locator(_fixed([]))
    ax.set_xticklabels([f"{v:g}" if numeric else str(v) for v in values], fontsize=8)
    ax.set_ylim(foot, min(high + pad, 102.0) if high <= 100 else high + pad)
    ax.margins(x=0.12)
    ax.set_xlabel(key, fontsize=9)
    ax.set_ylabel("validation accuracy, %", fontsize=8)
    ax.set_title(method, fontsize=9)
    ax.grid(color="0.9", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    if len(lines) > 1:
        ax.legend(fontsize=7, frameon=False)


def _fixed(ticks: Sequence[float]) -> Any:
    from matplotlib.ticker import FixedLocator

    return FixedLocator(ticks)
