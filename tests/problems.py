"""Tiny problems with known answers, and federations built by hand. Everything is float64 unless said otherwise.

A *formula* model has the loss itself as its only score, so an example can be any function of the weights: the constants
of the function are the example's input. Users are given as one array of inputs each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from perfed.algorithms.base import Algorithm, Task
from perfed.data.partition import Owned, Partition
from perfed.draws import Lanes, SeedData, make_pool
from perfed.federate import Federation
from perfed.models import Logistic, Mlp, Model
from perfed.optimizers import Average, LocalOptimizer, ServerOptimizer, Sgd
from perfed.types import Batch, Params


@dataclass(kw_only=True)
class Formula(Model):
    """The losses of examples are ``value(w, x)``; labels are all 0."""

    name: str = "formula"

    def value(self, w: Tensor, x: Tensor) -> Tensor:
        """Weights [d], examples [B, F] -> losses [B]."""
        raise NotImplementedError

    def apply(self, params, x):
        return self.value(params["w"], x).unsqueeze(-1)

    def losses(self, scores, y):
        return scores[:, 0]


@dataclass(kw_only=True)
class Quadratic(Formula):
    """w'A w/2 - b'w; the example is A (d*d numbers, symmetric), then b."""

    def value(self, w, x):
        d = len(w)
        A, b = x[:, : d * d].reshape(-1, d, d), x[:, d * d :]
        return (A @ w) @ w / 2 - b @ w


@dataclass(kw_only=True)
class AbsCubic(Formula):
    """sum_j |w_j|^3/6 + g'w; the example is g. Its Hessian diag(|w_j|) is 1-Lipschitz: rho = 1."""

    def value(self, w, x):
        return (w.abs() ** 3).sum() / 6 + x @ w


@dataclass(kw_only=True)
class Polynomial(Formula):
    """a w^4/4 + h w^2/2 - c w in one dimension; the example is (a, h, c). Gradient a w^3 + h w - c, Hessian 3 a w^2 + h."""

    def value(self, w, x):
        return x[:, 0] * w[0] ** 4 / 4 + x[:, 1] * w[0] ** 2 / 2 - x[:, 2] * w[0]


def quadratic(A: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[1, d*d + d]: a user with one example, whose loss is w'A w/2 - b'w."""
    return np.concatenate([np.ravel(A), np.ravel(b)])[None].astype(np.float64)


def random_quadratics(n: int, d: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A [n, d, d] with eigenvalues in [0.5, 2], different for each user, and b [n, d]."""
    rng = np.random.default_rng(seed)
    q = np.linalg.qr(rng.normal(size=(n, d, d)))[0]
    A = np.einsum("nij,nj,nkj->nik", q, rng.uniform(0.5, 2, (n, d)), q)
    return (A + A.transpose(0, 2, 1)) / 2, rng.normal(size=(n, d))


def coin() -> Logistic:
    """COIN: one linear layer 1 -> 2 without bias, cross-entropy, from (0, 0); the input is always [1.0]."""
    return Logistic(name="logistic", bias=False)


COIN_START = {"layer1.weight": torch.zeros(1, 2, dtype=torch.float64)}
COIN_X = np.array([[1.0]])


def mlp(features: int = 3, hidden: int = 4, classes: int = 3, seed: int = 0) -> tuple[Mlp, Params]:
    """A small network of the kind that the paper uses, and its initial parameters."""
    model = Mlp(name="mlp", hidden=[hidden])
    return model, model.init((features,), classes, np.random.default_rng(seed))


def blobs(sizes: Sequence[int], features: int = 3, classes: int = 3, seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Inputs and labels of users with these numbers of examples; every user has his own mean."""
    rng = np.random.default_rng(seed)
    xs = [rng.normal(rng.normal(size=features), 1.0, (m, features)) for m in sizes]
    return xs, [rng.integers(0, classes, m) for m in sizes]


def owned(sizes: Sequence[int], start: int = 0) -> Owned:
    """Users own consecutive examples, from position ``start`` on."""
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Owned(np.arange(start, start + offsets[-1], dtype=np.int64), offsets)


def federation(
    algo: Algorithm,
    model: Model,
    xs: Sequence[np.ndarray],
    start: Params | Tensor | Sequence[float],
    *,
    ys: Sequence[np.ndarray] | None = None,
    test_ys: Sequence[np.ndarray] | None = None,
    active: int | None = None,
    seeds: Sequence[int] = (0,),
    backend: str = "vmap",
    dtype: torch.dtype = torch.float64,
    local: LocalOptimizer | None = None,
    server: ServerOptimizer | None = None,
    task: type[Task] = Task,
    kind: type[Federation] = Federation,
) -> Federation:
    """Users with train inputs ``xs`` and labels ``ys`` (0 if left out), all active if not said; user i tests on his own inputs.

    ``start`` is the initial model, or for formulas the weight vector; it is the same for all seeds.
    """
    ys = [np.zeros(len(x), np.int64) for x in xs] if ys is None else ys
    test_ys = ys if test_ys is None else test_ys
    sizes, n = [len(x) for x in xs], len(xs)
    train, test = owned(sizes), owned(sizes, sum(sizes))
    partition = Partition(train, owned([0] * n), test, np.zeros(n, np.int64), ("all",), np.ones(n, bool))
    params = start if isinstance(start, dict) else {"w": torch.as_tensor(start, dtype=torch.float64)}
    x = np.concatenate([*xs, *xs]).astype(np.float64)
    y = np.concatenate([*ys, *test_ys]).astype(np.int64)
    return kind(
        algo=algo,
        task=task(model, local or Sgd(name="sgd"), server or Average(name="average")),
        pool=make_pool(x, y, np.array(0.0), np.array(1.0), torch.device("cpu"), dtype),
        data=[SeedData(partition, np.arange(n), s) for s in seeds],
        initial=[params] * len(seeds),
        active=active or n,
        classes=max(2, int(y.max()) + 1),
        backend=backend,
    )


def run(fed: Federation, rounds: int) -> Federation:
    for _ in range(rounds):
        fed.round()
    return fed


def weights(fed: Federation, s: int = 0) -> np.ndarray:
    """The server's parameters of seed row s as one vector."""
    return np.concatenate([t[s].numpy().ravel() for t in fed.state.server["w"].values()])


def drawn(fed: Federation, user: int, k: int, steps: int, s: int = 0) -> dict[str, list[np.ndarray]]:
    """{role: for each step the pool positions that the user reads in round k}, without the padding."""
    index, weight = fed.batches(Lanes(np.array([s]), np.array([user])), k, steps)
    return {role: [index[role][0, t][weight[role][0, t] > 0].numpy() for t in range(steps)] for role in index}


def batch_of(fed: Federation, index: Sequence[int]) -> Batch:
    """These examples of the pool, all of weight 1."""
    where = torch.as_tensor(np.asarray(index), dtype=torch.int64)
    return fed.pool.batch(where, torch.ones(len(where), dtype=fed.dtype))


@dataclass
class Spy(Task):
    """Remembers the point and the examples of every gradient and Hessian-vector product (``loop`` backend)."""

    log: list[tuple[str, Tensor, list[int]]] = field(default_factory=list)

    def _note(self, what: str, params: Params, batch: Batch) -> None:
        point = torch.cat([t.detach().flatten() for t in params.values()]).clone()
        self.log.append((what, point, batch.index.tolist()))

    def grad(self, params, batch):
        self._note("grad", params, batch)
        return super().grad(params, batch)

    def hvp(self, params, batch, v):
        self._note("hvp", params, batch)
        return super().hvp(params, batch, v)
