"""EASGD against its equations in numpy: trajectories, conservation, rest points, the stability bound."""

import numpy as np
import torch
from problems import Quadratic, blobs, federation, mlp, quadratic, random_quadratics, run, weights
from small import algorithm

from perfed import tree
from perfed.algorithms.base import Facts

from . import FIXED_POINT, cannot, check, mutant

N, D = 5, 3
A, B = random_quadratics(N, D, seed=3)


def built(A=A, b=B, start=None, seeds=(0,), active=None, backend="vmap", name="easgd", **fields):
    xs = [quadratic(a, c) for a, c in zip(A, b, strict=True)]
    start = np.zeros(A.shape[1]) if start is None else start
    return federation(algorithm(name, **fields), Quadratic(), xs, start, active=active, seeds=seeds, backend=backend)


def own(fed, s=0):
    """x_i, [N, D]."""
    return fed.state.users["x"]["w"][s].numpy()


def perturb(fed, seed=0):
    """Users and centre anywhere: they start alike, and alike nothing pulls."""
    rng = np.random.default_rng(seed)
    users = {**fed.state.users, "x": {"w": torch.from_numpy(rng.normal(size=fed.state.users["x"]["w"].shape))}}
    server = tree.map(lambda t: torch.from_numpy(rng.normal(size=t.shape)), fed.state.server)
    fed.state = fed.state._replace(users=users, server=server)
    return fed


def minimiser(lam):
    """(x_i, xt) of sum f_i(x_i) + lam/2 ||x_i - xt||^2: (A_i + lam) x_i = b_i + lam xt and xt = mean x_i, one linear system."""
    M, r = np.zeros((N + 1, D, N + 1, D)), np.zeros((N + 1, D))
    for i in range(N):
        M[i, :, i], M[i, :, N], r[i] = A[i] + lam * np.eye(D), -lam * np.eye(D), B[i]
        M[N, :, i] = -np.eye(D) / N
    M[N, :, N] = np.eye(D)
    z = np.linalg.solve(M.reshape((N + 1) * D, -1), r.ravel()).reshape(N + 1, D)
    return z[:N], z[N]


def trajectory(backend, tau, active):
    """Eq. 5 and 6: the largest deviation over users, centre and 4 rounds."""
    beta, beta_e, worst = 0.2, 0.7, 0.0
    fed = perturb(built(beta=beta, beta_e=beta_e, tau=tau, active=active, seeds=(0, 1), backend=backend))
    x, xt = own(fed, 1).copy(), weights(fed, 1)
    for k in range(4):
        force = np.zeros(D)
        for i in fed.cohorts(k)[1]:
            e = beta_e / active * (x[i] - xt)
            x[i] = x[i] - beta * (A[i] @ x[i] - B[i]) - e
            for _ in range(tau - 1):
                x[i] = x[i] - beta * (A[i] @ x[i] - B[i])
            force += e
        xt = xt + force
        fed.round()
        worst = max(worst, np.abs(own(fed, 1) - x).max(), np.abs(weights(fed, 1) - xt).max())
    return worst


@check("easgd", "four rounds of eqs. 5 and 6, one step, all users", tolerance=1e-13)
def eq5():
    return trajectory("loop", 1, N)


@check("easgd", "four rounds of eqs. 5 and 6, three steps, 2 of 5 users", tolerance=1e-13)
def eq5_steps():
    return max(trajectory("vmap", 3, 2), trajectory("loop", 3, 2))


@check("easgd", "the exchange conserves xt + sum x_i", tolerance=1e-13)
def conserved():
    """Losses -b'x have the gradient -b: the sum grows by beta tau sum b over the active users, and by nothing where b = 0."""
    worst = 0.0
    for b in (0 * B, B):
        fed = perturb(built(A=0 * A, b=b, beta=0.1, tau=2, active=3))
        total = weights(fed) + own(fed).sum(0)
        for k in range(5):
            before = own(fed).copy()
            total = total + 0.1 * 2 * b[fed.cohorts(k)[0]].sum(0)
            fed.round()
            assert np.abs(own(fed) - before).max() > 1e-2
            worst = max(worst, np.abs(weights(fed) + own(fed).sum(0) - total).max())
    return worst


@check("easgd", "alpha_e = 0 is local training, bit by bit", tolerance=0)
def local():
    model, start = mlp()
    xs, ys = blobs([9, 10, 11, 4])
    feds = []
    for name, fields in (("easgd", {"beta_e": 0.0}), ("local", {})):
        algo = algorithm(name, beta=0.3, tau=2, batch=4, **fields)
        feds.append(run(federation(algo, model, xs, start, ys=ys, active=2), 4))
    pairs = zip(tree.leaves(feds[0].state.users["x"]), tree.leaves(feds[1].state.users), strict=True)
    centre = sum(float((v[0] - start[k]).abs().max()) for k, v in feds[0].state.server["w"].items())
    return max(float((a - b).abs().max()) for a, b in pairs) + centre


def rest(beta, tau):
    """(x_i, xt) after 60 rounds with beta_e = 0.9, which shrink the error to 1e-12 or less of what it was."""
    fed = run(built(beta=beta, beta_e=0.9, tau=tau), 60)
    return own(fed), weights(fed)


@check("easgd", "tau = 1: the minimiser with lambda = rho = alpha_e / beta", tolerance=1e-9, group=FIXED_POINT)
def one_step():
    x, xt = rest(0.6, 1)
    want, centre = minimiser(0.9 / N / 0.6)
    deviation = max(np.abs(x - want).max(), np.abs(xt - centre).max())
    return deviation, deviation


@check("easgd", "tau = 5: the rest point of the iterated map", tolerance=1e-9, group=FIXED_POINT)
def five_steps():
    """M = I - beta A_i, a = alpha_e: x_i+ = M^4 ((M - a) x_i + a xt) + S beta b_i with S = I + M + .. + M^4, and sum (x_i - xt) = 0.

    So x_i = R_i xt + r_i with (I - M^4 (M - a)) [R_i, r_i] = [a M^4, S beta b_i], and xt = mean x_i.
    """
    x, xt = rest(0.4, 5)
    beta, a, eye, R, r = 0.4, 0.9 / N, np.eye(D), [], []
    for i in range(N):
        M = eye - beta * A[i]
        powers = [np.linalg.matrix_power(M, s) for s in range(5)]
        K = np.linalg.inv(eye - powers[4] @ (M - a * eye))
        R.append(K @ powers[4] * a)
        r.append(K @ sum(powers) @ B[i] * beta)
    centre = np.linalg.solve(eye - np.mean(R, 0), np.mean(r, 0))
    want = np.stack([R[i] @ centre + r[i] for i in range(N)])
    lam = algorithm("easgd", beta=0.4, beta_e=0.9, tau=5).coupling_lambda(Facts(N, N, 1, None))
    best, best_centre = minimiser(lam)
    deviation = max(np.abs(x - want).max(), np.abs(xt - centre).max())
    return deviation, max(np.abs(want - best).max(), np.abs(centre - best_centre).max())


@check("easgd", "the printed lambda is rho / tau of the active users", tolerance=1e-15)
def coupling():
    """beta_e = 0.6 over A = 3 users is alpha_e = 0.2, rho = 0.2 / 0.1 = 2, over tau = 4 steps 0.5."""
    return abs(algorithm("easgd", beta=0.1, beta_e=0.6, tau=4).coupling_lambda(Facts(10, 3, 1, None)) - 0.5)


@check("easgd", "the stability warning says what the eigenvalues say", tolerance=0)
def stability():
    """On h x^2/2 and one step: (mean, centre) -> [[1 - bh - a, a], [beta_e, 1 - beta_e]], differences of users shrink by 1 - bh - a."""
    rng, wrong, found = np.random.default_rng(0), 0, set()
    for _ in range(3000):
        step, beta_e, active = rng.uniform(0.01, 2.5), rng.uniform(0.01, 1.99), int(rng.integers(2, 9))
        a = beta_e / active
        radius = np.abs(np.linalg.eigvals([[1 - step - a, a], [beta_e, 1 - beta_e]])).max()
        stable = max(radius, abs(1 - step - a)) < 1
        lines = algorithm("easgd", beta=0.5, tau=1, beta_e=beta_e).notes(Facts(active, active, 10**6, step / 0.5))
        warned = any("stability" in line for line in lines)
        wrong += stable == warned
        found.add(stable)
    assert found == {True, False}
    return wrong


cannot(
    "easgd",
    "a rest point with r < 1",
    "the centre moves by the elastic forces of the drawn users, which cancel over all users only; it goes on moving with constant steps",
)
cannot("easgd", "tau > 1 rests at the minimiser", "the force acts in one of tau steps: the map has another rest point (see the distance)")

mutant("easgd", "the centre takes the mean of the forces", "w + e.sum(0)", "w + e.mean(0)")
mutant("easgd", "the centre moves away", "w + e.sum(0)", "w - e.sum(0)")
mutant("easgd", "the elastic difference has the wrong sign", 'tree.sub(user["x"], down)', 'tree.sub(down, user["x"])')
mutant("easgd", "the user is pushed away", "tree.sub(new.w, local.e)", "tree.axpy(1.0, local.e, new.w)")
mutant("easgd", "the force acts in every step", "info.step == 0", "info.step >= 0")
mutant("easgd", "the force acts in the last step", "info.step == 0", "info.step == info.tau - 1")
mutant(
    "easgd",
    "the first gradient is taken after the exchange",
    'return Local(user["x"], task.local.init(user["x"]), e)',
    'return Local(tree.sub(user["x"], e), task.local.init(user["x"]), tree.zeros(e))',
)
mutant("easgd", "alpha_e is not divided by A", "return self.beta_e / active", "return self.beta_e")
mutant("easgd", "the user starts from the centre", 'Local(user["x"], task', "Local(down, task")
mutant("easgd", "the user forgets his steps", '{"x": local.w,', '{"x": user["x"],')
mutant("easgd", "lambda is not divided by tau", "/ self.beta / self.tau", "/ self.beta")
mutant("easgd", "the bound has the wrong sign", "(2 - step - alpha_e) *", "(2 - step + alpha_e) *")
