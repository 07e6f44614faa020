"""What the paper's studies share: train labelled runs, read their primary cells and curves, name and write the study's folder."""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from perfed import results, stats, tables
from perfed.config import Config
from perfed.htmlpage import Links, Picture, Section, write_page
from perfed.identity import identity
from perfed.pivot import against, asked, source
from perfed.results import Run
from perfed.studies.jobs import Context, Job, run_all

CIFAR_SPLIT = ("partition.a=68", "partition.a_test=34")
HVP_WEIGHT = 2
"""Gradient evaluations that a Hessian-vector product counts for."""


def image_folder(path: str) -> tuple[str, ...]:
    """The words for CIFAR-10 as an image folder, with the paper's split."""
    quoted = path.replace("\\", "\\\\").replace("'", "\\'")
    return ("dataset=imagefolder", f"dataset.path='{quoted}'", *CIFAR_SPLIT)


def data_words(config: Config) -> tuple[str, ...]:
    """``study.cifar`` in the place of dataset=cifar10, for a study of one row."""
    return image_folder(config.study.cifar) if config.study.cifar is not None and config.dataset.name == "cifar10" else ()


def train_all(words: Mapping[str, tuple[str, ...]], context: Context, title: str = "run") -> tuple[dict[str, Run], list[str]]:
    """({label: finished run}, a line for each label without one)."""
    ended = run_all([Job(label, text) for label, text in words.items()], context, title)
    runs, missing = {}, []
    for label, done in ended.items():
        if done.folder is not None and done.problem is None and (run := results.load(done.folder)).complete:
            runs[label] = run
        else:
            missing.append(f"{label}: no result ({done.problem or 'the run did not end'})")
    return {label: runs[label] for label in words if label in runs}, missing


def accuracies(run: Run, steps: int | None = None) -> dict[str, float] | None:
    """Accuracy by seed of the primary model after ``steps`` (default the primary ones); None where a seed diverged."""
    if run.result["diverged"]:
        return None
    cell = tables.primary(run.result)
    if steps is not None:
        cell = next(c for c in run.result["cells"] if c["seen"] and c["model"] == cell["model"] and c["steps"] == steps)
    return cell["per_seed"]


def before(run: Run) -> float | None:
    """Accuracy of the primary model before adaptation; None where it was not judged."""
    cell = tables.primary(run.result)
    found = (c for c in run.result["cells"] if c["seen"] and c["model"] == cell["model"] and c["steps"] == 0)
    return next((c["mean"] for c in found), None)


def better_and_worse(run: Run, local: Run) -> str:
    """Shares of the users, in percent over seeds, whose accuracy is higher / lower than under ``local``: ``64 / 11``."""
    sides = list(against(source([run]), source([local]), asked("accuracy", [run, local]))[0].values())
    return " / ".join(f"{100 * sum(side) / len(side):.0f}" for side in zip(*sides, strict=True)) or "-"


def text_of(run: Run | None, steps: int | None = None) -> str:
    """The cell of a table."""
    if run is None:
        return "-"
    seeds = accuracies(run, steps)
    if seeds is None:
        return f"div {len(run.result['diverged'])}/{len(run.result['seeds'])}"
    return tables.accuracy_text(*stats.interval(list(seeds.values())))


def seconds(run: Run) -> dict[int, float]:
    """Training seconds (compiling and evaluating apart) until each evaluated round, of one seed's share of the run."""
    out = {}
    with open(run.folder / "timing.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["what"].startswith("train until round "):
                out[int(row["what"].rpartition(" ")[2])] = float(row["value"]) / len(run.result["seeds"])
    return out


def curve(run: Run) -> dict[str, np.ndarray]:
    """The primary cell by evaluated round: ``accuracy`` [K, S] of the seeds that did not diverge, ``seed`` [S], and [K] each of
    ``round``, ``gradients`` (a Hessian-vector product counts twice), ``floats`` (both ways), ``seconds`` (NaN where unknown)."""
    want, bad = run.result["primary"], [int(seed) for seed in run.result["diverged"]]
    frame = run.rounds
    mine = frame[(frame["model"] == want["model"]) & (frame["steps"] == want["steps"]) & frame["seen"] & ~frame["seed"].isin(bad)]
    spent = mine.assign(
        gradients=mine["grad_evals"] + HVP_WEIGHT * mine["hvps"], floats=mine["floats_down"] + mine["floats_up"]
    )
    rounds = np.array(sorted(set(mine["round"])))
    clock = seconds(run)
    by_seed = mine.pivot(index="round", columns="seed", values="accuracy")
    return {
        "accuracy": by_seed.to_numpy(),
        "seed": by_seed.columns.to_numpy(),
        "round": rounds,
        "gradients": spent.groupby("round")["gradients"].mean().to_numpy(),
        "floats": spent.groupby("round")["floats"].mean().to_numpy(),
        "seconds": np.array([clock.get(int(k), np.nan) for k in rounds]),
    }


def at(found: Mapping[str, np.ndarray], axis: str, budget: float) -> np.ndarray:
    """Accuracy [S] where the axis reaches ``budget``, linear between two evaluations; NaN before the first, the last one after the last."""
    return np.array([np.interp(budget, found[axis], line, left=np.nan) for line in found["accuracy"].T])


def seeds_at(found: Mapping[str, np.ndarray], axis: str, budget: float) -> dict[str, float] | None:
    """:func:`at` by seed; None before the first evaluation."""
    values = at(found, axis, budget)
    return dict(zip(map(str, found["seed"]), map(float, values), strict=True)) if np.isfinite(values).all() else None


def band(accuracy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[K, S] -> mean [K] and half-width [K] (NaN for one seed)."""
    pairs = [stats.interval(row) for row in accuracy]
    return np.array([m for m, _ in pairs]), np.array([np.nan if h is None else h for _, h in pairs])


def folder_of(name: str, config: Config, choices: Sequence[Any] = ()) -> Path:
    """The study's folder, made: named by what can change its numbers."""
    text = json.dumps([identity(config, "").hash, *choices])
    folder = config.outputs_path / f"{name}-{config.dataset.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def publish(folder: Path, title: str, sections: Sequence[Section], runs: Mapping[str, Run], missing: Sequence[str]) -> None:
    """Write the study's report.md and report.html, say what is missing and where the report is. The runs are listed last."""
    links = Links([(f"{label}: {run.folder.name}", run.folder) for label, run in runs.items()])
    sections = [*sections, Section("Runs", [links, *missing])]
    write_page(folder / "report.html", title, sections)
    results.write_text(folder / "report.md", _markdown(title, sections, folder))
    for line in missing:
        print(f"perfed: {line}")
    print(f"report: {results.from_here(folder) / 'report.md'}, report.html beside it", flush=True)


def _markdown(title: str, sections: Sequence[Section], folder: Path) -> str:
    texts = [f"# {title}\n"]
    for section in sections:
        texts += [f"{'#' * section.level} {section.heading}\n", *(_part(part, folder) for part in section.parts)]
    return "\n".join(texts)


def _part(part: Any, folder: Path) -> str:
    match part:
        case tables.Grid():
            return tables.markdown(part)
        case Picture(path, alt):
            return f"![{alt}]({path.name})\n\nAlso as [PDF]({path.with_suffix('.pdf').name}).\n"
        case Links(items):
            return "".join(f"- [{text}]({os.path.relpath(path, folder)})\n" for text, path in items)
        case _:
            return f"{part}\n"
