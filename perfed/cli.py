"""The command ``perfed``: flags, the front door, Hydra's launcher, exit codes.

Nothing is launched and no folder made while anything is wrong with any job: the command line is read and every cell
composed and parsed (:mod:`perfed.frontdoor`), and its data, partition, model and device are tried (``perfed.prepare``).
Hydra then starts the jobs, with the launcher that the user chose, and a sweep ends with one table.

Exit codes: 0 done, finished before, or diverged (a result); 1 refused or a job failed; 75 another process holds the run;
130 / 143 ended by SIGINT / SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from omegaconf import DictConfig

from perfed.config import conf_dir, parse
from perfed.errors import UserError
from perfed.frontdoor import Cell, Command, Composer, FrontDoor, InJob, Refused, compose

__all__ = ["compose", "main"]

DONE, FAILED, HELD = 0, 1, 75
_PASSED_ON = ("hydra_help", "info", "shell_completion", "experimental_rerun")

_codes: dict[Path, int] = {}
"""Exit code of each job of this process by folder. A launcher that starts other processes leaves it empty."""

_names: dict[Path, str] = {}
"""How a job of a sweep is announced, by folder: ``3 of 8: tau=4``."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, as an exception, so that a run can store its status."""

    number = signal.SIGTERM


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: the process's own) and return the exit code. Never raises for the user's mistakes."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        with _sigterm():
            return _main(argv)
    except UserError as error:
        return _complain(str(error), FAILED)
    except KeyboardInterrupt as error:
        number = signal.Signals(getattr(error, "number", signal.SIGINT))
        return _complain(f"ended by {number.name}", 128 + number)
    except BrokenPipeError:  # `perfed --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _complain(text: str, code: int) -> int:
    print(f"perfed: {' '.join(text.split())}", file=sys.stderr, flush=True)
    return code


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
    return _jobs(command, args)


def version() -> str:
    """Of the installed package, else of the checkout."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("perfed")
    except PackageNotFoundError:
        import tomllib

        project = conf_dir().parent / "pyproject.toml"
        return tomllib.loads(project.read_text())["project"]["version"] if project.is_file() else "unknown"


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


def _jobs(command: Command, args: argparse.Namespace) -> int:
    from perfed import prepare

    cells = command.cells
    for number, cell in enumerate(cells):
        try:
            if not _finished(cell):
                prepare.prepare(cell.config)
        except UserError as error:
            if len(cells) == 1:
                raise
            raise InJob(error, number, len(cells), cell.overrides) from error
    _names.clear()
    if command.multirun:
        same = set.intersection(*(set(cell.overrides) for cell in cells)) if len(cells) > 1 else set()
        for number, cell in enumerate(cells):
            _names[cell.folder] = f"{number + 1} of {len(cells)}: {' '.join(text for text in cell.overrides if text not in same)}"
    if command.multirun:
        print(f"perfed: {len(cells)} job{'s' * (len(cells) != 1)}", flush=True)
    if any(cell.config.plan for cell in cells):
        for cell in cells:
            if command.multirun:
                print(f"\nperfed: job {_names[cell.folder]}")
            print(prepare.plan(cell.config), flush=True)
        return DONE
    _codes.clear()
    code = DONE
    try:
        code = _hydra([*command.argv, *(["--multirun"] if command.multirun else [])], args)
    finally:
        if command.multirun:
            for root in {cell.folder.parent for cell in cells}:
                (root / "multirun.yaml").unlink(missing_ok=True)  # of Hydra's sweeper
            _closing_table(list(dict.fromkeys(cell.folder for cell in cells)))
    codes = [code, *(_code(cell.folder) for cell in cells)]
    return next((code for code in (FAILED, HELD) if code in codes), DONE)


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
    return studies.main(config.study.name, Context(config, tuple(words), compose))


def _finished(cell: Cell) -> bool:
    """Nothing is left to do for the job but to show its table. Raises UserError where another run has its folder."""
    from perfed.results import check_identity, read_status

    check_identity(cell.folder, cell.hash)
    if cell.config.plan or cell.config.force:
        return False
    return (read_status(cell.folder) or {}).get("status") in ("DONE", "DIVERGED")


def _code(folder: Path) -> int:
    """From this process, else from what the job left in its folder."""
    from perfed.results import read_status

    if folder in _codes:
        return _codes[folder]
    return DONE if (read_status(folder) or {}).get("status") in ("DONE", "DIVERGED") else FAILED


def _closing_table(folders: Sequence[Path]) -> None:
    from perfed import results, tables

    runs = []
    for folder in folders:
        with suppress(UserError):
            runs.append(results.load(folder))
    if runs:
        print(f"\n{tables.plain(tables.sweep_table(runs))}", flush=True)


def _hydra(argv: Sequence[str], args: argparse.Namespace) -> int:
    """Let Hydra act on ``argv``; its exit code."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    decorated = hydra.main(config_path=str(conf_dir()), config_name=args.config_name or "config", version_base="1.3")(_job)
    before, sys.argv = sys.argv, ["perfed", *argv]
    GlobalHydra.instance().clear()
    try:
        decorated()
    except SystemExit as end:
        return DONE if not end.code else FAILED
    finally:
        sys.argv = before
    return DONE


def _job(cfg: DictConfig) -> None:
    """One job, as Hydra calls it: never raises but for signals, so the other jobs of a sweep go on."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from perfed import results, train

    job = HydraConfig.get()
    folder = Path(job.runtime.output_dir)
    alone = job.mode != RunMode.MULTIRUN
    if not alone:
        name = _names.get(folder) or f"{job.job.num + 1}: {' '.join(job.overrides.task)}"
        print(f"perfed: job {name}", flush=True)
    code = FAILED
    try:
        result = train.run(parse(cfg), folder)
        print(f"{result.status}: {result.folder}" + (f"\n\n{result.table}" if alone else ""), flush=True)
        code = DONE
    except UserError as error:
        _complain(str(error), FAILED)
    except results.Held as error:
        code = _complain(str(error), HELD)
    except Exception as error:
        _complain(f"{folder.name}: failed with {type(error).__name__}: {error}; the traceback is in {folder / 'status.json'}", FAILED)
    finally:
        _codes[folder] = code
        with suppress(OSError):
            folder.rmdir()  # only where nothing was written


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
