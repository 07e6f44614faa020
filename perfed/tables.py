"""Runs -> a grid of cells -> plain text, Markdown or CSV.

``run_table`` is the final table of one run, ``sweep_table`` the table over several (rows = settings, columns = algorithms). Both return a
:class:`Grid`, which the writers ``plain``, ``markdown`` and ``to_csv`` render; another format is one more function of a Grid.
"""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

from perfed import stats
from perfed.errors import require, show
from perfed.results import Run

MARKED_FROM = 5
"""Common seeds below which no cell is marked."""
GROUP_COLUMNS = 6
"""More user groups than this have no column each."""


class Cell(NamedTuple):
    text: str
    bold: bool = False
    mark: str = ""


@dataclass(frozen=True)
class Grid:
    """``rows`` hold one Cell per column; the first column is the row's name. ``notes`` are lines below the caption."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    notes: tuple[str, ...] = ()


def grid(columns: Sequence[str], rows: Sequence[Sequence[str | Cell]], caption: str = "", notes: Sequence[str] = ()) -> Grid:
    """A Grid from plain strings and Cells. Every row has one entry per column."""
    assert all(len(row) == len(columns) for row in rows)
    cells = tuple(tuple(item if isinstance(item, Cell) else Cell(item) for item in row) for row in rows)
    return Grid(tuple(columns), cells, caption, tuple(notes))


def plain(table: Grid) -> str:
    """Aligned columns for a terminal; a bold cell has a star before it."""
    lines = [list(table.columns), *([f"{'*' if c.bold else ''}{c.text}{c.mark}" for c in row] for row in table.rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.columns))]
    text = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines]
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*text, *(textwrap.fill(line, 110) for line in _below(table))]) + "\n"


def markdown(table: Grid) -> str:
    """A pipe table, then the caption and the notes."""

    def line(items: Sequence[str]) -> str:
        return "| " + " | ".join(" ".join(item.replace("|", "\\|").split()) for item in items) + " |"

    text = [line(table.columns), "| --- |" + " ---: |" * (len(table.columns) - 1)]
    text += [line([f"**{c.text}**{c.mark}" if c.bold else c.text + c.mark for c in row]) for row in table.rows]
    below = _below(table)
    return "\n".join(text) + "\n" + ("\n" + "\n\n".join(below) + "\n" if below else "")


def to_csv(table: Grid) -> str:
    """Header and rows, without caption and bold; quoted only where needed."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows([c.text + c.mark for c in row] for row in table.rows)
    return out.getvalue()


def _below(table: Grid) -> list[str]:
    return [text for text in (table.caption, *table.notes) if text]


def percent(value: float | None) -> str:
    """``0.9213`` -> ``92.13``; ``-`` for None."""
    return "-" if value is None else f"{100 * value:.2f}"


def accuracy_text(mean: float, half_width: float | None) -> str:
    """``92.13 ± 0.45``, or ``92.13 (n/a)`` for one seed."""
    return f"{percent(mean)} (n/a)" if half_width is None else f"{percent(mean)} ± {percent(half_width)}"


def judged(model: str, steps: int) -> str:
    """``global, before adaptation`` or ``personal, after 5 steps``."""
    return f"{model}, before adaptation" if steps == 0 else f"{model}, after {steps} step{'s' if steps > 1 else ''}"


def run_table(result: Mapping[str, Any]) -> Grid:
    """The final table of one run, from its result.json. A run with a diverged seed shows ``div k/S`` and no mean."""
    seeds, diverged = len(result["seeds"]), len(result["diverged"])
    names = list(dict.fromkeys(name for cell in result["cells"] for name in cell.get("groups") or {}))
    groups = names if 1 < len(names) <= GROUP_COLUMNS else []
    lr = result.get("adapt_lr")
    rows: list[list[str]] = []
    for cell in sorted(result["cells"], key=lambda cell: not cell["seen"]):
        row = [("" if cell["seen"] else "new users: ") + judged(cell["model"], cell["steps"])]
        row.append("-" if cell["steps"] == 0 else "own" if lr is None else f"{lr:g}")
        if diverged:
            row += [f"div {diverged}/{seeds}"] + ["-"] * (len(groups) + 1)
        else:
            low, floor = cell.get("worst10"), cell.get("binomial_floor")
            row.append(accuracy_text(cell["mean"], cell["half_width"]))
            row += [percent((cell.get("groups") or {}).get(name)) for name in groups]
            row.append(percent(low) if floor is None else f"{percent(low)} ({percent(floor)})")
        rows.append(row)
    shares = result.get("majority_groups") or {}
    rows.append(["majority class", "-", percent(result.get("majority")), *(percent(shares.get(name)) for name in groups), "-"])
    notes = [f"DIVERGED: seed {seed} at round {k}." for seed, k in result["diverged"].items()]
    if alone := result.get("sampled_users_alone"):
        count, which = sum(result["never_sampled"]) / seeds, judged(result["primary"]["model"], result["primary"]["steps"])
        notes.append(
            f"{count:g} users a seed were never sampled; for them {result['cold_start']} is judged. "
            f"{which}, without them: {accuracy_text(alone['mean'], alone['half_width'])}."
        )
    if not all(cell["seen"] for cell in result["cells"]):
        notes.append(f"New users took no part in training; {result.get('cold_start', 'the global model')} is judged for them.")
    if best := result.get("best_on_validation"):
        rounds = ", ".join(map(str, best["rounds"]))
        notes.append(f"Best on validation (rounds {rounds}): {accuracy_text(best['mean'], best['half_width'])} on test data.")
    if len(names) > GROUP_COLUMNS:
        notes.append(f"{len(names)} user groups: see users.csv.")
    columns = ["judged model", "step size", "accuracy % ± 95 % CI", *groups, "worst 10 % (floor)"]
    return grid(columns, rows, _run_caption(result, seeds), notes)


def _run_caption(result: Mapping[str, Any], seeds: int) -> str:
    unit = "of the unweighted mean over users"
    interval = f"± is the half-width of the 95 % Student-t interval over {seeds} seeds {unit}"
    if seeds == 1:
        interval = f"n/a: one seed has no interval (± would be the half-width of the 95 % Student-t interval over seeds {unit})"
    return (
        f"{interval}; protocol {_protocol(result)}; {_redraws(result)}. "
        "Worst 10 %: the mean over the tenth of the users with the lowest accuracy (at least one user); in brackets its binomial floor, "
        "what it would be by chance if all users had the same true accuracy. "
        "Majority class: always answering the class that is most frequent in a user's training data."
    )


def _protocol(result: Mapping[str, Any]) -> str:
    text = result.get("protocol_text")
    return f"{result['protocol']} ({text.rstrip('.')})" if text else str(result["protocol"])


def _redraws(result: Mapping[str, Any]) -> str:
    """What differs between seeds. A ``partition_seed``, ``init_seed`` or ``sampling_seed`` that is set is the same for all."""
    parts = {"partition_seed": "partition", "init_seed": "initial model", "sampling_seed": "user sampling and batches"}
    fixed = [text for key, text in parts.items() if result.get(key) is not None]
    free = [text for key, text in parts.items() if result.get(key) is None]
    drawn = (", ".join(free) if "sampling" in free[-1] else " and ".join(free)) if free else "nothing"
    return f"a seed redraws {drawn}; the pool of images{''.join(', the ' + text for text in fixed)} is fixed"


def primary(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """The cell that stands for the run in a sweep: its primary judged model and steps, over the users seen in training."""
    want = result["primary"]
    return next(c for c in result["cells"] if c["seen"] and (c["model"], c["steps"]) == (want["model"], want["steps"]))


def sweep_table(runs: Sequence[Run]) -> Grid:
    """Rows = the settings in which the runs differ, columns = algorithms, cells = mean ± half-width of the primary cells; in the order
    of ``runs``.

    Runs that differ in seeds alone share a cell, where no seed counts twice. With at least MARKED_FROM seeds common to a row, the highest
    mean is bold and † marks what a paired t test does not separate from it (Holm over all pairs of the row, level 0.05). Raises UserError
    for no run, and for runs of different protocols.
    """
    require(bool(runs), "run", "", "at least one run folder")
    labels = list(dict.fromkeys(run.result["protocol"] for run in runs if run.complete))
    require(len(labels) < 2, "protocol", ", ".join(labels), "one table holds runs of one protocol; make one table for each")
    keys = _setting_keys([flat(run.config) for run in runs])
    table: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        table.setdefault(_setting(run, keys), {}).setdefault(_algorithm(run), []).append(run)
    algorithms = list(dict.fromkeys(_algorithm(run) for run in runs))
    reasons: list[str] = []
    rows = [_sweep_row(name, [row.get(algorithm, []) for algorithm in algorithms], algorithms, reasons) for name, row in table.items()]
    stated = [_stated([run for row in table.values() for run in row.get(name, []) if run.complete]) for name in algorithms]
    same = len({text for text in stated if text}) < 2
    heads = [name if same or not text else f"{name} ({text})" for name, text in zip(algorithms, stated, strict=True)]
    done = [run for run in runs if run.complete]
    return grid(["setting", *heads, "majority class"], rows, sweep_caption(done, next(filter(None, stated), "") if same else ""), reasons)


def _sweep_row(name: str, cells: list[list[Run]], algorithms: list[str], reasons: list[str]) -> list[str | Cell]:
    """The row's cells; what has no number gets a line in ``reasons``."""
    texts: list[str] = []
    values: dict[int, dict[str, float]] = {}
    majority: float | None = None
    for i, runs in enumerate(cells):
        done = sorted((run for run in runs if run.complete), key=lambda run: -len(run.result["seeds"]))
        text, reason = "-", "no run"
        if done:
            per_seed, diverged = _seeds(done)
            majority = done[0].result.get("majority") if majority is None else majority
            text = f"div {len(diverged)}/{len(per_seed)}"
            reason = ", ".join(f"seed {seed} diverged at round {k}" for seed, k in diverged.items())
            if not diverged:
                values[i] = per_seed
                text, reason = accuracy_text(*stats.interval(list(per_seed.values()))), ""
        elif runs:
            status = runs[0].status
            text = "FAILED" if status["status"] == "FAILED" else "-"
            reason = f"{status['status']}{_cause(status)} ({runs[0].folder.name})"
        texts.append(text)
        if reason:
            reasons.append(f"{text}: {algorithms[i]}, {name}: {reason}.")
    bold, dagger = _marks(values)
    return [name, *(Cell(text, i in bold, "†" if i in dagger else "") for i, text in enumerate(texts)), percent(majority)]


def _seeds(runs: list[Run]) -> tuple[dict[str, float], dict[str, int]]:
    """Primary accuracy by seed (None where it diverged) and round of divergence by seed; of a seed in several runs, the first counts."""
    per_seed: dict[str, float] = {}
    diverged: dict[str, int] = {}
    for run in runs:
        value = primary(run.result)["per_seed"]
        for seed in map(str, run.result["seeds"]):
            if seed not in per_seed:
                per_seed[seed] = value.get(seed)
                if seed in run.result["diverged"]:
                    diverged[seed] = run.result["diverged"][seed]
    return per_seed, diverged


def _marks(values: dict[int, dict[str, float]]) -> tuple[set[int], set[int]]:
    """Columns with the highest mean, and those not separated from it."""
    common = sorted(set.intersection(*(set(v) for v in values.values()))) if len(values) > 1 else []
    if len(common) < MARKED_FROM:
        return set(), set()
    mean = {i: stats.interval(list(v.values()))[0] for i, v in values.items()}
    best = {i for i in mean if mean[i] == max(mean.values())}
    pairs = list(combinations(values, 2))
    adjusted = stats.holm([stats.paired({s: values[i][s] for s in common}, values[j]).p for i, j in pairs])
    open_pairs = [pair for pair, p in zip(pairs, adjusted, strict=True) if p > 0.05]
    return best, {i for pair in open_pairs for i in pair if set(pair) & best and i not in best}


def _cause(status: Mapping[str, Any]) -> str:
    """The error's last line, where a failed run stored one."""
    lines = str(status.get("error") or status.get("traceback") or "").strip().splitlines()
    return f", {show(lines[-1])}" if lines else ""


def _stated(runs: list[Run]) -> str:
    """Judged model, steps and step size of a column's cells, such as ``global, after 1 step of 0.01``."""
    models = dict.fromkeys(judged(run.result["primary"]["model"], run.result["primary"]["steps"]) for run in runs)
    sizes = [run.result.get("adapt_lr") for run in runs if run.result["primary"]["steps"]]
    rates = dict.fromkeys("own size" if lr is None else f"{lr:g}" for lr in sizes)
    return " / ".join(models) + (f" of {' / '.join(rates)}" if rates else "")


def sweep_caption(runs: list[Run], stated: str = "", tuned: bool = False) -> str:
    """What the cells are: interval, protocol, what a seed redraws, and whether the steps were chosen (``tuned``: on validation data)."""
    if not runs:
        return ""
    counts = sorted({len(run.result["seeds"]) for run in runs})
    seeds = f"{counts[0]} seed{'s' if counts[0] > 1 else ''}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
    result = dict(runs[0].result)
    if len({run.result.get("protocol_text") for run in runs}) > 1:  # the adaptation batch is a setting of the rows
        del result["protocol_text"]
    return (
        f"Accuracy in percent{f' ({stated})' if stated else ''}; "
        f"± is the half-width of the 95 % Student-t interval over {seeds} of the unweighted mean over users"
        f"{'; n/a: one seed has no interval' if counts[0] == 1 else ''}; protocol {_protocol(result)}; {_redraws(result)}. "
        + (
            "Hyper-parameters were chosen on validation data. Bold (* in plain text): the highest mean; †: not separated from it "
            "(paired t over common seeds, Holm over the comparisons with it, level 0.05)"
            if tuned
            else "Step sizes are as configured, untuned. Bold (* in plain text): the highest mean of a row; †: not separated from it "
            "(paired t over common seeds, Holm over all pairs of the row, level 0.05)"
        )
        + f"; no marks below {MARKED_FROM} common seeds."
    )


NOT_A_SETTING = {
    "device", "data_root", "outputs", "progress", "pictures", "plugins", "plan", "force", "eval_every", "checkpoint_every", "resume",
    "fail_fast",
    "seed", "seeds", "hydra", "experiment", "tracker", "engine", "study",
}  # fmt: skip
"""Root keys that change no number, and the seeds, which are averaged over."""


def _algorithm(run: Run) -> str:
    return str(run.result["algo"] if run.result else (run.config.get("algo") or {}).get("name", "?"))


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested maps as one, with dotted keys."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        out.update(flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return out


def _setting_keys(configs: list[dict[str, Any]]) -> list[str]:
    """The keys that tell the runs apart, beside the algorithm. An option's own key counts only if it differs between runs with the same
    option of that group, and one that follows a root key (``algo.alpha: ${alpha}``) not at all."""
    keys = []
    for key in dict.fromkeys(key for config in configs for key in config):
        root, _, leaf = key.rpartition(".")
        if (key.split(".")[0] in NOT_A_SETTING and key != "engine.dtype") or key == "algo.name":
            continue
        if leaf != "name" and root and all(leaf in c and _typed(c[leaf]) == _typed(c[key]) for c in configs if key in c):
            continue
        values: dict[Any, set[Any]] = {}
        for config in configs:
            option = None if leaf == "name" or not root else config.get(f"{root}.name")
            values.setdefault(option, set()).add(_typed(config.get(key)))
        if any(len(found) > 1 for found in values.values()):
            keys.append(key)
    return keys


def _typed(value: Any) -> Any:
    """A hashable stand-in that keeps 1 and "1", null and "null" apart, and 1 and 1.0 together."""
    if isinstance(value, list):
        return tuple(_typed(item) for item in value)
    return (type(value).__name__ if value is None or isinstance(value, (bool, str)) else "number", value)


def _setting(run: Run, keys: list[str]) -> str:
    """``partition=table2, tau=10``; for runs that do not differ, the data set and tau."""
    values = flat(run.config)
    keys = keys or [key for key in ("dataset.name", "tau", "alpha") if key in values]
    return ", ".join(f"{key.removesuffix('.name')}={_typed_text(values.get(key))}" for key in keys) or "all"


def _typed_text(value: Any) -> str:
    """As typed on the command line; a text that reads as another type is quoted."""
    if not isinstance(value, str):
        return show(value)
    try:
        float(value)
    except ValueError:
        return value if value.lower() not in ("", "null", "~", "true", "false") else f"'{value}'"
    return f"'{value}'"
