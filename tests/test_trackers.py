"""Trackers: what is logged, that a failing one costs a run nothing, and what TensorBoard, MLflow and W&B hold afterwards.

The packages are extras; a test of one is skipped where it is not installed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perfed import cli, frontdoor, results, trackers, train
from perfed.config import parse
from perfed.errors import UserError
from perfed.federate import Federation
from perfed.identity import identity
from perfed.trackers import TRACKERS, Tracked, Tracker, Tracking, final, register, scalars

torch.set_num_threads(1)
COMPOSER = frontdoor.Composer()
NUMBERS = ("rounds.csv", "users.csv", "result.json")
WORDS = ["dataset=synthetic", "dataset.train=60", "dataset.test=30", "dataset.features=4", "dataset.classes=3", "partition=iid"]
WORDS += ["device=cpu", "algo=fedavg", "model=logistic", "n=4", "tau=1", "batch=8", "rounds=4", "eval_every=1", "seeds=2", "progress=off"]
WORDS += ["pictures=false", "engine.backend=loop"]


def row(seed: int, k: int = 3, model: str = "global", steps: int = 1, seen: bool = True, **values: Any) -> dict[str, Any]:
    return {"seed": seed, "round": k, "model": model, "steps": steps, "seen": seen, **values}


# ---------------------------------------------------------------- what is logged


def test_scalars_of_a_round():
    """Two seeds: means (0.5 + 0.75) / 2, (2 + 4) / 2, (10 + 30) / 2; only seed 1 has a finite loss and a new user."""
    rows = [
        row(0, accuracy=0.5, loss=float("nan"), val_accuracy=None, grad_evals=10, hf_error=2.0),
        row(1, accuracy=0.75, loss=1.0, val_accuracy=None, grad_evals=30, hf_error=4.0),
        row(1, accuracy=0.25, seen=False, grad_evals=30, hf_error=4.0),
    ]
    each = {
        "seed0/accuracy/global/steps1": 0.5, "seed1/accuracy/global/steps1": 0.75, "seed1/new_users/accuracy/global/steps1": 0.25,
        "seed1/loss/global/steps1": 1.0, "seed0/cost/grad_evals": 10.0, "seed1/cost/grad_evals": 30.0,
        "seed0/diagnostic/hf_error": 2.0, "seed1/diagnostic/hf_error": 4.0,
    }  # fmt: skip
    means = {"accuracy/global/steps1": 0.625, "cost/grad_evals": 20.0, "diagnostic/hf_error": 3.0}
    assert scalars(rows, 7.5) == {**means, **each, "time/train_seconds": 7.5}
    assert scalars(rows, diverged=True) == each


def test_final_values():
    cell = {"model": "personal", "steps": 5, "seen": True, "mean": 0.5, "half_width": 0.1}
    new = {**cell, "seen": False, "mean": 0.4, "half_width": None}  # one seed
    lost = {**cell, "steps": 0, "mean": None, "half_width": None}
    want = {"final/mean/personal/steps5": 0.5, "final/half_width/personal/steps5": 0.1, "new_users/final/mean/personal/steps5": 0.4}
    assert final({"cells": [cell, new, lost]}) == want


# ---------------------------------------------------------------- a tracker of our own, which may fail


@dataclass(kw_only=True)
class Mine(Tracker):
    """Notes every call in ``notes``. ``trouble``: the call that fails, and how."""

    trouble: str = ""
    notes = []

    def open(self, run: Tracked):
        return Notes(self, run)


class Notes:
    where = "in memory"
    last = -1

    def __init__(self, option: Mine, run: Tracked):
        self.option = option
        self.note("open", run)

    def note(self, what: str, *values: Any) -> None:
        self.option.notes.append((what, *values))
        call, _, how = self.option.trouble.partition(" ")
        if call == what:
            if how == "hangs":
                time.sleep(60)
            raise {"error": OSError("no space\nleft"), "exit": SystemExit(3), "interrupt": KeyboardInterrupt()}[how]

    def log(self, k: int, values) -> None:
        self.note(f"log{k}", k, values)

    def close(self, status, k, values, pictures) -> None:
        self.note("close", status, k, values, pictures)


@pytest.fixture
def mine():
    """``tracker=mine_for_test``, registered as a plugin does; its notes."""
    from hydra.core.config_store import ConfigStore

    Mine.notes = []
    register("mine_for_test")(Mine)
    frontdoor.offer_registered(COMPOSER)
    yield Mine.notes
    TRACKERS.pop("mine_for_test")
    ConfigStore.instance().repo.pop("tracker")


def cheap(patch) -> None:
    """Without the binomial floor and questions to git, which take most of the time of a small run."""
    patch.setattr("perfed.stats.binomial_floor", lambda accuracy, sizes: 0.0)
    patch.setattr("perfed.train.provenance", lambda prepared: {})


@pytest.fixture
def config(tmp_path, monkeypatch):
    cheap(monkeypatch)
    fixed = [*WORDS, f"outputs={tmp_path / 'outputs'}", f"data_root={tmp_path}"]
    return lambda *words: parse(frontdoor.compose([*fixed, *words], COMPOSER))


def content(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in NUMBERS}


def test_a_run_is_told_once_and_its_end_too(config, mine, tmp_path):
    made = config("tracker=mine_for_test", "split.val=0.2")
    result = train.run(made)
    assert result.status == "DONE"
    (_, run), *logged, (_, status, k, values, pictures) = mine
    assert (run.folder, run.identity, run.fresh) == (result.folder, result.summary["identity"], True)
    assert run.config["algo.name"] == "fedavg" and run.config["split.val"] == 0.2 and run.config["adapt.steps"] == [1]
    assert [note[0] for note in logged] == ["log1", "log2", "log3", "log4"]
    rounds = result.rounds
    for _, k, seen in logged:
        of = rounds[(rounds["round"] == k) & (rounds["steps"] == 1)].sort_values("seed")
        for key in ("accuracy", "loss", "worst10", "val_accuracy"):
            assert seen[f"{key}/global/steps1"] == pytest.approx(of[key].mean(), rel=1e-14)
            assert [seen[f"seed{s}/{key}/global/steps1"] for s in (0, 1)] == of[key].tolist()
        assert seen["cost/grad_evals"] == of["grad_evals"].mean() and seen["time/train_seconds"] > 0
    assert (status, k, pictures) == ("DONE", 4, [])
    after = next(cell for cell in result.summary["cells"] if cell["steps"] == 1)
    assert values["final/mean/global/steps1"] == after["mean"] and values["final/half_width/global/steps1"] == after["half_width"]
    del mine[:]
    assert train.run(made).status == "finished before" and mine == []


@pytest.fixture(scope="module")
def untracked(tmp_path_factory):
    """The numbers of the run without a tracker."""
    home = tmp_path_factory.mktemp("untracked")
    with pytest.MonkeyPatch.context() as patch:
        cheap(patch)
        return content(train.run(parse(frontdoor.compose([*WORDS, f"data_root={home}"], COMPOSER)), home / "run").folder)


CALLS = ("open", "log1", "log4", "close")


@pytest.mark.parametrize("trouble", [*(f"{call} error" for call in CALLS), "open hangs", "close hangs", "log2 exit", "log2 interrupt"])
def test_a_failing_tracker_costs_one_warning_and_no_bit(config, mine, untracked, tmp_path, monkeypatch, trouble):
    monkeypatch.setattr(trackers, "PATIENCE", 0.3)
    result = train.run(config("tracker=mine_for_test", f"tracker.trouble={trouble}"), tmp_path / "tracked")
    assert result.status == "DONE" and content(result.folder) == untracked
    lines = [line for line in (result.folder / "log.txt").read_text().splitlines() if "tracker" in line]
    kind = {"error": "OSError: no space left", "exit": "SystemExit: 3", "interrupt": "KeyboardInterrupt:"}
    kind["hangs"] = "no answer within 0.3 s"
    start = "warning: tracker=mine_for_test failed and is switched off, the run is not affected: "
    assert lines == [start + kind[trouble.split()[1]]]
    assert mine[-1][0] == trouble.split()[0], "nothing is called after a failure"


def test_an_interrupted_run_goes_on_in_its_tracker(config, mine, tmp_path, monkeypatch):
    """Stopped in round 3: rounds 1 .. 3 are logged; gone on, the tracker is offered all rounds again and holds what it holds."""
    words = ("tracker=mine_for_test",)
    with monkeypatch.context() as patch:
        advance = Federation.round
        patch.setattr(Federation, "round", lambda fed: (advance(fed), fed.k == 3 and os.kill(os.getpid(), signal.SIGTERM)))
        with pytest.raises(train.Interrupted):
            train.run(config(*words), tmp_path / "run")
    first = [note[0] for note in mine]
    assert first == ["open", "log1", "log2", "log3", "close"] and mine[-1][1:] == ("INTERRUPTED", 3, {}, [])
    before = [values for what, *_, values in mine if what.startswith("log")]
    del mine[:]
    monkeypatch.setattr(Notes, "last", 2)
    train.run(config(*words), tmp_path / "run")
    assert [note[0] for note in mine] == ["open", "log3", "log4", "close"] and not mine[0][1].fresh
    assert mine[1][2] == before[2]  # training seconds of the rounds before are kept too
    assert mine[-1][1] == "DONE"


def test_a_run_that_fails_tells_its_tracker(config, mine, tmp_path, monkeypatch):
    def boom(fed):
        raise RuntimeError("boom")

    monkeypatch.setattr(Federation, "round", boom)
    with pytest.raises(RuntimeError, match="boom"):
        train.run(config("tracker=mine_for_test"), tmp_path / "run")
    assert [note[:2] for note in mine[1:]] == [("close", "FAILED")]


def test_a_user_in_a_hurry_does_not_wait(monkeypatch):
    """The end waits PATIENCE seconds, after a signal HURRY; the call hangs for a minute."""
    monkeypatch.setattr(trackers, "HURRY", 0.1)
    said = []
    with Tracking(Mine(name="mine", trouble="close hangs"), hurried=lambda: True) as tracking:
        tracking.begin(Tracked(Path("x"), Path("."), "0", {}, True), said.append)
        tracking.ended("DONE", {"cells": []}, Path("x"))
    assert len(said) == 1 and said[0].endswith("no answer within 0.1 s")


# ---------------------------------------------------------------- the group of options


def test_a_tracker_is_no_part_of_who_a_run_is(config):
    made = config()
    others = [replace(made, tracker=cls(name=name)) for name, cls in TRACKERS.items()]
    assert len(others) == 4 and {identity(other).hash for other in others} == {identity(made).hash}
    old = made.as_dict()
    del old["tracker"]  # as stored before there were trackers
    assert parse(old) == made


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("tracker=wandb", 'perfed: tracker=wandb: needs the extra: pip install "perfed[wandb]"\n'),
        ("-m tracker=none,mlflow", 'perfed: tracker=mlflow: needs the extra: pip install "perfed[mlflow]" [job 2 of 2: tracker=mlflow]\n'),
        ("tracker=mlflow tracker.uri=x", "perfed: tracker.uri=x: null, sqlite:///FILE.db, or the address of a server: http://HOST:PORT\n"),
        ("tracker=wandb tracker.mode=on", "perfed: tracker.mode=on: must be one of offline, online\n"),
        ("tracker=wan", "perfed: tracker=wan: no such tracker (did you mean 'wandb'?); one of mlflow, none, tensorboard, wandb\n"),
    ],
)
def test_refused_before_round_1(tmp_path, monkeypatch, capsys, words, line):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(cli, "Composer", lambda *places: COMPOSER)
    argv = [word for word in WORDS if not word.startswith("tracker")]
    assert cli.main([*argv, *words.split()]) == 1
    err = capsys.readouterr().err
    assert re.sub(r"(job 2 of 2: ).* (?=tracker)", r"\1", err) == line and not list(tmp_path.iterdir())


def test_a_folder_of_the_packages_name_is_no_package(tmp_path, monkeypatch):
    """W&B itself makes a folder ``wandb`` where it is started."""
    (tmp_path / "no_such_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    option = Mine(name="mine")
    monkeypatch.setattr(Mine, "packages", ("no_such_tracker",))
    with pytest.raises(UserError, match="needs the extra"):
        option.check()


def test_online_needs_a_key(tmp_path, monkeypatch):
    monkeypatch.setattr(Tracker, "check", lambda self: None)
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://wandb.test:8080")
    with pytest.raises(UserError, match=r"tracker\.mode=online: needs a key: `wandb login`"):
        TRACKERS["wandb"](name="wandb", mode="online").check()
    TRACKERS["wandb"](name="wandb").check()
    (tmp_path / "netrc").write_text("machine wandb.test login user password x\n")
    TRACKERS["wandb"](name="wandb", mode="online").check()


def test_the_jobs_of_a_sweep_are_one_group(config):
    """The words of the command, what is swept first, none of the folders; a name of the user's own stays."""

    def using(name: str, **fields: Any) -> Any:
        return SimpleNamespace(tracker=TRACKERS[name](name=name, **fields))

    made = [using("wandb"), using("wandb")]
    name = 'alpha="${beta}" outputs=x tau=1,2 tracker=wandb model.hidden=[6]'
    assert cli._group(made, name) == ['tracker.group="tau=1,2 alpha=beta model.hidden=6"']
    assert cli._group([using("mlflow")], "experiment=table1") == ['tracker.experiment="experiment=table1"']
    assert cli._group([using("wandb", group="x")], name) == cli._group([using("none")], name) == []
    assert cli._group([using("wandb"), using("mlflow")], name) == []
    assert config("tracker=wandb", *cli._group(made, name)).tracker.group == "tau=1,2 alpha=beta model.hidden=6"


# ---------------------------------------------------------------- the three


def cut_and_gone_on(config, words, folder: Path, monkeypatch) -> train.Result:
    """A run with pictures that was stopped in round 3, and gone on."""
    monkeypatch.setattr(trackers, "HURRY", 120.0)  # the first start of MLflow makes its tables
    with monkeypatch.context() as patch:
        advance = Federation.round
        patch.setattr(Federation, "round", lambda fed: (advance(fed), fed.k == 3 and os.kill(os.getpid(), signal.SIGINT)))
        with pytest.raises(train.Interrupted):
            train.run(config(*words), folder)
    result = train.run(config(*words, "pictures=true"), folder)
    log = (folder / "log.txt").read_text()
    assert log.count(f"\ntracker={words[0].partition('=')[2]}: ") == 2 and "warning" not in log, log
    return result


def curve(result: train.Result, key: str = "accuracy") -> list[tuple[int, float]]:
    """Round and mean over seeds after adaptation, from rounds.csv."""
    rounds = result.rounds
    return list(rounds[rounds["steps"] == 1].groupby("round")[key].mean().items())


def test_tensorboard(config, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = cut_and_gone_on(config, ["tracker=tensorboard"], tmp_path / "run", monkeypatch)
    events = EventAccumulator(str(result.folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    for key in ("accuracy", "loss", "worst10"):
        got = [(event.step, event.value) for event in events.Scalars(f"{key}/global/steps1")]
        assert got == [(k, pytest.approx(value, rel=1e-6)) for k, value in curve(result, key)]  # float32
    ((last,),) = ([event.value for event in events.Scalars("final/mean/global/steps1")],)
    assert last == pytest.approx(curve(result)[-1][1], rel=1e-6)
    assert events.Tags()["images"] == sorted(path.stem for path in result.folder.glob("*.png"))
    text = {tag: events.Tensors(f"{tag}/text_summary")[0].tensor_proto.string_val[0].decode() for tag in ("config", "status")}
    assert "| algo.name | fedavg |" in text["config"] and text["status"] == "DONE"
    assert "_hparams_/session_start_info" in events.summary_metadata


def wandb_records(path: Path) -> list[bytes]:
    """The records of W&B's file: LevelDB's log format, blocks of 32 KiB of (checksum 4, length 2, kind 1, data) after 7 bytes."""
    data, at, records, part = path.read_bytes(), 7, [], b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            records.append(part)
            part = b""
    return records


@pytest.mark.slow
def test_wandb_offline(config, tmp_path, monkeypatch):
    """No key, no network; a run that went on is one whole run in one file."""
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    result = cut_and_gone_on(config, ["tracker=wandb", "tracker.group=ours"], tmp_path / "run", monkeypatch)
    (path,) = result.folder.glob("wandb/offline-run-*/*.wandb")
    records = [Record.FromString(text) for text in wandb_records(path)]
    (run,) = [record.run for record in records if record.HasField("run")]
    assert (run.display_name, run.project, run.run_group) == ("run", "perfed", "ours")
    given = {update.key or "/".join(update.nested_key): json.loads(update.value_json) for update in run.config.update}
    assert given["algo.name"] == "fedavg" and given["rounds"] == 4
    found = {}
    for record in records:
        if record.HasField("history"):
            values = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            found[record.history.step.num] = values
    assert [(k, found[k]["accuracy/global/steps1"]) for k in (1, 2, 3, 4)] == curve(result)
    assert sorted(found) == [1, 2, 3, 4, 5] and "pictures/learning_curve/path" in found[5]
    updates = [item for record in records if record.HasField("summary") for item in record.summary.update]
    summary = {item.key or "/".join(item.nested_key): item.value_json for item in updates}
    assert summary["status"] == '"DONE"' and float(summary["final/mean/global/steps1"]) == curve(result)[-1][1]
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]


@pytest.mark.slow
def test_mlflow(config, tmp_path, monkeypatch):
    """The SQLite file under outputs; a run that went on is one run, a run that is forced again another."""
    for package in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(package)
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "outputs").mkdir()
    words = ["tracker=mlflow", "tracker.experiment=ours"]
    result = cut_and_gone_on(config, words, tmp_path / "outputs" / "run", monkeypatch)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'outputs' / 'mlflow.db'}")
    home = client.get_experiment_by_name("ours").experiment_id
    (run,) = client.search_runs([home])
    assert (run.info.run_name, run.info.status, run.data.tags["perfed.status"]) == ("run", "FINISHED", "DONE")
    assert run.data.params["algo.name"] == "fedavg" and run.data.tags["perfed.identity"] == result.summary["identity"]
    history = client.get_metric_history(run.info.run_id, "accuracy/global/steps1")
    assert [(point.step, point.value) for point in history] == curve(result)
    assert run.data.metrics["final/mean/global/steps1"] == curve(result)[-1][1]
    assert {item.path for item in client.list_artifacts(run.info.run_id)} == {path.name for path in result.folder.glob("*.png")}
    train.run(config(*words, "force=true"), result.folder)
    assert [r.info.status for r in client.search_runs([home])] == ["FINISHED", "FINISHED"]


def test_stored_runs_of_a_tracker_can_be_judged_without_it(config, tmp_path, monkeypatch):
    """perfed-eval on a machine without the package."""
    from perfed import rescore

    folder = train.run(config(), tmp_path / "run").folder
    stored = (folder / "config.yaml").read_text()
    assert "tracker:\n  name: none\n" in stored
    results.write_text(folder / "config.yaml", stored.replace("tracker:\n  name: none\n", "tracker:\n  name: wandb\n"))
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    assert rescore.rescore(folder, ["protocol=paper"]).status["status"] == "DONE"
