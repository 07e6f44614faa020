"""APFL: each user is judged on a mixture of a model of his own and FedAvg's.

Y. Deng, M. M. Kamani, M. Mahdavi, "Adaptive Personalized Federated Learning", arXiv 2003.13461, algorithm 1.
User i minimises f_i(a_i v_i + (1 - a_i) w) in v_i, w being FedAvg's model; a_i is `mix` (alpha_i in the paper).

    round k: the server draws A_k and sends w
      user i in A_k:  w_i = w;   (v_i and a_i stay between rounds)
        repeat tau times, with one batch B (role `outer`), all right-hand sides being old values:
          vbar = a_i v_i + (1 - a_i) w_i
          w_i = w_i - beta g_i(w_i; B)
          v_i = v_i - beta a_i g_i(vbar; B)                                   a_i by the chain rule
          a_i = clip(a_i - beta <v_i - w_i, g_i(vbar; B)>, 0, 1)              adaptive, in the first step of the round
      w = mean over A_k of w_i

adaptive  a_i moves; else it is `mix` throughout
v_step    `chain`: as above, the gradient of f_i(vbar) in v_i | `none`: without the factor a_i, as much public code has it
Parameters are mixed; the mixing of outputs, which some public code has in its place, is not offered.
v_i is never overwritten by the mixture, and w_i never sees v_i: w is FedAvg's.
mix = 1 is local training (of v_i; w is trained all the same), mix = 0 FedAvg. Two gradients a step.

Every v_i starts at w_0. Cold start: a user that never trained, or is new, is judged as v = w, so his mixture is w.
Judged: `personal` (the mixture of v_i and the final w, which changes with w also for users that rest) and `global` (w).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from perfed import tree
from perfed.algorithms.base import Algorithm, choice, register
from perfed.errors import require
from perfed.types import Params, State, Tree


class Local(NamedTuple):
    """The copy of the server's model and the user's own, with their optimizers' states; a_i where it moves."""

    w: Params
    opt: Tree
    v: Params
    own: Tree
    mix: Tree


def mixture(a: float | Tensor, v: Params, w: Params) -> Params:
    """a v + (1 - a) w, without round-off for a = 0, for a = 1 and for v = w."""
    return tree.map(lambda wi, vi: torch.lerp(wi, vi, a), w, v)


@register("apfl")
@dataclass(kw_only=True)
class APFL(Algorithm):
    """State: users hold v, the number of rounds in which they trained and, where it moves, a; the server is FedAvg's."""

    cold_start = "the global model (v = w)"
    plain_sgd = True  # a scale-free optimizer would drop the factor a_i

    mix: float = 0.5
    adaptive: bool = False
    v_step: str = "chain"

    def __post_init__(self):
        super().__post_init__()
        require(0 <= self.mix <= 1, "mix", self.mix, "a number in [0, 1]; 1 is local training, 0 FedAvg")
        choice("v_step", self.v_step, ("chain", "none"))

    def init(self, task, params, population):
        n = population.n
        mix = {"mix": torch.full((n,), self.mix, dtype=tree.leaves(params)[0].dtype)} if self.adaptive else {}
        users = {"v": tree.repeat(params, n), "rounds": torch.zeros(n, dtype=torch.int64), **mix}
        return State(super().init(task, params, population).server, users)

    def receive(self, task, down, user, info, full=None):
        v = user["v"]
        return Local(down, task.local.init(down), v, task.local.init(v), user["mix"] if self.adaptive else ())

    def step(self, task, local, batches, info):
        w, v, a = local.w, local.v, local.mix if self.adaptive else self.mix
        g = task.grad(w, batches["outer"])
        h = task.grad(mixture(a, v, w), batches["outer"])
        new_w, opt = task.local.update(g, local.opt, w, self.beta)
        new_v, own = task.local.update(tree.scale(a, h) if self.v_step == "chain" else h, local.own, v, self.beta)
        if self.adaptive:
            moved = torch.clamp(a - self.beta * tree.dot(tree.sub(v, w), h), 0, 1)
            a = torch.where(info.step == 0, moved, a)
        return Local(new_w, opt, new_v, own, a if self.adaptive else ())

    def send(self, task, down, user, local, info):
        mix = {"mix": local.mix} if self.adaptive else {}
        return local.w, {"v": local.v, "rounds": user["rounds"] + 1, **mix}

    def candidates(self, server, user):
        w = server["w"]
        v = tree.where(user["rounds"] > 0, user["v"], w)
        return {"personal": mixture(user["mix"] if self.adaptive else self.mix, v, w), "global": w}
