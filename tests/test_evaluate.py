"""Protocols on problems that can be solved by hand. Row B21 of the fault list.

COIN: every input is 1, scores are the two weights W, start (0, 0). The gradient of the mean cross-entropy is p - q with
p = softmax(W) and q the shares of the labels, so one step of size s from (0, 0) on labels 0 alone gives W = (s/2, -s/2).
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from small import advance, algorithm, clone, cloud, coin, federation, ranges, same, split

from perfed import tree
from perfed.algorithms import ALGORITHMS
from perfed.algorithms.base import Algorithm
from perfed.data.sampling import key, permuted
from perfed.errors import UserError
from perfed.evaluate import Protocol, adapted_models, check, evaluate
from perfed.models import MODELS, Mlp
from perfed.prepare import _adapted

CLEAN = Protocol(label="clean", source="train", support=None, batch=None, repeats=1, steps=(0, 1), lr=1.0)
PAPER = dataclasses.replace(CLEAN, label="paper", source="test")
FEWSHOT = dataclasses.replace(PAPER, label="fewshot", support=2)
BACKENDS = pytest.mark.parametrize("backend", ["vmap", "loop"])


def softmax(w: np.ndarray) -> np.ndarray:
    e = np.exp(w - w.max())
    return e / e.sum()


def stepped(w: np.ndarray, labels, lr: float) -> np.ndarray:
    """One gradient step of COIN."""
    return w - lr * (softmax(w) - np.bincount(labels, minlength=2) / len(labels))


def judged(w: np.ndarray, labels) -> tuple[float, float]:
    """(share correct, mean loss); a tie goes to class 0."""
    labels = np.asarray(labels)
    return float((labels == w.argmax()).mean()), float(-np.log(softmax(w)[labels]).mean())


# ---------------------------------------------------------------- what is adapted on


@BACKENDS
def test_b21_adapting_on_train_data_cannot_know_the_test_labels(backend):
    fed = advance(coin([[0, 0, 0]], [[1, 1]], backend=backend), 1)
    w = stepped(np.zeros(2), [0], 1.0)
    assert w.tolist() == [0.5, -0.5]
    assert tree.at(fed.state.server["w"]["layer1.weight"], 0)[0].tolist() == [0.5, -0.5]
    clean, paper = evaluate(fed, CLEAN), evaluate(fed, PAPER)
    assert clean.models == ("global",) and clean.steps == (0, 1)
    assert clean.correct[0, 0, 0].tolist() == [0.0, 0.0]
    assert paper.correct[0, 0, 0].tolist() == [0.0, 1.0]
    losses = [judged(w, [1, 1])[1], judged(stepped(w, [0], 1.0), [1, 1])[1]]
    np.testing.assert_allclose(clean.loss[0, 0, 0], losses, rtol=1e-12)
    np.testing.assert_allclose(paper.loss[0, 0, 0], [losses[0], judged(stepped(w, [1], 1.0), [1, 1])[1]], rtol=1e-12)
    assert clean.n_scored.tolist() == [[2]]


@BACKENDS
def test_each_user_adapts_on_his_own_data(backend):
    fed = coin([[0], [1, 1], [0, 0, 1]], [[0, 1], [1], [1, 1, 1, 0]], backend=backend)
    scores = evaluate(fed, dataclasses.replace(CLEAN, lr=0.7))
    for user, (train, test) in enumerate([([0], [0, 1]), ([1, 1], [1]), ([0, 0, 1], [1, 1, 1, 0])]):
        before, after = np.zeros(2), stepped(np.zeros(2), train, 0.7)
        for i, w in enumerate((before, after)):
            correct, loss = judged(w, test)
            assert scores.correct[0, user, 0, i] == correct
            np.testing.assert_allclose(scores.loss[0, user, 0, i], loss, rtol=1e-12)


class Recording(Mlp):
    """Scores nothing but writes down the inputs that are scored; an input is the position of its example."""

    seen: list

    def apply(self, params, x):
        self.seen.append(x[:, 0].to(torch.int64).tolist())
        return x.new_zeros(len(x), 2) + params["layer1.bias"].sum() * 0


@dataclasses.dataclass(kw_only=True)
class Watching(Algorithm):
    """Adaptation that writes down what it reads."""

    def __post_init__(self):
        super().__post_init__()
        self.read = []

    def adapt_step(self, task, carry, batch, lr):
        assert (batch.weight == 1).all()
        self.read.append(batch.index.tolist())
        return carry


def watched(protocol: Protocol, sizes_train, sizes_test, seeds=(0,)):
    """For each user of the first seed (steps of all repeats: positions adapted on, sets scored)."""
    total = sum(sizes_train) + sum(sizes_test)
    x, y = np.arange(total, dtype=np.float64)[:, None], np.zeros(total, dtype=np.int64)
    parts = [split(ranges(sizes_train), ranges(sizes_test, sum(sizes_train))) for _ in seeds]
    out = []
    for user in range(len(sizes_train)):
        model, algo = Recording(name="mlp", hidden=[]), Watching(name="watching", tau=1, batch=4)
        mine = [split([p.train.of(user)], [p.test.of(user)]) for p in parts]
        fed = federation(algo, x, y, mine, seeds=seeds, classes=2, model=model, backend="loop")
        model.seen = []
        evaluate(fed, protocol)
        out.append((algo.read, model.seen, set(mine[0].train.index.tolist()), set(mine[0].test.index.tolist())))
    return out


def test_clean_reads_train_data_and_scores_all_test_data():
    for read, scored, train, test in watched(dataclasses.replace(CLEAN, batch=3, steps=(0, 1, 2), repeats=2), [8, 5], [6, 4]):
        assert len(read) == 4 and all(len(set(b)) == 3 and set(b) <= train for b in read)
        assert len({tuple(b) for b in read}) > 1
        assert len(scored) == 5 and all(set(b) == test for b in scored)  # before, and twice after 1 and 2 steps


def test_paper_reads_a_batch_of_the_test_data_and_scores_all_of_it():
    for read, scored, _, test in watched(dataclasses.replace(PAPER, batch=4, repeats=3), [3, 3], [6, 9]):
        assert len(read) == 3 and all(len(set(b)) == 4 and set(b) <= test for b in read)
        assert len(scored) == 4 and all(sorted(b) == sorted(test) for b in scored)


@pytest.mark.parametrize("batch", [None, 2, 3, 50])
def test_fewshot_scores_the_rest_of_the_test_data(batch):
    protocol = dataclasses.replace(FEWSHOT, support=3, batch=batch, steps=(0, 2), repeats=4)
    for read, scored, _, test in watched(protocol, [3, 3], [4, 9]):
        assert len(read) == 8 and len(scored) == 8
        supports = set()
        for repeat in range(4):
            rest = set(scored[2 * repeat])
            assert sorted(scored[2 * repeat]) == sorted(rest) == sorted(scored[2 * repeat + 1])
            support = test - rest
            supports.add(frozenset(support))
            assert len(support) == 3 and rest <= test
            for b in read[2 * repeat : 2 * repeat + 2]:
                assert set(b) <= support and len(set(b)) == len(b) == min(batch or 3, 3)
        assert len(supports) > 1


def test_fewshot_counts_what_it_scores():
    fed = coin([[0], [0]], [[0, 1, 1], [1, 1, 0, 0, 1]])
    assert evaluate(fed, FEWSHOT).n_scored.tolist() == [[1, 3]]
    tests = [d.partition.test for d in fed.data]
    check(FEWSHOT, tests)
    with pytest.raises(UserError, match=r"^protocol.support=3: at most 2: users \[0\] have no more") as caught:
        check(dataclasses.replace(FEWSHOT, support=3), tests)
    assert "\n" not in str(caught.value)


@BACKENDS
def test_fewshot_by_hand(backend):
    """The support set is the beginning of the permutation keyed (seed, support, user, repeat, 0)."""
    labels = [[0, 1, 1, 0, 1, 0, 1], [1, 1, 1, 0]]
    fed = coin([[0], [0]], labels, backend=backend)
    scores = evaluate(fed, dataclasses.replace(FEWSHOT, support=3, repeats=2, lr=0.9))
    for user, mine in enumerate(labels):
        correct, loss = np.zeros(2), np.zeros(2)
        for repeat in range(2):
            support = permuted(np.atleast_1d(key(0, "support", user, repeat, 0)), len(mine), 3)[0]
            rest = np.delete(mine, support)
            for i, w in enumerate((np.zeros(2), stepped(np.zeros(2), np.array(mine)[support], 0.9))):
                c, ls = judged(w, rest)
                correct[i] += c / 2
                loss[i] += ls / 2
        np.testing.assert_allclose(scores.correct[0, user, 0], correct, rtol=1e-12)
        np.testing.assert_allclose(scores.loss[0, user, 0], loss, rtol=1e-12)


# ---------------------------------------------------------------- repeats, steps, batches


@BACKENDS
@pytest.mark.parametrize("source", ["train", "test"])
def test_repeats_are_averaged(source, backend):
    """By hand, with the documented keys (seed, adapt, user, repeat, step)."""
    train, test = [[0, 1, 1, 0, 1], [1, 0, 0]], [[0, 1, 1], [1, 0, 0, 0, 1, 1]]
    protocol = dataclasses.replace(CLEAN, source=source, batch=2, repeats=5, steps=(0, 2), lr=2.0)
    fed = coin(train, test, seeds=(3,), backend=backend)
    scores = evaluate(fed, protocol)
    for user in range(2):
        mine = np.array((train if source == "train" else test)[user])
        results = []
        for repeat in range(5):
            w = np.zeros(2)
            for t in range(2):
                batch = permuted(np.atleast_1d(key(3, "adapt", user, repeat, t)), len(mine), 2)[0]
                w = stepped(w, mine[batch], 2.0)
            results.append(judged(w, test[user]))
        np.testing.assert_allclose(scores.correct[0, user, 0, 1], np.mean([r[0] for r in results]), rtol=1e-12)
        np.testing.assert_allclose(scores.loss[0, user, 0, 1], np.mean([r[1] for r in results]), rtol=1e-12)
        np.testing.assert_allclose(scores.loss[0, user, 0, 0], math.log(2), rtol=1e-12)


def world(algo=None, seeds=(0, 1), backend="vmap", users=None, **more):
    """Four users with unequal train and test sets; ``users`` keeps some of them."""
    sizes, tests = [30, 9, 1, 17], [3, 11, 6, 1]
    x, y = cloud(sum(sizes) + sum(tests))
    train, test = ranges(sizes), ranges(tests, sum(sizes))
    kept = range(4) if users is None else users
    part = split([train[u] for u in kept], [test[u] for u in kept])
    algo = algo or algorithm("perfedavg_fo", batch=8, tau=2)
    return federation(algo, x, y, [part] * len(seeds), seeds=seeds, backend=backend, **more)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("protocol", [CLEAN, dataclasses.replace(PAPER, repeats=2)], ids=["clean", "paper"])
def test_a_curve_equals_separate_runs(name, protocol):
    fed = advance(world(algorithm(name, batch=8, tau=2)), 1)
    protocol = dataclasses.replace(protocol, batch=6, lr=0.1)
    curve = evaluate(fed, dataclasses.replace(protocol, steps=(0, 1, 5)))
    assert curve.correct.shape == (2, 4, len(curve.models), 3)
    for i, steps in enumerate((0, 1, 5)):
        one = evaluate(fed, dataclasses.replace(protocol, steps=tuple(sorted({0, steps}))))
        assert (one.loss[..., -1] == curve.loss[..., i]).all() and (one.correct[..., -1] == curve.correct[..., i]).all()
    assert len(np.unique(curve.loss[0, 0, 0])) == 3


@pytest.mark.parametrize("source", ["train", "test"])
def test_a_batch_larger_than_the_data_is_all_of_them(source):
    fed = world()
    protocol = dataclasses.replace(CLEAN, source=source, steps=(0, 1, 2), lr=0.1)
    whole = evaluate(fed, protocol)
    for batch in (30, 1000):
        large = evaluate(fed, dataclasses.replace(protocol, batch=batch, repeats=2))
        np.testing.assert_allclose(large.loss, whole.loss, rtol=1e-12)


@BACKENDS
@pytest.mark.parametrize("protocol", [CLEAN, PAPER, dataclasses.replace(PAPER, batch=2, repeats=3)], ids=["clean", "paper", "batch"])
def test_padding_of_unequal_test_sets_is_exact(protocol, backend):
    """A user scored among others equals the same user scored alone. He is user 0 in both: his streams carry his id."""
    protocol = dataclasses.replace(protocol, lr=0.1, steps=(0, 2))
    for first in range(4):
        others = [u for u in range(4) if u != first]
        among, alone = (evaluate(world(users=users, backend=backend), protocol) for users in ([first, *others], [first]))
        assert (among.correct[:, 0] == alone.correct[:, 0]).all()
        np.testing.assert_allclose(among.loss[:, 0], alone.loss[:, 0], rtol=1e-12)
        assert among.n_scored[0, 0] == alone.n_scored[0, 0] == [3, 11, 6, 1][first]


def test_chunks_of_an_evaluation_change_nothing(monkeypatch):
    fed = world()
    protocol = dataclasses.replace(CLEAN, batch=5, lr=0.1)
    whole = evaluate(fed, protocol)
    monkeypatch.setattr("perfed.evaluate._CHUNK_NUMBERS", 40)
    parts = evaluate(fed, protocol)
    assert (parts.correct == whole.correct).all()
    np.testing.assert_allclose(parts.loss, whole.loss, rtol=1e-12)


# ---------------------------------------------------------------- which parameters


def test_last_layer_adapts_alone():
    model = MODELS["mlp"](name="mlp", hidden=[5])
    params = world(model=model).initial[0]
    last = _adapted("last", model, params)
    assert last == {"layer2.weight", "layer2.bias"}
    assert _adapted("all", model, params) is None
    assert _adapted(["layer1", "layer2.bias"], model, params) == {"layer1.weight", "layer1.bias", "layer2.bias"}
    with pytest.raises(UserError, match="^adapt.layers=layer9: all, last, or layers among layer1, layer2$"):
        _adapted("layer9", model, params)

    fed, whole = (advance(world(model=model, adapted=a), 1) for a in (last, None))
    before = tree.at(fed.state.server["w"], 0)
    protocol = dataclasses.replace(CLEAN, lr=0.1, batch=4)
    after, free = (adapted_models(f, protocol, 0, 1, 3)["global"] for f in (fed, whole))
    for name, value in before.items():
        assert torch.equal(after[name], value) == (name not in last)
        assert not torch.equal(free[name], value)
    assert (evaluate(fed, protocol).loss[..., 1] != evaluate(whole, protocol).loss[..., 1]).all()


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("protocol", [CLEAN, PAPER, dataclasses.replace(FEWSHOT, support=2)], ids=["clean", "paper", "fewshot"])
def test_adapted_models_are_the_scored_ones(name, protocol):
    """The model handed out for a user gets the scores of the evaluation (first of one repeat)."""
    fed = advance(world(algorithm(name, batch=8, tau=2), users=[0, 1, 2]), 1)
    protocol = dataclasses.replace(protocol, batch=4, lr=0.1, steps=(0, 2))
    scores = evaluate(fed, protocol)
    for s, user in ((0, 0), (1, 1), (1, 2)):
        index = fed.data[s].partition.test.of(user)
        if protocol.support:
            seed = fed.data[s].sampling
            index = np.delete(index, permuted(np.atleast_1d(key(seed, "support", user, 0, 0)), len(index), 2)[0])
        for i, steps in enumerate(scores.steps):
            models = adapted_models(fed, protocol, s, user, steps)
            for j, params in enumerate(models[m] for m in scores.models):
                out = fed.task.model.apply(params, fed.pool.x[index])
                correct = float((out.argmax(1) == fed.pool.y[index]).double().mean())
                assert correct == pytest.approx(scores.correct[s, user, j, i], abs=1e-12)


# ---------------------------------------------------------------- purity, broken models


@pytest.mark.parametrize("name", ALGORITHMS)
def test_evaluation_changes_nothing(name):
    fed = advance(world(algorithm(name, batch=8, tau=2)), 1)
    state, costs, sampled, diverged = clone(fed.state), [dataclasses.replace(c) for c in fed.costs], fed.times_sampled.copy(), fed.diverged
    first = evaluate(fed, dataclasses.replace(CLEAN, batch=4, lr=0.1))
    second = evaluate(fed, dataclasses.replace(CLEAN, batch=4, lr=0.1))
    fed.diagnose()
    assert same(fed.state, state) and fed.costs == costs and (fed.times_sampled == sampled).all()
    assert torch.equal(fed.diverged, diverged) and fed.k == 1
    assert (first.loss == second.loss).all() and (first.correct == second.correct).all()


@BACKENDS
def test_scores_that_are_not_finite_predict_nothing(backend):
    """argmax of NaN is class 0: users with class 0 alone would get 100 %."""
    fed = coin([[0]], [[0, 0, 0]], backend=backend)
    fed.state = fed.state._replace(server=tree.map(lambda t: torch.full_like(t, math.nan), fed.state.server))
    scores = evaluate(fed, CLEAN)
    assert not np.isfinite(scores.loss).any()
    assert (np.nan_to_num(scores.correct) == 0).all()


def test_protocols_say_what_they_do():
    assert "all of the user's train data" in CLEAN.text() and "scored on all test data" in CLEAN.text()
    assert "a batch of 40 of the user's test data" in dataclasses.replace(PAPER, batch=40).text()
    text = dataclasses.replace(FEWSHOT, batch=1, repeats=3).text()
    assert "a batch of 1 of the 2 support examples" in text and "without the 2 support examples" in text and "mean of 3 draws" in text
