"""Per-FedAvg: exact Hessian, first order (FO), Hessian-free (HF). MAML is the case tau = 1, r = 1.

A. Fallah, A. Mokhtari, A. Ozdaglar, "Personalized Federated Learning: A Meta-Learning Approach", arXiv 2002.07948.
Objective (eq. 4): F(w) = (1/n) sum_i f_i(w - alpha grad f_i(w)).

    round k: the server draws A_k and sends w
      user i in A_k:  v = w;  repeat tau times, with batches B (role `inner`), B' (`outer`), B'' (`hess`):
        u = g_i(v - alpha g_i(v; B); B')
        exact:  dir = u - alpha H_i(v; B'') u                                                   (algorithm 1, eq. 8)
        FO:     dir = u                                                                         (appendix H)
        HF:     dir = u - alpha [g_i(v + delta u; B'') - g_i(v - delta u; B'')] / (2 delta)     (eqs. 119-121)
        v = v - beta_k dir
      w = mean over A_k of v

Section 5 of the paper prints the HF quotient without the factor 2 in the denominator; appendix H and Taylor's theorem
have it. Both gradients of the quotient read the same B''; with independent batches the variance grows as 1/delta^2.

Switches
    batches        `independent` (eq. 8) | `disjoint` (one shuffle cut in parts) | `shared` (one batch in all roles)
    hess_batch     `independent` (eq. 8) | `inner` (B'' = B: then exact is the gradient of f(w - alpha g(w; B); B')) | `outer`
    batch_inner, batch_outer, batch_hess     sizes D, D', D'' of B, B', B''; null is `batch`
    schedule       `constant` | `inverse_root`: beta_k = min(beta, beta sqrt(100 / (k + 1)))    (appendix G.1 with c = beta sqrt(100 tau))
    inner_steps    S > 1: the chain rule through S inner steps (exact, with hess_batch=inner) or FO; the paper has S = 1
    extra_iterate  remark 4.7: users also send their iterate after t_k steps, t_k drawn from {0, .., tau-1} for all;
                   the mean of the last round is judged beside the model, as `iterate`
    delta_mode     `relative`: the perturbation has norm delta; `absolute`: delta times u, as public code does
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from perfed import tree
from perfed.algorithms.base import Algorithm, Draw, Task, choice, register
from perfed.errors import require
from perfed.types import Batch, Info, Params, State, Tree


class Local(NamedTuple):
    """The model, the optimizer's state and, for remark 4.7, the iterate after t_k steps."""

    w: Params
    opt: Tree
    extra: Tree


@dataclass(kw_only=True)
class PerFedAvgBase(Algorithm):
    """What the three variants share."""

    alpha: float = 0.01
    batches: str = "independent"
    batch_inner: int | None = None
    batch_outer: int | None = None
    schedule: str = "constant"
    inner_steps: int = 1
    extra_iterate: bool = False

    wants_smoothness = True

    def __post_init__(self):
        super().__post_init__()
        require(self.alpha >= 0, "alpha", self.alpha, "a number >= 0")
        choice("batches", self.batches, ("independent", "disjoint", "shared"))
        choice("schedule", self.schedule, ("constant", "inverse_root"))
        require(self.inner_steps >= 1, "inner_steps", self.inner_steps, "an integer >= 1")
        for key in ("batch_inner", "batch_outer"):
            value = getattr(self, key)
            require(value is None or value >= 1, key, value, "null or an integer >= 1")

    @property
    def inner_step(self):
        return self.alpha

    def notes(self, facts):
        lines, rate = super().notes(facts), self.alpha * (facts.smoothness or 0.0)
        if rate > 1:
            lines.append(
                f"warning: alpha*L = {rate:.3g} with L >= {facts.smoothness:.3g} at w_0, and the paper assumes alpha <= 1/L: "
                f"an inner step may overshoot"
            )
        return lines

    @property
    def inner_roles(self) -> list[str]:
        return ["inner", *(f"inner{s}" for s in range(2, self.inner_steps + 1))]

    def sizes(self) -> dict[str, int]:
        """Batch size by role, in the order in which a disjoint draw is cut."""
        return {
            "outer": self.batch_outer or self.batch,
            **dict.fromkeys(self.inner_roles, self.batch_inner or self.batch),
        }

    def draws(self, active=1):
        draws, start = {}, 0
        for role, size in self.sizes().items():
            if self.batches == "independent":
                draws[role] = Draw(size, role)
            else:
                draws[role] = Draw(size, "outer", start if self.batches == "disjoint" else 0)
            start += size
        return draws

    def init(self, task, params, population):
        state = super().init(task, params, population)
        return State({**state.server, "extra": params}, ()) if self.extra_iterate else state

    def receive(self, task, down, user, info, full=None):
        return Local(down, task.local.init(down), down if self.extra_iterate else ())

    def step_size(self, info):
        if self.schedule == "constant":
            return self.beta
        return self.beta * torch.clamp((100 / (info.round.to(torch.float64) + 1)).sqrt(), max=1.0)

    def inner(self, task: Task, w: Params, batches: dict[str, Batch]) -> list[Params]:
        """The inner iterates w, w - alpha g(w; B), ...; inner_steps + 1 of them."""
        path = [w]
        for role in self.inner_roles:
            path.append(tree.axpy(-self.alpha, task.grad(path[-1], batches[role]), path[-1]))
        return path

    def meta_gradient(self, task: Task, w: Params, batches: dict[str, Batch]) -> Params:
        """``dir`` of the docstring above."""
        raise NotImplementedError

    def direction(self, task, w, batches, info):
        return self.meta_gradient(task, w, batches)

    def step(self, task, local, batches, info):
        new = super().step(task, local, batches, info)
        if self.extra_iterate:
            new = new._replace(extra=tree.where(info.step + 1 == info.t_k, new.w, local.extra))
        return new

    def send(self, task, down, user, local, info):
        return ({"w": local.w, "extra": local.extra} if self.extra_iterate else local.w), user

    def floats_up(self, upload, info):
        if not self.extra_iterate:
            return tree.numel(upload)
        return tree.numel(upload["w"]) + tree.numel(upload["extra"]) * (info.t_k > 0)  # t_k = 0 is what the server sent

    def aggregate(self, task, server, uploads, cohort):
        if not self.extra_iterate:
            return super().aggregate(task, server, uploads, cohort)
        server, replies = super().aggregate(task, server, uploads["w"], cohort)
        return {**server, "extra": self.average(uploads["extra"], cohort)}, replies

    def candidates(self, server, user):
        models = super().candidates(server, user)
        return {**models, "iterate": server["extra"]} if self.extra_iterate else models


@register("perfedavg_fo")
@dataclass(kw_only=True)
class PerFedAvgFO(PerFedAvgBase):
    """First order: the curvature term is dropped."""

    def meta_gradient(self, task, w, batches):
        return task.grad(self.inner(task, w, batches)[-1], batches["outer"])


@dataclass(kw_only=True)
class SecondOrder(PerFedAvgBase):
    """The variants that read a third batch B''."""

    hess_batch: str = "independent"
    batch_hess: int | None = None

    def __post_init__(self):
        super().__post_init__()
        choice("hess_batch", self.hess_batch, ("independent", "inner", "outer"))
        require(self.batch_hess is None or self.batch_hess >= 1, "batch_hess", self.batch_hess, "null or an integer >= 1")
        own = self.batch_hess is None or self.hess_batch == "independent"
        require(own, "batch_hess", self.batch_hess, f"null with hess_batch={self.hess_batch}, which is a batch of another size")

    def sizes(self):
        sizes = super().sizes()
        return {**sizes, "hess": self.batch_hess or self.batch} if self.hess_batch == "independent" else sizes

    def curvature_batch(self, batches: dict[str, Batch]) -> Batch:
        return batches["hess" if self.hess_batch == "independent" else self.hess_batch]


@register("perfedavg")
@dataclass(kw_only=True)
class PerFedAvg(SecondOrder):
    """The exact Hessian-vector product: no Hessian matrix, no difference quotient."""

    def __post_init__(self):
        super().__post_init__()
        ok = self.inner_steps == 1 or self.hess_batch == "inner"
        require(ok, "inner_steps", self.inner_steps, "1 unless hess_batch=inner: the chain rule reads the inner batches")

    def meta_gradient(self, task, w, batches):
        path = self.inner(task, w, batches)
        u = task.grad(path[-1], batches["outer"])
        if self.inner_steps == 1:
            return tree.axpy(-self.alpha, task.hvp(w, self.curvature_batch(batches), u), u)
        for v, role in reversed(list(zip(path[:-1], self.inner_roles, strict=True))):
            u = tree.axpy(-self.alpha, task.hvp(v, batches[role], u), u)
        return u


@register("perfedavg_hf")
@dataclass(kw_only=True)
class PerFedAvgHF(SecondOrder):
    """Hessian-free: a central difference of two gradients on one batch.

    ||HF - exact|| <= alpha rho delta ||u||^2 / 2 for a rho-Lipschitz Hessian (absolute delta), and zero on quadratics.
    """

    delta: float = 1e-3
    delta_mode: str = "relative"

    def __post_init__(self):
        super().__post_init__()
        require(self.delta > 0, "delta", self.delta, "a number > 0")
        choice("delta_mode", self.delta_mode, ("relative", "absolute"))
        require(self.inner_steps == 1, "inner_steps", self.inner_steps, "1 for perfedavg_hf; perfedavg and perfedavg_fo take more")

    def check(self, dtype):
        low = 1e-5 if dtype == "float32" else 1e-12
        require(self.delta >= low, "delta", self.delta, f"at least {low:g} in {dtype}: below it the quotient is round-off, HF is FO")

    def notes(self, facts):
        if not facts.kinks:
            return super().notes(facts)
        line = (
            f"warning: the model calls {', '.join(facts.kinks)}: the difference quotient sees the kinks that a step of delta crosses, "
            "the exact product does not, so HF is another method than exact here; hf_error in rounds.csv says by how much"
        )
        return [*super().notes(facts), line]

    def quotient(self, task: Task, w: Params, batch: Batch, u: Params):
        """H(w) u by the central difference."""
        if self.delta_mode == "relative":
            norm = tree.norm(u)
            delta = self.delta / torch.clamp(norm, min=torch.finfo(norm.dtype).tiny ** 0.5)
        else:
            delta = self.delta
        up = task.grad(tree.axpy(delta, u, w), batch)
        low = task.grad(tree.axpy(-delta, u, w), batch)
        return tree.map(lambda a, b: (a - b) / (2 * delta), up, low)

    def meta_gradient(self, task, w, batches):
        u = task.grad(self.inner(task, w, batches)[-1], batches["outer"])
        return tree.axpy(-self.alpha, self.quotient(task, w, self.curvature_batch(batches), u), u)

    def diagnostics(self, task, w, batches, info: Info):
        """``hf_error``: ||HF - exact|| / ||alpha H u||, the relative error of the curvature term."""
        batch = self.curvature_batch(batches)
        u = task.grad(self.inner(task, w, batches)[-1], batches["outer"])
        exact = task.hvp(w, batch, u)
        return {"hf_error": tree.norm(tree.sub(self.quotient(task, w, batch, u), exact)) / tree.norm(exact)}
