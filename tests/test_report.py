"""Tables, pictures and report.md over made-up run folders that follow the files' schema."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from perfed import compare, figures, report, results, stats, tables
from perfed.errors import UserError
from perfed.studies import all_methods

ROOT = Path(__file__).parents[1]
GROUPS = ("classes 0-4", "classes 5-9, few images each")
CONFIG = """\
n: 8
rounds: {rounds}
tau: {tau}
alpha: 0.01
seed: 0
seeds: {seeds}
device: auto
engine: {{threads: {seeds}, dtype: float32}}
algo: {{name: {algo}, alpha: 0.01{extra}}}
dataset: {{name: mnist5k, norm: unit}}
partition: {{name: table2, a: null}}
protocol: {{name: {protocol}}}
"""


def fake_run(
    folder,
    algo="perfedavg_hf",
    *,
    tau=10,
    seeds=3,
    shift=0.0,
    protocol="clean",
    diverged=(),
    steps=(0, 1),
    new_users=False,
    status="DONE",
    extra="",
    per_seed=None,
    **more,
):
    """A finished run: accuracy of seed s after j > 0 steps is .80 + .02 s + shift, or ``per_seed[s]``; before adaptation .30 lower."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG.format(algo=algo, tau=tau, seeds=seeds, rounds=20, protocol=protocol, extra=extra))
    results.write_status(folder, status, **({"traceback": "Traceback\nRuntimeError: out of memory"} if status == "FAILED" else {}))
    if status not in ("DONE", "DIVERGED"):
        return folder
    n, images, users, rounds, cells = 8, 25, [], [], []
    noise = np.random.default_rng(3).uniform(-0.12, 0.12, (seeds, n))
    noise -= noise.mean(axis=1, keepdims=True)
    for step in steps:
        means, lists = {}, {}
        for seed in range(seeds):
            final = (0.8 + 0.02 * seed + shift if per_seed is None else per_seed[seed]) - (0.3 if step == 0 else -0.01 * (step - 1))
            lists[seed] = final + noise[seed] * (2 if step == 0 else 1)
            means[str(seed)] = float(lists[seed].mean())
            for user in range(n):
                size = {"n_train": 40, "n_val": 0, "n_test": images}
                row = {"seed": seed, "user": user, "group": GROUPS[user // 5], "seen": True, "times_sampled": 3, "model": "global"}
                users.append({**row, **size, "steps": step, "correct": images * lists[seed][user], "loss": 0.5})
            for k in range(0, 21, 2):
                costs = {"grad_evals": 30 * k, "hvps": 0, "floats_down": 900 * k, "floats_up": 900 * k}
                value = final - (final - 0.1) * np.exp(-k / (5 + seed))
                bad = seed in diverged and k > 8
                row = {"seed": seed, "round": k, "model": "global", "steps": step, "seen": True, **costs}
                scores = {"accuracy": np.nan if bad else value, "loss": 0.4, "worst10": value - 0.1}
                rounds.append({**row, **scores, "hf_error": 0.002 if k else None})
        mean, half = stats.interval(list(means.values()))
        groups = {name: float(np.mean([lists[s][:5] if g == 0 else lists[s][5:] for s in lists])) for g, name in enumerate(GROUPS)}
        cell = {"model": "global", "steps": step, "seen": True, "mean": mean, "half_width": half, "per_seed": means, "groups": groups}
        cells.append({**cell, "loss": 0.5, "worst10": 0.61, "binomial_floor": 0.7})
        if new_users:
            cells.append({**cells[-1], "seen": False, "mean": mean - 0.1})
    result = {"name": folder.name, "algo": algo, "dataset": "mnist5k", "partition": "table2", "model": "mlp", "identity": "ab" * 32}
    result |= {"protocol": protocol, "protocol_text": "adapted on a batch of train data, scored on the test data", "adapt_lr": 0.01}
    result |= {"primary": {"model": "global", "steps": max(steps)}, "seeds": list(range(seeds)), "diverged": {str(s): 9 for s in diverged}}
    if diverged:
        for cell in cells:
            cell.update(mean=None, half_width=None, per_seed={s: v for s, v in cell["per_seed"].items() if int(s) not in diverged})
    counts = {"rows": list(GROUPS), "classes": [*"0123456789"], "counts": [[34] * 5 + [0] * 5, [0] * 5 + [17] * 5]}
    result |= {"cells": cells, "majority": 0.5, "majority_groups": dict(zip(GROUPS, (0.2, 1.0), strict=True)), "partition_counts": counts}
    result |= {"costs": {"grad_evals": 600, "hvps": 0, "floats_down": 18000, "floats_up": 18000}, "n": n, "r": 0.2, "rounds": 20}
    result |= {"per_active_user_round": {"grad_evals": 30, "hvps": 0, "floats_down": 900.5, "floats_up": 900}, "tau": tau, "alpha": 0.01}
    result |= {"batch": 40, "beta": 0.1, **more}
    results.write_csv(folder / "users.csv", users, results.USERS)
    results.write_csv(folder / "rounds.csv", rounds, results.ROUNDS)
    results.write_json(folder / "result.json", result)
    return folder


def result_of(folder):
    return results.load(folder).result


def sweep(*folders):
    return compare.sweep_table([results.load(folder) for folder in folders])


def cells(table):
    return [[cell.text for cell in row] for row in table.rows]


def cli(*args, env=None):
    command = [sys.executable, "-W", "error", "-m", "perfed.report", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **(env or {})})


def test_run_table(tmp_path):
    new = {"majority_new": 0.4, "majority_groups_new": {GROUPS[0]: 0.3}}
    table = tables.run_table(result_of(fake_run(tmp_path / "a", new_users=True, **new)))
    # seeds .80 .82 .84: half-width .0497 as in test_stats
    assert table.columns == ("judged model", "step size", "accuracy % ± 95 % CI", *GROUPS, "worst 10 % (floor)")
    assert [row[0] for row in cells(table)] == [
        "global, before adaptation",
        "global, after 1 step",
        "majority class",
        "new users: global, before adaptation",
        "new users: global, after 1 step",
        "majority class, new users",
    ]
    assert [row[1:3] for row in cells(table)] == [
        ["-", "52.00 ± 4.97"],
        ["0.01", "82.00 ± 4.97"],
        ["-", "50.00"],
        ["-", "42.00 ± 4.97"],
        ["0.01", "72.00 ± 4.97"],
        ["-", "40.00"],
    ]
    assert cells(table)[1][5] == "61.00 (70.00)"
    assert [cells(table)[i][3:] for i in (2, 5)] == [["20.00", "100.00", "-"], ["30.00", "-", "-"]]
    older = tables.run_table(result_of(fake_run(tmp_path / "b", new_users=True)))
    assert [row[0] for row in cells(older)[2:]] == ["majority class", *(row[0] for row in cells(table)[3:5])]
    for words in (
        "± is the half-width of the 95 % Student-t interval over 3 seeds of the unweighted mean over users; protocol clean (adapted on",
        "a seed redraws partition, initial model, user sampling and batches; the pool of images is fixed",
        "binomial floor",
    ):
        assert words in table.caption


def test_run_table_of_one_seed_has_no_interval(tmp_path):
    table = tables.run_table(result_of(fake_run(tmp_path / "a", seeds=1, partition_seed=4)))
    assert cells(table)[1][2] == "80.00 (n/a)"
    assert "nan" not in tables.plain(table) and "± 0" not in tables.plain(table)
    assert "one seed has no interval" in table.caption
    assert "redraws initial model, user sampling and batches; the pool of images and the partition are fixed" in table.caption


def test_notes_name_the_judged_model_and_agree_in_number(tmp_path):
    alone = {"cold_start": "the initial model", "sampled_users_alone": {"mean": 0.5, "half_width": 0.1}}
    best = {"best_on_validation": {"rounds": [2, 4, 4], "mean": 0.389, "half_width": 0.053}}
    for name, never, words in (("a", [1, 1, 1], "1 user a seed was"), ("b", [1, 2, 1], "1.33 users a seed were")):
        notes = tables.run_table(result_of(fake_run(tmp_path / name, steps=(0, 5), never_sampled=never, **alone, **best))).notes
        which = "global, after 5 steps, over the sampled users alone"
        assert notes[0] == f"{words} never sampled; judged there: the initial model. {which}: 50.00 ± 10.00."
        assert notes[1] == "Best on validation, global, after 5 steps (rounds 2, 4, 4): 38.90 ± 5.30 on test data."


def test_a_diverged_seed_leaves_no_number(tmp_path):
    fake_run(tmp_path / "a", seeds=5, diverged=(2,), status="DIVERGED")
    table = tables.run_table(result_of(tmp_path / "a"))
    assert [row[2:] for row in cells(table)[:2]] == [["div 1/5", "-", "-", "-"]] * 2
    assert table.notes == ("DIVERGED: seed 2 at round 9.",)
    table = sweep(tmp_path / "a", fake_run(tmp_path / "b", "fedavg", seeds=5))
    assert cells(table)[0][1:3] == ["div 1/5", "84.00 ± 3.93"]
    assert not any(cell.bold or cell.mark for cell in table.rows[0])
    assert "seed 2 diverged at round 9" in table.notes[0]


def test_step_size_that_the_method_owns(tmp_path):
    assert cells(tables.run_table(result_of(fake_run(tmp_path / "a", adapt_lr=None))))[1][1] == "own"


SWEEP = """\
setting        fedavg  perfedavg_hf  majority class
-------  ------------  ------------  --------------
tau=4    81.20 ± 4.97  82.00 ± 4.97           50.00
tau=10   91.00 ± 4.97  92.00 ± 4.97           50.00
"""


def four_runs(root):
    settings = [("fedavg", 4, -0.008), ("perfedavg_hf", 4, 0.0), ("fedavg", 10, 0.09), ("perfedavg_hf", 10, 0.1)]
    return [fake_run(root / f"{algo}-{tau}", algo, tau=tau, shift=shift) for algo, tau, shift in settings]


def test_sweep_table_without_any_warning(tmp_path, capsys):
    done = cli(*four_runs(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(SWEEP)
    text = " ".join(done.stdout.split())
    assert "(global, after 1 step of 0.01); ± is the half-width of the 95 % Student-t interval over 3 seeds of the unweighted mean" in text
    assert "nan" not in text and "†: not separated" in text
    report.main([str(tmp_path), "--format", "csv"])
    assert capsys.readouterr().out.startswith("setting,fedavg,perfedavg_hf,majority class\ntau=4,81.20 ± 4.97,82.00 ± 4.97,50.00\n")
    report.main([str(tmp_path), "--format", "markdown"])
    assert capsys.readouterr().out.startswith("| setting | fedavg | perfedavg_hf | majority class |\n| --- | ---: |")


def test_report_refuses_in_one_line(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for args, words in (([tmp_path / "empty"], "no run folder"), ([tmp_path / "absent"], "no such folder"), ([], "at least one run")):
        assert report.main(list(map(str, args))) == 1
        out, err = capsys.readouterr()
        assert out == "" and re.fullmatch(rf"perfed: .*{words}.*\n", err)


def test_sweep_refuses_to_mix_protocols(tmp_path):
    with pytest.raises(UserError, match="^protocol=clean, paper: one table holds runs of one protocol; make one for each: where=protocol="):
        sweep(fake_run(tmp_path / "a"), fake_run(tmp_path / "b", "fedavg", protocol="paper"))


def test_sweep_names_what_is_missing_and_what_failed(tmp_path):
    table = sweep(
        fake_run(tmp_path / "a", "fedavg", tau=4),
        fake_run(tmp_path / "b", "local", tau=10, status="FAILED"),
        fake_run(tmp_path / "c", "local", tau=4, status="RUNNING"),
        fake_run(tmp_path / "d", "maml", tau=10),
    )
    assert table.columns[1:4] == ("fedavg", "local", "maml")
    assert cells(table) == [["tau=4", "82.00 ± 4.97", "-", "-", "50.00"], ["tau=10", "-", "FAILED", "82.00 ± 4.97", "50.00"]]
    assert table.notes == (
        "-: local, tau=4: INTERRUPTED (c).",
        "-: maml, tau=4: no run.",
        "-: fedavg, tau=10: no run.",
        "FAILED: local, tau=10: RuntimeError: out of memory (b).",
    )
    assert sweep(tmp_path / "b").columns == ("setting", "local", "majority class")


def test_marks(tmp_path):
    # differences to "best": "near" alternates in sign, so it is not separated; "far" is -.1 +- .005, which is
    base = [0.80, 0.81, 0.82, 0.83, 0.84]
    names = {"best": base, "near": [b + d for b, d in zip(base, (0.01, -0.02, 0.01, -0.01, 0.0), strict=True)]}
    names["far"] = [b - 0.1 + d for b, d in zip(base, (0.005, -0.005, 0.0, 0.005, -0.005), strict=True)]
    folders = [fake_run(tmp_path / name, name, seeds=5, per_seed=values) for name, values in names.items()]
    row = sweep(*folders).rows[0]
    assert [(cell.bold, cell.mark) for cell in row[1:4]] == [(True, ""), (False, "†"), (False, "")]
    # t(4, .975) / sqrt(5) = 1.2417 times the spreads .015811 and .019235
    assert "| **82.00 ± 1.96** | 81.80 ± 2.39† | 72.00 " in tables.markdown(sweep(*folders))
    assert "  *82.00 ± 1.96  " in tables.plain(sweep(*folders))
    four = [fake_run(tmp_path / f"{name}-4", name, seeds=4, per_seed=values) for name, values in names.items()]
    assert not any(cell.bold or cell.mark for cell in sweep(*four).rows[0])


def test_a_seed_never_counts_twice(tmp_path):
    table = sweep(fake_run(tmp_path / "a", seeds=2), fake_run(tmp_path / "b", seeds=3))
    assert cells(table)[0][1] == "82.00 ± 4.97"


def test_rows_are_the_keys_that_differ(tmp_path):
    hf = [fake_run(tmp_path / f"hf{delta}", extra=f", delta: {delta}") for delta in ("1e-3", "1e-2")]
    assert [row[0] for row in cells(sweep(*hf))] == ["algo.delta=0.001", "algo.delta=0.01"]
    # an option that only one method has tells no settings apart
    fedavg = fake_run(tmp_path / "fedavg", "fedavg")
    assert [row[0] for row in cells(sweep(hf[0], fedavg))] == ["dataset=mnist5k, tau=10, alpha=0.01"]
    texts = [fake_run(tmp_path / f"t{i}", extra=f", kind: {text}") for i, text in enumerate(("null", "'null'", "'001'", "NA", "1"))]
    shown = ["null", "'null'", "'001'", "NA", "1"]
    assert [row[0] for row in cells(sweep(*texts))] == [f"algo.kind={text}" for text in shown]


def test_columns_say_how_they_were_judged_where_that_differs(tmp_path):
    fedavg, maml = fake_run(tmp_path / "b", "fedavg", adapt_lr=0.1), fake_run(tmp_path / "c", "maml", steps=(0, 5))
    table = sweep(fake_run(tmp_path / "a"), fedavg, maml)
    assert table.columns[1:4] == (
        "perfedavg_hf\nglobal, after 1 step of 0.01",
        "fedavg\nglobal, after 1 step of 0.1",
        "maml\nglobal, after 5 steps of 0.01",
    )


def test_markdown_escapes_and_csv_quotes():
    table = tables.grid(["a|b", "c"], [["x|y", "1\n2"], ["NA", "001"]])
    assert tables.markdown(table) == "| a\\|b | c |\n| --- | ---: |\n| x\\|y | 1 2 |\n| NA | 001 |\n"
    assert tables.to_csv(table) == 'a|b,c\nx|y,"1\n2"\nNA,001\n'


def test_report_of_a_run(tmp_path):
    folder = fake_run(tmp_path / "hf", steps=(0, 1, 5))
    results.write_json(folder / "provenance.json", {"versions": {"torch": "2.14.1"}, "git": "abc", "dirty": True})
    assert report.write_report(folder) == []
    text = (folder / "report.md").read_text()
    for words in (
        "# hf\n",
        "| global, after 5 steps | 0.01 | 86.00 ± 4.97 |",
        "n=8, r=0.2, rounds=20, tau=10, batch=40, alpha=0.01, beta=0.1; 3 seeds (0, 1, 2)",
        "| gradient evaluations | 30 | 600 |",
        "| floats down | 900.50 | 18,000 |",
        "relative error 2.00e-03 against the exact one, measured on one user at round 20 (mean over 3 seeds)",
        "## Partition: train examples a user\n\n| train examples a user | 0 | 1 |",
        "| classes 0-4 | 34 | 34 |",
        "\n\nTrain examples a user (mean over the users of the row), seed 0.\n",
        "![train examples a user (mean over the users of the row), seed 0](partition.png)",
        "Shown are 2 of 3 curves: each judged model before adaptation and after 5 steps. All are in rounds.csv.",
        "- versions.torch: 2.14.1\n- git: abc\n- dirty: true\n",
    ):
        assert words in text
    assert "new users" not in text
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert pictures == ["learning_curve.png", "per_user.png", "adaptation.png", "partition.png"]
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    assert all((folder / name).with_suffix(".pdf").read_bytes().startswith(b"%PDF") for name in pictures)
    assert "## Pictures\n\nEach also as PDF, under the same name.\n" in text
    assert not list(folder.glob(".tmp*"))


def count_table(rows, of, classes=2):
    names = [f"user {k}" for k in range(rows)]
    return {"rows": names, "of": of, "classes": [str(c) for c in range(classes)], "counts": [[k + 0.25] * classes for k in range(rows)]}


def test_a_report_says_what_the_count_table_leaves_out(tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr(figures, "heat_map", lambda counts, rows, classes, path, title: titles.append(title))
    alike = {"partition_digest": {"0": "x", "1": "x", "2": "x"}}
    folder = fake_run(tmp_path / "a", partition_counts=count_table(20, 100), n=100, **alike)
    report.write_report(folder)
    text = (folder / "report.md").read_text()
    assert "| user 19 | 19.25 | 19.25 |\n\nTrain examples a user, all seeds; first 20 of 100 rows.\n" in text
    assert titles == ["mnist5k, table2\ntrain examples a user, all seeds; first 20 of 100 rows"]
    wide = fake_run(tmp_path / "b", partition_counts=count_table(2, 2, 62), partition_seed=4)
    report.write_report(wide, pictures=False)
    said = "## Partition: train examples a user\n\nNo table: 62 classes are too many.\n"
    assert said in (wide / "report.md").read_text()
    report.write_report(wide)
    assert "No table: 62 classes are too many; see partition.png.\n" in (wide / "report.md").read_text()
    assert titles[1] == "mnist5k, table2\ntrain examples a user (mean over the users of the row), partition_seed=4"
    older = fake_run(tmp_path / "c", partition_counts=None)
    report.write_report(older)
    assert "partition.png" not in (older / "report.md").read_text()


def test_the_picture_of_users_against_local_says_its_numbers(tmp_path, monkeypatch, capsys):
    titles = []
    monkeypatch.setattr(figures, "user_scatter", lambda panels, path, title: titles.append(title))
    fake_run(tmp_path / "runs" / "a", "fedavg", seeds=3)
    fake_run(tmp_path / "runs" / "b", "local", seeds=2)
    assert report.main([str(tmp_path / "runs"), "rows=tau", f"scatter={tmp_path / 'x'}"]) == 0
    assert titles[0].split("\n") == [
        "Users against themselves under local training; mnist5k, table2, protocol clean",
        "a point is one user in one seed (2 seeds of 8 users), no interval",
    ]


def test_a_picture_that_fails_costs_only_itself(tmp_path, monkeypatch):
    folder = fake_run(tmp_path / "hf")
    monkeypatch.setattr(figures, "per_user", lambda *_, **__: 1 / 0)
    problems = report.write_report(folder)
    assert problems == ["per_user.png could not be drawn: ZeroDivisionError: division by zero"]
    text = (folder / "report.md").read_text()
    assert problems[0] in text and "(learning_curve.png)" in text and "(per_user.png)" not in text and "82.00 ± 4.97" in text


@pytest.mark.parametrize("diverged", [(1,), (0, 1, 2)])
def test_report_of_a_diverged_run(tmp_path, diverged):
    folder = fake_run(tmp_path / "hf", diverged=diverged, status="DIVERGED")
    assert report.write_report(folder) == []
    assert f"div {len(diverged)}/3" in (folder / "report.md").read_text()
    assert (folder / "learning_curve.png").exists() == (len(diverged) < 3)


def test_tables_need_no_torch():
    code = "import sys, perfed.report; assert not {'torch', 'matplotlib', 'pandas', 'scipy'} & set(sys.modules), 'heavy import'"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_no_mark_where_seeds_that_not_all_have_decide_which_is_best():
    """A: 0.80 in seeds 0 to 4. B: 0.83 there, 0.71 in seeds 5 to 9, which A lacks: B's mean is lower, and yet it is the better one."""
    a = {str(s): 0.80 + 0.001 * s for s in range(5)}
    b = {str(s): 0.83 + 0.001 * s for s in range(5)} | {str(s): 0.71 for s in range(5, 10)}
    assert compare.marks_of_row({0: a, 1: b}) == (set(), {})
    assert compare.marks_of_row({0: a, 1: {s: b[s] for s in a}}) == ({1}, {})


def test_a_command_in_a_note_can_be_copied_and_names_are_not_cut():
    command = f"python -m perfed {' '.join(f'key{i}=value' for i in range(20))}"
    text = tables.plain(tables.grid(["a"], [["1"]], "word " * 20 + "(fedavg-mnist5k-table2-tau10-0123456789ab) " * 3, [f"run {command}"]))
    assert f"run {command}\n" in text and text.count("(fedavg-mnist5k-table2-tau10-0123456789ab)") == 3


def test_a_caption_says_again_only_what_is_new():
    first = tables.grid(["a"], [["1"]], "Accuracy; protocol clean; a seed redraws all. Untuned. Bold: the best; no marks below 5.")
    second = tables.grid(["a"], [["2"]], "Accuracy; protocol paper; a seed redraws all. Tuned. Bold: the best; no marks below 5.")
    assert tables.unsaid(first, None) == first
    assert tables.unsaid(second, first).caption == "protocol paper. Tuned. Otherwise as above."
    again = tables.unsaid(first, first)  # whatever stands further above, the protocol is said
    assert again.caption == "protocol clean. Otherwise as above." and again.rows == first.rows


def test_a_caption_names_the_comparisons_that_its_marks_make(tmp_path):
    run = results.load(fake_run(tmp_path / "a", "fedavg", seeds=5))
    for tuned in (False, True):
        assert "Holm over all pairs of the row" in tables.sweep_caption([run], tuned=tuned)
    one_column = all_methods.method_table({"fedavg": run}, {"fedavg": 20}).caption
    assert "the highest mean; †: not separated from it (paired t over common seeds, Holm over all pairs of methods" in one_column
    assert "Bold" not in tables.sweep_caption([run], marks="") and "†" not in tables.sweep_caption([run], marks="")
