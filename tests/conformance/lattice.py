"""Methods that are one method at the ends of their switches, all on one small network, the same data, users and batches.

    FedAvg        = Per-FedAvg(alpha=0) = Reptile(eps=1) = FedProx(mu=0) = q-FedAvg(q=0) = SCAFFOLD(c held at 0)
                  = APFL.w = Ditto.w = ARUBA(b, G held) = partial(nothing personal)
    MAML          = Per-FedAvg(tau=1, all users, B''=B) = FedMeta = Meta-SGD(a held); likewise first order
    local         = Ditto(0).v = L2GD(0) = FedU(0) = EASGD(0) = APFL(1).v = mtl(0) = partial(all personal) = FedAvg fine-tuned from w_0
    one penalty   FedU complete(lam/(2n)) = L2GD(lam) = mtl(lam), as forces on given models, and as minimisers; EASGD, pFedMe join
    consensus     ADMM, SCAFFOLD, L2GD(pull=1), pFedMe(lam large), FedAvg(tau=1): (sum A_i)^-1 sum b_i
    J = 0         no step of fine-tuning is the global model

The method of all these checks is ``lattice``; the methods that one compares are words of its name (``concerns`` in
scripts/conformance.py finds them there). A check is registered only if the registry has all its methods when this is imported.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from problems import Quadratic, blobs, drawn, federation, mlp, quadratic, random_quadratics, run, weights
from small import algorithm

from conformance import FIXED_POINT, IDENTITY, check
from conformance.fedavg import far, flat, net_loss, unlike
from conformance.perfedavg import maml
from perfed import tree
from perfed.algorithms import ALGORITHMS
from perfed.evaluate import Protocol, adapted_models
from perfed.federate import Federation

SIZES = [9, 14, 13, 20, 9, 16]


def equal(name: str, methods: str, tolerance: float, group: str = IDENTITY) -> Callable:
    """Register a check that compares ``methods``, names with spaces between; not if one of them does not exist."""
    missing = set(methods.split()) - set(ALGORITHMS)
    return (lambda f: f) if missing else check("lattice", name, tolerance, group)


def network(algo, active: int = 3, backend: str = "vmap", kind: type[Federation] = Federation, sizes=SIZES):
    """The common problem: 3 -> 4 -> 3 with ELU and cross-entropy, users of different sizes and means."""
    model, start = mlp()
    xs, ys = blobs(sizes)
    return federation(algo, model, xs, start, ys=ys, active=active, backend=backend, kind=kind)


def held(name: str, **overrides):
    """A subclass of the registered method with some methods replaced: parts of its state held still."""
    return type("Held", (ALGORITHMS[name],), overrides)


def models(users) -> np.ndarray:
    """[N, d] of user models {name: [1, N, ...]}."""
    return np.concatenate([t[0].numpy().reshape(t.shape[1], -1) for t in users.values()], axis=1)


# ---------------------------------------------------------------- FedAvg

COMMON = {"beta": 0.5, "tau": 3, "batch": 4}  # a beta that is a power of 2: ARUBA's sqrt(beta^2) is exact
ROUNDS = 2


def scaffold_held(**fields):
    # A user's reply is his model alone: c and c_i stay at 0.
    def send(self, task, down, user, local, info):
        up, _ = ALGORITHMS["scaffold"].send(self, task, down, user, local, info)
        return {**up, "dc": tree.zeros(up["dc"])}, user

    return held("scaffold", send=send)(name="scaffold", **fields)


def aruba_held(**fields):
    def aggregate(self, task, server, uploads, cohort):
        new, replies = ALGORITHMS["aruba"].aggregate(self, task, server, uploads, cohort)
        return {**new, "b": server["b"], "G": server["G"]}, replies

    return held("aruba", aggregate=aggregate)(name="aruba", **fields)


def plain(method: str, **more):
    return lambda **fields: algorithm(method, **fields, **more)


# What it is called, the method, how it is made, tolerance: 0 is bitwise
AS_FEDAVG = [
    ("perfedavg(alpha=0)", "perfedavg", plain("perfedavg", alpha=0.0), 0),
    ("perfedavg_fo(alpha=0)", "perfedavg_fo", plain("perfedavg_fo", alpha=0.0), 0),
    ("perfedavg_hf(alpha=0)", "perfedavg_hf", plain("perfedavg_hf", alpha=0.0), 0),
    ("reptile(eps=1)", "reptile", plain("reptile", eps=1.0), 0),
    ("fedprox(mu=0)", "fedprox", plain("fedprox", mu=0.0), 0),
    ("qfedavg(q=0), up to round-off", "qfedavg", plain("qfedavg", q=0.0), 1e-13),
    ("scaffold(c, c_i held at 0), up to round-off", "scaffold", scaffold_held, 1e-14),
    ("apfl.w", "apfl", plain("apfl", mix=0.3), 0),
    ("apfl.w, adaptive", "apfl", plain("apfl", mix=0.3, adaptive=True), 0),
    ("ditto.w", "ditto", plain("ditto", lam=0.7), 0),
    ("aruba(b, G held)", "aruba", aruba_held, 0),
    ("partial(personal=none)", "partial", plain("partial", personal="none"), 0),
]


def is_fedavg(make: Callable, backend: str) -> float:
    one, other = network(algorithm("fedavg", **COMMON), backend=backend), network(make(**COMMON), backend=backend)
    worst = 0.0
    for _ in range(ROUNDS):
        worst = max(worst, unlike(weights(run(one, 1)), weights(run(other, 1))))
    assert far(weights(one), flat(one.initial[0])) > 0.05  # it moved
    return worst


for _i, (_title, _method, _make, _tolerance) in enumerate(AS_FEDAVG):
    equal(f"fedavg = {_title}", f"fedavg {_method}", _tolerance)(
        lambda make=_make, backend=("vmap", "loop")[_i % 2]: is_fedavg(make, backend)
    )


@equal("fedavg(tau=1) = fedmeta(alpha=0) = metasgd(a held near 0)", "fedavg fedmeta metasgd", 1e-12)
def one_step_without_adaptation():
    fields = {"beta": 0.5, "tau": 1, "batch": 4}
    want = weights(run(network(algorithm("fedavg", **fields)), ROUNDS))
    meta = run(network(algorithm("fedmeta", alpha=0.0, support=None, **fields)), ROUNDS)
    steps = run(network(algorithm("metasgd", alpha=1e-14, support=None, learn=False, **fields)), ROUNDS)  # alpha = 0 is refused
    return max(unlike(weights(meta), want), far(weights(steps), want))


@equal("fedavg(tau=1, weighted by samples, all data) = pooled(tau=1)", "fedavg pooled", 1e-14)
def pooled():
    fields = {"beta": 0.5, "tau": 1, "batch": 100}
    one = network(algorithm("fedavg", **fields, aggregation="samples"), active=6)
    other = network(algorithm("pooled", **fields), active=6)
    return far(weights(run(one, ROUNDS)), weights(run(other, ROUNDS)))


# ---------------------------------------------------------------- MAML


def autodiff_maml(variant: str, fed: Federation, alpha: float, beta: float, rounds: int) -> np.ndarray:
    """MAML (or first order) over all users, on the batches that the federation reads."""
    xs, ys = (torch.from_numpy(np.concatenate(part)) for part in blobs(SIZES))
    p = list(mlp()[1].values())
    for k in range(rounds):
        picks = [drawn(fed, i, k, 1) for i in range(len(SIZES))]
        tasks = [(xs[d["inner"][0]], ys[d["inner"][0]], xs[d["outer"][0]], ys[d["outer"][0]]) for d in picks]
        p = maml(p, tasks, alpha, beta, variant, None)
    return flat(p)


def maml_family(variant: str, first_order: bool) -> float:
    alpha, fields = 0.4, {"beta": 0.5, "tau": 1, "batch": 4}
    per = {} if first_order else {"hess_batch": "inner"}
    algos = [
        algorithm(variant, alpha=alpha, **fields, **per),
        algorithm("fedmeta", alpha=alpha, support=None, first_order=first_order, **fields),
        algorithm("metasgd", alpha=alpha, support=None, first_order=first_order, learn=False, **fields),
    ]
    feds = [network(algo, active=6, backend=b) for algo, b in zip(algos, ("vmap", "vmap", "loop"), strict=True)]
    want = autodiff_maml(variant, feds[0], alpha, 0.5, ROUNDS)
    got = [weights(run(fed, ROUNDS)) for fed in feds]
    return max(far(w, want) for w in got)


@equal("perfedavg(tau=1, r=1, hess_batch=inner) = fedmeta = metasgd(a held) = MAML by autodiff", "perfedavg fedmeta metasgd", 1e-13)
def exact_maml():
    return maml_family("perfedavg", False)


@equal("perfedavg_fo(tau=1, r=1) = fedmeta(first_order) = metasgd(first_order, a held) = FO-MAML", "perfedavg_fo fedmeta metasgd", 1e-13)
def first_order_maml():
    return maml_family("perfedavg_fo", True)


# ---------------------------------------------------------------- local training


class Coin(Federation):
    """Every round's coin gives ``tau`` local steps of L2GD: T = floor(log(1 - coin) / log(1 - p)), in the middle of its interval."""

    def info(self, lanes, k):
        fields = super().info(lanes, k)
        p = 1 / self.algo.tau
        return {**fields, "coin": torch.full_like(fields["coin"], 1 - (1 - p) ** (self.algo.tau + 0.5))}


AS_LOCAL = [
    ("ditto(lam=0).v", "ditto", {"lam": 0.0}, lambda users: users["v"]),
    ("apfl(mix=1).v", "apfl", {"mix": 1.0}, lambda users: users["v"]),
    ("fedu(lam=0)", "fedu", {"lam": 0.0}, lambda users: users["w"]),
    ("easgd(beta_e=0)", "easgd", {"beta_e": 0.0}, lambda users: users["x"]),
    ("mtl(lam=0)", "mtl", {"lam": 0.0}, lambda users: users["w"]),
    ("partial(personal=all)", "partial", {"personal": "all"}, lambda users: users),
    ("l2gd(pull=0), all users, tau steps by its coin", "l2gd", {"pull": 0.0}, lambda users: users["x"]),
]


def is_local(method: str, options: dict, of: Callable, backend: str) -> float:
    """2 of 6 users active, so that some rest; L2GD trains all."""
    active, kind = (6, Coin) if method == "l2gd" else (2, Federation)
    one = network(algorithm("local", **COMMON), active=active, backend=backend)
    other = network(algorithm(method, **COMMON, **options), active=active, backend=backend, kind=kind)
    worst = 0.0
    for _ in range(ROUNDS):
        worst = max(worst, unlike(models(run(one, 1).state.users), models(of(run(other, 1).state.users))))
    assert far(models(one.state.users), flat(one.initial[0])) > 0.05
    return worst


for _i, (_title, _method, _options, _of) in enumerate(AS_LOCAL):
    equal(f"local = {_title}", f"local {_method}", 0)(
        lambda method=_method, options=_options, of=_of, backend=("vmap", "loop")[_i % 2]: is_local(method, options, of, backend)
    )


@equal("local (K rounds, all data) = fedavg before round 1, fine-tuned by J = K tau steps", "local fedavg", 1e-14)
def fine_tuned_from_the_start():
    algo = algorithm("local", beta=0.5, tau=2, batch=100)
    own = models(run(network(algo, active=6), 2).state.users)
    fed = network(algorithm("fedavg", beta=0.5, tau=2, batch=100))
    protocol = Protocol(label="clean", source="train", support=None, batch=None, repeats=1, steps=(0,), lr=0.5)
    return max(far(flat(adapted_models(fed, protocol, 0, i, 4)["global"]), own[i]) for i in range(len(SIZES)))


# ---------------------------------------------------------------- one penalty

N, D = 5, 3
X = np.random.default_rng(4).normal(size=(N, D))  # given models of the users
A, B = random_quadratics(N, D, seed=6)
A = (A + np.eye(D)) / 2  # eigenvalues in [0.75, 1.5]: fixed points are reached soon
LAM, BETA = 0.4, 0.05


def minimiser(lam: float) -> tuple[np.ndarray, np.ndarray]:
    """(x_i, their mean) that minimise sum f_i(x_i) + lam/2 sum ||x_i - xbar||^2: A_i x_i - b_i + lam (x_i - xbar) = 0."""
    # x_i = (A_i + lam I)^-1 (b_i + lam xbar), and the mean of both sides
    inverse = np.linalg.inv(A + lam * np.eye(D))
    mean = np.linalg.solve(np.eye(D) - lam * inverse.mean(0), np.einsum("nij,nj->i", inverse, B) / N)
    return np.einsum("nij,nj->ni", inverse, B + lam * mean), mean


def placed(fed: Federation, x: np.ndarray) -> Federation:
    """The users' models are x [N, D], and so is what the server knows of them."""
    for t in tree.leaves(fed.state.users):
        if t.ndim == 3:  # [1, N, D]
            t[0] = torch.from_numpy(x)
    w = fed.state.server["w"]["w"]  # [1, D] a centre or mean, [1, N, D] all models
    new = torch.from_numpy(np.broadcast_to(x if w.ndim == 3 else x.mean(0), w.shape).copy())
    fed.state = fed.state._replace(server={**fed.state.server, "w": {"w": new}})
    return fed


class NoStep(Federation):
    """L2GD's coin shows a pull at once."""

    def info(self, lanes, k):
        fields = super().info(lanes, k)
        return {**fields, "coin": torch.zeros_like(fields["coin"])}


def force(method: str, x: np.ndarray, lam: float = LAM) -> np.ndarray:
    """[N, D] the penalty's force in a round where the losses are flat, over the step size: what is added to the gradients."""
    n, kind, options, size = len(x), Federation, {}, BETA
    if method == "fedu":  # lam/2 of FedU sum over ordered pairs = n lam_FedU sum ||x_i - xbar||^2: lam = 2 n lam_FedU
        options = {"lam": lam / (2 * n)}
    elif method == "l2gd":  # a pull of pull = alpha lam/(n p) for (1 - p)/p local steps of beta = alpha/(n (1 - p)) on average
        p, kind = 0.25, NoStep
        size = BETA * (1 - p) / p
        options = {"p": p, "pull": size * lam}
    elif method == "mtl":
        options = {"lam": lam, "layers": "all"}
    elif method == "easgd":  # alpha_e = beta rho
        options = {"beta_e": n * BETA * lam}
    flat_losses = [quadratic(0 * np.eye(x.shape[1]), 0 * row) for row in x]
    model = Quadratic()
    model.last_layer = lambda params: list(params)  # the formula has one parameter
    fed = federation(algorithm(method, beta=BETA, tau=1, batch=1, **options), model, flat_losses, 0 * x[0], kind=kind)
    placed(fed, x)
    run(fed, 1)
    after = next(t for t in tree.leaves(fed.state.users) if t.ndim == 3)[0].numpy()
    if method == "l2gd":  # the mean is the cached one in a round without local steps: the server was given it
        assert fed.costs[0].steps == 0
    return (x - after) / size


PENALTY = "fedu l2gd mtl easgd"


@equal("force of the penalty: fedu(complete, lam/(2n)) = l2gd(lam) = mtl(lam) = easgd(rho=lam, centre at the mean)", PENALTY, 1e-13)
def one_force():
    want = LAM * (X - X.mean(0))  # the gradient of lam/2 sum ||x_i - xbar||^2
    return max(far(force(method, X), want) for method in PENALTY.split())


@equal("at the minimiser of sum f_i(x_i) + lam/2 sum ||x_i - xbar||^2 forces balance gradients: fedu l2gd mtl easgd", PENALTY, 1e-12)
def one_minimiser():
    x, _ = minimiser(LAM)
    gradients = np.einsum("nij,nj->ni", A, x) - B
    return max(far(gradients + force(method, x), 0) for method in PENALTY.split())


@equal("sum_ij ||x_i - x_j||^2 (fedu) = 2n sum ||x_i - xbar||^2 (l2gd) = 2n tr(W (I - 11'/n) W') (mtl)", "fedu l2gd mtl", 1e-12)
def one_penalty():
    # The penalty along the line from all models alike to X, as the work of the measured force: linear in the distance, so the
    # midpoint rule is exact. FedU's objective counts every edge twice: lam_FedU/2 sum_ij ||x_i - x_j||^2.
    pairs = ((X[:, None] - X[None]) ** 2).sum()
    apart = ((X - X.mean(0)) ** 2).sum()
    omega = np.eye(N) - np.ones((N, N)) / N
    values = [LAM / (2 * N) / 2 * pairs, LAM / 2 * apart, LAM / 2 * np.trace(X.T @ omega @ X)]
    middle = X.mean(0) + (X - X.mean(0)) / 2
    work = [(force(method, middle) * (X - X.mean(0))).sum() for method in ("fedu", "l2gd", "mtl")]
    return far(values, work)


def settled(method: str, rounds: int, **fields) -> Federation:
    model = Quadratic()
    model.last_layer = lambda params: list(params)
    return run(federation(algorithm(method, batch=1, **fields), model, list(map(quadratic, A, B)), [1.0] * D), rounds)


@equal("pfedme = easgd = mtl = l2gd, tau = 1: one minimiser, w* the mean of th_i", "pfedme easgd mtl l2gd", 1e-9, FIXED_POINT)
def one_rest_point():
    # All at their fixed points for one lam; L2GD's coin never rests, so it is one pull after (1 - p)/p = 1 local step, from the
    # minimiser, with a small step: the change per step size is O(beta).
    x, mean = minimiser(LAM)
    me = settled("pfedme", 25, beta=1 / LAM, tau=1, lam=LAM, p_lr=0.65, inner_steps=22)
    easgd = settled("easgd", 100, beta=0.5, tau=1, beta_e=N * 0.5 * LAM)
    mtl = settled("mtl", 50, beta=0.7, tau=1, lam=LAM, layers="all")
    found = [
        (me.state.users["th"]["w"][0].numpy(), x),
        (weights(me), mean),
        (me.state.users["th"]["w"][0].numpy().mean(0), weights(me)),
        (easgd.state.users["x"]["w"][0].numpy(), x),
        (weights(easgd), mean),
        (mtl.state.users["w"]["w"][0].numpy(), x),
        (-force("l2gd", x), np.einsum("nij,nj->ni", A, x) - B),
    ]
    worst = max(far(a, b) for a, b in found)
    return worst, worst


# ---------------------------------------------------------------- consensus

CONSENSUS = np.linalg.solve(A.sum(0), B.sum(0))


def consensus(method: str, rounds: int, active: int = N, **fields) -> tuple[float, float]:
    fed = federation(algorithm(method, batch=1, **fields), Quadratic(), list(map(quadratic, A, B)), [1.0] * D, active=active)
    apart = far(weights(run(fed, rounds)), CONSENSUS)
    return apart, apart


AT_CONSENSUS = [
    ("fedavg, tau=1, all users", "fedavg", 40, {"beta": 0.7, "tau": 1}, 1e-10),
    ("admm, scheme=full", "admm", 60, {"scheme": "full", "beta": 0.4, "tau": 3, "lam": 1.0}, 1e-10),
    ("admm, 2 of 5 users", "admm", 160, {"active": 2, "beta": 0.4, "tau": 3, "lam": 1.0}, 1e-10),
    ("scaffold, option II, 2 of 5 users, tau=3", "scaffold", 120, {"active": 2, "beta": 0.1, "tau": 3}, 1e-10),
    ("scaffold, option I, 2 of 5 users, tau=3", "scaffold", 120, {"active": 2, "beta": 0.1, "tau": 3, "option": "I"}, 1e-10),
    # F of pFedMe has its minimiser O(1/lam) from the consensus optimum. beta lam = 1: proximal points.
    ("pfedme, lam=1e7", "pfedme", 10, {"beta": 1e-7, "tau": 1, "lam": 1e7, "p_lr": 1e-7, "inner_steps": 2, "start": True}, 1e-6),
]


def at_consensus(method: str, rounds: int, fields: dict) -> tuple[float, float]:
    if fields.get("start"):
        # Steps of 1/lam towards it would take millions of rounds: the point must stay, to O(1/lam) per step size.
        fields = {k: v for k, v in fields.items() if k != "start"}
        fed = federation(algorithm(method, batch=1, **fields), Quadratic(), list(map(quadratic, A, B)), CONSENSUS)
        moved = far(weights(run(fed, 1)), CONSENSUS) / fields["beta"]
        return moved, moved
    return consensus(method, rounds, **fields)


for _title, _method, _rounds, _fields, _tolerance in AT_CONSENSUS:
    equal(f"consensus optimum (sum A_i)^-1 sum b_i: {_title}", _method, _tolerance, FIXED_POINT)(
        lambda method=_method, rounds=_rounds, fields=_fields: at_consensus(method, rounds, fields)
    )


class OneStep(Federation):
    """L2GD's coin gives one local step in every round."""

    def info(self, lanes, k):
        fields = super().info(lanes, k)
        return {**fields, "coin": torch.full_like(fields["coin"], 1 - (1 - self.algo.rate) ** 1.5)}


@equal("consensus optimum (sum A_i)^-1 sum b_i: l2gd, pull=1, one step a pull", "l2gd", 1e-10, FIXED_POINT)
def consensus_of_l2gd():
    algo = algorithm("l2gd", beta=0.7, tau=2, batch=1, pull=1.0)
    fed = run(federation(algo, Quadratic(), list(map(quadratic, A, B)), [1.0] * D, kind=OneStep), 40)
    apart = far(fed.state.users["x"]["w"][0].numpy(), np.broadcast_to(CONSENSUS, (N, D)))
    return apart, apart


# ---------------------------------------------------------------- J = 0

JUDGED_GLOBAL = (
    "fedavg perfedavg perfedavg_fo perfedavg_hf reptile fedprox qfedavg scaffold aruba fedmeta metasgd apfl ditto pfedme easgd admm "
    "l2gd fedu pooled"
).split()


def untouched(method: str) -> float:
    """Deviation of what is judged as `global` after no step from the server's model; J = 1 must differ."""
    fields = {"support": None, "tau": 1} if method in ("fedmeta", "metasgd") else {"tau": 2}
    fed = run(network(algorithm(method, beta=0.3, batch=4, **fields)), 1)
    protocol = Protocol(label="clean", source="train", support=None, batch=None, repeats=1, steps=(0,), lr=0.5)
    w = weights(fed)
    assert far(flat(adapted_models(fed, protocol, 0, 0, 1)["global"]), w) > 1e-3
    return max(unlike(flat(adapted_models(fed, protocol, 0, i, 0)["global"]), w) for i in range(len(SIZES)))


for _method in JUDGED_GLOBAL:
    equal(f"no step of fine-tuning (J = 0) is the global model: {_method}", _method, 0)(lambda method=_method: untouched(method))


@equal("one step of fine-tuning on all data with beta = one more local step of fedavg, apfl.w, ditto.w", "fedavg apfl ditto", 1e-14)
def update():
    # FedAvg + update: w - alpha grad f_i(w), by autodiff
    model, _ = mlp()
    xs, ys = blobs(SIZES)
    worst = 0.0
    for method in ("fedavg", "apfl", "ditto"):
        fed = run(network(algorithm(method, beta=0.3, tau=2, batch=4)), 1)
        protocol = Protocol(label="clean", source="train", support=None, batch=None, repeats=1, steps=(0,), lr=0.3)
        p = [t[0].clone().requires_grad_() for t in fed.state.server["w"].values()]
        for i in (0, 3):
            g = torch.autograd.grad(net_loss(p, torch.from_numpy(xs[i]), torch.from_numpy(ys[i])), p)
            want = flat([t - 0.3 * gt for t, gt in zip(p, g, strict=True)])
            worst = max(worst, far(flat(adapted_models(fed, protocol, 0, i, 1)["global"]), want))
    return worst
