"""Which device, backend, compilation and chunking a run uses. Every ``auto`` is decided here, once, before round 1."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from perfed.errors import UserError, require

T = TypeVar("T")
MENDINGS = 16
"""Torn libraries that are removed before a compiler counts as broken."""
EAGER_FLOPS = 15e9
"""Floating-point operations a second of the eager vmapped step on one CPU core (measured on the paper's network); only
decides whether compiling may pay."""
COMPILE_FROM_SECONDS = 240
HEAP_BYTES = 256 * 2**20
"""Of the heap, which are kept when freed and lie on large pages."""
CPU_CHUNK_BYTES = 2 * 2**30
"""Memory of the lanes that are computed together on a CPU; a constant, so that equal commands chunk alike."""


@dataclass(frozen=True)
class Decision:
    """What was decided; ``notes`` say why, one line each."""

    device: torch.device
    backend: str
    chunk: int | None
    compiled: bool
    notes: tuple[str, ...]
    state_device: torch.device = torch.device("cpu")


def pick_device(wanted: str) -> tuple[torch.device, list[str]]:
    """``auto``, ``cpu``, ``cuda`` or ``cuda:i`` -> a device on which a real operation has worked."""
    if wanted == "cpu":
        return torch.device("cpu"), []
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        require(wanted == "auto", "device", wanted, "no CUDA device was found; use device=cpu or device=auto")
        return torch.device("cpu"), ["device cpu: no CUDA device was found"]
    index = int(wanted.partition(":")[2] or 0)
    require(index < count, "device", wanted, f"at most cuda:{count - 1}: {count} CUDA device{'s' if count > 1 else ''} found")
    device = torch.device("cuda", index)
    try:
        torch.ones(1, device=device).add(1).item()
    except RuntimeError as error:
        name = torch.cuda.get_device_name(index)
        reason = f"{name} failed a first operation: {str(error).strip().splitlines()[0]}"
        if wanted == "auto":
            return torch.device("cpu"), [f"warning: device cpu, since {reason}"]
        raise UserError("device", wanted, reason) from error
    return device, [f"device {device}: {torch.cuda.get_device_name(index)}"]


def compiler_found(device: torch.device) -> bool:
    """Whether torch.compile can build code for the device."""
    if device.type == "cuda":
        try:
            import triton  # noqa: F401
        except ImportError:
            return False
        return True
    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))


@cache
def keep_freed_memory() -> None:
    """Let glibc reuse the temporaries of a step instead of returning each to the system and faulting it in again.

    Blocks up to 32 MiB come from the heap, of which up to 256 MiB stay when freed and lie on large pages where the system
    grants them: a step runs through more small ones than a core remembers the places of. Elsewhere than on glibc: nothing.
    """
    if not (sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "gnu_get_libc_version")):
        return
    mmap_threshold, top_pad, trim_threshold, advice_huge_page = -3, -2, -1, 14  # <malloc.h>, <sys/mman.h>
    libc.mallopt(mmap_threshold, 32 * 2**20)
    libc.mallopt(trim_threshold, HEAP_BYTES)
    libc.mallopt(top_pad, HEAP_BYTES)
    libc.malloc.restype = ctypes.c_void_p
    libc.free(ctypes.c_void_p(libc.malloc(ctypes.c_size_t(31 * 2**20))))  # more than is left: the heap grows by so much, untouched
    with contextlib.suppress(OSError), open("/proc/self/maps") as file:
        for line in file:
            if line.rstrip().endswith("[heap]"):
                start, end = (int(x, 16) for x in line.split()[0].split("-"))
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), advice_huge_page)


@cache
def compiler_works(device_type: str) -> str | None:
    """None when a trivial function compiles and runs, else what went wrong, in one line."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns about an absent CUDA toolkit on every CPU machine
    try:
        mended(lambda: torch.compile(lambda x: x + 1)(torch.ones(2, device=device_type)))
    except Exception as error:  # torch wraps the compiler's own errors in many kinds
        return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
    return None


def compile_step(step: Callable[..., T], device: torch.device) -> Callable[..., T]:
    """``step`` as torch compiles it when it is first called."""
    from perfed.fusion import options  # loads the compiler, which takes a second

    return torch.compile(step, dynamic=False, options=options() if device.type == "cpu" else None)


def same_step(got: list[torch.Tensor], wanted: list[torch.Tensor], before: list[torch.Tensor]) -> bool:
    """Whether a compiled step moved each tensor as the eager one did, within a hundredth of the way (Euclidean) and round-off.

    Compilers order sums otherwise, which methods that divide by small numbers enlarge; a compiler that errs is further off.
    """
    for new, right, old in zip(got, wanted, before, strict=True):
        if not new.is_floating_point():
            if not torch.equal(new, right):
                return False
            continue
        equal = (new == right) | (new.isnan() & right.isnan())
        apart = torch.where(equal, torch.zeros_like(new), new - right).norm()
        moved, size = (part.nan_to_num(0.0, 0.0, 0.0).norm() for part in (right - old, right))
        if not apart <= 0.01 * moved + 64 * torch.finfo(new.dtype).eps * size:
            return False
    return True


def mended(call: Callable[[], T]) -> T:
    """``call()``, which compiles. A process that was killed while it compiled leaves half a library in torch's cache, where every later
    one would stumble over it: such a library is removed, and the call made again."""
    for _ in range(MENDINGS):
        try:
            return call()
        except Exception as error:  # torch wraps the loader's errors in its own
            if not remove_torn(error):
                raise
            torch.compiler.reset()
    return call()


def remove_torn(error: BaseException) -> bool:
    """Remove the library that could not be loaded, if it lies in the compiler's cache; whether one was removed."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    cache, found = Path(cache_dir()).resolve(), False
    for name in re.findall(r"(/[^\n:]+\.so): (?:file too short|invalid ELF header|file data|ELF load)", str(error)):
        path = Path(name).resolve()
        if path.is_relative_to(cache) and path.is_file():
            path.unlink()
            found = True
    return found


def available_memory(device: torch.device) -> int | None:
    """Bytes that are free on the device, or of the host; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None


def decide(
    engine: Any, device: torch.device, *, vmap_pays_on_cpu: bool, model: str, flops: float, lane_bytes: int, user_bytes: int = 0
) -> Decision:
    """engine: the configuration's ``engine`` block. flops: of the whole training. lane_bytes: of one lane during a step.
    user_bytes: of all that users keep from round to round.
    """
    notes = []
    backend = engine.backend
    if backend == "auto":
        backend = "vmap" if device.type != "cpu" or vmap_pays_on_cpu else "loop"
        notes.append(f"backend {backend}: model {model} on {device.type}")
    compiled = False
    if engine.compile is not False and backend == "vmap":
        seconds = flops / EAGER_FLOPS
        pays = seconds > COMPILE_FROM_SECONDS
        if engine.compile is True or pays:
            compiled = compiler_found(device)
            if not compiled:
                missing = "no C++ compiler was found" if device.type == "cpu" else "triton is not installed"
                notes.append(f"warning: not compiled: {missing}")
            elif engine.compile == "auto":
                notes.append(f"compiled: the run is long (about {seconds / 60:.0f} min of eager steps)")
    elif engine.compile is True:
        notes.append("warning: not compiled: the loop backend is plain Python")
    chunk = None if engine.chunk == "auto" else int(engine.chunk)
    if engine.chunk == "auto":
        budget = _device_bytes(device) // 4 if device.type == "cuda" else CPU_CHUNK_BYTES
        chunk = max(1, int(budget // lane_bytes))
    home = device
    large = device.type == "cuda" and user_bytes > _device_bytes(device) // 4
    if engine.state_device == "cpu" or (engine.state_device == "auto" and large):
        home = torch.device("cpu")
        if device.type != "cpu":
            notes.append(f"users' state ({user_bytes / 2**30:.1f} GiB) lies in host memory")
    return Decision(device, backend, chunk, compiled, tuple(notes), home)


def _device_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory
