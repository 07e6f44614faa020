"""The README's commands: each is composed and planned, and each that is not marked (long) is executed, in their order."""

from __future__ import annotations

import glob
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from perfed import cli, prepare, report, rescore, tune
from perfed.config import conf_dir
from perfed.data.datasets import DATASETS, Dataset, load
from perfed.data.partition import PARTITIONS, SplitConfig, make
from perfed.errors import UserError
from perfed.frontdoor import Composer, FrontDoor
from perfed.trackers import TRACKERS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.M | re.S)
COMPOSER = Composer()
SHELL = [line for kind, block in BLOCKS if kind == "sh" for line in block.splitlines() if line.strip() and not line.startswith("#")]
COMMANDS = [line for line in SHELL if line.startswith("python ")]
DRAWN = [next(line for line in COMMANDS if word in line) for word in ("algo=fedavg rounds=5", "algo=pfedme")]
"""These draw their pictures: a model for all, and one for each user. The others leave out what has tests of its own, and takes a third of
their time."""
SETUP = [line for line in SHELL if line.startswith("python3 -m venv")]


def words(line: str) -> list[str]:
    return shlex.split(line, comments=True)


def long(line: str) -> bool:
    return "(long)" in line


def installed(line: str) -> bool:
    """False where a command needs a tracker's package that is not here."""
    names = [word.partition("=")[2] for word in words(line) if word.startswith("tracker=")]
    try:
        return all(TRACKERS[name](name=name).check() is None for name in names)
    except UserError:
        return False


def test_there_are_commands_of_every_kind():
    assert len(COMMANDS) > 30
    assert any(long(line) for line in COMMANDS) and any(not long(line) for line in COMMANDS)
    assert len(SETUP) == 1


def test_ci_runs_the_two_commands_of_the_readme():
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    start = SHELL[SHELL.index(SETUP[0]) : SHELL.index(SETUP[0]) + 2]
    assert [line for line in ci if line.startswith(("python3 -m venv", ".venv/bin/python -m pytest"))] == start
    assert ci[-1] == start[1], "pytest's summary must close the output"


def mnist_sized() -> Dataset:
    """Blank images with MNIST's sizes and labels: what a plan needs of a data set that is not at hand."""
    train = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    test = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    y = np.concatenate([np.repeat(np.arange(10), counts) for counts in (train, test)])
    x = np.zeros((len(y), 1, 28, 28), np.uint8)
    one = np.float32(1)
    return Dataset("mnist", x, y, 60000, tuple("0123456789"), None, "blank", 0 * one, one / 255, "unit", (196, 34))


@pytest.mark.parametrize("line", [line for line in COMMANDS if words(line)[1:3] == ["-m", "perfed"]])
def test_command_is_composed_and_planned(line, user, monkeypatch):
    monkeypatch.chdir(user)
    if "dataset=mnist" in line or "row=mnist" in line or "cifar=" in line:
        monkeypatch.setattr("perfed.data.datasets.fingerprint", lambda *_: "blank")
        monkeypatch.setattr("perfed.prepare.load", lambda *_: mnist_sized())
    if "cuda" in line:
        monkeypatch.setattr("perfed.prepare.pick_device", lambda _: (torch.device("cpu"), []))
    flags = [word for word in words(line)[3:] if word.startswith("-")]
    overrides = [word for word in words(line)[3:] if not word.startswith("-")]
    if "--help" in flags:
        return
    command = FrontDoor(COMPOSER, overrides).command("-m" in flags, [])
    assert command.multirun == ("-m" in flags)
    assert len(command.cells) == np.prod([len(word.partition("=")[2].split(",")) for word in overrides if "[" not in word], dtype=int)
    for cell in command.cells[:2]:
        assert cell.config.algo.name in prepare.plan(replace(cell.config, pictures=False))  # the heat map has tests of its own


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    """A folder with a user's images and arrays."""
    home = tmp_path_factory.mktemp("user")
    rng = np.random.default_rng(0)
    for part, count in (("train", 12), ("test", 4)):
        for name in ("cat", "dog"):
            (home / "my_images" / part / name).mkdir(parents=True)
            for i in range(count * 10):
                Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).save(home / "my_images" / part / name / f"{i}.png")
    x = rng.normal(size=(400, 5))
    owner = np.arange(400) % 10
    np.savez(home / "my_data.npz", x=x, y=(x[:, 0] > 0).astype(int), user=owner, split=(np.arange(400) // 10) % 4 == 0)
    digits = load(DATASETS["mnist5k"](), home)
    make(PARTITIONS["table2"](), digits, n=20, seed=0, split=SplitConfig()).save(home / "my_split.npz", digits.fingerprint)
    (home / "my_space.yaml").write_text("grid: {beta: [0.1, 0.2]}\n")
    return home


@pytest.mark.parametrize("line", [line for line in COMMANDS if "perfed.tune" in words(line) and long(line) and "algo=all" not in line])
def test_tuning_is_composed_and_planned(line, user, monkeypatch, capsys):
    monkeypatch.chdir(user)
    assert tune.main([*words(line)[3:], "plan=true"]) == 0
    assert "trials" in capsys.readouterr().out


FIRST_OF_SECOND, FIRST_AFTER = (next(line for line in COMMANDS if word in line) for word in ("algo=reptile", "protocol=fewshot"))


@pytest.mark.parametrize("half", ["first", "second"])
def test_every_command_not_marked_long_is_executed(half, user, monkeypatch, capsys):
    """In two halves, which run side by side; the commands of one half need none of the other. One composer reads ``conf/`` for all."""
    monkeypatch.chdir(user)
    monkeypatch.setattr(cli, "Composer", lambda *places: COMPOSER)
    monkeypatch.setenv("COLUMNS", "120")
    inside = COMMANDS[COMMANDS.index(FIRST_OF_SECOND) : COMMANDS.index(FIRST_AFTER)]
    for line in inside if half == "second" else [line for line in COMMANDS if line not in inside]:
        if long(line) or not installed(line):
            continue
        module, *rest = words(line)[2:]
        rest = [hit for word in rest for hit in (sorted(glob.glob(word)) if word.startswith("outputs/") else [word])]
        if module == "perfed" and line not in DRAWN:
            rest.append("pictures=false")
        if module == "perfed.tune":
            rest.append("study.jobs=1")  # a process of its own would take longer to start than all of its trials
        code = {"perfed": cli.main, "perfed.rescore": rescore.main, "perfed.report": report.main, "perfed.tune": tune.main}[module](rest)
        out, err = capsys.readouterr()
        assert code == 0, f"{line}\n{err}"
        assert re.search(r"±|\\pm|removed|chosen|page\.html", out) or "plan=true" in line or "--help" in line, line


def test_python_block_runs(user, monkeypatch, capsys):
    monkeypatch.chdir(user)
    (block,) = (block for kind, block in BLOCKS if kind == "python")
    names: dict = {}
    exec(block, names)
    assert names["same"].summary == names["result"].summary
    assert names["scores"](np.zeros((2, 1, 28, 28), np.uint8)).shape == (2, 10)


def test_every_option_has_a_line_of_its_own():
    """Each option of the groups that name a method stands in a command or beside one."""
    text = "\n".join(line for kind, block in BLOCKS if kind == "sh" for line in block.splitlines())
    for group in ("algo", "dataset", "model", "protocol", "experiment", "row", "tracker"):
        for path in (conf_dir() / group).glob("*.yaml"):
            assert path.stem in text, f"{group}={path.stem}"


def test_nothing_is_left_to_be_filled_in():
    assert "@@" not in README
