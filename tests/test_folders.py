"""Run folders: found, listed, and removed by status; what must never be removed."""

import os
import time
from pathlib import Path

import pytest
from test_report import cells, fake_run

from perfed import folders, report, rescore, results, train
from perfed.config import parse
from perfed.errors import UserError
from perfed.frontdoor import compose

IDENTITY = "ab" * 32


def claimed(folder, status="FAILED", **more):
    """A run folder as a run leaves it: with its lock and identity."""
    fake_run(folder, status=status, **more)
    (folder / ".lock").write_text("{}")
    results.write_status(folder, status, identity=IDENTITY, **({"round": 8} if status == "INTERRUPTED" else {}))
    (folder / "state.pt").write_bytes(b"x" * 1000)
    return folder


@pytest.fixture
def home(tmp_path):
    """Five run folders, a study's folder, a file, and a link to a run."""
    home = tmp_path / "outputs"
    for name, status in (("a", "DONE"), ("b", "FAILED"), ("c", "INTERRUPTED"), ("d", "RUNNING"), ("e", "DIVERGED")):
        claimed(home / name, status, **({"diverged": (1,)} if status == "DIVERGED" else {}))
    (home / "all_methods-mnist-1").mkdir()
    (home / "all_methods-mnist-1" / "report.md").write_text("")
    (home / "multirun.yaml").write_text("")
    (home / "z-link").symlink_to(home / "b")
    return home


def left(home):
    return sorted(path.name for path in home.iterdir())


def run(capsys, *words):
    code = report.main(list(map(str, words)))
    return code, *capsys.readouterr()


def test_find_takes_every_run_once(home):
    assert [run.folder.name for run in folders.find([home, home / "a", home / "z-link"])] == ["a", "b", "c", "d", "e"]
    passed = []
    assert len(folders.find(sorted(home.iterdir()), passed)) == 5
    assert [line.partition(": ")[0].rpartition("/")[2] for line in passed] == ["all_methods-mnist-1", "multirun.yaml"]
    with pytest.raises(UserError, match="^run=.*absent: no such folder"):
        folders.find([home, home / "absent"])
    with pytest.raises(UserError, match="^run=.*multirun.yaml: no folder"):
        folders.find([home / "multirun.yaml"])


def test_list(home, capsys):
    runs = folders.find([home])
    for i, run_ in enumerate(runs):
        os.utime(run_.folder / "status.json", (1000, 1000 - 10 ** (i + 1)))
    table = folders.listing(runs, now=1000)
    assert table.columns == ("folder", "status", "algo", "setting", "seeds", "rounds", "accuracy", "size", "age")
    # 82.00 ± 4.97 as in test_report; ages 10, 100, 1000, 10000, 100000 seconds
    assert [row[1:2] + row[4:7] + row[8:] for row in cells(table)] == [
        ["DONE", "0-2", "20", "82.00 ± 4.97", "10 s"],
        ["FAILED", "0-2", "?/20", "-", "1 min"],
        ["INTERRUPTED", "0-2", "8/20", "-", "16 min"],
        ["INTERRUPTED", "0-2", "?/20", "-", "2 h"],
        ["DIVERGED", "0-2", "20", "div 1/3", "1 d"],
    ]
    sizes = {path.name: path.lstat().st_size for path in (home / "b").iterdir()}
    assert cells(table)[1][7] == folders.bytes_text(sum(sizes.values())) == "1.3 kB"
    (home / "c" / "result.json").write_text("{")
    code, out, err = run(capsys, home, "list=true", "format=csv")
    assert code == 0 and len(out.splitlines()) == 1 + 4 and "result.json is damaged" in err


def test_bytes_and_ages():
    assert [folders.bytes_text(n) for n in (0, 999, 1000, 1449, 99_949, 99_950, 999_499, 999_500, 2.5e9)] == [
        "0 B", "999 B", "1.0 kB", "1.4 kB", "99.9 kB", "100 kB", "999 kB", "1.0 MB", "2.5 GB",
    ]  # fmt: skip
    assert [folders.age_text(s) for s in (-5, 59.9, 60, 3600, 86399, 86400)] == ["0 s", "59 s", "1 min", "1 h", "23 h", "1 d"]


def test_prune_says_first_and_removes_with_yes(home, capsys):
    before = left(home)
    code, out, _ = run(capsys, home, "--prune", "FAILED,INTERRUPTED")
    assert code == 0 and left(home) == before
    assert out.splitlines()[2].split()[:2] == [str(home / "b"), "would"] and "3 runs would be removed" in out and "add --yes" in out
    code, out, err = run(capsys, home, "prune=failed", "yes=true")
    assert (code, left(home)) == (0, [name for name in before if name != "b"])
    assert "1 run removed, 1.3 kB." in out and err == ""
    assert (home / "z-link").is_symlink()  # it led to b
    run(capsys, home, "prune=INTERRUPTED", "yes=true")
    assert left(home) == ["a", "all_methods-mnist-1", "e", "multirun.yaml", "z-link"]
    code, out, _ = run(capsys, home, "prune=INTERRUPTED", "yes=true")
    assert code == 0 and "0 runs removed, 0 B." in out


def test_prune_takes_finished_runs_only_by_name(home, capsys):
    run(capsys, home, "prune=FAILED,INTERRUPTED,DIVERGED", "yes=true")
    assert "a" in left(home)
    for text in ("all", "*", "RUNNING", ""):
        assert run(capsys, home, f"prune={text}", "yes=true")[0] == 1
    assert "a" in left(home)
    assert run(capsys, home, "prune=DONE", "yes=true")[0] == 0 and "a" not in left(home)


def test_prune_leaves_what_is_held(home, capsys):
    with results.Claim(home / "d"):
        assert results.read_status(home / "d")["status"] == "RUNNING"
        for yes in ([], ["yes=true"]):
            run(capsys, home, "prune=INTERRUPTED", *yes)
            assert "d" in left(home)
    results.write_status(home / "d", "FAILED", identity=IDENTITY)
    with results.Claim(home / "d"):  # a run that was started again and has not written its status yet
        for yes in ([], ["yes=true"]):
            _, _, err = run(capsys, home / "d", "prune=FAILED", *yes)
            assert err == f"perfed: {home / 'd'} stays: another process holds it\n"
    assert sorted(path.name for path in (home / "d").iterdir()) == [".lock", "config.yaml", "state.pt", "status.json"]


def test_prune_never_follows_a_link(home, tmp_path, capsys):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data.npz").write_text("x")
    (home / "b" / "wandb").symlink_to(precious)
    _, _, err = run(capsys, home / "z-link", "prune=FAILED", "yes=true")
    assert err == f"perfed: {home / 'z-link'} stays: a link; give the folder itself\n" and (home / "b" / "status.json").is_file()
    run(capsys, home / "b", "prune=FAILED", "yes=true")
    assert not (home / "b").exists() and (precious / "data.npz").read_text() == "x"


def test_prune_keeps_a_folder_that_holds_what_no_run_writes(home, monkeypatch, capsys):
    """hydra.run.dir=. in a folder of one's own."""
    (home / "b" / "thesis.tex").write_text("years of work")
    (home / "b" / "data").mkdir()
    monkeypatch.chdir(home / "b")
    for yes in ([], ["yes=true"]):
        _, out, err = run(capsys, Path("."), "prune=FAILED", *yes)
        assert "0 runs" in out and err == f"perfed: {home / 'b'} stays: it holds what no run writes (data, thesis.tex); remove it by hand\n"
    assert (home / "b" / "thesis.tex").read_text() == "years of work" and (home / "b" / "status.json").is_file()


def test_what_a_run_leaves_can_be_pruned(tmp_path, capsys):
    words = ["dataset=synthetic", "partition=iid", "n=4", "rounds=2", "seeds=2", "adapt.steps=[0,1,2]", "checkpoint_every=0.001"]
    done = train.run(parse(compose([*words, "model=logistic", "tracker=tensorboard"])), tmp_path / "run")
    rescore.rescore(done.folder, ["protocol=paper"])
    run(capsys, tmp_path / "run", "prune=DONE", "yes=true")
    assert not (tmp_path / "run").exists()


def test_prune_removes_nothing_that_is_no_run(home, tmp_path, capsys):
    """A status.json of another program, a damaged one, and a run folder around other runs (hydra.run.dir=outputs)."""
    other = tmp_path / "other"
    for name, text in (("tool", '{"status": "FAILED"}'), ("broken", '{"status": "FAI')):
        (other / name).mkdir(parents=True)
        (other / name / "status.json").write_text(text)
    _, out, err = run(capsys, other, "prune=FAILED,INTERRUPTED", "yes=true")
    assert left(other) == ["broken", "tool"] and "0 runs removed" in out
    assert err.count("its status.json is damaged or not perfed's; remove it by hand") == 2
    results.write_status(home, "FAILED", identity=IDENTITY)
    _, _, err = run(capsys, home, "prune=FAILED", "yes=true")
    assert "stays: another run lies in it (" in err and "a" in left(home)


def test_prune_takes_a_job_that_failed_before_its_run(tmp_path, capsys):
    """It has a lock, a log and a status without identity."""
    with results.Claim(tmp_path / "job"):
        results.write_status(tmp_path / "job", "FAILED", traceback="Traceback\nOSError: gone")
    (row,) = cells(folders.listing(folders.find([tmp_path])))
    assert row[1:7] == ["FAILED", "-", "-", "-", "-", "-"]
    run(capsys, tmp_path, "prune=FAILED", "yes=true")
    assert left(tmp_path) == []


def test_prune_takes_what_was_scored_again_along(home, capsys):
    scored = claimed(home / "b" / "eval-paper-1", "DONE")
    assert folders.size(home / "b") > folders.size(scored) > 0
    run(capsys, home / "b", "prune=FAILED", "yes=true")
    assert not (home / "b").exists()


def test_prune_can_be_finished_after_an_interruption(home, monkeypatch):
    """status.json goes last: a folder that was begun is still a run folder of that status."""

    def stop(path):
        raise KeyboardInterrupt

    (home / "b" / "eval-x").mkdir()
    monkeypatch.setattr(folders.shutil, "rmtree", stop)
    with pytest.raises(KeyboardInterrupt):
        folders.prune([home / "b"], ["FAILED"], True)
    monkeypatch.undo()
    assert results.read_status(home / "b")["status"] == "FAILED" and not results.is_held(home / "b")
    assert [folder for folder, _ in folders.prune([home / "b"], ["FAILED"], True).removed] == [home / "b"]
    assert not (home / "b").exists()


def test_the_clock_is_the_status(home):
    table = folders.listing(folders.find([home / "a"]), now=time.time() + 7200)
    assert cells(table)[0][8] == "2 h"
