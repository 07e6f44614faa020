"""``experiment=aruba``: Per-FedAvg against FedAvg + ARUBA with refinement (appendix I, figure 1b), tuned.

All methods of the comparison get the same number of trials (``conf/tune/studies/aruba.yaml``: ARUBA's first step and zeta; the local
step of the others), judged on validation data; Per-FedAvg and FedAvg stand in the table with the configured step too, as in the
paper, which tunes ARUBA alone. A user adapts ("refines") for one step, the same budget for all, and for one pass over his data.
Claim: HF is ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfed import figures, results, tables
from perfed.config import Config, conf_dir
from perfed.errors import require
from perfed.htmlpage import Picture, Section
from perfed.results import Run
from perfed.studies import paper
from perfed.studies.compared import accuracies, band, curve, data_words, folder_of, publish, text_of, train_all
from perfed.studies.jobs import Context
from perfed.studies.paper import FEDAVG, FO, HF, TITLES
from perfed.studies.tuning import Space, Tuned, choices, read, tuned

ARUBA = "aruba"
NAMES = {**TITLES, ARUBA: "FedAvg + ARUBA"}
METHODS = (FEDAVG, FO, HF, ARUBA)


def main(context: Context) -> int:
    """Run the study; returns the exit code."""
    config = context.config
    require(config.study.methods == "all", "study.methods", config.study.methods, "all: the comparison has its own methods")
    require(config.split.val > 0, "split.val", config.split.val, "a share > 0: the trials are chosen on validation data")
    spaces, epoch = spaces_of(), one_pass(config, context)
    steps = f"adapt.steps=[1,{epoch}]"
    base = {method: (*data_words(config), f"algo={method}", steps) for method in METHODS}
    if config.plan:
        rows = [[NAMES[m], " ".join(text), "; ".join(f"{k} in {v}" for k, v in spaces[m].grid.items())] for m, text in base.items()]
        print(tables.plain(tables.grid(["method", "words", "grid"], rows, f"One pass over a user's data: {epoch} steps.")))
        return 0
    chosen = tuned(context, base, spaces, lanes=True)
    problems = [f"{NAMES[m]}: every trial failed or diverged" for m, found in chosen.items() if found.best is None]
    runs, missing = train_all({f"{NAMES[m]}, as configured": base[m] for m in METHODS if m != ARUBA}, context)
    well = {f"{NAMES[m]}, tuned": (*base[m], *found.words) for m, found in chosen.items() if found.best is not None}
    more, lost = train_all(well, context)  # after the others: the chosen value may be the configured one, which is one run
    runs, missing = runs | more, missing + lost
    report(folder_of("aruba", config, [spaces[m].grid for m in METHODS]), runs, [*problems, *missing], chosen, epoch, config)
    return 1 if missing or problems else 0


def spaces_of() -> dict[str, Space]:
    """The published grids, equally many points for each method."""
    return read(conf_dir() / "tune" / "studies" / "aruba.yaml", METHODS)


def one_pass(config: Config, context: Context) -> int:
    """Adaptation steps in which the user with the most data sees all of it once."""
    from perfed.prepare import prepare

    prepared = prepare(context.parsed(*data_words(config), f"algo={FEDAVG}", "seeds=1", "plan=false"))
    largest = max(int(part.train.sizes.max()) for part in prepared.partitions)
    return max(2, -(-largest // config.adapt_batch))


def report(
    folder: Path,
    runs: Mapping[str, Run],
    missing: list[str],
    chosen: Mapping[str, Tuned],
    epoch: int,
    config: Config,
) -> None:
    """Write and print the table, the verdicts and the picture."""
    table, verdict = table_of(runs, epoch, config), verdicts(runs, epoch)
    picked = choices({NAMES[m]: found for m, found in chosen.items()}, config.study.tuning_share)
    results.write_text(folder / "verdicts.csv", tables.to_csv(verdict))
    sections = [Section("Result", [table]), Section("Verdict", [verdict]), Section("What was chosen", [picked])]
    well = {label: run for label, run in runs.items() if not run.result["diverged"]}
    if well:
        first = next(iter(well.values()))
        what = f"{first.result['dataset']}, tau={first.result['tau']}; protocol {first.result['protocol']}"
        title, picture = f"{what}; after one pass of adaptation ({epoch} steps)", folder / "fig1b.png"
        figures.lines(frame(drawn_once(well)), picture, title, xlabels={"rounds": "rounds"}, majority=first.result["majority"])
        sections.insert(1, Section("Curves", [Picture(picture, "accuracy against rounds; mean and 95 % band over seeds")]))
    print(f"\n{tables.plain(table)}\n{tables.plain(picked)}\n{tables.plain(verdict)}")
    publish(folder, "Per-FedAvg against FedAvg + ARUBA (appendix I)", sections, runs, missing)


def drawn_once(runs: Mapping[str, Run]) -> dict[str, Run]:
    """The same run under one name where the trials chose the configured values: two curves would hide each other."""
    names: dict[Path, list[str]] = {}
    for label, run in runs.items():
        names.setdefault(run.folder, []).append(label)
    return {f"{mine[0]} and {mine[1].split(', ')[-1]}" if len(mine) > 1 else mine[0]: runs[mine[0]] for mine in names.values()}


def frame(runs: Mapping[str, Run]) -> Any:
    """What ``figures.lines`` draws."""
    import pandas as pd

    rows = []
    for label, run in runs.items():
        found = curve(run)
        mean, half = band(found["accuracy"])
        rows.append(pd.DataFrame({"panel": "rounds", "line": label, "x": found["round"], "mean": mean, "half_width": half}))
    return pd.concat(rows, ignore_index=True)


def table_of(runs: Mapping[str, Run], epoch: int, config: Config) -> tables.Grid:
    """A row per method and choice of steps."""
    rows = [[label, *(text_of(run, steps) for steps in (0, 1, epoch))] for label, run in runs.items()]
    row = paper.ROWS["cifar10_tau4"]
    mine = (config.dataset.name, config.tau, config.alpha, getattr(config.partition, "diff_hetero", None))
    if mine == ("cifar10", row.tau, row.alpha, row.diff):
        recalled = {FO: row.recalled[FO], HF: row.recalled[HF], ARUBA: paper.RECALLED_ARUBA}
        texts = {m: tables.accuracy_text(*value) for m, value in recalled.items()}
        rows += [[f"{NAMES[m]}, {paper.RECALLED}", "-", *((t, "-") if m != ARUBA else ("-", t))] for m, t in texts.items()]
    caption = (
        f"{tables.sweep_caption(list(runs.values()), tuned=True, marks='')} In rows 'as configured' they are the configuration's. "
        f"One pass: {epoch} steps, all data of the user with the most. "
        f"ARUBA adapts with its learned steps, the others with alpha={config.alpha:g}. Majority class: "
        f"{tables.percent(next(iter(runs.values())).result['majority']) if runs else '-'}."
    )
    return tables.grid(["method", "before adaptation", "after 1 step", "after one pass"], rows, caption)


def verdicts(runs: Mapping[str, Run], epoch: int) -> tables.Grid:
    """HF - ARUBA, for each choice of HF's steps and both budgets of adaptation."""
    rows, other = [], runs.get(f"{NAMES[ARUBA]}, tuned")
    for choice in ("as configured", "tuned"):
        run = runs.get(f"{NAMES[HF]}, {choice}")
        for steps, name in ((1, "after 1 step"), (epoch, "after one pass")):
            part = paper.compare("", *(accuracies(r, steps) if r is not None else None for r in (run, other)))
            rows.append([f"HF ({choice}) is ahead of FedAvg + ARUBA, {name}", paper.difference_text(part.difference), part.verdict])
    caption = "By the 95 % interval of the paired difference over common seeds; undecided below five seeds."
    return tables.grid(["claim", "difference, points", "verdict"], rows, caption)
