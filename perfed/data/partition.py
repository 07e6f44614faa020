"""Who owns which example: (labels, seed) -> flat index lists with offsets, never users x examples padding.

``make`` turns one of the option classes in ``PARTITIONS`` into a :class:`Partition`. A new kind is one dataclass with
a method ``build`` and an entry in ``PARTITIONS``. Streams are named (seed, "partition", role), so ``split.val`` or
``holdout_users`` change nothing about who owns what.

Shapes: n users, C classes, M examples of the pool, K examples dealt out.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zipfile
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perfed.data.sampling import generator
from perfed.errors import UserError, require

if TYPE_CHECKING:
    from perfed.data.datasets import Dataset

PARTS = ("train", "val", "test")
TABLE2_GROUP1 = "1: classes 0-4"


class Owned(NamedTuple):
    """Examples user by user: ``index[offsets[i]:offsets[i + 1]]`` are the pool positions of user i."""

    index: np.ndarray  # [K] int64
    offsets: np.ndarray  # [n+1] int64

    @property
    def sizes(self) -> np.ndarray:
        """[n] int64, examples per user."""
        return np.diff(self.offsets)

    @property
    def owner(self) -> np.ndarray:
        """[K] int64, the user of each entry of ``index``."""
        return np.repeat(np.arange(len(self.offsets) - 1), self.sizes)

    def of(self, i: int) -> np.ndarray:
        """[m_i] int64, the pool positions of user i."""
        return self.index[self.offsets[i] : self.offsets[i + 1]]


@dataclass(frozen=True, eq=False)
class Partition:
    """The data of n users. No example is owned twice; every user has train and test data (UserError ``partition``)."""

    train: Owned
    val: Owned
    test: Owned
    group: np.ndarray  # [n] int64, position in `groups`
    groups: tuple[str, ...]
    seen: np.ndarray  # [n] bool, False: held out of training, a new user
    names: tuple[str, ...] = ()  # the data's own names of the users, where they have any; not in the digest

    def __post_init__(self):
        for part in (self.train, self.val, self.test):
            assert part.index.dtype == part.offsets.dtype == np.int64, "index and offsets must be int64"
            assert len(part.offsets) == self.n + 1 and part.offsets[0] == 0, "wrong number of users"
            assert part.offsets[-1] == len(part.index) and (part.sizes >= 0).all(), "offsets do not fit the index"
        assert len(self.seen) == self.n and self.seen.dtype == bool, "seen must be [n] bool"
        assert len(self.names) in (0, self.n), "one name a user, or none"
        assert self.n == 0 or 0 <= self.group.min() <= self.group.max() < len(self.groups), "unknown group"
        everything = np.sort(np.concatenate([self.train.index, self.val.index, self.test.index]))
        assert not len(everything) or everything[0] >= 0, "negative index"
        assert (np.diff(everything) > 0).all(), "an example is owned twice"
        _refuse_empty("given", self.train, self.test)

    @property
    def n(self) -> int:
        return len(self.group)

    def counts(self, y: np.ndarray, C: int, part: str = "train") -> np.ndarray:
        """[n, C] int64: examples per user and class. ``y`` [M] are the labels of the pool."""
        return _counts(getattr(self, part), y, C)

    def majority(self, y: np.ndarray, C: int) -> np.ndarray:
        """[n] float64: share of a user's test data that has the most frequent class of his train data (ties: lowest)."""
        top = self.counts(y, C).argmax(axis=1)
        test = self.counts(y, C, "test")
        return np.take_along_axis(test, top[:, None], axis=1)[:, 0] / test.sum(axis=1)

    def blocks(self) -> list[tuple[str, np.ndarray]]:
        """Rows of the count table: (name, user ids).

        ``table2``: the ten rows of the paper's Table 2, five equal blocks of group 1 and the users of group 2 by their
        class 0-4 (``pairing=diagonal``: by their pair). Any other partition: one row per user, with the data's own name of him.
        """
        if self.groups[0] != TABLE2_GROUP1 or self.n % 10:
            return [(f"user {i}" + (f": {self.names[i]}" if self.names else ""), np.array([i])) for i in range(self.n)]
        first, second = np.split(np.arange(self.n), 2)
        rows = [(1, ids) for ids in np.split(first, 5)] + [(2, second[c::5]) for c in range(5)]
        return [(f"{g}: users {_span(ids)}", ids) for g, ids in rows]

    def table(self, y: np.ndarray, C: int, part: str = "train") -> tuple[list[str], np.ndarray]:
        """Names of :meth:`blocks` and [rows, C] float64, the mean number of examples per user of the block."""
        counts = self.counts(y, C, part)
        blocks = self.blocks()
        return [name for name, _ in blocks], np.stack([counts[ids].mean(axis=0) for _, ids in blocks])

    def digest(self) -> str:
        """sha256 (hex) over all arrays with their types and lengths, and the group names."""
        sha = hashlib.sha256()
        for name, array in self._arrays().items():
            sha.update(json.dumps([name, array.dtype.str, array.shape]).encode())
            sha.update(array.tobytes())
        sha.update(json.dumps(self.groups).encode())
        return sha.hexdigest()

    def save(self, path: str | Path, data: str = "") -> None:
        """Write an .npz without pickled objects, whole or not at all (temporary name, then renamed).

        data: fingerprint of the data set that the positions are of; "" leaves it open.
        """
        path = Path(path)
        scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with open(scratch, "wb") as file:
                about = {"groups": self.groups, "names": self.names, "digest": self.digest(), "data": data}
                np.savez_compressed(file, **{key: np.array(value, dtype=str) for key, value in about.items()}, **self._arrays())
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)

    @staticmethod
    def load(path: str | Path, data: str = "") -> Partition:
        """Read what :meth:`save` wrote. UserError ``partition.path`` where it is absent, damaged or no partition, or where it was made
        for other data than those of the fingerprint ``data`` ("": any)."""
        try:
            with np.load(path, allow_pickle=False) as file:
                parts = [Owned(file[f"{p}_index"], file[f"{p}_offsets"]) for p in PARTS]
                groups, names = (tuple(map(str, file[key])) if key in file else () for key in ("groups", "names"))  # older files lack names
                out = Partition(*parts, file["group"], groups, file["seen"], names)
                digest, made_for = str(file["digest"]), str(file["data"]) if "data" in file else ""
        except FileNotFoundError:
            raise UserError("partition.path", path, "no such file; a run saves one per seed: RUN/partition-seed0.npz") from None
        except (OSError, ValueError, KeyError, EOFError, TypeError, AttributeError, AssertionError, zipfile.BadZipFile) as error:
            raise UserError("partition.path", path, f"not a saved partition, or damaged ({error})") from None
        require(out.digest() == digest, "partition.path", path, "damaged: its content does not match the digest stored in it")
        ok = not (data and made_for) or data == made_for
        require(ok, "partition.path", path, "made for other data than these: its positions would mean other examples")
        return out

    def _arrays(self) -> dict[str, np.ndarray]:
        """What is saved and hashed, little-endian on every machine."""
        out = {}
        for name in PARTS:
            part = getattr(self, name)
            out |= {f"{name}_index": part.index.astype("<i8"), f"{name}_offsets": part.offsets.astype("<i8")}
        return out | {"group": self.group.astype("<i8"), "seen": self.seen}


def tv(counts: np.ndarray) -> np.ndarray:
    """[n, C] counts -> [n] total variation (1/2) sum_c |p_i(c) - p(c)|, p_i a user's label distribution, p their unweighted mean."""
    share = counts / counts.sum(axis=1, keepdims=True)
    return np.abs(share - share.mean(axis=0)).sum(axis=1) / 2


# ---------------------------------------------------------------------------------------------------------------------
# options


class SplitTest(Enum):
    """Where test data come from."""

    matched = "matched"
    split = "split"


class Pairing(Enum):
    """Which class of 5-9 goes with which class of 0-4 in group 2 of ``table2``."""

    diagonal = "diagonal"
    crossed = "crossed"


@dataclass(kw_only=True)
class SplitConfig:
    """How a user's data become train, validation and test data.

    ``test=matched``: test data come from the official test part; ``test=split``: both parts are pooled, dealt out, and
    ``test_share`` of each user's data (half up, at least one example each) is cut off. ``val``: share of each user's
    train data held out for selection (half up; none where that is 0). Cuts are spread evenly over a user's classes.
    """

    val: float = 0.0
    test: SplitTest = SplitTest.matched
    test_share: float = 0.2

    def __post_init__(self):
        self.test = _choice(SplitTest, "split.test", self.test)
        require(0 <= self.val < 1, "split.val", self.val, "0 or more and below 1")
        require(0 < self.test_share < 1, "split.test_share", self.test_share, "above 0 and below 1")


class Built(NamedTuple):
    """What ``build`` returns."""

    train: Owned
    test: Owned
    group: np.ndarray  # [n]
    groups: tuple[str, ...]
    names: tuple[str, ...] = ()  # of the users


@dataclass(kw_only=True)
class Table2:
    """The split of the Per-FedAvg paper (Fallah et al. 2020, section 5 and Table 2), for 10 classes and n a multiple of 10.

    Users 0 .. n/2-1 (group 1) own ``a`` images of each class 0-4. User n/2+j (group 2) owns a/2 images of class c = j mod 5
    (none with ``diff_hetero``) and 2a of class 5+c' with c' = c (``diagonal``) or c' = (c + j // 5) mod 5 (``crossed``: every
    five users in a row use every class once, so class demand is equal for every legal n; all 25 pairs come equally often where
    n is a multiple of 50). Test data likewise, ``a_test`` for ``a``; with ``split.test=split``, ``a`` counts train and test
    data together. null takes the data's own value.
    """

    name: str = "table2"
    a: int | None = None
    a_test: int | None = None
    pairing: Pairing = Pairing.diagonal
    diff_hetero: bool = False

    def __post_init__(self):
        self.pairing = _choice(Pairing, "partition.pairing", self.pairing)
        for key, value in (("partition.a", self.a), ("partition.a_test", self.a_test)):
            if value is not None:
                lower = value - value % 2
                allowed = f"an even number: {lower} or {lower + 2}" if value > 2 else "an even number of at least 2"
                require(value >= 2 and value % 2 == 0, key, value, allowed)

    def build(self, data: Dataset, n: int, seed: int, split: SplitConfig) -> Built:
        C = len(data.classes)
        require(C == 10, "partition", self.name, f"needs 10 classes, {data.name} has {C}; iid, dirichlet and shards take any number")
        around = [str(k) for k in (n - n % 10, n - n % 10 + 10) if k]
        require(n % 10 == 0, "n", n, f"a multiple of 10 with partition=table2: {' or '.join(around)}")
        default = data.table2 or (None, None)
        a, a_test = default[0] if self.a is None else self.a, default[1] if self.a_test is None else self.a_test
        group = np.repeat(np.arange(2), n // 2)
        groups = (TABLE2_GROUP1, "2: one class" if self.diff_hetero else "2: pairs")
        if split.test is SplitTest.split:
            allowed = "null with split.test=split, where split.test_share cuts test data off"
            require(self.a_test is None, "partition.a_test", self.a_test, allowed)
            owned = _deal(data.y, self._counts("partition.a", a, data, data.y, "all data", n), _rng(seed, "train"))
            return Built(*_cut_test(owned, data.y, split, seed, self.name), group, groups)
        y, y_test = data.y[: data.n_train], data.y[data.n_train :]
        counts = self._counts("partition.a", a, data, y, "the train part", n)
        test_counts = self._counts("partition.a_test", a_test, data, y_test, "the test part", n)
        test = _shift(_deal(y_test, test_counts, _rng(seed, "test")), data.n_train)
        return Built(_deal(y, counts, _rng(seed, "train")), test, group, groups)

    def _counts(self, key: str, a: int | None, data: Dataset, y: np.ndarray, where: str, n: int) -> np.ndarray:
        """[n, 10] images per user and class; refuses ``a`` where a class has too few of them."""
        have = np.bincount(y, minlength=10).tolist()
        # Demand is proportional to a and n: pair[c] images of class c for every 10 users and every 2 of a.
        pair, tens = self._table(2, 10).sum(axis=0).tolist(), n // 10
        largest = 2 * min(h // (tens * p) for h, p in zip(have, pair, strict=True))
        hint = f"an even number of at most {largest} with n={n}" if largest else f"no number fits n={n}"
        require(a is not None, key, a, f"{hint}; null only where the data have a value of their own, and {data.name} has none")
        need = [tens * p * a // 2 for p in pair]
        if a > largest:
            c = next(c for c in range(10) if need[c] > have[c])
            n_max = 10 * min(h // (p * a // 2) for h, p in zip(have, pair, strict=True))
            lack = f"class {c} needs {need[c]} images, {where} of {data.name} has {have[c]}"
            require(largest > 0 or n_max == 0, "n", n, f"at most {n_max} with {key}={a}: {lack}")
            raise UserError(key, a, f"{hint}{f', or n of at most {n_max}' if n_max else ''}: {lack}")
        return self._table(a, n)

    def _table(self, a: int, n: int) -> np.ndarray:
        out = np.zeros((n, 10), dtype=np.int64)
        out[: n // 2, :5] = a
        j = np.arange(n // 2)
        low = j % 5
        high = low if self.pairing is Pairing.diagonal else (low + j // 5) % 5
        out[n // 2 + j, low] = 0 if self.diff_hetero else a // 2
        out[n // 2 + j, 5 + high] = 2 * a
        return out


@dataclass(kw_only=True)
class IID:
    """A shuffled pool in n parts whose sizes differ by at most one; ``per_user`` examples each where it is given."""

    name: str = "iid"
    per_user: int | None = None

    def __post_init__(self):
        require(self.per_user is None or self.per_user >= 1, "partition.per_user", self.per_user, "null (all examples) or at least 1")

    def build(self, data: Dataset, n: int, seed: int, split: SplitConfig) -> Built:
        return _build(self.own, data, n, seed, split, self.name)

    def own(self, y: np.ndarray, data: Dataset, n: int, rng: np.random.Generator) -> Owned:
        M = len(y)
        require(n <= M, "n", n, f"at most {M}, one example each: {data.name} has {M} to deal out")
        if self.per_user:
            need = n * self.per_user
            allowed = f"at most {M // n} with n={n}: {need} examples are needed, there are {M}"
            require(need <= M, "partition.per_user", self.per_user, allowed)
            sizes = np.full(n, self.per_user)
        else:
            sizes = M // n + (np.arange(n) < M % n)
        return Owned(rng.permutation(M)[: sizes.sum()], _offsets(sizes))


@dataclass(kw_only=True)
class Dirichlet:
    """Label skew (Hsu et al. 2019; Li et al. 2022): each class goes to the users in proportions drawn from Dirichlet(concentration).

    Redrawn until every user has ``min_size`` examples, at most ``max_draws`` times.
    """

    name: str = "dirichlet"
    concentration: float = 0.5
    min_size: int = 10
    max_draws: int = 1000

    def __post_init__(self):
        positive = 0 < self.concentration < math.inf
        require(positive, "partition.concentration", self.concentration, "a finite number above 0 (small: few classes per user)")
        require(self.min_size >= 1, "partition.min_size", self.min_size, "at least 1")
        require(self.max_draws >= 1, "partition.max_draws", self.max_draws, "at least 1")

    def build(self, data: Dataset, n: int, seed: int, split: SplitConfig) -> Built:
        return _build(self.own, data, n, seed, split, self.name)

    def own(self, y: np.ndarray, data: Dataset, n: int, rng: np.random.Generator) -> Owned:
        M, need = len(y), n * self.min_size
        most = f"at most {M // n} with n={n}" if n <= M else f"impossible with n={n}"
        allowed = f"{most}: {n} users times {self.min_size} is {need} examples, there are {M}"
        require(need <= M, "partition.min_size", self.min_size, allowed)
        total = np.bincount(y, minlength=len(data.classes))
        best = 0
        for _ in range(self.max_draws):
            ends = np.cumsum(rng.dirichlet(np.full(n, self.concentration), size=len(total)), axis=1)
            if not np.isfinite(ends).all():
                continue
            ends = np.minimum(np.floor(ends * total[:, None]).astype(np.int64), total[:, None])
            ends[:, -1] = total
            counts = np.diff(ends, axis=1, prepend=0).T
            smallest = int(counts.sum(axis=1).min())
            if smallest >= self.min_size:
                return _deal(y, counts, rng)
            best = max(best, smallest)
        raise UserError(
            "partition.concentration",
            self.concentration,
            f"none of partition.max_draws={self.max_draws} draws gives all {n} users partition.min_size={self.min_size} of {M} examples "
            f"(best: smallest user {best}); raise partition.concentration or lower partition.min_size",
        )


@dataclass(kw_only=True)
class Shards:
    """Every user has exactly ``classes_per_user`` classes, drawn at random.

    Every class is at the same number of users (one more at some where n * classes_per_user does not divide by C) and its
    examples are split evenly among them. With ``split.test=split`` this holds for train and test data together.
    """

    name: str = "shards"
    classes_per_user: int = 2

    def __post_init__(self):
        require(self.classes_per_user >= 1, "partition.classes_per_user", self.classes_per_user, "at least 1")

    def build(self, data: Dataset, n: int, seed: int, split: SplitConfig) -> Built:
        return _build(self.own, data, n, seed, split, self.name)

    def own(self, y: np.ndarray, data: Dataset, n: int, rng: np.random.Generator) -> Owned:
        C, k, key = len(data.classes), self.classes_per_user, "partition.classes_per_user"
        require(k <= C, key, k, f"1 to {C}: {data.name} has {C} classes")
        least = -(-C // n)
        require(n * k >= C, key, k, f"at least {least} with n={n}: {n * k} places leave {C - n * k} of {C} classes without a user")
        left = n * k // C + (rng.permutation(C) < n * k % C)  # users that a class still needs
        have, holders = np.bincount(y, minlength=C), left.copy()
        if (short := np.flatnonzero(have < holders)).size:
            c = short[0]
            raise UserError(key, k, f"too many for n={n}: class {c} has {have[c]} examples for {holders[c]} users")
        holds = np.zeros((n, C), dtype=bool)
        for i, tie in enumerate(rng.random((n, C))):
            # The k neediest classes: needs differ by at most one throughout, so nobody runs out of distinct classes.
            mine = np.argsort(tie - left)[:k]
            holds[i, mine] = True
            left[mine] -= 1
        counts = np.zeros((n, C), dtype=np.int64)
        for c in range(C):
            counts[rng.permutation(np.flatnonzero(holds[:, c])), c] = have[c] // holders[c] + (np.arange(holders[c]) < have[c] % holders[c])
        return _deal(y, counts, rng)


@dataclass(kw_only=True)
class Natural:
    """The data's own users, in the order of their ids; for n below their number a seeded sample of n of them.

    ``split.test=matched``: a user's test data are his examples in the official test part.
    """

    name: str = "natural"

    def build(self, data: Dataset, n: int, seed: int, split: SplitConfig) -> Built:
        require(data.user is not None, "partition", self.name, f"{data.name} has no users of its own; dataset=npz with an array `user` has")
        ids = np.unique(data.user)
        require(n <= len(ids), "n", n, f"{len(ids)}, the users of {data.name}, or fewer (then a seeded sample of them)")
        chosen = np.sort(_rng(seed, "train").permutation(ids)[:n])
        place = np.minimum(np.searchsorted(chosen, data.user), n - 1)
        owner = np.where(chosen[place] == data.user, place, -1)

        def own(lo: int, hi: int) -> Owned:
            mine = lo + np.flatnonzero(owner[lo:hi] >= 0)
            return _group(mine, owner[mine], n)

        M = len(data.y)
        whole = split.test is SplitTest.split
        train, test = _cut_test(own(0, M), data.y, split, seed, self.name) if whole else (own(0, data.n_train), own(data.n_train, M))
        names = tuple(data.users[i] for i in chosen) if data.users else ()
        return Built(train, test, np.zeros(n, dtype=np.int64), ("all",), names)


@dataclass(kw_only=True)
class File:
    """A saved partition, taken whole: its own test and validation data and held-out users. ``{seed}`` in ``path`` is the seed."""

    name: str = "file"
    path: str | None = None

    def __post_init__(self):
        require(bool(self.path), "partition.path", self.path, "a file that a run saved, such as outputs/RUN/partition-seed0.npz")

    def read(self, data: Dataset, n: int, seed: int, split: SplitConfig, holdout_users: float) -> Partition:
        require(split.val == 0, "split.val", split.val, "0 with partition=file, which holds its own validation data")
        require(holdout_users == 0, "holdout_users", holdout_users, "0 with partition=file, which holds its own new users")
        path = Path(self.path.replace("{seed}", str(seed))).expanduser()
        out = Partition.load(path, data.fingerprint)
        require(out.n == n, "n", n, f"{out.n}, the users of {path}")
        top = max(int(getattr(out, part).index.max(initial=-1)) for part in PARTS)
        M = len(data.y)
        require(top < M, "partition.path", path, f"made for other data: it holds example {top}, {data.name} has {M} (0 to {M - 1})")
        return out


PartitionConfig = Table2 | IID | Dirichlet | Shards | Natural | File
PARTITIONS: dict[str, type] = {
    "table2": Table2,
    "iid": IID,
    "dirichlet": Dirichlet,
    "shards": Shards,
    "natural": Natural,
    "file": File,
}


def make(config: PartitionConfig, dataset: Dataset, *, n: int, seed: int, split: SplitConfig, holdout_users: float = 0.0) -> Partition:
    """Deal ``dataset`` out to n users. A pure function of its arguments.

    ``holdout_users`` in [0, 1): that share of the users (half up, n-1 at most) is not trained on: ``seen`` is False.
    Raises UserError naming the key for every value that does not fit the data.
    """
    require(n >= 1, "n", n, "at least 1")
    require(0 <= holdout_users < 1, "holdout_users", holdout_users, "0 or more and below 1")
    if isinstance(config, File):
        return config.read(dataset, n, seed, split, holdout_users)
    M = len(dataset.y)
    require(n <= M // 2, "n", n, f"at most {M // 2}: every user needs a train and a test example, {dataset.name} has {M} examples")
    official = dataset.n_train < M or split.test is SplitTest.split
    require(official, "split.test", split.test.value, f"split: {dataset.name} has no official test part")
    train, test, group, groups, names = config.build(dataset, n, seed, split)
    _refuse_empty(config.name, train, test)
    out = Partition(*_cut_val(train, dataset.y, split, seed), test, group, groups, _seen(n, holdout_users, seed), names)
    assert max(part.index.max(initial=-1) for part in (out.train, out.val, out.test)) < M, "index beyond the data"
    return out


# ---------------------------------------------------------------------------------------------------------------------
# building blocks


def _rng(seed: int, role: str) -> np.random.Generator:
    return generator(seed, "partition", role)


def _choice(options: type[Enum], key: str, value: Enum | str) -> Enum:
    try:
        return options(value)
    except ValueError:
        raise UserError(key, value, " or ".join(o.value for o in options)) from None


def _half_up(share: float, count: int) -> int:
    """share * count rounded half up, in decimal: 0.29 of 50 is 15."""
    return int(Decimal(str(share)) * int(count) + Decimal("0.5"))


def _users(ids: Iterable[int]) -> str:
    """``user 3``, ``users 3, 7`` or the first ten of them."""
    ids = [int(i) for i in ids]
    more = f" and {len(ids) - 10} more" if len(ids) > 10 else ""
    return ("user " if len(ids) == 1 else "users ") + ", ".join(map(str, ids[:10])) + more


def _span(ids: np.ndarray) -> str:
    """Evenly spaced ids: ``4``, ``0-4`` or ``25, 30 .. 45``."""
    if len(ids) == 1:
        return str(ids[0])
    if ids[1] - ids[0] == 1:
        return f"{ids[0]}-{ids[-1]}"
    return f"{ids[0]}, {ids[1]}" if len(ids) == 2 else f"{ids[0]}, {ids[1]} .. {ids[-1]}"


def _offsets(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _group(index: np.ndarray, owner: np.ndarray, n: int) -> Owned:
    return Owned(index[np.argsort(owner, kind="stable")].astype(np.int64), _offsets(np.bincount(owner, minlength=n)))


def _shift(owned: Owned, by: int) -> Owned:
    return Owned(owned.index + by, owned.offsets)


def _counts(owned: Owned, y: np.ndarray, C: int) -> np.ndarray:
    n = len(owned.offsets) - 1
    return np.bincount(owned.owner * C + y[owned.index], minlength=n * C).reshape(n, C)


def _deal(y: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> Owned:
    """Shuffle each class and deal ``counts`` [n, C] examples of it to the users. Positions are those in ``y``."""
    n, C = counts.shape
    order = rng.permutation(len(y))
    order = order[np.argsort(y[order], kind="stable")]
    start = _offsets(np.bincount(y, minlength=C))
    taken = np.concatenate([order[start[c] : start[c] + k] for c, k in enumerate(counts.sum(axis=0))])
    return _group(taken, np.repeat(np.tile(np.arange(n), C), counts.T.ravel()), n)


def _build(own: Callable[..., Owned], data: Dataset, n: int, seed: int, split: SplitConfig, name: str) -> Built:
    """Train data by ``own``; test data matched to them, or cut off where both parts were pooled."""
    if split.test is SplitTest.split:
        train, test = _cut_test(own(data.y, data, n, _rng(seed, "train")), data.y, split, seed, name)
    else:
        y, y_test = data.y[: data.n_train], data.y[data.n_train :]
        train = own(y, data, n, _rng(seed, "train"))
        counts = _matched(_counts(train, y, len(data.classes)), y_test)
        test = _shift(_deal(y_test, counts, _rng(seed, "test")), data.n_train)
    return Built(train, test, np.zeros(n, dtype=np.int64), ("all",))


def _matched(train: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Deal all test images out in the users' train proportions: [n, C] train counts, test labels -> [n, C] test counts.

    Target: T_c m_ic / M_c for user i and class c, so a user's test classes are those of his train data. Rounded down; what
    is left of a class goes to the users who are furthest below their total. Then single images are moved to users with none.
    """
    C = train.shape[1]
    total = train.sum(axis=0)
    have = np.where(total > 0, np.bincount(y, minlength=C), 0)  # classes that nobody trains on stay out
    out, rest = np.divmod(train * have, np.maximum(total, 1))
    want = (train * (have / np.maximum(total, 1))).sum(axis=1) - out.sum(axis=1)
    for c, left in enumerate(have - out.sum(axis=0)):
        chosen = np.lexsort((-rest[:, c], -want, rest[:, c] == 0))[:left]
        out[chosen, c] += 1
        want[chosen] -= 1
    if out.sum() >= len(out):
        _fill(out, train > 0)
    return out


def _fill(counts: np.ndarray, holds: np.ndarray) -> None:
    """Move single images in ``counts`` [n, C], in place, until no user is empty; ``holds`` says who may own which class.

    A shortest chain of users, each passing on one image, is searched from every empty user to one with two or more
    (augmenting paths), so a user stays empty only where that cannot be avoided.
    """
    sizes = counts.sum(axis=1)
    for user in np.flatnonzero(sizes == 0):
        came: dict[int, tuple[int, int] | None] = {int(c): None for c in np.flatnonzero(holds[user])}  # class -> (class before, user)
        queue = deque(came)
        while queue:
            c = queue.popleft()
            owners = np.flatnonzero(counts[:, c])
            if not len(owners):
                continue
            giver = owners[sizes[owners].argmax()]
            if sizes[giver] > 1:
                sizes[giver] -= 1
                sizes[user] += 1
                counts[giver, c] -= 1
                while (step := came[c]) is not None:
                    before, middle = step
                    counts[middle, c] += 1
                    counts[middle, before] -= 1
                    c = before
                counts[user, c] += 1
                break
            for d in np.flatnonzero(holds[owners].any(axis=0)):
                if int(d) not in came:
                    came[int(d)] = (c, int(owners[holds[owners, d].argmax()]))
                    queue.append(int(d))


def _cut(owned: Owned, take: np.ndarray, y: np.ndarray, rng: np.random.Generator) -> tuple[Owned, Owned]:
    """Split off ``take`` [n] examples of each user (0 <= take <= size): (kept, taken).

    Systematic sampling: a user's examples are sorted by class, shuffled within, and picked at equal distances from a random
    start, so each class gives its share to within one example.
    """
    n, size = len(take), owned.sizes
    owner = owned.owner
    order = np.lexsort((rng.random(len(owner)), y[owned.index], owner))
    index, m, k = owned.index[order], size[owner], take[owner]
    start = rng.integers(np.maximum(size, 1))[owner]
    place = np.arange(len(owner)) - owned.offsets[owner]
    picked = ((place + 1) * k + start) // m > (place * k + start) // m
    return _group(index[~picked], owner[~picked], n), _group(index[picked], owner[picked], n)


def _cut_test(owned: Owned, y: np.ndarray, split: SplitConfig, seed: int, name: str) -> tuple[Owned, Owned]:
    small = np.flatnonzero(owned.sizes < 2)
    allowed = f"{_users(small)} with fewer than 2 examples, too few to cut test data off (split.test=split)"
    require(not small.size, "partition", name, allowed)
    take = np.array([min(max(_half_up(split.test_share, m), 1), m - 1) for m in owned.sizes])
    return _cut(owned, take, y, _rng(seed, "cut"))


def _cut_val(train: Owned, y: np.ndarray, split: SplitConfig, seed: int) -> tuple[Owned, Owned]:
    take = np.array([_half_up(split.val, m) for m in train.sizes])
    none = np.flatnonzero(take >= train.sizes)
    require(not none.size, "split.val", split.val, f"smaller: it leaves {_users(none)} without train examples")
    if not take.any():
        return train, Owned(np.zeros(0, dtype=np.int64), np.zeros_like(train.offsets))
    return _cut(train, take, y, _rng(seed, "val"))


def _seen(n: int, share: float, seed: int) -> np.ndarray:
    out = np.ones(n, dtype=bool)
    if share:
        k = min(_half_up(share, n), n - 1)
        require(k >= 1, "holdout_users", share, f"0, or at least {0.5 / n:.3g} with n={n}" if n > 1 else "0 with n=1")
        out[_rng(seed, "holdout").permutation(n)[:k]] = False
    return out


def _refuse_empty(name: str, train: Owned, test: Owned) -> None:
    for part, owned in (("train", train), ("test", test)):
        empty = np.flatnonzero(owned.sizes == 0)
        hint = " (split.test=split cuts them off each user's own data)" if part == "test" else ""
        require(not empty.size, "partition", name, f"{_users(empty)} without {part} examples{hint}; every user needs some")
