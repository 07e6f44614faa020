"""``experiment=table1`` and ``table1_quick``: the paper's Table 1, ours beside the recalled values, and a verdict per claim.

Rows are options of the group ``row`` (``conf/row``), columns the paper's three methods, the exact one, local training, and FedAvg with the
gradient evaluations of HF (four times the local steps). Each network of ``study.networks`` is trained once and judged under every
protocol of ``study.protocols`` (as by ``perfed-eval``). The block "tuned" repeats it with local steps chosen on validation data,
from the same trials for every method (``conf/tune/studies/table1.yaml``). Claims: :mod:`perfed.studies.paper`; that HF is ahead after
the same time is read from the same trainings, that it is ahead of ARUBA from the reports of ``experiment=aruba`` in the same outputs.
"""

from __future__ import annotations

import csv
import hashlib
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perfed import compare, results, tables
from perfed.config import Config, conf_dir, parse
from perfed.errors import nearest, require, show
from perfed.htmlpage import Section
from perfed.identity import identity
from perfed.results import Run
from perfed.studies import paper
from perfed.studies.compared import before, better_and_worse, curve, image_folder, publish, seeds_at
from perfed.studies.jobs import Context, Done, Job, run_all
from perfed.studies.paper import EQUAL, EXACT, FEDAVG, FO, HEADS, HF, LOCAL, ROWS, TITLES
from perfed.studies.tuning import Space, Tuned, choices, read, tuned

HF_GRADIENTS = 4
"""Gradient evaluations of one step of HF; FedAvg takes so many times more steps for the column at equal gradients."""
NETWORKS = {
    "mlp": ("model=mlp",),
    "langelaar": ("model=langelaar",),
    "mlp_large": ("model=mlp", "model.hidden=[200,100]"),
    "cnn": ("model=cnn",),
}
METHODS = (FEDAVG, FO, HF, EXACT, LOCAL, EQUAL)
AS_CONFIGURED, TUNED = "steps as configured", "tuned steps"
HELD_OUT = "split.val=0.2"
OF_A_ROW = ("alpha", "tau", "partition.diff_hetero")
"""What the claims compare: a row keeps its own."""
NOT_OF_A_ROW = ("seed", "seeds", "eval_every", "data")
"""What a command may set without being named."""
AT_EQUAL_TIME = "HF is ahead of FedAvg after the time of FedAvg's training (longer: experiment=fig1)"


@dataclass(frozen=True)
class Key:
    """A training of the study."""

    row: str
    network: str
    block: str
    method: str

    @property
    def label(self) -> str:
        return " ".join((self.row, self.network, *(["tuned"] if self.block == TUNED else []), self.method))


@dataclass(frozen=True)
class Variant:
    """A whole table: what the paper leaves open, chosen."""

    network: str
    protocol: str
    block: str

    @property
    def text(self) -> str:
        return f"{self.network}, protocol {self.protocol}, {self.block}"

    def choices(self, baseline: str) -> paper.Choices:
        return (("network", self.network), ("protocol", self.protocol), ("steps", self.block), ("baseline", baseline))


def row_words(row: str, cifar: str | None) -> tuple[str, ...]:
    """The words of a row; with ``cifar`` CIFAR-10 comes from an image folder."""
    if cifar is None or ROWS[row].data != "CIFAR-10":
        return (f"row={row}",)
    return (f"row={row}", *image_folder(cifar))


def method_words(row: str, method: str) -> tuple[str, ...]:
    return ("algo=fedavg", f"tau={HF_GRADIENTS * ROWS[row].tau}") if method == EQUAL else (f"algo={method}",)


def known_rows(rows: Sequence[str] | None) -> list[str]:
    """The wanted rows; raises UserError for one that does not exist."""
    wanted = list(rows or ROWS)
    for row in wanted:
        require(row in ROWS, "study.rows", row, f"a list of rows among {', '.join(ROWS)}{nearest(row, list(ROWS))}")
    return wanted


def changed(context: Context, rows: Sequence[str]) -> dict[str, Any]:
    """Keys of which the command's words give a row another value than its own, with that value. Raises UserError for one that a row is
    known by."""
    out: dict[str, Any] = {}
    for row in rows:
        words = row_words(row, context.config.study.cifar)
        own, mine = (tables.flat(identity(config, "").content) for config in (parse(context.compose(words)), context.parsed(*words)))
        out |= {key: mine.get(key) for key in own.keys() | mine.keys() if own.get(key) != mine.get(key)}
        for key in OF_A_ROW:
            why = f"{show(own.get(key))} in the row {row}, which says so; study.rows chooses among {', '.join(ROWS)}"
            require(key not in out or key not in mine, key, out.get(key), why)
    return {key: out[key] for key in sorted(out) if key not in NOT_OF_A_ROW and not key.startswith("algo.")}


def main(context: Context) -> int:
    """Run the study; returns the exit code."""
    study, rows = context.config.study, known_rows(context.config.study.rows)
    require(study.methods == "all", "study.methods", study.methods, "all: Table 1 has its own methods")
    space = table_space()
    base = {
        Key(row, network, AS_CONFIGURED, method): (*row_words(row, study.cifar), *NETWORKS[network], *method_words(row, method))
        for row in rows
        for network in study.networks
        for method in METHODS
    }
    if study.tuned:
        own = "0: the tuned block holds out its own 20 %, the other none (study.tuned=false)"
        require(context.config.split.val == 0, "split.val", context.config.split.val, own)
    other = changed(context, rows)
    if context.config.plan:
        print(_plan(base, space, context))
        return 0
    pairs = [(row, network) for row in rows for network in study.networks]
    smooth = {pair: _smoothness(context, base[Key(*pair, AS_CONFIGURED, HF)]) for pair in pairs}
    count = f"{len(base)} trainings" + (f", {len(base) * len(space.trials)} trials and {len(base)} tuned trainings" if study.tuned else "")
    print(f"perfed: Table 1: {len(rows)} rows, {count}; {context.processes} at once", flush=True)
    jobs = dict(base)
    chosen: dict[Key, Tuned] = {}
    if study.tuned:
        chosen = _tune(context, base, space)
        well = {key: found.words for key, found in chosen.items() if found.best is not None}
        jobs |= {Key(key.row, key.network, TUNED, key.method): (*base[key], HELD_OUT, *text) for key, text in well.items()}
    ended: dict[str, Done] = {}
    for block in (AS_CONFIGURED, TUNED) if study.tuned else (AS_CONFIGURED,):
        ended |= run_all([Job(key.label, text) for key, text in jobs.items() if key.block == block], context, "run")
    folders = {key: ended[key.label].folder for key in jobs if ended[key.label].problem is None}
    runs = _judged(folders, study.protocols)
    return _report(context, rows, runs, {key: ended[key.label] for key in jobs}, chosen, smooth, other)


def table_space() -> Space:
    """The trials of the tuned block, the same for every method."""
    return read(conf_dir() / "tune" / "studies" / "table1.yaml", ["table1"])["table1"]


def _plan(base: Mapping[Key, tuple[str, ...]], space: Space, context: Context) -> str:
    rows = [[key.row, key.network, TITLES[key.method], " ".join(text)] for key, text in base.items()]
    note = f"Each judged under the protocols {', '.join(context.config.study.protocols)}."
    if context.config.study.tuned:
        grid = "; ".join(f"{k} in {v}" for k, v in space.grid.items())
        note += f" Tuned block: {len(space.trials)} trials each ({grid}), then as many trainings again."
    return tables.plain(tables.grid(["row", "network", "method", "words"], rows, note))


def _smoothness(context: Context, text: tuple[str, ...]) -> float:
    """L at w_0; raises UserError before anything is trained where the row's data cannot be had."""
    from perfed.prepare import prepare, smoothness

    return smoothness(prepare(context.parsed(*text, "seeds=1", "plan=false")))


def _tune(context: Context, base: Mapping[Key, tuple[str, ...]], space: Space) -> dict[Key, Tuned]:
    """The trials of every training."""
    holding = replace(context, config=context.parsed(HELD_OUT), words=(*context.words, HELD_OUT))
    found = tuned(holding, {key.label: text for key, text in base.items()}, {key.label: space for key in base}, lanes=True)
    return {key: found[key.label] for key in base}


def _judged(folders: Mapping[Key, Path | None], protocols: Sequence[str]) -> dict[tuple[Key, str], Run]:
    """(training, protocol) -> its run, scored again where it was trained under another protocol."""
    from perfed.rescore import rescore

    out = {}
    for key, folder in folders.items():
        if folder is None or not (run := results.load(folder)).complete:
            continue
        for protocol in protocols:
            same = run.result["protocol"] == protocol
            out[key, protocol] = run if same else rescore(folder, [f"protocol={protocol}", "engine.threads=1"])
    return out


# ---------------------------------------------------------------- the report


def values_of(runs: Mapping[tuple[Key, str], Run], variant: Variant) -> dict[tuple[str, str], dict[str, float]]:
    """(row, method) -> accuracy by seed, of one table; of a cell with a diverged seed none."""
    return {
        (key.row, key.method): {} if run.result["diverged"] else tables.primary(run.result)["per_seed"]
        for (key, protocol), run in runs.items()
        if Variant(key.network, protocol, key.block) == variant
    }


def variants_of(runs: Mapping[tuple[Key, str], Run]) -> list[Variant]:
    return list(dict.fromkeys(Variant(key.network, protocol, key.block) for key, protocol in runs))


def table_of(
    rows: Sequence[str],
    runs: Mapping[tuple[Key, str], Run],
    variant: Variant,
    smooth: Mapping[tuple[str, str], float],
    other: Mapping[str, Any] | None = None,
) -> tables.Grid:
    """One table: a line per row, and below it the paper's recalled values where there are any.

    ``other``: what the command changed of the rows' settings; the caption says so, and the paper's values do not stand beside it.
    """
    lines, notes = [], []
    mine = {(key.row, key.method): run for (key, protocol), run in runs.items() if Variant(key.network, protocol, key.block) == variant}
    for row in rows:
        found = {method: mine.get((row, method)) for method in METHODS}
        well = {i: run for i, run in enumerate(found.values()) if run is not None and not run.result["diverged"]}
        seeds = {i: tables.primary(run.result)["per_seed"] for i, run in well.items()}
        bold, dagger = compare.marks_of_row(seeds)
        cells: list[Any] = []
        for i, (method, run) in enumerate(found.items()):
            if run is None:
                cells.append("-")
                notes.append(f"-: {HEADS[method]}, {ROWS[row].text}: no result.")
            elif run.result["diverged"]:
                cells.append(f"div {len(run.result['diverged'])}/{len(run.result['seeds'])}")
            else:
                cell = tables.primary(run.result)
                cells.append(tables.Cell(tables.accuracy_text(cell["mean"], cell["half_width"]), i in bold, dagger.get(i, "")))
        majority = next((run.result["majority"] for run in found.values() if run is not None), None)
        size = smooth.get((row, variant.network))
        alpha_l = "-" if size is None else f"{ROWS[row].alpha * size:.2g}"
        lines.append([ROWS[row].text, *cells, tables.percent(majority), alpha_l])
        if (recalled := ROWS[row].recalled) and not other:
            old = [tables.accuracy_text(*recalled[method]) if method in recalled else "-" for method in METHODS]
            lines.append(["  paper, as recalled", *old, "-", "-"])
    caption = tables.sweep_caption([run for run in mine.values()], tuned=variant.block == TUNED)
    caption += (
        f" Network {variant.network}. FO, HF, exact: Per-FedAvg. {HEADS[EQUAL]}: FedAvg with {HF_GRADIENTS} times the local steps, the "
        "gradient evaluations of HF. local judges each user's own model, the others the global one after the protocol's adaptation. "
        "alpha L: the adaptation step times the largest Hessian eigenvalue of a user's loss at the initial model."
    )
    if other:
        caption += f" Not the rows' own: {', '.join(f'{key}={show(value)}' for key, value in other.items())}."
    elif any(ROWS[row].recalled for row in rows):
        caption += f" The paper's values are {paper.RECALLED}; what its ± counts is not stated."
        if variant.protocol != "paper":
            caption += " The paper's values are of the protocol paper."
    return tables.grid(["row", *(HEADS[method] for method in METHODS), "majority", "alpha L"], lines, caption, notes)


def groups_of(rows: Sequence[str], runs: Mapping[tuple[Key, str], Run], variant: Variant) -> tables.Grid:
    """Accuracy before adaptation, by user group and of the worst 10 %, and who gains over local training, beside each table."""
    mine = {(key.row, key.method): run for (key, protocol), run in runs.items() if Variant(key.network, protocol, key.block) == variant}
    lines = []
    for row in rows:
        cells = {m: tables.primary(mine[row, m].result) for m in METHODS if (row, m) in mine and not mine[row, m].result["diverged"]}
        kinds = {
            name: {m: tables.percent(cell["groups"].get(name)) for m, cell in cells.items()}
            for name in dict.fromkeys(name for cell in cells.values() for name in cell["groups"])
        }
        low = {m: f"{tables.percent(cell['worst10'])} ({tables.percent(cell['binomial_floor'])})" for m, cell in cells.items()}
        start = {m: tables.percent(before(mine[row, m])) for m in cells}
        gain = {m: better_and_worse(mine[row, m], mine[row, LOCAL]) for m in cells if LOCAL in cells and m != LOCAL}
        for name, texts in (("before adaptation", start), *kinds.items(), ("worst 10 % (floor)", low), ("better / worse than local", gain)):
            lines.append([f"{ROWS[row].text}: {name}", *(texts.get(m, "-") for m in METHODS)])
    caption = (
        "The same runs: the same models before adaptation; by group of users (group 1: five classes; group 2: two classes, one of which is "
        "most of a user's data; under diff. hetero. one class, where 100 % is trivial); the mean of the tenth of the users with the lowest "
        "accuracy, with its binomial floor; shares of the users, in percent, with a higher / lower accuracy than under local training."
    )
    return tables.grid(["row: users", *(HEADS[m] for m in METHODS)], lines, caption)


def against_equal(values: paper.Values) -> dict[tuple[str, str], paper.Seeds]:
    """The same values with FedAvg at equal gradient evaluations in FedAvg's place."""
    out = {key: seeds for key, seeds in values.items() if key[1] not in (FEDAVG, EQUAL)}
    return out | {(row, FEDAVG): seeds for (row, method), seeds in values.items() if method == EQUAL}


def equal_time(rows: Sequence[str], trained: Mapping[Key, Run], network: str) -> list[paper.Part]:
    """HF - FedAvg, as configured, when the cheaper of the two trainings of a row ends; by their own protocol and measured seconds."""
    parts = []
    for row in rows:
        pair = [trained.get(Key(row, network, AS_CONFIGURED, method)) for method in (HF, FEDAVG)]
        text = f"{ROWS[row].text}: HF - FedAvg"
        if None in pair or any(run.result["diverged"] for run in pair):
            parts.append(paper.Part(text, None, "not run" if None in pair else "diverged"))
            continue
        curves = [curve(run) for run in pair]
        end = min(found["seconds"][-1] for found in curves)
        values = [seeds_at(found, "seconds", end) for found in curves]
        if None in values:
            parts.append(paper.Part(f"{text} after {end:.3g} s, before the first evaluation", None, "not run"))
        else:
            parts.append(paper.compare(f"{text} after {end:.3g} s of training, a seed's share", *values))
    return parts


def stored_verdicts(outputs: Path) -> str:
    """What the reports of ``experiment=aruba`` in a folder say of their claims."""
    found = []
    for path in sorted(outputs.glob("aruba-*/verdicts.csv")):
        with open(path, encoding="utf-8", newline="") as file:
            found.append(f"{' / '.join(dict.fromkeys(line['verdict'] for line in csv.DictReader(file)))} ({path.parent.name})")
    return "; ".join(found) or "not run (experiment=aruba)"


def verdicts(
    found: Mapping[paper.Choices, paper.Values],
    networks: Mapping[str, tuple[paper.Values, paper.Values]],
    timed: Sequence[paper.Part] = (),
    aruba: str = "not run (experiment=aruba)",
) -> tuple[tables.Grid, tables.Grid, tables.Grid]:
    """(claims with the first choices' verdict and what turns it, claims x all choices, every comparison).

    ``found``: choices -> values; ``networks``: name of a more complex network -> (values of mlp, values of it); ``timed``: the parts of
    :func:`equal_time`; ``aruba``: of :func:`stored_verdicts`.
    """
    short, whole, every = [], [], []
    for claim in paper.CLAIMS:
        parts = {made: list(claim.parts(values)) for made, values in found.items()}
        ends = {made: paper.overall(p) for made, p in parts.items()}
        short.append([claim.text, paper.verdict_text(next(iter(parts.values()))), paper.turned(ends)])
        whole.append([claim.text, *ends.values()])
        for made, listed in parts.items():
            for part in listed:
                every.append([claim.name, _chosen(made), part.text, paper.difference_text(part.difference), part.verdict])
    if not networks:
        short.append(["a more complex network keeps the order (study.networks=[mlp,mlp_large])", "not run", "-"])
    for name, (base, other) in networks.items():
        parts = list(paper.keeps_the_order(base, other))
        text = f"a more complex network keeps the order ({name} against mlp)"
        short.append([text, paper.verdict_text(parts) if parts else "undecided (mlp separates no two methods)", "-"])
        every += [["network", name, part.text, paper.difference_text(part.difference), part.verdict] for part in parts]
    short += [[AT_EQUAL_TIME, paper.verdict_text(timed), "-"], ["HF is ahead of FedAvg + ARUBA", aruba, "-"]]
    every += [["equal time", "as trained", part.text, paper.difference_text(part.difference), part.verdict] for part in timed]
    base = next(iter(found))
    note = (
        f"Of the first table ({_chosen(base)}). Supported, contradicted, undecided: by the 95 % interval of the paired difference over "
        "common seeds, each by itself, of every comparison that the claim makes in these rows (below five seeds: undecided; one "
        "contradicted comparison contradicts the claim). Turned by: the choice that the paper leaves open and that, changed alone, gives "
        "another verdict (with tuned steps a fifth of the training data is held out too). After the same time: by measured seconds, whose "
        "own error the intervals do not know."
    )
    return (
        tables.grid(["claim of the paper", "verdict", "turned by"], short, note),
        tables.grid(["claim of the paper", *map(_chosen, found)], whole),
        tables.grid(["claim", "choices", "comparison", "difference, points", "verdict"], every),
    )


def _chosen(made: paper.Choices) -> str:
    return ", ".join(f"protocol {value}" if name == "protocol" else value for name, value in made)


def below_majority(rows: Sequence[str], runs: Mapping[tuple[Key, str], Run]) -> Iterator[str]:
    """A sentence per table on its cells below the majority class, ours and the recalled ones."""
    for variant in variants_of(runs):
        low = []
        for (key, protocol), run in runs.items():
            if Variant(key.network, protocol, key.block) == variant and not run.result["diverged"]:
                mean = tables.primary(run.result)["mean"]
                if mean < run.result["majority"]:
                    low.append(f"{HEADS[key.method]} on {ROWS[key.row].text} ({tables.percent(mean)})")
        yield f"{variant.text}: {'; '.join(low) or 'none'}."
    old = [
        f"{HEADS[method]} on {ROWS[row].text} ({tables.percent(mean)})"
        for row in rows
        for method, (mean, _) in (ROWS[row].recalled or {}).items()
        if mean < paper.RECALLED_MAJORITY[ROWS[row].diff]
    ]
    if any(ROWS[row].recalled for row in rows):
        yield f"the paper's, {paper.RECALLED}: {'; '.join(old) or 'none'}."


def _report(
    context: Context, rows: list[str], runs: Any, ended: Mapping[Key, Done], chosen: Any, smooth: Any, other: Mapping[str, Any]
) -> int:
    config = context.config
    missing = [f"{key.label}: {done.problem}" for key, done in ended.items() if done.problem is not None]
    missing += [f"{key.label}: every trial failed or diverged" for key, found in chosen.items() if found.best is None]
    variants = variants_of(runs)
    folder = config.outputs_path / _name(config, rows)
    folder.mkdir(parents=True, exist_ok=True)
    trained = {key: results.load(done.folder) for key, done in ended.items() if done.folder is not None}
    sections: list[Section] = []
    last: tables.Grid | None = None
    for number, variant in enumerate(variants, 1):
        shown = table_of(rows, runs, variant, smooth, other)
        sections.append(Section(variant.text, [shown, groups_of(rows, runs, variant)]))
        results.write_text(folder / f"table{number}.csv", tables.to_csv(shown))
        print(f"\n{variant.text}\n\n{tables.plain(tables.unsaid(shown, last))}", flush=True)
        last = shown
    if variants:
        timed = equal_time(rows, {key: run for key, run in trained.items() if run.complete}, config.study.networks[0])
        claims, whole, every = verdicts(*_values(config, runs, variants), timed, stored_verdicts(config.outputs_path))
        sections += [Section("Verdicts", [claims, whole]), Section("Every comparison", [every], 3)]
        results.write_text(folder / "verdicts.csv", tables.to_csv(claims))
        results.write_text(folder / "comparisons.csv", tables.to_csv(every))
        print(tables.plain(claims))
    below = list(below_majority(rows, runs))
    sections.append(Section("Below the majority class", below))
    if chosen:
        named = {f"{ROWS[key.row].text}; {key.network}: {TITLES[key.method]}": found for key, found in chosen.items()}
        picked = choices(named, config.study.tuning_share)
        sections.append(Section("What was chosen", [picked]))
        print(tables.plain(picked))
    print("Below the majority class:")
    for line in below:
        print(textwrap.fill(line, 110, initial_indent="  ", subsequent_indent="    "))
    data = ", ".join(dict.fromkeys(ROWS[row].data for row in rows))
    publish(folder, f"Table 1 of the Per-FedAvg paper on {data}", sections, {key.label: run for key, run in trained.items()}, missing)
    return 1 if missing else 0


def _values(config: Config, runs: Any, variants: Sequence[Variant]) -> tuple[dict[paper.Choices, paper.Values], dict[str, Any]]:
    """What :func:`verdicts` takes. The first network, protocol and steps come first, against FedAvg as it is."""
    found = {}
    for variant in variants:
        values = values_of(runs, variant)
        found[variant.choices("FedAvg")] = values
        found[variant.choices("FedAvg at equal gradients")] = against_equal(values)
    first = Variant("mlp", config.study.protocols[0], AS_CONFIGURED)
    larger = [name for name in config.study.networks if name in ("mlp_large", "cnn") and "mlp" in config.study.networks]
    return found, {name: (values_of(runs, first), values_of(runs, Variant(name, first.protocol, first.block))) for name in larger}


def _name(config: Config, rows: Sequence[str]) -> str:
    study = config.study
    choices = [rows, study.networks, study.protocols, study.tuned, study.tuning_seeds, study.tuning_share]
    return f"table1-{hashlib.sha256(json.dumps([identity(config, '').hash, *choices]).encode()).hexdigest()[:12]}"
