"""Studies: questions that take several runs, started by ``experiment=<name>``.

    all_methods     every method with an equal budget, its values chosen on validation data, in one table
    easgd_vs_admm   is EASGD more stable than ADMM? spectral radii of the round-robin maps, and training curves of both
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perfed.studies.jobs import Context


def main(name: str, context: Context) -> int:
    """Run a study and return the exit code: 0, or 1 when a run of it gave no result. Raises UserError."""
    return importlib.import_module(f"perfed.studies.{name}").main(context)
