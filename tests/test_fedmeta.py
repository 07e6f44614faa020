"""FedMeta with MAML: support and query sets, a round by hand, costs, what is refused."""

import numpy as np
import pytest
from problems import Quadratic, blobs, drawn, federation, mlp, quadratic, run, weights

from perfed.algorithms.fedmeta import FedMeta
from perfed.errors import UserError
from perfed.evaluate import Protocol, evaluate

every_backend = pytest.mark.parametrize("backend", ["vmap", "loop"])


def make(**fields):
    return FedMeta(name="fedmeta", **fields)


def sets(fed, user, rounds, s=0):
    """The examples that a user's support and query batches ever hold."""
    picks = [drawn(fed, user, k, 1, s) for k in range(rounds)]
    return tuple(set(np.concatenate([p[role][0] for p in picks]).tolist()) for role in ("inner", "outer"))


@pytest.mark.parametrize("batch", [3, 100])
@pytest.mark.parametrize("share, sizes", [(0.2, [1, 1, 2, 4]), (0.5, [1, 1, 6, 10]), (0.9, [1, 1, 11, 18])])
def test_support_and_query_sets(share, sizes, batch):
    # round(p m), at least 1 and at most m - 1: of m = 1 (used for both), 2, 12, 20.
    m = [1, 2, 12, 20]
    xs, ys = blobs(m)
    model, start = mlp()
    fed = federation(make(support=share, batch=batch), model, xs, start, ys=ys, seeds=(0, 5))
    offset = np.concatenate([[0], np.cumsum(m)])
    for user in range(4):
        every = set(range(offset[user], offset[user + 1]))
        for s in range(2):
            support, query = sets(fed, user, 60, s)
            assert support | query == every  # 60 draws of 3 find all of at most 19
            if m[user] == 1:
                assert support == query == every
            else:
                assert not support & query and len(support) == sizes[user]
            if batch == 100:  # all of the set, in every round
                assert all(sets(fed, user, 1, s) == (support, query) for _ in range(2))
            for k in range(3):
                picks = drawn(fed, user, k, 1, s)
                for role, members in (("inner", support), ("outer", query)):
                    assert len(set(picks[role][0])) == len(picks[role][0]) == min(batch, len(members))
    assert sets(fed, 3, 60, 0)[0] != sets(fed, 3, 60, 1)[0]  # another seed, another cut


def test_without_a_support_set_both_batches_come_from_all_data():
    xs, ys = blobs([12])
    model, start = mlp()
    fed = federation(make(support=None, batch=3), model, xs, start, ys=ys)
    assert sets(fed, 0, 60) == (set(range(12)), set(range(12)))


@every_backend
def test_a_round_by_hand(backend):
    # Two users, f = h w^2/2 - c w with one example each, alpha = .5, from w = 2:
    # h = 1, c = 4: u = 2 - .5 (-2) = 3, q = -1, dir = (1 - .5) (-1) = -.5; upload 2 + .1 .5 = 2.05
    # h = .5, c = 0: u = 2 - .5 1 = 1.5, q = .75, dir = .75 .75 = .5625; upload 2 - .05625; the mean is 1.996875.
    xs = [quadratic(np.eye(1), [4.0]), quadratic(0.5 * np.eye(1), [0.0])]
    fed = run(federation(make(alpha=0.5, beta=0.1), Quadratic(), xs, [2.0], backend=backend), 1)
    assert weights(fed)[0] == pytest.approx(1.996875, abs=1e-15)
    cost = fed.costs[0]
    assert (cost.steps, cost.grads, cost.hvps, cost.floats_down, cost.floats_up) == (2, 4, 2, 2, 2)
    # First order: the mean of dir is (-1 + .75) / 2 = -.125.
    fed = run(federation(make(alpha=0.5, beta=0.1, first_order=True), Quadratic(), xs, [2.0], backend=backend), 1)
    assert weights(fed)[0] == pytest.approx(2.0125, abs=1e-15)
    assert (fed.costs[0].grads, fed.costs[0].hvps) == (4, 0)


def test_support_and_query_have_their_own_losses():
    # One user with two examples of f = w^2/2 - c w, c = 1 and 5, half of them support. From w = 0, alpha = .5: u = .5 c_S,
    # q = .5 c_S - c_Q, dir = .5 q: -2.25 if c_S = 1, .75 if c_S = 5.
    xs = [np.concatenate([quadratic(np.eye(1), [1.0]), quadratic(np.eye(1), [5.0])])]
    fed = federation(make(alpha=0.5, beta=1.0, support=0.5), Quadratic(), xs, [0.0])
    support = int(drawn(fed, 0, 0, 1)["inner"][0][0])
    assert weights(run(fed, 1))[0] == pytest.approx([2.25, -0.75][support], abs=1e-15)


def test_one_step_whatever_the_round_and_a_new_user_starts_from_the_server():
    model, start = mlp()
    xs, ys = blobs([11, 20, 16])
    fed = run(federation(make(batch=5, beta=0.3), model, xs, start, ys=ys, active=2), 3)
    assert fed.step_calls == 3 and fed.costs[0].steps == 6
    assert fed.state.users == ()
    server = {k: v[0] for k, v in fed.state.server["w"].items()}
    assert fed.algo.candidates({"w": server}, ()) == {"global": server}


def test_adapting_takes_the_inner_step():
    assert make(alpha=0.25).inner_step == 0.25
    # f = w^2/2 - 4 w, score after one step of .25 from 0: w = 1, loss .5 - 4
    fed = federation(make(alpha=0.25), Quadratic(), [quadratic(np.eye(1), [4.0])], [0.0])
    scores = evaluate(fed, Protocol(label="clean", source="train", support=None, batch=None, repeats=1, steps=(0, 1), lr=0.25))
    np.testing.assert_allclose(scores.loss[0, 0, 0], [0.0, -3.5], atol=1e-15)


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"tau": 10}, "tau=10: 1: a user of fedmeta sends one gradient"),
        ({"alpha": -0.1}, "alpha=-0.1: a number >= 0"),
        ({"support": 0.0}, "support=0.0: null or a share over 0 and below 1"),
        ({"support": 1.0}, "support=1.0: null or a share"),
        ({"beta": 0.0}, "beta=0.0"),
    ],
)
def test_refused(fields, text):
    with pytest.raises(UserError, match=text):
        make(**fields)
