"""perfed: personalized federated learning experiments, simulated on one device.

    from perfed import run, load
    result = run("algo=perfedavg_hf", "tau=4")   # the words of the command line
    result.users, result.rounds, result.summary  # DataFrames and result.json
    result.model(seed=0, user=3)                 # a user's model, after the protocol's adaptation
    load("outputs/...")                          # the same of a stored run
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own costs an import, and this file is the first of every command
if TYPE_CHECKING:
    from os import PathLike
    from pathlib import Path

    from perfed.frontdoor import Cell
    from perfed.train import Result

__all__ = ["load", "run"]

_HEEDED = ("hydra.run.dir", "hydra.searchpath")


def run(*overrides: str, folder: str | PathLike[str] | None = None) -> Result:
    """Run one experiment, or give the stored one. ``overrides`` are the words of the command line: ``"tau=4"``.

    folder: default that of ``hydra.run.dir``. Raises perfed.errors.UserError for bad input and for what is not one run (a sweep, a
    study), perfed.results.Held when another process holds the folder.
    """
    from perfed import train
    from perfed.errors import require

    home = None if folder is None else _path(folder)
    cell = _cell(overrides)
    require(not cell.config.plan, "plan", cell.config.plan, "false here; perfed.prepare.plan(config) gives the text")
    twice = home is not None and any(word.lstrip("+").startswith("hydra.run.dir=") for word in overrides)
    require(not twice, "folder", folder, "not beside hydra.run.dir: give one of the two")
    return train.run(cell.config, home or cell.folder)


def load(folder: str | PathLike[str]) -> Result:
    """A finished run as the same object, its status DONE or DIVERGED. Raises perfed.errors.UserError where ``folder`` holds none."""
    from perfed import results, tables, train

    home = _path(folder)
    stored = results.finished(home, "folder")
    return train.Result(home, stored.status["status"], tables.plain(tables.run_table(stored.result)))


def _path(folder: object) -> Path:
    """Absolute, with ``~`` expanded. Raises UserError for what is no path."""
    from os import PathLike

    from perfed.config import absolute
    from perfed.errors import require

    require(isinstance(folder, (str, PathLike)) and bool(str(folder).strip()), "folder", folder, "a folder, as a text or a Path")
    return absolute(folder)


def _cell(words: tuple[str, ...]) -> Cell:
    """The one run that the words ask for, and its folder. Raises UserError."""
    from shlex import join

    from perfed.errors import UserError, require
    from perfed.frontdoor import Composer, FrontDoor, Refused

    for word in words:
        require(isinstance(word, str), "run", word, 'words of the command line, each a text, such as run("tau=4")')
        if word.startswith("-"):
            raise Refused(word, "no flags here; a sweep is a Python loop over run(...), or made on the command line")
    door = FrontDoor(Composer(), words)
    for override in door.given:
        if override.is_sweep_override():
            raise Refused(override.input_line, "one value here; a sweep is a Python loop over run(...); a list is written [a,b]")
        if override.is_hydra_override() and override.key_or_group not in _HEEDED:
            key, value = override.key_or_group, override.get_value_string()
            raise UserError(key, value, f"for the command line alone; of Hydra's own keys {' and '.join(_HEEDED)} count here")
    command = door.command(False)
    again = f"use the command line: python -m perfed {join(words)}"
    require(not command.multirun, "hydra.mode", "MULTIRUN", f"a sweep is no single run; {again}")
    name = command.cells[0].config.study.name
    require(name is None, "study.name", name, f"a study is no single run; {again}")
    return command.cells[0]
