"""One paper, one file. Importing this package fills the registry."""

import importlib
import pkgutil

from perfed.algorithms.base import ALGORITHMS, Algorithm

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["ALGORITHMS", "Algorithm"]
