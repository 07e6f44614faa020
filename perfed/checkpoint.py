"""The state of a simulation on disk: nested plain dicts of tensors, numbers and texts, written whole or not at all.

    state.pt            where a run goes on; state-previous.pt is the one before
    final.pt            the end of the training, for judging it again and for longer runs to start from
    donor.pt            a copy of the final.pt that some seeds of a running run come from (``perfed.donors``)

All load under torch's safe loading. They are zip archives with a CRC-32 for each record; torch writes these sums but does not look at
them, so :func:`read` does: a file that was cut or changed anywhere is found out. There is no generator state: draws are functions of
their keys.
"""

from __future__ import annotations

import time
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perfed import results, tree
from perfed.errors import UserError
from perfed.federate import Costs, Federation
from perfed.types import Tree

STATE, PREVIOUS, FINAL, DONOR = "state.pt", "state-previous.pt", "final.pt", "donor.pt"
SHARE = 0.04
"""Share of a run's time that its checkpoints are planned to take at most; 5 % is promised, and a save may take longer than planned."""
SAVE_SECONDS, SAVE_BYTES = 0.02, 200 * 2**20
"""What the first save is taken to cost: seconds, and bytes a second; later ones are taken to cost what the last one did."""


class Damaged(Exception):
    """A file that cannot be trusted. The text says why, in one line."""


def content(fed: Federation, identity: str, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """What is stored after ``fed.k`` whole rounds, with the rows measured so far. Tensors are not copied where they can be stored as
    they are: save before the next round."""
    return {
        "identity": identity,
        "k": fed.k,
        "server": _stored(fed.state.server),
        "users": _stored(fed.state.users),
        "diverged": fed.diverged.cpu(),
        "times_sampled": torch.from_numpy(fed.times_sampled),
        "costs": [asdict(cost) for cost in fed.costs],
        "rows": rows,
        **more,
    }


def _stored(part: Tree) -> Tree:
    """``tree.plain`` without a second copy of what fills its memory: torch stores the whole memory that a tensor is a view of."""
    if isinstance(part, dict):
        return {k: _stored(v) for k, v in part.items()}
    if isinstance(part, tuple):
        return _stored(part._asdict()) if hasattr(part, "_fields") else [_stored(v) for v in part]
    if not isinstance(part, Tensor):
        return part
    whole = part.untyped_storage().nbytes() == part.numel() * part.element_size()
    return part.detach().cpu() if whole else part.detach().to("cpu", copy=True)


def save(path: Path, stored: dict[str, Any], keep_as: Path | None = None) -> None:
    """Write a content; an older file at ``path`` becomes ``keep_as``, so that there is a good file at every instant.

    Raises OSError or RuntimeError (torch's) where it cannot be written; then the older file is still there.
    """
    with results.atomic(path, keep_as) as temporary, open(temporary, "wb") as file:
        torch.save(stored, file)  # by name, torch would put the name of the temporary file into it


def read(path: Path) -> dict[str, Any]:
    """A content, verified. Raises :class:`Damaged`, in one line, for whatever is wrong with the file."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
        if broken is None:
            stored = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zipfile and torch raise many kinds for a torn file
        raise Damaged(f"{path.name} is damaged ({type(error).__name__})") from error
    if broken is not None:
        raise Damaged(f"{path.name} is damaged (checksum)")
    if not isinstance(stored, dict):
        raise Damaged(f"{path.name} has another structure")
    return stored


def put(fed: Federation, stored: dict[str, Any], name: str) -> None:
    """Put a content into ``fed``. Raises :class:`Damaged`, and leaves ``fed`` as it was, where it does not fit."""
    try:
        state = fed.state._replace(
            server=tree.restore(fed.state.server, stored["server"]), users=tree.restore(fed.state.users, stored["users"])
        )
        pairs = zip(tree.leaves(state), tree.leaves(fed.state), strict=True)
        costs = [Costs(**cost) for cost in stored["costs"]]
        times = stored["times_sampled"].numpy()
        k, diverged = int(stored["k"]), stored["diverged"].to(fed.device)
        if any(a.shape != b.shape for a, b in pairs) or times.shape != fed.times_sampled.shape or len(costs) != len(fed.costs):
            raise ValueError("shapes")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"{name} has another structure") from error
    fed.state, fed.k, fed.diverged, fed.times_sampled, fed.costs = state, k, diverged, times, costs


def restore(path: Path, fed: Federation, identity: str) -> bool:
    """:func:`read` and :func:`put`; False where there is no file. Raises UserError for a file that is damaged or of another run."""
    if not path.is_file():
        return False
    try:
        stored = read(path)
        if stored.get("identity") != identity:
            raise UserError("run", path, "belongs to another run; start over with force=true")
        put(fed, stored, path.name)
    except Damaged as error:
        raise UserError("run", path, f"{error}; start over with force=true") from error
    return True


def join(parts: list[tuple[list[int], dict[str, Any]]], seeds: list[int]) -> dict[str, Any]:
    """Contents of some seeds each -> the content of all of them in the order of ``seeds``; rows are sorted by round, then by seed."""
    place = {seed: i for i, seed in enumerate(seed for have, _ in parts for seed in have)}
    order = torch.tensor([place[seed] for seed in seeds])

    def one(*values: Any) -> Any:
        if isinstance(values[0], dict):
            return {k: one(*(v[k] for v in values)) for k in values[0]}
        if isinstance(values[0], (list, tuple)):
            return [one(*items) for items in zip(*values, strict=True)]
        return torch.cat(values)[order] if isinstance(values[0], Tensor) else values[0]

    contents = [stored for _, stored in parts]
    costs = [cost for stored in contents for cost in stored["costs"]]
    at = {seed: i for i, seed in enumerate(seeds)}
    rows = sorted((row for stored in contents for row in stored["rows"]), key=lambda row: (row["round"], at[row["seed"]]))
    whole = {key: one(*(stored[key] for stored in contents)) for key in ("server", "users", "diverged", "times_sampled")}
    return {**contents[0], **whole, "costs": [costs[i] for i in order.tolist()], "rows": rows}


def size(fed: Federation) -> int:
    """Bytes of a stored state."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(fed.state))


@dataclass
class Schedule:
    """When to save: ``every`` seconds, but only while all saving, the next one included, stays within SHARE of the time since ``begun``.

    bytes: of a stored state. now: the clock, seconds. What is computed never depends on it.
    """

    every: float
    bytes: int
    now: Callable[[], float] = time.monotonic
    spent: float = field(default=0.0, init=False)

    def __post_init__(self):
        self.begun = self.last = self.now()
        self.cost = SAVE_SECONDS + self.bytes / SAVE_BYTES

    def due(self) -> bool:
        """Whether to save now, between two rounds."""
        return self.now() - self.last >= self.every and self.affordable()

    def affordable(self) -> bool:
        """Whether a save now would stay within the share."""
        return self.spent + self.cost <= SHARE * (self.now() - self.begun + self.cost)

    def saved(self, since: float) -> float:
        """A save that began at ``since`` has ended, well or not; returns its seconds."""
        self.last = self.now()
        self.cost = self.last - since
        self.spent += self.cost
        return self.cost
