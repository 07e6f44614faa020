"""Models as pure functions: ``init`` makes parameters, ``apply`` maps inputs to scores, ``losses`` judges them.

One dataclass a model; its fields are the keys of ``conf/model/<name>.yaml``. Input channels and classes come from the
data. Models must be deterministic and free of running statistics, or users could not be simulated side by side: use
GroupNorm in place of BatchNorm, and no dropout. A torch module joins through :class:`ModuleModel`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perfed.errors import UserError, require
from perfed.types import Params

MODELS: dict[str, type] = {}


def register(name: str):
    """Class decorator: make a model available as ``model=<name>``."""

    def add(cls):
        MODELS[name] = cls
        return cls

    return add


@dataclass(kw_only=True)
class Model:
    """The interface. ``shape`` is that of one input, (C, H, W) or (F,)."""

    name: str
    vmap_pays_on_cpu: ClassVar[bool] = True  # False: on a CPU the loop backend is as fast

    def init(self, shape: tuple[int, ...], classes: int, rng: np.random.Generator) -> Params:
        """Fresh parameters, float64 on the host; a pure function of the generator."""
        raise NotImplementedError

    def apply(self, params: Params, x: Tensor) -> Tensor:
        """Inputs [B, *shape] -> scores [B, C]. The prediction is the first largest score."""
        raise NotImplementedError

    def losses(self, scores: Tensor, y: Tensor) -> Tensor:
        """Scores [B, C], labels [B] -> loss of each example [B]. Default: cross-entropy (nats)."""
        return F.cross_entropy(scores, y, reduction="none")

    def last_layer(self, params: Params) -> list[str]:
        """Names of the output layer's parameters: those that share the last one's prefix."""
        prefix = list(params)[-1].rpartition(".")[0]
        return [name for name in params if name.rpartition(".")[0] == prefix]


def _uniform(rng: np.random.Generator, fan_in: int, *shape: int) -> Tensor:
    bound = 1 / math.sqrt(fan_in)
    return torch.from_numpy(rng.uniform(-bound, bound, shape))


def _positive_widths(widths: list[int]) -> None:
    require(all(w >= 1 for w in widths), "hidden", widths, "a list of layer widths, each an integer >= 1")


@register("mlp")
@dataclass(kw_only=True)
class Mlp(Model):
    """Fully connected network with ELU (Per-FedAvg paper, section 5: hidden layers of 80 and 60), cross-entropy.

    Weights and biases start uniform in +-1/sqrt(fan_in), torch's default for linear layers.
    """

    hidden: list[int] = field(default_factory=lambda: [80, 60])

    def __post_init__(self):
        _positive_widths(self.hidden)

    def init(self, shape, classes, rng):
        widths = [math.prod(shape), *self.hidden, classes]
        params: Params = {}
        for i, (a, b) in enumerate(zip(widths, widths[1:], strict=False), 1):
            params[f"layer{i}.weight"] = _uniform(rng, a, a, b)
            params[f"layer{i}.bias"] = _uniform(rng, a, b)
        return params

    def apply(self, params, x):
        h = x.flatten(1)
        depth = len(params) // 2
        for i in range(1, depth + 1):
            h = torch.addmm(params[f"layer{i}.bias"], h, params[f"layer{i}.weight"])
            if i < depth:
                h = F.elu(h)
        return h


@register("langelaar")
@dataclass(kw_only=True)
class Langelaar(Model):
    """The network that the paper's experiments are built on (J. Langelaar, MATLAB File Exchange 73010).

    ELU with slope 0.2 on every layer *including the outputs*, loss 1/2 ||output - onehot||^2, weights
    N(0, 2/fan_in), biases N(0, 1). Whether the paper kept the squared error is not stated there.
    """

    hidden: list[int] = field(default_factory=lambda: [80, 60])
    slope: float = 0.2

    def __post_init__(self):
        _positive_widths(self.hidden)
        require(self.slope > 0, "slope", self.slope, "a number > 0")

    def init(self, shape, classes, rng):
        widths = [math.prod(shape), *self.hidden, classes]
        params: Params = {}
        for i, (a, b) in enumerate(zip(widths, widths[1:], strict=False), 1):
            params[f"layer{i}.weight"] = torch.from_numpy(rng.normal(0, math.sqrt(2 / a), (a, b)))
            params[f"layer{i}.bias"] = torch.from_numpy(rng.normal(0, 1, b))
        return params

    def apply(self, params, x):
        h = x.flatten(1)
        for i in range(1, len(params) // 2 + 1):
            h = F.elu(torch.addmm(params[f"layer{i}.bias"], h, params[f"layer{i}.weight"]), alpha=self.slope)
        return h

    def losses(self, scores, y):
        onehot = (y[:, None] == torch.arange(scores.shape[-1], device=y.device)).to(scores)
        return 0.5 * (scores - onehot).square().sum(-1)


@register("logistic")
@dataclass(kw_only=True)
class Logistic(Model):
    """Multinomial logistic regression, cross-entropy; starts at zero. ``bias=false`` leaves the bias out."""

    bias: bool = True

    def init(self, shape, classes, rng):
        params = {"layer1.weight": torch.zeros(math.prod(shape), classes, dtype=torch.float64)}
        if self.bias:
            params["layer1.bias"] = torch.zeros(classes, dtype=torch.float64)
        return params

    def apply(self, params, x):
        scores = x.flatten(1) @ params["layer1.weight"]
        return scores + params["layer1.bias"] if self.bias else scores


@dataclass(kw_only=True)
class ModuleModel(Model):
    """A torch module as a model. Subclasses give ``module(shape, classes)``.

    Modules with random or running state (dropout, BatchNorm, any buffer) are refused by name: draws inside a model
    or statistics shared by users would make a result depend on how users are placed.
    """

    def module(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        raise NotImplementedError

    def init(self, shape, classes, rng):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng.integers(2**62)))
            module = self.module(shape, classes)
        for path, part in module.named_modules():
            kind = type(part).__name__
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                raise UserError("model", self.name, f"layer '{path}' is {kind}: batch statistics mix examples, use GroupNorm")
            if isinstance(part, nn.modules.dropout._DropoutNd | nn.RReLU):
                raise UserError("model", self.name, f"layer '{path}' is {kind}: random layers are not allowed, leave it out")
        buffers = [path for path, _ in module.named_buffers()]
        require(not buffers, "model", self.name, f"buffers {buffers} are not allowed, only parameters")
        values = {path: p.detach().to(torch.float64) for path, p in module.named_parameters()}
        self._skeleton = module.to("meta")
        return values

    def apply(self, params, x):
        return torch.func.functional_call(self._skeleton, params, (x,))


@register("cnn")
@dataclass(kw_only=True)
class Cnn(ModuleModel):
    """Two blocks of 3x3 convolution, GroupNorm, ELU and 2x2 max pooling, then one linear layer; cross-entropy."""

    vmap_pays_on_cpu = False
    channels: list[int] = field(default_factory=lambda: [16, 32])
    groups: int = 4

    def __post_init__(self):
        require(len(self.channels) == 2 and min(self.channels) >= 1, "channels", self.channels, "two integers >= 1")
        ok = self.groups >= 1 and all(c % self.groups == 0 for c in self.channels)
        require(ok, "groups", self.groups, f"an integer >= 1 that divides channels {self.channels}")

    def module(self, shape, classes):
        ok = len(shape) == 3 and min(shape[1:]) >= 4
        require(ok, "model", self.name, f"needs images of at least 4 x 4 pixels, the dataset has inputs of shape {tuple(shape)}")
        c, h, w = shape
        c1, c2 = self.channels

        def block(a: int, b: int) -> list[nn.Module]:
            return [nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(self.groups, b), nn.ELU(), nn.MaxPool2d(2)]

        return nn.Sequential(*block(c, c1), *block(c1, c2), nn.Flatten(), nn.Linear(c2 * (h // 4) * (w // 4), classes))


def build(model: Model, shape: tuple[int, ...], classes: int, rng: np.random.Generator) -> Params:
    """Initial parameters (float64, host), after a trial forward pass; a mismatch with the data is refused by name."""
    params = model.init(shape, classes, rng)
    try:
        scores, again = (model.apply(params, torch.ones(2, *shape, dtype=torch.float64)) for _ in range(2))
    except (RuntimeError, ValueError, TypeError) as error:
        raise UserError("model", model.name, f"does not accept inputs of shape {tuple(shape)}: {error}") from error
    wanted = (2, classes)
    require(tuple(scores.shape) == wanted, "model", model.name, f"gives scores {tuple(scores.shape)} for 2 inputs, {wanted} needed")
    require(torch.equal(scores, again), "model", model.name, "gives other scores when asked again: random layers are not allowed")
    return params
