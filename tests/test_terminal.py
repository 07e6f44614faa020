"""What goes to the terminal may get lost; what a run computed does not. And no two jobs write to one folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from perfed import results
from perfed.cli import main

TINY = "dataset=synthetic dataset.train=200 dataset.test=100 partition=iid model=logistic n=4 rounds=2 seeds=2 tau=2 device=cpu".split()
QUIET = [*TINY, "algo=fedavg", "pictures=false"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def perfed(*words: str, stdout) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "perfed", *words]
    path = str(Path(__file__).resolve().parents[1])
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120, env={"PYTHONPATH": path, "PATH": ""})


def status() -> str:
    (run,) = Path("outputs").iterdir()
    return results.load(run).status["status"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has /dev/full")
def test_a_full_disk_behind_stdout_fails_no_run():
    with open("/dev/full", "w") as full:
        done = perfed(*QUIET, "progress=off", stdout=full)
    assert done.returncode == 1 and "perfed: the output could not be written: No space left on device" in done.stderr
    assert status() == "DONE"
    (run,) = Path("outputs").iterdir()
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    with open("/dev/full", "w") as full:
        assert perfed(*QUIET, "progress=off", stdout=full).returncode == 1
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before  # a finished run is left as it is


def test_a_closed_pipe_fails_no_run(monkeypatch, capsys):
    """``perfed ... | head``: whoever reads goes away while the run goes on."""

    class Closed:
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

        def flush(self):
            raise BrokenPipeError(32, "Broken pipe")

        def isatty(self):
            return False

        def fileno(self):
            return self.file.fileno()

    out, err = Closed(), Closed()
    with open("out", "w") as out.file, open("err", "w") as err.file:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            code = main([*QUIET, "progress=lines"])
    assert code == 1
    assert (Path("out").read_text(), Path("err").read_text()) == ("", "")
    (run,) = Path("outputs").iterdir()
    assert results.load(run).complete


@pytest.mark.parametrize("outputs", ["/proc/x", "a" * 300, "/dev/null/x"])
def test_outputs_that_cannot_be_made_are_one_line(outputs, capsys):
    if outputs.startswith("/proc") and not Path("/proc/self").exists():
        pytest.skip("no /proc")
    for words in (QUIET, ["-m", *TINY, "algo=fedavg,local"], ["experiment=easgd_vs_admm", "study.jobs=1"]):
        assert main([*words, f"outputs={outputs}"]) == 1
        out, err = capsys.readouterr()
        assert err.startswith("perfed: outputs=") and err.count("\n") == 1 and "a folder that can be made" in err
        assert "not run" not in out
    assert list(Path().iterdir()) == []


def test_jobs_that_would_share_a_folder_are_refused(capsys):
    words = ["-m", *TINY, "pictures=false", "hydra.sweep.subdir=one"]
    assert main([*words, "algo=fedavg,local"]) == 1
    out, err = capsys.readouterr()
    assert err.startswith("perfed: hydra.sweep.subdir=one: must tell all jobs apart: ") and err.count("\n") == 1
    assert "algo=fedavg" in err and "algo=local would share outputs/one" in err
    assert list(Path().iterdir()) == []
    assert main([*words, "algo=fedavg", "alpha=0.5,0.50"]) == 0  # one job twice is no other one
    assert "the same run as job 1 of 2" in capsys.readouterr().out
