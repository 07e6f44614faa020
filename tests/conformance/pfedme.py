"""pFedMe on quadratics f_i = w'A_i w/2 - b_i'w, where everything is linear: with M_i = (A_i + lam I)^-1,

th_i(w) = M_i (b_i + lam w),   grad F_i(w) = lam (w - th_i(w)) = lam M_i (A_i w - b_i).
"""

from __future__ import annotations

import numpy as np
from problems import Quadratic, federation, quadratic, random_quadratics, run, weights
from small import algorithm

from conformance import FIXED_POINT, cannot, check, mutant
from perfed.evaluate import Protocol, adapted_models

N, D = 5, 4
A, B = random_quadratics(N, D)  # eigenvalues in [.5, 2]
BEST = np.linalg.solve(A, B[..., None])[..., 0]
CONSENSUS = np.linalg.solve(A.sum(0), B.sum(0))
START = np.array([3.0, -1.0, 0.5, 2.0])
EYE = np.eye(D)


def build(start=START, users=range(N), active=None, backend="vmap", **fields):
    xs = [quadratic(A[i], B[i]) for i in users]
    return federation(algorithm("pfedme", batch=1, **fields), Quadratic(), xs, start, active=active, backend=backend)


def exact(lam: float, error: float = 1e-17) -> dict:
    """Steps of size 2/(mu + L + 2 lam) shrink the error of an inner solve by (L - mu)/(L + mu + 2 lam) each, here to ``error``."""
    rate = 1.5 / (2.5 + 2 * lam)
    return {"lam": lam, "p_lr": 2 / (2.5 + 2 * lam), "inner_steps": int(np.ceil(np.log(error) / np.log(rate)))}


def theta(w: np.ndarray, lam: float) -> np.ndarray:
    """[N, d] proximal points."""
    return np.linalg.solve(A + lam * EYE, (B + lam * w)[..., None])[..., 0]


def stored(fed) -> np.ndarray:
    return fed.state.users["th"]["w"][0].numpy()


def gap(x, y) -> float:
    return float(np.abs(np.asarray(x) - np.asarray(y)).max())


def joint(lam: float) -> tuple[np.ndarray, np.ndarray]:
    """(w, [x_i]) that minimise sum_i f_i(x_i) + lam/2 ||x_i - w||^2, from its normal equations: no Moreau envelope is used."""
    size = (N + 1) * D
    H, c = np.zeros((size, size)), np.concatenate([*B, np.zeros(D)])
    for i in range(N):
        mine, shared = slice(i * D, (i + 1) * D), slice(N * D, size)
        H[mine, mine] = A[i] + lam * EYE
        H[mine, shared] = H[shared, mine] = -lam * EYE
        H[shared, shared] += lam * EYE
    x = np.linalg.solve(H, c).reshape(N + 1, D)
    return x[-1], x[:-1]


def simulate(cohorts, *, beta, lam, p_lr, inner_steps, tau, server_mix=1.0, theta_init="paper", train_all=False):
    """The docstring of the method in numpy; th of users that never trained is NaN."""
    w, th = START.copy(), np.full((N, D), np.nan)
    for active in cohorts:
        uploads = []
        for i in range(N) if train_all else active:
            wi, t = w.copy(), w if np.isnan(th[i]).any() else th[i]
            for _ in range(tau):
                t = wi if theta_init == "paper" else t
                for _ in range(inner_steps):
                    t = t - p_lr * (A[i] @ t - B[i] + lam * (t - wi))
                wi = wi - beta * lam * (wi - t)
            th[i] = t
            if i in active:
                uploads.append(wi)
        w = (1 - server_mix) * w + server_mix * np.mean(uploads, 0)
    return w, th


def deviation(rounds=4, backend="vmap", **fields) -> float:
    """Largest error of w and of every stored th against ``simulate``, 2 of 5 users a round."""
    fed = build(active=2, backend=backend, **fields)
    cohorts = [fed.cohorts(k)[0] for k in range(rounds)]
    w, th = simulate(cohorts, **fields)
    run(fed, rounds)
    trained = ~np.isnan(th).any(1)
    untouched = gap(stored(fed)[~trained], START) if not trained.all() else 0.0
    return max(gap(weights(fed), w), gap(stored(fed)[trained], th[trained]), untouched)


COMMON = {"beta": 0.2, "lam": 1.5, "p_lr": 0.2, "inner_steps": 2, "tau": 3}


@check("pfedme", "iterates are those of algorithm 1 (partial participation, truncated inner solves)", tolerance=1e-12)
def iterates():
    return max(deviation(backend=b, **COMMON) for b in ("vmap", "loop"))


@check("pfedme", "iterates with warm starts", tolerance=1e-12)
def warm():
    return deviation(**COMMON, theta_init="warm")


@check("pfedme", "iterates when all users train and the active ones report", tolerance=1e-12)
def everyone():
    return max(deviation(**COMMON, theta_init=t, train_all=True) for t in ("paper", "warm"))


@check("pfedme", "iterates with server_mix 0.5 and 2", tolerance=1e-12)
def server_mix():
    return max(deviation(**COMMON, server_mix=m) for m in (0.5, 2.0))


@check("pfedme", "who trains does not move w with theta_init=paper", tolerance=0)
def train_all_moves_nothing():
    one, other = (run(build(active=2, **COMMON, train_all=t), 3) for t in (False, True))
    return gap(weights(one), weights(other))


@check("pfedme", "two inner steps feel the pull", tolerance=1e-14)
def pull():
    # th_1 = w - p g(w); th_2 = th_1 - p (g(th_1) + lam (th_1 - w)): the pull adds p^2 lam g(w) to plain gradient descent.
    lam, p = 1.5, 0.2
    fed = run(build(beta=0.1, tau=1, lam=lam, p_lr=p, inner_steps=2), 1)
    g = A @ START - B
    free = START - p * g
    free = free - p * (np.einsum("nij,nj->ni", A, free) - B)
    return gap(stored(fed) - free, p * p * lam * g)


@check("pfedme", "th_i(w) = (A_i + lam I)^-1 (b_i + lam w)", tolerance=1e-13)
def proximal_point():
    return max(gap(stored(run(build(beta=0.1, tau=1, **exact(lam)), 1)), theta(START, lam)) for lam in (0.3, 2.0, 15.0))


@check("pfedme", "w* solves sum (A_i + lam I)^-1 (A_i w - b_i) = 0 and stays; the mean of th_i(w*) is w*", tolerance=1e-13)
def stationary():
    lam = 2.0
    M = np.linalg.inv(A + lam * EYE)
    w = np.linalg.solve(np.einsum("nij,njk->ik", M, A), np.einsum("nij,nj->i", M, B))
    fed = run(build(start=w, beta=0.4, tau=1, **exact(lam)), 1)
    return max(gap(weights(fed), w), gap(stored(fed).mean(0), w))


@check("pfedme", "beta lam = 1: w_i becomes th (proximal point method)", tolerance=1e-13)
def proximal_point_method():
    lam, w = 2.0, START
    fed = run(build(users=[2], beta=0.5, tau=3, **exact(lam)), 1)
    for _ in range(3):
        w = theta(w, lam)[2]
    return max(gap(weights(fed), w), gap(weights(fed), stored(fed)[0]))


@check("pfedme", "tau = 1, exact th: w -= beta grad F(w)", tolerance=1e-10)
def gradient_descent():
    lam, beta, h = 2.0, 0.3, 1e-3

    def envelopes(w):  # F by its definition; central differences of a quadratic have no error but round-off / h
        th = theta(w, lam)
        return np.mean([t @ Ai @ t / 2 - bi @ t + lam / 2 * np.sum((t - w) ** 2) for t, Ai, bi in zip(th, A, B, strict=True)])

    grad = np.array([(envelopes(START + h * e) - envelopes(START - h * e)) / (2 * h) for e in EYE])
    return gap(weights(run(build(beta=beta, tau=1, **exact(lam)), 1)), START - beta * grad)


@check("pfedme", "proximal adaptation from w and from th: the steps, and their limit th_i(w)", tolerance=1e-12)
def adaptation():
    lam, p = 1.5, 0.2
    fed = run(build(active=2, **COMMON), 3)
    w, th, worst = weights(fed), stored(fed), 0.0
    protocol = Protocol(label="clean", source="train", support=None, batch=None, repeats=1, steps=(0, 3), lr=fed.algo.inner_step)
    for i in range(N):
        got = adapted_models(fed, protocol, 0, i, 3)
        for name, t in {"personal": th[i] if fed.times_sampled[0, i] else w, "adapted": w}.items():
            for _ in range(3):
                t = t - p * (A[i] @ t - B[i] + lam * (t - w))
            worst = max(worst, gap(got[name]["w"].numpy(), t))
        far = adapted_models(fed, protocol, 0, i, 80)  # (1 - .2 2)^80 = 2e-18
        worst = max(worst, *(gap(far[name]["w"].numpy(), theta(w, lam)[i]) for name in ("personal", "adapted")))
    return worst


def fixed_point(tau: int, inner: dict, solve) -> tuple[float, float]:
    """A local round takes w to x_i* + (I - beta lam S_i)(w - x_i*), where w - th_i = S_i (w - x_i*).

    So w is fixed where sum_i Q_i (w - x_i*) = 0 with Q_i = I - (I - beta lam S_i)^tau.
    """
    lam = inner["lam"]
    beta = 0.9 / lam
    Q = np.stack([EYE - np.linalg.matrix_power(EYE - 0.9 * solve(Ai), tau) for Ai in A])
    w = np.linalg.solve(Q.sum(0), np.einsum("nij,nj->i", Q, BEST))
    fed = run(build(beta=beta, tau=tau, **inner), {1: 60, 5: 14, 20: 4}[tau])
    return gap(weights(fed), w), gap(w, joint(lam)[0])


for _tau in (1, 5, 20):

    @check("pfedme", f"fixed point of w, exact th, tau = {_tau}", tolerance=1e-11, group=FIXED_POINT)
    def _exact(tau=_tau):
        return fixed_point(tau, exact(1.0, 1e-12), lambda Ai: np.linalg.solve(Ai + EYE, Ai))  # S = M A


@check("pfedme", "fixed point of w, 5 inner steps, tau = 5", tolerance=1e-11, group=FIXED_POINT)
def truncated():
    # K steps of size p from w reach th_i(w) + (I - p (A + lam))^K (w - th_i(w)), so S = (I - (I - p (A + lam))^K) M A.
    def solve(Ai):
        return (EYE - np.linalg.matrix_power(EYE - 0.2 * (Ai + EYE), 5)) @ np.linalg.solve(Ai + EYE, Ai)

    return fixed_point(5, {"lam": 1.0, "p_lr": 0.2, "inner_steps": 5}, solve)


@check("pfedme", "tau = 1: (w, th) minimise sum f_i(x_i) + lam/2 ||x_i - w||^2 (the minimiser of L2GD and EASGD)", 1e-11, FIXED_POINT)
def talk():
    w, x = joint(1.0)
    fed = run(build(beta=0.9, tau=1, **exact(1.0, 1e-12)), 60)
    return max(gap(weights(fed), w), gap(stored(fed), x)), gap(weights(fed), w)


@check("pfedme", "lam to infinity: the consensus optimum", tolerance=1e-6, group=FIXED_POINT)
def strong():
    # grad F -> grad f, error of order 1/lam = 1e-7; beta lam is large, but tau = 1 is gradient descent, stable for beta L < 2.
    fed = run(build(beta=0.8, tau=1, **exact(1e7)), 80)
    return gap(weights(fed), CONSENSUS), gap(weights(fed), joint(1e7)[0])


@check("pfedme", "lam to 0: the mean of the users' own optima", tolerance=1e-6, group=FIXED_POINT)
def weak():
    fed = run(build(beta=0.9e7, tau=1, **exact(1e-7, 1e-9)), 12)
    return gap(weights(fed), BEST.mean(0)), gap(weights(fed), joint(1e-7)[0])


cannot("pfedme", "the fixed point for tau > 1 minimises F", "w_i drifts towards x_i* within a round, as FedAvg's local models do")
cannot("pfedme", "one inner step from w_i shows the pull", "lam (th - w_i) is zero where the solve starts; two steps show it")
cannot("pfedme", "lam = 0 is local training", "w_i = w_i - beta lam (w_i - th) then never moves; lam -> 0 with beta lam fixed is tested")

STEP = "t - self.p_lr * (gt + self.lam * (t - w))"
mutant("pfedme", "pull has the wrong sign", STEP, "t - self.p_lr * (gt - self.lam * (t - w))")
mutant("pfedme", "no pull", STEP, "t - self.p_lr * gt")
mutant("pfedme", "pull with factor 2", STEP, "t - self.p_lr * (gt + 2 * self.lam * (t - w))")
mutant("pfedme", "pull outside the step size", STEP, "t - self.p_lr * gt - self.lam * (t - w)")
mutant("pfedme", "gradient at w_i, not at th", 'task.grad(th, batches["outer"])', 'task.grad(local.w, batches["outer"])')
mutant("pfedme", "outer step without lam", "tree.axpy(-self.beta * self.lam,", "tree.axpy(-self.beta,")
mutant("pfedme", "outer step has the wrong sign", "tree.axpy(-self.beta * self.lam,", "tree.axpy(self.beta * self.lam,")
mutant("pfedme", "stored th is an alias of w_i", '{"th": local.th,', '{"th": local.w,')
mutant("pfedme", "th goes up", "return local.w, {", "return local.th, {")
mutant("pfedme", "warm and paper starts exchanged", 'self.theta_init == "warm"', 'self.theta_init != "warm"')
mutant("pfedme", "a new user warm-starts from w_0", 'tree.where(user["rounds"] > 0, user["th"], down)', 'user["th"]')
mutant("pfedme", "server weights exchanged", 'server["w"], mean)}', 'mean, server["w"])}')
mutant("pfedme", "adaptation is anchored at th", "Anchored(th, w)", "Anchored(th, th)")
mutant("pfedme", "adaptation without the pull", "        return self.lam\n\n    def init", "        return 0.0\n\n    def init")
