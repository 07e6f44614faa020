"""SCAFFOLD: control variates take the drift out of local steps.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh, "SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning", ICML 2020, arXiv 1910.06378: algorithm 1, eqs. 3-5.

    state: server w, c;  user c_i;  c = c_i = 0 at first
    round k: the server draws A_k, of A out of n users, and sends w and c
      user i in A_k:  y = w;  repeat tau times:  y = y - beta (g_i(y; B') - c_i + c)
        option I:   c_i+ = grad f_i(w), on all of his data
        option II:  c_i+ = c_i - c + (w - y) / (tau beta)              with SGD the mean of the gradients that he just saw
        sends dy = y - w and dc = c_i+ - c_i, and keeps c_i = c_i+
      w = w + eta_g (mean over A_k of dy);   c = c + A/n (mean over A_k of dc)

so that c is the mean of all n users' c_i at all times; users that were not drawn keep theirs. On quadratics with exact
gradients w goes to the minimiser of the mean of the f_i for every tau, and under partial participation; FedAvg does not.

Switches
    option       `II` (cheaper, and the paper's experiments) | `I` (one more pass over the user's data a round)
    server.lr    eta_g, with server=average. Other server optimizers get w + mean dy in place of the mean model.
    aggregation  `uniform` only: c is the plain mean
Option II reads gradients off the steps, so it needs plain SGD. It divides by the number of steps that the user took.

Cold start: a user that was never drawn has c_i = 0 and takes part like all others. Judged: `global`, w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from perfed import tree
from perfed.algorithms.base import Algorithm, choice, register
from perfed.types import Params, State, Tree


class Local(NamedTuple):
    """The model, the optimizer's state, the correction c - c_i, and with option I the user's next c_i (else ())."""

    w: Params
    opt: Tree
    shift: Params
    exact: Tree


@register("scaffold")
@dataclass(kw_only=True)
class Scaffold(Algorithm):
    """State: the server holds w and c, each user his c_i."""

    option: str = "II"

    def __post_init__(self):
        super().__post_init__()
        choice("option", self.option, ("I", "II"))
        choice("aggregation", self.aggregation, ("uniform",))

    @property
    def plain_sgd(self):
        return self.option == "II"

    @property
    def full_data(self):
        return self.option == "I"

    def init(self, task, params, population):
        zero = tree.zeros(params)
        return State({"w": params, "opt": task.server.init(params), "c": zero}, tree.repeat(zero, population.n))

    def broadcast(self, server):
        return {"w": server["w"], "c": server["c"]}

    def receive(self, task, down, user, info, full=None):
        w = down["w"]
        exact = task.grad(w, full) if self.option == "I" else ()
        return Local(w, task.local.init(w), tree.sub(down["c"], user), exact)

    def step(self, task, local, batches, info):
        u = tree.map(torch.add, task.grad(local.w, batches["outer"]), local.shift)
        w, opt = task.local.update(u, local.opt, local.w, self.step_size(info))
        return local._replace(w=w, opt=opt)

    def send(self, task, down, user, local, info):
        moved = tree.sub(local.w, down["w"])
        # Two divisions: an integer tensor of steps times a float would be rounded to single precision.
        seen = tree.map(lambda d: -d / self.step_size(info) / self.local_steps(info), moved)
        new = local.exact if self.option == "I" else tree.sub(seen, local.shift)
        return {"dy": moved, "dc": tree.sub(new, user)}, new

    def aggregate(self, task, server, uploads, cohort):
        dy, dc = self.average(uploads["dy"], cohort), self.average(uploads["dc"], cohort)
        w, opt = task.server.update(tree.map(torch.add, server["w"], dy), server["opt"], server["w"])
        return {"w": w, "opt": opt, "c": tree.axpy(cohort.active / cohort.n, dc, server["c"])}, ()

    def shown(self, server):
        return {"w": server["w"]}
