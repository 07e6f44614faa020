"""``run(config) -> Result``: a whole experiment, in plain Python, usable from a notebook.

    run       claim a folder, train, evaluate, write the folder (see ``perfed.results``)
    rebuild   the final state of a finished run, ready to be judged again
"""

from __future__ import annotations

import shutil
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor

from perfed import checkpoint, donors, results, resume, stats, tables
from perfed.config import Config, absolute
from perfed.device import compiler_works
from perfed.errors import UserError, require
from perfed.evaluate import Scores, adapted_models, judge, validate
from perfed.federate import Federation
from perfed.identity import identity
from perfed.prepare import federation, only, prepare
from perfed.progress import Progress
from perfed.resume import Start
from perfed.signals import Interrupted, Signals
from perfed.summary import Prepared, provenance, summary, write_users
from perfed.trackers import Tracked, Tracking
from perfed.types import Params


@dataclass
class Result:
    """A finished run. ``status``: DONE, DIVERGED, or "finished before" when :func:`run` computed nothing. ``folder`` is made absolute."""

    folder: Path
    status: str
    table: str
    _cache: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self):
        self.folder = Path(self.folder).absolute()  # the caller may move to another working folder

    @property
    def outcome(self) -> str:
        """``status`` as the terminal tells it: "finished before (DIVERGED)" where the stored run had diverged."""
        return results.finished_before(self.stored.status["status"]) if self.status == "finished before" else self.status

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

        seed: one of ``summary["seeds"]``; user in 0 .. n-1; model: "global" or "personal", as the method has them. Raises UserError
        for any other, for a seed that diverged, and where the adaptation diverges.
        """
        if "fed" not in self._cache:
            self._cache["fed"] = rebuild(self.folder)
        fed, prepared = self._cache["fed"]
        primary = self.summary["primary"]
        with threads(prepared.config.engine.threads):
            return user_model(fed, prepared, seed, user, model or primary["model"], primary["steps"] if steps is None else steps)


@dataclass(frozen=True)
class UserModel:
    """Parameters of one user's model. Call it with raw inputs (as stored in the data set) [B, ...] for scores [B, C].

    The call raises UserError for what has another shape.
    """

    params: Params
    _pool: Any = field(repr=False)
    _apply: Any = field(repr=False)

    def __call__(self, x: np.ndarray | Tensor) -> Tensor:
        shape = tuple(self._pool.x.shape[1:])
        wanted = f"inputs of shape [{', '.join(map(str, ('B', *shape)))}], as stored in the data set"
        try:
            raw = torch.as_tensor(x)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError("x", x, f"must be numbers: {wanted}") from error
        require(raw.ndim == 1 + len(shape) and raw.shape[1:] == shape, "x", f"[{', '.join(map(str, raw.shape))}]", wanted)
        scaled = raw.to(self._pool.scale) * self._pool.scale
        return self._apply(self.params, scaled if self._pool.shift is None else scaled + self._pool.shift)


# ---------------------------------------------------------------- a run


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
    unless progress=lines was asked for. Raises UserError before anything is written when the configuration does not fit;
    results.Held when another process holds the folder. A run that was interrupted, or killed, goes on from its last stored state
    when it is started again, and one that differs from a stored run in rounds or seeds computes only what is new.
    """
    started = time.perf_counter()
    who = identity(config)
    folder = Path(folder) if folder is not None else config.outputs_path / who.name
    results.check_identity(folder, who.hash)
    before = _finished(folder) if not config.force else None
    if before is not None:
        return before
    prepared = prepare(config)
    config.tracker.check()
    with results.Claim(folder), threads(config.engine.threads), Signals() as signals:
        before = _finished(folder) if not config.force else None  # another process may have ended it meanwhile
        if before is not None:
            return before
        with results.open_log(folder) as log, Tracking(config.tracker, lambda: signals.number is not None) as tracker:
            try:
                if config.force:
                    for stale in folder.glob("eval-*"):
                        shutil.rmtree(stale)
                result = _run(prepared, folder, log, signals, started, tracker, quiet)
            except UserError:
                raise
            except Exception as error:
                text, short = traceback.format_exc(), f"{type(error).__name__}: {' '.join(str(error).split())}"
                log.write(text)
                results.write_status(folder, "FAILED", identity=who.hash, error=short, traceback=text)
                raise
        signals.check()  # a signal that came while the end was being written still ends a sweep
        return result


def _finished(folder: Path) -> Result | None:
    status = results.read_status(folder)
    if status is None or status["status"] not in ("DONE", "DIVERGED"):
        return None
    stored = results.load(folder)
    lost = next((name for name in ("rounds.csv", "users.csv") if not (folder / name).is_file()), None)
    require(lost is None, "run", folder, f"{lost} is missing; force=true computes the run again")
    return Result(folder, "finished before", tables.plain(tables.run_table(stored.result))) if stored.complete else None


def _run(
    prepared: Prepared, folder: Path, log: TextIO, signals: Signals, started: float, tracker: Tracking, quiet: bool
) -> Result:
    config, who = prepared.config, prepared.identity
    start = _compilable(resume.begin(prepared, folder))
    if start.stored is None and not config.force:
        start = donors.look(start, folder)
    signals.check()  # a signal reaches the compiler's processes too: what they failed at says nothing
    prepared = start.prepared
    results.write_text(folder / "config.yaml", stored_yaml(config))
    results.write_status(folder, "RUNNING", identity=who.hash)
    if config.force:
        resume.clear(folder, checkpoint.FINAL)
    for seed, partition in zip(config.seed_values, prepared.partitions, strict=True):
        partition.save(folder / f"partition-seed{seed}.npz", prepared.dataset.fingerprint)
    mode = "off" if quiet and config.progress != "lines" else config.progress
    progress = Progress(config.rounds, mode, log, (*prepared.decision.notes, *start.lines))
    now = only(prepared, start.seeds)  # what is computed now: all seeds, or those that a donor lacks
    fed = federation(now)
    rows: list[dict[str, Any]] = []
    clock = {"prepare": time.perf_counter() - started, "compile": 0.0, "train": 0.0, "evaluate": 0.0, "checkpoint": 0.0}
    if start.stored is not None:
        rows = start.restore(fed, folder)
        clock = start.clock | {name: value + start.clock.get(name, 0.0) for name, value in clock.items()}
    results.write_json(folder / "provenance.json", provenance(prepared) | start.origin)
    tracker.begin(Tracked(folder, config.outputs_path, who.hash, tables.flat(config.as_dict()), start.stored is None), progress.say)
    if start.donor is None:  # else seeds are missing yet: what was measured is told when all are together
        tracker.scored(rows, clock, fed.diverged.tolist())
    warm = not prepared.decision.compiled
    scores: Scores | None = None
    whole = fed.snapshot(), len(rows)
    schedule = checkpoint.Schedule(config.checkpoint_every, checkpoint.size(fed))
    try:
        while fed.k < config.rounds and (start.donor is not None or not bool((fed.diverged >= 0).all())):
            whole = fed.snapshot(), len(rows)
            signals.check()
            if schedule.due():
                _keep(folder, fed, rows, clock, start, progress, schedule)
                signals.check()
            tick = time.perf_counter()
            with signals.cuttable():
                fed.round()
                if fed.device.type == "cuda":
                    torch.cuda.synchronize(fed.device)
                if not warm and fed.warning:
                    signals.check()  # a compiler that the signal reached too: this round is undone
                    progress.say(start.not_compiled(fed.warning))
                    results.write_json(folder / "provenance.json", provenance(prepared) | start.origin)
                clock["train" if warm else "compile"] += time.perf_counter() - tick
                warm = True
                if fed.k % config.eval_every == 0 and fed.k < config.rounds:
                    clock[f"train until round {fed.k}"] = clock["train"]
                    scores = _measure(fed, now, rows, clock)
                    progress.scored(_headline(rows, scores))
                    if start.donor is None:
                        tracker.scored(rows, clock, fed.diverged.tolist())
            progress.round(fed.k)
        rows[:] = [row for row in rows if scores is not None or row["round"] != fed.k]  # an evaluation whose scores are not at hand
        whole = fed.snapshot(), len(rows)
        signals.check()
        if fed.k > start.begun and schedule.affordable():
            _keep(folder, fed, rows, clock, start, progress, schedule)
        if start.donor is not None:
            fed, rows, clock = donors.joined(start, fed, rows, clock)
            rows = [row for row in rows if row["round"] != fed.k]  # all seeds are scored together
            start.donor, start.seeds, now, scores = None, config.seed_values, prepared, None
            whole = fed.snapshot(), len(rows)
        with signals.cuttable():
            if scores is None or rows[-1]["round"] != fed.k:
                clock[f"train until round {fed.k}"] = clock["train"]
                scores = _measure(fed, now, rows, clock)
                progress.scored(_headline(rows, scores))
                tracker.scored(rows, clock, fed.diverged.tolist())
            result = _write(folder, fed, scores, rows, clock, start, progress)
            tracker.ended(result.status, result.summary, folder)
            return result
    except Interrupted:
        signals.ignore()
        fed.go_back(whole[0])
        del rows[whole[1] :]
        _keep(folder, fed, rows, clock, start, progress, schedule)
        with suppress(OSError):  # a full disk: RUNNING without a live process reads as INTERRUPTED
            _write_rounds(folder, rows)
            results.write_status(folder, "INTERRUPTED", identity=who.hash, round=fed.k)
        again = "the same command without force=true" if config.force else "the same command"
        progress.say(f"interrupted after round {fed.k} of {config.rounds}; {again} goes on from there")
        raise
    finally:
        progress.close()


def _compilable(start: Start) -> Start:
    """The same without compiling where this machine cannot; refused where the stored state was computed by compiled steps."""
    decision = start.prepared.decision
    if not decision.compiled or not (problem := compiler_works(decision.device.type)):
        return start
    if start.binding:
        raise resume.refusal("compiled", False, True, f" (now: {problem})")
    notes = (*decision.notes, f"warning: not compiled: {problem}")
    return replace(start, prepared=replace(start.prepared, decision=replace(decision, compiled=False, notes=notes)))


def _keep(
    folder: Path,
    fed: Federation,
    rows: list[dict[str, Any]],
    clock: dict[str, float],
    start: Start,
    progress: Progress,
    schedule: checkpoint.Schedule,
) -> None:
    """Store a checkpoint. A disk that does not take it costs a warning, not the run."""
    tick = schedule.now()
    stored = checkpoint.content(fed, start.prepared.identity.hash, rows, **start.marks(fed), clock=clock)
    try:
        checkpoint.save(folder / checkpoint.STATE, stored, keep_as=folder / checkpoint.PREVIOUS)
        progress.note(f"stored the state after round {fed.k}")
    except (OSError, RuntimeError) as error:  # torch's own writer raises the second
        progress.say(f"warning: the state after round {fed.k} could not be stored: {' '.join(str(error).split())}")
    clock["checkpoint"] += schedule.saved(tick)


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
    for s, seed in enumerate(prepared.seeds):
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
    folder: Path,
    fed: Federation,
    scores: Scores,
    rows: list[dict[str, Any]],
    clock: dict[str, float],
    start: Start,
    progress: Progress,
) -> Result:
    """Everything a finished run leaves behind: the final state first, from which the rest can be made again; the status last."""
    from perfed.report import write_report

    progress.close()
    prepared = start.prepared
    checkpoint.save(folder / checkpoint.FINAL, checkpoint.content(fed, prepared.identity.hash, rows, **start.marks(fed)))
    timing = [{"what": name, "value": round(value, 3), "unit": "s"} for name, value in clock.items()]
    timing.append({"what": "peak memory", "value": round(_peak_memory(fed.device), 1), "unit": "MiB"})
    results.write_csv(folder / "timing.csv", timing, ["what", "value", "unit"])
    result = summary(prepared, fed, scores, rows)
    _write_rounds(folder, rows)
    write_users(folder, prepared, scores, fed.times_sampled)
    results.write_json(folder / "result.json", result)
    for line in write_report(folder, prepared.config.pictures):
        progress.say("warning: " + line)
    resume.clear(folder)
    status = "DIVERGED" if result["diverged"] else "DONE"
    results.write_status(folder, status, identity=prepared.identity.hash, rounds=fed.k, family=donors.family(prepared))
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
    found = checkpoint.restore(folder / checkpoint.FINAL, fed, stored.result["identity"])
    require(found, "run", folder, "final.pt is missing")
    return fed, prepared


def user_model(fed: Federation, prepared: Prepared, seed: int, user: int, model: str, steps: int) -> UserModel:
    """See :meth:`Result.model`."""
    seeds = list(prepared.config.seed_values)
    require(isinstance(seed, (int, np.integer)) and seed in seeds, "seed", seed, f"one of {seeds}")
    ended = fed.diverged.tolist()
    k, others = ended[seeds.index(seed)], [other for other, k in zip(seeds, ended, strict=True) if k < 0]
    require(k < 0, "seed", seed, f"has no model, it diverged in round {k}" + (f"; one of {others}" if others else ""))
    last = prepared.config.n - 1
    require(isinstance(user, (int, np.integer)) and 0 <= user <= last, "user", user, f"an integer from 0 to {last}")
    require(isinstance(steps, (int, np.integer)) and steps >= 0, "steps", steps, "an integer >= 0")
    models = adapted_models(fed, prepared.protocol, seeds.index(seed), int(user), int(steps))
    require(model in models, "model", model, f"one of {', '.join(models)}")
    finite = all(bool(torch.isfinite(value).all()) for value in models[model].values())
    require(finite, "steps", steps, f"fewer steps: the adaptation of user {user} diverges")
    return UserModel(models[model], fed.pool, fed.task.model.apply)
