"""Seeds that a half-width needs, variance by source against known components, and the commands of missing runs."""

import math
import shlex

import numpy as np
import pytest
from test_pivot import made
from test_report import cells

from perfed import keys, pivot, power, tables
from perfed.config import parse
from perfed.errors import UserError
from perfed.frontdoor import Composer, compose
from perfed.identity import identity

COMPOSER = Composer()
# Orthogonal, of mean 0: so the variance over seeds of a sum is the sum of the variances, 10/4, 14/4 and 10/4, exactly.
P, Q, B = (np.array(v) for v in ([-2, -1, 0, 1, 2], [2, -1, -2, -1, 2], [-1, 2, 0, -2, 1]))
NONE = None


def numbers(*parts):
    return {str(s): float(v) for s, v in enumerate(sum(parts, np.full(5, 80.0)))}


ALL, ONLY_P, ONLY_I, ONLY_B = (NONE,) * 3, (NONE, 0, 0), (0, NONE, 0), (0, 0, NONE)


def test_one_source_free_at_a_time():
    runs = {ALL: numbers(P, Q, B), ONLY_P: numbers(P), ONLY_I: numbers(Q), ONLY_B: numbers(B)}
    found = power.components(runs)
    assert found.variance == pytest.approx((2.5, 3.5, 2.5)) and sorted(found.df) == [4, 4, 4, 4]
    # two of them and the whole are enough: the third is the rest
    assert power.components({k: runs[k] for k in (ALL, ONLY_P, ONLY_I)}).variance == pytest.approx((2.5, 3.5, 2.5))
    assert power.components({k: runs[k] for k in (ONLY_P, ONLY_I)}).variance == (pytest.approx(2.5), pytest.approx(3.5), None)
    assert power.components({ALL: runs[ALL]}).variance == (None, None, None)
    assert power.components({}).variance == (None, None, None)


def test_one_source_fixed_at_a_time():
    """All minus what is left without the source."""
    runs = {ALL: numbers(P, Q, B), (0, NONE, NONE): numbers(Q, B), (NONE, 0, NONE): numbers(P, B), (NONE, NONE, 0): numbers(P, Q)}
    assert power.components(runs).variance == pytest.approx((2.5, 3.5, 2.5))


def test_crossed_runs():
    """Runs that differ in a fixed partition: Y[c, s] = P_c + (Q + B)_s + E[c, s], E with rows and columns of sum 0.

    E = e outer(u, v) with u . 1 = v . 1 = 0, |u|^2 = 10, |v|^2 = 14 leaves MS_e = e^2 140 / 16 and adds nothing to the means, so the
    variance of the row means is 2.5 and the estimate 2.5 - MS_e / 5. The runs' own variances pool to 3.5 + 2.5 + e^2 7: the mean of u^2 is
    2, |v|^2 / 4 = 3.5, and cross terms sum to 0 over the runs."""
    e = 0.1
    error = e * np.outer(P, Q)
    runs = {(c, NONE, NONE): numbers(np.full(5, float(P[c])), Q, B, error[c]) for c in range(5)}
    found = power.components(runs)
    assert found.variance[0] == pytest.approx(2.5 - e**2 * 140 / 16 / 5)
    assert found.variance[1:] == (None, None)
    free_i = {(0, NONE, 0): numbers(Q)}
    whole = power.components(runs | free_i)  # init alone is free: 3.5; the rest of what partition leaves is B
    assert whole.variance[1:] == pytest.approx((3.5, 6 + e**2 * 7 - 3.5))
    single = {(c, 0, 0): {"0": float(P[c])} for c in range(5)}  # everything fixed, one seed each
    assert power.components(single).variance == (pytest.approx(2.5), None, None)


def test_a_variance_is_never_below_zero():
    """P alone 2.5, I alone 3.5, but only 5 together: B would be -1; the best with v_B = 0 is a compromise of the three equations.

    A sample variance of df degrees of freedom has the variance 2 v^2 / df, so each weighs 1 / v^2 as fitted (all have df = 4):
    (p - 2.5) / p^2 = (i - 3.5) / i^2 = -(p + i - 5) / (p + i)^2, which p = 2.38286, i = 3.27829 solve."""
    together = {s: 80 + (v - 80) * math.sqrt(5 / 6) for s, v in numbers(P, Q).items()}
    found = power.components({ALL: together, ONLY_P: numbers(P), ONLY_I: numbers(Q)})
    p, i, b = found.variance
    misfit = (p + i - 5) / (p + i) ** 2
    assert ((2.5 - p) / p**2, (3.5 - i) / i**2, b) == (pytest.approx(misfit, rel=1e-3), pytest.approx(misfit, rel=1e-3), 0.0)
    assert (p, i) == pytest.approx((2.38286, 3.27829), rel=1e-4)


def test_a_source_that_is_measured_alone_is_not_drowned_by_a_large_one():
    """Variances 0.5, 12 and 0.4, each redrawn alone and all together, five seeds, 200 times: least squares with weights that ignore the
    size of a variance would put the small ones at 0 half of the time."""
    rng, true, found = np.random.default_rng(0), np.array([0.5, 12.0, 0.4]), []
    for _ in range(200):
        runs = {}
        for free in ((1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
            effects = rng.normal(size=(5, 3)) * np.sqrt(true) * free
            runs[tuple(None if yes else 0 for yes in free)] = numbers(*effects.T)
        found.append(power.components(runs).variance)
    found = np.array(found)
    assert (found > 0).all()
    # A sample variance of 4 degrees of freedom has a standard deviation of v / sqrt(2): of 200, 0.05 v; within 4 of these.
    assert found.mean(axis=0) == pytest.approx(true, rel=0.2)


def test_known_components_are_found_in_many_seeds():
    """400 seeds of normal effects with variances 4, 1 and 2.25 and an interaction: within 5 standard errors sqrt(2 / 399) of v."""
    rng = np.random.default_rng(0)
    p, i, b = (sd * rng.standard_normal(400) for sd in (2.0, 1.0, 1.5))
    runs = {f: {str(s): x for s, x in enumerate(v)} for f, v in ((ALL, p + i + b), (ONLY_P, p + 3), (ONLY_I, i), (ONLY_B, b))}
    for got, want in zip(power.components(runs).variance, (4.0, 1.0, 2.25), strict=True):
        assert abs(got - want) < 5 * want * math.sqrt(2 / 399) * 1.5


def run(values, **fixed):
    return made(per_seed=[v / 100 for v in values.values()], name=f"run{fixed}", **{k: fixed.get(k) for k in tables.CHANCE})


def arranged(*runs):
    return pivot.arrange(runs, ["tau"], ignore=tuple(tables.CHANCE))


def test_tables_of_power():
    runs = [run(numbers(P, Q, B)), run(numbers(P), init_seed=0, sampling_seed=0), run(numbers(Q), partition_seed=0, sampling_seed=0)]
    table = power.needed_table(arranged(*runs), 2)
    # s = sqrt(8.5) = 2.9155: t(9) / sqrt 10 = .71536 gives 2.086, t(10) / sqrt 11 = .67180 gives 1.959; sqrt(2.5) = 1.5811: t(4) / sqrt 5 =
    # 1.24166 gives 1.963; sqrt(3.5) = 1.8708: t(5) / sqrt 6 = 1.04943 gives 1.963. The true s is within sqrt(4 / 11.1433) = .59914 and
    # sqrt(4 / .484419) = 2.87356 of it.
    assert [row[:6] for row in cells(table)] == [
        ["10", "fedavg", "all three", "5", "3.62", "2.92 (1.75 to 8.38)"],
        ["10", "fedavg", "partition", "5", "1.96", "1.58 (0.95 to 4.54)"],
        ["10", "fedavg", "initial model", "5", "2.32", "1.87 (1.12 to 5.38)"],
    ]
    assert [row[6] for row in cells(table)] == ["11", "5", "6"]
    table = power.variance_table(arranged(*runs))
    # the third is the rest: 2.5, 3.5, 2.5 of 8.5
    assert cells(table) == [["10", "fedavg", "1.58 (29 %)", "1.87 (41 %)", "1.58 (29 %)", "2.92", "2.92"]]
    assert table.notes == () and "a factor of 0.60 to 2.87" in table.caption


def test_power_of_a_difference_is_of_the_paired_difference():
    base, other = made("fedavg"), made("local", [0.70, 0.72, 0.73, 0.72, 0.73])
    # .80 .. .84 minus that: .10 .09 .09 .11 .11, s = .01: t(6) / sqrt 7 = .9248, t(7) / sqrt 8 = .8360
    table = power.needed_table(arranged(base, other), 0.9, reference="local")
    assert [row[1:2] + row[3:5] + row[6:7] for row in cells(table)] == [["fedavg", "5", "1.24", "8"]]
    with pytest.raises(UserError, match="^reference=locl: a column: fedavg, local"):
        power.needed_table(arranged(base, other), 0.9, reference="locl")
    with pytest.raises(UserError, match="^cell=grad_evals: with power"):
        power.needed_table(arranged(base, other), 0.9, "grad_evals")
    one = power.needed_table(arranged(made(per_seed=[0.8])), 0.9)
    assert cells(one)[0][3:] == ["1", "-", "-", "-", "-"] and one.notes == ("-: fedavg, tau=10: one seed has no spread.",)


WORDS = [
    ["algo=fedavg", "tau=4", "seeds=5", "outputs=/x y", "rounds=20"],
    ["algo=ditto", "algo.lam=0.3", "dataset=synthetic", "partition=dirichlet", "partition.concentration=0.1", "engine.dtype=float64"],
    ["algo=perfedavg_hf", "algo.alpha=0.3", "adapt.steps=[0,1,5]", "protocol=fewshot", "protocol.support=3", "model.hidden=[6,7]"],
    ["algo=partial", "algo.personal=[layer1,layer3]", "server=adam", "model=langelaar", "partition=shards", "split.val=0.2", "seed=7"],
]


@pytest.mark.parametrize("words", WORDS, ids=lambda words: words[0])
def test_the_printed_command_is_the_run(words):
    """Composed again, it has the same identity; with a fixed seed, that of the run asked for."""
    config = parse(compose(words, COMPOSER))
    stored = config.as_dict()
    again = parse(compose(shlex.split(keys.command(stored))[3:], COMPOSER))
    assert identity(again, "data").hash == identity(config, "data").hash
    assert (again.outputs, again.seeds) == (config.outputs, config.seeds)
    assert shlex.split(keys.command(stored, init_seed=3)).count("init_seed=3") == 1
    assert len(shlex.split(keys.command(stored))) <= 4 + len(words)  # what equals a default is left out


def test_missing_runs_are_named_by_their_command():
    config = parse(compose(WORDS[0], COMPOSER))
    stored = made("fedavg", tau=4)
    stored.config.clear()
    stored.config.update(config.as_dict())
    (note,) = power.variance_table(arranged(stored)).notes
    assert note == (
        "-: fedavg, tau=4: partition, initial model, user sampling and batches: needs runs that redraw one alone: "
        "printf '%s\\n' 'init_seed=0 sampling_seed=0' 'partition_seed=0 sampling_seed=0' 'partition_seed=0 init_seed=0' | "
        "xargs -L1 python -m perfed algo=fedavg rounds=20 tau=4 seeds=5 'outputs=/x y'"
    )
