"""L2GD: both coins enumerated, the expected round, its limits, and what it communicates."""

import dataclasses
import math

import numpy as np
import torch
from problems import Quadratic, blobs, federation, mlp, quadratic, random_quadratics, weights
from small import algorithm

from perfed import tree
from perfed.algorithms.base import Facts
from perfed.data.sampling import key, uniforms
from perfed.draws import Lanes
from perfed.types import Info

from . import FIXED_POINT, cannot, check, mutant

N, D = 4, 2
A, B = random_quadratics(N, D, seed=5)
RATE, BETA, PULL = 0.5, 0.2, 0.3
LAM = PULL * RATE / ((1 - RATE) * BETA)  # from pull = alpha lam / (n p) and beta = alpha / (n (1 - p))


def built(active=None, backend="vmap", start=(0.4, -0.2), **fields):
    """User i has i + 1 times the same example: numbers of examples must not count."""
    fields = {"beta": BETA, "tau": 2, "pull": PULL, **fields}
    xs = [np.repeat(quadratic(a, c), i + 1, axis=0) for i, (a, c) in enumerate(zip(A, B, strict=True))]
    return federation(algorithm("l2gd", **fields), Quadratic(), xs, np.array(start), active=active, backend=backend)


def force(fed, steps, p=RATE):
    """Let the coin give this many local steps: 1 - coin lies between (1 - p)^(T + 1) and (1 - p)^T."""
    drawn = type(fed).info

    def info(lanes, k):
        fields = drawn(fed, lanes, k)
        return {**fields, "coin": torch.full_like(fields["coin"], 1 - (1 - p) ** (steps + 0.5))}

    fed.info = info
    return fed


def own(fed):
    """x_i, [N, D]."""
    return fed.state.users["x"]["w"][0].numpy()


def at(fed, x):
    """The state in which users are at x, and the server knows their mean."""
    x = torch.as_tensor(x)[None]
    fed.state = fed.state._replace(users={**fed.state.users, "x": {"w": x.clone()}}, server={"w": {"w": x.mean(1)}})
    return fed


def after(x, steps, **fields):
    """x_i after a round with this many local steps."""
    fed = force(at(built(**fields), x), steps)
    fed.round()
    return own(fed)


def gradients(x):
    return np.einsum("nij,nj->ni", A, x) - B


def minimiser(lam):
    """A_i x_i - b_i + lam (x_i - xbar) = 0 for all i, one linear system."""
    M = np.zeros((N, D, N, D))
    for i in range(N):
        for j in range(N):
            M[i, :, j] = (A[i] + lam * np.eye(D)) * (i == j) - lam * np.eye(D) / N
    return np.linalg.solve(M.reshape(N * D, -1), B.ravel()).reshape(N, D)


def steps_of(coins, p, tau=2):
    """local_steps on many coins at once."""
    coins = torch.as_tensor(coins, dtype=torch.float64)
    zero = torch.zeros(len(coins), dtype=torch.int64)
    info = Info(zero, zero, zero, N, N, tau, zero, zero[:, None], zero, coins, coins)
    return algorithm("l2gd", p=p, tau=tau).local_steps(info).numpy()


def directions(x):
    """dir(0) and dir(1) of an iteration, as the displacement over alpha; alone they are T = 1 without a pull, and T = 0."""
    alpha = BETA * N * (1 - RATE)
    return (x - after(x, 1, pull=0.0)) / alpha, (x - after(x, 0)) / alpha


@check("l2gd", "both coins: (1 - p) dir(0) + p dir(1) = grad F", tolerance=1e-13)
def unbiased():
    x = np.random.default_rng(1).normal(size=(N, D))
    zero, one = directions(x)
    lam = built().algo.coupling_lambda(Facts(N, N, 1, None))
    want = gradients(x) / N + lam / N * (x - x.mean(0))
    return np.abs((1 - RATE) * zero + RATE * one - want).max()


@check("l2gd", "the expected iteration rests at the minimiser", tolerance=1e-13, group=FIXED_POINT)
def expected_iteration():
    zero, one = directions(minimiser(LAM))
    deviation = np.abs((1 - RATE) * zero + RATE * one).max()
    return deviation, deviation


@check("l2gd", "the expected round rests at the minimiser, pulled once", tolerance=1e-10, group=FIXED_POINT)
def expected_round():
    """z_i = E[local steps of x_i]: p (x - z) = (1 - p) beta grad f(z), and x = z - pull (z - zbar): z is the minimiser.

    So the round starts and ends at x = z - pull (z - zbar). All T up to 35 with P(T) = (1 - p)^T p; the rest has 2^-36.
    """
    z = minimiser(LAM)
    x = z - PULL * (z - z.mean(0))
    mean = sum(RATE * (1 - RATE) ** t * after(x, t) for t in range(36))
    return np.abs(mean - x).max(), np.abs(x - z).max()


@check("l2gd", "T is geometric: P(T = t) = (1 - p)^t p", tolerance=1e-4)
def geometric():
    """On a grid of 20,000 coins the counts are the probabilities, up to one grid point each."""
    worst = 0.0
    for p, given, tau in ((0.5, None, 2), (0.3, 0.3, 2), (0.1, None, 10)):
        steps = steps_of((np.arange(20000) + 0.5) / 20000, given, tau)
        worst = max(worst, *(abs(np.mean(steps == t) - (1 - p) ** t * p) for t in range(60)))
    return worst


@check("l2gd", "p (1 - p) communications per iteration, over 200,000 coins", tolerance=2e-3)
def communications():
    """A round is T + 1 iterations and communicates if T > 0. Four standard errors are below 2e-3."""
    steps = steps_of(uniforms(key(0, "coin", np.arange(200000)), 1)[:, 0], 0.3)
    return abs((steps > 0).sum() / (steps + 1).sum() - 0.3 * 0.7)


@check("l2gd", "costs: nothing is sent in rounds without a local step", tolerance=0)
def costs():
    fed, wrong = built(), 0
    lanes = Lanes(np.zeros(1, np.int64), np.zeros(1, np.int64))
    quiet = 0
    for k in range(12):
        steps = math.floor(math.log(1 - float(fed.info(lanes, k)["coin"][0])) / math.log(1 - RATE))
        before = dataclasses.replace(fed.costs[0])
        fed.round()
        want = N * D * (steps > 0)
        wrong += (fed.costs[0].floats_up - before.floats_up != want) + (fed.costs[0].floats_down - before.floats_down != want)
        wrong += fed.costs[0].grads - before.grads != N * steps  # all users compute
        quiet += steps == 0
    assert 0 < quiet < 12
    return wrong


def trajectory(active, backend, participation):
    """Six rounds with the drawn coins, written again."""
    fed, worst = built(active, backend, participation=participation), 0.0
    lanes = Lanes(np.zeros(1, np.int64), np.zeros(1, np.int64))
    x = own(fed).copy()
    for k in range(6):
        for _ in range(math.floor(math.log(1 - float(fed.info(lanes, k)["coin"][0])) / math.log(1 - RATE))):
            x = x - BETA * gradients(x)
        who = np.arange(N) if participation == "all" else fed.cohorts(k)[0]
        mean = x[who].mean(0)
        x[who] = (1 - PULL) * x[who] + PULL * mean
        fed.round()
        worst = max(worst, np.abs(own(fed) - x).max(), np.abs(weights(fed) - mean).max())
    return worst


@check("l2gd", "six rounds by hand, whatever r is", tolerance=1e-13)
def by_hand():
    return max(trajectory(2, "loop", "all"), trajectory(N, "vmap", "all"))


@check("l2gd", "six rounds by hand, only the active are pulled", tolerance=1e-13)
def by_hand_subset():
    return max(trajectory(2, "loop", "subset"), trajectory(2, "vmap", "subset"))


@check("l2gd", "T = 0: the mean stays, the pull is applied", tolerance=1e-15)
def no_step():
    x = np.random.default_rng(2).normal(size=(N, D))
    fed = force(at(built(), x), 0)
    fed.round()
    moved = np.abs(own(fed) - ((1 - PULL) * x + PULL * x.mean(0))).max()
    return max(moved, np.abs(weights(fed) - x.mean(0)).max())


def beside(name, pull):
    """The deviation from FedAvg or local training with as many steps as the coin gave, on the same batches."""
    model, start = mlp()
    xs, ys = blobs([9, 10, 11, 4])
    common = {"beta": 0.3, "batch": 4, "tau": 3}
    fed = federation(algorithm("l2gd", pull=pull, **common), model, xs, start, ys=ys)
    other = federation(algorithm(name, **common), model, xs, start, ys=ys)
    lanes = Lanes(np.zeros(1, np.int64), np.zeros(1, np.int64))
    worst, taken = 0.0, set()
    for k in range(6):
        steps = math.floor(math.log(1 - float(fed.info(lanes, k)["coin"][0])) / math.log(1 - 1 / 3))
        taken.add(steps)
        fed.round()
        if steps:
            other.algo = dataclasses.replace(other.algo, tau=steps)
            other.round()
        else:
            other.k += 1
        users = fed.state.users["x"]
        theirs = other.state.users if name == "local" else tree.map(lambda t: t[:, None], other.state.server["w"])
        worst = max(worst, *(float((users[p] - theirs[p]).abs().max()) for p in users))
    assert len(taken) > 2
    return worst


@check("l2gd", "pull = 1 is FedAvg with a random number of steps, bit by bit", tolerance=0)
def fedavg():
    return beside("fedavg", 1.0)


@check("l2gd", "pull = 0 is local training with a random number of steps, bit by bit", tolerance=0)
def local():
    return beside("local", 0.0)


@check("l2gd", "lambda to infinity: the consensus optimum rests with pull = 1 and T = 1", tolerance=1e-13, group=FIXED_POINT)
def consensus():
    w = np.linalg.solve(A.sum(0), B.sum(0))
    return np.abs(after(np.tile(w, (N, 1)), 1, pull=1.0) - w).max(), np.abs(minimiser(1e7) - w).max()


@check("l2gd", "the printed lambda is pull p / ((1 - p) beta)", tolerance=1e-15)
def coupling():
    """pull = 0.2, p = 1/5, beta = 0.1: 0.2 * 0.2 / (0.8 * 0.1) = 0.5."""
    return abs(algorithm("l2gd", pull=0.2, tau=5, beta=0.1).coupling_lambda(Facts(10, 3, 1, None)) - 0.5)


cannot("l2gd", "iterates converge to the minimiser", "constant steps keep the coin's noise; the expected iteration rests there")
cannot("l2gd", "participation=subset: rounds without communication", "another subset has another mean, also where nobody took a step")

mutant("l2gd", "the pull pushes away", "torch.lerp(x, mean, self.pull)", "torch.lerp(x, mean, -self.pull)")
mutant("l2gd", "the pull is 1 - pull", "torch.lerp(x, mean, self.pull)", "torch.lerp(x, mean, 1 - self.pull)")
mutant("l2gd", "the pull has the factor of the local step", "torch.lerp(x, mean, self.pull)", "torch.lerp(x, mean, self.pull * self.rate)")
mutant("l2gd", "the coin is turned round", "math.log1p(-self.rate)", "math.log(self.rate)")
mutant("l2gd", "one step too many", "torch.floor(torch", "torch.ceil(torch")
mutant("l2gd", "p is 1 - 1/tau", "return 1 / self.tau if", "return 1 - 1 / self.tau if")
mutant("l2gd", "the mean counts examples", "tree.mean(uploads, torch.ones_like(cohort.m))", "tree.mean(uploads, cohort.m)")
mutant("l2gd", "the mean is cached after steps", 'tree.where(self.sends(cohort)[0], w, server["w"])', 'server["w"]')
mutant("l2gd", "the pull forgets the local steps", '{"x": local.w,', '{"x": user["x"],')
mutant("l2gd", "lambda lacks 1 - p", "((1 - self.rate) * self.beta)", "self.beta")
mutant("l2gd", "rounds without a step are counted as sent", "return tree.numel(upload) * self.sends(info)", "return tree.numel(upload)")
