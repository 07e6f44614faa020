"""The same scalars to TensorBoard, MLflow or W&B: ``tracker=none|tensorboard|mlflow|wandb``.

A tracker never loses a run. It works in a thread of its own, which the training does not wait for; whatever it raises, or a call that
takes longer than :data:`PATIENCE`, costs one warning, and the run goes on without it. Only a package that is not installed is
refused, before round 1. It changes no number, so it is no part of who a run is: an interrupted run may go on with another one.

What is logged at each evaluated round (the step):

| name | value |
|---|---|
| ``accuracy/<model>/steps<k>`` | mean over users of the accuracy in [0, 1] of a judged model after k adaptation steps; steps0 is before |
| ``loss/<model>/steps<k>`` | the same for the test loss |
| ``worst10/<model>/steps<k>`` | mean accuracy of the tenth of the users with the lowest one |
| ``val_accuracy/<model>/steps<k>`` | accuracy on data held out for selection, with ``split.val`` |
| ``cost/grad_evals``, ``cost/hvps``, ``cost/floats_down``, ``cost/floats_up`` | counted so far, summed over users |
| ``diagnostic/<name>`` | what the method measures of itself, e.g. ``hf_error`` |
| ``time/train_seconds`` | seconds of training so far |
| ``new_users/...`` | the first four over users held out of training |
| ``seed<s>/...`` | the value of one seed; without it, the mean over seeds |

Once: the configuration as flat parameters. At the end of a run that ends with a result: ``final/mean/<model>/steps<k>`` and
``final/half_width/<model>/steps<k>`` (95 % interval over seeds), the pictures, and the status. A value that is not finite is left out, and
from the round on in which a seed diverges, so are the means over seeds.

An own tracker is one class in a module of yours (``plugins=[my.module]``)::

    @register("mine")
    @dataclass(kw_only=True)
    class Mine(Tracker):
        port: int = 80                       # tracker.port

        def open(self, run: Tracked) -> Session: ...
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import math
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any, ClassVar, Protocol

from perfed.errors import UserError, require

PATIENCE = 30.0
"""Seconds that one call to a tracker may take, and that the end of a run waits for it."""
HURRY = 10.0
"""Seconds that an interrupted run waits for its tracker."""
PLACE = ("seed", "round", "model", "steps", "seen")
CELL = ("accuracy", "loss", "worst10", "val_accuracy")
COST = ("grad_evals", "hvps", "floats_down", "floats_up")

TRACKERS: dict[str, type] = {}


def register(name: str):
    """Class decorator: make a tracker available as ``tracker=<name>``."""

    def add(cls):
        TRACKERS[name] = cls
        return cls

    return add


@dataclass(frozen=True)
class Tracked:
    """What a tracker is told once. ``identity``: the hash of who the run is. ``config``: dotted key -> value.

    ``fresh``: the run starts at its beginning; else it goes on, and earlier rounds may have been logged already.
    """

    folder: Path
    outputs: Path
    identity: str
    config: Mapping[str, Any]
    fresh: bool

    @property
    def id(self) -> str:
        """16 hex digits, of the run in its place: the same run in another folder is another one for a tracker."""
        return hashlib.sha256(f"{self.identity} {self.folder}".encode()).hexdigest()[:16]


class Session(Protocol):
    """A run as a tracker sees it. All calls come from one thread, in order; whatever is raised switches the tracker off."""

    last: int
    """The last round that the tracker holds already, -1: none. Earlier ones are not logged again."""
    where: str
    """The command that shows or sends it, or its address."""

    def log(self, k: int, scalars: Mapping[str, float]) -> None:
        """The values after k rounds."""

    def close(self, status: str, k: int, final: Mapping[str, float], pictures: Sequence[Path]) -> None:
        """status: DONE, DIVERGED, INTERRUPTED or FAILED; the last two have neither final values nor pictures."""


@dataclass(kw_only=True)
class Tracker:
    """An option of the group ``tracker``: its fields are its keys."""

    name: str
    packages: ClassVar[tuple[str, ...]] = ()  # modules that must be there
    sweep_key: ClassVar[str | None] = None  # the field that takes the name of a sweep, where it is null

    def check(self) -> None:
        """Raise UserError where the run could not be tracked at all: before round 1, before a folder is made."""
        for package in self.packages:
            found = importlib.util.find_spec(package)
            there = found is not None and found.origin is not None  # a folder of that name is no package
            require(there, "tracker", self.name, f'needs the extra: pip install "perfed[{self.name}]"')

    def open(self, run: Tracked) -> Session | None:
        """Begin, or go on. None: there is nothing to do."""
        raise NotImplementedError


@register("none")
@dataclass(kw_only=True)
class NoTracker(Tracker):
    def open(self, run: Tracked) -> None:
        return None


# ---------------------------------------------------------------- what is logged


def scalars(rows: Sequence[Mapping[str, Any]], seconds: float | None = None, diverged: bool = False) -> dict[str, float]:
    """Rows of rounds.csv of one round -> name -> value, see the table above. ``diverged``: some seed has, up to that round."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        new = "" if row["seen"] else "new_users/"
        for key, value in row.items():
            if key in PLACE or value is None or not math.isfinite(value):
                continue
            cell = key in CELL
            name = f"{new}{key}/{row['model']}/steps{row['steps']}" if cell else f"{'cost' if key in COST else 'diagnostic'}/{key}"
            found.setdefault(name, {})[row["seed"]] = float(value)
    seeds = {row["seed"] for row in rows}
    means = {name: math.fsum(of.values()) / len(of) for name, of in found.items() if not diverged and len(of) == len(seeds)}
    each = {f"seed{seed}/{name}": value for name, of in found.items() for seed, value in of.items()}
    return means | each | ({} if seconds is None else {"time/train_seconds": seconds})


def final(result: Mapping[str, Any]) -> dict[str, float]:
    """result.json -> the final values; none for a run that diverged, no half-width for one seed."""
    out = {}
    for cell in result["cells"]:
        for key in ("mean", "half_width"):
            if cell[key] is not None and math.isfinite(cell[key]):
                out[f"{'' if cell['seen'] else 'new_users/'}final/{key}/{cell['model']}/steps{cell['steps']}"] = float(cell[key])
    return out


# ---------------------------------------------------------------- a run and its tracker


class Tracking:
    """``with Tracking(option) as tracker:`` around a run. Its methods neither raise nor wait; the end of the block waits for a while.

    hurried: asked while waiting, whether the user wants to be gone.
    """

    def __init__(self, option: Tracker, hurried: Callable[[], bool] = lambda: False):
        self.option, self.hurried = option, hurried
        self.say: Callable[[str], None] = lambda text: None
        self._calls: queue.SimpleQueue[Callable[[Session], None] | None] = queue.SimpleQueue()
        self._on = self._ended = False
        self._logged = -1
        self._since: float | None = None  # when the call in progress began
        self._problem: str | None = None
        self._where = ""
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Tracking:
        return self

    def begin(self, run: Tracked, say: Callable[[str], None]) -> None:
        """say: where a warning goes."""
        self.say = say
        if isinstance(self.option, NoTracker):
            return
        self._on = True
        self._thread = threading.Thread(target=self._work, args=(run,), name="tracker", daemon=True)
        self._thread.start()

    def scored(self, rows: Sequence[Mapping[str, Any]], clock: Mapping[str, float], diverged: Iterable[int]) -> None:
        """Log the rounds that are new in ``rows`` (of rounds.csv, by round). diverged: for each seed the round, or -1."""
        self._look()
        if not self._on:
            return
        lost = min((k for k in diverged if k >= 0), default=math.inf)
        new = list(takewhile(lambda row: row["round"] > self._logged, reversed(rows)))
        for k, of_round in groupby(reversed(new), key=lambda row: row["round"]):
            values = scalars(list(of_round), clock.get(f"train until round {k}"), lost <= k)
            self._calls.put(lambda session, k=k, values=values: session.log(k, values) if k > session.last else None)
            self._logged = k

    def ended(self, status: str, result: Mapping[str, Any], folder: Path) -> None:
        """The run has a result, and its pictures lie in its folder."""
        self._close(status, final(result), sorted(folder.glob("*.png")))

    def _close(self, status: str, values: Mapping[str, float], pictures: Sequence[Path]) -> None:
        self._ended, k = True, max(self._logged, 0)
        self._calls.put(lambda session: session.close(status, k, values, pictures))
        self._calls.put(None)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._ended:
            self._close("INTERRUPTED" if kind is not None and issubclass(kind, KeyboardInterrupt) else "FAILED", {}, [])
        began = time.monotonic()
        while self._on and self._thread is not None and self._thread.is_alive():
            self._thread.join(0.05)
            self._look(HURRY if kind is not None or self.hurried() else PATIENCE, began)
        self._look()
        if self._on:
            self.say(f"tracker={self.option.name}: {self._where}")
            self._on = False

    def _look(self, patience: float | None = None, began: float | None = None) -> None:
        """Switch the tracker off where it has failed, or works too long on one call (or, from ``began`` on, on all that are left)."""
        since, patience = self._since if began is None else began, PATIENCE if patience is None else patience
        late = since is not None and self._thread is not None and self._thread.is_alive() and time.monotonic() - since > patience
        why = self._problem or (f"no answer within {patience:g} s" if late else None)
        if self._on and why is not None:
            self._on = False
            self.say(f"warning: tracker={self.option.name} failed and is switched off, the run is not affected: {why}")

    def _work(self, run: Tracked) -> None:
        try:
            self._since = time.monotonic()
            session = self.option.open(run)
            while self._on and session is not None:
                self._where, self._since = session.where, None
                call = self._calls.get()
                if call is None:
                    break
                self._since = time.monotonic()
                call(session)
        except BaseException as error:  # a tracker's SystemExit too: it must not cost the run
            self._problem = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        finally:
            self._since = None


# ---------------------------------------------------------------- TensorBoard


@register("tensorboard")
@dataclass(kw_only=True)
class TensorBoard(Tracker):
    packages = ("tensorboard",)

    def open(self, run: Tracked) -> Session:
        return _TensorBoard(run)


class _TensorBoard:
    """One event file, written anew when a run goes on: all its rounds are known, and none stands there twice."""

    last = -1

    def __init__(self, run: Tracked):
        from torch.utils.tensorboard import SummaryWriter

        home = run.folder / "tensorboard"
        shutil.rmtree(home, ignore_errors=True)
        self.where = f"tensorboard --logdir {run.outputs}"
        self.config = {key: value if isinstance(value, (bool, int, float)) else str(value) for key, value in run.config.items()}
        self.writer = SummaryWriter(str(home))
        text = "".join(f"| {key} | {value} |\n" for key, value in self.config.items())
        self.writer.add_text("config", f"| key | value |\n|---|---|\n{text}", 0)

    def log(self, k: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, k)
        self.writer.flush()

    def close(self, status: str, k: int, final: Mapping[str, float], pictures: Sequence[Path]) -> None:
        import numpy as np
        from PIL import Image
        from torch.utils.tensorboard.summary import hparams

        for summary in hparams(self.config, dict(final)) if final else ():  # the tab that compares runs
            self.writer.file_writer.add_summary(summary)
        self.log(k, final)
        for path in pictures:
            with Image.open(path) as image:
                self.writer.add_image(path.stem, np.asarray(image.convert("RGB")), k, dataformats="HWC")
        self.writer.add_text("status", status, k)
        self.writer.close()


# ---------------------------------------------------------------- MLflow


@register("mlflow")
@dataclass(kw_only=True)
class MLflow(Tracker):
    """``uri`` None: a SQLite file under outputs (MLflow keeps its older store of plain files in maintenance only)."""

    uri: str | None = None
    experiment: str | None = None
    sweep_key = "experiment"

    def __post_init__(self):
        ok = self.uri is None or "://" in self.uri or self.uri.startswith("databricks")
        require(ok, "uri", self.uri, "null, sqlite:///FILE.db, or the address of a server: http://HOST:PORT")

    @property
    def packages(self) -> tuple[str, ...]:
        return ("mlflow", "sqlalchemy", "alembic") if self.uri is None or self.uri.startswith("sqlite") else ("mlflow",)

    def open(self, run: Tracked) -> Session:
        return _MLflow(self, run)


class _MLflow:
    """A run that goes on is found by its tag."""

    QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
    """Nothing is sent that was not asked for; a server that is not there is found out in 15 s. Values of the user's own stay."""
    ENDS = {"DONE": "FINISHED", "DIVERGED": "FINISHED", "INTERRUPTED": "KILLED", "FAILED": "FAILED"}
    AT_ONCE = {"metrics": 1000, "params": 100}  # MLflow's limits of a batch

    def __init__(self, option: MLflow, run: Tracked):
        for key, value in self.QUIET.items():
            os.environ.setdefault(key, value)
        from mlflow import MlflowClient
        from mlflow.entities import Param

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.ERROR)
        uri = option.uri or f"sqlite:///{run.outputs / 'mlflow.db'}"
        self.where = f"mlflow ui --backend-store-uri {uri}" if uri.startswith("sqlite") else f"run {run.folder.name} at {uri}"
        local = run.outputs if uri.startswith("sqlite") else None
        with _alone(local):  # jobs of a sweep would make the tables twice
            self.client = MlflowClient(tracking_uri=uri)
            experiment = self._experiment(option.experiment or "perfed", local)
        found = self._earlier(run.id)
        if run.fresh:
            for old in found:
                if old.info.status != "FINISHED":  # killed before it kept anything
                    self.client.delete_run(old.info.run_id)
        if found and not run.fresh:
            self.id = found[0].info.run_id
            self.client.update_run(self.id, status="RUNNING")
            self.last = max((metric.step for metric in self.client.get_metric_history(self.id, "progress/round")), default=-1)
            return
        self.last = -1
        tags = {"perfed.run": run.id, "perfed.identity": run.identity, "perfed.folder": str(run.folder)}
        self.id = self.client.create_run(experiment, run_name=run.folder.name, tags=tags).info.run_id
        self._send("params", [Param(key, str(value)[:500]) for key, value in run.config.items()])

    def _experiment(self, name: str, outputs: Path | None) -> str:
        from mlflow.exceptions import MlflowException

        if (known := self.client.get_experiment_by_name(name)) is not None:
            return known.experiment_id
        place = None if outputs is None else (outputs / "mlruns" / hashlib.sha256(name.encode()).hexdigest()[:12]).as_uri()
        try:
            return self.client.create_experiment(name, artifact_location=place)
        except MlflowException:
            if (known := self.client.get_experiment_by_name(name)) is None:  # not made by another job meanwhile
                raise
            return known.experiment_id

    def _earlier(self, tag: str) -> list[Any]:
        """Runs of this run, the newest first, in whatever experiment."""
        places = [experiment.experiment_id for experiment in self.client.search_experiments()]
        return list(self.client.search_runs(places, f"tags.`perfed.run` = '{tag}'", order_by=["attributes.start_time DESC"]))

    def _send(self, kind: str, items: Sequence[Any]) -> None:
        size = self.AT_ONCE[kind]
        for start in range(0, len(items), size):
            self.client.log_batch(self.id, **{kind: items[start : start + size]})

    def log(self, k: int, scalars: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._send("metrics", [Metric(name, value, now, k) for name, value in {**scalars, "progress/round": float(k)}.items()])

    def close(self, status: str, k: int, final: Mapping[str, float], pictures: Sequence[Path]) -> None:
        from mlflow.entities import Metric

        self._send("metrics", [Metric(name, value, int(1000 * time.time()), k) for name, value in final.items()])
        for path in pictures:
            self.client.log_artifact(self.id, str(path))
        self.client.set_tag(self.id, "perfed.status", status)
        self.client.set_terminated(self.id, self.ENDS[status])


@contextmanager
def _alone(folder: Path | None) -> Iterator[None]:
    """Hold a lock of that folder; None holds nothing."""
    if folder is None:
        yield
        return
    import fcntl

    with open(folder / ".mlflow.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---------------------------------------------------------------- W&B


@register("wandb")
@dataclass(kw_only=True)
class Wandb(Tracker):
    project: str = "perfed"
    entity: str | None = None
    mode: str = "offline"
    group: str | None = None
    packages = ("wandb",)
    sweep_key = "group"

    def __post_init__(self):
        require(self.mode in ("offline", "online"), "mode", self.mode, "must be one of offline, online")

    def check(self) -> None:
        """Online without a key would ask for one, and wait."""
        super().check()
        if self.mode == "online" and not _has_key():
            raise UserError("tracker.mode", self.mode, "needs a key: `wandb login`, or the variable WANDB_API_KEY; offline needs none")

    def open(self, run: Tracked) -> Session:
        return _Wandb(self, run)


def _has_key() -> bool:
    """Whether W&B would find a key: a variable, or an entry of its host in the netrc file."""
    from netrc import NetrcParseError, netrc
    from urllib.parse import urlsplit

    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, NetrcParseError):
        return False


class _Wandb:
    """Offline, a run that goes on is written anew as one whole run; online it is resumed by its id."""

    def __init__(self, option: Wandb, run: Tracked):
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        offline = option.mode == "offline"
        if offline:
            shutil.rmtree(run.folder / "wandb", ignore_errors=True)
        quiet = {"silent": True, "console": "off", "save_code": False, "disable_git": True, "x_disable_stats": True}
        limits = {"init_timeout": PATIENCE / 2, "finish_timeout": PATIENCE / 2}
        self.run = wandb.init(
            dir=str(run.folder),
            mode=option.mode,
            project=option.project,
            entity=option.entity,
            group=option.group,
            id=run.id,
            name=run.folder.name,
            config=dict(run.config),
            resume=None if offline or run.fresh else "allow",  # None: an older run of that id is overwritten
            settings=wandb.Settings(**quiet, **limits),
        )
        self.last = self.run.step - 1
        self.where = f"wandb sync {Path(self.run.dir).parent}" if offline else str(self.run.url)

    def log(self, k: int, scalars: Mapping[str, float]) -> None:
        self.run.log(dict(scalars), step=k, commit=True)

    def close(self, status: str, k: int, final: Mapping[str, float], pictures: Sequence[Path]) -> None:
        import wandb

        self.run.summary.update({**final, "status": status})
        if pictures:
            self.run.log({f"pictures/{path.stem}": wandb.Image(str(path)) for path in pictures}, step=k + 1)
        self.run.finish(exit_code=0 if final or status == "DIVERGED" else 1)
