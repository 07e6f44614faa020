"""Models as pure functions. Rows B07 and B09 of the fault list."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap

from perfed import tree
from perfed.data.sampling import generator
from perfed.errors import UserError
from perfed.models import MODELS, ModuleModel, build

SHAPES = {"grey": (1, 28, 28), "rgb": (3, 32, 32), "vector": (7,)}
MAKE = {name: (lambda name=name, **fields: MODELS[name](name=name, **fields)) for name in MODELS}


def rng(seed: int = 0) -> np.random.Generator:
    return generator(seed, "init")


def complaint(model, shape=(3,), classes=2) -> str:
    with pytest.raises(UserError) as caught:
        build(model, shape, classes, rng())
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", SHAPES)
def test_inputs_and_classes_come_from_the_data(name, kind):
    shape = SHAPES[kind]
    if name == "cnn" and kind == "vector":
        assert complaint(MAKE[name](), shape) == "model=cnn: needs images of at least 4 x 4 pixels, the dataset has inputs of shape (7,)"
        return
    model = MAKE[name]()
    for classes in (2, 10):
        params = build(model, shape, classes, rng())
        assert all(p.dtype == torch.float64 and p.device.type == "cpu" and not p.requires_grad for p in params.values())
        x = torch.randn(5, *shape, dtype=torch.float64)
        scores = model.apply(params, x)
        assert scores.shape == (5, classes)
        losses = model.losses(scores, torch.zeros(5, dtype=torch.int64))
        assert losses.shape == (5,) and torch.isfinite(losses).all()
        single = model.apply(params, x[2:3])
        torch.testing.assert_close(single, scores[2:3], rtol=1e-12, atol=1e-12)


def test_b07_sizes_of_the_first_layer():
    assert build(MAKE["mlp"](), (1, 28, 28), 10, rng())["layer1.weight"].shape == (784, 80)
    assert build(MAKE["mlp"](), (3, 32, 32), 10, rng())["layer1.weight"].shape == (3072, 80)
    assert build(MAKE["cnn"](), (1, 28, 28), 10, rng())["0.weight"].shape == (16, 1, 3, 3)
    assert build(MAKE["cnn"](), (3, 32, 32), 10, rng())["0.weight"].shape == (16, 3, 3, 3)
    assert tree.numel(build(MAKE["mlp"](), (784,), 10, rng())) == 784 * 80 + 80 + 80 * 60 + 60 + 60 * 10 + 10


def test_last_layer():
    names = {"mlp": ["layer3.weight", "layer3.bias"], "logistic": ["layer1.weight", "layer1.bias"], "cnn": ["9.weight", "9.bias"]}
    for name, last in {**names, "langelaar": names["mlp"]}.items():
        model = MAKE[name]()
        assert model.last_layer(build(model, (1, 8, 8), 3, rng())) == last
    bare = MAKE["logistic"](bias=False)
    assert bare.last_layer(build(bare, (4,), 3, rng())) == ["layer1.weight"]


# ---------------------------------------------------------------- initial values


@pytest.mark.parametrize("name", MODELS)
def test_initial_values_are_a_function_of_the_seed(name):
    a, b, c = (build(MAKE[name](), (1, 8, 8), 3, rng(seed)) for seed in (0, 0, 1))
    assert all(torch.equal(a[k], b[k]) for k in a)
    if name != "logistic":
        assert all(not torch.equal(a[k], c[k]) for k in a if "weight" in k and a[k].ndim > 1)
    before = torch.random.get_rng_state()
    build(MAKE[name](), (1, 8, 8), 3, rng())
    assert torch.equal(torch.random.get_rng_state(), before)  # the global generator is left alone


def test_statistics_of_initial_values():
    """Uniform in +-1/sqrt(fan_in) has deviation 1/sqrt(3 fan_in); langelaar: N(0, 2/fan_in), biases N(0, 1)."""
    mlp = build(MAKE["mlp"](hidden=[400]), (100,), 50, rng())
    for layer, fan_in in ((1, 100), (2, 400)):
        bound = 1 / math.sqrt(fan_in)
        weight, bias = mlp[f"layer{layer}.weight"], mlp[f"layer{layer}.bias"]
        assert 0.99 * bound < weight.abs().max() <= bound and bias.abs().max() <= bound
        assert weight.std() == pytest.approx(bound / math.sqrt(3), rel=0.03) and abs(weight.mean()) < 0.03 * bound
    lang = build(MAKE["langelaar"](hidden=[400]), (100,), 50, rng())
    assert lang["layer1.weight"].std() == pytest.approx(math.sqrt(2 / 100), rel=0.03)
    assert lang["layer2.weight"].std() == pytest.approx(math.sqrt(2 / 400), rel=0.03)
    assert lang["layer1.bias"].std() == pytest.approx(1, rel=0.1)
    assert all((p == 0).all() for p in build(MAKE["logistic"](), (4,), 3, rng()).values())


# ---------------------------------------------------------------- by hand


def test_mlp_by_hand():
    """One hidden unit: h = 2 x1 - x2 + 1, elu(h) = h or e^h - 1, score_c = a_c elu(h) + b_c."""
    model = MAKE["mlp"](hidden=[1])
    params = {
        "layer1.weight": torch.tensor([[2.0], [-1.0]]),
        "layer1.bias": torch.tensor([1.0]),
        "layer2.weight": torch.tensor([[3.0, -1.0]]),
        "layer2.bias": torch.tensor([0.5, 0.0]),
    }
    scores = model.apply(params, torch.tensor([[1.0, 1.0], [-1.0, 1.0]]))
    low = math.exp(-2.0) - 1
    torch.testing.assert_close(scores, torch.tensor([[3 * 2.0 + 0.5, -2.0], [3 * low + 0.5, -low]]))
    losses = model.losses(torch.tensor([[0.0, math.log(3)]]), torch.tensor([1]))
    torch.testing.assert_close(losses, torch.tensor([math.log(4 / 3)]))


def test_langelaar_by_hand():
    """ELU of scale 0.2 on the outputs too: 0.2 (e^z - 1) below zero; loss 1/2 ||output - onehot||^2."""
    model = MAKE["langelaar"](hidden=[])
    params = {"layer1.weight": torch.tensor([[1.0, -2.0]]), "layer1.bias": torch.tensor([0.5, 0.0])}
    out = model.apply(params, torch.tensor([[1.0]]))
    torch.testing.assert_close(out, torch.tensor([[1.5, 0.2 * (math.exp(-2.0) - 1)]]))
    deep = MAKE["langelaar"](hidden=[1], slope=0.5)
    params = {**params, "layer2.weight": torch.tensor([[1.0, 1.0]]), "layer2.bias": torch.tensor([0.0, -1.0])}
    params["layer1.weight"], params["layer1.bias"] = torch.tensor([[-1.0]]), torch.tensor([0.0])
    h = 0.5 * (math.exp(-1.0) - 1)
    wanted = torch.tensor([[0.5 * (math.exp(h) - 1), 0.5 * (math.exp(h - 1) - 1)]])
    torch.testing.assert_close(deep.apply(params, torch.tensor([[1.0]])), wanted)
    losses = model.losses(torch.tensor([[0.2, 0.9], [0.2, 0.9]]), torch.tensor([1, 0]))
    torch.testing.assert_close(losses, torch.tensor([0.5 * (0.04 + 0.01), 0.5 * (0.64 + 0.81)]))


def test_logistic_by_hand():
    params = {"layer1.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "layer1.bias": torch.tensor([0.1, 0.2])}
    torch.testing.assert_close(MAKE["logistic"]().apply(params, torch.tensor([[1.0, -1.0]])), torch.tensor([[-1.9, -1.8]]))


def test_cnn_is_the_network_of_its_docstring():
    model = MAKE["cnn"](channels=[4, 8], groups=2)
    p = build(model, (2, 9, 9), 3, rng())
    x = torch.randn(6, 2, 9, 9, dtype=torch.float64)
    h = x
    for conv, norm in ((0, 1), (4, 5)):
        h = F.conv2d(h, p[f"{conv}.weight"], p[f"{conv}.bias"], padding=1)
        h = F.max_pool2d(F.elu(F.group_norm(h, 2, p[f"{norm}.weight"], p[f"{norm}.bias"])), 2)
    wanted = h.flatten(1) @ p["9.weight"].T + p["9.bias"]
    torch.testing.assert_close(model.apply(p, x), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_can_be_mapped_over_users(name):
    model = MAKE[name]()
    users = [build(model, (1, 8, 8), 3, rng(seed)) for seed in range(3)]
    x, y = torch.randn(3, 4, 1, 8, 8, dtype=torch.float64), torch.tensor([[0, 1, 2, 0]] * 3)
    f = grad(lambda p, x, y: model.losses(model.apply(p, x), y).mean())
    mapped = vmap(f)(tree.stack(users), x, y)
    for i, params in enumerate(users):
        for key, value in f(params, x[i], y[i]).items():
            torch.testing.assert_close(mapped[key][i], value, rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------- refused


@dataclass(kw_only=True)
class Plugin(ModuleModel):
    """A user's module."""

    name: str = "mine"
    part: str = "norm1d"

    def module(self, shape, classes):
        size = math.prod(shape)
        parts = {
            "norm1d": lambda: nn.BatchNorm1d(size),
            "stateless": lambda: nn.BatchNorm1d(size, track_running_stats=False),
            "sync": lambda: nn.SyncBatchNorm(size),
            "lazy": lambda: nn.LazyBatchNorm1d(),
            "dropout": lambda: nn.Dropout(0.1),
            "alpha": lambda: nn.AlphaDropout(0.1),
            "rrelu": lambda: nn.RReLU(),
            "instance": lambda: nn.InstanceNorm1d(size, track_running_stats=True),
            "layernorm": lambda: nn.LayerNorm(size),
            "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(size, size)),
            "wrong": lambda: nn.Linear(size, size + 1),
        }
        return nn.Sequential(nn.Flatten(), nn.Sequential(nn.Identity(), parts[self.part]()), nn.Linear(size, classes))


@pytest.mark.parametrize(
    "part, kind, advice",
    [
        ("norm1d", "BatchNorm1d", "GroupNorm"),
        ("stateless", "BatchNorm1d", "GroupNorm"),
        ("sync", "SyncBatchNorm", "GroupNorm"),
        ("dropout", "Dropout", "leave it out"),
        ("alpha", "AlphaDropout", "leave it out"),
        ("rrelu", "RReLU", "leave it out"),
    ],
)
def test_b09_batchnorm_and_dropout_are_refused_by_name(part, kind, advice):
    text = complaint(Plugin(part=part))
    assert text.startswith("model=mine: layer '1.1' is " + kind + ":") and advice in text


@pytest.mark.parametrize("part", ["instance", "spectral"])
def test_running_state_is_refused_by_name(part):
    text = complaint(Plugin(part=part))
    assert text.startswith("model=mine: buffers ['1.1.") and text.endswith("are not allowed, only parameters")


def test_a_layer_without_a_size_is_refused():
    assert complaint(Plugin(part="lazy")).startswith("model=mine: ")


def test_a_module_of_the_user_works():
    model = Plugin(part="layernorm")
    params = build(model, (2, 2, 2), 3, rng())
    assert list(params) == ["1.1.weight", "1.1.bias", "2.weight", "2.bias"]
    assert model.last_layer(params) == ["2.weight", "2.bias"]
    assert all(p.device.type == "meta" for p in model._skeleton.parameters())


def test_sizes_that_do_not_fit_are_refused():
    assert complaint(Plugin(part="wrong")).startswith("model=mine: does not accept inputs of shape (3,)")

    @dataclass(kw_only=True)
    class Short(Plugin):
        def module(self, shape, classes):
            return nn.Linear(*shape, classes + 1)

    assert complaint(Short()) == "model=mine: gives scores (2, 3) for 2 inputs, (2, 2) needed"

    @dataclass(kw_only=True)
    class Colour(Plugin):
        def module(self, shape, classes):
            return nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    text = complaint(Colour(), (1, 8, 8))
    assert text.startswith("model=mine: does not accept inputs of shape (1, 8, 8)") and "3 channels" in text
    assert build(Colour(), (3, 8, 8), 2, rng())


@pytest.mark.parametrize(
    "name, fields, text",
    [
        ("mlp", {"hidden": [8, 0]}, "hidden=[8, 0]: a list of layer widths, each an integer >= 1"),
        ("langelaar", {"hidden": [-1]}, "hidden=[-1]: a list of layer widths, each an integer >= 1"),
        ("langelaar", {"slope": 0.0}, "slope=0.0: a number > 0"),
        ("cnn", {"channels": [4]}, "channels=[4]: two integers >= 1"),
        ("cnn", {"channels": [4, 0]}, "channels=[4, 0]: two integers >= 1"),
        ("cnn", {"groups": 3}, "groups=3: an integer >= 1 that divides channels [16, 32]"),
        ("cnn", {"groups": 0}, "groups=0: an integer >= 1 that divides channels [16, 32]"),
    ],
)
def test_bad_fields(name, fields, text):
    with pytest.raises(UserError) as caught:
        MAKE[name](**fields)
    assert str(caught.value) == text


def test_small_images_are_refused_by_the_cnn():
    assert "needs images of at least 4 x 4 pixels, the dataset has inputs of shape (1, 3, 8)" in complaint(MAKE["cnn"](), (1, 3, 8))
