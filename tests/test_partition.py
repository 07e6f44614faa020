"""Partitions: the paper's counts, the public fault rows B01, B03, B04, B05, every refusal, and invariants on many small sizes."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from perfed.data.partition import (
    IID,
    PARTITIONS,
    Dirichlet,
    File,
    Natural,
    Owned,
    Partition,
    Shards,
    SplitConfig,
    Table2,
    _fill,
    _matched,
    make,
    tv,
)
from perfed.errors import UserError

MNIST_TRAIN = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST_TEST = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
MATCHED, SPLIT = SplitConfig(), SplitConfig(test="split")
CONF = Path(__file__).parents[1] / "conf" / "partition"


@dataclass(frozen=True)
class Data:
    """The fields of ``perfed.data.datasets.Dataset`` that a partition reads."""

    y: np.ndarray
    n_train: int
    classes: tuple[str, ...]
    user: np.ndarray | None = None
    table2: tuple[int, int] | None = None
    name: str = "toy"
    x: np.ndarray | None = None
    users: tuple[str, ...] = ()
    fingerprint: str = "toy's"


def data(train, test=(), **kw) -> Data:
    """``train[c]`` and ``test[c]`` examples of class c, shuffled within each part."""
    rng = np.random.default_rng(0)
    y = np.concatenate([rng.permutation(np.repeat(np.arange(len(part)), part)) for part in (train, test or [0])]).astype(np.int64)
    return Data(y=y, n_train=int(sum(train)), classes=tuple(str(c) for c in range(len(train))), **kw)


def deal(config, d, n, *, seed=0, split=MATCHED, holdout_users=0.0) -> Partition:
    return make(config, d, n=n, seed=seed, split=split, holdout_users=holdout_users)


def check(p: Partition, d: Data) -> None:
    """No index twice, parts disjoint, within the data, nobody without train or test data."""
    every = np.concatenate([p.train.index, p.val.index, p.test.index])
    assert len(np.unique(every)) == len(every)
    assert every.min() >= 0 and every.max() < len(d.y)
    assert p.train.sizes.min() >= 1 and p.test.sizes.min() >= 1
    for part in (p.train, p.val, p.test):
        assert len(part.sizes) == p.n and part.sizes.sum() == len(part.index)


MNIST = data(MNIST_TRAIN, MNIST_TEST, table2=(196, 34), name="mnist")
MNIST5K = data([390] * 10, [110] * 10, table2=(34, 10), name="mnist5k")
SMALL = data([20] * 10, [10] * 10)


# ------------------------------------------------------------------------------------------- the paper's split


def paper_rows(a, diff=False):
    """The paper's Table 2: rows 1-5 hold a of each class 0-4; row 6+c holds a/2 of class c and 2a of class 5+c."""
    rows = np.zeros((10, 10), dtype=int)
    rows[:5, :5] = a
    for c in range(5):
        rows[5 + c, c], rows[5 + c, 5 + c] = 0 if diff else a // 2, 2 * a
    return rows


@pytest.mark.parametrize("diff", [False, True])
def test_table2_counts_of_mnist(diff):
    p = deal(Table2(diff_hetero=diff), MNIST, 50)
    check(p, MNIST)
    for part, a in (("train", 196), ("test", 34)):
        names, rows = p.table(MNIST.y, 10, part)
        assert (rows == paper_rows(a, diff)).all()
        for _, ids in p.blocks():  # every user of a row is alike, five users a row
            assert len(ids) == 5 and (np.ptp(p.counts(MNIST.y, 10, part)[ids], axis=0) == 0).all()
    assert names[0] == "1: users 0-4" and names[5] == "2: users 25, 30 .. 45"
    assert p.groups == ("1: classes 0-4", "2: one class" if diff else "2: pairs") and (p.group == np.arange(50) // 25).all()
    assert (p.train.sizes == np.where(p.group == 0, 980, 392 if diff else 490)).all()
    assert (p.test.sizes == np.where(p.group == 0, 170, 68 if diff else 85)).all()
    assert (p.train.index < MNIST.n_train).all() and (p.test.index >= MNIST.n_train).all()


def test_table2_counts_of_mnist5k():
    p = deal(Table2(), MNIST5K, 20)
    check(p, MNIST5K)
    assert (p.train.sizes == [170] * 10 + [85] * 10).all() and (p.test.sizes == [50] * 10 + [25] * 10).all()
    assert (p.table(MNIST5K.y, 10)[1] == paper_rows(34)).all() and (p.table(MNIST5K.y, 10, "test")[1] == paper_rows(10)).all()


@pytest.mark.parametrize("n", [10, 20, 50])
def test_table2_crossed_keeps_class_demand_and_crosses(n):
    d = data([600] * 10, [60] * 10)
    counts, diagonal = (deal(Table2(a=4, a_test=2, pairing=pairing), d, n).counts(d.y, 10) for pairing in ("crossed", "diagonal"))
    assert (counts.sum(axis=0) == diagonal.sum(axis=0)).all()
    second = counts[n // 2 :]
    pairs = {(int(row[:5].argmax()), int(row[5:].argmax())) for row in second}
    assert len(pairs) == n // 2  # n=50: all 25 pairs once
    assert (np.sort(second, axis=1)[:, -2:] == [2, 8]).all() and (second.sum(axis=1) == 10).all()


def test_total_variation_of_the_papers_split():
    # Group 1: 1/5 on each class 0-4. Group 2: 1/5 on c, 4/5 on 5+c, each c for a fifth of the group.
    # Mean p: class 0-4: (1/5 + 1/5 * 1/5) / 2 = .12; class 5-9: (4/5 * 1/5) / 2 = .08.
    # Group 1: (5 |.2-.12| + 5 * .08) / 2 = (.4 + .4) / 2 = .40
    # Group 2: (|.2-.12| + 4 * .12 + |.8-.08| + 4 * .08) / 2 = (.08 + .48 + .72 + .32) / 2 = .80
    for pairing in ("diagonal", "crossed"):
        got = tv(deal(Table2(pairing=pairing), MNIST, 50).counts(MNIST.y, 10))
        np.testing.assert_allclose(got, [0.4] * 25 + [0.8] * 25, rtol=1e-12)
    assert np.mean(got) == pytest.approx(0.6) and np.mean(got**2) == pytest.approx(0.4)
    # diff_hetero: p = .1 on every class. Group 1: (5 * .1 + 5 * .1) / 2 = .50. Group 2: (|1-.1| + 9 * .1) / 2 = .90
    got = tv(deal(Table2(diff_hetero=True), MNIST, 50).counts(MNIST.y, 10))
    np.testing.assert_allclose(got, [0.5] * 25 + [0.9] * 25, rtol=1e-12)


def test_majority_baseline():
    # Group 1 has five equal classes (20 %), group 2 has 2a of 2.5a images in one class (80 %; diff_hetero: all of them).
    np.testing.assert_allclose(deal(Table2(), MNIST, 50).majority(MNIST.y, 10), [0.2] * 25 + [0.8] * 25)
    np.testing.assert_allclose(deal(Table2(diff_hetero=True), MNIST, 50).majority(MNIST.y, 10), [0.2] * 25 + [1.0] * 25)
    # The majority class is that of the train data, not of the test data: train 0 0 1, test 0 1 1 1 -> 1/4.
    y = np.array([0, 0, 1, 0, 1, 1, 1])
    parts = [Owned(np.arange(lo, hi), np.array([0, hi - lo])) for lo, hi in ((0, 3), (0, 0), (3, 7))]
    p = Partition(*parts, np.array([0]), ("all",), np.array([True]))
    assert p.majority(y, 2) == [0.25]


# ------------------------------------------------------------------------------------------- public fault rows


def test_b01a_dirichlet_that_cannot_fit_is_refused_at_once():
    message = r"partition.min_size=10: at most 2 with n=50: 50 users times 10 is 500 examples, there are 100"
    with pytest.raises(UserError, match=message):
        deal(Dirichlet(concentration=0.1, min_size=10), data([10] * 10, [10] * 10), 50)


def test_b01b_dirichlet_stops_after_a_bounded_number_of_draws():
    message = r"partition.concentration=0.01: none of partition.max_draws=1000 .* partition.min_size=10 of 100 examples"
    with pytest.raises(UserError, match=message):
        deal(Dirichlet(concentration=0.01, min_size=10), data([10] * 10, [10] * 10), 10)


@pytest.mark.parametrize("concentration", [1e-300, 1e-6, 1e6, 1e300])
def test_dirichlet_at_extreme_concentrations_ends(concentration):
    d = data([200] * 10, [50] * 10)
    try:
        check(deal(Dirichlet(concentration=concentration, min_size=1, max_draws=50), d, 4), d)
    except UserError as error:
        assert error.key in ("partition.concentration", "partition")


def test_b03a_iid_loses_nothing():
    p = deal(IID(), data([5, 5], [3, 3]), 3)
    assert sorted(p.train.sizes) == [3, 3, 4] and sorted(p.train.index) == list(range(10))
    p = deal(IID(), data([5, 5]), 3, split=SPLIT)
    assert sorted(p.train.sizes + p.test.sizes) == [3, 3, 4]


def test_b03b_table2_that_needs_more_images_than_there_are():
    counts = deal(Table2(a=196), MNIST, 50).counts(MNIST.y, 10).sum(axis=0)
    assert (counts == [5390] * 5 + [1960] * 5).all()
    message = "partition.a=196: an even number of at most 106 with n=100, or n of at most 50: class 0 needs 10780 images, .* has 5923"
    with pytest.raises(UserError, match=message):
        deal(Table2(), MNIST, 100)
    with pytest.raises(UserError, match="^n=20000: at most 50 with partition.a=196: class 0 needs 2156000 images, .* has 5923"):
        deal(Table2(), MNIST, 20_000)
    deal(Table2(a=106, a_test=16), MNIST, 100)  # what the message advises is legal


@pytest.mark.parametrize(("n", "allowed"), [(7, "10"), (25, "20 or 30"), (11, "10 or 20")])
def test_b03c_table2_n_not_a_multiple_of_ten(n, allowed):
    with pytest.raises(UserError, match=rf"^n={n}: a multiple of 10 with partition=table2: {allowed}$"):
        deal(Table2(), MNIST, n)


@pytest.mark.parametrize(("n", "k"), [(20, 2), (20, 3), (10, 7), (15, 4), (5, 2), (1, 10), (40, 1)])
def test_b04_shards(n, k):
    d = data([200] * 10, [50] * 10)
    p = deal(Shards(classes_per_user=k), d, n)
    check(p, d)
    counts = p.counts(d.y, 10)
    holds = counts > 0
    assert (holds.sum(axis=1) == k).all()
    assert np.ptp(holds.sum(axis=0)) == (n * k % 10 > 0)
    for c in range(10):  # split evenly among the holders, nothing lost
        assert np.ptp(counts[holds[:, c], c]) <= 1
    assert (counts.sum(axis=0) == 200).all()
    assert ((p.counts(d.y, 10, "test") > 0) == holds).all()
    if (n, k) == (20, 2):
        assert (holds.sum(axis=0) == 4).all() and len({tuple(row) for row in holds}) >= 5


def stamp(n_train=160) -> Data:
    """200 images, 20 per class, whose pixel [0, 0] is the label; every ten in a row hold each class once; 7 users."""
    y = np.random.default_rng(3).permuted(np.tile(np.arange(10), (20, 1)), axis=1).ravel()
    x = np.zeros((200, 1, 4, 4), dtype=np.uint8)
    x[:, 0, 0, 0] = y
    return Data(y=y, n_train=n_train, classes=tuple("0123456789"), user=np.arange(200) % 7, x=x, name="stamp")


@pytest.mark.parametrize("val", [0.0, 0.2])
@pytest.mark.parametrize("test", ["matched", "split"])
@pytest.mark.parametrize("kind", PARTITIONS)
def test_b05_stamp(kind, test, val, tmp_path):
    d, n, split, config = stamp(), 7, SplitConfig(test=test, val=val), None
    if kind == "table2":  # 7 is refused; in halves, the ten images of a class are just what diff_hetero needs
        d, n, config = stamp(100), 10, Table2(a=2, a_test=2 if test == "matched" else None, diff_hetero=True)
    if kind == "file":
        deal(Shards(), d, n, split=split).save(tmp_path / "p.npz")
        config, split = File(path=str(tmp_path / "p.npz")), MATCHED
    p = deal(config or PARTITIONS[kind](), d, n, split=split)
    check(p, d)
    for part in ("train", "val", "test"):
        owned = getattr(p, part)
        for i, reported in enumerate(p.counts(d.y, 10, part)):
            assert (np.bincount(d.x[owned.of(i), 0, 0, 0], minlength=10) == reported).all()
    if kind != "table2":
        assert len(p.train.index) + len(p.val.index) + len(p.test.index) == 200


# ------------------------------------------------------------------------------------------- test and validation data


def test_matched_test_data_follow_the_train_proportions():
    p = deal(Dirichlet(), MNIST, 50)
    train, test = p.counts(MNIST.y, 10), p.counts(MNIST.y, 10, "test")
    target = train * np.array(MNIST_TEST) / np.array(MNIST_TRAIN)
    assert (np.abs(test - target) < 1).all()  # each cell rounded down or up
    assert (np.abs(test.sum(axis=1) - target.sum(axis=1)) < 1).all()
    assert (test.sum(axis=0) == MNIST_TEST).all()  # all dealt out


def test_matched_fills_empty_users_where_that_can_be_done():
    # Two test images of each class for four users: user 2, who has nearly all the train data, must make do with one.
    train = np.array([[1, 0], [1, 0], [8, 8], [0, 1]])
    counts = _matched(train, np.array([0, 0, 1, 1]))
    assert (counts.sum(axis=0) == 2).all() and (counts.sum(axis=1) == 1).all() and (counts[train == 0] == 0).all()
    # Class 0 has one test image for the two users who hold nothing else: one of them stays empty.
    assert (_matched(np.array([[1, 0], [1, 0], [0, 9]]), np.array([0, 1, 1, 1])).sum(axis=1) == 0).sum() == 1


def test_fill_finds_a_chain_of_two_users():
    # User 0 (class a) is empty; a's only image is user 1's, who may also own b; user 2 has two of b.
    counts, holds = np.array([[0, 0], [1, 0], [0, 2]]), np.array([[1, 0], [1, 1], [0, 1]], dtype=bool)
    _fill(counts, holds)
    assert (counts == [[1, 0], [0, 1], [0, 1]]).all()


def test_fill_is_as_good_as_a_maximum_matching():
    rng = np.random.default_rng(1)
    for _ in range(200):
        n, C = rng.integers(2, 7), rng.integers(1, 5)
        holds = rng.random((n, C)) < 0.5
        holds[np.arange(n), rng.integers(0, C, n)] = True
        counts = np.zeros((n, C), dtype=np.int64)
        for c in np.flatnonzero(holds.any(axis=0)):
            np.add.at(counts, (rng.choice(np.flatnonzero(holds[:, c]), rng.integers(0, 4)), c), 1)
        have = counts.sum(axis=0)
        _fill(counts, holds)
        # Hall: the most users that can be served is min over sets S of classes of have(S) + users who hold a class outside S.
        best = min(sum(have[c] for c in S) + (holds[:, [c for c in range(C) if c not in S]].any(axis=1)).sum() for S in _subsets(C))
        assert (counts.sum(axis=1) > 0).sum() == best and (counts.sum(axis=0) == have).all() and (counts[~holds] == 0).all()


def _subsets(C):
    return [[c for c in range(C) if mask >> c & 1] for mask in range(2**C)]


def test_split_cuts_each_users_own_data_evenly_over_classes():
    d = data([50] * 10)
    p = deal(Shards(), d, 10, split=SplitConfig(test="split", test_share=0.29, val=0.5))
    check(p, d)
    assert (p.test.sizes == 15).all()  # 0.29 * 50 = 14.5, half up (binary floats give 14)
    assert (p.val.sizes == 18).all()  # half of the remaining 35 is 17.5
    assert (p.train.sizes == 17).all()
    for part in ("train", "val", "test"):
        counts = p.counts(d.y, 10, part)
        assert ((counts > 0).sum(axis=1) == 2).all() and max(np.ptp(row[row > 0]) for row in counts) <= 2


def test_a_cut_takes_its_share_of_every_class():
    d = data([50] * 10)
    p = deal(IID(), d, 10, split=SplitConfig(test="split", test_share=0.2))
    train, test = p.counts(d.y, 10), p.counts(d.y, 10, "test")
    assert (np.abs(test - 0.2 * (train + test)) < 1).all()


def test_val_and_holdout_change_no_one_elses_draw():
    plain = deal(IID(), SMALL, 7)
    p = deal(IID(), SMALL, 7, split=SplitConfig(val=0.3), holdout_users=0.5)
    assert (p.test.index == plain.test.index).all() and plain.seen.all() and not len(plain.val.index)
    for i in range(7):
        assert sorted(np.concatenate([p.train.of(i), p.val.of(i)])) == sorted(plain.train.of(i))
    assert (~p.seen).sum() == 4  # 3.5, half up; their data stay in place


def test_holdout_leaves_one_user_to_train():
    assert deal(IID(), SMALL, 3, holdout_users=0.99).seen.sum() == 1
    assert (deal(IID(), SMALL, 20, holdout_users=0.2, seed=0).seen != deal(IID(), SMALL, 20, holdout_users=0.2, seed=1).seen).any()


def test_iid_per_user():
    p = deal(IID(per_user=6), SMALL, 30)
    assert (p.train.sizes == 6).all() and p.test.sizes.sum() == 100 and np.ptp(p.test.sizes) <= 2


# ------------------------------------------------------------------------------------------- natural, file


def test_natural_users_keep_their_own_train_and_test_data():
    # User 0: 1 train example, user 1: 3 (the sizes of fault row B12).
    d = Data(y=np.array([0, 1, 1, 1, 0, 1]), n_train=4, classes=("a", "b"), user=np.array([0, 1, 1, 1, 0, 1]))
    p = deal(Natural(), d, 2)
    assert list(p.train.sizes) == [1, 3] and list(p.test.of(0)) == [4] and list(p.test.of(1)) == [5]


def test_natural_takes_a_seeded_sample_of_users():
    d = stamp()
    p, q = (deal(Natural(), d, 4, seed=seed) for seed in (0, 1))
    for part in (p, q):
        owners = [set(d.user[np.concatenate([part.train.of(i), part.test.of(i)])]) for i in range(4)]
        assert all(len(own) == 1 for own in owners) and len(set.union(*owners)) == 4
    assert p.digest() != q.digest()


def test_natural_users_keep_their_names(tmp_path):
    d = replace(stamp(), users=tuple("gfedcba"))
    p = deal(Natural(), d, 3)
    owners = [int(d.user[p.train.of(i)[0]]) for i in range(3)]
    assert p.names == tuple("gfedcba"[u] for u in owners)
    assert [name for name, _ in p.blocks()] == [f"user {i}: {name}" for i, name in enumerate(p.names)]
    p.save(tmp_path / "p.npz")
    assert Partition.load(tmp_path / "p.npz").names == p.names == deal(File(path=str(tmp_path / "p.npz")), d, 3).names
    assert p.digest() == deal(Natural(), stamp(), 3).digest()  # names are no part of who owns what
    assert deal(IID(), d, 3).names == ()


def test_natural_split_pools_and_cuts():
    d = stamp()
    p = deal(Natural(), d, 7, split=SPLIT)
    assert all((d.user[p.test.of(i)] == i).all() and len(p.test.of(i)) == 6 for i in range(7))  # 0.2 of 28 or 29


def test_save_and_load(tmp_path):
    p = deal(Table2(), MNIST5K, 20, split=SplitConfig(val=0.1), holdout_users=0.2)
    p.save(tmp_path / "partition-seed0.npz")
    q = Partition.load(tmp_path / "partition-seed0.npz")
    assert q.digest() == p.digest() and q.groups == p.groups and (q.seen == p.seen).all()
    assert [f.name for f in tmp_path.iterdir()] == ["partition-seed0.npz"]
    again = deal(File(path=str(tmp_path / "partition-seed{seed}.npz")), MNIST5K, 20)
    assert again.digest() == p.digest() and (again.val.index == p.val.index).all()


def test_a_file_of_other_data_is_refused(tmp_path):
    deal(IID(), SMALL, 4).save(tmp_path / "p.npz", data="those")
    config = File(path=str(tmp_path / "p.npz"))
    assert deal(config, replace(SMALL, fingerprint="those"), 4).n == 4
    with pytest.raises(UserError, match=r"^partition.path=.*p\.npz: made for other data than these"):
        deal(config, replace(SMALL, fingerprint="these"), 4)
    with np.load(tmp_path / "p.npz") as file:  # as it was written before data were noted
        np.savez(tmp_path / "p.npz", **{key: file[key] for key in file if key not in ("data", "names")})
    assert deal(config, replace(SMALL, fingerprint="these"), 4).n == 4


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    def disk_full(*args, **kw):
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez_compressed", disk_full)
    with pytest.raises(OSError, match="disk full"):
        deal(IID(), SMALL, 4).save(tmp_path / "p.npz")
    assert not list(tmp_path.iterdir())


def test_file_refusals(tmp_path):
    path = tmp_path / "p.npz"
    p = deal(IID(), SMALL, 4)
    p.save(path)
    config = File(path=str(path))
    with pytest.raises(UserError, match=r"^n=5: 4, the users of .*p\.npz"):
        deal(config, SMALL, 5)
    with pytest.raises(UserError, match=r"partition.path=.*made for other data: it holds example 299, toy has 100 \(0 to 99\)"):
        deal(config, data([10] * 10), 4)
    with pytest.raises(UserError, match="^split.val=0.1: 0 with partition=file"):
        deal(config, SMALL, 4, split=SplitConfig(val=0.1))
    with pytest.raises(UserError, match="^holdout_users=0.5: 0 with partition=file"):
        deal(config, SMALL, 4, holdout_users=0.5)
    with pytest.raises(UserError, match="^partition.path=null: a file that a run saved"):
        File()
    with pytest.raises(UserError, match="partition.path=.*no such file"):
        deal(File(path=str(tmp_path / "absent.npz")), SMALL, 4)
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **(arrays | {"seen": ~arrays["seen"]}))
    with pytest.raises(UserError, match="partition.path=.*damaged: its content does not match the digest"):
        Partition.load(path)
    np.savez(path, **(arrays | {"train_index": arrays["train_index"] * 0}))
    with pytest.raises(UserError, match="partition.path=.*an example is owned twice"):
        Partition.load(path)
    for content in (b"", b"no archive", (tmp_path / "p.npz").read_bytes()[:500]):
        path.write_bytes(content)
        with pytest.raises(UserError, match="partition.path=.*not a saved partition, or damaged"):
            Partition.load(path)


# ------------------------------------------------------------------------------------------- refusals

TINY = data([3] * 10, [1] * 10, table2=(196, 34), name="tiny")
BARE = data([60] * 10, name="bare")
FEW = data([2] * 10, [3] * 10, name="few")
LONE = Data(y=np.array([0, 1, 1, 0]), n_train=4, classes=("a", "b"), user=np.array([0, 0, 0, 1]))


@pytest.mark.parametrize(
    ("config", "d", "n", "kw", "message"),
    [
        (IID(), SMALL, 0, {}, "^n=0: at least 1$"),
        (Table2(), data([20] * 3, [9] * 3), 10, {}, "^partition=table2: needs 10 classes, toy has 3"),
        (Table2(), SMALL, 10, {}, "^partition.a=null: an even number of at most 2 with n=10; null only where .* toy has none$"),
        (Table2(a=2), SMALL, 10, {}, "^partition.a_test=null: no number fits n=10; null only where"),
        (Table2(a=34, a_test=12), MNIST5K, 20, {}, "^partition.a_test=12: .* at most 10 with n=20, or n of at most 10: class 0 needs 132 "),
        (Table2(), TINY, 10, {}, "^partition.a=196: no number fits n=10: class 0 needs 1078 images, the train part of tiny has 3$"),
        (Table2(a=2), BARE, 10, {}, "^split.test=matched: split: bare has no official test part$"),
        (Table2(a=30), BARE, 10, {"split": SPLIT}, "^partition.a=30: .* at most 10 with n=10: class 0 needs 165 images, all data .* 60$"),
        (Table2(a=2, a_test=2), BARE, 10, {"split": SPLIT}, "^partition.a_test=2: null with split.test=split"),
        (IID(), SMALL, 151, {}, "^n=151: at most 150: every user needs a train and a test example, toy has 300 examples$"),
        (Shards(), SMALL, 10**30, {}, "^n=10{30}: at most 150"),
        (Table2(a=10**30), MNIST5K, 20, {}, "^partition.a=10{30}: .* at most 34 with n=20: class 0 needs 110{30} "),
        (IID(), FEW, 25, {}, "^n=25: at most 20, one example each: few has 20 to deal out$"),
        (IID(per_user=21), SMALL, 10, {}, "^partition.per_user=21: at most 20 with n=10: 210 examples are needed, there are 200"),
        (IID(), SMALL, 120, {}, r"^partition=iid: users \d+, .* and \d+ more without test examples \(split.test=split"),
        (IID(), BARE, 10, {}, "^split.test=matched: split: bare has no official test part$"),
        (Natural(), LONE, 2, {"split": SPLIT}, "^partition=natural: user 1 with fewer than 2 examples, too few to cut"),
        (Dirichlet(min_size=1), FEW, 25, {}, "^partition.min_size=1: impossible with n=25: .* is 25 examples, there are 20$"),
        (Shards(classes_per_user=11), SMALL, 10, {}, "^partition.classes_per_user=11: 1 to 10: toy has 10 classes"),
        (Shards(classes_per_user=2), SMALL, 3, {}, "^partition.classes_per_user=2: at least 4 with n=3: 6 places leave 4 of 10"),
        (Shards(classes_per_user=5), SMALL, 100, {}, "^partition.classes_per_user=5: too many for n=100: class 0 has 20 .* for 50 users"),
        (Natural(), SMALL, 7, {}, "^partition=natural: toy has no users of its own"),
        (Natural(), stamp(), 8, {}, r"^n=8: 7, the users of stamp, or fewer"),
        (Natural(), stamp(195), 7, {}, r"^partition=natural: users 4, 5 without test examples \(split.test=split"),
        (IID(), SMALL, 4, {"holdout_users": 1.0}, "^holdout_users=1.0: 0 or more and below 1"),
        (IID(), SMALL, 4, {"holdout_users": -0.1}, "^holdout_users=-0.1: 0 or more and below 1"),
        (IID(), SMALL, 4, {"holdout_users": float("nan")}, "^holdout_users=nan: "),
        (IID(), SMALL, 4, {"holdout_users": 0.1}, "^holdout_users=0.1: 0, or at least 0.125 with n=4"),
        (IID(), SMALL, 1, {"holdout_users": 0.9}, "^holdout_users=0.9: 0 with n=1"),
        (IID(), data([3, 3], [3, 3]), 4, {"split": SplitConfig(val=0.5)}, "^split.val=0.5: smaller: it leaves users 2, 3 without"),
    ],
)
def test_refusals(config, d, n, kw, message):
    with pytest.raises(UserError, match=message) as caught:
        deal(config, d, n, **kw)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "kw", "message"),
    [
        (Table2, {"a": 7}, "^partition.a=7: an even number: 6 or 8$"),
        (Table2, {"a": 0}, "^partition.a=0: an even number of at least 2$"),
        (Table2, {"a_test": -2}, "^partition.a_test=-2: an even number of at least 2$"),
        (Table2, {"pairing": "random"}, "^partition.pairing=random: diagonal or crossed$"),
        (IID, {"per_user": 0}, "^partition.per_user=0: null"),
        (Dirichlet, {"concentration": 0.0}, "^partition.concentration=0.0: a finite number above 0"),
        (Dirichlet, {"concentration": float("nan")}, "^partition.concentration=nan: "),
        (Dirichlet, {"concentration": float("inf")}, "^partition.concentration=inf: "),
        (Dirichlet, {"min_size": 0}, "^partition.min_size=0: at least 1$"),
        (Dirichlet, {"max_draws": 0}, "^partition.max_draws=0: at least 1$"),
        (Shards, {"classes_per_user": 0}, "^partition.classes_per_user=0: at least 1$"),
        (SplitConfig, {"val": 1.0}, "^split.val=1.0: 0 or more and below 1$"),
        (SplitConfig, {"val": float("nan")}, "^split.val=nan: "),
        (SplitConfig, {"test": "both"}, "^split.test=both: matched or split$"),
        (SplitConfig, {"test_share": 0.0}, "^split.test_share=0.0: above 0 and below 1$"),
        (SplitConfig, {"test_share": 1.0}, "^split.test_share=1.0: above 0 and below 1$"),
    ],
)
def test_refused_options(kind, kw, message):
    with pytest.raises(UserError, match=message):
        kind(**kw)


def test_a_partition_checks_itself():
    def part(*users):
        return Owned(np.array([i for u in users for i in u], dtype=np.int64), np.cumsum([0, *map(len, users)]))

    def build(train, val, test):
        n = len(train.offsets) - 1
        return Partition(train, val, test, np.zeros(n, dtype=np.int64), ("all",), np.ones(n, dtype=bool))

    build(part([0, 1], [2]), part([], [3]), part([4], [5]))
    for train, val in (([0, 1], [1]), ([], [])), (([0], [1]), ([], [4])), (([-1], [1]), ([], [])):
        with pytest.raises(AssertionError, match="owned twice|negative"):
            build(part(*train), part(*val), part([4], [5]))
    with pytest.raises(UserError, match="^partition=given: user 1 without train examples; every user needs some$"):
        build(part([0, 1], []), part([], [3]), part([4], [5]))


# ------------------------------------------------------------------------------------------- determinism, sizes, speed


def options(d, n):
    yield Table2(a=2, a_test=2) if n % 10 == 0 else IID()
    yield from (IID(), Dirichlet(concentration=0.3, min_size=2), Shards(classes_per_user=3))


@pytest.mark.parametrize("split", [MATCHED, SPLIT], ids=["matched", "split"])
def test_same_seed_same_partition_other_seed_other_digest(split):
    d, n = data([60] * 10, [30] * 10), 10
    for config in options(d, n):
        if split is SPLIT and isinstance(config, Table2):
            config = Table2(a=4)
        digests = [deal(config, d, n, seed=seed, split=split).digest() for seed in (0, 0, 1)]
        assert digests[0] == digests[1] != digests[2] and len(digests[0]) == 64


def test_many_small_sizes():
    rng = np.random.default_rng(0)
    refused = 0
    for trial in range(300):
        C, n = int(rng.integers(2, 8)), int(rng.integers(1, 12))
        d = data(rng.integers(3, 30, C).tolist(), rng.integers(1, 20, C).tolist())
        share, val = float(rng.uniform(0.05, 0.95)), float(rng.choice([0, 0.1, 0.4]))
        split = SplitConfig(test=("matched", "split")[trial % 2], test_share=share, val=val)
        kinds = (IID(), Dirichlet(concentration=0.5, min_size=2, max_draws=50), Shards(classes_per_user=int(rng.integers(1, C + 1))))
        config = kinds[trial % 3]
        try:
            p = deal(config, d, n, seed=trial, split=split, holdout_users=0.5 if n > 1 else 0)
        except UserError:
            refused += 1
            continue
        check(p, d)
        pooled = split.test.name == "split"
        total = len(p.train.index) + len(p.val.index) + len(p.test.index)
        assert total == len(d.y)
        assert pooled or ((p.test.index >= d.n_train).all() and (p.train.index < d.n_train).all())
        assert (p.counts(d.y, C).sum(axis=1) == p.train.sizes).all() and p.seen.any()
    assert refused < 200  # most sizes are legal


@pytest.mark.parametrize("kind", PARTITIONS)
def test_yaml_holds_exactly_the_fields(kind):
    raw = OmegaConf.load(CONF / f"{kind}.yaml")
    if kind == "file":
        raw.path = "p.npz"
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(PARTITIONS[kind]), raw))
    assert config == PARTITIONS[kind](**({"path": "p.npz"} if kind == "file" else {})) and config.name == kind
    assert list(raw) == list(vars(config))


def test_ten_thousand_users():
    d = Data(y=np.random.default_rng(0).integers(0, 10, 700_000), n_train=600_000, classes=tuple("0123456789"))
    p = deal(IID(per_user=60), d, 10_000)
    p.counts(d.y, 10), p.digest()
    assert (p.train.sizes == 60).all()
    for config in (Table2(), IID(), Dirichlet(), Shards()):
        deal(config, MNIST, 50)
