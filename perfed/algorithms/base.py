"""The interface of an algorithm, its defaults, and the registry.

An algorithm is one dataclass. Its fields are its hyper-parameters and the keys of ``conf/algo/<name>.yaml``. Its methods
are pure functions **for one user and one seed**; ``perfed.federate`` maps them over users and seeds. They may not edit
their inputs, branch on the value of a tensor or a float, nor draw random numbers.

A round, for every user that trains (``down`` and ``reply`` are all that he gets, ``upload`` is all that the server gets):

    down = broadcast(server)                        # or Down(broadcast(server), his row of unicast(server, cohort))
    local = receive(down, user, info, full)
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

COUPLING_FROM = 0.05
"""A coupled method with less coupling than this is local training in disguise."""


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
    """The users of one seed: N of them, of whom A are drawn a round. Label counts are those of the training data."""

    n: int
    active: int
    sizes: Tensor  # [N] int64
    counts: Tensor  # [N, C] int64
    members: Tensor  # [N] bool; False: held out, never drawn
    seed: int  # for set-up that is drawn at random, by ``perfed.data.sampling.generator(seed, name)``
    largest: int = 0  # most training examples of a user in ANY seed: a size for padding, as the states of all seeds are stacked


class Down(NamedTuple):
    """What a user gets when the method also sends something to each user alone."""

    common: Tree
    own: Tree


class Anchored(NamedTuple):
    """A model that adapts by proximal steps around another one; see :meth:`Algorithm.adapt_step`."""

    w: Params
    anchor: Params


class Facts(NamedTuple):
    """What :meth:`Algorithm.notes` may know about a run.

    ``smoothness``: largest Hessian eigenvalue found at w_0, a lower bound of L. ``kinks``: functions whose slope jumps (ReLU and its kin)
    that the model calls.
    """

    n: int
    active: int
    rounds: int
    smoothness: float | None
    kinks: tuple[str, ...] = ()


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
    own_server_step: ClassVar[bool] = False  # True: the paper fixes the server's step, and other server optimizers are refused
    no_server: ClassVar[bool] = False  # True: there is no server's step, and server optimizers other than the default are refused
    plain_sgd: ClassVar[bool] = False  # True: the update is part of the method, and other local optimizers are refused
    learned_step: ClassVar[bool] = False  # True: adaptation uses a step that training learned, unless adapt.lr is given
    cold_start: ClassVar[str] = "the global model"  # what is judged for a user that was never sampled, or is new
    weighs: ClassVar[bool] = True  # False: the server's step is uniform by definition, and aggregation=samples is refused
    wants_smoothness: ClassVar[bool] = False  # True: ``notes`` reads ``facts.smoothness``

    def __post_init__(self):
        require(self.beta > 0, "beta", self.beta, "a number > 0")
        require(self.tau >= 1, "tau", self.tau, "an integer >= 1")
        require(self.batch >= 1, "batch", self.batch, "an integer >= 1")
        choice("aggregation", self.aggregation, ("uniform", "samples") if self.weighs else ("uniform",))

    def check(self, dtype: str) -> None:
        """Refuse hyper-parameters that do not go with ``float32`` or ``float64`` arithmetic."""

    # --- data and schedule

    @property
    def trains(self) -> str:
        """Who steps: ``sampled``, the active users; ``all``, every user; ``together``, one model on the data of all users."""
        return "sampled"

    @property
    def reports(self) -> str:
        """Whose uploads are aggregated: ``sampled``, or (where all train) ``all``."""
        return "sampled"

    @property
    def full_data(self) -> bool:
        """Whether ``receive`` reads all of the user's data: ``full`` is a Batch of them, else None."""
        return False

    @property
    def inner_step(self) -> float | None:
        """The adaptation step that the method itself defines, or None."""
        return None

    def draws(self, active: int = 1) -> dict[str, Draw]:
        """Which batches ONE step reads, by role. ``active``: A."""
        return {"outer": Draw(self.batch, "outer")}

    def stream_step(self, step: int) -> int:
        """Which step of the round's streams local step ``step`` reads; two steps may share their batches."""
        return step

    def local_steps(self, info: Info) -> int | Tensor:
        """Steps of a user in this round: a number, or a tensor where they differ between users.

        The one method that is called for all lanes at once: the tensors of ``info`` lead with L, so use arithmetic by entries.
        """
        return self.tau

    @property
    def square_state(self) -> int:
        """How many N x N matrices the server holds for a seed: for estimates of memory, before ``init``."""
        return 0

    def local_steps_at_most(self) -> int:
        """About how many steps a user takes in a round: for estimates."""
        return self.tau

    # --- a round

    def init(self, task: Task, params: Params, population: Population) -> State:
        """The state before round 0, for one seed. ``users`` leads with N (a view will do: ``tree.repeat``) or is ()."""
        return State({"w": params, "opt": task.server.init(params)}, ())

    def broadcast(self, server: Tree) -> Tree:
        """What is sent to every user alike."""
        return server["w"]

    def unicast(self, server: Tree, cohort: Info) -> Tree:
        """What is sent to each user alone, leading with the users of ``cohort``; () where there is no such thing."""
        return ()

    def receive(self, task: Task, down: Tree, user: Tree, info: Info, full: Batch | None = None) -> Tree:
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

    def floats_down(self, down: Tree, reply: Tree, info: Info) -> int | Tensor:
        """Numbers that a user gets in a round; the engine asks for ``down`` and ``reply`` one by one, the other being ()."""
        return tree.numel(down) + tree.numel(reply)

    def aggregate(self, task: Task, server: Tree, uploads: Tree, cohort: Info) -> tuple[Tree, Tree]:
        """Uploads and ``cohort`` lead with the users that report: A, or all members.

        Returns the server and the replies to these users, which lead likewise.
        """
        w, opt = task.server.update(self.average(uploads, cohort), server["opt"], server["w"])
        return {**server, "w": w, "opt": opt}, ()

    def average(self, uploads: Tree, cohort: Info) -> Tree:
        """Mean over the active users: all alike, or by their number of training examples."""
        weight = cohort.m if self.aggregation == "samples" else torch.ones_like(cohort.m)
        return tree.mean(uploads, weight)

    def settle(self, user: Tree, reply: Tree) -> Tree:
        """What the user keeps once the server has answered."""
        return user

    # --- guarding

    def server_models(self, server: Tree) -> Tree:
        """The part of the server whose size shows that training has run away; the rest need only be finite."""
        return server

    def user_models(self, user: Tree) -> Tree:
        """The same of what a user keeps."""
        return user

    # --- judging

    def shown(self, server: Tree) -> Tree:
        """What ``candidates`` reads of the server. It is copied for every user: leave out what is large."""
        return server

    def candidates(self, server: Tree, user: Tree) -> dict[str, Tree]:
        """The models that can be judged for a user, by name (global, personal, ...); the first one is the primary one.

        Each is what ``adapt_init`` starts from: parameters, or whatever else the method adapts. ``server`` is ``shown(server)``.
        """
        return {"global": server["w"]}

    @property
    def prox(self) -> float:
        """lambda of the proximal adaptation steps of an :class:`Anchored` candidate."""
        return 0.0

    def adapt_init(self, task: Task, candidate: Tree) -> Tree:
        """What adaptation carries from step to step."""
        return candidate

    def adapt_step(self, task: Task, carry: Tree, batch: Batch, lr: float | None) -> Tree:
        """ONE adaptation step on the parameters that may change: w -= lr grad, or w -= lr (grad + prox (w - anchor)).

        ``lr`` is None where the method's learned step is to be used.
        """
        if isinstance(carry, Anchored):
            g = tree.axpy(self.prox, tree.sub(carry.w, carry.anchor), task.grad(carry.w, batch))
            return carry._replace(w=self.moved(task, carry.w, g, lr))
        return self.moved(task, carry, task.grad(carry, batch), lr)

    def moved(self, task: Task, w: Params, g: Params, lr: float | Tensor) -> Params:
        """w - lr g on the parameters that adaptation may change."""
        return {k: v - lr * g[k] if task.adapted is None or k in task.adapted else v for k, v in w.items()}

    def adapted(self, carry: Tree) -> Params:
        """The model that a carry stands for."""
        return carry.w if isinstance(carry, Anchored) else carry

    def diagnostics(self, task: Task, w: Params, batches: dict[str, Batch], info: Info) -> dict[str, Tensor]:
        """Scalars measured on one user at each evaluation; they change nothing. ``w``: his first candidate, not adapted."""
        return {}

    # --- for the engine

    def method(self, name: str):
        """The bound method of that name."""
        return getattr(self, name)

    def is_default(self, name: str) -> bool:
        """Whether the method of that name is the one of this base class."""
        return getattr(type(self), name) is getattr(Algorithm, name)

    # --- what the user should know before the first round

    def coupling_lambda(self, facts: Facts) -> float | None:
        """lambda of a method whose users hold models of their own that are pulled together; None for all others."""
        return None

    def notes(self, facts: Facts) -> list[str]:
        """Lines that are printed and kept with the run; one that starts with ``warning:`` is a warning."""
        lam = self.coupling_lambda(facts)
        if lam is None:
            return []
        coupling = lam * self.beta * self.tau * facts.rounds * facts.active / facts.n
        line = f"coupling lambda*beta*tau*rounds*r = {coupling:.3g} (lambda={lam:.3g})"
        if coupling < COUPLING_FROM:
            line = f"warning: {line}, below {COUPLING_FROM}: the users' models hardly feel each other, this is local training"
        return [line]


def choice(key: str, value: Any, allowed: Iterable[str]) -> None:
    """Refuse a value that is none of ``allowed``."""
    require(value in allowed, key, value, "one of " + ", ".join(allowed))
