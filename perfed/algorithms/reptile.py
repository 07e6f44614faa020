"""Reptile, federated: the server moves a part eps_k of the way to the mean of the users' models.

A. Nichol, J. Achiam, J. Schulman, "On First-Order Meta-Learning Algorithms", arXiv 1803.02999: algorithm 2, its batched
version, with users as tasks.

    round k: the server draws A_k and sends w
      user i in A_k:  v = w;  repeat tau times:  v = v - beta g_i(v; B')        B' of `batch` examples, role `outer`
      w = w + eps_k (mean over A_k of v - w)

eps = 1 is FedAvg, bit for bit, and eps in (0, 1) is FedAvg with server.lr=eps. On average, two steps from w move v by
-beta (2 g - beta H g): the term in H is that of first-order MAML (section 5 of the paper).

Switches
    eps        eps_0, in (0, 1]
    schedule   `constant` | `linear`: eps_k = eps (1 - k / rounds), as the paper's experiments anneal it
The paper also hands w - mean to an adaptive optimizer (section 3): that is server=adam, whose step multiplies eps_k. Its
experiments use Adam with beta1 = 0 for local steps; optimizer=adam starts afresh for each user and round, whereas moments
carried from task to task would mix the users.

Cold start: users keep nothing, so a new one starts from w like all others. Judged: `global`, w, which the protocol adapts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from perfed import tree
from perfed.algorithms.base import Algorithm, choice, register
from perfed.errors import require


@register("reptile")
@dataclass(kw_only=True)
class Reptile(Algorithm):
    """State: the server holds w. ``rounds`` is the horizon of the linear schedule."""

    eps: float = 1.0
    schedule: str = "constant"
    rounds: int = 100

    def __post_init__(self):
        super().__post_init__()
        require(0 < self.eps <= 1, "eps", self.eps, "a number in (0, 1]")
        choice("schedule", self.schedule, ("constant", "linear"))
        require(self.rounds >= 0, "rounds", self.rounds, "an integer >= 0")

    @property
    def uses_horizon(self):
        return self.schedule == "linear"

    def rate(self, k: Tensor) -> Tensor:
        """eps_k; 0 from the horizon on."""
        k = k.to(torch.float64)
        left = torch.clamp(1 - k / self.rounds, min=0.0) if self.schedule == "linear" else torch.ones_like(k)
        return self.eps * left

    def aggregate(self, task, server, uploads, cohort):
        eps = self.rate(cohort.round[0])
        target = tree.map(lambda w, v: torch.lerp(w, v, eps.to(w.dtype)), server["w"], self.average(uploads, cohort))
        w, opt = task.server.update(target, server["opt"], server["w"])
        return {**server, "w": w, "opt": opt}, ()
