"""Ditto: numbers by hand, what each step reads and moves, cold start, costs, notes."""

import numpy as np
import pytest
from problems import Quadratic, Spy, blobs, drawn, federation, mlp, quadratic, run, weights
from small import algorithm, same

from perfed import tree
from perfed.algorithms.base import Facts
from perfed.errors import UserError
from perfed.evaluate import Protocol, adapted_models

every_backend = pytest.mark.parametrize("backend", ["vmap", "loop"])


def line(algo, centres=(4.0,), **options):
    """f_i = w^2/2 - c_i w, gradient w - c_i, from w = 2."""
    return federation(algo, Quadratic(), [quadratic(np.eye(1), [c]) for c in centres], [2.0], **options)


def own(fed, user=0):
    return float(fed.state.users["v"]["w"][0, user, 0])


@every_backend
def test_two_rounds_by_hand(backend):
    # c = 4, lam = 2, beta = .5, tau = 1, two personal steps of .25.
    # Round 0, w = 2: w_i = 2 + .5 2 = 3.  v = 2 + .25 2 = 2.5;  v = 2.5 - .25 (-1.5 + 2 (2.5 - 2)) = 2.625.
    # Round 1, w = 3: w_i = 3.5.  v = 2.625 - .25 (-1.375 + 2 (-.375)) = 3.15625;
    #   v = 3.15625 - .25 (-.84375 + 2 .15625) = 3.2890625.   Anchors w_i = 3 and 3.5 would give other numbers.
    fed = line(algorithm("ditto", beta=0.5, tau=1, lam=2.0, personal_steps=2, personal_lr=0.25), backend=backend)
    run(fed, 1)
    assert (weights(fed)[0], own(fed)) == (3.0, 2.625)
    run(fed, 1)
    assert (weights(fed)[0], own(fed)) == (3.5, 3.2890625)
    # One proximal adaptation step around the final w = 3.5: v - .25 (-.7109375 + 2 (-.2109375)) = 3.572265625
    clean = Protocol(label="clean", source="train", support=None, batch=None, repeats=1, steps=(0, 1), lr=fed.algo.inner_step)
    models = adapted_models(fed, clean, 0, 0, 1)
    assert list(models) == ["personal", "global"]
    assert float(models["personal"]["w"]) == pytest.approx(3.572265625, abs=1e-15)
    assert float(models["global"]["w"]) == pytest.approx(3.5 + 0.25 * 0.5, abs=1e-15)


@pytest.mark.parametrize("personal, cost", [(None, 6), (2, 5), (5, 8)])
def test_steps_batches_points_and_costs(personal, cost):
    model, start = mlp()
    xs, ys = blobs([9, 8, 12])
    algo = algorithm("ditto", tau=3, batch=4, personal_steps=personal)
    fed = federation(algo, model, xs, start, ys=ys, active=2, backend="loop", task=Spy)
    fed.round()
    before = {i: np.concatenate([t[0, i].numpy().ravel() for t in fed.state.users["v"].values()]) for i in range(3)}
    received = weights(fed)
    fed.task.log.clear()
    fed.round()
    users, log = fed.cohorts(1)[0], fed.task.log
    plain = federation(algorithm("fedavg", tau=3, batch=4), model, xs, start, ys=ys, active=2)
    assert len(log) == 2 * cost  # one gradient for each step, none of them wasted
    for a, user in enumerate(users):
        mine = log[a::2]  # the users take their steps in turn
        stream = [list(picks) for picks in drawn(plain, user, 1, max(3, cost - 3))["outer"]]
        assert [index for _, _, index in mine] == stream[:3] + stream[: cost - 3]
        np.testing.assert_array_equal(mine[0][1].numpy(), received)
        np.testing.assert_array_equal(mine[3][1].numpy(), before[user])
    spent = fed.costs[0]
    assert (spent.grads, spent.steps, spent.hvps) == (2 * 2 * cost, 2 * 2 * cost, 0)
    assert spent.floats_up == spent.floats_down == 2 * 2 * len(received)


@every_backend
def test_a_user_that_never_trained_has_the_server_model(backend):
    fed = run(line(algorithm("ditto"), (1.0, 3.0, 4.0, 8.0), active=1, backend=backend), 2)
    np.testing.assert_array_equal(fed.state.users["rounds"][0].numpy(), fed.times_sampled[0])
    w = weights(fed)[0]
    for i in range(4):
        models = fed.algo.candidates(tree.at(fed.state.server, 0), fed.users_at(0, i))
        assert float(models["personal"].anchor["w"]) == float(models["global"]["w"]) == w
        if fed.times_sampled[0, i]:
            assert float(models["personal"].w["w"]) == own(fed, i) != w
        else:
            assert float(models["personal"].w["w"]) == w != 2.0 == own(fed, i)


def test_other_users_reach_v_through_w_only():
    # lam = 0: user 0 does not feel user 1. lam > 0: he does from his second round on.
    for lam, alike in ((0.0, True), (1.0, False)):
        one, other = (run(line(algorithm("ditto", lam=lam), (4.0, c)), 2) for c in (1.0, 9.0))
        assert (own(one) == own(other)) == alike
        one, other = (run(line(algorithm("ditto", lam=lam), (4.0, c)), 1) for c in (1.0, 9.0))
        assert own(one) == own(other)


def test_nulls_are_tau_and_beta():
    given = algorithm("ditto", beta=0.2, tau=4, personal_steps=4, personal_lr=0.2)
    null = algorithm("ditto", beta=0.2, tau=4)
    assert same(run(line(given, (1.0, 5.0)), 3).state, run(line(null, (1.0, 5.0)), 3).state)
    assert null.inner_step == 0.2 and null.prox == 1.0
    assert null.local_steps_at_most() == 8 and algorithm("ditto", tau=4, personal_steps=3).local_steps_at_most() == 7
    assert [null.stream_step(t) for t in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


BAD = [
    ("lam", -0.5, "a number >= 0"),
    ("personal_steps", 0, "null or an integer >= 1"),
    ("personal_lr", 0.0, "null or a number > 0"),
]


@pytest.mark.parametrize("key, value, allowed", BAD)
def test_bad_values(key, value, allowed):
    with pytest.raises(UserError, match=f"^{key}={value}: {allowed}"):
        algorithm("ditto", **{key: value})


def test_notes():
    def warnings(smoothness, **fields):
        lines = algorithm("ditto", tau=10, **fields).notes(Facts(n=20, active=4, rounds=100, smoothness=smoothness))
        return [line for line in lines if line.startswith("warning:")]

    assert warnings(18.9) == [] and warnings(None) == []  # beta = .1, lam = 1: .1 19.9 = 1.99
    (line,) = warnings(19.1)
    assert "personal_lr*(L+lam) = 2.01, bound 2" in line
    assert "= 2.5," in warnings(1.5, personal_lr=1.0)[0]
    (line,) = warnings(1.0, lam=0.0)
    assert "local training" in line
