"""Trials side by side: configurations that differ in float hyper-parameters alone are trained as lanes of one job.

    groups   which of some configurations can share a job
    train    train a group, score its validation data, and store a record of each trial
    stored   what an earlier job, or a run of the trial's own, has found

Rows of the leading axis are (trial, seed). A row has the partition, the initial model and the draws of its seed, as a run of its own has,
and its own hyper-parameters; a row that diverges disturbs no other. The numbers are those of separate runs up to round-off
(``tests/test_lanes.py``), so a trial leaves a record (``outputs/trials/<name of the run>.json``) and not a run folder. Test data are not
looked at. A method that reads such a value where all lanes are served at once raises, and its trials have to be run one by one.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perfed import results
from perfed.binding import ADAPT_LR, PARTS
from perfed.config import Config, plain
from perfed.device import compiler_works
from perfed.evaluate import Protocol, Scores, validate
from perfed.federate import Federation
from perfed.identity import identity
from perfed.prepare import federation, prepare, resolve
from perfed.summary import primary
from perfed.train import threads

KNOBS = ("alpha", "beta")
"""Root keys that act through a method's fields or through the protocol's step, which are compared themselves."""


class Apart(Exception):
    """Why some configurations cannot share a job: one line."""


@dataclass(frozen=True)
class Record:
    """A trial: accuracy on validation data in [0, 1] by seed, and the round by seed that diverged."""

    validation: dict[int, float]
    diverged: dict[int, int]


def groups(configs: Sequence[Config]) -> list[list[int]]:
    """Positions of configurations that differ in float hyper-parameters alone, group by group, in their order."""
    found: dict[str, list[int]] = {}
    for i, config in enumerate(configs):
        found.setdefault(json.dumps(_rest(config), sort_keys=True), []).append(i)
    return list(found.values())


def _rest(config: Config) -> dict[str, Any]:
    """The configuration without its float hyper-parameters, of which only the place is left."""
    tree = plain(config)
    for key in KNOBS:
        del tree[key]
    for group in PARTS:
        tree[group] = {name: "float" if isinstance(value, float) else value for name, value in tree[group].items()}
    if tree["adapt"]["lr"] is not None:
        tree["adapt"]["lr"] = "float"
    return tree


def varying(configs: Sequence[Config]) -> dict[str, list[float]]:
    """Keys in which the configurations differ -> one number each. Raises Apart where they differ in anything else."""
    if len(groups(configs)) != 1:
        raise Apart("the trials differ in more than float hyper-parameters")
    found: dict[str, list[Any]] = {}
    for group in PARTS:
        options = [vars(getattr(config, group)) for config in configs]
        names = {f.name for f in dataclasses.fields(getattr(configs[0], group))}
        if any(set(option) - names for option in options):
            raise Apart(f"{group} keeps more than its fields")
        found |= {f"{group}.{name}": [option[name] for option in options] for name in options[0]}
    found[ADAPT_LR] = [resolve(config, config.algo).lr for config in configs]
    found = {key: values for key, values in found.items() if any(value != values[0] for value in values)}
    if bad := [key for key, values in found.items() if not all(isinstance(value, float) for value in values)]:
        raise Apart(f"{', '.join(bad)} is not a number in every trial")
    return found


def simulation(configs: Sequence[Config]) -> tuple[Federation, Protocol, Any]:
    """(the simulation of all trials before round 0, the protocol, what was prepared). Rows are trial by trial, seed by seed."""
    own = varying(configs)
    prepared = prepare(configs[0], copies=len(configs))
    if prepared.decision.compiled and compiler_works(prepared.decision.device.type):
        prepared = replace(prepared, decision=replace(prepared.decision, compiled=False))
    for config in configs[1:]:
        config.algo.check(config.engine.dtype)
    return federation(prepared, own), prepared.protocol, prepared


def train(configs: Sequence[Config]) -> list[Record]:
    """Train the trials, store a record of each, and return them. Raises Apart, UserError, or what the method raised."""
    with threads(configs[0].engine.threads):
        fed, protocol, prepared = simulation(configs)
        validate(fed, protocol)  # whatever cannot be done lane by lane is to fail before the training
        while fed.k < configs[0].rounds and not bool((fed.diverged >= 0).all()):
            fed.round()
        scores = validate(fed, protocol)
        known = scores.n_scored > 0
        fed.mark(torch.from_numpy((~np.isfinite(scores.loss).all(axis=(2, 3)) & known).any(axis=1)).to(fed.device))
        found = _records(configs, fed, prepared, scores)
    facts = {"lanes": len(configs), "torch": torch.__version__, "device": fed.device.type}
    facts |= {"backend": fed.backend, "compiled": fed.compiled}
    own = varying(configs)
    for i, (config, record) in enumerate(zip(configs, found, strict=True)):
        who = identity(config)
        path = _path(config, who.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        tried = {"algo": config.algo.name, "values": {key: values[i] for key, values in own.items()}}
        results.write_json(path, {"identity": who.hash, **tried, **dataclasses.asdict(record), **facts})
    return found


def _records(configs: Sequence[Config], fed: Federation, prepared: Any, scores: Scores) -> list[Record]:
    want, seeds = primary(prepared, scores.models), configs[0].seed_values
    j, i = scores.models.index(want["model"]), scores.steps.index(want["steps"])
    diverged = fed.diverged.tolist()
    found = []
    for t in range(len(configs)):
        rows = {seed: t * len(seeds) + s for s, seed in enumerate(seeds)}
        lost = {seed: diverged[row] for seed, row in rows.items() if diverged[row] >= 0}
        means = {
            seed: float(np.nanmean(scores.correct[row, prepared.partitions[s].seen, j, i]))
            for s, (seed, row) in enumerate(rows.items())
            if seed not in lost
        }
        found.append(Record(means, lost))
    return found


def _path(config: Config, name: str) -> Path:
    return config.outputs_path / "trials" / f"{name}.json"


def stored(config: Config) -> Record | None:
    """The record of a trial, or the same from a finished run of its own; None where there is neither."""
    who = identity(config)
    found = results.read_json(_path(config, who.name))
    if found is not None and found.get("identity") == who.hash:
        return Record(*({int(seed): value for seed, value in found[key].items()} for key in ("validation", "diverged")))
    folder = config.outputs_path / who.name
    status = results.read_status(folder)
    if status is None or status["status"] not in ("DONE", "DIVERGED"):
        return None
    results.check_identity(folder, who.hash)
    run = results.load(folder)
    return of_run(run) if run.complete else None


def of_run(run: results.Run) -> Record:
    """The same of a finished run: the primary judged model after the last round."""
    want, last = run.result["primary"], run.rounds[run.rounds["round"] == run.rounds["round"].max()]
    mine = last[(last["model"] == want["model"]) & (last["steps"] == want["steps"]) & last["seen"]]
    diverged = {int(seed): k for seed, k in run.result["diverged"].items()}
    return Record({int(r.seed): float(r.val_accuracy) for r in mine.itertuples() if r.seed not in diverged}, diverged)
