"""Centralised training: its batches, costs and judged models. Closed forms are in conformance/pooled.py."""

import numpy as np
import pytest
import torch
from problems import COIN_START, COIN_X, coin, federation, mlp, run, weights
from small import algorithm, cloud, ranges, split
from small import federation as small_federation

from perfed import tree
from perfed.algorithms import ALGORITHMS
from perfed.config import conf_dir, parse
from perfed.errors import UserError
from perfed.evaluate import Protocol, evaluate
from perfed.models import MODELS

every_backend = pytest.mark.parametrize("backend", ["vmap", "loop"])


def models(fed, user=0, s=0):
    return fed.algo.candidates(tree.at(fed.shown(), s), fed.users_at(s, user))


@every_backend
def test_a_step_on_the_data_of_all(backend):
    # COIN: softmax(0, 0) = (.5, .5). One example of label 0 and three of label 1 in one batch: the gradient is
    # (.5 - 1/4, .5 - 3/4), a step of 1 gives (-.25, .25). Users alike would give (0, 0).
    xs, ys = [COIN_X, np.repeat(COIN_X, 3, 0)], [np.array([0]), np.array([1, 1, 1])]
    algo = algorithm("pooled", beta=1.0, tau=1, batch=2)
    fed = run(federation(algo, coin(), xs, COIN_START, ys=ys, backend=backend), 1)
    np.testing.assert_allclose(weights(fed), [-0.25, 0.25], rtol=0, atol=1e-15)
    assert list(models(fed)) == ["global"]  # this model has no bias
    cost = fed.costs[0]
    assert (cost.grads, cost.steps, cost.floats_down, cost.floats_up) == (2, 1, 0, 0)
    assert fed.times_sampled.tolist() == [[1, 1]]


@every_backend
def test_reweighting_by_hand(backend):
    # User 0 has labels 0, 0, 0, 1; user 1 has 1, 1. p(y) = 1/2, 1/2. p_0 = 3/4, 1/4: shifts log 1.5, log .5.
    # User 1 has none of label 0, which counts half an example of 2: log(.25 / .5) = -log 2, and log(1 / .5) = log 2.
    model = MODELS["logistic"](name="logistic")
    start = model.init((1,), 2, None)
    ys = [np.array([0, 0, 0, 1]), np.array([1, 1])]
    fed = federation(algorithm("pooled"), model, [np.ones((4, 1)), np.ones((2, 1))], start, ys=ys, backend=backend, seeds=(0, 1))
    for s in range(2):
        for user, want in ((0, np.log([1.5, 0.5])), (1, np.log([0.5, 2.0]))):
            found = models(fed, user, s)
            assert list(found) == ["global", "reweighted"]
            np.testing.assert_allclose(found["reweighted"]["layer1.bias"], want, rtol=0, atol=1e-15)
            assert list(found["reweighted"]) == list(found["global"])
    # Scored: w = 0 has loss log 2 everywhere; reweighted user 0 gives label 0 the probability 1.5 / 2 = .75.
    scores = evaluate(fed, Protocol(label="clean", source="train", support=None, batch=None, repeats=1, steps=(0,), lr=0.1))
    np.testing.assert_allclose(scores.loss[0, :, 0, 0], np.log(2), rtol=1e-12)
    np.testing.assert_allclose(scores.loss[0, 0, 1, 0], -(3 * np.log(0.75) + np.log(0.25)) / 4, rtol=1e-12)
    np.testing.assert_allclose(scores.loss[0, 1, 1, 0], -np.log(2.0 / 2.5), rtol=1e-12)


def test_held_out_users_are_judged_and_their_data_not_read():
    x, y = cloud(40)
    part = split(ranges([9, 8, 10]), ranges([4, 4, 4], 27), seen=[True, True, False])
    changed = y.copy()
    changed[17:27] = (changed[17:27] + 1) % 3
    one, other = (run(small_federation(algorithm("pooled", batch=4), x, labels, [part]), 3) for labels in (y, changed))
    assert np.array_equal(weights(one), weights(other))
    assert one.times_sampled.tolist() == [[3, 3, 0]]
    scores = evaluate(one, Protocol(label="clean", source="train", support=None, batch=None, repeats=1, steps=(0, 1), lr=0.1))
    assert scores.models == ("global", "reweighted") and np.isfinite(scores.loss).all()
    # Only his own class shares tell the two runs apart for the held-out user.
    assert torch.equal(models(one, 2)["global"]["layer2.bias"], models(other, 2)["global"]["layer2.bias"])
    assert not torch.equal(models(one, 2)["reweighted"]["layer2.bias"], models(other, 2)["reweighted"]["layer2.bias"])


def test_which_models_have_an_output_bias():
    cases = [("mlp", {"hidden": [3]}, "layer2.bias"), ("logistic", {}, "layer1.bias"), ("logistic", {"bias": False}, None)]
    cases += [("langelaar", {"hidden": [4]}, None)]
    x, y = cloud(20)
    for name, fields, wanted in cases:
        for dtype in (torch.float32, torch.float64):
            part = split(ranges([8, 8]), ranges([2, 2], 16))
            fed = small_federation(algorithm("pooled"), x, y, [part], model=MODELS[name](name=name, **fields), dtype=dtype)
            assert list(fed.state.users) == ([wanted] if wanted else [])
            assert all(t.dtype == dtype and t.shape == (1, 2, 3) for t in fed.state.users.values())
    images = np.random.default_rng(0).normal(size=(12, 1, 8, 8))
    model = MODELS["cnn"](name="cnn", channels=[4, 4], groups=2)
    fed = small_federation(algorithm("pooled"), images, np.arange(12) % 3, [split(ranges([4, 4]), ranges([2, 2], 8))], model=model)
    assert list(fed.state.users) == [list(fed.initial[0])[-1]]


def test_chunks_and_seeds():
    model, start = mlp()
    xs = [np.random.default_rng(i).normal(size=(6, 3)) for i in range(3)]
    fed = run(federation(algorithm("pooled", batch=4), model, xs, start, active=2, seeds=(0, 1)), 2)
    alone = run(federation(algorithm("pooled", batch=4), model, xs, start, active=2, seeds=(1,)), 2)
    np.testing.assert_allclose(weights(fed, 1), weights(alone), rtol=1e-12)
    assert np.abs(weights(fed, 1) - weights(fed, 0)).max() > 1e-4


@pytest.mark.parametrize("floor", [0.0, -1.0, 1.5])
def test_bad_values(floor):
    with pytest.raises(UserError, match=rf"^floor={floor}: a number of examples in \(0, 1\]"):
        algorithm("pooled", floor=floor)


def test_the_yaml_file_holds_the_defaults():
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        found = vars(parse(compose("config", overrides=["algo=pooled"])).algo)
    knobs = {"beta": found["beta"], "tau": found["tau"], "batch": found["batch"]}
    assert found == vars(ALGORITHMS["pooled"](name="pooled", **knobs))
