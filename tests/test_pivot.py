"""Rows, columns and cells by keys: typed values through every format and back, refusals, comparisons, what stands behind a number."""

import csv
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from test_report import ROOT, cells, fake_run

from perfed import compare, keys, pivot, report, results, tables, views
from perfed.errors import UserError
from perfed.results import Run

BASE = [0.80, 0.81, 0.82, 0.83, 0.84]


def made(algo="fedavg", per_seed=BASE, *, name=None, status="DONE", first=0, result=None, **config):
    """A run in memory: seed first + i has accuracy ``per_seed[i]``, .3 less before adaptation. ``config``: keys, ``__`` for a dot."""
    tree = {"n": 8, "rounds": 20, "tau": 10, "alpha": 0.01, "seed": first, "seeds": len(per_seed), "algo": {"name": algo}}
    for key, value in config.items():
        group, _, leaf = key.rpartition("__")
        (tree.setdefault(group, {}) if group else tree)[leaf] = value
    seeds = [first + i for i in range(len(per_seed))]
    one = {"model": "global", "seen": True}
    score = [(1, 0.0), (0, 0.3)]
    found = [{**one, "steps": j, "per_seed": {str(s): v - less for s, v in zip(seeds, per_seed, strict=True)}} for j, less in score]
    full = {"algo": algo, "protocol": "clean", "seeds": seeds, "diverged": {}, "cells": found, "primary": {"model": "global", "steps": 1}}
    full |= {"adapt_lr": 0.01, "majority": 0.5, "dataset": "d", "partition": "p", **(result or {})}
    return Run(Path(name or f"{algo}-{first}-{len(per_seed)}"), {"status": status}, tree, full if status == "DONE" else None)


def grid_of(runs, rows=None, columns=("algo",), cell="accuracy", **more):
    return compare.table(pivot.arrange(runs, rows, columns), cell, **more)


# ---------------------------------------------------------------- typed values

VALUES = [None, "null", "NA", "001", "1e-3", 0.001, 1e-5, 1, "1", True, "true", "-", "", "~", "a b", "a  b", " a", "a\nb", "it's", '"q"']
VALUES += ["a\\", "a\\'b", [1, 5], [], ["a", "x,y", None, "1"], "k=v", "é", "50%_of #1 & $x ~y^2 \\z {q}", "a|b", "`*<b>_", "&amp;"]
VALUES += ["[a](b)", "nan", "<1>", "mean-1", "(x)"]


@pytest.mark.parametrize("value", VALUES, ids=map(repr, VALUES))
def test_typed_and_read_are_inverse(value):
    text = keys.typed(value)
    assert keys.read(text) == value and type(keys.read(text)) is type(value)
    assert keys.split(f"k={text},{text}, x") == [f"k={text}", text, "x"]
    assert text == " ".join(text.split())


def test_typed_values_are_those_of_the_command_line():
    """What Hydra's own parser makes of a typed value is the value."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    for value in VALUES:
        if value not in ("a\nb", "a  b", " a"):  # no words of a command line
            assert parser.parse_override(f"key={keys.typed(value)}").value() == value, value


def from_csv(text):
    return list(csv.reader(io.StringIO(text)))


def from_markdown(text):
    """Cells of a pipe table, by the rules of CommonMark: a backslash before punctuation is an escape."""
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    parts = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in rows]
    assert len({len(part) for part in parts}) == 1
    return [[re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", item) for item in part] for part in parts]


LATEX = {r"\textbackslash{}": "\\", r"\textasciitilde{}": "~", r"\textasciicircum{}": "^", r"\textquotesingle{}": "'"}
LATEX |= {r"\textasciigrave{}": "`"}
LATEX |= {"$<$": "<", "$>$": ">", "$|$": "|", "{[}": "[", "{]}": "]", r"$\pm$": "±", r"$^\dagger$": "†", r"$^\approx$": "≈", "$-$": "-"}
LATEX |= {f"\\{letter}": letter for letter in "_%&#${}"}


def from_latex(text):
    """Cells of the tabular: the commands that the writer uses, undone; anything else of LaTeX is an error."""
    body = text[text.index(r"\toprule") + 8 : text.index(r"\bottomrule")].replace("\\midrule\n", "")
    pattern = "|".join(map(re.escape, sorted(LATEX, key=len, reverse=True))) + r"|\\textbf\{(.*)\}|([\\{}$#%&~^_])"

    def undo(m):
        return LATEX[m[0]] if m[0] in LATEX else re.sub(pattern, undo, m[1]) if m[1] else pytest.fail(m[0])

    rows = []
    for line in body.strip().splitlines():
        assert line.endswith(r" \\")
        rows.append([re.sub(pattern, undo, item) for item in re.split(r"(?<!\\) & ", line.removesuffix(r" \\"))])
    return rows


@pytest.mark.parametrize(
    ("write", "parse"), [(tables.to_csv, from_csv), (tables.markdown, from_markdown), (tables.latex, from_latex)], ids=["csv", "md", "tex"]
)
def test_values_survive_the_way_to_the_table_and_back(write, parse):
    runs = [made(algo__kind=value, algo__on=value) for value in VALUES]
    table = grid_of(runs, ["algo.kind"], ["algo"])
    head, *rows = parse(write(table))
    assert head[0] == "algo.kind"
    found = [keys.read(row[0]) for row in rows]
    assert sorted(map(repr, found)) == sorted(map(repr, VALUES))
    assert {row[1] for row in rows} == {"82.00 ± 1.96"}


def test_an_absent_key_is_not_null():
    rows = cells(grid_of([made(), made(tau=4, algo__kind=None), made(tau=2, algo__kind="-")], ["algo.kind"]))
    assert [row[0] for row in rows] == ["-", "null", "'-'"]
    assert len(cells(grid_of([made(alpha=1), made("local", alpha=1.0)], ["alpha"]))) == 1


def test_latex_needs_booktabs_alone_and_compiles_where_it_can(tmp_path):
    table = grid_of([made("fed_avg"), made("b", [v - 0.1 for v in BASE])], ["tau"], reference="b", margin=1)
    text = tables.latex(table)
    assert text.startswith("\\begin{table}\n\\centering\n\\caption{Accuracy in percent (global, after 1 step of 0.01); $\\pm$ is the")
    assert text.endswith("\\bottomrule\n\\end{tabular}\n\\end{table}\n")
    assert "tau & shown & fed\\_avg & b & majority class \\\\\n\\midrule\n10 & mean & \\textbf{82.00 $\\pm$ 1.96} & 72.00 $" in text
    bare = re.sub(r"\\[{}]", "", text)
    depth = [bare[: i + 1].count("{") - bare[: i + 1].count("}") for i in range(len(bare))]
    assert min(depth) == 0 == depth[-1]
    assert re.sub(r"\\\$", "", text).count("$") % 2 == 0
    assert all(ord(letter) < 128 for letter in text)
    if program := shutil.which("pdflatex"):
        (tmp_path / "t.tex").write_text(f"\\documentclass{{article}}\\usepackage{{booktabs}}\\begin{{document}}{text}\\end{{document}}")
        assert subprocess.run([program, "-interaction=batchmode", "t.tex"], cwd=tmp_path).returncode == 0


# ---------------------------------------------------------------- rows and columns


def test_rows_are_sorted_by_value_and_columns_named():
    runs = [made(tau=10), made(tau=4, partition__name="iid"), made("local", tau=10), made("local", tau=4, partition__name="iid")]
    table = grid_of(runs, ["tau"])
    assert table.columns == ("tau", "fedavg", "local", "majority class")
    assert [row[0] for row in cells(table)] == ["4", "10"]
    turned = grid_of(runs, ["algo"], ["tau", "partition"])
    assert turned.columns == ("algo", "tau=4, partition=iid", "tau=10, partition=-", "majority class")
    assert grid_of(runs, None, ["tau"]).columns == ("setting", "tau=4", "tau=10", "majority class")


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        (["tao"], ["algo"], r"rows=tao: no such key in these runs \(did you mean 'tau'\?\)"),
        (["concentration"], ["algo"], r"rows=concentration: no such key in these runs \(did you mean 'partition.concentration'\?\)"),
        (["tau"], ["alog"], r"columns=alog: no such key in these runs \(did you mean 'algo'\?\)"),
        (["tau"], ["tau"], "rows=tau: tau names the columns already"),
        (["tau"], ["algo"], "rows=tau: one cell would hold runs with partition.concentration=0.1, 0.5; add partition.concentration to"),
    ],
)
def test_rows_and_columns_refuse_in_one_line(rows, columns, message):
    with pytest.raises(UserError, match=f"^{message}"):
        grid_of([made(partition__concentration=0.1), made(partition__concentration=0.5, alpha=0.01)], rows, columns)


def test_runs_with_one_more_setting_are_never_averaged():
    """Every way to lose a key that tells two runs apart is refused: 10 and '10', null and 'null', one fixed seed of three."""
    for change in ({"batch": "10"}, {"batch": None}, {"partition_seed": 3}, {"rounds": 21}, {"algo__lam": 0.1}):
        with pytest.raises(UserError, match="one cell would hold runs with"):
            grid_of([made(batch=10), made(**{"batch": 10, **change})], ["tau"])
    assert cells(grid_of([made(device="cpu"), made(device="cuda", first=5)], ["tau"]))[0][1].startswith("82.00")


def test_a_note_says_what_rows_and_columns_do_not():
    table = grid_of([made(rounds=25), made("local", rounds=100)], ["tau"])
    assert table.notes == ("The cells differ in more than rows and columns say: rounds=25, 100.",)


def test_a_run_without_a_configuration_has_no_cell_and_is_named():
    lost = Run(Path("x"), {"status": "FAILED", "traceback": "Traceback\nOSError: gone"}, {}, None)
    table = grid_of([made(), lost, made("local")])
    assert cells(table) == [["tau=10, alpha=0.01", "82.00 ± 1.96", "82.00 ± 1.96", "50.00"]]
    assert table.notes == ("In no cell, it has no configuration: FAILED, OSError: gone (x).",)
    assert cells(grid_of([lost])) == [["all", "FAILED", "-"]]


def test_other_data_under_the_same_settings_do_not_compare():
    with pytest.raises(UserError, match="^run=b: made with other data than a"):
        grid_of([made(name="a", result={"data": "1"}), made("local", name="b", result={"data": "2"})])


# ---------------------------------------------------------------- seeds


def test_a_seed_with_two_numbers_counts_once_and_is_named():
    whole, equal = made(name="whole"), made(per_seed=BASE[:3], name="equal")
    other, more = made(per_seed=[0.7, 0.71], first=3, name="other"), made(per_seed=[0.85], first=5, name="more")
    table = grid_of([equal, other, whole, more])
    # seeds 0..5 of whole and more: mean .825, s = .018708, t(5, .975) = 2.570582: .019633
    assert cells(table)[0][1] == "82.50 ± 1.96"
    assert table.notes == ("other is left out: its seed 3 has another number than in whole.",)
    shown = compare.why(pivot.arrange([equal, other, whole, more]), "#1,fedavg")
    assert [row[0] for row in cells(shown)] == ["0", "1", "2", "3", "4", "5"]
    assert [row[3] for row in cells(shown)] == ["whole"] * 5 + ["more"]
    assert shown.notes == (*table.notes, "equal adds no seed: its numbers are those above.")


def test_why_by_label_and_by_number():
    runs = [made(tau=4), made(tau=10, name="ten"), made("local", tau=10, status="FAILED", name="broken")]
    sorted_rows = pivot.arrange(runs, ["tau"])
    for place in ("tau=10,fedavg", "10,fedavg", "#2,fedavg", "tau=10,algo=fedavg", "#2,#1"):
        assert {row[3] for row in cells(compare.why(sorted_rows, place))} == {"ten"}
    shown = compare.why(sorted_rows, "10,local")
    assert cells(shown) == [["-", "-", "FAILED", "broken"]]
    assert shown.caption.startswith("local, tau=10: FAILED: no reason stored (broken).")
    for place in ("10", "7,fedavg", "10,maml", "fedavg,10"):
        with pytest.raises(UserError, match=f"^why={place}: ROW,COLUMN with a row .tau=4 or #1; tau=10 or #2. and a column .fedavg; local"):
            compare.why(sorted_rows, place)


# ---------------------------------------------------------------- comparisons


def shifted(*differences):
    return [base + d for base, d in zip(BASE, differences, strict=True)]


def test_reference_shows_paired_differences():
    # d = .01 .02 .03 .02 .02: mean .02, s = sqrt(2e-4 / 4) = .0070711, times t(4, .975) / sqrt 5 = 1.241664: .0087799
    # "noise" alternates: mean 0, s = .0158114, half-width .019632; its t is 0
    runs = [made(), made("better", shifted(0.01, 0.02, 0.03, 0.02, 0.02)), made("noise", shifted(0.02, -0.02, 0.01, -0.01, 0.0))]
    table = grid_of(runs, ["tau"], reference="fedavg")
    assert table.columns == ("tau", "shown", "fedavg", "better", "noise", "majority class")
    assert cells(table)[1] == ["10", "minus fedavg", "-", "+2.00 ± 0.88", "+0.00 ± 1.96", "-"]
    assert [cell.mark for cell in table.rows[1][2:5]] == ["", "", "†"]
    assert [cell.bold for cell in table.rows[0][2:5]] == [False, True, False] and not any(cell.mark for cell in table.rows[0])
    assert "Holm over the comparisons with fedavg in a row" in table.caption
    with pytest.raises(UserError, match=r"^reference=fedavgg: a column: fedavg, better, noise \(did you mean 'fedavg'\?\)"):
        grid_of(runs, ["tau"], reference="fedavgg")


def test_holm_counts_the_comparisons_with_the_reference_only():
    # d with mean .01 and s = .008 (t = 2.795, p = .0490): alone it is separated, as one of two comparisons (p doubled) it is not
    d = [0.01 + 0.008 * x / 10**0.5 * 2 for x in (-2, -1, 0, 1, 2)]
    near, far = made("near", shifted(*d)), made("far", shifted(0.2, 0.2, 0.21, 0.2, 0.2))
    alone = grid_of([made(), near], ["tau"], reference="fedavg").rows[1]
    both = grid_of([made(), near, made("same", shifted(0.0, 0.01, -0.01, 0.0, 0.001))], ["tau"], reference="fedavg").rows[1]
    assert (alone[3].text, alone[3].mark, both[3].mark) == ("+1.00 ± 0.99", "", "†")
    sure = grid_of([made(), near, far], ["tau"], reference="fedavg").rows[1]  # the smaller p takes the factor 2, the larger 1
    assert (sure[3].mark, sure[4].mark) == ("", "")


def test_four_common_seeds_have_differences_and_no_marks():
    noise = made("noise", shifted(0.02, -0.02, 0.01, -0.01, 0.0))
    table = grid_of([made(per_seed=BASE[:4]), noise], ["tau"], reference="fedavg", margin=50)
    assert table.rows[1][3] == ("+0.00 ± 2.91", False, "")  # s = .018257, t(3, .975) / 2 = 1.591223
    assert not any(cell.bold or cell.mark for cell in table.rows[0])
    one = grid_of([made(per_seed=BASE[:1]), made("noise")], ["tau"], reference="fedavg")
    assert one.rows[1][3].text == "+0.00 (n/a)"


def test_margin_marks_what_is_equivalent():
    # d as above: 90 % half-width t(4, .95) s / sqrt 5 = 2.131847 * .0070711 / 2.236068 = .0067415, so it lies within 2.68 points, not 2.67
    runs = [made(), made("better", shifted(0.01, 0.02, 0.03, 0.02, 0.02))]
    marks = {m: grid_of(runs, ["tau"], reference="fedavg", margin=m).rows[1][3].mark for m in (2.67, 2.68)}
    assert marks == {2.67: "", 2.68: "≈"}
    table = grid_of(runs, ["tau"], margin=2.68)  # without a reference: to the best
    assert [cell.mark for cell in table.rows[0][1:3]] == ["≈", ""]
    assert "≈: equivalent to it within ±2.68 (two one-sided paired t tests" in table.caption and table.caption.endswith("common seeds.")
    for bad in (0, -1):
        with pytest.raises(UserError, match="^margin="):
            grid_of(runs, ["tau"], margin=bad)


def test_a_diverged_run_is_never_compared():
    lost = made("admm", result={"diverged": {"2": 7}})
    table = grid_of([made(), lost], ["tau"], reference="fedavg", margin=5)
    assert cells(table)[0][2:4] == ["82.00 ± 1.96", "div 1/5"] and cells(table)[1][2:4] == ["-", "-"]
    assert not any(cell.bold or cell.mark for row in table.rows for cell in row)
    assert table.notes == ("div 1/5: admm, tau=10: seed 2 diverged at round 7.",)


def test_a_loss_is_best_when_it_is_low(tmp_path):
    runs = [results.load(fake_run(tmp_path / name, name, seeds=5, per_seed=BASE)) for name in ("a", "b")]
    table = grid_of(runs, ["tau"], cell="loss")
    assert cells(table)[0][1:3] == ["0.5000 ± 0.0000"] * 2 and [cell.bold for cell in table.rows[0][1:3]] == [True, True]
    assert "the lowest mean of a row" in table.caption


# ---------------------------------------------------------------- measures


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """fedavg and local, 3 seeds, 8 users: local's users are .1 below fedavg's, but for user 0, who is .2 above."""
    home = tmp_path_factory.mktemp("two")
    for name in ("fedavg", "local"):
        fake_run(home / name, name, seeds=3)
        results.write_csv(home / name / "timing.csv", [{"what": "train", "value": 6.0, "unit": "s"},
            {"what": "train until round 10", "value": 3.0, "unit": "s"}, {"what": "train until round 12", "value": 4.5, "unit": "s"}],
            ["what", "value", "unit"])  # fmt: skip
    path = home / "local" / "users.csv"
    rows = from_csv(path.read_text())
    for row in rows[1:]:
        row[10] = repr(float(row[10]) + 25 * (0.2 if row[1] == "0" else -0.1))
    path.write_text("".join(",".join(f'"{x}"' if "," in x else x for x in row) + "\n" for row in rows))
    return [results.load(home / name) for name in ("fedavg", "local")]


def test_measures_of_the_files(two):
    def one(cell, **more):
        return cells(grid_of(two, ["tau"], cell=cell, **more))[0]

    assert one("before")[1] == "52.00 ± 4.97" and one("gain")[1] == "30.00 ± 0.00"
    assert one("accuracy", steps=0)[1] == "52.00 ± 4.97"
    users = two[0].users
    worst = [min(part["correct"] / 25) for _, part in users[users["steps"] == 1].groupby("seed")]
    assert one("worst10")[1].startswith(f"{100 * sum(worst) / 3:.2f} ± ")
    group = users[(users["steps"] == 1) & (users["user"] < 5)]["correct"].mean() / 25
    assert one("group:classes 0-4")[1].startswith(f"{100 * group:.2f} ± ")
    assert one("grad_evals")[1] == "600" and one("seconds")[1] == "2.00"  # 6 s, 3 seeds
    assert grid_of(two, ["tau"], cell="seconds").notes == ("Measured on a machine not stored.",)
    assert one("loss")[1] == "0.5000 ± 0.0000"
    table = grid_of(two, ["tau"], cell="val_accuracy")
    assert cells(table)[0][1] == "-" and table.notes == ("-: fedavg, local, tau=10: no validation data (split.val=0).",)
    assert "protocol clean (each step on train data of the user, scored on all his validation data, unweighted" in table.caption
    assert "test data" not in table.caption and "scored on the test data" in grid_of(two, ["tau"]).caption
    for cell, message in (("acuracy", "did you mean 'accuracy'"), ("group:x", "one user group of these runs: classes 0-4; classes 5-9")):
        with pytest.raises(UserError, match=message):
            one(cell)
    with pytest.raises(UserError, match="^steps=7: judged by one of these runs: 0, 1"):
        one("accuracy", steps=7)
    with pytest.raises(UserError, match="^model=personal: judged by one of these runs: global"):
        one("accuracy", model="personal")


def test_new_users_stand_beside_their_own_majority_class(tmp_path):
    old = results.load(fake_run(tmp_path / "a", "fedavg", new_users=True))
    assert grid_of([old], ["tau"], cell="new_users").columns == ("tau", "fedavg")  # older results lack it
    new = results.load(fake_run(tmp_path / "b", "local", new_users=True, majority_new=0.4))
    table = grid_of([old, new], ["tau"], cell="new_users")
    assert table.columns == ("tau", "fedavg", "local", "majority class") and cells(table)[0][1:] == ["82.00 ± 4.97"] * 2 + ["40.00"]


def test_users_helped_and_hurt(two, tmp_path):
    """7 of 8 users are better off with fedavg than with local, user 0 is worse off: .875 and .125 in every seed."""
    assert cells(grid_of(two, ["tau"], cell="helped"))[0][1:3] == ["87.50 ± 0.00", "-"]
    assert cells(grid_of(two, ["tau"], cell="hurt"))[0][1:3] == ["12.50 ± 0.00", "-"]
    assert cells(grid_of(two, ["tau"], cell="helped:fedavg"))[0][1:3] == ["-", "12.50 ± 0.00"]
    table = views.users_table(pivot.arrange(two, ["tau"]))
    assert table.columns[:2] == ("tau", "algo")
    assert [row[4:] for row in cells(table)] == [["87.5 ± 0.0", "12.5 ± 0.0", "-", "-"], ["-", "-", "12.5 ± 0.0", "87.5 ± 0.0"]]
    assert cells(grid_of(two, ["algo"], ["tau"], cell="helped")) == [["fedavg", "87.50 ± 0.00"], ["local", "-"]]
    other = results.load(fake_run(tmp_path / "other", "local", tau=4))
    table = views.users_table(pivot.arrange([two[0], other], ["tau"]))
    assert "-: fedavg, tau=10 against local: no run of local with the same setting, or several." in table.notes


def test_users_of_another_split_are_not_the_same_users(two):
    digests = {str(s): "x" for s in range(3)}
    moved = Run(two[1].folder, two[1].status, two[1].config, {**two[1].result, "partition_digest": digests})
    table = grid_of([two[0], moved], ["tau"], cell="helped")
    assert "the users differ: another split" in table.notes[0]


def test_scatter_of_users(two):
    panels = views.scatter(pivot.arrange(two, ["tau"]))
    (points,) = panels.values()
    assert list(panels) == ["fedavg"] and len(points) == 24
    assert sum(p["y"] > p["x"] for p in points) == 21 and {p["group"] for p in points} == {"classes 0-4", "classes 5-9, few images each"}
    with pytest.raises(UserError, match="^scatter=local: no method to compare with local"):
        views.scatter(pivot.arrange([two[1]]))


def test_target(two):
    # accuracy f - (f - .1) exp(-k / (5 + s)), f = .8 + .02 s: .7 is reached after (5 + s) log((f - .1) / (f - .7)) = 9.73, 10.75, 11.66
    # rounds, so at the scored rounds 10, 12, 12: mean 11.33, s = 1.1547, t(2, .975) / sqrt 3 = 2.4841. Gradients 30 k. Seconds 3 / 3,
    # 4.5 / 3 twice: mean 4 / 3.
    table = views.target_table(pivot.arrange(two, ["tau"]), 70)
    assert table.columns == ("tau", "algo", "rounds to 70 %", "gradient evaluations", "seconds", "scored every")
    assert cells(table)[0] == ["10", "fedavg", "11 ± 3", "340 ± 86", "1.33", "-"]
    # after 20 rounds the seeds are at .787, .794 and .797
    assert cells(views.target_table(pivot.arrange(two, ["tau"]), 79))[0][2:5] == ["not reached 1/3", "-", "-"]
    late = views.target_table(pivot.arrange(two, ["tau"]), 20)
    assert cells(late)[0][4] == "-" and late.notes[0] == "-: fedavg, tau=10: no seconds until that round in timing.csv."
    for bad in (0.7, 101):
        with pytest.raises(UserError, match="^target="):
            views.target_table(pivot.arrange(two), bad)


# ---------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Four result files (row B26): two methods, two settings, 5 seeds."""
    home = tmp_path_factory.mktemp("four")
    for algo, shift in (("fedavg", [0.0] * 5), ("local", [-0.02, -0.01, -0.03, -0.02, -0.02])):
        for tau in (4, 10):
            fake_run(home / f"{algo}-{tau}", algo, tau=tau, seeds=5, per_seed=shifted(*shift))
    return home


def run(capsys, *words):
    code = report.main(list(map(str, words)))
    return code, *capsys.readouterr()


def test_words_are_flags(four, capsys):
    _, words, _ = run(capsys, four, "rows=tau", "reference=local", "format=csv")
    _, flags, _ = run(capsys, "--rows", "tau", four, "--reference=local", "--format", "csv")
    assert words == flags
    assert words.splitlines()[:3] == [
        "tau,shown,fedavg,local,majority class",
        "4,mean,82.00 ± 1.96,80.00 ± 1.96,50.00",
        "4,minus local,+2.00 ± 0.88,-,-",
    ]


def test_what_is_no_run_is_left_out_beside_runs(four, tmp_path, capsys):
    (tmp_path / "multirun.yaml").write_text("")
    (tmp_path / "all_methods-mnist-123").mkdir()
    (tmp_path / "link").symlink_to(four / "fedavg-4")
    code, out, err = run(capsys, *sorted(tmp_path.iterdir()), four, "rows=tau", "format=csv")
    assert code == 0 and out.splitlines()[1] == "4,82.00 ± 1.96,80.00 ± 1.96,50.00"
    assert err.splitlines() == [
        f"perfed: {tmp_path / 'all_methods-mnist-123'}: no run folder: it holds no status.json, nor does a folder in it",
        f"perfed: {tmp_path / 'multirun.yaml'}: no folder",
    ]


def test_a_csv_without_notes_says_them_beside(four, capsys):
    _, out, err = run(capsys, four, four / "fedavg-4", "cell=val_accuracy", "rows=tau", "format=csv")
    assert out.splitlines()[1:] == ["4,-,-", "10,-,-"] and err.count("no validation data") == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rowz=tau"], r"rowz=tau: no such option \(did you mean 'rows'\?\); see --help"),
        (["--rowz", "tau"], "report=.*unrecognized arguments: --rowz.*; see --help"),
        (["format=pdf"], "format=pdf: one of plain, markdown, latex, csv"),
        (["where=tau"], "where=tau: KEY=VALUE, or several with commas between them"),
        (["where=tau=7"], "where=tau=7: none of the 4 runs; tau is 10, 4"),
        (["where=tau=4,n=7"], "where=tau=4,n=7: none of the 4 runs; n is 8"),
        (["where=tauu=7"], r"where=tauu: no such key in these runs \(did you mean 'tau'\?\)"),
        (["margin=x"], "margin=x: a number"),
        (["power=nan"], "power=nan: a number"),
        (["steps=1.5"], "steps=1.5: a whole number"),
        (["power=0"], "power=0.0: a half-width > 0"),
        (["yes=true"], "yes=true: goes with prune"),
        (["users=true", "list=true"], "list=true: not together with users"),
        (["users=true", "margin=2"], "margin=2: says nothing with users"),
        (["cell=gain", "steps=0"], "steps=0: at least 1 with cell=gain"),
        (["users=true", "cell=loss"], "cell=loss: says nothing with users"),
        (["target=20", "cell=nosuch"], "cell=nosuch: says nothing with target"),
        (["html=x.html", "format=latex"], "format=latex: says nothing with html"),
        (["prune=GONE"], "prune=GONE: one or more of DONE, FAILED, INTERRUPTED, DIVERGED"),
        (["list=maybe"], "list=maybe: true or false"),
        (["scatter=/nowhere/x.png"], "scatter=/nowhere/x.png: cannot be written"),
    ],
)
def test_the_command_refuses_in_one_line(four, capsys, words, message):
    code, out, err = run(capsys, four, *words)
    assert code == 1 and re.fullmatch(f"perfed: {message}.*\n", err)
    assert ("±" in out) == words[0].startswith("scatter")  # the numbers are out before anything is drawn


GOLDEN = """\
| tau | shown | fedavg | local |
| --- | --- | ---: | ---: |
| 4 | mean | **72.59 ± 2.59** | 70.59 ± 2.56 |
| 4 | minus local | +2.00 ± 0.88 | - |
| 10 | mean | **72.59 ± 2.59** | 70.59 ± 2.56 |
| 10 | minus local | +2.00 ± 0.88 | - |
| setting | algo | accuracy % | worst 10 % (floor) | better than local % | worse than local % | better than fedavg % | worse than fedavg % |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |
| tau=4 | fedavg | 82.00 ± 1.96 | 72.59 ± 2.59 (70.00) | 100.0 ± 0.0 | 0.0 ± 0.0 | - | - |
| tau=4 | local | 80.00 ± 1.96 | 70.59 ± 2.56 (70.00) | - | - | 0.0 ± 0.0 | 100.0 ± 0.0 |
| tau=10 | fedavg | 82.00 ± 1.96 | 72.59 ± 2.59 (70.00) | 100.0 ± 0.0 | 0.0 ± 0.0 | - | - |
| tau=10 | local | 80.00 ± 1.96 | 70.59 ± 2.56 (70.00) | - | - | 0.0 ± 0.0 | 100.0 ± 0.0 |
| setting | algo | rounds to 70 % | gradient evaluations | seconds | scored every |
| --- | --- | ---: | ---: | ---: | ---: |
| tau=4 | fedavg | 13 ± 3 | 396 ± 85 | - | - |
| tau=4 | local | 15 ± 3 | 444 ± 100 | - | - |
| tau=10 | fedavg | 13 ± 3 | 396 ± 85 | - | - |
| tau=10 | local | 15 ± 3 | 444 ± 100 | - | - |
| setting | fedavg | local | majority class |
| --- | ---: | ---: | ---: |
| tau=4 | **82.00 ± 1.96** | 80.00 ± 1.96 | 50.00 |
| tau=10 | **82.00 ± 1.96** | 80.00 ± 1.96 | 50.00 |
"""


def test_b26_four_results_give_these_bytes_with_every_pandas_and_no_warning(four, tmp_path):
    """Row B26: the text is pinned, so it is the same under every pandas that runs this test; -W error lets no warning pass. Row B27: drawn
    with a stale display."""
    code = (
        "import sys; from perfed import report\n"
        "for words in (['rows=tau', 'cell=worst10', 'reference=local'], ['users=true'], ['target=70'], [f'scatter={sys.argv[2]}/users']):\n"
        "    assert report.main([sys.argv[1], 'format=markdown', *words]) == 0\n"
    )
    command = [sys.executable, "-W", "error", "-c", code, four, tmp_path]
    env = {**os.environ, "MPLBACKEND": "TkAgg", "DISPLAY": "localhost:64.0"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, f"perfed: {tmp_path}/users.png and users.pdf: 2 methods against local\n")
    assert (tmp_path / "users.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "users.pdf").read_bytes().startswith(b"%PDF")
    assert "".join(line + "\n" for line in done.stdout.splitlines() if line.startswith("|")) == GOLDEN


def test_a_closed_pipe_ends_quietly(four):
    command = [sys.executable, "-m", "perfed.report", str(four)]
    with tempfile.TemporaryFile() as err, subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=err) as process:
        process.stdout.close()
        assert process.wait() == 1
        err.seek(0)
        assert err.read() == b""


def test_help_has_three_examples(capsys):
    with pytest.raises(SystemExit) as end:
        report.main(["--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.count("\n  perfed-report ") == 3
