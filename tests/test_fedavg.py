"""FedAvg: gradient descent where it must be, its fixed point on quadratics, server steps by hand, weighted averages."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from problems import COIN_START, COIN_X, Quadratic, blobs, coin, drawn, federation, mlp, quadratic, random_quadratics, run, weights

from perfed.algorithms.fedavg import FedAvg
from perfed.evaluate import Protocol, evaluate
from perfed.optimizers import Adam, Average, Momentum, ServerAdam, Sgd

BACKENDS = ["vmap", "loop"]


def plain_loss(p, x, y):
    """The network of problems.mlp, written again."""
    scores = F.elu(x @ p[0] + p[1]) @ p[2] + p[3]
    return F.nll_loss(F.log_softmax(scores, 1), y)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("batch", [3, 100])
def test_all_users_and_one_step_is_sgd_on_the_mean_of_the_losses(backend, batch):
    model, start = mlp()
    xs, ys = blobs([5, 8, 8, 6])
    fed = federation(FedAvg(name="fedavg", beta=0.3, tau=1, batch=batch), model, xs, start, ys=ys, backend=backend)
    x, y = torch.from_numpy(np.concatenate(xs)), torch.from_numpy(np.concatenate(ys))
    p = [t.clone().requires_grad_() for t in start.values()]
    for k in range(4):
        picks = [drawn(fed, i, k, 1)["outer"][0] for i in range(4)]
        assert [len(set(pick)) for pick in picks] == ([3, 3, 3, 3] if batch == 3 else [5, 8, 8, 6])
        f = sum(plain_loss(p, x[pick], y[pick]) for pick in picks) / 4
        p = [(t - 0.3 * g).detach().requires_grad_() for t, g in zip(p, torch.autograd.grad(f, p), strict=True)]
    want = torch.cat([t.detach().flatten() for t in p]).numpy()
    np.testing.assert_allclose(weights(run(fed, 4)), want, rtol=0, atol=1e-13)
    assert np.abs(want - torch.cat([t.flatten() for t in start.values()]).numpy()).max() > 0.05


@pytest.mark.parametrize("active", [5, 2])
def test_identical_users_with_all_their_data_are_centralised_gradient_descent(active):
    model, start = mlp()
    (x,), (y,) = blobs([7])
    fed = federation(FedAvg(name="fedavg", beta=0.2, tau=3, batch=7), model, [x] * 5, start, ys=[y] * 5, active=active)
    p = [t.clone().requires_grad_() for t in start.values()]
    for _ in range(4 * 3):
        f = plain_loss(p, torch.from_numpy(x), torch.from_numpy(y))
        p = [(t - 0.2 * g).detach().requires_grad_() for t, g in zip(p, torch.autograd.grad(f, p), strict=True)]
    np.testing.assert_allclose(weights(run(fed, 4)), torch.cat([t.detach().flatten() for t in p]).numpy(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tau", [1, 6])
def test_fixed_point_on_quadratics(tau, backend):
    # tau full-batch steps take v to x_i* + (I - beta A_i)^tau (v - x_i*), so the mean upload is the mean of
    # (I - Q_i) w + Q_i x_i*, which is w where sum Q_i w = sum Q_i x_i*.
    n, d, beta = 5, 4, 0.4
    A, b = random_quadratics(n, d)
    fed = federation(
        FedAvg(name="fedavg", beta=beta, tau=tau, batch=1), Quadratic(), list(map(quadratic, A, b)), [3.0] * d, backend=backend
    )
    best = np.linalg.solve(A, b[..., None])[..., 0]
    Q = np.stack([np.eye(d) - np.linalg.matrix_power(np.eye(d) - beta * Ai, tau) for Ai in A])
    fixed = np.linalg.solve(Q.sum(0), np.einsum("nij,nj->i", Q, best))
    np.testing.assert_allclose(weights(run(fed, 80 if tau == 1 else 25)), fixed, rtol=0, atol=1e-10)
    drift = np.abs(fixed - np.linalg.solve(A.sum(0), b.sum(0))).max()
    assert drift < 1e-12 if tau == 1 else drift > 1e-2  # one step finds the minimiser, several steps do not


# Two users, f_1 = w^2/2 - 3 w and f_2 = w^2/2 - 5 w, one step of 0.1 from w = 2:
# v_1 = 2 - .1 (2 - 3) = 2.1 and v_2 = 2 - .1 (2 - 5) = 2.3, mean 2.2. In general the mean upload is w - .1 (w - 4).
def pair(server):
    xs = [quadratic(np.eye(1), [c]) for c in (3.0, 5.0)]
    return federation(FedAvg(name="fedavg", beta=0.1, tau=1, batch=1), Quadratic(), xs, [2.0], server=server)


def test_server_average_by_hand():
    # (1 - .25) 2 + .25 2.2 = 2.05; then the mean upload is 2.05 + .195 and w = 2.05 + .25 .195 = 2.09875
    fed = pair(Average(name="average", lr=0.25))
    assert weights(run(fed, 1))[0] == pytest.approx(2.05, abs=1e-14)
    assert weights(run(fed, 1))[0] == pytest.approx(2.09875, abs=1e-14)
    assert weights(run(pair(Average(name="average")), 1))[0] == pytest.approx(2.2, abs=1e-14)


def test_server_momentum_by_hand():
    # v = 2 - 2.2 = -.2, w = 2 + .5 .2 = 2.1; then the mean is 2.1 + .19, v = .8 (-.2) - .19 = -.35, w = 2.1 + .175
    fed = pair(Momentum(name="momentum", lr=0.5, momentum=0.8))
    assert weights(run(fed, 1))[0] == pytest.approx(2.1, abs=1e-14)
    assert weights(run(fed, 1))[0] == pytest.approx(2.275, abs=1e-14)


def test_server_adam_by_hand():
    # FedAdam (Reddi et al. 2021, algorithm 2) with v_0 = eps^2, eps = .1, beta1 = .5, beta2 = .75, lr = .3:
    # d = .2: m = .1, v = .75 .01 + .25 .04 = .0175, w = 2 + .03 / (sqrt(.0175) + .1) = 2.129150262212918
    # d = .1 (4 - w): m = .5 .1 + .5 d, v = .75 .0175 + .25 d^2, w = w + .3 m / (sqrt(v) + .1) = 2.302858547779596
    fed = pair(ServerAdam(name="adam", lr=0.3, beta1=0.5, beta2=0.75, eps=0.1))
    assert weights(run(fed, 1))[0] == pytest.approx(2.129150262212918, abs=1e-14)
    assert weights(run(fed, 1))[0] == pytest.approx(2.302858547779596, abs=1e-14)


def test_local_momentum_and_adam_by_hand_and_afresh_each_round():
    # f = w^2/2 - 4 w from w = 2, two steps of .1 with momentum .5: g = -2, v = -2, w = 2.2; g = -1.8, v = -2.8, w = 2.48.
    # Next round, momentum forgotten: g = v = -1.52, w = 2.632; g = -1.368, v = -2.128, w = 2.8448.
    xs = [quadratic(np.eye(1), [4.0])]
    fed = federation(FedAvg(name="fedavg", beta=0.1, tau=2, batch=1), Quadratic(), xs, [2.0], local=Sgd(name="sgd", momentum=0.5))
    assert weights(run(fed, 1))[0] == pytest.approx(2.48, abs=1e-14)
    assert weights(run(fed, 1))[0] == pytest.approx(2.8448, abs=1e-14)
    # Weight decay .5 adds .5 w to the gradient: g = -2 + 1, w = 2.1.
    fed = federation(FedAvg(name="fedavg", beta=0.1, tau=1, batch=1), Quadratic(), xs, [2.0], local=Sgd(name="sgd", weight_decay=0.5))
    assert weights(run(fed, 1))[0] == pytest.approx(2.1, abs=1e-14)
    # Adam's first step is beta g / (|g| + eps) = .1 2 / (2 + .5) = .08; bias corrections cancel. Afresh: the next round's
    # gradient is -1.92 and its step .1 1.92 / 2.42.
    fed = federation(FedAvg(name="fedavg", beta=0.1, tau=1, batch=1), Quadratic(), xs, [2.0], local=Adam(name="adam", eps=0.5))
    assert weights(run(fed, 1))[0] == pytest.approx(2.08, abs=1e-14)
    assert weights(run(fed, 1))[0] == pytest.approx(2.08 + 0.192 / 2.42, abs=1e-14)
    # Second step of Adam within a round, beta1 = beta2 = .5, eps = .5: g_1 = -2, w = 2.08, g_2 = -1.92;
    # m/(1 - .25) = (-.5 - .96)/.75, v/(1 - .25) = (1 + 1.8432)/.75, so the step is .1 (1.46/.75) / (sqrt(2.8432/.75) + .5).
    adam = Adam(name="adam", beta1=0.5, beta2=0.5, eps=0.5)
    fed = federation(FedAvg(name="fedavg", beta=0.1, tau=2, batch=1), Quadratic(), xs, [2.0], local=adam)
    assert weights(run(fed, 1))[0] == pytest.approx(2.08 + 0.146 / 0.75 / ((2.8432 / 0.75) ** 0.5 + 0.5), abs=1e-14)


# COIN: softmax(0, 0) = (.5, .5), so one step of size 1 from (0, 0) gives (.5, -.5) on label 0 and (-.5, .5) on label 1.
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("aggregation, want", [("samples", [-0.25, 0.25]), ("uniform", [0.0, 0.0])])
def test_b12a_average_by_samples_or_alike(aggregation, want, backend):
    # One example of label 0, three of label 1: (1 (.5, -.5) + 3 (-.5, .5)) / 4 = (-.25, .25).
    xs, ys = [COIN_X, np.repeat(COIN_X, 3, 0)], [np.array([0]), np.array([1, 1, 1])]
    algo = FedAvg(name="fedavg", beta=1.0, tau=1, batch=40, aggregation=aggregation)
    fed = run(federation(algo, coin(), xs, COIN_START, ys=ys, backend=backend), 1)
    np.testing.assert_allclose(weights(fed), want, rtol=0, atol=1e-15)


@pytest.mark.parametrize("aggregation", ["samples", "uniform"])
def test_b12b_only_the_active_users_share_the_mean(aggregation):
    algo = FedAvg(name="fedavg", beta=1.0, tau=1, batch=40, aggregation=aggregation)
    fed = run(federation(algo, coin(), [COIN_X] * 4, COIN_START, active=2), 1)
    np.testing.assert_allclose(weights(fed), [0.5, -0.5], rtol=0, atol=1e-15)


def test_users_outside_the_cohort_do_not_move_the_server():
    xs = [quadratic(np.eye(1), [c]) for c in (1.0, 2.0, 3.0, 4.0, 5.0)]
    algo = FedAvg(name="fedavg", beta=0.1, tau=2, batch=1)
    fed = federation(algo, Quadratic(), xs, [0.0], active=2)
    inside = fed.cohorts(0)[0]
    other = [x if i in inside else quadratic(np.eye(1) * 7, [99.0]) for i, x in enumerate(xs)]
    changed = federation(algo, Quadratic(), other, [0.0], active=2)
    assert weights(run(fed, 1))[0] == weights(run(changed, 1))[0]
    # From 0, two steps of .1 reach (1 - .81) c.
    assert weights(fed)[0] == pytest.approx(0.19 * np.mean([i + 1.0 for i in inside]), abs=1e-14)


@pytest.mark.parametrize("backend", BACKENDS)
def test_b21_adaptation_reads_train_data_and_scoring_test_data(backend):
    # Train labels all 0, test labels all 1. From W = (0, 0) one round and one adaptation step on train data only raise the
    # score of label 0: accuracy 0. Adapting on the test data instead (protocol `paper`), the step of 4 has
    # W = (.5, -.5) + 4 (-p, p) with p = sigmoid(1) = .731: label 1 wins, accuracy 1.
    fed = federation(
        FedAvg(name="fedavg", beta=1.0, tau=1, batch=40),
        coin(),
        [COIN_X],
        COIN_START,
        ys=[np.array([0])],
        test_ys=[np.array([1])],
        backend=backend,
    )
    run(fed, 1)
    common = dict(support=None, batch=None, repeats=1, steps=(0, 1), lr=4.0)
    clean = evaluate(fed, Protocol(label="clean", source="train", **common))
    np.testing.assert_array_equal(clean.correct[0, 0, 0], [0.0, 0.0])
    paper = evaluate(fed, Protocol(label="paper", source="test", **common))
    np.testing.assert_array_equal(paper.correct[0, 0, 0], [0.0, 1.0])
    # Losses of label 1: log(1 + e^{W_0 - W_1}) with W_0 - W_1 = 1 before; after, 1 + 8 (1 - p) on train, 1 - 8 p on test.
    p = 1 / (1 + np.exp(-1))
    np.testing.assert_allclose(clean.loss[0, 0, 0], np.log1p(np.exp([1.0, 1 + 8 * (1 - p)])), rtol=1e-12)
    np.testing.assert_allclose(paper.loss[0, 0, 0], np.log1p(np.exp([1.0, 1 - 8 * p])), rtol=1e-12)
