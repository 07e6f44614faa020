"""What a cell of a table may hold: from a run to one number for each of its seeds.

Everything is of the users seen in training, of one judged model after one number of adaptation steps; seeds that diverged have no number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perfed import results, stats
from perfed.errors import UserError, nearest
from perfed.results import Run

if TYPE_CHECKING:
    from pandas import DataFrame

Judged = tuple[str, int]
"""A model's name and the adaptation steps."""


@dataclass(frozen=True)
class Measure:
    """``of(run, judged)`` -> seed -> number. ``what`` and ``unit`` go into the caption; ``better`` +1, -1, or 0 for a number that is not
    compared; ``scale`` 100 shows a share in percent. Without ``interval`` seeds do not vary by chance, and a cell shows the mean alone.
    ``scored``: how users are scored, where that is not as the protocol says."""

    name: str
    what: str
    unit: str
    of: Callable[[Run, Judged], dict[str, float]]
    better: int = 1
    scale: float = 100.0
    digits: int = 2
    interval: bool = True
    lacking: str = "not measured"
    scored: str = ""

    def text(self, mean: float, half_width: float | None, sign: bool = False) -> str:
        """``92.13 ± 0.45``; ``92.13 (n/a)`` for one seed; a count that is the same for all seeds stands alone."""
        number = self.number(mean, sign)
        if not self.interval or (half_width == 0 and self.digits == 0):
            return number
        return f"{number} (n/a)" if half_width is None else f"{number} ± {self.number(half_width)}"

    def number(self, value: float, sign: bool = False) -> str:
        return f"{self.scale * value:{'+' if sign else ''},.{self.digits}f}"


# ---------------------------------------------------------------- of the files


def judged(run: Run, model: str | None = None, steps: int | None = None) -> Judged | None:
    """The model and steps that are asked for, by default the run's primary ones; None where the run does not judge them."""
    primary = run.result["primary"]
    want = (model or primary["model"], primary["steps"] if steps is None else steps)
    return want if _cell(run, want) is not None else None


def _cell(run: Run, want: Judged, seen: bool = True) -> Mapping[str, Any] | None:
    return next((c for c in run.result["cells"] if c["seen"] == seen and (c["model"], c["steps"]) == want), None)


def _users(run: Run, want: Judged) -> DataFrame:
    """Columns seed, user, group, accuracy, loss: the seen users, without diverged seeds."""
    users = run.users
    lost = [int(seed) for seed in run.result["diverged"]]
    mine = users[(users["model"] == want[0]) & (users["steps"] == want[1]) & users["seen"] & ~users["seed"].isin(lost)]
    return mine.assign(accuracy=mine["correct"] / mine["n_test"])


def per_user(run: Run, want: Judged) -> dict[str, dict[int, float]]:
    """seed -> user -> accuracy on his test data."""
    mine = _users(run, want)
    found: dict[str, dict[int, float]] = {}
    for seed, user, value in zip(mine["seed"], mine["user"], mine["accuracy"], strict=True):
        found.setdefault(str(int(seed)), {})[int(user)] = float(value)
    return found


def groups_of(run: Run, want: Judged) -> dict[tuple[str, int], str]:
    """(seed, user) -> the user's group."""
    mine = _users(run, want)
    return {(str(int(s)), int(u)): g for s, u, g in zip(mine["seed"], mine["user"], mine["group"], strict=True)}


def history(run: Run) -> DataFrame | None:
    """rounds.csv; of a run that was scored again that of the run itself. None where there is none."""
    for folder in (run.folder, *([run.folder.parent] if run.status.get("run") else [])):
        if (folder / "rounds.csv").is_file():
            return run.rounds if folder == run.folder else results.read_csv(folder / "rounds.csv", results.ROUNDS)
    return None


def clock(run: Run) -> dict[str, float]:
    """What timing.csv says, ``{"train": seconds, "train until round 10": seconds, ...}``; empty where there is none."""
    for folder in (run.folder, *([run.folder.parent] if run.status.get("run") else [])):
        if (folder / "timing.csv").is_file():
            frame = results.read_csv(folder / "timing.csv", {"what": "str", "value": "float64", "unit": "str"})
            return dict(zip(frame["what"], frame["value"], strict=True))
    return {}


def machine(run: Run) -> str:
    """``cpu, 1 thread, AMD EPYC``: seconds of other machines do not compare."""
    for folder in (run.folder, run.folder.parent):
        if made := results.read_json(folder / "provenance.json"):
            threads = made.get("threads")
            return f"{made.get('device')}, {threads} thread{'' if threads == 1 else 's'}, {made.get('processor')}"
    return "a machine not stored"


def _means(column: str, pick: Callable[[Any], float] | None = None) -> Callable[[Run, Judged], dict[str, float]]:
    def of(run: Run, want: Judged) -> dict[str, float]:
        parts = _users(run, want).groupby("seed")[column]
        return {str(int(seed)): float((pick or (lambda values: values.mean()))(values.to_numpy())) for seed, values in parts}

    return of


def _accuracy(run: Run, want: Judged) -> dict[str, float]:
    return dict(_cell(run, want)["per_seed"])


def _before(run: Run, want: Judged) -> dict[str, float]:
    cell = _cell(run, (want[0], 0))
    return dict(cell["per_seed"]) if cell else {}


def _gain(run: Run, want: Judged) -> dict[str, float]:
    before = _before(run, want)
    return {seed: value - before[seed] for seed, value in _accuracy(run, want).items() if seed in before}


def _new(run: Run, want: Judged) -> dict[str, float]:
    cell = _cell(run, want, seen=False)
    return dict(cell["per_seed"]) if cell else {}


def _last(column: str, of_model: bool = False) -> Callable[[Run, Judged], dict[str, float]]:
    def of(run: Run, want: Judged) -> dict[str, float]:
        rounds = history(run)
        if rounds is None:
            return {}
        mine = rounds[rounds["seen"] & ~rounds["seed"].isin([int(seed) for seed in run.result["diverged"]])]
        mine = mine[(mine["model"] == want[0]) & (mine["steps"] == want[1])] if of_model else mine
        ends = {str(int(seed)): part.sort_values("round", kind="stable")[column].iloc[-1] for seed, part in mine.groupby("seed")}
        return {seed: float(value) for seed, value in ends.items() if value == value}

    return of


def _seconds(run: Run, want: Judged) -> dict[str, float]:
    known = clock(run)
    seeds = [str(seed) for seed in run.result["seeds"] if str(seed) not in run.result["diverged"]]
    return {seed: known["train"] / len(run.result["seeds"]) for seed in seeds} if "train" in known else {}


MEAN = "of the unweighted mean over users"
VALIDATION = "each step on train data of the user, scored on all his validation data, unweighted mean over users"
COUNT = {"better": 0, "scale": 1.0, "digits": 0}
MEASURES: dict[str, Measure] = {
    m.name: m
    for m in (
        Measure("accuracy", "Accuracy in percent", MEAN, _accuracy),
        Measure("before", "Accuracy in percent before adaptation", MEAN, _before, lacking="not scored before adaptation"),
        Measure("gain", "Accuracy after adaptation minus accuracy before it, in percentage points", MEAN, _gain,
                lacking="not scored before adaptation"),
        Measure("worst10", "Accuracy in percent of the worst 10 % of the users (the tenth with the lowest accuracy, at least one)",
                "of their mean", _means("accuracy", stats.worst)),
        Measure("loss", "Mean loss on the scored data", MEAN, _means("loss"), better=-1, scale=1.0, digits=4),
        Measure("new_users", "Accuracy in percent of users that took no part in training", MEAN, _new, lacking="no user was held out"),
        Measure("val_accuracy", "Accuracy in percent on the validation data, after the last round", MEAN, _last("val_accuracy", True),
                lacking="no validation data (split.val=0)", scored=VALIDATION),
        Measure("grad_evals", "Gradient evaluations of all users together", "of the count", _last("grad_evals"), **COUNT),
        Measure("hvps", "Hessian-vector products of all users together", "of the count", _last("hvps"), **COUNT),
        Measure("floats_up", "Floats that all users sent", "of the count", _last("floats_up"), **COUNT),
        Measure("floats_down", "Floats sent to all users", "of the count", _last("floats_down"), **COUNT),
        Measure("seconds", "Seconds of training for one seed (the seeds of a run are computed together and share its time), without "
                "compiling and scoring", "", _seconds, better=0, scale=1.0, interval=False, lacking="no timing.csv"),
    )
}  # fmt: skip
"""The measures of one run; ``group:<name>`` (:func:`measure`) and helped, hurt (``perfed.pivot``) come on top."""
PAIRED = ("helped", "hurt")
BASELINES = ("local", "fedavg")


def measure(name: str, runs: list[Run]) -> Measure:
    """The measure of that name; ``group:<name>`` is the accuracy of a user group (its beginning is enough). Raises UserError."""
    if name in MEASURES:
        return MEASURES[name]
    if name.startswith("group:"):
        known = dict.fromkeys(g for run in runs if run.complete for cell in run.result["cells"] for g in cell.get("groups") or {})
        asked = name.removeprefix("group:").strip()
        fits = [asked] if asked in known else [group for group in known if group.startswith(asked)]
        if len(fits) == 1 and asked:
            return _of_group(fits[0])
        names = "; ".join(known) or "none: a diverged run has no groups"
        raise UserError("cell", name, f"one user group of these runs: {names}{nearest(asked, known)}")
    names = (*MEASURES, *PAIRED, *(f"{name}:{other}" for name in PAIRED for other in BASELINES[1:]), "group:<name>")
    raise UserError("cell", name, f"one of {', '.join(names)}{nearest(name, names)}")


def _of_group(group: str) -> Measure:
    def of(run: Run, want: Judged) -> dict[str, float]:
        mine = _users(run, want)
        return {str(int(s)): float(part.mean()) for s, part in mine[mine["group"] == group].groupby("seed")["accuracy"]}

    return Measure(f"group:{group}", f"Accuracy in percent of the users of group '{group}'", MEAN, of, lacking="no user of that group")
