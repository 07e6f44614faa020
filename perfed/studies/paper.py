"""What the Per-FedAvg paper (arXiv 2002.07948) says of its experiments, as claims that runs can support or contradict.

Rows, values and claims of Table 1 (section 5) and of appendix I. **The values are recalled**: the readable copies of the
paper lost them, and no public copy of the table was found, so nothing here may be printed without the words "as recalled".
The claims stand in the text. Numbers alone, no run folder and no torch: a study hands over accuracies by seed.

A claim has parts, each the paired difference of two means over common seeds. A part is supported where the 95 % interval of the
difference lies on the claimed side of zero, contradicted where it lies on the other, else undecided; so is a part with fewer than
five common seeds. A claim is supported when all its parts are, contradicted when one is, else undecided: so is a claim of a row in which a
method diverged or has no result. The intervals are not widened for the number of parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfed import stats, tables

FEDAVG, FO, HF, EXACT, LOCAL, EQUAL = "fedavg", "perfedavg_fo", "perfedavg_hf", "perfedavg", "local", "fedavg_equal"
TITLES = {
    FEDAVG: "FedAvg + update", FO: "Per-FedAvg (FO)", HF: "Per-FedAvg (HF)", EXACT: "Per-FedAvg (exact)", LOCAL: "local",
    EQUAL: "FedAvg, equal gradients",
}  # fmt: skip
ALIKE = 0.04
"""FO and HF count as "almost similar" when the interval of their difference lies within so much: the paper calls 3.46 points so, as
recalled."""
HEADS = {FEDAVG: "FedAvg", FO: "FO", HF: "HF", EXACT: "exact", LOCAL: "local", EQUAL: "FedAvg x 4"}
"""Short, for the columns of a table whose caption explains them."""
RECALLED = "as recalled from the paper, unverified"


@dataclass(frozen=True)
class Row:
    """A row of Table 1. ``alpha`` is "small" or "large" among the rows of its data set that share tau; ``recalled`` method -> (mean,
    half-width) as fractions."""

    data: str
    tau: int
    alpha: float
    large: bool = False
    diff: bool = False
    recalled: Mapping[str, tuple[float, float]] | None = None

    @property
    def text(self) -> str:
        return f"{self.data}, tau={self.tau}, alpha={self.alpha:g}{', diff. hetero.' if self.diff else ''}"


def _recalled(fedavg: float, fo: float, hf: float, *half: float) -> dict[str, tuple[float, float]]:
    return {m: (v / 100, h / 100) for m, v, h in zip((FEDAVG, FO, HF), (fedavg, fo, hf), half, strict=True)}


ROWS: dict[str, Row] = {
    "mnist_tau10": Row("MNIST", 10, 0.01, recalled=_recalled(75.96, 78.00, 79.85, 0.02, 0.02, 0.02)),
    "mnist_tau4": Row("MNIST", 4, 0.01, recalled=_recalled(60.18, 64.55, 70.94, 0.02, 0.02, 0.03)),
    "cifar10_tau10": Row("CIFAR-10", 10, 0.001, recalled=_recalled(40.49, 46.98, 50.44, 0.07, 0.1, 0.15)),
    "cifar10_tau4": Row("CIFAR-10", 4, 0.001, recalled=_recalled(38.38, 34.04, 43.73, 0.07, 0.08, 0.11)),
    "cifar10_tau4_alpha01": Row("CIFAR-10", 4, 0.01, True, recalled=_recalled(35.97, 25.32, 46.32, 0.17, 0.18, 0.12)),
    "cifar10_tau4_diff": Row("CIFAR-10", 4, 0.01, True, True, recalled=_recalled(58.59, 37.71, 71.25, 0.11, 0.23, 0.05)),
    "digits_tau10": Row("digits", 10, 0.01),
    "digits_tau4": Row("digits", 4, 0.01),
    "digits_tau4_alpha10": Row("digits", 4, 0.1, True),
    "digits_tau4_diff": Row("digits", 4, 0.1, True, True),
}
"""Options of the group ``row`` -> what the row is. The digits' rows are ours."""

RECALLED_ARUBA = (0.3674, 0.001)
"""FedAvg+ARUBA with refinement on the row cifar10_tau4 (appendix I)."""
RECALLED_MAJORITY = {False: 0.5, True: 0.6}
"""Majority class under the paper's split, without and with ``diff. hetero.``: (0.2 + 0.8) / 2 and (0.2 + 1) / 2."""

Seeds = Mapping[str, float]
"""Accuracy by seed."""
Choices = tuple[tuple[str, str], ...]
"""What the paper leaves open, as (name, chosen) pairs in a fixed order."""
Values = Mapping[tuple[str, str], Seeds]
"""(row, method) -> accuracies, of one network, protocol and choice of steps: no seeds where the cell diverged, absent where it has no
result."""


@dataclass(frozen=True)
class Part:
    """One comparison. ``difference`` None: a run is not there, or diverged. ``verdict``: supported, contradicted, undecided, diverged, not
    run."""

    text: str
    difference: stats.Paired | None
    verdict: str


@dataclass(frozen=True)
class Claim:
    """``name`` is short; ``parts`` lists the comparisons that can be made of these values, absent cells among them."""

    name: str
    text: str
    parts: Callable[[Values], Iterator[Part]]


def compare(text: str, high: Seeds | None, low: Seeds | None) -> Part:
    """The part that says high > low."""
    if (why := _missing(high, low)) is not None:
        return Part(text, None, why)
    difference = stats.paired(high, low)
    return Part(text, difference, stats.verdict(difference))


def _missing(a: Seeds | None, b: Seeds | None) -> str | None:
    """Why two cells cannot be compared."""
    if a is None or b is None:
        return "not run"
    return "diverged" if not a or not b else None if set(a) & set(b) else "not run"


def alike(text: str, a: Seeds | None, b: Seeds | None) -> Part:
    """The part that says a and b differ by less than ALIKE: the interval lies inside, outside, or across."""
    if (why := _missing(a, b)) is not None:
        return Part(text, None, why)
    d = stats.paired(a, b)
    if d.half_width is None or d.n < tables.MARKED_FROM:
        return Part(text, d, "undecided")
    inside, outside = abs(d.difference) + d.half_width < ALIKE, abs(d.difference) - d.half_width > ALIKE
    return Part(text, d, "supported" if inside else "contradicted" if outside else "undecided")


def minus(a: Seeds | None, b: Seeds | None) -> Seeds | None:
    """The difference by common seed, itself something to compare."""
    return None if a is None or b is None else {seed: a[seed] - b[seed] for seed in a if seed in b}


def _rows(values: Values, **what: Any) -> list[str]:
    """Rows of these values with the given fields, in the order of ROWS."""
    present = {row for row, _ in values}
    return [name for name, row in ROWS.items() if name in present and all(getattr(row, key) == value for key, value in what.items())]


def _hf_everywhere(values: Values) -> Iterator[Part]:
    for row in _rows(values):
        yield compare(f"{ROWS[row].text}: HF - FedAvg", values.get((row, HF)), values.get((row, FEDAVG)))


def _mnist_both(values: Values) -> Iterator[Part]:
    mine = [row for row in _rows(values, large=False, diff=False) if ROWS[row].data != "CIFAR-10"]  # the digits stand for MNIST
    for row, method in itertools.product(mine, (FO, HF)):
        yield compare(f"{ROWS[row].text}: {_short(method)} - FedAvg", values.get((row, method)), values.get((row, FEDAVG)))


def _gain_on_cifar(values: Values) -> Iterator[Part]:
    def gain(data: str) -> Seeds | None:
        """Mean over the rows of a data set, by seed; none where a row diverged."""
        found = [minus(values.get((row, HF)), values.get((row, FEDAVG))) for row in _rows(values, data=data, diff=False)]
        if not found or None in found:
            return None
        common = set.intersection(*map(set, found))
        return {seed: sum(seeds[seed] for seeds in found) / len(found) for seed in sorted(common)}

    yield compare("gain of HF over FedAvg, mean over rows: CIFAR-10 - MNIST", gain("CIFAR-10"), gain("MNIST"))


def _many_steps(values: Values) -> Iterator[Part]:
    for row in _rows(values, tau=10):
        yield alike(f"{ROWS[row].text}: HF - FO, within {100 * ALIKE:g} points", values.get((row, HF)), values.get((row, FO)))
        for method in (FO, HF):
            yield compare(f"{ROWS[row].text}: {_short(method)} - FedAvg", values.get((row, method)), values.get((row, FEDAVG)))


def _fewer_steps(values: Values) -> Iterator[Part]:
    for many in _rows(values, tau=10):
        for few in _rows(values, tau=4, data=ROWS[many].data, alpha=ROWS[many].alpha, diff=False):
            for method in (FEDAVG, FO, HF):
                yield compare(f"{ROWS[many].data}: {_short(method)}, tau=10 - tau=4", values.get((many, method)), values.get((few, method)))


def _larger_alpha(method: str, sign: int) -> Callable[[Values], Iterator[Part]]:
    def parts(values: Values) -> Iterator[Part]:
        for large in _rows(values, large=True, diff=False):
            for small in _rows(values, large=False, data=ROWS[large].data, tau=ROWS[large].tau, diff=False):
                pair = [(large, small), (small, large)][sign < 0]
                steps = " - ".join(f"{ROWS[row].alpha:g}" for row in pair)
                text = f"{ROWS[large].data}, tau={ROWS[large].tau}: {_short(method)}, alpha={steps}"
                yield compare(text, *(values.get((row, method)) for row in pair))

    return parts


def _diff(values: Values) -> Iterator[Part]:
    for row in _rows(values, diff=True):
        yield compare(f"{ROWS[row].text}: HF - FedAvg", values.get((row, HF)), values.get((row, FEDAVG)))
        yield compare(f"{ROWS[row].text}: FedAvg - FO", values.get((row, FEDAVG)), values.get((row, FO)))


CLAIMS = (
    Claim("HF best", "Per-FedAvg (HF) is at least as good as FedAvg in every row", _hf_everywhere),
    Claim("MNIST gain", "both Per-FedAvg methods are above FedAvg on MNIST", _mnist_both),
    Claim("CIFAR gain", "the gain of HF over FedAvg is larger on CIFAR-10 than on MNIST", _gain_on_cifar),
    Claim("tau=10", f"at tau=10 FO and HF are almost similar (within {100 * ALIKE:g} points), and above FedAvg", _many_steps),
    Claim("smaller tau", "a smaller tau lowers the accuracy of all three methods", _fewer_steps),
    Claim("larger alpha, HF", "a larger alpha helps HF", _larger_alpha(HF, +1)),
    Claim("larger alpha, FO", "a larger alpha hurts FO", _larger_alpha(FO, -1)),
    Claim("diff. hetero.", "under diff. hetero. HF is above FedAvg, and FO below it", _diff),
)
"""The claims of section 5 that Table 1 carries."""


def overall(parts: Sequence[Part]) -> str:
    """The claim's verdict: "not run" where no part was; a part without a result leaves it undecided, unless another contradicts it."""
    found = {part.verdict for part in parts}
    if found <= {"not run"}:
        return "not run"
    return "contradicted" if "contradicted" in found else "supported" if found == {"supported"} else "undecided"


def verdict_text(parts: Sequence[Part]) -> str:
    """The verdict, and how many parts of it have no result where that is why it is undecided."""
    found, lost = overall(parts), [part for part in parts if part.verdict in ("diverged", "not run")]
    return f"{found} ({len(lost)} of {len(parts)} comparisons without a result)" if lost and found == "undecided" else found


def difference_text(difference: stats.Paired | None) -> str:
    """``+1.85 ± 0.30`` points, or ``+1.85 (n/a)`` for one seed."""
    if difference is None:
        return "-"
    half = "(n/a)" if difference.half_width is None else f"± {100 * difference.half_width:.2f}"
    return f"{100 * difference.difference:+.2f} {half}"


def keeps_the_order(base: Values, other: Values) -> Iterator[Part]:
    """Parts of the claim that another (more complex) network changes no order: a pair of methods that ``base`` separates is separated
    the same way by ``other``. The difference shown is that of ``other``, in the direction of ``base``."""
    for row in _rows(base):
        for a, b in itertools.combinations((FEDAVG, FO, HF), 2):
            first = compare("", base.get((row, b)), base.get((row, a)))
            if first.verdict not in ("supported", "contradicted"):
                continue
            high, low = (b, a) if first.verdict == "supported" else (a, b)
            yield compare(f"{ROWS[row].text}: {_short(high)} - {_short(low)}", other.get((row, high)), other.get((row, low)))


def _short(method: str) -> str:
    return {FEDAVG: "FedAvg", FO: "FO", HF: "HF"}[method]


def turned(verdicts: Mapping[Choices, str]) -> str:
    """The choices that the paper leaves open and that turn a claim: those that give another verdict than the first entry when they alone
    are changed. ``verdicts``: choices -> verdict."""
    (base, first), *others = verdicts.items()
    found = []
    for made, verdict in others:
        changed = [(name, new) for (name, new), (_, old) in zip(made, base, strict=True) if new != old]
        if len(changed) == 1 and verdict not in (first, "not run"):
            name, new = changed[0]
            found.append(f"{new if new.endswith(name) else f'{name} {new}'}: {verdict}")  # "tuned steps" says what it is
    return "; ".join(found) or "-"
