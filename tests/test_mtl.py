"""Primal multi-task learning: numbers by hand, cold start, costs, refusals. The update rule in general is in conformance/mtl.py."""

import numpy as np
import pytest
import torch
from problems import Quadratic, federation, quadratic, run
from small import advance, algorithm, cloud, ranges, same, split
from small import federation as classified

from perfed import tree
from perfed.algorithms.base import Facts
from perfed.algorithms.mocha import spectrum
from perfed.errors import UserError

C = [1.0, 2.0, 6.0]


def line(algo, c=C, **options):
    """f_i = w^2/2 - c_i w from 0: a plain step of 0.5 goes half of the way to c_i."""
    return federation(algo, Quadratic(), [quadratic(np.eye(1), [v]) for v in c], [0.0], **options)


def own(fed, s=0):
    return fed.state.users["w"]["w"][s, :, 0].tolist()


@pytest.mark.parametrize("backend", ["vmap", "loop"])
def test_two_rounds_by_hand(backend):
    # Round 1: W = 0 is its own mean, so w = c/2 = (.5, 1, 3), mean 1.5.
    # Round 2, lam = .4: w -= .5 (w - c + .4 (w - 1.5)):  .5 - .5 (-.5 - .4) = .95,  1 - .5 (-1 - .2) = 1.6,  3 - .5 (-3 + .6) = 4.2.
    fed = run(line(algorithm("mtl", beta=0.5, tau=1, lam=0.4), seeds=(0, 1), backend=backend), 2)
    for s in range(2):
        assert own(fed, s) == pytest.approx([0.95, 1.6, 4.2], abs=1e-14)
    cost = fed.costs[0]
    assert (cost.grads, cost.floats_up, cost.floats_down) == (6, 6, 12)  # down: rest and Omega_tt


@pytest.mark.parametrize("backend", ["vmap", "loop"])
def test_a_learned_relation_by_hand(backend):
    # Round 1: Omega = I and W = 0: w = c/2 = (1, 3, 0). W'W has the root w w'/|w|, of which the trace is |w|: Sigma = w w'/10, eigenvalues
    # 1, 0, 0. With floor = .3: 1, .1, .1, and by their sum 1.2; so Omega = Sigma^-1 / 3 = .4 on w and 4 across it, and Omega w = .4 w.
    # Round 2, lam = .5: w -= .5 (w - c + .2 w) = .4 w + .5 c = (1.4, 4.2, 0).
    fed = run(line(algorithm("mtl", beta=0.5, tau=1, lam=0.5, relation="learned", floor=0.3), c=[2.0, 6.0, 0.0], backend=backend), 1)
    w = np.array([1.0, 3.0, 0.0])
    want = 4 * np.eye(3) - 3.6 * np.outer(w, w) / 10
    np.testing.assert_allclose(fed.state.server["omega"][0], want, atol=1e-13)
    assert own(run(fed, 1)) == pytest.approx([1.4, 4.2, 0], abs=1e-13)


def blobs(algo, **options):
    x, y = cloud(60)
    part = split(ranges([6] * 5), ranges([4] * 5, 30), seen=[True, True, False, True, True])
    return classified(algo, x, y, [part], **options)


def test_cold_start_and_what_is_sent():
    fed = blobs(algorithm("mtl", lam=0.3), active=2)
    names, d_last = ["layer2.weight", "layer2.bias"], 5 * 3 + 3
    assert list(fed.state.server["w"]) == names
    assert {k: tuple(v.shape[1:3]) for k, v in fed.state.server["w"].items()} == {"layer2.weight": (4, 5), "layer2.bias": (4, 3)}
    fed.round()
    drawn, cost = fed.cohorts(0)[0], fed.costs[0]
    assert (cost.floats_up, cost.floats_down) == (2 * d_last, 2 * (d_last + 1))
    initial, mean = fed.initial[0], tree.at(fed.shown(), 0)
    for user in range(5):
        (personal,) = fed.algo.candidates(mean, fed.users_at(0, user)).values()
        for name, value in personal.items():
            kept = fed.state.users["w"][name][0]
            if user in drawn:
                assert torch.equal(value, kept[user])
            elif name in names:
                torch.testing.assert_close(value, kept[torch.from_numpy(drawn)].mean(0), rtol=0, atol=1e-15)
            else:
                assert torch.equal(value, initial[name])
    assert fed.times_sampled[0, 2] == 0  # held out


def test_absent_users_are_part_of_the_relation():
    # Round 1 of users 0 and 1 of 3: w = (.5, 1, 0). In the second round the mean is .5 for all, with the third's 0.
    fed = line(algorithm("mtl", beta=0.5, tau=1, lam=0.4), active=2)
    fed.cohorts = lambda k: np.array([[0, 1]])
    run(fed, 2)
    assert own(fed) == pytest.approx([0.5 - 0.5 * (-0.5), 1 - 0.5 * (-1 + 0.4 * 0.5), 0], abs=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_diverged_seed_does_not_stop_the_others(dtype):
    fed = advance(line(algorithm("mtl", lam=0.3, relation="learned"), seeds=(0, 1), dtype=dtype), 1)
    for leaf in (fed.state.users["w"]["w"], fed.state.server["w"]["w"]):
        leaf[0] = float("nan")
    advance(fed, 2)
    alone = advance(line(algorithm("mtl", lam=0.3, relation="learned"), seeds=(1,), dtype=dtype), 3)
    assert fed.diverged.tolist()[0] >= 0 and fed.diverged.tolist()[1] == -1
    torch.testing.assert_close(fed.state.users["w"]["w"][1], alone.state.users["w"]["w"][0])
    assert fed.state.server["omega"].dtype == dtype


def test_spectrum_of_nothing_is_that_of_the_identity():
    share, vectors = spectrum({"w": torch.zeros(4, 3)}, 0.1)
    assert share.tolist() == [0.25] * 4 and share.dtype == torch.float64
    torch.testing.assert_close(vectors @ vectors.T, torch.eye(4, dtype=torch.float64))


def test_all_layers_is_another_method_than_the_last():
    one, other = (advance(blobs(algorithm("mtl", lam=1.0, layers=layers)), 2) for layers in ("last", "all"))
    assert tree.numel(tree.at(other.state.server["w"], 0, 0)) == tree.numel(other.initial[0])
    assert not same(one.state.users["w"], other.state.users["w"])


@pytest.mark.parametrize(
    "field, value, allowed",
    [
        ("lam", -1.0, ">= 0"),
        ("layers", "first", "last, all"),
        ("relation", "ones", "mean, learned"),
        ("floor", 0.0, "> 0"),
        ("floor", 1.5, "at most 1"),
    ],
)
def test_bad_values(field, value, allowed):
    with pytest.raises(UserError, match=f"^{field}={value}: .*{allowed}"):
        algorithm("mtl", **{field: value})


def test_notes():
    # lambda beta tau rounds r = .2 * .1 * 10 * 100 * .2 = 4
    assert algorithm("mtl", tau=10).notes(Facts(20, 4, 100, None)) == ["coupling lambda*beta*tau*rounds*r = 4 (lambda=0.2)"]
    assert algorithm("mtl", lam=0.0).notes(Facts(20, 4, 100, None))[0].startswith("warning: coupling")
    # Omega has no eigenvalue above 1 (mean), above (1 + floor)/floor = 11 (learned): .1 * 2 * 11 = 2.2
    assert "Omega) < 2" in algorithm("mtl", lam=20.0).notes(Facts(20, 4, 100, None))[1]
    assert "may be 2.2" in algorithm("mtl", lam=2.0, relation="learned").notes(Facts(20, 4, 100, None))[1]
    assert len(algorithm("mtl", lam=2.0).notes(Facts(20, 4, 100, None))) == 1
