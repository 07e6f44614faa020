"""FedAvg with ARUBA: the initial model and a step for each of its coordinates, learned from how far users move.

M. Khodak, M.-F. Balcan, A. Talwalkar, "Adaptive Gradient-Based Meta-Learning Methods", NeurIPS 2019, arXiv 1906.02717:
algorithm 2 (there G is called g), with FedAvg's tau steps and mean. One knob less: eps = beta zeta, so that eta starts at beta.

    server: phi = w_0,  b = eps^2,  G = zeta^2,  t = 1
    round k: the server draws A_k and sends phi and eta = sqrt(b / G)
      user i in A_k:  th = phi, s = 0;  repeat tau times, with batch B' (role `outer`):
        g = g_i(th; B');  th = th - eta o g;  s = s + g^2              o, squares and roots by coordinates
      for each user in A_k:
        b = b + (th - phi)^2 / 2 + eps^2 / (t + 1)^p
        G = G + s + zeta^2 / (t + 1)^p
        t = t + 1
      phi = mean over A_k of th

t counts users, not rounds; the decrements depend on t alone, so the order of the users does not matter. phi and eta go
down, th and s go up: 2d numbers each.

Switches
    zeta, p      weight and decay of the terms that keep b / G near beta^2
    isotropic    one step for all coordinates: b, G and s are then means over the coordinates, so that eta is the root of the
                 ratio of their sums; d + 1 numbers each way
    refine_c     adaptation ("refinement") takes steps of size eta: null keeps eta (ARUBA), a number c >= 0 is ARUBA++:
                 G' = G at first, step sqrt(b / G'), and G' = G' + c g^2 after each step

The step needs plain SGD, and the server's step is the mean. Users keep nothing: a new one refines the server's model. Judged:
the server's model; adaptation uses the learned step, unless adapt.lr is given, which is plain SGD.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from perfed import tree
from perfed.algorithms.base import Algorithm, register
from perfed.errors import require
from perfed.types import Params, State, Tree


class Running(NamedTuple):
    """A user's model, the step and the sum of squared gradients; the last two are one number if isotropic."""

    th: Params
    eta: Tree
    s: Tree


class Refined(NamedTuple):
    """A model and what its steps come from."""

    w: Params
    b: Tree
    G: Tree


def step_of(b: Tree, G: Tree) -> Tree:
    """eta."""
    return tree.map(lambda bi, Gi: (bi / Gi).sqrt(), b, G)


def mean_square(x: Params) -> Tensor:
    """Mean of the squares of all coordinates."""
    return tree.dot(x, x) / tree.numel(x)


@register("aruba")
@dataclass(kw_only=True)
class Aruba(Algorithm):
    """Server: w (phi), b, G and t, the number of users that have reported, plus 1."""

    zeta: float = 1.0
    p: float = 1.0
    isotropic: bool = False
    refine_c: float | None = None

    own_server_step: ClassVar[bool] = True
    plain_sgd: ClassVar[bool] = True
    learned_step: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        require(self.zeta > 0, "zeta", self.zeta, "a number > 0")
        require(self.p >= 0, "p", self.p, "a number >= 0")
        require(self.refine_c is None or self.refine_c >= 0, "refine_c", self.refine_c, "null or a number >= 0")

    @property
    def eps(self) -> float:
        return self.beta * self.zeta

    def squares(self, g: Params) -> Tree:
        """g^2, by coordinate or as their mean."""
        return mean_square(g) if self.isotropic else tree.map(torch.square, g)

    def filled(self, value: float, params: Params) -> Tree:
        """A tree of the shape of b and G."""
        return tree.map(lambda t: torch.full_like(t, value), self.squares(params))

    def scaled(self, eta: Tree, g: Params) -> Params:
        """eta o g."""
        return tree.scale(eta, g) if self.isotropic else tree.map(torch.mul, eta, g)

    def init(self, task, params, population):
        b, G = self.filled(self.eps**2, params), self.filled(self.zeta**2, params)
        return State({"w": params, "b": b, "G": G, "t": torch.ones((), dtype=torch.int64)}, ())

    def broadcast(self, server):
        return {"w": server["w"], "eta": step_of(server["b"], server["G"])}

    def receive(self, task, down, user, info, full=None):
        return Running(down["w"], down["eta"], tree.zeros(down["eta"]))

    def step(self, task, local, batches, info):
        g = task.grad(local.th, batches["outer"])
        th = tree.sub(local.th, self.scaled(local.eta, g))
        return local._replace(th=th, s=tree.map(torch.add, local.s, self.squares(g)))

    def send(self, task, down, user, local, info):
        return {"th": local.th, "s": local.s}, user

    def aggregate(self, task, server, uploads, cohort):
        reports = len(cohort.m)
        after = server["t"] + 1 + torch.arange(reports, device=server["t"].device)  # t + 1 of each user in turn
        decay = (after.to(torch.float64) ** -self.p).sum()
        moved = tree.map(lambda th, phi: th - phi, uploads["th"], server["w"])
        if self.isotropic:
            moved = sum(t.square().sum() for t in tree.leaves(moved)) / tree.numel(server["w"])
        else:
            moved = tree.map(lambda t: t.square().sum(0), moved)
        b = tree.map(lambda bi, v: bi + v / 2 + (self.eps**2 * decay).to(bi.dtype), server["b"], moved)
        G = tree.map(lambda Gi, s: Gi + s.sum(0) + (self.zeta**2 * decay).to(Gi.dtype), server["G"], uploads["s"])
        return {"w": self.average(uploads["th"], cohort), "b": b, "G": G, "t": server["t"] + reports}, ()

    def server_models(self, server):
        return server["w"]

    def candidates(self, server, user):
        return {"global": Refined(server["w"], server["b"], server["G"])}

    def adapt_step(self, task, carry, batch, lr):
        g = task.grad(carry.w, batch)
        if lr is not None:
            return carry._replace(w=self.moved(task, carry.w, g, lr))
        w = self.moved(task, carry.w, self.scaled(step_of(carry.b, carry.G), g), 1.0)
        return Refined(w, carry.b, carry.G if self.refine_c is None else tree.axpy(self.refine_c, self.squares(g), carry.G))

    def adapted(self, carry):
        return carry.w

    def diagnostics(self, task, w, batches, info):
        """``eta_mean``: mean of eta over its entries; ``w`` is the candidate, with its b and G."""
        eta = step_of(w.b, w.G)
        return {"eta_mean": sum(t.sum() for t in tree.leaves(eta)) / tree.numel(eta)}
