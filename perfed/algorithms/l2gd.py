"""L2GD: personal models, local steps and pulls to their mean in random order.

F. Hanzely, P. Richtarik, "Federated Learning of a Mixture of Global and Local Models", arXiv 2002.05516, algorithm 1.
Objective (eq. 2): F(x_1, .., x_n) = (1/n) sum_i f_i(x_i) + (lam / (2 n)) sum_i ||x_i - xbar||^2.

    each iteration, with one coin for all users:
      with 1 - p:  x_i = x_i - alpha / (n (1 - p)) g_i(x_i; B')                              here beta = alpha / (n (1 - p))
      with p:      xbar = mean_i x_i;  x_i = (1 - alpha lam / (n p)) x_i + alpha lam / (n p) xbar   here pull = alpha lam / (n p)

Hence lam = pull p / ((1 - p) beta). A round is one pull and the T local steps before it, P(T = t) = (1 - p)^t p, T drawn from the
round's coin. Real communication is needed after a local step only: with T = 0 the mean is the cached one, the pull is
applied all the same, and nothing is sent. That makes p (1 - p) communications per iteration.

Switches
    p              null is 1 / tau, which makes tau iterations per pull
    pull           0 is local training, 1 is FedAvg with a random number of steps
    participation  `all`, the paper: every user is averaged and pulled (r does not count);
                   `subset`, an extension: only the active users are, and they communicate in every round

All users train in every round. With a constant step the coin's noise stays: L2GD reaches a neighbourhood of the minimiser.
Judged: `personal`, x_i (xbar for a new user); `global`, xbar.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from perfed import tree
from perfed.algorithms.base import Algorithm, Local, choice, register
from perfed.errors import require
from perfed.types import State


@register("l2gd")
@dataclass(kw_only=True)
class L2GD(Algorithm):
    """State: users hold x_i and the number of rounds they trained; the server holds the mean ``w``."""

    cold_start = "the mean model"
    weighs = False
    own_server_step = True
    wants_smoothness = True

    p: float | None = None
    pull: float = 0.2
    participation: str = "all"

    def __post_init__(self):
        super().__post_init__()
        require(self.p is None or 0 < self.p < 1, "p", self.p, "null (1 / tau) or a number in (0, 1)")
        require(self.p is not None or self.tau >= 2, "tau", self.tau, "an integer >= 2, or give p: p = 1 / tau is a number in (0, 1)")
        require(0 <= self.pull <= 1, "pull", self.pull, "a number in [0, 1]")
        choice("participation", self.participation, ("all", "subset"))

    @property
    def rate(self) -> float:
        """p, the probability of a pull."""
        return 1 / self.tau if self.p is None else self.p

    @property
    def trains(self):
        return "all"

    @property
    def reports(self):
        return "all" if self.participation == "all" else "sampled"

    def local_steps(self, info):
        # T >= t if and only if 1 - coin <= (1 - p)^t
        return torch.floor(torch.log1p(-info.coin) / math.log1p(-self.rate)).to(torch.int64)

    def local_steps_at_most(self):
        return max(1, round((1 - self.rate) / self.rate))  # the mean of T

    def init(self, task, params, population):
        return State({"w": params}, tree.repeat({"x": params, "rounds": torch.tensor(0)}, population.n))

    def broadcast(self, server):
        return ()

    def receive(self, task, down, user, info, full=None):
        return Local(user["x"], task.local.init(user["x"]))

    def send(self, task, down, user, local, info):
        return local.w, {"x": local.w, "rounds": user["rounds"] + 1}

    def sends(self, info):
        """Whether the round communicates: 0 or 1, or True."""
        return self.participation == "subset" or self.local_steps(info) > 0

    def floats_up(self, upload, info):
        return tree.numel(upload) * self.sends(info)

    def floats_down(self, down, reply, info):
        return tree.numel(reply) * self.sends(info)

    def aggregate(self, task, server, uploads, cohort):
        w = tree.mean(uploads, torch.ones_like(cohort.m))
        if self.participation == "all":
            w = tree.where(self.sends(cohort)[0], w, server["w"])
        return {"w": w}, tree.repeat(w, len(cohort.m))

    def settle(self, user, reply):
        return {**user, "x": tree.map(lambda x, mean: torch.lerp(x, mean, self.pull), user["x"], reply)}

    def candidates(self, server, user):
        return {"personal": tree.where(user["rounds"] > 0, user["x"], server["w"]), "global": server["w"]}

    def coupling_lambda(self, facts):
        if self.participation == "subset" and facts.active == 1:
            return 0.0  # a user alone is his own mean
        return self.pull * self.rate / ((1 - self.rate) * self.beta)

    def notes(self, facts):
        everyone = self.participation == "all"
        lines = super().notes(facts._replace(active=facts.n) if everyone else facts)
        # The paper takes alpha <= n / (2 max(L / (1 - p), lam / p)); here in terms of beta and pull.
        if facts.smoothness is not None and self.beta * facts.smoothness > 0.5:
            lines.append(f"warning: beta*L = {self.beta * facts.smoothness:.3g} at w_0 is over L2GD's bound 1/2")
        if self.pull > 0.5:
            lines.append(f"warning: pull = {self.pull:.3g} is over L2GD's bound 1/2")
        return lines
