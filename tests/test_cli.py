"""The command line: what is refused, how, and with which exit code. Rows B30, B31, B32 and B11 (r) of the fault list."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perfed import cli, results, train
from perfed.cli import main
from perfed.config import KNOBS, conf_dir, parse
from perfed.errors import UserError
from perfed.frontdoor import Composer, FrontDoor, compose
from perfed.helppage import groups_of, page
from perfed.identity import identity

TINY = "dataset=synthetic dataset.train=200 dataset.test=100 partition=iid model=logistic n=4 rounds=2 seeds=2 tau=2 device=cpu".split()


COMPOSER = Composer()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Every test stands in a folder of its own; the composer of ``conf/`` alone is made once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "Composer", lambda *places: Composer(*places) if any(places) else COMPOSER)
    return tmp_path


def refusal(capsys, *argv: str) -> str:
    """The one line of a refused command, which left nothing behind."""
    assert main(argv) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("perfed: "), (out, err)
    assert list(Path().iterdir()) == []
    return err.removeprefix("perfed: ").strip()


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        # B30
        ("alhpa=0.02", r"alhpa=0\.02: no such key \(did you mean 'alpha'\?\)"),
        ("+alhpa=0.02", r"alhpa=0\.02: no such key \(did you mean 'alpha'\?\)"),
        ("++alhpa=0.02", r"alhpa=0\.02: no such key \(did you mean 'alpha'\?\)"),
        ("hydra.outptu_subdir=x", r"hydra\.outptu_subdir=x: no such key \(did you mean 'hydra\.output_subdir'\?\)"),
        ("+hydra.outptu_subdir=x", r"hydra\.outptu_subdir=x: no such key \(did you mean 'hydra\.output_subdir'\?\)"),
        ("hydra/launchr=basic", r"hydra/launchr=basic: no such group \(did you mean 'hydra/launcher'\?\)"),
        ("hydra/launcher=joblibb", r"hydra/launcher=joblibb: must be one of basic"),
        ("hydra.launcher.n_jobs=2", r"hydra\.launcher\.n_jobs=2: no such key with hydra/launcher=basic$"),
        ("hydra.mode=FOO", r"hydra\.mode=FOO: .*\[RUN, MULTIRUN\]"),
        ("+alpha=0.02", r"\+alpha=0\.02: alpha exists: write alpha=0\.02, without \+"),
        ("algo.detla=1", r"algo\.detla=1: no such key with algo=perfedavg_hf \(did you mean 'algo\.delta'\?\)"),
        ("delta=1", r"delta=1: no such key \(did you mean 'algo\.delta'\?\)"),
        ("algo=fedavg delta=1", r"delta=1: no such key; algo\.delta: algo=perfedavg_hf has it"),
        ("algo=fedavg algo.delta=1", r"algo\.delta=1: no such key with algo=fedavg"),
        ("algo=fedavg algo.nme=1", r"algo\.nme=1: no such key with algo=fedavg (?!.*algo\.name)"),
        ("resume=null", r"resume=null: must be a text, such as auto"),
        ("adapt={stpes:3}", r"adapt\.stpes=3: no such key \(did you mean 'adapt\.steps'\?\)"),
        ("alpha.x=3", r"alpha\.x=3: no such key"),
        ("alpha@x=3", r"alpha@x=3: no such key"),
        ("algo=fedagv", r"algo=fedagv: no such algo \(did you mean 'fedavg'\?\); one of admm, apfl, "),
        ("algoo=fedavg", r"algoo=fedavg: no such key \(did you mean 'algo'\?\)"),
        ("+algo=fedavg", r"\+algo=fedavg: write algo=fedavg, without \+"),
        ("algo=[fedavg,local]", r"algo=\['fedavg', 'local'\]: no such algo; one of"),
        ("algo.name=fedavg", r"algo\.name=fedavg: choose with algo=<option>"),
        ("experiment=nothing", r"experiment=nothing: no such experiment"),
        ("~alpha", r"~alpha: a key cannot be removed"),
        ("alpha", r"alpha: write key=value: alpha=<value>"),
        ("--alpha=1", r"--alpha=1: unrecognized arguments.*keys are written without dashes, as alpha=0\.02"),
        ("--cfg", r"--cfg: .*expected one argument"),
        ("--resolve", r"--resolve: goes with --cfg job"),
        ("-m --cfg job", r"--run, --multirun, --cfg: only one"),
        ("--config-dir nothing", r"--config-dir nothing: no such folder"),
        # B31
        ("alpha=abc", r"alpha=abc: must be a number"),
        ("n=50.0", r"n=50\.0: must be a whole number: write 50"),
        ("algo.delta=None", r"algo\.delta=None: must be a number \(neither None nor null is a value here\)"),
        ("adapt.lr=None", r"adapt\.lr=None: must be a number or null \(write null, not None\)"),
        ("delta=None", r"delta=None: no such key \(did you mean "),
        ("partition=None", r"partition=None: no such partition.*; one of dirichlet, file, iid, natural, shards, table2"),
        ("partition=null", r"partition=null: no such partition; one of"),
        ("alpha=nan", r"alpha=nan: must be a finite number"),
        ("alpha=-1", r"alpha=-1\.0: a number >= 0"),
        ("alpha=0,01", r"alpha=0,01: several values need -m; .*the decimal point is a dot"),
        ("-m alpha=0,01", r"alpha=0,01: the decimal point is a dot \(0\.01\)"),
        ("-m alpha=0.1,nan", r"alpha=nan: must be a finite number \[job 2 of 2: alpha=nan\]"),
        ("-m seed=interval(0,1)", r"seed=interval\(0,1\): a sweep takes values or range"),
        ("-m hydra.mode=RUN,MULTIRUN", r"hydra\.mode=RUN,MULTIRUN: Hydra's own keys cannot be swept"),
        ("-m algo=fedavg,fedagv", r"algo=fedagv: no such algo"),
        ("tau=-1", r"tau=-1: a whole number >= 1"),
        # B11
        ("r=0", r"r=0\.0: a share of users in \(0, 1\]"),
        ("r=-0.1", r"r=-0\.1: a share of users in \(0, 1\]"),
        ("r=1.5", r"r=1\.5: a share of users in \(0, 1\]"),
        # what only the data, the split or the machine can tell
        ("device=gpu", r"device=gpu: must be one of auto, cpu, cuda, cuda:0"),
        ("n=7", r"n=7: a multiple of 10"),
        ("-m n=10,7", r"n=7: a multiple of 10.* \[job 2 of 2: n=7\]"),
        ("plugins=[no.such]", r"plugins=no\.such: cannot be imported: ModuleNotFoundError"),
    ],
)
def test_refused_in_one_line(capsys, argv, expected):
    line = refusal(capsys, *argv.split())
    assert re.match(expected, line), line


def test_values_that_are_fine():
    for text, value in (("alpha=1e-3", 0.001), ('alpha="0.01"', 0.01), ("alpha='1e-3'", 0.001), ("++alpha=0.5", 0.5)):
        assert parse(compose([text], COMPOSER)).alpha == value
    assert parse(compose(["adapt={steps:3}"], COMPOSER)).adapt_steps == (3,)
    assert parse(compose(["experiment=null"], COMPOSER)) == parse(compose([], COMPOSER))


def test_a_cuda_device_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert refusal(capsys, "device=cuda").startswith("device=cuda: no CUDA device")


def test_bad_files_of_an_experiment(capsys, tmp_path_factory):
    own = tmp_path_factory.mktemp("own")
    (own / "experiment").mkdir()
    (own / "experiment" / "typo.yaml").write_text("# @package _global_\nalhpa: 3\n")
    (own / "experiment" / "broken.yaml").write_text("# @package _global_\nalpha: [1,\n")
    (own / "experiment" / "late.yaml").write_text("# Its command.\n# @package _global_\nalpha: 1\n")
    (own / "experiment" / "quoted.yaml").write_text('# @package _global_\nalpha: "1e-3"\n')
    assert refusal(capsys, f"--config-dir={own}", "experiment=typo") == "alhpa=3: no such key (did you mean 'alpha'?)"
    assert "broken.yaml" in refusal(capsys, f"--config-dir={own}", "experiment=broken")
    assert "first line of its file must be '# @package _global_'" in refusal(capsys, f"--config-dir={own}", "experiment=late")
    assert FrontDoor(Composer(config_dir=str(own)), ["experiment=quoted"]).command(False).cells[0].config.alpha == 0.001


# ---------------------------------------------------------------- cells


def cells(*overrides: str, multirun: bool = True, config_dir: str | None = None):
    composer = Composer(config_dir=config_dir) if config_dir else COMPOSER
    return FrontDoor(composer, overrides).command(multirun).cells


def test_every_cell_is_composed():
    made = cells("algo=fedavg,perfedavg_hf", "tau=4,10", "dataset=synthetic")
    assert [(c.config.algo.name, c.config.tau) for c in made] == [("fedavg", 4), ("fedavg", 10), ("perfedavg_hf", 4), ("perfedavg_hf", 10)]
    assert len({c.folder for c in made}) == 4  # B32(b): no two different jobs share a folder
    assert [c.config.tau for c in cells("tau=range(1,4)", "dataset=synthetic")] == [1, 2, 3]


def test_the_folder_is_the_same_alone_and_in_a_sweep(folder):
    alone = cells("tau=4", "dataset=synthetic", "outputs=out", multirun=False)[0].folder
    assert alone in [c.folder for c in cells("tau=4,10", "dataset=synthetic", "outputs=out")]
    assert alone.parent == folder / "out" and re.fullmatch(r"[A-Za-z0-9._-]+", alone.name)


def test_an_experiment_is_a_sweep_without_m(tmp_path):
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    sweep = "hydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      algo: fedavg,local\n      tau: 4,10\n"
    (tmp_path / "own" / "experiment" / "study.yaml").write_text(f"# @package _global_\n# Its command.\ndataset: {{train: 300}}\n{sweep}")
    made = cells("experiment=study", "dataset=synthetic", "tau=3", multirun=False, config_dir="own")
    assert [(c.config.algo.name, c.config.tau, c.config.dataset.train) for c in made] == [("fedavg", 3, 300), ("local", 3, 300)]


@pytest.mark.parametrize("name", sorted(file.stem for file in (conf_dir() / "experiment").glob("*.yaml")))
def test_every_experiment(name):
    assert cells(f"experiment={name}", "dataset=synthetic", multirun=False)
    assert groups_of(conf_dir())["experiment"][name], "its first comment is shown by --help"


def test_a_plugin_needs_no_yaml(tmp_path):
    (tmp_path / "my_method.py").write_text(
        "from dataclasses import dataclass\n"
        "from perfed.algorithms.base import register\n"
        "from perfed.algorithms.fedavg import FedAvg\n"
        "@register('mine_for_test')\n@dataclass(kw_only=True)\nclass Mine(FedAvg):\n    kappa: float = 2.0\n"
    )
    from hydra.core.config_store import ConfigStore

    from perfed.algorithms.base import ALGORITHMS

    try:
        cell = cells("plugins=[my_method]", "algo=mine_for_test", "algo.kappa=3", "tau=7", "dataset=synthetic", multirun=False)[0]
        assert (cell.config.algo.kappa, cell.config.algo.tau, cell.config.algo.name) == (3.0, 7, "mine_for_test")
    finally:
        ALGORITHMS.pop("mine_for_test", None)
        ConfigStore.instance().repo.pop("algo", None)
        sys.modules.pop("my_method", None)


def test_a_callers_hydra_is_left_alone():
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        assert compose(["tau=3"]).tau == 3
        assert hydra_compose("config", ["tau=4"]).tau == 4


# ---------------------------------------------------------------- help


def test_help(capsys):
    assert main(["alhpa=1", "-h"]) == 0
    short = capsys.readouterr().out
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert short == out
    knobs = out.partition("The ten knobs")[2].partition("Groups:")[0]
    assert len(KNOBS) == 10
    for key in KNOBS:
        assert re.search(rf"^  {key}=\S+ +\w", knobs, re.MULTILINE), key
    for group, options in groups_of(conf_dir()).items():
        assert re.search(rf"^  {group}\b", out, re.MULTILINE)
        for option, meaning in options.items():
            assert re.search(rf"^    [* ] {option}( |$)", out, re.MULTILINE)
            assert meaning or group not in ("optimizer", "server", "protocol")
    assert "* perfedavg_hf" in out and "adapt.steps=1" in out and "Exit codes" in out and "schema" not in out
    assert len(re.findall(r"^  python -m perfed", out, re.MULTILINE)) == 3
    assert max(map(len, out.splitlines())) <= 120 and "\x1b" not in out
    assert page(conf_dir()) in out


def test_the_examples_of_the_help_are_good():
    for line in re.findall(r"^  python -m perfed(.*)$", page(conf_dir()), re.MULTILINE):
        words = line.split()
        assert cells(*(word for word in words if word != "-m"), multirun="-m" in words)


def test_help_imports_no_torch():
    code = "import sys; from perfed.__main__ import main; main(['--help']); sys.exit(int('torch' in sys.modules))"
    env = {**os.environ, "PYTHONPATH": str(conf_dir().parent)}
    assert subprocess.run([sys.executable, "-c", code], env=env, capture_output=True).returncode == 0


def test_version(capsys):
    assert main(["--version"]) == 0 and re.match(r"perfed \d+\.\d+", capsys.readouterr().out)


def test_cfg_job(capsys, folder):
    assert main(["--cfg", "job", "algo=fedavg", "tau=4"]) == 0
    out = capsys.readouterr().out
    assert "tau: 4" in out and "beta: ${beta}" in out and "hydra" not in out
    assert main(["tau=4", "--cfg", "job", "--resolve", "--package", "algo"]) == 0
    assert "tau: 4\n" in capsys.readouterr().out
    assert list(folder.iterdir()) == []
    assert "did you mean" in refusal(capsys, "--cfg", "job", "alhpa=1")


# ---------------------------------------------------------------- running


def test_a_run_and_the_same_again(capsys, folder):
    assert main(TINY) == 0
    first = capsys.readouterr().out
    (run,) = (folder / "outputs").iterdir()
    before = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in run.iterdir()}
    assert results.read_status(run)["status"] == "DONE" and f"outputs/{run.name}" in first and "majority" in first
    assert not any("hydra" in name or name.endswith("multirun.yaml") for name in before)
    assert main(TINY) == 0
    again = capsys.readouterr().out
    assert again.startswith("finished before: ") and again.partition("\n")[2] == first.partition("\n")[2]
    assert {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in run.iterdir()} == before


def test_a_sweep(capsys, folder):
    assert main([*TINY, "-m", "algo=fedavg,local"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("perfed: 2 jobs; all of them: ") and "job 2 of 2: algo=local\n" in out
    assert "HYDRA" not in out + err and "hydra.cc" not in out + err
    table = out[out.index("\nsetting") :]
    assert "fedavg" in table and "local" in table
    assert sorted(p.name.split("-")[0] for p in (folder / "outputs").iterdir()) == ["fedavg", "local"]


def test_a_folder_of_another_run_is_refused(monkeypatch, capsys, folder):
    """B32(a)."""
    jobs(monkeypatch, lambda config, folder: "DONE")
    assert main([*TINY, "hydra.run.dir=mine"]) == 0
    before = {p: p.read_bytes() for p in (folder / "mine").iterdir()}
    capsys.readouterr()
    assert main([*TINY, "hydra.run.dir=mine", "alpha=0.5"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and re.match(r"perfed: hydra\.run\.dir=.*mine: holds another run", err)
    assert {p: p.read_bytes() for p in (folder / "mine").iterdir()} == before


def test_plan_starts_nothing(capsys, folder):
    assert main([*TINY, "plan=true"]) == 0
    out = capsys.readouterr().out
    assert "4 users" in out
    runs = [p for p in (folder / "outputs").glob("*") if p.name != "plans"] if (folder / "outputs").exists() else []
    assert runs == []


def jobs(monkeypatch, behave):
    """Replace the run itself; ``behave(config, folder)`` raises or returns a status."""

    def run(config, folder, quiet):
        status = behave(config, folder)
        results.write_status(folder, status, identity=identity(config).hash)
        return train.Result(folder, status, "a table")

    monkeypatch.setattr(train, "run", run)
    monkeypatch.setattr(cli, "_closing_table", lambda cells, *_: print(f"closing table of {len(cells)}"))


@pytest.mark.parametrize(
    ("trouble", "code", "line"),
    [
        (None, 0, ""),
        (UserError("alpha", 1, "no"), 1, "perfed: alpha=1: no\n"),
        (results.Held(Path("x"), 12, "here", "noon"), 75, "perfed: x is held by process 12 on here since noon\n"),
        (KeyboardInterrupt(), 130, "perfed: ended by SIGINT\n"),
        (cli.Terminated(), 143, "perfed: ended by SIGTERM\n"),
    ],
)
def test_exit_codes(monkeypatch, capsys, folder, trouble, code, line):
    def behave(config, folder):
        if trouble is not None:
            raise trouble
        return "DIVERGED"

    jobs(monkeypatch, behave)
    assert main(TINY) == code
    assert capsys.readouterr().err == line
    assert code == 0 or list((folder / "outputs").iterdir()) == []  # nothing was written: no folder is left


def test_a_failing_job_lets_the_others_go_on(monkeypatch, capsys, folder):
    def behave(config, folder):
        if config.tau == 2:
            results.write_status(folder, "FAILED", traceback="Traceback\nboom")
            raise RuntimeError("boom\nand more")
        return "DONE"

    jobs(monkeypatch, behave)
    assert main([*TINY, "-m", "tau=1,2,3"]) == 1
    out, err = capsys.readouterr()
    assert out.count("DONE: ") == 2 and "closing table of 3" in out
    assert err.count("\n") == 1 and "RuntimeError: boom and more" in err and "status.json" in err
    assert not (folder / "outputs" / "multirun.yaml").exists()


def test_a_held_job_gives_75_and_a_failed_one_1(monkeypatch, capsys):
    def behave(config, folder):
        if config.tau == 2:
            raise results.Held(folder, 12, "here", "noon")
        return "DONE"

    jobs(monkeypatch, behave)
    assert main([*TINY, "-m", "tau=1,2"]) == 75


def test_a_signal_ends_the_sweep_with_its_table(monkeypatch, capsys):
    def behave(config, folder):
        if config.tau == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return "DONE"

    jobs(monkeypatch, behave)
    assert main([*TINY, "-m", "tau=1,2,3"]) == 143
    out, err = capsys.readouterr()
    assert out.count("DONE: ") == 1 and "closing table of 3" in out and err == "perfed: ended by SIGTERM\n"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_process_of_its_own(folder):
    """``python -m perfed`` from another folder."""
    env = {**os.environ, "PYTHONPATH": str(conf_dir().parent)}
    done = subprocess.run([sys.executable, "-m", "perfed", "alhpa=1"], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "perfed: alhpa=1: no such key (did you mean 'alpha'?)\n")
    assert list(folder.iterdir()) == []


# ---------------------------------------------------------------- folders that cannot be used, runs that are damaged


@pytest.mark.parametrize("word", ["outputs=file.txt", "outputs=file.txt/deep", "hydra.run.dir=file.txt", "outputs=nowhere"])
@pytest.mark.parametrize("more", [[], ["-m", "tau=1,2"], ["plan=true"]])
def test_a_folder_that_cannot_be_used_is_refused_in_one_line(word, more, folder, capsys):
    if "hydra.run.dir" in word and "-m" in more:
        pytest.skip("a sweep has outputs")
    (folder / "file.txt").write_text("mine")
    (folder / "nowhere").symlink_to(folder / "gone")
    assert main([*TINY, "progress=off", word, *more]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"perfed: {word.partition('=')[0]}=") and err.count("\n") == 1
    assert sorted(p.name for p in folder.iterdir()) == ["file.txt", "nowhere"]


def test_of_equal_jobs_the_first_is_the_one_that_runs(folder, capsys):
    assert main(["-m", *TINY, "progress=off", "pictures=false", "engine.threads=1,2"]) == 0
    out, _ = capsys.readouterr()
    assert "job 2 of 2: engine.threads=2: the same run as job 1" in out
    (run,) = (folder / "outputs").glob("*-synthetic-*")
    assert results.load(run).config["engine"]["threads"] == 1


def test_a_finished_run_that_lost_a_file_says_what_to_do(folder, capsys):
    assert main([*TINY, "progress=off", "pictures=false"]) == 0
    (run,) = (folder / "outputs").iterdir()
    whole = (run / "users.csv").read_bytes()
    (run / "users.csv").unlink()
    capsys.readouterr()
    assert main([*TINY, "progress=off", "pictures=false"]) == 1
    assert "users.csv is missing; force=true computes the run again" in capsys.readouterr().err
    assert main([*TINY, "progress=off", "pictures=false", "force=true"]) == 0 and (run / "users.csv").read_bytes() == whole


def test_a_tracker_that_comes_too_late_is_told(folder, capsys):
    assert main([*TINY, "progress=off", "pictures=false"]) == 0
    capsys.readouterr()
    assert main([*TINY, "progress=off", "pictures=false", "tracker=tensorboard"]) == 0
    assert "nothing goes to tensorboard: the run is over; force=true runs it again" in capsys.readouterr().out
    assert main([*TINY, "progress=off", "pictures=false"]) == 0
    assert "nothing goes" not in capsys.readouterr().out


def test_a_folder_is_named_from_where_one_stands(folder, capsys):
    assert main([*TINY, "progress=off", "pictures=false"]) == 0
    (run,) = (folder / "outputs").iterdir()
    assert capsys.readouterr().out.startswith(f"DONE: outputs/{run.name}\n")
    assert main([*TINY, "progress=off", "pictures=false", f"outputs={folder.parent / (folder.name + '-elsewhere')}"]) == 0
    assert capsys.readouterr().out.startswith(f"DONE: {folder.parent}/")


# ---------------------------------------------------------------- hints, and a Ctrl-C while the program is being imported


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("delta=1e-3", "delta=1e-3: no such key (did you mean 'algo.delta'?)"),
        ("delta=None", "delta=None: no such key (did you mean 'algo.delta'?)"),
        ("lr=1", "lr=1: no such key (did you mean 'adapt.lr'?)"),
        ("hydra.dir=x", "hydra.dir=x: no such key (did you mean 'hydra.run.dir'?)"),
        ("algo=perfedavg_fo algo.delta=1", "algo.delta=1: no such key with algo=perfedavg_fo; algo=perfedavg_hf has it"),
        ("algo=fedavg algo.lam=1", "algo.lam=1: no such key with algo=fedavg; algo=admm, ditto, fedu, ... have it"),
    ],
)
def test_a_hint_names_the_key_that_is_meant(capsys, argv, expected):
    assert refusal(capsys, *argv.split()) == expected


@pytest.mark.parametrize("word", ["model.batchnorm=true", "model.nme=x", "study.nme=x", "dataset.nam=x", "partition.naem=3"])
def test_no_hint_names_the_name_of_an_option(capsys, word):
    assert ".name'" not in refusal(capsys, word)


def test_the_help_cuts_no_sentence_inside_brackets():
    shown = groups_of(conf_dir())
    assert all(text.count("(") == text.count(")") for options in shown.values() for text in options.values())
    assert sum("r, alpha, beta as recalled" in text for text in shown["row"].values()) == 6


@pytest.mark.parametrize("body", ["raise KeyboardInterrupt", "exec('raise KeyboardInterrupt')"])
def test_a_ctrl_c_during_the_imports_is_one_line(body, tmp_path):
    """The second body: dataclass executes a text, and CPython would end the process by SIGINT for a Ctrl-C in there."""
    code = f"""import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "perfed.cli":
            {body}
sys.meta_path.insert(0, Finder())
from perfed.__main__ import main
sys.exit(main())"""
    (tmp_path / "entry.py").write_text(code)
    env = {**os.environ, "PYTHONPATH": str(conf_dir().parent)}
    done = subprocess.run([sys.executable, "entry.py"], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "perfed: interrupted\n")
