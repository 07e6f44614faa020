"""The wheel holds everything that a run needs, and works away from the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_wheel_runs_from_another_directory(tmp_path):
    def pip(*words: str) -> None:
        subprocess.run([sys.executable, "-m", "pip", *words], check=True, capture_output=True, cwd=tmp_path)

    pip("wheel", "--no-deps", "--no-build-isolation", "-w", "wheels", str(ROOT))
    (wheel,) = (tmp_path / "wheels").glob("perfed-*.whl")
    pip("install", "--no-deps", "--target", "site", str(wheel))
    assert (tmp_path / "site" / "perfed" / "conf" / "config.yaml").is_file()
    assert "Permission is hereby granted" in (tmp_path / "site" / "perfed" / "LICENSE").read_text()
    words = ["dataset=synthetic", "partition=iid", "rounds=1", "seeds=1", "algo=fedavg", "progress=off"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-P", "-m", "perfed", *words], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "global, after 1 step" in done.stdout
    assert len(list((tmp_path / "outputs").glob("fedavg-synthetic-*/result.json"))) == 1
