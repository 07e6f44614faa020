"""A sweep of 6 jobs, one of which fails while it runs; Ctrl-C interrupts it twice, and the same command finishes it.

    python scripts/sweep_demo.py [words for the command, such as hydra/launcher=joblib]

Everything happens in a temporary folder, with a user's own algorithm. Less than 2 minutes on 2 CPU cores. Exit code 0 if all came as it
should: codes 130, 130, 1; five jobs DONE and one FAILED.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from perfed import results  # noqa: E402

PLUGIN = '''
from dataclasses import dataclass
from perfed.algorithms.base import register
from perfed.algorithms.fedavg import FedAvg

@register("fragile")
@dataclass(kw_only=True)
class Fragile(FedAvg):
    """FedAvg; with tau=6 and beta=0.1 it raises when it is scored first, in round 50."""

    def candidates(self, server, user):
        if (self.tau, self.beta) == (6, 0.1):
            raise RuntimeError("a fault in a user's own algorithm")
        return super().candidates(server, user)
'''
WORDS = "plugins=[fragile] algo=fragile tau=2,4,6 beta=0.05,0.1 rounds=300 eval_every=50 seeds=2 model=logistic pictures=false progress=off"


def command(folder: Path, more: list[str], interrupt_at: int | None) -> int:
    """Run the sweep; Ctrl-C once a second has passed since its ``interrupt_at``-th run began. Returns the exit code."""
    words = [sys.executable, "-m", "perfed", "-m", *WORDS.split(), *more]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    print("\n$ python " + " ".join(words[1:]), flush=True)
    # A session of its own, so that the signal reaches the workers too, as Ctrl-C on a terminal does.
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(words, cwd=folder, env=env, start_new_session=True, **pipes)

    def show() -> None:
        for line in process.stdout:
            print(line.replace(f"{folder}{os.sep}", ""), end="", flush=True)

    reader = threading.Thread(target=show)
    reader.start()
    if interrupt_at is not None:
        while len(list(folder.glob("outputs/*/status.json"))) < interrupt_at and process.poll() is None:
            time.sleep(0.05)
        time.sleep(1)
        print("^C", flush=True)
        os.killpg(process.pid, signal.SIGINT)
    code = process.wait()
    reader.join()
    print(f"exit code {code}", flush=True)
    return code


def main(more: list[str]) -> int:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        (folder / "fragile.py").write_text(PLUGIN)
        codes = [command(folder, more, at) for at in (2, 4, None)]
        runs = [results.load(path.parent) for path in folder.glob("outputs/*/status.json")]
        statuses = sorted(run.status["status"] for run in runs)
        resumed = sum(len(re.findall("resumed after round", (run.folder / "log.txt").read_text())) for run in runs)
        print(f"\n{statuses.count('DONE')} DONE, {statuses.count('FAILED')} FAILED; {resumed} resumed; {time.monotonic() - started:.0f} s")
        return 0 if codes == [130, 130, 1] and statuses == ["DONE"] * 5 + ["FAILED"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
