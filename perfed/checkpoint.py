"""The state of a simulation on disk: nested plain dicts of tensors, numbers and texts, written whole or not at all.

``state.pt`` is where an interrupted run goes on; ``final.pt`` is the end of a finished one, for judging it again. There
is no generator state: draws are functions of their keys.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from perfed import results, tree
from perfed.errors import UserError
from perfed.federate import Costs, Federation


def save(path: Path, fed: Federation, identity: str, rows: list[dict[str, Any]], clock: dict[str, float]) -> None:
    """Write the state after ``fed.k`` whole rounds, with the rows measured so far."""
    content = {
        "identity": identity,
        "k": fed.k,
        "server": tree.plain(fed.state.server),
        "users": tree.plain(fed.state.users),
        "diverged": fed.diverged.cpu(),
        "times_sampled": torch.from_numpy(fed.times_sampled),
        "costs": [asdict(cost) for cost in fed.costs],
        "rows": rows,
        "clock": clock,
    }
    with results.atomic(path) as temporary:
        torch.save(content, temporary)


def restore(path: Path, fed: Federation, identity: str) -> tuple[list[dict[str, Any]], dict[str, float]] | None:
    """Put a stored state into ``fed``; returns its (rows, clock), or None where there is no file.

    Raises UserError for a damaged file, and for one of another run.
    """
    if not path.is_file():
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a torn file
        raise UserError("run", path, f"damaged ({type(error).__name__}); remove it or start over with force=true") from error
    if content.get("identity") != identity:
        raise UserError("run", path, "belongs to another run; remove it or start over with force=true")
    before = fed.snapshot()
    try:
        fed.state = fed.state._replace(
            server=tree.restore(fed.state.server, content["server"]), users=tree.restore(fed.state.users, content["users"])
        )
        fed.k = content["k"]
        fed.diverged = content["diverged"].to(fed.device)
        fed.times_sampled = content["times_sampled"].numpy()
        fed.costs = [Costs(**cost) for cost in content["costs"]]
        return content["rows"], content["clock"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        fed.go_back(before)
        raise UserError("run", path, "has another structure; remove it or start over with force=true") from error
