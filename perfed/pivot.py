"""Runs sorted into the cells of a table by keys of the configuration, and the number that a cell shows.

Runs that differ in seeds alone share a cell, where no seed counts twice; runs that differ in anything else never do: that is refused. A
cell without a number knows why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from perfed import keys, measures, stats, tables
from perfed.errors import UserError, require, show
from perfed.measures import MEASURES, Judged, Measure, measure
from perfed.results import Run
from perfed.tables import flat

Label = tuple[str, ...]
"""The typed values of the row's (or column's) keys."""


# ---------------------------------------------------------------- what stands behind a cell


@dataclass(frozen=True)
class Source:
    """The runs of a cell, and which of them stands for which seed. ``diverged``: seed -> round. ``left_out``: runs that disagree, with
    the reason."""

    runs: tuple[Run, ...] = ()
    taken: Mapping[str, Run] = ()
    diverged: Mapping[str, int] = ()
    left_out: tuple[tuple[Run, str], ...] = ()

    @property
    def why_not(self) -> tuple[str, str]:
        """The text of the cell where it has no mean, and the reason; two empty texts where it has one."""
        if self.diverged:
            when = ", ".join(f"seed {seed} diverged at round {k}" for seed, k in self.diverged.items())
            return f"div {len(self.diverged)}/{len(self.taken)}", when
        if self.taken:
            return "", ""
        if not self.runs:
            return "-", "no run"
        run = self.runs[0]
        if run.status["status"] == "FAILED":
            return "FAILED", f"{_cause(run.status) or 'no reason stored'} ({run.folder.name})"
        return "-", _ended(run)


def source(runs: Sequence[Run]) -> Source:
    """The run with the most seeds counts first. One whose seeds are among them with equal numbers adds its others; one with other numbers
    for a seed (made by another version, say) is left out whole and named."""
    taken: dict[str, Run] = {}
    left: list[tuple[Run, str]] = []
    for run in sorted((run for run in runs if run.complete), key=lambda run: -len(run.result["seeds"])):
        mine = _by_seed(run)
        other = next((s for s in mine if s in taken and _by_seed(taken[s])[s] != mine[s]), None)
        if other is None:
            taken |= {seed: run for seed in mine if seed not in taken}
        else:
            left.append((run, f"its seed {other} has another number than in {taken[other].folder.name}"))
    taken = dict(sorted(taken.items(), key=lambda item: int(item[0])))
    diverged = {seed: run.result["diverged"][seed] for seed, run in taken.items() if seed in run.result["diverged"]}
    return Source(tuple(runs), taken, diverged, tuple(left))


def _by_seed(run: Run) -> dict[str, Any]:
    """seed -> primary accuracy, or the round of divergence."""
    value, lost = tables.primary(run.result)["per_seed"], run.result["diverged"]
    return {str(seed): ("diverged", lost[str(seed)]) if str(seed) in lost else value.get(str(seed)) for seed in run.result["seeds"]}


def _ended(run: Run) -> str:
    cause = _cause(run.status)
    return f"{run.status['status']}{', ' if cause else ''}{cause} ({run.folder.name})"


def _cause(status: Mapping[str, Any]) -> str:
    """The error's last line, where a failed run stored one."""
    lines = str(status.get("error") or status.get("traceback") or "").strip().splitlines()
    return show(lines[-1]) if lines else ""


# ---------------------------------------------------------------- rows and columns


@dataclass(frozen=True)
class Pivot:
    """Runs sorted into cells. ``one_label``: the row's keys share one column, ``setting``, else each has its own. ``nameless``: runs that
    failed before they had a configuration, beside others; they have no cell."""

    row_keys: tuple[str, ...]
    column_keys: tuple[str, ...]
    rows: tuple[Label, ...]
    columns: tuple[Label, ...]
    cells: Mapping[tuple[Label, Label], Source]
    one_label: bool
    nameless: tuple[Run, ...] = ()

    @property
    def runs(self) -> list[Run]:
        """The complete ones."""
        return [run for cell in self.cells.values() for run in cell.runs if run.complete]

    def heads(self) -> list[str]:
        """Of the columns that name a row."""
        return ["setting"] if self.one_label else [keys.shown(key) for key in self.row_keys]

    def name(self, row: Label) -> str:
        """``partition=table2, tau=10``"""
        return ", ".join(f"{keys.shown(key)}={value}" for key, value in zip(self.row_keys, row, strict=True)) or "all"

    def labels(self, row: Label) -> list[str]:
        return [self.name(row)] if self.one_label else list(row)

    def head(self, column: Label) -> str:
        """``fedavg`` for the algorithm, ``tau=4`` for other keys."""
        pairs = zip(self.column_keys, column, strict=True)
        return ", ".join(value if key == "algo.name" else f"{keys.shown(key)}={value}" for key, value in pairs) or "all"

    def each(self) -> Iterator[tuple[Label, Label, Source]]:
        """Every cell that holds a run, row by row."""
        for row, column in product(self.rows, self.columns):
            if (row, column) in self.cells:
                yield row, column, self.cells[row, column]

    def at(self, row: Label, column: Label) -> Source:
        return self.cells.get((row, column), Source())

    def beside(self, row: Label, column: Label, algo: str) -> Source | None:
        """The cell of another algorithm in the same setting: equal labels, but for the algorithm and its own keys. None unless there is
        exactly one."""
        if "algo.name" not in (*self.row_keys, *self.column_keys):
            return None

        def setting(row: Label, column: Label) -> dict[str, str]:
            pairs = zip((*self.row_keys, *self.column_keys), (*row, *column), strict=True)
            return {key: value for key, value in pairs if not key.startswith("algo.")} | {"": algo}

        def name(row: Label, column: Label) -> str:
            return (*row, *column)[(*self.row_keys, *self.column_keys).index("algo.name")]

        mine = setting(row, column)
        found = [cell for at, cell in self.cells.items() if setting(*at) == mine and name(*at) == algo]
        return found[0] if len(found) == 1 else None


def arrange(
    runs: Sequence[Run],
    rows: Sequence[str] | None = None,
    columns: Sequence[str] = ("algo",),
    ignore: Sequence[str] = (),
    by_value: bool = True,
) -> Pivot:
    """Sort runs into cells by the values of keys; ``rows`` None: the keys that tell the runs apart.

    ``ignore``: keys in which runs of one cell may differ. Rows are sorted ``by_value``, else in the order of ``runs``. Raises UserError for
    no run, an unknown key, runs of different protocols, of different data under equal settings, and for a cell whose runs differ in more
    than their seeds.
    """
    require(bool(runs), "run", "", "at least one run folder")
    protocols = list(dict.fromkeys(run.result["protocol"] for run in runs if run.complete))
    one = "one table holds runs of one protocol; make one for each: where=protocol=NAME"
    require(len(protocols) < 2, "protocol", ", ".join(protocols), one)
    nameless = [run for run in runs if not run.config and run.result is None]
    if len(nameless) < len(runs):
        runs = [run for run in runs if run not in nameless]
    else:
        nameless = []
    configs = [_flat(run) for run in runs]
    column_keys = tuple(keys.find(word, configs, "columns") for word in columns)
    if rows is None:
        row_keys = () if "algo.name" in column_keys else ("algo.name",)
        row_keys += tuple(key for key in keys.telling(configs, ignore) if key not in column_keys)
        row_keys = row_keys or tuple(k for k in ("dataset.name", "tau", "alpha") if k not in column_keys and any(k in c for c in configs))
    else:
        row_keys = tuple(keys.find(word, configs, "rows") for word in rows)
        both = next((key for key in row_keys if key in column_keys), None)
        require(both is None, "rows", ",".join(rows), f"{keys.shown(both or '')} names the columns already")
    found: dict[tuple[Label, Label], list[tuple[Run, dict[str, Any]]]] = {}
    texts: dict[Any, str] = {}  # 1 and 1.0 are one value: the first text stands for both

    def label(config: Mapping[str, Any], names: Sequence[str]) -> Label:
        parts = [(key, config[key]) if key in config else None for key in names]
        return tuple(keys.ABSENT if p is None else texts.setdefault((p[0], keys.alike(p[1])), keys.typed(p[1])) for p in parts)

    for run, config in zip(runs, configs, strict=True):
        found.setdefault((label(config, row_keys), label(config, column_keys)), []).append((run, config))
    for cell in found.values():
        _one_setting([config for _, config in cell], ignore, rows)
    pivot = Pivot(
        row_keys,
        column_keys,
        _sorted([row for row, _ in found], row_keys if by_value else ()),
        _sorted([column for _, column in found], column_keys),
        {place: source([run for run, _ in cell]) for place, cell in found.items()},
        rows is None,
        tuple(nameless),
    )
    _same_data(pivot)
    return pivot


def _flat(run: Run) -> dict[str, Any]:
    """The flat configuration; a name that only the result holds counts too."""
    config = flat(run.config)
    return {"algo.name": run.result["algo"] if run.result else "?"} | config if "algo.name" not in config else config


def _sorted(labels: Sequence[Label], names: Sequence[str]) -> tuple[Label, ...]:
    """Without repeats; by value, algorithms as they come. Without ``names``: all as they come."""
    labels = list(dict.fromkeys(labels))
    first = {name: i for i, name in enumerate(dict.fromkeys(part for label in labels for part in label))}

    def key(label: Label) -> list[Any]:
        return [first[text] if name == "algo.name" else keys.order(text) for name, text in zip(names, label, strict=True)]

    return tuple(sorted(labels, key=key) if names else labels)


def _one_setting(configs: Sequence[Mapping[str, Any]], ignore: Sequence[str], rows: Sequence[str] | None) -> None:
    known = dict.fromkeys(key for config in configs for key in keys.settings(config, ignore))
    for key in known:
        kinds = {keys.alike(config.get(key)): keys.typed(config.get(key)) for config in configs}
        if len(kinds) > 1:
            name, some = keys.shown(key), ", ".join(list(kinds.values())[:4])
            advice = f"add {name} to rows or columns, or choose with where={name}={next(iter(kinds.values()))}"
            raise UserError("rows", ",".join(rows or ()), f"one cell would hold runs with {name}={some}; {advice}")


def _same_data(pivot: Pivot) -> None:
    seen: dict[Any, Run] = {}
    for run in pivot.runs:
        name = tuple(sorted((key, str(value)) for key, value in _flat(run).items() if key.startswith("dataset.")))
        first = seen.setdefault(name, run)
        same = first.result.get("data") == run.result.get("data")
        require(same, "run", run.folder.name, f"made with other data than {first.folder.name} under the same settings: they do not compare")


def unequal(pivot: Pivot) -> list[str]:
    """Notes on runs that have no place, and on what differs between cells and stands neither in rows nor in columns."""
    lost = [f"In no cell, it has no configuration: {_ended(run)}." for run in pivot.nameless]
    if pivot.one_label:
        return lost
    configs = [_flat(run) for run in pivot.runs]
    parts = []
    for key in keys.telling(configs, {*pivot.row_keys, *pivot.column_keys}):
        kinds = {keys.alike(c[key]): keys.typed(c[key]) for c in configs if key in c}
        parts.append(f"{keys.shown(key)}={', '.join(list(kinds.values())[:6])}{', ...' * (len(kinds) > 6)}")
    return lost + ([f"The cells differ in more than rows and columns say: {'; '.join(parts)}."] if parts else [])


# ---------------------------------------------------------------- numbers


@dataclass(frozen=True)
class Number:
    """What a cell shows: its text, the numbers by seed behind it (None where it shows no mean), and the reason for that."""

    text: str
    per_seed: Mapping[str, float] | None = None
    reason: str = ""


@dataclass(frozen=True)
class Asked:
    """Which number of which judged model: ``helped`` and ``hurt`` are shares of users compared with ``baseline``."""

    measure: Measure
    model: str | None = None
    steps: int | None = None
    baseline: str | None = None

    def judged(self, run: Run) -> Judged | None:
        return measures.judged(run, self.model, self.steps)


def asked(cell: str, runs: list[Run], model: str | None = None, steps: int | None = None) -> Asked:
    """Raises UserError for an unknown name, and for a model or a number of steps that no run judges."""
    done = [cell for run in runs if run.complete for cell in run.result["cells"]]
    for key, value, known in (("model", model, {c["model"] for c in done}), ("steps", steps, {c["steps"] for c in done})):
        listed = sorted(known)
        require(value is None or value in known, key, value, f"judged by one of these runs: {', '.join(map(str, listed)) or 'none'}")
    name, _, other = cell.partition(":")
    if name in measures.PAIRED and (not other or other in measures.BASELINES):
        other = other or measures.BASELINES[0]
        word = "higher" if name == "helped" else "lower"
        what = f"Share of the users, in percent, whose accuracy is {word} than with {other} in the same row (by one test example or more)"
        share = Measure(cell, what, "of that share", MEASURES["accuracy"].of, better=1 if name == "helped" else -1)
        return Asked(share, model, steps, other)
    return Asked(measure(cell, runs), model, steps)


def number(pivot: Pivot, row: Label, column: Label, want: Asked) -> Number:
    """The number of a cell."""
    return of_cell(pivot.at(row, column), want, (lambda: _shares(pivot, row, column, want)) if want.baseline else None)


def of_cell(cell: Source, want: Asked, shares: Callable[[], tuple[dict[str, float], str]] | None = None) -> Number:
    """The same of runs that stand in no table; ``shares`` gives the numbers that come from a comparison, and why there are none."""
    text, reason = cell.why_not
    if reason:
        return Number(text, None, reason)
    judged = {id(run): want.judged(run) for run in cell.taken.values()}
    if None in judged.values():
        name = tables.judged(want.model or "its model", want.steps) if want.steps is not None else want.model
        return Number("-", None, f"{name} is not judged")
    if shares is not None:
        per_seed, lacking = shares()
    else:
        of = {id(run): want.measure.of(run, judged[id(run)]) for run in cell.taken.values()}
        per_seed = {seed: of[id(run)][seed] for seed, run in cell.taken.items() if seed in of[id(run)]}
        lost = [seed for seed in cell.taken if seed not in per_seed]
        lacking = want.measure.lacking + (f", seed {', '.join(lost)}" if per_seed else "") if lost else ""
    if lacking:
        return Number("-", None, lacking)
    return Number(want.measure.text(*stats.interval(list(per_seed.values()))), per_seed)


def _shares(pivot: Pivot, row: Label, column: Label, want: Asked) -> tuple[dict[str, float], str]:
    other = pivot.beside(row, column, want.baseline)
    if other is None:
        return {}, f"no run of {want.baseline} with the same setting, or several"
    if other is pivot.at(row, column):
        return {}, f"it is {want.baseline} itself"
    compared, lacking = against(pivot.at(row, column), other, want)
    side = 0 if want.measure.name.startswith("helped") else 1
    return {seed: shares[side] for seed, shares in compared.items()}, lacking


def against(cell: Source, other: Source, want: Asked) -> tuple[dict[str, tuple[float, float]], str]:
    """seed -> shares of the users with a higher and a lower accuracy in ``cell`` than in ``other``, over common seeds with the same split;
    and the reason where there is none."""
    pairs, lacking = pairs_of_users(cell, other, want)
    return {
        seed: (sum(a > b for _, a, b in users) / len(users), sum(a < b for _, a, b in users) / len(users)) for seed, users in pairs.items()
    }, lacking


def pairs_of_users(cell: Source, other: Source, want: Asked) -> tuple[dict[str, list[tuple[int, float, float]]], str]:
    """seed -> (user, his accuracy in ``cell``, in ``other``), over common seeds in which both have the same split; the reason for none."""
    if text := cell.why_not[1] or other.why_not[1]:
        return {}, text
    # The other method is judged as it stands for itself; only the steps are the same where they are asked for.
    mine, theirs = {}, {}
    for found, source, model in ((mine, cell, want.model), (theirs, other, None)):
        for run in {id(run): run for run in source.taken.values()}.values():
            judged = measures.judged(run, model, want.steps)
            if judged is None:
                return {}, f"not judged after {want.steps} steps ({run.folder.name})"
            found[id(run)] = measures.per_user(run, judged)
    pairs, reason = {}, "no common seed"
    for seed, run in cell.taken.items():
        if seed not in other.taken:
            continue
        if _digest(run, seed) != _digest(other.taken[seed], seed):
            reason = "the users differ: another split"
            continue
        a, b = mine[id(run)][seed], theirs[id(other.taken[seed])][seed]
        pairs[seed] = [(user, a[user], b[user]) for user in a if user in b]
    return pairs, "" if pairs else reason


def _digest(run: Run, seed: str) -> str | None:
    return (run.result.get("partition_digest") or {}).get(seed)
