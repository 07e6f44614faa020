"""Meta-SGD in FedMeta: the model and a step for each of its coordinates are learned together.

Z. Li, F. Zhou, F. Chen, H. Li, "Meta-SGD: Learning to Learn Quickly for Few-Shot Learning", arXiv 1707.09835, algorithm 1; as
used in F. Chen et al., "Federated Meta-Learning with Fast Convergence and Efficient Communication", arXiv 1802.07876, algorithm 1.
Objective: F(w, a) = (1/n) sum_i L_i(w - a o grad L_i(w; S_i); Q_i), o the product by coordinates. a starts at alpha.

    round k: the server draws A_k and sends w and a
      user i in A_k, with batches S (role `inner`) and Q (role `outer`):
        g = g_i(w; S);  q = g_i(w - a o g; Q)
        dw = q - H_i(w; S) (a o q)                   (first_order: dw = q)
        da = -g o q
      (w, a) = outer step of the server with the means over A_k of dw and da

What goes up is w - beta dw and a - beta_a da: ``server=average`` is SGD with the steps beta and beta_a, other server
optimizers work on w and a jointly and see beta mean(dw), beta_a mean(da) as pseudo-gradients. Both go up and down: 2d numbers each.

Switches
    support, first_order   as in `fedmeta`
    beta_a       step of a; null: beta
    clamp        a = max(a, 0) after each server step. Without it (as in the papers) entries may turn negative; `share_negative`
                 of the diagnostics says how many
    learn        false: a stays alpha and does not go up; this is `fedmeta`

Users keep nothing: a new one adapts the server's model with the server's a. Judged: the server's model; adaptation uses a,
unless adapt.lr is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from perfed import tree
from perfed.algorithms.base import register
from perfed.algorithms.fedmeta import FedMeta
from perfed.errors import require
from perfed.types import Params, State


class Meta(NamedTuple):
    """A model and the steps with which it adapts."""

    w: Params
    a: Params


@register("metasgd")
@dataclass(kw_only=True)
class MetaSgd(FedMeta):
    """Server: w, a and the state of the server's optimizer."""

    beta_a: float | None = None
    clamp: bool = False
    learn: bool = True

    learned_step: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        require(self.alpha > 0, "alpha", self.alpha, "a number > 0, where a starts")
        require(self.beta_a is None or self.beta_a > 0, "beta_a", self.beta_a, "null or a number > 0")

    def learned(self, w: Params, a: Params) -> dict[str, Params]:
        """What goes up, and what the server's optimizer works on."""
        return {"w": w, "a": a} if self.learn else {"w": w}

    def init(self, task, params, population):
        a = tree.map(lambda t: torch.full_like(t, self.alpha), params)
        return State({"w": params, "a": a, "opt": task.server.init(self.learned(params, a))}, ())

    def broadcast(self, server):
        return Meta(server["w"], server["a"])

    def receive(self, task, down, user, info, full=None):
        return down

    def step(self, task, local, batches, info):
        w, a = local
        g = task.grad(w, batches["inner"])
        q = task.grad(tree.map(lambda wi, ai, gi: wi - ai * gi, w, a, g), batches["outer"])
        dw = q
        if not self.first_order:
            dw = tree.sub(q, task.hvp(w, batches["inner"], tree.map(torch.mul, a, q)))
        da = tree.map(lambda gi, qi: -gi * qi, g, q)
        beta_a = self.beta if self.beta_a is None else self.beta_a
        return Meta(tree.axpy(-self.beta, dw, w), tree.axpy(-beta_a, da, a))

    def send(self, task, down, user, local, info):
        return self.learned(*local), user

    def aggregate(self, task, server, uploads, cohort):
        before = self.learned(server["w"], server["a"])
        new, opt = task.server.update(self.average(uploads, cohort), server["opt"], before)
        if self.clamp and self.learn:
            new = {**new, "a": tree.map(lambda t: t.clamp(min=0), new["a"])}
        return {**server, **new, "opt": opt}, ()

    def candidates(self, server, user):
        return {"global": Meta(server["w"], server["a"])}

    def adapt_step(self, task, carry, batch, lr):
        g = task.grad(carry.w, batch)
        if lr is not None:
            return carry._replace(w=self.moved(task, carry.w, g, lr))
        return carry._replace(w=self.moved(task, carry.w, tree.map(torch.mul, carry.a, g), 1.0))

    def adapted(self, carry):
        return carry.w

    def diagnostics(self, task, w, batches, info):
        """``share_negative``: share of the entries of a that are negative; ``w`` is the candidate, with its a."""
        return {"share_negative": sum((t < 0).sum() for t in tree.leaves(w.a)) / tree.numel(w.a)}
