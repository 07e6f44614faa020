"""The interface of a dataset, the registry, and loading once per process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from perfed.errors import UserError, require

NORMS = ("unit", "standard")


@dataclass(frozen=True)
class Dataset:
    """Arrays shared by all runs of a process: never write into them. The model sees ``(x - offset) * scale``."""

    name: str
    x: np.ndarray  # [M, C, H, W] images or [M, F] vectors, uint8 or float32; official train examples first, then test
    y: np.ndarray  # [M] int64, 0..C-1
    n_train: int  # x[:n_train] is the train part; M where the data have no official test part
    classes: tuple[str, ...]  # the data's own name of each class id
    user: np.ndarray | None  # [M] int64, 0..U-1: the data's own users
    fingerprint: str  # sha256 (hex) of the content; norm is not in it
    offset: np.ndarray  # float32, [C] for images, [] for vectors
    scale: np.ndarray
    norm: str
    table2: tuple[int, int] | None  # (a, a_test) of the paper's split for these data
    users: tuple[str, ...] = ()  # the data's own name of each user id

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape[1:]


class Arrays(NamedTuple):
    """What a dataset reads; fields as in :class:`Dataset`."""

    x: np.ndarray
    y: np.ndarray
    n_train: int
    classes: tuple[str, ...]
    user: np.ndarray | None = None
    users: tuple[str, ...] = ()


@dataclass(kw_only=True)
class DatasetConfig:
    """``norm=unit``: bytes are divided by 255, floats stay. ``norm=standard``: mean 0 and deviation 1 on the train
    part, per channel of images, over all entries of vectors."""

    name: str = ""
    norm: str = "unit"
    table2: ClassVar[tuple[int, int] | None] = None

    def __post_init__(self) -> None:
        require(self.norm in NORMS, "dataset.norm", self.norm, f"one of {', '.join(NORMS)}")

    def fingerprint(self, root: Path) -> str:
        """Identity of the content; milliseconds once hashed. Fetches absent data where that is allowed."""
        raise NotImplementedError

    def read(self, root: Path) -> Arrays:
        raise NotImplementedError


DATASETS: dict[str, type[DatasetConfig]] = {}


def register(cls: type[DatasetConfig]) -> type[DatasetConfig]:
    """Class decorator: the dataset is known under the default of its field ``name``."""
    DATASETS[cls.name] = cls
    return cls


KEPT = 4
_loaded: dict[tuple[str, str], Arrays] = {}  # the last KEPT datasets of this process, by name and fingerprint


def shared(name: str, content: str, read: Callable[[], Arrays]) -> Arrays:
    if (name, content) not in _loaded:
        arrays = read()
        while len(_loaded) >= KEPT:
            del _loaded[next(iter(_loaded))]
        _loaded[name, content] = arrays
    return _loaded[name, content]


def fingerprint(config: DatasetConfig, data_root: Path | str) -> str:
    """Identity of the data without loading them. Raises UserError when they are absent and cannot be had."""
    try:
        return config.fingerprint(Path(data_root).expanduser())
    except OSError as error:
        raise UserError("dataset", config.name, f"its files must be readable: {error}") from error


def load(config: DatasetConfig, data_root: Path | str) -> Dataset:
    """The dataset; its arrays are read once per process and fetched first if they are absent."""
    content = fingerprint(config, data_root)
    arrays = shared(config.name, content, lambda: config.read(Path(data_root).expanduser()))
    offset, scale = moments(arrays.x[: arrays.n_train], config.norm)
    *stored, users = arrays
    return Dataset(config.name, *stored, content, offset, scale, config.norm, config.table2, users)


def moments(x: np.ndarray, norm: str) -> tuple[np.ndarray, np.ndarray]:
    """(offset, scale) of the train part: float32, [C] for images, [] for vectors. A constant channel keeps its scale."""
    axes, shape = ((0, 2, 3), x.shape[1:2]) if x.ndim == 4 else ((0, 1), ())
    unit = 1 / 255 if x.dtype == np.uint8 else 1.0
    if norm == "unit":
        return np.zeros(shape, np.float32), np.full(shape, unit, np.float32)
    parts = [x[i : i + 4096] for i in range(0, len(x), 4096)]
    count = x.size / math.prod(shape)
    mean = sum(part.sum(axes, dtype=np.float64, keepdims=True) for part in parts) / count
    deviation = np.sqrt(sum(np.square(part - mean).sum(axes) for part in parts) / count)
    scale = np.where(deviation > 0, 1 / np.where(deviation > 0, deviation, 1), unit)
    return mean.reshape(shape).astype(np.float32), scale.astype(np.float32)
