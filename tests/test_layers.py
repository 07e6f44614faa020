"""Data flows one way (design, sections 2 and 3): who may import whom, checked on the source.

The order that the code needs differs from the design's table in three places: ``data/sampling`` stands before the data sets and
partitions, which draw from its generators, ``config`` stands before ``identity``, which hashes a parsed configuration, and ``trackers``,
which are told all they need, before ``config``, since each is an option of a group.
``config`` reaches the registries by name, inside functions.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from perfed.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "perfed"

ORDER = [
    ["errors"],
    ["types"],
    ["tree"],
    ["data.sampling"],
    ["data.datasets"],
    ["data.partition"],
    ["models"],
    ["optimizers"],
    ["algorithms.base"],
    ["algorithms"],
    ["fusion"],
    ["device"],
    ["binding"],
    ["draws"],
    ["federate"],
    ["evaluate"],
    ["trackers"],
    ["config"],
    ["identity"],
    ["results"],
    ["checkpoint"],
    ["stats"],
    ["tables"],
    ["keys"],
    ["measures"],
    ["pivot"],
    ["compare"],
    ["views"],
    ["power"],
    ["folders"],
    ["figures"],
    ["sensitivity"],
    ["htmlpage"],
    ["webpage"],
    ["report"],
    ["progress"],
    ["signals"],
    ["summary"],
    ["prepare"],
    ["resume"],
    ["donors"],
    ["train"],
    ["lanes"],
    ["rescore"],
    ["studies.stability"],
    ["isolation"],
    ["frontdoor"],
    ["sweep"],
    ["studies.jobs"],
    ["studies.tuning"],
    ["studies.compared"],
    ["studies.all_methods"],
    ["studies.easgd_vs_admm"],
    ["studies.paper"],
    ["studies.table1"],
    ["studies.fig1"],
    ["studies.aruba"],
    ["studies.alpha_sweep"],
    ["studies"],
    ["helppage"],
    ["cli"],
    ["tune"],
    ["__main__", ""],
]
RANK = {name: i for i, names in enumerate(ORDER) for name in names}
HYDRA = {"cli", "frontdoor", "helppage", "__main__", "train", "sweep"}
NO_TORCH = {"stats", "tables", "figures", "sensitivity", "errors", "config", "identity", "results", "report", "trackers"}
NO_TORCH |= {"keys", "measures", "pivot", "compare", "views", "power", "folders", "htmlpage", "webpage"}
ALLOWED_AT_THE_TOP = {"pyproject.toml", "README.md", "perfed", "conf", "scripts", "tests", "outputs"}


def modules() -> dict[str, ast.Module]:
    """Dotted name inside the package ('' is the package itself) -> source."""
    out = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        out[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text(), str(path))
    return out


MODULES = modules()


def imports(source: ast.Module) -> Iterator[tuple[str, int]]:
    """Every import, lazy ones too, but for those under TYPE_CHECKING: dotted name with the imported names, line."""
    types_only = {
        id(child)
        for node in ast.walk(source)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for stmt in node.body
        for child in ast.walk(stmt)
    }
    for node in ast.walk(source):
        if id(node) in types_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            if isinstance(node.args[0], ast.Constant):
                yield node.args[0].value, node.lineno


def layer(name: str) -> str:
    """The entry of ORDER that a module belongs to: itself, or the nearest package around it."""
    while name not in RANK and name:
        name = name.rpartition(".")[0]
    return name


def target(dotted: str) -> str | None:
    """'perfed.data.sampling.Draw' -> 'data.sampling'; None for other packages."""
    if dotted != "perfed" and not dotted.startswith("perfed."):
        return None
    name = dotted.removeprefix("perfed").removeprefix(".")
    while name not in MODULES:
        name = name.rpartition(".")[0]
    return name


@pytest.mark.parametrize("name", [n for n in MODULES if n not in ("data",)])
def test_imports_point_upwards(name):
    mine = layer(name)
    assert mine or name == "", f"perfed/{name} has no place in ORDER"
    for dotted, line in imports(MODULES[name]):
        other = target(dotted)
        if other is None or layer(other) == mine:
            continue
        assert RANK[layer(other)] < RANK[mine], f"perfed/{name}.py:{line} imports {dotted}"


def test_the_package_imports_nothing_when_it_is_imported():
    for node in MODULES[""].body:
        assert not (isinstance(node, (ast.Import, ast.ImportFrom)) and "perfed" in ast.unparse(node))
    assert not list(imports(MODULES["data"]))


@pytest.mark.parametrize("name", [n for n in MODULES if n.split(".")[0] == "algorithms"])
def test_algorithms_know_torch_but_neither_hydra_nor_data(name):
    for dotted, line in imports(MODULES[name]):
        first = dotted.split(".")[0]
        assert first not in ("hydra", "omegaconf", "pandas"), f"perfed/{name}.py:{line} imports {dotted}"
        if (target(dotted) or "").startswith("data"):
            assert dotted in ("perfed.data.sampling.Draw", "perfed.data.sampling.generator"), f"perfed/{name}.py:{line} imports {dotted}"


@pytest.mark.parametrize("name", sorted(NO_TORCH & set(MODULES)))
def test_numbers_and_pictures_never_import_torch(name):
    """Neither themselves nor through what they import at their top."""
    seen, todo = set(), [name]
    while todo:
        one = todo.pop()
        seen.add(one)
        for dotted, line in _at_the_top(MODULES[one]):
            assert dotted.split(".")[0] not in ("torch", "torchvision"), f"perfed/{one}.py:{line}, imported by {name}"
            if (other := target(dotted)) is not None and other not in seen:
                todo.append(other)
    if name in ("stats", "tables", "figures"):
        assert not [d for d, _ in imports(MODULES[name]) if d.split(".")[0] in ("torch", "torchvision")]


def _at_the_top(source: ast.Module) -> Iterator[tuple[str, int]]:
    plain = [n for n in source.body if isinstance(n, (ast.Import, ast.ImportFrom))]
    return imports(ast.Module(plain, []))


def test_slow_packages_are_imported_where_they_are_used():
    slow = {"torchvision", "matplotlib", "pandas", "mlxtend", "scipy", "hydra", "PIL", "tqdm"}
    for name, source in MODULES.items():
        for dotted, line in _at_the_top(source):
            assert dotted.split(".")[0] not in slow, f"perfed/{name}.py:{line} imports {dotted}"


def test_only_the_command_line_knows_hydra():
    knows = {name for name, source in MODULES.items() for dotted, _ in imports(source) if dotted.split(".")[0] == "hydra"}
    assert knows <= HYDRA and "cli" in knows


def test_the_global_plotting_backend_is_never_touched():
    for name, source in MODULES.items():
        for dotted, line in imports(source):
            assert "pyplot" not in dotted and "pylab" not in dotted, f"perfed/{name}.py:{line}"
        assert "matplotlib.use" not in ast.unparse(source)


# ---------------------------------------------------------------- the engine knows no method


@pytest.mark.parametrize("name", ["draws", "federate", "evaluate"])
def test_the_engine_tests_no_type(name):
    found = []
    for node in ast.walk(MODULES[name]):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            text = ast.unparse(node)
            if node.func.id in ("isinstance", "hasattr", "issubclass", "type") or (node.func.id == "getattr" and "algo" in text):
                found.append(f"perfed/{name}.py:{node.lineno}: {text}")
        elif isinstance(node, ast.Match):
            found.append(f"perfed/{name}.py:{node.lineno}: match")
    assert not found


@pytest.mark.parametrize("name", ["draws", "federate", "evaluate"])
def test_the_engine_names_no_algorithm(name):
    classes = {cls.__name__ for cls in ALGORITHMS.values()}
    for node in ast.walk(MODULES[name]):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert node.value not in ALGORITHMS, f"perfed/{name}.py:{node.lineno}"
        elif isinstance(node, ast.Name):
            assert node.id not in classes and node.id != "ALGORITHMS", f"perfed/{name}.py:{node.lineno}"
        elif isinstance(node, ast.Attribute):
            assert not (node.attr == "name" and ast.unparse(node.value).endswith("algo")), f"perfed/{name}.py:{node.lineno}"
    own = [d for d, _ in imports(MODULES[name]) if d.startswith("perfed.algorithms")]
    assert all(d.startswith("perfed.algorithms.base.") for d in own)
    code = re.sub(r'""".*?"""|#[^\n]*', "", (PACKAGE / f"{name}.py").read_text(), flags=re.S)
    words = set(re.findall(r"\w+", code.lower()))
    assert not words & {n for n in ALGORITHMS if n != "local"}  # `local` is also what a user works on


def test_no_global_random_generator():
    """Draws are functions of their keys; models fork torch's generator for modules of the user."""
    numpy = r"\bnp\.random\.(?!Generator\b|Philox\b|default_rng\(\d+\))\w+"
    banned = re.compile(numpy + r"|\btorch\.(rand|randn|randint|randperm|manual_seed|bernoulli)\b|^import random")
    for path in PACKAGE.rglob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if banned.search(line) and not (path.name == "models.py" and "manual_seed" in line):
                raise AssertionError(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")


# ---------------------------------------------------------------- the repository


def test_top_level_holds_only_what_is_prescribed():
    names = {path.name for path in ROOT.iterdir() if not path.name.startswith(".") and path.name != "__pycache__"}
    assert names <= ALLOWED_AT_THE_TOP, sorted(names - ALLOWED_AT_THE_TOP)
    assert {"pyproject.toml", "perfed", "conf", "tests"} <= names


def test_what_is_imported_is_declared():
    """Every package that perfed imports stands in pyproject.toml (numpy's, torch's own dependencies do not count)."""
    import sys
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [d for group in project.get("optional-dependencies", {}).values() for d in group]
    declared = {re.split(r"[\[<>=!~ ;]", d)[0].lower().replace("-", "_") for d in [*project["dependencies"], *extras]}
    known = {"hydra": "hydra_core", "PIL": "torchvision", "yaml": "omegaconf"}  # the last two are required by what is declared
    known["mlflow"] = "mlflow_skinny"
    used = {d.split(".")[0] for source in MODULES.values() for d, _ in imports(source)} - set(sys.stdlib_module_names) - {"perfed"}
    optional = {"triton"}  # comes with torch where it exists
    missing = {name for name in used - optional if known.get(name, name) not in declared}
    assert not missing, sorted(missing)
