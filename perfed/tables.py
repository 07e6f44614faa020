"""A grid of cells -> plain text, Markdown, LaTeX or CSV; the table of one run and what captions say.

``run_table`` is the final table of one run (tables over several are made in ``perfed.pivot``). Like every table it is a :class:`Grid`,
which the writers ``plain``, ``markdown``, ``latex`` and ``to_csv`` render; another format is one more function of a Grid.
"""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from perfed import stats
from perfed.results import Run

MARKED_FROM = stats.CLAIMED_FROM
"""Common seeds below which no cell is marked."""
GROUP_COLUMNS = 6
"""More user groups than this have no column each."""


CHANCE = {"partition_seed": "partition", "init_seed": "initial model", "sampling_seed": "user sampling and batches"}
"""What a seed redraws, by the key that fixes it for all seeds."""


class Cell(NamedTuple):
    text: str
    bold: bool = False
    mark: str = ""


@dataclass(frozen=True)
class Grid:
    """``rows`` hold one Cell per column; the first ``labels`` columns name the row. ``notes`` are lines below the caption. What follows a
    line break in a column's name explains it."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    notes: tuple[str, ...] = ()
    labels: int = 1


def grid(
    columns: Sequence[str], rows: Sequence[Sequence[str | Cell]], caption: str = "", notes: Sequence[str] = (), labels: int = 1
) -> Grid:
    """A Grid from plain strings and Cells. Every row has one entry per column."""
    assert all(len(row) == len(columns) for row in rows)
    cells = tuple(tuple(item if isinstance(item, Cell) else Cell(item) for item in row) for row in rows)
    return Grid(tuple(columns), cells, caption, tuple(notes), labels)


def plain(table: Grid) -> str:
    """Aligned columns for a terminal; a bold cell has a star before it."""
    heads = [_lines(name) for name in table.columns]
    depth = max(map(len, heads))
    lines = [[(head + [""] * depth)[i] for head in heads] for i in range(depth)]
    lines += [[f"{'*' if c.bold else ''}{c.text}{c.mark}" for c in row] for row in table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.columns))]
    sides = [str.ljust] * table.labels + [str.rjust] * (len(widths) - table.labels)
    text = ["  ".join(side(item, width) for side, item, width in zip(sides, line, widths, strict=True)).rstrip() for line in lines]
    text.insert(depth, "  ".join("-" * width for width in widths))
    return "\n".join([*text, *map(_wrapped, _below(table))]) + "\n"


def _wrapped(line: str) -> str:
    """Lines of 110 columns; names are not cut at hyphens, and a line with a command stays whole, so that it can be copied."""
    return line if "python -m perfed" in line else textwrap.fill(line, 110, break_on_hyphens=False, break_long_words=False)


def unsaid(table: Grid, last: Grid | None) -> Grid:
    """The table with what its caption adds to that of the table above it; the clause of the protocol stays."""
    clauses, said = (re.split(r"(?<=[;.]) ", part.caption) if part else [] for part in (table, last))
    new = [clause for clause in clauses if clause not in said or clause.startswith("protocol ")]
    if len(new) == len(clauses):
        return table
    text = re.sub(r"; (?=[A-Z])", ". ", " ".join(new)).rstrip(";.")  # a clause that has lost the next one ends its sentence
    return replace(table, caption=f"{text}. Otherwise as above." if new else "As above.")


def markdown(table: Grid) -> str:
    """A pipe table, then the caption and the notes. In cells, what Markdown would read as its own is escaped."""

    def line(items: Sequence[str]) -> str:
        return "| " + " | ".join(items) + " |"

    def cell(c: Cell) -> str:
        text = _MARKDOWN.sub(r"\\\g<0>", " ".join(c.text.split()))
        return f"**{text}**{c.mark}" if c.bold else text + c.mark

    text = [line(["<br>".join(cell(Cell(part)) for part in name.split("\n")) for name in table.columns])]
    text.append("|" + " --- |" * table.labels + " ---: |" * (len(table.columns) - table.labels))
    text += [line([cell(c) for c in row]) for row in table.rows]
    below = [line.replace(STAR, "") for line in _below(table)]
    return "\n".join(text) + "\n" + ("\n" + "\n\n".join(below) + "\n" if below else "")


_MARKDOWN = re.compile(r"[\\|`*~<$]|(?<![^\W_])_|_(?![^\W_])|&(?=#?\w+;)|\[(?=[^\]]*\]\()")
"""A backslash, a bar, code, emphasis (an underscore inside a word is none), a tag, an entity, a link."""


def latex(table: Grid) -> str:
    """A table environment with the rules of booktabs, the one package it needs; the caption holds the notes too."""
    below = " ".join(map(escaped, _below(table))).replace(r"\textquotesingle{}", "'").replace(STAR, "")
    lines = [r"\begin{table}", r"\centering", *([rf"\caption{{{below}}}"] if below else [])]
    lines += [rf"\begin{{tabular}}{{{'l' * table.labels}{'r' * (len(table.columns) - table.labels)}}}", r"\toprule"]
    lines += [" & ".join(map(_latex_head, table.columns)) + r" \\", r"\midrule"]
    for row in table.rows:
        texts = [rf"\textbf{{{escaped(c.text)}}}" if c.bold else escaped(c.text) for c in row]
        lines.append(" & ".join(text + escaped(c.mark) for text, c in zip(texts, row, strict=True)) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def _latex_head(name: str) -> str:
    parts = r" \\ ".join(map(escaped, _lines(name)))
    return rf"\shortstack[r]{{{parts}}}" if len(_lines(name)) > 1 else parts


def escaped(text: str) -> str:
    """Text as LaTeX prints it, in one line."""
    text = "".join(_LATEX.get(letter, letter) for letter in " ".join(text.split()))
    return re.sub(r"(?<![\w}])-(?=\d)", "$-$", text)


_LATEX = {
    **{letter: "\\" + letter for letter in "_%&#${}"}, "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": "$<$", ">": "$>$", "|": "$|$", "'": r"\textquotesingle{}", "`": r"\textasciigrave{}",
    "[": "{[}", "]": "{]}", "±": r"$\pm$", "†": r"$^\dagger$", "≈": r"$^\approx$", "≤": r"$\le$", "≥": r"$\ge$",
}  # fmt: skip


def to_csv(table: Grid) -> str:
    """Header and rows, without caption and bold; quoted only where needed."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(one_line(name) for name in table.columns)
    writer.writerows([c.text + c.mark for c in row] for row in table.rows)
    return out.getvalue()


def _lines(name: str) -> list[str]:
    """A column's name, and below it what explains it, in lines of 24 letters."""
    first, _, rest = name.partition("\n")
    return [first, *textwrap.wrap(rest, 24)]


def one_line(name: str) -> str:
    """A column's name with what explains it in brackets."""
    first, more, rest = name.partition("\n")
    return f"{first} ({' '.join(rest.split())})" if more else first


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
    rows: dict[bool, list[list[str]]] = {True: [], False: []}  # of users seen in training, of new ones
    for cell in result["cells"]:
        row = [("" if cell["seen"] else "new users: ") + judged(cell["model"], cell["steps"])]
        row.append("-" if cell["steps"] == 0 else "own" if lr is None else f"{lr:g}")
        if diverged:
            row += [f"div {diverged}/{seeds}"] + ["-"] * (len(groups) + 1)
        else:
            low, floor = cell.get("worst10"), cell.get("binomial_floor")
            row.append(accuracy_text(cell["mean"], cell["half_width"]))
            row += [percent((cell.get("groups") or {}).get(name)) for name in groups]
            row.append(percent(low) if floor is None else f"{percent(low)} ({percent(floor)})")
        rows[cell["seen"]].append(row)
    rows[True].append(_majority_row("majority class", result.get("majority"), result.get("majority_groups"), groups))
    if rows[False] and "majority_new" in result:  # older results lack it
        rows[False].append(_majority_row("majority class, new users", result["majority_new"], result.get("majority_groups_new"), groups))
    which = judged(result["primary"]["model"], result["primary"]["steps"])
    notes = [f"DIVERGED: seed {seed} at round {k}." for seed, k in result["diverged"].items()]
    if alone := result.get("sampled_users_alone"):
        count = f"{sum(result['never_sampled']) / seeds:.3g}"
        notes.append(
            f"{count} {'user a seed was' if count == '1' else 'users a seed were'} never sampled; judged there: {result['cold_start']}. "
            f"{which}, over the sampled users alone: {accuracy_text(alone['mean'], alone['half_width'])}."
        )
    if not all(cell["seen"] for cell in result["cells"]):
        notes.append(f"New users took no part in training; judged for them: {result.get('cold_start', 'the global model')}.")
    if best := result.get("best_on_validation"):
        rounds = ", ".join(map(str, best["rounds"]))
        many = "rounds" if len(best["rounds"]) > 1 else "round"
        notes.append(f"Best on validation, {which} ({many} {rounds}): {accuracy_text(best['mean'], best['half_width'])} on test data.")
    if len(names) > GROUP_COLUMNS:
        notes.append(f"{len(names)} user groups: see users.csv.")
    columns = ["judged model", "step size", "accuracy % ± 95 % CI", *groups, "worst 10 % (floor)"]
    return grid(columns, rows[True] + rows[False], _run_caption(result, seeds), notes)


def _majority_row(name: str, overall: float | None, shares: Mapping[str, float] | None, groups: Sequence[str]) -> list[str]:
    return [name, "-", percent(overall), *(percent((shares or {}).get(group)) for group in groups), "-"]


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


def one_partition(result: Mapping[str, Any]) -> bool:
    """Whether several seeds have one and the same partition."""
    digests = list((result.get("partition_digest") or {}).values())
    return len(digests) > 1 and len(set(digests)) == 1


def _redraws(result: Mapping[str, Any]) -> str:
    """What differs between seeds. A ``partition_seed``, ``init_seed`` or ``sampling_seed`` that is set is the same for all, and so is
    a partition of which all seeds have the same (one file, or all of the data's own users)."""
    held = {key: result.get(key) is not None or (key == "partition_seed" and one_partition(result)) for key in CHANCE}
    fixed, free = ([text for key, text in CHANCE.items() if held[key] is wanted] for wanted in (True, False))
    drawn = (", ".join(free) if "sampling" in free[-1] else " and ".join(free)) if free else "nothing"
    kept = ["the pool of images", *(f"the {text}" for text in fixed)]
    return f"a seed redraws {drawn}; {', '.join(kept[:-1])}{' and ' * (len(kept) > 1)}{kept[-1]} {'are' if len(kept) > 1 else 'is'} fixed"


def primary(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """The cell that stands for the run in a sweep: its primary judged model and steps, over the users seen in training."""
    want = result["primary"]
    return next(c for c in result["cells"] if c["seen"] and (c["model"], c["steps"]) == (want["model"], want["steps"]))


def sweep_caption(
    runs: Sequence[Run],
    stated: str = "",
    tuned: bool = False,
    *,
    what: str = "Accuracy in percent",
    unit: str = "of the unweighted mean over users",
    seeds: Sequence[int] = (),
    marks: str | None = None,
    scored: str = "",
) -> str:
    """What the cells are: interval, protocol, what a seed redraws, and whether the steps were chosen (``tuned``: on validation data).

    ``seeds``: how many each cell has, default: each run. ``unit`` "": there is no interval. ``marks``: a sentence, default: bold and † of
    rows; "" where no cell is marked. ``scored``: stands for the text of the protocol where cells are not scored as that says.
    """
    if not runs:
        return ""
    counts = sorted(set(seeds or [len(run.result["seeds"]) for run in runs]))
    many = f"{counts[0]} seed{'s' if counts[0] > 1 else ''}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
    alone = "; n/a: one seed has no interval" if counts[0] == 1 else ""
    interval = f"± is the half-width of the 95 % Student-t interval over {many} {unit}, t(S-1, .975) s / sqrt(S){alone}"
    result = dict(runs[0].result)
    if len({run.result.get("protocol_text") for run in runs}) > 1:  # the adaptation batch is a setting of the rows
        del result["protocol_text"]
    if scored:
        result["protocol_text"] = scored
    chance = {_redraws(run.result) for run in runs}
    if marks is None:
        marks = BOLD_OF_ROW
    return (
        f"{what}{f' ({stated})' if stated else ''}; {interval if unit else f'mean over {many}'}; protocol {_protocol(result)}; "
        + (chance.pop() if len(chance) == 1 else "a seed redraws what partition_seed, init_seed and sampling_seed of the row leave free")
        + (". Hyper-parameters were chosen on validation data. " if tuned else ". Step sizes are as configured, untuned. ")
        + marks
    ).rstrip()


STAR = " (* in plain text)"
BOLD_OF_ROW = (
    f"Bold{STAR}: the highest mean of a row; †: not separated from it (paired t over common seeds, Holm over all pairs of the row, level "
    f"0.05); no marks below {MARKED_FROM} common seeds."
)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested maps as one, with dotted keys."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        out.update(flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return out
