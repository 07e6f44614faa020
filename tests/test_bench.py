"""scripts/bench.py works: equal weights are asserted, the tables are printed. No time is judged."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from pretended import pretended_gpu

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench"]


def test_quick_prints_the_tables(bench, monkeypatch, capsys):
    checked = []
    original = bench.same_weights
    monkeypatch.setattr(bench, "same_weights", lambda held, before: checked.append(set(held)) or original(held, before))
    monkeypatch.setattr(bench, "memory", lambda arguments, n: {"imports": 1.0, "rounds": 2.0, "evaluation": 3.0})
    threads = torch.get_num_threads()
    bench.main(["--quick"])
    assert torch.get_num_threads() == threads
    assert checked == [{"engine", "loop", "idiomatic", "fastest"}] * 4
    lines = capsys.readouterr().out.splitlines()
    assert f"torch {torch.__version__}" in lines[0] and "threads: 1" in lines[0]
    tables = [lines[i - 1] for i, line in enumerate(lines) if line.startswith("| --- |")]
    assert tables[0] == "|  | engine | loop | idiomatic | fastest | weights apart |"
    assert len(tables) == 4
    for name in ("FedAvg", "FO", "HF", "exact"):
        assert sum(line.startswith(f"| {name} |") for line in lines) == 3


def test_what_must_be_reached(bench):
    def times(engine, fastest, draws=0.04, evaluate=1.0):
        return bench.Times({"engine": [engine] * 3, "fastest": [fastest] * 3}, [1.0], [1.0], [evaluate], [draws], 0.0, 0.0)

    found = {"fedavg": times(1.0, 1.8), "perfedavg_fo": times(2.0, 3.5)}
    found |= {"perfedavg_hf": times(4.0, 6.8, evaluate=8.1), "perfedavg": times(4.0, 9.0)}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = bench.goals(found, 0.39, 1400.0)
    finally:
        torch.set_num_threads(threads)
    # 3.5 / 2 = 1.75 < 1.8; 8.1 / 4 > 2; 1,400 MiB are 1.468 GB
    assert [row[3] for row in rows] == ["pass", "miss", "pass", "pass", "miss", "pass", "miss", "pass"]
    assert [row[1] for row in rows] == ["1.80", "1.75", "1.70", "1.00", "0.39", "0.04", "2.02", "1.47"]


@pytest.mark.parametrize("word", ["--repeats=0", "--repeats=-1", "--threads=0", "--device=foo", "--device=cuda:99"])
def test_options_that_make_no_sense(bench, capsys, word):
    with pytest.raises(SystemExit) as end:
        bench.main(["--quick", word])
    assert end.value.code == 2 and word.partition("=")[2] in capsys.readouterr().err.splitlines()[-1]


def test_different_weights_are_refused(bench):
    before = [torch.zeros(3), torch.zeros(2)]
    moved = [torch.ones(3), torch.ones(2)]
    near = [t + 5e-5 for t in moved]
    assert bench.same_weights({"engine": near, "fastest": moved}, before) == pytest.approx(5e-5, rel=0.1)
    with pytest.raises(AssertionError, match="engine: weights are 0.0002 off"):
        bench.same_weights({"engine": [moved[0] + 2e-4, moved[1]], "fastest": moved}, before)
    with pytest.raises(AssertionError, match="loop: .* of the way"):
        bench.same_weights({"loop": [t + 5e-5 for t in before], "fastest": [t + 1e-5 for t in before]}, before)
    with pytest.raises(AssertionError, match="engine"):
        bench.same_weights({"engine": [t * float("nan") for t in moved], "fastest": moved}, before)


def test_operations_are_counted_by_hand(bench):
    work = bench.Workload()
    forward = 2 * 40 * (784 * 80 + 80 * 60 + 60 * 10)
    assert work.flops() == 10 * 10 * (2 * forward + 2 * 40 * (80 * 60 + 60 * 10))


def test_memory_is_measured_in_a_process_of_its_own(bench):
    found = bench.memory(["--quick"], 20)
    assert list(found) == ["imports", "rounds", "evaluation"]
    assert 0 < found["imports"] <= found["rounds"] <= found["evaluation"]


def test_all_prints_a_row_for_every_method(bench, monkeypatch, capsys):
    from perfed.algorithms import ALGORITHMS

    kept = {name: ALGORITHMS[name] for name in ("ditto", "fedavg", "l2gd", "mocha", "pooled")}
    monkeypatch.setattr(bench, "ALGORITHMS", kept)
    bench.main(["--quick", "--all", "--repeats", "1"])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    found = {row[0]: row[4:] for row in rows[2:]}
    assert set(found) == set(kept)
    # Step calls a round of the vmap backend (tau = 2; Ditto 2 + 2), with twice the active users (as many), and of the loop.
    assert found["fedavg"] == ["2", "2", "8"] and found["ditto"] == ["4", "4", "16"] and found["pooled"] == ["2", "2", "2"]
    assert found["l2gd"][0] == found["l2gd"][1] and float(found["l2gd"][2]) == 20 * float(found["l2gd"][0])


@pytest.mark.slow
def test_the_contenders_meet_on_another_device(bench, monkeypatch, capsys):
    monkeypatch.setattr(bench, "memory", lambda arguments, n: {"imports": 1.0, "rounds": 2.0, "evaluation": 3.0, "GPU": 4.0})
    with pretended_gpu(monkeypatch):
        bench.main(["--quick", "--device", "cuda:0"])
    out = capsys.readouterr().out
    assert out.startswith("pretended, ") and "| exact |" in out and "Must reach" not in out
