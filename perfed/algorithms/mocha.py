"""MOCHA: multi-task learning of linear models in the dual.

V. Smith, C.-K. Chiang, M. Sanjabi, A. Talwalkar, "Federated Multi-Task Learning", NeurIPS 2017 (arXiv 1705.10467),
algorithm 1, with the local solver SDCA (S. Shalev-Shwartz, T. Zhang, JMLR 14, 2013).
Objective, one task a user, each of C classes against the rest (y = 1 for the class, -1 for the others), n users:

    P(W) = sum_t sum_j l(w_t'x_tj, y_tj) + (lam / 2) tr(W Sigma^-1 W')          W = [w_1 .. w_n], Sigma PSD with trace 1
    D(a) = - sum_t sum_j l*(-a_tj) - (1 / (2 lam)) sum_st Sigma_st v_s'v_t
    v_t = sum_j a_tj x_tj,   w_t = (1 / lam) sum_s Sigma_ts v_s

    user t keeps the dual variables a_t, which start at 0; the server V = [v_1 .. v_n] and Sigma
    round k: the server draws A_k and sends each user his w_t and q_t = sigma' Sigma_tt / lam
      user t in A_k:  dv = 0;  repeat tau times, for each example j of a batch in turn:
        z = (w_t + q_t dv)'x_j                                                           his view of his own progress
        hinge:    d = y clip(y a_j + (1 - y z) / (q_t ||x_j||^2), 0, 1) - a_j            l = max(0, 1 - y z)
        squared:  d = (y - z - a_j) / (1 + q_t ||x_j||^2)                                l = (z - y)^2 / 2
        a_j = a_j + d;  dv = dv + d x_j
      v_t = v_t + dv;  the others' v_t and a_t stay (their theta is 1)
      learned, every `omega_every` rounds:  Sigma = (W'W)^(1/2) / tr (W'W)^(1/2)         W of all users, from V

sigma' = max_t sum_t' |Sigma_tt'| / Sigma_tt over the cohort (lemma 9 of the paper, where it is over all users): whatever the others
do, D cannot fall. lam is the authors' code's; the paper's lam1 tr(W Omega W') + lam2 ||W||^2 is Sigma^-1 ~ lam1 Omega + lam2 I.

Switches
    loss      `hinge` | `squared`
    relation  `independent`: Sigma = I/n, support vector machines or ridge regressions with the weight lam n | `mean`:
              Sigma ~ (I - 11'/n + kappa I)^-1, the users are pulled to their mean and kappa times as much to 0 | `learned`, from I/n
    floor     least eigenvalue of a learned Sigma, as a share of the mean one, 1/n. The authors' code has 1e-7 in place of
              floor/n, at which a user that has not trained yet would stay at 0

For linear models alone: model=logistic, whose bias is the weight of a feature that is always 1 (and regularised as all
others). There is no step size: beta is not used. The losses that are shown are the model's (cross-entropy), not l.
A batch counts as one gradient evaluation, which it costs.

Judged: `personal`, the w_t that the user was last sent (after his last round; he needs it once, so it is not counted in the costs).
Cold start: a user that was never drawn, or is new, has the mean of the models of those that were.
Before the first round the model is 0, whatever the initial model is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from perfed import tree
from perfed.algorithms.base import Algorithm, choice, register
from perfed.errors import UserError, require
from perfed.models import Logistic
from perfed.types import Params, State, Tree


class Local(NamedTuple):
    """A user at work: w_t as sent, q_t, his dual variables, what he has added to v_t, and the ids of his examples."""

    start: Params
    q: Tensor
    dual: Tensor  # [m_max, C]
    dv: Params
    index: Tensor  # [m_max], -1 after his last one


def spectrum(w: Tree, floor: float) -> tuple[Tensor, Tensor]:
    """Eigenvalues [n] and eigenvectors [n, n] (columns) of Sigma = (W'W)^(1/2) / trace, float64; w leads with n."""
    flat = torch.cat([t.reshape(len(t), -1) for t in tree.leaves(w)], 1).to(torch.float64)
    gram = flat @ flat.T
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    # A seed that has diverged must not stop the others: eigh raises on numbers that are not finite.
    vectors = torch.linalg.eigh(torch.where(torch.isfinite(gram).all(), gram, eye))[1]
    root = torch.linalg.vector_norm(vectors.T @ flat, dim=1).nan_to_num()  # the root of an eigenvalue that is round-off would be 1e-8
    share = (root / root.sum().clamp(min=torch.finfo(root.dtype).tiny)).clamp(min=floor / len(gram))
    return share / share.sum(), vectors


def mix(rows: Tensor, w: Tree) -> Tree:
    """rows [A, n] times w, which leads with n."""
    return tree.map(lambda t: (rows @ t.reshape(len(t), -1)).reshape(len(rows), *t.shape[1:]), w)


def mean_of_trained(w: Tree, trained: Tensor) -> Tree:
    """Mean over those that have trained; the first, as all are alike, if nobody has."""
    some = trained.sum() > 0
    return tree.where(some, tree.mean(w, torch.where(some, trained, torch.ones_like(trained))), tree.map(lambda t: t[0], w))


def ranks(members: Tensor) -> Tensor:
    """[N] int64: the row of each member among the members."""
    return (members.to(torch.int64).cumsum(0) - 1).clamp(min=0)


@register("mocha")
@dataclass(kw_only=True)
class Mocha(Algorithm):
    """State: users hold dual variables [m_max, C], the last w_t and how often they trained; the server V, Sigma, and who trained."""

    cold_start = "the mean of the trained users"
    weighs = False
    own_server_step = True
    plain_sgd = True

    lam: float = 0.1
    loss: str = "hinge"
    relation: str = "mean"
    kappa: float = 0.1
    floor: float = 0.01
    omega_every: int = 10

    def __post_init__(self):
        super().__post_init__()
        require(self.lam > 0, "lam", self.lam, "a number > 0")
        choice("loss", self.loss, ("hinge", "squared"))
        choice("relation", self.relation, ("independent", "mean", "learned"))
        require(self.kappa > 0, "kappa", self.kappa, "a number > 0")
        require(0 < self.floor <= 1, "floor", self.floor, "a number > 0 and at most 1")
        require(self.omega_every >= 1, "omega_every", self.omega_every, "an integer >= 1")

    @property
    def full_data(self):
        return True

    @property
    def square_state(self):
        return 1

    def init(self, task, params, population):
        if not isinstance(task.model, Logistic):
            raise UserError("model", task.model.name, "must be logistic: mocha is a method for linear models (algo=mtl takes all)")
        weight = params["layer1.weight"]
        n, members = int(population.members.sum()), population.members.to(weight.device)
        eye = torch.eye(n, dtype=weight.dtype, device=weight.device)
        sigma = eye / n
        if self.relation == "mean":
            # The inverse of (1 + kappa) I - 11'/n, by the formula of Sherman and Morrison, times kappa (1 + kappa).
            sigma = self.kappa * eye + torch.ones_like(eye) / n
            sigma = sigma / sigma.diagonal().sum()
        zeros = tree.zeros(params)
        longest = max(population.largest, int(population.sizes.max()))
        count = torch.zeros(population.n, dtype=torch.int64, device=weight.device)
        server = {"v": tree.repeat(zeros, n), "sigma": sigma, "trained": torch.zeros_like(count[:n]), "row": ranks(members)}
        dual = weight.new_zeros(()).expand(population.n, longest, weight.shape[1])
        return State(server, {"dual": dual, "w": tree.repeat(zeros, population.n), "rounds": count})

    def broadcast(self, server):
        return ()

    def unicast(self, server, cohort):
        row = server["row"][cohort.user]
        sigma = server["sigma"][row]
        own = sigma.gather(1, row[:, None])[:, 0]
        safe = (sigma[:, row].abs().sum(1) / own).max()
        return {"w": mix(sigma / self.lam, server["v"]), "q": safe * own / self.lam}

    def receive(self, task, down, user, info, full=None):
        rest = len(user["dual"]) - len(full.index)
        index = torch.cat([full.index, full.index.new_full((rest,), -1)])
        return Local(down.own["w"], down.own["q"], user["dual"], tree.zeros(down.own["w"]), index)

    def delta(self, z: Tensor, a: Tensor, y: Tensor, curvature: Tensor) -> Tensor:
        """The step of one dual variable (for each class) to the maximum of the local subproblem."""
        if self.loss == "squared":
            return (y - z - a) / (1 + curvature)
        return y * torch.clamp(y * a + (1 - y * z) / curvature, 0, 1) - a

    def step(self, task, local, batches, info):
        task.count("grads")
        batch = batches["outer"]
        x = batch.x.flatten(1)
        classes = local.dual.shape[1]
        y = 2 * (batch.y[:, None] == torch.arange(classes, device=x.device)).to(x.dtype) - 1
        at = (batch.index[:, None] == local.index[None, :]).to(torch.int64).argmax(1)  # the first one: padding repeats an id
        a = local.dual[at]
        gram = x @ x.T
        if "layer1.bias" in local.dv:
            gram = gram + 1
        z = task.model.apply(tree.axpy(local.q, local.dv, local.start), batch.x)
        steps = []
        for j in range(len(x)):  # in scores: z of the whole batch is kept up to date
            d = self.delta(z[j], a[j], y[j], local.q * gram[j, j]) * batch.weight[j]
            z = z + local.q * gram[:, j, None] * d
            steps.append(d)
        d = torch.stack(steps)
        more = {"layer1.weight": x.T @ d, "layer1.bias": d.sum(0)}
        dv = {k: v + more[k] for k, v in local.dv.items()}
        return local._replace(dual=local.dual.index_put((at,), d, accumulate=True), dv=dv)

    def send(self, task, down, user, local, info):
        return local.dv, {**user, "dual": local.dual, "rounds": user["rounds"] + 1}

    def aggregate(self, task, server, uploads, cohort):
        row = server["row"][cohort.user]
        v = tree.map(lambda t, d: t.index_put((row,), d, accumulate=True), server["v"], uploads)
        sigma = server["sigma"]
        if self.relation == "learned":
            share, vectors = spectrum(mix(sigma, v), self.floor)
            new = ((vectors * share) @ vectors.T).to(sigma.dtype)
            sigma = torch.where((cohort.round[0] + 1) % self.omega_every == 0, new, sigma)
        trained = server["trained"].index_put((row,), torch.ones_like(row))
        return {**server, "v": v, "sigma": sigma, "trained": trained}, mix(sigma[row] / self.lam, v)

    def settle(self, user, reply):
        return {**user, "w": reply}

    def floats_down(self, down, reply, info):
        return tree.numel(down)

    def shown(self, server):
        return mean_of_trained(mix(server["sigma"] / self.lam, server["v"]), server["trained"])

    def server_models(self, server):
        return ()

    def user_models(self, user):
        return user["w"]

    def candidates(self, server, user):
        return {"personal": tree.where(user["rounds"] > 0, user["w"], server)}

    def notes(self, facts):
        return [*super().notes(facts), f"mocha trains on the {self.loss} loss, class against rest; the losses shown are cross-entropy"]
