"""perfed-tune: spaces, the choice on validation data, what is written, what is refused."""

from __future__ import annotations

import shlex

import pandas as pd
import pytest
from omegaconf import OmegaConf

from perfed import results, tune
from perfed.config import parse
from perfed.errors import UserError
from perfed.frontdoor import Composer, compose
from perfed.studies import tuning

COMPOSER = Composer()
SMALL = ["dataset=synthetic", "partition=iid", "n=4", "r=0.5", "batch=8", "model.hidden=[4]", "seeds=2", "rounds=2", "study.jobs=1"]


def test_a_count_of_trials_is_spread_evenly():
    """Of the six points of a 3 x 2 grid, three: positions 0, 2.5 and 5, rounded to even; both ends are among them."""
    space = tuning.Space("x", (), {"beta": [0.1, 0.2, 0.3], "alpha": [1, 2]}, count=3)
    assert [tuple(t.values()) for t in space.trials] == [(0.1, 1), (0.2, 1), (0.3, 2)]
    assert space.edges({"beta": 0.3, "alpha": 2}) == ["beta"]  # two values have no inside
    two = tuning.Space("x", (), {"beta": [0.1, 0.2, 0.3]}, count=2)
    assert two.tried("beta") == [0.1, 0.3] and two.edges({"beta": 0.3}) == []


def test_a_file_holds_one_space_for_all_or_one_for_each(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text("fixed: [tau=3]\ngrid: {beta: [0.1, 0.2]}\n")
    both = ["fedavg", "ditto"]
    assert tuning.read(path, both) == {m: tuning.Space(m, ("tau=3",), {"beta": [0.1, 0.2]}) for m in both}
    path.write_text("ditto: {grid: {algo.lam: [1]}}\n")
    assert tuning.read(path, both) == {"ditto": tuning.Space("ditto", (), {"algo.lam": [1]})}
    bad = ("grid: 3", "grid: {beta: 3}", "grid: {beta: []}", "grid: {beta: [1, 1]}", "[1]", "grid: {a: [1]}\nb: 2", "a: [", "fixed: [x]")
    bad += ("beta: [0.1, 0.2]", "fedavgg: {grid: {beta: [1]}}", "grid: {seed: [1, 2]}", "grid: {split.val: [0.1, 0.2]}")
    bad += ("grid: {algo: [a, b]}",)
    bad += ("fixed: [beta=0.5]\ngrid: {beta: [1, 2]}", "fixed: [protocol=paper]\ngrid: {beta: [1, 2]}", "grid: {rounds: [1, 2]}")
    for text in bad:
        path.write_text(text)
        with pytest.raises(UserError, match="space="):
            tuning.read(path, ["fedavg"])


@pytest.mark.parametrize(
    "word",
    ["seed=1000,2000", "seeds=2,3", "split.val=0.1,0.2", "study.tuning_seeds=1,2", "protocol=paper,clean", "beta=0.1,1e-1"]
    + ["n=20,40", "partition.a=20,34", "dataset.norm=unit,standard"],
)
def test_a_grid_holds_different_values_of_what_may_be_chosen(word, tmp_path, capsys):
    assert tune.main(["algo=fedavg", word, f"outputs={tmp_path / 'out'}"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"perfed: {word.partition('=')[0]}=") and err.count("\n") == 1 and not (tmp_path / "out").exists()


def test_the_best_trial_is_the_first_of_equals_and_never_one_that_diverged():
    space = tuning.Space("x", (), {"beta": [1, 2, 3, 4]})
    trials = [
        tuning.Trial({"beta": 1}, {0: 0.5, 1: 0.7}, {}),
        tuning.Trial({"beta": 2}, {0: 0.6, 1: 0.6}, {}),
        tuning.Trial({"beta": 3}, {0: 1.0}, {1: 7}),
        tuning.Trial({"beta": 4}, {}, {}, "failed"),
    ]
    found = tuning.Tuned(space, trials)
    assert found.words == ("beta=1",) and [t.score for t in trials] == [0.6, 0.6, None, None]
    row = [cell.text for cell in tuning.choices({"x": found}).rows[0]]
    assert row == ["x", "4 (1 diverged, 1 failed)", "beta=1", "60.00", "60.0 to 60.0 (2)", "beta"]
    none = tuning.choices({"x": tuning.Tuned(space, trials[2:])}).rows[0]
    assert [cell.text for cell in none] == ["x", "2 (1 diverged, 1 failed)", "none", "-", "-", "-"]


def test_from_the_command_line(tmp_path, monkeypatch, capsys):
    """The choice by hand from trials.csv; a second time nothing is trained; the printed command is a run of the report's seeds."""
    monkeypatch.chdir(tmp_path)
    words = ["algo=fedavg,reptile", "beta=0.01,0.3,1e12", "study.tuning_seeds=2", *SMALL, "pictures=false"]
    assert tune.main(words) == 0
    out = capsys.readouterr()
    assert "2 methods, 3 trials each on seeds 1000 to 1001; the report's are seeds 0 to 1" in out.out
    assert "split.val=0.2, the default of perfed-tune" in out.out and "perfed-tune" not in out.err
    assert "job 1 of 2: fedavg, 3 side by side from beta=0.01" in out.err
    (folder,) = (tmp_path / "outputs").glob("tune-fedavg-reptile-synthetic-iid-*")
    trials = pd.read_csv(folder / "trials.csv")
    assert len(trials) == 2 * 3 * 2 and set(trials["seed"]) == {1000, 1001}
    assert set(trials[trials["beta"] == 1e12]["status"]) == {"DIVERGED"} and set(trials[trials["beta"] < 1]["status"]) == {"DONE"}
    means = trials[trials["status"] == "DONE"].groupby(["method", "beta"])["val_accuracy"].mean()
    chosen = OmegaConf.load(folder / "chosen.yaml")
    table = pd.read_csv(folder / "choices.csv").set_index("method")
    for method in ("fedavg", "reptile"):
        best = means[method].idxmax()
        assert chosen[method]["values"]["beta"] == best and table["chosen"][method] == f"beta={best}"
        assert chosen[method]["validation_accuracy"] == pytest.approx(means[method].max(), abs=1e-15)
        assert table["trials"][method] == "3 (1 diverged)"
        command = shlex.split(chosen[method]["command"])
        assert command[:3] == ["python", "-m", "perfed"] and chosen[method]["command"] in out.out
        config = parse(compose(command[3:], COMPOSER))
        assert (config.algo.name, config.beta, config.seed_values, config.split.val) == (method, best, (0, 1), 0.2)
    assert not list((tmp_path / "outputs").glob("*/result.json"))
    records = list((tmp_path / "outputs" / "trials").iterdir())
    before = {path: path.stat().st_mtime_ns for path in records}
    assert tune.main([*words, "--run"]) == 0
    out = capsys.readouterr()
    assert len(records) == 6 and before == {path: path.stat().st_mtime_ns for path in before}
    assert "job" not in out.err and "method 2 of 2: reptile" in out.err and "majority class" in out.out
    report = (folder / "report.md").read_text()
    assert "## Sensitivity" in report and "Result on the report's seeds" in report
    assert (folder / "sensitivity.png").stat().st_size > 1000 and (folder / "sensitivity.pdf").read_bytes().startswith(b"%PDF")
    ran = [results.read_json(path) for path in (tmp_path / "outputs").glob("*/result.json")]
    assert {r["algo"]: (r["beta"], r["seeds"]) for r in ran} == {m: (chosen[m]["values"]["beta"], [0, 1]) for m in chosen}


def test_trials_that_cannot_be_lanes_run_one_by_one(tmp_path, monkeypatch, capsys):
    """algo.support of FedMeta shapes the batches: the job of lanes says so, and each trial has a run folder."""
    monkeypatch.chdir(tmp_path)
    assert tune.main(["algo=fedmeta", "algo.support=0.3,0.4", *SMALL]) == 0
    err = capsys.readouterr().err
    assert "one by one, since Unbound: algo.support differs between lanes" in err and "trial 2 of 2: fedmeta algo.support=0.4" in err
    assert len(list((tmp_path / "outputs").glob("fedmeta-*/result.json"))) == 2
    table = pd.read_csv(next((tmp_path / "outputs").glob("tune-fedmeta-*/choices.csv")))
    assert table["trials"].tolist() == [2]


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "algo=null: the methods to tune"),
        (["algo=fedavgg"], "algo=fedavgg: no such algo (did you mean 'fedavg'?)"),
        (["algo=fedavg", "beta=0.1"], "beta=0.1: the space of fedavg sweeps this key"),
        (["algo=fedavg", "--trials", "7"], "--trials=7: a whole number from 1 to 6"),
        (["algo=ditto", "algo.lamm=0.1,1"], "algo.lamm=0.1: no such key with algo=ditto (did you mean 'algo.lam'?)"),
        (["algo=fedavg", "beta=0,0.1"], "beta=0.0: a number > 0"),
        (["algo=partial"], "algo=partial: no published space"),
        (["algo=fedavg", "split.val=0"], "split.val=0.0: a share > 0"),
        (["algo=fedavg", "study.budget=7"], "study.budget=7: perfed-tune gives every method the same rounds"),
        (["algo=fedavg", "study.name=all_methods"], "study.name=all_methods: perfed-tune is no study"),
        (["algo=fedavg", "beta=1,2", "--space", "nowhere.yaml"], "--space=nowhere.yaml: not beside keys with several values (beta)"),
        (["algo=fedavg", "seeds=1001"], "seeds=1001: at most 1000"),
        (["-m", "algo=fedavg"], "perfed-tune: unrecognized arguments: -m"),
        (["algo=fedavg", "hydra.run.dir=x"], "hydra.run.dir=x: perfed-tune makes its runs itself"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert tune.main([*(w for w in SMALL if w.split("=")[0] not in {x.split("=")[0] for x in words}), *words]) == 1
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert not (tmp_path / "outputs").exists()


def test_methods_with_different_numbers_of_trials_are_refused():
    spaces = {"a": tuning.Space("a", (), {"beta": [1, 2]}), "b": tuning.Space("b", (), {"beta": [1, 2, 3]})}
    with pytest.raises(UserError, match="a: 2, b: 3: the same number of trials for every method; give --trials 2"):
        tune._counted(spaces, None)
    assert {len(s.trials) for s in tune._counted(spaces, "2").values()} == {2}


def test_the_plan_trains_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert tune.main(["algo=fedavg,ditto", *SMALL, "plan=true", "--trials", "2"]) == 0
    assert "4 trials of 2 rounds" in capsys.readouterr().out
    assert not list((tmp_path).rglob("status.json"))
