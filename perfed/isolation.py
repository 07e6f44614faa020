"""Jobs that follow one another in a process leave each other nothing: neither settings nor memory.

perfed itself changes no setting for good. A user's plugin may, and torch's compiler keeps what it made.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, torch.set_default_device),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (os.getcwd, os.chdir),
    (lambda: list(sys.path), lambda value: sys.path.__setitem__(slice(None), value)),
    (lambda: dict(os.environ), lambda value: (os.environ.clear(), os.environ.update(value))),
)
_CUDNN = ("enabled", "benchmark", "deterministic", "allow_tf32")


@contextmanager
def settings_kept() -> Iterator[None]:
    """What the block changes in the process is undone when it ends.

    Undone: torch's default dtype and device, threads, gradient mode, matrix product precision, determinism, cuDNN's flags and random
    generators; numpy's error handling; warning filters; environment, working and import folders; handlers of SIGINT and SIGTERM.
    Not undone: the random generators of Python and numpy, which start anywhere in every process.
    """
    before = [get() for get, _ in _SETTINGS]
    cudnn = {name: getattr(torch.backends.cudnn, name) for name in _CUDNN}
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if main else {}
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with warnings.catch_warnings(), np.errstate(), torch.random.fork_rng(gpus):
            yield
    finally:
        for (get, put), value in zip(_SETTINGS, before, strict=True):
            if get() != value:
                put(value)
        for name, value in cudnn.items():
            if getattr(torch.backends.cudnn, name) != value:
                setattr(torch.backends.cudnn, name, value)
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def isolated() -> Iterator[None]:
    """:func:`settings_kept`; and the memory of the block's tensors is freed, also after an exception that was dealt with inside.

    Freed: reference cycles (the frames of a traceback), what torch.compile made, CUDA's cached blocks. Data sets stay cached
    (``perfed.data.datasets``).
    """
    try:
        with settings_kept():
            yield
    finally:
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
