"""The table over several runs: one measure in every cell, what is the best, and what a paired test separates from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product

from perfed import keys, stats, tables
from perfed.errors import nearest, require
from perfed.measures import Measure, machine, measure
from perfed.pivot import Asked, Label, Pivot, Source, arrange, asked, number, unequal
from perfed.results import Run
from perfed.tables import MARKED_FROM, Cell, Grid, grid


def sweep_table(runs: Sequence[Run]) -> Grid:
    """Rows = the settings in which the runs differ, columns = algorithms, cells = accuracy; in the order of ``runs``."""
    return table(arrange(runs, by_value=False))


def table(
    pivot: Pivot,
    cell: str = "accuracy",
    *,
    model: str | None = None,
    steps: int | None = None,
    reference: str | None = None,
    margin: float | None = None,
) -> Grid:
    """The table of one measure.

    Marks need MARKED_FROM seeds common to the row. The best mean is bold; without ``reference`` † marks what a paired t test does not
    separate from it (Holm over all pairs of the row, level 0.05). With ``reference`` (a column) a second line of each row holds the paired
    differences to it with their 95 % intervals, † by Holm over these comparisons. ``margin``, in the unit shown: ≈ marks what is equivalent
    within it to the reference, else to the best (two one-sided t tests, level 0.05).
    """
    want = asked(cell, pivot.runs, model, steps)
    numbers = {(r, c): number(pivot, r, c, want) for r in pivot.rows for c in pivot.columns}
    heads = [pivot.head(column) for column in pivot.columns]
    if reference is not None:
        require(reference in heads, "reference", reference, f"a column: {', '.join(heads)}{nearest(reference, heads)}")
    require(margin is None or margin > 0, "margin", margin, "a number > 0, in the unit of the cells")
    require(margin is None or want.measure.better != 0, "margin", margin, f"a measure that is compared, not {cell}")
    stated = [_stated([pivot.at(row, column) for row in pivot.rows], want) for column in pivot.columns]
    same = len({text for text in stated if text}) < 2
    shown = [name if same or not text else f"{name}\n{text}" for name, text in zip(heads, stated, strict=True)]
    beside = _has_majority(pivot, want)
    rows: list[list[str | Cell]] = []
    notes: list[str] = []
    for row in pivot.rows:
        mine = [numbers[row, column] for column in pivot.columns]
        reasons: dict[tuple[str, str], list[str]] = {}
        for head, n in zip(heads, mine, strict=True):
            if n.reason:
                reasons.setdefault((n.text, n.reason), []).append(head)
        notes += [f"{text}: {', '.join(names)}, {pivot.name(row)}: {reason}." for (text, reason), names in reasons.items()]
        values = {i: n.per_seed for i, n in enumerate(mine) if n.per_seed is not None}
        bold, marks = _marks(values, want.measure, reference is None, margin)
        base = [_majority([pivot.at(row, c) for c in pivot.columns], want)] if beside else []
        what = [] if reference is None else ["mean"]
        rows.append([*pivot.labels(row), *what, *(Cell(n.text, i in bold, marks.get(i, "")) for i, n in enumerate(mine)), *base])
        if reference is not None:
            differences = _differences(values, heads.index(reference), len(heads), want.measure, margin)
            rows.append([*pivot.labels(row), f"minus {reference}", *differences, *["-"] * len(base)])
    notes += [f"{run.folder.name} is left out: {why}." for _, _, cell in pivot.each() for run, why in cell.left_out]
    notes += unequal(pivot) + (_machines(pivot) if want.measure.name == "seconds" else [])
    columns = [*pivot.heads(), *([] if reference is None else ["shown"]), *shown, *(["majority class"] if beside else [])]
    counts = [len(n.per_seed) for n in numbers.values() if n.per_seed] or [len(c.taken) for c in pivot.cells.values() if c.taken]
    caption = tables.sweep_caption(
        pivot.runs,
        next(filter(None, stated), "") if same else "",
        what=want.measure.what,
        unit=want.measure.unit,
        seeds=counts,
        marks=_explained(want.measure, reference, margin),
        scored=want.measure.scored,
    )
    return grid(columns, rows, caption, notes, len(pivot.heads()) + (reference is not None))


def marks_of_row(values: Mapping[int, Mapping[str, float]]) -> tuple[set[int], dict[int, str]]:
    """Columns with the highest mean accuracy, and by column the † of those not separated from it; ``values``: column -> by seed."""
    return _marks(values, measure("accuracy", []), True)


def _machines(pivot: Pivot) -> list[str]:
    found = sorted({machine(run) for run in pivot.runs})
    return [f"Measured on {found[0]}." if len(found) == 1 else f"The seconds do not compare, the machines differ: {'; '.join(found)}."]


def _marks(
    values: Mapping[int, Mapping[str, float]], of: Measure, dagger: bool, margin: float | None = None
) -> tuple[set[int], dict[int, str]]:
    """Columns with the best mean; and by column the marks, from a comparison with the best."""
    common = sorted(set.intersection(*(set(v) for v in values.values()))) if len(values) > 1 else []
    if len(common) < MARKED_FROM or not of.better:
        return set(), {}
    mean = {i: of.better * stats.interval(list(v.values()))[0] for i, v in values.items()}
    best = {i for i in mean if mean[i] == max(mean.values())}
    shared = {i: of.better * stats.interval([v[seed] for seed in common])[0] for i, v in values.items()}
    if best != {i for i in shared if shared[i] == max(shared.values())}:  # seeds that not all have decide which is the best
        return set(), {}
    if not dagger:
        return best, {}
    pairs = list(combinations(values, 2))
    tests = {(i, j): stats.paired({s: values[i][s] for s in common}, values[j]) for i, j in pairs}
    adjusted = stats.holm([test.p for test in tests.values()])
    unclear = [pair for pair, p in zip(pairs, adjusted, strict=True) if p > 0.05]
    marks = {i: "†" for pair in unclear for i in pair if set(pair) & best and i not in best}
    for (i, j), test in tests.items() if margin is not None else ():
        for one, other in ((i, j), (j, i)):
            if other == min(best) and one not in best and stats.tost(test, margin / of.scale) <= 0.05:
                marks[one] = marks.get(one, "") + "≈"
    return best, marks


def _differences(values: Mapping[int, Mapping[str, float]], base: int, count: int, of: Measure, margin: float | None) -> list[str | Cell]:
    """For each column its paired difference to the column ``base``, with marks."""
    tests: dict[int, stats.Paired] = {}
    for i in range(count):
        if i != base and i in values and base in values and set(values[i]) & set(values[base]):
            tests[i] = stats.paired(values[i], values[base])
    tested = [i for i, test in tests.items() if test.n >= MARKED_FROM] if of.better else []
    adjusted = dict(zip(tested, stats.holm([tests[i].p for i in tested]), strict=True))
    out: list[str | Cell] = []
    for i in range(count):
        if i not in tests:
            out.append("-")
            continue
        d, half = tests[i].difference, tests[i].half_width
        mark = "†" if adjusted.get(i, 0) > 0.05 else ""
        mark += "≈" if margin is not None and i in adjusted and stats.tost(tests[i], margin / of.scale) <= 0.05 else ""
        out.append(Cell(of.text(d, half, sign=True), mark=mark))
    return out


def _explained(of: Measure, reference: str | None, margin: float | None) -> str:
    """The caption's sentence on marks."""
    best = "highest" if of.better > 0 else "lowest"
    end = f"no marks below {MARKED_FROM} common seeds."
    same = f"equivalent to {reference or 'it'} within ±{margin:g}" if margin is not None else ""
    tost = f"≈: {same} (two one-sided paired t tests, each comparison by itself, level 0.05: its 90 % interval lies within); " * bool(same)
    if reference is None:
        if not of.better:
            return ""
        marks = tables.BOLD_OF_ROW.replace("highest", best)
        return marks.replace("; no marks", f"; {tost}no marks") if tost else marks
    rows = f"Rows 'minus {reference}': the mean paired difference over common seeds, ± the half-width of its 95 % Student-t interval"
    if not of.better:
        return f"{rows}."
    holm = f"†: not separated from {reference} (paired t, Holm over the comparisons with {reference} in a row, level 0.05)"
    return f"{rows}; {holm}; {tost}bold{tables.STAR}: the {best} mean of a row, not tested; {end}"


def _stated(cells: Sequence[Source], want: Asked) -> str:
    """Judged model, steps and step size of a column's cells, such as ``global, after 1 step of 0.01``; "" where the number needs none."""
    if want.measure.better == 0:
        return ""
    runs = [run for cell in cells for run in cell.runs if run.complete]
    pairs = [(run, judged) for run in runs if (judged := want.judged(run)) is not None]
    if want.measure.name == "before":
        return " / ".join(dict.fromkeys(judged[0] for _, judged in pairs))
    models = dict.fromkeys(tables.judged(*judged) for _, judged in pairs)
    sizes = [run.result.get("adapt_lr") for run, judged in pairs if judged[1]]
    rates = dict.fromkeys("own size" if lr is None else f"{lr:g}" for lr in sizes)
    return " / ".join(models) + (f" of {' / '.join(rates)}" if rates else "")


def _has_majority(pivot: Pivot, want: Asked) -> bool:
    """Whether the majority class stands beside the cells. That of new users is not in older results."""
    if want.measure.name == "new_users":
        return any("majority_new" in run.result for run in pivot.runs)
    return want.measure.name in ("accuracy", "before") or want.measure.name.startswith("group:")


def _majority(cells: Sequence[Source], want: Asked) -> str:
    group = want.measure.name.removeprefix("group:") if want.measure.name.startswith("group:") else None
    overall = "majority_new" if want.measure.name == "new_users" else "majority"
    found = []
    for run in {id(run): run for cell in cells for run in dict(cell.taken).values()}.values():
        value = run.result.get(overall) if group is None else (run.result.get("majority_groups") or {}).get(group)
        found += [] if value is None else [value]
    if not found:
        return "-"
    low, high = tables.percent(min(found)), tables.percent(max(found))
    return low if low == high else f"{low} to {high}"


def why(pivot: Pivot, text: str, cell: str = "accuracy", model: str | None = None, steps: int | None = None) -> Grid:
    """The seeds and run folders behind the number at ``ROW,COLUMN``. Raises UserError where that is not one cell."""
    row, column = _place(pivot, text)
    want, behind = asked(cell, pivot.runs, model, steps), pivot.at(row, column)
    shown = number(pivot, row, column, want)
    rows = []
    for seed, run in behind.taken.items():
        value = (shown.per_seed or {}).get(seed)
        end = f"diverged at round {behind.diverged[seed]}" if seed in behind.diverged else "-"
        rows.append([seed, end if value is None else want.measure.number(value), run.status["status"], str(run.folder)])
    rows += [["-", "-", run.status["status"], str(run.folder)] for run in behind.runs if not run.complete]
    reason = f": {shown.reason}" if shown.reason else ""
    caption = f"{pivot.head(column)}, {pivot.name(row)}: {shown.text}{reason}. {want.measure.what}; one row for each seed that counts."
    notes = [f"{run.folder} is left out: {text}." for run, text in behind.left_out]
    counted = {id(run) for run in behind.taken.values()} | {id(run) for run, _ in behind.left_out}
    again = [run for run in behind.runs if run.complete and id(run) not in counted]
    notes += [f"{run.folder} adds no seed: its numbers are those above." for run in again]
    return grid(["seed", want.measure.name, "status", "run folder"], rows, caption, notes, labels=4)


def _place(pivot: Pivot, text: str) -> tuple[Label, Label]:
    parts = keys.split(text)

    def forms(names: Sequence[str], label: Label, number: int) -> set[str]:
        full = [f"{keys.shown(k)}={v}" for k, v in zip(names, label, strict=True)]
        bare = [v if k == "algo.name" else f"{keys.shown(k)}={v}" for k, v in zip(names, label, strict=True)]
        return {",".join(full) or "all", ",".join(bare) or "all", ",".join(label), f"#{number}"}

    hits = []
    for i in range(1, len(parts)):
        left, right = ",".join(parts[:i]), ",".join(parts[i:])
        rows = [row for n, row in enumerate(pivot.rows, 1) if left in forms(pivot.row_keys, row, n)]
        columns = [column for n, column in enumerate(pivot.columns, 1) if right in forms(pivot.column_keys, column, n)]
        hits += list(product(rows, columns))
    rows = "; ".join(f"{pivot.name(row)} or #{n}" for n, row in enumerate(pivot.rows[:4], 1)) + "; ..." * (len(pivot.rows) > 4)
    columns = "; ".join(map(pivot.head, pivot.columns[:6])) + "; ..." * (len(pivot.columns) > 6)
    require(len(set(hits)) == 1, "why", text, f"ROW,COLUMN with a row ({rows}) and a column ({columns})")
    return hits[0]
