"""What a method must satisfy, as functions that measure a deviation.

``tests/test_conformance.py`` asserts them one by one, ``scripts/conformance.py`` prints them as a table, and its
``--mutate`` shows that a wrong sign or factor in an update rule makes one of them fail.

    @check("pfedme", "theta(w) on quadratics", tolerance=1e-9)
    def theta() -> float:                      # the deviation; the derivation of the expected number stands inside
        ...

    @check("pfedme", "fixed point of the iterated map", tolerance=1e-9, group=FIXED_POINT)
    def fixed_point() -> tuple[float, float]:  # (deviation from the closed form, distance of that point to the minimiser)
        ...

    mutant("pfedme", "pull towards the anchor has the wrong sign", "g + lam * (th - w)", "g - lam * (th - w)")
    cannot("fedu", "iterates of FedU and L2GD agree", "only their penalties are equal: ...")

Checks get methods from the registry (``small.algorithm``), never from a class they import, so that a mutant can take
the place of the method. Expected numbers come from numpy or from a formula, never from the code under test.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

IDENTITY = "identities of objectives and updates"
FIXED_POINT = "fixed points of the iterated maps"


@dataclass(frozen=True)
class Check:
    """One property of one method; ``measure`` returns the deviation, or (deviation, distance to the minimiser)."""

    method: str
    name: str
    tolerance: float
    group: str
    measure: Callable[[], float | tuple[float, float]]

    def run(self) -> tuple[float, float | None]:
        """(deviation, distance to the minimiser or None)."""
        found = self.measure()
        return (float(found[0]), float(found[1])) if isinstance(found, tuple) else (float(found), None)


class Mutant(NamedTuple):
    """A wrong version of a method: ``old`` occurs once in the file of the method's module and becomes ``new``."""

    method: str
    name: str
    old: str
    new: str


class Impossible(NamedTuple):
    """A property that cannot hold, and why."""

    method: str
    name: str
    reason: str


CHECKS: list[Check] = []
MUTANTS: list[Mutant] = []
IMPOSSIBLE: list[Impossible] = []


def check(method: str, name: str, tolerance: float, group: str = IDENTITY):
    """Decorator: register a function without arguments as a check of ``algo=<method>``."""

    def add(f):
        CHECKS.append(Check(method, name, tolerance, group, f))
        return f

    return add


def mutant(method: str, name: str, old: str, new: str) -> None:
    """Register a mutant of the file in which ``algo=<method>`` is defined."""
    MUTANTS.append(Mutant(method, name, old, new))


def cannot(method: str, name: str, reason: str) -> None:
    """Register a property that cannot hold."""
    IMPOSSIBLE.append(Impossible(method, name, reason))


def collect() -> list[Check]:
    """Import every module of this package; all checks, in order of method and registration."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return sorted(CHECKS, key=lambda c: c.method)
