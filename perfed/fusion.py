"""Two rewritings of a compiled step that torch's compiler does not make itself; both on the CPU.

Plain gradient descent ends in w + c (a @ b): the product is a layer's gradient, a and b are its inputs and errors, and c is
minus the step size. Compiled as it stands, the gradients of all lanes are written to memory and read again for a sum, which
takes as long as the product. Here the product adds onto w where w lies.

ELU needs exp(x) - 1 on the way forward and exp(x) on the way back, and the compiler computes both. Here it is one
exponential. By subtraction the first is off by half a unit in the last place of 1, as every sum of numbers near 1 is.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

aten = torch.ops.aten

LARGE = 2**18
"""Weights of all lanes, in numbers, from which on it pays: smaller ones stay in the cache, and their sum joins other loops."""
_VIEWS = (aten.expand.default, aten.permute.default, aten.reshape.default, aten.view.default, aten.transpose.int)


def _is(node: Any, target: Any) -> bool:
    """A call that no one but its one reader needs."""
    return isinstance(node, Node) and node.target is target and len(node.users) == 1 and not node.kwargs


def _source(node: Node) -> Node:
    """What a chain of views shows."""
    while node.target in _VIEWS:
        node = node.args[0]
    return node


def update_in_product(graph: Graph, least: int) -> int:
    """Turn ``w.copy_(w + c * bmm(a, b))`` into ``w.baddbmm_(a, b, alpha=c)`` where w [L, i, o], an input on the CPU, holds at
    least so many numbers; how often that was done."""
    made = 0
    for copy in list(graph.find_nodes(op="call_function", target=aten.copy_.default)):
        w, total = copy.args
        if w.op != "placeholder" or not _is(total, aten.add.Tensor) or total.args[0] is not w:
            continue
        if not _is(scaled := total.args[1], aten.mul.Tensor) or not isinstance(scaled.args[1], float):
            continue
        if not _is(product := scaled.args[0], aten.bmm.default):
            continue
        value, other = w.meta["val"], product.meta["val"]
        alike = value.shape == other.shape and value.dtype == other.dtype and value.is_contiguous()
        if not alike or value.device.type != "cpu" or value.numel() < least:
            continue
        # The product must not read what it is writing, and whoever else reads w has done so: the copies come last.
        if any(_source(factor) is w for factor in product.args):
            continue
        with graph.inserting_before(copy):
            update = graph.call_function(aten.baddbmm_.default, (w, *product.args), {"alpha": scaled.args[1]})
        update.meta.update(copy.meta)
        copy.replace_all_uses_with(update)
        for node in (copy, total, scaled, product):
            graph.erase_node(node)
        made += 1
    return made


def one_exponential(graph: Graph) -> int:
    """Turn ``expm1(x)`` into ``exp(x) - 1`` where exp(x) is computed too, on the CPU; how often that was done."""
    made = 0
    for less_one in list(graph.find_nodes(op="call_function", target=aten.expm1.default)):
        (x,) = less_one.args
        others = [node for node in x.users if node.target is aten.exp.default]
        if not others or x.op == "placeholder" or less_one.meta["val"].device.type != "cpu":
            continue
        with graph.inserting_after(x):
            power = graph.call_function(aten.exp.default, (x,))
        with graph.inserting_after(power):
            difference = graph.call_function(aten.sub.Tensor, (power, 1.0))
        for old, new in ((less_one, difference), *((node, power) for node in others)):
            new.meta.update(old.meta)
            old.replace_all_uses_with(new)
            graph.erase_node(old)
        made += 1
    return made


class Rewritings(CustomGraphPass):
    """Both. ``least``: numbers in w from which on; ``updates``, ``exponentials``: how often each has been made."""

    def __init__(self, least: int = LARGE):
        self.least, self.updates, self.exponentials = least, 0, 0

    def uuid(self) -> Any:
        """torch keeps compiled code under this key."""
        return get_hash_for_files((__file__,), str(self.least))

    def __call__(self, graph: Graph) -> None:
        self.exponentials += one_exponential(graph)
        self.updates += update_in_product(graph, self.least)


@cache
def options() -> dict[str, Any] | None:
    """What torch.compile is to be given for a step on the CPU; None where this torch does not take it, which a trial shows."""

    def step(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        w.copy_(w - 2.0 * (a @ b))

    w, a, b = (torch.arange(8.0).reshape(2, 2, 2) + i for i in range(3))
    wanted = w - 2.0 * (a @ b)
    try:
        torch.compile(step, dynamic=False, options={"post_grad_custom_post_pass": Rewritings(1)})(w, a, b)
    except Exception:  # of whatever kind: the step is compiled without it
        return None
    return {"post_grad_custom_post_pass": Rewritings()} if torch.equal(w, wanted) else None
