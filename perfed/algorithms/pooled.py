"""Centralised training: one model on the data of all users. A reference that no federated method has, and not a bound.

    round k:  repeat tau times:  w = w - beta g(w; B),  B of `batch` A examples of all users' data, A users being active in a round

So K rounds process as many examples as FedAvg does, in tau steps a round. A personal model can be better than this one.
Judged
    global      w; with adaptation steps it is pooled + adapt
    reweighted  w with the user's class shares p_i(y) in place of those of all, p(y): p_i(y|x) ~ p(y|x) p_i(y) / p(y) is the user's
                posterior where users differ in their class shares alone (M. Saerens, P. Latinne, C. Decaestecker, "Adjusting the
                Outputs of a Classifier to New a Priori Probabilities", Neural Computation 14, 2002, eq. 2.4). For scores that are
                logits with an output bias b this is, exactly,
                    b_y + log p_i(y) - log p(y)
                p_i are the shares in the user's train data; a class that he has none of counts `floor` examples. A class that no
                training user has keeps its bias: w knows nothing of it.
                The model must have cross-entropy and one bias of C entries in its last layer, which must give the scores as they
                are (mlp, cnn, logistic with bias); for others `reweighted` is left out

The local optimizer's state starts afresh in each round, as a user's does. Communication: raw data leave the users; no numbers
are counted. Costs: a gradient on the examples of A users counts as A.
Cold start: every user has w; a new one needs his class shares only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from perfed.algorithms.base import Algorithm, Draw, Population, Task, register
from perfed.errors import require
from perfed.models import Model
from perfed.types import Params, State


def output_bias(model: Model, params: Params, classes: int) -> str | None:
    """Name of the parameter that is added to the logits, or None where there is none or scores are no logits."""
    if type(model).losses is not Model.losses:
        return None
    found = [name for name in model.last_layer(params) if params[name].shape == (classes,)]
    return found[0] if len(found) == 1 else None


@register("pooled")
@dataclass(kw_only=True)
class Pooled(Algorithm):
    """Server: w. Users: what is added to the output bias, by its name, or nothing; it never changes."""

    floor: float = 0.5

    weighs: ClassVar[bool] = False
    own_server_step: ClassVar[bool] = True  # there is none

    def __post_init__(self):
        super().__post_init__()
        require(0 < self.floor <= 1, "floor", self.floor, "a number of examples in (0, 1]")

    @property
    def trains(self):
        return "together"

    def draws(self, active=1):
        return {"outer": Draw(self.batch * active, "outer")}

    def init(self, task: Task, params: Params, population: Population) -> State:
        server = super().init(task, params, population).server
        name = output_bias(task.model, params, population.counts.shape[1])
        return State(server, {} if name is None else {name: self.shifts(population).to(params[name])})

    def shifts(self, population: Population) -> Tensor:
        """log p_i(y) - log p(y), [N, C]."""
        counts = population.counts.to(torch.float64)
        total = counts[population.members].sum(0)
        mine = counts.clamp(min=self.floor) / counts.sum(1, keepdim=True)
        return torch.where(total > 0, mine.log() - (total.clamp(min=1) / total.sum()).log(), 0.0)

    def floats_up(self, upload, info):
        return 0

    def floats_down(self, down, reply, info):
        return 0

    def candidates(self, server, user):
        w = server["w"]
        models = {"global": w}
        if user:
            models["reweighted"] = {name: value + user[name] if name in user else value for name, value in w.items()}
        return models
