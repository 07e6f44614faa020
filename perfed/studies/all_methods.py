"""``experiment=all_methods``: every method on one split, with equal budgets, its step sizes chosen on validation data.

1. Budget. Each method gets ``study.budget`` gradient evaluations for every user that trains in a round; a Hessian-vector
   product counts as two. What one round costs is counted on a dry run, and the number of rounds follows. What all users
   computed and sent together is in the table too: it differs, for example where every user trains in every round. With
   ``study.budget=null`` all methods get the same number of rounds instead.
2. Trials. ``conf/tune/<method>.yaml`` names a grid, equally many points for each method; see ``perfed.studies.tuning``.
3. Report. The chosen values on the report's seeds, one table sorted by accuracy; what was chosen, with a flag at an edge of a grid.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from perfed import compare, results, tables
from perfed.config import Config
from perfed.errors import require
from perfed.identity import identity
from perfed.studies.compared import before, better_and_worse
from perfed.studies.jobs import Context, Done, Job, run_all
from perfed.studies.tuning import TRIALS, Space, Tuned, choices, methods, space, tuned, words

HVP_WEIGHT = 2
"""Gradient evaluations that a Hessian-vector product counts for: it is the gradient of a gradient."""


def cost_of_a_round(config: Config) -> float:
    """Gradient evaluations of one training user in one round, counted on a dry run."""
    from perfed.prepare import federation, prepare

    one = replace(config, seeds=1)
    fed = federation(prepare(one))
    price = fed.price()
    times = {"receive": 1, "send": 1, "step": config.algo.local_steps_at_most()}
    return sum(count * (price[part]["grads"] + HVP_WEIGHT * price[part]["hvps"]) for part, count in times.items())


def rounds_for(config: Config, budget: int | None) -> int:
    return config.rounds if budget is None else max(1, round(budget / cost_of_a_round(config)))


class Rounds:
    """Rounds of a trial: what the budget pays for, with the trial's own numbers of steps (its step sizes cost nothing)."""

    def __init__(self, context: Context, spaces: Mapping[str, Space]):
        self.context, self.spaces = context, spaces
        self._known: dict[Any, int] = {}

    def __call__(self, method: str, values: Mapping[str, Any]) -> int:
        costly = {key: value for key, value in values.items() if not isinstance(value, float)}
        key = (method, *costly.items())
        if key not in self._known:
            config = self.context.parsed(f"algo={method}", *self.spaces[method].fixed, *words(costly))
            self._known[key] = rounds_for(config, config.study.budget)
        return self._known[key]


def main(context: Context) -> int:
    """Run the study; returns the exit code."""
    config = context.config
    require(config.split.val > 0, "split.val", config.split.val, "a share > 0: the trials are chosen on validation data")
    wanted = methods() if config.study.methods == "all" else list(config.study.methods)
    spaces = [space(method) for method in wanted]
    rounds = Rounds(context, {s.method: s for s in spaces})
    if config.plan:
        print(_plan(spaces, rounds, config))
        return 0
    seeds = f"{TRIALS} trials each on {config.study.tuning_seeds} seed(s), then {config.seeds} seeds"
    print(f"perfed: {len(spaces)} methods, {seeds}; {context.processes} at once", flush=True)
    found = tuned(context, {s.method: (f"algo={s.method}",) for s in spaces}, {s.method: s for s in spaces}, lanes=True, rounds=rounds)
    well = {m: t for m, t in found.items() if t.best is not None}
    spent = {m: rounds(m, t.best.values) for m, t in well.items()}
    final = [Job(m, (f"algo={m}", *t.space.fixed, *t.words, f"rounds={spent[m]}")) for m, t in well.items()]
    ended = run_all(final, context, "method")
    return _report(context, spaces, spent, found, ended)


def _plan(spaces: list[Space], rounds: Rounds, config: Config) -> str:
    def text(s: Space) -> str:
        return " or ".join(map(str, dict.fromkeys(rounds(s.method, values) for values in s.trials)))

    rows = [[s.method, text(s), "; ".join(f"{k} in {v}" for k, v in s.grid.items())] for s in spaces]
    note = f"{len(spaces) * TRIALS} trials of {config.study.tuning_seeds} seed(s) and {len(spaces)} runs of {config.seeds} seeds."
    return tables.plain(tables.grid(["method", "rounds", "grid"], rows, note))


def _report(context: Context, spaces: list[Space], rounds: dict[str, int], found: dict[str, Tuned], ended: dict[str, Done]) -> int:
    config = context.config
    runs = {m: results.load(done.folder) for m, done in ended.items() if done.folder is not None and done.problem is None}
    runs = {m: run for m, run in runs.items() if run.complete}
    missing = [s.method for s in spaces if s.method not in runs]
    table = method_table(runs, rounds)
    chosen = choices(found, config.study.tuning_share)
    folder = config.outputs_path / _name(config, spaces)
    text = (
        f"# All methods on {config.dataset.name}\n\n{tables.markdown(table)}\n## What was chosen\n\n{tables.markdown(chosen)}\n"
        + "## Runs\n\n"
        + "".join(f"- {m}: {run.folder.name}\n" for m, run in sorted(runs.items()))
        + "".join(f"- {m}: no result ({_why(m, found, ended)})\n" for m in missing)
    )
    folder.mkdir(parents=True, exist_ok=True)
    results.write_text(folder / "report.md", text)
    results.write_text(folder / "methods.csv", tables.to_csv(table))
    results.write_text(folder / "choices.csv", tables.to_csv(chosen))
    print(f"\n{tables.plain(table)}\n{tables.plain(chosen)}\nreport: {results.from_here(folder) / 'report.md'}", flush=True)
    for m in missing:
        print(f"perfed: {m}: no result ({_why(m, found, ended)})", flush=True)
    return 1 if missing else 0


def _name(config: Config, spaces: list[Space]) -> str:
    grids = [[s.method, s.fixed, s.grid] for s in spaces]
    content = json.dumps([identity(config, "").hash, config.study.budget, config.study.tuning_seeds, config.study.tuning_share, grids])
    return f"all_methods-{config.dataset.name}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


def _why(method: str, found: Mapping[str, Tuned], ended: dict[str, Done]) -> str:
    if found[method].best is None:
        return "every trial failed or diverged"
    return ended[method].problem or "the run did not end"


def method_table(runs: Mapping[str, results.Run], rounds: Mapping[str, int]) -> tables.Grid:
    """One row a method, sorted by accuracy; a diverged method comes last, without a mean."""
    means: dict[str, tuple[float, float | None]] = {}
    per_seed: dict[str, dict[str, float]] = {}
    for method, run in runs.items():
        cell = tables.primary(run.result)
        if not run.result["diverged"]:
            means[method], per_seed[method] = (cell["mean"], cell["half_width"]), cell["per_seed"]
    order = sorted(runs, key=lambda m: -means[m][0] if m in means else 1.0)
    bold, dagger = compare.marks_of_row({i: per_seed[method] for i, method in enumerate(order) if method in per_seed})
    rows = []
    for i, method in enumerate(order):
        run, cell = runs[method], tables.primary(runs[method].result)
        costs, result = run.result["costs"], run.result
        shares = better_and_worse(run, runs["local"]) if method != "local" and "local" in runs else "-"
        div = f"div {len(result['diverged'])}/{len(result['seeds'])}"
        text = tables.accuracy_text(*means[method]) if method in means else div
        rows.append(
            [
                method if result["model"] == "mlp" else f"{method} ({result['model']})",
                tables.judged(cell["model"], cell["steps"]),
                tables.Cell(text, i in bold, dagger.get(i, "")),
                tables.percent(before(run)) if method in means else "-",
                tables.percent(cell["worst10"]),
                shares,
                f"{rounds[method]:,}",
                f"{costs['grad_evals'] / 1000:,.1f}" + (f" + {costs['hvps'] / 1000:,.1f} HVP" if costs["hvps"] else ""),
                f"{(costs['floats_down'] + costs['floats_up']) / 1e6:,.0f}",
            ]
        )
    first = next(iter(runs.values()), None)
    caption = "" if first is None else _caption(first, runs)
    if first is not None:
        rows.append(["majority class", "-", tables.percent(first.result.get("majority")), "-", "-", "-", "-", "-", "-"])
    columns = [
        "method", "judged model", "accuracy % ± 95 % CI", "before %", "worst 10 %", "better / worse than local %",
        "rounds", "gradients, 1000", "numbers sent, million",
    ]  # fmt: skip
    return tables.grid(columns, rows, caption)


def _caption(first: results.Run, runs: Mapping[str, results.Run]) -> str:
    marks = tables.BOLD_OF_ROW.replace(" of a row", "").replace("pairs of the row", "pairs of methods")
    return (
        f"{tables.sweep_caption(list(runs.values()), tuned=True, marks=marks)} Before: the same model without adaptation. "
        "Better / worse than local: share of (seed, user) pairs with a higher / lower accuracy than under local training. Gradients "
        "(thousands; HVP: Hessian-vector products) and numbers sent (both ways) are counted over all "
        f"{first.result['n']} users of a seed."
    )
