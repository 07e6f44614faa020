"""The run folder: atomic files, the claim, the status rule, identity, and texts that survive."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from perfed import results
from perfed.errors import UserError

ROOT = Path(__file__).parents[1]
HOLD = "import sys; from perfed.results import Claim\nwith Claim(sys.argv[1]):\n    print('held', flush=True); sys.stdin.read()"


def spawn_holder(folder):
    command = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def end(process, how=None):
    if how is not None:
        process.send_signal(how)
    process.communicate()


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    results.write_json(path, {"a": 1})
    old = path.read_bytes()
    with pytest.raises(TypeError):
        results.write_json(path, {"a": object()})
    with pytest.raises(RuntimeError), results.atomic(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        results.write_text(path, "new")
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["result.json"]


def test_atomic_keeps_the_suffix_and_the_folder(tmp_path):
    with results.atomic(tmp_path / "a.npz") as temporary:
        assert (temporary.suffix, temporary.parent) == (".npz", tmp_path)
        np.savez(temporary, x=np.arange(3))
    assert np.load(tmp_path / "a.npz")["x"].tolist() == [0, 1, 2]


def test_json_is_strict(tmp_path):
    results.write_json(tmp_path / "a.json", {"x": math.nan, 1: (np.float64(0.1), np.arange(2), None), "text": "é"})
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"x": None, "1": [0.1, [0, 1], None], "text": "é"}
    assert "é" in text and "NaN" not in text


def user_row(**changes):
    row = {"seed": 0, "user": 0, "group": "g", "seen": True, "times_sampled": 1, "n_train": 4, "n_val": 0, "n_test": 3, "model": "global"}
    return {**row, "steps": 1, "correct": 2.5, "loss": 0.1 + 0.2, **changes}


def test_csv_text_is_fixed(tmp_path):
    rows = [user_row(loss=None), user_row(seen=False, loss=math.nan, group='a,"b"'), user_row(correct=np.float64(2.5), seed=np.int64(7))]
    results.write_csv(tmp_path / "users.csv", rows, results.USERS)
    assert (tmp_path / "users.csv").read_bytes().decode().split("\n") == [
        "seed,user,group,seen,times_sampled,n_train,n_val,n_test,model,steps,correct,loss",
        "0,0,g,true,1,4,0,3,global,1,2.5,",
        '0,0,"a,""b""",false,1,4,0,3,global,1,2.5,nan',
        "7,0,g,true,1,4,0,3,global,1,2.5,0.30000000000000004",
        "",
    ]
    with pytest.raises(ValueError, match="no such column in users.csv: \\['secs'\\]"):
        results.write_csv(tmp_path / "users.csv", [{"secs": 1.0}], results.USERS)


def test_csv_texts_and_floats_survive(tmp_path):
    groups = ["NA", "001", "1e-3", "null", "", "nan", "True", "a\nb", "é"]
    rows = [user_row(group=group, user=i, loss=0.1 * i / 3) for i, group in enumerate(groups)]
    results.write_csv(tmp_path / "users.csv", rows, results.USERS)
    frame = results.read_csv(tmp_path / "users.csv", results.USERS)
    assert frame["group"].tolist() == groups
    assert frame["loss"].tolist() == [row["loss"] for row in rows]
    assert {name: str(frame[name].dtype) for name in ("user", "seen", "correct")} == {"user": "int64", "seen": "bool", "correct": "float64"}


def test_csv_that_does_not_fit_is_one_line(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        results.read_csv(tmp_path / "users.csv", results.USERS)
    (tmp_path / "users.csv").write_text("seed,user\n0,1\n")
    with pytest.raises(UserError, match="lacks the columns group, seen"):
        results.read_csv(tmp_path / "users.csv", results.USERS)
    results.write_csv(tmp_path / "users.csv", [user_row(seed="x")], results.USERS)
    with pytest.raises(UserError, match="damaged"):
        results.read_csv(tmp_path / "users.csv", results.USERS)


def test_a_second_process_is_told_who_holds_the_run(tmp_path):
    folder = tmp_path / "run"
    holder = spawn_holder(folder)
    try:
        with pytest.raises(results.Held, match=f"is held by process {holder.pid} on ") as caught, results.Claim(folder):
            pass
        assert caught.value.pid == holder.pid and caught.value.host and caught.value.since
        assert results.is_held(folder)
    finally:
        end(holder)
    assert not results.is_held(folder)
    with results.Claim(folder):
        with pytest.raises(results.Held, match=f"process {os.getpid()} on"), results.Claim(folder):
            pass


def test_a_claim_survives_readers_of_the_status(tmp_path):
    reader = "import sys; from perfed.results import is_held\nprint(flush=True)\nwhile sys.stdin: is_held(sys.argv[1])"
    with results.Claim(tmp_path):
        pass
    process = subprocess.Popen([sys.executable, "-c", reader, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        for _ in range(50):
            with results.Claim(tmp_path):
                pass
    finally:
        end(process, signal.SIGKILL)


def test_running_without_a_live_lock_is_interrupted(tmp_path):
    assert results.read_status(tmp_path) is None
    holder = spawn_holder(tmp_path)
    results.write_status(tmp_path, "RUNNING", identity="abc", round=3)
    assert results.read_status(tmp_path) == {"status": "RUNNING", "identity": "abc", "round": 3}
    (tmp_path / ".tmp-99-final.pt").write_text("half")
    end(holder, signal.SIGKILL)
    assert results.read_status(tmp_path) == {"status": "INTERRUPTED", "identity": "abc", "round": 3}
    with results.Claim(tmp_path):
        assert results.read_status(tmp_path)["status"] == "RUNNING"
        assert not (tmp_path / ".tmp-99-final.pt").exists()
    results.write_status(tmp_path, "DONE")
    assert results.read_status(tmp_path) == {"status": "DONE", "identity": "abc"}
    (tmp_path / "status.json").write_text('{"status": "DO')
    assert results.read_status(tmp_path)["status"] == "INTERRUPTED"


def test_a_folder_of_another_run_is_refused(tmp_path):
    results.check_identity(tmp_path, "a" * 64)
    results.write_status(tmp_path, "FAILED", identity="a" * 64)
    results.check_identity(tmp_path, "a" * 64)
    with pytest.raises(UserError, match="^hydra.run.dir=.*holds another run"):
        results.check_identity(tmp_path, "a" * 63 + "b")


def test_a_folder_of_other_files_is_refused(tmp_path):
    for name in (results.LOCK, "log.txt", "partition-seed3.npz"):  # what a run leaves that was killed before its status was written
        (tmp_path / name).write_text("")
    results.check_identity(tmp_path, "a" * 64)
    for name in ("thesis.tex", "b", "c", "d"):
        (tmp_path / name).write_text("")
    with pytest.raises(UserError, match=r"^hydra.run.dir=.*: holds files that are no run's \(b, c, d, \.\.\.\); give a new folder"):
        results.check_identity(tmp_path, "a" * 64)
    mine = tmp_path / "mine"
    mine.mkdir()
    results.check_identity(mine, "a" * 64)
    (mine / "report.md").write_text("a report of my own")  # a name that runs use, where no run has been
    with pytest.raises(UserError, match=r"holds files that are no run's \(report\.md\)"):
        results.check_identity(mine, "a" * 64)
    results.write_status(tmp_path, "FAILED", identity="a" * 64)  # notes beside a run's files are the user's own business
    results.check_identity(tmp_path, "a" * 64)


def test_a_claim_where_no_folder_can_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="^hydra.run.dir=.*cannot be written"), results.Claim(tmp_path / "file" / "run"):
        pass


def test_log_lines_reach_the_file_at_once(tmp_path):
    for line in ("one", "two"):
        log = results.open_log(tmp_path)
        print(line, file=log)
        assert (tmp_path / "log.txt").read_text().endswith(f"{line}\n")
        log.close()
    assert (tmp_path / "log.txt").read_text() == "one\ntwo\n"


def test_load(tmp_path):
    from omegaconf import OmegaConf

    with pytest.raises(UserError, match="no run folder: it holds no status.json"):
        results.load(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        results.load(tmp_path / "absent")
    config = {"tau": 10, "texts": ["null", "NA", "001", "1e-3", "1e3", "true"], "none": None, "small": 1e-05}
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    results.write_status(tmp_path, "DONE")
    run = results.load(tmp_path)
    assert run.config == config
    assert run.result is None and not run.complete
    results.write_json(tmp_path / "result.json", {"algo": "fedavg"})
    assert results.load(tmp_path).complete
    (tmp_path / "result.json").write_text("{")
    with pytest.raises(UserError, match="result.json is damaged"):
        results.load(tmp_path)
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(UserError, match="config.yaml is damaged"):
        results.load(tmp_path)


def test_warnings_are_said_without_progress_too(capsys):
    import io

    from perfed.progress import Progress

    log = io.StringIO()
    progress = Progress(3, "off", log)
    progress.say("backend vmap")
    progress.say("warning: state.pt is damaged")
    assert capsys.readouterr().err == "warning: state.pt is damaged\n" and log.getvalue().count("\n") == 2
