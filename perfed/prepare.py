"""What happens before round 1: a configuration is checked against its data and the machine, and planned.

    prepare      load the data, split them, build the model, choose the device; refuses what does not fit, writes nothing
    smoothness   largest Hessian eigenvalue of a user's loss at the initial model
    federation   the simulation before round 0
    plan         what a run would do, described
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from perfed import tables, tree
from perfed.algorithms.base import Facts, Population, Task
from perfed.config import GROUPS, Config
from perfed.data.datasets import load
from perfed.data.partition import Partition, SplitConfig, SplitTest, make
from perfed.data.sampling import cohort_size, generator
from perfed.device import EAGER_FLOPS, Decision, available_memory, decide, pick_device
from perfed.draws import Pool, SeedData, make_pool
from perfed.errors import UserError, require
from perfed.evaluate import Protocol, check
from perfed.federate import Federation
from perfed.identity import identity
from perfed.models import build
from perfed.summary import Prepared, partition_counts
from perfed.types import Params


def prepare(config: Config, copies: int = 1) -> Prepared:
    """Check a configuration against its data and the machine; raises UserError, writes nothing but data caches.

    copies: trials that are trained side by side (``perfed.lanes``), of which this is the first: they count in memory and time.
    """
    device, notes = pick_device(config.device)
    dataset = load(config.dataset, config.data_path)
    classes = len(dataset.classes)
    split = SplitConfig(val=config.split.val, test=SplitTest[config.split.test], test_share=config.split.test_share)
    partitions, initial = [], []
    for seed in config.seed_values:
        of_split = seed if config.partition_seed is None else config.partition_seed
        of_init = seed if config.init_seed is None else config.init_seed
        partitions.append(make(config.partition, dataset, n=config.n, seed=of_split, split=split, holdout_users=config.holdout_users))
        initial.append(build(config.model, dataset.shape, classes, generator(of_init, "init")))
    _named("algo", lambda: config.algo.check(config.engine.dtype))
    _own_steps(config)
    _disjoint(config, partitions)
    held = all(p.val.sizes[p.seen].any() for p in partitions)
    require(held or config.split.val == 0, "split.val", config.split.val, "0, or a share that gives at least one user a validation example")
    _adapted(config.adapt.layers, config.model, initial[0])
    protocol = resolve(config, config.algo)
    check(protocol, [p.test for p in partitions])
    prepared = Prepared(config, identity(config, dataset.fingerprint), dataset, partitions, initial, protocol, _NOT_YET, copies=copies)
    prepared = replace(prepared, state_numbers=state_numbers(prepared))
    prepared = replace(prepared, decision=_decide(prepared, device, notes))
    _fits(prepared)
    remarks = (*_own_knobs(config), *_short(prepared), *_unscored(prepared), *config.algo.notes(_facts(prepared)))
    return replace(prepared, decision=replace(prepared.decision, notes=(*prepared.decision.notes, *remarks)), remarks=remarks)


def _named(group: str, f) -> None:
    """Run a check of an option; its complaint gets the group's prefix."""
    try:
        f()
    except UserError as error:
        key = error.key if error.key in GROUPS else f"{group}.{error.key.removeprefix(group + '.')}"
        raise UserError(key, error.value, error.allowed) from None


def _own_steps(config: Config) -> None:
    """Refuse optimizers that a method's own update rule has no place for."""
    name, server, local = config.algo.name, config.server, config.optimizer
    if config.algo.own_server_step or config.algo.no_server:
        why = f"algo={name} has {'no server' if config.algo.no_server else 'a server step of its own'}"
        require(server.name == "average", "server", server.name, f"average: {why}")
        require(server.lr == 1, "server.lr", server.lr, f"1: {why}")
    if config.algo.plain_sgd:
        why = f"algo={name} is defined for plain SGD"
        require(local.name == "sgd", "optimizer", local.name, f"sgd: {why}")
        for key in ("momentum", "weight_decay"):
            require(getattr(local, key) is None, f"optimizer.{key}", getattr(local, key), f"null: {why}")


def _own_knobs(config: Config) -> list[str]:
    """Knobs of the root that the method has a value of its own for."""
    lines = []
    for key in ("beta", "alpha", "tau", "batch"):
        mine, knob = getattr(config.algo, key, None), getattr(config, key)
        if mine is not None and mine != knob:
            lines.append(f"algo={config.algo.name} takes algo.{key}={mine:g}; the knob {key}={knob:g} does not count")
    return lines


def _short(prepared: Prepared) -> list[str]:
    """Says of how many users a step reads all data, since the batch is larger."""
    sizes = np.concatenate([p.train.sizes[p.seen] for p in prepared.partitions])
    most = _largest_batch(prepared)
    fewer = int((sizes < most).sum())
    if prepared.config.algo.trains == "together" or not fewer:
        return []
    return [f"{fewer} of {len(sizes)} users over all seeds have fewer train examples than a batch of {most}: their steps read all of them"]


def _unscored(prepared: Prepared) -> list[str]:
    """Says how many test images no user gets, since no user trains on their classes."""
    config, data = prepared.config, prepared.dataset
    if config.split.test != "matched" or config.partition.name in ("table2", "natural", "file"):
        return []
    part, C = prepared.partitions[0], len(data.classes)
    have = np.bincount(data.y[data.n_train :], minlength=C)
    owned = sum(part.counts(data.y, C, kind).sum(axis=0) for kind in ("train", "val"))
    lost = np.flatnonzero((have > 0) & (owned == 0))
    if not lost.size:
        return []
    names = ", ".join(data.classes[c] for c in lost[:5]) + (", ..." if lost.size > 5 else "")
    return [f"warning: {have[lost].sum()} of {have.sum()} test examples are not scored: nobody trains on their classes ({names})"]


def _disjoint(config: Config, partitions: list[Partition]) -> None:
    """Disjoint batches need users with enough examples for all of them."""
    need = max((d.start + d.size for d in config.algo.draws(1).values() if d.start > 0), default=0)
    small = sorted({int(u) for p in partitions for u in np.nonzero(p.seen & (p.train.sizes < need))[0]})
    if small:
        least = min(int(p.train.sizes[p.seen].min()) for p in partitions)
        raise UserError("algo.batches", "disjoint", f"needs {need} train examples a user; users {small[:10]} have fewer (least {least})")


def resolve(config: Config, algo: Any) -> Protocol:
    """The protocol with every null filled in. Its label names each departure from the protocol's own values."""
    rules, adapt = config.protocol, config.adapt
    changes = [f"{key}={value}" for key in ("source", "batch", "repeats") if (value := getattr(adapt, key)) is not None]
    if adapt.layers != "all":
        changes.append(f"layers={adapt.layers if isinstance(adapt.layers, str) else '+'.join(adapt.layers)}")
    if rules.support is not None:
        changes.insert(0, f"support={rules.support}")
    lr = adapt.lr
    if lr is None and not algo.learned_step:
        lr = algo.inner_step if algo.inner_step is not None else config.alpha
    return Protocol(
        label=rules.name + (f"[{', '.join(changes)}]" if changes else ""),
        source=config.adapt_source,
        support=rules.support,
        batch=config.adapt_batch,
        repeats=config.adapt_repeats,
        steps=tuple(sorted({0, *config.adapt_steps})),
        lr=None if lr is None else float(lr),
    )


def _adapted(layers: str | list[str], model: Any, params: Params) -> frozenset[str] | None:
    """Names of the parameters that adaptation changes; None: all."""
    if layers == "all":
        return None
    if layers == "last":
        return frozenset(model.last_layer(params))
    wanted = [layers] if isinstance(layers, str) else list(layers)
    names = {name for name in params if any(name == w or name.startswith(w + ".") for w in wanted)}
    known = sorted({name.rpartition(".")[0] or name for name in params})
    missing = [w for w in wanted if not any(n == w or n.startswith(w + ".") for n in params)]
    require(not missing, "adapt.layers", layers, f"all, last, or layers among {', '.join(known)}")
    return frozenset(names)


_NOT_YET = Decision(torch.device("cpu"), "loop", None, False, ())


def _active(config: Config, partitions: list[Partition]) -> int:
    return cohort_size(int(partitions[0].seen.sum()), config.r)


def _rows(prepared: Prepared) -> int:
    """Rows of the leading axis: seeds, of each trial."""
    return prepared.config.seeds * prepared.copies


def _lanes(prepared: Prepared) -> int:
    """Seeds times the users that train in a round."""
    config, who = prepared.config, prepared.config.algo.trains
    members = int(prepared.partitions[0].seen.sum())
    return _rows(prepared) * {"sampled": _active(config, prepared.partitions), "all": members}.get(who, 1)


def _examples(prepared: Prepared) -> int:
    """Examples that a lane reads in one step, over all roles."""
    return sum(d.size for d in prepared.config.algo.draws(_active(prepared.config, prepared.partitions)).values())


def _flops(prepared: Prepared) -> float:
    """A rough count for the training: 6 d B for each gradient evaluation."""
    config = prepared.config
    steps = config.algo.local_steps_at_most()
    examples = _largest_batch(prepared) * _lanes(prepared) * steps * config.rounds
    return 6.0 * tree.numel(prepared.initial[0]) * examples * _gradients(prepared)


def _largest_batch(prepared: Prepared) -> int:
    return max(d.size for d in prepared.config.algo.draws(_active(prepared.config, prepared.partitions)).values())


def _gradients(prepared: Prepared) -> int:
    """Of a local step, about."""
    draws = prepared.config.algo.draws(_active(prepared.config, prepared.partitions))
    return len(draws) if len(draws) < 3 else len(draws) + 1  # a third batch feeds two gradients, or a Hessian product


def _number_bytes(config: Config) -> int:
    return 8 if config.engine.dtype == "float64" else 4


def _lane_bytes(prepared: Prepared) -> int:
    inputs = int(np.prod(prepared.dataset.shape)) * _examples(prepared)
    if prepared.config.algo.full_data:
        inputs += int(np.prod(prepared.dataset.shape)) * max(int(p.train.sizes.max()) for p in prepared.partitions)
    return _number_bytes(prepared.config) * (8 * tree.numel(prepared.initial[0]) + 3 * inputs)


def _decide(prepared: Prepared, device: torch.device, notes: list[str]) -> Decision:
    config = prepared.config
    made = decide(
        config.engine,
        device,
        vmap_pays_on_cpu=config.model.vmap_pays_on_cpu,
        model=config.model.name,
        flops=_flops(prepared),
        lane_bytes=_lane_bytes(prepared),
        user_bytes=_number_bytes(config) * _rows(prepared) * prepared.state_numbers[1],
    )
    return replace(made, notes=(*notes, *made.notes))


def _task(prepared: Prepared) -> Task:
    config = prepared.config
    return Task(config.model, config.optimizer, config.server, _adapted(config.adapt.layers, config.model, prepared.initial[0]))


def _population(prepared: Prepared, row: int = 0) -> Population:
    """The users of the seed in a row."""
    config, part = prepared.config, prepared.partitions[row]
    counts = torch.from_numpy(part.counts(prepared.dataset.y, len(prepared.dataset.classes)))
    sampling = prepared.seeds[row] if config.sampling_seed is None else config.sampling_seed
    sizes, seen = torch.from_numpy(part.train.sizes), torch.from_numpy(part.seen)
    largest = max(int(p.train.sizes.max()) for p in prepared.partitions)
    return Population(part.n, _active(config, prepared.partitions), sizes, counts, seen, sampling, largest)


def state_numbers(prepared: Prepared) -> tuple[int, int]:
    """Numbers that one seed keeps from round to round: (the server's, all users'). Raises UserError where a method refuses its users."""
    config = prepared.config
    population = _population(prepared)
    square = 3 * 8 * config.algo.square_state * population.n**2
    free = available_memory(torch.device("cpu"))
    if free is not None and square > free:
        _too_large(config, "the host", square, free)
    state: list[Any] = []
    _named("algo", lambda: state.append(prepared.config.algo.init(_task(prepared), prepared.initial[0], population)))
    return tree.numel(state[0].server), tree.numel(state[0].users)


def needed_bytes(prepared: Prepared) -> tuple[int, int]:
    """A rough peak of memory beside torch itself: (with the computing device, where users' state lies)."""
    config, size = prepared.config, _number_bytes(prepared.config)
    server, users = (_rows(prepared) * size * numbers for numbers in prepared.state_numbers)
    lanes = _lanes(prepared)
    together = min(lanes, prepared.decision.chunk or lanes)
    rows = 4 * size * lanes * users // max(1, _rows(prepared) * config.n * size)  # read, written, undone, checked
    sent = 2 * size * lanes * tree.numel(prepared.initial[0])
    return prepared.dataset.x.nbytes + 3 * server + sent + rows + together * _lane_bytes(prepared), users


def _fits(prepared: Prepared) -> None:
    """Refuse a run that cannot fit, before anything is allocated."""
    here, parked = needed_bytes(prepared)
    device, host = prepared.decision.device, prepared.decision.state_device
    wanted = {device: here + (parked if host == device else 0), **({host: parked} if host != device else {})}
    for place, count in wanted.items():
        free = available_memory(place)
        if free is not None and count > free:
            _too_large(prepared.config, str(place), count, free)


def _too_large(config: Config, place: str, count: float, free: float) -> NoReturn:
    raise UserError(
        "n",
        config.n,
        f"too many for the memory of {place}: this run needs about {count / 2**30:,.1f} GiB and {free / 2**30:,.1f} GiB are free; "
        "fewer users or seeds, a smaller engine.chunk or model, or engine.state_device=cpu",
    )


def _facts(prepared: Prepared) -> Facts:
    config = prepared.config
    members = int(prepared.partitions[0].seen.sum())
    curvature = _curvature(prepared) if config.algo.wants_smoothness else None
    return Facts(members, _active(config, prepared.partitions), config.rounds, curvature, _kinks(prepared))


_curvatures: dict[tuple, float] = {}
"""Known ones: a command prepares each run to plan it and to train it, and the jobs of a sweep mostly start alike."""


def _curvature(prepared: Prepared) -> float:
    """:func:`smoothness` at w_0, good enough for a warning: the exact figure would take a minute where the model convolves."""
    config, data = prepared.config, prepared.dataset
    init = config.seed_values[0] if config.init_seed is None else config.init_seed
    start = (data.fingerprint, data.norm, prepared.partitions[0].digest(), repr(config.model), init)
    if start not in _curvatures:
        _curvatures[start] = smoothness(prepared, examples=64, within=0.01, dtype=torch.float32)
    return _curvatures[start]


class _Bent(TorchFunctionMode):
    """Notes the functions whose slope jumps."""

    names = frozenset({"relu", "relu6", "leaky_relu", "prelu", "rrelu", "hardtanh", "hardswish", "hardsigmoid", "threshold"})

    def __init__(self):
        super().__init__()
        self.found: set[str] = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "").rstrip("_")
        if name in self.names:
            self.found.add(name)
        return function(*args, **(kwargs or {}))


def _kinks(prepared: Prepared) -> tuple[str, ...]:
    """Names of the functions with kinks that the model calls."""
    return tuple(sorted(_watched(prepared, _Bent()).found))


def smoothness(
    prepared: Prepared, params: Params | None = None, examples: int = 256, within: float = 0.0, dtype: torch.dtype = torch.float64
) -> float:
    """Largest Hessian eigenvalue (in size) of the first user's loss on some of his examples: a lower bound of L.

    By power iteration, 30 steps or until one changes it by no more than the share ``within``. ``params``: where; default w_0 of the
    first seed.
    """
    params = tree.map(lambda t: t.to("cpu", dtype), prepared.initial[0] if params is None else params)
    data, part = prepared.dataset, prepared.partitions[0]
    index = torch.from_numpy(part.train.of(int(np.nonzero(part.seen)[0][0]))[:examples])
    pool = make_pool(data.x, data.y, data.offset, data.scale, torch.device("cpu"), dtype)
    batch, task = pool.batch(index, torch.ones(len(index), dtype=dtype)), _task(prepared)
    rng = generator(0, "power")  # a direction without structure: the same number for all logits changes no softmax
    v = tree.map(lambda t: torch.from_numpy(rng.standard_normal(tuple(t.shape))).to(dtype), params)
    size = 0.0
    for _ in range(30):
        v = tree.scale(1 / tree.norm(v).clamp(min=torch.finfo(dtype).tiny), v)
        v, before = task.hvp(params, batch, v), size
        size = float(tree.norm(v))
        if abs(size - before) < within * size:
            break
    return size


def federation(prepared: Prepared, varying: dict[str, list[float]] | None = None) -> Federation:
    """The simulation before round 0. ``varying``: float hyper-parameters in which the copies differ, one number for each copy."""
    config, data = prepared.config, prepared.dataset
    dtype = torch.float64 if config.engine.dtype == "float64" else torch.float32
    pool: Pool = make_pool(data.x, data.y, data.offset, data.scale, prepared.decision.device, dtype)
    task = _task(prepared)
    seeds = []
    for seed, partition in zip(prepared.seeds, prepared.partitions, strict=True):
        sampling = seed if config.sampling_seed is None else config.sampling_seed
        seeds.append(SeedData(partition, np.nonzero(partition.seen)[0], sampling))
    return Federation(
        algo=config.algo,
        task=task,
        pool=pool,
        data=seeds * prepared.copies,
        initial=prepared.initial * prepared.copies,
        active=cohort_size(len(seeds[0].members), config.r),
        classes=len(data.classes),
        backend=prepared.decision.backend,
        chunk=prepared.decision.chunk,
        compiled=prepared.decision.compiled,
        state_device=prepared.decision.state_device,
        varying={key: [value for value in values for _ in seeds] for key, values in (varying or {}).items()},
    )


def only(prepared: Prepared, seeds: Sequence[int]) -> Prepared:
    """The same for some of the seeds of a run."""
    rows = [prepared.seeds.index(seed) for seed in seeds]
    partitions, initial = ([part[row] for row in rows] for part in (prepared.partitions, prepared.initial))
    return replace(prepared, chosen=tuple(seeds), partitions=partitions, initial=initial)


class Size(NamedTuple):
    """What a run needs, roughly: seconds of training on one CPU core (None on a GPU), bytes beside torch itself; its users' steps."""

    seconds: float | None
    bytes: int
    steps: int


def size(prepared: Prepared) -> Size:
    """Counted, not measured: operations at the rate of the eager step, and what each call of it costs by itself.

    The processor time of eleven runs (five models, seven methods, 6 to 60 lanes) was 0.46 to 2.2 times the estimate.
    """
    config, lanes = prepared.config, _lanes(prepared)
    steps = config.algo.local_steps_at_most() * config.rounds
    gradients = _gradients(prepared) * max(1, int(getattr(config.algo, "inner_steps", 1)))
    operations = 3 * _forward_flops(prepared) * _largest_batch(prepared) * lanes * steps * gradients
    calls = steps * (lanes if prepared.decision.backend == "loop" else math.ceil(lanes / (prepared.decision.chunk or lanes)))
    seconds = operations / EAGER_FLOPS + calls * gradients * CALL_SECONDS
    return Size(seconds if prepared.decision.device.type == "cpu" else None, sum(needed_bytes(prepared)), lanes * steps)


CALL_SECONDS = 1e-3
"""What a gradient costs in one call of the step, beside its operations (measured on small models)."""


def _forward_flops(prepared: Prepared) -> int:
    """Operations of the matrix products and convolutions of the model on one example (torch's own counter loads the compiler: seconds)."""
    return _watched(prepared, _Products()).operations


def _watched(prepared: Prepared, mode: Any) -> Any:
    """``mode``, under which the model has been applied to one example."""
    params = prepared.initial[0]
    with mode, torch.no_grad():
        prepared.config.model.apply(params, torch.zeros((1, *prepared.dataset.shape), dtype=next(iter(params.values())).dtype))
    return mode


class _Products(TorchFunctionMode):
    """Counts 2 operations for each product of two numbers."""

    operations = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name, sizes = getattr(function, "__name__", ""), [a.shape for a in args if torch.is_tensor(a)]
        if name.startswith("conv") and len(sizes) > 1:
            self.operations += 2 * out.numel() * math.prod(sizes[1][1:])  # the weight is [out, in, ...]
        elif name in ("mm", "matmul", "bmm", "__matmul__", "linear", "addmm", "baddbmm") and len(sizes) > 1:
            first = 1 if name in ("addmm", "baddbmm") else 0
            self.operations += 2 * out.numel() * sizes[first][-1]
        return out


def total(sizes: Sequence[Size], together: int) -> str:
    """Of the runs of a sweep, ``together`` of them at once: ``6,000 local steps of users, roughly 30 s of one CPU core; ...``."""
    largest = sorted((s.bytes for s in sizes), reverse=True)[:together]
    each = f" for {len(largest)} at once" if len(largest) > 1 else ""
    seconds = [s.seconds for s in sizes if s.seconds is not None]
    work = f"{sum(s.steps for s in sizes):,} local steps of users"
    if len(seconds) == len(sizes):
        work += f", roughly {_span(sum(seconds))} of one CPU core"
    return f"{work}; about {max(1.0, sum(largest) / 2**20):,.0f} MiB{each} beside torch itself"


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def plan(config: Config) -> str:
    """What a run would do: its folder, sizes, the rough time, and the group-by-class count table of its first seed."""
    prepared = prepare(config)
    params = prepared.initial[0]
    active = _active(config, prepared.partitions)
    lanes = _lanes(prepared)
    here, parked = needed_bytes(prepared)
    memory = f"about {(here + parked) / 2**20:,.0f} MiB beside torch itself"
    if prepared.decision.state_device != prepared.decision.device:
        memory = f"about {here / 2**20:,.0f} MiB there and {parked / 2**20:,.0f} MiB of users' state on the host"
    seconds = size(prepared).seconds
    counted = partition_counts(prepared)
    rows, classes, counts = (counted[key] for key in ("rows", "classes", "counts"))
    what, cut = "train examples a user", [f"first {len(rows)} of {counted['of']} rows"] if counted["of"] > len(rows) else []
    table = tables.grid(
        [what, *classes, "all"],
        [[name, *(f"{v:g}" for v in row), f"{sum(row):g}"] for name, row in zip(rows, counts, strict=True)],
        notes=cut,
    )
    picture, drawn = config.outputs_path / "plans" / f"{prepared.identity.name}.png", "no picture"
    if config.pictures and _draw_plan(picture, counts, rows, classes, "; ".join([what, *cut])):
        drawn = f"picture: {picture}"
    return (
        f"{prepared.identity.name}\n"
        f"  {config.n} users, {active} active a round, {config.seeds} seeds: {lanes} lanes; "
        f"{config.rounds} rounds of {config.algo.tau} steps; {tree.numel(params):,} parameters\n"
        f"  device {prepared.decision.device}, backend {prepared.decision.backend}"
        f"{', compiled' if prepared.decision.compiled else ''}; {memory}"
        f"{'' if seconds is None else f', roughly {_span(seconds)} of training on one CPU core'}\n"
        + "".join(f"  {line}\n" for line in prepared.remarks)
        + f"  {prepared.protocol.text()}\n\n{tables.plain(table)}  {drawn}\n"
    )


def _draw_plan(path: Path, counts: list[list[float]], names: list[str], classes: list[str], title: str) -> bool:
    from perfed import figures

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figures.heat_map(counts, names, classes, path, title)
    except (OSError, ValueError) as error:
        print(f"perfed: no picture: {error}", file=sys.stderr)
        return False
    return True
