"""scripts/conformance.py: a failing check is printed and exits with 1, mutants are killed, survive or are refused, and all is put back."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
from pathlib import Path

import conformance
import pytest
from small import algorithm

from perfed.algorithms import ALGORITHMS

SCRIPT = Path(__file__).parents[1] / "scripts" / "conformance.py"
HERE = '"""All defaults of the base class: the plain gradient, the plain mean."""'  # in fedavg.py, once


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("conformance_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    path = list(sys.path)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path
    del sys.modules[spec.name]


@pytest.fixture
def empty(monkeypatch):
    """No checks, mutants and impossible properties but those that the test registers."""
    conformance.collect()
    for name in ("CHECKS", "MUTANTS", "IMPOSSIBLE"):
        monkeypatch.setattr(conformance, name, [])
    before = dict(ALGORITHMS)
    modules = set(sys.modules)
    yield
    assert list(ALGORITHMS.items()) == list(before.items())  # the same classes in the same order
    assert not {name for name in set(sys.modules) - modules if "mutant" in name}


def output(script, capsys, *arguments):
    code = script.main([*map(str, arguments)])
    return code, capsys.readouterr().out


def row(text: str, *cells: str) -> list[str]:
    """The one line of a table with these cells."""
    lines = [line for line in text.splitlines() if all(f"| {cell} |" in line for cell in cells)]
    assert len(lines) == 1, text
    return [cell.strip() for cell in lines[0].strip("|").split(" | ")]


def test_tables_and_a_pass(script, empty, capsys, tmp_path):
    conformance.check("fedavg", "||w|| stays", 1e-9)(lambda: 1e-10)
    conformance.check("local", "ends somewhere", 1e-9, conformance.FIXED_POINT)(lambda: (3e-12, 0.25))
    conformance.cannot("fedavg", "magic", "there is none")
    code, text = output(script, capsys, "--out", tmp_path / "table.md")
    assert code == 0 and (tmp_path / "table.md").read_text() == text
    assert row(text, "fedavg", r"\|\|w\|\| stays") == ["fedavg", r"\|\|w\|\| stays", "1e-10", "1e-09", "yes"]
    assert row(text, "local", "ends somewhere") == ["local", "ends somewhere", "3e-12", "1e-09", "yes", "0.25"]
    assert row(text, "fedavg", "magic")[-1] == "there is none"
    assert text.index("Identities") < text.index("stays") < text.index("Fixed points") < text.index("ends somewhere") < text.index("magic")
    assert "distance to the minimiser" in text and "torch 2" in text and "float64" in text
    assert "2 checks, 2 pass, 0 fail; 1 properties that cannot hold. Methods without a check: " in text.splitlines()[-1]


@pytest.mark.parametrize("found", [1e-8, float("nan"), float("inf"), (0.0, float("nan")), ValueError("no\nluck")])
def test_a_failing_check_is_shown_and_exits_with_1(script, empty, capsys, found):
    def measure():
        if isinstance(found, Exception):
            raise found
        return found

    conformance.check("fedavg", "holds", 1e-9)(lambda: 0.0)
    conformance.check("fedavg", "does not hold", 1e-9)(measure)
    code, text = output(script, capsys)
    assert code == 1
    assert row(text, "holds")[-1] == "yes"
    assert row(text, "does not hold")[-1] == "**NO**"
    assert ("raised ValueError: no |" in text) == isinstance(found, Exception)
    assert "2 checks, 1 pass, 1 fail" in text


def test_one_method_and_the_equivalences_that_name_it(script, empty, capsys):
    equivalences = [("lattice", "fedavg = perfedavg(alpha=0)"), ("lattice", "local = perfedavg_fo.x")]
    for method, name in [("fedavg", "a"), ("local", "b"), *equivalences]:
        conformance.check(method, name, 0)(lambda: 0.0)
    _, text = output(script, capsys, "--method", "fedavg")
    assert "| a |" in text and "| fedavg = perfedavg(alpha=0) |" in text and "| b |" not in text and "local =" not in text
    _, text = output(script, capsys, "--method", "perfedavg")  # a word of the name, not a part of a word
    assert "2 checks" not in text and "1 checks" in text
    with pytest.raises(SystemExit) as stop:
        script.main(["--method", "nonsense"])
    assert stop.value.code == 2


@functools.cache
def remembered() -> float:
    return algorithm("fedavg").step_size(None)


def other_class() -> float:
    """1 while a mutant is in place, whatever it does."""
    return float(ALGORITHMS["fedavg"].__module__ != "perfed.algorithms.fedavg")


def step_is_beta() -> float:
    return abs(remembered() - 0.1)


def with_step(code: str) -> str:
    return f"{HERE}\n\n    def step_size(self, info):\n        {code}\n"


def test_mutants_are_killed_survive_or_raise(script, empty, capsys, monkeypatch):
    monkeypatch.setattr(conformance, "remembered", remembered, raising=False)  # what checks remember is forgotten in between
    conformance.check("fedavg", "the step is beta", 0)(step_is_beta)
    conformance.mutant("fedavg", "twice the step", HERE, with_step("return 2 * self.beta"))
    conformance.mutant("fedavg", "no step", HERE, with_step("raise RuntimeError('none')"))
    code, text = output(script, capsys, "--mutate")
    assert code == 0 and "2 mutants, 2 killed (1 by an exception), 0 survive, 0 bad; 0 of 1 checks fail as it is." in text
    assert row(text, "twice the step") == ["fedavg", "twice the step", "the step is beta", "0.1"]
    assert row(text, "no step")[-1] == "raised RuntimeError: none"
    conformance.mutant("fedavg", "the same step", HERE, with_step("return self.beta"))
    code, text = output(script, capsys, "--mutate", "--method", "fedavg")
    assert code == 1 and row(text, "the same step")[2:] == ["**SURVIVES**", "1 checks pass"]
    assert step_is_beta() == 0


@pytest.mark.parametrize(
    "old, new, why",
    [
        ("FedAvg", "x", "the text to replace occurs 4 times"),
        ("not in the file", "x", "the text to replace occurs 0 times"),
        (HERE, "x = (", "does not load: SyntaxError"),
        (HERE, "x = unknown", "does not load: NameError"),
        ('@register("fedavg")\n', "", "does not define the method any more"),
    ],
)
def test_mutants_that_say_nothing_are_refused(script, empty, capsys, old, new, why):
    conformance.check("fedavg", "fails as soon as it can", 0)(other_class)
    conformance.mutant("fedavg", "bad", old, new)
    code, text = output(script, capsys, "--mutate")
    assert code == 1 and "**BAD MUTANT**" in row(text, "bad")[2] and why in text
    assert "1 mutants, 0 killed (0 by an exception), 0 survive, 1 bad" in text


def test_a_check_that_fails_as_it_is_kills_nothing(script, empty, capsys):
    conformance.check("fedavg", "never holds", 0)(lambda: 1.0)
    conformance.mutant("fedavg", "twice the step", HERE, with_step("return 2 * self.beta"))
    code, text = output(script, capsys, "--mutate")
    assert code == 1 and "These checks fail as it is" in text and "1 of 1 checks fail as it is" in text
    assert row(text, "twice the step")[2] == "**SURVIVES**"


def test_own_checks_come_first_the_cheap_ones_before_the_others(script, empty, capsys):
    from conformance.fedavg import one_round, sgd

    conformance.check("lattice", "fedavg = nothing", 0)(other_class)
    conformance.check("fedavg", "dear", 1e-13)(sgd)
    conformance.check("fedavg", "cheap", 1e-13)(one_round)
    conformance.mutant("fedavg", "twice the step", HERE, with_step("return 2 * self.beta"))
    conformance.mutant("fedavg", "the same step", HERE, with_step("return self.beta"))
    _, text = output(script, capsys, "--mutate")
    assert row(text, "twice the step")[2] == "cheap"
    assert row(text, "the same step")[2] == "lattice: fedavg = nothing"


def test_the_script_runs_by_itself(tmp_path):
    out = tmp_path / "local.md"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--method", "local", "--out", out], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == out.read_text() and "| local | a lone user walks with FedAvg" in done.stdout


@pytest.mark.slow
def test_every_mutant_is_killed(script, capsys):
    code, text = output(script, capsys, "--mutate")
    assert code == 0, text
