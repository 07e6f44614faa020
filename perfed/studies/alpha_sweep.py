"""``experiment=alpha_sweep``: accuracy against alpha times the measured smoothness L, the paper's second observation.

alpha is a small or a large step only beside the curvature of the loss. L is measured: the largest Hessian eigenvalue of a user's loss
at the initial model, by power iteration, and again at the end of each training. The sweep takes alpha = c / L at the initial model,
for c in ``MULTIPLES``. Claims: a larger alpha helps HF, a larger alpha hurts FO; for small alpha both do alike (section 5).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfed import figures, stats, tables
from perfed.config import Config
from perfed.errors import require
from perfed.htmlpage import Picture, Section
from perfed.results import Run
from perfed.studies import paper
from perfed.studies.compared import accuracies, data_words, folder_of, publish, text_of, train_all
from perfed.studies.jobs import Context
from perfed.studies.paper import EXACT, FEDAVG, FO, HF, TITLES

METHODS = (FEDAVG, FO, HF, EXACT)
MULTIPLES = (0.01, 0.03, 0.1, 0.3, 1.0)


def main(context: Context) -> int:
    """Run the study; returns the exit code."""
    from perfed.prepare import prepare, smoothness

    config = context.config
    require(config.study.methods == "all", "study.methods", config.study.methods, "all: the sweep has its own methods")
    base = data_words(config)
    size = smoothness(prepare(context.parsed(*base, f"algo={FEDAVG}", "seeds=1", "plan=false")))
    alphas = {multiple: float(f"{multiple / size:.2g}") for multiple in MULTIPLES}
    words = {_label(m, alpha): (*base, f"algo={m}", f"alpha={alpha:g}") for alpha in alphas.values() for m in METHODS}
    if config.plan:
        note = f"L = {size:.3g} at the initial model."
        print(tables.plain(tables.grid(["run", "words"], [[label, " ".join(text)] for label, text in words.items()], note)))
        return 0
    runs, missing = train_all(words, context)
    report(folder_of("alpha_sweep", config, [MULTIPLES]), runs, missing, list(alphas.values()), size, config)
    return 1 if missing else 0


def _label(method: str, alpha: float) -> str:
    return f"{TITLES[method]}, alpha={alpha:g}"


def final_smoothness(run: Run) -> float | None:
    """L at the run's final global model; None where it diverged."""
    from perfed import train
    from perfed.prepare import smoothness

    if run.result["diverged"]:
        return None
    fed, prepared = train.rebuild(run.folder)
    first = int(prepared.partitions[0].seen.argmax())
    return smoothness(prepared, train.user_model(fed, prepared, prepared.config.seed_values[0], first, "global", 0).params)


def report(folder: Path, runs: Mapping[str, Run], missing: list[str], alphas: list[float], size: float, config: Config) -> None:
    """Write and print the table, the verdicts and the picture."""
    table, verdict = table_of(runs, alphas, size), verdicts(runs, alphas)
    sections = [Section("Result", [table]), Section("Verdicts", [verdict])]
    if (drawn := frame(runs, alphas, size)) is not None:
        first = next(iter(runs.values()))
        title = f"{first.result['dataset']}, {first.result['model']}, tau={first.result['tau']}; protocol {first.result['protocol']}"
        xlabels, picture = {"alpha L": f"alpha L (L = {size:.3g} at the initial model)"}, folder / "alpha_sweep.png"
        figures.lines(drawn, picture, title, xlabels=xlabels, log=["alpha L"], majority=first.result["majority"])
        sections.insert(0, Section("Curves", [Picture(picture, "accuracy against alpha L; mean and 95 % band over seeds")]))
    print(f"\n{tables.plain(table)}\n{tables.plain(verdict)}")
    publish(folder, "Accuracy against alpha L: the second observation of the Per-FedAvg paper", sections, runs, missing)


def frame(runs: Mapping[str, Run], alphas: list[float], size: float) -> Any:
    """What ``figures.lines`` draws; None where no run has a mean."""
    import pandas as pd

    rows = []
    for method in METHODS:
        for alpha in alphas:
            run = runs.get(_label(method, alpha))
            seeds = None if run is None else accuracies(run)
            if seeds:
                mean, half = stats.interval(list(seeds.values()))
                rows.append(("alpha L", TITLES[method], alpha * size, mean, float("nan") if half is None else half))
    return pd.DataFrame(rows, columns=["panel", "line", "x", "mean", "half_width"]) if rows else None


def table_of(runs: Mapping[str, Run], alphas: list[float], size: float) -> tables.Grid:
    """A row per alpha; below it alpha L at the end of each training."""
    rows: list[list[str]] = []
    for alpha in alphas:
        mine = [runs.get(_label(method, alpha)) for method in METHODS]
        ends = [None if run is None else final_smoothness(run) for run in mine]
        rows.append([f"{alpha:g}", f"{alpha * size:.2g}", *map(text_of, mine)])
        rows.append(["  alpha L at the end", "", *("-" if end is None else f"{alpha * end:.2g}" for end in ends)])
    caption = tables.sweep_caption(list(runs.values()), marks="") + (
        " alpha L: alpha times the largest Hessian eigenvalue of a user's loss (256 of his images), at the initial model and at the end of "
        "the training of the first seed."
    )
    return tables.grid(["alpha", "alpha L", *(TITLES[m] for m in METHODS)], rows, caption)


def verdicts(runs: Mapping[str, Run], alphas: list[float]) -> tables.Grid:
    """The claims of the second observation."""

    def seeds(method: str, alpha: float) -> Any:
        run = runs.get(_label(method, alpha))
        return None if run is None else accuracies(run)

    ended = {method: [alpha for alpha in alphas if seeds(method, alpha)] for method in (FO, HF)}
    both = [alpha for alpha in ended[HF] if alpha in ended[FO]]
    if any(len(mine) < 2 for mine in (*ended.values(), both)):
        return tables.grid(["claim of the paper", "difference, points", "verdict"], [], "Fewer than two steps without a diverged seed.")
    small, large, near = both[0], both[-1], 100 * paper.ALIKE
    (low, high), (least, most) = ((mine[0], mine[-1]) for mine in (ended[HF], ended[FO]))
    lost = [_label(m, a) for m in (HF, FO) for a in alphas if runs.get(_label(m, a)) is not None and not seeds(m, a)]
    parts = [
        paper.compare(f"a larger alpha helps HF: {high:g} - {low:g}", seeds(HF, high), seeds(HF, low)),
        paper.compare(f"a larger alpha hurts FO: {least:g} - {most:g}", seeds(FO, least), seeds(FO, most)),
        paper.alike(f"for a small alpha ({small:g}) HF and FO are alike: within {near:g} points", seeds(HF, small), seeds(FO, small)),
        paper.compare(f"for a large alpha ({large:g}) HF is ahead of FO", seeds(HF, large), seeds(FO, large)),
    ]
    rows = [[part.text, paper.difference_text(part.difference), part.verdict] for part in parts]
    caption = (
        "Between the smallest and the largest alpha at which no seed of the method diverged (for both together: of either), by the 95 % "
        f"interval of the paired difference over common seeds; undecided below five seeds. Diverged: {'; '.join(lost) or 'none'}."
    )
    return tables.grid(["claim of the paper", "difference, points", "verdict"], rows, caption)
