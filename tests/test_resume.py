"""Runs that end early and go on: killed at chosen instants, on another machine, from damaged files; and runs that donors spare work."""

from __future__ import annotations

import functools
import io
import itertools
import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from perfed import checkpoint, cli, donors, frontdoor, results, resume, train
from perfed.config import parse
from perfed.errors import UserError
from perfed.federate import Federation
from perfed.prepare import prepare

torch.set_num_threads(1)
COMPOSER = frontdoor.Composer()
NUMBERS = ("rounds.csv", "users.csv", "result.json")
TINY = "dataset=synthetic dataset.train=120 dataset.test=60 dataset.features=4 dataset.classes=3 partition=iid model=logistic n=4 r=0.5"
TINY += " tau=2 batch=8 rounds=6 eval_every=4 seeds=2 algo=fedavg device=cpu progress=off outputs=out"


class Killed(BaseException):
    """Like SIGKILL: nothing catches it."""


def words(*overrides: str) -> list[str]:
    given = {text.partition("=")[0] for text in overrides}
    return [*(text for text in TINY.split() if text.partition("=")[0] not in given), *overrides]


@functools.cache
def config(*overrides: str):
    """Of a small run whose folder lies in ``out``, in the current folder."""
    return parse(frontdoor.compose(words(*overrides), COMPOSER))


@pytest.fixture(autouse=True)
def plain(monkeypatch, request, tmp_path):
    """In a folder of its own, without report, binomial floor and questions to git, which take most of the time of a small run; saving is
    always due."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("perfed.report._pictures", lambda run: ({}, []))
    if "reported" not in request.fixturenames:
        monkeypatch.setattr("perfed.report.write_report", lambda folder, pictures: [])
    monkeypatch.setattr("perfed.stats.binomial_floor", lambda accuracy, sizes: 0.0)
    monkeypatch.setattr("perfed.train.provenance", lambda prepared: {})
    if "schedule" not in request.node.name:
        monkeypatch.setattr(checkpoint.Schedule, "due", lambda self: True)
        monkeypatch.setattr(checkpoint.Schedule, "affordable", lambda self: True)


@pytest.fixture
def reported():
    """Such a test reads report.md."""


@pytest.fixture
def computed(monkeypatch):
    """(round, seeds) of every round that is computed."""
    calls: list[tuple[int, int]] = []
    advance = Federation.round
    monkeypatch.setattr(Federation, "round", lambda self: (calls.append((self.k, len(self.data))), advance(self))[1])
    return calls


def same(a, b) -> bool:
    """Bitwise, of contents of final.pt."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, list) else a == b


def assert_equal_runs(one: Path, other: Path, but=()) -> None:
    for name in NUMBERS:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    a, b = (checkpoint.read(folder / "final.pt") for folder in (one, other))
    for key in a.keys() | b.keys():
        assert key in but or same(a[key], b[key]), key


def everything(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != results.LOCK}


# ---------------------------------------------------------------- killed, at chosen instants


def kill(patch, where: str, k: int) -> None:
    """Die in round ``k`` (counted from 0), or in the save or the evaluation after ``k`` rounds."""
    if where == "round":
        account = Federation._account

        def dies(self, *args):
            if self.k == k:
                raise Killed
            return account(self, *args)

        patch.setattr(Federation, "_account", dies)
    elif where in ("save", "final"):
        write = torch.save

        def dies(stored, file):
            if stored["k"] == k and ("clock" in stored) == (where == "save"):
                whole = io.BytesIO()
                write(stored, whole)
                file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
                raise Killed
            write(stored, file)

        patch.setattr(torch, "save", dies)
    elif where == "rename":
        replace, count = os.replace, [0]

        def dies(source, to):
            if Path(to).name == "state.pt":
                count[0] += 1
                if count[0] == k + 1:  # the first save is made after 0 rounds
                    raise Killed
            replace(source, to)

        patch.setattr(os, "replace", dies)
    elif where == "evaluate":
        judge = train.judge

        def dies(fed, protocol):
            if fed.k == k:
                raise Killed
            return judge(fed, protocol)

        patch.setattr(train, "judge", dies)
    elif where == "tables":
        patch.setattr(train, "write_users", lambda *_: (_ for _ in ()).throw(Killed))
    else:
        status = results.write_status

        def dies(folder, name, **fields):
            if name == "DONE":
                raise Killed
            status(folder, name, **fields)

        patch.setattr(results, "write_status", dies)


METHODS = {
    "fedavg": ["algo=fedavg", "server=adam"],
    "scaffold": ["algo=scaffold", "server=adam", "server.lr=0.02"],
    "ditto": ["algo=ditto", "optimizer.momentum=0.5", "server=momentum", "engine.backend=loop"],
    "apfl": ["algo=apfl", "algo.adaptive=true", "engine.dtype=float64", "engine.chunk=3"],
}
INSTANTS = [("round", 3, 3), ("save", 3, 2), ("rename", 3, 2), ("evaluate", 4, 3), ("evaluate", 6, 6), ("final", 6, 6), ("tables", 6, 6)]
INSTANTS += [("round", 0, 0), ("save", 0, 0), ("save", 6, 5), ("status", 6, 6)]
FAST = {"fedavg": [*INSTANTS[:3], *INSTANTS[5:7]], "scaffold": [("save", 3, 2)], "ditto": [("round", 3, 3)], "apfl": []}
CASES = [(method, *instant) for method in METHODS for instant in INSTANTS]


def some(fast, every):
    """The parameters; those that are not in ``fast`` are slow."""
    return [case if case in fast else pytest.param(*case, marks=pytest.mark.slow) for case in every]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The folder of each method's run without an interruption."""
    made: dict[str, Path] = {}

    def folder(method: str) -> Path:
        if method not in made:
            made[method] = train.run(config(*METHODS[method]), tmp_path_factory.mktemp(method) / "run").folder
        return made[method]

    return folder


@pytest.mark.parametrize("method, where, k, resumed", some([(name, *i) for name in FAST for i in FAST[name]], CASES))
def test_a_killed_run_goes_on_bit_for_bit(unbroken, computed, monkeypatch, tmp_path, method, where, k, resumed):
    """``resumed``: the round after which the second run goes on, which is what the last good file holds."""
    whole = unbroken(method)
    folder = tmp_path / "cut"
    with monkeypatch.context() as patch:
        kill(patch, where, k)
        with pytest.raises(Killed):
            train.run(config(*METHODS[method]), folder)
    assert results.read_status(folder)["status"] == "INTERRUPTED"
    computed.clear()
    assert train.run(config(*METHODS[method]), folder).status == "DONE"
    assert [k for k, _ in computed] == list(range(resumed, 6))
    fresh = (where, k) == ("save", 0)  # nothing was stored
    assert fresh or f"resumed after round {resumed}\n" in (folder / "log.txt").read_text()
    assert_equal_runs(folder, whole)
    assert not list(folder.glob("state*")) and not list(folder.glob(results.TEMPORARY + "*"))


@pytest.mark.slow
def test_killed_again_and_again(unbroken, computed, monkeypatch, tmp_path):
    for k in (1, 1, 2, 4, 5):
        with monkeypatch.context() as patch:
            kill(patch, "round", k)
            with pytest.raises(Killed):
                train.run(config(*METHODS["scaffold"]), tmp_path / "cut")
    train.run(config(*METHODS["scaffold"]), tmp_path / "cut")
    assert [k for k, _ in computed if k > 0] == [1, 1, 1, 2, 2, 3, 4, 4, 5, 5]  # each killed round, and no other, is computed twice
    assert_equal_runs(tmp_path / "cut", unbroken("scaffold"))


def test_the_seconds_of_all_parts_are_summed(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        kill(patch, "round", 5)
        with pytest.raises(Killed):
            train.run(config(), tmp_path / "cut")
    stored = checkpoint.read(tmp_path / "cut" / "state.pt")["clock"]
    train.run(config(), tmp_path / "cut")
    clock = resume.seconds(tmp_path / "cut")
    assert list(clock) == ["prepare", "compile", "train", "evaluate", "checkpoint", "train until round 4", "train until round 6"]
    assert clock["train until round 4"] == round(stored["train until round 4"], 3) and clock["train until round 6"] == clock["train"]
    assert all(clock[name] >= round(stored[name], 3) for name in stored)


# ---------------------------------------------------------------- signals


def signals_in(patch, target, name: str, when, count: int) -> None:
    """Send SIGINT ``count`` times in the call of ``target.name`` for which ``when(*args)`` holds."""
    before = getattr(target, name)

    def call(*args, **more):
        if when(*args):
            for _ in range(count):
                os.kill(os.getpid(), signal.SIGINT)
        return before(*args, **more)

    patch.setattr(target, name, call)


SIGNALS = [  # the round after which the run is stored, None: it is finished, since nothing but its end is missing
    (train, "judge", 4, 1, 4),
    (train, "judge", 4, 2, 3),  # the second signal cuts the evaluation short, and the round is undone
    (torch, "save", 3, 1, 3),
    (torch, "save", 3, 2, 3),  # a save is not cut short
    (train, "judge", 6, 1, None),
    (train, "judge", 6, 2, 6),
    (train, "write_users", 6, 1, None),
    (train, "write_users", 6, 2, 6),
]


@pytest.mark.parametrize("target, name, k, count, stored", some(SIGNALS[1:4:2] + SIGNALS[6:7], SIGNALS))
def test_signals_cost_nothing(unbroken, monkeypatch, tmp_path, target, name, k, count, stored):
    folder = tmp_path / "cut"
    with monkeypatch.context() as patch:
        rounds = {"judge": lambda fed, _: fed.k, "save": lambda content, _: content["k"], "write_users": lambda *_: 6}[name]
        signals_in(patch, target, name, lambda *args: rounds(*args) == k, count)
        with pytest.raises(train.Interrupted):
            train.run(config(*METHODS["fedavg"]), folder)
    status = results.read_status(folder)
    if stored is None:
        assert status["status"] == "DONE"
    else:
        assert (status["status"], status["round"]) == ("INTERRUPTED", stored)
        assert checkpoint.read(folder / "state.pt")["k"] == stored
    train.run(config(*METHODS["fedavg"]), folder)
    assert_equal_runs(folder, unbroken("fedavg"))


def test_a_compiler_that_a_signal_kills_does_not_make_the_run_eager(monkeypatch, tmp_path):
    """Ctrl-C reaches the compiler's processes; a step that fails to compile then says nothing about this machine."""
    monkeypatch.setattr(train, "compiler_works", lambda device: None)
    monkeypatch.setattr("perfed.fusion.options", lambda: None)

    def broken(step, **_):
        def compiled(*arguments):
            os.kill(os.getpid(), signal.SIGINT)
            raise RuntimeError("g++ died of signal 2")

        return compiled

    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", broken)
        with pytest.raises(train.Interrupted):
            train.run(config("engine.compile=true", "engine.backend=vmap"), tmp_path / "cut")
    stored = checkpoint.read(tmp_path / "cut" / "state.pt")
    assert stored["k"] == 0 and not stored["rows"]
    again = prepare(config("engine.compile=true", "engine.backend=vmap"))
    assert resume.begin(again, tmp_path / "cut").prepared.decision.compiled


# ---------------------------------------------------------------- files


def test_a_file_that_was_changed_anywhere_is_found_out(monkeypatch, tmp_path):
    """Cut at, or a bit flipped in, any of many bytes: refused, or harmless (in padding, say)."""
    with monkeypatch.context() as patch:
        kill(patch, "round", 3)
        with pytest.raises(Killed):
            train.run(config(), tmp_path / "cut")
    path = tmp_path / "cut" / "state.pt"
    good, content = path.read_bytes(), checkpoint.read(path)
    rng = np.random.default_rng(0)
    inside = next(good.index(leaf.numpy().tobytes()) for leaf in content["server"]["w"].values())
    refused = 0
    for position in [0, 1, inside, inside + 3, len(good) - 1, *rng.integers(len(good), size=150).tolist()]:
        spoilt = bytearray(good)
        spoilt[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(spoilt)
        try:
            assert same(checkpoint.read(path), content), position
        except checkpoint.Damaged as error:
            refused += 1
            assert str(error).startswith("state.pt is damaged") and "\n" not in str(error)
        if position in (inside, inside + 3):  # torch alone would load the wrong numbers
            with pytest.raises(checkpoint.Damaged, match="checksum"):
                checkpoint.read(path)
    assert refused > 50
    for length in (0, 1, 100, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:length])
        with pytest.raises(checkpoint.Damaged):
            checkpoint.read(path)


@pytest.mark.parametrize("torn, resumed", [(["state.pt"], 2), (["state.pt", "state-previous.pt"], 0)])
def test_a_torn_file_falls_back_with_a_warning(unbroken, computed, monkeypatch, capfd, tmp_path, torn, resumed):
    folder = tmp_path / "cut"
    with monkeypatch.context() as patch:
        kill(patch, "round", 3)
        with pytest.raises(Killed):
            train.run(config(*METHODS["scaffold"]), folder)
    for name in torn:
        (folder / name).write_bytes((folder / name).read_bytes()[:-100])
    computed.clear()
    capfd.readouterr()
    train.run(config(*METHODS["scaffold"], "progress=lines"), folder)
    assert [k for k, _ in computed] == list(range(resumed, 6))
    err, log = capfd.readouterr().err, (folder / "log.txt").read_text()
    for name in torn:
        line = f"warning: {name} is damaged (BadZipFile); the run goes on without it\n"
        assert line in err and line in log
    assert ("resumed after round 2\n" if resumed else "no good state is left: the run starts at round 0\n") in err
    assert_equal_runs(folder, unbroken("scaffold"))


def test_a_state_of_another_run_is_refused(monkeypatch, tmp_path):
    for name, beta in (("one", "beta=0.1"), ("other", "beta=0.2")):
        with monkeypatch.context() as patch:
            kill(patch, "round", 3)
            with pytest.raises(Killed):
                train.run(config(beta), tmp_path / name)
    (tmp_path / "one" / "state.pt").write_bytes((tmp_path / "other" / "state.pt").read_bytes())
    with pytest.raises(UserError, match="belongs to another run; remove it or start over with force=true"):
        train.run(config("beta=0.1"), tmp_path / "one")


def test_a_full_disk_costs_a_warning(unbroken, monkeypatch, tmp_path):
    """The system refuses files beyond 1 kB while checkpoints are written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    save = checkpoint.save

    def full(path, stored, keep_as=None):
        if path.name == "state.pt":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            save(path, stored, keep_as)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    monkeypatch.setattr(checkpoint, "save", full)
    done = train.run(config(*METHODS["fedavg"]), tmp_path / "run")
    assert "warning: the state after round 3 could not be stored: " in (done.folder / "log.txt").read_text()
    assert not list(done.folder.glob(results.TEMPORARY + "*"))
    assert_equal_runs(done.folder, unbroken("fedavg"))


def test_the_previous_file_is_kept_when_a_save_fails(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        kill(patch, "save", 3)
        with pytest.raises(Killed):
            train.run(config(), tmp_path / "cut")
    assert [checkpoint.read(tmp_path / "cut" / name)["k"] for name in ("state.pt", "state-previous.pt")] == [2, 1]


def test_force_starts_over(unbroken, computed, monkeypatch, tmp_path):
    for more in ((), ("force=true",)):
        with monkeypatch.context() as patch:
            kill(patch, "round", 2 if more else 4)
            with pytest.raises(Killed):
                train.run(config(*METHODS["fedavg"], *more), tmp_path / "cut")
    assert [k for k, _ in computed] == [0, 1, 2, 3, 4, 0, 1, 2]
    train.run(config(*METHODS["fedavg"]), tmp_path / "cut")
    assert [k for k, _ in computed][8:] == [2, 3, 4, 5]  # the state of the forced run, not the older one
    assert_equal_runs(tmp_path / "cut", unbroken("fedavg"))


# ---------------------------------------------------------------- when to save


def test_schedule_of_saves():
    """A round takes 0.1 s, a save 0.5 s, one is wanted every second: then one every 12.5 s keeps to 4 %. The first is taken to cost
    0.02 s and 1 s for 200 MiB, so it comes when 0.52 s are 4 % of all: 0.52 <= 0.04 (t + 0.52) from t = 12.48, in the round that ends at
    12.5. It ends at 13.0; 1.0 <= 0.04 (t + 0.5) from t = 24.5."""
    now = [0.0]
    schedule = checkpoint.Schedule(1.0, 100 * 2**20, lambda: now[0])
    saves = []
    while now[0] < 100:
        now[0] = round(now[0] + 0.1, 6)
        if schedule.due():
            saves.append(now[0])
            now[0] = round(now[0] + 0.5, 6)
            schedule.saved(saves[-1])
            assert schedule.spent <= 0.04 * now[0] + 1e-9
    assert saves[:3] == [12.5, 24.5, 37.0] and len(saves) == 8


def test_schedule_where_saves_are_cheap():
    """A save of 1 ms: every second, as wanted; a slow one (1 s) makes the next wait until it is 4 % of all."""
    now = [0.0]
    schedule = checkpoint.Schedule(1.0, 0, lambda: now[0])
    saves = []
    while now[0] < 60:
        now[0] = round(now[0] + 0.25, 6)
        if schedule.due():
            saves.append(now[0])
            schedule.last = now[0]
            cost = 1.0 if len(saves) == 3 else 0.001
            now[0] += cost
            schedule.saved(saves[-1])
            now[0] = round(now[0] - cost, 6)  # saves beside the clock, to keep the numbers round
            schedule.last = now[0]
    # spent 1.002 + the next, taken to cost 1: 2.002 <= 0.04 (t + 1) from t = 49.05
    assert saves[:4] == [1.0, 2.0, 3.0, 49.25]


def test_schedule_in_a_short_run(tmp_path, monkeypatch):
    """A run that takes no time has none for checkpoints, however often they are wanted."""
    monkeypatch.setattr(checkpoint, "Schedule", functools.partial(checkpoint.Schedule, now=lambda: 0.0))
    done = train.run(config("checkpoint_every=0.0001"), tmp_path / "run")
    assert "stored the state" not in (done.folder / "log.txt").read_text()


# ---------------------------------------------------------------- on another machine


@pytest.fixture
def cut(monkeypatch, tmp_path):
    """The folder of a run that was killed in its fourth round."""

    def make(*overrides: str) -> Path:
        with monkeypatch.context() as patch:
            kill(patch, "round", 3)
            with pytest.raises(Killed):
                train.run(config(*overrides), tmp_path / "cut")
        return tmp_path / "cut"

    return make


ONWARDS = "; resume=anyway goes on, no longer equal to an unbroken run to the last bit, and force=true starts over"


def test_another_engine_is_refused_in_one_line(cut):
    folder = cut("engine.chunk=2")
    before = everything(folder)
    for now, line in (
        ("engine.threads=2", "engine.threads=2: this run was begun with 1"),
        ("engine.backend=loop", "engine.backend=loop: this run was begun with vmap"),
        ("engine.chunk=3", "engine.chunk=3: this run was begun with 2"),
        ("engine.compile=true", "engine.compile=true: this run was begun with false"),
    ):
        with pytest.raises(UserError) as caught:
            train.run(config(now), folder)
        assert str(caught.value) == line + ONWARDS
        assert everything(folder) == before and results.read_status(folder)["status"] == "INTERRUPTED"


def test_another_torch_or_device_is_refused_in_one_line(cut, monkeypatch):
    folder = cut()
    before = everything(folder)
    version = str(torch.__version__)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "1.2.3")
        with pytest.raises(UserError, match=f"^torch=1.2.3: this run was begun with {re.escape(version)};"):
            train.run(config(), folder)
    assert everything(folder) == before
    stored = checkpoint.read(folder / "state.pt")  # of a machine with a GPU
    stored["facts"] |= {"device": "cuda", "processor": "a GPU", "chunk": 77}
    checkpoint.save(folder / "state.pt", stored)
    with pytest.raises(UserError, match="^device=cpu: this run was begun with cuda;"):
        train.run(config(), folder)
    done = train.run(config("resume=anyway"), folder)  # what was auto is decided anew
    origin = json.loads((folder / "provenance.json").read_text())["origin"]
    assert origin == [
        "after round 3 device cpu instead of cuda (resume=anyway): no longer equal to an unbroken run to the last bit",
        f"after round 3 chunk {done_chunk()} instead of 77 (resume=anyway): no longer equal to an unbroken run to the last bit",
    ]
    assert done.status == "DONE"


def done_chunk() -> int:
    return prepare(config()).decision.chunk


@pytest.mark.parametrize("begun", [["engine.backend=loop"], pytest.param(["engine.chunk=2"], marks=pytest.mark.slow)])
def test_what_is_auto_now_stays_as_it_was_decided(cut, tmp_path, begun):
    whole = train.run(config(*begun, "algo=ditto"), tmp_path / "whole")
    folder = cut(*begun, "algo=ditto")
    done = train.run(config("algo=ditto"), folder)
    assert_equal_runs(folder, whole.folder, but=("asked",))
    assert "origin" not in json.loads((done.folder / "provenance.json").read_text())


def test_resume_anyway_is_told(cut, tmp_path, reported):
    folder = cut()
    train.run(config("resume=anyway", "engine.threads=2"), folder)
    line = "after round 3 threads 2 instead of 1 (resume=anyway): no longer equal to an unbroken run to the last bit"
    assert f"warning: {line}\n" in (folder / "log.txt").read_text()
    assert line in (folder / "report.md").read_text()
    assert json.loads((folder / "provenance.json").read_text())["origin"] == [line]
    assert checkpoint.read(folder / "final.pt")["told"] == [line]
    whole = train.run(config(), tmp_path / "whole")
    for name in ("users.csv", "result.json"):  # they say nothing of machines, and hold the same numbers up to rounding
        assert "threads" not in (folder / name).read_text()
    np.testing.assert_allclose(train.run(config(), folder).users["loss"], whole.users["loss"], rtol=1e-5)


def test_another_processor_is_told_but_not_refused(cut):
    folder = cut()
    for name in ("state.pt", "state-previous.pt"):
        stored = checkpoint.read(folder / name)
        stored["facts"]["processor"] = "Antique 800"
        checkpoint.save(folder / name, stored)
    train.run(config(), folder)
    (line,) = json.loads((folder / "provenance.json").read_text())["origin"]
    assert line.startswith("after round 3 on ") and line.endswith(" instead of Antique 800: the last bits may differ")


def test_compiled_steps_that_cannot_be_compiled_now_are_refused(cut, monkeypatch):
    folder = cut()
    for name in ("state.pt", "state-previous.pt"):
        stored = checkpoint.read(folder / name)
        stored["facts"]["compiled"] = stored["asked"]["compiled"] = True
        checkpoint.save(folder / name, stored)
    before = everything(folder)
    monkeypatch.setattr(train, "compiler_works", lambda device: "CppCompileError: no headers")
    with pytest.raises(UserError, match=r"^engine.compile=false: this run was begun with true \(now: CppCompileError: no headers\); "):
        train.run(config("engine.compile=true"), folder)
    assert everything(folder) == before


# ---------------------------------------------------------------- donors: more rounds


def run_beside(*overrides: str) -> Path:
    """A run in its own folder in the common outputs."""
    return train.run(config(*overrides)).folder


@pytest.mark.parametrize("method, rounds", some([("scaffold", 3), ("ditto", 4)], [*itertools.product(METHODS, [3, 4])]))
def test_more_rounds_continue_a_finished_run(unbroken, computed, reported, method, rounds):
    """eval_every=4: the evaluation of the donor at round 3 is none of a longer run, the one at round 4 is."""
    whole = unbroken(method)
    donor = run_beside(*METHODS[method], f"rounds={rounds}")
    run_beside(*METHODS[method], "rounds=2")  # a shorter one is not chosen
    before = everything(donor)
    computed.clear()
    folder = run_beside(*METHODS[method])
    assert [k for k, _ in computed] == list(range(rounds, 6)) and everything(donor) == before
    assert f"starts after round {rounds}, from the final state of {donor.name}\n" in (folder / "log.txt").read_text()
    assert_equal_runs(folder, whole, but=("told",))
    told = [f"rounds 1 to {rounds} were computed by {donor.name}"]
    assert json.loads((folder / "provenance.json").read_text())["origin"] == told and told[0] in (folder / "report.md").read_text()
    clock, spent = resume.seconds(folder), resume.seconds(donor)
    laps = [f"train until round {k}" for k in (4, 6)]
    assert [name for name in clock if "until" in name] == laps and clock["train"] >= spent["train"]


def test_a_continued_run_is_interrupted_and_continued(unbroken, computed, monkeypatch):
    donor = run_beside(*METHODS["fedavg"], "rounds=3")
    with monkeypatch.context() as patch:
        kill(patch, "round", 4)
        with pytest.raises(Killed):
            run_beside(*METHODS["fedavg"])
    (donor / "final.pt").unlink()  # it has served
    computed.clear()
    folder = run_beside(*METHODS["fedavg"])
    assert [k for k, _ in computed] == [4, 5]
    assert_equal_runs(folder, unbroken("fedavg"), but=("told",))
    assert checkpoint.read(folder / "final.pt")["told"] == [f"rounds 1 to 3 were computed by {donor.name}"]


OTHERS = [
    (["engine.threads=2"], [], "it was computed with threads 2, this run has 1"),
    (["rounds=3", "beta=1e6", "alpha=1e6"], ["beta=1e6", "alpha=1e6"], "it stopped after round "),
    (["algo=reptile", "algo.schedule=linear"], ["algo=reptile", "algo.schedule=linear"], None),
    (["seeds=1"], [], None),  # rounds and seeds differ
    (["rounds=6", "seeds=3"], [], None),  # more seeds than wanted
    ([], ["force=true"], None),
]


@pytest.mark.parametrize("first, then, line", some([OTHERS[0], OTHERS[2], OTHERS[5]], OTHERS))
def test_other_runs_give_nothing(computed, first, then, line):
    rounds = [] if any(word.startswith("rounds") for word in first) else ["rounds=4"]
    donor = run_beside(*first, *rounds)
    computed.clear()
    folder = run_beside(*then)
    assert computed[0] == (0, 2) and "origin" not in json.loads((folder / "provenance.json").read_text())
    log = (folder / "log.txt").read_text()
    assert donor.name not in log if line is None else f"nothing is taken from {donor.name}: {line}" in log


def test_an_evaluation_of_the_donors_own_may_not_mark_a_seed(monkeypatch, tmp_path):
    """A seed whose scores stop being finite in the donor's last evaluation: a longer run does not evaluate there."""
    donor = run_beside("rounds=3")
    stored = checkpoint.read(donor / "final.pt")
    stored["diverged"][1] = 3
    checkpoint.save(donor / "final.pt", stored)
    folder = run_beside()
    assert f"nothing is taken from {donor.name}: a seed diverged at its last round 3, " in (folder / "log.txt").read_text()


DAMAGES = [*itertools.product(["cut", "flipped", "missing"], ["rounds", "seeds"])]


@pytest.mark.parametrize("how, more", some([("flipped", "rounds")], DAMAGES))
def test_a_damaged_donor_costs_a_warning(unbroken, computed, how, more):
    donor = run_beside(*METHODS["fedavg"], "rounds=4" if more == "rounds" else "seeds=1")
    path = donor / "final.pt"
    content = bytearray(path.read_bytes())
    first = checkpoint.read(path)["server"]["w"]
    content[content.index(next(iter(first.values())).numpy().tobytes())] ^= 1
    path.unlink() if how == "missing" else path.write_bytes(content[:-50] if how == "cut" else content)
    computed.clear()
    folder = run_beside(*METHODS["fedavg"])
    assert computed == [(k, 2) for k in range(6)]
    assert f"warning: {donor.name}: final.pt is damaged (" in (folder / "log.txt").read_text()
    assert_equal_runs(folder, unbroken("fedavg"))


# ---------------------------------------------------------------- donors: more seeds


def assert_close_runs(one: train.Result, other: train.Result, rtol: float) -> None:
    """The same rows; floats within rtol, all else equal."""
    for a, b in ((one.rounds, other.rounds), (one.users, other.users)):
        assert list(a.columns) == list(b.columns) and len(a) == len(b)
        for name in a.columns:
            if a[name].dtype == "float64":
                np.testing.assert_allclose(a[name], b[name], rtol=rtol)
            else:
                assert a[name].tolist() == b[name].tolist(), name
    assert one.summary.keys() == other.summary.keys()
    for key in one.summary.keys() - {"cells"}:
        assert one.summary[key] == other.summary[key], key


HELD = [["seeds=1"], ["seed=1", "seeds=2"]]


@pytest.mark.parametrize("method, held", some([("ditto", HELD[1])], [*itertools.product(METHODS, HELD)]))
def test_more_seeds_compute_the_missing_ones(computed, tmp_path, reported, method, held):
    """Equal to a run of all seeds together up to rounding (another number of lanes rounds otherwise), here in float64; the seeds that
    ``held`` lacks are 1 2 3, or 0 and 3."""
    fixed = [*METHODS[method], "engine.dtype=float64", "partition=dirichlet", "partition.min_size=2", "holdout_users=0.25", "split.val=0.2"]
    donor = run_beside(*fixed, *held)
    before = everything(donor)
    computed.clear()
    joined = train.run(config(*fixed, "seeds=4"))
    count = 3 if held == ["seeds=1"] else 2
    assert computed == [(k, count) for k in range(6)] and everything(donor) == before
    whole = train.run(config(*fixed, "seeds=4"), tmp_path / "alone" / "whole")
    assert_close_runs(joined, whole, 1e-11)
    a, b = (checkpoint.read(run.folder / "final.pt") for run in (joined, whole))
    assert a["seeds"] == [0, 1, 2, 3] and a["costs"] == b["costs"] and torch.equal(a["times_sampled"], b["times_sampled"])
    seeds = ", ".join(map(str, [0] if count == 3 else [1, 2]))
    told = f"seeds {seeds} were computed by {donor.name}: equal to a run of all seeds together up to rounding"
    assert a["told"] == [told] and told in (joined.folder / "report.md").read_text() and b["told"] == []
    assert f"seeds {seeds} are taken from {donor.name}; the others are computed\n" in (joined.folder / "log.txt").read_text()
    assert not (joined.folder / "donor.pt").exists()
    clock, spent = resume.seconds(joined.folder), resume.seconds(donor)
    assert all(clock[name] >= spent[name] for name in ("train", "evaluate", "train until round 4", "train until round 6"))
    model, mine = whole.model(3, 2, steps=0), joined.model(3, 2, steps=0)
    for key in model.params:
        torch.testing.assert_close(mine.params[key], model.params[key], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("where, k, expected", [("round", 3, [3, 4, 5]), pytest.param("tables", 6, [], marks=pytest.mark.slow)])
def test_missing_seeds_are_interrupted_and_continued(computed, monkeypatch, tmp_path, where, k, expected):
    fixed = [*METHODS["scaffold"], "seeds=3"]
    donor = run_beside(*fixed, "seeds=1")
    whole = run_beside(*fixed)
    elsewhere = whole.rename(tmp_path / "whole")
    with monkeypatch.context() as patch:
        kill(patch, where, k)
        with pytest.raises(Killed):
            run_beside(*fixed)
    (donor / "final.pt").unlink()  # the run has its own copy
    computed.clear()
    folder = run_beside(*fixed)
    assert computed == [(k, 2) for k in expected]
    assert_equal_runs(folder, elsewhere)


def test_missing_seeds_start_over_where_the_copy_is_damaged(computed, monkeypatch, tmp_path):
    fixed = [*METHODS["fedavg"], "seeds=3"]
    donor = run_beside(*fixed, "seeds=1")
    with monkeypatch.context() as patch:
        kill(patch, "round", 3)
        with pytest.raises(Killed):
            run_beside(*fixed)
    (copy,) = (tmp_path / "out").glob("*/donor.pt")
    copy.write_bytes(b"")
    computed.clear()
    folder = run_beside(*fixed)
    assert computed == [(k, 2) for k in range(6)]
    log = (folder / "log.txt").read_text()
    assert "warning: donor.pt is damaged (BadZipFile); the run goes on without it\n" in log
    assert log.count(f"seeds 0 are taken from {donor.name}") == 2


def test_seeds_of_a_diverged_donor(computed):
    """Seed 0 diverged and seed 1 did not: joined all the same. Of a donor whose seeds all diverged nothing is taken."""
    donor = run_beside("seeds=2")
    stored = checkpoint.read(donor / "final.pt")
    stored["diverged"][:] = torch.tensor([2, 4])
    checkpoint.save(donor / "final.pt", stored)
    folder = run_beside("seeds=4")
    assert computed[-1] == (5, 4)
    stored["diverged"][1] = -1
    checkpoint.save(donor / "final.pt", stored)
    done = train.run(config("seeds=3"))
    assert done.status == "DIVERGED" and done.summary["diverged"] == {"0": 2} and computed[-1] == (5, 1)
    assert f"nothing is taken from {donor.name}: all its seeds diverged" in (folder / "log.txt").read_text()


def test_what_a_donor_was_told_is_passed_on():
    first = run_beside("seeds=1", "rounds=3")
    second = run_beside("seeds=2", "rounds=3")
    third = run_beside("seeds=2", "rounds=6")
    assert json.loads((third / "provenance.json").read_text())["origin"] == [
        f"seeds 0 were computed by {first.name}: {donors.ROUNDING}",
        f"rounds 1 to 3 were computed by {second.name}",
    ]


# ---------------------------------------------------------------- B32, B33, B35: from the command line


@pytest.fixture
def command(capsys, monkeypatch):
    """A command line -> (exit code, stdout, stderr)."""
    monkeypatch.setattr(cli, "Composer", lambda *places: COMPOSER)

    def call(*overrides: str) -> tuple[int, str, str]:
        code = cli.main(words(*overrides))
        return code, *capsys.readouterr()

    return call


def test_b32_a_folder_is_used_by_one_run_alone(command, tmp_path):
    """(a) One folder, two runs: refused, and nothing in it changes. (b) Two runs at once: two folders; one run twice at once: the second
    says who holds it, and exits with 75."""
    train.run(config(), tmp_path / "mine")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / "mine").iterdir()}
    code, out, err = command("hydra.run.dir=mine", "alpha=0.5")
    assert (code, out, err.count("\n")) == (1, "", 1) and "holds another run" in err
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in (tmp_path / "mine").iterdir()} == before
    mine, other = (frontdoor.FrontDoor(COMPOSER, words(beta)).command(False).cells[0].folder for beta in ("beta=0.1", "beta=0.2"))
    assert mine != other
    with results.Claim(mine):
        code, out, err = command("beta=0.1")
        assert (code, out) == (75, "") and f"is held by process {os.getpid()} on " in err and err.count("\n") == 1
        assert [path.name for path in mine.iterdir()] == [results.LOCK]


def test_b33_interrupt_and_resume(computed, monkeypatch, tmp_path):
    """SIGINT in the round after round 3 of 10, the same line again; then rounds=20 goes on at round 11 (10, counted from 0)."""
    algo = "algo=ditto"
    with monkeypatch.context() as patch:
        signals_in(patch, Federation, "_account", lambda self, *_: self.k == 2, 1)
        with pytest.raises(train.Interrupted):
            train.run(config(algo, "rounds=10"))
    (folder,) = (tmp_path / "out").iterdir()
    status = results.read_status(folder)
    assert (status["status"], status["round"]) == ("INTERRUPTED", 3)
    computed.clear()
    assert train.run(config(algo, "rounds=10")).folder == folder and [k for k, _ in computed] == list(range(3, 10))
    computed.clear()
    longer = train.run(config(algo, "rounds=20")).folder
    assert [k for k, _ in computed] == list(range(10, 20))
    for rounds, run in ((10, folder), (20, longer)):
        whole = train.run(config(algo, f"rounds={rounds}"), tmp_path / "whole" / str(rounds)).folder
        assert_equal_runs(run, whole, but=("told",))
    assert train.run(config(algo, "rounds=20", "alpha=0.5")).folder not in (folder, longer)  # another run


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_b33_a_sweep_is_interrupted_and_resumed(command, computed, monkeypatch, tmp_path, number):
    sweep = ["-m", "beta=0.1,0.2,0.3"]
    with monkeypatch.context() as patch:
        account = Federation._account

        def signalled(self, *args):
            if self.algo.beta == 0.2 and self.k == 2:
                os.kill(os.getpid(), number)
            return account(self, *args)

        patch.setattr(Federation, "_account", signalled)
        code, out, err = command(*sweep)
    assert code == 128 + number and err.endswith(f"perfed: ended by {number.name}\n") and out.count("DONE: ") == 1
    assert len(computed) == 6 + 3
    done = next(path for path in (tmp_path / "out").iterdir() if results.read_status(path)["status"] == "DONE")
    before = everything(done)
    computed.clear()
    code, out, _ = command(*sweep)
    assert code == 0 and out.count("finished before: ") == 1 and out.count("DONE: ") == 2
    assert [k for k, _ in computed] == [3, 4, 5, 0, 1, 2, 3, 4, 5] and everything(done) == before
    for beta in ("0.1", "0.2", "0.3"):
        whole = train.run(config(f"beta={beta}"), tmp_path / "whole" / beta).folder
        assert_equal_runs(tmp_path / "out" / json.loads((whole / "result.json").read_text())["name"], whole)


@pytest.mark.slow
def test_b35_neither_hash_seed_nor_environment_threads_count(tmp_path):
    """This process against a new one with another hash seed, and with OMP_NUM_THREADS=2: engine.threads decides."""
    here = train.run(config("algo=ditto"), tmp_path / "here")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "2"}
    line = [sys.executable, "-m", "perfed", *words("algo=ditto", "pictures=false", f"hydra.run.dir={tmp_path / 'there'}")]
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("rounds.csv", "users.csv"):
        assert (here.folder / name).read_bytes() == (tmp_path / "there" / name).read_bytes()
    a, b = (checkpoint.read(folder / "final.pt") for folder in (here.folder, tmp_path / "there"))
    assert all(same(a[key], b[key]) for key in a)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("method", list(METHODS))
def test_b35_and_resume_on_a_gpu(monkeypatch, tmp_path, method):
    """On one GPU: twice the same bits, and the same ones over a kill; against the CPU: the same split, users and initial model, accuracies
    within 2 %."""
    gpu = [*METHODS[method], "device=cuda"]
    whole = train.run(config(*gpu), tmp_path / "whole")
    with monkeypatch.context() as patch:
        kill(patch, "round", 3)
        with pytest.raises(Killed):
            train.run(config(*gpu), tmp_path / "cut")
    train.run(config(*gpu), tmp_path / "cut")
    assert_equal_runs(tmp_path / "cut", whole.folder)
    cpu = train.run(config(*METHODS[method]), tmp_path / "cpu")
    assert cpu.summary["partition_digest"] == whole.summary["partition_digest"]
    assert cpu.users["times_sampled"].tolist() == whole.users["times_sampled"].tolist()
    assert abs(cpu.summary["cells"][-1]["mean"] - whole.summary["cells"][-1]["mean"]) < 0.02
