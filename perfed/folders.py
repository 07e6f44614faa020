"""Run folders: found, listed with their size and age, and removed by status."""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from perfed import keys, results, tables
from perfed.errors import UserError, nearest, require
from perfed.results import STATUSES, Run
from perfed.tables import Grid, flat, grid

# ---------------------------------------------------------------- found


def run_folders(paths: Sequence[Path | str], passed: list[str] | None = None) -> list[Path]:
    """The run folders among ``paths``, as given; a folder of run folders stands for all of them, by name.

    What exists and holds no run (a file, a study's folder) is left out beside runs, and named in ``passed``. Raises UserError for a path
    that does not exist, and where there is no run at all.
    """
    found: list[Path] = []
    none: list[tuple[Path, str]] = []
    for path in map(lambda text: Path(text).expanduser(), paths):
        require(os.path.lexists(path), "run", path, "no such folder")
        inside = [path] if (path / "status.json").is_file() else sorted(p.parent for p in path.glob("*/status.json"))
        if not inside:
            none.append((path, "no run folder: it holds no status.json, nor does a folder in it" if path.is_dir() else "no folder"))
        found += inside
    require(bool(found), "run", *(none[0] if none else ("", "at least one run folder")))
    if passed is not None:
        passed += [f"{path}: {why}" for path, why in none]
    return list(dict.fromkeys(found))


def find(paths: Sequence[Path | str], passed: list[str] | None = None) -> list[Run]:
    """The runs in :func:`run_folders`, none twice, also by a link. Raises UserError for a damaged one."""
    found: dict[Path, Path] = {}
    for folder in run_folders(paths, passed):
        found.setdefault(folder.resolve(), folder)
    return [results.load(folder) for folder in found.values()]


def whole(paths: Sequence[Path | str], passed: list[str]) -> list[Run]:
    """The same, but a damaged run is named in ``passed``."""
    found = []
    for folder in {folder.resolve(): folder for folder in reversed(run_folders(paths, passed))}.values():
        try:
            found.insert(0, results.load(folder))
        except UserError as error:
            passed.append(str(error))
    return found


def chosen(runs: Sequence[Run], text: str) -> list[Run]:
    """The runs whose settings have all the values of ``KEY=VALUE,...``. Raises UserError for an unknown key, and where no run is left."""
    configs = [flat(run.config) for run in runs]
    wanted = [(keys.find(word, configs, "where"), value) for word, value in keys.where(text)]
    hits = [[k in c and keys.alike(c[k]) == keys.alike(v) for k, v in wanted] for c in configs]
    left = [run for run, hit in zip(runs, hits, strict=True) if all(hit)]
    if not left:
        alone = next((i for i in range(len(wanted)) if not any(hit[i] for hit in hits)), None)
        if alone is None:
            raise UserError("where", text, f"none of the {len(runs)} runs has all of these values, though each has some run")
        key = wanted[alone][0]
        there = list(dict.fromkeys(keys.typed(config[key]) for config in configs if key in config))
        some = f"{', '.join(there[:8])}{', ...' if len(there) > 8 else ''}"
        raise UserError("where", text, f"none of the {len(runs)} runs; {keys.shown(key)} is {some}")
    return left


# ---------------------------------------------------------------- listed


def listing(runs: Sequence[Run], now: float | None = None) -> Grid:
    """One row a run: folder, status, algorithm, setting, seeds, rounds, accuracy, size on disk, age of its last status."""
    now = time.time() if now is None else now
    configs = [flat(run.config) for run in runs]
    named = [config for config in configs if config]
    tell = keys.telling(named) or [key for key in ("dataset.name", "tau") if any(key in config for config in named)]
    rows = []
    for run, config in zip(runs, configs, strict=True):
        setting = ", ".join(f"{keys.shown(key)}={keys.typed(config[key])}" for key in tell if key in config) or "-"
        seeds = run.result["seeds"] if run.result else range(config.get("seed", 0), config.get("seed", 0) + config.get("seeds", 0))
        number = "-"
        if run.complete:
            cell, lost = tables.primary(run.result), len(run.result["diverged"])
            number = f"div {lost}/{len(seeds)}" if lost else tables.accuracy_text(cell["mean"], cell["half_width"])
        age = now - os.lstat(run.folder / "status.json").st_mtime
        name = config.get("algo.name") or (run.result or {}).get("algo") or "-"
        what = [str(run.folder), run.status["status"], name, setting, _seeds(seeds), _rounds(run, config), number]
        rows.append([*what, size(run.folder), age])
    total = sum(row[-2] for row in rows)
    texts = [[*row[:-2], bytes_text(row[-2]), age_text(row[-1])] for row in rows]
    caption = f"{len(runs)} run{'s' if len(runs) != 1 else ''}, {bytes_text(total)}. Accuracy in percent of each run's primary model."
    columns = ["folder", "status", "algo", "setting", "seeds", "rounds", "accuracy", "size", "age"]
    return grid(columns, texts, caption, labels=4)


def _seeds(seeds: Sequence[int]) -> str:
    """``0-4``, ``3``, ``0,2``"""
    if len(seeds) > 1 and list(seeds) == list(range(seeds[0], seeds[0] + len(seeds))):
        return f"{seeds[0]}-{seeds[-1]}"
    return ",".join(map(str, seeds)) or "-"


def _rounds(run: Run, config: dict) -> str:
    """``100``, or ``40/100`` of a run that has not ended."""
    planned = config.get("rounds")
    done = run.status.get("round", run.status.get("rounds"))
    if planned is None:
        return "-"
    return f"{planned}" if run.complete else f"{'?' if done is None else done}/{planned}"


def size(folder: Path) -> int:
    """Bytes of the files in a folder; links count as links."""
    total = 0
    for here, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(here, name)).st_size
            except FileNotFoundError:  # a run is being written
                continue
    return total


def bytes_text(count: float) -> str:
    """``812 B``, ``1.5 kB``, ``23 MB``: powers of 1000, as in ``ls --si``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def age_text(seconds: float) -> str:
    """``5 s``, ``12 min``, ``3 h``, ``8 d``: whole units that have passed."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"


# ---------------------------------------------------------------- removed


@dataclass(frozen=True)
class Pruned:
    """``removed``: folder and bytes, also of a dry run; ``kept``: folders of the asked status that stay, and why."""

    removed: tuple[tuple[Path, int], ...]
    kept: tuple[tuple[Path, str], ...]


def require_writable(key: str, folder: Path) -> None:
    """Raise UserError where a folder can be seen not to be writable, or not to be made; makes nothing."""
    here = folder
    try:
        while not here.exists() and not here.is_symlink() and here != here.parent:
            here = here.parent
        what = "a link to nothing" if not here.exists() else "no folder" if not here.is_dir() else "not writable"
        ok = here.is_dir() and os.access(here, os.W_OK | os.X_OK)
    except OSError as error:  # a name that is too long, say
        raise UserError(key, folder, f"a folder that can be made or written to ({error.strerror})") from None
    require(ok, key, folder, f"a folder that can be made or written to; {here} is {what}")


def make(key: str, folder: Path) -> None:
    """Make a folder and what lies above it. Raises UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # what only the attempt shows
        raise UserError(key, folder, f"a folder that can be made ({error.strerror})") from None


def statuses(text: str) -> tuple[str, ...]:
    """``FAILED,INTERRUPTED`` -> its parts. Raises UserError; RUNNING is never removed."""
    allowed = [status for status in STATUSES if status != "RUNNING"]
    words = [word.strip().upper() for word in text.split(",")]
    bad = next((word for word in words if word not in allowed), None)
    near = nearest(bad or "", allowed)
    require(bad is None, "prune", text, f"one or more of {', '.join(allowed)}; a run that goes on is never removed{near}")
    return tuple(words)


def prune(folders: Iterable[Path], wanted: Sequence[str], remove: bool) -> Pruned:
    """Remove the run folders whose status is among ``wanted``; with ``remove`` False only say which.

    A folder stays if a process holds it, if it is a link, if its status.json is not one of perfed's, if it holds anything that a run does
    not write, or if another run lies inside it (but for what ``perfed-eval`` scored). Links inside are removed, never followed.
    """
    gone, kept = [], []
    for folder in (path if path.is_symlink() else path.resolve() for path in folders):
        status = results.read_status(folder)
        if status is None or status["status"] not in wanted:
            continue
        if why := _not_ours(folder):
            kept.append((folder, why))
            continue
        count = size(folder)
        try:
            if remove:
                _remove(folder, wanted)
            elif results.is_held(folder):
                raise results.Held(folder, None, None, None)
            gone.append((folder, count))
        except results.Held:
            kept.append((folder, "another process holds it"))
        except OSError as error:
            kept.append((folder, f"cannot be removed: {error.strerror}"))
    return Pruned(tuple(gone), tuple(kept))


def _not_ours(folder: Path) -> str:
    """Why a folder must not be removed; an empty text for a run folder of perfed's."""
    if folder.is_symlink() or (folder / "status.json").is_symlink():
        return "a link; give the folder itself"
    stored = results.read_json(folder / "status.json") or {}
    lock = results.read_json(folder / results.LOCK) or {}  # all that a job which failed before its run has
    marked = re.fullmatch("[0-9a-f]{64}", str(stored.get("identity"))) or {"pid", "host", "since"} <= set(lock)
    if stored.get("status") not in STATUSES or not marked:
        return "its status.json is damaged or not perfed's; remove it by hand"
    for here, inside, names in os.walk(folder):
        inside[:] = [name for name in inside if not (Path(here) == folder and name.startswith("eval-"))]
        if "status.json" in names and Path(here) != folder:
            return f"another run lies in it ({Path(here).relative_to(folder)})"
    if others := results.foreign(folder):
        return f"it holds what no run writes ({others}); remove it by hand"
    return ""


def _remove(folder: Path, wanted: Sequence[str]) -> None:
    """Under the run's own lock; status.json goes last, so that what was begun can be finished by the same command."""
    if not os.access(folder, os.W_OK):
        raise PermissionError(13, "Permission denied")
    with results.Claim(folder):
        now = (results.read_json(folder / "status.json") or {}).get("status")
        if ("INTERRUPTED" if now == "RUNNING" else now) not in wanted:  # it went on meanwhile
            raise results.Held(folder, None, None, None)
        for child in sorted(folder.iterdir()):
            if child.name in ("status.json", results.LOCK):
                continue
            if stat.S_ISDIR(child.lstat().st_mode):
                shutil.rmtree(child)
            else:
                child.unlink()
        (folder / "status.json").unlink()
        (folder / results.LOCK).unlink()
    folder.rmdir()
