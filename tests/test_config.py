"""The typed configuration, who a run is, and the YAML tree. Rows B11 (r), B31 and B32(b) of the fault list."""

from __future__ import annotations

import dataclasses
import math
import re
import sys

import pytest
import yaml
from omegaconf import OmegaConf

from perfed import frontdoor
from perfed.config import GROUPS, KNOBS, Config, Protocol, Root, build, conf_dir, elsewhere, parse, registry, wanted
from perfed.errors import UserError
from perfed.helppage import keys_of
from perfed.identity import LATE, identity, readable

DATA = "0" * 64  # stands for the fingerprint of the data
COMPOSER = frontdoor.Composer()


def compose(overrides):
    return frontdoor.compose(overrides, COMPOSER)


@pytest.fixture(scope="module")
def tree():
    return compose([])


def changed(tree, **changes) -> Config:
    """The parsed default with dotted keys changed, ``__`` for the dot."""
    cfg = OmegaConf.create(OmegaConf.to_container(tree))
    for key, value in changes.items():
        OmegaConf.update(cfg, key.replace("__", "."), value)
    return parse(cfg)


def complaint(tree, **changes) -> str:
    with pytest.raises(UserError) as caught:
        changed(tree, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_was_composed_before_changes_nothing(tmp_path):
    """Files are read once for each composer; a tree that was edited, and other choices of the same groups, leave no trace."""
    words = ["algo=ditto", "protocol=fewshot", "experiment=fomaml", "tau=3"]
    used = frontdoor.Composer()
    edited = used.compose(words)
    edited.algo.name, edited.n = "x", 7
    used.compose(["algo=fedavg", "model=cnn"])
    assert used.compose(words) == frontdoor.Composer().compose(words)
    (tmp_path / "algo").mkdir()
    (tmp_path / "algo" / "softer.yaml").write_text("name: ditto\nlam: 0.25\n")
    searched = used.compose([f"hydra.searchpath=[file://{tmp_path}]", "algo=softer"])
    assert searched.algo == {"name": "ditto", "lam": 0.25}
    with pytest.raises(UserError, match="softer"):
        used.compose(["algo=softer"])


# ---------------------------------------------------------------- types and values


def test_defaults_are_those_of_the_yaml(tree):
    config = parse(tree)
    for f in dataclasses.fields(Root):
        if f.name not in ("data_root", "plugins"):
            assert getattr(config, f.name) == f.default, f.name
    names = [getattr(config, group).name for group in GROUPS]
    assert names == ["perfedavg_hf", "mnist5k", "table2", "mlp", "sgd", "average", "clean", "none"]


def test_values_take_the_type_of_their_field(tree):
    config = changed(tree, alpha="1e-3", beta=1, seeds="5", adapt__steps=["5", 0, 1], engine__chunk="8", engine__compile="true")
    assert config.alpha == 0.001 and isinstance(config.beta, float) and config.seeds == 5
    assert config.algo.alpha == 0.001  # by interpolation
    assert config.adapt_steps == (0, 1, 5) and config.engine.chunk == 8 and config.engine.compile is True


def test_a_file_with_a_quoted_number(tmp_path, tree):
    file = tmp_path / "x.yaml"
    file.write_text('alpha: "1e-3"\n')
    assert parse(OmegaConf.merge(tree, OmegaConf.load(file))).alpha == 0.001


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"r": 0}, r"r=0\.0: .*\(0, 1\]"),
        ({"r": -0.1}, r"r=-0\.1: .*\(0, 1\]"),
        ({"r": 1.5}, r"r=1\.5: .*\(0, 1\]"),
        ({"alpha": "abc"}, "alpha=abc: must be a number"),
        ({"alpha": float("nan")}, "alpha=nan: must be a finite number"),
        ({"alpha": "inf"}, "alpha=inf: must be a finite number"),
        ({"alpha": -1}, r"alpha=-1\.0: a number >= 0"),
        ({"alpha": None}, "alpha=null: must be a number"),
        ({"alpha": [1, 2]}, r"alpha=\[1, 2\]: must be a number"),
        ({"beta": 0}, r"beta=0\.0: a number > 0"),
        ({"n": 50.0}, "n=50.0: must be a whole number: write 50"),
        ({"n": 2.5}, "n=2.5: must be a whole number"),
        ({"n": True}, "n=true: must be a whole number"),
        ({"n": 0}, "n=0: "),
        ({"tau": 0}, "tau=0: "),
        ({"rounds": -1}, "rounds=-1: "),
        ({"batch": 0}, "batch=0: "),
        ({"seeds": 0}, "seeds=0: "),
        ({"seed": -1}, "seed=-1: "),
        ({"init_seed": "x"}, "init_seed=x: must be a whole number or null"),
        ({"init_seed": "None"}, "init_seed=None: must be a whole number or null .write null"),
        ({"eval_every": 0}, "eval_every=0: "),
        ({"holdout_users": 1}, "holdout_users=1.0: "),
        ({"device": "gpu"}, "device=gpu: must be one of auto, cpu, cuda, cuda:0"),
        ({"progress": "lots"}, "progress=lots: must be one of auto, bar, lines, off"),
        ({"plan": 2}, "plan=2: must be true or false"),
        ({"plugins": "mine"}, "plugins=mine: must be a list of texts"),
        ({"plugins": ["no.such.module"]}, "plugins=no.such.module: cannot be imported: ModuleNotFoundError"),
        ({"split__test": "matchd"}, r"split\.test=matchd: must be one of matched, split \(did you mean 'matched'\?\)"),
        ({"split__val": 1}, r"split\.val=1\.0: "),
        ({"adapt__steps": -1}, r"adapt\.steps=-1: "),
        ({"adapt__steps": []}, r"adapt\.steps=\[\]: "),
        ({"adapt__steps": 1.5}, r"adapt\.steps=1\.5: "),
        ({"adapt__source": "val"}, r"adapt\.source=val: must be one of train, test"),
        ({"adapt": 3}, r"adapt=3: .*adapt\.<key>"),
        ({"engine__chunk": 0}, r"engine\.chunk=0: auto or"),
        ({"engine__backend": "fast"}, r"engine\.backend=fast: must be one of auto, vmap, loop"),
        ({"engine__dtype": "float16"}, r"engine\.dtype=float16: must be one of float32, float64"),
        ({"algo": None}, "algo=null: must be one of .*fedavg"),
        ({"algo__name": "fedavgg"}, r"algo=fedavgg: no such algo \(did you mean 'fedavg'\?\)"),
        ({"algo__alpha": "abc"}, r"algo\.alpha=abc: must be a number"),
        ({"algo__delta": None}, r"algo\.delta=null: must be a number"),
        ({"algo__delta": "None"}, r"algo\.delta=None: must be a number \(neither None nor null"),
        ({"dataset__norm": "max"}, r"dataset\.norm=max: "),
        ({"protocol__score": "rest"}, r"protocol\.support=null: "),
        ({"alpha": "${zeta}"}, r"alpha=\$\{zeta\}: cannot be resolved: .*zeta"),
        ({"alpha": "???"}, r"alpha=\?\?\?: has no value"),
        ({"split__val": "???"}, r"split\.val=\?\?\?: has no value: give one, a number"),
    ],
)
def test_bad_values(tree, change, expected):
    assert re.match(expected, complaint(tree, **change)), complaint(tree, **change)


def test_a_knob_is_named_as_it_was_typed(tree):
    """The algorithm refuses the value; the user typed the knob that it reads by interpolation."""
    config = OmegaConf.to_container(tree)
    raw = OmegaConf.create(config)
    raw.algo = {"name": "perfedavg_hf", "alpha": "${split.val}"}
    raw.split.val = 0.5
    assert parse(raw).algo.alpha == 0.5

    @dataclasses.dataclass(kw_only=True)
    class Picky:
        name: str = "picky"
        alpha: float = 1.0

        def __post_init__(self):
            if self.alpha > 2:
                raise UserError("alpha", self.alpha, "at most 2")

    registry("algo")["picky"] = Picky
    try:
        raw.algo = {"name": "picky", "alpha": "${alpha}"}
        raw.alpha = 3
        with pytest.raises(UserError, match="^alpha=3.0: at most 2$"):
            parse(raw)
        raw.algo.alpha = 4
        with pytest.raises(UserError, match=r"^algo\.alpha=4\.0: at most 2$"):
            parse(raw)
    finally:
        del registry("algo")["picky"]


def test_unknown_keys(tree):
    assert complaint(tree, alhpa=0.02) == "alhpa=0.02: no such key (did you mean 'alpha'?)"
    assert complaint(tree, algo__detla=1) == "algo.detla=1: no such key with algo=perfedavg_hf (did you mean 'delta'?)"
    assert complaint(tree, split__vall=0) == "split.vall=0: no such key (did you mean 'val'?)"


def test_any_exception_of_an_option_is_a_line():
    @dataclasses.dataclass(kw_only=True)
    class Broken:
        x: int

        def __post_init__(self):
            raise ValueError("first line\nsecond line")

    with pytest.raises(UserError, match="first line second line"):
        build(Broken, {"x": 1}, group="model")
    with pytest.raises(UserError, match=r"model\.x=null: has no value: give one, a whole number"):
        build(Broken, {}, group="model")


def test_wanted():
    assert wanted(float | None) == "a number or null" and wanted(list[int]) == "a list of whole numbers" and wanted(bool) == "true or false"


def test_protocols(tree):
    clean = parse(tree)
    assert (clean.adapt_source, clean.adapt_batch, clean.adapt_repeats) == ("train", 40, 1)
    paper = parse(compose(["protocol=paper", "batch=7"]))
    assert (paper.adapt_source, paper.protocol.score, paper.adapt_batch, paper.adapt_repeats) == ("test", "all", 40, 10)
    few = parse(compose(["protocol=fewshot", "batch=7"]))
    assert (few.adapt_source, few.protocol.score, few.protocol.support, few.adapt_batch) == ("test", "rest", 20, 7)
    assert changed(tree, adapt__batch=3, adapt__repeats=2, adapt__source="test").adapt_batch == 3
    with pytest.raises(UserError, match=r"adapt\.source=train: must be test with protocol=fewshot"):
        parse(compose(["protocol=fewshot", "adapt.source=train"]))
    with pytest.raises(UserError, match="^support=5: must be null"):
        Protocol(name="x", support=5)


def test_paths(tree, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    config = changed(tree, outputs="out", data_root="~/data")
    assert config.outputs_path == tmp_path / "out" and config.data_path == tmp_path / "data"
    monkeypatch.setenv("PERFED_DATA", "/somewhere")
    assert parse(tree).data_root == "/somewhere"
    monkeypatch.setenv("PERFED_DATA", "")
    assert parse(tree).data_path == tmp_path / ".cache" / "perfed"
    monkeypatch.delenv("PERFED_DATA")
    with pytest.raises(UserError, match="^data_root=: a folder"):
        changed(tree, data_root=" ")
    assert parse(tree).data_path == tmp_path / ".cache" / "perfed"


def test_round_trip(tree):
    """The stored, resolved tree parses to an equal configuration."""
    for overrides in ([], ["algo=local", "adapt.steps=[0,1,5]", "partition=dirichlet", "protocol=paper"]):
        config = parse(compose(overrides))
        again = parse(yaml.safe_load(yaml.safe_dump(config.as_dict())))
        assert again == config


# ---------------------------------------------------------------- the YAML tree


def options():
    return [(group, file.stem) for group in GROUPS for file in sorted((conf_dir() / group).glob("*.yaml"))]


NEEDS = {"imagefolder": ["dataset.path=x"], "npz": ["dataset.path=x"], "file": ["partition.path=x"]}


@pytest.mark.parametrize(("group", "option"), options())
def test_every_option_file(group, option):
    """It composes, parses, names itself, and holds fields of its class with the class's defaults, or a knob."""
    overrides = [f"{group}={option}", *(NEEDS.get(option, []))]
    tree = compose(overrides)
    config = parse(tree)
    made = getattr(config, group)
    assert made.name == option
    fields = {f.name: f for f in dataclasses.fields(made)}
    assert set(tree[group]) <= set(fields)
    for name, f in fields.items():
        linked = isinstance(OmegaConf.to_container(tree, resolve=False)[group].get(name), str) and name in KNOBS
        if group == "protocol" or name in ("name", "path") or linked or f.default is dataclasses.MISSING:
            continue
        assert getattr(made, name) == f.default, f"conf/{group}/{option}.yaml: {name}"


def test_every_registered_option_has_a_file():
    for group in GROUPS:
        assert {option for g, option in options() if g == group} == {name for name in registry(group) if "test" not in name}, group


def test_config_yaml_explains_every_key():
    for key, (_, meaning) in keys_of(conf_dir() / "config.yaml").items():
        assert meaning, f"{key} has no comment"
    text = (conf_dir() / "config.yaml").read_text()
    for constant in ("60,000", "n=50", "r=0.2", "rounds=1000", "beta=0.001", "majority"):
        assert constant in text.split("defaults:")[0]


# ---------------------------------------------------------------- identity


def who(*overrides: str, data: str = DATA):
    return identity(parse(compose(list(overrides))), data)


PINNED = {
    "": "2252c96a819f7af67c319c19d07f278a90ff4d6171dd63103c044b173b10ec52",
    "algo=fedavg": "73f416ad29d8d4b296284365f7c644bb571467c67e24ce6fd68eae46ceaf10fe",
    "algo=perfedavg tau=4": "c51cdb804496f7b992badca533f889ada0e8c1d6d71aca979bdbf469f564ec1b",
    "algo=perfedavg_fo alpha=0.001 seeds=5": "6f5f43b2dd3ac3ffd71b3f6def845dfe403307900e35c35eca1c99e5c330c2ea",
    "algo=local partition=dirichlet model=logistic": "8f6bdb82e2c01ea082794c5144c8dfbb27b6e0e6b8fb291fd4b7bb5378f3a054",
    "dataset=synthetic partition=iid n=4 rounds=5": "85f40516c4c271158e75821dacd8aeca52e035ad7e268184a99d185bda0922ca",
    "protocol=paper adapt.steps=[1,5]": "a810381cb17dc1bc0c14d7bc81a3dbd15b26d81ac2bbd0db793b653f4739a874",
    "protocol=fewshot model=cnn optimizer=adam": "424b9f588f0d423aab91be59134c4648452dd65dc703ca96122b9bc8a76241d4",
    "server=momentum engine.dtype=float64 init_seed=3": "8b50536068bb33bf78c49f272dbc66359d9207d169a422a12a36075d94509c4d",
    "dataset=mnist n=50 rounds=1000 beta=0.001 seeds=5": "fac7f6ebb2b0fe51d24ecbd3252db612dcf8c60f728291933840b5d261dfdef6",
}


def test_pinned():
    """Stored runs keep their folders. A change here means: a key was added (put it into LATE) or results changed (bump a version)."""
    assert {line: who(*line.split()).hash for line in PINNED} == PINNED
    assert len(PINNED) == 10 and len(set(PINNED.values())) == 10


def test_what_changes_no_number_is_no_part():
    base = who().hash
    same = ["alpha=0.010", "alpha=1e-2", "adapt.source=train", "adapt.batch=40", "dataset.norm=unit", "plugins=[]"]
    same += ["device=cpu", "engine.threads=2"]
    same += ["engine.chunk=4", "engine.backend=loop", "engine.compile=false", "progress=off", "force=true"]
    same += ["plan=true", "outputs=/tmp/x", "data_root=/tmp/y"]
    for override in same:
        assert who(override).hash == base, override
    different = ["alpha=0.02", "tau=4", "rounds=101", "seeds=4", "seed=1", "engine.dtype=float64", "dataset.norm=standard", "adapt.steps=2"]
    different += ["eval_every=5", "split.val=0.1", "algo=perfedavg", "model=logistic", "protocol=paper", "init_seed=0", "algo.delta=1e-2"]
    hashes = {who(override).hash for override in different}
    assert len(hashes) == len(different) and base not in hashes
    assert who(data="1" * 64).hash != base
    assert who("alpha=1").hash == who("alpha=1.0").hash


def test_equal_fields_are_two_runs_under_two_names():
    a, b = who("algo=fedavg"), who("algo=local")
    assert a.content["algo"]["name"] == "fedavg" and a.hash != b.hash


def test_results_version(monkeypatch):
    from perfed.algorithms.base import ALGORITHMS

    before = who().hash
    monkeypatch.setattr(ALGORITHMS["perfedavg_hf"], "version", 2, raising=False)
    assert who().hash != before


def test_a_late_key_enters_when_it_differs(monkeypatch):
    before, other = who(), who("split.val=0.1")
    monkeypatch.setitem(LATE, "split.val", 0.0)
    late = who()
    assert "val" not in late.content["split"] and "val" in before.content["split"]
    assert who("split.val=0.1").hash == other.hash


def test_ignore():
    config = [parse(compose([f"rounds={k}"])) for k in (10, 20)]
    assert identity(config[0], DATA, ["rounds"]).hash == identity(config[1], DATA, ["rounds"]).hash != identity(config[0], DATA).hash
    assert "val" not in identity(config[0], DATA, ["split.val", "no.such"]).content["split"]


def test_a_saved_partition_counts_by_content(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}0.npz").write_bytes(b"same" if name != "c" else b"other")
    lines = [("partition=file", f"'partition.path=\"{tmp_path}/{name}{{seed}}.npz\"'".strip("'"), "seeds=1") for name in "abc"]
    a, b, c = (who(*line).hash for line in lines)
    assert a == b != c
    with pytest.raises(UserError, match=r"partition\.path=.*nothing.* cannot be read"):
        who("partition=file", f"partition.path={tmp_path}/nothing.npz")


def test_folder_names(tree):
    run = who()
    assert run.name == f"perfedavg_hf-mnist5k-table2-tau10-{run.hash[:12]}" and len(run.hash) == 64
    config = parse(tree)
    config.dataset.name = "my data/1, [x]=2 ü"
    assert re.fullmatch(r"[A-Za-z0-9._-]+", readable(config))


def test_floats_in_an_identity_are_finite():
    def leaves(value):
        if isinstance(value, dict):
            for item in value.values():
                yield from leaves(item)
        elif isinstance(value, list):
            for item in value:
                yield from leaves(item)
        else:
            yield value

    assert all(math.isfinite(v) for v in leaves(who().content) if isinstance(v, float))


def test_a_key_of_other_options_is_told_with_them(tree):
    """Of a stored configuration too; three options at most, and never the key ``name``."""
    cfg = OmegaConf.to_container(tree)
    cfg["algo"] = {"name": "perfedavg_fo", "delta": 0.1}
    with pytest.raises(UserError, match=r"^algo\.delta=0\.1: no such key with algo=perfedavg_fo; algo=perfedavg_hf has it$"):
        parse(cfg)
    assert elsewhere("algo.lam").startswith("; algo=admm, ditto, fedu, ... have it") and elsewhere("algo.name") == ""
    assert elsewhere("model.batchnorm") == elsewhere("alhpa") == elsewhere("adapt.delta") == ""
    assert "'name'" not in complaint(tree, model__nme="x") and "'name'" not in complaint(tree, study__nme="x")


if __name__ == "__main__" and "--pin" in sys.argv:  # python tests/test_config.py --pin: print PINNED anew
    for line in PINNED:
        print(f'    "{line}": "{who(*line.split()).hash}",')
