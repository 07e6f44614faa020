"""Rewritings of the compiled step: the same numbers. An update becomes part of a product only where nobody else reads it."""

from __future__ import annotations

import pytest
import torch
from small import algorithm, close, cloud, federation, ranges, split
from torch.fx.experimental.proxy_tensor import make_fx

from perfed import fusion, tree
from perfed.device import compiler_found, same_step
from perfed.fusion import Rewritings
from perfed.models import MODELS


def tensors() -> tuple[torch.Tensor, ...]:
    """w [2, 3, 3] and factors of such shape; small integers, so that every sum is exact."""
    return tuple(torch.arange(18.0).reshape(2, 3, 3) - i for i in (0, 3, 7))


def passed(step, least: int = 1) -> tuple[int, tuple, tuple, str]:
    """How often the pass acts on a step; the arguments after the step with it and without it; its graph."""
    graph = make_fx(step, tracing_mode="fake")(*tensors())
    with_it, without = tensors(), tensors()
    step(*without)
    rewrite = Rewritings(least)
    rewrite(graph.graph)
    graph.graph.lint()
    graph.recompile()
    graph(*with_it)
    return rewrite.updates, with_it, without, str(graph.graph)


def test_an_update_becomes_part_of_its_product():
    def step(w, a, b):
        w.copy_(w + torch.bmm(a, b) * -0.5)

    made, got, wanted, graph = passed(step)
    assert made == 1 and "baddbmm_" in graph and "aten.add" not in graph and "aten.copy_" not in graph
    close(got, wanted, rtol=0)
    assert not torch.equal(got[0], tensors()[0])


def test_two_updates_of_two_layers():
    def step(w, a, b):
        hidden = torch.bmm(w, b)  # reads the old w
        w.copy_(w + torch.bmm(a.transpose(1, 2), b) * -0.5)
        a.copy_(a + torch.bmm(hidden, b) * 2.0)

    made, got, wanted, _ = passed(step)
    assert made == 2
    close(got, wanted, rtol=0)


UNTOUCHED = {
    "the product reads what it would write": lambda w, a, b: w.copy_(w + torch.bmm(w, b) * -0.5),
    "or a view of it": lambda w, a, b: w.copy_(w + torch.bmm(a, w.transpose(1, 2)) * -0.5),
    "a step size of each lane": lambda w, a, b: w.copy_(w + torch.bmm(a, b) * b[:, :1, :1]),
    "onto something else": lambda w, a, b: w.copy_(a + torch.bmm(a, b) * -0.5),
    "momentum": lambda w, a, b: w.copy_(w + (torch.bmm(a, b) + w) * -0.5),
    "the gradient is needed too": lambda w, a, b: (g := torch.bmm(a, b), w.copy_(w + g * -0.5), a.copy_(g)),
    "no plain sum": lambda w, a, b: w.copy_(torch.add(w, torch.bmm(a, b) * -0.5, alpha=2)),
    "not in place": lambda w, a, b: a.copy_((w + torch.bmm(b, b) * -0.5).relu()),
}


@pytest.mark.parametrize("case", list(UNTOUCHED))
def test_what_is_left_alone(case):
    made, got, wanted, _ = passed(lambda *x: (UNTOUCHED[case](*x), None)[1])
    assert made == 0
    close(got, wanted, rtol=0)


def test_small_weights_are_left_alone():
    made, got, wanted, _ = passed(lambda w, a, b: (w.copy_(w + torch.bmm(a, b) * -0.5), None)[1], least=19)
    assert made == 0 and passed(lambda w, a, b: (w.copy_(w + torch.bmm(a, b) * -0.5), None)[1], least=18)[0] == 1
    close(got, wanted, rtol=0)


def test_one_exponential_serves_both_ways():
    def step(w, a, b):
        w.copy_(torch.where(w > 0, w, torch.expm1(w)))  # nobody needs exp(w)
        h = torch.bmm(b, a) * 0.01
        a.copy_(torch.where(h > 0, h, torch.expm1(h)) + torch.exp(h))

    graph = make_fx(step, tracing_mode="fake")(*tensors())
    rewrite, got, wanted = Rewritings(), tensors(), tensors()
    rewrite(graph.graph)
    graph.graph.lint()
    graph.recompile()
    graph(*got), step(*wanted)
    close(got, wanted, rtol=1e-6)
    targets = [node.target for node in graph.graph.nodes]
    assert rewrite.exponentials == 1 and targets.count(torch.ops.aten.expm1.default) == 1
    assert targets.count(torch.ops.aten.exp.default) == 1


def test_where_torch_does_not_take_it_steps_are_compiled_without(monkeypatch):
    def refuses(step, options=None, **_):
        raise RuntimeError("no such option")

    fusion.options.cache_clear()
    monkeypatch.setattr(torch, "compile", refuses)
    assert fusion.options() is None
    fusion.options.cache_clear()
    monkeypatch.setattr(torch, "compile", lambda step, **_: lambda *x: None)  # wrong numbers
    assert fusion.options() is None
    fusion.options.cache_clear()


# ---------------------------------------------------------------- the first compiled steps are compared with eager ones


def errs(wrong: set[str], after: int = 0):
    """torch.compile, of which the steps of these names are wrong in one tensor, by 3 % of the way, from a call on."""

    def compile(step, **_):
        calls = []

        def compiled(local, *rest):
            before = tree.map(torch.clone, local)
            new = step(local, *rest)
            calls.append(1)
            if step.__name__ in wrong and len(calls) > after:
                new.w["layer1.bias"].add_(new.w["layer1.bias"] - before.w["layer1.bias"], alpha=0.03)
            return new

        return compiled

    return compile


def simulation(compiled: bool):
    x, y = cloud(40)
    fed = federation(algorithm("fedprox", mu=0.5, tau=3), x, y, [split(ranges([15, 15]), ranges([5, 5], 30))], compiled=compiled)
    fed.round(), fed.round()
    return fed


@pytest.mark.parametrize("wrong, after", [(set(), 0), ({"_step_in_place"}, 0), ({"_step_in_place"}, 1)])
def test_a_wrong_compiled_step_is_replaced_by_one_that_writes_to_no_input(wrong, after, monkeypatch):
    monkeypatch.setattr(torch, "compile", errs(wrong, after))
    fed = simulation(True)
    assert fed.compiled and fed.warning is None and len(fed._ways) == 2 - len(wrong)
    close(fed.state.server, simulation(False).state.server, rtol=0)


def test_where_no_compiled_step_is_right_all_are_eager(monkeypatch):
    monkeypatch.setattr(torch, "compile", errs({"_step_in_place", "_step"}))
    fed = simulation(True)
    assert not fed.compiled and fed.warning == f"warning: not compiled: torch {torch.__version__} gives other numbers than without"
    close(fed.state.server, simulation(False).state.server, rtol=0)


def test_what_counts_as_the_same_step():
    old, right = torch.ones(2000), torch.ones(2000) + 1e-2
    assert same_step([right], [right], [old])
    assert same_step([right + 0.9e-4], [right], [old]) and not same_step([right + 1.1e-4], [right], [old])
    assert same_step([old + 1e-6], [old], [old]) and not same_step([old + 1e-4], [old], [old])  # where nothing moves: round-off
    assert not same_step([right, old], [right, right], [old, old])
    assert not same_step([torch.arange(3)], [torch.arange(3) + 1], [torch.arange(3)])
    away = torch.tensor([float("nan"), float("inf"), 1.0])
    assert same_step([away], [away.clone()], [torch.ones(3)])
    assert not same_step([torch.ones(3)], [away], [torch.ones(3)])


@pytest.mark.slow
@pytest.mark.skipif(not compiler_found(torch.device("cpu")), reason="no C++ compiler")
@pytest.mark.parametrize("name, gradients, made", [("fedavg", 1, 1), ("perfedavg_fo", 2, 1), ("perfedavg_hf", 4, 0)])
def test_a_compiled_step_with_them(name, gradients, made, monkeypatch, tmp_path):
    """Two rounds of a network of which one layer is large enough. HF adds three gradients, of which none is alone."""
    x, y = cloud(160, features=120)
    users = split(ranges([30] * 4), ranges([10] * 4, 120))
    model = MODELS["mlp"](name="mlp", hidden=[8])
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # a step that torch remembers does not come to the pass
    rewrite = fusion.options()["post_grad_custom_post_pass"]
    monkeypatch.setattr(rewrite, "least", 4 * 120 * 8)
    before, ended = (rewrite.updates, rewrite.exponentials), []
    for compiled in (False, True):
        torch.compiler.reset()
        fed = federation(algorithm(name, tau=3), x, y, [users], model=model, compiled=compiled)
        fed.round(), fed.round()
        assert fed.compiled == compiled and fed.warning is None
        ended.append(fed.state.server["w"])
    close(*ended, rtol=1e-10)
    assert rewrite.updates - before[0] == made
    assert rewrite.exponentials - before[1] in (0, gradients)  # one hidden layer; torch 2.9 has no expm1 in it


@pytest.mark.slow
@pytest.mark.skipif(not compiler_found(torch.device("cpu")), reason="no C++ compiler")
def test_compiled_simulations_side_by_side():
    """Their steps share code and shapes; each round finds its own, also after torch has forgotten all of them."""
    x, y = cloud(160)
    users = split(ranges([30] * 4), ranges([10] * 4, 120))

    def simulations(compiled):
        return [federation(algorithm(name), x, y, [users], compiled=compiled) for name in ("fedavg", "perfedavg_fo", "fedprox")]

    eager, compiled = simulations(False), simulations(True)
    for k in range(4):
        for fed in eager + compiled:
            fed.round()
        if k == 1:
            torch.compiler.reset()
    for one, other in zip(eager, compiled, strict=True):
        assert other.warning is None and other.compiled
        close(other.state.server, one.state.server, rtol=1e-10)
    assert not torch.equal(eager[0].state.server["w"]["layer1.weight"], eager[2].state.server["w"]["layer1.weight"])
