"""Primal multi-task learning for any model: gradient steps on the users' losses and on a penalty that relates their models.

Objective of V. Smith et al., "Federated Multi-Task Learning", NeurIPS 2017 (arXiv 1705.10467, eq. 1):

    sum_t f_t(w_t) + (lam / 2) tr(W Omega W'),   W = [w_1 .. w_n] the regularised parameters of the n users

This is not MOCHA, which is a dual method for linear models (algo=mocha): networks have no dual, and nothing is guaranteed.

    user t keeps w_t, which starts at w_0; the server keeps W and Omega
    round k: the server draws A_k and sends each user rest_t = sum_{t' != t} Omega_tt' w_t' and Omega_tt
      user t in A_k:  repeat tau times: w_t = w_t - beta (g_t(w_t; B') + lam (Omega_tt w_t + rest_t))    the penalty on the
      regularised parameters alone; these go up                                           B' of role `outer`
      learned:  Omega = Sigma^-1 / n,  Sigma = (W'W)^(1/2) / tr (W'W)^(1/2)

rest_t is of the beginning of the round; with all users active the minimiser is a fixed point for every tau.
Public code has built Omega from a matrix of ones in place of the identity, which penalises ||sum_t w_t||^2 alone, or has
detached W from the penalty, which is then local training.

Switches
    layers    `last`: the output layer is regularised, the others are each user's own | `all`
    relation  `mean`: Omega = I - 11'/n, the penalty (lam / 2) sum_t ||w_t - mean w||^2 of L2GD | `learned`: Omega starts at I and is
              computed after each round. The division by n keeps it there while all users are alike important (Sigma = I/n),
              so that lam means the same in both; the paper's lam is lam / n
    floor     least eigenvalue of a learned Sigma, as a share of the mean one, 1/n; Omega has none above (1 + floor) / floor

W holds w_0 for users that have not trained yet, and they take part in the penalty with it, as the objective says.
lam = 0.2: with beta = 0.1 and tau = 10 a round moves a user about 0.2 of the way to the mean, as the default of L2GD does.

Judged: `personal`, w_t.
Cold start: a user that was never drawn, or is new, has the mean of the others (that have trained) in the regularised parameters
and w_0 elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from perfed import tree
from perfed.algorithms.base import Algorithm, choice, register
from perfed.algorithms.mocha import mean_of_trained, mix, ranks, spectrum
from perfed.errors import require
from perfed.types import Params, State, Tree


class Local(NamedTuple):
    """The model, the optimizer's state, and what the penalty reads of the others."""

    w: Params
    opt: Tree
    rest: Params
    weight: Tensor


@register("mtl")
@dataclass(kw_only=True)
class Mtl(Algorithm):
    """State: users hold their model and how often they trained; the server W [n, ...], Omega [n, n] if learned, and who trained."""

    cold_start = "the mean of the trained users in the regularised parameters and the initial model elsewhere"
    weighs = False
    own_server_step = True

    lam: float = 0.2
    layers: str = "last"
    relation: str = "mean"
    floor: float = 0.1

    def __post_init__(self):
        super().__post_init__()
        require(self.lam >= 0, "lam", self.lam, "a number >= 0")
        choice("layers", self.layers, ("last", "all"))
        choice("relation", self.relation, ("mean", "learned"))
        require(0 < self.floor <= 1, "floor", self.floor, "a number > 0 and at most 1")

    @property
    def square_state(self):
        return 1 if self.relation == "learned" else 0

    def init(self, task, params, population):
        names = task.model.last_layer(params) if self.layers == "last" else list(params)
        like, n = params[names[0]], int(population.members.sum())
        rounds = torch.zeros(population.n, dtype=torch.int64, device=like.device)
        server = {
            "w": tree.repeat({k: params[k] for k in names}, n),
            "omega": torch.eye(n, dtype=like.dtype, device=like.device) if self.relation == "learned" else (),
            "trained": torch.zeros_like(rounds[:n]),
            "row": ranks(population.members.to(like.device)),
        }
        return State(server, {"w": tree.repeat(params, population.n), "rounds": rounds})

    def broadcast(self, server):
        return ()

    def unicast(self, server, cohort):
        row, w = server["row"][cohort.user], server["w"]
        at = (row[:, None] == torch.arange(len(server["trained"]), device=row.device)).to(tree.leaves(w)[0].dtype)
        omega = at - 1 / at.shape[1] if self.relation == "mean" else server["omega"][row]
        return {"rest": mix(omega * (1 - at), w), "weight": (omega * at).sum(1)}

    def receive(self, task, down, user, info, full=None):
        return Local(user["w"], task.local.init(user["w"]), down.own["rest"], down.own["weight"])

    def step(self, task, local, batches, info):
        g = task.grad(local.w, batches["outer"])
        u = {**g, **{k: g[k] + self.lam * (local.weight * local.w[k] + rest) for k, rest in local.rest.items()}}
        w, opt = task.local.update(u, local.opt, local.w, self.beta)
        return local._replace(w=w, opt=opt)

    def send(self, task, down, user, local, info):
        return {k: local.w[k] for k in local.rest}, {"w": local.w, "rounds": user["rounds"] + 1}

    def aggregate(self, task, server, uploads, cohort):
        row = server["row"][cohort.user]
        w = tree.put(server["w"], (row,), uploads)
        omega = server["omega"]
        if self.relation == "learned":
            share, vectors = spectrum(w, self.floor)
            omega = ((vectors / (len(share) * share)) @ vectors.T).to(omega.dtype)
        trained = server["trained"].index_put((row,), torch.ones_like(row))
        return {**server, "w": w, "omega": omega, "trained": trained}, ()

    def shown(self, server):
        return mean_of_trained(server["w"], server["trained"])

    def server_models(self, server):
        return server["w"]

    def candidates(self, server, user):
        return {"personal": tree.where(user["rounds"] > 0, user["w"], {**user["w"], **server})}

    def coupling_lambda(self, facts):
        return self.lam

    def notes(self, facts):
        top = self.beta * self.lam * (1 if self.relation == "mean" else (1 + self.floor) / self.floor)
        line = f"warning: bound beta*lam*lambda_max(Omega) < 2 of a stable penalty step: it may be {top:.3g}"
        return super().notes(facts) + ([line] if top >= 2 else [])
