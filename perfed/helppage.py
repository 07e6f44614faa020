"""The page that ``--help`` prints, made from the YAML files in ``conf/``: a key's meaning is the comment beside it."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from perfed.config import GROUPS, KNOBS

_LINE = re.compile(r"^( *)(?:- )?([A-Za-z_]\w*):(?: +(.*?))?(?: +# *(.*))?$")
_WIDTH = 116

_HEAD = """\
perfed: personalized federated learning experiments

It simulates n users on one device. Each round, some of them train the shared model on their own data and the server
averages what they send. In the end every user adapts the model to himself, and a table shows the accuracy before and
after, as mean ± 95 % interval over seeds. Each run has its own folder in outputs/; the same command again shows the
stored result.

Usage:    python -m perfed [key=value ...] [-m]            (once installed, also: perfed ...)
          Write keys with a dot where they are in a group: adapt.steps=5. null means none. A list is [1,2].
          -m (--multirun) runs every combination of comma-separated values and ends with one table.

Examples:
  python -m perfed
      Per-FedAvg (HF) on real handwritten digits, no download, under a minute.
  python -m perfed algo=fedavg tau=4 alpha=0.02
      another algorithm, fewer local steps, a larger adaptation step.
  python -m perfed -m algo=fedavg,perfedavg_fo,perfedavg_hf,perfedavg tau=4,10
      eight runs and a table: rows are settings, columns are algorithms.
"""

_TAIL = """\
Flags:
  -m, --multirun        run all combinations
  --cfg job             print the composed configuration and stop; with --resolve every value is filled in
  --config-dir DIR      a folder with YAML files of your own
  -h, --help            this page
  --version             perfed's version
  --hydra-help          Hydra's own flags; they work too

Exit codes: 0 done, finished before or diverged; 1 refused, or a run failed; 75 another process holds the run;
130 / 143 ended by a signal.
"""


def page(conf: Path) -> str:
    """The whole text. conf: the folder that holds config.yaml and one folder per group."""
    keys = keys_of(conf / "config.yaml")
    defaults = _defaults(conf / "config.yaml")
    knobs = [_row(f"{key}={keys[key][0]}", keys[key][1], 12) for key in KNOBS]
    other = [_row(f"{key}={value}", meaning, 30) for key, (value, meaning) in keys.items() if key not in KNOBS]
    groups = []
    for group, options in groups_of(conf).items():
        groups.append(f"  {group}" + ("" if group in defaults and defaults[group] != "null" else " (default none)"))
        for option, meaning in options.items():
            star = "*" if defaults.get(group) == option else " "
            groups.append(_row(f"{star} {option}", meaning, 18, indent=4))
    return "\n".join(
        [
            _HEAD,
            "The ten knobs, with their defaults:",
            *knobs,
            "",
            "Groups: choose with group=option, for example model=cnn; * marks the default. The keys of an option are set as",
            "group.key=value; --cfg job shows them.",
            *groups,
            "",
            "Other keys, with their defaults:",
            *other,
            "",
            _TAIL,
        ]
    )


def keys_of(path: Path) -> dict[str, tuple[str, str]]:
    """Dotted key -> (default as written, meaning) of a YAML file, without its defaults list and its hydra part."""
    found: dict[str, tuple[str, str]] = {}
    parents: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        match = _LINE.match(line)
        if match is None or line.lstrip().startswith("- "):
            continue
        indent, key, value, meaning = match.groups()
        parents = parents[: len(indent) // 2]
        if value is not None and not value.startswith("#"):
            if (parents or [key])[0] not in ("defaults", "hydra"):
                found[".".join([*parents, key])] = (_shown(value), meaning or "")
        parents.append(key)
    return found


def _shown(value: str) -> str:
    """The default of an ``${oc.env:NAME,"default"}``, else the value."""
    match = re.fullmatch(r'\$\{oc\.env:\w+,"?(.*?)"?\}', value)
    return match[1] if match else value


def _defaults(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^  - (\w+): (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))


def groups_of(conf: Path) -> dict[str, dict[str, str]]:
    """Group -> option -> its first comment. Folders of schemas (a name with 'schema' or a leading underscore) are hidden."""
    names = [p.name for p in conf.iterdir() if p.is_dir() and p.name not in ("hydra", "__pycache__")]
    names = [name for name in names if "schema" not in name and not name.startswith("_")]
    order = [*GROUPS, *sorted(set(names) - set(GROUPS))]
    found = {}
    for group in (name for name in order if name in names):
        options = {p.stem: _first_comment(p) for p in sorted((conf / group).glob("*.yaml"))}
        if options:
            found[group] = options
    return found


def _first_comment(path: Path) -> str:
    """The first sentence of the comment that opens the file, or its part before a semicolon, without the file's command."""
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    said = [line.lstrip("# ").rstrip() for line in lines[:end] if not line.startswith("# @package")]
    text = " ".join(line for line in said if not line.startswith(("python -m perfed", "perfed ")))
    outside = re.sub(r"\([^()]*\)", lambda brackets: "_" * len(brackets[0]), text)  # a semicolon in brackets ends nothing
    end = re.search(r"(?<!\bal)\.(?: +(?=[A-Z])|$)|;", outside)
    return (text[: end.start()] if end else text).strip()


def _row(left: str, right: str, width: int, indent: int = 2) -> str:
    first = " " * indent + left.ljust(width) + "  "
    rest = " " * (indent + width + 2)
    if len(left) > width:
        return " " * indent + left + "\n" + textwrap.fill(right, _WIDTH, initial_indent=rest, subsequent_indent=rest)
    return textwrap.fill(right, _WIDTH, initial_indent=first, subsequent_indent=rest) if right else first.rstrip()
