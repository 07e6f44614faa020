"""Studies: their spaces, budgets, choices and reports."""

from __future__ import annotations

import json
import os

import pandas as pd
import pytest

from perfed import cli, results, sweep
from perfed.algorithms import ALGORITHMS
from perfed.config import parse
from perfed.errors import UserError
from perfed.frontdoor import Composer, compose
from perfed.studies import all_methods, jobs, tuning
from perfed.studies.jobs import Context, Done

COMPOSER = Composer()
SMALL = ["dataset=synthetic", "partition=iid", "n=6", "r=0.5", "batch=8", "model.hidden=[6]", "split.val=0.25", "seeds=2", "study.jobs=1"]


def context(*words: str) -> Context:
    return Context(parse(compose(["experiment=all_methods", *SMALL, *words])), ("experiment=all_methods", *SMALL, *words), compose)


def test_every_method_has_a_space_of_equally_many_trials():
    assert set(tuning.methods()) <= set(ALGORITHMS)
    assert set(ALGORITHMS) - set(tuning.methods()) == {"partial"}  # its presets stand for it
    for method in tuning.methods():
        space = tuning.space(method)
        assert len(space.trials) == tuning.TRIALS
        for trial in (space.trials[0], space.trials[-1]):  # legal at both ends of every key
            parse(compose([f"algo={method}", *space.fixed, *tuning.words(trial)], COMPOSER))


@pytest.mark.parametrize(
    "method, rounds",
    # Of a budget of 1,000 with tau = 10: one gradient a step is 10 a round; FO 20, HF 40; exact 2 + 2 (one Hessian product) = 40;
    # Ditto 10 + 10; APFL 2 a step; local 10; q-FedAvg 10 (its losses are no gradients); FedMeta 2 + 2 in its one step.
    [("fedavg", 100), ("local", 100), ("perfedavg_fo", 50), ("perfedavg_hf", 25), ("perfedavg", 25), ("ditto", 50), ("apfl", 50),
     ("qfedavg", 100), ("fedmeta", 250)],
)  # fmt: skip
def test_rounds_follow_from_the_budget(method, rounds):
    ctx = context()
    assert all_methods.rounds_for(ctx.parsed(f"algo={method}"), 1000) == rounds


def test_edges_are_flagged():
    space = tuning.Space("x", (), {"beta": [0.1, 0.2, 0.3], "flag": [True, False], "two": [1, 2]})
    assert space.edges({"beta": 0.1, "flag": True, "two": 1}) == ["beta"]
    assert space.edges({"beta": 0.2, "flag": True, "two": 2}) == []


def test_the_study_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["experiment=all_methods", *SMALL, "study.methods=[fedavg,local]", "study.budget=20"]
    assert cli.main(words) == 0
    out = capsys.readouterr()
    assert out.err.count("6 side by side") == 2 and "method 2 of 2" in out.err
    (folder,) = (tmp_path / "outputs").glob("all_methods-synthetic-*")
    table = pd.read_csv(folder / "methods.csv")
    assert set(table["method"]) == {"fedavg", "local", "majority class"}
    shown = [float(text.split(" ")[0]) for text in table["accuracy % ± 95 % CI"][:2]]
    assert shown == sorted(shown, reverse=True)
    assert set(table["rounds"][:2]) == {"2"}
    # The choice is the trial with the highest validation accuracy, by hand from the trials' records.
    best: dict[str, tuple[float, float]] = {}
    trials = [json.loads(path.read_text()) for path in (tmp_path / "outputs" / "trials").glob("*.json")]
    assert len(trials) == 2 * tuning.TRIALS
    for trial in trials:
        assert list(trial["validation"]) == ["1000"] and list(trial["values"]) == ["algo.beta"]
        found = (trial["validation"]["1000"], -trial["values"]["algo.beta"])  # of equals, the first in the grid: the smallest
        best[trial["algo"]] = max(best.get(trial["algo"], (-1.0, 0.0)), found)
    choices = pd.read_csv(folder / "choices.csv").set_index("method")
    assert {m: -beta for m, (_, beta) in best.items()} == {m: float(choices["chosen"][m].partition("=")[2]) for m in best}
    final = [r for p in (tmp_path / "outputs").glob("*-synthetic-*/result.json") if (r := results.read_json(p))["seeds"] == [0, 1]]
    assert {r["algo"]: r["beta"] for r in final} == {m: -beta for m, (_, beta) in best.items()}
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "outputs").glob("*-synthetic-*/users.csv")}
    assert cli.main(words) == 0  # nothing is trained again
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_a_worker_of_a_study_sees_one_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    sweep.own_gpu.cache_clear()
    jobs._see_one(("3", "5"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    sweep.own_gpu.cache_clear()
    jobs._see_one(("3", "5"))  # as the next worker would: the first has its lock still
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"
    sweep.own_gpu.cache_clear()


def test_the_plan_of_a_study_trains_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["experiment=all_methods", *SMALL, "study.methods=[fedavg,perfedavg_hf]", "plan=true"]) == 0
    text = capsys.readouterr().out
    assert "12 trials of 1 seed(s) and 2 runs of 2 seeds" in text
    assert not (tmp_path / "outputs").exists() or not list((tmp_path / "outputs").glob("*/status.json"))


@pytest.mark.parametrize(
    "words, message",
    [
        (["algo=fedavg"], "algo=fedavg: study all_methods chooses the algorithms"),
        (["study.methods=[fedavgg]"], "study.methods"),
        (["study.budget=0"], "study.budget"),
        (["study.jobs=0"], "study.jobs"),
        (["split.val=0"], "split.val"),
        (["study.name=nothing"], "study.name"),
    ],
)
def test_bad_words_of_a_study(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["experiment=all_methods", *[w for w in SMALL if w.split("=")[0] != words[0].split("=")[0]], *words]) == 1
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert not (tmp_path / "outputs").exists()


def test_a_run_that_failed_is_named_and_the_others_stand():
    space = tuning.Space("x", (), {"beta": [1]})
    well, ill = tuning.Trial({"beta": 1}, {1000: 0.5}, {}), tuning.Trial({"beta": 1}, {}, {1000: 3})
    found = {"a": tuning.Tuned(space, [ill, well]), "b": tuning.Tuned(space, [ill])}
    assert all_methods._why("b", found, {}) == "every trial failed or diverged"
    assert all_methods._why("a", found, {"a": Done(None, 1.0, "n=5: too many")}) == "n=5: too many"


def test_a_trial_gets_the_rounds_that_its_own_steps_leave():
    # FedRep: tau = 10 steps of the body and personal_steps of the head: 12 or 15 gradients a round of a budget of 1,000.
    spaces = {"fedrep": tuning.space("fedrep"), "fedavg": tuning.space("fedavg")}
    rounds = all_methods.Rounds(context("study.budget=1000"), spaces)
    assert [rounds("fedrep", {"beta": 0.1, "algo.personal_steps": steps}) for steps in (2, 5)] == [83, 67]
    assert {rounds("fedavg", values) for values in spaces["fedavg"].trials} == {100}


def test_a_study_is_no_part_of_who_a_run_is():
    from perfed.identity import identity

    one = parse(compose([]))
    other = parse(compose(["study.name=all_methods", "study.budget=7"]))
    assert identity(one, "x").hash == identity(other, "x").hash
    with pytest.raises(UserError, match=r"study.methods=3: all, or a list of methods"):
        parse(compose(["study.methods=3"]))
