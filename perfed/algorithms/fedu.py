"""FedU: a model for each user, pulled together along the edges of a graph.

C. T. Dinh, T. T. Vu, N. H. Tran, M. N. Dao, H. Zhang, "FedU: A Unified Framework for Federated Multi-Task Learning with
Laplacian Regularization", arXiv 2102.07148, algorithm 1.
Objective: sum_i f_i(w_i) + (lam / 2) sum_i sum_j a_ij ||w_i - w_j||^2, a symmetric; the penalty is lam tr(W Lap W').

    user i keeps w_i, which starts at w_0
    round k: the server draws A_k
      user i in A_k:  repeat tau times: w_i = w_i - beta g_i(w_i; B')                     B' of role `outer`; w_i goes up
      all at once:    w_i = w_i - beta tau lam c sum_{j in A_k} a_ij (w_i - w_j)          from one snapshot; w_i comes back

The sum is over the users that are there: the others' models would be old ones. The authors' public code has this line
commented out, and is local training. Replacing the users one after the other would not preserve sum_i w_i.

Switches
    graph          `complete`: a_ij = 1 | `knn`: 1 for the `neighbours` users of the nearest label distribution (Euclidean), of
                   which one names the other; at most n - 1 | `random`: a_ij uniform in [0, 1], 0 below `threshold`, as in the
                   paper's experiments | `file`: the matrix [N, N] in `path` (.npy, or numbers with commas), its diagonal ignored
    edge_counting  c, the factor of the gradient: `ordered` (c = 2, each edge counted twice, as the objective above) |
                   `unordered` (c = 1)
    aggregation    the weights in the mean that is judged as `global`; it takes no part in training

lam = 0.025: on the complete graph a round moves a user beta tau lam c A of the way to his cohort's mean, 0.2 at beta = 0.1,
tau = 10, A = 4. The step is stable while beta tau lam c lambda_max(Laplacian of the cohort) < 2; lambda_max is A on the complete
graph. Over time a user feels the share A / n of his edges: as L2GD with lambda = c A lam, c n lam if all are active.

Judged: `personal`, w_i, and `global`, the mean of the last cohort's models.
Cold start: a user that was never drawn, or is new, has the latter.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from perfed import tree
from perfed.algorithms.base import Algorithm, Local, Population, choice, register
from perfed.data.sampling import generator
from perfed.errors import UserError, require
from perfed.types import State


@register("fedu")
@dataclass(kw_only=True)
class FedU(Algorithm):
    """State: users hold their model and how often they trained; the server the mean of the last cohort, and the graph."""

    cold_start = "the mean of the last cohort's models"
    own_server_step = True

    lam: float = 0.025
    graph: str = "complete"
    neighbours: int = 3
    threshold: float = 0.25
    path: str | None = None
    edge_counting: str = "ordered"

    def __post_init__(self):
        super().__post_init__()
        require(self.lam >= 0, "lam", self.lam, "a number >= 0")
        choice("graph", self.graph, ("complete", "knn", "random", "file"))
        require(self.neighbours >= 1, "neighbours", self.neighbours, "an integer >= 1")
        require(0 <= self.threshold < 1, "threshold", self.threshold, "a number in [0, 1)")
        wanted = "the name of a file" if self.graph == "file" else "null unless graph=file"
        require((self.path is not None) == (self.graph == "file"), "path", self.path, wanted)
        choice("edge_counting", self.edge_counting, ("ordered", "unordered"))

    @property
    def square_state(self):
        return 0 if self.graph == "complete" else 1

    @property
    def c(self) -> int:
        """Gradient factor of an edge."""
        return 2 if self.edge_counting == "ordered" else 1

    def weights(self, population: Population) -> np.ndarray:
        """a [N, N] of a graph that is not complete."""
        n = population.n
        if self.graph == "knn":
            counts, members = population.counts.cpu().numpy(), population.members.cpu().numpy()
            shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
            squares = (shares**2).sum(1)
            # |a - b|^2 without an N x N x C array; rounded, so that equal distributions are equally near.
            apart = np.round(squares[:, None] + squares[None] - 2 * shares @ shares.T, 12)
            apart[:, ~members] = np.inf
            np.fill_diagonal(apart, np.inf)
            nearest = np.argsort(apart, axis=1, kind="stable")[:, : min(self.neighbours, int(members.sum()) - 1)]
            a = np.zeros((n, n))
            np.put_along_axis(a, nearest, 1, axis=1)
            a[~members] = 0
            return np.maximum(a, a.T)
        if self.graph == "random":
            a = np.triu(generator(population.seed, "graph").uniform(size=(n, n)), 1)
            return np.where(a < self.threshold, 0, a) + np.where(a < self.threshold, 0, a).T
        return self.read(n)

    def read(self, n: int) -> np.ndarray:
        """The matrix in ``path``."""
        try:
            path = Path(self.path).expanduser()
            a = np.load(path, allow_pickle=False) if path.suffix == ".npy" else np.loadtxt(path, delimiter=",", ndmin=2)
            a = np.asarray(a, dtype=np.float64)
        except (OSError, EOFError, BadZipFile, ValueError, TypeError) as error:
            raise UserError("path", self.path, f"cannot be read: {error}") from error
        fits = a.shape == (n, n)
        require(fits, "path", self.path, f"a matrix of {n} x {n} numbers, one row a user; this one has the shape {a.shape}")
        require(bool(np.isfinite(a).all() and (a >= 0).all()), "path", self.path, "numbers >= 0 only")
        require(bool(np.array_equal(a, a.T)), "path", self.path, "a symmetric matrix; this one is not equal to its transpose")
        return a * (1 - np.eye(n))

    def init(self, task, params, population):
        like = tree.leaves(params)[0]
        graph = () if self.graph == "complete" else torch.as_tensor(self.weights(population)).to(like)
        rounds = torch.zeros(population.n, dtype=torch.int64, device=like.device)
        return State({"w": params, "graph": graph}, {"w": tree.repeat(params, population.n), "rounds": rounds})

    def broadcast(self, server):
        return ()

    def receive(self, task, down, user, info, full=None):
        return Local(user["w"], task.local.init(user["w"]))

    def send(self, task, down, user, local, info):
        return local.w, {"w": local.w, "rounds": user["rounds"] + 1}

    def aggregate(self, task, server, uploads, cohort):
        step = self.beta * self.tau * self.lam * self.c
        if self.graph == "complete":

            def laplacian(w: Tensor) -> Tensor:
                return len(w) * w - w.sum(0)

        else:
            a = server["graph"][cohort.user[:, None], cohort.user[None, :]]

            def laplacian(w: Tensor) -> Tensor:
                flat = w.reshape(len(w), -1)
                return (a.sum(1, keepdim=True) * flat - a @ flat).reshape(w.shape)

        new = tree.map(lambda w: w - step * laplacian(w), uploads)
        return {**server, "w": self.average(new, cohort)}, new

    def settle(self, user, reply):
        return {**user, "w": reply}

    def shown(self, server):
        return server["w"]

    def server_models(self, server):
        return server["w"]

    def candidates(self, server, user):
        return {"personal": tree.where(user["rounds"] > 0, user["w"], server), "global": server}

    def edge(self, facts) -> float | None:
        """Mean weight of a pair of users, a lower bound for knn; None where the graph lies in a file."""
        if self.graph == "knn":
            return min(1.0, self.neighbours / max(facts.n - 1, 1))
        return {"complete": 1.0, "random": (1 - self.threshold**2) / 2}.get(self.graph)

    def coupling_lambda(self, facts):
        mean = self.edge(facts)
        if mean is None:
            return None
        return self.c * facts.active * self.lam * mean if facts.active > 1 else 0.0  # one user alone has no edge

    def notes(self, facts):
        lines = super().notes(facts)
        # No edge weighs more than 1, so lambda_max is at most that of the complete graph.
        top = self.beta * self.tau * self.lam * self.c * facts.active
        if self.graph != "file" and facts.active > 1 and top >= 2:
            known = "" if self.graph == "complete" else "at most "
            lines.append(f"warning: bound beta*tau*lam*c*lambda_max < 2 of a stable pull: it is {known}{top:.3g}")
        return lines
