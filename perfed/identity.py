"""Who a run is: the parsed configuration that can change a number, hashed, and a folder name that can be read.

In: every typed value and the option name of every group, the content of the data, the results version of the
algorithm. Out: where and how fast it is computed (device, threads, backend, chunk and compile, which round
differently but mean the same), paths, progress, and fields of an option with the metadata ``identity=False``. A value
equal to its default counts like one that was typed; what ``adapt.*`` leaves to the protocol like the resolved value.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfed.config import GROUPS, Config, absolute, plain
from perfed.errors import UserError

FORMAT = 1
_NO_NUMBER = ("device", "data_root", "outputs", "progress", "pictures", "plan", "force", "resume", "checkpoint_every", "fail_fast", "study")
_NO_NUMBER += ("tracker",)

LATE: dict[str, Any] = {}
"""Keys that were added after the first release -> the value that reproduces the behaviour before them.

Such a key (``split.val``) enters an identity only when it differs from that value, so stored runs keep their names.
"""


@dataclass(frozen=True)
class Identity:
    """``hash``: 64 hex digits. ``name``: the folder, readable part and first 12 digits. ``content``: what was hashed."""

    hash: str
    name: str
    content: dict[str, Any]


def identity(config: Config, fingerprint: str | None = None, ignore: Iterable[str] = ()) -> Identity:
    """The identity of a run.

    fingerprint: of the data; None asks :func:`perfed.data.datasets.fingerprint`, which raises UserError where the data
    cannot be had. ignore: dotted keys to leave out, e.g. ``("rounds",)`` to find runs that differ in nothing else.
    """
    if fingerprint is None:
        from perfed.data.datasets import fingerprint as of_data

        fingerprint = of_data(config.dataset, config.data_path)
    content = _content(config, fingerprint)
    for key in ignore:
        _drop(content, key.split("."), lambda value: True)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    full = hashlib.sha256(text.encode()).hexdigest()
    return Identity(full, f"{readable(config)}-{full[:12]}", content)


def readable(config: Config) -> str:
    """``perfedavg_hf-mnist5k-table2-tau10``, of [A-Za-z0-9._-] only."""
    parts = (config.algo.name, config.dataset.name, config.partition.name, f"tau{getattr(config.algo, 'tau', config.tau)}")
    return "-".join(re.sub(r"[^A-Za-z0-9._]+", "_", str(part)).strip("._") or "x" for part in parts)


def _content(config: Config, fingerprint: str) -> dict[str, Any]:
    tree = plain(config)
    for key in _NO_NUMBER:
        del tree[key]
    tree["engine"] = {"dtype": tree["engine"]["dtype"]}
    tree["adapt"] |= {"source": config.adapt_source, "batch": config.adapt_batch, "repeats": config.adapt_repeats}
    for group in GROUPS:
        if group not in tree:
            continue
        for f in dataclasses.fields(getattr(config, group)):
            if not f.metadata.get("identity", True):
                del tree[group][f.name]
    if tree["partition"].get("path") is not None:
        tree["partition"]["path"] = _file_of_partition(config, tree["partition"]["path"])
    if tree["algo"].get("path") is not None:
        tree["algo"]["path"] = _content_of("algo.path", absolute(tree["algo"]["path"]))
    if not config.algo.uses_horizon:
        tree["algo"].pop("rounds", None)  # a schedule that does not read it
    for key, old in LATE.items():
        _drop(tree, key.split("."), functools.partial(operator.eq, plain(old)))
    tree["plugins"] = sorted(tree["plugins"])
    tree["data"] = fingerprint
    tree["version"] = {"format": FORMAT, "algo": int(getattr(type(config.algo), "version", 1))}
    return _canonical(tree)


def _drop(tree: dict[str, Any], parts: list[str], when: Callable[[Any], bool]) -> None:
    for part in parts[:-1]:
        tree = tree.get(part)
        if not isinstance(tree, dict):
            return
    if parts[-1] in tree and when(tree[parts[-1]]):
        del tree[parts[-1]]


def _canonical(value: Any) -> Any:
    """Minus zero is zero; numpy scalars and the like are refused by json later."""
    if isinstance(value, dict):
        return {k: _canonical(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_canonical(v) for v in value]
    return value + 0.0 if isinstance(value, float) else value


def _file_of_partition(config: Config, path: str) -> list[str]:
    """The content, not the place, of a saved partition: one hash for each file that ``{seed}`` stands for."""
    seeds = config.seed_values if config.partition_seed is None else (config.partition_seed,)
    hashes = []
    for file in dict.fromkeys(absolute(path.replace("{seed}", str(seed))) for seed in seeds):
        hashes.append(_content_of("partition.path", file))
    return hashes


def _content_of(key: str, file: Path) -> str:
    """What is in a file counts, not where it is."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(key, file, f"cannot be read: {error.strerror or error}") from error
