"""Optimizers by hand and against torch.optim."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small import advance, algorithm, clone, cloud, coin, federation, ranges, same, split

from perfed import tree
from perfed.errors import UserError
from perfed.optimizers import LOCAL, SERVER, Adaptive


def local(name: str, **fields):
    return LOCAL[name](name=name, **fields)


def server(name: str, **fields):
    return SERVER[name](name=name, **fields)


def number(value: float) -> dict:
    return {"w": torch.tensor([value], dtype=torch.float64)}


def walk(optimizer, values, start: float, lr: float | None = None) -> list[float]:
    """Parameters after each of the gradients (or server targets) ``values``."""
    w, out = number(start), []
    state = optimizer.init(w)
    for value in values:
        before = clone((w, state))
        args = () if lr is None else (lr,)
        new, new_state = optimizer.update(number(value), state, w, *args)
        assert same((w, state), before)
        w, state = new, new_state
        out.append(float(w["w"]))
    return out


# ---------------------------------------------------------------- local


def test_sgd_by_hand():
    assert walk(local("sgd"), [2.0, -1.0], 1.0, 0.5) == [0.0, 0.5]


def test_momentum_by_hand():
    """v = 2, then 0.5 * 2 + 4 = 5; w = 1 - 0.1 * 2 = 0.8, then 0.8 - 0.5 = 0.3."""
    np.testing.assert_allclose(walk(local("sgd", momentum=0.5), [2.0, 4.0], 1.0, 0.1), [0.8, 0.3], rtol=1e-15)


def test_weight_decay_by_hand():
    """g + 0.5 w = 2.5, w = 1 - 0.25 = 0.75; then 4 + 0.375, w = 0.75 - 0.4375."""
    np.testing.assert_allclose(walk(local("sgd", weight_decay=0.5), [2.0, 4.0], 1.0, 0.1), [0.75, 0.3125], rtol=1e-15)


def test_momentum_and_weight_decay_by_hand():
    """v = 2.5, w = 0.75; v = 0.9 * 2.5 + 4 + 0.375 = 6.625, w = 0.75 - 0.6625."""
    np.testing.assert_allclose(walk(local("sgd", momentum=0.9, weight_decay=0.5), [2.0, 4.0], 1.0, 0.1), [0.75, 0.0875], rtol=1e-14)


def test_first_step_of_adam_has_length_lr():
    """m / (1 - b1) = g and v / (1 - b2) = g^2: w -= lr g / (|g| + eps)."""
    np.testing.assert_allclose(walk(local("adam"), [-3.0], 1.0, 0.1), [1 + 0.1 * 3 / (3 + 1e-8)], rtol=1e-14)


CASES = [
    ("sgd", {}, torch.optim.SGD, {}),
    ("sgd", {"momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "weight_decay": 0.1}, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    ("sgd", {"weight_decay": 0.1}, torch.optim.SGD, {"weight_decay": 0.1}),
    ("adam", {}, torch.optim.Adam, {}),
    ("adam", {"beta1": 0.5, "beta2": 0.9, "eps": 1e-3}, torch.optim.Adam, {"betas": (0.5, 0.9), "eps": 1e-3}),
    ("adam", {"weight_decay": 0.1}, torch.optim.Adam, {"weight_decay": 0.1}),
]


@pytest.mark.parametrize("name, fields, theirs, options", CASES)
def test_local_optimizers_equal_those_of_torch(name, fields, theirs, options):
    rng = torch.Generator().manual_seed(0)
    w = {"a": torch.randn(4, 3, dtype=torch.float64, generator=rng), "b": torch.randn(3, dtype=torch.float64, generator=rng)}
    leaves = {k: v.clone().requires_grad_() for k, v in w.items()}
    optimizer = theirs(leaves.values(), lr=0.03, **options)
    ours = local(name, **fields)
    state = ours.init(w)
    for _ in range(12):
        grads = {k: torch.randn(v.shape, dtype=torch.float64, generator=rng) for k, v in w.items()}
        for k, leaf in leaves.items():
            leaf.grad = grads[k]
        optimizer.step()
        w, state = ours.update(grads, state, w, 0.03)
        for k, leaf in leaves.items():
            torch.testing.assert_close(w[k], leaf.detach(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name, fields, expected", [("sgd", {}, 0), ("sgd", {"momentum": 0.0}, 1), ("adam", {}, 3)])
def test_states_hold_what_is_needed(name, fields, expected):
    state = local(name, **fields).init({"w": torch.ones(2)})
    assert len(tree.leaves(state)) == expected and all((t == 0).all() for t in tree.leaves(state))


# ---------------------------------------------------------------- server


def test_average_by_hand():
    assert walk(server("average"), [3.0, -1.0], 1.0) == [3.0, -1.0]
    assert walk(server("average", lr=0.5), [3.0, -1.0], 1.0) == [2.0, 0.5]
    assert walk(server("average", lr=1.5), [3.0], 1.0) == [4.0]


def test_the_plain_mean_is_the_mean_bit_for_bit():
    w = {"w": torch.rand(1000, dtype=torch.float64) * 1e8}
    target = {"w": torch.rand(1000, dtype=torch.float64)}
    assert torch.equal(server("average").update(target, (), w)[0]["w"], target["w"])


def test_server_momentum_by_hand():
    """v = 1 - 3 = -2, w = 1 + 2 = 3; v = 0.5 * -2 + (3 - 5) = -3, w = 6."""
    assert walk(server("momentum", momentum=0.5), [3.0, 5.0], 1.0) == [3.0, 6.0]
    np.testing.assert_allclose(walk(server("momentum", momentum=0.5, lr=0.1), [3.0, 5.0], 1.0), [1.2, 1.2 + 0.1 * (1 + 3.8)], rtol=1e-15)


def test_server_adam_by_hand():
    """FedAdam: d = 2; m = 0.1 d = 0.2; v = 0.99 * 1e-6 + 0.01 * 4; w += 0.5 m / (sqrt(v) + 1e-3)."""
    m, v = 0.2, 0.99 * 1e-6 + 0.01 * 4
    first = 1 + 0.5 * m / (v**0.5 + 1e-3)
    d = 4.0 - first
    m, v = 0.9 * m + 0.1 * d, 0.99 * v + 0.01 * d * d
    wanted = [first, first + 0.5 * m / (v**0.5 + 1e-3)]
    np.testing.assert_allclose(walk(server("adam", lr=0.5), [3.0, 4.0], 1.0), wanted, rtol=1e-14)
    state = server("adam", eps=1e-2).init(number(1.0))
    assert isinstance(state, Adaptive) and float(state.v["w"]) == pytest.approx(1e-4) and float(state.m["w"]) == 0


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_server_state_lives_on_from_round_to_round(name):
    """COIN, all labels 0, one step of size 1 a round: the target is W + (1 - p0) (1, -1)."""
    fed = coin([[0], [0]], [[0], [0]], server=server(name))
    optimizer, w = server(name), {"layer1.weight": torch.zeros(1, 2, dtype=torch.float64)}
    state = optimizer.init(w)
    for _ in range(4):
        fed.round()
        p = torch.softmax(w["layer1.weight"], 1)
        target = {"layer1.weight": w["layer1.weight"] - (p - torch.tensor([[1.0, 0.0]]))}
        w, state = optimizer.update(target, state, w)
        torch.testing.assert_close(fed.state.server["w"]["layer1.weight"][0], w["layer1.weight"], rtol=1e-12, atol=1e-14)


# ---------------------------------------------------------------- fresh each round


@pytest.mark.parametrize("name, fields", [("sgd", {"momentum": 0.9}), ("adam", {})])
@pytest.mark.parametrize("algo", ["fedavg", "local", "perfedavg"])
def test_local_state_starts_afresh_each_round(name, fields, algo):
    """Two rounds equal one round, and one round of a new federation that starts from its end."""
    x, y = cloud(40)
    part = split(ranges([18, 18]), ranges([2, 2], 36))
    method = algorithm(algo, batch=100, tau=3)  # all the data: no draw depends on the round
    more = {"local": local(name, **fields)}
    fed = advance(federation(method, x, y, [part], **more), 1)
    assert not [path for path in _names(fed.state) if "count" in path]
    again = federation(method, x, y, [part], **more)
    again.state = clone(fed.state)
    again.round()
    fed.round()
    assert same(again.state, fed.state)
    long = advance(federation(algorithm(algo, batch=100, tau=6), x, y, [part], active=2, **more), 1)
    assert not same(long.state, fed.state)


def _names(t, path: str = "") -> list[str]:
    if isinstance(t, dict):
        return [p for k, v in t.items() for p in _names(v, f"{path}.{k}")]
    if isinstance(t, tuple):
        fields = getattr(t, "_fields", range(len(t)))
        return [p for k, v in zip(fields, t, strict=True) for p in _names(v, f"{path}.{k}")]
    return [path]


def test_one_step_a_round_never_builds_up_momentum():
    """COIN: with tau = 1 heavy-ball momentum changes nothing, since its state starts afresh."""
    plain, heavy = coin([[0]], [[0]]), coin([[0]], [[0]], local=local("sgd", momentum=0.9))
    advance(plain, 5), advance(heavy, 5)
    assert same(plain.state, heavy.state)


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: local("sgd", momentum=1.0), "momentum=1.0: a number in [0, 1)"),
        (lambda: local("sgd", momentum=-0.1), "momentum=-0.1: a number in [0, 1)"),
        (lambda: local("sgd", weight_decay=-1.0), "weight_decay=-1.0: null or a number >= 0"),
        (lambda: local("adam", beta1=1.0), "beta1=1.0: a number in [0, 1)"),
        (lambda: local("adam", beta2=1.5), "beta2=1.5: a number in [0, 1)"),
        (lambda: local("adam", eps=0.0), "eps=0.0: a number > 0"),
        (lambda: server("average", lr=0.0), "lr=0.0: a number > 0"),
        (lambda: server("momentum", momentum=1.0), "momentum=1.0: a number in [0, 1)"),
        (lambda: server("adam", beta1=-1.0), "beta1=-1.0: a number in [0, 1)"),
        (lambda: server("adam", eps=0.0), "eps=0.0: a number > 0"),
    ],
)
def test_bad_fields(make, text):
    with pytest.raises(UserError) as caught:
        make()
    assert str(caught.value) == text
