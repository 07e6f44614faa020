"""The paper's claims as verdicts on exact numbers, its recalled values, and the studies that print them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from perfed import cli, figures, results, stats, tables
from perfed.config import NETWORKS, parse
from perfed.frontdoor import Composer, compose
from perfed.studies import alpha_sweep, aruba, compared, fig1, paper, table1
from perfed.studies.jobs import Context
from perfed.studies.paper import CLAIMS, EQUAL, FEDAVG, FO, HF, ROWS

COMPOSER = Composer()
SMALL = ["dataset=synthetic", "partition=iid", "n=6", "r=0.5", "batch=8", "model.hidden=[6]", "seeds=2", "study.jobs=1", "progress=off"]


def seeds(*values: float) -> dict[str, float]:
    return {str(i): v for i, v in enumerate(values)}


def around(mean: float) -> dict[str, float]:
    """Five seeds whose paired difference to ``around(other)`` is the same in every seed: its interval is a point."""
    return seeds(*(mean + offset for offset in (-0.02, -0.01, 0.0, 0.01, 0.02)))


def claim(name: str) -> paper.Claim:
    return next(c for c in CLAIMS if c.name == name)


# ---------------------------------------------------------------- verdicts


def test_a_verdict_is_where_the_interval_lies():
    # differences 1, 2, 3, 4, 5: mean 3, s = sqrt(2.5), half-width 2.776 * sqrt(2.5 / 5) = 1.963
    d = stats.paired(seeds(1, 2, 3, 4, 5), seeds(0, 0, 0, 0, 0))
    assert d.half_width == pytest.approx(2.7764451 * np.sqrt(0.5), rel=1e-6)
    assert stats.verdict(d) == "supported"
    assert stats.verdict(stats.paired(seeds(0, 0, 0, 0, 0), seeds(1, 2, 3, 4, 5))) == "contradicted"
    # shifted by 2: mean 1 < 1.963
    assert stats.verdict(stats.paired(seeds(-1, 0, 1, 2, 3), seeds(0, 0, 0, 0, 0))) == "undecided"
    assert stats.verdict(stats.paired(seeds(1, 2, 3, 4), seeds(0, 0, 0, 0))) == "undecided"  # four seeds


def test_alike_is_an_interval_inside_the_margin():
    margin = paper.ALIKE
    assert paper.alike("", around(0.5 + 0.9 * margin), around(0.5)).verdict == "supported"
    assert paper.alike("", around(0.5 - 1.1 * margin), around(0.5)).verdict == "contradicted"
    wide = seeds(*(0.5 + step for step in (-2 * margin, 0, 2 * margin, -margin, margin)))
    assert paper.alike("", wide, seeds(0.5, 0.5, 0.5, 0.5, 0.5)).verdict == "undecided"
    assert paper.alike("", None, around(0.5)).verdict == "not run"


def test_a_claim_is_the_conjunction_of_its_parts():
    def parts(*verdicts: str) -> list[paper.Part]:
        return [paper.Part("", None, verdict) for verdict in verdicts]

    assert paper.overall(parts("supported", "supported")) == "supported"
    # A method that diverged, or that failed, in a row that was run: "in every row" cannot be said.
    assert paper.overall(parts("supported", "diverged")) == paper.overall(parts("supported", "not run")) == "undecided"
    assert paper.verdict_text(parts("supported", "diverged")) == "undecided (1 of 2 comparisons without a result)"
    assert paper.verdict_text(parts("undecided", "supported")) == "undecided"
    assert paper.overall(parts("contradicted", "diverged")) == "contradicted"
    assert paper.overall(parts("supported", "undecided")) == "undecided"
    assert paper.overall(parts("undecided", "contradicted")) == "contradicted"
    assert paper.overall(parts("not run")) == paper.overall([]) == "not run"


def recalled() -> dict[tuple[str, str], dict[str, float]]:
    """The paper's own table, as recalled, as if five seeds had given it: it must support the paper's own sentences."""
    return {(row, method): around(mean) for row, r in ROWS.items() for method, (mean, _) in (r.recalled or {}).items()}


@pytest.mark.parametrize("name", [c.name for c in CLAIMS])
def test_the_recalled_table_supports_the_papers_sentences(name):
    parts = list(claim(name).parts(recalled()))
    assert parts and paper.overall(parts) == "supported", [(p.text, p.verdict) for p in parts]


@pytest.mark.parametrize(
    "name, row, method, mean",
    # One cell changed turns the claim around. Mean gains as recalled: MNIST (3.89 + 10.76) / 2 = 7.3, CIFAR-10 (9.95 + 5.35 + 10.35)
    # / 3 = 8.6 points; with 7.47 less in one of its rows 6.1.
    [
        ("HF best", "cifar10_tau4", HF, 0.38),
        ("MNIST gain", "mnist_tau4", FO, 0.60),
        ("CIFAR gain", "cifar10_tau10", HF, 0.5044 - 0.0747),
        ("tau=10", "mnist_tau10", FO, 0.75),
        ("smaller tau", "cifar10_tau4", FEDAVG, 0.41),
        ("larger alpha, HF", "cifar10_tau4_alpha01", HF, 0.43),
        ("larger alpha, FO", "cifar10_tau4_alpha01", FO, 0.35),
        ("diff. hetero.", "cifar10_tau4_diff", FO, 0.59),
    ],
)
def test_one_cell_contradicts_a_claim(name, row, method, mean):
    assert paper.overall(list(claim(name).parts(recalled() | {(row, method): around(mean)}))) == "contradicted"


def test_what_was_not_run_is_said():
    some = {key: value for key, value in recalled().items() if key[0].startswith("mnist")}
    ends = {c.name: paper.overall(list(c.parts(some))) for c in CLAIMS}
    assert ends["HF best"] == ends["tau=10"] == ends["smaller tau"] == "supported"
    assert ends["CIFAR gain"] == ends["larger alpha, HF"] == ends["diff. hetero."] == "not run"


def test_a_diverged_cell_leaves_its_claims_undecided():
    lost = recalled() | {("cifar10_tau4_alpha01", HF): {}}
    ends = {c.name: paper.overall(list(c.parts(lost))) for c in CLAIMS}
    assert ends == {c.name: "supported" for c in CLAIMS} | dict.fromkeys(("HF best", "CIFAR gain", "larger alpha, HF"), "undecided")


def test_the_digits_with_a_large_alpha_are_no_part_of_the_claim_on_mnist():
    values = {(row, m): around(v) for row in ROWS if row.startswith("digits") for m, v in {FEDAVG: 0.6, FO: 0.65, HF: 0.7}.items()}
    parts = [p.text for p in claim("MNIST gain").parts(values)]
    assert parts == [f"digits, tau={tau}, alpha=0.01: {m} - FedAvg" for tau in (10, 4) for m in ("FO", "HF")]


def test_a_choice_turns_a_claim_when_it_alone_is_changed():
    def choices(network, protocol):
        return (("network", network), ("protocol", protocol))

    found = {
        choices("mlp", "paper"): "supported",
        choices("mlp", "clean"): "undecided",
        choices("langelaar", "paper"): "supported",
        choices("langelaar", "clean"): "contradicted",  # two changes: it does not say which one did it
    }
    assert paper.turned(found) == "protocol clean: undecided"
    assert paper.turned({choices("mlp", "paper"): "supported"}) == "-"


def test_another_network_keeps_the_order_or_not():
    base = {("mnist_tau4", m): around(v) for m, v in {FEDAVG: 0.6, FO: 0.65, HF: 0.7}.items()}
    same = {("mnist_tau4", m): around(v) for m, v in {FEDAVG: 0.8, FO: 0.85, HF: 0.9}.items()}
    swapped = same | {("mnist_tau4", FO): around(0.95)}
    assert paper.overall(list(paper.keeps_the_order(base, same))) == "supported"
    parts = {p.text.partition(": ")[2]: p.verdict for p in paper.keeps_the_order(base, swapped)}
    assert parts == {"FO - FedAvg": "supported", "HF - FedAvg": "supported", "HF - FO": "contradicted"}
    tie = base | {("mnist_tau4", FO): seeds(0.5, 0.7, 0.6, 0.8, 0.4)}  # not separated from either: no order to keep
    assert [p.text.partition(": ")[2] for p in paper.keeps_the_order(tie, swapped)] == ["HF - FedAvg"]


def test_equal_gradients_take_fedavgs_place():
    values = {("mnist_tau4", FEDAVG): around(0.6), ("mnist_tau4", EQUAL): around(0.9), ("mnist_tau4", HF): around(0.7)}
    swapped = table1.against_equal(values)
    assert swapped == {("mnist_tau4", FEDAVG): around(0.9), ("mnist_tau4", HF): around(0.7)}
    assert paper.overall(list(claim("HF best").parts(swapped))) == "contradicted"


# ---------------------------------------------------------------- rows and recalled values


@pytest.mark.parametrize("name", ROWS)
def test_the_rows_of_the_configuration_are_those_of_the_claims(name):
    config, row = parse(compose([f"row={name}"], COMPOSER)), ROWS[name]
    data = {"mnist": "MNIST", "cifar10": "CIFAR-10", "mnist5k": "digits"}[config.dataset.name]
    assert (data, config.tau, config.alpha, config.partition.diff_hetero) == (row.data, row.tau, row.alpha, row.diff)
    if row.recalled:  # section 5: n, K, tau and D stand in the text; r, alpha and beta are recalled
        assert (config.n, config.rounds, config.batch, config.r, config.beta) == (50, 1000, 40, 0.2, 0.001)


def test_the_networks_of_the_configuration_are_those_of_the_study():
    assert set(NETWORKS) == set(table1.NETWORKS)
    for words in table1.NETWORKS.values():
        parse(compose(list(words), COMPOSER))


def test_no_recalled_value_stands_without_its_label(tmp_path):
    """In every table and report a line with one of the paper's numbers says "as recalled"."""
    grid = table1.table_of(list(ROWS), {}, table1.Variant("mlp", "paper", table1.AS_CONFIGURED), {})
    numbers = {f"{100 * mean:.2f}" for row in ROWS.values() for mean, _ in (row.recalled or {}).values()}
    lines = [[cell.text for cell in row] for row in grid.rows]
    shown = {number for number in numbers for line in lines if any(number in cell for cell in line)}
    assert shown == numbers
    assert all("as recalled" in line[0] for line in lines if any(number in cell for cell in line for number in numbers))
    assert paper.RECALLED in grid.caption
    below = list(table1.below_majority(list(ROWS), {}))
    # Below 50 %: 40.49, 46.98 | 38.38, 34.04, 43.73 | 35.97, 25.32, 46.32; below 60 %: 58.59, 37.71
    assert len(below) == 1 and paper.RECALLED in below[0]
    found = set(re.findall(r"\d\d\.\d\d", below[0]))
    assert found == {"40.49", "46.98", "38.38", "34.04", "43.73", "35.97", "25.32", "46.32", "58.59", "37.71"}


# ---------------------------------------------------------------- curves and budgets


def test_equal_budgets_are_read_between_two_evaluations():
    found = {"round": np.array([0, 10, 20]), "accuracy": np.array([[0.0, 0.2], [0.5, 0.4], [0.7, 0.8]])}
    assert compared.at(found, "round", 15) == pytest.approx([0.6, 0.6])
    assert compared.at(found, "round", 99) == pytest.approx([0.7, 0.8])
    later = {"round": np.array([10, 20]), "accuracy": np.array([[0.5, 0.4], [0.7, 0.8]])}
    assert np.isnan(compared.at(later, "round", 9)).all()  # nothing is known before the first evaluation
    mean, half = compared.band(found["accuracy"][:, :1])
    assert mean.tolist() == [0.0, 0.5, 0.7] and np.isnan(half).all()


def test_all_curves_of_figure_1_end_at_the_same_gradient_evaluations(tmp_path, monkeypatch):
    words = ["experiment=fig1", "row=digits_tau4", *SMALL, "rounds=6", "eval_every=3", f"outputs={tmp_path}"]
    drawn, draw = [], figures.lines
    monkeypatch.setattr(figures, "lines", lambda frame, *where, **how: (drawn.append(frame), draw(frame, *where, **how)))
    assert cli.main(words) == 0
    ends = {}
    for folder in tmp_path.glob("*-synthetic-*"):
        if (folder / "rounds.csv").is_file():
            run = results.load(folder)
            found = compared.curve(run)
            ends[run.result["algo"]] = (int(found["round"][-1]), float(found["gradients"][-1]))
            assert len(found["round"]) == 2 and np.isfinite(found["seconds"]).all()
    # 6 rounds of HF: 3 users x 4 steps x 4 gradients = 48 a round
    assert ends == {FEDAVG: (24, 288.0), FO: (12, 288.0), HF: (6, 288.0), "perfedavg": (6, 288.0)}
    (folder,) = tmp_path.glob("fig1-*")
    text = (folder / "report.md").read_text()
    assert text.count("is ahead after the same") == 4 and "undecided" in text  # two seeds decide nothing
    assert "protocol clean" in text and "Majority class: " in text and "over 2 seeds" in text
    assert [set(frame["panel"]) for frame in drawn] == [{"time", "rounds", "gradients", "numbers sent"}]


def test_the_sweep_takes_multiples_of_the_measured_smoothness(capsys):
    from perfed.prepare import prepare, smoothness

    words = ["experiment=alpha_sweep", "row=digits_tau4", *SMALL]
    size = smoothness(prepare(parse(compose([*words, "algo=fedavg"], COMPOSER))))
    assert cli.main([*words, "plan=true"]) == 0
    out = capsys.readouterr().out
    assert f"L = {size:.3g} at the initial model" in out
    assert {float(a) for a in re.findall(r" alpha=([\d.e-]+)$", out, re.M)} == {float(f"{m / size:.2g}") for m in alpha_sweep.MULTIPLES}


def test_every_method_of_a_comparison_gets_the_same_number_of_trials():
    assert {len(space.trials) for space in aruba.spaces_of().values()} == {6}
    assert len(table1.table_space().trials) == 6


# ---------------------------------------------------------------- whole studies


@pytest.mark.slow
@pytest.mark.parametrize("name", ["table1", "table1_quick", "aruba", "alpha_sweep"])
def test_a_study_from_the_command_line(name, tmp_path, capsys):
    rows = ["study.rows=[digits_tau4,digits_tau4_alpha10]"] if name.startswith("table1") else ["row=digits_tau4"]
    networks = ["study.networks=[mlp,mlp_large]"] if name == "table1" else []
    small = [w for w in SMALL if w != "model.hidden=[6]"]
    words = [f"experiment={name}", *rows, *networks, *small, "rounds=2", "eval_every=2", f"outputs={tmp_path}"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "claim" in out and "undecided" in out
    before = {p: p.stat().st_mtime_ns for p in Path(tmp_path).glob("*/users.csv")}
    assert before and cli.main(words) == 0
    assert before == {p: p.stat().st_mtime_ns for p in Path(tmp_path).glob("*/users.csv")}, "nothing is trained again"


@pytest.mark.parametrize(
    "words, message",
    [
        (["experiment=table1", "study.rows=[mnist_tau5]"], "study.rows=mnist_tau5: a list of rows among"),
        (["experiment=table1", "study.networks=[resnet]"], "study.networks=resnet: must be one of mlp"),
        (["experiment=table1", "study.protocols=[dirty]"], "study.protocols=dirty: must be one of clean"),
        (["experiment=table1_quick", "study.methods=[fedavg]"], "study.methods"),
        (["experiment=fig1", "algo=fedavg"], "algo=fedavg: study fig1 chooses the algorithms"),
        (["experiment=aruba", "split.val=0"], "split.val=0"),
        (["row=mnist_tau5"], "row=mnist_tau5: no such row"),
        (["experiment=table1_quick", "study.rows=[digits_tau4]", "alpha=0.5"], "alpha=0.5: 0.01 in the row digits_tau4"),
        (["experiment=table1_quick", "tau=7"], "tau=7: 10 in the row digits_tau10"),
        (["experiment=table1", "study.rows=[cifar10_tau4_diff]", "partition.diff_hetero=false"], "partition.diff_hetero=false: true in"),
    ],
)
def test_bad_words(words, message, tmp_path, capsys):
    assert cli.main([*words, f"outputs={tmp_path}/out"]) == 1
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_run_that_stands_for_two_rows_is_drawn_once(tmp_path):
    same, other = (results.Run(tmp_path / name, {}, {}, None) for name in "ab")
    names = {"HF, as configured": same, "FO, as configured": other, "HF, tuned": same}
    assert aruba.drawn_once(names) == {"HF, as configured and tuned": same, "FO, as configured": other}


# ---------------------------------------------------------------- the tables of the studies, on numbers made up


def a_run(folder: Path, values: dict[str, float], *, diverged=(), seconds=(), curve=None, **result) -> results.Run:
    """A finished run: accuracy by seed after one step (0.3 lower before it, 0.01 higher after four). ``curve``: [K, S] accuracies at the
    ``seconds`` [K] of all seeds together; a round, a gradient and a number each way per evaluation."""
    folder.mkdir()
    cells = []
    for steps, shift in ((0, -0.3), (1, 0.0), (4, 0.01)):
        mine = {s: v + shift for s, v in values.items()}
        mean, half = stats.interval(list(mine.values()))
        groups = {"1: classes 0-4": mean, "2: pairs": mean}
        common = {"model": "global", "seen": True, "worst10": mean, "binomial_floor": mean, "groups": groups}
        cells.append({**common, "steps": steps, "mean": mean, "half_width": half, "per_seed": mine})
    record = {"seeds": list(map(int, values)), "diverged": {s: 1 for s in diverged}, "primary": {"model": "global", "steps": 1}}
    record |= {"cells": cells, "majority": 0.5, "protocol": "clean", "protocol_text": "clean", "tau": 4, **result}
    run = results.Run(folder, {"status": "DONE"}, {}, record)
    keys = ("grad_evals", "floats_up", "floats_down")
    rows = [
        {"seed": int(s), "round": k, "model": "global", "steps": 1, "seen": True, "accuracy": v, "hvps": 0, **dict.fromkeys(keys, k)}
        for k, line in enumerate(curve or [], 1)
        for s, v in zip(values, line, strict=True)
    ]
    run.__dict__["rounds"] = pd.DataFrame(rows)  # as if it had been read
    lines = [f"train until round {k},{t * len(values)}" for k, t in enumerate(seconds, 1)]
    (folder / "timing.csv").write_text("\n".join(["what,value", *lines]) + "\n")
    return run


def verdict_column(grid) -> dict[str, str]:
    return {row[0].text: row[-1].text for row in grid.rows}


def test_equal_time_is_where_the_cheaper_training_ends(tmp_path):
    five = around(0.9)
    # FedAvg: 0.8 at 1 s, 0.9 at 2 s. HF: 0.7 at 2 s, 0.95 at 4 s: at 2 s it is 20 points behind, though ahead at its end.
    low = a_run(tmp_path / "low", five, seconds=(1, 2), curve=[[0.8] * 5, [0.9] * 5])
    high = a_run(tmp_path / "high", five, seconds=(2, 4), curve=[[0.7] * 5, [0.95] * 5])
    row = {table1.Key("mnist_tau4", "mlp", table1.AS_CONFIGURED, m): run for m, run in ((FEDAVG, low), (HF, high))}
    (part,) = table1.equal_time(["mnist_tau4"], row, "mlp")
    assert part.difference.difference == pytest.approx(-0.2) and part.verdict == "contradicted" and "after 2 s" in part.text
    late = a_run(tmp_path / "late", five, seconds=(3, 4), curve=[[0.7] * 5, [0.95] * 5])  # not evaluated so early
    row[table1.Key("mnist_tau4", "mlp", table1.AS_CONFIGURED, HF)] = late
    assert [p.verdict for p in table1.equal_time(["mnist_tau4", "mnist_tau10"], row, "mlp")] == ["not run", "not run"]
    lost = a_run(tmp_path / "lost", five, diverged=["3"])
    row[table1.Key("mnist_tau4", "mlp", table1.AS_CONFIGURED, HF)] = lost
    assert [p.verdict for p in table1.equal_time(["mnist_tau4"], row, "mlp")] == ["diverged"]

    curves = {fig1.TITLES[HF]: compared.curve(high), fig1.TITLES[FEDAVG]: compared.curve(low)}
    budgets = {"seconds": 2.0, "round": 1.5}  # between rounds 1 and 2: HF (0.7 + 0.95) / 2, FedAvg (0.8 + 0.9) / 2
    found = fig1.verdicts(curves, budgets)
    assert [[c.text for c in line[1:]] for line in found.rows] == [["-20.00 ± 0.00", "contradicted"], ["-2.50 ± 0.00", "contradicted"]]
    shown = fig1.equal_budgets(curves, budgets | {"gradients": 0.5}, [high, low])
    cells = [[c.text for c in line[1:]] for line in shown.rows]
    assert cells == [["70.00 ± 0.00", "90.00 ± 0.00"], ["82.50 ± 0.00", "85.00 ± 0.00"], ["-", "-"]]


def test_verdicts_against_aruba(tmp_path):
    means = {"Per-FedAvg (HF), as configured": 0.9, "Per-FedAvg (HF), tuned": 0.8, "FedAvg + ARUBA, tuned": 0.85}
    runs = {label: a_run(tmp_path / str(i), around(mean)) for i, (label, mean) in enumerate(means.items())}
    grid = aruba.verdicts(runs, 4)
    found = [[c.text for c in row[1:]] for row in grid.rows]
    assert found == [["+5.00 ± 0.00", "supported"]] * 2 + [["-5.00 ± 0.00", "contradicted"]] * 2
    shown = aruba.table_of(runs, 4, parse(compose(["experiment=aruba", "row=digits_tau4"], COMPOSER)))
    assert [c.text.split(" ")[0] for c in shown.rows[0]][1:] == ["60.00", "90.00", "91.00"] and len(shown.rows) == 3
    theirs = aruba.table_of(runs, 4, parse(compose(["experiment=aruba", "row=cifar10_tau4"], COMPOSER)))
    assert len(theirs.rows) == 6 and all(paper.RECALLED in row[0].text for row in theirs.rows[3:])
    for other in ("row=cifar10_tau10", "row=cifar10_tau4_diff", "row=cifar10_tau4_alpha01"):
        assert len(aruba.table_of(runs, 4, parse(compose(["experiment=aruba", other], COMPOSER))).rows) == 3
    (tmp_path / "aruba-x").mkdir()
    (tmp_path / "aruba-x" / "verdicts.csv").write_text(tables.to_csv(grid))
    assert table1.stored_verdicts(tmp_path) == "supported / contradicted (aruba-x)"
    assert table1.stored_verdicts(tmp_path / "none") == "not run (experiment=aruba)"


def test_verdicts_of_the_sweep_over_alpha(tmp_path):
    """HF diverges at the largest alpha; that is no reason not to judge FO there."""
    means = {(HF, 0.01): 0.8, (HF, 0.1): 0.9, (FO, 0.01): 0.79, (FO, 0.1): 0.85, (FO, 1.0): 0.6}
    runs = {alpha_sweep._label(m, a): a_run(tmp_path / f"{m}{a}", around(v)) for (m, a), v in means.items()}
    runs[alpha_sweep._label(HF, 1.0)] = a_run(tmp_path / "lost", around(0.9), diverged=["0"])
    grid = alpha_sweep.verdicts(runs, [0.01, 0.1, 1.0])
    assert [[c.text for c in row] for row in grid.rows] == [
        ["a larger alpha helps HF: 0.1 - 0.01", "+10.00 ± 0.00", "supported"],
        ["a larger alpha hurts FO: 0.01 - 1", "+19.00 ± 0.00", "supported"],
        ["for a small alpha (0.01) HF and FO are alike: within 4 points", "+1.00 ± 0.00", "supported"],
        ["for a large alpha (0.1) HF is ahead of FO", "+5.00 ± 0.00", "supported"],
    ]
    assert grid.caption.endswith("Diverged: Per-FedAvg (HF), alpha=1.")


def test_the_table_of_claims(tmp_path):
    def values(shift: float) -> dict:
        """FedAvg 0.6 + shift, FO 0.65, HF 0.7."""
        return {("mnist_tau4", m): around(v) for m, v in {FEDAVG: 0.6 + shift, FO: 0.65, HF: 0.7}.items()}

    first, second = (table1.Variant("mlp", protocol, table1.AS_CONFIGURED).choices("FedAvg") for protocol in ("paper", "clean"))
    timed = [paper.compare("mnist_tau4", around(0.7), around(0.8))]
    larger = {"mlp_large": (values(0.0), values(0.08))}
    short, whole, every = table1.verdicts({first: values(0.0), second: values(0.06)}, larger, timed, "undecided (aruba-x)")
    found = verdict_column(whole)  # the last choice: FedAvg 0.66 lies above FO, below HF
    assert found["Per-FedAvg (HF) is at least as good as FedAvg in every row"] == "supported"
    assert found["both Per-FedAvg methods are above FedAvg on MNIST"] == "contradicted"
    told = {row[0].text: (row[1].text, row[2].text) for row in short.rows}
    assert told["both Per-FedAvg methods are above FedAvg on MNIST"] == ("supported", "protocol clean: contradicted")
    assert told["a more complex network keeps the order (mlp_large against mlp)"] == ("contradicted", "-")  # there FedAvg is above FO
    assert told[table1.AT_EQUAL_TIME] == ("contradicted", "-")
    assert told["HF is ahead of FedAvg + ARUBA"] == ("undecided (aruba-x)", "-")
    assert told["a larger alpha hurts FO"] == ("not run", "-")
    assert ["equal time", "as trained", "mnist_tau4", "-10.00 ± 0.00", "contradicted"] in [[c.text for c in row] for row in every.rows]


def test_settings_that_are_not_the_rows_own_are_named_and_the_papers_values_left_out():
    words = ["experiment=table1", "study.rows=[mnist_tau4]", "rounds=7", "dataset=synthetic", "partition=iid"]
    ctx = Context(parse(compose(words, COMPOSER)), tuple(words), lambda more: compose(list(more), COMPOSER))
    other = table1.changed(ctx, ["mnist_tau4"])
    assert other["rounds"] == 7 and other["dataset.name"] == "synthetic" and other["partition.name"] == "iid" and "seeds" not in other
    grid = table1.table_of(["mnist_tau4"], {}, table1.Variant("mlp", "paper", table1.AS_CONFIGURED), {}, other)
    assert len(grid.rows) == 1 and "rounds=7" in grid.caption and "recalled" not in grid.caption
    own = Context(ctx.config, tuple(words[:2]), ctx.compose)
    assert table1.changed(own, ["mnist_tau4"]) == {}


def test_the_readme_labels_the_recalled_values():
    lines = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8").splitlines()
    for row in ROWS.values():
        for line in lines:
            hits = [f"{100 * mean:.2f} ± {100 * half:.2f}" in line for mean, half in (row.recalled or {}).values()]
            assert not any(hits) or "as recalled" in line, line
    assert sum("as recalled" in line for line in lines) > 3
