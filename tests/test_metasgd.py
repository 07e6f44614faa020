"""Meta-SGD: a round by hand, adaptation with the learned step, costs, what is refused."""

import numpy as np
import pytest
import torch
from problems import Quadratic, blobs, federation, mlp, quadratic, run, weights

from perfed.algorithms.metasgd import MetaSgd
from perfed.errors import UserError
from perfed.evaluate import Protocol, adapted_models, evaluate
from perfed.optimizers import ServerAdam

every_backend = pytest.mark.parametrize("backend", ["vmap", "loop"])


def make(**fields):
    return MetaSgd(name="metasgd", **fields)


def learned(fed):
    return float(fed.state.server["a"]["w"][0, 0])


# Two users, f = h w^2/2 - c w with one example each, a = .5, from w = 2 (see test_fedmeta):
# h = 1, c = 4: g = -2, q = -1, dw = -1 + .5 = -.5, da = -(-2) (-1) = -2
# h = .5, c = 0: g = 1, q = .75, dw = .75 - .5 .5 .75 = .5625, da = -.75
# means: dw = .03125, da = -1.375
PAIR = [quadratic(np.eye(1), [4.0]), quadratic(0.5 * np.eye(1), [0.0])]


@every_backend
def test_a_round_by_hand(backend):
    fed = run(federation(make(alpha=0.5, beta=0.1), Quadratic(), PAIR, [2.0], backend=backend), 1)
    assert weights(fed)[0] == pytest.approx(1.996875, abs=1e-15)
    assert learned(fed) == pytest.approx(0.6375, abs=1e-15)
    cost = fed.costs[0]
    assert (cost.steps, cost.grads, cost.hvps, cost.floats_down, cost.floats_up) == (2, 4, 2, 4, 4)
    fed = run(federation(make(alpha=0.5, beta=0.1, beta_a=0.02), Quadratic(), PAIR, [2.0], backend=backend), 1)
    assert (weights(fed)[0], learned(fed)) == pytest.approx((1.996875, 0.5275), abs=1e-15)


def test_a_frozen_step_does_not_go_up():
    fed = run(federation(make(alpha=0.5, beta=0.1, learn=False), Quadratic(), PAIR, [2.0]), 2)
    assert learned(fed) == 0.5
    assert (fed.costs[0].floats_down, fed.costs[0].floats_up) == (8, 4)


def test_server_adam_moves_both():
    # FedAdam, v_0 = eps^2 = .01, beta1 = .5, beta2 = .75, lr = .3; pseudo-gradients -.1 .03125 and .1 1.375:
    # m = d / 2, v = .0075 + d^2 / 4, step .3 m / (sqrt(v) + .1).
    fed = federation(
        make(alpha=0.5, beta=0.1), Quadratic(), PAIR, [2.0], server=ServerAdam(name="adam", lr=0.3, beta1=0.5, beta2=0.75, eps=0.1)
    )
    run(fed, 1)
    for found, start, d in ((weights(fed)[0], 2.0, -0.003125), (learned(fed), 0.5, 0.1375)):
        assert found == pytest.approx(start + 0.15 * d / (np.sqrt(0.0075 + d * d / 4) + 0.1), abs=1e-15)


@every_backend
def test_adaptation_uses_the_learned_step_unless_told_otherwise(backend):
    # After the round above user 1 (h = 1, c = 4) moves from 1.996875 by a (4 - w) = .6375 2.003125, or lr times that.
    fed = run(federation(make(alpha=0.5, beta=0.1), Quadratic(), PAIR, [2.0], backend=backend), 1)
    w = 1.996875
    for lr, step in ((None, 0.6375), (0.25, 0.25)):
        protocol = Protocol(label="clean", source="train", support=None, batch=None, repeats=1, steps=(0, 2), lr=lr)
        end = 4 + (1 - step) ** 2 * (w - 4)
        assert float(adapted_models(fed, protocol, 0, 0, 2)["global"]["w"][0]) == pytest.approx(end, abs=1e-14)
        loss = evaluate(fed, protocol).loss[0, 0, 0]
        np.testing.assert_allclose(loss, [w * w / 2 - 4 * w, end * end / 2 - 4 * end], rtol=1e-13)


def test_negative_steps_are_counted():
    # Support and query of opposite signs push a down (derivation in conformance/metasgd.py): .1 - 1.1 = -1.
    xs = [np.concatenate([quadratic(np.eye(1), [1.0]), quadratic(np.eye(1), [-1.0])])]
    for clamp, share in ((False, 1.0), (True, 0.0)):
        fed = federation(make(alpha=0.1, beta=0.2, beta_a=1.0, support=0.5, clamp=clamp), Quadratic(), xs, [0.0])
        assert fed.diagnose()[0]["share_negative"] == 0.0
        assert run(fed, 1).diagnose()[0]["share_negative"] == share


def test_layers_that_do_not_adapt_stay():
    model, start = mlp()
    xs, ys = blobs([11, 20])
    fed = federation(make(batch=5, alpha=0.2, beta=0.3), model, xs, start, ys=ys)
    fed.task.adapted = frozenset(["layer2.weight"])
    protocol = Protocol(label="clean", source="train", support=None, batch=None, repeats=1, steps=(0, 1), lr=None)
    after = adapted_models(fed, protocol, 0, 0, 1)["global"]
    assert [k for k in start if not torch.equal(after[k], start[k])] == ["layer2.weight"]


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"tau": 4}, "tau=4: 1: a user of metasgd"),
        ({"alpha": 0.0}, "alpha=0.0: a number > 0"),
        ({"beta_a": 0.0}, "beta_a=0.0: null or a number > 0"),
        ({"support": 1.5}, "support=1.5"),
    ],
)
def test_refused(fields, text):
    with pytest.raises(UserError, match=text):
        make(**fields)
