"""Studies: questions that take several runs, started by ``experiment=<name>``.

    all_methods     every method with an equal budget, its values chosen on validation data, in one table
    table1          the paper's Table 1 beside the recalled values, with a verdict per claim
    fig1            figure 1a: accuracy against time and other budgets
    aruba           appendix I: Per-FedAvg against FedAvg + ARUBA
    alpha_sweep     accuracy against alpha times the measured smoothness
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
