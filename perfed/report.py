"""A run folder -> ``report.md`` with its pictures; several -> one table: ``python -m perfed.report RUN ...``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from perfed import compare, figures, folders, measures, power, results, tables, views
from perfed.errors import UserError, nearest, require, show, silence_stdout
from perfed.folders import find
from perfed.pivot import Pivot, arrange, asked, pairs_of_users
from perfed.results import Run

__all__ = ["find", "main", "write_report"]

COSTS = {
    "grad_evals": "gradient evaluations", "hvps": "Hessian-vector products", "losses": "loss evaluations",
    "full_passes": "passes over all of a user's data", "floats_down": "floats down", "floats_up": "floats up",
}  # fmt: skip


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
        *_partition(run.result, pictures),
        ("## Pictures\n\nEach also as PDF, under the same name.\n\n" if pictures else "No pictures (pictures=false).\n")
        + "".join(f"{part}\n\n" for name, (alt, note) in drawn.items() for part in (f"![{alt}]({name})", note) if part)
        + "".join(f"{line}\n" for line in problems),
        *_provenance(run),
    ]
    results.write_text(run.folder / "report.md", "\n".join(parts))
    return problems


def _pictures(run: Run) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """File name -> description, and what is to be said below, of those that could be drawn; and a line for each that could not."""
    result, folder = run.result, run.folder
    title = f"{result['algo']}, {result['dataset']}, {result['partition']}, {result['model']}; protocol {result['protocol']}"
    diverged = [int(seed) for seed in result["diverged"]]
    known = [cell for cell in result["cells"] if cell["seen"]]
    jobs: dict[str, tuple[str, str, Callable[[Path], None]]] = {}
    want = result["primary"]
    baseline = "" if len(known) == len(result["cells"]) else "The line of the majority class is that of the users seen in training."
    if len(diverged) < len(result["seeds"]):
        users = run.users[~run.users["seed"].isin(diverged)]
        jobs["learning_curve.png"] = (
            "accuracy against rounds",
            " ".join(filter(None, [_left_out(run), baseline])),
            lambda path: figures.learning_curve(run.rounds, path, title, majority=result.get("majority"), diverged=diverged, primary=want),
        )
        jobs["per_user.png"] = (
            f"accuracy of every user seen in training, {tables.judged(want['model'], want['steps'])}",
            "",
            lambda path: figures.per_user(users, path, title, model=want["model"], steps=want["steps"]),
        )
    if not diverged and len({cell["steps"] for cell in known}) > 2:
        jobs["adaptation.png"] = (
            "accuracy against adaptation steps",
            baseline,
            lambda path: figures.adaptation_curve(
                result["cells"],
                path,
                title,
                majority=result.get("majority"),
                lr=result.get("adapt_lr"),
                primary=want["model"],
            ),
        )
    if counts := result.get("partition_counts"):
        jobs["partition.png"] = (
            _counted(result),
            "",
            lambda path: figures.heat_map(
                counts["counts"], counts["rows"], counts["classes"], path, f"{result['dataset']}, {result['partition']}\n{_counted(result)}"
            ),
        )
    drawn, problems = {}, []
    for name, (alt, note, draw) in jobs.items():
        try:
            draw(folder / name)
            drawn[name] = alt, note
        except Exception as error:  # a picture must not cost the numbers; the report and the caller say what failed
            problems.append(f"{name} could not be drawn: {type(error).__name__}: {' '.join(str(error).split())}")
    return drawn, problems


def _left_out(run: Run) -> str:
    """A sentence on the curves of rounds.csv that the picture does not show, or nothing."""
    want = run.result["primary"]
    shown, others = figures.shown_curves(run.rounds, want)
    if not others:
        return ""
    new = "" if all(seen for seen, _, _ in shown) else f", new users for the model {want['model']} alone"
    after = f" and {tables.judged('', want['steps'])[2:]}" if want["steps"] else ""
    count = f"{len(shown)} of {len(shown) + others} curves"
    return f"Shown are {count}: each judged model before adaptation{after}{new}. All are in rounds.csv."


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


def _partition(result: Mapping[str, Any], pictures: bool) -> list[str]:
    """The count table, or why there is none."""
    counts = result.get("partition_counts")
    if not counts:
        return []
    head, said, classes = "## Partition: train examples a user\n\n", _counted(result), counts["classes"]
    if len(classes) > figures.NUMBERED:
        return [f"{head}No table: {len(classes)} classes are too many{'; see partition.png' if pictures else ''}.\n"]
    rows = [[name, *map(figures.count_text, row)] for name, row in zip(counts["rows"], counts["counts"], strict=True)]
    return [head + tables.markdown(tables.grid(["train examples a user", *classes], rows, f"{said[0].upper()}{said[1:]}."))]


def _counted(result: Mapping[str, Any]) -> str:
    """What the numbers of the count table are. Older results have it with all rows only."""
    counts = result["partition_counts"]
    shown = len(counts["rows"])
    many = counts.get("of", shown)
    mean = "" if many == result.get("n") else " (mean over the users of the row)"
    which = "all seeds" if tables.one_partition(result) else f"seed {result['seeds'][0]}"
    if result.get("partition_seed") is not None:
        which = f"partition_seed={result['partition_seed']}"
    return f"train examples a user{mean}, {which}{f'; first {shown} of {many} rows' if many > shown else ''}"


def _provenance(run: Run) -> list[str]:
    path = run.folder / "provenance.json"
    if not path.is_file():
        return []
    made = results.read_json(path) or {}
    origin, notes = ("".join(f"- {line}\n" for line in made.pop(key, [])) for key in ("origin", "notes"))
    return [
        *([f"## Notes\n\n{notes}"] if notes else []),
        *([f"## Origin\n\nNot computed by one unbroken run:\n\n{origin}"] if origin else []),
        "## Made with\n\n" + "".join(f"- {key}: {show(value)}\n" for key, value in tables.flat(made).items()),
    ]


# ---------------------------------------------------------------- the command

HELP = """\
Print one table over run folders: rows = settings, columns = algorithms, cells = accuracy ± 95 % interval over seeds.
Options can be written as words: rows=tau is --rows tau."""
EXAMPLES = """\
A KEY is a key of the configuration, with a dot in a group: tau, algo, partition.concentration, algo.lam.

Examples:
  perfed-report outputs/mnist
      every run in the folder: one row for each setting, one column for each algorithm
  perfed-report outputs/mnist rows=tau,alpha reference=local margin=1 format=latex > table.tex
      paired differences to local training, what is equivalent to it within one point, for a paper
  perfed-report outputs/mnist why=tau=4,fedavg
      the seeds and run folders behind one number
"""
FORMATS: dict[str, Callable[[tables.Grid], str]] = {
    "plain": tables.plain, "markdown": tables.markdown, "latex": tables.latex, "csv": tables.to_csv,
}  # fmt: skip
SWITCHES = ("users", "list", "yes")
MODES = ("why", "power", "target", "users", "list", "prune", "html")
SHAPING = ("rows", "columns", "cell", "model", "steps", "reference", "margin", "scatter")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError("report", " ".join(sys.argv[1:]), f"{message}; see --help")


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="perfed-report", description=HELP, epilog=EXAMPLES, formatter_class=raw, allow_abbrev=False)
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="a run folder, or a folder that holds run folders")
    add("--format", default="plain", metavar="|".join(FORMATS), help="default: plain; latex needs the package booktabs")
    add("--where", metavar="KEY=VALUE,...", help="only the runs with these values")
    add("--rows", metavar="KEYS", help="one column for each key; default: the keys that tell the runs apart")
    add("--columns", default="algo", metavar="KEYS", help="default: algo")
    names = ", ".join([*measures.MEASURES, "group:NAME", "helped, hurt (than local; helped:fedavg, hurt:fedavg)"])
    add("--cell", default="accuracy", metavar="NAME", help=f"default: accuracy; one of {names}".replace("%", "%%"))
    add("--model", metavar="NAME", help="which judged model; default: each run's primary one")
    add("--steps", metavar="J", help="after how many adaptation steps; default: each run's primary number")
    add("--reference", metavar="NAME", help="a column: a second line shows the paired differences to it, tested by Holm's method")
    add("--margin", metavar="POINTS", help="mark what is equivalent within it to the reference, else to the best (TOST)")
    add("--why", metavar="ROW,COLUMN", help="the seeds and run folders behind a number; ROW as tau=4, or #1 for the first")
    add("--power", metavar="HALFWIDTH", help="how many seeds a half-width needs, and the variance by source where the runs tell")
    add("--target", metavar="PERCENT", help="rounds, gradient evaluations and seconds to an accuracy")
    add("--users", action="store_true", help="share of users better and worse off than with local and with fedavg; the worst 10 %%")
    add("--scatter", metavar="FILE", help="draw every user against himself under local, as FILE.png and FILE.pdf")
    add("--html", metavar="FILE", help="write one self-contained page: tables, pictures, configurations, links to the run folders")
    add("--list", action="store_true", help="the run folders: status, setting, seeds, rounds, accuracy, size, age")
    add("--prune", metavar="STATUS,...", help="name the run folders of a status (FAILED, INTERRUPTED, ...) and what they take; see --yes")
    add("--yes", action="store_true", help="with --prune: remove them")
    return parser


def _options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; a word ``rows=tau`` counts as ``--rows=tau``, unless a folder has that name. Raises UserError."""
    parser = _parser()
    known = [action.dest for action in parser._actions if action.option_strings and action.dest != "help"]
    given: list[str] = []
    for word in argv:
        key, equals, value = word.partition("=")
        if not equals or word.startswith("-") or "/" in key or Path(word).exists():
            given.append(word)
            continue
        require(key in known, key, value, f"no such option{nearest(key, known)}; see --help")
        if key not in SWITCHES:
            given.append(f"--{key}={value}")
            continue
        require(value.lower() in ("true", "false"), key, value, "true or false")
        given += [f"--{key}"] if value.lower() == "true" else []
    options = parser.parse_intermixed_args(given)
    require(options.format in FORMATS, "format", options.format, f"one of {', '.join(FORMATS)}{nearest(options.format, FORMATS)}")
    modes = [mode for mode in MODES if getattr(options, mode) not in (None, False)]
    for first, second in zip(modes, modes[1:], strict=False):
        raise UserError(second, getattr(options, second), f"not together with {first}")
    for mode in modes:
        judged = ("rows", "columns", "model", "steps")
        own = {"why": ("cell",), "power": ("cell", "reference", "scatter"), "list": (), "prune": (), "html": ()}
        allowed = own.get(mode, ("scatter",)) + (judged if mode not in ("list", "prune", "html") else ())
        plain = mode != "html" or options.format == parser.get_default("format")
        require(plain, "format", options.format, "says nothing with html")
        other = next((key for key in SHAPING if key not in allowed and getattr(options, key) != parser.get_default(key)), None)
        require(other is None, other or "", getattr(options, other or "rows"), f"says nothing with {mode}")
    require(options.prune is not None or not options.yes, "yes", "true", "goes with prune")
    options.steps = _number("steps", options.steps, int, "a whole number")
    require(options.cell != "gain" or options.steps != 0, "steps", 0, "at least 1 with cell=gain, which is 0 before adaptation")
    for key in ("margin", "power", "target"):
        setattr(options, key, _number(key, getattr(options, key), float, "a number"))
    return options


def _number(key: str, text: str | None, kind: Callable[[str], Any], what: str) -> Any:
    try:
        value = None if text is None else kind(text)
    except ValueError:
        raise UserError(key, text, what) from None
    require(value is None or value == value and abs(value) != float("inf"), key, text, what)
    return value


def _words(text: str | None) -> list[str] | None:
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, or 1 after one line on stderr."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        options = _options(argv)
        passed: list[str] = []
        if options.html is not None:
            print(_page(options, passed))
            return 0
        grids = _prune(options, passed) if options.prune is not None else _grids(options, passed)
        write = FORMATS[options.format]
        print("\n".join(write(table) for table in grids), end="", flush=True)
        for line in passed + ([note for table in grids for note in table.notes] if options.format == "csv" else []):
            print(f"perfed: {line}", file=sys.stderr)
        if options.scatter:
            print(f"perfed: {_scatter(options)}", file=sys.stderr)
    except UserError as error:
        print(f"perfed: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `perfed-report ... | head`
        silence_stdout()
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _runs(options: argparse.Namespace, passed: list[str]) -> list[Run]:
    runs = folders.find(options.runs, passed)
    return folders.chosen(runs, options.where) if options.where else runs


def _arranged(options: argparse.Namespace, passed: list[str], ignore: Sequence[str] = ()) -> Pivot:
    return arrange(_runs(options, passed), _words(options.rows), _words(options.columns) or (), ignore)


def _grids(options: argparse.Namespace, passed: list[str]) -> list[tables.Grid]:
    judged = {"model": options.model, "steps": options.steps}
    if options.list:
        runs = folders.whole(options.runs, passed)
        return [folders.listing(folders.chosen(runs, options.where) if options.where else runs)]
    pivot = _arranged(options, passed, tuple(tables.CHANCE) if options.power is not None else ())
    if options.why is not None:
        return [compare.why(pivot, options.why, options.cell, **judged)]
    if options.power is not None:
        needed = power.needed_table(pivot, options.power, options.cell, **judged, reference=options.reference)
        return [needed, power.variance_table(pivot, options.cell, **judged)]
    if options.target is not None:
        return [views.target_table(pivot, options.target, **judged)]
    if options.users:
        return [views.users_table(pivot, **judged)]
    return [compare.table(pivot, options.cell, **judged, reference=options.reference, margin=options.margin)]


def _page(options: argparse.Namespace, passed: list[str]) -> Path:
    """Write the page; runs of several protocols get a section each."""
    from perfed.webpage import write_html

    path = Path(options.html).expanduser()
    require(path.suffix.lower() in (".html", ".htm"), "html", path, "a name that ends in .html")
    require(path.parent.is_dir() and not path.is_dir(), "html", path, "a file in a folder that exists")
    try:
        write_html(path, _runs(options, passed))
    except OSError as error:
        raise UserError("html", path, f"cannot be written: {error.strerror or error}") from error
    return path


def _scatter(options: argparse.Namespace) -> str:
    """Draw the picture, after the numbers are out; what was drawn."""
    path = Path(options.scatter).expanduser()
    path = path.with_suffix(".png") if path.suffix in (".png", ".pdf") else path.with_name(path.name + ".png")
    pivot = _arranged(options, [])
    panels = views.scatter(pivot, model=options.model, steps=options.steps)
    result = pivot.runs[0].result
    title = f"Users against themselves under local training; {result['dataset']}, {result['partition']}, protocol {result['protocol']}"
    title += f"\na point is one user in one seed ({_numbers(pivot, options)}), no interval"
    try:
        figures.user_scatter(panels, path, title)
    except OSError as error:
        raise UserError("scatter", options.scatter, f"cannot be written: {error.strerror}") from None
    return f"{path} and {path.with_suffix('.pdf').name}: {len(panels)} method{'s' if len(panels) > 1 else ''} against local"


def _numbers(pivot: Pivot, options: argparse.Namespace) -> str:
    """``5 seeds of 50 users``: what the panels of the picture show; ``3 to 5 seeds`` where they differ."""
    want = asked("accuracy", pivot.runs, options.model, options.steps)
    others = [(cell, pivot.beside(row, column, "local")) for row, column, cell in pivot.each()]
    pairs = [pairs_of_users(cell, other, want)[0] for cell, other in others if other is not None and other is not cell]
    return f"{_span([len(p) for p in pairs if p], 'seed')} of {_span([len(users) for p in pairs for users in p.values()], 'user')}"


def _span(counts: Sequence[int], what: str) -> str:
    low, high = min(counts), max(counts)
    return f"{low if low == high else f'{low} to {high}'} {what}{'s' if high != 1 else ''}"


def _prune(options: argparse.Namespace, passed: list[str]) -> list[tables.Grid]:
    wanted = folders.statuses(options.prune)
    require(options.where is None, "where", options.where, "says nothing with prune: give the folders")
    done = folders.prune(folders.run_folders(options.runs, passed), wanted, options.yes)
    passed += [f"{folder} stays: {why}" for folder, why in done.kept]
    verb = "removed" if options.yes else "would be removed"
    total = folders.bytes_text(sum(size for _, size in done.removed))
    end = f"{len(done.removed)} run{'s' if len(done.removed) != 1 else ''} {verb}, {total}."
    rows = [[str(folder), verb, folders.bytes_text(size)] for folder, size in done.removed]
    hint = "" if options.yes or not rows else " Nothing is gone yet: add --yes."
    return [tables.grid(["folder", "what", "size"], rows, end + hint, labels=2)]


if __name__ == "__main__":
    sys.exit(main())
