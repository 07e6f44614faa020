"""Everything lies where it should, shown on a pretended GPU (see pretended.py), whose numbers must be those of the host."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from pretended import Pretended, pretended_gpu
from small import advance, algorithm, cloud, federation, ranges, split

from perfed import checkpoint, rescore, train, tree
from perfed.algorithms import ALGORITHMS
from perfed.config import parse
from perfed.evaluate import Protocol, evaluate
from perfed.frontdoor import compose

FAST = {"fedavg", "perfedavg_hf", "scaffold", "mtl"}
ENGINES = {"vmap": {}, "loop": {"backend": "loop"}, "parked": {"chunk": 3, "state_device": torch.device("cpu")}}
SIZES = [7, 4, 9, 5]


def test_what_a_gpu_would_refuse_is_refused(monkeypatch):
    with pretended_gpu(monkeypatch):
        here, there = torch.arange(3.0), torch.arange(3.0, device="cuda:0")
        assert isinstance(there, Pretended) and there.device.type == "cuda" and (there + 1).cpu().tolist() == [1, 2, 3]
        assert isinstance(here.to(there), Pretended) and not isinstance(there.to("cpu"), Pretended) and there.sum().item() == 3
        assert (there * torch.tensor(2.0)).tolist() == [0, 2, 4]  # a number may lie on the host
        assert there[torch.tensor([2])].tolist() == [2]  # and so may indices, but not the other way round
        assert torch.func.vmap(lambda v: v + torch.ones(1, device=v.device))(there).tolist() == [[1], [2], [3]]
        assert torch.func.vmap(torch.func.grad(lambda v: v @ there))(there.expand(2, 3)).tolist() == [[0, 1, 2]] * 2
        for wrong in (lambda: here + there, lambda: there @ here, lambda: torch.stack([there[0], here[0]]), lambda: here[there.long()]):
            with pytest.raises(RuntimeError, match="devices meet|on the host"):
                wrong()
        with pytest.raises(TypeError, match="use Tensor.cpu"):
            np.asarray(there)
    assert not isinstance(torch.ones(1), Pretended)


def simulated(name: str, device: str, **engine):
    """Everything that a simulation gives: its state, scores, diagnostics, what was counted, and what a checkpoint holds."""
    x, y = cloud(2 * sum(SIZES))
    part = split(ranges(SIZES), ranges(SIZES, sum(SIZES)), seen=[True, True, True, False])
    fed = federation(algorithm(name, tau=2, batch=4), x, y, [part, part], seeds=(0, 1), active=2, device=device, **engine)
    advance(fed, 2)
    snapshot = fed.snapshot()
    advance(fed, 1)
    fed.go_back(snapshot)
    scores = evaluate(fed, Protocol("paper", "test", None, 3, 2, (0, 2), 0.1))
    stored = checkpoint.content(fed, "0" * 64, [])
    state = [leaf.cpu() for leaf in tree.leaves(fed.state)]
    return state, [scores.correct, scores.loss], fed.diagnose(), fed.costs, [t for t in tree.leaves(stored) if isinstance(t, Pretended)]


@pytest.mark.parametrize("name", [m if m in FAST else pytest.param(m, marks=pytest.mark.slow) for m in sorted(ALGORITHMS)])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_method_gives_the_same_on_another_device(name, engine, monkeypatch):
    wanted = simulated(name, "cpu", **ENGINES[engine])
    with pretended_gpu(monkeypatch):
        found = simulated(name, "cuda:0", **ENGINES[engine])
    assert all(torch.equal(a, b) for a, b in zip(found[0], wanted[0], strict=True))
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(found[1], wanted[1], strict=True))
    assert found[2:4] == wanted[2:4] and found[4] == []  # a checkpoint holds nothing of the device


def test_a_run_on_another_device(monkeypatch, tmp_path):
    """Training, its files, a model, and scoring again."""
    tiny = "dataset=synthetic dataset.train=200 dataset.test=60 partition=iid model.hidden=[5] n=4 rounds=3 seeds=2 tau=2 batch=8".split()
    tiny += ["algo=scaffold", "pictures=false", "progress=off", "checkpoint_every=0.0001", "holdout_users=0.25", "split.val=0.2"]
    runs = {}
    for device in ("cpu", "cuda"):
        config = parse(compose([*tiny, f"device={device}", f"outputs={tmp_path / device}"]))
        with pretended_gpu(monkeypatch) if device == "cuda" else nullcontext():
            run = train.run(config)
            scores = run.model(0, 1)(np.zeros((2, 32), np.float32)).cpu()
            again = rescore.rescore(run.folder, ["protocol=paper"])
        runs[device] = [(folder / "users.csv").read_bytes() for folder in (run.folder, again.folder)], scores
        assert f'"device": "{device}' in (run.folder / "provenance.json").read_text()
    assert runs["cpu"][0] == runs["cuda"][0] and torch.equal(runs["cpu"][1], runs["cuda"][1])
