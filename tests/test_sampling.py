"""Named streams: uniform, keyed by all parts, pinned, the same under every algorithm. Row B11 of the fault list."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small import algorithm, cloud, federation, ranges, split

from perfed.algorithms import ALGORITHMS
from perfed.data.partition import Owned
from perfed.data.sampling import LONG as SWITCH
from perfed.data.sampling import Draw, cohort, cohort_size, draw, generator, key, permuted, uniforms
from perfed.draws import Lanes, positions


def keys(count: int, *parts) -> np.ndarray:
    return key(*(parts or ("test",)), np.arange(count))


def chi_square(counts: np.ndarray) -> float:
    """Against equal expected counts."""
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2).sum() / expected)


# ---------------------------------------------------------------- draws


def test_ordered_pairs_of_four_are_uniform():
    """All 12 ordered pairs without repeats; chi-square with 11 degrees of freedom exceeds 40 once in 30,000 times."""
    got = permuted(keys(24_000), 4, 2)
    counts = np.array([((got[:, 0] == a) & (got[:, 1] == b)).sum() for a, b in itertools.permutations(range(4), 2)])
    assert counts.sum() == 24_000
    assert chi_square(counts) < 40
    skewed = np.where(got[:, 0] == 3, 0, got[:, 0])  # the bound fails where one position is never drawn
    assert chi_square(np.bincount(skewed, minlength=4)) > 1000


def test_all_orders_of_three_are_uniform():
    got = permuted(keys(12_000), 3, 3)
    counts = np.array([(got == order).all(1).sum() for order in itertools.permutations(range(3))])
    assert counts.sum() == 12_000 and chi_square(counts) < 30  # 5 degrees of freedom: once in 70,000 times


@pytest.mark.parametrize("m", [SWITCH - 1, SWITCH, 150])
def test_positions_are_uniform_on_both_sides_of_the_switch(m):
    """Each of the first three positions, and the difference of the first two, over all m values."""
    got = permuted(keys(200 * m, "wide", m), m, 3)
    for column in (*got.T, (got[:, 1] - got[:, 0]) % m):
        counts = np.bincount(column, minlength=m)
        if counts[0] == 0:  # a difference is never 0
            counts = counts[1:]
        assert chi_square(counts) < m + 6 * np.sqrt(2 * m)


@pytest.mark.parametrize("m, size", [(1, 1), (5, 5), (7, 3), (96, 96), (97, 97), (97, 40), (130, 129), (1000, 40), (300, 290)])
def test_no_repeats(m, size):
    got = permuted(keys(500), m, size)
    assert got.shape == (500, size) and got.dtype == np.int64
    assert got.min() >= 0 and got.max() < m
    assert (np.diff(np.sort(got, axis=1)) > 0).all()


@pytest.mark.parametrize("m", [SWITCH - 1, SWITCH, 2 * SWITCH])
def test_a_shorter_draw_is_the_beginning_of_a_longer_one(m):
    whole = permuted(keys(50), m, m)
    for size in (1, 2, 17, 40, m - 1):
        assert (permuted(keys(50), m, size) == whole[:, :size]).all()
    assert (permuted(keys(50)[::-1], m, 40) == whole[::-1, :40]).all()


@pytest.mark.parametrize("size", [1, 40, SWITCH])
def test_users_of_different_sizes_draw_in_one_call_as_they_do_alone(size):
    m = np.array([SWITCH, SWITCH + 1, 3000, 150, SWITCH, 10**6] * 5)
    together = permuted(keys(30), m, size)
    for i in range(30):
        assert (together[i] == permuted(keys(30)[i : i + 1], int(m[i]), size)[0]).all()


def test_who_has_enough_to_be_drawn_for_with_others():
    assert Draw(40, "outer").plenty() == Draw(SWITCH - 1, "outer").plenty() == SWITCH
    assert Draw(SWITCH, "outer").plenty() == SWITCH + 1  # with as many as the batch, all of them come, in order
    assert Draw(40, "outer", 80).plenty() == 121
    assert Draw(40, "outer", part=(0, 0.5)).plenty() > 10**9  # cut by each user's size


def test_a_draw_larger_than_the_data_is_all_the_data():
    assert permuted(keys(3), 7, 40).shape == (3, 7)
    assert (draw(keys(3), 7, Draw(40, "outer")) == np.arange(7)).all()
    assert (draw(keys(3), 7, Draw(7, "outer")) == np.arange(7)).all()
    assert draw(keys(3), 1, Draw(40, "outer")).tolist() == [[0]] * 3


@pytest.mark.parametrize("m", [30, 200])
def test_draws_from_one_stream_are_disjoint(m):
    parts = [draw(keys(40), m, Draw(size, "outer", start)) for size, start in ((10, 0), (12, 10), (8, 22))]
    assert [p.shape[1] for p in parts] == [10, 12, 8]
    joined = np.concatenate(parts, axis=1)
    assert (np.diff(np.sort(joined, axis=1)) > 0).all()
    assert (joined == permuted(keys(40), m, 30)).all()
    assert (parts[0] == draw(keys(40), m, Draw(10, "outer"))).all()


def test_positions_of_users_with_few_some_and_many_examples():
    """Batches of 120 from 7, 100, 121 and 400 examples: each as alone, the first two padded."""
    sizes = [7, 100, 121, 400]
    data, lanes = [ranges(sizes)], Lanes(np.zeros(4, np.int64), np.arange(4))
    owned = [Owned(np.concatenate(data[0]), np.cumsum([0, *sizes]))]
    what, steps = Draw(120, "outer"), key("t", np.arange(4)[:, None], np.arange(3))
    index, weight = positions(owned, lanes, steps, what)
    assert index.shape == weight.shape == (4, 3, 120)
    for i, m in enumerate(sizes):
        alone = draw(steps[i], m, what) + owned[0].offsets[i]
        assert (index[i, :, : alone.shape[1]] == alone).all() and np.isin(index[i], data[0][i]).all()
        assert (weight[i].sum(1) == min(m, 120)).all()


# ---------------------------------------------------------------- keys


def test_every_part_of_a_key_counts():
    base = (3, "outer", 5, 7, 2)
    others = [(4, *base[1:]), (3, "inner", 5, 7, 2), (3, "outer", 6, 7, 2), (3, "outer", 5, 8, 2), (3, "outer", 5, 7, 3)]
    swapped = [(3, "outer", 7, 5, 2), (3, "outer", 5, 2, 7), (5, "outer", 3, 7, 2)]
    drawn = {tuple(permuted(np.atleast_1d(key(*k)), 1000, 10)[0]) for k in (base, *others, *swapped)}
    assert len(drawn) == 9


def test_keys_of_a_grid_are_distinct():
    grid = key(np.arange(5)[:, None, None, None], "outer", np.arange(20)[:, None, None], np.arange(30)[:, None], np.arange(10))
    assert grid.shape == (5, 20, 30, 10) and grid.dtype == np.uint64
    assert len(np.unique(grid)) == grid.size
    assert grid[2, 3, 4, 5] == key(2, "outer", 3, 4, 5)


def test_uniforms_continue_where_they_are_told_to():
    whole = uniforms(keys(4), 20)
    assert (uniforms(keys(4), 8, start=12) == whole[:, 12:]).all()
    assert whole.min() >= 0 and whole.max() < 1
    many = uniforms(keys(1000), 100).ravel()
    assert chi_square(np.bincount((many * 50).astype(int), minlength=50)) < 49 + 6 * np.sqrt(98)
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.02


def test_streams_are_pinned():
    """A change of the streams changes every result: raise the version of all algorithms with it."""
    assert int(key(0)) == 16294208416658607535
    assert int(key(7, "outer", 3, 0, 1)) == PINNED["key"]
    assert uniforms(np.atleast_1d(key(0, "tk", 0)), 3)[0].tolist() == PINNED["uniforms"]
    assert permuted(keys(2, 0, "outer", 1), 10, 6).tolist() == PINNED["short"]
    assert permuted(keys(2, 0, "outer", 1), 1000, 6).tolist() == PINNED["long"]
    assert cohort(0, 0, 50, 10).tolist() == PINNED["cohort"]
    assert generator(0, "init").integers(1000, size=4).tolist() == PINNED["generator"]


PINNED = {
    "key": 18406054603826945412,
    "uniforms": [0.2074478501941407, 0.44183773346417554, 0.8243961784956798],
    "short": [[9, 7, 8, 0, 4, 5], [3, 2, 1, 4, 7, 0]],
    "long": [[157, 995, 716, 502, 358, 373], [388, 194, 184, 99, 256, 876]],
    "cohort": [6, 8, 13, 19, 30, 31, 32, 40, 45, 47],
    "generator": [491, 375, 664, 138],
}

DIGEST = """
import hashlib
import numpy as np
from perfed.data.sampling import Draw, cohort, draw, generator, key, permuted
parts = [key(3, "outer", np.arange(9), 2, 1), permuted(key("a", np.arange(5)), 300, 40), cohort(1, 4, 30, 7)]
parts += [draw(key(2, np.arange(3)), 50, Draw(4, "inner", 6)), generator(5, "partition", "x").random(8)]
print(hashlib.sha256(b"".join(np.ascontiguousarray(p).tobytes() for p in parts)).hexdigest())
"""


def test_another_hash_seed_gives_the_same_numbers(capsys):
    root = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", DIGEST], capture_output=True, text=True, env=env, timeout=60, check=True)
    exec(DIGEST, {})
    assert done.stdout == capsys.readouterr().out
    assert len(done.stdout) == 65 and hashlib.sha256().hexdigest() != done.stdout.strip()


# ---------------------------------------------------------------- cohorts


@pytest.mark.parametrize(
    "n, r, size",
    [(50, 0.2, 10), (100, 0.29, 29), (50, 0.29, 15), (100, 0.07, 7), (4, 0.2, 1), (5, 1.0, 5), (50, 0.05, 3), (3, 0.01, 1), (50, 1e-05, 1)],
)
def test_b11_cohort_sizes(n, r, size):
    assert cohort_size(n, r) == size
    for k in range(20):
        chosen = cohort(0, k, n, size)
        assert len(chosen) == len(set(chosen.tolist())) == size
        assert (np.diff(chosen) > 0).all() and chosen[0] >= 0 and chosen[-1] < n


def test_users_are_drawn_alike():
    times = np.zeros(20)
    for k in range(3000):
        times[cohort(0, k, 20, 4)] += 1
    assert times.sum() == 12_000
    assert chi_square(times) < 19 + 6 * np.sqrt(38)
    assert len({tuple(cohort(s, k, 20, 4)) for s in range(3) for k in range(30)}) > 80


# ---------------------------------------------------------------- common random numbers


def world(algo, seeds=(0, 1)):
    sizes = [130, 60, 125]
    x, y = cloud(sum(sizes) + 6)
    partitions = [split(ranges(sizes), ranges([2, 2, 2], sum(sizes))) for _ in seeds]
    return federation(algo, x, y, partitions, seeds=seeds, active=2)


LANES = Lanes(np.array([0, 0, 1]), np.array([0, 2, 1]))
OWN_DATA = {"fedmeta", "metasgd", "pooled"}  # a step reads a fixed part of a user's data, or everybody's
BATCHES = {name: [{}] for name in ALGORITHMS if name not in OWN_DATA}
BATCHES |= {"fedmeta": [{"support": None}], "metasgd": [{"support": None}]}
for _name in ("perfedavg_fo", "perfedavg", "perfedavg_hf"):
    BATCHES[_name] = [{"batches": kind} for kind in ("independent", "disjoint", "shared")] + [{"batch_inner": 3}]


@pytest.mark.parametrize("name, fields", [(name, fields) for name, options in BATCHES.items() for fields in options])
def test_outer_batches_and_cohorts_are_those_of_fedavg(name, fields):
    plain, other = world(algorithm("fedavg", batch=20)), world(algorithm(name, batch=20, **fields))
    for k in range(3):
        assert (plain.cohorts(k) == other.cohorts(k)).all()
        index, weight = plain.batches(LANES, k, 3)
        again, same_weight = other.batches(LANES, k, 3)
        assert (again["outer"] == index["outer"]).all() and (same_weight["outer"] == weight["outer"]).all()


@pytest.mark.parametrize("name", ["perfedavg", "perfedavg_hf", "perfedavg_fo"])
def test_disjoint_roles_share_no_example(name):
    fed = world(algorithm(name, batch=20, batches="disjoint", batch_inner=7))
    index, _ = fed.batches(LANES, 0, 4)
    for lane, t in itertools.product(range(3), range(4)):
        together = np.concatenate([part[lane, t].numpy() for part in index.values()])
        assert len(set(together.tolist())) == len(together) == sum(d.size for d in fed.algo.draws().values())


def test_roles_lanes_rounds_and_steps_draw_differently():
    fed = world(algorithm("perfedavg", batch=20))
    drawn = [tuple(np.sort(v[i, t])) for k in range(2) for v in fed.batches(LANES, k, 3)[0].values() for i in range(3) for t in range(3)]
    assert len(set(drawn)) == len(drawn) == 2 * 3 * 3 * 3
    shared = world(algorithm("perfedavg", batch=20, batches="shared")).batches(LANES, 0, 3)[0]
    assert (shared["outer"] == shared["inner"]).all() and (shared["outer"] == shared["hess"]).all()


def test_a_batch_does_not_depend_on_who_else_is_there():
    fed = world(algorithm("perfedavg", batch=70))
    together, weights = fed.batches(LANES, 1, 2)
    for i in range(3):
        alone, weight = fed.batches(Lanes(LANES.seed[i : i + 1], LANES.user[i : i + 1]), 1, 2)
        for role in alone:
            mine = fed.train[LANES.seed[i]].of(LANES.user[i])
            assert (alone[role][0] == together[role][i]).all() and (weight[role][0] == weights[role][i]).all()
            assert (weight[role][0].sum(1) == min(70, len(mine))).all()
            assert np.isin(together[role][i], mine).all()
