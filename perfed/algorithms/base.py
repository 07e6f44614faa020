"""The interface of an algorithm, its defaults, and the registry.

An algorithm is one dataclass. Its fields are its hyper-parameters and the keys of ``conf/algo/<name>.yaml``. Its methods
are pure functions **for one user and one seed**; ``perfed.federate`` maps them over users and seeds. They may not edit
their inputs, branch on the value of a tensor or a float, nor draw random numbers.

A round, for every active user (``down`` is all that the user gets, ``upload`` all that the server gets):

    down = broadcast(server)
    local = receive(down, user, info)
    repeat local_steps(info) times:  local = step(local, batches, info)
    upload, user = send(down, user, local, info)
    server, replies = aggregate(server, uploads, cohort)
    user = settle(user, reply)

How to add one: a file with the paper and its update rule in the docstring ...

    @register("fedavg")
    @dataclass(kw_only=True)
    class FedAvg(Algorithm):
        def direction(self, task, w, batches, info):
            return task.grad(w, batches["outer"])

... and a YAML file of the same name with its fields (``beta: ${beta}``). A file of your own outside the package joins with
``plugins=[my.module]``. Every registered algorithm is put through the contract in ``tests/test_contract.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, grad_and_value

from perfed import tree
from perfed.data.sampling import Draw
from perfed.errors import require
from perfed.models import Model
from perfed.optimizers import LocalOptimizer, ServerOptimizer
from perfed.types import Batch, Info, Params, State, Tree

ALGORITHMS: dict[str, type[Algorithm]] = {}


def register(name: str):
    """Class decorator: make an algorithm available as ``algo=<name>``."""

    def add(cls):
        ALGORITHMS[name] = cls
        return cls

    return add


@dataclass
class Task:
    """The learning problem of a user: loss, gradient and Hessian-vector product, every call counted in ``calls``."""

    model: Model
    local: LocalOptimizer
    server: ServerOptimizer
    adapted: frozenset[str] | None = None  # parameters that adaptation may change; None: all
    calls: Counter[str] = field(default_factory=Counter)

    def count(self, what: str) -> None:
        """Note a call; a compiled step is traced, not called, and notes nothing."""
        if not torch.compiler.is_compiling():
            self.calls[what] += 1

    def mean_loss(self, params: Params, batch: Batch) -> Tensor:
        """sum(w l) / sum(w), without counting."""
        losses = self.model.losses(self.model.apply(params, batch.x), batch.y)
        return (batch.weight * losses).sum() / batch.weight.sum()

    def loss(self, params: Params, batch: Batch) -> Tensor:
        """Mean loss of a batch."""
        self.count("losses")
        return self.mean_loss(params, batch)

    def grad(self, params: Params, batch: Batch) -> Params:
        """Gradient of the mean loss: one gradient evaluation."""
        self.count("grads")
        return grad(self.mean_loss)(params, batch)

    def grad_and_loss(self, params: Params, batch: Batch) -> tuple[Params, Tensor]:
        """Gradient and mean loss: one gradient evaluation."""
        self.count("grads")
        return grad_and_value(self.mean_loss)(params, batch)

    def hvp(self, params: Params, batch: Batch, v: Params) -> Params:
        """Hessian of the mean loss times v, exactly, as the gradient of <grad f, v> with v held."""
        self.count("hvps")
        return grad(lambda p: tree.dot(grad(self.mean_loss)(p, batch), v))(params)


class Population(NamedTuple):
    """Who takes part: sizes [N], label counts [N, C] (training data), and N users of whom A are drawn a round."""

    n: int
    active: int
    sizes: Tensor
    counts: Tensor


class Local(NamedTuple):
    """What a user works on during a round: the model and the state of the local optimizer."""

    w: Params
    opt: Tree


@dataclass(kw_only=True)
class Algorithm:
    """Base class: a server model ``w`` that users pull, step on and send back; FedAvg but for ``direction``."""

    name: str
    beta: float = 0.001
    tau: int = 10
    batch: int = 40
    aggregation: str = "uniform"

    version: ClassVar[int] = 1  # raise it when results change
    uses_horizon: ClassVar[bool] = False  # True: a shorter run is not the beginning of a longer one

    def __post_init__(self):
        require(self.beta > 0, "beta", self.beta, "a number > 0")
        require(self.tau >= 1, "tau", self.tau, "an integer >= 1")
        require(self.batch >= 1, "batch", self.batch, "an integer >= 1")
        choice("aggregation", self.aggregation, ("uniform", "samples"))

    def check(self, dtype: str) -> None:
        """Refuse hyper-parameters that do not go with ``float32`` or ``float64`` arithmetic."""

    # --- data and schedule

    @property
    def trains(self) -> str:
        """``sampled``: the active users step; ``all``: every user steps, the active ones are aggregated."""
        return "sampled"

    @property
    def inner_step(self) -> float | None:
        """The adaptation step that the method itself defines, or None."""
        return None

    def draws(self) -> dict[str, Draw]:
        """Which batches ONE step reads, by role."""
        return {"outer": Draw(self.batch, "outer")}

    def local_steps(self, info: Info) -> int | Tensor:
        """Steps of a user in this round: a number, or a tensor where they differ between users.

        The one method that is called for all lanes at once: the tensors of ``info`` lead with L, so use arithmetic by entries.
        """
        return self.tau

    # --- a round

    def init(self, task: Task, params: Params, population: Population) -> State:
        """The state before round 0, for one seed."""
        return State({"w": params, "opt": task.server.init(params)}, ())

    def broadcast(self, server: Tree) -> Tree:
        """All that is sent to a user."""
        return server["w"]

    def receive(self, task: Task, down: Tree, user: Tree, info: Info) -> Tree:
        """What a user starts the round from. Local optimizer state starts here."""
        return Local(down, task.local.init(down))

    def direction(self, task: Task, w: Params, batches: dict[str, Batch], info: Info) -> Params:
        """The vector that takes the place of the gradient in ``w -= beta * direction``."""
        return task.grad(w, batches["outer"])

    def step_size(self, info: Info) -> float | Tensor:
        """beta of this round."""
        return self.beta

    def step(self, task: Task, local: Tree, batches: dict[str, Batch], info: Info) -> Tree:
        """ONE local step."""
        u = self.direction(task, local.w, batches, info)
        w, opt = task.local.update(u, local.opt, local.w, self.step_size(info))
        return local._replace(w=w, opt=opt)

    def send(self, task: Task, down: Tree, user: Tree, local: Tree, info: Info) -> tuple[Tree, Tree]:
        """(what goes up, what the user keeps)."""
        return local.w, user

    def floats_up(self, upload: Tree, info: Info) -> int | Tensor:
        """Numbers that ``upload`` costs a user."""
        return tree.numel(upload)

    def aggregate(self, task: Task, server: Tree, uploads: Tree, cohort: Info) -> tuple[Tree, Tree]:
        """Uploads lead with A. Returns the server and the replies to the active users, which lead with A too."""
        w, opt = task.server.update(self.average(uploads, cohort), server["opt"], server["w"])
        return {**server, "w": w, "opt": opt}, ()

    def average(self, uploads: Tree, cohort: Info) -> Tree:
        """Mean over the active users: all alike, or by their number of training examples."""
        weight = cohort.m if self.aggregation == "samples" else torch.ones_like(cohort.m)
        return tree.mean(uploads, weight.to(tree.leaves(uploads)[0].dtype))

    def settle(self, user: Tree, reply: Tree) -> Tree:
        """What the user keeps once the server has answered."""
        return user

    # --- judging

    def candidates(self, server: Tree, user: Tree) -> dict[str, Params]:
        """The models that can be judged for a user, by name; the first one is the primary one."""
        return {"global": server["w"]}

    def adapt_init(self, task: Task, params: Params) -> Tree:
        """What adaptation carries from step to step."""
        return params

    def adapt_step(self, task: Task, carry: Tree, batch: Batch, lr: float) -> Tree:
        """ONE adaptation step: w -= lr grad, on the parameters that may change."""
        g = task.grad(carry, batch)
        return {k: w - lr * g[k] if task.adapted is None or k in task.adapted else w for k, w in carry.items()}

    def adapted(self, carry: Tree) -> Params:
        """The model that a carry stands for."""
        return carry

    def diagnostics(self, task: Task, w: Params, batches: dict[str, Batch], info: Info) -> dict[str, Tensor]:
        """Scalars measured on one user at each evaluation; they change nothing."""
        return {}


def choice(key: str, value: Any, allowed: Iterable[str]) -> None:
    """Refuse a value that is none of ``allowed``."""
    require(value in allowed, key, value, "one of " + ", ".join(allowed))
