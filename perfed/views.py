"""Other tables over the same cells: users who gain and lose against local training and FedAvg, and what a target accuracy costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfed import keys, measures, stats, tables
from perfed.errors import require
from perfed.measures import BASELINES, MEASURES
from perfed.pivot import Asked, Pivot, Source, against, asked, number, pairs_of_users, unequal
from perfed.results import Run
from perfed.tables import Grid, grid

# ---------------------------------------------------------------- users


def users_table(pivot: Pivot, model: str | None = None, steps: int | None = None) -> Grid:
    """For each cell: accuracy, the worst 10 % with its binomial floor, and the shares of users with a higher / lower accuracy than under
    the baselines in the same setting: mean over common seeds."""
    want = asked("accuracy", pivot.runs, model, steps)
    worst = Asked(MEASURES["worst10"], model, steps)
    rows, notes = [], []
    for row, column, cell in pivot.each():
        name = f"{pivot.head(column)}, {pivot.name(row)}"
        mean, low = number(pivot, row, column, want), number(pivot, row, column, worst)
        notes += [f"{mean.text}: {name}: {mean.reason}."] if mean.reason else []
        floor = _floor(cell, want) if low.per_seed else None
        line = [*pivot.labels(row), *column, mean.text, low.text + (f" ({tables.percent(floor)})" if floor is not None else "")]
        for baseline in BASELINES:
            other = pivot.beside(row, column, baseline)
            if other is cell:
                line += ["-", "-"]
                continue
            shares, why = against(cell, other, want) if other else ({}, f"no run of {baseline} with the same setting, or several")
            notes += [f"-: {name} against {baseline}: {why}."] if why and mean.per_seed else []
            for side in (0, 1):
                values = [pair[side] for pair in shares.values()]
                line.append(_share(*stats.interval(values)) if values else "-")
        rows.append(line)
    sides = [f"{side} than {baseline} %" for baseline in BASELINES for side in ("better", "worse")]
    labels = _heads(pivot)
    caption = tables.sweep_caption(
        pivot.runs,
        seeds=[len(cell.taken) for cell in pivot.cells.values() if cell.taken],
        marks="Worst 10 %: the mean over the tenth of the users with the lowest accuracy (at least one user); in brackets its binomial "
        "floor, what it would be by chance if all users had the same true accuracy. Better / worse: share of the users with a higher / "
        "lower accuracy than the same user has with the other method, by one test example or more; mean over the seeds that both have; "
        "the rest are equal.",
    )
    return grid([*labels, "accuracy %", "worst 10 % (floor)", *sides], rows, caption, notes + unequal(pivot), len(labels))


def _heads(pivot: Pivot) -> list[str]:
    """One line a cell: the keys of its row, then of its column."""
    return [*pivot.heads(), *map(keys.shown, pivot.column_keys)]


def _share(mean: float, half_width: float | None) -> str:
    return f"{100 * mean:.1f} (n/a)" if half_width is None else f"{100 * mean:.1f} ± {100 * half_width:.1f}"


def _floor(cell: Source, want: Asked) -> float | None:
    """Mean over seeds of the binomial floor, as the runs stored it for all of their seeds; None where runs with few seeds were joined."""
    if len({id(run) for run in cell.taken.values()}) != 1:
        return None
    run = next(iter(cell.taken.values()))
    model, steps = want.judged(run)
    found = next(c for c in run.result["cells"] if c["seen"] and (c["model"], c["steps"]) == (model, steps))
    return found.get("binomial_floor")


Points = dict[str, list[Mapping[str, Any]]]


def scatter(pivot: Pivot, baseline: str = "local", model: str | None = None, steps: int | None = None) -> Points:
    """Title of a panel -> points for ``figures.user_scatter``: every user of every common seed, his accuracy with the baseline (x), with
    the method (y), and his group. Raises UserError where nothing can be compared."""
    want = asked("accuracy", pivot.runs, model, steps)
    panels: dict[str, list[Mapping[str, Any]]] = {}
    reasons = []
    for row, column, cell in pivot.each():
        other = pivot.beside(row, column, baseline)
        if other is cell or other is None:
            continue
        pairs, why = pairs_of_users(cell, other, want)
        name = f"{pivot.head(column)}, {pivot.name(row)}" if len(pivot.rows) > 1 else pivot.head(column)
        if why:
            reasons.append(f"{name}: {why}")
            continue
        runs = {id(run): run for run in cell.taken.values()}.values()
        group = {key: value for run in runs for key, value in measures.groups_of(run, want.judged(run)).items()}
        panels[name] = [{"x": b, "y": a, "group": group[seed, user]} for seed, users in pairs.items() for user, a, b in users]
    why = f"; {reasons[0]}" if reasons else f"; give runs of {baseline} and of another method with the same setting"
    require(bool(panels), "scatter", baseline, f"no method to compare with {baseline}{why}")
    return panels


# ---------------------------------------------------------------- to a target


def target_table(pivot: Pivot, percent: float, model: str | None = None, steps: int | None = None) -> Grid:
    """For each cell the first scored round with at least ``percent`` accuracy on test data, and the gradient evaluations and seconds of one
    seed until then: mean over seeds. A seed that does not get there leaves no mean: ``not reached k/S``."""
    require(1 < percent <= 100, "target", percent, "an accuracy in percent, over 1 and at most 100")
    want = asked("accuracy", pivot.runs, model, steps)
    rows, notes, machines = [], [], set()
    for row, column, cell in pivot.each():
        name = f"{pivot.head(column)}, {pivot.name(row)}"
        line = [*pivot.labels(row), *column]
        shown = number(pivot, row, column, want)
        if shown.per_seed is None:
            notes.append(f"{shown.text}: {name}: {shown.reason}.")
            rows.append([*line, shown.text, "-", "-", "-"])
            continue
        reached, every, why = _reached(cell, want, percent / 100)
        notes += [f"-: {name}: {why}."] if why else []
        missed = [seed for seed, value in reached.items() if value is None]
        scored = "-" if not every else "/".join(map(str, sorted(every)))
        if missed:
            rows.append([*line, f"not reached {len(missed)}/{len(reached)}", "-", "-", scored])
            continue
        machines |= {measures.machine(run) for run in cell.taken.values()}
        rounds, grads, hvps, seconds = ([value[i] for value in reached.values()] for i in range(4))
        work = _count(grads) + (f" + {_count(hvps)} HVP" if any(hvps) else "")
        time = "-"
        if reached and None not in seconds:
            time = f"{sum(seconds) / len(seconds):,.2f}"
        elif reached:
            notes.append(f"-: {name}: no seconds until that round in timing.csv.")
        rows.append([*line, *([_count(rounds), work, time] if reached else ["-", "-", "-"]), scored])
    if len(machines) > 1:
        notes.append(f"The seconds do not compare, the machines differ: {'; '.join(sorted(machines))}.")
    caption = tables.sweep_caption(
        pivot.runs,
        _judged(pivot, want),
        what=f"The first scored round with {percent:g} % accuracy or more on test data (mean over users), and what a seed took until it",
        unit="of that round or count",
        seeds=[len(cell.taken) for cell in pivot.cells.values() if cell.taken],
        marks=f"Not reached k/S: k of S seeds did not get there, so there is no mean. Gradient evaluations of all users together; HVP: "
        "Hessian-vector products. Seconds of training without compiling and scoring: the seeds of a run are computed together, each counts "
        f"its share{f' ({machines.pop()})' if len(machines) == 1 else ''}. The resolution in rounds is 'scored every' (eval_every).",
    )
    columns = [*_heads(pivot), f"rounds to {percent:g} %", "gradient evaluations", "seconds", "scored every"]
    return grid(columns, rows, caption, notes + unequal(pivot), len(_heads(pivot)))


Reached = dict[str, tuple[int, int, int, float | None] | None]


def _reached(cell: Source, want: Asked, least: float) -> tuple[Reached, set[int], str]:
    """seed -> (round, gradient evaluations, Hessian-vector products, seconds), None where it does not get there; the distances of scored
    rounds; and why there is nothing."""
    found: Reached = {}
    every: set[int] = set()
    runs: dict[int, tuple[Run, list[str]]] = {}
    for seed, run in cell.taken.items():
        runs.setdefault(id(run), (run, []))[1].append(seed)
    for run, seeds in runs.values():
        model, steps = want.judged(run)
        if run.status.get("run") or not (run.folder / "rounds.csv").is_file():
            return {}, set(), f"{run.folder.name} has no rounds of its own"
        mine = run.rounds
        mine = mine[(mine["model"] == model) & (mine["steps"] == steps) & mine["seen"]].sort_values("round", kind="stable")
        known = measures.clock(run)
        every |= {run.config["eval_every"]} if "eval_every" in run.config else set()
        for seed in seeds:
            there = mine[(mine["seed"] == int(seed)) & (mine["accuracy"] >= least)]
            if there.empty:
                found[seed] = None
                continue
            k, grads, hvps = (int(there[name].iloc[0]) for name in ("round", "grad_evals", "hvps"))
            seconds = known.get(f"train until round {k}")
            found[seed] = (k, grads, hvps, None if seconds is None else seconds / len(run.result["seeds"]))
    return found, every, ""


def _count(values: list[int]) -> str:
    mean, half = stats.interval(values)
    if half is None:
        return f"{mean:,.0f} (n/a)"
    return f"{mean:,.0f} ± {half:,.0f}" if half else f"{mean:,.0f}"


def _judged(pivot: Pivot, want: Asked) -> str:
    """Where all cells are judged alike: how."""
    kinds = {tables.judged(*judged) for run in pivot.runs if (judged := want.judged(run)) is not None}
    return kinds.pop() if len(kinds) == 1 else "each method's primary model"
