"""Local training: no communication. The baseline that every table needs.

    user i:  w_i = w_0, the common initial model;  w_i = w_i - beta g_i(w_i; B')

``schedule=cohort``: the active users of a round take tau steps, on the batches that FedAvg would read. Some users train
more often than others, and a user that was never drawn keeps w_0.
``schedule=equal``: every user takes round(K tau A / n) steps in K rounds, A of n users being active in a round: the number that a
FedAvg user takes on average.
Cold start: a new user has w_0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from perfed import tree
from perfed.algorithms.base import Algorithm, Local, choice, register
from perfed.types import State


@register("local")
@dataclass(kw_only=True)
class LocalTraining(Algorithm):
    """State: users hold their own model; the server holds nothing."""

    schedule: str = "cohort"

    cold_start = "the initial model"
    weighs = False
    no_server = True

    def __post_init__(self):
        super().__post_init__()
        choice("schedule", self.schedule, ("cohort", "equal"))

    @property
    def trains(self):
        return "all" if self.schedule == "equal" else "sampled"

    def local_steps(self, info):
        if self.schedule == "cohort":
            return self.tau
        # Multiples of tau A / n, rounded half up in integers: over K rounds they add up to round(K tau A / n).
        done = (2 * info.round * self.tau * info.active + info.n) // (2 * info.n)
        after = (2 * (info.round + 1) * self.tau * info.active + info.n) // (2 * info.n)
        return (after - done).to(torch.int64)

    def init(self, task, params, population):
        return State((), tree.repeat(params, population.n))

    def broadcast(self, server):
        return ()

    def receive(self, task, down, user, info, full=None):
        return Local(user, task.local.init(user))

    def send(self, task, down, user, local, info):
        return (), local.w

    def aggregate(self, task, server, uploads, cohort):
        return server, ()

    def candidates(self, server, user):
        return {"personal": user}
