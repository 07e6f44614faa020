"""Does every method do what its paper says? The checks of tests/conformance as a table, and proof that they can fail.

    python scripts/conformance.py                    all checks; exit code 1 if one fails
    python scripts/conformance.py --method pfedme    one method, and the equivalences that name it
    python scripts/conformance.py --out FILE         the same Markdown to a file too
    python scripts/conformance.py --mutate           put each wrong version in the place of its method: a check must fail

Each check measures a deviation from numbers that numpy, autodiff or a formula on paper give. The table has two groups:
identities (of objectives, updates, equivalences of methods) and fixed points of the iterated maps. A method's fixed point
need not be the minimiser of its objective (several local steps drift): the second group shows the distance, and does not judge it.

``--mutate``: first all checks must pass as they are. Then, for each mutant, the checks of its method and the equivalences
that name it run, cheap ones first, until one fails or raises. A mutant that cannot be loaded (its text does not occur exactly
once, bad syntax) is an error, not a kill. The order of checks comes from counted loss evaluations: every run is the same.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# First in the path: this file has the name of the package of checks, and its folder may be in the path as well.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import conformance
import torch

from perfed.algorithms import ALGORITHMS
from perfed.algorithms.base import Task

LATTICE = "lattice"  # the "method" of checks that compare methods: their names tell which


@dataclass(frozen=True)
class Found:
    """What came of one check."""

    check: conformance.Check
    deviation: float = math.nan
    distance: float | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        finite = self.distance is None or math.isfinite(self.distance)
        return self.error is None and finite and math.isfinite(self.deviation) and self.deviation <= self.check.tolerance

    @property
    def text(self) -> str:
        return number(self.deviation) if self.error is None else f"raised {self.error}"


class BadMutant(Exception):
    """A mutant that says nothing about the checks."""


def measure(check: conformance.Check) -> Found:
    try:
        return Found(check, *check.run())
    except Exception as error:  # whatever a check raises, it does not hold
        return Found(check, error=f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"[:160])


def concerns(check: conformance.Check, method: str) -> bool:
    """A check of the method, or an equivalence that names it."""
    return check.method == method or (check.method == LATTICE and method in re.findall(r"\w+", check.name))


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Markdown; bars within cells are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cell.replace("|", r"\|").replace("\n", " ") for cell in line) + " |" for line in lines] + [""]


def progress(done: int, of: int, what: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{done}/{of} {what[:100]}", end="" if done < of else "\r\x1b[K", file=sys.stderr, flush=True)


def setting() -> str:
    return f"torch {torch.__version__}, dtype float64 unless a check says otherwise, one thread."


# ---------------------------------------------------------------- the table


def report(method: str | None) -> tuple[list[str], bool]:
    """(lines of Markdown, whether all checks hold)."""
    checks = [c for c in conformance.collect() if method is None or concerns(c, method)]
    found = []
    for i, check in enumerate(checks):
        progress(i, len(checks), f"{check.method}: {check.name}")
        found.append(measure(check))
    progress(len(checks), len(checks), "")
    lines = ["# Conformance", "", setting(), ""]
    for group in (conformance.IDENTITY, conformance.FIXED_POINT):
        fixed = group == conformance.FIXED_POINT
        header = ["method", "check", "deviation", "tolerance", "pass", *(["distance to the minimiser"] if fixed else [])]
        rows = []
        for one in found:
            if one.check.group == group:
                row = [one.check.method, one.check.name, one.text, number(one.check.tolerance), "yes" if one.ok else "**NO**"]
                rows.append(row + ([number(one.distance)] if fixed else []))
        lines += [f"## {group[0].upper()}{group[1:]}", "", *table(header, rows)]
    impossible = [i for i in conformance.IMPOSSIBLE if method in (None, i.method)]
    if impossible:
        rows = [[i.method, i.name, i.reason] for i in sorted(impossible, key=lambda i: i.method)]
        lines += ["## What cannot hold", "", *table(["method", "property", "reason"], rows)]
    failed = [one for one in found if not one.ok]
    without = sorted(name for name in ALGORITHMS if method is None and not any(c.method == name for c in checks))
    lines.append(
        f"{len(found)} checks, {len(found) - len(failed)} pass, {len(failed)} fail; {len(impossible)} properties that cannot hold."
        + (f" Methods without a check: {', '.join(without)}." if without else "")
    )
    return lines, not failed


# ---------------------------------------------------------------- mutants


def mutated(mutant: conformance.Mutant) -> tuple[Path, str]:
    """The file of the method, and its text with the mistake in it."""
    if mutant.method not in ALGORITHMS:
        raise BadMutant("no such method")
    file = Path(sys.modules[ALGORITHMS[mutant.method].__module__].__file__)
    source = file.read_text(encoding="utf-8")
    if (count := source.count(mutant.old)) != 1:
        raise BadMutant(f"the text to replace occurs {count} times in {file.name}")
    return file, source.replace(mutant.old, mutant.new)


@contextmanager
def in_place(mutant: conformance.Mutant) -> Iterator[None]:
    """While this lasts, the registry holds the mutated classes."""
    file, source = mutated(mutant)
    before = dict(ALGORITHMS)
    module = types.ModuleType(f"{before[mutant.method].__module__}__mutant")
    module.__file__ = str(file)
    module.__package__ = "perfed.algorithms"
    try:
        sys.modules[module.__name__] = module  # dataclasses look the module of a class up
        try:
            exec(compile(source, str(file), "exec"), module.__dict__)
        except Exception as error:
            raise BadMutant(f"does not load: {type(error).__name__}: {error}") from error
        if ALGORITHMS[mutant.method].__module__ != module.__name__:
            raise BadMutant("does not define the method any more")
        forget()
        yield
    finally:
        sys.modules.pop(module.__name__, None)
        ALGORITHMS.clear()
        ALGORITHMS.update(before)
        forget()


def forget() -> None:
    """Empty what functions of the checks remember: it may have been computed with another version of a method."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "conformance":
            for value in vars(module).values():
                if callable(clear := getattr(value, "cache_clear", None)):
                    clear()


def counted(check: conformance.Check) -> tuple[Found, int]:
    """What came of a check, and how many loss evaluations it took: a cost that is the same in every run."""
    calls, original = [0], Task.mean_loss

    def mean_loss(self, *arguments):
        calls[0] += 1
        return original(self, *arguments)

    Task.mean_loss = mean_loss
    try:
        return measure(check), calls[0]
    finally:
        Task.mean_loss = original


def mutate(method: str | None) -> tuple[list[str], bool]:
    """(lines of Markdown, whether every mutant is killed)."""
    checks = conformance.collect()
    mutants = sorted((m for m in conformance.MUTANTS if method in (None, m.method)), key=lambda m: m.method)
    methods = sorted({m.method for m in mutants})
    needed = [c for c in checks if any(concerns(c, name) for name in methods)]
    plain, cost = {}, {}
    for i, check in enumerate(needed):
        progress(i, len(needed), f"as it is: {check.method}: {check.name}")
        plain[check], cost[check] = counted(check)
    progress(len(needed), len(needed), "")

    lines = ["# Mutants", "", setting(), ""]
    broken = [one for one in plain.values() if not one.ok]
    if broken:
        rows = [[one.check.method, one.check.name, one.text, number(one.check.tolerance)] for one in broken]
        lines += ["These checks fail as it is:", "", *table(["method", "check", "deviation", "tolerance"], rows)]

    rows, killed, raised, survived, bad = [], 0, 0, 0, 0
    for i, mutant in enumerate(mutants):
        progress(i, len(mutants), f"{mutant.method}: {mutant.name}")
        mine = [c for c in needed if concerns(c, mutant.method) and plain[c].ok]
        mine.sort(key=lambda c: (c.method == LATTICE, cost[c]))  # stable: equal costs in order of registration
        by, how = "", ""
        try:
            with in_place(mutant):
                hit = next((one for one in map(measure, mine) if not one.ok), None)
        except BadMutant as error:
            bad += 1
            by, how = "**BAD MUTANT**", str(error)
        else:
            if hit is None:
                survived += 1
                by, how = "**SURVIVES**", f"{len(mine)} checks pass"
            else:
                killed += 1
                raised += hit.error is not None
                by, how = (f"{LATTICE}: " if hit.check.method == LATTICE else "") + hit.check.name, hit.text
        rows.append([mutant.method, mutant.name, by, how])
    progress(len(mutants), len(mutants), "")
    lines += table(["method", "mutant", "killed by", "deviation"], rows)
    without = sorted(name for name in ALGORITHMS if method is None and name not in methods)
    lines.append(
        f"{len(mutants)} mutants, {killed} killed ({raised} by an exception), {survived} survive, {bad} bad; "
        f"{len(broken)} of {len(needed)} checks fail as it is." + (f" Methods without a mutant: {', '.join(without)}." if without else "")
    )
    return lines, not (survived or bad or broken)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", help="one method; default all")
    parser.add_argument("--out", type=Path, help="write the Markdown to this file too")
    parser.add_argument("--mutate", action="store_true", help="run the checks on wrong versions of the methods")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    known = {*ALGORITHMS, *(c.method for c in conformance.collect())}
    if options.method is not None and options.method not in known:
        parser.error(f"--method {options.method}: one of {', '.join(sorted(known))}")
    lines, ok = (mutate if options.mutate else report)(options.method)
    text = "\n".join(lines)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
