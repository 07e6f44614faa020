"""perfed: personalized federated learning experiments, simulated on one device.

    from perfed import run, load
    result = run("algo=perfedavg_hf", "tau=4")   # the words of the command line
    result.users, result.rounds, result.summary  # DataFrames and result.json
    result.model(seed=0, user=3)                 # a user's model, after the protocol's adaptation
    load("outputs/...")                          # the same of a stored run
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perfed.train import Result

__all__ = ["load", "run"]


def run(*overrides: str, folder: str | None = None) -> Result:
    """Run one experiment, or give the stored one. ``overrides`` are the words of the command line: ``"tau=4"``.

    Raises perfed.errors.UserError for bad input.
    """
    from perfed import cli, train
    from perfed.config import parse
    from perfed.errors import require

    config = parse(cli.compose(list(overrides)))
    require(not config.plan, "plan", config.plan, "false here; perfed.prepare.plan(config) gives the text")
    return train.run(config, folder)


def load(folder: str) -> Result:
    """A finished run as the same object. Raises perfed.errors.UserError where ``folder`` holds none."""
    from pathlib import Path

    from perfed import results, tables, train

    stored = results.finished(folder, "folder")
    return train.Result(Path(folder).expanduser(), "finished before", tables.plain(tables.run_table(stored.result)))
