"""How fast is a round? The engine against plain loops over users, in one process, taking turns.

    python scripts/bench.py                  all tables; some minutes, most of them compiling
    python scripts/bench.py --eager          measure the engine without torch.compile as well
    python scripts/bench.py --threads 2      only on an otherwise idle machine
    python scripts/bench.py --device cuda
    python scripts/bench.py --quick          a tiny workload, not compiled: does the script work?
    python scripts/bench.py --all            every method: a round of the vmap backend against one of the loop, both eager

Workload: 10 of 50 users, 10 local steps on batches of 40, a 784-80-60-10 network, random uint8 images in the paper's
split (980 or 490 train examples a user), one seed. A round is draw + gather + local steps + aggregate for everyone.

Contenders. All draw users and indices by the same functions and so see the same batches. Before anything is timed, all
must hold the same weights after one round, to 1e-4 and to 0.1 % of the distance that the weights moved.

    engine       Federation, vmap backend: what ``perfed`` runs; compiled unless --no-compile
    eager        the same without torch.compile
    loop         Federation, loop backend: the same algorithm code, one user at a time
    idiomatic    nn.Module and torch.optim.SGD in a Python loop over users, as most public code has it
    fastest      the fastest eager loop: torch.autograd.grad on leaf tensors, torch._foreach_add_, data on the device

Columns. Times are medians over the repeats (least - most); in a repeat each contender in turn runs one round to warm up and
one that counts. Ratios are ratios of medians (least - most of the ratios within a repeat). ``compile`` is the first round
less a later one, from an empty compiler cache. ``evaluate`` scores all users before and after one step, protocol clean.
In all of these everyone draws for one round at a time.
``rounds in a row``: nobody else runs between them, and the engine draws for some rounds at once, as in a run; each time is
the mean of as many rounds as are drawn for at once. ``draws`` is the time of Federation.plans as a share of such a round.
``of SGEMM`` relates the gradients' floating-point operations (counted by hand: forward, weight gradients, input gradients of
all layers but the first) per second of such *whole rounds* to the best square float32 matrix product right before and after
them, for the speed of a shared core changes (median, least - most).
Peak memory is that of a process of its own: of the imports alone, after some
rounds, after an evaluation (VmHWM; getrusage, where there is no /proc).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from perfed import draws
from perfed.algorithms import ALGORITHMS
from perfed.algorithms.base import Task
from perfed.data.datasets import Dataset
from perfed.data.partition import PARTITIONS, Partition, SplitConfig, make
from perfed.data.sampling import generator
from perfed.device import pick_device
from perfed.draws import Lanes, SeedData, make_pool
from perfed.errors import UserError
from perfed.evaluate import Protocol, evaluate
from perfed.federate import Federation
from perfed.models import MODELS, build
from perfed.optimizers import LOCAL, SERVER

ALPHA, BETA = 0.01, 0.1
AT_ONCE = draws.AHEAD_ROUNDS
NAMES = {"fedavg": "FedAvg", "perfedavg_fo": "FO", "perfedavg_hf": "HF", "perfedavg": "exact"}
FIELDS = {"fedmeta": {"tau": 1}, "metasgd": {"tau": 1}}
LINEAR = {"mocha"}
GRADIENTS = {"fedavg": 1, "perfedavg_fo": 2, "perfedavg_hf": 4}


@dataclass(frozen=True)
class Workload:
    """``a``, ``a_test``: of the paper's split; None: iid, 60 train and 10 test images a user."""

    n: int = 50
    active: int = 10
    tau: int = 10
    batch: int = 40
    widths: tuple[int, ...] = (784, 80, 60, 10)
    a: int | None = 196
    a_test: int | None = 34
    device: str = "cpu"

    def many(self, n: int) -> Workload:
        return replace(self, n=n, a=None, a_test=None)

    def flops(self) -> int:
        """Of the gradients of one FedAvg round."""
        layers = [2 * self.batch * a * b for a, b in zip(self.widths, self.widths[1:], strict=False)]
        return self.active * self.tau * (3 * sum(layers) - layers[0])

    def protocol(self) -> Protocol:
        return Protocol("clean", "train", None, self.batch, 1, (0, 1), ALPHA)

    def federation(self, name: str, **engine) -> Federation:
        """A simulation before round 0; ``engine``: backend, chunk, compiled."""
        data, partition = _data(self)
        known = {f.name for f in dataclasses.fields(ALGORITHMS[name])}
        fields = {"beta": BETA, "tau": self.tau, "batch": self.batch, "alpha": ALPHA}
        fields = {key: value for key, value in (fields | FIELDS.get(name, {})).items() if key in known}
        linear = name in LINEAR
        model = MODELS["logistic"](name="logistic") if linear else MODELS["mlp"](name="mlp", hidden=list(self.widths[1:-1]))
        return Federation(
            algo=ALGORITHMS[name](name=name, **fields),
            task=Task(model, LOCAL["sgd"](name="sgd"), SERVER["average"](name="average")),
            pool=make_pool(data.x, data.y, data.offset, data.scale, torch.device(self.device), torch.float32),
            data=[SeedData(partition, np.arange(self.n), 0)],
            initial=[build(model, data.shape, 10, generator(0, "init"))],
            active=self.active,
            classes=10,
            **engine,
        )

    def timed(self, f: Callable[[], object]) -> float:
        """Seconds of one call."""
        wait = torch.cuda.synchronize if self.device.startswith("cuda") else int
        wait()
        start = time.perf_counter()
        f()
        wait()
        return time.perf_counter() - start


@functools.lru_cache(maxsize=1)
def _data(work: Workload) -> tuple[Dataset, Partition]:
    n_train, n_test = (60_000, 10_000) if work.a else (60 * work.n, 10 * work.n)
    side = round(work.widths[0] ** 0.5)
    x = np.random.default_rng(0).integers(0, 256, (n_train + n_test, 1, side, side), dtype=np.uint8)
    offset, scale = np.zeros(1, np.float32), np.full(1, 1 / 255, np.float32)
    data = Dataset("random", x, np.arange(len(x)) % 10, n_train, tuple("0123456789"), None, "", offset, scale, "unit", None)
    kind = PARTITIONS["table2"](a=work.a, a_test=work.a_test) if work.a else PARTITIONS["iid"](per_user=60)
    return data, make(kind, data, n=work.n, seed=0, split=SplitConfig())


# ---------------------------------------------------------------- the loops


class Loop:
    """A Python loop over the active users. Parameters in the order and the layout [in, out] of the engine's."""

    def __init__(self, fed: Federation):
        self.draws, self.k = fed, 0  # it only draws; its own rounds never start
        self.algo, self.pool = fed.algo, fed.pool
        self.start = [value[0].clone() for value in fed.state.server["w"].values()]

    def users(self):
        """For each active user the batches {role: (x, y)} of his steps, gathered when asked for."""
        active, tau = self.draws.cohorts(self.k)[0], self.algo.tau
        index, _ = self.draws.batches(Lanes(np.zeros(len(active), np.int64), active), self.k, tau)
        self.k += 1
        for i in range(len(active)):
            yield ({role: self.gather(part[i, t]) for role, part in index.items()} for t in range(tau))


class Idiomatic(Loop):
    """nn.Module and torch.optim.SGD; perturbed models are deep copies."""

    def __init__(self, fed: Federation):
        super().__init__(fed)
        layers: list[nn.Module] = [nn.Flatten()]
        for weight, bias in zip(self.start[::2], self.start[1::2], strict=True):
            linear = nn.Linear(*weight.shape, device=fed.device)
            with torch.no_grad():
                linear.weight.copy_(weight.t())
                linear.bias.copy_(bias)
            layers += [linear, nn.ELU()]
        self.net = nn.Sequential(*layers[:-1])

    def weights(self) -> list[Tensor]:
        return [p.detach().t() if p.ndim == 2 else p.detach() for p in self.net.parameters()]

    def gather(self, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.pool.x[index].float() / 255, self.pool.y[index]

    def round(self) -> None:
        server = {name: value.clone() for name, value in self.net.state_dict().items()}
        total = {name: torch.zeros_like(value) for name, value in server.items()}
        for steps in self.users():
            self.net.load_state_dict(server)
            optimizer = torch.optim.SGD(self.net.parameters(), lr=BETA)
            for batches in steps:
                for p, direction in zip(self.net.parameters(), self.direction(batches), strict=True):
                    p.grad = direction
                optimizer.step()
            for name, value in self.net.state_dict().items():
                total[name] += value / self.draws.active
        self.net.load_state_dict(total)

    def direction(self, batches: dict[str, tuple[Tensor, Tensor]]) -> list[Tensor]:
        if self.algo.name == "fedavg":
            return self.grad(self.net, batches["outer"])
        u = self.grad(self.moved(-ALPHA, self.grad(self.net, batches["inner"])), batches["outer"])
        if self.algo.name == "perfedavg_fo":
            return u
        if self.algo.name == "perfedavg_hf":
            delta = self.algo.delta / torch.cat([t.flatten() for t in u]).norm()
            up, low = (self.grad(self.moved(sign * delta, u), batches["hess"]) for sign in (1, -1))
            hvp = [(a - b) / (2 * delta) for a, b in zip(up, low, strict=True)]
        else:
            x, y = batches["hess"]
            params = list(self.net.parameters())
            first = torch.autograd.grad(F.cross_entropy(self.net(x), y), params, create_graph=True)
            hvp = torch.autograd.grad(first, params, grad_outputs=u)
        return [a - ALPHA * h for a, h in zip(u, hvp, strict=True)]

    @staticmethod
    def grad(net: nn.Module, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
        net.zero_grad()
        F.cross_entropy(net(batch[0]), batch[1]).backward()
        return [p.grad for p in net.parameters()]

    @torch.no_grad()
    def moved(self, size: float | Tensor, direction: list[Tensor]) -> nn.Module:
        net = copy.deepcopy(self.net)
        for p, d in zip(net.parameters(), direction, strict=True):
            p += size * d
        return net


class Fastest(Loop):
    """One set of leaf tensors, moved in place: no copies, no modules, no optimizer, no padding."""

    def __init__(self, fed: Federation):
        super().__init__(fed)
        self.x = self.pool.x.flatten(1)
        self.w = [value.clone().requires_grad_() for value in self.start]
        self.total = [torch.empty_like(value) for value in self.start]

    def weights(self) -> list[Tensor]:
        return self.start

    def gather(self, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.x.index_select(0, index).float().mul_(1 / 255), self.pool.y.index_select(0, index)

    def round(self) -> None:
        step = getattr(self, self.algo.name)
        torch._foreach_zero_(self.total)
        for steps in self.users():
            with torch.no_grad():
                torch._foreach_copy_(self.w, self.start)
            for batches in steps:
                step(batches)
            with torch.no_grad():
                torch._foreach_add_(self.total, self.w, alpha=1 / self.draws.active)
        self.start, self.total = self.total, self.start

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        h, last = batch[0], len(self.w) - 2
        for i in range(0, len(self.w), 2):
            h = torch.addmm(self.w[i + 1], h, self.w[i])
            h = h if i == last else F.elu_(h)
        return F.cross_entropy(h, batch[1])

    def grad(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.loss(batch), self.w)

    @torch.no_grad()
    def move(self, size: float, direction: tuple[Tensor, ...] | list[Tensor]) -> None:
        torch._foreach_add_(self.w, direction, alpha=size)

    def meta(self, batches: dict) -> tuple[Tensor, ...]:
        """The gradient after the inner step; the weights end where they were."""
        g = self.grad(batches["inner"])
        self.move(-ALPHA, g)
        u = self.grad(batches["outer"])
        self.move(ALPHA, g)
        return u

    def fedavg(self, batches: dict) -> None:
        self.move(-BETA, self.grad(batches["outer"]))

    def perfedavg_fo(self, batches: dict) -> None:
        self.move(-BETA, self.meta(batches))

    def perfedavg_hf(self, batches: dict) -> None:
        u = self.meta(batches)
        norm = torch.stack(torch._foreach_norm(u)).norm()
        small = torch._foreach_mul(u, self.algo.delta / norm)
        self.move(1.0, small)
        up = self.grad(batches["hess"])
        self.move(-2.0, small)
        low = self.grad(batches["hess"])
        self.move(1.0, small)
        self.move(-BETA, u)
        torch._foreach_sub_(up, low)
        torch._foreach_mul_(up, norm / (2 * self.algo.delta))
        self.move(BETA * ALPHA, up)

    def perfedavg(self, batches: dict) -> None:
        u = self.meta(batches)
        first = torch.autograd.grad(self.loss(batches["hess"]), self.w, create_graph=True)
        hvp = torch.autograd.grad(first, self.w, grad_outputs=u)
        self.move(-BETA, u)
        self.move(BETA * ALPHA, hvp)


# ---------------------------------------------------------------- measuring


@dataclass
class Times:
    """Of one method: seconds of its rounds by contender, and what was measured along with them."""

    rounds: dict[str, list[float]]
    steady: list[float]  # of a round of the engine among others that follow one another
    peaks: list[float]  # of SGEMM in those moments, floating-point operations a second
    evaluate: list[float]
    draws: list[float]
    compile: float
    apart: float  # the largest difference of a weight between a contender and the fastest loop after round 0

    def ratio(self, other: str) -> str:
        pairs = [b / a for a, b in zip(self.rounds["engine"], self.rounds[other], strict=True)]
        return f"{self.times_faster(other):.2f} ({min(pairs):.2f} - {max(pairs):.2f})"

    def share(self, flops: int) -> list[float]:
        """Of the SGEMM peak, for a round of so many operations."""
        return [flops / seconds / peak for seconds, peak in zip(self.steady, self.peaks, strict=True)]

    def times_faster(self, other: str) -> float:
        return median(self.rounds[other]) / median(self.rounds["engine"])


@contextlib.contextmanager
def ahead(rounds: int) -> Iterator[None]:
    """So many rounds at most are drawn for at once."""
    before, draws.AHEAD_ROUNDS = draws.AHEAD_ROUNDS, rounds
    try:
        yield
    finally:
        draws.AHEAD_ROUNDS = before


def same_weights(held: dict[str, list[Tensor]], before: list[Tensor]) -> float:
    """Assert that the contenders hold the same weights; the largest difference."""

    def distance(a: list[Tensor], b: list[Tensor]) -> tuple[float, float]:
        off = torch.cat([(s - t).flatten() for s, t in zip(a, b, strict=True)])
        return float(off.abs().max()), float(off.norm())

    wanted, worst = held["fastest"], 0.0
    moved = distance(wanted, before)[1]
    for name, weights in held.items():
        largest, apart = distance(weights, wanted)
        assert largest <= 1e-4 and apart <= 1e-3 * moved, f"{name}: weights are {largest:.2g} off, {apart / moved:.2g} of the way"
        worst = max(worst, largest)
    return worst


def measure(work: Workload, name: str, repeats: int, compiled: bool, eager: bool, squares: list[int]) -> Times:
    """All contenders on one method, one round each in turn."""
    torch._dynamo.reset()  # or every call would search the compiled steps of the methods before
    fed = work.federation(name, compiled=compiled)
    contenders: dict[str, Federation | Loop] = {"engine": fed}
    if compiled and eager:
        contenders["eager"] = work.federation(name)
    contenders["loop"] = work.federation(name, backend="loop")
    contenders["idiomatic"] = Idiomatic(work.federation(name))
    contenders["fastest"] = fastest = Fastest(work.federation(name))
    before = [value.clone() for value in fastest.start]
    first = {label: work.timed(contender.round) for label, contender in contenders.items()}
    held = {x: [v[0] for v in c.state.server["w"].values()] if isinstance(c, Federation) else c.weights() for x, c in contenders.items()}
    times = Times({label: [] for label in contenders}, [], [], [], [], 0.0, same_weights(held, before))
    for contender in contenders.values():
        contender.round()
    evaluate(fed, work.protocol())
    for _ in range(repeats):
        for label, contender in contenders.items():
            contender.round()  # after another contender's rounds the caches are cold; in a run they are not
            times.rounds[label].append(work.timed(contender.round))
        times.evaluate.append(work.timed(lambda: evaluate(fed, work.protocol())))
    with ahead(AT_ONCE):
        peaks = [sgemm(work, squares)]
        for _ in range(repeats):
            fed.round()
            times.steady.append(work.timed(lambda: [fed.round() for _ in range(AT_ONCE)]) / AT_ONCE)
            drawn: dict[int, draws.Plan] = {}
            times.draws.append(work.timed(lambda drawn=drawn: drawn.update(fed.plans(fed.k))) / len(drawn) / times.steady[-1])
            peaks.append(sgemm(work, squares))
        times.peaks = [max(pair) for pair in itertools.pairwise(peaks)]
    times.compile = first["engine"] - median(times.rounds["engine"]) if compiled else 0.0
    return times


def sgemm(work: Workload, sizes: list[int]) -> float:
    """The most floating-point operations a second of a square float32 matrix product."""
    best = 0.0
    for size in sizes:
        a, b, out = (torch.randn(size, size, device=work.device) for _ in range(3))
        multiply = functools.partial(torch.mm, a, b, out=out)
        best = max(best, *(2 * size**3 / work.timed(multiply) for _ in range(4)))
    return best


def scale(work: Workload, sizes: list[int], repeats: int, compiled: bool) -> dict[int, list[float]]:
    """Seconds of FedAvg rounds by number of users, in turn."""
    torch._dynamo.reset()
    feds = {n: work.many(n).federation("fedavg", compiled=compiled) for n in sizes}
    times: dict[int, list[float]] = {n: [] for n in sizes}
    for repeat in range(-2, repeats):
        for n, fed in feds.items():
            spent = work.timed(fed.round)
            if repeat >= 0:
                times[n].append(spent)
    return times


def peak() -> float:
    """MiB that this process has held at most. getrusage would count what its parent held when it started it."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def worker(work: Workload, compiled: bool) -> None:
    """Print the peak after each stage as JSON."""
    out = {"imports": peak()}
    fed = work.federation("fedavg", compiled=compiled)
    for _ in range(3):
        fed.round()
    out["rounds"] = peak()
    evaluate(fed, work.protocol())
    out["evaluation"] = peak()
    if work.device.startswith("cuda"):
        out["GPU"] = torch.cuda.max_memory_allocated() / 2**20
    print(json.dumps(out))


def memory(arguments: list[str], n: int) -> dict[str, float]:
    """Peaks in MiB of a process that runs :func:`worker`."""
    done = subprocess.run([sys.executable, __file__, *arguments, "--worker", str(n)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the process for n={n} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


# ---------------------------------------------------------------- tables


def grid(title: str, head: list[str], rows: list[list[str]]) -> None:
    """Print a Markdown table."""
    print("", title, "", *(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)), sep="\n", flush=True)


def ms(values: list[float]) -> str:
    return f"{1e3 * median(values):.1f} ({1e3 * min(values):.1f} - {1e3 * max(values):.1f})"


def percent(values: list[float]) -> str:
    return f"{median(values):.1%} ({min(values):.1%} - {max(values):.1%})"


def machine(work: Workload) -> str:
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        cpu = next((x.partition(":")[2].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), cpu)
    gpu = [torch.cuda.get_device_name(work.device)] if work.device.startswith("cuda") else []
    return ", ".join([*gpu, cpu, f"{os.cpu_count()} cores, threads: {torch.get_num_threads()}, torch {torch.__version__}"])


def goals(found: dict[str, Times], share: float, peak_mib: float) -> list[list[str]]:
    """Rows of the table of what must be reached on a CPU."""
    hf, exact = (median(found[name].rounds["engine"]) for name in ("perfedavg_hf", "perfedavg"))
    rows = []

    def goal(what: str, value: float, bound: float, least: bool = False) -> None:
        passed = value >= bound if least else value <= bound
        rows.append([what, f"{value:.2f}", f"at {'least' if least else 'most'} {bound:g}", "pass" if passed else "miss"])

    for name, bound in {"fedavg": 1.8, "perfedavg_fo": 1.8, "perfedavg_hf": 1.7}.items():
        bound = 2.5 if torch.get_num_threads() == 2 else bound
        goal(f"{NAMES[name]}: times faster than the fastest loop", found[name].times_faster("fastest"), bound, True)
    goal("exact: a round, in HF rounds", exact / hf, 1.0)
    if torch.get_num_threads() == 1:
        goal("FedAvg: share of the SGEMM peak", share, 0.4, True)
        goal("FedAvg: share of a round that draws", median(found["fedavg"].draws), 0.05)
    goal("scoring all users before and after one step, in HF rounds", median(found["perfedavg_hf"].evaluate) / hf, 2.0)
    goal("10,000 users: peak memory, GB", peak_mib * 2**20 / 1e9, 1.5)
    return rows


def report(work: Workload, options: argparse.Namespace, arguments: list[str], compiled: bool) -> None:
    """Measure everything, print the tables."""
    print(machine(work))
    print(
        f"{work.active} of {work.n} users, {work.tau} steps on batches of {work.batch}, network {'-'.join(map(str, work.widths))}, "
        f"{options.repeats} repeats; the engine is {'compiled' if compiled else 'not compiled'}"
    )
    squares = [128, 256] if options.quick else [256, 512, 1024, 2048] if work.device == "cpu" else [2048, 4096, 8192]
    found = {name: measure(work, name, options.repeats, compiled, options.eager, squares) for name in NAMES}
    labels = list(found["fedavg"].rounds)
    rows = [[NAMES[n], *(ms(t.rounds[label]) for label in labels), f"{t.apart:.0e}"] for n, t in found.items()]
    grid("A round, ms", ["", *labels, "weights apart"], rows)
    grid("In rounds of the engine", ["", *labels[1:]], [[NAMES[n], *(t.ratio(label) for label in labels[1:])] for n, t in found.items()])
    share = {n: t.share(GRADIENTS[n] * work.flops()) for n, t in found.items() if n in GRADIENTS}
    rows = [
        [NAMES[n], f"{t.compile:.1f}", ms(t.steady), ms(t.evaluate), f"{median(t.draws):.1%}", percent(share[n]) if n in share else "-"]
        for n, t in found.items()
    ]
    speeds = [peak for t in found.values() for peak in t.peaks]
    head = ["", "compile, s", "rounds in a row, ms", "evaluate, ms", "draws", "of SGEMM"]
    grid(f"The engine (SGEMM: {min(speeds) / 1e9:.0f} - {max(speeds) / 1e9:.0f} GFLOP/s)", head, rows)

    sizes = [20] if options.quick else [50, 1000, 10_000]
    rounds, peaks = scale(work, sizes, options.repeats, compiled), {n: memory(arguments, n) for n in sizes}
    stages = list(peaks[sizes[0]])
    first = median(rounds[sizes[0]])
    rows = [[f"{n:,}", ms(rounds[n]), f"{median(rounds[n]) / first:.2f}", *(f"{peaks[n][x]:,.0f}" for x in stages)] for n in sizes]
    title = f"FedAvg, iid, 60 images a user, {work.active} active; peak memory in MiB"
    grid(title, ["users", "round, ms", "in rounds of the first", *(f"peak: {x}" for x in stages)], rows)
    if work.device == "cpu" and not options.quick:  # what must be reached is said of the whole workload
        grid("Must reach", ["", "measured", "needed", ""], goals(found, median(share["fedavg"]), peaks[sizes[-1]]["evaluation"]))


def all_methods(work: Workload, repeats: int) -> None:
    """Every method: vmap against loop, and the Python-level step calls of a round, which must not grow with the users."""
    rows = []
    for name in sorted(ALGORITHMS):
        feds = {backend: work.federation(name, backend=backend) for backend in ("vmap", "loop")}
        times: dict[str, list[float]] = {backend: [] for backend in feds}
        for repeat in range(repeats + 1):
            for backend, fed in feds.items():
                seconds = work.timed(fed.round)
                if repeat:
                    times[backend].append(seconds)
        rounds = repeats + 1
        more = work.federation(name, backend="vmap")
        more.active = min(work.n, 2 * work.active)
        for _ in range(rounds):
            more.round()
        calls = [f"{fed.step_calls / rounds:g}" for fed in (feds["vmap"], more, feds["loop"])]
        ratio = median(times["loop"]) / median(times["vmap"])
        rows.append([name, ms(times["vmap"]), ms(times["loop"]), f"{ratio:.2f}", *calls])
    head = ["", "vmap, ms", "loop, ms", "loop / vmap", "step calls", "with twice the active users", "of the loop"]
    grid("A round of every method, eager", head, rows)


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:i")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (1)")
    parser.add_argument("--repeats", type=int, help="timed rounds of each contender (7; with --quick 2)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="compile the engine's step (yes; with --quick no)")
    parser.add_argument("--eager", action="store_true", help="measure the engine without torch.compile as well")
    parser.add_argument("--quick", action="store_true", help="a tiny workload")
    parser.add_argument("--all", action="store_true", help="every method, vmap against loop")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.repeats is None:
        options.repeats = 2 if options.quick else 7
    for key in ("repeats", "threads"):
        if getattr(options, key) < 1:
            parser.error(f"--{key} {getattr(options, key)}: a whole number >= 1")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", options.device):
        parser.error(f"--device {options.device}: cpu, cuda or cuda:i")
    try:
        pick_device(options.device)
    except UserError as error:
        parser.error(str(error))
    compiled = not options.quick if options.compile is None else options.compile
    work = Workload(device=options.device)
    if options.quick:
        work = replace(work, n=20, active=4, tau=2, batch=8, widths=(64, 12, 11, 10), a=20, a_test=4)
    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        if options.worker:
            worker(work.many(options.worker), compiled)
            return
        if options.all:
            print(machine(work))
            all_methods(work, options.repeats)
            return
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ahead(1):
            if compiled:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
            report(work, options, arguments, compiled)
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
