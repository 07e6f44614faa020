"""The command ``perfed``: flags, the front door, Hydra's launcher, exit codes.

Nothing is launched and no folder made while anything is wrong with any job: the command line is read and every cell
composed and parsed (:mod:`perfed.frontdoor`), and its data, partition, model and device are tried (``perfed.prepare``).
Hydra then starts the jobs, with the launcher that the user chose, and a sweep ends with one table.

Exit codes: 0 done, finished before, or diverged (a result); 1 refused or a job failed; 75 another process holds the run;
130 / 143 ended by SIGINT / SIGTERM.
"""

from __future__ import annotations

import argparse
import functools
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from perfed.config import Config, conf_dir, parse, version
from perfed.errors import UserError, require, silence_stdout
from perfed.folders import make, require_writable
from perfed.frontdoor import Cell, Command, Composer, FrontDoor, InJob, Refused, compose
from perfed.results import finished_before, from_here
from perfed.sweep import Outcome, Sweep, at_once, guarded, launch

__all__ = ["compose", "main"]

DONE, FAILED, HELD = 0, 1, 75
_PASSED_ON = ("hydra_help", "info", "shell_completion", "experimental_rerun")


class Terminated(KeyboardInterrupt):
    """SIGTERM, as an exception, so that a run can store its status."""

    number = signal.SIGTERM


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: the process's own) and return the exit code. Never raises for the user's mistakes."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return answered(_main, argv)
    except BrokenPipeError:  # `perfed --help | head`
        silence_stdout()
        return FAILED


def answered(command: Callable[[list[str]], int], argv: list[str], after: str = "") -> int:
    """The exit code of a command; a UserError or a signal becomes one line on stderr. ``after``: what to add when a signal ended it."""
    try:
        with _sigterm():
            return command(argv)
    except UserError as error:
        return _complain(str(error), FAILED)
    except KeyboardInterrupt as error:
        number = signal.Signals(getattr(error, "number", signal.SIGINT))
        return _complain(f"ended by {number.name}{after}", 128 + number)


def _complain(text: str, code: int) -> int:
    with suppress(OSError):  # stderr is closed
        print(f"perfed: {' '.join(text.split())}", file=sys.stderr, flush=True)
    return code


def _tell(text: str) -> bool:
    """Print the end of a run. One that cannot be printed loses nothing: it is in the run's folder."""
    try:
        print(text, flush=True)
        return True
    except OSError as error:  # `perfed | head`, or a full disk
        silence_stdout()
        if not isinstance(error, BrokenPipeError):
            _complain(f"the output could not be written: {error.strerror}", FAILED)
        return False


def _main(argv: list[str]) -> int:
    if "-h" in argv or "--help" in argv:
        from perfed.helppage import page

        print(page(conf_dir()))
        return DONE
    if "--version" in argv:
        print(f"perfed {version()}")
        return DONE
    args = _flags(argv)
    if any(getattr(args, name) for name in _PASSED_ON):
        return _hydra(argv, args)
    door = FrontDoor(Composer(args.config_path, args.config_dir, args.config_name), args.overrides)
    own = {"--config-path": args.config_path, "--config-dir": args.config_dir, "--config-name": args.config_name}
    flags = [f"{flag}={value}" for flag, value in own.items() if value]
    if args.cfg:
        command = door.command(False, flags)
        shown = [*(["--package", args.package] if args.package else []), *(["--resolve"] if args.resolve else [])]
        return _hydra([*command.argv, "--cfg", args.cfg, *shown], args)
    command = door.command(args.multirun, flags)
    if any(cell.config.study.name for cell in command.cells):
        return _study(command, args)
    return _jobs(door, command, args)


def _flags(argv: Sequence[str]) -> argparse.Namespace:
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    parser.allow_abbrev = False

    def error(message: str):
        unknown = next((text for text in argv if text.startswith("-") and text.partition("=")[0] in message), "")
        advice = "; keys are written without dashes, as alpha=0.02" if "unrecognized" in message else ""
        raise Refused(unknown or "command line", f"{message}{advice}; see --help")

    parser.error = error
    args = parser.parse_intermixed_args(list(argv))
    if args.resolve and not args.cfg:
        raise Refused("--resolve", "goes with --cfg job")
    if sum(map(bool, (args.run, args.multirun, args.cfg))) > 1:
        raise Refused("--run, --multirun, --cfg", "only one of them at a time")
    return args


# ---------------------------------------------------------------- jobs


def _jobs(door: FrontDoor, command: Command, args: argparse.Namespace) -> int:
    from perfed import prepare
    from perfed.isolation import settings_kept

    cells = command.cells
    places = dict.fromkeys(map(_place, cells))
    for key, place in places:
        require_writable(key, place)
    _apart(cells)
    sizes: dict[Path, prepare.Size] = {}
    done: set[Path] = set()
    for number, cell in enumerate(cells):
        try:
            if _finished(cell):
                done.add(cell.folder)
                continue
            cell.config.tracker.check()
            if cell.folder not in sizes:
                with settings_kept():
                    sizes[cell.folder] = prepare.size(prepare.prepare(cell.config))
        except UserError as error:
            if len(cells) == 1:
                raise
            raise InJob(error, number, len(cells), cell.overrides) from error
        except Exception:  # a fault of a plugin's code, not of the command: the job will meet it again, and keep its traceback
            continue
    names = _names(cells)
    if command.multirun:
        print(f"perfed: {len(cells)} job{'s' * (len(cells) != 1)}{_estimate(door, command, len(done), list(sizes.values()))}", flush=True)
    if any(cell.config.plan for cell in cells):
        for cell, name in zip(cells, names, strict=True):
            if command.multirun:
                print(f"\nperfed: job {name}")
            print(prepare.plan(cell.config), flush=True)
        return DONE
    for key, place in places:
        make(key, place)
    if not command.multirun:
        return _hydra(command.argv, args)
    if door.cells_are_known:
        return _sweep(door, command, names)
    try:
        return _hydra([*command.argv, "--multirun"], args)
    finally:
        (cells[0].folder.parent / "multirun.yaml").unlink(missing_ok=True)  # of Hydra's sweeper


def _apart(cells: Sequence[Cell]) -> None:
    """Refuse jobs of different settings that would write to one folder."""
    first: dict[Path, Cell] = {}
    for cell in cells:
        other = first.setdefault(cell.folder, cell)
        why = f"must tell all jobs apart: {' '.join(other.overrides)} and {' '.join(cell.overrides)} would share {from_here(cell.folder)}"
        require(other.hash == cell.hash, "hydra.sweep.subdir", cell.folder.name, why)


def _place(cell: Cell) -> tuple[str, Path]:
    """Where the job writes, and the key that says so."""
    outputs = cell.config.outputs_path
    return ("outputs", outputs) if cell.folder.is_relative_to(outputs) else ("hydra.run.dir", cell.folder)


def _names(cells: Sequence[Cell]) -> list[str]:
    """How each job of a sweep is announced: ``3 of 8: tau=4``, without the words that all jobs share."""
    same = set.intersection(*(set(cell.overrides) for cell in cells)) if len(cells) > 1 else set()
    words = [" ".join(text for text in cell.overrides if text not in same) for cell in cells]
    return [f"{number} of {len(cells)}: {text}".rstrip(": ") for number, text in enumerate(words, 1)]


def _estimate(door: FrontDoor, command: Command, done: int, sizes: Sequence[Any]) -> str:
    """``, 2 of them finished before; the others: roughly ...``: work and memory of the jobs that will run."""
    from perfed.prepare import total

    left = "the others" if done else "all of them"
    text = f", {done} of them finished before" if done else ""
    if not sizes or not door.cells_are_known:
        return text
    threads = max(cell.config.engine.threads for cell in command.cells)
    return f"{text}; {left}: {total(sizes, at_once(door.composer, command.words, threads))}"


def _sweep(door: FrontDoor, command: Command, names: Sequence[str]) -> int:
    """Run the jobs of a sweep that are missing, and close with a table of all."""
    first: dict[Path, Cell] = {}
    for cell in command.cells:
        first.setdefault(cell.folder, cell)
    cells = list(first.values())
    by_folder: dict[Path, str] = {}
    for cell, name in zip(command.cells, names, strict=True):
        if cell.folder in by_folder:
            print(f"perfed: job {name}: the same run as job {by_folder[cell.folder].partition(':')[0]}", flush=True)
        elif by_folder.setdefault(cell.folder, name) and _finished(cell):
            print(f"perfed: job {name}\n{finished_before(_status(cell) or '')}: {from_here(cell.folder)}", flush=True)
    missing = [cell for cell in cells if not _finished(cell)]
    shared = Sweep.of(by_folder, cells[0].folder.parent, [cell.config.device for cell in missing])
    outcomes: dict[Path, Outcome] = {}

    def job(cfg: DictConfig) -> Outcome:  # pickled by value, with what it knows, where it runs in another process
        return _job(cfg, shared, outcomes)

    trouble = False
    try:
        if missing:
            threads = max(cell.config.engine.threads for cell in missing)
            group = _group([cell.config for cell in cells], " ".join(command.words))
            launched = [replace(cell, overrides=(*cell.overrides, *group)) for cell in missing]
            for cell, outcome in launch(door.composer, command.words, launched, shared, job, threads):
                outcomes[cell.folder] = outcome
    except Exception as error:
        trouble = True
        _complain(f"the launcher stopped: {type(error).__name__}: {error}", FAILED)
    finally:
        why = (shared.halted or {}).get("why", "")
        shared.stop.unlink(missing_ok=True)
        _closing_table(cells, {folder: outcome.reason for folder, outcome in outcomes.items()}, why)
    codes = [_code(cell, outcomes.get(cell.folder)) for cell in cells]
    return FAILED if trouble else next((code for code in (FAILED, HELD) if code in codes), DONE)


def _study(command: Command, args: argparse.Namespace) -> int:
    """A study composes its runs itself, from the words of the command."""
    from perfed import studies
    from perfed.studies.jobs import Context

    config = command.cells[0].config
    if command.multirun:
        raise UserError("study.name", config.study.name, "one command without -m: a study makes its runs itself")
    words = [word for word in args.overrides if not word.startswith("hydra")]
    own = next((word for word in words if word.partition("=")[0].lstrip("+") == "algo"), None)
    if own is not None:
        raise Refused(own, f"study {config.study.name} chooses the algorithms; narrow it with study.methods=[...]")
    config.tracker.check()
    require_writable("outputs", config.outputs_path)
    reading_once = functools.partial(compose, composer=Composer())
    return studies.main(config.study.name, Context(config, (*words, *_group([config], config.study.name)), reading_once))


def _group(configs: Sequence[Config], name: str) -> list[str]:
    """The word that tells a tracker which runs belong together: those of one sweep or study, unless the user gave a name."""
    tracker = configs[0].tracker
    key = tracker.sweep_key
    if key is None or getattr(tracker, key) is not None or len({config.tracker.name for config in configs}) > 1:
        return []
    words = [word for word in name.split() if not word.startswith(("hydra", "tracker", "outputs"))]
    text = " ".join(sorted(words, key=lambda word: "," not in word))  # what is swept comes first
    text = re.sub(r"[^\w=,.+/ -]", "", text)[:120]  # nothing that Hydra would read; W&B takes 128
    return [f'tracker.{key}="{text or "sweep"}"']


def _finished(cell: Cell) -> bool:
    """Nothing is left to do for the job but to show its table. Raises UserError where another run has its folder."""
    from perfed.results import check_identity, read_status

    check_identity(cell.folder, cell.hash)
    if cell.config.plan or cell.config.force:
        return False
    return (read_status(cell.folder) or {}).get("status") in ("DONE", "DIVERGED") and (cell.folder / "result.json").is_file()


def _code(cell: Cell, outcome: Outcome | None) -> int:
    """What the job said, else what it left in its folder. A run that another process held may have ended meanwhile."""
    if outcome is None or outcome.code == HELD:
        done = _status(cell) in ("DONE", "DIVERGED")
        return DONE if done else FAILED if outcome is None else HELD
    return outcome.code if outcome.code in (DONE, FAILED) else FAILED


def _status(cell: Cell) -> str | None:
    from perfed.results import read_status

    return (read_status(cell.folder) or {}).get("status")


def _closing_table(cells: Sequence[Cell], reasons: Mapping[Path, str], why: str = "") -> None:
    """One table over all jobs, one for each protocol where there are several.

    reasons: by folder, of jobs that left none there. why: no other job was started.
    """
    from perfed import compare, prepare, results, tables

    groups: dict[str, list[results.Run]] = {}
    for cell in cells:
        missing = {"status": "not run", "error": reasons.get(cell.folder) or why}
        run = results.Run(cell.folder, missing, {}, None)
        with suppress(UserError):
            run = results.load(cell.folder)
        if run.status["status"] == "RUNNING":
            run = replace(run, status={"status": "held by another process"})
        elif "traceback" not in run.status and (reason := reasons.get(cell.folder)):
            run = replace(run, status={"error": reason, **run.status})
        run = replace(run, config=run.config or cell.config.as_dict())
        groups.setdefault(prepare.resolve(cell.config, cell.config.algo).label, []).append(run)
    for runs in groups.values():
        _tell(f"\n{tables.plain(compare.sweep_table(runs))}")


def _hydra(argv: Sequence[str], args: argparse.Namespace) -> int:
    """Let Hydra act on ``argv``; its exit code, and that of the job."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    codes: list[int] = []

    def job(cfg: DictConfig) -> None:
        codes.append(_job(cfg).code)

    decorated = hydra.main(config_path=str(conf_dir()), config_name=args.config_name or "config", version_base="1.3")(job)
    before, sys.argv = sys.argv, ["perfed", *argv]
    GlobalHydra.instance().clear()
    try:
        decorated()
    except SystemExit as end:
        codes.append(FAILED if end.code else DONE)
    finally:
        sys.argv = before
    return next((code for code in (FAILED, HELD) if code in codes), DONE)


def _job(cfg: DictConfig, sweep: Sweep | None = None, outcomes: dict[Path, Outcome] | None = None) -> Outcome:
    """One job, as Hydra calls it, in whatever process. Raises nothing but signals, and those only in the launching process.

    sweep: None for a run alone. outcomes: gets the outcome too, for a sweep that is broken off in this process.
    """
    from hydra.core.hydra_config import HydraConfig

    from perfed.isolation import isolated

    folder = Path(HydraConfig.get().runtime.output_dir)
    outcome = Outcome(FAILED)
    try:
        if sweep is not None and (halted := sweep.halted) is not None:
            outcome = Outcome(FAILED, halted["why"])
        elif sweep is None or sweep.inline:
            with isolated():
                outcome = _attempt(cfg, folder, sweep)
        else:
            with guarded(sweep), isolated():
                outcome = _attempt(cfg, folder, sweep)
    except KeyboardInterrupt as error:
        if sweep is None or sweep.inline:
            raise
        outcome = Outcome(128 + getattr(error, "number", signal.SIGINT))
    finally:
        if outcomes is not None:
            outcomes[folder] = outcome
        with suppress(OSError):
            folder.rmdir()  # only where nothing was written
    return outcome


def _tracked(folder: Path) -> str:
    """The tracker with which a finished run was made."""
    from perfed.results import load

    return (load(folder).config.get("tracker") or {}).get("name", "none")


def _attempt(cfg: DictConfig, folder: Path, sweep: Sweep | None) -> Outcome:
    """Run the job and say how it ended. Of several jobs that run at once each line bears the job's name, and progress stays in the logs."""
    from perfed import results, train

    alone, together = sweep is None, sweep is not None and not sweep.inline
    label = "" if alone else f"job {sweep.names.get(folder, folder.name)}"
    prefix = f"perfed: {label}: " if together else ""
    if not alone:
        _tell(f"perfed: {label}" + ": begins" * together)
    config = None
    try:
        config = parse(cfg)
        result = train.run(config, folder, quiet=together)
        untracked = ""
        if result.status == "finished before" and config.tracker.name != _tracked(result.folder):
            untracked = f" (nothing goes to {config.tracker.name}: the run is over; force=true runs it again)"
        told = _tell(f"{prefix}{result.outcome}: {from_here(result.folder)}{untracked}" + (f"\n\n{result.table}" if alone else ""))
        return Outcome(DONE if told else FAILED, "" if told else "its end could not be printed")
    except results.Held as error:
        return Outcome(_complain(f"{label}: {error}" if together else str(error), HELD), "held by another process")
    except UserError as error:
        _complain(f"{label}: {error}" if together else str(error), FAILED)
        outcome = Outcome(FAILED, str(error))
    except (Exception, SystemExit) as error:  # SystemExit: a user's own code that ends the process
        said, who = f"{type(error).__name__}: {error}", f"{label}: " if together else ""
        _complain(f"{who}{folder.name}: failed with {said}; the traceback is in {from_here(folder) / 'status.json'}", FAILED)
        _keep(folder, traceback.format_exc())
        outcome = Outcome(FAILED, said)
    if sweep is not None and config is not None and config.fail_fast:
        sweep.halt(f"fail_fast=true, and {label.partition(':')[0]} failed")
    return outcome


def _keep(folder: Path, text: str) -> None:
    """The traceback of a job that failed before its run had its folder (``train.run`` keeps that of one which failed later)."""
    from perfed import results

    last = text.rstrip().splitlines()[-1]
    if str((results.read_status(folder) or {}).get("traceback", "")).rstrip().endswith(last):
        return
    with suppress(results.Held, UserError), results.Claim(folder), results.open_log(folder) as log:
        log.write(text)
        results.write_status(folder, "FAILED", traceback=text)


@contextmanager
def _sigterm() -> Iterator[None]:
    def handler(number, frame):
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
