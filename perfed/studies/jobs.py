"""Runs that belong together: a study composes many configurations and trains them, in several processes if there are cores.

Every run has its own folder, so a study that is interrupted and started again trains only what is missing.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfed import sweep
from perfed.config import Config, parse
from perfed.errors import UserError
from perfed.folders import make

Compose = Callable[[Sequence[str]], Any]
"""Words of the command line -> a composed tree (``perfed.frontdoor.compose``)."""


@dataclass(frozen=True)
class Context:
    """What a study gets: the configuration of its command, the user's own words, and the way to compose others."""

    config: Config
    words: tuple[str, ...]
    compose: Compose

    def parsed(self, *words: str) -> Config:
        """The configuration of the command with more words."""
        return parse(self.compose([*self.words, *words]))

    @property
    def processes(self) -> int:
        """How many runs go on at once."""
        jobs = self.config.study.jobs
        return max(1, os.cpu_count() or 1) if jobs == "auto" else int(jobs)


@dataclass(frozen=True)
class Job:
    """One run: how it is announced, and the words that compose it. Or ``trials``, to be trained as lanes of one job (``perfed.lanes``)."""

    label: str
    words: tuple[str, ...]
    trials: tuple[Config, ...] = ()


@dataclass(frozen=True)
class Done:
    """How a job ended. ``folder`` None: it was refused, or trained lanes; ``problem``: one line, or None."""

    folder: Path | None
    seconds: float
    problem: str | None = None


def _work(words: tuple[str, ...], trials: tuple[Config, ...] = (), alone: bool = False) -> Done:
    """Train one configuration, or several as lanes, in whatever process this is. ``alone``: a signal that ends a run ends the study."""
    from perfed import lanes, results, train
    from perfed.frontdoor import compose

    started, folder = time.perf_counter(), None
    try:
        if trials:
            lanes.train(trials)
            return Done(None, time.perf_counter() - started)
        config = parse(compose(list(words)))
        folder = train.run(config).folder
    except UserError as error:
        return Done(None, time.perf_counter() - started, str(error))
    except results.Held as error:
        return Done(None, time.perf_counter() - started, str(error))
    except train.Interrupted as error:
        if alone:
            raise
        return Done(None, time.perf_counter() - started, str(error))
    except Exception as error:  # the folder holds the traceback; the other runs go on
        if trials:
            return Done(None, time.perf_counter() - started, f"one by one, since {error.__class__.__name__}: {error}")
        return Done(folder, time.perf_counter() - started, f"{type(error).__name__}: {error}")
    return Done(folder, time.perf_counter() - started)


def _see_one(gpus: tuple[str, ...]) -> None:
    """Before a worker's first job: it sees one GPU alone, the one that the fewest processes have."""
    os.environ["CUDA_VISIBLE_DEVICES"] = sweep.own_gpu(gpus)


def _stop(pool: ProcessPoolExecutor) -> None:
    """End the workers by SIGTERM: a run ends its round and keeps its state. Again and again, since a worker whose run has ended
    takes the next job that is queued already."""
    workers = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    while alive := [worker for worker in workers if worker.is_alive()]:
        for worker in alive:
            worker.terminate()
        time.sleep(0.5)


def run_all(jobs: Sequence[Job], context: Context, title: str) -> dict[str, Done]:
    """Train all jobs and say a line for each that ends. Raises KeyboardInterrupt once every running job has stored its state, UserError
    where there can be no folder for the runs."""
    make("outputs", context.config.outputs_path)
    done: dict[str, Done] = {}
    words = {job.label: (*context.words, *job.words, "progress=off", "study.name=null", "plan=false") for job in jobs}

    def tell(label: str, end: Done) -> None:
        done[label] = end
        what = end.problem or f"{end.seconds:.1f} s"
        print(f"perfed: {title} {len(done)} of {len(jobs)}: {label}: {what}", file=sys.stderr, flush=True)

    if context.processes == 1 or len(jobs) <= 1:
        for job in jobs:
            tell(job.label, _work(words[job.label], job.trials, alone=True))
        return done
    gpus = sweep.gpus_to_share([context.config.device])
    first = {"initializer": _see_one, "initargs": (gpus,)} if gpus else {}
    with ProcessPoolExecutor(min(context.processes, len(jobs)), multiprocessing.get_context("spawn"), **first) as pool:
        try:
            waiting = {pool.submit(_work, words[job.label], job.trials): job.label for job in jobs}
            for future in as_completed(waiting):
                tell(waiting[future], future.result())
        except BaseException:
            _stop(pool)
            raise
    return done
