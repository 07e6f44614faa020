"""``perfed-eval RUN ... [protocol=NAME] [adapt.KEY=VALUE] ...``: score finished runs again, without training.

The final state is judged under another protocol or with other adaptation; the run itself stays as it is. What was scored
lies in ``RUN/eval-<protocol>-<hash12>/``, a folder of the same form, so that tables can be made of several.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfed import compare, results, tables
from perfed.errors import UserError, require

if TYPE_CHECKING:
    from perfed.config import Config

HELP = """\
perfed-eval RUN [RUN ...] [KEY=VALUE ...]    score finished runs again, without training

  protocol=clean|paper|fewshot   what is adapted on and what is scored
  adapt.steps=[0,1,5,10]         adaptation steps, several make a curve
  adapt.lr, adapt.batch, adapt.source, adapt.repeats, adapt.layers, protocol.support
  device, engine.*, data_root    where and how it is computed

Example: perfed-eval outputs/perfedavg_hf-* protocol=paper adapt.steps=[0,1,2,5,10]
"""
KEYS = re.compile(r"protocol|protocol\.\w+|adapt\.\w+|device|engine\.\w+|data_root")
GROUPED = {"adapt": "adapt.steps=3", "engine": "engine.threads=2"}
"""Groups of such keys -> an example of one."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, or 1 after one line on stderr."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or "-h" in argv or "--help" in argv:
        print(HELP)
        return 0 if argv else 1
    try:
        folders = [Path(word) for word in argv if "=" not in word or Path(word).is_dir()]
        overrides = [word for word in argv if "=" in word and not Path(word).is_dir()]
        require(bool(folders), "run", "", "at least one run folder")
        for folder in folders:
            results.finished(folder)
        done = [rescore(folder, overrides) for folder in folders]
        for folder, run in zip(folders, done, strict=True):
            print(f"{folder.name}: {run.folder}\n\n{tables.plain(tables.run_table(run.result))}")
        if len(done) > 1:
            print(tables.plain(compare.sweep_table(done)))
        return 0
    except UserError as error:
        print(f"perfed-eval: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def changed(config: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A stored configuration with ``KEY=VALUE`` words applied. Raises UserError for a key that would need training."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from perfed.config import PROTOCOLS, conf_dir

    cfg = OmegaConf.create(config)
    for word in sorted(overrides, key=lambda w: not w.startswith("protocol=")):
        key, equals, value = word.partition("=")
        require(bool(equals), "run", word, "no such folder, and no KEY=VALUE")
        require(bool(KEYS.fullmatch(key)), key, value, _refusal(key, value))
        if key == "protocol":
            require(value in PROTOCOLS, key, value, f"one of {', '.join(PROTOCOLS)}")
            cfg.protocol = OmegaConf.load(conf_dir() / "protocol" / f"{value}.yaml")
            continue
        try:
            cfg = OmegaConf.merge(cfg, OmegaConf.from_dotlist([word]))
        except (OmegaConfBaseException, YAMLError) as error:
            raise UserError(key, value, f"cannot be read: {str(error).splitlines()[0]}") from error
    support = cfg.protocol.get("support")
    cut = support is None or cfg.protocol.get("score") == "rest"
    require(cut, "protocol.support", support, "goes with protocol=fewshot, which takes a support set")
    return OmegaConf.to_container(cfg)


def _refusal(key: str, value: str) -> str:
    """Why a key that is none of KEYS cannot be set, and what was meant where that is plain."""
    plain = key.lstrip("+")
    if KEYS.fullmatch(plain):
        return f"write {plain}={value}, without +"
    if plain in GROUPED:
        return f"a group of keys: write {plain}.<key>=<value>, such as {GROUPED[plain]}"
    return "cannot be changed without training; protocol, adapt.*, device, engine.* and data_root can"


def rescore(folder: Path, overrides: Sequence[str]) -> results.Run:
    """Score the final state of a finished run and store the numbers; an equal request is answered from the folder."""
    from perfed import train
    from perfed.config import parse

    folder = folder.expanduser()
    config = parse(changed(results.finished(folder).config, overrides))
    with train.threads(config.engine.threads):
        return _rescored(folder, config)


def _rescored(folder: Path, config: Config) -> results.Run:
    from perfed import train
    from perfed.evaluate import judge
    from perfed.identity import identity
    from perfed.prepare import resolve
    from perfed.summary import summary, write_users

    slug = re.sub(r"[^A-Za-z0-9]+", "_", resolve(config, config.algo).label).strip("_")
    home = folder / f"eval-{slug}-{identity(config).hash[:12]}"
    status = results.read_status(home)
    if status is None or status["status"] not in ("DONE", "DIVERGED"):
        fed, prepared = train.rebuild(folder, config)
        scores = judge(fed, prepared.protocol)
        result = summary(prepared, fed, scores)
        home.mkdir(exist_ok=True)
        results.write_text(home / "config.yaml", train.stored_yaml(config))
        write_users(home, prepared, scores, fed.times_sampled)
        results.write_json(home / "result.json", result)
        results.write_status(home, "DIVERGED" if result["diverged"] else "DONE", identity=prepared.identity.hash, run=folder.name)
    return results.load(home)


if __name__ == "__main__":
    sys.exit(main())
