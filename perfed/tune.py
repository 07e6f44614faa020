"""``perfed-tune algo=A,B [KEY=VALUE ...]``: step sizes and the like, chosen on validation data with the same trials for every method.

Every trial is trained on seeds that are not the report's and scored on validation data (``split.val``); test data are never looked at. What
was chosen is printed as a command line for the report's seeds, and ``--run`` goes on with it. Repeating the command trains what is missing.

``outputs/tune-<...>-<hash12>/`` holds report.md, choices.csv, trials.csv, sensitivity.png and .pdf, and chosen.yaml.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from perfed import results, tables
from perfed.cli import DONE, FAILED, answered
from perfed.config import Config, absolute, parse
from perfed.errors import nearest, require
from perfed.folders import make, require_writable
from perfed.frontdoor import Composer, FrontDoor, Refused, compose
from perfed.studies import tuning
from perfed.studies.jobs import Context, Done, Job, run_all
from perfed.studies.tuning import Space, Tuned

VALIDATION = 0.2
"""``split.val`` where the command does not give it."""

HELP = """\
perfed-tune algo=A[,B ...] [KEY=VALUE ...]    choose values on validation data, the same number of trials for every method

  algo=fedavg,ditto    the methods; algo=all: every method with a published space (conf/tune/<method>.yaml)
  beta=0.01,0.1,1      keys with several values are the grid, for all methods, in place of the published spaces
  KEY=VALUE            as for perfed, for all trials; split.val=0.2 unless given
  study.tuning_seeds   seeds of a trial; they start at seed + 1000
  study.tuning_share   share of the rounds that a trial runs
  study.jobs           jobs at once
  plan=true            print the trials and stop

  --space FILE         a space of your own: grid: {key: [values]}, fixed: [key=value]; or such a block for each method by name
  --trials N           N points of each grid, evenly spread
  --lanes off          a run folder for each trial; auto: trials that differ in numbers alone are lanes of one job, where that can be
  --run                go on with the chosen values on the report's seeds, and print their table

Example: perfed-tune algo=fedavg,perfedavg_hf dataset=mnist n=50 rounds=200
"""
_OWN = {
    "study.name": "perfed-tune is no study; leave it out",
    "study.methods": "name the methods by algo=A,B",
    "study.budget": "perfed-tune gives every method the same rounds; experiment=all_methods has budgets",
}


@dataclass(frozen=True)
class Request:
    """A command line that was understood. ``words``: without ``algo`` and the keys of the grid."""

    words: tuple[str, ...]
    spaces: dict[str, Space]
    said: tuple[str, ...]
    run: bool
    lanes: bool


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused("perfed-tune", f"{message}; see --help")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: 0; 1 when something was refused or a method has no result; 130 / 143 by signal."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or "-h" in argv or "--help" in argv:
        print(HELP)
        return DONE if argv else FAILED
    return answered(_main, argv, "; the same command goes on from here")


def _main(argv: Sequence[str]) -> int:
    composer = Composer()
    wanted = request(argv, composer)
    first = next(iter(wanted.spaces.values()))
    composed = functools.cache(lambda words: compose(words, composer))  # each trial is looked at more than once
    config = parse(composed((*wanted.words, f"algo={first.method}", *first.fixed)))
    require(config.study.name is None, "study.name", config.study.name, _OWN["study.name"])
    require_writable("outputs", config.outputs_path)
    context = Context(config, wanted.words, lambda words: composed(tuple(words)))
    base = {name: (f"algo={name}",) for name in wanted.spaces}
    _check(context, base, wanted.spaces)
    seeds = tuning.tuning_seeds(config)
    many, rounds = len(first.trials), config.rounds
    print(
        f"perfed: {len(base)} method{'s' * (len(base) > 1)}, {many} trial{'s' * (many > 1)} each on {_range(seeds)}; "
        f"the report's are {_range(config.seed_values)}; {context.processes} at once",
        *(f"perfed: {line}" for line in (*wanted.said, *_shared(config))),
        sep="\n",
        flush=True,
    )
    if config.plan:
        print(_plan(wanted.spaces, rounds))
        return DONE
    make("outputs", config.outputs_path)
    found = tuning.tuned(context, base, wanted.spaces, wanted.lanes)
    folder = config.outputs_path / _name(context, base, wanted.spaces)
    texts = _write(folder, context, found)
    print(f"\n{texts}\nreport: {results.from_here(folder) / 'report.md'}", flush=True)
    bad = [name for name, method in found.items() if method.best is None or method.count("FAILED")]
    for name in bad:
        why = next((t.problem for t in found[name].trials if t.problem), "every trial diverged")
        print(f"perfed: {name}: {'no result' if found[name].best is None else 'a trial failed'} ({why})", file=sys.stderr, flush=True)
    return max(FAILED if bad else DONE, _report_runs(context, found, folder) if wanted.run else DONE)


# ---------------------------------------------------------------- reading the command line


def request(argv: Sequence[str], composer: Composer) -> Request:
    """Understand a command line. Raises UserError."""
    parser = _Parser(prog="perfed-tune", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--space")
    parser.add_argument("--trials")
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--lanes", choices=("auto", "off"), default="auto")
    args = parser.parse_intermixed_args(list(argv))
    methods, grid, rest = _split(args.overrides, composer)
    keys = [word.partition("=")[0].lstrip("+") for word in rest]
    for key, word in zip(keys, rest, strict=True):
        if key in _OWN or key.startswith("hydra"):
            raise Refused(word, _OWN.get(key, "perfed-tune makes its runs itself, without Hydra's launcher"))
    said = []
    if "split.val" not in keys:
        rest.append(f"split.val={VALIDATION}")
        said.append(f"split.val={VALIDATION}, the default of perfed-tune: a share of each user's train data is held out for the choice")
    spaces = _spaces(methods, grid, args.space)
    for name, space in spaces.items():
        typed = next((word for key, word in zip(keys, rest, strict=False) if key in space.grid), None)
        if typed is not None:
            raise Refused(typed, f"the space of {name} sweeps this key; leave it out, or give several values or a --space of your own")
    spaces = _counted(spaces, args.trials)
    return Request(tuple(rest), spaces, tuple(said), args.run, args.lanes == "auto")


def _split(overrides: Sequence[str], composer: Composer) -> tuple[list[str], dict[str, list[Any]], list[str]]:
    """(methods, keys with several values, the other words)."""
    methods: list[str] = []
    grid: dict[str, list[Any]] = {}
    rest: list[str] = []
    plugins = [word for word in overrides if word.startswith("plugins=")]
    door = FrontDoor(composer, plugins)  # what plugins register is an option then
    for word in overrides:
        if word.partition("=")[0] == "algo":
            require(not methods, "algo", word.partition("=")[2], "once: algo=A,B")
            methods = [name for name in word.partition("=")[2].split(",") if name]
            continue
        override = door._read(word)
        if not override.is_sweep_override():
            rest.append(word)
        elif not override.is_discrete_sweep():
            raise Refused(word, "a grid takes values or range(start,stop,step)")
        else:
            key, values = override.get_key_element().lstrip("+"), list(override.sweep_iterator())
            tuning.require_tunable(key, key, word.partition("=")[2])
            require(len(set(map(str, values))) == len(values), key, word.partition("=")[2], "different values")
            grid[key] = values
    known = composer.options("algo")
    require(bool(methods), "algo", "null", "the methods to tune: algo=fedavg,perfedavg_hf, or algo=all")
    if methods == ["all"]:
        methods = tuning.methods()
    for name in methods:
        require(name in known, "algo", name, f"no such algo{nearest(name, known)}; one of {', '.join(known)}")
    return list(dict.fromkeys(methods)), grid, rest


def _spaces(methods: Sequence[str], grid: dict[str, list[Any]], file: str | None) -> dict[str, Space]:
    require(not (grid and file), "--space", file, f"not beside keys with several values ({', '.join(grid)})")
    if grid:
        return {name: Space(name, (), grid) for name in methods}
    own = tuning.read(absolute(file), methods) if file else {}
    out = {}
    for name in methods:
        published = name in tuning.methods()
        why = f"no published space; give several values (beta=0.05,0.1) or --space FILE with a block {name}:"
        require(name in own or published, "algo", name, why)
        out[name] = own[name] if name in own else tuning.space(name)
    return out


def _counted(spaces: dict[str, Space], count: str | None) -> dict[str, Space]:
    """The same number of trials for every method, or a refusal."""
    sizes = {name: len(space.trials) for name, space in spaces.items()}
    least = min(sizes.values())
    if count is not None:
        ok = count.isdigit() and 1 <= int(count) <= least
        require(ok, "--trials", count, f"a whole number from 1 to {least}, the points of the smallest grid")
        return {name: replace(space, count=int(count)) for name, space in spaces.items()}
    why = f"the same number of trials for every method; give --trials {least}"
    require(len(set(sizes.values())) == 1, "trials", ", ".join(f"{name}: {size}" for name, size in sizes.items()), why)
    return spaces


def _check(context: Context, base: Mapping[str, tuple[str, ...]], spaces: Mapping[str, Space]) -> None:
    """Refuse whatever is wrong with any trial before the first one is trained."""
    from perfed.prepare import prepare

    require(context.config.split.val > 0, "split.val", context.config.split.val, "a share > 0: the trials are chosen on validation data")
    more = tuning.trial_words(context.config, context.config.rounds)
    for name, space in spaces.items():
        for i, values in enumerate(space.trials):
            one = context.parsed(*base[name], *space.fixed, *tuning.words(values), *more)
            if i == 0:
                prepare(replace(one, seeds=1))


# ---------------------------------------------------------------- what is said


def _range(seeds: Sequence[int]) -> str:
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"


def _shared(config: Config) -> list[str]:
    """What the trials and the report have in common although their seeds differ."""
    fixed = [key for key in ("partition_seed", "init_seed", "sampling_seed") if getattr(config, key) is not None]
    return [f"warning: {', '.join(fixed)} is the same for the trials and the report"] if fixed else []


def _plan(spaces: Mapping[str, Space], rounds: int) -> str:
    rows = [[name, str(len(s.trials)), "; ".join(f"{key} in {s.tried(key)}" for key in s.grid)] for name, s in spaces.items()]
    note = f"{sum(len(s.trials) for s in spaces.values())} trials of {rounds} rounds in all (study.tuning_share: less)."
    return tables.plain(tables.grid(["method", "trials", "tried"], rows, note))


def _name(context: Context, base: Mapping[str, tuple[str, ...]], spaces: Mapping[str, Space]) -> str:
    """A folder for the methods, their trials and all that a number depends on."""
    from perfed.identity import identity

    config = context.config
    who = [identity(context.parsed(*base[name], *s.fixed)).hash for name, s in spaces.items()]
    what = [[s.method, s.fixed, s.trials] for s in spaces.values()]
    content = json.dumps([who, what, config.study.tuning_seeds, config.study.tuning_share])
    names = "-".join(spaces) if len(spaces) <= 2 else f"{len(spaces)}_methods"
    return f"tune-{names}-{config.dataset.name}-{config.partition.name}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


def command(context: Context, name: str, method: Tuned) -> str:
    """The command line that runs the chosen values on the report's seeds."""
    words = (f"algo={name}", *context.words, *method.space.fixed, *method.words)
    return shlex.join(["python", "-m", "perfed", *(word for word in words if not word.startswith("study."))])


# ---------------------------------------------------------------- what is written


def _write(folder: Path, context: Context, found: Mapping[str, Tuned]) -> str:
    """Fill the folder; returns what is shown on the terminal."""
    from perfed.sensitivity import sensitivity

    config = context.config
    table = tuning.choices(found, config.study.tuning_share)
    commands = {name: command(context, name, method) for name, method in found.items() if method.best is not None}
    folder.mkdir(parents=True, exist_ok=True)
    rows = trial_rows(found, list(tuning.tuning_seeds(config)))
    results.write_csv(folder / "trials.csv", rows, list(dict.fromkeys(key for row in rows for key in row)))
    results.write_text(folder / "choices.csv", tables.to_csv(table))
    results.write_text(folder / "chosen.yaml", _chosen(found, commands))
    bars = ", bar: lowest to highest seed" if config.study.tuning_seeds > 1 else ""
    title = f"{config.dataset.name}, {config.partition.name}: validation accuracy of every trial; ring: chosen, cross: no result{bars}"
    drawn = "![validation accuracy against the swept keys](sensitivity.png)\n"
    try:
        sensitivity({name: _points(method) for name, method in found.items()}, folder / "sensitivity.png", title)
    except Exception as error:  # a picture must not cost the numbers
        drawn = f"sensitivity.png could not be drawn: {type(error).__name__}: {' '.join(str(error).split())}\n"
        print(f"perfed: warning: {drawn}", end="", file=sys.stderr)
    report = [
        f"# Tuning on {config.dataset.name}, {config.partition.name}\n",
        tables.markdown(table),
        f"Trials on {_range(tuning.tuning_seeds(config))}, report on {_range(config.seed_values)}. "
        f"split.val={config.split.val:g} of each user's train data is held out; test data played no part in the choice.\n",
        *(f"{line}\n" for line in _shared(config)),
        "## Sensitivity\n",
        drawn,
        "## The chosen values on the report's seeds\n",
        "```sh\n" + "".join(f"{line}\n" for line in commands.values()) + "```\n",
        "## Trials\n",
        tables.markdown(_trials_table(found)),
    ]
    results.write_text(folder / "report.md", "\n".join(report))
    return f"{tables.plain(table)}\nthe chosen values on the report's seeds:\n" + "".join(f"  {line}\n" for line in commands.values())


def trial_rows(found: Mapping[str, Tuned], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """The rows of trials.csv: one for each method, trial and seed; ``diverged`` is the round."""
    rows = []
    for name, method in found.items():
        for i, trial in enumerate(method.trials):
            for seed in seeds:
                status = "FAILED" if trial.problem else "DIVERGED" if seed in trial.diverged else "DONE"
                row = {"method": name, "trial": i + 1, "values": " ".join(tuning.words(trial.values)), "seed": seed, "status": status}
                row |= {"val_accuracy": trial.validation.get(seed), "diverged": trial.diverged.get(seed), "chosen": trial is method.best}
                rows.append(row | {"problem": trial.problem} | {key: str(value) for key, value in trial.values.items()})
    return rows


def _trials_table(found: Mapping[str, Tuned]) -> tables.Grid:
    rows = []
    for name, method in found.items():
        for trial in method.trials:
            text = trial.problem or tables.percent(trial.score)
            if trial.diverged:
                text = f"div {len(trial.diverged)}/{len(trial.diverged) + len(trial.validation)}"
            rows.append([name, " ".join(tuning.words(trial.values)), tables.Cell(text, trial is method.best)])
    return tables.grid(["method", "values", "validation %"], rows, "Mean over the tuning seeds. Bold: chosen.")


def _points(method: Tuned) -> list[dict[str, Any]]:
    """As the picture wants them."""
    points = []
    for trial in method.trials:
        known = list(trial.validation.values())
        spread = (min(known), max(known)) if len(known) > 1 and trial.score is not None else None
        point = {"values": trial.values, "score": trial.score, "spread": spread, "status": trial.status, "chosen": trial is method.best}
        points.append(point)
    return points


def _chosen(found: Mapping[str, Tuned], commands: Mapping[str, str]) -> str:
    from omegaconf import OmegaConf

    content = {
        name: {"validation_accuracy": method.best.score, "values": method.best.values, "command": commands[name]}
        for name, method in found.items()
        if method.best is not None
    }
    return "# Chosen by perfed-tune on validation data; each command runs the values on the report's seeds.\n" + OmegaConf.to_yaml(content)


# ---------------------------------------------------------------- going on


def _report_runs(context: Context, found: Mapping[str, Tuned], folder: Path) -> int:
    """Run the chosen values on the report's seeds; one table, sorted by accuracy, in the folder too."""
    from perfed.studies.all_methods import method_table

    chosen = {name: method for name, method in found.items() if method.best is not None}
    jobs = [Job(name, (f"algo={name}", *method.space.fixed, *method.words)) for name, method in chosen.items()]
    ended: dict[str, Done] = run_all(jobs, context, "method")
    runs = {name: results.load(done.folder) for name, done in ended.items() if done.folder is not None and done.problem is None}
    runs = {name: run for name, run in runs.items() if run.complete}
    table = method_table(runs, dict.fromkeys(runs, context.config.rounds))
    text = (folder / "report.md").read_text(encoding="utf-8")
    lines = "".join(f"- {name}: {run.folder.name}\n" for name, run in runs.items())
    results.write_text(folder / "report.md", f"{text}\n## Result on the report's seeds\n\n{tables.markdown(table)}\n{lines}")
    results.write_text(folder / "methods.csv", tables.to_csv(table))
    print(f"\n{tables.plain(table)}", flush=True)
    return DONE if len(runs) == len(chosen) else FAILED


if __name__ == "__main__":
    sys.exit(main())
