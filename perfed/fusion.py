"""One rewriting of the compiled step that torch's compiler does not make itself.

Plain gradient descent ends in w + c (a @ b): the product is a layer's gradient, a and b are its inputs and errors, and c is
minus the step size. Compiled as it stands, the gradients of all lanes are written to memory and read again for a sum; on one
CPU core the paper's network waits for memory half of that time. Here the product adds onto w where w lies.
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


class UpdateInProduct(CustomGraphPass):
    """Turn ``w.copy_(w + c * bmm(a, b))`` into ``w.baddbmm_(a, b, alpha=c)`` where w [L, i, o] is an input on the CPU.

    ``least``: numbers in w from which on. ``made``: how often it has been done.
    """

    def __init__(self, least: int = LARGE):
        self.least, self.made = least, 0

    def uuid(self) -> Any:
        """torch keeps compiled code under this key."""
        return get_hash_for_files((__file__,), str(self.least))

    def __call__(self, graph: Graph) -> None:
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
            if not alike or value.device.type != "cpu" or value.numel() < self.least:
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
            self.made += 1


@cache
def options() -> dict[str, Any] | None:
    """What torch.compile is to be given for a step on the CPU; None where this torch does not take it, which a trial shows."""

    def step(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        w.copy_(w - 2.0 * (a @ b))

    w, a, b = (torch.arange(8.0).reshape(2, 2, 2) + i for i in range(3))
    wanted = w - 2.0 * (a @ b)
    try:
        torch.compile(step, dynamic=False, options={"post_grad_custom_post_pass": UpdateInProduct(1)})(w, a, b)
    except Exception:  # of whatever kind: the step is compiled without it
        return None
    return {"post_grad_custom_post_pass": UpdateInProduct()} if torch.equal(w, wanted) else None
