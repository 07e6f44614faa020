"""What a run leaves behind: the rows of its files, result.json, and what made the numbers."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perfed import results, stats, tree
from perfed.config import Config
from perfed.config import version as perfed_version
from perfed.data.datasets import Dataset
from perfed.data.partition import Partition
from perfed.device import Decision
from perfed.evaluate import Protocol, Scores
from perfed.federate import Federation
from perfed.identity import Identity
from perfed.types import Params

SHOWN_ROWS = 20
"""Rows of a count table that are shown."""


@dataclass(frozen=True)
class Prepared:
    """Everything a run needs before round 1, checked."""

    config: Config
    identity: Identity
    dataset: Dataset
    partitions: list[Partition]
    initial: list[Params]
    protocol: Protocol
    decision: Decision
    state_numbers: tuple[int, int] = (0, 0)  # that one seed keeps from round to round: the server's, all users'
    remarks: tuple[str, ...] = ()  # what a reader of the numbers should know of the setting, one line each
    copies: int = 1  # trials that are trained side by side, each with all seeds
    chosen: tuple[int, ...] | None = None  # the seeds that are computed; None: all

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that ``partitions`` and ``initial`` are of."""
        return self.config.seed_values if self.chosen is None else self.chosen


def primary(prepared: Prepared, models: tuple[str, ...]) -> dict[str, Any]:
    """The cell that stands for the run: the first model, after the most steps."""
    return {"model": models[0], "steps": max(prepared.config.adapt_steps)}


def user_rows(prepared: Prepared, scores: Scores, times_sampled: np.ndarray) -> list[dict[str, Any]]:
    """The rows of users.csv. ``n_test`` counts the scored examples; ``correct`` is a mean over the protocol's repeats. ``name``, the data's
    own name of the user, is there where the data have such."""
    rows = []
    for s, (seed, part) in enumerate(zip(prepared.config.seed_values, prepared.partitions, strict=True)):
        for u in range(part.n):
            fixed = {
                "seed": seed,
                "user": u,
                **({"name": part.names[u]} if part.names else {}),
                "group": part.groups[part.group[u]],
                "seen": bool(part.seen[u]),
                "times_sampled": int(times_sampled[s, u]),
                "n_train": int(part.train.sizes[u]),
                "n_val": int(part.val.sizes[u]),
                "n_test": int(scores.n_scored[s, u]),
            }
            for j, model in enumerate(scores.models):
                for i, steps in enumerate(scores.steps):
                    correct = round(float(scores.correct[s, u, j, i] * scores.n_scored[s, u]), 9)  # of a share: a count, but for round-off
                    rows.append({**fixed, "model": model, "steps": steps, "correct": correct, "loss": float(scores.loss[s, u, j, i])})
    return rows


def write_users(folder: Path, prepared: Prepared, scores: Scores, times_sampled: np.ndarray) -> None:
    """users.csv."""
    rows = user_rows(prepared, scores, times_sampled)
    results.write_csv(folder / "users.csv", rows, list(dict.fromkeys([*results.USERS, *rows[0]])))


def cells(prepared: Prepared, scores: Scores, diverged: dict[str, int]) -> list[dict[str, Any]]:
    """The cells of result.json: mean over seeds of the unweighted user mean, its interval, groups, worst 10 %."""
    out = []
    seeds, parts = prepared.config.seed_values, prepared.partitions
    for seen in (True, False) if not all(p.seen.all() for p in parts) else (True,):
        for j, model in enumerate(scores.models):
            for i, steps in enumerate(scores.steps):
                of = [scores.correct[s, p.seen == seen, j, i] for s, p in enumerate(parts)]
                loss = [float(scores.loss[s, p.seen == seen, j, i].mean()) for s, p in enumerate(parts)]
                mean, half = stats.interval([a.mean() for a in of])
                scored = [scores.n_scored[s, p.seen == seen] for s, p in enumerate(parts)]
                floors = [stats.binomial_floor((a * m).sum() / m.sum(), m) for a, m in zip(of, scored, strict=True)]
                groups = {}
                for g, name in enumerate(parts[0].groups):
                    inside = [a[p.group[p.seen == seen] == g] for a, p in zip(of, parts, strict=True)]
                    if all(len(x) for x in inside):
                        groups[name] = float(np.mean([x.mean() for x in inside]))
                out.append(
                    {
                        "model": model,
                        "steps": steps,
                        "seen": seen,
                        "mean": None if diverged else mean,
                        "half_width": None if diverged else half,
                        "per_seed": {str(seed): float(a.mean()) for seed, a in zip(seeds, of, strict=True) if str(seed) not in diverged},
                        "loss": None if diverged else float(np.mean(loss)),
                        "worst10": None if diverged else float(np.mean([stats.worst(a) for a in of])),
                        "binomial_floor": None if diverged else float(np.mean(floors)),
                        "groups": {} if diverged else groups,
                    }
                )
    return out


def integers(counts: np.ndarray) -> np.ndarray:
    """The same as integers where nothing is lost."""
    return counts.astype(np.int64) if (counts == np.rint(counts)).all() else counts


def _majority(prepared: Prepared) -> dict[str, Any]:
    """``majority``: mean over seeds and seen users of the majority-class accuracy; ``majority_groups``: the same by group. Where users were
    held out, both of them too, under ``..._new``."""
    y, classes = prepared.dataset.y, len(prepared.dataset.classes)
    shares = [p.majority(y, classes) for p in prepared.partitions]
    found: dict[str, Any] = {}
    for seen, end in ((True, ""), (False, "_new")):
        masks = [p.seen == seen for p in prepared.partitions]
        if not any(mask.any() for mask in masks):
            continue
        found["majority" + end] = float(np.mean([a[mask].mean() for a, mask in zip(shares, masks, strict=True) if mask.any()]))
        groups = found["majority_groups" + end] = {}
        for g, name in enumerate(prepared.partitions[0].groups):
            inside = [a[mask & (p.group == g)] for a, mask, p in zip(shares, masks, prepared.partitions, strict=True)]
            if all(len(x) for x in inside):
                groups[name] = float(np.mean([x.mean() for x in inside]))
    return found


def partition_counts(prepared: Prepared) -> dict[str, Any]:
    """The first SHOWN_ROWS rows of the count table of the first seed: train examples a user, mean over the users of a row. ``of``: how many
    rows there are."""
    names, counts = prepared.partitions[0].table(prepared.dataset.y, len(prepared.dataset.classes))
    shown = integers(counts[:SHOWN_ROWS]).tolist()
    return {"rows": names[:SHOWN_ROWS], "of": len(names), "classes": list(prepared.dataset.classes), "counts": shown}


def _selected(prepared: Prepared, rows: list[dict[str, Any]], models: tuple[str, ...]) -> dict[str, Any]:
    """For each seed the evaluated round with the highest validation accuracy of the primary cell (ties: the first), and
    the test accuracy there: selection never sees test data."""
    want, chosen = primary(prepared, models), []
    for seed in prepared.config.seed_values:
        mine = [r for r in rows if r["seed"] == seed and r["seen"] and (r["model"], r["steps"]) == (want["model"], want["steps"])]
        chosen.append(max(mine, key=lambda r: (r["val_accuracy"], -r["round"])))
    mean, half = stats.interval([r["accuracy"] for r in chosen])
    return {"rounds": [r["round"] for r in chosen], "mean": mean, "half_width": half}


def _sampled_alone(prepared: Prepared, scores: Scores, times: np.ndarray, diverged: dict[str, int]) -> dict[str, Any] | None:
    """The primary cell over the users that trained at least once; None where all did, or none in some seed."""
    seen = [p.seen & (t > 0) for p, t in zip(prepared.partitions, times, strict=True)]
    everyone = all((mask == p.seen).all() for mask, p in zip(seen, prepared.partitions, strict=True))
    if diverged or everyone or not all(mask.any() for mask in seen):
        return None
    want = primary(prepared, scores.models)
    j, i = scores.models.index(want["model"]), scores.steps.index(want["steps"])
    mean, half = stats.interval([scores.correct[s, mask, j, i].mean() for s, mask in enumerate(seen)])
    return {"mean": mean, "half_width": half}


def summary(prepared: Prepared, fed: Federation, scores: Scores, rows: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """result.json: nothing in it depends on the clock, the machine or the folder."""
    config = prepared.config
    diverged = {str(seed): int(k) for seed, k in zip(config.seed_values, fed.diverged.tolist(), strict=True) if k >= 0}
    price = fed.price()
    visits = max(1, fed.costs[0].user_rounds)
    counted = {"grad_evals": "grads", **{key: key for key in ("hvps", "losses", "full_passes", "floats_down", "floats_up")}}
    total = {key: integers(np.mean([getattr(cost, name) for cost in fed.costs])).item() for key, name in counted.items()}
    return {
        "name": prepared.identity.name,
        "algo": config.algo.name,
        "dataset": config.dataset.name,
        "partition": config.partition.name,
        "model": config.model.name,
        "identity": prepared.identity.hash,
        "protocol": prepared.protocol.label,
        "protocol_text": prepared.protocol.text().partition(": ")[2],
        "adapt_lr": prepared.protocol.lr,
        "primary": primary(prepared, scores.models),
        "seeds": list(config.seed_values),
        "diverged": diverged,
        "cells": cells(prepared, scores, diverged),
        **_majority(prepared),
        "best_on_validation": _selected(prepared, rows, scores.models) if rows and prepared.config.split.val > 0 and not diverged else None,
        "cold_start": config.algo.cold_start,
        "sampled_users_alone": _sampled_alone(prepared, scores, fed.times_sampled, diverged),
        "never_sampled": [int((p.seen & (t == 0)).sum()) for p, t in zip(prepared.partitions, fed.times_sampled, strict=True)],
        "costs": total,
        "per_active_user_round": {name: value / visits for name, value in total.items()},
        "per_local_step": {name: price["step"][name] for name in ("grads", "hvps")},
        **{name: getattr(config.algo, name, getattr(config, name)) for name in ("tau", "batch", "alpha", "beta")},
        **{name: getattr(config, name) for name in ("n", "r", "rounds", "partition_seed", "init_seed", "sampling_seed")},
        "parameters": tree.numel(prepared.initial[0]),
        "partition_digest": {str(s): p.digest() for s, p in zip(config.seed_values, prepared.partitions, strict=True)},
        "data": prepared.dataset.fingerprint,
        "norm": prepared.dataset.norm,
        "partition_counts": partition_counts(prepared),
    }


def provenance(prepared: Prepared) -> dict[str, Any]:
    """What made the numbers: versions, commit, machine. Not part of result.json."""
    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(Path(__file__).parent), *words], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    mine = git("ls-files", "--error-unmatch", "train.py") is not None  # not an unrelated repository around site-packages
    dirty = git("status", "--porcelain") if mine else None
    decision = prepared.decision
    return {
        "perfed": perfed_version(),
        "commit": git("rev-parse", "HEAD") if mine else None,
        "dirty": None if dirty is None else bool(dirty),
        "python": platform.python_version(),
        **{name: installed(name) for name in ("torch", "numpy", "pandas", "hydra-core", "omegaconf")},
        "device": str(decision.device),
        "processor": processor(decision.device),
        "threads": torch.get_num_threads(),
        "backend": decision.backend,
        "compiled": decision.compiled,
        "chunk": decision.chunk,
        "notes": list(decision.notes),
        "data_sha256": prepared.dataset.fingerprint,
    }


def processor(device: torch.device) -> str:
    """Name of the GPU, or of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
