"""perfed-eval: a finished run scored again, without training and without touching it."""

from __future__ import annotations

import shutil

import pytest

from perfed import frontdoor, rescore, results, train
from perfed.config import parse

WORDS = "dataset=synthetic dataset.train=180 dataset.test=90 dataset.features=4 dataset.classes=3 partition=iid model.hidden=[6]".split()
WORDS += "n=5 r=0.4 tau=2 batch=8 rounds=4 eval_every=4 seeds=2 progress=off algo=fedavg".split()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    home = tmp_path_factory.mktemp("run")
    composer = frontdoor.Composer()
    folders = {}
    for protocol in ("clean", "paper"):
        config = parse(frontdoor.compose([*WORDS, f"protocol={protocol}", f"data_root={home}"], composer))
        folders[protocol] = train.run(config, home / protocol).folder
    return folders


@pytest.fixture
def folder(finished, tmp_path):
    """A copy of the finished run under protocol clean."""
    return shutil.copytree(finished["clean"], tmp_path / "run")


def own_files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def test_another_protocol_gives_what_training_under_it_gives(finished, folder):
    """The protocol has no part in training, so both ways must end in the same numbers."""
    before = own_files(folder)
    again = rescore.rescore(folder, ["protocol=paper"])
    trained = results.load(finished["paper"])
    assert again.result["protocol"] == "paper"
    assert again.result["cells"] == trained.result["cells"]
    assert again.result["identity"] == trained.result["identity"]
    assert own_files(folder) == before


def test_the_same_request_is_answered_from_the_folder(folder, monkeypatch):
    first = rescore.rescore(folder, ["adapt.steps=[0,1,3]"])
    assert [cell["steps"] for cell in first.result["cells"]] == [0, 1, 3]
    monkeypatch.setattr("perfed.evaluate.judge", lambda *_: pytest.fail("scored twice"))
    assert rescore.rescore(folder, ["adapt.steps=[0,1,3]"]).result == first.result


def test_a_step_that_overflows_is_diverged_and_has_no_mean(folder, capsys):
    run = rescore.rescore(folder, ["adapt.lr=1e30", "adapt.steps=5"])
    assert run.status["status"] == "DIVERGED" and set(run.result["diverged"]) == {"0", "1"}
    assert all(cell["mean"] is None for cell in run.result["cells"])
    assert rescore.main([str(folder), "adapt.lr=1e30", "adapt.steps=5"]) == 0
    assert "div 2/2" in capsys.readouterr().out


def test_folders_may_be_written_as_a_shell_completes_them(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder.parent)
    for word in ("run", "run/", "./run"):
        assert rescore.main([word, "protocol=paper"]) == 0
    assert "mean of 10 draws" in " ".join(capsys.readouterr().out.split())


def test_a_forced_run_drops_scores_of_the_old_state(folder):
    rescore.rescore(folder, ["protocol=paper"])
    assert list(folder.glob("eval-*"))
    config = train.stored_config(folder)
    config.force = True
    train.run(config, folder)
    assert not list(folder.glob("eval-*"))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["rounds=3"], "rounds=3: cannot be changed without training"),
        (["algo.beta=1"], "algo.beta=1: cannot be changed without training"),
        (["protocol=cleen"], "protocol=cleen: one of clean, paper, fewshot"),
        (["adapt.stps=3"], "did you mean 'steps'"),
        (["adapt.steps=-1"], "adapt.steps=-1: a whole number >= 0"),
        (["nothing"], "run=nothing: no such folder"),
    ],
)
def test_bad_words_get_one_line(folder, words, text, capsys):
    assert rescore.main([str(folder), *words]) == 1
    err = capsys.readouterr().err
    assert text in err and err.count("\n") == 1
    assert not list(folder.glob("eval-*"))


def test_help_and_no_words(capsys):
    assert rescore.main(["--help"]) == 0 and rescore.main([]) == 1
    assert "perfed-eval RUN" in capsys.readouterr().out
    assert rescore.main(["protocol=paper"]) == 1
    assert "at least one run folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["protocol.support=5"], "protocol.support=5: goes with protocol=fewshot, which takes a support set"),
        (["adapt=3"], "adapt=3: a group of keys: write adapt.<key>=<value>, such as adapt.steps=3"),
        (["+adapt.steps=3"], "+adapt.steps=3: write adapt.steps=3, without +"),
        (["+rounds=3"], "+rounds=3: cannot be changed without training; protocol, adapt.*, device, engine.* and data_root can"),
    ],
)
def test_a_word_that_is_nearly_right_is_told_the_right_one(folder, words, line, capsys):
    assert rescore.main([str(folder), *words]) == 1
    assert capsys.readouterr().err == f"perfed-eval: {line}\n"


def test_a_support_set_goes_with_fewshot(folder):
    config = results.load(folder).config
    for words in (["protocol.support=2", "protocol=fewshot"], ["protocol.support=2", "protocol.source=test", "protocol.score=rest"]):
        assert rescore.changed(config, words)["protocol"]["support"] == 2
    assert rescore.changed(config, ["protocol.support=null"])["protocol"]["support"] is None
