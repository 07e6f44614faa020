"""Ditto: FedAvg, and beside it a personal model for each user that is pulled towards the server's.

T. Li, S. Hu, A. Beirami, V. Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021,
arXiv 2012.04221, algorithm 1. Objective of user i: min_v f_i(v) + (lam/2) ||v - w*||^2, w* FedAvg's solution.

    round k: the server draws A_k and sends w
      user i in A_k:  w_i = w;   repeat tau times:             w_i = w_i - beta g_i(w_i; B)
                      (v_i stays between rounds)
                                 repeat personal_steps times:  v_i = v_i - personal_lr (g_i(v_i; B) + lam (v_i - w))
      w = mean over A_k of w_i

The pull is towards the w that the user received, not towards his freshly trained w_i. v_i feeds nothing back: w is FedAvg's.
Both tracks have their own optimizer state. Personal step j reads the batch of global step j (role `outer`), so lam = 0
is local training on the batches of FedAvg. One step of the engine moves one track, the global one first: tau + personal_steps
gradients a round, none of them wasted.

personal_steps   null is tau          personal_lr   null is beta
Every v_i starts at w_0. Cold start: a user that never trained, or is new, is judged as v = w.
Judged: `personal` (v, adapted by proximal steps of size personal_lr around the final w: the paper's last personalisation of
all users is `adapt.steps`) and `global` (w).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from perfed import tree
from perfed.algorithms.base import Algorithm, Anchored, register
from perfed.errors import require
from perfed.types import Params, State, Tree


class Track(NamedTuple):
    """A model and the state of its optimizer."""

    w: Params
    opt: Tree


class Local(NamedTuple):
    """The copy of the server's model, the personal one, and what was received."""

    shared: Track
    own: Track
    anchor: Params


@register("ditto")
@dataclass(kw_only=True)
class Ditto(Algorithm):
    """State: users hold v and the number of rounds in which they trained; the server is FedAvg's."""

    cold_start = "the global model, and proximal steps from it"

    lam: float = 1.0
    personal_steps: int | None = None
    personal_lr: float | None = None

    wants_smoothness = True

    def __post_init__(self):
        super().__post_init__()
        require(self.lam >= 0, "lam", self.lam, "a number >= 0; 0 is local training")
        steps, lr = self.personal_steps, self.personal_lr
        require(steps is None or steps >= 1, "personal_steps", steps, "null or an integer >= 1")
        require(lr is None or lr > 0, "personal_lr", lr, "null or a number > 0")

    @property
    def inner_step(self):
        return self.beta if self.personal_lr is None else self.personal_lr

    @property
    def prox(self):
        return self.lam

    def stream_step(self, step):
        return step if step < self.tau else step - self.tau

    def local_steps(self, info):
        return self.local_steps_at_most()

    def local_steps_at_most(self):
        return self.tau + (self.personal_steps or self.tau)

    def init(self, task, params, population):
        users = {"v": tree.repeat(params, population.n), "rounds": torch.zeros(population.n, dtype=torch.int64)}
        return State(super().init(task, params, population).server, users)

    def receive(self, task, down, user, info, full=None):
        return Local(Track(down, task.local.init(down)), Track(user["v"], task.local.init(user["v"])), down)

    def step(self, task, local, batches, info):
        first = info.step < self.tau
        shared, own = local.shared, local.own
        g = task.grad(tree.where(first, shared.w, own.w), batches["outer"])
        pulled = tree.axpy(self.lam, tree.sub(own.w, local.anchor), g)
        moved = Track(*task.local.update(g, shared.opt, shared.w, self.beta))
        pulled = Track(*task.local.update(pulled, own.opt, own.w, self.inner_step))
        return local._replace(shared=tree.where(first, moved, shared), own=tree.where(first, own, pulled))

    def send(self, task, down, user, local, info):
        return local.shared.w, {"v": local.own.w, "rounds": user["rounds"] + 1}

    def candidates(self, server, user):
        w = server["w"]
        return {"personal": Anchored(tree.where(user["rounds"] > 0, user["v"], w), w), "global": w}

    def coupling_lambda(self, facts):
        # The pull acts in personal_steps steps of personal_lr; the printed coupling multiplies by beta and tau.
        return self.lam * self.inner_step * (self.personal_steps or self.tau) / (self.beta * self.tau)

    def notes(self, facts):
        lines, smooth = super().notes(facts), facts.smoothness or 0.0
        size = self.inner_step * (smooth + self.lam)
        if size >= 2:
            lines.append(f"warning: personal_lr*(L+lam) = {size:.3g}, bound 2 (L >= {smooth:.3g} at the start): v may diverge")
        return lines
