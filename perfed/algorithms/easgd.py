"""EASGD: users with models of their own, tied to a centre by an elastic force.

S. Zhang, A. Choromanska, Y. LeCun, "Deep learning with Elastic Averaging SGD", NeurIPS 2015, arXiv 1412.6651, eqs. 5, 6.
Objective (eq. 2): sum_i f_i(x_i) + (rho / 2) ||x_i - xt||^2.

    round k: the server draws A_k and sends the centre xt
      user i in A_k:  e = alpha_e (x_i - xt)                     alpha_e = beta_e / A
        step 0:              x_i = x_i - beta g_i(x_i; B') - e   the gradient is taken where the user was before the exchange (eq. 5)
        steps 1 .. tau - 1:  x_i = x_i - beta g_i(x_i; B')
      xt = xt + sum over A_k of e                                a sum, not a mean (eq. 6 with beta_e = A alpha_e)

Users that are not drawn neither move nor pull the centre. All users start at w_0, so one that is drawn late pulls the centre
back towards it. beta_e = 0 is local training. Each exchange conserves xt + sum_i x_i.

For tau = 1 and all users active the rest point is the minimiser of the objective with rho = alpha_e / beta. For tau > 1 it is
not: the force acts once in tau steps, and the point is near the minimiser for lambda = rho / tau, which is what the coupling
that is printed means. Other local optimizers replace the gradient step alone, never the force.

Deviations from the paper: users may be drawn (the paper has all); the exchange is synchronous.
Judged: `personal`, x_i (the centre for a user that was never drawn, or is new); `global`, the centre xt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from perfed import tree
from perfed.algorithms.base import Algorithm, register
from perfed.errors import require
from perfed.types import Params, State, Tree


class Local(NamedTuple):
    """The model, the optimizer's state and the elastic difference e."""

    w: Params
    opt: Tree
    e: Params


@register("easgd")
@dataclass(kw_only=True)
class EASGD(Algorithm):
    """State: users hold x_i and the number of rounds they trained; the server holds the centre ``w``."""

    cold_start = "the centre"
    weighs = False
    own_server_step = True
    wants_smoothness = True

    beta_e: float = 0.9

    def __post_init__(self):
        super().__post_init__()
        require(0 <= self.beta_e < 2, "beta_e", self.beta_e, "a number in [0, 2): beyond it the centre overshoots")

    def alpha_e(self, active: int) -> float:
        """The share of the difference that a user gives way by."""
        return self.beta_e / active

    def init(self, task, params, population):
        return State({"w": params}, tree.repeat({"x": params, "rounds": torch.tensor(0)}, population.n))

    def receive(self, task, down, user, info, full=None):
        e = tree.scale(self.alpha_e(info.active), tree.sub(user["x"], down))
        return Local(user["x"], task.local.init(user["x"]), e)

    def step(self, task, local, batches, info):
        new = super().step(task, local, batches, info)
        return new._replace(w=tree.where(info.step == 0, tree.sub(new.w, local.e), new.w))

    def send(self, task, down, user, local, info):
        return local.e, {"x": local.w, "rounds": user["rounds"] + 1}

    def aggregate(self, task, server, uploads, cohort):
        return {"w": tree.map(lambda w, e: w + e.sum(0), server["w"], uploads)}, ()

    def candidates(self, server, user):
        return {"personal": tree.where(user["rounds"] > 0, user["x"], server["w"]), "global": server["w"]}

    def coupling_lambda(self, facts):
        return self.alpha_e(facts.active) / self.beta / self.tau

    def notes(self, facts):
        lines = super().notes(facts)
        if facts.smoothness is not None:
            step, alpha_e = self.beta * facts.smoothness, self.alpha_e(facts.active)
            # Eigenvalues of the map (x_i, xt) -> (x_i, xt) on curvature L within the unit circle; beta_e < 2 bounds the determinant.
            if not ((2 - step - alpha_e) * (2 - self.beta_e) > alpha_e * self.beta_e and abs(1 - step - alpha_e) < 1):
                lines.append(
                    f"warning: beta*L = {step:.3g} at w_0 is outside of EASGD's stability bound: (2 - beta*L - alpha_e)(2 - beta_e) > "
                    f"alpha_e*beta_e and |1 - beta*L - alpha_e| < 1 with alpha_e = {alpha_e:.3g} (analysis for tau = 1 and quadratics)"
                )
        return lines
