"""Where a run begins: at round 0, or in a state that it has left itself; and on which machine it may go on.

What a run computes depends, to the last bit, on FACTS beside its configuration. They are stored with every state, and so is every
``auto`` as it was decided before round 1: a run goes on with those, or not at all unless ``resume=anyway``. Then ``provenance.json`` and
with it report.md say what was changed after which round.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from perfed import checkpoint
from perfed.checkpoint import DONOR, FINAL, PREVIOUS, STATE, Damaged
from perfed.config import Config
from perfed.errors import UserError, show
from perfed.federate import Federation
from perfed.summary import Prepared, processor

FACTS = {
    "device": "device", "threads": "engine.threads", "torch": "torch",
    "backend": "engine.backend", "compiled": "engine.compile", "chunk": "engine.chunk",
}  # fmt: skip
"""What the bits depend on -> the key that a user would change it by."""
NO_LONGER = "no longer equal to an unbroken run to the last bit"


@dataclass
class Start:
    """How a run begins.

    prepared: with the decisions of the stored state. stored: a content of :mod:`perfed.checkpoint`, None for round 0. seeds: those that
    are computed here; the others come from ``donor``, the content of another run. clock: seconds spent before. told: sentences for
    provenance.json, about a state that no single unbroken run has computed. lines: for the terminal and the log.
    """

    prepared: Prepared
    stored: dict[str, Any] | None
    seeds: tuple[int, ...]
    donor: dict[str, Any] | None = None
    clock: dict[str, float] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    @property
    def begun(self) -> int:
        """The round after which this process goes on."""
        return self.stored["k"] if self.stored is not None else 0

    @property
    def binding(self) -> bool:
        """Whether the facts of a stored state must be kept."""
        return self.stored is not None and self.prepared.config.resume != "anyway"

    def restore(self, fed: Federation, folder: Path) -> list[dict[str, Any]]:
        """Put the stored state into ``fed`` and let go of it; returns the rows measured so far."""
        stored, self.stored = self.stored, {"k": self.stored["k"]}
        try:
            checkpoint.put(fed, stored, "the stored state")
        except Damaged as error:
            raise UserError("run", folder, f"{error}; start over with force=true") from error
        return stored["rows"]

    def marks(self, fed: Federation) -> dict[str, Any]:
        """What is stored beside the state, to know by whom and how it was computed."""
        seen = facts(self.prepared, fed if fed.k > self.begun else None)  # a first step that was cut short says nothing of the compiler
        return {"seeds": list(self.seeds), "facts": seen, "asked": asked(self.prepared.config), "told": self.told}

    def not_compiled(self, warning: str) -> str:
        """The first step did not compile and was computed eagerly. Raises UserError where that is not how the run was begun; returns
        what to print."""
        if self.binding:
            raise refusal("compiled", False, True, f" (now: {warning})")
        if self.stored is not None:
            self.told.append(f"after round {self.begun} compiled false instead of true: {NO_LONGER}")
        return warning

    @property
    def origin(self) -> dict[str, list[str]]:
        """What provenance.json says beside what makes the numbers here and now."""
        return {"origin": self.told} if self.told else {}


def facts(prepared: Prepared, fed: Federation | None = None) -> dict[str, Any]:
    """FACTS of this run on this machine, as decided (``fed``: as it came out), and the processor, which is noted only."""
    decision = prepared.decision
    return {
        "device": decision.device.type,
        "threads": prepared.config.engine.threads,
        "torch": str(torch.__version__),
        "backend": decision.backend,
        "compiled": fed.compiled if fed is not None else decision.compiled,
        "chunk": decision.chunk,
        "processor": processor(decision.device),
    }


def asked(config: Config) -> dict[str, Any]:
    """What the user asked for where it can be ``auto``."""
    return {"backend": config.engine.backend, "compiled": config.engine.compile, "chunk": config.engine.chunk}


def begin(prepared: Prepared, folder: Path) -> Start:
    """Find the state that this run has left in its folder: the end of its training, else the last good checkpoint.

    Writes nothing. A damaged file costs a line and is passed over; ``force=true`` looks at none. Raises UserError where the state may not
    be continued here, or belongs to another run.
    """
    config = prepared.config
    start = Start(prepared, None, config.seed_values)
    for name in (FINAL, STATE, PREVIOUS) if not config.force else ():
        if not (folder / name).is_file():
            continue
        try:
            stored = checkpoint.read(folder / name)
            if stored.get("identity") != prepared.identity.hash:
                raise UserError("run", folder / name, "belongs to another run; remove it or start over with force=true")
            if not {"facts", "asked", "seeds", "told", "rows"} <= set(stored):
                raise Damaged(f"{name} has another structure")
            if tuple(stored["seeds"]) != config.seed_values:
                start.donor = checkpoint.read(folder / DONOR)
        except Damaged as error:
            start.lines.append(f"warning: {error}; the run goes on without it")
            continue
        start.stored, start.seeds, start.told = stored, tuple(stored["seeds"]), list(stored["told"])
        start.clock = stored["clock"] if "clock" in stored else seconds(folder)
        start.prepared = _continued(start)
        start.lines.append(f"resumed after round {stored['k']}")
        return start
    if start.lines:
        start.lines.append("no good state is left: the run starts at round 0")
    return start


def _continued(start: Start) -> Prepared:
    """The run with the decisions of the stored state, where this machine and the command allow them."""
    prepared, stored, config = start.prepared, start.stored, start.prepared.config
    was, wanted = stored["facts"], asked(config)
    now = facts(prepared)
    if was["device"] == now["device"]:  # on another one, resume=anyway decides anew
        now |= {name: was[name] for name, value in wanted.items() if value in ("auto", stored["asked"][name])}
    changed = [name for name in FACTS if now[name] != was[name]]
    if changed and start.binding:
        raise refusal(changed[0], now[changed[0]], was[changed[0]])
    for name in changed:
        start.told.append(f"after round {stored['k']} {name} {show(now[name])} instead of {show(was[name])} (resume=anyway): {NO_LONGER}")
    if now["processor"] != was["processor"] and "device" not in changed:
        start.told.append(f"after round {stored['k']} on {now['processor']} instead of {was['processor']}: the last bits may differ")
    start.lines += [f"warning: {line}" for line in start.told[len(stored["told"]) :]]
    decision = replace(prepared.decision, backend=now["backend"], compiled=now["compiled"], chunk=now["chunk"])
    return replace(prepared, decision=decision)


def refusal(fact: str, now: Any, was: Any, why: str = "") -> UserError:
    """One line for a run that may not go on here."""
    allowed = f"this run was begun with {show(was)}{why}; resume=anyway goes on, {NO_LONGER}, and force=true starts over"
    return UserError(FACTS[fact], now, allowed)


def clear(folder: Path, *more: str) -> None:
    """Remove the states that a finished run needs no more, and ``more``."""
    for name in (STATE, PREVIOUS, DONOR, *more):
        (folder / name).unlink(missing_ok=True)


def seconds(folder: Path) -> dict[str, float]:
    """The seconds of timing.csv by name; empty where it cannot be read."""
    try:
        with open(folder / "timing.csv", encoding="utf-8", newline="") as file:
            return {row["what"]: float(row["value"]) for row in csv.DictReader(file) if row["unit"] == "s"}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
