"""Sweeps: what a failing, held, lost or interrupted job means for the others. Rows B28 and B33 (sweeps) of the fault list.

The algorithm of these tests is a user's plugin: FedAvg, in which something happens on demand.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from perfed import cli, prepare, results, sweep, train
from perfed.algorithms.base import ALGORITHMS
from perfed.cli import main
from perfed.config import conf_dir, parse
from perfed.frontdoor import Composer, FrontDoor, compose
from perfed.isolation import isolated
from perfed.sweep import Signalled, Sweep

TINY = "plugins=[troubled] algo=troubled dataset=synthetic dataset.train=200 dataset.test=100 partition=iid model=logistic".split()
TINY += "n=4 seeds=2 rounds=3 tau=2 device=cpu engine.compile=false pictures=false progress=off outputs=out".split()
PLUGIN = '''
import os, signal, sys, time, warnings
from dataclasses import dataclass
from pathlib import Path
import numpy as np
import torch
from perfed.algorithms.base import register
from perfed.algorithms.fedavg import FedAvg

def leak():
    torch.set_default_dtype(torch.float64); torch.set_num_threads(2); torch.rand(7); torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = True; np.seterr(divide="raise"); warnings.simplefilter("error")
    os.environ["LEAK"] = "1"; os.chdir("/"); signal.signal(signal.SIGINT, signal.SIG_IGN)

@register("troubled")
@dataclass(kw_only=True)
class Troubled(FedAvg):
    trouble: str = "none"
    wait: float = 0.0

    def meets(self, what):
        if self.trouble == what and not Path("repaired").exists():
            raise {"exit": SystemExit, "memory": MemoryError}.get(what, RuntimeError)(f"trouble: {what}")

    def init(self, task, params, population):
        self.meets("init")
        if self.trouble == "leak":
            leak()
        noise = torch.rand(()) if self.trouble == "draws" else 0.0  # what no method should do: it draws from the process's generator
        return super().init(task, {k: v + noise for k, v in params.items()}, population)

    def step(self, task, local, batches, info):
        new = super().step(task, local, batches, info)
        for what in ("step", "exit", "memory"):
            self.meets(what)
        return new

    def aggregate(self, task, server, uploads, cohort):
        time.sleep(self.wait)
        if self.trouble == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().aggregate(task, server, uploads, cohort)

    def candidates(self, server, user):
        self.meets("score")
        return super().candidates(server, user)
'''
COMPOSER = Composer()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with the plugin in it, on the path for as long as the test."""
    (tmp_path / "troubled.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cli, "Composer", lambda *_: COMPOSER)
    yield tmp_path
    from hydra.core.config_store import ConfigStore

    ALGORITHMS.pop("troubled", None)
    ConfigStore.instance().repo.get("algo", {}).pop("troubled.yaml", None)
    sys.modules.pop("troubled", None)


@pytest.fixture
def started(monkeypatch) -> list[str]:
    """The jobs that a launcher has started in this process, as their algorithm's trouble or their tau."""
    seen: list[str] = []
    real = train.run

    def run(config, folder, quiet):
        seen.append(f"{config.algo.trouble} tau={config.tau}")
        return real(config, folder, quiet)

    monkeypatch.setattr(train, "run", run)
    return seen


def of(trouble: str, tau: int = 2) -> Path:
    """The run folder of a job."""
    (found,) = (
        path.parent
        for path in Path("out").glob("*/config.yaml")
        if f"trouble: {trouble}\n" in path.read_text() and f"-tau{tau}-" in path.parent.name
    )
    return found


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}


def numbers(folder: Path) -> dict[str, bytes]:
    """The files that hold nothing that depends on clock, machine or folder, and the split."""
    names = ("rounds.csv", "users.csv", "result.json", "partition-seed0.npz", "partition-seed1.npz")
    return {name: (folder / name).read_bytes() for name in names}


def status(folder: Path) -> str:
    return (results.read_status(folder) or {}).get("status", "nothing")


# ---------------------------------------------------------------- one job fails


def failed(command: list[str], troubles: dict[str, str], started: list[str], capsys) -> None:
    """A sweep of ``none``, the troubles and ``other``, and once more ``none``; ``troubles`` maps each to its exception."""
    assert main(command) == 1
    out, err = capsys.readouterr()
    assert started == [f"{name} tau=2" for name in ("none", *troubles, "other")]
    count = len(troubles) + 3
    assert f"job {count} of {count}: algo.trouble=none: the same run as job 1 of {count}\n" in out
    assert status(of("none")) == status(of("other")) == "DONE"
    for trouble, error in troubles.items():
        places = [Path(name) for name in re.findall(r"out/\S+status\.json", err)]
        folder = next(path.parent for path in places if f"trouble: {trouble}\\n" in path.read_text())
        stored = results.read_status(folder)
        assert stored["status"] == "FAILED" and stored["traceback"].startswith("Traceback") and "troubled.py" in stored["traceback"]
        assert stored["traceback"].endswith(f"{error}: trouble: {trouble}\n") and stored["traceback"] in (folder / "log.txt").read_text()
        assert f"{error}: trouble: {trouble}" in err  # of each that fails; left alone, Hydra tells of the first, in the end
        assert re.search(rf"^algo\.trouble={trouble} +FAILED ", out, re.M)
        assert re.search(rf"FAILED: troubled, algo\.trouble={trouble}: {error}:\s+trouble:\s+{trouble}\s+\(", out)
    assert err.count("Traceback") == 0 and len(re.findall(r"^algo\.trouble=\w+ +\d\d\.\d\d ± ", out, re.M)) == 2


def test_b28_jobs_that_fail_while_they_run(capsys, started):
    """B28: the others are complete, exit code 1; the folders of those have status FAILED and the traceback, also in their logs; gaps in the
    table. Then the cause is removed: the same command runs these alone."""
    command = [*TINY, "-m", "algo.trouble=none,step,exit,other,none"]
    failed(command, {"step": "RuntimeError", "exit": "SystemExit"}, started, capsys)
    before = files(of("none")), files(of("other"))
    Path("repaired").touch()
    del started[:]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert started == ["step tau=2", "exit tau=2"] and out.startswith("perfed: 5 jobs, 2 of them finished before; the others: ")
    assert len(re.findall(r"^algo\.trouble=\w+ +\d\d\.\d\d ± ", out, re.M)) == 4 and "FAILED" not in out.partition("\nsetting")[2]
    assert (files(of("none")), files(of("other"))) == before


@pytest.mark.slow
def test_b28_wherever_it_fails(capsys, started):
    """While it scores, for want of memory, and before its first round (``init`` also runs before any job starts)."""
    errors = {"score": "RuntimeError", "memory": "MemoryError", "init": "RuntimeError"}
    failed([*TINY, "-m", f"algo.trouble=none,{','.join(errors)},other,none"], errors, started, capsys)


def test_fail_fast(capsys, started):
    assert main([*TINY, "-m", "algo.trouble=none,step", "tau=2,3", "fail_fast=true"]) == 1
    out = capsys.readouterr().out
    assert started == ["none tau=2", "step tau=2"]
    assert len(re.findall(r"not\s+run,\s+fail_fast=true,\s+and\s+job\s+2\s+of\s+4\s+failed", out)) == 2
    assert len(list(Path("out").iterdir())) == 2  # neither folders of jobs 3 and 4 nor the file that stopped them


def test_a_run_alone_that_fails(capsys):
    assert main([*TINY, "algo.trouble=init"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "RuntimeError: trouble: init" in err


# ---------------------------------------------------------------- only what is missing


def test_a_repeated_sweep_does_what_is_missing(capsys, started):
    """DONE, FAILED, INTERRUPTED, held by another process, and never begun."""
    command = [*TINY, "-m", "tau=1,2,3,4,5"]
    assert main([*TINY, "tau=1"]) == 0
    del started[:]
    places = {cell.config.tau: cell.folder for cell in FrontDoor(COMPOSER, command[:-2] + command[-1:]).command(True).cells}
    for tau, (name, fields) in {2: ("FAILED", {"traceback": "boom"}), 3: ("INTERRUPTED", {"round": 1}), 4: ("RUNNING", {})}.items():
        places[tau].mkdir()
        results.write_status(places[tau], name, **fields)
    before = files(places[1])
    with results.Claim(places[4]):
        capsys.readouterr()
        assert main(command) == 75
        out, err = capsys.readouterr()
    assert started == [f"none tau={t}" for t in (2, 3, 4, 5)] and out.startswith("perfed: 5 jobs, 1 of them finished before; the others:")
    assert files(places[1]) == before and [status(places[tau]) for tau in (2, 3, 5)] == ["DONE"] * 3
    assert f"is held by process {os.getpid()}" in err and re.search(r"^-: troubled, tau=4:\s+held\s+by\s+another\s+process\s+\(", out, re.M)
    del started[:]
    assert main(command) == 0 and started == ["none tau=4"]  # RUNNING without a holder: begun again
    assert capsys.readouterr().out.startswith("perfed: 5 jobs, 4 of them finished before; ")


def test_two_sweeps_on_the_same_cells(monkeypatch, capsys):
    """The second one begins while the first trains job 1: it leaves that to it, does the rest, and the first finds the rest done."""
    command, real, trained, codes = [*TINY, "-m", "tau=1,2,3"], train._run, [], []

    def run(prepared, *rest):
        trained.append(prepared.config.tau)
        if not codes:
            codes.append(None)
            codes[0] = main(command)
        return real(prepared, *rest)

    monkeypatch.setattr(train, "_run", run)
    assert main(command) == 0
    assert codes == [75] and trained == [1, 2, 3]
    first, second = capsys.readouterr().out.split("\nsetting")[1:]
    assert re.search(r"-: troubled, tau=1:\s+not\s+run,\s+held\s+by\s+another\s+process", first)
    assert first.count("±") == 2 + 1  # two cells and the caption
    assert second.count("±") == 3 + 1


@pytest.mark.slow
def test_a_table_for_each_protocol(capsys):
    assert main([*TINY, "-m", "protocol=clean,paper"]) == 0
    assert capsys.readouterr().out.count("\nsetting") == 2


def test_a_launcher_that_is_not_installed(monkeypatch, capsys):
    options = COMPOSER.options
    monkeypatch.setattr(COMPOSER, "options", lambda group: ["basic"] if group == "hydra/launcher" else options(group))
    assert main([*TINY, "-m", "hydra/launcher=joblib"]) == 1
    assert capsys.readouterr().err == "perfed: hydra/launcher=joblib: is an extra: pip install 'perfed[launchers]'\n"


# ---------------------------------------------------------------- nothing leaks


def test_a_job_is_the_same_alone_and_after_others():
    """After a failed one in float64, on two threads, that changes what it can. The job itself reads the process's random generator."""
    assert main([*TINY, "algo.trouble=draws", "outputs=alone"]) == 0
    (alone,) = Path("alone").iterdir()
    with isolated():  # for this test's own process
        assert main([*TINY, "-m", "algo.trouble=leak,draws"]) == 0
    assert numbers(of("draws")) == numbers(alone)


@pytest.mark.slow
def test_a_job_is_the_same_after_all_kinds_of_jobs():
    assert main([*TINY, "algo.trouble=draws", "outputs=alone"]) == 0
    (alone,) = Path("alone").iterdir()
    words = ["engine.dtype=float64,float32", "engine.threads=2,1", "algo.trouble=step,leak,draws"]
    assert main([*TINY, "-m", *words]) == 1
    assert numbers(Path("out") / alone.name) == numbers(alone)


def test_isolated_undoes_what_a_block_changes():
    import warnings

    def state():
        return (
            torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), np.geterr(),
            torch.backends.cudnn.benchmark, torch.get_rng_state().tolist(), list(warnings.filters), dict(os.environ), os.getcwd(),
            signal.getsignal(signal.SIGINT), list(sys.path), torch.is_grad_enabled(), torch.get_float32_matmul_precision(),
            torch.get_default_device(),
        )  # fmt: skip

    import troubled

    before = state()
    with isolated():
        troubled.leak()
        sys.path.append("/nowhere")
        torch.set_grad_enabled(False)
        torch.set_float32_matmul_precision("medium")
        torch.set_default_device("meta")
        during = state()
        os.environ["PERFED_TEST"] = "2"
    changed = [a != b for a, b in zip(before, during, strict=True)]
    assert all(changed), changed
    assert state() == before


def test_the_memory_of_a_failed_job_is_freed(monkeypatch, capsys):
    """Its state sits in the frames of the traceback, in cycles that only a collection finds; automatic ones are off here."""
    alive: list[weakref.ref] = []
    counts: list[int] = []
    real_run, real_round = train.run, train.Federation.round

    def run(config, folder, quiet):
        counts.append(sum(ref() is not None for ref in alive))
        return real_run(config, folder, quiet)

    def round(fed):
        fed.cycle = fed
        alive.extend(weakref.ref(x) for x in (fed, *fed.state.server["w"].values(), fed.pool.x))
        real_round(fed)

    monkeypatch.setattr(train, "run", run)
    monkeypatch.setattr(train.Federation, "round", round)
    gc.collect()
    gc.disable()
    try:
        assert main([*TINY, "-m", "algo.trouble=step,none"]) == 1
    finally:
        gc.enable()
    assert len(alive) > 9 and counts == [0, 0]
    assert sum(ref() is not None for ref in alive) == 0


# ---------------------------------------------------------------- signals, for jobs in other processes


def a_sweep(folder: Path, **fields) -> Sweep:
    return Sweep({}, folder / "out" / ".stop", **fields)


def test_signals_of_the_launching_process(folder, capfd):
    """The first and the second let the jobs end; the third does not wait."""
    shared = a_sweep(folder)
    with pytest.raises(Signalled) as ended, sweep._signals_for(shared):
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])  # inherited by worker processes
        for count, number in enumerate((signal.SIGINT, signal.SIGTERM), 1):
            os.kill(os.getpid(), number)
            while (shared.halted or {}).get("signals") != count:
                time.sleep(0.01)
    assert ended.value.number == signal.SIGINT and shared.halted["why"] == "ended by SIGTERM"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(Signalled), sweep._signals_for(shared):
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
        raise AssertionError("the third one is raised at once")
    assert capfd.readouterr().err.count("a third time does not wait") == 2  # once in each block


def test_a_job_elsewhere_hears_of_each_signal_once(folder):
    """Its own SIGTERM handler, which a run replaces, raises for the first."""
    shared, heard = a_sweep(folder), []
    with sweep.guarded(shared):
        signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
        shared.halt("ended by SIGINT", 2)
        while len(heard) < 2:
            time.sleep(0.01)
    assert len(heard) == 2 and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with pytest.raises(Signalled), sweep.guarded(shared):
        time.sleep(30)


def test_fail_fast_leaves_running_jobs_alone(folder):
    shared = a_sweep(folder)
    shared.halt("fail_fast=true, and job 1 of 2 failed")
    with sweep.guarded(shared):
        time.sleep(3 * sweep.POLL_SECONDS)


# ---------------------------------------------------------------- GPUs


def test_each_process_has_the_gpu_that_the_fewest_have(tmp_path):
    """Locks of one process conflict like those of several, since each opens the file anew. Two GPUs, five processes; the second dies."""
    taken: dict[str, int] = {}

    def take(name: str) -> bool:
        if (fd := sweep._lock_for_life(tmp_path / name)) is None:
            return False
        taken[name] = fd
        return True

    try:
        assert [sweep.least_used(["4", "GPU-7/1"], take) for _ in range(5)] == ["4", "GPU-7/1", "4", "GPU-7/1", "4"]
        os.close(taken.pop("GPU-7_1-0"))
        assert [sweep.least_used(["4", "GPU-7/1"], take) for _ in range(3)] == ["GPU-7/1", "GPU-7/1", "4"]
    finally:
        for fd in taken.values():
            os.close(fd)


def test_visible_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert sweep.visible_gpus() == ("0", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5,-1")  # CUDA stops at the first name that it does not know
    assert sweep.visible_gpus() == ("3", "5")
    assert Sweep.of({}, Path("out"), ["cpu", "cpu"]).gpus == ()
    for devices, one_each in ((["auto", "cuda"], True), (["auto", "cuda:1"], False)):
        made = Sweep.of({}, Path("out"), devices)
        assert made.gpus == ("3", "5") and made.one_each == one_each and made.inline
        assert sweep.gpus_to_share(devices) == (("3", "5") if one_each else ())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sweep.visible_gpus() == ()


def test_what_a_job_elsewhere_sees(folder, monkeypatch):
    """One GPU, the same for all jobs of a process; all of them where an index was typed (the user wins); not submitit's empty list."""
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    sweep.own_gpu.cache_clear()
    for one_each, expected in ((True, "3"), (True, "3"), (False, "3,5")):
        with sweep.guarded(a_sweep(folder, gpus=("3", "5"), one_each=one_each)):
            assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
    sweep.own_gpu.cache_clear()
    with sweep.guarded(a_sweep(folder, gpus=("3", "5"))):  # as another process would: the first has its lock still
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"
    sweep.own_gpu.cache_clear()


# ---------------------------------------------------------------- the estimate


@pytest.mark.parametrize(
    ("words", "flops"),
    [
        # 2 operations for each weight of a matrix: 784 inputs, 10 classes
        (["model=logistic"], 2 * 784 * 10),
        (["model=mlp"], 2 * (784 * 80 + 80 * 60 + 60 * 10)),
    ],
)
def test_operations_of_a_model(words, flops):
    prepared = prepare.prepare(parse(compose(["n=10", *words], COMPOSER)))
    assert prepare._forward_flops(prepared) == flops


def test_operations_of_a_convolution():
    """3 channels, 4 of the output, kernels 5 x 5, 28 x 28 -> 24 x 24 places: 2 * 75 operations for each of 4 * 24 * 24 outputs."""
    with prepare._Products() as counter:
        torch.nn.functional.conv2d(torch.ones(1, 3, 28, 28), torch.ones(4, 3, 5, 5))
        torch.ones(2, 3) @ torch.ones(3, 5)  # 2 * 10 * 3
    assert counter.operations == 2 * 75 * 4 * 24 * 24 + 2 * 10 * 3


def test_the_size_of_a_run():
    """logistic, 5 of 20 users by r=0.25, 3 seeds, tau=10, 100 rounds: 15 lanes x 1,000 steps. FedAvg, one gradient, batch 40: three
    times the forward pass of 15,680 operations an example, at 15e9 a second, and 1 ms for each of 1,000 calls."""
    run = prepare.prepare(parse(compose(["algo=fedavg", "model=logistic", "r=0.25"], COMPOSER)))
    size = prepare.size(run)
    assert size.steps == 15_000 and size.seconds == pytest.approx(3 * 15680 * 40 * 15_000 / 15e9 + 1.0)
    text = prepare.total([prepare.Size(30.0, 2**20, 5), prepare.Size(90.0, 3 * 2**20, 7)], 2)
    assert text == "12 local steps of users, roughly 2 min of one CPU core; about 4 MiB for 2 at once beside torch itself"
    assert prepare.total([prepare.Size(None, 2**20, 5)], 1) == "5 local steps of users; about 1 MiB beside torch itself"


def test_jobs_at_once():
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    cores = len(os.sched_getaffinity(0))
    pairs = (([], 1), (["hydra/launcher=joblib"], cores), (["hydra/launcher=joblib", "hydra.launcher.n_jobs=7"], 7))
    for words, count in (*pairs, (["hydra/launcher=submitit_local"], max(1, cores // 2)), (["hydra/launcher=submitit_slurm"], 1)):
        assert sweep.at_once(COMPOSER, [*words, "tau=3"], 2) == count


# ---------------------------------------------------------------- real processes


def no_workers_left() -> None:
    from joblib.externals.loky import get_reusable_executor

    get_reusable_executor().shutdown(wait=True)


def test_joblib(capfd, started):
    """In processes of their own: one job fails, the results of the others are those of a run alone, byte for byte."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    assert main([*TINY, "outputs=alone"]) == 0
    (alone,) = Path("alone").iterdir()
    del started[:]
    words = ["-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "progress=auto"]
    try:
        assert main([*TINY, *words, "algo.trouble=none,step"]) == 1
    finally:
        no_workers_left()
    out, err = capfd.readouterr()
    assert started == [] and numbers(of("none")) == numbers(alone)
    assert results.read_status(of("step"))["traceback"].endswith("RuntimeError: trouble: step\n")
    assert "perfed: job 1 of 2: algo.trouble=none: DONE: " in out and "perfed: job 2 of 2: algo.trouble=step: troubled-" in err
    assert "backend vmap" not in err and "backend vmap" in (of("none") / "log.txt").read_text()  # no progress of several jobs on a terminal
    assert re.search(r"^algo\.trouble=step +FAILED ", out, re.M) and sorted(p.name[:8] for p in Path("out").iterdir()) == ["troubled"] * 2


@pytest.mark.slow
def test_submitit_local(folder, monkeypatch, capfd):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    monkeypatch.setenv("PYTHONPATH", str(conf_dir().parent))  # its processes start anew; perfed need not be installed here
    assert main([*TINY, "outputs=alone"]) == 0
    (alone,) = Path("alone").iterdir()
    assert main([*TINY, "-m", "hydra/launcher=submitit_local", "algo.trouble=none,step,kill"]) == 1
    out = capfd.readouterr().out
    assert numbers(of("none")) == numbers(alone) and status(of("step")) == "FAILED" and status(of("kill")) == "INTERRUPTED"
    assert "job 1 of 3: algo.trouble=none: DONE\n" in out and re.search(r"trouble=kill:\s+INTERRUPTED,\s+its\s+process\s+left\s+no", out)


@pytest.mark.slow
def test_a_worker_of_joblib_is_killed(capfd):
    """It takes what runs beside it along; that, and what had not begun, is launched again, and only the one to blame is left out."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    words = ["-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "algo.wait=0.1"]
    try:
        assert main([*TINY, *words, "algo.trouble=none,kill", "tau=2,3"]) == 1
    finally:
        no_workers_left()
    out = capfd.readouterr().out
    assert [status(of(trouble, tau)) for trouble in ("none", "kill") for tau in (2, 3)] == ["DONE", "DONE", "INTERRUPTED", "INTERRUPTED"]
    assert len(re.findall(r"INTERRUPTED,\s+its\s+process\s+was\s+killed", out)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local", "basic"])
def test_ctrl_c_and_again(launcher, folder):
    """B33: Ctrl-C goes to all processes of a terminal. Status and code say so; the same command ends the sweep, as if nothing had been."""
    if launcher != "basic":
        pytest.importorskip(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher")
    words = ["-m", "rounds=6", "tau=2,3,4", f"hydra/launcher={launcher}", *(["hydra.launcher.n_jobs=2"] if launcher == "joblib" else [])]
    command = [sys.executable, "-m", "perfed", *TINY, *words]
    env = {**os.environ, "PYTHONPATH": str(conf_dir().parent)}
    process = subprocess.Popen([*command, "algo.wait=1"], env=env, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    end = time.monotonic() + 120
    while not any(status(path.parent) == "RUNNING" for path in Path("out").glob("*/provenance.json")) and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(2)
    os.killpg(process.pid, signal.SIGINT)
    out = process.communicate(timeout=120)[0].decode()
    assert process.returncode == 130, out
    found = [status(path.parent) for path in Path("out").glob("*/status.json")]
    assert set(found) == {"INTERRUPTED"} and "ended by SIGINT" in out and "\nsetting" in out, out
    done = subprocess.run([*command, "algo.wait=1"], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    folders = [path.parent for path in Path("out").glob("*/status.json")]
    assert [status(path) for path in folders] == ["DONE"] * 3
    assert any("resumed after round" in (path / "log.txt").read_text() for path in folders)
    assert main([*TINY, *words[:3], "algo.wait=1", "outputs=unbroken"]) == 0
    for path in folders:
        assert numbers(path) == numbers(Path("unbroken") / path.name)
