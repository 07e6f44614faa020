"""APFL: numbers by hand, the two ends of the mixing weight (row B18), cold start, costs."""

import numpy as np
import pytest
import torch
from problems import Quadratic, Spy, blobs, drawn, federation, mlp, quadratic, run, weights
from small import algorithm, same

from perfed import tree
from perfed.errors import UserError
from perfed.evaluate import Protocol, evaluate

BACKENDS = ["vmap", "loop"]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
CLEAN = Protocol(label="clean", source="train", support=None, batch=4, repeats=1, steps=(0, 1), lr=0.05)


def line(algo, centres=(4.0,), **options):
    """f_i = w^2/2 - c_i w, gradient w - c_i, from w = 2."""
    return federation(algo, Quadratic(), [quadratic(np.eye(1), [c]) for c in centres], [2.0], **options)


def own(fed, user=0):
    return float(fed.state.users["v"]["w"][0, user, 0])


def personal(fed, user, s=0):
    return fed.algo.candidates(tree.at(fed.state.server, s), fed.users_at(s, user))["personal"]


# c = 4, beta = .5, mix = .25, tau = 2, from w = v = 2.
# Step 0: vbar = 2, g = h = -2:  w = 3;  v = 2 + .5 .25 2 = 2.25 (chain), 3 (none);  a stays: v - w = 0.
# Step 1: vbar = .25 2.25 + .75 3 = 2.8125, h = -1.1875, g = -1:  w = 3.5;  v = 2.25 + .125 1.1875 = 2.3984375 (chain)
#         vbar = 3, h = -1:  v = 3.5 (none)
# Mixture: .25 2.3984375 + .75 3.5 = 3.224609375 (chain), 3.5 (none).
# Round 1, step 0, adaptive, chain: w = 3.5, v = 2.3984375, vbar = 3.224609375, h = -.775390625:
#         a = .25 - .5 (2.3984375 - 3.5)(-.775390625) = .25 - .427..., clipped to 0; unclipped it would be -.17707824707
@every_backend
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("v_step, v, mixed", [("chain", 2.3984375, 3.224609375), ("none", 3.5, 3.5)])
def test_a_round_by_hand(v_step, v, mixed, adaptive, backend):
    fed = run(line(algorithm("apfl", beta=0.5, tau=2, mix=0.25, v_step=v_step, adaptive=adaptive), backend=backend), 1)
    assert (weights(fed)[0], own(fed), float(personal(fed, 0)["w"])) == (3.5, v, mixed)
    assert list(fed.algo.candidates(tree.at(fed.state.server, 0), fed.users_at(0, 0))) == ["personal", "global"]
    if adaptive:
        assert fed.state.users["mix"].tolist() == [[0.25]]
        fed.round()
        assert fed.state.users["mix"].tolist() == [[0.0 if v_step == "chain" else 0.25]]


@every_backend
def test_adaptive_weight_by_hand(backend):
    # The same with beta = .25: step 0: w = 2.5, v = 2.125; step 1: vbar = 2.40625, w = 2.875, v = 2.125 + .0625 1.59375 = 2.224609375.
    # Round 1: v - w = -.650390625, vbar = .25 v + .75 w = 2.71240234375, h = -1.28759765625,
    #   a = .25 - .25 .650390625 1.28759765625 = .04064130783; it moves in the first of the two steps only.
    fed = run(line(algorithm("apfl", beta=0.25, tau=2, mix=0.25, adaptive=True), backend=backend), 2)
    a = 0.25 - 0.25 * 0.650390625 * 1.28759765625
    assert float(fed.state.users["mix"]) == pytest.approx(a, abs=1e-15)
    assert 0 < a < 0.05
    # Step 0 moves v with the old weight, step 1 with the new one.
    v, w = 2.224609375 + 0.25 * 0.25 * 1.28759765625, 2.875 + 0.25 * 1.125
    h = a * v + (1 - a) * w - 4
    assert own(fed) == pytest.approx(v - 0.25 * a * h, abs=1e-14)


def network(name, xs, ys, active=3, backend="vmap", **fields):
    model, start = mlp()
    return federation(algorithm(name, beta=0.3, tau=3, batch=5, **fields), model, xs, start, ys=ys, active=active, backend=backend)


SIZES = [9, 4, 11, 12, 6]


@every_backend
def test_b18a_weight_one_is_local_training(backend):
    xs, ys = blobs(SIZES)
    other = [*xs[:3], xs[3] + 1, xs[4]], [*ys[:3], (ys[3] + 1) % 3, ys[4]]
    local, fed, changed = (
        run(network(name, *data, backend=backend, **fields), 5)
        for name, data, fields in (("local", (xs, ys), {}), ("apfl", (xs, ys), {"mix": 1.0}), ("apfl", other, {"mix": 1.0}))
    )
    assert fed.times_sampled[0, 0] > 1 and fed.times_sampled[0, 3] > 1
    for i in np.flatnonzero(fed.times_sampled[0]):
        assert same(personal(fed, i), local.users_at(0, i))
    for i in (0, 1, 2, 4):
        assert same(fed.users_at(0, i), changed.users_at(0, i))
    assert same(personal(fed, 0), personal(changed, 0)) and not same(personal(fed, 3), personal(changed, 3))
    assert not same(fed.state.server, changed.state.server)  # w is trained all the same


@every_backend
def test_b18b_weight_zero_is_the_global_model(backend):
    fed = run(network("apfl", *blobs(SIZES), backend=backend, mix=0.0), 4)
    scores = evaluate(fed, CLEAN)
    assert scores.models == ("personal", "global")
    np.testing.assert_array_equal(scores.correct[:, :, 0], scores.correct[:, :, 1])
    np.testing.assert_array_equal(scores.loss[:, :, 0], scores.loss[:, :, 1])
    for i in range(5):
        assert same(tree.at(fed.state.users["v"], 0, i), fed.initial[0])
        assert same(personal(fed, i), tree.at(fed.state.server["w"], 0))


@every_backend
def test_b18c_the_adaptive_weight_moves_and_stays_in_its_range(backend):
    fed = network("apfl", *blobs(SIZES), backend=backend, adaptive=True)
    seen = []
    for _ in range(20):
        fed.round()
        seen.append(fed.state.users["mix"].clone())
    mix = torch.stack(seen)
    assert 0 <= float(mix.min()) and float(mix.max()) <= 1
    assert (mix[-1] != 0.5).all() and mix.std() > 0.01


@every_backend
def test_parameters_are_mixed_not_outputs(backend):
    fed = run(network("apfl", *blobs(SIZES), backend=backend, mix=0.3), 3)
    (i, *_) = np.flatnonzero(fed.times_sampled[0])
    user, server = fed.users_at(0, i), tree.at(fed.state.server, 0)
    for key, value in personal(fed, i).items():
        torch.testing.assert_close(value, 0.3 * user["v"][key] + 0.7 * server["w"][key], rtol=0, atol=1e-15)


@every_backend
def test_a_user_that_never_trained_has_the_server_model(backend):
    fed = run(line(algorithm("apfl", mix=0.3, adaptive=True), (1.0, 3.0, 4.0, 8.0), active=1, backend=backend), 2)
    w = weights(fed)[0]
    np.testing.assert_array_equal(fed.state.users["rounds"][0].numpy(), fed.times_sampled[0])
    for i in range(4):
        assert (float(personal(fed, i)["w"]) == w) == (fed.times_sampled[0, i] == 0)
    assert w != 2.0


def test_two_gradients_on_one_batch_and_costs():
    xs, ys = blobs([9, 8])
    model, start = mlp()
    fed = federation(algorithm("apfl", tau=3, batch=4, mix=0.3), model, xs, start, ys=ys, backend="loop", task=Spy)
    fed.round()
    fed.task.log.clear()
    received = weights(fed)
    fed.round()
    picks = [drawn(fed, user, 1, 3)["outer"] for user in range(2)]
    want = [list(picks[user][step]) for step in range(3) for user in range(2) for _ in range(2)]
    assert [index for _, _, index in fed.task.log] == want
    np.testing.assert_array_equal(fed.task.log[0][1].numpy(), received)
    cost = fed.costs[0]
    assert (cost.grads, cost.steps, cost.hvps) == (2 * 2 * 3 * 2, 2 * 2 * 3, 0)
    assert cost.floats_up == cost.floats_down == 2 * 2 * len(received)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_backend
def test_the_weight_has_the_dtype_of_the_model(dtype, backend):
    fed = line(algorithm("apfl", adaptive=True), (1.0, 5.0), backend=backend, dtype=dtype)
    assert fed.state.users["mix"].dtype == dtype and fed.state.users["mix"].shape == (1, 2)
    assert run(fed, 2).state.users["mix"].dtype == dtype
    assert set(run(line(algorithm("apfl")), 1).state.users) == {"v", "rounds"}  # a fixed weight is no state


BAD = [
    ("mix", -0.1, r"a number in \[0, 1\]"),
    ("mix", 1.5, r"a number in \[0, 1\]"),
    ("v_step", "full", "one of chain, none"),
]


@pytest.mark.parametrize("key, value, allowed", BAD)
def test_bad_values(key, value, allowed):
    with pytest.raises(UserError, match=f"^{key}={value}: {allowed}"):
        algorithm("apfl", **{key: value})
