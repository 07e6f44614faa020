"""Trials as lanes of one job: every row is what a run of its own would be, and what cannot be a lane says so.

Rows are (trial, seed). The two trials of a comparison differ in all float fields of a method at once; each is compared with a federation
that holds its values as plain numbers.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from small import advance, algorithm, close, cloud, federation, ranges, split
from test_contract import VARIANTS

from perfed import lanes, train, tree
from perfed.algorithms import ALGORITHMS
from perfed.binding import Unbound, Varies
from perfed.config import parse
from perfed.device import compiler_found
from perfed.evaluate import Protocol, evaluate
from perfed.frontdoor import compose
from perfed.optimizers import LOCAL, SERVER
from perfed.studies import tuning

NOT_LANES = {
    ("fedmeta", "support"): "cuts the batch in two: it shapes the draws",
    ("metasgd", "support"): "cuts the batch in two: it shapes the draws",
    ("fedprox", "stragglers"): "how many steps each user takes is settled for all lanes at once",
    ("l2gd", "p"): "how many steps a round has is settled for all lanes at once",
}
"""Float fields whose trials are run one by one, and why. Everything else is a lane."""
NULL = {"p": 0.3, "personal_lr": 0.05, "refine_c": 0.5, "beta_a": 0.02, "support": 0.5}
"""A number for the fields that are null by default."""
SIZES = [12, 8, 1, 9]
CLEAN = Protocol("clean", "train", None, 10, 1, (0, 1), 0.05)


def build(algo, seeds=(0, 1), copies=1, **engine):
    """``copies`` trials of the same seeds; each seed has a partition of its own."""
    total = sum(SIZES)
    x, y = cloud(total + 3 * len(SIZES))
    parts = []
    for seed in seeds:
        dealt = np.random.default_rng(seed).permutation(len(x))
        parts.append(split([dealt[i] for i in ranges(SIZES)], [dealt[i] for i in ranges([3] * len(SIZES), total)]))
    return federation(algo, x, y, parts * copies, seeds=seeds * copies, active=2, **engine)


def floats(name: str) -> list[str]:
    """The fields of a method that hold a number, by their type."""
    return [f.name for f in dataclasses.fields(ALGORITHMS[name]) if "float" in str(f.type)]


def pair(name: str, fields: dict, keys: list[str]):
    """Two methods that differ in ``keys``: as they are by default, and a fifth less."""
    base = algorithm(name, **fields)
    values = {key: NULL.get(key) if getattr(base, key) is None else float(getattr(base, key) or NULL.get(key, 0.5)) for key in keys}
    two = [values, {key: 0.8 * value for key, value in values.items()}]
    return [algorithm(name, **{**fields, **v}) for v in two], {f"algo.{key}": [v[key] for v in two for _ in range(2)] for key in keys}


def compare(algos, varying, rounds=2, **engine) -> torch.Tensor:
    """Each trial of one job against a federation of its own; returns how far the trials are apart, the largest difference of a loss."""
    fed = advance(build(algos[0], copies=2, varying=varying, **engine), rounds)
    scores = evaluate(fed, CLEAN)
    for t, algo in enumerate(algos):
        rows = slice(2 * t, 2 * t + 2)
        alone = advance(build(algo, **engine), rounds)
        close(tree.at(fed.state, rows), alone.state, rtol=1e-10)
        mine = evaluate(alone, CLEAN)
        np.testing.assert_allclose(scores.loss[rows], mine.loss, rtol=1e-10)
        np.testing.assert_array_equal(scores.correct[rows], mine.correct)
        assert torch.equal(fed.diverged[rows], alone.diverged)
    return float(np.abs(scores.loss[:2] - scores.loss[2:]).max())


def allowed(name: str) -> list[str]:
    return [key for key in floats(name) if (name, key) not in NOT_LANES]


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_a_lane_is_a_run_of_its_own(name):
    keys = allowed(name)
    assert compare(*pair(name, {}, keys)) > 1e-4 or name == "mocha"  # whose dual steps are as large for any lam until they meet a bound


@pytest.mark.parametrize("name, key", list(NOT_LANES))
def test_what_cannot_be_a_lane_raises(name, key):
    algos, varying = pair(name, {"tau": 3} if name == "fedprox" else {}, [key])
    with pytest.raises(Unbound, match=f"algo.{key} differs between lanes"):
        compare(algos, varying)


def test_every_float_of_the_published_spaces_is_a_lane():
    for name in tuning.methods():
        for key, values in tuning.space(name).grid.items():
            if any(isinstance(value, float) for value in values):
                assert (name, key.removeprefix("algo.")) not in NOT_LANES and key.removeprefix("algo.") in [*floats(name), "alpha"]


FEW = {"perfedavg_hf": ("beta", "alpha", "delta"), "mtl": ("beta", "lam")}


@pytest.mark.parametrize("engine", [{"backend": "loop"}, {"chunk": 3}, {"dtype": torch.float32}], ids=str)
@pytest.mark.parametrize("name", list(FEW))
def test_on_the_loop_in_chunks_and_in_single_precision(name, engine):
    """Single precision rounds once more where numbers are multiplied before they meet a tensor; here nothing does so but for 1e-5."""
    algos, varying = pair(name, {}, list(FEW[name]))
    if "dtype" not in engine:
        assert compare(algos, varying, **engine) > 1e-4
        return
    fed = advance(build(algos[0], copies=2, varying=varying, **engine), 2)
    for t, algo in enumerate(algos):
        close(tree.at(fed.state, slice(2 * t, 2 * t + 2)), advance(build(algo, **engine), 2).state, rtol=1e-5)


@pytest.mark.parametrize(
    "part, name, values",
    [
        ("optimizer", "sgd", {"momentum": (0.9, 0.5), "weight_decay": (0.1, 0.2)}),
        ("optimizer", "adam", {"beta1": (0.9, 0.8), "beta2": (0.99, 0.9), "eps": (1e-3, 1e-2)}),
        ("server", "average", {"lr": (1.0, 0.5)}),
        ("server", "momentum", {"lr": (1.0, 0.5), "momentum": (0.9, 0.3)}),
        ("server", "adam", {"lr": (0.1, 0.2), "beta1": (0.9, 0.8), "beta2": (0.99, 0.9), "eps": (1e-3, 1e-2)}),
    ],
)
def test_optimizers_have_lanes_too(part, name, values):
    registry, where = (LOCAL, "local") if part == "optimizer" else (SERVER, "server")
    two = [registry[name](name=name, **{k: v[t] for k, v in values.items()}) for t in range(2)]
    varying = {f"{part}.{key}": [v for v in pair for _ in range(2)] for key, pair in values.items()}
    fed = advance(build(algorithm("fedavg"), copies=2, varying=varying, **{where: two[0]}), 2)
    for t in range(2):
        alone = advance(build(algorithm("fedavg"), **{where: two[t]}), 2)
        close(tree.at(fed.state, slice(2 * t, 2 * t + 2)), alone.state, rtol=1e-10)


def test_the_step_of_adaptation_is_the_lanes_own():
    """FedAvg's update differs in adapt.lr alone: the same models, other scores after a step; before it, equal bits."""
    algo, rates = algorithm("fedavg"), (0.05, 0.4)
    fed = advance(build(algo, copies=2, varying={"adapt.lr": [r for r in rates for _ in range(2)]}), 1)
    scores = evaluate(fed, CLEAN)
    for t, lr in enumerate(rates):
        mine = evaluate(advance(build(algo), 1), dataclasses.replace(CLEAN, lr=lr))
        np.testing.assert_allclose(scores.loss[2 * t : 2 * t + 2], mine.loss, rtol=1e-12)
    before, after = scores.loss[..., 0], scores.loss[..., 1]
    assert np.array_equal(before[:2], before[2:]) and (after[:2] != after[2:]).all()


def test_a_trial_that_diverges_disturbs_no_other():
    algos = [algorithm("fedavg", beta=beta) for beta in (1e200, 0.1)]
    fed = advance(build(algos[0], copies=2, varying={"algo.beta": [1e200, 1e200, 0.1, 0.1]}), 3)
    alone = advance(build(algos[1]), 3)
    assert (fed.diverged[:2] == 1).all() and fed.diverged[2:].tolist() == [-1, -1]
    close(tree.at(fed.state, slice(2, 4)), alone.state, rtol=1e-10)


def test_whoever_uses_a_value_that_varies_is_stopped():
    v, t = Varies("algo.x"), torch.ones(2)
    uses = [
        lambda: v + 1, lambda: 1 - v, lambda: v * t, lambda: t * v, lambda: t / v, lambda: t**v, lambda: v > 0, lambda: v == 0.1,
        lambda: float(v), lambda: int(v), lambda: bool(v), lambda: -v, lambda: f"{v:g}", lambda: torch.clamp(t, max=v),
        lambda: np.sqrt(v), lambda: np.asarray(v), lambda: {v: 1}, lambda: v.real, lambda: torch.full((2,), v), lambda: torch.lerp(t, t, v),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(TypeError):  # Unbound is one; so is what torch says of a value that is no number
            use()
    assert v is not None


SMALL = ["dataset=synthetic", "partition=iid", "n=4", "r=0.5", "batch=8", "model.hidden=[4]", "seeds=2", "rounds=2", "split.val=0.25",
         "engine.dtype=float64", "pictures=false", "progress=off"]  # fmt: skip


@pytest.fixture(scope="module")
def config():
    return parse(compose([*SMALL, "algo=fedavg"]))


def test_who_shares_a_job(config):
    """FedRep's number of steps is no float; null and a number are not alike; alpha and beta act through the method and the protocol."""

    def method(name, **fields):
        return dataclasses.replace(config, algo=ALGORITHMS[name](name=name, **fields))

    assert lanes.groups([method("fedrep", beta=b, personal_steps=s) for b in (0.1, 0.2) for s in (2, 5)]) == [[0, 2], [1, 3]]
    mixed = [method("ditto"), method("ditto", personal_lr=0.1), method("ditto", personal_lr=0.2)]
    assert lanes.groups(mixed) == [[0], [1, 2]]
    assert lanes.varying(mixed[1:]) == {"algo.personal_lr": [0.1, 0.2], "adapt.lr": [0.1, 0.2]}
    with pytest.raises(lanes.Apart):
        lanes.varying(mixed[:2])
    knobs = [method("fedavg", beta=0.1), dataclasses.replace(method("fedavg", beta=0.3), alpha=0.2, beta=0.3)]
    assert lanes.varying(knobs) == {"algo.beta": [0.1, 0.3], "adapt.lr": [0.01, 0.2]}  # the step of FedAvg's adaptation is alpha
    others = [{"r": 1.0}, {"tau": 3}, {"seed": 1}, {"rounds": 3}, {"split": dataclasses.replace(config.split, val=0.5)},
              {"algo": ALGORITHMS["fedprox"](name="fedprox")}, {"adapt": dataclasses.replace(config.adapt, steps=2)}]  # fmt: skip
    for other in others:
        assert lanes.groups([config, dataclasses.replace(config, **other)]) == [[0], [1]], other


def test_a_record_is_what_a_run_finds(config, tmp_path):
    """Validation accuracy by seed, and who diverged when; afterwards neither is trained again."""
    methods = [algorithm("perfedavg_fo", beta=beta, alpha=alpha, batch=8) for beta, alpha in ((0.3, 0.1), (1e200, 0.2))]
    trials = [dataclasses.replace(config, outputs=str(tmp_path), algo=method) for method in methods]
    records = lanes.train(trials)
    assert records == [lanes.stored(trial) for trial in trials] and not list(tmp_path.glob("*/status.json"))
    runs = [lanes.of_run(train.run(trial, tmp_path / f"alone{i}").stored) for i, trial in enumerate(trials)]
    for record, run in zip(records, runs, strict=True):
        assert record.diverged == run.diverged and record.validation == pytest.approx(run.validation, abs=1e-12)
    assert set(records[1].diverged) == {0, 1} and records[1].validation == {} and len(records[0].validation) == 2


# ---------------------------------------------------------------- slow


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["vmap", "loop"])
@pytest.mark.parametrize("case", list(VARIANTS))
def test_a_lane_is_a_run_of_its_own_in_every_variant(case, backend):
    name, fields = VARIANTS[case]
    compare(*pair(name, {"tau": 2, **fields}, [key for key in allowed(name) if key not in fields]), backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedprox", "perfedavg_hf", "perfedavg", "scaffold"])
def test_compiled_lanes(name):
    if not compiler_found(torch.device("cpu")):
        pytest.skip("no C++ compiler")
    algos, varying = pair(name, {}, allowed(name))
    fed = build(algos[0], copies=2, varying=varying, compiled=True)
    advance(fed, 2)
    assert fed.compiled, fed.warning
    for t, algo in enumerate(algos):
        close(tree.at(fed.state, slice(2 * t, 2 * t + 2)), advance(build(algo), 2).state, rtol=1e-9)
