"""A name -> images or vectors with labels, loaded once. No users yet: who owns what is ``partition.py``.

Every kind of data is one dataclass. Its fields are its YAML keys; ``fingerprint(root)`` says quickly whether the data
are there and which they are; ``read(root)`` returns the arrays. A plugin adds one like this::

    @register
    @dataclass(kw_only=True)
    class Mine(DatasetConfig):
        name: str = "mine"
        def fingerprint(self, root): return sha256("mine", 1)
        def read(self, root): return Arrays(x, y, n_train, classes=("a", "b"))

Fields that change no number (``path``, ``download``) carry the metadata ``identity=False``. Bad input, absent or
damaged data raise :class:`UserError`.
"""

from __future__ import annotations

from perfed.data.datasets import folder, npz, published, small  # noqa: F401  (each registers its kinds)
from perfed.data.datasets.base import DATASETS, Arrays, Dataset, DatasetConfig, fingerprint, load, register
from perfed.data.datasets.files import sha256

__all__ = ["DATASETS", "Arrays", "Dataset", "DatasetConfig", "fingerprint", "load", "register", "sha256"]
