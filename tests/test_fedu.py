"""FedU: numbers by hand, its graphs, cold start, costs, refusals. The update rule in general is in conformance/fedu.py."""

import numpy as np
import pytest
import torch
from problems import Quadratic, federation, quadratic, run
from small import advance, algorithm, cloud, ranges, split
from small import federation as classified

from perfed import tree
from perfed.algorithms.base import Facts, Population
from perfed.errors import UserError

C = [1.0, 2.0, 6.0]


def line(algo, c=C, **options):
    """f_i = w^2/2 - c_i w from 0: a step of 0.5 goes half of the way to c_i."""
    return federation(algo, Quadratic(), [quadratic(np.eye(1), [v]) for v in c], [0.0], **options)


def own(fed, s=0):
    return fed.state.users["w"]["w"][s, :, 0].tolist()


def population(counts, held_out=(), seed=0) -> Population:
    counts = torch.tensor(counts)
    members = torch.ones(len(counts), dtype=torch.bool)
    members[list(held_out)] = False
    return Population(len(counts), 2, counts.sum(1), counts, members, seed)


@pytest.mark.parametrize("backend", ["vmap", "loop"])
def test_a_round_by_hand(backend):
    # After one step of beta = .5: v = (.5, 1, 3), mean 1.5. beta tau lam c = .5 * 1 * .1 * 2 = .1, so A = 3 users are pulled .3 of the way:
    # .5 + .3 * 1 = .8,  1 + .3 * .5 = 1.15,  3 - .3 * 1.5 = 2.55; their mean is 1.5 again.
    fed = run(line(algorithm("fedu", beta=0.5, tau=1, lam=0.1), seeds=(0, 1), backend=backend), 1)
    for s in range(2):
        assert own(fed, s) == pytest.approx([0.8, 1.15, 2.55], abs=1e-14)
        assert fed.state.server["w"]["w"][s].item() == pytest.approx(1.5, abs=1e-14)
    cost = fed.costs[0]
    assert (cost.grads, cost.floats_up, cost.floats_down) == (3, 3, 3)


def test_a_file_of_edges_by_hand(tmp_path):
    # Only users 0 and 2 are tied, with weight .5; the 9 on the diagonal is nobody's. beta tau lam c a = .5 * 1 * 1 * 1 * .5 = .25:
    # .5 + .25 * 2.5 = 1.125, 3 - .25 * 2.5 = 2.375, and user 1 stays at 1.
    path = tmp_path / "edges.csv"
    path.write_text("9,0,.5\n0,0,0\n.5,0,0\n")
    algo = algorithm("fedu", beta=0.5, tau=1, lam=1.0, graph="file", path=str(path), edge_counting="unordered")
    fed = run(line(algo), 1)
    assert own(fed) == pytest.approx([1.125, 1, 2.375], abs=1e-14)
    assert fed.algo.shown(fed.state.server).keys() == {"w"}  # not the graph, which would be copied for every user


@pytest.mark.parametrize(
    "text, why",
    [
        ("0,1\n1,0\n", r"3 x 3 numbers.*\(2, 2\)"),
        ("0,1,0\n2,0,0\n0,0,0\n", "symmetric"),
        ("0,-1,0\n-1,0,0\n0,0,0\n", ">= 0"),
        ("0,nan,0\nnan,0,0\n0,0,0\n", ">= 0"),
        ("a,b\n", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_unfit_files(tmp_path, text, why):
    path = tmp_path / "edges.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=f"^path=.*edges.csv: .*{why}") as error:
        line(algorithm("fedu", graph="file", path=str(path)))
    assert "\n" not in str(error.value)


def test_nearest_neighbours():
    # Shares of class 0: 1, .9, .5, .1, 0, and user 5 (.5, held out) is nobody's neighbour. Nearest: 0-1, 1-0, 2-1 (as near as 3; the
    # first one counts), 3-4, 4-3. Symmetric: edges 01, 12, 34.
    counts = [[10, 0], [9, 1], [50, 50], [1, 9], [0, 10], [5, 5]]
    a = algorithm("fedu", graph="knn", neighbours=1).weights(population(counts, held_out=[5]))
    assert {(i, j) for i, j in np.argwhere(np.triu(a))} == {(0, 1), (1, 2), (3, 4)}
    assert np.array_equal(a, a.T) and set(np.unique(a)) == {0, 1}
    every = algorithm("fedu", graph="knn", neighbours=9).weights(population(counts, held_out=[5]))
    assert np.array_equal(every[:5, :5], 1 - np.eye(5)) and not every[5].any() and not every[:, 5].any()


def test_random_graph():
    users = population([[1, 1]] * 40)
    a = algorithm("fedu", graph="random", threshold=0.25).weights(users)
    pairs = a[np.triu_indices(40, 1)]
    assert np.array_equal(a, a.T) and not a.diagonal().any()
    assert pairs[pairs > 0].min() >= 0.25 and pairs.max() < 1
    assert 0.15 < (pairs == 0).mean() < 0.35  # a quarter of 780 pairs
    assert abs(pairs.mean() - (1 - 0.25**2) / 2) < 0.05
    again, other = (algorithm("fedu", graph="random").weights(users._replace(seed=s)) for s in (0, 1))
    assert np.array_equal(a, again) and not np.array_equal(a, other)


def test_cold_start():
    fed = line(algorithm("fedu", beta=0.5, tau=1), active=2)
    fed.round()
    (absent,) = np.setdiff1d(range(3), fed.cohorts(0)[0])
    mean = tree.at(fed.shown(), 0)
    for user in range(3):
        models = fed.algo.candidates(mean, fed.users_at(0, user))
        assert list(models) == ["personal", "global"]
        assert torch.equal(models["global"]["w"], mean["w"])
        want = mean["w"] if user == absent else fed.state.users["w"]["w"][0, user]
        assert torch.equal(models["personal"]["w"], want)
    assert mean["w"].item() != 0 and own(fed)[absent] == 0  # the absent one would still train from w_0


def test_held_out_users_and_float32():
    x, y = cloud(40)
    part = split(ranges([6] * 4), ranges([4] * 4, 24), seen=[True, True, False, True])
    for graph in ("complete", "knn", "random"):
        fed = advance(classified(algorithm("fedu", graph=graph), x, y, [part], dtype=torch.float32), 2)
        assert fed.times_sampled[0].tolist() == [2, 2, 0, 2]
        assert all(t.dtype == torch.float32 for t in tree.leaves(fed.state) if t.is_floating_point())
        personal = fed.algo.candidates(tree.at(fed.shown(), 0), fed.users_at(0, 2))["personal"]
        assert torch.equal(personal["layer1.weight"], fed.state.server["w"]["layer1.weight"][0])


@pytest.mark.parametrize(
    "field, value, allowed",
    [
        ("lam", -0.1, ">= 0"),
        ("graph", "ring", "complete, knn, random, file"),
        ("neighbours", 0, "integer >= 1"),
        ("threshold", 1.0, r"\[0, 1\)"),
        ("path", "a.npy", "null unless graph=file"),
        ("edge_counting", "twice", "ordered, unordered"),
    ],
)
def test_bad_values(field, value, allowed):
    with pytest.raises(UserError, match=f"^{field}={value}: .*{allowed}"):
        algorithm("fedu", **{field: value})


def test_a_graph_in_a_file_needs_a_file():
    with pytest.raises(UserError, match="path=null: the name of a file"):
        algorithm("fedu", graph="file")


def test_notes():
    # Defaults with n = 20, A = 4: lambda = 2 * 4 * .025 = .2, and .2 * .1 * 10 * 100 * 4/20 = 4; the pull is .1 * 10 * .025 * 2 * 4 = .2.
    (line,) = algorithm("fedu", tau=10).notes(Facts(20, 4, 100, None))
    assert line == "coupling lambda*beta*tau*rounds*r = 4 (lambda=0.2)"
    assert algorithm("fedu", tau=10, lam=0.25).notes(Facts(20, 4, 100, None))[1].startswith("warning: bound")
    assert "is at most 2.5" in algorithm("fedu", tau=10, lam=0.3125, graph="random").notes(Facts(20, 4, 100, None))[1]
    assert len(algorithm("fedu", tau=10, lam=0.24).notes(Facts(20, 4, 100, None))) == 1
    assert algorithm("fedu", lam=1e-6).notes(Facts(20, 4, 10, None))[0].startswith("warning: coupling")
    assert algorithm("fedu").notes(Facts(20, 1, 10, None))[0].startswith("warning: coupling")  # one user has no edge
    # A file's weights are not known; a random edge weighs (1 - .5^2)/2 in the mean, and knn has at least k of n - 1.
    assert algorithm("fedu", graph="file", path="x.npy").notes(Facts(20, 4, 100, None)) == []
    assert algorithm("fedu", graph="random", threshold=0.5).coupling_lambda(Facts(20, 4, 1, None)) == pytest.approx(0.2 * 0.375)
    assert algorithm("fedu", graph="knn", neighbours=19).coupling_lambda(Facts(20, 4, 1, None)) == pytest.approx(0.2)
