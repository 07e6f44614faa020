"""``npz``: any arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from perfed.data.datasets.base import Arrays, DatasetConfig, register
from perfed.data.datasets.files import BROKEN, digest, natural, sha256
from perfed.errors import UserError, require


@register
@dataclass(kw_only=True)
class Npz(DatasetConfig):
    """Arrays of one .npz file: ``x``, ``y``, and if there ``user`` and ``split`` (0 or "train", 1 or "test").

    x [M, F] vectors, [M, H, W] or [M, C, H, W] images, or [M, H, W, C] with C in {1, 3} where axis 1 is neither.
    Bytes stay, all other numbers become float32. y and user: [M] integers or strings of any values, numbered in order.
    """

    name: str = "npz"
    path: str | None = field(default=None, metadata={"identity": False})

    def bad(self, what: str) -> UserError:
        return UserError("dataset.path", self.path, what)

    def file(self) -> Path:
        if self.path is None or not Path(self.path).expanduser().is_file():
            raise self.bad("an .npz file with arrays x and y" + ("" if self.path is None else "; there is no such file"))
        return Path(self.path).expanduser()

    def fingerprint(self, root: Path) -> str:
        try:
            return sha256(self.name, digest(self.file(), root))
        except OSError as error:
            raise self.bad(f"a readable file ({error})") from error

    def read(self, root: Path) -> Arrays:
        try:
            stored = np.load(self.file(), allow_pickle=False)
            require(isinstance(stored, np.lib.npyio.NpzFile), "dataset.path", self.path, "an .npz file, written by numpy.savez")
            with stored:
                given = {name: stored[name] for name in ("x", "y", "user", "split") if name in stored}
        except BROKEN as error:
            raise self.bad(f"an undamaged .npz file of plain arrays without pickled objects ({error})") from error
        if missing := [name for name in ("x", "y") if name not in given]:
            raise self.bad(f"arrays x and y; {' and '.join(missing)} missing, it holds {', '.join(stored.files) or 'nothing'}")
        x = self.pixels(given.pop("x"))
        for name, array in given.items():
            if array.shape != (len(x),):
                raise self.bad(f"{name} of shape [{len(x)}], one entry per example of x, not {list(array.shape)}")
            if array.dtype.kind not in "iubU":
                raise self.bad(f"{name} of integers or strings, not {array.dtype}")
        y, classes = _numbered(given["y"])
        user, users = _numbered(given["user"]) if "user" in given else (None, ())
        test = self.test(given["split"]) if "split" in given else np.zeros(len(x), bool)
        order = np.argsort(test, kind="stable")
        if test.any():
            x, y, user = x[order], y[order], None if user is None else user[order]
        return Arrays(x, y, int(len(x) - test.sum()), classes, user, users)

    def pixels(self, x: np.ndarray) -> np.ndarray:
        if x.ndim not in (2, 3, 4) or x.dtype.kind not in "fiub":
            raise self.bad(f"x of numbers, [M,F], [M,H,W] or [M,C,H,W], not {x.dtype} {list(x.shape)}")
        if x.size == 0:
            raise self.bad(f"at least one example and one entry each; x is {list(x.shape)}")
        if x.dtype != np.uint8:
            with np.errstate(over="ignore"):
                x = x.astype(np.float32)
            if wrong := int(len(x) - np.isfinite(x).all(axis=tuple(range(1, x.ndim))).sum()):
                raise self.bad(f"finite numbers; {wrong} of {len(x)} examples of x hold NaN, infinity or more than float32 can")
        if x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
            x = x.transpose(0, 3, 1, 2)
        return np.ascontiguousarray(x[:, None] if x.ndim == 3 else x)

    def test(self, split: np.ndarray) -> np.ndarray:
        test = np.isin(split, ["test"] if split.dtype.kind == "U" else [1])
        train = np.isin(split, ["train"] if split.dtype.kind == "U" else [0])
        if not (test | train).all():
            raise self.bad(f"split of 0 (or 'train') and 1 (or 'test'), not {split[~(test | train)][0].item()!r}")
        if not train.any():
            raise self.bad("at least one train example (split 0)")
        return test


def _numbered(values: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Ids 0..C-1 in the order of the values (strings in natural order), and the values as text."""
    known, ids = np.unique(values, return_inverse=True)
    order = sorted(range(len(known)), key=lambda i: natural(str(known[i]))) if known.dtype.kind == "U" else range(len(known))
    return np.argsort(order)[ids].astype(np.int64), tuple(str(known[i]) for i in order)
