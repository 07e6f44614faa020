"""``experiment=fig1``: the paper's figure 1a (appendix I), accuracy against time, and against what does not depend on the machine.

FedAvg, Per-FedAvg (FO), (HF) and exact run until each has spent the gradient evaluations of ``rounds`` rounds of HF (a Hessian-vector
product counts twice), so FedAvg runs four times the rounds. Drawn against seconds of training (compiling and evaluating left out; one
seed's share of a run that trains all seeds together), rounds, gradient evaluations and numbers sent. Runs go one after the other
(``study.jobs=1``), since others would share their cores. Claim: HF is ahead of FedAvg after the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from perfed import figures, stats, tables
from perfed.errors import require
from perfed.htmlpage import Picture, Section
from perfed.results import Run
from perfed.studies import paper
from perfed.studies.all_methods import cost_of_a_round
from perfed.studies.compared import band, curve, data_words, folder_of, publish, seeds_at, train_all
from perfed.studies.jobs import Context
from perfed.studies.paper import EXACT, FEDAVG, FO, HF, TITLES

METHODS = (FEDAVG, FO, HF, EXACT)
AXES = {
    "seconds": "seconds of training, a seed's share",
    "round": "rounds of communication",
    "gradients": "gradient evaluations, thousands",
    "floats": "numbers sent, million",
}
PANELS = {"seconds": "time", "round": "rounds", "gradients": "gradients", "floats": "numbers sent"}
SCALES = {"seconds": 1.0, "round": 1.0, "gradients": 1e3, "floats": 1e6}


def main(context: Context) -> int:
    """Run the study; returns the exit code."""
    config = context.config
    require(config.study.methods == "all", "study.methods", config.study.methods, "all: the figure has its own methods")
    words = plan(context)
    if config.plan:
        print(tables.plain(tables.grid(["method", "words"], [[TITLES[m], " ".join(text)] for m, text in words.items()])))
        return 0
    runs, missing = train_all({TITLES[m]: text for m, text in words.items()}, context)
    folder = folder_of("fig1", config)
    report(folder, runs, missing)
    return 1 if missing else 0


def plan(context: Context) -> dict[str, tuple[str, ...]]:
    """method -> words, all with the same gradient evaluations and as many evaluated rounds. Raises UserError where that is no whole
    number of rounds."""
    base, out = data_words(context.config), {}
    dear = cost_of_a_round(context.parsed(f"algo={HF}", *base))
    for method in METHODS:
        times = dear / cost_of_a_round(context.parsed(f"algo={method}", *base))
        require(times == int(times), "tau", context.config.tau, f"a value for which {HF} costs a whole multiple of {method}")
        rounds, every = context.config.rounds * int(times), context.config.eval_every * int(times)
        out[method] = (*base, f"algo={method}", f"rounds={rounds}", f"eval_every={every}")
    return out


def report(folder: Path, runs: Mapping[str, Run], missing: list[str]) -> None:
    """Write and print the table at equal budgets, the verdicts and the picture."""
    curves = {title: curve(run) for title, run in runs.items() if not run.result["diverged"]}
    notes = [f"{title}: a seed diverged; it is in no curve." for title, run in runs.items() if run.result["diverged"]]
    axes = [axis for axis in AXES if curves and all(np.isfinite(found[axis]).all() for found in curves.values())]
    if curves and "seconds" not in axes:
        notes.append("Against seconds nothing is drawn: a run lacks the times of its rounds.")
    sections = [Section("Curves", notes)] if notes else []
    if curves:
        budgets = {axis: min(found[axis][-1] for found in curves.values()) for axis in axes}
        well = [run for run in runs.values() if not run.result["diverged"]]
        first = well[0]
        table, verdict = equal_budgets(curves, budgets, well), verdicts(curves, budgets)
        labels = {PANELS[axis]: AXES[axis] for axis in axes}
        picture = folder / "fig1.png"
        figures.lines(frame(curves, axes), picture, _title(first), xlabels=labels, majority=first.result["majority"])
        shown = Picture(picture, f"accuracy against {', '.join(labels)}; mean and 95 % band over seeds")
        sections = [Section("Curves", [shown, *notes]), Section("At equal budgets", [table]), Section("Verdict", [verdict])]
        print(f"\n{tables.plain(table)}\n{tables.plain(verdict)}")
    for note in notes:
        print(f"perfed: {note}")
    publish(folder, "Figure 1a of the Per-FedAvg paper: accuracy against time and other budgets", sections, runs, missing)


def _title(run: Run) -> str:
    result = run.result
    return f"{result['dataset']}, {result['partition']}, {result['model']}, tau={result['tau']}; protocol {result['protocol']}"


def frame(curves: Mapping[str, Mapping[str, np.ndarray]], axes: list[str]) -> Any:
    """What ``figures.lines`` draws: a panel per axis."""
    import pandas as pd

    rows = []
    for axis in axes:
        for title, found in curves.items():
            mean, half = band(found["accuracy"])
            x = found[axis] / SCALES[axis]
            rows.append(pd.DataFrame({"panel": PANELS[axis], "line": title, "x": x, "mean": mean, "half_width": half}))
    return pd.concat(rows, ignore_index=True)


def equal_budgets(curves: Mapping[str, Mapping[str, np.ndarray]], budgets: Mapping[str, float], runs: Sequence[Run]) -> tables.Grid:
    """Accuracy of each method where the cheapest run of an axis ends; "-" where it was not evaluated so early."""
    rows = []
    for axis, budget in budgets.items():
        values = [seeds_at(found, axis, budget) for found in curves.values()]
        cells = ["-" if seeds is None else tables.accuracy_text(*stats.interval(list(seeds.values()))) for seeds in values]
        rows.append([f"{budget / SCALES[axis]:,.6g} {AXES[axis]}", *cells])
    caption = (
        f"{tables.sweep_caption(runs, marks='')} Of each method when it has spent so much, where the cheapest curve of an axis ends "
        "(between two evaluated rounds: linear). Gradients and numbers sent are counted over all users of a seed. Seconds: one "
        "measurement for all seeds of a method, compiling and evaluating left out; the interval does not know its error. Majority "
        f"class: {tables.percent(runs[0].result['majority'])}."
    )
    return tables.grid(["after", *curves], rows, caption)


def verdicts(curves: Mapping[str, Mapping[str, np.ndarray]], budgets: Mapping[str, float]) -> tables.Grid:
    """HF ahead of FedAvg after the same time (the paper's claim), and after the same of each other budget."""
    rows, high, low = [], curves.get(TITLES[HF]), curves.get(TITLES[FEDAVG])
    for axis, budget in budgets.items():
        if high is None or low is None:
            continue
        part = paper.compare("", *(seeds_at(found, axis, budget) for found in (high, low)))
        claim = "paper: HF is ahead after the same time" if axis == "seconds" else f"HF is ahead after the same {AXES[axis].split(',')[0]}"
        rows.append([claim, paper.difference_text(part.difference), part.verdict])
    caption = "By the 95 % interval of the paired difference HF - FedAvg over seeds; undecided below five seeds."
    return tables.grid(["claim", "HF - FedAvg, points", "verdict"], rows, caption)
