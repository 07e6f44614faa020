"""The page of a sweep, from its run folders: tables, pictures, configurations and links in one HTML file (see ``perfed.htmlpage``)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfed import compare, figures, keys, results, tables
from perfed.errors import require, show
from perfed.htmlpage import Folded, Links, Part, Picture, Section, typed, write_page
from perfed.pivot import arrange
from perfed.results import Run
from perfed.tables import Grid

if TYPE_CHECKING:
    from pandas import DataFrame

BANDS = 5
"""More lines than this in one picture have no bands."""


def write_html(path: Path | str, runs: Sequence[Run], title: str | None = None) -> None:
    """The page of a sweep: for each protocol its table with learning curves and the users' accuracies, then costs, configurations, what
    made the numbers, and every run with its own table, pictures and a link to its folder. Runs without a result are named.

    A picture that cannot be drawn costs only itself: the page says what went wrong. Raises UserError for no run, OSError where the page
    cannot be written.
    """
    require(bool(runs), "run", "", "at least one run folder")
    sections: list[Section] = []
    with tempfile.TemporaryDirectory(prefix="perfed-") as drawn:
        groups = _by_protocol(runs)
        for k, (protocol, mine) in enumerate(groups.items()):
            parts = [compare.sweep_table(mine), *_drawn(mine, Path(drawn) / str(k))]
            sections.append(Section("Results" if len(groups) == 1 else f"Results, protocol {protocol}", parts))
        done = [run for run in runs if run.complete]
        if done:
            sections.append(Section("Costs", [costs_table(done)]))
        shared = _shared([tables.flat(run.config) for run in runs])
        sections += [_configuration(runs, shared), *_made_with(runs), Section("Runs", [])]
        sections += [_run(run, shared) for run in runs]
        sections[0] = Section(sections[0].heading, [_counted(runs), *_unfinished(runs), *sections[0].parts])
        write_page(path, title or _title(runs), sections)


def _title(runs: Sequence[Run]) -> str:
    methods = list(dict.fromkeys(_algorithm(run) for run in runs))
    data = list(dict.fromkeys(str((run.config.get("dataset") or {}).get("name", "?")) for run in runs))
    return f"{', '.join(methods) if len(methods) < 5 else f'{len(methods)} methods'} on {', '.join(data)}"


def _algorithm(run: Run) -> str:
    return str(run.result["algo"] if run.result else (run.config.get("algo") or {}).get("name", "?"))


def _by_protocol(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Protocol -> its runs, in order; a run without a result belongs to those that were configured with the same one."""
    known = {repr(run.config.get("protocol")): run.result["protocol"] for run in runs if run.complete}
    groups: dict[str, list[Run]] = {}
    for run in runs:
        name = (run.config.get("protocol") or {}).get("name", "?")
        label = run.result["protocol"] if run.complete else known.get(repr(run.config.get("protocol")), name)
        groups.setdefault(str(label), []).append(run)
    return groups


def _counted(runs: Sequence[Run]) -> str:
    counts: dict[str, int] = {}
    for run in runs:
        counts[run.status["status"]] = counts.get(run.status["status"], 0) + 1
    return f"{len(runs)} run{'s' * (len(runs) > 1)}: " + ", ".join(f"{count} {status}" for status, count in counts.items()) + "."


def _unfinished(runs: Sequence[Run]) -> list[str]:
    return [f"{run.folder.name}: {run.status['status']}{_cause(run)}." for run in runs if run.status["status"] != "DONE"]


def _cause(run: Run) -> str:
    """Why there is no mean, in a few words."""
    if run.complete and run.result["diverged"]:
        return ", " + ", ".join(f"seed {seed} at round {k}" for seed, k in run.result["diverged"].items())
    lines = str(run.status.get("error") or run.status.get("traceback") or "").strip().splitlines()
    return f", {show(lines[-1])}" if lines else ""


def _drawn(runs: Sequence[Run], folder: Path) -> list[Part]:
    """Learning curves and per-user accuracies of the runs' primary cells: a pair of pictures for every setting, with a line a method; of
    one method in several settings one pair, with a line a setting. Where every seed diverged there is no line: the table says so."""
    folder.mkdir()
    cells = _cells(runs)
    methods = list(dict.fromkeys(method for row in cells.values() for method in row))
    if len(methods) == 1 < len(cells):
        cells = {methods[0]: {setting: row[methods[0]] for setting, row in cells.items()}}
    parts: list[Part] = []
    for i, (title, row) in enumerate(cells.items()):
        done = {line: [run for run in found if run.complete] for line, found in row.items()}
        done = {line: found for line, found in done.items() if any(len(r.result["diverged"]) < len(r.result["seeds"]) for r in found)}
        if not done:
            continue
        majority = next(iter(done.values()))[0].result.get("majority")
        of = f"{title}: {', '.join(done)}"
        trained = {line: [run for run in found if (run.folder / "rounds.csv").is_file()] for line, found in done.items()}
        trained = {line: found for line, found in trained.items() if found}  # what was scored again has no rounds of its own
        jobs: dict[str, Callable[[Path], None]] = {}
        if trained:
            jobs[f"Accuracy against rounds. {of}."] = lambda path, d=trained, s=title, m=majority: _curves(d, path, s, m)
        jobs[f"Distribution of the users' accuracies. {of}."] = lambda path, d=done, s=title, m=majority: _users(d, path, s, m)
        for j, (alt, draw) in enumerate(jobs.items()):
            path = folder / f"{i}-{j}.png"
            try:
                draw(path)
                parts.append(Picture(path, alt))
            except Exception as error:  # a picture must not cost the page; it says what failed
                parts.append(f"{alt} Not drawn: {type(error).__name__}: {' '.join(str(error).split())}")
    return parts


def _cells(runs: Sequence[Run]) -> dict[str, dict[str, list[Run]]]:
    """setting -> method -> runs, as in the sweep's table."""
    pivot = arrange(runs, by_value=False)
    found: dict[str, dict[str, list[Run]]] = {}
    for row, column, cell in pivot.each():
        found.setdefault(pivot.name(row), {})[pivot.head(column)] = list(cell.runs)
    return found


def _primary(runs: Sequence[Run], name: str) -> tuple[DataFrame, int]:
    """The rows of rounds.csv or users.csv (``name``) of the primary cells without diverged seeds, and the number of all seeds. A seed that
    is in several runs counts in the one with the most seeds."""
    import pandas as pd

    parts, seeds = [], set()
    for run in sorted(runs, key=lambda run: -len(run.result["seeds"])):
        frame, want = getattr(run, name), run.result["primary"]
        frame = frame[(frame["model"] == want["model"]) & (frame["steps"] == want["steps"]) & frame["seen"] & ~frame["seed"].isin(seeds)]
        parts.append(frame[~frame["seed"].isin([int(seed) for seed in run.result["diverged"]])])
        seeds |= set(run.result["seeds"])
    return pd.concat(parts), len(seeds)


def _curves(lines: Mapping[str, Sequence[Run]], path: Path, title: str, majority: float | None) -> None:
    import pandas as pd

    parts = []
    for name, runs in lines.items():
        frame, count = _primary(runs, "rounds")
        good = figures.whole_seeds(frame)[0]
        if good:
            note = f" ({len(good)} of {count} seeds)" if len(good) < count else ""
            parts.append(figures.curve(frame[frame["seed"].isin(good)], name + note))
    require(bool(parts), "run", ", ".join(lines), "no seed has a whole learning curve")
    frame, bands = pd.concat(parts), len(parts) <= BANDS
    ylabel = "accuracy, %" + (" (95 % band over seeds)" if bands and frame["half_width"].notna().any() else "")
    figures.lines(frame, path, title, xlabels={"": "round"}, ylabel=ylabel, majority=majority, bands=bands)


def _users(lines: Mapping[str, Sequence[Run]], path: Path, title: str, majority: float | None) -> None:
    import pandas as pd

    parts = []
    for name, runs in lines.items():
        frame, _ = _primary(runs, "users")
        parts.append(pd.DataFrame({"line": name, "accuracy": frame["correct"] / frame["n_test"]}))
    figures.distributions(pd.concat(parts), path, title, majority=majority)


def costs_table(runs: Sequence[Run]) -> Grid:
    """What was counted for one seed of each run, over all users and rounds."""
    names = {"grad_evals": "gradients", "hvps": "Hessian-vector products", "floats_down": "floats down", "floats_up": "floats up"}
    rows = []
    for run in runs:
        costs = run.result.get("costs") or {}
        counts = [f"{costs[key]:,.0f}" if key in costs else "-" for key in names]
        rows.append([run.folder.name, f"{run.result['rounds']:,}", *counts])
    return tables.grid(["run", "rounds", *names.values()], rows, "Counted, not declared: for one seed, over all users and rounds.")


def _shared(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The keys that all have with the same value."""
    first, *others = values
    return {key: value for key, value in first.items() if all(key in v and typed(v[key]) == typed(value) for v in others)}


def _differing(names: Sequence[str], values: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[Part]:
    """A table of those of the ``keys`` that differ, where there are any."""
    keys = [key for key in keys if len({typed(v[key]) if key in v else None for v in values}) > 1]
    rows = [[name, *(typed(v[key]) if key in v else "-" for key in keys)] for name, v in zip(names, values, strict=True)]
    return ["What tells the runs apart:", tables.grid(["run", *keys], rows)] if keys else []


def _configuration(runs: Sequence[Run], shared: Mapping[str, Any]) -> Section:
    flat = [tables.flat(run.config) for run in runs]
    names = dict.fromkeys(["algo.name", *keys.telling(flat), "seed", "seeds"])
    parts = _differing([run.folder.name for run in runs], flat, list(names))
    return Section("Configuration", [*parts, Folded(f"{'Common to all runs' if len(runs) > 1 else 'All'} ({len(shared)} keys)", [shared])])


def _made_with(runs: Sequence[Run]) -> list[Section]:
    """Versions, commit and machine, from the runs' provenance.json."""
    made = {run.folder.name: tables.flat(results.read_json(run.folder / "provenance.json") or {}) for run in runs}
    made = {name: values for name, values in made.items() if values}
    if not made:
        return []
    keys = dict.fromkeys(key for values in made.values() for key in values)
    return [Section("Made with", [_shared(list(made.values())), *_differing(list(made), list(made.values()), list(keys))])]


def _run(run: Run, shared: Mapping[str, Any]) -> Section:
    parts: list[Part] = [f"{run.status['status']}{_cause(run)}.", Links([(f"folder {run.folder.name}", run.folder)])]
    if run.result is not None:
        parts.append(tables.run_table(run.result))
    pictures = [Picture(path, f"{run.folder.name}: {path.stem.replace('_', ' ')}") for path in sorted(run.folder.glob("*.png"))]
    if pictures:
        parts.append(Folded(f"Pictures ({len(pictures)})", pictures))
    own = {key: value for key, value in tables.flat(run.config).items() if key not in shared}
    if own:
        parts.append(Folded(f"Configuration beside what is common ({len(own)} keys)", [own]))
    return Section(run.folder.name, parts, level=3)
