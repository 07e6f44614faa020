"""Local training: FedAvg's steps without the average, no communication, and the equal schedule to the step."""

import numpy as np
import pytest
from problems import Quadratic, blobs, federation, mlp, quadratic, run, weights

from perfed.algorithms.fedavg import FedAvg
from perfed.algorithms.local import LocalTraining

BACKENDS = ["vmap", "loop"]
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def own(fed, user, s=0):
    """The user's own model as one vector."""
    return np.concatenate([t[s, user].numpy().ravel() for t in fed.state.users.values()])


@every_backend
@pytest.mark.parametrize("schedule", ["cohort", "equal"])
def test_a_lone_user_follows_fedavg(schedule, backend):
    model, start = mlp()
    xs, ys = blobs([11])
    common = dict(beta=0.3, tau=3, batch=4)
    plain = federation(FedAvg(name="fedavg", **common), model, xs, start, ys=ys, backend=backend)
    local = federation(LocalTraining(name="local", schedule=schedule, **common), model, xs, start, ys=ys, backend=backend)
    for _ in range(4):
        plain.round()
        local.round()
        np.testing.assert_array_equal(own(local, 0), weights(plain))
    assert np.abs(weights(plain) - np.concatenate([t.numpy().ravel() for t in start.values()])).max() > 0.05


# f_i = w^2/2 - c_i w: a step from w goes to c_i + (1 - beta)(w - c_i), so s steps from 0 end at c_i (1 - .9^s).
C = [1.0, 2.0, 3.0, 4.0, 5.0]


def line(algo, **options):
    return federation(algo, Quadratic(), [quadratic(np.eye(1), [c]) for c in C], [0.0], **options)


@every_backend
def test_cohort_schedule(backend):
    # The active users of a round take tau = 2 steps from where they were; a user that was never drawn keeps w_0.
    fed = line(LocalTraining(name="local", beta=0.1, tau=2, batch=1), active=2, seeds=(0, 1), backend=backend)
    rounds = 2
    times = np.zeros((2, 5), int)
    for k in range(rounds):
        for s in range(2):
            times[s, fed.cohorts(k)[s]] += 1
    run(fed, rounds)
    np.testing.assert_array_equal(fed.times_sampled, times)
    assert (times == 0).sum() >= 2  # 2 of 5, twice: at least one user of each seed was never drawn
    for s in range(2):
        for i in range(5):
            want = C[i] * (1 - 0.9 ** (2 * times[s, i]))
            assert own(fed, i, s)[0] == pytest.approx(want, abs=1e-14)
            assert times[s, i] > 0 or own(fed, i, s)[0] == 0.0
        cost = fed.costs[s]
        assert (cost.grads, cost.hvps, cost.steps, cost.user_rounds) == (8, 0, 8, 4)


@every_backend
@pytest.mark.parametrize("schedule", ["cohort", "equal"])
def test_nothing_is_ever_sent(schedule, backend):
    fed = run(line(LocalTraining(name="local", beta=0.1, tau=3, batch=1, schedule=schedule), active=2, backend=backend), 3)
    assert (fed.costs[0].floats_down, fed.costs[0].floats_up) == (0, 0)
    assert fed.state.server == ()
    assert list(fed.algo.candidates(fed.state.server, {"w": 0})) == ["personal"]


# K r tau, rounded (a half goes up): 5 users, r = A/n.
EQUAL = [
    # A, tau, K, steps of each user after 1, .., K rounds
    (2, 3, 7, [1, 2, 4, 5, 6, 7, 8]),  # multiples of 1.2: 1.2 2.4 3.6 4.8 6 7.2 8.4
    (5, 2, 3, [2, 4, 6]),  # all users active: tau a round
    (1, 1, 8, [0, 0, 1, 1, 1, 1, 1, 2]),  # multiples of 0.2: most rounds have no step at all
    (1, 10, 2, [2, 4]),
    (3, 4, 5, [2, 5, 7, 10, 12]),  # multiples of 2.4: 2.4 4.8 7.2 9.6 12
]


@every_backend
@pytest.mark.parametrize("active, tau, rounds, steps", EQUAL)
def test_equal_schedule(active, tau, rounds, steps, backend):
    assert len(steps) == rounds
    fed = line(LocalTraining(name="local", beta=0.1, tau=tau, batch=1, schedule="equal"), active=active, backend=backend)
    for done in steps:
        fed.round()
        for i in range(5):
            assert own(fed, i)[0] == pytest.approx(C[i] * (1 - 0.9**done), abs=1e-13)
        assert (fed.costs[0].steps, fed.costs[0].grads) == (5 * done, 5 * done)  # all five users compute, drawn or not


@pytest.mark.parametrize(
    "n, active, tau, rounds, total",
    # round(K r tau) with r = A/n: 13 .3 7 = 27.3, 100 .2 10 = 200, 9 (1/3) 5 = 15, 10 .25 1 = 2.5 (a half goes up), 11 .25 3 = 8.25
    [(10, 3, 7, 13, 27), (10, 2, 10, 100, 200), (3, 1, 5, 9, 15), (4, 1, 1, 10, 3), (4, 1, 3, 11, 8)],
)
def test_equal_schedule_totals(n, active, tau, rounds, total):
    algo = LocalTraining(name="local", beta=0.1, tau=tau, batch=1, schedule="equal")
    fed = federation(algo, Quadratic(), [quadratic(np.eye(1), [1.0])] * n, [0.0], active=active)
    run(fed, rounds)
    assert fed.costs[0].steps == n * total
    assert own(fed, 0)[0] == pytest.approx(1 - 0.9**total, abs=1e-12)


@every_backend
@pytest.mark.parametrize("schedule", ["cohort", "equal"])
def test_other_users_data_change_nothing_for_a_user(schedule, backend):
    model, start = mlp()
    xs, ys = blobs([9, 10, 11, 12])
    algo = LocalTraining(name="local", beta=0.3, tau=2, batch=4, schedule=schedule)
    changed_xs, changed_ys = [*xs[:3], xs[3] + 1], [*ys[:3], (ys[3] + 1) % 3]
    one = run(federation(algo, model, xs, start, ys=ys, active=3, backend=backend), 4)
    two = run(federation(algo, model, changed_xs, start, ys=changed_ys, active=3, backend=backend), 4)
    for i in range(3):
        assert own(one, i).tobytes() == own(two, i).tobytes()
    assert np.abs(own(one, 3) - own(two, 3)).max() > 1e-3
    assert np.abs(own(one, 0) - np.concatenate([t.numpy().ravel() for t in start.values()])).max() > 1e-3


@every_backend
def test_equal_schedule_reads_one_batch_stream_whoever_is_drawn(backend):
    # The steps of a round read the beginning of the batches that FedAvg would read in it: with r = 1 the two schedules are one.
    model, start = mlp()
    xs, ys = blobs([9, 10, 11])
    a, b = (
        run(federation(LocalTraining(name="local", beta=0.3, tau=2, batch=4, schedule=s), model, xs, start, ys=ys, backend=backend), 3)
        for s in ("cohort", "equal")
    )
    for i in range(3):
        assert own(a, i).tobytes() == own(b, i).tobytes()
