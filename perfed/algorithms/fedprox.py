"""FedProx: local steps are pulled to the model that the server sent, and some users may take fewer of them.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith, "Federated Optimization in Heterogeneous Networks",
MLSys 2020, arXiv 1812.06127: algorithm 2 with SGD as the local solver of h_i (eq. 2).

    h_i(v) = f_i(v) + mu/2 ||v - w||^2
    round k: the server draws A_k and sends w
      user i in A_k:  v = w;  repeat tau_i times:  v = v - beta (g_i(v; B') + mu (v - w))
      w = mean over A_k of v

mu = 0 without stragglers is FedAvg, bit for bit. Plain SGD is stable where beta (L + mu) < 2.

Switches
    stragglers   share of users, in [0, 1], that in a round take a number of steps drawn uniformly from {1, .., tau}; all
                 others take tau. The paper's gamma_i-inexactness is this variable amount of work. Stragglers' models count
                 like all others; the paper's FedAvg baseline drops them.
    aggregation  `uniform` is the plain mean of the paper, which draws users with probabilities m_i / m; here they are drawn
                 uniformly, which minimises the mean of the f_i. `samples` weighs them by m_i, as the authors' code does.

Cold start: users keep nothing, so a new one starts from w like all others. Judged: `global`, w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from perfed import tree
from perfed.algorithms.base import Algorithm, register
from perfed.errors import require
from perfed.types import Params, Tree


class Local(NamedTuple):
    """The model, the optimizer's state and the model that the server sent."""

    w: Params
    opt: Tree
    anchor: Params


@register("fedprox")
@dataclass(kw_only=True)
class FedProx(Algorithm):
    """State: the server holds w."""

    mu: float = 0.1
    stragglers: float = 0.0

    wants_smoothness = True

    def __post_init__(self):
        super().__post_init__()
        require(self.mu >= 0, "mu", self.mu, "a number >= 0")
        require(0 <= self.stragglers <= 1, "stragglers", self.stragglers, "a share of users, in [0, 1]")

    def local_steps(self, info):
        # Given that it lies below the share, chance / share is uniform on [0, 1): one draw decides who and how many.
        late = info.chance < self.stragglers
        few = 1 + torch.floor(info.chance / self.stragglers * self.tau)
        return torch.where(late, few.clamp(max=self.tau), self.tau).to(torch.int64)

    def receive(self, task, down, user, info, full=None):
        return Local(down, task.local.init(down), down)

    def step(self, task, local, batches, info):
        g = task.grad(local.w, batches["outer"])
        u = tree.axpy(self.mu, tree.sub(local.w, local.anchor), g)
        w, opt = task.local.update(u, local.opt, local.w, self.step_size(info))
        return local._replace(w=w, opt=opt)

    def notes(self, facts):
        smoothness = facts.smoothness or 0.0  # not measured: mu alone may be too much
        rate = self.beta * (smoothness + self.mu)
        if rate < 2:
            return super().notes(facts)
        line = f"warning: beta (L + mu) = {rate:.3g} with L >= {smoothness:.3g} reaches the bound 2 of stable steps: they may diverge"
        return [*super().notes(facts), line]
