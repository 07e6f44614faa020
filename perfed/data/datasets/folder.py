"""``imagefolder``: any tree of images, decoded once."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from perfed.data.datasets.base import Arrays, DatasetConfig, register, shared
from perfed.data.datasets.files import keep, natural, recall, sha256
from perfed.errors import UserError, require

IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".pbm"}


@register
@dataclass(kw_only=True)
class ImageFolder(DatasetConfig):
    """``path/train/<class>/`` and, if there, ``path/test/<class>/``, with images at any depth below.

    Class ids follow the natural order of the union of both sides' folder names ("2" before "10"), so a class that one
    side lacks shifts nothing. Decoded once into data_root/cache; the fingerprint is that of the decoded arrays.
    """

    name: str = "imagefolder"
    path: str | None = field(default=None, metadata={"identity": False})
    size: list[int] | None = None
    grayscale: bool | str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        ok = self.size is None or (len(self.size) == 2 and min(self.size) >= 1)
        require(ok, "dataset.size", self.size, "null (all images agree) or [height,width], at least 1")
        require(self.grayscale in (True, False, "auto"), "dataset.grayscale", self.grayscale, "auto, true or false")

    def fingerprint(self, root: Path) -> str:
        tree = self.tree()
        if (stored := recall(root, tree.key, "content")) is not None:
            return str(stored[0])
        arrays = shared(self.name, tree.key, lambda: self.decode(tree))
        content = hashlib.sha256(np.ascontiguousarray(arrays.x)).hexdigest()
        content = sha256(content, arrays.x.shape, arrays.y.tolist(), arrays.n_train, arrays.classes)
        keep(root, tree.key, content=content, x=arrays.x)
        return content

    def read(self, root: Path) -> Arrays:
        tree = self.tree()
        if (stored := recall(root, tree.key, "x")) is not None:
            return tree.arrays(stored[0])
        return shared(self.name, tree.key, lambda: self.decode(tree))

    def tree(self) -> Tree:
        """List the images, train ones first."""
        require(self.path is not None, "dataset.path", self.path, "a folder that holds train/<class>/<image>")
        base = Path(self.path).expanduser()
        require((base / "train").is_dir(), "dataset.path", self.path, "a folder that holds train/<class>/<image>; there is no train/ in it")
        sides = [base / side for side in ("train", "test") if (base / side).is_dir()]
        names = {entry.name for side in sides for entry in os.scandir(side) if entry.is_dir() and entry.name[0] != "."}
        classes = tuple(sorted(names, key=natural))
        found = [[(entry, c) for c, name in enumerate(classes) for entry in _images(side / name)] for side in sides]
        require(bool(found[0]), "dataset.path", self.path, f"at least one image in train/<class>/ (endings: {' '.join(sorted(IMAGES))})")
        entries, y = zip(*(pair for side in found for pair in side), strict=True)
        stats = [(entry.path, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in entries]
        key = sha256(self.name, 2, str(base.resolve()), self.size, self.grayscale, stats)
        return Tree(f"{self.name}-{key[:32]}", [entry.path for entry in entries], np.array(y, np.int64), len(found[0]), classes)

    def decode(self, tree: Tree) -> Arrays:
        """All images as bytes; one channel as long as every image is grey."""
        with ThreadPool() as pool:
            images = _reported(pool.imap(self.image, tree.files, chunksize=32), len(tree.files), "decoding images")
            first = next(images)
            x = np.empty((len(tree.files), *first.shape), np.uint8)
            x[0] = first
            for i, image in enumerate(images, start=1):
                if image.shape[1:] != x.shape[2:]:
                    (h, w), (height, width) = image.shape[1:], x.shape[2:]
                    what = f"{tree.files[i]} is {h}x{w} but {tree.files[0]} is {height}x{width} (height x width)"
                    raise UserError("dataset.size", self.size, f"{what}: give all one size, for example dataset.size=[{height},{width}]")
                if len(image) > x.shape[1]:
                    x = np.repeat(x, len(image), axis=1)
                x[i] = image
        return tree.arrays(x)

    def image(self, path: str) -> np.ndarray:
        """[1 or 3, H, W] uint8."""
        from PIL import Image

        try:
            with Image.open(path) as image:
                if image.mode[0] in "IF":
                    raise ValueError(f"mode {image.mode}; 8 bits a channel are needed")
                grey = _grey(image) if self.grayscale == "auto" else bool(self.grayscale)
                image = image.convert("L" if grey else "RGB")
                if self.size is not None:
                    image = image.resize(self.size[::-1], Image.Resampling.BILINEAR)
                pixels = np.asarray(image)
        except Exception as error:  # decoders raise whatever they like on damaged files
            raise UserError("dataset.path", self.path, f"{path} cannot be decoded ({error}): replace or delete it") from error
        return pixels[None] if grey else pixels.transpose(2, 0, 1)


def _grey(image: Any) -> bool:
    """Whether all pixels are grey, however they are stored: a palette or three equal channels too."""
    if image.mode in ("1", "L", "LA"):
        return True
    red, green, blue = (np.asarray(channel) for channel in image.convert("RGB").split())
    return bool((red == green).all() and (green == blue).all())


class Tree(NamedTuple):
    """The images of a folder. ``key`` changes with every path, size, time of change and option."""

    key: str
    files: list[str]
    y: np.ndarray
    n_train: int
    classes: tuple[str, ...]

    def arrays(self, x: np.ndarray) -> Arrays:
        return Arrays(x, self.y, self.n_train, self.classes)


def _images(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    if not os.path.isdir(folder):
        return
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name[0] != "." and entry.is_dir():
            yield from _images(entry.path)
        elif os.path.splitext(entry.name)[1].lower() in IMAGES:
            yield entry


def _reported(items: Iterator[Any], total: int, what: str, quiet: int = 2000) -> Iterator[Any]:
    """Pass ``items`` on; above ``quiet`` of them say on stderr how far it is, on one line of a terminal."""
    terminal, due = sys.stderr.isatty(), time.monotonic()
    for done, item in enumerate(items, start=1):
        if total > quiet and (time.monotonic() >= due or done == total):
            due = time.monotonic() + (0.2 if terminal else 10)
            print(f"{what}: {done:,} of {total:,}", end="\r" if terminal and done < total else "\n", file=sys.stderr, flush=True)
        yield item
