"""Local training: no communication; who trains how often, and where it ends."""

import numpy as np
from problems import Quadratic, blobs, federation, mlp, quadratic, random_quadratics, run, weights
from small import algorithm

from conformance import FIXED_POINT, cannot, check, mutant
from conformance.fedavg import far, unlike
from perfed.evaluate import Protocol, adapted_models

SCHEDULES = ("cohort", "equal")
C = np.array([1.0, 2.0, 3.0, 4.0, 5.0])


def models(fed, s: int = 0) -> np.ndarray:
    """[N, d] the users' own models."""
    return np.concatenate([t[s].numpy().reshape(len(t[s]), -1) for t in fed.state.users.values()], axis=1)


def line(active: int = 5, backend: str = "vmap", seeds=(0,), users: int = 5, **options):
    """f_i = w^2/2 - c_i w: a step from w goes to c_i + (1 - beta)(w - c_i), so s steps from 0 end at c_i (1 - .9^s)."""
    algo = algorithm("local", beta=0.1, batch=1, **options)
    return federation(algo, Quadratic(), [quadratic(np.eye(1), [c]) for c in C[:users]], [0.0], active=active, backend=backend, seeds=seeds)


def network(algo, xs=None, ys=None, **options):
    model, start = mlp()
    if xs is None:
        xs, ys = blobs([9, 10, 11, 12])
    return federation(algo, model, xs, start, ys=ys, **options)


@check("local", "a lone user walks with FedAvg (bitwise), both schedules", 0)
def lone():
    worst = 0.0
    xs, ys = blobs([11])
    for schedule, backend in zip(SCHEDULES, ("vmap", "loop"), strict=True):
        local = network(algorithm("local", beta=0.3, tau=3, batch=4, schedule=schedule), xs, ys, backend=backend)
        plain = network(algorithm("fedavg", beta=0.3, tau=3, batch=4), xs, ys, backend=backend)
        for _ in range(3):
            worst = max(worst, unlike(models(run(local, 1))[0], weights(run(plain, 1))))
    return worst


@check("local", "schedule=cohort, first round: the mean over the cohort is FedAvg's model (the same batches)", 1e-15)
def same_batches():
    local = network(algorithm("local", beta=0.3, tau=3, batch=4), active=2)
    plain = network(algorithm("fedavg", beta=0.3, tau=3, batch=4), active=2)
    inside = local.cohorts(0)[0]
    return far(models(run(local, 1))[inside].mean(0), weights(run(plain, 1)))


@check("local", "schedule=cohort: c_i (1 - (1-beta)^(tau times drawn)); w_0 for a user that was never drawn", 1e-14)
def cohort():
    worst = 0.0
    for backend in ("vmap", "loop"):
        fed = line(active=2, backend=backend, seeds=(0, 1), tau=2)
        times = np.stack([np.bincount(np.concatenate([fed.cohorts(k)[s] for k in range(2)]), minlength=5) for s in range(2)])
        assert (times == 0).any(1).all()
        run(fed, 2)
        worst = max(worst, *(far(models(fed, s)[:, 0], C * (1 - 0.9 ** (2 * times[s]))) for s in range(2)))
    return worst


@check("local", "schedule=equal: c_i (1 - (1-beta)^round(K r tau)) after every round", 1e-13)
def equal():
    worst = 0.0
    for users, active, tau, steps in [
        (5, 2, 3, [1, 2, 4, 5, 6, 7, 8]),  # multiples of 1.2: 1.2 2.4 3.6 4.8 6 7.2 8.4
        (5, 5, 2, [2, 4, 6]),
        (5, 1, 1, [0, 0, 1, 1, 1, 1, 1, 2]),  # multiples of 0.2
        (5, 3, 4, [2, 5, 7, 10, 12]),  # multiples of 2.4
        (4, 1, 1, [0, 1, 1, 1, 1, 2]),  # multiples of 0.25: a half goes up
    ]:
        fed = line(active=active, tau=tau, schedule="equal", users=users)
        for done in steps:
            worst = max(worst, far(models(run(fed, 1))[:, 0], C[:users] * (1 - 0.9**done)))
            worst = max(worst, abs(fed.costs[0].steps - users * done))
    return worst


@check("local", "r = 1: the two schedules are one (bitwise)", 0)
def one_schedule():
    a, b = (models(run(network(algorithm("local", beta=0.3, tau=2, batch=4, schedule=s)), 3)) for s in SCHEDULES)
    return unlike(a, b)


@check("local", "other users' data change nothing for a user (bitwise)", 0)
def alone():
    worst = 0.0
    xs, ys = blobs([9, 10, 11, 12])
    for schedule in SCHEDULES:
        algo = algorithm("local", beta=0.3, tau=2, batch=4, schedule=schedule)
        one = models(run(network(algo, xs, ys, active=3), 3))
        two = models(run(network(algo, [*xs[:3], xs[3] + 1], [*ys[:3], (ys[3] + 1) % 3], active=3), 3))
        worst = max(worst, unlike(one[:3], two[:3]))
    return worst


@check("local", "costs: nothing is sent, 1 gradient a step of every user that computes", 0)
def costs():
    worst = 0.0
    # 3 rounds, 2 of 5 users, tau = 3: cohort 18 steps; equal round(3 .4 3) = 4 steps (3.6 rounded) of each of 5 users.
    for schedule, steps, rounds in (("cohort", 18, 6), ("equal", 20, 15)):
        cost = run(line(active=2, tau=3, schedule=schedule), 3).costs[0]
        got = (cost.grads, cost.hvps, cost.losses, cost.floats_down, cost.floats_up, cost.steps, cost.user_rounds)
        worst = max(worst, far(got, (steps, 0, 0, 0, 0, steps, rounds)))
    return worst


@check("local", "until converged, all data: x_i* = A_i^-1 b_i, the minimiser of each f_i", 1e-12, FIXED_POINT)
def optimum():
    A, b = random_quadratics(4, 3)
    fed = federation(algorithm("local", beta=0.5, tau=10, batch=1), Quadratic(), list(map(quadratic, A, b)), [3.0] * 3)
    deviation = far(models(run(fed, 12)), np.linalg.solve(A, b[..., None])[..., 0])
    return deviation, deviation


@check("local", "J steps of fine-tuning go on from the own model: x_i* + (I - alpha A_i)^J (w_i - x_i*)", 1e-13)
def fine_tuned():
    fed = run(line(tau=3), 2)
    protocol = Protocol(label="clean", source="train", support=None, batch=None, repeats=1, steps=(0,), lr=0.25)
    worst = 0.0
    for user in range(5):
        for steps in (0, 1, 4):
            want = C[user] + 0.75**steps * (C[user] * (1 - 0.9**6) - C[user])
            worst = max(worst, far(adapted_models(fed, protocol, 0, user, steps)["personal"]["w"].numpy(), [want]))
    return worst


cannot(
    "local",
    "data of all users in one model (pooled) is an upper bound for personalised accuracy",
    "one model cannot fit users whose labels contradict each other; local training can: pooled training is a reference, not a bound",
)

for name, old, new in [
    ("every round starts at zero", "return Local(user,", "return Local(tree.zeros(user),"),
    ("the user keeps what he started from", "return (), local.w", "return (), user"),
    ("users send their models", "return (), local.w", "return local.w, local.w"),
    ("the cohort takes a step less", "            return self.tau\n", "            return self.tau - 1\n"),
    ("equal: what was done is cut", "2 * info.round * self.tau * info.active + info.n)", "2 * info.round * self.tau * info.active)"),
    ("equal: what is to be done is cut", "+ 1) * self.tau * info.active + info.n)", "+ 1) * self.tau * info.active)"),
    ("equal: tau steps whatever r", "return (after - done).to(torch.int64)", "return self.tau"),
    ("equal: all steps so far in each round", "return (after - done).to(torch.int64)", "return after.to(torch.int64)"),
    ("equal: only the cohort trains", 'return "all" if self.schedule == "equal" else "sampled"', 'return "sampled"'),
    ("cohort: all train", 'return "all" if self.schedule == "equal" else "sampled"', 'return "all"'),
    ("all start at zero", "tree.repeat(params, population.n)", "tree.repeat(tree.zeros(params), population.n)"),
]:
    mutant("local", name, old, new)
mutant(
    "local",
    "equal: a half goes down",
    """        done = (2 * info.round * self.tau * info.active + info.n) // (2 * info.n)
        after = (2 * (info.round + 1) * self.tau * info.active + info.n) // (2 * info.n)
""",
    """        done = (2 * info.round * self.tau * info.active + info.n - 1) // (2 * info.n)
        after = (2 * (info.round + 1) * self.tau * info.active + info.n - 1) // (2 * info.n)
""",
)
mutant(
    "local",
    "the gradient has the wrong sign",
    '        return {"personal": user}\n',
    """        return {"personal": user}

    def direction(self, task, w, batches, info):
        return tree.scale(-1, task.grad(w, batches["outer"]))
""",
)
mutant(
    "local",
    "the models are averaged",
    """        return (), local.w

    def aggregate(self, task, server, uploads, cohort):
        return server, ()
""",
    """        return local.w, local.w

    def floats_up(self, upload, info):
        return 0

    def floats_down(self, down, reply, info):
        return 0

    def aggregate(self, task, server, uploads, cohort):
        return server, tree.map(lambda t: t.mean(0).expand(t.shape), uploads)

    def settle(self, user, reply):
        return reply
""",
)
