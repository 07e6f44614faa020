"""ARUBA: two rounds by hand, costs, refinement by hand, new users, what is refused."""

import numpy as np
import pytest
import torch
from problems import Quadratic, blobs, federation, mlp, quadratic, run, weights

from perfed import tree
from perfed.algorithms.aruba import Aruba
from perfed.errors import UserError
from perfed.evaluate import Protocol, adapted_models

every_backend = pytest.mark.parametrize("backend", ["vmap", "loop"])


def make(**fields):
    return Aruba(name="aruba", **fields)


def protocol(lr, steps):
    return Protocol(label="clean", source="train", support=None, batch=None, repeats=1, steps=(0, steps), lr=lr)


def pair(backend="vmap", **fields):
    """f_1 = w^2/2 - 3 w and f_2 = w^2/2 - 5 w from w = 2: gradients w - 3 and w - 5."""
    return federation(make(beta=0.5, tau=1, **fields), Quadratic(), [quadratic(np.eye(1), [c]) for c in (3.0, 5.0)], [2.0], backend=backend)


@every_backend
@pytest.mark.parametrize("isotropic", [False, True])
def test_rounds_by_hand(backend, isotropic):
    # Round 0: eta = sqrt(.25 / 1) = .5. th = 2.5 and 3.5, squared gradients 1 and 9, squared moves .25 and 2.25.
    # b = .25 + .125 + .25/2 + 1.125 + .25/3 = 1.70833.., G = 1 + 1 + 1/2 + 9 + 1/3 = 11.8333.., t = 3, w = 3.
    fed = run(pair(backend, isotropic=isotropic), 1)
    server = tree.at(fed.state.server, 0)
    b, G = 1.625 + 0.25 / 3, 11.5 + 1 / 3
    assert weights(fed)[0] == 3.0 and int(server["t"]) == 3
    assert [float(tree.leaves(server[k])[0]) for k in ("b", "G")] == pytest.approx([b, G], abs=1e-14)
    assert (fed.costs[0].floats_down, fed.costs[0].floats_up, fed.costs[0].grads) == (4, 4, 2)
    # Round 1: gradients 0 and -2, so w = 3 + eta 2 / 2; t = 3, 4 gives 1/4 + 1/5.
    eta = np.sqrt(b / G)
    run(fed, 1)
    server = tree.at(fed.state.server, 0)
    assert weights(fed)[0] == pytest.approx(3 + eta, abs=1e-14) and int(server["t"]) == 5
    want = [b + (2 * eta) ** 2 / 2 + 0.25 * 0.45, G + 4 + 0.45]
    assert [float(tree.leaves(server[k])[0]) for k in ("b", "G")] == pytest.approx(want, abs=1e-14)


def test_costs_on_a_network():
    model, start = mlp()
    xs, ys = blobs([11, 20, 16])
    d = tree.numel(start)
    for isotropic, numbers in ((False, 2 * d), (True, d + 1)):
        fed = run(federation(make(batch=5, tau=3, isotropic=isotropic), model, xs, start, ys=ys, active=2), 2)
        cost = fed.costs[0]
        assert (cost.floats_down, cost.floats_up) == (4 * numbers, 4 * numbers)
        assert (cost.steps, cost.grads, cost.hvps) == (12, 12, 0)
        assert fed.state.users == ()  # a new user refines the server's model, as everyone does


@every_backend
def test_refinement_by_hand(backend):
    # After round 0 above w = 3, b = 1.70833, G = 11.8333. User 2 has the gradient w - 5: each step of size e keeps 1 - e of it.
    b, G = 1.625 + 0.25 / 3, 11.5 + 1 / 3
    first = np.sqrt(b / G)
    for c, second in ((None, first), (0.0, first), (2.0, np.sqrt(b / (G + 2 * 4)))):
        fed = run(pair(backend, refine_c=c), 1)
        end = float(adapted_models(fed, protocol(None, 2), 0, 1, 2)["global"]["w"][0])
        assert end == pytest.approx(5 - 2 * (1 - first) * (1 - second), abs=1e-14)
        plain = float(adapted_models(fed, protocol(0.25, 2), 0, 1, 2)["global"]["w"][0])
        assert plain == pytest.approx(5 - 2 * 0.75**2, abs=1e-14)


def test_the_step_at_the_start_is_beta():
    for zeta in (0.01, 1.0, 30.0):
        fed = pair(zeta=zeta)
        assert fed.diagnose()[0]["eta_mean"] == pytest.approx(0.5, abs=1e-15)
    run(fed, 3)
    server = tree.at(fed.state.server, 0)
    assert fed.diagnose()[0]["eta_mean"] == pytest.approx(float((server["b"]["w"] / server["G"]["w"]).sqrt()), abs=1e-15)


def test_a_large_zeta_holds_the_step():
    # With zeta = 1e6 the users' moves and gradients are 1e-12 of b and G: eta stays .5 and this is FedAvg, w <- w - .5 (w - 4).
    fed = run(pair(zeta=1e6), 5)
    assert weights(fed)[0] == pytest.approx(4 - 2 * 0.5**5, abs=1e-9)


def test_layers_that_do_not_adapt_stay():
    model, start = mlp()
    xs, ys = blobs([11, 20])
    for fields in ({}, {"refine_c": 1.0, "isotropic": True}):
        fed = federation(make(beta=0.3, **fields), model, xs, start, ys=ys)
        fed.task.adapted = frozenset(["layer2.weight"])
        after = adapted_models(fed, protocol(None, 2), 0, 0, 2)["global"]
        assert [k for k in start if not torch.equal(after[k], start[k])] == ["layer2.weight"]


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"zeta": 0.0}, "zeta=0.0: a number > 0"),
        ({"p": -1.0}, "p=-1.0: a number >= 0"),
        ({"refine_c": -0.5}, "refine_c=-0.5: null or a number >= 0"),
        ({"beta": 0.0}, "beta=0.0"),
        ({"aggregation": "median"}, "aggregation=median"),
    ],
)
def test_refused(fields, text):
    with pytest.raises(UserError, match=text):
        make(**fields)
