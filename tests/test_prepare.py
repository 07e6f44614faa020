"""Before round 1: what does not go together is refused, memory is estimated, and the user is told what theory says."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from small import advance, algorithm, cloud, federation, ranges, same, split
from torch import nn

from perfed import device, prepare, tree
from perfed.algorithms.base import Facts
from perfed.config import parse
from perfed.errors import UserError
from perfed.evaluate import Protocol, evaluate
from perfed.frontdoor import compose
from perfed.models import ModuleModel

TINY = ["dataset=synthetic", "partition=iid", "n=6", "r=0.5", "batch=8", "model.hidden=[6]", "seeds=2", "rounds=4", "engine.compile=false"]


def ready(*words: str):
    base = [word for word in TINY if "model=logistic" not in words or not word.startswith("model.")]
    return prepare.prepare(parse(compose([*base, *words])))


@pytest.mark.parametrize(
    "words, message",
    [
        (["algo=easgd", "server=momentum"], r"server=momentum: average: algo=easgd has a server step of its own"),
        (["algo=l2gd", "server.lr=0.5"], r"server\.lr=0\.5: 1: algo=l2gd"),
        (["algo=scaffold", "optimizer=adam"], r"optimizer=adam: sgd: algo=scaffold is defined for plain SGD"),
        (["algo=aruba", "optimizer.momentum=0.9"], r"optimizer\.momentum=0\.9: null: algo=aruba"),
        (["algo=qfedavg", "optimizer=adam"], r"optimizer=adam: sgd"),
        (["algo=apfl", "optimizer=adam"], r"optimizer=adam: sgd"),
        (["algo=easgd", "algo.aggregation=samples"], r"algo\.aggregation=samples: one of uniform"),
        (["algo=mocha"], r"model=mlp: must be logistic"),
        (["algo=fedu", "algo.graph=file", "algo.path=nowhere.csv"], r"algo\.path"),
        (["algo=partial", "algo.personal=[layer9]"], r"algo\.personal.*layer9.*layer1"),
    ],
)
def test_what_does_not_go_together_is_refused(words, message):
    with pytest.raises(UserError, match=message):
        ready(*words)


def test_scaffold_with_option_one_takes_any_local_optimizer():
    assert ready("algo=scaffold", "algo.option=I", "optimizer=adam").config.algo.plain_sgd is False


# ---------------------------------------------------------------- memory


def test_the_memory_of_users_state_is_counted():
    """Of n users, d numbers each, for every seed: FedAvg keeps none, Ditto d (and a counter), ADMM 2 d."""
    d = tree.numel(ready().initial[0])
    kept = {name: prepare.state_numbers(ready(f"algo={name}"))[1] for name in ("fedavg", "ditto", "admm")}
    assert kept == {"fedavg": 0, "ditto": 6 * (d + 1), "admm": 6 * (2 * d + 1)}
    here, parked = prepare.needed_bytes(ready("algo=admm"))
    assert parked == 2 * 4 * 6 * (2 * d + 1) and here > 0


def test_a_run_that_cannot_fit_is_refused_before_it_allocates(monkeypatch):
    free = sum(prepare.needed_bytes(ready("algo=ditto")))
    monkeypatch.setattr("perfed.prepare.available_memory", lambda place: free)
    ready("algo=ditto")
    monkeypatch.setattr("perfed.prepare.available_memory", lambda place: free - 1)
    monkeypatch.setattr("perfed.prepare.federation", lambda prepared: pytest.fail("allocated"))
    with pytest.raises(UserError, match=r"n=6: too many for the memory of cpu: this run needs about .* GiB"):
        ready("algo=ditto")
    monkeypatch.setattr("perfed.prepare.available_memory", lambda place: None)  # a system that does not say
    ready("algo=ditto")


def test_free_memory_is_read_from_the_system():
    free = device.available_memory(torch.device("cpu"))
    assert free is None or 2**20 < free < 2**50


def test_users_state_goes_to_the_host_where_it_would_fill_a_gpu(monkeypatch):
    engine = parse(compose(TINY)).engine
    monkeypatch.setattr("perfed.device._device_bytes", lambda place: 1000)
    common = dict(vmap_pays_on_cpu=True, model="mlp", flops=1.0, lane_bytes=10)
    gpu, host = torch.device("cuda", 0), torch.device("cpu")
    decide = device.decide
    assert decide(engine, gpu, user_bytes=250, **common).state_device == gpu
    made = decide(engine, gpu, user_bytes=251, **common)
    assert made.state_device == host and any("host memory" in note for note in made.notes)
    engine.state_device = "device"
    assert decide(engine, gpu, user_bytes=10**9, **common).state_device == gpu
    engine.state_device = "cpu"
    assert decide(engine, gpu, user_bytes=0, **common).state_device == host
    with pytest.raises(UserError, match=r"engine\.state_device=gpu: must be one of auto, cpu, device"):
        parse(compose(["engine.state_device=gpu"]))


def small(name: str, **more):
    x, y = cloud(60)
    return federation(algorithm(name, batch=8), x, y, [split(ranges([12, 7, 20, 3]), ranges([4] * 4, 42))], active=2, **more)


def test_parked_state_gives_the_same_numbers():
    """A second device is imitated: the engine must move rows to and fro by itself, wherever the state lies."""
    plain, parked = small("ditto"), small("ditto", state_device=torch.device("cpu"))
    advance(plain, 3)
    advance(parked, 3)
    assert same(plain.state, parked.state)
    assert all(leaf.device.type == "cpu" for leaf in tree.leaves(parked.state.users))
    meta = tree.map(lambda t: t.to("meta"), parked.state.users)
    parked.state = parked.state._replace(users=meta)
    parked.state_device = torch.device("meta")
    with pytest.raises((NotImplementedError, RuntimeError)):  # rows are fetched from where the state lies, not from a copy
        parked.users_at(torch.tensor([0]), torch.tensor([1])) and parked.round()


def test_only_the_rows_of_active_users_are_touched():
    fed = small("ditto")
    where = {name: leaf.data_ptr() for name, leaf in fed.state.users["v"].items()}
    before = tree.map(torch.clone, fed.state.users)
    fed.round()
    assert {name: leaf.data_ptr() for name, leaf in fed.state.users["v"].items()} == where  # no copy of all users
    active = fed.cohorts(0)[0]
    for old, new in zip(tree.leaves(before), tree.leaves(fed.state.users), strict=True):
        changed = {u for u in range(4) if not torch.equal(old[0, u], new[0, u])}
        assert changed == set(active.tolist())


# ---------------------------------------------------------------- what the user is told


def test_coupling_is_printed_and_warned_about():
    # lambda beta tau rounds r = 1 * .1 * 10 * 100 * .2 = 20; with lambda = 1e-4 it is .002.
    facts = Facts(n=20, active=4, rounds=100, smoothness=1.0)
    (line,) = algorithm("ditto", lam=1.0, beta=0.1, tau=10).notes(facts)
    assert line == "coupling lambda*beta*tau*rounds*r = 20 (lambda=1)"
    (line,) = algorithm("ditto", lam=1e-4, beta=0.1, tau=10).notes(facts)
    assert line.startswith("warning: coupling") and "0.002" in line and "local training" in line
    assert algorithm("fedavg").notes(facts) == []


@pytest.mark.parametrize("name", ["pfedme", "ditto", "easgd", "l2gd", "fedu", "mtl"])
def test_every_coupled_method_says_how_much(name):
    facts = Facts(n=20, active=4, rounds=100, smoothness=1.0)
    assert any("coupling lambda*beta*tau*rounds*r" in line for line in algorithm(name).notes(facts))


@pytest.mark.parametrize("classes", [2, 10])
def test_smoothness_is_the_largest_eigenvalue(classes):
    """One linear layer, C classes, softmax at W = 0: the Hessian of the mean loss is kron(mean x x', (I - 11'/C) / C), whose
    largest eigenvalue is lambda_max(mean x x') / C; the bias is a feature 1."""
    made = ready("algo=fedprox", "model=logistic", f"dataset.classes={classes}")
    index = made.partitions[0].train.of(0)[:256]
    data = made.dataset
    x = np.concatenate([(data.x[index].reshape(len(index), -1) - data.offset) * data.scale, np.ones((len(index), 1))], axis=1)
    at_zero = tree.map(torch.zeros_like, made.initial[0])
    found = prepare.smoothness(prepare.replace(made, initial=[at_zero]))
    assert found == pytest.approx(np.linalg.eigvalsh(x.T @ x / len(x))[-1] / classes, rel=0.02)


def test_notes_stand_in_the_plan_and_beside_the_decisions():
    made = ready("algo=ditto", "algo.lam=1e-5")
    assert any("below 0.05" in note for note in made.decision.notes)
    assert "below 0.05" in prepare.plan(made.config)


def test_the_plan_draws_its_counts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = ready("algo=fedavg")
    assert "no picture" in prepare.plan(prepare.replace(made.config, pictures=False)) and not list(tmp_path.rglob("*.png"))
    (shown,) = (line for line in prepare.plan(made.config).splitlines() if "picture: " in line)
    (picture,) = tmp_path.rglob("*.png")
    assert shown.split("picture: ")[1] == str(picture) and picture.with_suffix(".pdf").exists()


# ---------------------------------------------------------------- parts of a user's data


def test_a_learned_step_is_used_unless_one_is_given():
    assert ready("algo=metasgd").protocol.lr is None
    assert ready("algo=metasgd", "adapt.lr=0.3").protocol.lr == 0.3
    fed = small("metasgd")
    common = dict(label="clean", source="train", support=None, batch=None, repeats=1, steps=(0, 1))
    own, same_size = (evaluate(fed, Protocol(lr=lr, **common)) for lr in (None, 0.05))  # a starts at alpha = .05
    np.testing.assert_allclose(own.loss, same_size.loss, rtol=1e-12)


# ---------------------------------------------------------------- what shows that training has run away


@pytest.mark.parametrize("name, fields", [("aruba", {"zeta": 2000.0}), ("mtl", {"relation": "learned", "floor": 1e-7, "lam": 1e-9})])
def test_large_numbers_beside_the_model_are_no_divergence(name, fields):
    x, y = cloud(60)
    parts = [split(ranges([12, 7, 20, 3]), ranges([4] * 4, 42))]
    fed = advance(federation(algorithm(name, batch=8, **fields), x, y, parts, active=1), 1)  # three users are alike still
    big = max(float(leaf.abs().max()) for leaf in tree.leaves(fed.state.server) if leaf.is_floating_point())
    assert big > 1e6 and int(fed.diverged[0]) == -1


def test_a_matrix_of_users_is_counted_before_it_is_made(monkeypatch):
    monkeypatch.setattr("perfed.prepare.available_memory", lambda place: 3 * 8 * 6**2 - 1)
    with pytest.raises(UserError, match="n=6: too many for the memory of the host"):
        ready("algo=mtl", "algo.relation=learned")


def test_the_knobs_that_do_not_count_are_named():
    made = ready("algo=pfedme")
    assert any(note == "algo=pfedme takes algo.beta=0.005; the knob beta=0.1 does not count" for note in made.decision.notes)
    assert not any("does not count" in note for note in ready("algo=fedavg").decision.notes)


def test_a_batch_larger_than_the_data_is_said():
    (line,) = [note for note in ready("n=4", "partition=iid", "partition.per_user=5", "batch=9").decision.notes if "batch" in note]
    assert line == "8 of 8 users over all seeds have fewer train examples than a batch of 9: their steps read all of them"
    assert not any("batch" in note for note in ready("n=4", "partition=iid", "partition.per_user=9", "batch=9").decision.notes)


def test_test_examples_of_classes_that_nobody_trains_on_are_said(tmp_path):
    x, y, split = np.zeros((12, 2)), np.array([0, 1, 0, 1, 0, 1, 0, 1, 2, 2, 2, 1]), np.array([0] * 6 + [1] * 6)
    np.savez(tmp_path / "own.npz", x=x, y=y, split=split)
    notes = ready("dataset=npz", f"dataset.path={tmp_path}/own.npz", "partition=iid", "n=2", "model=logistic").decision.notes
    assert "warning: 3 of 6 test examples are not scored: nobody trains on their classes (2)" in notes
    assert not any("not scored" in note for note in ready().decision.notes)


def test_an_optimizer_of_a_server_that_is_not_there():
    with pytest.raises(UserError, match="^server=adam: average: algo=local has no server"):
        ready("algo=local", "server=adam")
    with pytest.raises(UserError, match=r"^server.lr=0.5: 1: algo=local has no server"):
        ready("algo=local", "server.lr=0.5")


@dataclass(kw_only=True)
class Kinked(ModuleModel):
    def module(self, shape, classes):
        return nn.Sequential(nn.Linear(shape[0], 8), nn.LeakyReLU(), nn.Linear(8, classes), nn.ReLU())


def test_kinks_of_the_model_and_steep_inner_steps_are_said():
    config = parse(compose([*TINY[:4], "alpha=0.001"]))
    (line,) = prepare.prepare(replace(config, model=Kinked(name="kinked"))).remarks
    assert line.startswith("warning: the model calls leaky_relu, relu: ")
    assert ready("alpha=0.001").remarks == ()
    (line,) = ready("alpha=100").remarks
    assert line.startswith("warning: alpha*L = ") and "the paper assumes alpha <= 1/L" in line
