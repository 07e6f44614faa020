"""Twenty kills by SIGKILL, at random moments and in the middle of saves, and one power cut: every end is that of an unbroken run.

    .venv/bin/python -m pytest -q -s -n 0 -m slow tests/test_kill.py
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_resume import assert_equal_runs

from perfed import results

pytestmark = pytest.mark.slow
KILLS, AIMED = 20, range(1, 20, 2)
ROUNDS = 2500
WORDS = "dataset=synthetic dataset.train=200 dataset.test=80 dataset.features=5 dataset.classes=3 partition=iid n=6 r=0.5 seeds=2"
WORDS += f" device=cpu model.hidden=[6] tau=2 batch=8 rounds={ROUNDS} eval_every=500 progress=lines pictures=false checkpoint_every=0.1"
WORDS += " algo=scaffold server=adam engine.compile=true engine.backend=vmap engine.threads=1"
PATIENCE = 300.0  # seconds; compiling takes half a minute on a busy machine


class Child:
    """The command, in a session of its own: a compiler's processes die with it."""

    def __init__(self, folder: Path):
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # no pool of workers
        line = [sys.executable, "-m", "perfed", *WORDS.split(), f"hydra.run.dir={folder}"]
        self.folder, self.error = folder, folder.with_suffix(".err")
        self.process = subprocess.Popen(line, env=env, cwd=folder.parent, start_new_session=True, stderr=open(self.error, "a"))

    def wait_for(self, holds, pause: float = 0.02) -> float:
        """Seconds until it holds; the child must live that long."""
        since = time.monotonic()
        while not holds():
            assert self.process.poll() is None, f"ended before it could be killed: more rounds are needed\n{self.error.read_text()[-2000:]}"
            assert time.monotonic() - since < PATIENCE, self.error.read_text()[-2000:]
            time.sleep(pause)
        return time.monotonic() - since

    def kill(self) -> bool:
        """SIGKILL; whether that was inside a save: the temporary file is still there."""
        assert self.process.poll() is None, "ended before it could be killed: more rounds are needed"
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return any(self.folder.glob(results.TEMPORARY + "*-state.pt"))

    def end(self) -> None:
        assert self.process.wait(timeout=4 * PATIENCE) == 0, self.error.read_text()[-2000:]


def log(folder: Path) -> str:
    path = folder / "log.txt"
    return path.read_text() if path.is_file() else ""


def resumed(folder: Path) -> list[int]:
    return [int(k) for k in re.findall(r"^resumed after round (\d+)$", log(folder), re.MULTILINE)]


def saves(folder: Path) -> int:
    return log(folder).count("stored the state after round ")


def being_saved(folder: Path) -> bool:
    """Whether a checkpoint is being written at this moment."""
    try:
        return any(entry.name.startswith(results.TEMPORARY) and entry.name.endswith("-state.pt") for entry in os.scandir(folder))
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an unbroken run."""
    folder = tmp_path_factory.mktemp("unbroken") / "whole"
    Child(folder).end()
    return folder


def test_twenty_kills(tmp_path, whole):
    """SCAFFOLD (users keep a state), server Adam, compiled steps. A killed run must go on at a round strictly between 0 and the last."""
    cut = tmp_path / "cut"
    choose, span, inside = random.Random(0), 5.0, 0
    for kill in range(KILLS):
        child = Child(cut)
        try:
            child.wait_for(lambda kill=kill: len(resumed(cut)) == kill)
            before = saves(cut)
            if kill == 0 or kill in AIMED:
                span = child.wait_for(lambda before=before: saves(cut) > before) + 0.5
                time.sleep(choose.uniform(0, 0.4))
                if kill > 0:
                    child.wait_for(lambda: being_saved(cut), pause=0.0005)
            else:
                time.sleep(choose.uniform(0, span))
            inside += child.kill()
        finally:
            if child.process.poll() is None:
                child.kill()
        print(f"kill {kill + 1}: {saves(cut)} saves so far, {inside} kills inside a save, resumed at {resumed(cut)[-1:]}", flush=True)
    Child(cut).end()
    rounds = resumed(cut)
    print(f"resumed after rounds {rounds} of {ROUNDS}; {inside} of {KILLS} kills inside a save")
    assert len(rounds) == KILLS and all(0 < k < ROUNDS for k in rounds) and rounds == sorted(rounds) and len(set(rounds)) >= 5
    assert inside >= 5
    assert_equal_runs(cut, whole)
    assert not list(cut.glob("state*")) and not list(cut.glob(results.TEMPORARY + "*"))


@pytest.mark.parametrize("size", [0, 1000, -1])
def test_a_power_cut_during_a_save(tmp_path, whole, size):
    """What a disk may hold after one: the newest file under its own name, empty or cut short. The one before is whole."""
    cut = tmp_path / "cut"
    child = Child(cut)
    child.wait_for(lambda: saves(cut) >= 3)
    child.kill()
    path = cut / "state.pt"
    path.write_bytes(path.read_bytes()[:size])
    Child(cut).end()
    assert f"warning: state.pt is damaged (BadZipFile); the run goes on without it\nresumed after round {resumed(cut)[0]}\n" in log(cut)
    assert 0 < resumed(cut)[0] < ROUNDS
    assert_equal_runs(cut, whole)
