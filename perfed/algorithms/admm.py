"""Consensus ADMM, with inexact local solves, for all users or for drawn ones (FedADMM).

S. Boyd et al., "Distributed Optimization and Statistical Learning via the Alternating Direction Method of Multipliers",
2011, section 7.1; Y. Gong, Y. Li, N. Freris, "FedADMM", ICDE 2022, arXiv 2204.03529; X. Zhang et al., "FedPD", IEEE TSP
2021, arXiv 2005.11418. The saddle point is written with a minus sign; these papers have y_i of the opposite sign:

    max_y min_x sum_i f_i(x_i) + (lam / 2) ||x_i - x||^2 - <y_i, x_i - x>

    a user's solve, tau steps from his own x_i, around the x that was sent:
        x_i = x_i - beta (g_i(x_i; B') + lam (x_i - x) - y_i)

    scheme=full: every user, whatever r is (Boyd)
        solve for x_i;  x = mean_i (x_i - y_i / lam);  y_i = y_i - lam (x_i - x) with the new x
    scheme=partial: the active users (FedADMM); the new x_i, y_i are marked +
        solve for x_i+;  y_i+ = y_i - lam (x_i+ - x) with the x that was sent
        d_i = (x_i+ - x_i) - (y_i+ - y_i) / lam;  x = x + (s / A) sum over A_k of d_i

Switches
    tracking   true: s = A / n, which keeps x = mean over all users of (x_i - y_i / lam);  false: s = 1. With A < n the latter
               does not end at the consensus optimum but, if at all, where mean grad f_i(x) = lam (1 - A/n) (x - w_0)

x_i = w_0, y_i = 0 at the start. At the consensus optimum y_i = grad f_i(x). Duals never leave the user. With scheme=full, x
is counted once: what a user gets after the mean is what the next round would send him. Nonconvex theory wants lam > 2 L.

Deviations from the papers: none in the order; the solve is tau steps of the local optimizer.
Judged: `global`, the consensus x; `personal`, x_i (x for a user that was never drawn, or is new).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from perfed import tree
from perfed.algorithms.base import Algorithm, choice, register
from perfed.errors import require
from perfed.types import Params, State, Tree


class Local(NamedTuple):
    """The model, the optimizer's state, the consensus that was sent and the dual."""

    w: Params
    opt: Tree
    x: Params
    y: Params


@register("admm")
@dataclass(kw_only=True)
class ADMM(Algorithm):
    """State: users hold x_i, y_i and the number of rounds they trained; the server holds the consensus ``w``."""

    cold_start = "the consensus model"
    weighs = False
    own_server_step = True
    wants_smoothness = True

    lam: float = 0.1
    scheme: str = "partial"
    tracking: bool = True

    def __post_init__(self):
        super().__post_init__()
        require(self.lam > 0, "lam", self.lam, "a number > 0")
        choice("scheme", self.scheme, ("partial", "full"))

    @property
    def trains(self):
        return "all" if self.scheme == "full" else "sampled"

    @property
    def reports(self):
        return "all" if self.scheme == "full" else "sampled"

    def init(self, task, params, population):
        user = {"x": params, "y": tree.zeros(params), "rounds": torch.tensor(0)}
        return State({"w": params}, tree.repeat(user, population.n))

    def receive(self, task, down, user, info, full=None):
        return Local(user["x"], task.local.init(user["x"]), down, user["y"])

    def step(self, task, local, batches, info):
        g = task.grad(local.w, batches["outer"])
        u = tree.map(lambda g, w, x, y: g + self.lam * (w - x) - y, g, local.w, local.x, local.y)
        w, opt = task.local.update(u, local.opt, local.w, self.step_size(info))
        return local._replace(w=w, opt=opt)

    def dual(self, y: Params, own: Params, x: Params) -> Params:
        """y - lam (x_i - x)."""
        return tree.axpy(-self.lam, tree.sub(own, x), y)

    def send(self, task, down, user, local, info):
        user_after = {"x": local.w, "y": user["y"], "rounds": user["rounds"] + 1}
        if self.scheme == "full":
            return tree.axpy(-1 / self.lam, user["y"], local.w), user_after
        y = self.dual(user["y"], local.w, down)
        d = tree.axpy(-1 / self.lam, tree.sub(y, user["y"]), tree.sub(local.w, user["x"]))
        return d, {**user_after, "y": y}

    def floats_down(self, down, reply, info):
        return tree.numel(down)

    def aggregate(self, task, server, uploads, cohort):
        mean = tree.mean(uploads, torch.ones_like(cohort.m))
        if self.scheme == "full":
            return {"w": mean}, tree.repeat(mean, len(cohort.m))
        s = cohort.active / cohort.n if self.tracking else 1.0
        return {"w": tree.axpy(s, mean, server["w"])}, ()

    def settle(self, user, reply):
        return {**user, "y": self.dual(user["y"], user["x"], reply)} if self.scheme == "full" else user

    def candidates(self, server, user):
        return {"global": server["w"], "personal": tree.where(user["rounds"] > 0, user["x"], server["w"])}

    def notes(self, facts):
        lines = super().notes(facts)
        if self.scheme == "partial" and not self.tracking and facts.active < facts.n:
            lines.append("warning: tracking=false with r < 1: the consensus is not the optimum of the mean loss, but biased away from w_0")
        if facts.smoothness is not None and self.beta * (facts.smoothness + self.lam) >= 2:
            lines.append(
                f"warning: beta*(L + lam) = {self.beta * (facts.smoothness + self.lam):.3g} with L = {facts.smoothness:.3g} at w_0 is "
                "over the bound 2 for gradient steps on a user's subproblem"
            )
        return lines
