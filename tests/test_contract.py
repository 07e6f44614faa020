"""The contract of an algorithm (design, section 4) over the whole registry, eager and in float64; a compiled twin is slow.

A new algorithm is included by being registered. ``VARIANTS`` adds settings of known methods that take other paths.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
from small import advance, algorithm, clone, close, cloud, federation, ranges, same, split, structure

from perfed import draws, tree
from perfed.algorithms import ALGORITHMS
from perfed.algorithms.base import Algorithm
from perfed.device import compiler_found
from perfed.draws import Lanes
from perfed.evaluate import Protocol, evaluate
from perfed.federate import Federation
from perfed.models import MODELS
from perfed.optimizers import LOCAL, SERVER

VARIANTS = {
    "fedavg-samples": ("fedavg", {"aggregation": "samples"}),
    "local-equal": ("local", {"schedule": "equal"}),
    "fo-two-inner-steps": ("perfedavg_fo", {"inner_steps": 2}),
    "fo-extra-iterate": ("perfedavg_fo", {"extra_iterate": True}),
    "fo-sizes": ("perfedavg_fo", {"batch_inner": 5, "batch_outer": 37}),
    "exact-shared": ("perfedavg", {"batches": "shared"}),
    "exact-through-inner-steps": ("perfedavg", {"hess_batch": "inner", "inner_steps": 3}),
    "exact-outer-inverse-root": ("perfedavg", {"hess_batch": "outer", "schedule": "inverse_root"}),
    "hf-absolute": ("perfedavg_hf", {"delta_mode": "absolute"}),
    "hf-sizes": ("perfedavg_hf", {"batch_hess": 7, "extra_iterate": True}),
    "fedmeta-null": ("fedmeta", {"support": None}),
    "fedmeta-fo": ("fedmeta", {"first_order": True, "batch": 5}),
    "metasgd-null-clamp": ("metasgd", {"support": None, "clamp": True}),
    "metasgd-frozen": ("metasgd", {"learn": False, "batch": 7}),
    "aruba-isotropic": ("aruba", {"isotropic": True}),
    "aruba-pp": ("aruba", {"refine_c": 0.5, "aggregation": "samples"}),
    "reptile-linear": ("reptile", {"schedule": "linear", "rounds": 5, "eps": 0.5}),
    "reptile-samples": ("reptile", {"aggregation": "samples", "eps": 0.5}),
    "fedprox-stragglers": ("fedprox", {"stragglers": 0.6, "mu": 0.5}),
    "scaffold-one": ("scaffold", {"option": "I"}),
    "qfedavg-samples": ("qfedavg", {"aggregation": "samples", "q": 5.0}),
    "qfedavg-half": ("qfedavg", {"q": 0.5}),
    "admm-full": ("admm", {"scheme": "full"}),
    "admm-untracked": ("admm", {"tracking": False}),
    "pfedme-warm": ("pfedme", {"theta_init": "warm"}),
    "pfedme-all": ("pfedme", {"theta_init": "warm", "train_all": True}),
    "ditto-steps": ("ditto", {"personal_steps": 3, "personal_lr": 0.05}),
    "apfl-adaptive": ("apfl", {"adaptive": True}),
    "apfl-none": ("apfl", {"v_step": "none"}),
    "fedu-knn": ("fedu", {"graph": "knn", "neighbours": 2}),
    "fedu-random": ("fedu", {"graph": "random", "edge_counting": "unordered"}),
    "mtl-all-learned": ("mtl", {"layers": "all", "relation": "learned"}),
    "mocha-learned": ("mocha", {"relation": "learned", "omega_every": 1}),
    "mocha-squared-learned": ("mocha", {"loss": "squared", "relation": "learned", "omega_every": 1}),
    "mocha-independent": ("mocha", {"relation": "independent"}),
    "l2gd-subset": ("l2gd", {"participation": "subset"}),
    "l2gd-pull1": ("l2gd", {"pull": 1.0, "p": 0.3}),
    "partial-all": ("partial", {"personal": "all"}),
    "partial-none-samples": ("partial", {"personal": "none", "aggregation": "samples"}),
    "partial-names": ("partial", {"personal": ["layer1.bias", "layer2"], "frozen": ["layer1.weight", "layer2.bias"]}),
    "partial-alternate": ("partial", {"personal": "first", "schedule": "alternate", "personal_steps": 2}),
    "aruba-pp-iso": ("aruba", {"refine_c": 0.5, "isotropic": True}),
}
CASES = {**{name: (name, {}) for name in ALGORITHMS}, **VARIANTS}
MORE = ["local-equal", "fo-extra-iterate", "fedmeta-null", "metasgd-null-clamp", "scaffold-one", "admm-full", "l2gd-subset",
        "pfedme-warm", "pfedme-all", "ditto-steps", "apfl-adaptive", "mtl-all-learned", "mocha-squared-learned"]  # fmt: skip
FEW = [*ALGORITHMS, *MORE]  # the variants with other states or lanes
OWN_START = {"pooled": {"reweighted"}, "mocha": {"personal"}}  # judged models that are not the initial one before round 0, by algorithm
ROWS_ON_SERVER = {"mtl", "mocha"}  # methods whose server keeps a row for each user
ROUNDS = 2
SIZES = [60, 40, 35, 1, 50, 45, 7]  # a batch is 40: users with more, as many, fewer, one
SEEDS = (0, 1)
CLEAN = Protocol(label="clean", source="train", support=None, batch=10, repeats=1, steps=(0, 1), lr=0.05)


def method(case: str):
    name, fields = CASES[case]
    return algorithm(name, **{"tau": 2, **fields})


each = pytest.mark.parametrize("case", list(CASES))
few = pytest.mark.parametrize("case", FEW)
BACKENDS = pytest.mark.parametrize("backend", ["vmap", "loop"])


def build(algo, sizes=SIZES, seeds=SEEDS, active=4, users=None, **engine) -> Federation:
    """Users of different sizes; each seed has its own partition of one pool. ``users``: which of them, in which order."""
    total = sum(sizes)
    x, y = cloud(total + 4 * len(sizes))
    users = range(len(sizes)) if users is None else users
    partitions = []
    for seed in seeds:
        dealt = np.random.default_rng(seed).permutation(len(x))
        train, test = ranges(sizes), ranges([4] * len(sizes), total)
        partitions.append(split([dealt[train[u]] for u in users], [dealt[test[u]] for u in users]))
    return federation(method(algo) if isinstance(algo, str) else algo, x, y, partitions, seeds=seeds, active=active, **engine)


@functools.cache
def trained(case: str, backend: str = "vmap", chunk: int | None = None) -> Federation:
    """After ROUNDS rounds. Shared by tests: not to be advanced."""
    return advance(build(case, backend=backend, chunk=chunk), ROUNDS)


def judged(fed: Federation):
    """All that a run can report: the state, and the scores before and after a step."""
    scores = evaluate(fed, CLEAN)
    return fed.state.server, fed.state.users, torch.from_numpy(scores.correct), torch.from_numpy(scores.loss)


# ---------------------------------------------------------------- backends


@each
def test_vmap_chunked_and_loop_agree(case):
    loop = trained(case, "loop")
    wanted = judged(loop)
    for chunk in (None, 3):  # 8 lanes; 3 gives chunks of 3, 3 and 2
        vmap = trained(case, "vmap", chunk)
        close(judged(vmap), wanted)
        assert vmap.costs == loop.costs
        assert (vmap.times_sampled == loop.times_sampled).all()


@few
def test_drawing_for_rounds_to_come_changes_nothing(case, monkeypatch):
    fed = trained(case)
    assert set(fed._plans) > {ROUNDS - 1, ROUNDS}
    monkeypatch.setattr(draws, "AHEAD", 1)
    alone = advance(build(case), ROUNDS)
    assert set(alone._plans) == {ROUNDS - 1}
    assert same(judged(alone), judged(fed))
    assert alone.costs == fed.costs


@pytest.mark.parametrize("local, server", [("adam", "average"), ("sgd", "momentum"), ("sgd", "adam")])
def test_backends_agree_with_other_optimizers(local, server):
    options = {"adam": {}, "sgd": {"momentum": 0.9, "weight_decay": 0.01}}
    more = {"local": LOCAL[local](name=local, **options[local]), "server": SERVER[server](name=server)}
    one, other = (advance(build(algorithm("perfedavg_fo"), backend=b, **more), ROUNDS) for b in ("vmap", "loop"))
    close(judged(one), judged(other), rtol=1e-10)  # Adam divides by roots of nearly nothing


@each
def test_padding_of_a_lane_is_exact(case):
    """One step of a user with 35 of 40 examples beside one with 60 equals his step alone, when no lane has padding."""
    if method(case).trains == "together":
        pytest.skip("one lane holds the data of all users")
    if method(case).name in ROWS_ON_SERVER:
        pytest.skip("a step depends on how many users there are")
    out = []
    for users in ([0, 1], [0]):
        fed = build(case, sizes=[35, 60], seeds=(0,), users=users, active=len(users))
        lanes = Lanes(np.zeros(len(users), dtype=np.int64), np.arange(len(users)))
        index, weight = fed.batches(lanes, 0, 1)
        info, ids = fed.info(lanes, 0), torch.arange(len(users))
        down = fed._down(lanes, info)
        kept = tree.at(fed.state.users, torch.zeros_like(ids), ids)
        local = fed._receive(down, kept, info, lanes)
        new = fed._step(local, *({r: v[:, 0] for r, v in d.items()} for d in (index, weight)), info, None)
        out.append(tree.at(new, 0))
        padded = {role: int((w[0] == 0).sum()) for role, w in weight.items()}
        draws = fed.algo.draws()
        assert {r: n for r, n in padded.items() if draws[r].part is None} == {
            r: max(0, d.size - 35) if len(users) == 2 else 0 for r, d in draws.items() if d.part is None
        }
    close(*out)


@pytest.mark.slow
@each
@pytest.mark.skipif(not compiler_found(torch.device("cpu")), reason="no C++ compiler")
def test_compiled_twin_agrees(case):
    torch.compiler.reset()
    close(judged(advance(build(case, compiled=True), ROUNDS)), judged(trained(case)), rtol=1e-10)


# ---------------------------------------------------------------- purity


class Spy:
    """Copies all tensors that go into the methods of an algorithm, and compares after the call."""

    METHODS = ("init", "broadcast", "receive", "step", "send", "aggregate", "settle", "candidates", "adapt_init", "adapt_step", "adapted")

    def __init__(self, monkeypatch):
        self.calls: dict[str, int] = {}
        self.edited: set[str] = set()
        self.patch = monkeypatch

    def watch(self, fed: Federation) -> Federation:
        mapped = fed.map

        def spied(f, size, *trees):
            before = clone(trees)
            out = mapped(f, size, *trees)
            if not same(trees, before):
                self.edited.add("lanes")
            return out

        fed.map = spied  # under vmap the methods see views of these tensors
        if fed.backend == "loop":
            for name in self.METHODS:
                self._wrap(fed.algo, name)
        return fed

    def _wrap(self, algo: Algorithm, name: str) -> None:
        method = getattr(algo, name)

        def wrapped(*args):
            trees = tuple(a for a in args if isinstance(a, (dict, tuple, torch.Tensor)))
            before = clone(trees)
            out = method(*args)
            self.calls[name] = self.calls.get(name, 0) + 1
            if not same(trees, before):
                self.edited.add(name)
            return out

        self.patch.setattr(algo, name, wrapped, raising=True)


@pytest.mark.parametrize("case, backend", [*((case, "vmap") for case in CASES), *((case, "loop") for case in FEW)])
def test_inputs_are_bit_identical_afterwards(case, backend, monkeypatch):
    spy = Spy(monkeypatch)
    fed = spy.watch(build(case, backend=backend))
    pool = clone(fed.pool)
    for _ in range(ROUNDS):
        server, users = fed.state.server, clone(fed.state.users)
        before, whole = clone(server), fed.snapshot()
        fed.round()
        assert same(server, before)  # users' rows are written in place, by the engine alone, and can be put back
        now = fed.state, fed.k, fed.diverged, fed.costs, fed.times_sampled.copy()
        after = clone(fed.state.users)
        fed.go_back(whole)
        assert same(fed.state.users, users)
        fed.state, fed.k, fed.diverged, fed.costs, fed.times_sampled = now
        fed.state = fed.state._replace(users=after)
    state, before = fed.state, clone(fed.state)
    evaluate(fed, CLEAN)
    fed.diagnose()
    assert same(state, before) and same(fed.pool, pool)
    assert not spy.edited
    if backend == "loop":
        assert {"receive", "step", "send", "aggregate", "adapt_step"} <= set(spy.calls)


@BACKENDS
def test_the_spy_sees_an_edit_in_place(backend, monkeypatch):
    @dataclasses.dataclass(kw_only=True)
    class Careless(Algorithm):
        def step(self, task, local, batches, info):
            next(iter(local.w.values())).mul_(0.5)
            return local

    spy = Spy(monkeypatch)
    fed = spy.watch(build(Careless(name="careless", tau=1), backend=backend))
    fed.round()
    assert spy.edited


@few
def test_structure_and_dtypes_are_stable(case):
    for dtype in (torch.float64, torch.float32):
        fed = build(case, dtype=dtype)
        before = structure(fed.state)
        assert structure(advance(fed, 2).state) == before
        assert all(leaf.dtype == dtype for leaf in tree.leaves(fed.state) if leaf.is_floating_point())


@few
def test_methods_are_functions_of_their_arguments(case):
    """Another federation of the same algorithm object, run in between, changes nothing."""
    alone = trained(case)
    mixed, other = build(case), build(case, seeds=(5, 6))
    mixed.algo = other.algo = alone.algo
    for _ in range(ROUNDS):
        mixed.round()
        other.round()
    assert same(mixed.state, alone.state)


# ---------------------------------------------------------------- users and seeds


@few
def test_order_of_the_active_users_changes_nothing(case):
    fed, turned = trained(case), build(case)
    cohorts = turned.cohorts
    turned.cohorts = lambda k: np.ascontiguousarray(cohorts(k)[:, ::-1])
    advance(turned, ROUNDS)
    close(judged(turned), judged(fed))
    assert (turned.times_sampled == fed.times_sampled).all()


@few
def test_relabelled_users_give_relabelled_results(case):
    """Full batches, all users active: no draw depends on an id, so new ids move what belongs to users and nothing else."""
    algo = dataclasses.replace(method(case), batch=100)
    if any(draw.part for draw in algo.draws().values()):
        pytest.skip("which part of his data is a user's support set depends on his id")
    order = np.array([2, 0, 3, 1])
    protocol = dataclasses.replace(CLEAN, batch=None)
    fed = advance(build(algo, sizes=[12, 9, 1, 7], seeds=(0,)), ROUNDS)
    moved = advance(build(algo, sizes=[12, 9, 1, 7], seeds=(0,), users=order), ROUNDS)
    if algo.name not in ROWS_ON_SERVER:
        close(moved.state.server, fed.state.server)
    close(moved.state.users, tree.map(lambda t: t[:, order], fed.state.users))
    a, b = evaluate(fed, protocol), evaluate(moved, protocol)
    np.testing.assert_array_equal(b.correct, a.correct[:, order])
    np.testing.assert_allclose(b.loss, a.loss[:, order], rtol=1e-11)


@few
@BACKENDS
def test_a_seed_alone_equals_the_seed_among_others(case, backend):
    together = trained(case, backend)
    for row, seed in enumerate(SEEDS):
        alone = advance(build(case, seeds=(seed,), backend=backend), ROUNDS)
        mine, one = tree.at(together.state, row), tree.at(alone.state, 0)
        if backend == "loop":
            assert same(mine, one)
        close(mine, one)
        assert together.costs[row] == alone.costs[0]
        assert (together.times_sampled[row] == alone.times_sampled[0]).all()


@few
def test_users_that_do_not_take_part_keep_their_state(case):
    fed = build(case)
    if fed.algo.trains != "sampled" or not tree.leaves(fed.state.users):
        pytest.skip("no user state, or every user trains")
    before = clone(fed.state.users)
    fed.round()
    idle = fed.times_sampled == 0
    assert idle.any()
    pairs = list(zip(tree.leaves(before), tree.leaves(fed.state.users), strict=True))
    assert all(torch.equal(old[torch.from_numpy(idle)], new[torch.from_numpy(idle)]) for old, new in pairs)
    assert any(not torch.equal(old, new) for old, new in pairs)


# ---------------------------------------------------------------- rounds


@few
def test_no_round_leaves_the_initial_model(case):
    fed = build(case)
    scores = evaluate(fed, CLEAN)
    for s in range(len(SEEDS)):
        initial = fed.initial[s]
        for user in range(len(SIZES)):
            models = fed.algo.candidates(tree.at(fed.shown(), s), fed.users_at(s, user))
            assert tuple(models) == scores.models
            for name, candidate in models.items():
                if name not in OWN_START.get(fed.algo.name, ()):
                    assert same(fed.algo.adapted(fed.algo.adapt_init(fed.task, candidate)), initial)


@few
def test_evaluating_more_often_changes_nothing(case):
    often, once = build(case), trained(case)
    for _ in range(ROUNDS):
        often.round()
        evaluate(often, CLEAN)
        often.diagnose()
    assert same(often.state, once.state)
    assert often.costs == once.costs and often.k == once.k
    a, b = evaluate(often, CLEAN), evaluate(once, CLEAN)
    assert (a.correct == b.correct).all() and (a.loss == b.loss).all()


@few
def test_step_calls_do_not_grow_with_users_or_seeds(case):
    few = advance(build(case, sizes=[20, 9, 30], seeds=(0,), active=2), 3)
    # Thrice the same seed: a method may draw its number of steps from the seed.
    many = advance(build(case, sizes=[20, 9, 30] * 5, seeds=(0, 0, 0), active=10), 3)
    assert few.step_calls == many.step_calls <= 30 * few.algo.local_steps_at_most()
    loop = advance(build(case, sizes=[20, 9, 30], seeds=(0,), active=2, backend="loop"), 3)
    assert loop.step_calls == few.step_calls * {"all": 3, "sampled": 2, "together": 1}[few.algo.trains]


@few
def test_a_round_trains(case):
    fed, first = trained(case), build(case)
    pairs = zip(tree.leaves(fed.state), tree.leaves(first.state), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)
    assert all(torch.isfinite(t).all() for t in tree.leaves(fed.state))


def test_equal_schedule_with_rounds_that_train_nobody():
    """tau r < 1: `local` with schedule=equal then has rounds without a step; round(K r tau) in all."""
    for backend in ("vmap", "loop"):
        fed = advance(build(algorithm("local", schedule="equal", tau=1), seeds=(0,), active=2, backend=backend), 7)
        assert fed.costs[0].steps == 7 * len(SIZES) * 2 // len(SIZES)


# ---------------------------------------------------------------- small data (row B08)


@few
@BACKENDS
def test_b08_seven_examples_and_a_batch_of_forty(case, backend):
    name, fields = CASES[case]
    algo = algorithm(name, **{**fields, "tau": 4})
    x, y = cloud(10)
    fed = federation(algo, x, y, [split([range(7)], [range(7, 10)])], backend=backend)
    lane = Lanes(np.array([0]), np.array([0]))
    steps = int(torch.as_tensor(algo.local_steps(fed._info(fed.info(lane, 0)))).max())
    index, weight = fed.batches(Lanes(np.array([0]), np.array([0])), 0, 4)
    sizes = {role: min(draw.size, 7) for role, draw in algo.draws().items()}
    whole = [role for role, draw in algo.draws().items() if draw.part is None]
    assert {role: tuple(index[role].shape) for role in whole} == {role: (1, 4, sizes[role]) for role in whole}
    assert all(bool((weight[role] == 1).all()) for role in whole)
    before = clone(fed.state)
    fed.round()
    assert fed.costs[0].steps == steps and fed.step_calls == steps
    assert fed.costs[0].grads >= steps
    moved = [not torch.equal(a, b) for a, b in zip(tree.leaves(before), tree.leaves(fed.state), strict=True)]
    assert any(moved) and all(torch.isfinite(t).all() for t in tree.leaves(fed.state))


# ---------------------------------------------------------------- counting


@pytest.mark.parametrize(
    "name, fields, grads, hvps",
    [
        ("fedavg", {}, 1, 0),
        ("local", {}, 1, 0),
        ("perfedavg_fo", {}, 2, 0),
        ("perfedavg_hf", {}, 4, 0),
        ("perfedavg", {}, 2, 1),
        ("perfedavg_fo", {"inner_steps": 2}, 3, 0),
        ("perfedavg", {"inner_steps": 2, "hess_batch": "inner"}, 3, 2),
    ],
)
@BACKENDS
def test_costs_are_counted(name, fields, grads, hvps, backend):
    fed = advance(build(algorithm(name, **fields), backend=backend), 2)
    size = tree.numel(fed.initial[0])
    for cost in fed.costs:
        assert cost.steps == 2 * 4 * 3
        assert (cost.grads, cost.hvps) == (grads * cost.steps, hvps * cost.steps)
        assert cost.floats_down == cost.floats_up == (0 if name == "local" else 2 * 4 * size)
        assert cost.user_rounds == 8


def test_costs_of_remark_4_7():
    """The second iterate goes up once more, but for rounds whose t_k is 0: then it is what the server sent."""
    fed = build(algorithm("perfedavg_fo", extra_iterate=True), active=3)
    size, up, seen = tree.numel(fed.initial[0]), np.zeros(2), set()
    for k in range(6):
        lanes = Lanes(np.repeat([0, 1], 3), np.tile([0, 4, 6], 2))
        t_k = fed.info(lanes, k)["t_k"].reshape(2, 3)
        assert (t_k == t_k[:, :1]).all() and 0 <= t_k.min() and t_k.max() < 3
        fed.round()
        up += 3 * size * (1 + (t_k[:, 0].numpy() > 0))
        seen |= set(t_k.flatten().tolist())
    assert [c.floats_up for c in fed.costs] == up.tolist()
    assert seen == {0, 1, 2}


def test_cnn_is_mapped_too():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((30, 1, 8, 8)), rng.integers(3, size=30)
    part = split(ranges([9, 5, 1]), ranges([5, 5, 5], 15))
    fed = {}
    for backend in ("vmap", "loop"):
        model = MODELS["cnn"](name="cnn", channels=[4, 4], groups=2)
        fed[backend] = advance(federation(algorithm("perfedavg", batch=6, tau=2), x, y, [part], model=model, backend=backend), 2)
    close(fed["vmap"].state, fed["loop"].state, rtol=1e-11)


@pytest.mark.slow
@pytest.mark.skipif(not compiler_found(torch.device("cpu")), reason="no C++ compiler")
def test_a_varying_number_of_steps_compiles_once():
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    fed = advance(build(algorithm("l2gd", tau=4), compiled=True), 6)
    assert fed.warning is None and fed.step_calls > 6
    assert counters["stats"]["unique_graphs"] == 1
