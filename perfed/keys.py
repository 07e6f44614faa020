"""Keys and values of stored configurations as they are typed on the command line, and back.

``typed`` and ``read`` are inverse: null and 'null', 1 and '1', 0.001 and '1e-3', NA and '001' stay apart on the way through a table. A key
is dotted, as in config.yaml; the name of a group's option goes by the group alone (``algo``, ``partition``).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from perfed.config import GROUPS, conf_dir
from perfed.errors import UserError, nearest, require
from perfed.tables import flat

NOT_A_SETTING = {
    "device", "data_root", "outputs", "progress", "pictures", "plugins", "plan", "force", "eval_every", "checkpoint_every", "resume",
    "fail_fast",
    "seed", "seeds", "hydra", "experiment", "tracker", "engine", "study",
}  # fmt: skip
"""Root keys that change no number, and the seeds, which are averaged over."""
ABSENT = "-"
"""Stands for the value of a key that a configuration does not have; a text ``-`` is quoted."""


# ---------------------------------------------------------------- values


def typed(value: Any) -> str:
    """A value as it is typed on the command line; a text that reads as something else is quoted, one with line breaks is JSON."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(typed, value))}]"
    if not isinstance(value, str):
        return repr(value)
    if " ".join(value.split()) != value or not value.isprintable():
        return re.sub(r"(?<= ) |(?<=^\") | (?=\"$)", r"\\u0020", json.dumps(value, ensure_ascii=False))
    if value != ABSENT and _BARE.fullmatch(value) and read(value) == value:
        return value
    body = re.sub(r"(\\*)('|$)", lambda m: 2 * m[1] + ("\\'" if m[2] else ""), value)
    return f"'{body}'"


_BARE = re.compile(r"[\w/\\+.$%*@?|: -]+", re.ASCII)
"""What Hydra takes without quotes."""


def read(text: str) -> Any:
    """The value that :func:`typed` wrote. What is no number, list, quoted text, null, true or false is a text."""
    text = text.strip()
    if text.lower() in ("null", "~", "true", "false"):
        return {"true": True, "false": False}.get(text.lower())
    if len(text) > 1 and text[0] == text[-1] == "'":
        return re.sub(r"(\\+)('|$)", lambda m: m[1][: len(m[1]) // 2] + m[2], text[1:-1])
    if len(text) > 1 and text[0] == text[-1] == '"':
        return json.loads(text)
    if text[:1] == "[" and text[-1:] == "]":
        return [read(item) for item in split(text[1:-1])] if text[1:-1].strip() else []
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def split(text: str) -> list[str]:
    """The parts between the commas that stand in no bracket or quote, without the spaces around them."""
    parts, depth, quote, escaped = [""], 0, "", False
    for letter in text:
        if quote:
            quote = "" if letter == quote and not escaped else quote
            escaped = letter == "\\" and not escaped
        elif letter in "'\"" and parts[-1].rstrip()[-1:] in ("", "=", "[", ","):
            quote, escaped = letter, False
        elif letter in "[]":
            depth += 1 if letter == "[" else -1
        if letter == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def alike(value: Any) -> Any:
    """A hashable stand-in that keeps 1 and "1", null and "null" apart, and 1 and 1.0 together."""
    if isinstance(value, list):
        return tuple(alike(item) for item in value)
    return (type(value).__name__ if value is None or isinstance(value, (bool, str)) else "number", value)


def order(text: str) -> tuple:
    """A sort key over typed values: absent, null, false and true, numbers by size, then texts and lists."""
    value = read(text)
    if text == ABSENT or value is None or isinstance(value, bool):
        return (0, "" if text == ABSENT else str(value is not None) + text)
    return (1, value) if isinstance(value, (int, float)) else (2, str(value))


# ---------------------------------------------------------------- keys


def shown(key: str) -> str:
    """``algo.name`` -> ``algo``: as it is typed."""
    return key.removesuffix(".name")


def find(word: str, configs: Sequence[Mapping[str, Any]], option: str) -> str:
    """The dotted key that a word stands for in flat configurations. Raises UserError under ``option``, with the nearest key."""
    known = dict.fromkeys(key for config in configs for key in config)
    for key in (word, f"{word}.name"):
        if key in known:
            return key
    names = [shown(key) for key in known]
    last = {name.rpartition(".")[2]: name for name in names}
    near = nearest(word, names)
    if (part := word.rpartition(".")[2]) in last or not near:
        near = f" (did you mean '{last[part]}'?)" if part in last else near
    raise UserError(option, word, f"no such key in these runs{near}")


def settings(config: Mapping[str, Any], without: Iterable[str] = ()) -> dict[str, Any]:
    """The entries of a flat configuration that can change a number, but for the seeds and the keys ``without``."""
    return {k: v for k, v in config.items() if (k.split(".")[0] not in NOT_A_SETTING or k == "engine.dtype") and k not in without}


def telling(configs: Sequence[Mapping[str, Any]], without: Iterable[str] = ()) -> list[str]:
    """The keys of flat configurations that tell runs apart, beside the algorithm. An option's own key counts only if it differs between
    runs with the same option of that group, and one that follows a root key (``algo.alpha: ${alpha}``) not at all."""
    keys = []
    for key in dict.fromkeys(key for config in configs for key in settings(config, {*without, "algo.name"})):
        root, _, leaf = key.rpartition(".")
        if leaf != "name" and root and all(leaf in c and alike(c[leaf]) == alike(c[key]) for c in configs if key in c):
            continue
        values: dict[Any, set[Any]] = {}
        for config in configs:
            option = None if leaf == "name" or not root else config.get(f"{root}.name")
            values.setdefault(option, set()).add(alike(config.get(key)))
        if any(len(found) > 1 for found in values.values()):
            keys.append(key)
    return keys


def where(text: str) -> list[tuple[str, Any]]:
    """``tau=4,partition=iid`` -> key and value pairs. Raises UserError."""
    pairs = [part.partition("=") for part in split(text)]
    require(all(key and equals for key, equals, _ in pairs), "where", text, "KEY=VALUE, or several with commas between them")
    return [(key.strip(), read(value)) for key, _, value in pairs]


# ---------------------------------------------------------------- a command


def command(config: Mapping[str, Any], **changes: Any) -> str:
    """``python -m perfed ...``: the words that compose a stored configuration again, with ``changes`` of root keys.

    What equals the default, or follows another key of the command, is left out.
    """
    from omegaconf import OmegaConf

    stored = flat(config) | changes
    main = OmegaConf.load(conf_dir() / "config.yaml")
    chosen = {name: value for entry in main.defaults if OmegaConf.is_dict(entry) for name, value in entry.items()}
    words = [f"{group}={stored[f'{group}.name']}" for group in GROUPS if stored.get(f"{group}.name") not in (None, chosen.get(group))]
    del main["defaults"], main["hydra"]
    defaults = OmegaConf.to_container(main, resolve=True)
    for key, value in stored.items():
        if "." not in key and key in main:
            main[key] = value
    for group in GROUPS:
        path = conf_dir() / group / f"{stored.get(f'{group}.name')}.yaml"
        main[group] = OmegaConf.load(path) if path.is_file() else {}
    composed = flat(OmegaConf.to_container(main, resolve=True))
    for key, value in stored.items():
        group, _, leaf = key.partition(".")
        if group in _WITHOUT or (group in GROUPS and leaf == "name"):
            continue
        before = composed.get(key) if leaf else defaults.get(key)  # a field that its YAML leaves out is null, or is written
        if alike(_one(value)) != alike(_one(before)):
            words.append(f"{key}={typed(value)}")
    return shlex.join(["python", "-m", "perfed", *words])


_WITHOUT = {"study", "plan", "force", "resume", "progress", "pictures", "checkpoint_every", "fail_fast"}


def _one(value: Any) -> Any:
    """``adapt.steps`` is stored as a list, also where one number was typed."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value
