"""pFedMe: personal models as proximal points, the server's model on the mean of the users' Moreau envelopes.

C. T. Dinh, N. H. Tran, T. D. Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020,
arXiv 2006.08848, algorithm 1. Objective (eqs. 2 and 3):
F(w) = (1/n) sum_i F_i(w),  F_i(w) = min_th f_i(th) + (lam/2) ||th - w||^2,  grad F_i(w) = lam (w - th_i(w)).

    round k: the server draws A_k and sends w
      user i in A_k:  w_i = w;  repeat tau times (R in the paper), each time with one batch B (role `outer`):
        th = w_i;  repeat inner_steps times:  th = th - p_lr (g_i(th; B) + lam (th - w_i))
        w_i = w_i - beta lam (w_i - th)
      w = (1 - server_mix) w + server_mix (mean over A_k of w_i)

One step of the engine is one local round. `beta` is the paper's eta, `server_mix` its beta.
theta_init  `paper`: each inner solve starts at w_i | `warm`: at the previous th, which the user keeps between rounds
            (public code does so); with one inner step from w_i the pull is zero, and lam acts through the outer step only
train_all   true: all users take their local rounds in every round and only A_k report, as in the paper | false: only A_k
            train, for an n/A-th of the cost. Who trains changes the server's model only through the users' warm starts.
Deviation from public code: no hidden weight decay, uniform weights unless aggregation=samples, and th is what is judged;
code that judges an alias of the trained weights judges w_i.

The personal model of user i is the th of his last local round. Cold start: a user that never trained, or is new, has th = w.
Judged: `personal` (th, adapted by proximal steps around the final w), `adapted` (such steps from w, that is th_i(w) computed
afresh; inner_steps of them in the paper, so adapt.steps=inner_steps; a single step from w feels no pull) and
`global` (w). Fixed point: the minimiser of F for tau = 1; else local drift
on F_i moves it, as in FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from perfed import tree
from perfed.algorithms.base import Algorithm, Anchored, choice, register
from perfed.errors import require
from perfed.types import Params, State


class Local(NamedTuple):
    """The user's copy of the server's model and the proximal point around it."""

    w: Params
    th: Params


@register("pfedme")
@dataclass(kw_only=True)
class PFedMe(Algorithm):
    """State: users hold th and the number of rounds in which they trained; the server holds w."""

    cold_start = "the global model, and proximal steps from it"

    beta: float = 0.005
    lam: float = 15.0
    p_lr: float = 0.1
    inner_steps: int = 5
    server_mix: float = 1.0
    theta_init: str = "paper"
    train_all: bool = False

    own_server_step = True
    plain_sgd = True
    wants_smoothness = True

    def __post_init__(self):
        super().__post_init__()
        require(self.lam > 0, "lam", self.lam, "a number > 0")
        require(self.p_lr > 0, "p_lr", self.p_lr, "a number > 0")
        require(self.inner_steps >= 1, "inner_steps", self.inner_steps, "an integer >= 1")
        require(self.server_mix > 0, "server_mix", self.server_mix, "a number > 0; 1 is the plain mean")
        choice("theta_init", self.theta_init, ("paper", "warm"))

    @property
    def trains(self):
        return "all" if self.train_all else "sampled"

    @property
    def inner_step(self):
        return self.p_lr

    @property
    def prox(self):
        return self.lam

    def init(self, task, params, population):
        users = {"th": tree.repeat(params, population.n), "rounds": torch.zeros(population.n, dtype=torch.int64)}
        return State({"w": params}, users)

    def receive(self, task, down, user, info, full=None):
        return Local(down, tree.where(user["rounds"] > 0, user["th"], down))

    def step(self, task, local, batches, info):
        th = local.th if self.theta_init == "warm" else local.w
        for _ in range(self.inner_steps):
            g = task.grad(th, batches["outer"])
            th = tree.map(lambda t, gt, w: t - self.p_lr * (gt + self.lam * (t - w)), th, g, local.w)
        return Local(tree.axpy(-self.beta * self.lam, tree.sub(local.w, th), local.w), th)

    def send(self, task, down, user, local, info):
        return local.w, {"th": local.th, "rounds": user["rounds"] + 1}

    def aggregate(self, task, server, uploads, cohort):
        mean = self.average(uploads, cohort)
        return {"w": tree.map(lambda w, a: torch.lerp(w, a, self.server_mix), server["w"], mean)}, ()

    def candidates(self, server, user):
        w = server["w"]
        th = tree.where(user["rounds"] > 0, user["th"], w)
        return {"personal": Anchored(th, w), "adapted": Anchored(w, w), "global": w}

    def coupling_lambda(self, facts):
        return self.lam

    def notes(self, facts):
        lines, outer = super().notes(facts), self.beta * self.lam
        if outer >= 1:
            lines.append(f"warning: beta*lam = {outer:.3g}, bound 1: w_i steps over th; from 2 on the local rounds may diverge")
        smooth = facts.smoothness or 0.0
        if self.p_lr * (smooth + self.lam) >= 2:
            size = self.p_lr * (smooth + self.lam)
            lines.append(f"warning: p_lr*(L+lam) = {size:.3g}, bound 2 (L >= {smooth:.3g} at the start): the inner steps may diverge")
        return lines
