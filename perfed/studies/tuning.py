"""Choosing values on validation data: the same number of trials for every method, on seeds that are not the report's.

    space     the published trials of a method, ``conf/tune/<method>.yaml``: words that always hold, and a grid
    tuned     train all trials of some methods: what each scored, and the best
    choices   the table of what was chosen

Each trial is trained on ``study.tuning_seeds`` seeds from ``seed + TUNING_SEED`` on, for ``study.tuning_share`` of the rounds, and the
highest accuracy on the validation data after the last round is chosen (the first of equals). Test data are never looked at.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perfed import results, tables
from perfed.algorithms import ALGORITHMS
from perfed.config import Config, conf_dir
from perfed.errors import UserError, nearest, require
from perfed.studies.jobs import Context, Done, Job, run_all

TRIALS = 6
"""Trials of every published space."""
NOT_TUNED = ("seed", "seeds", "partition_seed", "init_seed", "sampling_seed", "algo", "n", "holdout_users", "rounds", "eval_every")
"""Keys that are no part of a grid, beside those of dataset, partition, split, study, protocol and adapt."""
TUNING_SEED = 1000
"""Tuning uses the seeds from ``seed + TUNING_SEED`` on: not those of the report."""


@dataclass(frozen=True)
class Space:
    """One method's trials: words that always hold, and a grid of keys. ``count``: so many points of the grid, evenly spread; None: all."""

    method: str
    fixed: tuple[str, ...]
    grid: dict[str, list[Any]]
    count: int | None = None

    @property
    def trials(self) -> list[dict[str, Any]]:
        """The points that are tried, the last key running fastest."""
        points = [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]
        if self.count is None:
            return points
        return [points[i] for i in np.linspace(0, len(points) - 1, self.count).round().astype(int)]

    def tried(self, key: str) -> list[Any]:
        """The values of a key that are tried, in the order of the grid."""
        mine = [trial[key] for trial in self.trials]
        return [value for value in self.grid[key] if value in mine]

    def edges(self, chosen: Mapping[str, Any]) -> list[str]:
        """Keys whose chosen value is the first or last of at least three ordered numbers."""
        found = []
        for key in self.grid:
            values = self.tried(key)
            if all(number(v) for v in values) and len(values) >= 3 and chosen[key] in (min(values), max(values)):
                found.append(key)
        return found


@dataclass(frozen=True)
class Trial:
    """What became of one trial.

    ``validation``: accuracy in [0, 1] by seed, of the primary judged model on validation data after the last round; ``diverged``: round by
    seed; ``problem``: why there is no result, one line.
    """

    values: dict[str, Any]
    validation: dict[int, float]
    diverged: dict[int, int]
    problem: str | None = None

    @property
    def score(self) -> float | None:
        """Mean over seeds; None for a trial that failed, or diverged in any seed."""
        return None if self.problem or self.diverged or not self.validation else float(np.mean(list(self.validation.values())))

    @property
    def status(self) -> str:
        """DONE, DIVERGED or FAILED."""
        return "FAILED" if self.problem else "DIVERGED" if self.diverged else "DONE"


@dataclass(frozen=True)
class Tuned:
    """A method's space and its trials, in the order of the space."""

    space: Space
    trials: list[Trial]

    @property
    def best(self) -> Trial | None:
        """The trial with the highest score, the first of equals; None where every trial failed or diverged."""
        return max((t for t in self.trials if t.score is not None), key=lambda t: t.score, default=None)

    @property
    def words(self) -> tuple[str, ...]:
        """The chosen values as typed on the command line."""
        return () if self.best is None else words(self.best.values)

    def count(self, status: str) -> int:
        return sum(trial.status == status for trial in self.trials)


def number(value: Any) -> bool:
    """Whether the value is a number (true and false are none)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def space(method: str) -> Space:
    """The published space of a method."""
    path = conf_dir() / "tune" / f"{method}.yaml"
    require(path.is_file(), "study.methods", method, f"a method with a space: one of {', '.join(methods())}")
    found = read(path, [method])[method]
    assert len(found.trials) == TRIALS, f"{path}: {len(found.trials)} trials, not {TRIALS}"
    return found


def methods() -> list[str]:
    """All methods with a published space."""
    return sorted(path.stem for path in (conf_dir() / "tune").glob("*.yaml"))


def read(path: Path, wanted: Sequence[str]) -> dict[str, Space]:
    """The spaces that a file holds for some methods, by method.

    The file has the keys ``grid`` (key -> list of values) and, where wanted, ``fixed`` (a list of words), for all of them; or such a
    block for each method, by name. Raises UserError for a file of another form.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        raise UserError("space", path, f"cannot be read: {str(error).splitlines()[0]}") from None
    form = "a file with grid: {key: [values]} and, where wanted, fixed: [key=value], or such a block for each method by name"
    require(isinstance(content, dict) and bool(content), "space", path, form)
    if "grid" not in content:
        for name in content:
            known = sorted(ALGORITHMS)
            require(name in known, "space", path, f"{name}: no such algo{nearest(str(name), known)}; {form}")
    blocks = dict.fromkeys(wanted, content) if "grid" in content else {method: content[method] for method in wanted if method in content}
    found = {}
    for method, block in blocks.items():
        ok = isinstance(block, dict) and set(block) <= {"grid", "fixed"} and isinstance(block.get("grid"), dict) and bool(block["grid"])
        require(ok, "space", path, form)
        for key, values in block["grid"].items():
            ok = isinstance(values, list) and bool(values) and not any(isinstance(v, (list, dict)) for v in values)
            ok = ok and all(values.count(v) == 1 for v in values)
            require(ok, "space", path, f"{key} needs a list of different values, such as [0.1, 0.2]")
        fixed = block.get("fixed") or []
        require(isinstance(fixed, list) and all("=" in str(word) for word in fixed), "space", path, "fixed is a list of words: [key=value]")
        keys = [str(word).partition("=")[0] for word in fixed]
        twice = next((key for key in keys if key in block["grid"]), None)
        require(twice is None, "space", path, f"{twice} is in grid and in fixed")
        for key in (*block["grid"], *keys):
            require_tunable(str(key), "space", path)
        found[method] = Space(method, tuple(map(str, fixed)), {str(key): list(values) for key, values in block["grid"].items()})
    return found


def require_tunable(key: str, where: str, value: Any) -> None:
    """Raise UserError for a key that the choice itself rests on: trials with different ones could not be compared."""
    fixed = key in NOT_TUNED or key.split(".")[0] in ("dataset", "partition", "split", "study", "protocol", "adapt")
    require(not fixed, where, value, f"keys of the method or the model; {key} says how the trials are judged, and is the same for all")


def words(values: Mapping[str, Any]) -> tuple[str, ...]:
    """As typed on the command line."""

    def text(value: Any) -> str:
        return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

    return tuple(f"{key}={text(value)}" for key, value in values.items())


def label(method: str, values: Mapping[str, Any]) -> str:
    """How a trial is announced."""
    return " ".join((method, *words(values)))


def tuning_seeds(config: Config) -> range:
    """The seeds of the trials. Raises UserError where the report's seeds reach them."""
    why = f"at most {TUNING_SEED}: the trials use the seeds from seed + {TUNING_SEED} on"
    require(config.seeds <= TUNING_SEED, "seeds", config.seeds, why)
    return range(config.seed + TUNING_SEED, config.seed + TUNING_SEED + config.study.tuning_seeds)


def trial_words(config: Config, rounds: int) -> tuple[str, ...]:
    """What all trials of a method have that trains ``rounds`` rounds for the report: their seeds, their rounds, one evaluation."""
    seeds = tuning_seeds(config)
    share = f"rounds={max(1, round(config.study.tuning_share * rounds))}"
    return (f"seed={seeds.start}", f"seeds={len(seeds)}", f"eval_every={10**6}", "pictures=false", share)


def tuned(
    context: Context,
    methods: Mapping[str, Sequence[str]],
    spaces: Mapping[str, Space],
    lanes: bool = False,
    rounds: Callable[[str, Mapping[str, Any]], int] | None = None,
) -> dict[str, Tuned]:
    """Train the trials of all methods and choose: ``{label: Tuned}``.

    ``methods``: by a label of your own, the words that make the method beside those of ``context``: ``{"fedavg": ["algo=fedavg"]}``.
    ``spaces``: what is tried, by the same labels; their ``fixed`` words are part of every trial. ``tuned(...)[label].words`` are the chosen
    values, to be put behind the same words. ``study.tuning_seeds``, ``study.tuning_share`` and ``study.jobs`` count. Trials that have ended
    before are not trained again.

    ``lanes``: trials of a method that differ in float hyper-parameters alone are trained side by side, where the method allows it; they
    leave a record in ``outputs/trials`` and no run folder. ``rounds``: of a method (its label) with a trial's values, for the report;
    default those of its words; a trial takes ``study.tuning_share`` of them. Raises UserError without validation data, KeyboardInterrupt
    when interrupted.
    """
    config = context.config
    require(config.split.val > 0, "split.val", config.split.val, "a share > 0: the trials are chosen on validation data")
    jobs: dict[tuple[str, int], Job] = {}
    for name, base in methods.items():
        fixed = (*base, *spaces[name].fixed)
        whole = None if rounds else context.parsed(*fixed).rounds
        for i, values in enumerate(spaces[name].trials):
            more = trial_words(config, rounds(name, values) if rounds else whole)
            jobs[name, i] = Job(label(name, values), (*fixed, *words(values), *more))
    found = _side_by_side(context, jobs) if lanes else {}
    ended = run_all([job for key, job in jobs.items() if key not in found], context, "trial")
    for key, job in jobs.items():
        if key not in found:
            found[key] = _ended(ended[job.label])
    return {
        name: Tuned(spaces[name], [Trial(values, *found[name, i]) for i, values in enumerate(spaces[name].trials)]) for name in methods
    }


Outcome = tuple[dict[int, float], dict[int, int], str | None]


def _ended(done: Done) -> Outcome:
    """Validation, divergence and problem of a trial that had a run of its own."""
    from perfed.lanes import of_run

    if done.folder is None or done.problem:
        return {}, {}, done.problem or "no result"
    run = results.load(done.folder)
    if not run.complete:
        return {}, {}, f"the run did not end: {run.status['status']}"
    record = of_run(run)
    return record.validation, record.diverged, None


def _side_by_side(context: Context, jobs: Mapping[tuple[str, int], Job]) -> dict[tuple[str, int], Outcome]:
    """What is known of trials already, and of those that could be trained as lanes; the others are left out."""
    from perfed import lanes
    from perfed.device import pick_device

    configs = {key: context.parsed(*job.words) for key, job in jobs.items()}
    force = context.config.force
    known = {} if force else {key: record for key, config in configs.items() if (record := lanes.stored(config)) is not None}
    missing = [key for key in jobs if key not in known]
    groups = []
    for name in dict.fromkeys(name for name, _ in missing):
        mine = [key for key in missing if key[0] == name]
        groups += [[mine[i] for i in group] for group in lanes.groups([configs[key] for key in mine]) if len(group) > 1]
    # Where there are fewer jobs than processes a CPU would idle; a GPU does best with all lanes at once.
    parts = context.processes // len(groups) if groups and pick_device(context.config.device)[0].type == "cpu" else 1
    made: dict[str, list[tuple[str, int]]] = {}
    for group in groups:
        count = max(1, min(parts, len(group) // 2))
        for piece in np.array_split(np.arange(len(group)), count):
            keys = [group[i] for i in piece]
            made[f"{keys[0][0]}, {len(keys)} side by side from {' '.join(jobs[keys[0]].label.split()[1:])}"] = keys
    ended = run_all([Job(text, (), tuple(configs[key] for key in keys)) for text, keys in made.items()], context, "job")
    for text, keys in made.items():
        if ended[text].problem is None:
            known |= {key: lanes.stored(configs[key]) for key in keys}
    return {key: (record.validation, record.diverged, None) for key, record in known.items()}


def choices(found: Mapping[str, Tuned], share: float = 1.0) -> tables.Grid:
    """One row a method: trials, chosen values, their validation accuracy, the range over trials, and what lies at an edge of the grid."""
    rows = []
    for name, method in found.items():
        bad = [f"{number} {status.lower()}" for status in ("DIVERGED", "FAILED") if (number := method.count(status))]
        count = f"{len(method.trials)}" + (f" ({', '.join(bad)})" if bad else "")
        best, known = method.best, [t.score for t in method.trials if t.score is not None]
        if best is None:
            rows.append([name, count, "none", "-", "-", "-"])
            continue
        spread = f"{100 * min(known):.1f} to {100 * max(known):.1f} ({len(known)})"
        edges = ", ".join(method.space.edges(best.values)) or "-"
        rows.append([name, count, ", ".join(method.words), tables.percent(best.score), spread, edges])
    counts = "/".join(map(str, sorted({len(method.trials) for method in found.values()})))
    caption = (
        f"The best of {counts} trials for each method by accuracy on validation data (training data held out, other seeds than the "
        f"table's{'' if share == 1 else f', {share:g} of its rounds'}). Range: over the trials that ended without diverging (how many). "
        "At an edge: the chosen value is the smallest or largest of at least three, a better one may lie beyond."
    )
    return tables.grid(["method", "trials", "chosen", "validation %", "range % (trials)", "at an edge"], rows, caption)
