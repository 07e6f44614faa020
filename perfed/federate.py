"""Rounds. Only this file and :mod:`perfed.draws` know about the seed and user axes.

Seeds x active users are flattened into one *lane* axis L. Every method of an algorithm is written for one user and one
seed and is mapped over lanes here, by one of two backends that run the same algorithm code:

    vmap   one call of ``step`` moves all lanes of a chunk; gathering and uint8 -> float happen inside; may be compiled
    loop   one call per lane, without padding: the readable reference, and faster for models that gain nothing from vmap

Indices are drawn on the host (:mod:`perfed.draws`); nothing else is random.

The rows of the leading axis are seeds, or (trial, seed) where float hyper-parameters differ between rows (``varying``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from perfed import tree
from perfed.algorithms.base import Algorithm, Down, Population, Task
from perfed.binding import Method, Varies, bind
from perfed.device import compile_step, keep_freed_memory, mended, same_step
from perfed.draws import Draws, Lanes, Plan, Pool, SeedData
from perfed.types import Batch, Params, State, Tree

CHECKED_STEPS = 2  # compiled steps of a run that are compared with eager ones: in the first, many models are still equal
DIVERGED_NORM = 1e6  # a lane is diverged when ||w|| exceeds this many times max(||w_0||, 1)


@dataclass
class Costs:
    """What was computed and sent, counted over all users of one seed.

    ``full_passes``: how often a user read all his data at once (each is one of the gradients or losses too). A gradient on
    the pooled batch of A users counts as A.
    """

    grads: int = 0
    hvps: int = 0
    losses: int = 0
    full_passes: int = 0
    floats_down: int = 0
    floats_up: int = 0
    steps: int = 0
    user_rounds: int = 0


@dataclass
class Federation(Draws):
    """The state of a simulation and how to advance it.

    ``initial`` holds the initial parameters of each seed; ``classes`` the number of labels; ``varying`` the values of float
    hyper-parameters in which the rows differ, by key (see :mod:`perfed.binding`), one number a row. Public state: ``state`` (its
    tensors lead with S), ``k`` rounds done, ``costs`` per seed, ``times_sampled`` [S, N] (rounds in which a user stepped),
    ``diverged`` [S] (round or -1).
    """

    algo: Algorithm
    task: Task
    pool: Pool
    data: list[SeedData]
    initial: list[Params]
    active: int
    classes: int
    backend: str = "vmap"
    chunk: int | None = None
    compiled: bool = False
    state_device: torch.device | None = None  # where the users' state lies; None: with everything else
    varying: dict[str, list[float]] = field(default_factory=dict)

    k: int = field(default=0, init=False)
    warning: str | None = field(default=None, init=False)  # why a compiled step was given up
    step_calls: int = field(default=0, init=False)  # calls of the mapped step; does not grow with users or seeds under vmap

    def __post_init__(self):
        self.n = len(self.data[0].members)
        self.device = self.pool.y.device
        self.state_device = self.state_device or self.device
        self.dtype = self.pool.scale.dtype
        whole = Method(self.algo, self.task)
        self._each = [bind(whole, {key: values[s] for key, values in self.varying.items()}) for s in range(len(self.data))]
        self._own = {key: torch.tensor(values, dtype=self.dtype, device=self.device) for key, values in self.varying.items()}
        self._common = bind(whole, {key: Varies(key) for key in self.varying})
        self.algo, self.task = self._common.algo, self._common.task
        self.train = [d.partition.train for d in self.data]
        labels = self.pool.y.cpu().numpy()
        self.counts = torch.from_numpy(np.stack([d.partition.counts(labels, self.classes) for d in self.data]))
        self.sizes = torch.from_numpy(np.stack([d.partition.train.sizes for d in self.data]))
        self._trained_on = self._whole() if self.algo.trains == "together" else (self.train, self.sizes, self.counts)
        # One batch shape for all rounds: a compiled step is made for one shape.
        everyone = self._trained_on[1] if self.algo.trains == "together" else [self.sizes[s][d.members] for s, d in enumerate(self.data)]
        self.largest = max(int(sizes.max()) for sizes in everyone)
        params = [tree.map(lambda t: t.to(self.device, self.dtype), p) for p in self.initial]
        self.state = self._initial_state(params)
        norms = torch.stack([tree.norm(p) for p in params])
        self.limit = DIVERGED_NORM * norms.clamp(min=1.0)
        self.diverged = torch.full((len(self.data),), -1, dtype=torch.int64, device=self.device)
        self.times_sampled = np.zeros(tuple(self.sizes.shape), dtype=np.int64)
        self.costs = [Costs() for _ in self.data]
        if self.device.type == "cpu":
            keep_freed_memory()
        if self.compiled:
            torch.compiler.reset()  # jobs of a sweep share the code of the step, and torch bounds the versions it keeps of it
        # Of two ways the second spares torch from ordering what it writes, in which some versions fail.
        self._ways = [compile_step(step, self.device) for step in (self._step_in_place, self._step)] if self.compiled else []
        self._advance: Callable[..., Tree] = self._step
        self._price: dict[str, Counter] | None = None
        self._plans: dict[int, Plan] = {}  # of this round and some to come
        self._overwritten: tuple | None = None  # (seed, user, rows) of the users' state before this round wrote to it

    def _initial_state(self, params: list[Params]) -> State:
        """Stacked over seeds; the users' part is written once, where it is to lie."""
        servers, users, count = [], (), len(params)
        for s, (p, d) in enumerate(zip(params, self.data, strict=True)):
            members = torch.zeros(self.sizes.shape[1], dtype=torch.bool)
            members[d.members] = True
            who = Population(self.sizes.shape[1], self.active, self.sizes[s], self.counts[s], members, d.sampling, int(self.sizes.max()))
            one = self._each[s].algo.init(self._each[s].task, p, who)
            servers.append(one.server)
            if s == 0:
                users = tree.map(lambda t: torch.empty((count, *t.shape), dtype=t.dtype, device=self.state_device), one.users)
            for to, value in zip(tree.leaves(users), tree.leaves(one.users), strict=True):
                to[s].copy_(value)
        return State(tree.map(lambda t: t.to(self.device), tree.stack(servers)), users)

    def users_at(self, seed: Any, user: Any) -> Tree:
        """The state of some users, on the device. Integers, or index tensors [L]."""
        where = tuple(i.to(self.state_device) if torch.is_tensor(i) else i for i in (seed, user))
        return tree.map(lambda t: t[where].to(self.device), self.state.users)

    def shown(self) -> Tree:
        """What the method shows of the server to those who judge it; leads with S."""
        return self.map_method("shown", len(self.data), self._own, self.state.server)

    # --- mapping over lanes

    def own(self, rows: np.ndarray) -> dict[str, Tensor]:
        """The values of the hyper-parameters in which rows differ, for lanes of these rows [L]; {} where there are none."""
        if not self._own:
            return {}
        at = torch.from_numpy(rows).to(self.device)
        return {key: values[at] for key, values in self._own.items()}

    def method(self, row: int) -> Method:
        """The method of one row, with numbers."""
        return self._each[row]

    def map(self, f: Callable[..., Tree], size: int, own: dict[str, Tensor], *trees: Tree) -> Tree:
        """f(method, ...) on each of ``size`` lanes; the tensors of ``own`` and ``trees`` lead with L, and so do those of the result."""
        if self.backend == "loop":
            mine = [bind(self._common, {key: float(values[i]) for key, values in own.items()}) for i in range(size)]
            return tree.stack([f(mine[i], *tree.at(trees, i)) for i in range(size)])
        if size == 1:  # spares the dispatch of vmap
            return tree.map(lambda t: t[None], f(bind(self._common, tree.at(own, 0)), *tree.at(trees, 0)))
        return vmap(lambda _, own, *args: f(bind(self._common, own), *args))(torch.arange(size, device=self.device), own, *trees)

    def map_method(self, name: str, size: int, own: dict[str, Tensor], *trees: Tree) -> Tree:
        """A method that takes trees alone. The defaults only rearrange trees, so they take all lanes at once, as they are."""
        if self.algo.is_default(name):
            return self.algo.method(name)(*trees)
        return self.map(lambda m, *args: m.algo.method(name)(*args), size, own, *trees)

    # --- one local step of a chunk of lanes

    def _step(
        self,
        local: Tree,
        index: dict[str, Tensor],
        weight: dict[str, Tensor],
        info: dict[str, Tensor],
        live: Tensor | None,
        own: dict[str, Tensor] | None = None,
    ) -> Tree:
        batches = {role: self.pool.batch(index[role], weight[role]) for role in index}

        def one(m: Method, local: Tree, batches: dict[str, Batch], info: dict[str, Tensor]) -> Tree:
            batches = {role: self._trimmed(b) for role, b in batches.items()}
            return m.algo.step(m.task, local, batches, self._info(info))

        new = self.map(one, len(info["user"]), own or {}, local, batches, info)
        return new if live is None else tree.where(live, new, local)

    def _guarded(self, *arguments: Any) -> Tree:
        """One step. The first compiled ones must give what the eager step gives; otherwise another way takes their place."""
        if not self.compiled or self.step_calls >= CHECKED_STEPS:
            return self._advance(*arguments)
        local, *rest = arguments
        wanted = self._step(local, *rest)
        reason = f"torch {torch.__version__} gives other numbers than without"
        while self._ways:
            copy = tree.map(torch.clone, local)
            try:
                new = mended(lambda way=self._ways[0], copy=copy: way(copy, *rest))
            except Exception as error:  # torch wraps compilers' errors in many kinds; an error of the method's own came before
                reason = f"{error.__class__.__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
                break
            if same_step(tree.leaves(new), tree.leaves(wanted), tree.leaves(local)):
                self._advance = self._ways[0]
                return new
            self._ways.pop(0)
        self.compiled, self._advance = False, self._step
        self.warning = f"warning: not compiled: {reason}"
        return wanted

    @property
    def _in_place(self) -> bool:
        return self.compiled and len(self._ways) == 2

    def _step_in_place(self, local: Tree, *rest: Any) -> Tree:
        """The same, writing into the caller's tensors: compiled, this spares a fresh copy of all lanes a step."""
        new = self._step(local, *rest)
        for old, value in zip(tree.leaves(local), tree.leaves(new), strict=True):
            old.copy_(value)
        return local

    # --- rounds

    def round(self) -> None:
        """Advance by one round. Lanes of a diverged seed go on by themselves; nothing of theirs reaches another seed."""
        k = self.k
        if k not in self._plans:
            self._plans = self.plans(k)
        plan = self._plans[k]
        lanes, chosen, info = plan[:3]
        count = len(lanes.user)
        down = self._down(lanes, info)
        if (pieces := self._pieces(count)) == 1:
            uploads, users, steps = self._users(down, plan, k)
        else:
            parts = []
            for part in np.array_split(np.arange(count), pieces):
                at = torch.from_numpy(part).to(self.device)
                some = Plan(Lanes(lanes.seed[part], lanes.user[part]), chosen, tree.at(info, at))
                parts.append(self._users(tree.at(down, at), some, k))
            uploads, users, steps = tree.map(lambda *ts: torch.cat(ts), *parts)

        rows = torch.from_numpy(chosen).to(self.device)

        def of_reports(t: Tensor) -> Tensor:  # every lane in its order: a view is enough
            return t.unflatten(0, chosen.shape) if len(t) == chosen.size else t[rows]

        replies = self._aggregate(tree.map(of_reports, uploads), tree.map(of_reports, info))
        if tree.leaves(users):
            kept = tree.at(users, rows.flatten())
            own = self.own(lanes.seed[chosen.ravel()])
            settled = self.map_method("settle", rows.numel(), own, kept, tree.map(lambda t: t.flatten(0, 1), replies))
            users = settled if rows.numel() == count else tree.put(users, (rows.flatten(),), settled)
            where = tuple(torch.from_numpy(part) for part in lanes)
            old = tree.map(lambda t: t[tuple(i.to(t.device) for i in where)], self.state.users)
            self._overwritten = (where, old)
            tree.write(self.state.users, where, users)
        self._account(down, uploads, replies, info, steps, lanes, chosen)
        self.k += 1
        self._check(users, lanes)

    def _down(self, lanes: Lanes, info: dict[str, Tensor]) -> Tree:
        """What each lane gets, leading with L."""
        size, seeds = len(lanes.user), len(self.data)
        seed = torch.from_numpy(lanes.seed).to(self.device)
        down = self.map_method("broadcast", seeds, self._own, self.state.server)
        # One seed: all lanes get the same, and a view is enough.
        down = tree.map(lambda t: t.expand(size, *t.shape[1:]) if seeds == 1 else t.index_select(0, seed), down)
        if self.algo.is_default("unicast"):
            return down
        each = tree.map(lambda t: t.unflatten(0, (seeds, -1)), info)
        each = self.map(lambda m, server, cohort: m.algo.unicast(server, self._info(cohort)), seeds, self._own, self.state.server, each)
        return Down(down, tree.map(lambda t: t.flatten(0, 1), each)) if tree.leaves(each) else down

    def _users(self, down: Tree, plan: Plan, k: int) -> tuple[Tree, Tree, Tensor]:
        """receive, step, send for some lanes: (uploads, users, steps taken)."""
        lanes, _, info, index, weight = plan
        size, seed, user = len(lanes.user), torch.from_numpy(lanes.seed), torch.from_numpy(lanes.user)
        kept, own = self.users_at(seed, user), self.own(lanes.seed)
        local = self._receive(down, kept, info, lanes, own)
        if self.compiled:
            local = tree.map(lambda t: t.clone(memory_format=torch.contiguous_format), local)
        steps = self.algo.local_steps(self._info(info))
        alike = not torch.is_tensor(steps)
        horizon = steps if alike else int(steps.max())
        if index is None:
            index, weight = ({role: part[0] for role, part in parts.items()} for parts in self._by_step(lanes, k, info))
        at = torch.from_numpy(np.repeat(np.arange(horizon), size).reshape(horizon, size)).to(self.device).unbind(0)
        with ExitStack() as stack:
            for t in range(horizon):
                here = {**info, "step": at[t]}
                live = None if alike else t < steps
                local = self._guarded(local, {r: v[t] for r, v in index.items()}, {r: v[t] for r, v in weight.items()}, here, live, own)
                self.step_calls += 1 if self.backend == "vmap" else size
                if t == 0 and self._in_place and self.step_calls > CHECKED_STEPS:
                    # torch has just looked for the code that fits. The steps to come differ from this one in numbers alone.
                    stack.enter_context(torch.compiler.set_stance("default", skip_guard_eval_unsafe=True))
        if self.algo.is_default("send"):  # it only rearranges trees, so it takes all lanes at once, as they are
            upload, kept = self.algo.send(self.task, down, kept, local, self._info(info))
        else:

            def sent(m: Method, down: Tree, user: Tree, local: Tree, info: dict[str, Tensor]) -> tuple[Tree, Tree]:
                return m.algo.send(m.task, down, user, local, self._info(info))

            upload, kept = self.map(sent, size, own, down, kept, local, info)
        return upload, kept, torch.as_tensor(steps, device=self.device).expand(size)

    def _receive(self, down: Tree, kept: Tree, info: dict[str, Tensor], lanes: Lanes, own: dict[str, Tensor] | None = None) -> Tree:
        size, own = len(lanes.user), own or {}
        if self.algo.is_default("receive") and self.task.local.stateless:
            return self.algo.receive(self.task, down, kept, self._info(info))  # likewise
        if not self.algo.full_data:
            return self.map(lambda m, d, u, i: m.algo.receive(m.task, d, u, self._info(i)), size, own, down, kept, info)

        def one(m: Method, down: Tree, user: Tree, info: dict[str, Tensor], full: Batch) -> Tree:
            return m.algo.receive(m.task, down, user, self._info(info), self._trimmed(full))

        return self.map(one, size, own, down, kept, info, self.everything(lanes))

    def _trimmed(self, batch: Batch) -> Batch:
        """Without the padding, which is last, where lanes are computed one by one."""
        return Batch(*(part[: int(batch.weight.sum())] for part in batch)) if self.backend == "loop" else batch

    def _aggregate(self, uploads: Tree, info: dict[str, Tensor]) -> Tree:
        """Uploads lead with [S, R]; sets the server and returns the replies."""

        def one(m: Method, server: Tree, uploads: Tree, info: dict[str, Tensor]) -> tuple[Tree, Tree]:
            return m.algo.aggregate(m.task, server, uploads, self._info(info))

        server, replies = self.map(one, len(self.data), self._own, self.state.server, uploads, info)
        self.state = self.state._replace(server=server)
        return replies

    def _check(self, users: Tree, lanes: Lanes) -> None:
        """Mark the seeds of which a number is not finite, or a model has run away."""

        def size(leaves: list[Tensor]) -> Tensor:
            return torch.stack([torch.linalg.vector_norm(t.reshape(len(t), -1), dim=1) for t in leaves]).norm(dim=0)

        def numbers(part: Tree) -> list[Tensor]:
            return [leaf for leaf in tree.leaves(part) if leaf.is_floating_point()]

        def broken(part: Tree, models: Tree, limit: Tensor) -> Tensor:
            """[S] or [L]: the norm of the models is within the limit, and that of all numbers is finite."""
            bad = torch.zeros_like(limit, dtype=torch.bool)
            if leaves := numbers(models):
                bad |= ~(size(leaves) <= limit)
            # A norm within the limit is finite; whatever is no model is looked at by itself.
            if models is not part and (leaves := numbers(part)):
                bad |= ~torch.stack([torch.isfinite(t.reshape(len(t), -1)).all(1) for t in leaves]).all(0)
            return bad

        bad = broken(self.state.server, self.algo.server_models(self.state.server), self.limit)
        if numbers(users):
            seed = torch.from_numpy(lanes.seed).to(self.device)
            over = broken(users, self.algo.user_models(users), self.limit[seed])
            bad |= torch.zeros_like(self.limit).index_add_(0, seed, over.to(self.dtype)) > 0
        self.mark(bad)

    def mark(self, bad: Tensor) -> None:
        """bad [S]: seeds that are found diverged now, after ``k`` rounds."""
        self.diverged = torch.where(bad & (self.diverged < 0), self.k, self.diverged)

    def snapshot(self) -> tuple:
        """Where the simulation stands between two rounds; cheap, since only users' state is edited in place, and that is noted."""
        self._overwritten = None
        return self.state, self.k, self.diverged, [replace(cost) for cost in self.costs], self.times_sampled.copy()

    def go_back(self, snapshot: tuple) -> None:
        """Undo the one round since the snapshot, wherever it was cut short."""
        self.state, self.k, self.diverged, self.costs, self.times_sampled = snapshot
        if self._overwritten is not None:
            tree.write(self.state.users, *self._overwritten)
            self._overwritten = None

    # --- counting

    def price(self) -> dict[str, Counter]:
        """Calls of the task in receive, in one step and in send, for one user: measured on a dry run of one lane."""
        if self._price is None:
            lanes, _ = self.lanes(0)
            lane = Lanes(lanes.seed[:1], lanes.user[:1])
            fields = self.info(lane, 0)
            info = self._info(tree.at(fields, 0))
            index, weight = self.batches(lane, 0, 1)
            batches = {role: self.pool.batch(index[role][0, 0], weight[role][0, 0]) for role in index}
            full = tree.at(self.everything(lane), 0) if self.algo.full_data else None
            (algo, task, _), calls = self.method(0), {}

            def counted(name: str, f: Callable[[], Tree]) -> Tree:
                task.calls.clear()
                out = f()
                calls[name] = Counter(task.calls)
                return out

            server = tree.at(self.state.server, 0)
            down, own = algo.broadcast(server), algo.unicast(server, self._info(fields))
            down = Down(down, tree.at(own, 0)) if tree.leaves(own) else down
            user = tree.map(lambda t: t[0], self.users_at(torch.tensor([0]), torch.from_numpy(lane.user)))
            local = counted("receive", lambda: algo.receive(task, down, user, info, full))
            local = counted("step", lambda: algo.step(task, local, batches, info))
            counted("send", lambda: algo.send(task, down, user, local, info))
            self._price = calls
        return self._price

    def _account(
        self, down: Tree, uploads: Tree, replies: Tree, info: dict[str, Tensor], steps: Tensor, lanes: Lanes, chosen: np.ndarray
    ) -> None:
        price = self.price()
        steps = steps.cpu().numpy()
        as_one = self.algo.trains == "together"
        for s, cost in enumerate(self.costs):
            mine = lanes.seed == s
            users, taken = int(mine.sum()), int(steps[mine].sum())
            for name in ("grads", "hvps", "losses"):
                once = price["receive"][name] + price["send"][name]
                spent = once * users + price["step"][name] * taken
                setattr(cost, name, getattr(cost, name) + spent * (self.active if as_one else 1))
            # Everyone who trains gets ``down``; those who report get a reply.
            sent = self._floats(down, uploads, replies, info, s, int(chosen[s, 0]))
            cost.floats_down += sent[0] * users + sent[1] * chosen.shape[1]
            cost.floats_up += sent[2] * chosen.shape[1]
            cost.steps += taken
            cost.user_rounds += self.active if as_one else users
            cost.full_passes += users if self.algo.full_data else 0
            trained = self.data[s].members if as_one else lanes.user[mine][steps[mine] > 0]
            self.times_sampled[s, trained] += 1

    def _floats(self, down: Tree, uploads: Tree, replies: Tree, info: dict[str, Tensor], seed: int, lane: int) -> tuple[int, int, int]:
        """Numbers in what one user of a seed got at first, got as a reply, and sent."""
        algo = self.algo
        if algo.is_default("floats_down") and algo.is_default("floats_up"):  # the sizes say it
            rows = len(info["user"])
            return tree.numel(down) // rows, sum(t[seed, 0].numel() for t in tree.leaves(replies)), tree.numel(uploads) // rows
        facts, reply = self._info(tree.at(info, lane)), tree.map(lambda t: t[seed, 0], replies)
        first, second = algo.floats_down(tree.at(down, lane), (), facts), algo.floats_down((), reply, facts)
        return int(first), int(second), int(algo.floats_up(tree.at(uploads, lane), facts))

    # --- measurements that change nothing

    def diagnose(self) -> list[dict[str, float]]:
        """The method's own diagnostics for each seed, on the first active user of this round and his first batches."""
        k = max(self.k - 1, 0)
        every, _ = self.lanes(k)
        first = np.searchsorted(every.seed, np.arange(len(self.data)))
        lanes = Lanes(every.seed[first], every.user[first])
        index, weight = self.batches(lanes, k, 1)
        fields, shown, out = self.info(lanes, k), self.shown(), []
        kept = self.users_at(torch.from_numpy(lanes.seed), torch.from_numpy(lanes.user))
        for s in range(len(self.data)):
            batches = {role: self.pool.batch(index[role][s, 0], weight[role][s, 0]) for role in index}
            algo, task, _ = self.method(s)
            models = algo.candidates(tree.at(shown, s), tree.at(kept, s))
            w = next(iter(models.values()))
            values = algo.diagnostics(task, w, batches, self._info(tree.at(fields, s)))
            out.append({name: float(value) for name, value in values.items()})
        return out
