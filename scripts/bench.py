"""How fast is a round? The engine against plain loops over users, in one process, taking turns.

    python scripts/bench.py                         all tables; takes some minutes, most of them compiling
    python scripts/bench.py --eager                 the engine also without torch.compile
    python scripts/bench.py --threads 2             on an otherwise idle machine only
    python scripts/bench.py --device cuda
    python scripts/bench.py --quick                 a tiny workload, not compiled: does the script work?

Workload: 10 of 50 users, 10 local steps on batches of 40, a 784-80-60-10 network, random uint8 images in the paper's
split (980 or 490 train examples a user), one seed. A round is draw + gather + local steps + aggregate for everyone.

Contenders. All draw users and indices by the same functions, so all see the same batches; before anything is timed, all
must have reached the same weights after one round (1e-4, and 0.1 % of the distance that the weights moved).

    engine       Federation, vmap backend: what `perfed` runs. Compiled unless --no-compile
    eager        the same without torch.compile
    loop         Federation, loop backend: the same algorithm code, one user at a time
    idiomatic    nn.Module and torch.optim.SGD, a Python loop over users, as most public code has it
    fastest      the fastest eager loop: torch.autograd.grad on leaf tensors, torch._foreach_add_ in place, data on the device

Columns. Times are medians over the repeats (least - most). In every repeat each contender runs one round in turn; ratios
are ratios of medians (least - most of the ratios within a repeat). `compile` is the first round less a later one, from an
empty compiler cache. `evaluate` scores all users before and after one step, protocol clean. `draws` is the share of the
engine's round spent in Federation.batches. `of SGEMM` relates the floating-point operations of the gradients (counted by
hand: forward, weight gradients, input gradients but the first layer's) per second of a *whole round* to the best square
float32 matrix product of this process. Peak memory (VmHWM, getrusage elsewhere) is that of a process of its own.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from perfed.algorithms import ALGORITHMS
from perfed.algorithms.base import Task
from perfed.data.datasets import Dataset
from perfed.data.partition import PARTITIONS, SplitConfig, make
from perfed.data.sampling import cohort_size, generator
from perfed.evaluate import Protocol, evaluate
from perfed.federate import Federation, Lanes, SeedData, make_pool
from perfed.models import MODELS, build
from perfed.optimizers import LOCAL, SERVER

ALPHA, BETA = 0.01, 0.1
NAMES = {"fedavg": "FedAvg", "perfedavg_fo": "FO", "perfedavg_hf": "HF", "perfedavg": "exact"}
GRADIENTS = {"fedavg": 1, "perfedavg_fo": 2, "perfedavg_hf": 4}
MIB = 2**20


@dataclass(frozen=True)
class Workload:
    """``a``, ``a_test``: of the paper's split; None: iid, 60 train and 10 test images a user."""

    n: int = 50
    active: int = 10
    tau: int = 10
    batch: int = 40
    hidden: tuple[int, ...] = (80, 60)
    a: int | None = 196
    a_test: int | None = 34
    side: int = 28


@dataclass(frozen=True)
class Setting:
    """What is the same for all contenders."""

    work: Workload
    device: torch.device

    def federation(self, name: str, **engine) -> Federation:
        """A simulation before round 0; ``engine``: backend, chunk, compiled."""
        work, rng = self.work, np.random.default_rng(0)
        n_train, n_test = (60_000, 10_000) if work.a else (60 * work.n, 10 * work.n)
        shape = (1, work.side, work.side)
        x = rng.integers(0, 256, (n_train + n_test, *shape), dtype=np.uint8)
        offset, scale = np.zeros(1, np.float32), np.full(1, 1 / 255, np.float32)
        classes = tuple("0123456789")
        data = Dataset("random", x, np.arange(len(x)) % 10, n_train, classes, None, "", offset, scale, "unit", None)
        kind = PARTITIONS["table2"](a=work.a, a_test=work.a_test) if work.a else PARTITIONS["iid"](per_user=60)
        partition = make(kind, data, n=work.n, seed=0, split=SplitConfig())
        model = MODELS["mlp"](name="mlp", hidden=list(work.hidden))
        fields = {"beta": BETA, "tau": work.tau, "batch": work.batch, **({} if name == "fedavg" else {"alpha": ALPHA})}
        return Federation(
            algo=ALGORITHMS[name](name=name, **fields),
            task=Task(model, LOCAL["sgd"](name="sgd"), SERVER["average"](name="average")),
            pool=make_pool(x, data.y, offset, scale, self.device, torch.float32),
            data=[SeedData(partition, np.arange(work.n), 0)],
            initial=[build(model, shape, 10, generator(0, "init"))],
            active=cohort_size(work.n, work.active / work.n),
            classes=10,
            **engine,
        )

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, f: Callable[[], object]) -> float:
        """Seconds of one call."""
        self.sync()
        start = time.perf_counter()
        f()
        self.sync()
        return time.perf_counter() - start


# ---------------------------------------------------------------- contenders


class Engine:
    """A Federation, with a clock on its draws."""

    def __init__(self, fed: Federation):
        self.fed, self.drawing = fed, 0.0
        batches = fed.batches

        def clocked(*args):
            start = time.perf_counter()
            out = batches(*args)
            self.drawing += time.perf_counter() - start
            return out

        fed.batches = clocked

    def round(self) -> None:
        self.drawing = 0.0
        self.fed.round()

    def weights(self) -> list[Tensor]:
        return [value[0] for value in self.fed.state.server["w"].values()]


class Loop:
    """A Python loop over the active users. Parameters in the order and layout [in, out] of the engine's."""

    def __init__(self, fed: Federation):
        self.draws, self.k = fed, 0  # never advanced: it only draws
        self.algo, self.pool = fed.algo, fed.pool
        self.start = [value[0].clone() for value in fed.state.server["w"].values()]

    def users(self):
        """For each active user of the round the batches of his steps: a list of {role: (x, y)}, gathered one at a time."""
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
            linear = nn.Linear(*weight.shape)
            linear.weight.data, linear.bias.data = weight.t().clone(), bias.clone()
            layers += [linear, nn.ELU()]
        self.net = nn.Sequential(*layers[:-1]).to(fed.device)

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

    def fedavg(self, batches: dict) -> None:
        self.move(-BETA, self.grad(batches["outer"]))

    def meta(self, batches: dict) -> tuple[Tensor, ...]:
        """u; the weights end where they were."""
        g = self.grad(batches["inner"])
        self.move(-ALPHA, g)
        u = self.grad(batches["outer"])
        self.move(ALPHA, g)
        return u

    def perfedavg_fo(self, batches: dict) -> None:
        self.move(-BETA, self.meta(batches))

    def perfedavg_hf(self, batches: dict) -> None:
        u = self.meta(batches)
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(u)))
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
    """Seconds of the rounds of one method, by contender, and what else was measured along."""

    rounds: dict[str, list[float]]
    evaluate: list[float]
    draws: list[float]
    compile: float
    apart: float  # largest difference of a weight after round 0 between any contender and the fastest loop

    def ratio(self, other: str) -> float:
        return median(self.rounds[other]) / median(self.rounds["engine"])

    def paired(self, other: str) -> list[float]:
        return [b / a for a, b in zip(self.rounds["engine"], self.rounds[other], strict=True)]


def same_weights(contenders: dict[str, Engine | Loop], before: list[Tensor]) -> float:
    """Assert that all hold the same weights; the largest difference."""
    wanted = contenders["fastest"].weights()
    moved = float(torch.stack([(a - b).norm() for a, b in zip(wanted, before, strict=True)]).norm())
    worst = 0.0
    for name, contender in contenders.items():
        off = [a - b for a, b in zip(contender.weights(), wanted, strict=True)]
        largest, distance = max(float(t.abs().max()) for t in off), float(torch.stack([t.norm() for t in off]).norm())
        assert largest <= 1e-4 and distance <= 1e-3 * moved, f"{name}: weights differ by {largest:.2g}, {distance / moved:.2g} of the way"
        worst = max(worst, largest)
    return worst


def measure(setting: Setting, name: str, repeats: int, compiled: bool, eager: bool) -> Times:
    """All contenders on one method, one round each in turn."""
    torch._dynamo.reset()  # torch stops compiling one function for more than a few callers
    contenders: dict[str, Engine | Loop] = {"engine": Engine(setting.federation(name, compiled=compiled))}
    if compiled and eager:
        contenders["eager"] = Engine(setting.federation(name))
    contenders["loop"] = Engine(setting.federation(name, backend="loop"))
    contenders["idiomatic"] = Idiomatic(setting.federation(name))
    contenders["fastest"] = Fastest(setting.federation(name))
    before = [value.clone() for value in contenders["fastest"].start]
    first = {label: setting.timed(contender.round) for label, contender in contenders.items()}
    apart = same_weights(contenders, before)
    for contender in contenders.values():
        contender.round()
    protocol = Protocol("clean", "train", None, setting.work.batch, 1, (0, 1), ALPHA)
    fed = contenders["engine"].fed
    evaluate(fed, protocol)
    times = Times({label: [] for label in contenders}, [], [], 0.0, apart)
    for _ in range(repeats):
        for label, contender in contenders.items():
            times.rounds[label].append(setting.timed(contender.round))
        times.draws.append(contenders["engine"].drawing / times.rounds["engine"][-1])
        times.evaluate.append(setting.timed(lambda: evaluate(fed, protocol)))
    times.compile = first["engine"] - median(times.rounds["engine"]) if compiled else 0.0
    return times


def flops(work: Workload) -> float:
    """Of the gradients of one FedAvg round."""
    widths = [work.side**2, *work.hidden, 10]
    layers = [2 * work.batch * a * b for a, b in zip(widths, widths[1:], strict=False)]
    return work.active * work.tau * (3 * sum(layers) - layers[0])


def sgemm(setting: Setting, quick: bool) -> float:
    """The most floating-point operations a second of a square float32 matrix product."""
    best = 0.0
    sizes = (128, 256) if quick else (256, 512, 1024, 2048) if setting.device.type == "cpu" else (1024, 2048, 4096, 8192)
    for size in sizes:
        a, b = (torch.randn(size, size, device=setting.device) for _ in range(2))
        out = torch.empty_like(a)
        torch.mm(a, b, out=out)
        for _ in range(7):
            best = max(best, 2 * size**3 / setting.timed(lambda: torch.mm(a, b, out=out)))  # noqa: B023
    return best


def scale_times(setting: Setting, sizes: list[int], repeats: int, compiled: bool) -> dict[int, list[float]]:
    """Seconds of FedAvg rounds by number of users, taking turns."""
    torch._dynamo.reset()
    engines = {n: Engine(replace(setting, work=many(setting.work, n)).federation("fedavg", compiled=compiled)) for n in sizes}
    times: dict[int, list[float]] = {n: [] for n in sizes}
    for repeat in range(-2, repeats):
        for n, engine in engines.items():
            spent = setting.timed(engine.round)
            if repeat >= 0:
                times[n].append(spent)
    return times


def many(work: Workload, n: int) -> Workload:
    return replace(work, n=n, a=None, a_test=None)


def peak() -> float:
    """MiB: the most memory this process has held. getrusage would count the parent's before the exec, too."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def worker(setting: Setting, n: int, compiled: bool) -> None:
    """Print peak MiB as JSON: libraries alone, after some rounds, after an evaluation of everybody."""
    out = {"libraries": peak()}
    setting = replace(setting, work=many(setting.work, n))
    fed = setting.federation("fedavg", compiled=compiled)
    for _ in range(3):
        fed.round()
    out["rounds"] = peak()
    evaluate(fed, Protocol("clean", "train", None, setting.work.batch, 1, (0, 1), ALPHA))
    setting.sync()
    out["evaluate"] = peak()
    if setting.device.type == "cuda":
        out["device"] = torch.cuda.max_memory_allocated(setting.device) / MIB
    print(json.dumps(out))


def memory(arguments: list[str], n: int) -> dict[str, float]:
    """What a process of its own prints."""
    done = subprocess.run([sys.executable, __file__, *arguments, "--worker", str(n)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the process for n={n} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


# ---------------------------------------------------------------- tables


def grid(title: str, head: list[str], rows: list[list[str]]) -> None:
    """Print a Markdown table."""
    print(f"\n{title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    sys.stdout.flush()


def ms(values: list[float]) -> str:
    return f"{1e3 * median(values):.1f} ({1e3 * min(values):.1f} - {1e3 * max(values):.1f})"


def header(setting: Setting) -> str:
    cpu = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            cpu = next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    gpu = f"{torch.cuda.get_device_name(setting.device)}, " if setting.device.type == "cuda" else ""
    threads = torch.get_num_threads()
    return f"{gpu}{cpu}, {os.cpu_count()} cores, {threads} thread{'s' if threads > 1 else ''}, torch {torch.__version__}"


def reached(found: dict[str, Times], speed: float, gib: float | None, threads: int) -> list[list[str]]:
    """Rows of the table of goals."""
    rounds = {name: median(times.rounds["engine"]) for name, times in found.items()}
    scoring = median(found["perfedavg_hf"].evaluate) / rounds["perfedavg_hf"]
    goals = [
        (f"{NAMES[name]}: times faster than the fastest loop", found[name].ratio("fastest"), 2.5 if threads == 2 else least, True)
        for name, least in (("fedavg", 1.8), ("perfedavg_fo", 1.8), ("perfedavg_hf", 1.7))
    ]
    goals += [
        ("exact: round, in HF rounds", rounds["perfedavg"] / rounds["perfedavg_hf"], 1.0, False),
        ("FedAvg: share of the SGEMM peak", speed, 0.4, True),
        ("scoring all users before and after one step, in HF rounds", scoring, 2.0, False),
    ]
    if gib is not None:
        goals.append(("peak memory with 10,000 users, GB (1e9 bytes)", gib, 1.5, False))
    return [
        [
            what,
            f"{value:.2f}",
            f"{'at least' if up else 'at most'} {bound:g}",
            "pass" if (value >= bound if up else value <= bound) else "miss",
        ]
        for what, value, bound, up in goals
    ]


def report(setting: Setting, options: argparse.Namespace, arguments: list[str], compiled: bool) -> None:
    """Measure everything, print the tables."""
    work = setting.work
    print(header(setting))
    print(
        f"{work.active} of {work.n} users, {work.tau} steps on batches of {work.batch}, "
        f"{'-'.join(map(str, (work.side**2, *work.hidden, 10)))}; engine {'compiled' if compiled else 'not compiled'}; {options.repeats} repeats"
    )
    best = sgemm(setting, options.quick)
    found = {name: measure(setting, name, options.repeats, compiled, options.eager) for name in NAMES}
    best = max(best, sgemm(setting, options.quick))
    labels = list(found["fedavg"].rounds)
    grid(
        "A round, ms",
        ["", *labels, "weights apart"],
        [[NAMES[n], *(ms(t.rounds[label]) for label in labels), f"{t.apart:.0e}"] for n, t in found.items()],
    )
    grid(
        "Times the engine's round",
        ["", *labels[1:]],
        [
            [NAMES[n], *(f"{t.ratio(x):.2f} ({min(t.paired(x)):.2f} - {max(t.paired(x)):.2f})" for x in labels[1:])]
            for n, t in found.items()
        ],
    )
    share = {n: GRADIENTS[n] * flops(work) / median(t.rounds["engine"]) / best for n, t in found.items() if n in GRADIENTS}
    grid(
        f"The engine (SGEMM peak {best / 1e9:.0f} GFLOP/s)",
        ["", "compile, s", "evaluate, ms", "draws", "of SGEMM"],
        [
            [NAMES[n], f"{t.compile:.1f}", ms(t.evaluate), f"{median(t.draws):.1%}", f"{share[n]:.0%}" if n in share else "-"]
            for n, t in found.items()
        ],
    )
    sizes = [20] if options.quick else [50, 1000, 10_000]
    rounds = scale_times(setting, sizes, options.repeats, compiled)
    peaks = {n: memory(arguments, n) for n in sizes}
    first = median(rounds[sizes[0]])
    columns = list(peaks[sizes[0]])
    grid(
        f"Number of users (iid, 60 images each, {work.active} active), FedAvg; peak memory in MiB",
        ["users", "round, ms", "of the first", *(f"peak: {name}" for name in columns)],
        [[f"{n:,}", ms(rounds[n]), f"{median(rounds[n]) / first:.2f}", *(f"{peaks[n][c]:,.0f}" for c in columns)] for n in sizes],
    )
    if not options.quick:
        most = peaks[10_000]["evaluate"] * MIB / 1e9
        goals = reached(found, share["fedavg"], most, torch.get_num_threads()) if setting.device.type == "cpu" else []
    else:
        goals = reached(found, share["fedavg"], None, torch.get_num_threads())
    if goals:
        grid("Must reach", ["", "measured", "needed", ""], goals)


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:i")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--repeats", type=int, default=None, help="timed rounds of each contender (7; 2 with --quick)")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=None, help="compile the engine's step (default, but for --quick)"
    )
    parser.add_argument("--eager", action="store_true", help="measure the engine without torch.compile too")
    parser.add_argument("--quick", action="store_true", help="a tiny workload")
    parser.add_argument("--worker", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.repeats = options.repeats or (2 if options.quick else 7)
    compiled = not options.quick if options.compile is None else options.compile
    work = Workload(n=20, active=4, tau=2, batch=8, hidden=(12, 11), a=20, a_test=4, side=8) if options.quick else Workload()
    threads, cache = torch.get_num_threads(), os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    torch.set_num_threads(options.threads)
    try:
        setting = Setting(work, torch.device(options.device))
        if options.worker:
            worker(setting, options.worker, compiled)
            return
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
            report(setting, options, arguments, compiled)
    finally:
        torch.set_num_threads(threads)
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
        if cache is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache


if __name__ == "__main__":
    main()
