"""Hyper-parameters in which the rows of a simulation differ: what binds a method to one lane.

A grid over float hyper-parameters can be trained side by side: every row (a trial and a seed) has its own values, and whatever is mapped
over lanes reads them as numbers or 0-d tensors. Everything else (which batches are drawn, how many steps a round has, who trains) is done
once for all lanes, and there such a value is a :class:`Varies`: whoever uses it gets :class:`Unbound`, so nothing is silently wrong.

Keys are those of the command line: ``algo.beta``, ``optimizer.momentum``, ``server.lr``, and ``adapt.lr``, the step of the protocol.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from perfed.algorithms.base import Algorithm, Task

PARTS = ("algo", "optimizer", "server")
"""Groups whose float fields may differ from lane to lane."""
ADAPT_LR = "adapt.lr"


class Unbound(TypeError):
    """A hyper-parameter in which lanes differ was used where all lanes are served at once."""

    def __init__(self, key: str):
        self.key = key
        super().__init__(f"{key} differs between lanes, but is read outside of what is computed lane by lane")


class Varies:
    """The value of a hyper-parameter in which lanes differ. Any arithmetic, comparison, conversion or call raises Unbound."""

    def __init__(self, key: str):
        self._key = key

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise Unbound(self._key)

    def __getattr__(self, name: str) -> NoReturn:
        raise Unbound(self.__dict__.get("_key", "a hyper-parameter"))

    @classmethod
    def __torch_function__(cls, f: Any, kinds: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> NoReturn:
        raise Unbound(next((v._key for v in (*args, *(kwargs or {}).values()) if isinstance(v, cls)), "a hyper-parameter"))

    __hash__ = None


for _name in (
    "bool float int index complex str format len iter getitem call array contains round trunc floor ceil "
    "eq ne lt le gt ge neg pos abs invert "
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod divmod rdivmod pow rpow matmul rmatmul "
    "and rand or ror xor rxor lshift rlshift rshift rrshift"
).split():
    setattr(Varies, f"__{_name}__", Varies._refuse)


class Method(NamedTuple):
    """An algorithm and the task it works on, as one lane has them. ``own``: the values that are the lane's own, by key."""

    algo: Algorithm
    task: Task
    own: Mapping[str, Any] = {}

    def adapt_lr(self, common: float | None) -> float | Tensor | None:
        """The step of adaptation: the lane's own, else that of the protocol."""
        return self.own.get(ADAPT_LR, common)


def bind(method: Method, own: Mapping[str, Any]) -> Method:
    """The same with other values: numbers, 0-d tensors or :class:`Varies`. Nothing is copied but the dataclasses that change."""
    if not own:
        return method
    algo, task = method.algo, method.task
    parts = {"algo": algo, "optimizer": task.local, "server": task.server}
    for group in PARTS:
        mine = {key.partition(".")[2]: value for key, value in own.items() if key.partition(".")[0] == group}
        if mine:
            parts[group] = copy.copy(parts[group])
            for name, value in mine.items():
                setattr(parts[group], name, value)
    if parts["optimizer"] is not task.local or parts["server"] is not task.server:
        task = copy.copy(task)
        task.local, task.server = parts["optimizer"], parts["server"]
    return Method(parts["algo"], task, own)
