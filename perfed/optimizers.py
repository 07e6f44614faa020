"""Functional optimizers. A state is a tree of tensors; nothing is edited in place.

Local ones turn gradients into steps and start afresh each round. Server ones turn the mean of what users uploaded
into the next model. One dataclass each; its fields are the keys of ``conf/optimizer`` and ``conf/server``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from perfed import tree
from perfed.errors import require
from perfed.types import Params, Tree

LOCAL: dict[str, type] = {}
SERVER: dict[str, type] = {}


def register(registry: dict[str, type], name: str):
    """Class decorator: make an optimizer available under ``name``."""

    def add(cls):
        registry[name] = cls
        return cls

    return add


class Adaptive(NamedTuple):
    """First and second moments and the number of steps taken."""

    m: Params
    v: Params
    count: Tensor


def _unit(key: str, value: float | None) -> None:
    require(value is None or 0 <= value < 1, key, value, "a number in [0, 1)")


def _positive(key: str, value: float) -> None:
    require(value > 0, key, value, "a number > 0")


@dataclass(kw_only=True)
class LocalOptimizer:
    """``init(params)``, ``update(grad, state, params, lr) -> params, state``. The step size is the method's beta.

    ``weight_decay`` (L2, added to the gradient) is a number >= 0, or null to leave the term out.
    """

    name: str
    weight_decay: float | None = None

    def __post_init__(self):
        require(self.weight_decay is None or self.weight_decay >= 0, "weight_decay", self.weight_decay, "null or a number >= 0")

    @property
    def stateless(self) -> bool:
        """Whether ``init`` gives () for all parameters."""
        return False

    def init(self, params: Params) -> Tree:
        return ()

    def decayed(self, grad: Params, params: Params) -> Params:
        return grad if self.weight_decay is None else tree.axpy(self.weight_decay, params, grad)

    def update(self, grad: Params, state: Tree, params: Params, lr: float | Tensor) -> tuple[Params, Tree]:
        raise NotImplementedError


@register(LOCAL, "sgd")
@dataclass(kw_only=True)
class Sgd(LocalOptimizer):
    """w -= lr g; with momentum: v = momentum v + g, w -= lr v (heavy ball, no dampening)."""

    momentum: float | None = None

    def __post_init__(self):
        super().__post_init__()
        _unit("momentum", self.momentum)

    @property
    def stateless(self):
        return self.momentum is None

    def init(self, params):
        return () if self.stateless else tree.zeros(params)

    def update(self, grad, state, params, lr):
        step = self.decayed(grad, params)
        if self.momentum is not None:
            step = state = tree.axpy(self.momentum, state, step)
        return tree.axpy(-lr, step, params), state


@register(LOCAL, "adam")
@dataclass(kw_only=True)
class Adam(LocalOptimizer):
    """Adam with bias correction (Kingma and Ba 2015, algorithm 1)."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self):
        super().__post_init__()
        _unit("beta1", self.beta1)
        _unit("beta2", self.beta2)
        _positive("eps", self.eps)

    def init(self, params):
        first = tree.leaves(params)[0]
        return Adaptive(tree.zeros(params), tree.zeros(params), first.new_zeros(()))

    def update(self, grad, state, params, lr):
        g = self.decayed(grad, params)
        t = state.count + 1
        m = tree.map(lambda a, b: self.beta1 * a + (1 - self.beta1) * b, state.m, g)
        v = tree.map(lambda a, b: self.beta2 * a + (1 - self.beta2) * b * b, state.v, g)
        size, root = lr / (1 - self.beta1**t), (1 - self.beta2**t).sqrt()
        new = tree.map(lambda w, a, b: w - size * a / (b.sqrt() / root + self.eps), params, m, v)
        return new, Adaptive(m, v, t)


@dataclass(kw_only=True)
class ServerOptimizer:
    """``init(params)``, ``update(target, state, params) -> params, state``; ``target`` is the mean upload.

    ``lr`` is the server step size: 1 with ``average`` is the plain mean.
    """

    name: str
    lr: float = 1.0

    def __post_init__(self):
        _positive("lr", self.lr)

    def init(self, params: Params) -> Tree:
        return ()

    def update(self, target: Params, state: Tree, params: Params) -> tuple[Params, Tree]:
        raise NotImplementedError


@register(SERVER, "average")
@dataclass(kw_only=True)
class Average(ServerOptimizer):
    """w = (1 - lr) w + lr mean; lr = 1 gives the mean itself, without round-off."""

    def update(self, target, state, params):
        return tree.map(lambda w, a: torch.lerp(w, a, self.lr), params, target), state


@register(SERVER, "momentum")
@dataclass(kw_only=True)
class Momentum(ServerOptimizer):
    """v = momentum v + (w - mean), w -= lr v (FedAvgM, Hsu et al. 2019)."""

    momentum: float = 0.9

    def __post_init__(self):
        super().__post_init__()
        _unit("momentum", self.momentum)

    def init(self, params):
        return tree.zeros(params)

    def update(self, target, state, params):
        v = tree.map(lambda s, w, a: self.momentum * s + (w - a), state, params, target)
        return tree.axpy(-self.lr, v, params), v


@register(SERVER, "adam")
@dataclass(kw_only=True)
class ServerAdam(ServerOptimizer):
    """FedAdam (Reddi et al. 2021, algorithm 2): no bias correction, v starts at eps^2, eps is their tau."""

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-3

    def __post_init__(self):
        super().__post_init__()
        _unit("beta1", self.beta1)
        _unit("beta2", self.beta2)
        _positive("eps", self.eps)

    def init(self, params):
        first = tree.leaves(params)[0]
        return Adaptive(tree.zeros(params), tree.map(lambda w: torch.full_like(w, self.eps**2), params), first.new_zeros(()))

    def update(self, target, state, params):
        d = tree.sub(target, params)
        m = tree.map(lambda a, b: self.beta1 * a + (1 - self.beta1) * b, state.m, d)
        v = tree.map(lambda a, b: self.beta2 * a + (1 - self.beta2) * b * b, state.v, d)
        new = tree.map(lambda w, a, b: w + self.lr * a / (b.sqrt() + self.eps), params, m, v)
        return new, Adaptive(m, v, state.count + 1)
