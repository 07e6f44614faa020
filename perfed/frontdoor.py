"""Reads a command line with Hydra's own parser and composes and parses every cell of it, before Hydra runs.

Left alone, Hydra answers a typo with many lines, lets ``+alhpa=1`` and ``alpha=nan`` through and makes the run folder
before the program starts. Here whatever is wrong, in any cell of a sweep, becomes one :class:`UserError` line.
"""

from __future__ import annotations

import copy
import functools
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from perfed.config import GROUPS, Config, absolute, conf_dir, elsewhere, import_plugins, parse
from perfed.errors import UserError, nearest

_OPEN = ("hydra.job.env_set", "hydra.job.env_copy", "hydra.callbacks", "hydra.sweeper", "hydra.launcher")
_OF_LAUNCHERS = ("joblib", "submitit_local", "submitit_slurm")


class Refused(UserError):
    """A command line that is wrong as a text rather than in a value."""

    def __init__(self, text: str, why: str):
        Exception.__init__(self, f"{' '.join(text.split())}: {' '.join(why.split())}")
        self.key, self.value, self.allowed = text, text, why


class InJob(UserError):
    """What is wrong with one cell of a sweep."""

    def __init__(self, error: UserError, number: int, count: int, overrides: Sequence[str]):
        Exception.__init__(self, f"{error} [job {number + 1} of {count}: {' '.join(overrides)}]")
        self.key, self.value, self.allowed = error.key, error.value, error.allowed


# ---------------------------------------------------------------- resolvers: a folder from a configuration


def _run_id(*, _root_: DictConfig) -> str:
    """``${perfed.run_id:}``, the folder's name. Never raises: the front door has refused what cannot be parsed."""
    from perfed.identity import identity

    if _named:
        return _named[-1]
    try:
        return identity(parse(_root_)).name
    except Exception:
        return "refused"


_named: list[str] = []
"""The name while it is known already: parsing again costs as much as the whole cell."""


def _outputs(*, _root_: DictConfig) -> str:
    """``${perfed.outputs:}``, absolute. Never raises."""
    try:
        return str(absolute(str(_root_.outputs)))
    except Exception:
        return "outputs"


OmegaConf.register_new_resolver("perfed.run_id", _run_id, replace=True)
OmegaConf.register_new_resolver("perfed.outputs", _outputs, replace=True)


# ---------------------------------------------------------------- composing


class Composer:
    """Hydra's composition over ``conf/`` (and folders of the user's own), with one-line errors."""

    def __init__(self, config_path: str | None = None, config_dir: str | None = None, config_name: str | None = None):
        from hydra import version
        from hydra._internal.hydra import Hydra
        from hydra._internal.utils import create_config_search_path
        from hydra.core.config_search_path import SearchPathQuery

        version.setbase("1.3")
        self.name = config_name or "config"
        self._trees: dict[tuple[str, ...], DictConfig] = {}
        path = create_config_search_path(str(absolute(config_path) if config_path else conf_dir()))
        for key, folder in (("--config-path", config_path), ("--config-dir", config_dir)):
            if folder is not None and not absolute(folder).is_dir():
                raise Refused(f"{key} {folder}", "no such folder")
        if config_dir is not None:
            path.prepend(provider="command-line", path=f"file://{absolute(config_dir)}", anchor=SearchPathQuery(provider="schema"))
        with _no_global_hydra():
            self.hydra = Hydra.create_main_hydra2("perfed", path)
        self.loader = self.hydra.config_loader
        self.loader.repository = _reading_once()(path)

    def tree(self, choices: Sequence[str]) -> DictConfig:
        """The composition of groups (and Hydra's keys) alone, made once. Not to be edited."""
        key = tuple(choices)
        if key not in self._trees:
            self._trees[key] = self.compose(key)
        return self._trees[key]

    def groups(self) -> list[str]:
        return [group for group in self.loader.list_groups("") if group not in ("hydra", "tune") and "schema" not in group]

    def options(self, group: str) -> list[str]:
        from hydra.core.object_type import ObjectType

        return sorted(set(self.loader.get_group_options(group, ObjectType.CONFIG)))

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """The whole tree with the node ``hydra``. Raises UserError."""
        from hydra.types import RunMode

        try:
            return self.hydra.compose_config(self.name, list(overrides), RunMode.RUN, from_shell=False, with_log_configuration=False)
        except Exception as error:
            raise Refused(_culprit(overrides, error), _one_line(error)) from error

    def apply(self, overrides: Sequence[Any], tree: DictConfig) -> DictConfig:
        """A copy of a composed tree with parsed overrides of keys (not of groups): a composition's last step, at a tenth of its time."""
        out = copy.deepcopy(tree)
        try:
            self.loader._apply_overrides_to_config(list(overrides), out)
        except Exception as error:
            raise Refused(_culprit([o.input_line for o in overrides], error), _one_line(error)) from error
        return out


@functools.cache
def _reading_once() -> type:
    """Hydra's repository of configuration files, which reads each file once: reading takes half of a composition's time."""
    from hydra._internal.config_repository import ConfigRepository

    class ReadingOnce(ConfigRepository):
        def load_config(self, config_path: str):
            if config_path in self.read:
                return pickle.loads(self.read[config_path])  # composing changes what it is given
            found = super().load_config(config_path)
            if found is not None and not found.path.startswith("structured:"):  # a plugin may register its options again
                self.read[config_path] = pickle.dumps(found)
            return found

        def __deepcopy__(self, memo):
            return copy.copy(self)  # Hydra copies it to give it other sources, which it makes anew

        def initialize_sources(self, config_search_path) -> None:
            self.read: dict[str, bytes] = {}
            super().initialize_sources(config_search_path)

    return ReadingOnce


@contextmanager
def _no_global_hydra() -> Iterator[None]:
    """Hydra keeps one instance per process; leave the one of a caller (a notebook, hydra.main) as it is."""
    from hydra.core.global_hydra import GlobalHydra

    instance = GlobalHydra.instance()
    before, instance.hydra = instance.hydra, None
    try:
        yield
    finally:
        instance.hydra = before


def _culprit(overrides: Sequence[str], error: Exception) -> str:
    chain = "\n".join(str(e) for e in _causes(error))
    named = [text for text in overrides if text in chain or text.partition("=")[0].lstrip("+~") in re.findall(r"[\w./]+", chain)]
    return named[-1] if named else "config"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _one_line(error: Exception) -> str:
    """The last cause that says something, without Hydra's advice and OmegaConf's notes."""
    for cause in reversed(list(_causes(error))):
        if isinstance(cause, MarkedYAMLError) and cause.problem_mark is not None:
            return f"{cause.problem_mark.name}, line {cause.problem_mark.line + 1}: {cause.problem}"
        lines = [line.strip() for line in str(cause).splitlines()]
        lines = [line for line in lines if line and not re.match(r"(full_key|object_type|reference_type|See https|To append)", line)]
        if lines:
            return "; ".join(lines[:2])
    return type(error).__name__


# ---------------------------------------------------------------- reading the command line


@dataclass(frozen=True)
class Cell:
    """One job: its overrides, its configuration, its folder, the full hash of its identity, and its overrides as Hydra takes them."""

    overrides: tuple[str, ...]
    config: Config
    folder: Path
    hash: str
    argv: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """A command line that was understood. ``argv`` is what Hydra gets."""

    cells: tuple[Cell, ...]
    multirun: bool
    argv: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """``argv`` without flags."""
        return tuple(word for word in self.argv if not word.startswith("--"))


class FrontDoor:
    """Reads overrides, refuses what is wrong with their names, and composes and parses the cells."""

    def __init__(self, composer: Composer, overrides: Sequence[str]):
        from hydra.core.override_parser.overrides_parser import OverridesParser

        self.composer = composer
        self.parser = OverridesParser.create(config_loader=composer.loader)
        self.given = [self._read(text) for text in overrides]
        self._plugins()
        self.groups = composer.groups()
        self.hydra_given = [o for o in self.given if o.is_hydra_override()]
        self.forced: set[str] = set()
        base = composer.tree([])
        for override in self.hydra_given:
            self._check_hydra(override, base)
        for override in self.given:
            self._check_group(override, base)
        self.given = [o for o in self.given if not (self._is_group(o) and not o.is_sweep_override() and o.value() is None)]
        settled = [o.input_line for o in self.given if o.is_hydra_override() or (self._is_group(o) and not o.is_sweep_override())]
        self.base = composer.tree(settled)

    # ---- texts

    def _read(self, text: str):
        from hydra.errors import HydraException

        if re.fullmatch(r"\+{0,2}[\w./@]+", text):
            raise Refused(text, "write key=value" + (f": {text}=<value>" if not text.startswith("+") else ""))
        try:
            override = self.parser.parse_overrides([text])[0]
        except HydraException as error:
            key, _, value = text.partition("=")
            if re.search(r"""['"\\,()\[\]]""", value) is None and value and not value.startswith("{"):
                return self._read(f'{key}="{value}"')  # a path with ~ or {seed}, say, which Hydra takes in quotes alone
            raise Refused(text, "cannot be read; write key=value, and quote a value with spaces, brackets, braces or commas") from error
        if override.is_delete():
            raise Refused(text, "a key cannot be removed; set it to another value")
        return override

    def _plugins(self) -> None:
        values = [o.value() for o in self.given if o.get_key_element().lstrip("+") == "plugins" and not o.is_sweep_override()]
        if values and values[-1]:
            import_plugins(values[-1])
            offer_registered(self.composer)

    # ---- names

    def _is_group(self, override) -> bool:
        return override.key_or_group in self.groups

    def _check_hydra(self, override, base: DictConfig) -> None:
        key, value = override.key_or_group, override.get_value_string()
        if override.is_sweep_override():
            raise Refused(override.input_line, "Hydra's own keys cannot be swept")
        if "/" in key:
            known = [f"hydra/{group}" for group in self.composer.loader.list_groups("hydra")]
            if key not in known:
                raise UserError(key, value, f"no such group{nearest(key, known)}")
            options = self.composer.options(key)
            if value in _OF_LAUNCHERS and value not in options:
                raise UserError(key, value, "is an extra: pip install 'perfed[launchers]'")
            if override.value() not in (*options, None):
                raise UserError(key, value, f"must be one of {', '.join(options)}{nearest(str(override.value()), options)}")
            return
        if key.startswith("hydra.launcher.") and not override.is_add():
            tree = self.composer.tree([o.input_line for o in self.hydra_given if "/" in o.key_or_group])
            if not _has(tree, key):
                launcher, known = tree.hydra.runtime.choices["hydra/launcher"], _leaves(tree.hydra.launcher, "hydra.launcher.", nodes=True)
                near = _nearest_key(key, [name for name in known if not name.rpartition(".")[2].startswith("_")])
                raise UserError(key, value, f"no such key with hydra/launcher={launcher}{near}")
        parent = next((place for place in _OPEN if key.startswith(place + ".")), None)
        if parent is None and not _has(base, key):
            raise UserError(key, value, f"no such key{_nearest_key(key, _leaves(base.hydra, 'hydra.', nodes=True))}")

    def _check_group(self, override, base: DictConfig) -> None:
        if not self._is_group(override):
            return
        group, value = override.key_or_group, override.get_value_string()
        if override.package is not None:
            raise Refused(override.input_line, f"write {group}=<option>")
        listed = group in base.hydra.runtime.choices
        if listed and override.is_add():
            raise Refused(override.input_line, f"write {group}={value}, without +")
        if not listed and not override.is_add():
            raise Refused(override.input_line, f"write +{group}={value}")
        options = self.composer.options(group)
        for choice in list(override.sweep_iterator()) if override.is_discrete_sweep() else [override.value()]:
            if choice is None and group not in GROUPS:
                continue
            if not isinstance(choice, str) or choice not in options:
                near = nearest(choice, options) if isinstance(choice, str) else ""
                raise UserError(group, choice, f"no such {group}{near}; one of {', '.join(options) or '(none yet)'}")

    def _check_key(self, override, tree: DictConfig, known: Mapping[str, Any]) -> None:
        """The key exists in the tree of its cell; a field that the YAML of an option leaves out counts too."""
        key, value = override.key_or_group, override.get_value_string()
        if override.package is not None:
            raise UserError(override.get_key_element(), value, "no such key")
        if key.partition(".")[2] == "name" and key.partition(".")[0] in GROUPS:
            group = key.partition(".")[0]
            raise UserError(key, value, f"choose with {group}=<option>")
        if isinstance(override.value(), dict) and isinstance(OmegaConf.select(tree, key), DictConfig):
            for name, item in override.value().items():
                inner = f"{key}.{name}"
                if inner not in known and not _has(tree, inner):
                    raise UserError(inner, item, f"no such key{_nearest_key(inner, list(known))}")
        if key in known or _has(tree, key):
            if override.is_add() and not override.is_force_add():
                raise Refused(override.input_line, f"{key} exists: write {key}={value}, without +")
            if not _has(tree, key):
                self.forced.add(key)
            return
        group = key.partition(".")[0]
        option = tree.hydra.runtime.choices.get(group)
        where = f" with {group}={option}" if "." in key and option else ""
        same = any(name.rpartition(".")[2] == key for name in known)
        near = ("" if same else elsewhere(key)) or _nearest_key(key, [*known, *self.groups, *_SECTIONS])
        raise UserError(key, value, f"no such key{where}{near}")

    # ---- cells

    @property
    def cells_are_known(self) -> bool:
        """Hydra's own sweeper makes them; others choose while they run."""
        return str(self.base.hydra.sweeper.get("_target_", "")).endswith(".BasicSweeper")

    def command(self, multirun: bool, flags: Sequence[str] = ()) -> Command:
        """Every cell, composed and parsed. Raises UserError."""
        multirun = multirun or str(self.base.hydra.mode).rpartition(".")[2] == "MULTIRUN"
        task = [o for o in self.given if not o.is_hydra_override()]
        for override in task:
            self._check_sweep(override, multirun)
        cells = self._product(task) if multirun else [tuple(o.input_line for o in task)]
        made = tuple(self._cell(texts, multirun, number, len(cells)) for number, texts in enumerate(cells))
        return Command(made, multirun, (*flags, *(self._forced(o.input_line) for o in self.given)))

    def _check_sweep(self, override, multirun: bool) -> None:
        if not override.is_sweep_override():
            return
        text = override.input_line
        if not multirun:
            raise Refused(text, "several values need -m; a list is written [a,b] and the decimal point is a dot")
        if any(re.fullmatch(r"-?0\d+", item.strip()) for item in override.get_value_string().split(",")):
            raise Refused(text, "the decimal point is a dot (0.01); a comma separates the values of a sweep")

    def _product(self, task) -> list[tuple[str, ...]]:
        """The cells of Hydra's own sweeper: hydra.sweeper.params of an experiment, then the command line."""
        from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

        if not self.cells_are_known:  # a plugin chooses its cells while it runs; each job checks its own
            return [tuple(o.input_line for o in task if not o.is_sweep_override())]
        given = [self._read(f"{key}={value}") for key, value in (self.base.hydra.sweeper.params or {}).items()]
        for override in given:
            self._check_group(override, self.base)
            self._check_sweep(override, True)
        for override in (*given, *task):
            if override.is_sweep_override() and not override.is_discrete_sweep():
                raise Refused(override.input_line, "a sweep takes values or range(start,stop,step)")
        batches = BasicSweeper.split_arguments([*given, *task], None)
        return [tuple(cell) for batch in batches for cell in batch]

    def _forced(self, text: str) -> str:
        return f"++{text}" if text.partition("=")[0] in self.forced else text

    def _cell(self, texts: Sequence[str], multirun: bool, number: int, count: int) -> Cell:
        try:
            cfg = self._composed(texts)
            config = parse(cfg)
            who = _identity(config)
            folder = _folder(cfg, who.name, multirun, number)
        except UserError as error:
            if count == 1:
                raise
            raise InJob(error, number, count, texts) from error
        return Cell(tuple(texts), config, folder, who.hash, tuple(map(self._forced, texts)))

    def _composed(self, texts: Sequence[str]) -> DictConfig:
        read = [self._read(text) for text in texts]
        hydra_texts = tuple(o.input_line for o in self.hydra_given)
        chosen = (*hydra_texts, *(o.input_line for o in read if self._is_group(o)))
        tree = self.composer.tree(chosen)
        for group in self.groups:
            if group not in GROUPS and group in tree:
                choice = f"{group}={tree.hydra.runtime.choices.get(group)}"
                raise Refused(choice, "the first line of its file must be '# @package _global_'")
        known = known_keys(tree)
        for override in read:
            if not self._is_group(override):
                self._check_key(override, tree, known)
        keys = [self._read(self._forced(o.input_line)) for o in read if not self._is_group(o)]
        return self.composer.apply(keys, tree)


_SECTIONS = ("split", "adapt", "engine", "study")


def offer_registered(composer: Composer) -> None:
    """Make what a plugin registered an option even without a YAML file: the defaults of its fields, knobs by interpolation."""
    import dataclasses

    from hydra.core.config_store import ConfigStore

    from perfed.config import KNOBS, plain, registry

    for group in GROUPS:
        with_file = set(composer.options(group))
        for name, cls in registry(group).items():
            if name in with_file:
                continue
            node = {"name": name}
            for f in dataclasses.fields(cls):
                if f.name != "name" and f.name in KNOBS:
                    node[f.name] = f"${{{f.name}}}"
                elif f.name != "name" and f.default is not dataclasses.MISSING:
                    node[f.name] = plain(f.default)
                elif f.name != "name" and f.default_factory is not dataclasses.MISSING:
                    node[f.name] = plain(f.default_factory())
            ConfigStore.instance().store(group=group, name=name, node=node, provider="perfed.plugins")


def known_keys(tree: DictConfig) -> dict[str, None]:
    """The dotted keys that a user may set in this tree: those in it and the fields of the chosen options."""
    import dataclasses

    from perfed.config import registry

    keys = dict.fromkeys(key for key in _leaves(tree) if not key.startswith("hydra."))
    for group in GROUPS:
        name = OmegaConf.select(tree, f"{group}.name", default=None)
        cls = registry(group).get(name) if isinstance(name, str) else None
        keys |= dict.fromkeys(f"{group}.{f.name}" for f in dataclasses.fields(cls)) if cls else {}
    return keys


def _has(tree: DictConfig, key: str) -> bool:
    node: Any = tree
    for part in key.split("."):
        if not isinstance(node, DictConfig) or node._is_none() or node._is_missing() or part not in node._content:
            return False
        node = node._get_node(part)
    return True


def _leaves(tree: DictConfig, prefix: str = "", nodes: bool = False) -> list[str]:
    keys = []
    for key in tree:
        node = tree._get_node(key)
        branch = isinstance(node, DictConfig) and not node._is_none() and not node._is_missing() and not node._is_interpolation()
        if not branch or nodes:
            keys.append(f"{prefix}{key}")
        if branch:
            keys += _leaves(node, f"{prefix}{key}.", nodes)
    return keys


def _nearest_key(key: str, known: Sequence[str]) -> str:
    """A key of the same last part (``delta`` -> 'algo.delta'); else the nearest by the whole key, else by its last part.

    The name of an option is no answer: it is chosen as group=<option>.
    """
    part = key.rpartition(".")[2]
    known = [name for name in known if name.startswith("hydra.") or not name.endswith(".name")]
    if same := [name for name in known if name.rpartition(".")[2] == part]:
        return f" (did you mean '{get_close_matches(key, same, n=1, cutoff=0)[0]}'?)"
    if text := nearest(key, known):
        return text
    last = {name.rpartition(".")[2]: name for name in known}
    hit = get_close_matches(part, list(last), n=1, cutoff=0.75)
    return f" (did you mean '{last[hit[0]]}'?)" if hit else ""


def _identity(config: Config):
    from perfed.identity import identity

    return identity(config, "" if config.study.name else None)  # a study may take its data from elsewhere (study.cifar)


def _folder(cfg: DictConfig, name: str, multirun: bool, number: int) -> Path:
    """Where Hydra will put the job of that run id."""
    with open_dict(cfg.hydra.job):
        cfg.hydra.job.num = cfg.hydra.job.id = number
    keys = ("hydra.sweep.dir", "hydra.sweep.subdir") if multirun else ("hydra.run.dir",)
    _named.append(name)
    try:
        return absolute(Path(*(str(OmegaConf.select(cfg, key)) for key in keys)))
    except OmegaConfBaseException as error:
        raise Refused(keys[-1], _one_line(error)) from error
    finally:
        _named.pop()


def compose(overrides: Sequence[str] = (), composer: Composer | None = None) -> DictConfig:
    """The tree of a command line without a sweep, for notebooks: ``parse(compose(["algo=fedavg"]))``. Raises UserError.

    composer: one to use again; making one takes a tenth of a second.
    """
    door = FrontDoor(composer or Composer(), overrides)
    for override in door.given:
        door._check_sweep(override, False)
    cfg = door._composed([o.input_line for o in door.given if not o.is_hydra_override()])
    return OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"])
