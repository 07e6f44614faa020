"""How the jobs of a sweep start, in this process or in others, and how they stop.

    Sweep     what every job of a sweep knows; it travels to the process that runs the job
    launch    hands jobs to Hydra's launcher and collects how each of them ended
    guarded   what a job in a process of its own needs: its GPU, and signals

Hydra's launchers run what they are given; what is given to them, and what becomes of the rest when something goes wrong, is decided here:

- Only jobs that are missing are launched (a process for each finished one would cost a minute of imports, or a place in a queue).
- ``basic`` runs them one after the other in this process. ``joblib`` uses ``hydra.launcher.n_jobs`` processes, ``submitit_local`` one
  process a job and as many at once as the cores allow (left alone, submitit starts all of them together).
- SIGINT or SIGTERM to the launching process of joblib and submitit_local: no other job starts, and each running one ends its round, stores
  its state and returns. A second one stops them within the round; a third does not wait for them. A terminal sends Ctrl-C to all processes;
  the workers do not listen to SIGINT, so each gets one signal, from its own watcher of the file ``Sweep.stop``.
- A worker that is killed (out of memory, say) takes joblib's other workers with it. What had not begun is launched again, then each job
  that was running by itself, so the one to blame is found and the others finish. Under submitit_local the others never notice.
- Jobs of other launchers (Slurm) are not this machine's: a signal leaves them in their queue.
"""

from __future__ import annotations

import fcntl
import functools
import itertools
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from perfed import results
from perfed.errors import require
from perfed.frontdoor import Cell, Composer

POLL_SECONDS = 0.2


class Outcome(NamedTuple):
    """How a job ended: its exit code, and one line for a job that left nothing in its folder."""

    code: int
    reason: str = ""


class Signalled(KeyboardInterrupt):
    """The signal ``number`` ended a sweep whose jobs ran in other processes."""

    def __init__(self, number: int):
        self.number = number
        super().__init__(f"signal {number}")


def _me() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()


@dataclass(frozen=True)
class Sweep:
    """names: how a job is announced, by folder. stop: a file that exists once no other job is to start. gpus: the identifiers of this
    machine's GPUs, for jobs in processes of their own; ``one_each``: such a job sees one of them. launcher: host and pid."""

    names: Mapping[Path, str]
    stop: Path
    gpus: tuple[str, ...] = ()
    one_each: bool = True
    launcher: tuple[str, int] = ("", 0)

    @classmethod
    def of(cls, names: Mapping[Path, str], folder: Path, devices: Sequence[str]) -> Sweep:
        """folder: of the run folders. devices: the key ``device`` of every job."""
        gpus = () if set(devices) <= {"cpu"} else visible_gpus()
        one_each = not any(":" in device for device in devices)  # a typed cuda:1 counts among all of them
        return cls(names, folder / f".stop-{os.getpid()}", gpus, one_each, _me())

    @property
    def inline(self) -> bool:
        """The job runs in the launching process."""
        return self.launcher == _me()

    def halt(self, why: str, signals: int = 0) -> None:
        """From now on no job starts. signals: how many the launching process got; running jobs get as many."""
        self.stop.parent.mkdir(parents=True, exist_ok=True)
        results.write_json(self.stop, {"why": why, "signals": signals})

    @property
    def halted(self) -> dict[str, Any] | None:
        return results.read_json(self.stop)


# ---------------------------------------------------------------- in the process of a job


@contextmanager
def guarded(sweep: Sweep) -> Iterator[None]:
    """Surrounds a job in a process of its own. Raises :class:`Signalled` where SIGTERM comes while no run is there to deal with it."""

    def terminated(number: int, frame: Any) -> None:
        raise Signalled(number)

    def watch() -> None:
        sent = 0
        while not done.wait(POLL_SECONDS):
            if sent < (sweep.halted or {}).get("signals", 0):  # one at a time: two that come together are one
                sent += 1
                os.kill(os.getpid(), signal.SIGTERM)

    if sweep.gpus:
        chosen = [own_gpu(sweep.gpus)] if sweep.one_each else sweep.gpus
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
    done = threading.Event()
    watcher = threading.Thread(target=watch, daemon=True)
    before = signal.signal(signal.SIGTERM, terminated)
    try:
        watcher.start()
        yield
    finally:
        done.set()
        watcher.join()
        signal.signal(signal.SIGTERM, before)


def visible_gpus() -> tuple[str, ...]:
    """Identifiers, for CUDA_VISIBLE_DEVICES, of the GPUs that this process may use."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    listed = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return tuple((listed or [str(i) for i in range(count)])[:count])


def gpus_to_share(devices: Sequence[str]) -> tuple[str, ...]:
    """The GPUs of which jobs in processes of their own see one each: none where a job's key ``device`` is cpu or names a GPU."""
    made = Sweep.of({}, Path(), devices)
    return made.gpus if made.one_each else ()


@functools.cache
def own_gpu(gpus: tuple[str, ...]) -> str:
    """The GPU of this process: one that the fewest processes of this user have, as long as each of them lives.

    By locks that the kernel frees with their process: the number of a job says nothing, since a worker of joblib takes the next job when it
    has time, and it cannot change its GPU once it has used one.
    """
    folder = Path(tempfile.gettempdir()) / f"perfed-gpus-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return least_used(gpus, lambda name: _lock_for_life(folder / name) is not None)


def least_used(gpus: Sequence[str], take: Callable[[str], bool]) -> str:
    """The first of ``gpus`` of which ``take`` gets the lowest place: places ``0-<level>``, ``1-<level>``, ... level by level."""
    return next(gpu for level in itertools.count() for gpu in gpus if take(f"{re.sub('[^A-Za-z0-9-]', '_', gpu)}-{level}"))


def _lock_for_life(path: Path) -> int | None:
    """Take the lock of a file; its descriptor, which is to stay open until this process ends. None where another process has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


# ---------------------------------------------------------------- in the launching process


def launch(
    composer: Composer, argv: Sequence[str], cells: Sequence[Cell], sweep: Sweep, task: Callable[[Any], Outcome], threads: int
) -> Iterator[tuple[Cell, Outcome]]:
    """Run the jobs by Hydra's launcher; yields each with its outcome, as far as that is known.

    argv: the words of the command. threads: CPU threads of a job. Raises KeyboardInterrupt for a signal, once the jobs of this machine
    have stored their states.
    """
    from hydra._internal.callbacks import Callbacks
    from hydra.core.plugins import Plugins
    from hydra.types import HydraContext, RunMode

    config = composer.hydra.compose_config(composer.name, list(argv), RunMode.MULTIRUN, with_log_configuration=False)
    callbacks = Callbacks(config)
    context = HydraContext(config_loader=composer.loader, callbacks=callbacks)
    launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task, config=config)
    kind = type(launcher).__name__

    def run(some: Sequence[Cell]) -> list[tuple[Cell, Outcome]]:
        ends = launcher.launch([_words(cell) for cell in some], initial_job_idx=0)
        return [(cell, end.return_value) for cell, end in zip(some, ends, strict=True)]

    size = config.hydra.sweeper.get("max_batch_size") or len(cells)
    callbacks.on_multirun_start(config=config, config_name=composer.name)
    try:
        for start in range(0, len(cells), size):
            some = cells[start : start + size]
            if kind == "JoblibLauncher":
                with _signals_for(sweep):
                    yield from _until_all_had_their_turn(run, some, sweep)
            elif kind == "LocalLauncher":
                with _signals_for(sweep):
                    yield from _one_by_one(run, some, sweep, max(1, _cores() // threads))
            else:
                yield from run(some)
    except KeyboardInterrupt:
        if kind not in ("BasicLauncher", "JoblibLauncher", "LocalLauncher"):
            print("perfed: jobs in a queue stay there; the same command shows how they ended", file=sys.stderr, flush=True)
        raise
    finally:
        callbacks.on_multirun_end(config=config, config_name=composer.name)


def at_once(composer: Composer, argv: Sequence[str], threads: int) -> int:
    """How many jobs of this machine run together; 1 for launchers that use other machines. Raises UserError."""
    launcher = composer.tree([word for word in argv if word.startswith("hydra")]).hydra.launcher
    kind = str(launcher._target_).rpartition(".")[2]
    cores = _cores()
    if kind == "LocalLauncher":
        return max(1, cores // threads)
    if kind != "JoblibLauncher":
        return 1
    count = launcher.n_jobs
    require(count != 0, "hydra.launcher.n_jobs", count, "a number of processes; -1: one for each core")
    return count if count > 0 else max(1, cores + 1 + count)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _words(cell: Cell) -> list[str]:
    """Of one job. Its folder is the one that was looked at before, whatever its number in the launcher."""
    folder = str(cell.folder).replace("'", "\\'")
    return [*cell.argv, f"hydra.sweep.subdir='{folder}'"]


@contextmanager
def _signals_for(sweep: Sweep) -> Iterator[None]:
    """SIGINT and SIGTERM stop the sweep by its file; raises :class:`Signalled` when the block has ended, or at the third of them.

    SIGINT is blocked in this thread while the block runs, for its child processes to inherit that. A second thread, where it is not,
    receives it; Python runs the handler in this one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []

    def handler(number: int, frame: Any) -> None:
        caught.append(number)
        if len(caught) == 3:
            raise Signalled(number)
        name = signal.Signals(number).name
        sweep.halt(f"ended by {name}", len(caught))
        first = "the running jobs end their rounds and store their states; once more: within the round"
        os.write(2, f"perfed: {name}: {first if len(caught) == 1 else 'a third time does not wait for the jobs'}\n".encode())

    over = threading.Event()
    threading.Thread(target=over.wait, daemon=True).start()
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, old in before.items():
            signal.signal(number, old)
        over.set()
    if caught:
        raise Signalled(caught[0])


def _until_all_had_their_turn(
    run: Callable[[Sequence[Cell]], list[tuple[Cell, Outcome]]], cells: Sequence[Cell], sweep: Sweep
) -> Iterator[tuple[Cell, Outcome]]:
    """joblib: where a worker was killed, all that were running are suspects, and have another turn by themselves in the end."""
    waiting, suspects = list(cells), []
    while waiting or suspects:
        now = waiting or [suspects.pop(0)]
        started, waiting = time.time(), []
        try:
            yield from run(now)
        except BrokenProcessPool:
            _settle(now)
            begun = [cell for cell in now if _claimed_since(cell.folder, started)]
            lost = [cell for cell in begun if not _ended(cell.folder)] or ([] if begun else now)
            tell = f"perfed: {len(lost)} running job{'s' * (len(lost) != 1)} lost: a worker process was killed (out of memory?)"
            if sweep.halted:
                print(tell, file=sys.stderr, flush=True)
                return
            if len(now) == 1:
                print(f"perfed: job {sweep.names[now[0].folder]}: its process was killed (out of memory?)", file=sys.stderr, flush=True)
                yield now[0], Outcome(1, "its process was killed")
                continue
            print(f"{tell}; each is tried again by itself, after the others", file=sys.stderr, flush=True)
            waiting = [cell for cell in now if cell not in begun and cell not in lost]
            suspects += lost


def _settle(cells: Sequence[Cell], patience: float = 10.0) -> None:
    """Wait until killed workers have let go of their folders."""
    end = time.monotonic() + patience
    while time.monotonic() < end and any(results.is_held(cell.folder) for cell in cells):
        time.sleep(0.05)


def _claimed_since(folder: Path, moment: float) -> bool:
    try:
        return (folder / results.LOCK).stat().st_mtime >= moment - 0.01  # clocks of file systems are coarse
    except FileNotFoundError:
        return False


def _ended(folder: Path) -> bool:
    return (results.read_status(folder) or {}).get("status") in ("DONE", "DIVERGED", "FAILED")


def _one_by_one(
    run: Callable[[Sequence[Cell]], list[tuple[Cell, Outcome]]], cells: Sequence[Cell], sweep: Sweep, together: int
) -> Iterator[tuple[Cell, Outcome]]:
    """submitit_local: a thread waits for each job, so that one that is lost is one that is lost. Daemons: the jobs outlive this process."""
    queue = list(enumerate(cells))
    ends: list[Future[Outcome]] = [Future() for _ in cells]

    def work() -> None:
        while queue:
            try:
                i, cell = queue.pop(0)
            except IndexError:
                return
            if (halted := sweep.halted) is not None:
                ends[i].set_result(Outcome(1, halted["why"]))
                continue
            try:
                ends[i].set_result(run([cell])[0][1])
            except Exception as error:  # submitit's own, of a job that left no result
                ends[i].set_result(Outcome(1, f"its process left no result ({type(error).__name__}; see .submitit)"))

    for _ in range(min(together, len(cells))):
        threading.Thread(target=work, daemon=True).start()
    waiting = {future: cell for future, cell in zip(ends, cells, strict=True)}
    while waiting:
        for future in wait(waiting, POLL_SECONDS, "FIRST_COMPLETED").done:  # returns now and then, for Python to run signal handlers
            cell, outcome = waiting.pop(future), future.result()
            status = (results.read_status(cell.folder) or {}).get("status", "not run")
            print(f"perfed: job {sweep.names[cell.folder]}: {', '.join(filter(None, (status, outcome.reason)))}", flush=True)
            yield cell, outcome
