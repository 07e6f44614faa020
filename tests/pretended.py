"""A pretended GPU: tensors that compute on the host, say that they lie on ``cuda:0``, and refuse to meet tensors that do not.

On a machine without a GPU this finds what only a GPU would: an index or a number made on the wrong device, a result that is
read without being fetched. Numbers must come out as on the host, to the last bit. Out of reach: derivatives of derivatives for
which torch makes tensors of its own (GroupNorm's).
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("cuda", 0)
aten = torch.ops.aten
_NUMBERS = ("add", "sub", "mul", "div", "pow", "where", "eq", "ne", "lt", "le", "gt", "ge", "maximum", "minimum", "bitwise", "logical")
"""Operations that take a number on the host beside tensors elsewhere."""


class Pretended(torch.Tensor):
    """``held`` is the tensor on the host. torch's own code takes this one for a tensor on the host; Python sees the GPU."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor):
        like = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, held.size(), **like)
        made.held = held
        return made

    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})

    def __repr__(self) -> str:
        return f"Pretended({self.held!r})"

    def cpu(self):
        return self.held

    def tolist(self):
        return self.held.tolist()

    def numpy(self, *args, **kwargs):
        raise TypeError("can't convert a tensor on cuda:0 to numpy: use Tensor.cpu() first")

    __array__ = numpy


def _held(value: Any) -> Any:
    return value.held if isinstance(value, Pretended) else value


def _meet(function, args: tuple, here: list[torch.Tensor]) -> None:
    """Raise where torch would: tensors of the GPU beside ``here``, those of the host."""
    name = str(function).split(".")[1]
    if function in (aten._to_copy.default, aten.copy_.default):
        return
    if name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"):
        if not isinstance(args[0], Pretended):
            raise RuntimeError(f"indices on the GPU of a tensor on the host: {name}")
        here = [t for t in here if any(t is value for value in args[2:])]
    if any(t.dim() > 0 for t in here) or (here and not name.startswith(_NUMBERS)):
        raise RuntimeError(f"tensors of two devices meet in {name}: {[tuple(t.shape) for t in here]} lie on the host")


def _run(function, args: tuple, kwargs: dict) -> Any:
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    there = [t for t in tensors if isinstance(t, Pretended)]
    if there and len(there) < len(tensors):
        _meet(function, args, [t for t in tensors if not isinstance(t, Pretended)])
    wanted = kwargs.get("device")
    on_gpu = bool(there) or (wanted is not None and torch.device(wanted).type == "cuda")
    if function is aten.copy_.default:
        on_gpu = isinstance(args[0], Pretended)
    if wanted is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    out = function(*tree_map(_held, args), **tree_map(_held, kwargs))
    returns = function._schema.returns
    if returns and returns[0].alias_info is not None and returns[0].alias_info.is_write:  # in place: what it was given
        return kwargs.get("out", args[0])
    return tree_map(lambda t: Pretended(t) if isinstance(t, torch.Tensor) else t, out) if on_gpu else out


class _Device(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


def _device(original):
    """``Tensor.device``, which inside of vmap and grad is that of what they wrap."""

    def device(self) -> torch.device:
        while torch._C._functorch.is_functorch_wrapped_tensor(self):
            self = torch._C._functorch.get_unwrapped(self)
        return GPU if isinstance(self, Pretended) else original.__get__(self)

    return property(device)


def _to(original):
    """``Tensor.to``: torch's own would take a pretended tensor for one on the host."""

    def to(self, *args, **kwargs):
        others = [t for t in args if isinstance(t, Pretended)]
        device = next((torch.device(a) for a in args if isinstance(a, (torch.device, str))), kwargs.get("device"))
        if not isinstance(self, Pretended):
            if type(self) is torch.Tensor and others:
                return Pretended(original(self, *map(_held, args), **kwargs))
            return original(self, *args, **kwargs)
        if device is None and (other := next((t for t in args if isinstance(t, torch.Tensor)), None)) is not None:
            device = other.device
        rest = [_held(a) for a in args if not isinstance(a, (torch.device, str)) and a is not None]
        held = original(self.held, *rest, **{k: v for k, v in kwargs.items() if k != "device"}) if rest or kwargs else self.held
        if device is not None and torch.device(device).type == "cpu":
            return held
        return self if held is self.held else Pretended(held)

    return to


def _made(original):
    """``torch.tensor`` and ``torch.as_tensor``, whose device torch would look for."""

    def make(data, *args, device=None, **kwargs):
        out = original(_held(data), *args, **kwargs)
        gpu = isinstance(data, Pretended) if device is None else torch.device(device).type == "cuda"
        return Pretended(out) if gpu else out

    return make


@contextmanager
def pretended_gpu(monkeypatch):
    """``cuda:0`` inside of the block."""
    plenty = 2**34
    with monkeypatch.context() as patch:
        for name, answer in {
            "_lazy_init": None,
            "is_available": True,
            "device_count": 1,
            "get_device_name": "pretended",
            "mem_get_info": (plenty, plenty),
            "get_device_properties": SimpleNamespace(total_memory=plenty),
            "max_memory_allocated": 0,
            "synchronize": None,
        }.items():
            patch.setattr(torch.cuda, name, lambda *args, answer=answer: answer)
        patch.setattr(torch.Tensor, "device", _device(torch.Tensor.device))
        patch.setattr(torch.Tensor, "to", _to(torch.Tensor.to))
        for name in ("tensor", "as_tensor"):
            patch.setattr(torch, name, _made(getattr(torch, name)))
        with _Device():
            yield
