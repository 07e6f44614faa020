"""``run(config) -> Result``: a whole experiment, in plain Python, usable from a notebook.

    run       claim a folder, train, evaluate, write the folder (see ``perfed.results``)
    rebuild   the final state of a finished run, ready to be judged again
"""

from __future__ import annotations

import shutil
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor

from perfed import checkpoint, results, stats, tables
from perfed.config import Config, absolute
from perfed.device import compiler_works
from perfed.errors import UserError, require
from perfed.evaluate import Scores, adapted_models, judge, validate
from perfed.federate import Federation
from perfed.identity import identity
from perfed.prepare import federation, prepare
from perfed.progress import Progress
from perfed.summary import Prepared, provenance, summary, user_rows
from perfed.types import Params


@dataclass
class Result:
    """A finished run. ``status``: DONE, DIVERGED, or "finished before" when the folder already held it."""

    folder: Path
    status: str
    table: str
    _cache: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def stored(self) -> results.Run:
        """The run folder."""
        if "run" not in self._cache:
            self._cache["run"] = results.load(self.folder)
        return self._cache["run"]

    @property
    def rounds(self):
        """rounds.csv as a DataFrame: one row per seed, evaluated round, judged model, steps and kind of user."""
        return self.stored.rounds

    @property
    def users(self):
        """users.csv as a DataFrame: one row per seed, user, judged model and steps, of the final evaluation."""
        return self.stored.users

    @property
    def summary(self) -> dict[str, Any]:
        """result.json."""
        assert self.stored.result is not None
        return self.stored.result

    def model(self, seed: int, user: int, model: str | None = None, steps: int | None = None) -> UserModel:
        """The judged model of a user after ``steps`` adaptation steps (default: the primary ones of the run).

        seed: one of ``summary["seeds"]``; user in 0 .. n-1; model: "global" or "personal", as the method has them.
        """
        if "fed" not in self._cache:
            self._cache["fed"] = rebuild(self.folder)
        fed, prepared = self._cache["fed"]
        primary = self.summary["primary"]
        with threads(prepared.config.engine.threads):
            return user_model(fed, prepared, seed, user, model or primary["model"], primary["steps"] if steps is None else steps)


@dataclass(frozen=True)
class UserModel:
    """Parameters of one user's model. Call it with raw inputs (as stored in the data set) [B, ...] for scores [B, C]."""

    params: Params
    _pool: Any = field(repr=False)
    _apply: Any = field(repr=False)

    def __call__(self, x: np.ndarray | Tensor) -> Tensor:
        raw = torch.as_tensor(x)
        scaled = raw.to(self._pool.scale) * self._pool.scale
        return self._apply(self.params, scaled if self._pool.shift is None else scaled + self._pool.shift)


# ---------------------------------------------------------------- a run


class Interrupted(KeyboardInterrupt):
    """A signal ended the run between two rounds; everything computed was kept. ``number``: the signal."""

    def __init__(self, number: int):
        self.number = number
        super().__init__(f"signal {number}")


class _Signals:
    """SIGINT and SIGTERM wait for the end of the round; a second one does not."""

    def __init__(self):
        self.number: int | None = None
        self._old: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._caught) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _caught(self, number: int, frame: Any) -> None:
        if self.number is not None:
            raise Interrupted(number)
        self.number = number

    def ignore(self) -> None:
        """From now on signals are too late: what was computed is being stored."""
        for number in self._old:
            signal.signal(number, signal.SIG_IGN)

    def check(self) -> None:
        if self.number is not None:
            raise Interrupted(self.number)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with so many CPU threads."""
    old = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(old)


def run(config: Config, folder: Path | str | None = None, quiet: bool = False) -> Result:
    """Run an experiment, or show the stored one when ``folder`` already holds it.

    folder: default ``outputs/<readable>-<hash12>``. quiet: one of several runs on a terminal; progress goes to the log alone,
    unless progress=lines was asked for. Raises UserError before anything is written when the configuration
    does not fit; results.Held when another process holds the folder. An interrupted run keeps its state and its numbers, and
    goes on from there when it is started again.
    """
    started = time.perf_counter()
    who = identity(config)
    folder = Path(folder) if folder is not None else config.outputs_path / who.name
    results.check_identity(folder, who.hash)
    before = _finished(folder) if not config.force else None
    if before is not None:
        return before
    prepared = prepare(config)
    with results.Claim(folder), threads(config.engine.threads), _Signals() as signals:
        before = _finished(folder) if not config.force else None  # another process may have ended it meanwhile
        if before is not None:
            return before
        with results.open_log(folder) as log:
            try:
                if config.force:
                    for stale in folder.glob("eval-*"):
                        shutil.rmtree(stale)
                result = _run(prepared, folder, log, signals, started, quiet)
            except UserError:
                raise
            except Exception:
                text = traceback.format_exc()
                log.write(text)
                results.write_status(folder, "FAILED", identity=who.hash, traceback=text)
                raise
        signals.check()  # a signal that came while the end was being written still ends a sweep
        return result


def _finished(folder: Path) -> Result | None:
    status = results.read_status(folder)
    if status is None or status["status"] not in ("DONE", "DIVERGED"):
        return None
    stored = results.load(folder)
    return Result(folder, "finished before", tables.plain(tables.run_table(stored.result))) if stored.complete else None


def _run(prepared: Prepared, folder: Path, log: TextIO, signals: _Signals, started: float, quiet: bool) -> Result:
    if prepared.decision.compiled and (problem := compiler_works(prepared.decision.device.type)):
        notes = (*prepared.decision.notes, f"warning: not compiled: {problem}")
        prepared = replace(prepared, decision=replace(prepared.decision, compiled=False, notes=notes))
    config, who = prepared.config, prepared.identity
    results.write_text(folder / "config.yaml", stored_yaml(config))
    results.write_status(folder, "RUNNING", identity=who.hash)
    for seed, partition in zip(config.seed_values, prepared.partitions, strict=True):
        partition.save(folder / f"partition-seed{seed}.npz")
    results.write_json(folder / "provenance.json", provenance(prepared))
    mode = "off" if quiet and config.progress != "lines" else config.progress
    progress = Progress(config.rounds, mode, log, prepared.decision.notes)
    fed = federation(prepared)
    rows: list[dict[str, Any]] = []
    clock = {"prepare": time.perf_counter() - started, "compile": 0.0, "train": 0.0, "evaluate": 0.0}
    stored = None if config.force else checkpoint.restore(folder / "state.pt", fed, who.hash)
    if stored is not None:
        rows = stored[0]
        clock = stored[1] | {name: value + stored[1][name] for name, value in clock.items()}
        progress.say(f"resumed after round {fed.k}")
    warm = not prepared.decision.compiled
    scores: Scores | None = None
    whole = fed.snapshot(), len(rows)
    try:
        while fed.k < config.rounds and not bool((fed.diverged >= 0).all()):
            whole = fed.snapshot(), len(rows)
            signals.check()
            tick = time.perf_counter()
            fed.round()
            if fed.device.type == "cuda":
                torch.cuda.synchronize(fed.device)
            clock["train" if warm else "compile"] += time.perf_counter() - tick
            if not warm and fed.warning:
                progress.say(fed.warning)
            warm = True
            if fed.k % config.eval_every == 0 or fed.k == config.rounds:
                clock[f"train until round {fed.k}"] = clock["train"]
                scores = _measure(fed, prepared, rows, clock)
                progress.scored(_headline(rows, scores))
            progress.round(fed.k)
        whole = fed.snapshot(), len(rows)
        signals.check()
        if scores is None or rows[-1]["round"] != fed.k:
            rows[:] = [row for row in rows if row["round"] != fed.k]  # stored by a run that was interrupted after its last round
            scores = _measure(fed, prepared, rows, clock)
        return _write(prepared, folder, fed, scores, rows, clock, progress)
    except Interrupted:
        signals.ignore()
        fed.go_back(whole[0])
        del rows[whole[1] :]
        checkpoint.save(folder / "state.pt", fed, who.hash, rows, clock)
        _write_rounds(folder, rows)
        results.write_status(folder, "INTERRUPTED", identity=who.hash, round=fed.k)
        again = "the same command without force=true" if config.force else "the same command"
        progress.say(f"interrupted after round {fed.k} of {config.rounds}; {again} goes on from there")
        raise
    finally:
        progress.close()


def stored_yaml(config: Config) -> str:
    from omegaconf import OmegaConf

    stored = config.as_dict()
    for group in ("dataset", "partition", "algo"):  # the run folder may be opened from anywhere
        if stored[group].get("path"):
            stored[group]["path"] = str(absolute(stored[group]["path"]))
    return OmegaConf.to_yaml(OmegaConf.create(stored))


def _measure(fed: Federation, prepared: Prepared, rows: list[dict[str, Any]], clock: dict[str, float]) -> Scores:
    """Evaluate, and add the rows of this round."""
    tick = time.perf_counter()
    scores = judge(fed, prepared.protocol)
    measured = fed.diagnose()
    held = validate(fed, prepared.protocol).correct if prepared.config.split.val > 0 else None
    for s, seed in enumerate(prepared.config.seed_values):
        known = prepared.partitions[s].seen
        cost = fed.costs[s]
        for seen in (True, False) if not known.all() else (True,):
            who = known == seen
            for j, model in enumerate(scores.models):
                for i, steps in enumerate(scores.steps):
                    accuracy = scores.correct[s, who, j, i]
                    rows.append(
                        {
                            "seed": seed,
                            "round": fed.k,
                            "model": model,
                            "steps": steps,
                            "seen": seen,
                            "accuracy": float(accuracy.mean()),
                            "loss": float(scores.loss[s, who, j, i].mean()),
                            "worst10": float(stats.worst(accuracy)),
                            "val_accuracy": None if held is None else _mean(held[s, who, j, i]),
                            "grad_evals": cost.grads,
                            "hvps": cost.hvps,
                            "floats_down": cost.floats_down,
                            "floats_up": cost.floats_up,
                            **measured[s],
                        }
                    )
    clock["evaluate"] += time.perf_counter() - tick
    return scores


def _mean(values: np.ndarray) -> float | None:
    """Mean of the numbers among them; None where there is none."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def _headline(rows: list[dict[str, Any]], scores: Scores) -> str:
    """``accuracy 56.1 -> 92.0 %``: before and after adaptation, mean over seeds, of the last evaluation."""
    last = [r for r in rows if r["round"] == rows[-1]["round"] and r["seen"] and r["model"] == scores.models[0]]
    means = [100 * float(np.mean([r["accuracy"] for r in last if r["steps"] == steps])) for steps in (0, max(scores.steps))]
    return "accuracy " + " -> ".join(f"{m:.1f}" for m in dict.fromkeys(means)) + " %"


def _write_rounds(folder: Path, rows: list[dict[str, Any]]) -> None:
    """rounds.csv; a method's own diagnostics follow the columns that all methods have."""
    results.write_csv(folder / "rounds.csv", rows, list(dict.fromkeys([*results.ROUNDS, *(name for row in rows for name in row)])))


def _write(
    prepared: Prepared,
    folder: Path,
    fed: Federation,
    scores: Scores,
    rows: list[dict[str, Any]],
    clock: dict[str, float],
    progress: Progress,
) -> Result:
    """Everything a finished run leaves behind; the status comes last."""
    from perfed.report import write_report

    progress.close()
    result = summary(prepared, fed, scores, rows)
    _write_rounds(folder, rows)
    results.write_csv(folder / "users.csv", user_rows(prepared, scores, fed.times_sampled), results.USERS)
    checkpoint.save(folder / "final.pt", fed, prepared.identity.hash, [], {})
    results.write_json(folder / "result.json", result)
    peak = _peak_memory(fed.device)
    timing = [{"what": name, "value": round(value, 3), "unit": "s"} for name, value in clock.items()]
    timing.append({"what": "peak memory", "value": round(peak, 1), "unit": "MiB"})
    results.write_csv(folder / "timing.csv", timing, ["what", "value", "unit"])
    for line in write_report(folder, prepared.config.pictures):
        progress.say("warning: " + line)
    (folder / "state.pt").unlink(missing_ok=True)
    status = "DIVERGED" if result["diverged"] else "DONE"
    results.write_status(folder, status, identity=prepared.identity.hash, rounds=fed.k)
    return Result(folder, status, tables.plain(tables.run_table(result)))


def _peak_memory(device: torch.device) -> float:
    """MiB: of the GPU where there is one, else of this process since its start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


# ---------------------------------------------------------------- a finished run


def stored_config(folder: Path) -> Config:
    """The configuration of a run folder. Plugins are imported."""
    from perfed.config import parse

    return parse(results.load(folder).config)


def rebuild(folder: Path | str, config: Config | None = None) -> tuple[Federation, Prepared]:
    """The final state of a finished run. ``config``: its own with another protocol or device.

    Raises UserError where the run has not finished, or its data have changed since.
    """
    folder = Path(folder)
    stored = results.finished(folder)
    own = stored_config(folder)
    prepared = prepare(config or own)
    changed = prepared.dataset.fingerprint != stored.result["data"]
    require(not changed, "run", folder, "the data set is not the one that this run was made with")
    digests = {str(s): p.digest() for s, p in zip(own.seed_values, prepared.partitions, strict=True)}
    require(digests == stored.result["partition_digest"], "run", folder, "the split of the data is not the one of this run")
    fed = federation(prepared)
    found = checkpoint.restore(folder / "final.pt", fed, stored.result["identity"])
    require(found is not None, "run", folder, "final.pt is missing")
    return fed, prepared


def user_model(fed: Federation, prepared: Prepared, seed: int, user: int, model: str, steps: int) -> UserModel:
    """See :meth:`Result.model`."""
    seeds = list(prepared.config.seed_values)
    require(seed in seeds, "seed", seed, f"one of {seeds}")
    require(0 <= user < prepared.config.n, "user", user, f"an integer from 0 to {prepared.config.n - 1}")
    require(steps >= 0, "steps", steps, "an integer >= 0")
    models = adapted_models(fed, prepared.protocol, seeds.index(seed), user, steps)
    require(model in models, "model", model, f"one of {', '.join(models)}")
    return UserModel(models[model], fed.pool, fed.task.model.apply)
