"""Partial personalization: some layers are each user's own, the rest is averaged. FedPer, FedRep, FedBABU and LG-FedAvg are presets.

fedper     M. G. Arivazhagan et al., "Federated Learning with Personalization Layers", arXiv 1912.00818: the last layer is personal
fedrep     L. Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021, algorithm 1:
           the same parts, moved one after the other
fedbabu    J. Oh, S. Kim, S.-Y. Yun, "FedBABU: Towards Enhanced Representation for Federated Image Classification", ICLR 2022:
           the last layer stays what it was at the start; users get a head of their own when they adapt
lgfedavg   P. P. Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations",
           arXiv 2001.01523: the first layer is personal
partial    K. Pillutla et al., "Federated Learning with Partial Model Personalization", ICML 2022: any parts; `joint` is their
           FedSim, `alternate` their FedAlt. Objective: (1/n) sum_i f_i(u, v_i)

    A model is (u, v, z): shared, personal and frozen parameters. User i keeps v_i; z never changes.
    round k: the server draws A_k and sends u
      user i in A_k:  joint:      repeat tau times:  (u_i, v_i) = (u_i, v_i) - beta g_i(u_i, v_i, z; B')
                      alternate:  repeat personal_steps times:  v_i = v_i - beta grad_v f_i(u, v_i, z; B')
                                  repeat tau times:             u_i = u_i - beta grad_u f_i(u_i, v_i, z; B')
      u = mean over A_k of u_i

Switches
    personal, frozen   which parameters: `none`, `first` or `last` (layer), `all`, or a list of names or beginnings of names. What
                       is in both is frozen. personal=all is local training, personal=none with frozen=none is FedAvg, step by step
    schedule, personal_steps    as above. Every step reads a fresh batch and costs one whole gradient, so a round of `alternate`
                       costs personal_steps + tau gradients
    aggregation        of u; FedPer, FedBABU and LG-FedAvg weight by m_i (`samples`)

Deviations: FedPer and FedRep count local epochs, here all count steps. u and v have one step size and an optimizer each, whose
state starts afresh in a round. Communication is u alone, down and up: w_0, and with it z, is known to all before round 0.
Cold start: the personal part of a user that was never drawn, or is new, is that of the common w_0; only adaptation moves it.
Judged: `personal`, (u, v_i, z) with the server's u; without a personal part it is `global`, the same for all users.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from perfed import tree
from perfed.algorithms.base import Algorithm, Task, choice, register
from perfed.errors import UserError, require
from perfed.types import Params, State, Tree


class Part(NamedTuple):
    """Parameters that move together, perhaps none, and the state of their optimizer."""

    w: Params
    opt: Tree


class Local(NamedTuple):
    """What a user works on. ``order`` holds the names of all parameters, in the model's order, and zeros."""

    own: Part
    shared: Part
    frozen: Params
    order: Tree


def whole(order: Tree, *parts: Params) -> Params:
    """The parts as one model."""
    found = {name: value for part in parts for name, value in part.items()}
    return {name: found[name] for name in order}


@register("partial")
@dataclass(kw_only=True)
class Partial(Algorithm):
    """Server: u (as ``w``), z and the order of names. Users: v_i."""

    personal: Any = "last"
    frozen: Any = "none"
    schedule: str = "joint"
    personal_steps: int = 10

    def __post_init__(self):
        super().__post_init__()
        for key in ("personal", "frozen"):
            value = getattr(self, key)
            names = value if isinstance(value, (list, tuple)) else [value]
            ok = bool(names) and all(isinstance(name, str) and name for name in names)
            require(ok, key, value, "none, first, last, all, or names of layers or parameters")
        choice("schedule", self.schedule, ("joint", "alternate"))
        require(self.personal_steps >= 1, "personal_steps", self.personal_steps, "an integer >= 1")

    @property
    def cold_start(self):
        special = {"none": "the global model", "all": "the initial model"}
        if self.personal in ("first", "last") and self.frozen == self.personal:
            return special["none"]  # nothing is left that is personal
        return special.get(str(self.personal), "the global shared part with the initial personal part")

    def local_steps_at_most(self):
        return self.tau if self.schedule == "joint" else self.personal_steps + self.tau

    def local_steps(self, info):
        return self.local_steps_at_most()

    def named(self, key: str, task: Task, params: Params) -> set[str]:
        """The parameters that a field names."""
        value = getattr(self, key)
        layer = {name: name.rpartition(".")[0] for name in params}
        if value in ("none", "all"):
            return set(params) if value == "all" else set()
        if value == "last":
            return set(task.model.last_layer(params))
        if value == "first":
            return {name for name in params if layer[name] == layer[next(iter(params))]}
        found = set()
        for wanted in [value] if isinstance(value, str) else value:
            mine = {name for name in params if name == wanted or name.startswith(wanted + ".")}
            known = ", ".join(dict.fromkeys(layer[name] or name for name in params))
            require(bool(mine), key, value, f"none, first, last, all, or layers or parameters among {known}")
            found |= mine
        return found

    def init(self, task, params, population):
        still = self.named("frozen", task, params)
        mine = self.named("personal", task, params) - still
        require(len(still) < len(params), "frozen", self.frozen, "must leave parameters to train")
        u = {name: value for name, value in params.items() if name not in mine | still}
        v = {name: value for name, value in params.items() if name in mine}
        z = {name: value for name, value in params.items() if name in still}
        if self.schedule == "alternate" and not (u and v):
            raise UserError("schedule", self.schedule, "joint, since one of the parts, personal and shared, is empty")
        order = {name: value.new_zeros(()) for name, value in params.items()}
        server = {"w": u, "opt": task.server.init(u) if u else (), "frozen": z, "order": order}
        return State(server, tree.repeat(v, population.n))

    def broadcast(self, server):
        return {key: server[key] for key in ("w", "frozen", "order")}

    def floats_down(self, down, reply, info):
        return tree.numel(down["w"]) if down else 0

    def receive(self, task, down, user, info, full=None):
        own, shared = (Part(w, task.local.init(w) if w else ()) for w in (user, down["w"]))
        return Local(own, shared, down["frozen"], down["order"])

    def step(self, task, local, batches, info):
        w = whole(local.order, local.own.w, local.shared.w, local.frozen)
        g = task.grad(w, batches["outer"])
        first = info.step < self.personal_steps
        own_turn, shared_turn = (first, ~first) if self.schedule == "alternate" else (None, None)
        return local._replace(own=self.stepped(task, local.own, g, own_turn), shared=self.stepped(task, local.shared, g, shared_turn))

    def stepped(self, task: Task, part: Part, g: Params, turn: Tensor | None) -> Part:
        """The part after a step; where it is not its turn it stays, and so does its optimizer."""
        if not part.w:
            return part
        new = Part(*task.local.update({name: g[name] for name in part.w}, part.opt, part.w, self.beta))
        return new if turn is None else tree.where(turn, new, part)

    def send(self, task, down, user, local, info):
        return local.shared.w, local.own.w

    def aggregate(self, task, server, uploads, cohort):
        return super().aggregate(task, server, uploads, cohort) if server["w"] else (server, ())

    def candidates(self, server, user):
        return {"personal" if user else "global": whole(server["order"], user, server["w"], server["frozen"])}


@register("fedper")
@dataclass(kw_only=True)
class FedPer(Partial):
    """The last layer is personal, all parts move together."""


@register("fedrep")
@dataclass(kw_only=True)
class FedRep(Partial):
    """The last layer is personal and moves first."""

    schedule: str = "alternate"


@register("fedbabu")
@dataclass(kw_only=True)
class FedBABU(Partial):
    """The last layer is not trained at all."""

    personal: Any = "none"
    frozen: Any = "last"


@register("lgfedavg")
@dataclass(kw_only=True)
class LGFedAvg(Partial):
    """The first layer is personal."""

    personal: Any = "first"
