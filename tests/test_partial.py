"""Partial personalization: one round by hand, which parameters are whose, cold starts, refusals. The rest is in conformance/partial.py."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from problems import Quadratic, federation, mlp, run
from small import advance, algorithm, cloud, ranges, same, split, structure
from small import federation as small_federation

from perfed import tree
from perfed.algorithms import ALGORITHMS
from perfed.config import conf_dir, parse
from perfed.errors import UserError
from perfed.evaluate import Protocol, evaluate
from perfed.models import MODELS
from perfed.optimizers import Adam, ServerAdam

every_backend = pytest.mark.parametrize("backend", ["vmap", "loop"])
PRESETS = ["partial", "fedper", "fedrep", "fedbabu", "lgfedavg"]


@dataclass(kw_only=True)
class Product(Quadratic):
    """(u + v - c)^2 / 2 with u = body.w, v = head.w; the example is c. Both gradients are u + v - c."""

    def apply(self, params, x):
        return (params["body.w"] + params["head.w"] - x[:, 0]).square().unsqueeze(-1) / 2


def pair(name, backend="vmap", **fields):
    """Two users, c = 2 and c = 6; u = v = 0, beta = .5."""
    start = {"body.w": torch.zeros(1, dtype=torch.float64), "head.w": torch.zeros(1, dtype=torch.float64)}
    algo = algorithm(name, **{"beta": 0.5, "tau": 1, "batch": 1, **fields})
    return federation(algo, Product(), [np.array([[2.0]]), np.array([[6.0]])], start, backend=backend)


def models(fed, user=0, s=0):
    return fed.algo.candidates(tree.at(fed.shown(), s), fed.users_at(s, user))


def numbers(fed):
    """(u, v) as judged, user by user."""
    found = [next(iter(models(fed, i).values())) for i in range(2)]
    return [(float(m["body.w"]), float(m["head.w"])) for m in found]


@every_backend
def test_rounds_by_hand(backend):
    # joint, tau=1: the gradients at 0 are -2 and -6; u_i = v_i = 1 and 3; u = 2.
    fed = run(pair("fedper", backend), 1)
    assert numbers(fed) == [(2.0, 1.0), (2.0, 3.0)]
    # Then the gradients are 2 + 1 - 2 = 1 and 2 + 3 - 6 = -1: v = .5 and 3.5; u_i = 1.5 and 2.5, u = 2.
    assert numbers(run(fed, 1)) == [(2.0, 0.5), (2.0, 3.5)]
    # alternate, two head steps: v goes half of the way to c - u twice: 1.5 and 4.5; then the body: .25 and .75; u = .5.
    fed = run(pair("fedrep", backend, personal_steps=2), 1)
    assert numbers(fed) == [(0.5, 1.5), (0.5, 4.5)]
    assert (fed.costs[0].steps, fed.costs[0].grads, fed.costs[0].floats_down, fed.costs[0].floats_up) == (6, 6, 2, 2)
    # frozen head: u_i = 1 and 3.
    assert numbers(run(pair("fedbabu", backend), 1)) == [(2.0, 0.0), (2.0, 0.0)]
    # personal body: u_i = 1 and 3 stay, v = 2.
    assert numbers(run(pair("lgfedavg", backend), 1)) == [(1.0, 2.0), (3.0, 2.0)]


@every_backend
def test_the_shared_part_is_averaged_by_samples(backend):
    start = {"body.w": torch.zeros(1, dtype=torch.float64), "head.w": torch.zeros(1, dtype=torch.float64)}
    algo = algorithm("fedper", beta=0.5, tau=1, batch=3, aggregation="samples")
    fed = run(federation(algo, Product(), [np.array([[2.0]]), np.full((3, 1), 6.0)], start, backend=backend), 1)
    assert numbers(fed) == [(2.5, 1.0), (2.5, 3.0)]  # (1 1 + 3 3) / 4; the heads as before


NET = list(mlp()[1])


@pytest.mark.parametrize(
    "fields, mine, still",
    [
        ({"personal": "last"}, NET[2:], []),
        ({"personal": "first"}, NET[:2], []),
        ({"personal": "all"}, NET, []),
        ({"personal": "none"}, [], []),
        ({"personal": "layer1"}, NET[:2], []),
        ({"personal": ["layer1.bias", "layer2"]}, NET[1:], []),
        ({"personal": "all", "frozen": "last"}, NET[:2], NET[2:]),
        ({"personal": "last", "frozen": ["layer2.bias", "layer1.weight"]}, ["layer2.weight"], ["layer1.weight", "layer2.bias"]),
    ],
)
def test_whose_parameters(fields, mine, still):
    model, start = mlp()
    xs = [np.ones((2, 3)), np.zeros((2, 3))]
    fed = federation(algorithm("partial", **fields), model, xs, start)
    shared = [name for name in NET if name not in mine and name not in still]
    assert (list(fed.state.users), list(fed.state.server["frozen"]), list(fed.state.server["w"])) == (mine, still, shared)
    (name,) = models(fed)
    assert name == ("personal" if mine else "global")
    before = structure(fed.state)
    run(fed, 2)
    assert structure(fed.state) == before
    assert list(models(fed)[name]) == NET
    for name in still:
        assert torch.equal(fed.state.server["frozen"][name][0], start[name])


def test_the_layers_of_a_convolutional_network():
    x, y = np.random.default_rng(0).normal(size=(12, 1, 8, 8)), np.arange(12) % 3
    part = split(ranges([4, 4]), ranges([2, 2], 8))
    for personal, count in (("first", 2), ("last", 2), ("all", 10)):
        model = MODELS["cnn"](name="cnn", channels=[4, 4], groups=2)
        fed = small_federation(algorithm("partial", personal=personal, tau=1), x, y, [part], model=model)
        assert len(fed.state.users) == count
        advance(fed, 1)
        assert list(models(fed)["personal"]) == list(fed.initial[0])


def test_a_new_user_has_the_initial_personal_part_and_is_judged():
    x, y = cloud(40)
    part = split(ranges([8, 8, 8]), ranges([4, 4, 4], 24), seen=[True, True, False])
    fed = small_federation(algorithm("fedper"), x, y, [part], active=1)
    advance(fed, 1)
    drawn = int(fed.times_sampled[0].argmax())
    start = fed.initial[0]
    for i in range(3):
        w = models(fed, i)["personal"]
        assert torch.equal(w["layer2.weight"], start["layer2.weight"]) == (i != drawn)
        assert torch.equal(w["layer1.weight"], fed.state.server["w"]["layer1.weight"][0])
        assert not torch.equal(w["layer1.weight"], start["layer1.weight"])
    scores = evaluate(fed, Protocol(label="clean", source="train", support=None, batch=None, repeats=1, steps=(0, 1), lr=0.1))
    assert scores.models == ("personal",) and np.isfinite(scores.loss).all()
    # A step of adaptation gives him a head of his own.
    assert (scores.loss[0, 2, 0, 1] != scores.loss[0, 2, 0, 0]).all()


@every_backend
@pytest.mark.parametrize("personal", ["all", "last", "none"])
def test_other_optimizers_and_empty_parts(personal, backend):
    model, start = mlp()
    xs = [np.random.default_rng(i).normal(size=(5, 3)) for i in range(3)]
    algo = algorithm("partial", personal=personal)
    optimizers = {"local": Adam(name="adam"), "server": ServerAdam(name="adam")}
    fed = federation(algo, model, xs, start, backend=backend, active=2, seeds=(0, 1), **optimizers)
    first = tree.map(torch.clone, fed.state)
    before = structure(fed.state)
    run(fed, 2)
    assert structure(fed.state) == before and not same(first, fed.state)
    assert all(torch.isfinite(t).all() for t in tree.leaves(fed.state))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"personal": "layer7"}, "personal=layer7: none, first, last, all, or layers or parameters among layer1, layer2"),
        ({"personal": ["layer1", "layer"]}, "personal=.*: none, first, last, all, or layers"),
        ({"frozen": "lsat"}, "frozen=lsat: none, first, last, all, or layers"),
        ({"frozen": "all"}, "frozen=all: must leave parameters to train"),
        ({"frozen": ["layer1", "layer2"]}, "frozen=.*: must leave parameters to train"),
        ({"schedule": "alternate", "personal": "none"}, "schedule=alternate: joint, since one of the parts"),
        ({"schedule": "alternate", "personal": "all"}, "schedule=alternate: joint, since one of the parts"),
        ({"schedule": "alternate", "personal": "last", "frozen": "last"}, "schedule=alternate: joint, since"),
    ],
)
def test_names_that_the_model_does_not_have(fields, message):
    model, start = mlp()
    with pytest.raises(UserError, match=f"^{message}"):
        federation(algorithm("partial", **fields), model, [np.ones((2, 3))], start)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"personal": []}, r"personal=\[\]: none, first, last, all, or names"),
        ({"personal": None}, "personal=null: none, first"),
        ({"frozen": ["layer1", 2]}, "frozen=.*: none, first"),
        ({"frozen": ""}, "frozen=: none, first"),
        ({"schedule": "both"}, "schedule=both: one of joint, alternate"),
        ({"personal_steps": 0}, "personal_steps=0: an integer >= 1"),
        ({"tau": 0}, "tau=0: an integer >= 1"),
    ],
)
def test_bad_values(fields, message):
    with pytest.raises(UserError, match=f"^{message}"):
        algorithm("partial", **fields)


def test_cold_start_in_words():
    both = "the global shared part with the initial personal part"
    assert algorithm("fedper").cold_start == algorithm("partial", personal=["layer1"]).cold_start == both
    assert algorithm("fedbabu").cold_start == "the global model"
    assert algorithm("partial", personal="all").cold_start == "the initial model"


@pytest.mark.parametrize("name", PRESETS)
def test_the_yaml_file_holds_the_defaults(name):
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        tree = compose("config", overrides=[f"algo={name}"])
        listed = compose("config", overrides=[f"algo={name}", "algo.frozen=[layer1]"])
    found = vars(parse(tree).algo)
    knobs = {"beta": found["beta"], "tau": found["tau"], "batch": found["batch"]}
    assert found == vars(ALGORITHMS[name](name=name, **knobs))
    assert parse(listed).algo.frozen == ["layer1"]
