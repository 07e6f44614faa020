"""``experiment=easgd_vs_admm``: is EASGD more stable than ADMM? The question of the talk, as numbers and pictures.

The answer for the round-robin maps on a quadratic is computed (``perfed.studies.stability``): no training is needed. Beside it both
methods train on the study's data, at a few couplings and equal budgets, and their curves are drawn: there both are synchronous
within a cohort, and ADMM's subproblems are solved by tau steps.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from perfed import results, stats
from perfed.errors import require
from perfed.identity import identity
from perfed.studies import stability
from perfed.studies.jobs import Context, Job, run_all

SETTINGS: dict[str, tuple[str, ...]] = {
    "easgd, beta_e=0.3": ("algo=easgd", "algo.beta_e=0.3"),
    "easgd, beta_e=0.9": ("algo=easgd", "algo.beta_e=0.9"),
    "admm, lam=0.1": ("algo=admm", "algo.lam=0.1"),
    "admm, lam=1": ("algo=admm", "algo.lam=1.0"),
}


def main(context: Context) -> int:
    """Run the study; returns the exit code."""
    import pandas as pd

    config = context.config
    require(config.study.methods == "all", "study.methods", config.study.methods, "all: this study compares easgd and admm")
    if config.plan:
        print("\n".join(["perfed: stability maps, and runs of", *(f"  {label}" for label in SETTINGS)]))
        return 0
    done = run_all([Job(label, words) for label, words in SETTINGS.items()], context, "run")
    rows: list[dict[str, Any]] = []
    for label, end in done.items():
        if end.folder is not None and end.problem is None:
            rows += _curve(results.load(end.folder), *label.split(", "))
    content = json.dumps([identity(config, "").hash, sorted(SETTINGS)])
    folder = config.outputs_path / f"easgd_vs_admm-{config.dataset.name}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame(rows)
    stability.write_report(folder, frame if rows else None)
    frame.to_csv(folder / "curves.csv", index=False)
    print("\n".join(stability.verdict()).replace("**", "") + f"\nreport: {results.from_here(folder) / 'report.md'}", flush=True)
    return 0 if all(end.problem is None for end in done.values()) else 1


def _curve(run: results.Run, algo: str, setting: str) -> list[dict[str, Any]]:
    """Mean and half-width over seeds of the global model before adaptation, by round; diverged seeds are left out."""
    frame = run.rounds
    diverged = [int(seed) for seed in run.result["diverged"]] if run.result else []
    mine = frame[(frame["model"] == "global") & (frame["steps"] == 0) & frame["seen"] & ~frame["seed"].isin(diverged)]
    rows = []
    for k, part in mine.groupby("round"):
        mean, half = stats.interval(part["accuracy"].to_numpy())
        rows.append({"algo": algo, "setting": setting, "round": int(k), "mean": mean, "half_width": half})
    return rows
