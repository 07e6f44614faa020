"""Intervals, paired tests and worst users against numbers worked out by hand."""

import math

import numpy as np
import pytest

from perfed import stats


def test_interval_three_seeds():
    # s = sqrt((.02^2 + 0 + .02^2) / 2) = .02; t(2, .975) = 4.302653; 4.302653 * .02 / sqrt(3) = .049683
    mean, half = stats.interval([0.70, 0.72, 0.74])
    assert mean == pytest.approx(0.72, abs=1e-12)
    assert half == pytest.approx(0.0496827, abs=1e-6)


def test_interval_averages_users_within_a_seed_first():
    # user means .7 and .8: mean .75, s = .1 / sqrt(2), s / sqrt(2) = .05; t(1, .975) = tan(.475 pi) = 12.7062
    mean, half = stats.interval([[0.5, 0.7, 0.9], [0.6, 0.8, 1.0]])
    assert mean == pytest.approx(0.75, abs=1e-12)
    assert half == pytest.approx(0.05 * math.tan(0.475 * math.pi), abs=1e-9) == pytest.approx(0.635, abs=5e-4)


def test_interval_level():
    # t(1, .75) = tan(pi / 4) = 1, and s / sqrt(2) = |b - a| / 2
    assert stats.interval([0.2, 0.6], level=0.5)[1] == pytest.approx(0.2, abs=1e-12)


def test_one_seed_has_no_interval():
    assert stats.interval([0.7]) == (0.7, None)
    assert stats.interval([[0.6, 0.8]]) == (pytest.approx(0.7), None)


@pytest.mark.parametrize("values", [[], [0.5, math.nan], [[math.inf]], 0.5])
def test_interval_refuses(values):
    with pytest.raises(ValueError, match="values"):
        stats.interval(values)


def test_paired_uses_common_seeds_only():
    # differences .2, .4 (seed 2 has no partner): mean .3, s / sqrt(2) = .1, t = 3 with 1 degree: p = 1 - (2 / pi) atan(3)
    got = stats.paired({0: 0.7, 1: 0.8, 2: 0.1}, {1: 0.4, 0: 0.5, 5: 0.9})
    assert got.n == 2
    assert got.difference == pytest.approx(0.3)
    assert got.half_width == pytest.approx(0.1 * math.tan(0.475 * math.pi))
    assert got.p == pytest.approx(1 - 2 / math.pi * math.atan(3))


def test_paired_without_spread():
    assert stats.paired({0: 0.5, 1: 0.75}, {0: 0.5, 1: 0.75}).p == 1.0
    assert stats.paired({0: 0.5, 1: 0.75}, {0: 0.25, 1: 0.5}).p == 0.0
    assert stats.paired({0: 0.5}, {0: 0.25}) == (1, 0.25, None, None)


def test_b24_three_seeds_one_seed_two_seeds_of_three_users():
    """Row B24. 1.96 with the sample spread would be .0226, with the population's .0185, the bare spread .0200; six numbers pooled .196."""
    mean, half = stats.interval([0.70, 0.72, 0.74])
    assert (f"{mean:.4f}", f"{half:.4f}") == ("0.7200", "0.0497")
    assert stats.interval([0.7])[1] is None
    mean, half = stats.interval([[0.5, 0.7, 0.9], [0.6, 0.8, 1.0]])
    assert (f"{mean:.3f}", f"{half:.3f}") == ("0.750", "0.635")


def test_tost():
    # differences .2, .4: d = .3, e = .1, 1 degree: P(T < -(M - .3) / .1) = 1/2 - atan((M - .3) / .1) / pi
    d = stats.paired({0: 0.7, 1: 0.8}, {0: 0.5, 1: 0.4})
    assert stats.tost(d, 0.4) == pytest.approx(0.25)  # atan 1 = pi / 4
    assert stats.tost(d, 0.3) == pytest.approx(0.5)
    assert stats.tost(d, 0.2) == pytest.approx(0.75)
    assert stats.tost(d._replace(difference=-0.3), 0.4) == pytest.approx(0.25)
    assert stats.tost(stats.paired({0: 0.5}, {0: 0.25}), 0.4) is None
    same = stats.paired({0: 0.5, 1: 0.75}, {0: 0.25, 1: 0.5})  # no spread, d = .25
    assert (stats.tost(same, 0.3), stats.tost(same, 0.2)) == (0.0, 1.0)
    with pytest.raises(ValueError, match="margin"):
        stats.tost(d, 0.0)


def test_tost_is_the_90_percent_interval_within_the_margin():
    a, b = dict(enumerate([0.1, 0.3, 0.2, 0.25, 0.15])), dict.fromkeys(range(5), 0.1)
    inner = stats.paired(a, b, level=0.90)
    edge = abs(inner.difference) + inner.half_width
    assert stats.tost(stats.paired(a, b), edge * 1.0001) < 0.05 < stats.tost(stats.paired(a, b), edge * 0.9999)


def test_verdict():
    # n = 5: t(4, .975) s / sqrt(5); half-widths are given here
    def d(n, difference, half):
        return stats.Paired(n, difference, half, 0.5)

    assert stats.verdict(d(5, 0.02, 0.019)) == "supported"
    assert stats.verdict(d(5, 0.02, 0.019), "<") == "contradicted"
    assert stats.verdict(d(5, -0.02, 0.019)) == "contradicted"
    assert stats.verdict(d(5, -0.02, 0.019), "<") == "supported"
    assert stats.verdict(d(5, 0.02, 0.02)) == "undecided"  # 0 is in the closed interval
    assert stats.verdict(d(4, 0.02, 0.001)) == "undecided"  # too few common seeds
    assert stats.verdict(d(1, 0.02, None)) == "undecided"
    with pytest.raises(ValueError, match="direction"):
        stats.verdict(d(5, 0.02, 0.01), "=")


def test_seeds_needed():
    # t(1) / sqrt 2 = 12.7062 / 1.41421 = 8.98, t(2) / sqrt 3 = 4.30265 / 1.73205 = 2.484, t(4) / sqrt 5 = 1.2417, t(5) / sqrt 6 = 1.0494
    assert stats.seeds_needed(1.0, 9.0) == 2
    assert stats.seeds_needed(1.0, 8.9) == 3
    assert stats.seeds_needed(1.0, 2.49) == 3
    assert stats.seeds_needed(1.0, 1.25) == 5
    assert stats.seeds_needed(1.0, 1.2416) == 6
    assert stats.seeds_needed(2.0, 2.4832) == stats.seeds_needed(1.0, 1.2416)
    assert stats.seeds_needed(0.0, 0.1) == 2
    # many seeds: (1.96 / .01)^2 = 38,414.6, and t = z + (z^3 + z) / (4 df) is a little above 1.96, which adds (z^2 + 1) z^2 / 2 / z^2 = 2.4
    assert stats.seeds_needed(1.0, 0.01) == pytest.approx(38417, abs=1)
    for bad in ((1.0, 0.0), (-1.0, 1.0), (math.inf, 1.0)):
        with pytest.raises(ValueError, match="half-width"):
            stats.seeds_needed(*bad)


def test_spread_interval():
    # 2 degrees: chi-square is exponential with mean 2, so its p quantile is -2 log(1 - p)
    low, high = stats.spread_interval(3.0, 2)
    assert low == pytest.approx(3 * math.sqrt(2 / (-2 * math.log(0.025))))
    assert high == pytest.approx(3 * math.sqrt(2 / (-2 * math.log(0.975))))


def test_holm():
    # sorted .01 .02 .04 times 3, 2, 1 = .03 .04 .04; never above 1, never decreasing
    assert stats.holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert stats.holm([0.03, 0.02, 0.025]) == pytest.approx([0.06, 0.06, 0.06])
    assert stats.holm([0.9, 0.8]) == [1.0, 1.0]
    assert stats.holm([]) == []


@pytest.mark.parametrize(("n", "count"), [(1, 1), (4, 1), (14, 1), (15, 2), (20, 2), (25, 3), (50, 5)])
def test_worst_count_rounds_halves_up(n, count):
    assert stats.worst_count(n) == count


def test_worst():
    assert stats.worst([0.9, 0.2, 0.4] + [1.0] * 17) == pytest.approx(0.3)


def test_binomial_floor_of_two_users_with_one_test_image():
    # the lower of two fair coins is 1 with probability 1/4; a million draws have standard error .0006
    assert stats.binomial_floor(0.5, [1, 1]) == pytest.approx(0.25, abs=0.003)
    assert stats.binomial_floor(0.5, [1, 1]) == stats.binomial_floor(0.5, [1, 1])


def test_binomial_floor_of_unequal_sizes():
    # 20 users, two worst: compared with the exact integral of E[(2 - N(x))^+] / 2, N(x) the number of users at or below x
    sizes, p = [10] * 10 + [20] * 10, 0.85

    def below(x, m):
        return sum(math.comb(m, c) * p**c * (1 - p) ** (m - c) for c in range(m + 1) if c / m <= x)

    exact = 0.0
    for step in range(20):  # all accuracies are multiples of 1/20, so N is constant on [step/20, (step+1)/20)
        a, b = below(step / 20, 10), below(step / 20, 20)
        none = (1 - a) ** 10 * (1 - b) ** 10
        one = 10 * a * (1 - a) ** 9 * (1 - b) ** 10 + 10 * b * (1 - b) ** 9 * (1 - a) ** 10
        exact += (2 * none + one) / 2 / 20
    assert stats.binomial_floor(p, sizes) == pytest.approx(exact, abs=0.002)


def test_binomial_floor_of_the_paper():
    # algorithms.md section 8.7: 50 users of accuracy .85 with 10 to 20 test images measure about .67
    sizes = np.random.default_rng(1).integers(10, 21, 50)
    assert stats.binomial_floor(0.85, sizes) == pytest.approx(0.67, abs=0.02)
    assert stats.binomial_floor(1.0, sizes) == 1.0
