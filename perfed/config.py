"""The typed root configuration, ``parse()`` that makes it, and where ``conf/`` is. Free of Hydra.

``parse`` takes the tree that Hydra composed (or the same tree as a nested dict), resolves interpolations, lets OmegaConf
convert each value to the type of its field ('1e-3' becomes 0.001) and builds the dataclasses, whose ``__post_init__``
refuse bad values. Whatever goes wrong becomes a :class:`UserError` under the key that the user typed: a bad
``algo.alpha`` that reads ``${alpha}`` is reported as ``alpha``.

The groups (algo, dataset, ...) are registries name -> dataclass; its fields are the keys of ``conf/<group>/<name>.yaml``,
``name`` among them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import os
import re
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from perfed.errors import UserError, nearest, require

GROUPS = ("algo", "dataset", "partition", "model", "optimizer", "server", "protocol", "tracker")
LATER = {"tracker": {"name": "none"}}
"""Groups that stored configurations of earlier releases lack -> the option that stands for what they did."""
KNOBS = ("n", "r", "rounds", "tau", "batch", "alpha", "beta", "seed", "seeds", "device")
_NESTED = ("split", "adapt", "engine", "study")
NETWORKS = ("mlp", "langelaar", "mlp_large", "cnn")
STUDIES = ("all_methods", "easgd_vs_admm", "table1", "fig1", "aruba", "alpha_sweep")


def conf_dir() -> Path:
    """The absolute path of the YAML tree: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for place in (package / "conf", package.parent / "conf"):
        if (place / "config.yaml").is_file():
            return place
    raise FileNotFoundError(f"the installation is broken: no conf/config.yaml in {package} or beside it")


def version() -> str:
    """perfed's, of the installed package, else of the checkout."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("perfed")
    except PackageNotFoundError:
        import tomllib

        project = conf_dir().parent / "pyproject.toml"
        return tomllib.loads(project.read_text())["project"]["version"] if project.is_file() else "unknown"


def _choice(key: str, value: Any, *allowed: str) -> None:
    if value not in allowed:
        raise UserError(key, value, f"must be one of {', '.join(allowed)}{nearest(str(value), allowed)}")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number_or_text(value: Any) -> Any:
    """An int where a text (from YAML quotes, say) reads as one."""
    return int(value) if isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value) else value


# ---------------------------------------------------------------- the parts


@dataclass(kw_only=True)
class Protocol:
    """What is adapted on, what is scored, and how often: numbers under different protocols do not compare.

    ``source`` train or test; ``score`` all test data, or (with source test) the rest after ``support`` examples;
    ``batch`` examples an adaptation batch, None the knob ``batch``; ``repeats`` adaptations whose scores are averaged.
    """

    name: str
    source: str = "train"
    score: str = "all"
    batch: int | None = None
    repeats: int = 1
    support: int | None = None

    def __post_init__(self):
        _choice("source", self.source, "train", "test")
        _choice("score", self.score, "all", "rest")
        require(self.batch is None or self.batch >= 1, "batch", self.batch, "null or a whole number >= 1")
        require(self.repeats >= 1, "repeats", self.repeats, "a whole number >= 1")
        require(self.support is None or self.support >= 1, "support", self.support, "null or a whole number >= 1")
        if self.score == "rest":
            require(self.support is not None, "support", self.support, "how many test examples to adapt on, since score=rest")
            require(self.source == "test", "source", self.source, "must be test, since score=rest scores what the support set leaves")
        else:
            require(self.support is None, "support", self.support, "must be null: a support set needs score=rest")


PROTOCOLS: dict[str, type] = {name: Protocol for name in ("clean", "paper", "fewshot")}


@dataclass(kw_only=True)
class Split:
    """How a user's data are divided. ``val`` and ``test_share`` are shares; ``test_share`` counts with test=split only."""

    val: float = 0.0
    test: str = "matched"
    test_share: float = 0.2

    def __post_init__(self):
        require(0 <= self.val < 1, "val", self.val, "a share in [0, 1)")
        _choice("test", self.test, "matched", "split")
        require(0 < self.test_share < 1, "test_share", self.test_share, "a share in (0, 1)")


@dataclass(kw_only=True)
class Adapt:
    """Adaptation before scoring; None stands for what the protocol (``lr``: the algorithm) says.

    ``steps`` is one number or several (a curve); ``layers`` is "all", "last" or layer names.
    """

    steps: Any = 1
    lr: float | None = None
    batch: int | None = None
    source: str | None = None
    repeats: int | None = None
    layers: Any = "all"

    def __post_init__(self):
        steps = [_number_or_text(s) for s in (self.steps if isinstance(self.steps, (list, tuple)) else [self.steps])]
        ok = bool(steps) and all(_whole(s) and s >= 0 for s in steps)
        require(ok, "steps", self.steps, "a whole number >= 0, or several: [0,1,5]")
        self.steps = sorted(set(steps))
        require(self.lr is None or self.lr >= 0, "lr", self.lr, "null or a number >= 0")
        require(self.batch is None or self.batch >= 1, "batch", self.batch, "null or a whole number >= 1")
        if self.source is not None:
            _choice("source", self.source, "train", "test")
        require(self.repeats is None or self.repeats >= 1, "repeats", self.repeats, "null or a whole number >= 1")
        names = self.layers if isinstance(self.layers, (list, tuple)) else [self.layers]
        ok = bool(names) and all(isinstance(name, str) and name for name in names)
        require(ok, "layers", self.layers, "all, last, or names of layers")


@dataclass(kw_only=True)
class Engine:
    """How the numbers are computed. Only ``dtype`` is part of who a run is."""

    backend: str = "auto"
    chunk: Any = "auto"
    compile: Any = "auto"
    threads: int = 1
    dtype: str = "float32"
    state_device: str = "auto"

    def __post_init__(self):
        _choice("backend", self.backend, "auto", "vmap", "loop")
        self.chunk = _number_or_text(self.chunk)
        ok = self.chunk == "auto" or (_whole(self.chunk) and self.chunk >= 1)
        require(ok, "chunk", self.chunk, "auto or a whole number >= 1")
        self.compile = {"true": True, "false": False}.get(self.compile, self.compile) if isinstance(self.compile, str) else self.compile
        require(self.compile is True or self.compile is False or self.compile == "auto", "compile", self.compile, "auto, true or false")
        require(self.threads >= 1, "threads", self.threads, "a whole number >= 1")
        _choice("dtype", self.dtype, "float32", "float64")
        _choice("state_device", self.state_device, "auto", "cpu", "device")


@dataclass(kw_only=True)
class Study:
    """A study of several runs (``experiment=<name>`` sets it); no part of who a run is.

    ``methods`` "all" or names; ``budget`` gradient evaluations of a training user, None: ``rounds`` for all;
    ``tuning_seeds`` seeds of a trial, ``tuning_share`` the share of the rounds that it runs; ``jobs`` runs at once,
    "auto" one for each CPU core. Of the paper's studies: ``rows`` names in ``conf/row``, ``networks`` of NETWORKS, ``protocols``
    to judge under, ``tuned`` a block with tuned steps, ``cifar`` CIFAR-10 as an image folder.
    """

    name: str | None = None
    methods: Any = "all"
    budget: int | None = 1000
    tuning_seeds: int = 1
    tuning_share: float = 1.0
    jobs: Any = "auto"
    rows: Any = None
    networks: Any = field(default_factory=lambda: ["mlp"])
    protocols: Any = field(default_factory=lambda: ["paper", "clean"])
    tuned: bool = True
    cifar: str | None = None

    def __post_init__(self):
        if self.name is not None:
            _choice("name", self.name, *STUDIES)
        listed = isinstance(self.methods, (list, tuple)) and bool(self.methods) and all(isinstance(m, str) for m in self.methods)
        require(self.methods == "all" or listed, "methods", self.methods, "all, or a list of methods: [fedavg,local]")
        ok = self.budget is None or self.budget >= 1
        require(ok, "budget", self.budget, "a whole number >= 1 of gradient evaluations, or null: equal rounds")
        require(self.tuning_seeds >= 1, "tuning_seeds", self.tuning_seeds, "a whole number >= 1")
        require(0 < self.tuning_share <= 1, "tuning_share", self.tuning_share, "a share of the rounds in (0, 1]")
        self.jobs = _number_or_text(self.jobs)
        ok = self.jobs == "auto" or (_whole(self.jobs) and self.jobs >= 1)
        require(ok, "jobs", self.jobs, "auto or a whole number >= 1")
        for key in ("rows", "networks", "protocols"):
            value = getattr(self, key)
            ok = isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, str) for item in value)
            require(ok or (key == "rows" and value is None), key, value, "a list of names")
        for name in self.networks:
            _choice("networks", name, *NETWORKS)
        for name in self.protocols:
            _choice("protocols", name, *PROTOCOLS)


@dataclass(kw_only=True)
class Root:
    """The keys at the top of the tree that are plain values; ``conf/config.yaml`` explains each."""

    n: int = 20
    r: float = 0.2
    rounds: int = 100
    tau: int = 10
    batch: int = 40
    alpha: float = 0.01
    beta: float = 0.1
    seed: int = 0
    seeds: int = 3
    device: str = "auto"
    partition_seed: int | None = None
    init_seed: int | None = None
    sampling_seed: int | None = None
    holdout_users: float = 0.0
    eval_every: int = 10
    data_root: str = "~/.cache/perfed"
    outputs: str = "outputs"
    progress: str = "auto"
    pictures: bool = True
    plugins: list[str] = field(default_factory=list)
    plan: bool = False
    force: bool = False
    resume: str = "auto"
    checkpoint_every: float = 60.0
    fail_fast: bool = False

    def __post_init__(self):
        require(self.n >= 1, "n", self.n, "a whole number >= 1 of users")
        dot = " (the decimal point is a dot: 0.2)" if self.r == 0 else ""
        require(0 < self.r <= 1, "r", self.r, f"a share of users in (0, 1]{dot}")
        require(self.rounds >= 0, "rounds", self.rounds, "a whole number >= 0")
        require(self.tau >= 1, "tau", self.tau, "a whole number >= 1 of local steps")
        require(self.batch >= 1, "batch", self.batch, "a whole number >= 1")
        require(self.alpha >= 0, "alpha", self.alpha, "a number >= 0")
        require(self.beta > 0, "beta", self.beta, "a number > 0")
        require(0 <= self.seed < 2**31, "seed", self.seed, "a whole number in [0, 2^31)")
        require(self.seeds >= 1, "seeds", self.seeds, "a whole number >= 1: how many seeds")
        ok = re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device)
        require(bool(ok), "device", self.device, "must be one of auto, cpu, cuda, cuda:0, cuda:1, ...")
        for key in ("partition_seed", "init_seed", "sampling_seed"):
            value = getattr(self, key)
            require(value is None or 0 <= value < 2**31, key, value, "null (follow the seeds) or a whole number in [0, 2^31)")
        require(0 <= self.holdout_users < 1, "holdout_users", self.holdout_users, "a share of users in [0, 1)")
        require(self.eval_every >= 1, "eval_every", self.eval_every, "a whole number >= 1 of rounds")
        if not self.data_root.strip() and not os.environ.get("PERFED_DATA", "unset").strip():
            self.data_root = Root.data_root  # a variable that is empty counts as absent
        require(bool(self.data_root.strip()), "data_root", self.data_root, "a folder")
        require(bool(self.outputs.strip()), "outputs", self.outputs, "a folder")
        _choice("progress", self.progress, "auto", "bar", "lines", "off")
        _choice("resume", self.resume, "auto", "anyway")
        require(self.checkpoint_every > 0, "checkpoint_every", self.checkpoint_every, "a number > 0 of seconds")


@dataclass(kw_only=True)
class Config(Root):
    """A whole run. ``algo`` .. ``tracker`` are objects of the registries; see :func:`parse`."""

    algo: Any
    dataset: Any
    partition: Any
    model: Any
    optimizer: Any
    server: Any
    protocol: Protocol
    tracker: Any
    split: Split = field(default_factory=Split)
    adapt: Adapt = field(default_factory=Adapt)
    engine: Engine = field(default_factory=Engine)
    study: Study = field(default_factory=Study)

    def __post_init__(self):
        super().__post_init__()
        if self.protocol.score == "rest":
            require(self.adapt_source == "test", "adapt.source", self.adapt.source, f"must be test with protocol={self.protocol.name}")

    @property
    def seed_values(self) -> tuple[int, ...]:
        """The seeds of the run: seed, seed + 1, ..."""
        return tuple(range(self.seed, self.seed + self.seeds))

    @property
    def adapt_steps(self) -> tuple[int, ...]:
        """Ascending, without repeats."""
        return tuple(self.adapt.steps)

    @property
    def adapt_source(self) -> str:
        return self.adapt.source or self.protocol.source

    @property
    def adapt_batch(self) -> int:
        return self.adapt.batch or self.protocol.batch or self.batch

    @property
    def adapt_repeats(self) -> int:
        return self.adapt.repeats or self.protocol.repeats

    @property
    def data_path(self) -> Path:
        """``data_root``, absolute; ``~`` and the current folder are the caller's."""
        return absolute(self.data_root)

    @property
    def outputs_path(self) -> Path:
        return absolute(self.outputs)

    def as_dict(self) -> dict[str, Any]:
        """The resolved tree as plain dicts, lists, numbers and texts; ``parse`` turns it back into an equal Config."""
        return plain(self)


def absolute(path: str | Path) -> Path:
    """``~`` expanded, relative paths taken from the current folder."""
    return Path(path).expanduser().absolute()


def plain(value: Any) -> Any:
    """Dataclasses, lists and enums as dicts, lists and names."""
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, Enum):
        return value.name
    return str(value) if isinstance(value, Path) else value


# ---------------------------------------------------------------- registries


def registry(group: str) -> dict[str, type]:
    """name -> dataclass of a group; imports the modules that fill it (torch among them)."""
    match group:
        case "algo":
            importlib.import_module("perfed.algorithms")
            from perfed.algorithms.base import ALGORITHMS as entries
        case "dataset":
            from perfed.data.datasets import DATASETS as entries
        case "partition":
            from perfed.data.partition import PARTITIONS as entries
        case "model":
            from perfed.models import MODELS as entries
        case "optimizer":
            from perfed.optimizers import LOCAL as entries
        case "server":
            from perfed.optimizers import SERVER as entries
        case "protocol":
            entries = PROTOCOLS
        case "tracker":
            from perfed.trackers import TRACKERS as entries
        case _:
            raise KeyError(group)
    return entries


def import_plugins(modules: Any) -> None:
    """Import the user's modules, which register their algorithms, models and data sets. The current folder is searched last."""
    names = modules if isinstance(modules, (list, tuple)) else [modules]
    here = str(Path.cwd())
    if names and here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    for name in names:
        require(isinstance(name, str) and bool(name), "plugins", name, "a list of modules: plugins=[my.module]")
        try:
            importlib.import_module(name)
        except Exception as error:
            raise UserError("plugins", name, f"cannot be imported: {type(error).__name__}: {error}") from error


# ---------------------------------------------------------------- parse


class _Tree:
    """A configuration tree with the name under which the user knows each value."""

    def __init__(self, cfg: DictConfig):
        self.raw = OmegaConf.to_container(cfg, resolve=False)
        try:
            self.values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=False)
        except OmegaConfBaseException as error:
            key = error.full_key or "config"
            key = self.typed(key)
            value = self.look(key)
            why = "has no value: give one" if value == "???" else f"cannot be resolved: {str(error).splitlines()[0]}"
            raise UserError(key, value, why) from error

    def look(self, key: str) -> Any:
        node = self.raw
        for part in key.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return None
            node = node[part]
        return node

    def typed(self, key: str) -> str:
        """``algo.alpha`` -> ``alpha`` where the tree says ``algo: {alpha: ${alpha}}``."""
        for _ in range(10):
            value = self.look(key)
            link = re.fullmatch(r"\$\{([A-Za-z_][\w.]*)\}", value) if isinstance(value, str) else None
            if link is None or self.look(link[1]) is None:
                break
            key = link[1]
        return key


def parse(cfg: DictConfig | Mapping[str, Any]) -> Config:
    """A composed tree -> Config. Everything that is wrong with it raises :class:`UserError`; plugins are imported."""
    if not isinstance(cfg, DictConfig):
        cfg = OmegaConf.create(dict(cfg))
    cfg = OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"])
    tree = _Tree(cfg)
    roots = {f.name for f in dataclasses.fields(Root)}
    known = [*roots, *_NESTED, *GROUPS]
    for key, value in tree.values.items():
        if key not in known:
            raise UserError(str(key), value, f"no such key{nearest(str(key), known)}")
    root = build(Root, {k: v for k, v in tree.values.items() if k in roots}, tree.typed)
    import_plugins(root.plugins)
    parts: dict[str, Any] = {}
    for name, cls in zip(_NESTED, (Split, Adapt, Engine, Study), strict=True):
        parts[name] = build(cls, _mapping(name, tree.values.get(name, {})), tree.typed, name)
    for group in GROUPS:
        parts[group] = _option(group, tree)
    return _guard(lambda: Config(**vars(root), **parts), tree.typed, "", Config)


def _mapping(key: str, value: Any) -> dict[str, Any]:
    require(isinstance(value, Mapping), key, value, f"a group of keys: write {key}.<key>=<value>")
    return value


def _option(group: str, tree: _Tree) -> Any:
    entries = registry(group)
    choices = ", ".join(sorted(entries))
    value = tree.values.get(group, LATER.get(group))
    require(isinstance(value, Mapping), group, value, f"must be one of {choices}")
    name = value.get("name")
    if not isinstance(name, str) or name not in entries:
        raise UserError(group, name, f"no such {group}{nearest(str(name), entries)}; one of {choices}")
    return build(entries[name], value, tree.typed, group)


def build(cls: type, values: Mapping[str, Any], typed=lambda key: key, group: str = "") -> Any:
    """Make a ``cls`` from plain values with the types of its fields.

    cls: a dataclass. values: its fields by name, interpolations resolved. typed: full key -> the key as the user
    typed it. group: the prefix of the keys. Raises UserError for unknown, missing and ill-typed values.
    """
    prefix = f"{group}." if group else ""
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    for name, value in values.items():
        key = f"{prefix}{name}"
        with_option = f" with {group}={values['name']}" if "name" in values else ""
        if name not in fields:
            near = elsewhere(key) or nearest(str(name), [known for known in fields if known != "name"])
            raise UserError(key, value, f"no such key{with_option}{near}")
        require(value != "???", typed(key), value, f"has no value: give one, {wanted(hints[name])}")
        default = fields[name].default
        example = f", such as {default}" if value is None and isinstance(default, str) and default else ""
        _check(typed(key), value, hints[name], example)
    for name, f in fields.items():
        need = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        require(not need or name in values, f"{prefix}{name}", None, f"has no value: give one, {wanted(hints[name])}")
    try:
        node = OmegaConf.merge(_schema(cls), OmegaConf.create(dict(values)))
    except OmegaConfBaseException as error:
        name = re.split(r"[.\[]", error.full_key or "")[0]
        allowed = wanted(hints[name]) if name in hints else str(error).splitlines()[0]
        raise UserError(typed(f"{prefix}{name}"), values.get(name), f"must be {allowed}") from error
    for name in fields:
        _finite(typed(f"{prefix}{name}"), node[name])
    return _guard(lambda: OmegaConf.to_object(node), typed, prefix, cls)


def elsewhere(key: str) -> str:
    """``; algo=perfedavg_hf has it``: the options of the key's group that have such a field, three at most. Empty where none has.

    A key without a group is looked for in all of them: ``; algo.delta: algo=perfedavg_hf has it``.
    """
    group, dot, name = key.partition(".")
    if not dot:
        found = ((of, elsewhere(f"{of}.{key}")) for of in GROUPS)
        return next((f"; {of}.{key}: {text.removeprefix('; ')}" for of, text in found if text), "")
    entries = registry(group) if group in GROUPS and name != "name" else {}
    having = sorted(option for option, cls in entries.items() if any(f.init and f.name == name for f in dataclasses.fields(cls)))
    names = ", ".join(having[:3] + ["..."] * (len(having) > 3))
    return f"; {group}={names} {'has' if len(having) == 1 else 'have'} it" if having else ""


@functools.cache
def _schema(cls: type) -> DictConfig:
    return OmegaConf.structured(cls)


def _guard(make, typed, prefix: str, cls: type) -> Any:
    """Run ``make``; its complaint about a field of ``cls`` gets the prefix and the name that the user typed."""
    try:
        return make()
    except UserError as error:
        mine = {f.name for f in dataclasses.fields(cls)}
        key = prefix + error.key if error.key.split(".")[0] in mine else error.key
        raise UserError(typed(key), error.value, error.allowed) from error
    except (ValueError, TypeError, AssertionError, OmegaConfBaseException) as error:
        raise UserError(prefix.rstrip(".") or "config", cls.__name__, str(error) or type(error).__name__) from error


def _check(key: str, value: Any, hint: Any, example: str = "") -> None:
    """What OmegaConf would take in silence or explain badly."""
    base, optional = _unwrap(hint)
    if value is None:
        require(optional or base is Any, key, value, f"must be {wanted(hint)}{example}")
    elif isinstance(value, str) and value in ("None", "none") and base is not Any:
        advice = "write null, not None" if optional else "neither None nor null is a value here"
        require(base is str and not optional, key, value, f"must be {wanted(hint)} ({advice})")
    elif base is bool:
        ok = isinstance(value, bool) or (isinstance(value, str) and value.lower() in ("true", "false", "yes", "no", "on", "off"))
        require(ok, key, value, f"must be {wanted(hint)}")
    elif base is int and isinstance(value, float) and value.is_integer():
        raise UserError(key, value, f"must be {wanted(hint)}: write {int(value)}")
    elif base is str:
        require(isinstance(value, (str, int, float)) and not isinstance(value, bool), key, value, f"must be {wanted(hint)}")


def _finite(key: str, value: Any) -> None:
    if isinstance(value, float):
        require(math.isfinite(value), key, value, "must be a finite number")
    elif OmegaConf.is_list(value) or isinstance(value, (list, tuple)):
        for item in value:
            _finite(key, item)


def _unwrap(hint: Any) -> tuple[Any, bool]:
    """``float | None`` -> (float, True)."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return (rest[0] if len(rest) == 1 else typing.Union[tuple(rest)]), len(rest) < len(typing.get_args(hint))  # noqa: UP007
    return hint, False


_WORDS = {float: "a number", int: "a whole number", bool: "true or false", str: "a text", Any: "a value"}


def wanted(hint: Any) -> str:
    """A type hint in words: ``float | None`` -> 'a number or null'."""
    base, optional = _unwrap(hint)
    if isinstance(base, type) and issubclass(base, Enum):
        text = f"one of {', '.join(base.__members__)}"
    elif typing.get_origin(base) in (list, tuple):
        inner = _WORDS.get(typing.get_args(base)[0], "values").removeprefix("a ")
        text = f"a list of {inner}s" if not inner.endswith("s") else f"a list of {inner}"
    elif typing.get_origin(base) in (typing.Union, types.UnionType):
        text = " or ".join(wanted(arg) for arg in typing.get_args(base))
    else:
        text = _WORDS.get(base, getattr(base, "__name__", str(base)))
    return f"{text} or null" if optional else text
