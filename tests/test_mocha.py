"""MOCHA: numbers by hand, padding, cold start, costs, refusals. Convergence and the Omega-step are in conformance/mocha.py."""

import numpy as np
import pytest
import torch
from problems import federation, mlp
from small import advance, algorithm, cloud, ranges, split
from small import federation as classified

from perfed import tree
from perfed.algorithms.base import Facts
from perfed.data.partition import Partition
from perfed.errors import UserError
from perfed.models import Logistic

BACKENDS = ["vmap", "loop"]


def tiny(xs, ys, bias=False, **fields):
    """One feature, two classes; by default users that know nothing of each other."""
    start = {"layer1.weight": torch.zeros(1, 2, dtype=torch.float64)}
    if bias:
        start["layer1.bias"] = torch.zeros(2, dtype=torch.float64)
    backend = fields.pop("backend", "vmap")
    algo = algorithm("mocha", **{"tau": 1, "lam": 1.0, "relation": "independent", **fields})
    xs = [np.array(x)[:, None] for x in xs]
    return federation(algo, Logistic(name="logistic", bias=bias), xs, start, ys=[np.array(y) for y in ys], backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_squared_loss_by_hand(backend):
    # One user, Sigma = 1, lam = 2: q = .5. Class 0: x = 1, y = 1: d = 1 / (1 + .5) = 2/3. Then x = 2, y = -1:
    # z = .5 * (2/3) * 2 = 2/3, d = (-1 - 2/3) / (1 + .5 * 4) = -5/9. v = 2/3 - 10/9 = -4/9, w = v / 2 = -2/9. Class 1 is the mirror image.
    fed = advance(tiny([[1.0, 2.0]], [[0, 1]], loss="squared", lam=2.0, backend=backend), 1)
    np.testing.assert_allclose(fed.state.users["dual"][0, 0], [[2 / 3, -2 / 3], [-5 / 9, 5 / 9]], atol=1e-15)
    np.testing.assert_allclose(fed.state.server["v"]["layer1.weight"][0, 0], [[-4 / 9, 4 / 9]], atol=1e-15)
    np.testing.assert_allclose(fed.state.users["w"]["layer1.weight"][0, 0], [[-2 / 9, 2 / 9]], atol=1e-15)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hinge_loss_by_hand(backend):
    # With the bias ||x||^2 = x^2 + 1, q = 1. Class 0: x = 1, y = 1: a = clip(1 / 2) = .5, so w = b = .5. Then x = 3, y = -1: z = 2,
    # y a = clip((1 + 2) / 10) = .3: w = .5 - .9 = -.4, b = .5 - .3 = .2.
    fed = advance(tiny([[1.0, 3.0]], [[0, 1]], bias=True, backend=backend), 1)
    np.testing.assert_allclose(fed.state.users["dual"][0, 0, :, 0], [0.5, -0.3], atol=1e-15)
    w = fed.state.users["w"]
    assert (w["layer1.weight"][0, 0, 0, 0].item(), w["layer1.bias"][0, 0, 0].item()) == pytest.approx((-0.4, 0.2), abs=1e-15)


def test_the_box_of_the_hinge_loss_and_examples_of_zero():
    # x = .5: 1 / .25 = 4, cut to 1. x = 0 (and no bias): whatever the model, its loss is 1, and a = 1 is optimal.
    fed = advance(tiny([[0.5, 0.0]], [[0, 0]]), 1)
    np.testing.assert_array_equal(fed.state.users["dual"][0, 0, :, 0], [1, 1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_users_of_different_sizes_do_not_touch_each_other(backend):
    # Padding repeats the first example with weight 0, and rows after a user's last one stay 0.
    fed = advance(tiny([[1.0], [1.0, 2.0, 0.5]], [[0], [0, 1, 1]], loss="squared", batch=2, tau=2, backend=backend), 3)
    for i, x in enumerate(([1.0], [1.0, 2.0, 0.5])):
        dual = fed.state.users["dual"][0, i]
        assert not dual[len(x) :].any() and dual[: len(x)].any()
        np.testing.assert_allclose(np.array(x) @ dual[: len(x)].numpy(), fed.state.server["v"]["layer1.weight"][0, i, 0], atol=1e-14)
    # User 0 alone: Sigma = 1/2, q = 1/2, so (w - 1) x + lam n w = 0 gives w = 1/3; one dual variable is exact at once.
    assert fed.state.users["w"]["layer1.weight"][0, 0, 0, 0].item() == pytest.approx(1 / 3, abs=1e-15)


def test_related_users_by_hand():
    # n = 2, kappa = 1: Sigma ~ I + 11'/2 with trace 1: [[.5, 1/6], [1/6, .5]]; sigma' = (.5 + 1/6)/.5 = 4/3, q = 4/3 * .5 = 2/3.
    # Both x = 1, squared, y = 1 and -1: d = +-1 / (1 + 2/3) = +-.6; w_0 = .5 * .6 - .6/6 = .2, w_1 = -.2.
    fed = advance(tiny([[1.0], [1.0]], [[0], [1]], loss="squared", relation="mean", kappa=1.0), 1)
    np.testing.assert_allclose(fed.state.server["sigma"][0], [[1 / 2, 1 / 6], [1 / 6, 1 / 2]], atol=1e-15)
    np.testing.assert_allclose(fed.state.users["dual"][0, :, 0, 0], [0.6, -0.6], atol=1e-15)
    np.testing.assert_allclose(fed.state.users["w"]["layer1.weight"][0, :, 0, 0], [0.2, -0.2], atol=1e-15)


def blobs(algo, sizes=(6, 9, 6, 3), seen=(True, True, False, True), **options):
    x, y = cloud(60)
    part = split(ranges(sizes), ranges([4] * len(sizes), sum(sizes)), seen=list(seen))
    return classified(algo, x, y, [part], model=Logistic(name="logistic"), **options)


def test_cold_start_and_costs():
    fed = blobs(algorithm("mocha", relation="mean"), active=2)
    (only,) = fed.algo.candidates(tree.at(fed.shown(), 0), fed.users_at(0, 0)).items()
    assert only[0] == "personal" and not any(t.any() for t in tree.leaves(only[1]))  # w = 0 before the first round
    fed.round()
    drawn, d = fed.cohorts(0)[0], 3 * 3 + 3
    mean = tree.at(fed.shown(), 0)
    want = fed.state.users["w"]["layer1.weight"][0, torch.from_numpy(drawn)].mean(0)
    torch.testing.assert_close(mean["layer1.weight"], want, rtol=0, atol=1e-15)
    for user in range(4):
        personal = fed.algo.candidates(mean, fed.users_at(0, user))["personal"]["layer1.weight"]
        assert torch.equal(personal, fed.state.users["w"]["layer1.weight"][0, user] if user in drawn else mean["layer1.weight"])
    cost = fed.costs[0]
    assert (cost.grads, cost.steps, cost.floats_up, cost.floats_down) == (6, 6, 2 * d, 2 * (d + 1))  # down: w_t and q_t


@pytest.mark.parametrize("loss", ["hinge", "squared"])
@pytest.mark.parametrize("relation", ["mean", "learned"])
def test_it_learns_in_float32(loss, relation):
    fed = blobs(algorithm("mocha", loss=loss, relation=relation, omega_every=2), sizes=(15, 9, 6, 6), dtype=torch.float32)
    advance(fed, 6)
    assert all(t.dtype == torch.float32 for t in tree.leaves(fed.state) if t.is_floating_point())
    sigma = fed.state.server["sigma"][0]
    assert sigma.shape == (3, 3) and sigma.trace().item() == pytest.approx(1, abs=1e-6)
    model = tree.at(fed.state.users["w"], 0, 0)
    hits = (fed.task.model.apply(model, fed.pool.x[:15]).argmax(1) == fed.pool.y[:15]).float().mean()
    assert hits > 0.75


def test_seeds_of_different_partitions_share_one_shape():
    x, y = cloud(40)
    parts: list[Partition] = [split(ranges(sizes), ranges([4, 4], 20)) for sizes in ([3, 9], [7, 5])]
    fed = classified(algorithm("mocha"), x, y, parts, seeds=(0, 1), model=Logistic(name="logistic"))
    assert fed.state.users["dual"].shape == (2, 2, 9, 3)
    advance(fed, 1)
    alone = advance(classified(algorithm("mocha"), x, y, parts[1:], seeds=(1,), model=Logistic(name="logistic")), 1)
    torch.testing.assert_close(fed.state.users["dual"][1, :, :7], alone.state.users["dual"][0])


def test_networks_are_refused():
    model, start = mlp()
    with pytest.raises(UserError, match="^model=mlp: must be logistic.*linear.*algo=mtl"):
        federation(algorithm("mocha"), model, [np.ones((2, 3))], start)


@pytest.mark.parametrize(
    "field, value, allowed",
    [
        ("lam", 0.0, "> 0"),
        ("loss", "logistic", "hinge, squared"),
        ("relation", "ones", "independent, mean, learned"),
        ("kappa", 0.0, "> 0"),
        ("floor", 0.0, "> 0"),
        ("omega_every", 0, "integer >= 1"),
    ],
)
def test_bad_values(field, value, allowed):
    with pytest.raises(UserError, match=f"^{field}={value}: .*{allowed}"):
        algorithm("mocha", **{field: value})


def test_notes():
    (line,) = algorithm("mocha").notes(Facts(20, 4, 100, None))
    assert "hinge loss" in line and "cross-entropy" in line
