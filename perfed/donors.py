"""Finished runs that spare a new one a part of its work. They lie beside it, are read, and are never changed.

    fewer rounds   A run that differs in ``rounds`` alone begins where the longest such donor ended, bit for bit as if it had computed
                   those rounds itself. Not for a method that ``uses_horizon``.
    fewer seeds    A run that differs in ``seed`` and ``seeds`` alone computes the seeds that the donor lacks, and joins them. A seed
                   computed among others equals the same seed computed alone up to rounding only (sums in a batched product, and
                   the last elements of a vectorised loop, are computed differently for another number of lanes), so the joined run
                   equals a run of all seeds together to a relative error of about 1e-6 in float32, 1e-14 in float64; report.md says so. The
                   final evaluation is made anew, of all seeds together.

A donor that differs in both is not used. It must agree in all facts of :mod:`perfed.resume`. Where several fit, the one that leaves the
least to compute is taken. Seconds in timing.csv are those that the whole result has cost, wherever they were spent: the donor's are
added, lap by lap (``train until round K``) for joined seeds.

Donors are found by their ``family`` in status.json: the identity without rounds, seeds, and the path of a stored split, whose content
is compared seed by seed instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from perfed import checkpoint, results, tree
from perfed.checkpoint import DONOR, FINAL, Damaged
from perfed.device import available_memory
from perfed.errors import show
from perfed.federate import Federation
from perfed.identity import identity
from perfed.prepare import federation, only, state_numbers
from perfed.resume import FACTS, Start, facts, seconds
from perfed.summary import Prepared

ROUNDING = "equal to a run of all seeds together up to rounding"


@dataclass(frozen=True)
class _Found:
    """A run of the same family. work: what it would leave to compute, in rounds of one seed."""

    folder: Path
    seeds: tuple[int, ...]
    rounds: int
    identity: str
    work: int


class _Unfit(Exception):
    """Why a run is no donor."""


def family(prepared: Prepared) -> str:
    """Equal for runs that may spare each other work."""
    ignore = ("rounds", "seed", "seeds", "partition.path")
    return identity(prepared.config, prepared.dataset.fingerprint, ignore).hash


def look(start: Start, folder: Path) -> Start:
    """``start``, at round 0, changed to begin with what the best donor beside ``folder`` has computed."""
    for found in _candidates(start.prepared, folder):
        name = found.folder.name
        try:
            if found.rounds < start.prepared.config.rounds:
                _rounds(start, found)
            else:
                _seeds(start, found, folder)
        except Damaged as error:
            start.lines.append(f"warning: {name}: {error}; nothing is taken from it")
        except _Unfit as error:
            start.lines.append(f"nothing is taken from {name}: {error}")
        else:
            break
    return start


def _candidates(prepared: Prepared, folder: Path) -> list[_Found]:
    """Finished runs beside the folder with fewer rounds or fewer seeds, the most useful first."""
    config, mine = prepared.config, family(prepared)
    digests = {str(seed): p.digest() for seed, p in zip(config.seed_values, prepared.partitions, strict=True)}
    out = []
    for path in folder.absolute().parent.glob("*/status.json"):
        home = path.parent
        try:
            status = results.read_json(path) or {}
            if home.name == folder.absolute().name or status.get("family") != mine or status.get("status") not in ("DONE", "DIVERGED"):
                continue
            result = results.read_json(home / "result.json") or {}
        except OSError:  # of another user, say
            continue
        seeds, rounds, other = (result.get(key) for key in ("seeds", "rounds", "partition_digest"))
        if not seeds or not rounds or any(digests.get(str(seed)) != other[str(seed)] for seed in seeds if str(seed) in digests):
            continue
        longer = tuple(seeds) == config.seed_values and rounds < config.rounds and not config.algo.uses_horizon
        wider = set(seeds) < set(config.seed_values) and rounds == config.rounds
        if longer or wider:
            work = (config.seeds - len(seeds)) * config.rounds if wider else config.seeds * (config.rounds - rounds)
            out.append(_Found(home, tuple(seeds), rounds, result["identity"], work))
    return sorted(out, key=lambda found: (found.work, found.folder.name))


def _read(start: Start, path: Path, found: _Found) -> dict[str, Any]:
    """The donor's content. Raises Damaged or _Unfit."""
    stored = checkpoint.read(path)
    if stored.get("identity") != found.identity or not {"facts", "seeds", "told"} <= set(stored):
        raise Damaged(f"{FINAL} has another structure")
    if stored["k"] != found.rounds:
        raise _Unfit(f"it stopped after round {stored['k']}")
    now, was = facts(start.prepared), stored["facts"]
    for name in FACTS:
        if now[name] != was[name]:
            raise _Unfit(f"it was computed with {name} {show(was[name])}, this run has {show(now[name])}")
    return stored


def _elsewhere(start: Start, stored: dict[str, Any]) -> str:
    """Another processor may round otherwise; that is told, not refused."""
    was = stored["facts"]["processor"]
    return "" if was == facts(start.prepared)["processor"] else f" on another processor ({was})"


def _rounds(start: Start, found: _Found) -> None:
    """Begin where the donor ended."""
    stored, every = _read(start, found.folder / FINAL, found), start.prepared.config.eval_every
    clock, k = seconds(found.folder), found.rounds
    if k % every:  # its last evaluation is none of this run's
        if (stored["diverged"] == k).any():
            raise _Unfit(f"a seed diverged at its last round {k}, perhaps in an evaluation that this run does not make")
        stored["rows"] = [row for row in stored["rows"] if row["round"] != k]
        clock.pop(f"train until round {k}", None)
    start.stored, start.clock = stored, clock
    start.told = [*stored["told"], f"rounds 1 to {k} were computed by {found.folder.name}{_elsewhere(start, stored)}"]
    start.lines.append(f"starts after round {k}, from the final state of {found.folder.name}")


def _seeds(start: Start, found: _Found, folder: Path) -> None:
    """Take the donor's seeds, in a copy of its state, so that nothing that happens to it later matters."""
    prepared, missing = start.prepared, tuple(s for s in start.prepared.config.seed_values if s not in found.seeds)
    copy = folder / DONOR
    stored = _read(start, found.folder / FINAL, found)
    free = available_memory(torch.device("cpu"))
    if free is not None and 3 * (found.folder / FINAL).stat().st_size * prepared.config.seeds / len(found.seeds) > free:
        raise _Unfit("too little memory is free to join the states")
    if (stored["diverged"] >= 0).all():
        raise _Unfit("all its seeds diverged")
    each = state_numbers(prepared)
    if each != state_numbers(only(prepared, missing)) or each[1] * len(found.seeds) != _numel(stored["users"]):
        raise _Unfit("its users' states are padded to other sizes")
    stored["clock"] = seconds(found.folder)
    try:
        checkpoint.save(copy, stored)
    except (OSError, RuntimeError) as error:
        raise _Unfit(f"its state cannot be copied ({error})") from error
    start.donor, start.seeds = stored, missing
    listed = ", ".join(map(str, found.seeds))
    start.told = [*stored["told"], f"seeds {listed} were computed by {found.folder.name}{_elsewhere(start, stored)}: {ROUNDING}"]
    start.lines.append(f"seeds {listed} are taken from {found.folder.name}; the others are computed")


def _numel(stored: Any) -> int:
    """Numbers in a stored tree."""
    if isinstance(stored, dict):
        return sum(map(_numel, stored.values()))
    if isinstance(stored, (list, tuple)):
        return sum(map(_numel, stored))
    return tree.numel(stored)


def joined(start: Start, fed: Federation, rows: list[dict[str, Any]], clock: dict[str, float]) -> tuple[Federation, list, dict[str, float]]:
    """The simulation of all seeds after its last round, its rows, and the seconds of both."""
    prepared, donor = start.prepared, start.donor
    mine = checkpoint.content(fed, prepared.identity.hash, rows)
    seeds = list(prepared.config.seed_values)
    both = checkpoint.join([(list(start.seeds), mine), (list(donor["seeds"]), donor)], seeds)
    whole = federation(prepared)
    checkpoint.put(whole, both, DONOR)
    return whole, both["rows"], {name: value + donor["clock"].get(name, 0.0) for name, value in clock.items()}
