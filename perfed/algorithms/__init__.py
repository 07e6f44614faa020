"""One paper, one file. Importing this package fills the registry."""

from perfed.algorithms import fedavg, local, perfedavg
from perfed.algorithms.base import ALGORITHMS, Algorithm

__all__ = ["ALGORITHMS", "Algorithm", "fedavg", "local", "perfedavg"]
