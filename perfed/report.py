"""A run folder -> ``report.md`` with its pictures; several -> one table: ``python -m perfed.report RUN ...``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from perfed import figures, results, tables
from perfed.errors import UserError, require, show
from perfed.results import Run

COSTS = {
    "grad_evals": "gradient evaluations", "hvps": "Hessian-vector products", "losses": "loss evaluations",
    "full_passes": "passes over all of a user's data", "floats_down": "floats down", "floats_up": "floats up",
}  # fmt: skip
FORMATS = {"plain": tables.plain, "markdown": tables.markdown, "csv": tables.to_csv}


def write_report(folder: Path | str, pictures: bool = True) -> list[str]:
    """Write report.md and its pictures into a run folder that holds result.json, rounds.csv and users.csv.

    A picture that cannot be drawn costs only itself: what went wrong stands in the report and is returned, one line each.
    ``provenance.json`` (versions, commit, data) is shown where it lies in the folder. Raises UserError for a folder without a result.
    """
    run = results.load(folder)
    require(run.result is not None, "run", run.folder, "no result.json: the run has not ended")
    drawn, problems = _pictures(run) if pictures else ({}, [])
    parts = [
        f"# {run.result['name']}\n",
        _what(run.result),
        "## Result\n\n" + tables.markdown(tables.run_table(run.result)),
        "## Costs\n\n" + tables.markdown(costs_table(run.result)) + _hf_error(run),
        *_partition(run.result),
        ("## Pictures\n\nEach also as PDF, under the same name.\n\n" if pictures else "No pictures (pictures=false).\n")
        + "".join(f"![{alt}]({name})\n\n" for name, alt in drawn.items())
        + "".join(f"{line}\n" for line in problems),
        *_provenance(run),
    ]
    results.write_text(run.folder / "report.md", "\n".join(parts))
    return problems


def _pictures(run: Run) -> tuple[dict[str, str], list[str]]:
    """File name -> description of those that could be drawn, and a line for each that could not."""
    result, folder = run.result, run.folder
    title = f"{result['algo']}, {result['dataset']}, {result['partition']}, {result['model']}; protocol {result['protocol']}"
    diverged = [int(seed) for seed in result["diverged"]]
    known = [cell for cell in result["cells"] if cell["seen"]]
    jobs: dict[str, tuple[str, Callable[[Path], None]]] = {}
    if len(diverged) < len(result["seeds"]):
        users = run.users[~run.users["seed"].isin(diverged)]
        want = result["primary"]
        jobs["learning_curve.png"] = (
            "accuracy against rounds",
            lambda path: figures.learning_curve(run.rounds, path, title, majority=result.get("majority"), diverged=diverged),
        )
        jobs["per_user.png"] = (
            "accuracy of every user",
            lambda path: figures.per_user(users, path, title, model=want["model"], steps=want["steps"]),
        )
    if not diverged and len({cell["steps"] for cell in known}) > 2:
        jobs["adaptation.png"] = (
            "accuracy against adaptation steps",
            lambda path: figures.adaptation_curve(result["cells"], path, title, majority=result.get("majority")),
        )
    if counts := result.get("partition_counts"):
        jobs["partition.png"] = (
            "examples per group and class",
            lambda path: figures.heat_map(counts["counts"], counts["rows"], counts["classes"], path, title.split("; ")[0]),
        )
    drawn, problems = {}, []
    for name, (alt, draw) in jobs.items():
        try:
            draw(folder / name)
            drawn[name] = alt
        except Exception as error:  # a picture must not cost the numbers; the report and the caller say what failed
            problems.append(f"{name} could not be drawn: {type(error).__name__}: {' '.join(str(error).split())}")
    return drawn, problems


def _what(result: Mapping[str, Any]) -> str:
    names = ("n", "r", "rounds", "tau", "batch", "alpha", "beta")
    knobs = ", ".join(f"{key}={result[key]:g}" for key in names if result.get(key) is not None)
    seeds = f"{len(result['seeds'])} seed{'s' if len(result['seeds']) > 1 else ''} ({', '.join(map(str, result['seeds']))})"
    return (
        f"Method `{result['algo']}` on `{result['dataset']}`, users by `{result['partition']}`, model `{result['model']}`: "
        f"{knobs}; {seeds}. Protocol `{result['protocol']}`. Identity `{result['identity']}`.\n"
    )


def costs_table(result: Mapping[str, Any]) -> tables.Grid:
    """What was counted, per active user and round and in all, for one seed."""
    each, total = result.get("per_active_user_round") or {}, result.get("costs") or {}
    rows = [[text, _count(each.get(key)), _count(total.get(key))] for key, text in COSTS.items()]
    return tables.grid(["counted", "per active user and round", "per seed, all rounds"], rows)


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"


def _hf_error(run: Run) -> str:
    """A sentence on the last measured error of the Hessian-free product, or nothing."""
    measured = run.rounds[run.rounds["hf_error"].notna()]
    if measured.empty:
        return ""
    last = measured[measured["round"] == measured["round"].max()].drop_duplicates(["seed", "round"])
    return (
        f"\nHessian-free product: relative error {last['hf_error'].mean():.2e} against the exact one, measured on one user at round "
        f"{last['round'].iloc[0]} (mean over {len(last)} seed{'s' if len(last) > 1 else ''}).\n"
    )


def _partition(result: Mapping[str, Any]) -> list[str]:
    counts = result.get("partition_counts")
    if not counts or max(len(counts["rows"]), len(counts["classes"])) > figures.NUMBERED:
        return []
    rows = [[name, *map(str, row)] for name, row in zip(counts["rows"], counts["counts"], strict=True)]
    return ["## Partition: examples per group and class\n\n" + tables.markdown(tables.grid(["group", *counts["classes"]], rows))]


def _provenance(run: Run) -> list[str]:
    path = run.folder / "provenance.json"
    if not path.is_file():
        return []
    return ["## Made with\n\n" + "".join(f"- {key}: {show(value)}\n" for key, value in tables.flat(results.read_json(path) or {}).items())]


def find(paths: Sequence[Path | str]) -> list[Run]:
    """The runs in the given folders; a folder of run folders stands for all of them, by name. None twice. Raises UserError for a folder
    that is neither."""
    found: dict[Path, Run] = {}
    for path in map(lambda text: Path(text).expanduser(), paths):
        inside = [path] if (path / "status.json").is_file() or not path.is_dir() else sorted(p.parent for p in path.glob("*/status.json"))
        require(bool(inside), "run", path, "no run folder: it holds no status.json, nor does a folder in it")
        for folder in inside:
            if folder.resolve() not in found:
                found[folder.resolve()] = results.load(folder)
    return list(found.values())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError("report", " ".join(sys.argv[1:]), f"{message}; see --help")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, or 1 after one line on stderr."""
    parser = _Parser(prog="perfed.report", description="Print one table over run folders: rows = settings, columns = algorithms.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, or a folder that holds run folders")
    parser.add_argument("--format", choices=FORMATS, default="plain", help="default: %(default)s")
    try:
        options = parser.parse_args(argv)
        print(FORMATS[options.format](tables.sweep_table(find(options.runs))), end="")
    except UserError as error:
        print(f"perfed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
