"""A run's folder on disk: written atomically, claimed by a lock, read by everything below. No torch here.

Every file is written under a temporary name in the same folder, synced and renamed, so a reader sees the old file or the new one.
``rounds.csv``, ``users.csv`` and ``result.json`` hold nothing that depends on clock, machine or folder; their text is a function of the
values alone. Write the status DONE last.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import math
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from perfed.errors import UserError, require

if TYPE_CHECKING:
    from pandas import DataFrame

STATUSES = ("RUNNING", "DONE", "FAILED", "INTERRUPTED", "DIVERGED")
LOCK = ".lock"
TEMPORARY = ".tmp-"

WRITTEN = (
    "status.json", "result.json", "config.yaml", "provenance.json", "log.txt", "report.md", "rounds.csv", "users.csv", "timing.csv",
    "partition-seed*.npz", "state.pt", "state-previous.pt", "final.pt", "donor.pt", "eval-*", "wandb", "tensorboard", ".hydra",
    *(f"{name}.{kind}" for name in ("learning_curve", "per_user", "partition", "adaptation") for kind in ("png", "pdf")),
    LOCK, f"{TEMPORARY}*",
)  # fmt: skip
"""All that a run may leave in its folder."""

ROUNDS = {
    "seed": "int64", "round": "int64", "model": "str", "steps": "int64", "seen": "bool",
    "accuracy": "float64", "loss": "float64", "worst10": "float64",
    "grad_evals": "int64", "hvps": "int64", "floats_down": "int64", "floats_up": "int64", "val_accuracy": "float64", "hf_error": "float64",
}  # fmt: skip
"""Columns of rounds.csv and their dtypes. Costs are cumulative, summed over users, of that seed; val_accuracy and hf_error are
blank where they were not measured."""

USERS = {
    "seed": "int64", "user": "int64", "group": "str", "seen": "bool", "times_sampled": "int64",
    "n_train": "int64", "n_val": "int64", "n_test": "int64",
    "model": "str", "steps": "int64", "correct": "float64", "loss": "float64",
}  # fmt: skip
"""Columns of users.csv and their dtypes: one row per seed, user, judged model and number of steps, of the final evaluation. A last
column ``name`` holds the data's own names of the users, where they have any."""


class Held(Exception):
    """Another process holds the run folder. ``pid``, ``host``, ``since`` are None in the instant before the holder has written them."""

    def __init__(self, folder: Path, pid: int | None, host: str | None, since: str | None):
        self.folder, self.pid, self.host, self.since = folder, pid, host, since
        super().__init__(f"{folder} is held by process {pid} on {host} since {since}" if pid else f"{folder} is held by another process")


class Claim:
    """``with Claim(folder):`` makes the folder and holds it alone, by flock on ``.lock``; the kernel frees it when the process dies.

    Inside the lock file: pid, host and start of the claim. Left-over temporary files of a killed holder are removed. Raises :class:`Held`
    when another claim is alive (of this process too), UserError where the folder cannot be made or locked.
    """

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        self._fd = -1

    def __enter__(self) -> Claim:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UserError("hydra.run.dir", self.folder, f"cannot be written: {error.strerror}") from None
        try:
            if not _lock(fd, fcntl.LOCK_EX, patience=0.5):
                holder = _holder(self.folder)
                raise Held(self.folder, holder.get("pid"), holder.get("host"), holder.get("since"))
            text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now(UTC).isoformat(timespec="seconds")})
            os.ftruncate(fd, 0)
            os.pwrite(fd, text.encode(), 0)
        except OSError as error:
            os.close(fd)
            raise UserError("hydra.run.dir", self.folder, f"cannot be locked: {error.strerror}") from None
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        for leftover in self.folder.glob(TEMPORARY + "*"):
            leftover.unlink(missing_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)


def is_held(folder: Path | str) -> bool:
    """Whether a live process holds a :class:`Claim` on the folder."""
    try:
        fd = os.open(Path(folder) / LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _lock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def _lock(fd: int, kind: int, patience: float = 0.0) -> bool:
    """Take the lock, trying for ``patience`` seconds: a reader of the status holds a shared lock for an instant."""
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.02)


def _holder(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / LOCK).read_text())
    except ValueError:
        return {}


@contextmanager
def atomic(path: Path | str, keep_as: Path | None = None) -> Iterator[Path]:
    """Yields a temporary path in the same folder, with the same suffix; what is written there replaces ``path`` when the block ends well,
    and vanishes when it fails. ``keep_as``: what a file that was at ``path`` is renamed to, once the new one is safe on disk."""
    path = Path(path)
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    try:
        yield temporary
        _sync(temporary)
        if keep_as is not None and path.exists():
            os.replace(path, keep_as)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_text(path: Path | str, text: str) -> None:
    """UTF-8, line ends as in ``text``, atomically."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def write_json(path: Path | str, value: Any) -> None:
    """Strict JSON in the order of the dicts, atomically. Numpy and 0-d tensor values become numbers, arrays lists, a non-finite float
    null."""
    write_text(path, json.dumps(_plain(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_csv(path: Path | str, rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | Mapping[str, str]) -> None:
    """Rows in the order of ``columns`` (ROUNDS, USERS or any names), atomically: floats by ``repr``, true and false, blank for None or an
    absent key.

    Raises ValueError for a key that is no column.
    """
    names, out = list(columns), io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        if unknown := set(row) - set(names):
            raise ValueError(f"no such column in {Path(path).name}: {sorted(unknown)}")
        writer.writerow([_field(row.get(name)) for name in names])
    write_text(path, out.getvalue())


def _field(value: Any) -> str:
    value = value.item() if hasattr(value, "item") else value
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)


PARSE = {"int64": int, "float64": lambda text: float(text or "nan"), "bool": {"true": True, "false": False}.__getitem__, "str": str}


def read_csv(path: Path | str, dtypes: Mapping[str, str]) -> DataFrame:
    """The frame that :func:`write_csv` wrote, to the last bit and with every pandas version alike.

    Columns without a dtype, and every text ("NA", "001", "1e-3"), stay text; a blank float is NaN. Raises UserError when the file is absent
    or does not fit the dtypes.
    """
    import pandas

    path = Path(path)
    require(path.is_file(), "run", path, "no such file")
    try:
        with open(path, encoding="utf-8", newline="") as file:
            names, *rows = csv.reader(file)
        missing = [name for name in dtypes if name not in names]
        require(not missing, "run", path, f"lacks the columns {', '.join(missing)}")
        columns = dict(zip(names, zip(*rows, strict=True), strict=True)) if rows else dict.fromkeys(names, ())
        kinds = {name: dtypes.get(name, "str") for name in names}
        return pandas.DataFrame({n: pandas.Series([PARSE[kinds[n]](text) for text in columns[n]], dtype=kinds[n]) for n in names})
    except (ValueError, KeyError) as error:
        raise UserError("run", path, f"damaged: {error}") from None


def write_status(folder: Path | str, status: str, **fields: Any) -> None:
    """Replace ``status.json`` by ``status`` and ``fields``; an ``identity`` that was there stays."""
    assert status in STATUSES, status
    old = read_json(Path(folder) / "status.json") or {}
    kept = {"identity": old["identity"]} if "identity" in old else {}
    write_json(Path(folder) / "status.json", {"status": status, **kept, **fields})


def read_status(folder: Path | str) -> dict[str, Any] | None:
    """``status.json`` of a run, None where there is none. RUNNING without a live claim is INTERRUPTED; so is a file that cannot be read."""
    path = Path(folder) / "status.json"
    if not path.is_file():
        return None
    status = read_json(path)
    if not status or status.get("status") not in STATUSES:
        return {"status": "INTERRUPTED", "error": "status.json is damaged"}
    return {**status, "status": "INTERRUPTED"} if status["status"] == "RUNNING" and not is_held(folder) else status


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in the file, None where it is absent or holds no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def check_identity(folder: Path | str, identity: str) -> None:
    """Raise UserError when the folder belongs to a run of another identity (full hash), or holds no run but files of another kind."""
    folder = Path(folder)
    stored = next((v["identity"] for name in ("status.json", "result.json") if (v := read_json(folder / name)) and "identity" in v), None)
    allowed = f"holds another run ({str(stored)[:12]}, this one is {identity[:12]}); give another folder"
    require(stored in (None, identity), "hydra.run.dir", folder, allowed)
    # The lock is the first thing that a run writes.
    ours = (folder / LOCK).is_file() or (read_json(folder / "status.json") or {}).get("status") in STATUSES
    if stored is None and (others := foreign(folder, WRITTEN if ours else (LOCK,))):
        raise UserError("hydra.run.dir", folder, f"holds files that are no run's ({others}); give a new folder or an empty one")


def foreign(folder: Path, own: Sequence[str] = WRITTEN) -> str:
    """The first names of what lies in a folder and matches none of ``own``; empty where there is nothing, or no folder."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    others = [name for name in names if not any(fnmatch(name, pattern) for pattern in own)]
    return f"{', '.join(others[:3])}{', ...' if len(others) > 3 else ''}"


def finished_before(status: str) -> str:
    """How a stored run of that status is told to who asks for it again."""
    return "finished before" + (" (DIVERGED)" if status == "DIVERGED" else "")


def from_here(folder: Path) -> Path:
    """A folder as it is named on the terminal: from the working folder, where it lies in that."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def open_log(folder: Path | str) -> TextIO:
    """``log.txt``, opened to append; every line reaches the file at once."""
    return open(Path(folder) / "log.txt", "a", buffering=1, encoding="utf-8", newline="\n")


@dataclass(frozen=True)
class Run:
    """A run folder as it lies on disk. ``result`` is None until a run has ended; the frames are read when first asked for."""

    folder: Path
    status: dict[str, Any]
    config: dict[str, Any]
    result: dict[str, Any] | None

    @property
    def complete(self) -> bool:
        """It ended with a result: DONE, or DIVERGED in some seeds."""
        return self.status["status"] in ("DONE", "DIVERGED") and self.result is not None

    @cached_property
    def rounds(self) -> DataFrame:
        return read_csv(self.folder / "rounds.csv", ROUNDS)

    @cached_property
    def users(self) -> DataFrame:
        return read_csv(self.folder / "users.csv", USERS)


def load(folder: Path | str) -> Run:
    """Raises UserError where ``folder`` is no run folder or a file in it is damaged."""
    from omegaconf import OmegaConf

    folder = Path(folder).expanduser()
    status = read_status(folder)
    require(status is not None, "run", folder, "no run folder: it holds no status.json" if folder.is_dir() else "no such folder")
    try:
        path = folder / "config.yaml"
        config = OmegaConf.to_container(OmegaConf.load(path)) if path.is_file() else {}
    except Exception as error:  # the YAML and OmegaConf errors share no base class
        raise UserError("run", folder, f"config.yaml is damaged: {error}") from None
    result = read_json(folder / "result.json")
    whole = result is not None or not (folder / "result.json").is_file()
    require(whole, "run", folder, "result.json is damaged; force=true computes the run again")
    return Run(folder, status, config, result)


def finished(folder: Path | str, key: str = "run") -> Run:
    """:func:`load` of a run that has ended; raises UserError under ``key`` for any other."""
    run = load(folder)
    require(run.complete, key, folder, f"has not finished: its status is {run.status['status']}")
    return run
