"""FedMeta with MAML: users send meta-gradients, the server is the optimizer.

F. Chen, M. Luo, Z. Dong, Z. Li, X. He, "Federated Meta-Learning with Fast Convergence and Efficient Communication",
arXiv 1802.07876, algorithm 1; C. Finn, P. Abbeel, S. Levine, "Model-Agnostic Meta-Learning for Fast Adaptation of Deep
Networks", ICML 2017. Objective: F(w) = (1/n) sum_i L_i(w - alpha grad L_i(w; S_i); Q_i), S_i and Q_i the user's support and
query set.

    round k: the server draws A_k and sends w
      user i in A_k, one step whatever his data, with batches S (role `inner`) and Q (role `outer`):
        q = g_i(w - alpha g_i(w; S); Q)
        dir = q - alpha H_i(w; S) q                  (first_order: dir = q)
      w = outer step of the server with the mean over A_k of dir

What goes up is w - beta dir. The mean upload is therefore w - beta mean(dir): ``server=average`` is SGD with step beta, and
``server=momentum`` and ``server=adam`` (the paper's outer optimizer) see the pseudo-gradient beta mean(dir), as from any other method.

Switches
    support      share p of a user's data that is his support set, the rest is his query set; both are chosen once for the whole
                 run, and batches are drawn within. A user with one example uses it for both. null: both batches are drawn
                 independently from all of his data; then this is Per-FedAvg with tau = 1 and hess_batch=inner
    first_order  drop the curvature (first-order MAML), as public code does without saying so

The paper's users read all of S_i and Q_i; with `batch` at least as large as these sets, so do ours. Users keep nothing: a
new one adapts the server's model. Judged: the server's model, before and after adaptation with step alpha.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfed import tree
from perfed.algorithms.base import Algorithm, Draw, register
from perfed.errors import require


@register("fedmeta")
@dataclass(kw_only=True)
class FedMeta(Algorithm):
    """FedAvg's server and state; only the direction differs."""

    tau: int = 1
    alpha: float = 0.01
    support: float | None = 0.2
    first_order: bool = False

    plain_sgd: ClassVar[bool] = True  # what goes up stands for a gradient

    def __post_init__(self):
        super().__post_init__()
        require(self.tau == 1, "tau", self.tau, f"1: a user of {self.name} sends one gradient a round")
        require(self.alpha >= 0, "alpha", self.alpha, "a number >= 0")
        require(self.support is None or 0 < self.support < 1, "support", self.support, "null or a share over 0 and below 1")

    @property
    def inner_step(self):
        return self.alpha

    def draws(self, active=1):
        if self.support is None:
            return {"inner": Draw(self.batch, "inner"), "outer": Draw(self.batch, "outer")}
        return {
            "inner": Draw(self.batch, "inner", part=(0, self.support)),
            "outer": Draw(self.batch, "outer", part=(self.support, 1)),
        }

    def local_steps(self, info):
        return 1

    def direction(self, task, w, batches, info):
        q = task.grad(tree.axpy(-self.alpha, task.grad(w, batches["inner"]), w), batches["outer"])
        return q if self.first_order else tree.axpy(-self.alpha, task.hvp(w, batches["inner"], q), q)
