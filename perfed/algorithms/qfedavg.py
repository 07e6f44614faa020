"""q-FedAvg: users with a larger loss count more.

T. Li, M. Sanjabi, A. Beirami, V. Smith, "Fair Resource Allocation in Federated Learning", ICLR 2020, arXiv 1905.10497:
algorithm 2. Objective (q-FFL, eq. 2): (1 / (q + 1)) sum_i p_i f_i(w)^(q + 1).

    round k: the server draws A_k and sends w
      user i in A_k:  F_i = max(f_i(w), 1e-10), on all of his data
        v = w;  repeat tau times:  v = v - beta g_i(v; B')
        dw_i = L (w - v),  with L = 1 / beta
      Delta_i = F_i^q dw_i,   h_i = q F_i^(q - 1) ||dw_i||^2 + L F_i^q
      w = w - sum over A_k of Delta_i / sum over A_k of h_i

q = 0 is FedAvg up to round-off; q -> infinity looks at the worst of the active users alone. Losses times c with beta / c
leave the map as it is, for every q. The powers are those of F_i / max F, which cancels in the quotient: nothing overflows
for large q. The floor of 1e-10 keeps F^(q - 1) finite for q < 1.
Users send dw_i and F_i, in place of Delta_i and h_i: d + 1 numbers as well.

Switches
    aggregation  p_i: `uniform`, all alike | `samples`, in proportion to m_i. The paper draws users with probability p_i and
                 then sums alike; here they are drawn uniformly and p_i weighs both sums.
The server's step is the method's own: it has no step size.

Cold start: users keep nothing, so a new one starts from w like all others. Judged: `global`, w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from perfed import tree
from perfed.algorithms.base import Algorithm, register
from perfed.errors import require
from perfed.types import Params, State, Tree

FLOOR = 1e-10


class Local(NamedTuple):
    """The model, the optimizer's state and the loss of the model that the server sent."""

    w: Params
    opt: Tree
    loss: Tensor


@register("qfedavg")
@dataclass(kw_only=True)
class QFedAvg(Algorithm):
    """State: the server holds w."""

    q: float = 1.0

    own_server_step = True
    plain_sgd = True  # (w - v) / beta stands for a sum of gradients

    def __post_init__(self):
        super().__post_init__()
        require(0 <= self.q < float("inf"), "q", self.q, "a finite number >= 0")

    @property
    def full_data(self):
        return True

    def init(self, task, params, population):
        return State({"w": params}, ())

    def receive(self, task, down, user, info, full=None):
        return Local(down, task.local.init(down), torch.clamp(task.loss(down, full), min=FLOOR))

    def send(self, task, down, user, local, info):
        return {"dw": tree.scale(1 / self.beta, tree.sub(down, local.w)), "loss": local.loss}, user

    def aggregate(self, task, server, uploads, cohort):
        dw, top = uploads["dw"], uploads["loss"].amax()
        part = uploads["loss"] / top
        power = part**self.q
        norms = sum(t.square().flatten(1).sum(1) for t in tree.leaves(dw))
        # Both sums divided by max F^q, and by the weights' sum.
        delta = self.average(tree.map(lambda t: power.reshape(-1, *[1] * (t.ndim - 1)) * t, dw), cohort)
        h = self.average(self.q * part ** (self.q - 1) * norms / top + power / self.beta, cohort)
        return {"w": tree.axpy(-1 / h, delta, server["w"])}, ()
