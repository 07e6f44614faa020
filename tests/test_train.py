"""Whole runs in a temporary folder. Rows B20, B23, B35 and B38 of the fault list; interruption, finished twice, new users."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from small import split

import perfed
from perfed import device, frontdoor, results, train
from perfed.config import parse
from perfed.data.partition import Partition
from perfed.device import pick_device
from perfed.errors import UserError
from perfed.federate import Federation

torch.set_num_threads(1)
COMPOSER = frontdoor.Composer()
NUMBERS = ("rounds.csv", "users.csv", "result.json")
DATA = ["dataset=synthetic", "dataset.train=180", "dataset.test=90", "dataset.features=4", "dataset.classes=3", "dataset.noise=2.0"]
SMALL = ["algo=fedavg", "partition=iid", "device=cpu", "model.hidden=[6]", "n=5", "r=0.4", "tau=2", "batch=8"]
SMALL += ["rounds=6", "eval_every=3", "seeds=2"]


@pytest.fixture
def config(tmp_path):
    """Overrides -> Config of a small run whose folders lie in ``tmp_path/outputs``."""

    def make(*overrides: str):
        fixed = [*DATA, *SMALL, f"outputs={tmp_path / 'outputs'}", f"data_root={tmp_path / 'data'}", "progress=off", "engine.threads=1"]
        given = {text.partition("=")[0] for text in overrides}
        return parse(frontdoor.compose([*(t for t in fixed if t.partition("=")[0] not in given), *overrides], COMPOSER))

    return make


@pytest.fixture
def plain(monkeypatch):
    """Runs without report, pictures, binomial floor and questions to git, which take most of the time of a small run."""
    monkeypatch.setattr("perfed.report.write_report", lambda folder, pictures: [])
    monkeypatch.setattr("perfed.train.provenance", lambda prepared: {})
    monkeypatch.setattr("perfed.stats.binomial_floor", lambda accuracy, sizes: 0.0)


def content(folder: Path, names=NUMBERS) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names}


def everything(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Bytes and time of change of all files, and of the folder itself."""
    files = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()}
    return {**files, ".": (b"", folder.stat().st_mtime_ns)}


def status(folder: Path) -> dict:
    return json.loads((folder / "status.json").read_text())


# ---------------------------------------------------------------- a run and its folder


def test_a_run_leaves_its_folder_and_the_second_changes_nothing(config, tmp_path):
    done = train.run(config("algo=perfedavg_hf"))
    assert done.status == "DONE" and done.folder.parent == tmp_path / "outputs"
    assert done.folder.name.startswith("perfedavg_hf-synthetic-iid-tau2-")
    names = {path.name for path in done.folder.iterdir()}
    assert names >= {*NUMBERS, "config.yaml", "status.json", "timing.csv", "final.pt", "log.txt", "report.md"}
    assert names >= {"partition-seed0.npz", "partition-seed1.npz"} and any(name.endswith(".png") for name in names)
    assert not any(name.startswith(results.TEMPORARY) or name == "state.pt" for name in names)
    assert status(done.folder)["status"] == "DONE"
    for name in NUMBERS:
        text = (done.folder / name).read_text()
        assert str(tmp_path) not in text and "second" not in text and time.strftime("%Y-%m-%d") not in text

    before = everything(done.folder)
    again = train.run(config("algo=perfedavg_hf"))
    assert again.status == "finished before" and again.folder == done.folder and again.table == done.table
    assert everything(done.folder) == before
    assert not [p for p in (tmp_path / "outputs").iterdir() if p != done.folder]


def test_files_hold_what_they_promise(config, plain):
    done = train.run(config("algo=perfedavg_hf", "adapt.steps=[1,3]"))
    rounds, users, summary = done.rounds, done.users, done.summary
    assert set(rounds["round"]) == {3, 6} and set(rounds["seed"]) == {0, 1} and set(rounds["steps"]) == {0, 1, 3}
    assert list(rounds.columns) == list(results.ROUNDS) and list(users.columns) == list(results.USERS)
    assert len(users) == 2 * 5 * 3 and (users["correct"] <= users["n_test"]).all()
    last = rounds[rounds["round"] == 6]
    for cell in summary["cells"]:
        mine = users[(users["model"] == cell["model"]) & (users["steps"] == cell["steps"])]
        per_seed = (mine["correct"] / mine["n_test"]).groupby(mine["seed"]).mean()
        np.testing.assert_allclose(list(cell["per_seed"].values()), per_seed, rtol=1e-12)
        np.testing.assert_allclose(last[last["steps"] == cell["steps"]]["accuracy"], per_seed, rtol=1e-12)
        assert cell["mean"] == pytest.approx(per_seed.mean(), rel=1e-12)
    assert summary["primary"] == {"model": "global", "steps": 3} and summary["seeds"] == [0, 1] and summary["diverged"] == {}
    # 6 rounds x 2 active x 2 steps, four gradients each; 2 x (4 x 6 + 6 + 6 x 3 + 3) numbers a round
    nothing = {"hvps": 0, "losses": 0, "full_passes": 0}
    assert summary["costs"] == {"grad_evals": 96, **nothing, "floats_down": 12 * 51, "floats_up": 12 * 51}
    assert users.groupby("seed")["times_sampled"].first().sum() <= 12 and summary["adapt_lr"] == 0.01
    times = users[users["steps"] == 0].groupby("seed")["times_sampled"].sum()
    assert times.tolist() == [12, 12]
    for seed in (0, 1):
        stored = Partition.load(done.folder / f"partition-seed{seed}.npz")
        assert stored.digest() == summary["partition_digest"][str(seed)]
    assert np.isfinite(rounds["hf_error"]).all() and (rounds["hf_error"] > 0).all()


def test_models_of_users_score_as_users_csv_says(config, plain):
    """Raw test data of a user in, the accuracy of his row out; also after load()."""
    settings = config("adapt.steps=[0,2]", "dataset.norm=standard")
    done = train.run(settings)
    stored = perfed.load(str(done.folder))
    assert stored.status == "DONE" and stored.table == done.table
    assert stored.users.equals(done.users) and stored.rounds.equals(done.rounds)
    data = train.prepare(settings).dataset
    for result in (done, stored):
        for row in result.users.to_dict("records"):
            mine = Partition.load(done.folder / f"partition-seed{row['seed']}.npz").test.of(row["user"])
            scores = result.model(row["seed"], row["user"], row["model"], row["steps"])(data.x[mine])
            assert scores.shape == (len(mine), 3)
            hits = int((scores.argmax(1).numpy() == data.y[mine]).sum())
            assert hits == round(row["correct"]) and row["correct"] == pytest.approx(hits) and row["n_test"] == len(mine)
    adapted, before = done.model(0, 3), done.model(0, 3, steps=0)
    assert any(not torch.equal(adapted.params[k], before.params[k]) for k in before.params)
    for bad, text in (
        ({"seed": 7, "user": 0}, r"seed=7: one of \[0, 1\]"),
        ({"seed": 0, "user": 5}, "user=5: an integer from 0 to 4"),
        ({"seed": 0, "user": 0, "model": "personal"}, "model=personal: one of global"),
        ({"seed": 0, "user": 0, "steps": -1}, "steps=-1: "),
    ):
        with pytest.raises(UserError, match=text):
            done.model(**bad)


def test_run_and_load_from_python(tmp_path, plain):
    words = [*DATA, *SMALL[1:], "progress=off", f"data_root={tmp_path}", "algo=local", "rounds=2"]
    result = perfed.run(*words, folder=str(tmp_path / "mine"))
    assert result.folder == tmp_path / "mine" and result.summary["primary"]["model"] == "personal"
    assert perfed.load(str(result.folder)).summary == result.summary
    with pytest.raises(UserError, match="no such folder"):
        perfed.load(str(tmp_path / "absent"))


def test_no_rounds_scores_the_initial_model(config, plain):
    settings = config("rounds=0", "algo=fedavg")
    done = train.run(settings)
    assert set(done.rounds["round"]) == {0} and (done.rounds["grad_evals"] == 0).all() and (done.users["times_sampled"] == 0).all()
    initial = train.prepare(settings).initial[1]
    for key, value in done.model(1, 2, steps=0).params.items():
        torch.testing.assert_close(value, initial[key].float(), rtol=0, atol=0)


def test_twenty_rows_of_the_count_table_are_kept(config, plain):
    done = train.run(config("n=25", "rounds=0", "dataset.train=300", "seeds=1", "algo=fedavg"))
    kept, data = done.summary["partition_counts"], train.prepare(train.stored_config(done.folder)).dataset
    names, counts = Partition.load(done.folder / "partition-seed0.npz").table(data.y, 3)
    assert (kept["rows"], kept["of"], kept["counts"]) == (names[:20], 25, counts[:20].tolist())
    assert "majority_new" not in done.summary


# ---------------------------------------------------------------- B23


@pytest.mark.parametrize("every, rows", [(4, [4, 8, 10]), (1000, [10])])
def test_b23_the_last_round_is_always_scored(config, plain, every, rows):
    done = train.run(config("rounds=10", f"eval_every={every}", "seeds=1", "algo=fedavg"))
    got = done.rounds[done.rounds["steps"] == 1]
    assert got["round"].tolist() == rows
    assert got["accuracy"].iloc[-1] == pytest.approx(done.summary["cells"][1]["mean"], rel=1e-12) and got["accuracy"].iloc[-1] > 0
    assert f"{100 * got['accuracy'].iloc[-1]:.2f}" in done.table


# ---------------------------------------------------------------- B35


def test_b35_the_same_command_gives_the_same_bytes(config, plain, tmp_path):
    torch.manual_seed(1), np.random.seed(1)
    first = train.run(config(), tmp_path / "first")
    torch.manual_seed(2), np.random.seed(2)
    torch.rand(3), np.random.rand(3)
    second = train.run(config(f"outputs={tmp_path / 'elsewhere'}"), tmp_path / "second")
    assert content(first.folder) == content(second.folder)
    for seed in (0, 1):
        a, b = (torch.load(r.folder / "final.pt", weights_only=True)["server"]["w"] for r in (first, second))
        assert all(torch.equal(a[k][seed], b[k][seed]) for k in a)


def test_b35_seeds_differ_and_methods_share_partition_and_users(config, plain):
    one, other = train.run(config("algo=fedavg")), train.run(config("algo=perfedavg_fo"))
    assert one.summary["partition_digest"] == other.summary["partition_digest"]
    columns = ["seed", "user", "n_train", "n_test", "times_sampled"]
    assert one.users[columns].equals(other.users[columns])
    assert not one.users["loss"].equals(other.users["loss"])
    later = train.run(config("algo=fedavg", "seed=1", "seeds=1"))
    assert later.summary["partition_digest"]["1"] == one.summary["partition_digest"]["1"]
    mine = one.users[one.users["seed"] == 1].reset_index(drop=True)
    assert mine[columns].equals(later.users[columns])
    np.testing.assert_allclose(mine["loss"], later.users["loss"], rtol=1e-4)  # float32, another number of lanes
    assert len(set(one.summary["partition_digest"].values())) == 2
    assert one.users[one.users["seed"] == 0]["loss"].tolist() != mine["loss"].tolist()


@pytest.mark.parametrize("key, same", [("partition_seed", "partition"), ("init_seed", "initial"), ("sampling_seed", "cohorts")])
def test_fixed_seeds_fix_their_stream(config, key, same):
    """Three seeds: with ``key=5`` one of partition, initial model and users is common to them, the others are not."""
    fed = train.federation(train.prepare(config("seeds=3", f"{key}=5", "algo=fedavg")))
    found = {
        "partition": len({d.partition.digest() for d in fed.data}),
        "initial": len({p["layer1.weight"].sum().item() for p in fed.initial}),
        "cohorts": len({tuple(np.concatenate([fed.cohorts(k)[s] for k in range(9)])) for s in range(3)}),
    }
    assert found == {name: 1 if name == same else 3 for name in found}


def test_three_fixed_seeds_are_the_streams_of_those_seeds(config, plain):
    """With all three at 1, seeds 0, 1 and 2 are the same run to the last example, and it is the run of seed 1 (batches, adaptation too)."""
    fixed = train.run(config("seeds=3", "partition_seed=1", "init_seed=1", "sampling_seed=1", "algo=fedavg")).users
    free = train.run(config("seeds=3", "algo=fedavg")).users
    columns = ["user", "group", "times_sampled", "n_train", "n_test", "model", "steps", "correct"]
    want = free[free["seed"] == 1][columns].to_numpy().tolist()
    assert [fixed[fixed["seed"] == seed][columns].to_numpy().tolist() for seed in range(3)] == [want] * 3


# ---------------------------------------------------------------- B20


@pytest.mark.parametrize("algo", ["perfedavg_fo", "perfedavg_hf", "fedavg"])
def test_b20_divergence_is_a_result_without_a_number(config, plain, algo):
    done = train.run(config(f"algo={algo}", "alpha=1e6", "beta=1e6"))
    assert done.status == "DIVERGED" and status(done.folder)["status"] == "DIVERGED"
    diverged = done.summary["diverged"]
    assert set(diverged) == {"0", "1"}
    for cell in done.summary["cells"]:
        assert cell["mean"] is None and cell["half_width"] is None and cell["per_seed"] == {} and cell["groups"] == {}
        assert cell["loss"] is None and cell["worst10"] is None
    lines = [line for line in done.table.splitlines() if line.startswith("global")]
    assert len(lines) == 2 and all("div 2/2" in line and "%" not in line and "." not in line.split("div")[1] for line in lines)
    assert "diverged" in done.table.lower() and "nan" not in done.table.lower()
    assert train.run(config(f"algo={algo}", "alpha=1e6", "beta=1e6")).status == "finished before"
    rounds = set(done.rounds["round"])
    assert all(1 <= k <= max(rounds) for k in diverged.values()), "rounds are counted from 1, as in rounds.csv"


@pytest.fixture
def spoilt(tmp_path, config):
    """Three seeds with saved partitions; one training example of seed 1 is enormous, and no other seed owns it."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((97, 4)).astype(np.float32), rng.integers(3, size=97)
    x[96] = 1e30
    np.savez(tmp_path / "data.npz", x=x, y=y)
    for seed in range(3):
        order = rng.permutation(96)
        parts = [order[12 * u : 12 * u + 12].tolist() for u in range(4)]
        if seed == 1:
            parts[2][0] = 96
        tests = [order[48 + 12 * u : 60 + 12 * u].tolist() for u in range(4)]
        split(parts, tests).save(tmp_path / f"part{seed}.npz")
    words = ["dataset=npz", f"dataset.path={tmp_path / 'data.npz'}", "partition=file", f"partition.path='{tmp_path}/part{{seed}}.npz'"]
    fields = ["n=4", "r=0.5", "rounds=8", "eval_every=2", "engine.backend=loop"]

    def make(*more: str):
        fixed = [*SMALL, f"outputs={tmp_path / 'outputs'}", f"data_root={tmp_path / 'data'}", "progress=off", "engine.threads=1"]
        given = {t.partition("=")[0] for t in (*words, *fields, *more)}
        return parse(frontdoor.compose([*(t for t in fixed if t.partition("=")[0] not in given), *words, *fields, *more], COMPOSER))

    return make


def test_b20_other_seeds_go_on_untouched(spoilt, plain):
    done = train.run(spoilt("seeds=3", "adapt.steps=0"))
    summary = done.summary
    assert done.status == "DIVERGED" and set(summary["diverged"]) == {"1"}
    k = summary["diverged"]["1"]
    assert "div 1/3" in done.table and f"seed 1 at round {k}" in done.table
    for cell in summary["cells"]:
        assert cell["mean"] is None and set(cell["per_seed"]) == {"0", "2"}
    for seed in (0, 2):
        alone = train.run(spoilt(f"seed={seed}", "seeds=1", "adapt.steps=0"))
        assert alone.status == "DONE"
        for mine, other in ((done.users, alone.users), (done.rounds, alone.rounds)):
            assert mine[mine["seed"] == seed].reset_index(drop=True).equals(other)  # bitwise, under the loop
    assert set(done.rounds["round"]) == {2, 4, 6, 8}


def test_b20_the_round_counts_from_one(spoilt, plain):
    """Nothing is adapted, so seed 1 diverges in the round in which its user 2 first takes part: in the 8th."""
    fed = train.federation(train.prepare(spoilt("seeds=3")))
    first = next(k for k in range(8) if 2 in fed.cohorts(k)[1])
    done = train.run(spoilt("seeds=3", "adapt.steps=0"))
    assert first == 7 and done.summary["diverged"] == {"1": first + 1}


def test_b20_a_score_after_adaptation_counts_too(spoilt, plain):
    """User 2 of seed 1 adapts on the enormous example at every evaluation; the first one comes after round 2."""
    assert train.run(spoilt("seeds=3")).summary["diverged"] == {"1": 2}


def test_b20_no_share_of_correct_answers_from_scores_that_are_not_finite(spoilt, plain):
    done = train.run(spoilt("seeds=3"))
    broken = done.users[(done.users["seed"] == 1) & ~np.isfinite(done.users["loss"])]
    assert len(broken) and (broken["correct"].fillna(0) == 0).all()
    last = done.rounds[(done.rounds["seed"] == 1) & (done.rounds["round"] == 8)]
    assert (last["accuracy"].fillna(0) == 0).all()


def test_b20_vmap_keeps_the_lanes_apart_too(spoilt, plain):
    done = train.run(spoilt("seeds=3", "engine.backend=vmap", "engine.dtype=float64"))
    alone = train.run(spoilt("seed=2", "seeds=1", "engine.backend=vmap", "engine.dtype=float64"))
    mine = done.users[done.users["seed"] == 2].reset_index(drop=True)
    np.testing.assert_allclose(mine["loss"], alone.users["loss"], rtol=1e-11)
    assert set(done.summary["diverged"]) == {"1"}


# ---------------------------------------------------------------- who is never trained on


@pytest.fixture
def drawn(monkeypatch):
    """Every (seed row, user, pool position) that a training batch reads."""
    found: list[np.ndarray] = []
    batches = Federation.batches

    def spy(self, lanes, k, steps):
        index, weight = batches(self, lanes, k, steps)
        for part in index.values():
            rows = np.broadcast_to(np.stack([lanes.seed, lanes.user])[:, :, None, None], (2, *part.shape))
            found.append(np.concatenate([rows, part.numpy()[None]]).reshape(3, -1))
        return index, weight

    monkeypatch.setattr(Federation, "batches", spy)
    return lambda: np.unique(np.concatenate(found, axis=1), axis=1)


@pytest.mark.parametrize("algo", ["fedavg", "local", "algo.schedule"])
def test_new_users_are_never_sampled_and_scored_apart(config, plain, drawn, algo):
    words = ["algo=local", "algo.schedule=equal"] if algo == "algo.schedule" else [f"algo={algo}"]
    done = train.run(config("n=10", "holdout_users=0.3", "r=0.5", "rounds=8", *words))
    users, rounds = done.users, done.rounds
    parts = [Partition.load(done.folder / f"partition-seed{s}.npz") for s in (0, 1)]
    assert [int((~p.seen).sum()) for p in parts] == [3, 3]
    for s, part in enumerate(parts):
        mine = users[(users["seed"] == s) & (users["steps"] == 0)].sort_values("user")
        assert (mine["seen"].to_numpy() == part.seen).all()
        # 4 active users a round; under schedule=equal each of the 7 steps in every round: 8/7 steps on average, at least one
        trained = 8 * (7 if algo == "algo.schedule" else 4)
        assert (mine["times_sampled"].to_numpy()[~part.seen] == 0).all() and mine["times_sampled"].sum() == trained
    for s, user, position in drawn().T:
        assert parts[s].seen[user] and position in parts[s].train.of(user)
    assert set(rounds["seen"]) == {True, False}
    last = rounds[(rounds["round"] == 8) & (rounds["steps"] == 1)]
    for row in last.to_dict("records"):
        mine = users[(users["seed"] == row["seed"]) & (users["steps"] == 1) & (users["seen"] == row["seen"])]
        assert row["accuracy"] == pytest.approx((mine["correct"] / mine["n_test"]).mean(), rel=1e-12)
    assert "new users" in done.table
    assert [c["seen"] for c in done.summary["cells"]] == [True, True, False, False]
    data = train.prepare(train.stored_config(done.folder)).dataset
    for seen, key in ((True, "majority"), (False, "majority_new")):
        shares = [p.majority(data.y, 3)[p.seen == seen].mean() for p in parts]
        assert done.summary[key] == pytest.approx(np.mean(shares), rel=1e-12)
    assert done.summary["majority_groups_new"] == {"all": done.summary["majority_new"]}
    if algo != "fedavg":  # a user that was never trained, here a new one, has the initial model
        new = int(np.nonzero(~parts[0].seen)[0][0])
        initial = train.prepare(train.stored_config(done.folder)).initial[0]
        assert all(torch.equal(v, initial[k].float()) for k, v in done.model(0, new, steps=0).params.items())


def test_validation_and_test_data_are_never_trained_on(config, plain, drawn):
    done = train.run(config("split.val=0.3", "algo=perfedavg", "rounds=12", "r=1.0"))
    parts = [Partition.load(done.folder / f"partition-seed{s}.npz") for s in (0, 1)]
    reads = drawn()
    for s, part in enumerate(parts):
        mine = reads[2][reads[0] == s]
        assert len(part.val.index) and not np.isin(mine, part.val.index).any() and not np.isin(mine, part.test.index).any()
        assert len(np.intersect1d(mine, part.train.index)) == len(part.train.index)  # all train data, and nothing else
    assert (done.users["n_val"] > 0).all()


# ---------------------------------------------------------------- interruption


def interrupt(monkeypatch, after: int, numbers=(signal.SIGINT,), where: str = "end") -> None:
    """Send signals in round ``after`` + 1 of the next run: at its end, or before it changes anything."""
    advance = Federation.round

    def round_(self):
        if where == "end":
            advance(self)
        if self.k == after:
            for number in numbers:
                os.kill(os.getpid(), number)
        if where != "end":
            advance(self)

    monkeypatch.setattr(Federation, "round", round_)


@pytest.fixture
def unbroken(config, plain, tmp_path):
    """The same run without an interruption."""
    return lambda *words: train.run(config(*words), tmp_path / "whole")


@pytest.mark.parametrize("algo, after", [("perfedavg_fo", 1), ("perfedavg_fo", 3), ("local", 4), ("perfedavg_fo", 6)])
def test_an_interrupted_run_goes_on_bit_for_bit(config, unbroken, monkeypatch, tmp_path, algo, after):
    whole = unbroken(f"algo={algo}")
    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        interrupt(patch, after)
        with pytest.raises(train.Interrupted) as caught:
            train.run(config(f"algo={algo}"), tmp_path / "cut")
    assert caught.value.number == signal.SIGINT and isinstance(caught.value, KeyboardInterrupt)
    folder = tmp_path / "cut"
    assert status(folder)["status"] == "INTERRUPTED" and status(folder)["round"] == after and (folder / "state.pt").is_file()
    assert signal.getsignal(signal.SIGINT) is handler
    calls = []
    with monkeypatch.context() as patch:
        advance = Federation.round
        patch.setattr(Federation, "round", lambda self: (calls.append(self.k), advance(self))[1])
        resumed = train.run(config(f"algo={algo}"), folder)
    assert calls == list(range(after, 6)) and resumed.status == "DONE"
    assert content(folder) == content(whole.folder)
    a, b = (torch.load(f / "final.pt", weights_only=True) for f in (folder, whole.folder))
    assert str(a["server"]) == str(b["server"]) and str(a["users"]) == str(b["users"])
    assert not (folder / "state.pt").exists()


def test_interrupted_twice(config, unbroken, monkeypatch, tmp_path):
    whole = unbroken()
    for after in (2, 5):
        with monkeypatch.context() as patch:
            interrupt(patch, after, (signal.SIGTERM,))
            with pytest.raises(train.Interrupted) as caught:
                train.run(config(), tmp_path / "cut")
        assert caught.value.number == signal.SIGTERM
    train.run(config(), tmp_path / "cut")
    assert content(tmp_path / "cut") == content(whole.folder)


def test_a_second_signal_in_the_middle_of_a_round_loses_no_bit(config, unbroken, monkeypatch, tmp_path):
    """It does not wait for the end of the round; whatever is stored then must be a state between two rounds."""
    whole = unbroken()
    with monkeypatch.context() as patch:
        account = Federation._account

        def twice(self, *args):
            if self.k == 3:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
            return account(self, *args)

        patch.setattr(Federation, "_account", twice)
        with pytest.raises(KeyboardInterrupt):
            train.run(config(), tmp_path / "cut")
    assert results.read_status(tmp_path / "cut")["status"] == "INTERRUPTED"
    train.run(config(), tmp_path / "cut")
    assert content(tmp_path / "cut") == content(whole.folder)


def test_a_signal_to_the_command_ends_with_130(tmp_path):
    root = Path(__file__).parents[1]
    words = [*DATA, *SMALL[:-3], "rounds=200000", "eval_every=200000", "progress=lines", f"outputs={tmp_path}", f"data_root={tmp_path}"]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen([sys.executable, "-m", "perfed", *words], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end and child.poll() is None:
            if list(tmp_path.glob("*/partition-seed1.npz")) and list(tmp_path.glob("*/provenance.json")):
                break
            time.sleep(0.1)
        time.sleep(1.0)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
    finally:
        if child.poll() is None:
            child.kill()
    assert child.returncode == 130, err
    folder = next(p for p in tmp_path.iterdir() if p.name.startswith("fedavg"))
    assert status(folder)["status"] == "INTERRUPTED" and status(folder)["round"] > 0 and (folder / "state.pt").is_file()
    assert "Traceback" not in err


# ---------------------------------------------------------------- force, other identities, failures


def test_force_runs_again_in_the_same_folder(config, plain, monkeypatch):
    done = train.run(config())
    before = content(done.folder)
    calls = []
    advance = Federation.round
    monkeypatch.setattr(Federation, "round", lambda self: (calls.append(self.k), advance(self))[1])
    again = train.run(config("force=true"))
    assert again.status == "DONE" and again.folder == done.folder and calls == list(range(6))
    assert content(done.folder) == before


def test_a_folder_of_another_run_is_refused(config, plain):
    done = train.run(config())
    before = everything(done.folder)
    for word in ("alpha=0.5", "force=true"):
        with pytest.raises(UserError, match="holds another run") as caught:
            train.run(config("alpha=0.5", *([word] if word != "alpha=0.5" else [])), done.folder)
        assert caught.value.key == "hydra.run.dir" and "\n" not in str(caught.value)
    assert everything(done.folder) == before


def test_a_held_folder_is_left_alone(config, plain, tmp_path):
    with results.Claim(tmp_path / "mine"):
        before = {p.name for p in (tmp_path / "mine").iterdir()}
        with pytest.raises(results.Held):
            train.run(config(), tmp_path / "mine")
        assert {p.name for p in (tmp_path / "mine").iterdir()} == before
    assert train.run(config(), tmp_path / "mine").status == "DONE"


def test_a_failing_run_leaves_its_traceback(config, plain, monkeypatch, tmp_path):
    def broken(self):
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(Federation, "round", broken)
        with pytest.raises(RuntimeError, match="boom"):
            train.run(config(), tmp_path / "mine")
    found = status(tmp_path / "mine")
    assert found["status"] == "FAILED" and "RuntimeError: boom" in found["traceback"] and "in broken" in found["traceback"]
    assert "RuntimeError: boom" in (tmp_path / "mine" / "log.txt").read_text()
    with pytest.raises(UserError, match="has not finished: its status is FAILED"):
        perfed.load(str(tmp_path / "mine"))
    assert train.run(config(), tmp_path / "mine").status == "DONE"
    assert status(tmp_path / "mine")["status"] == "DONE" and "traceback" not in status(tmp_path / "mine")


@pytest.mark.parametrize(
    "words, key",
    [
        (["partition=table2"], "partition"),
        (["model=cnn"], "model"),
        (["adapt.layers=layer9"], "adapt.layers"),
        (["algo=perfedavg", "algo.batches=disjoint", "batch=30"], "algo.batches"),
        (["algo=perfedavg_hf", "algo.delta=1e-6", "algo.delta_mode=absolute"], "algo.delta"),
        (["protocol=fewshot", "protocol.support=50"], "protocol.support"),
        (["n=500"], "n"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_folder_exists(config, tmp_path, words, key):
    with pytest.raises(UserError) as caught:
        train.run(config(*words))
    assert key in str(caught.value).partition(": ")[0] and "\n" not in str(caught.value)
    assert not (tmp_path / "outputs").exists()


# ---------------------------------------------------------------- B38


@pytest.fixture
def old_card(monkeypatch):
    """CUDA says that it is there, and its first operation fails."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "Antique 800")
    ones = torch.ones

    def fails(*size, device=None, **more):
        if device is not None and torch.device(device).type == "cuda":
            raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore lines")
        return ones(*size, device=device, **more)

    monkeypatch.setattr(torch, "ones", fails)


def test_b38_auto_falls_back_to_the_cpu_and_names_the_card(old_card):
    device, notes = pick_device("auto")
    assert device == torch.device("cpu") and len(notes) == 1
    assert notes[0].startswith("warning") and "Antique 800" in notes[0] and "no kernel image" in notes[0] and "\n" not in notes[0]


def test_b38_the_warning_reaches_the_log(old_card, config, plain):
    done = train.run(config("device=auto", "rounds=1"))
    assert "Antique 800" in (done.folder / "log.txt").read_text() and done.status == "DONE"


@pytest.mark.parametrize("wanted", ["cuda", "cuda:0", "cuda:1"])
def test_b38_a_card_that_was_asked_for_is_refused(old_card, wanted):
    with pytest.raises(UserError) as caught:
        pick_device(wanted)
    text = str(caught.value)
    assert text.startswith(f"device={wanted}: ") and "Antique 800" in text and "no kernel image" in text and "\n" not in text


def test_b38_an_index_beyond_the_count(old_card):
    with pytest.raises(UserError, match="^device=cuda:7: at most cuda:1: 2 CUDA devices found$"):
        pick_device("cuda:7")


@pytest.mark.parametrize("wanted", ["cuda", "cuda:7"])
def test_b38_no_card(monkeypatch, config, tmp_path, wanted):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=f"^device={wanted}: no CUDA device was found; use device=cpu or device=auto$"):
        train.run(config(f"device={wanted}"))
    assert not (tmp_path / "outputs").exists()
    device, notes = pick_device("auto")
    assert device.type == "cpu" and "no CUDA device" in notes[0]
    assert pick_device("cpu") == (torch.device("cpu"), [])


@pytest.mark.parametrize("wanted", ["gpu", "cuda:", "cuda:x", "cuda:-1", "CPU", "mps"])
def test_b38_unknown_names_are_refused(config, wanted):
    with pytest.raises(UserError) as caught:
        config(f"device='{wanted}'")
    text = str(caught.value)
    assert text.startswith("device=") and "auto, cpu, cuda, cuda:0" in text and "\n" not in text


def test_b35_threads_move_losses_by_round_off_only(config, plain, tmp_path):
    """Documented: bytes are equal on one thread count; on another, losses agree to 1e-6."""
    one, two = (train.run(config(f"engine.threads={count}"), tmp_path / str(count)) for count in (1, 2))
    assert one.rounds["loss"].to_numpy() == pytest.approx(two.rounds["loss"].to_numpy(), abs=1e-6)
    assert one.users["times_sampled"].tolist() == two.users["times_sampled"].tolist()


def test_a_compiler_that_does_not_work_costs_a_warning(config, plain, monkeypatch):
    monkeypatch.setattr("perfed.train.compiler_works", lambda device: "CppCompileError: no headers")
    done = train.run(config("engine.compile=true"))
    assert done.status == "DONE"
    assert "warning: not compiled: CppCompileError: no headers" in (done.folder / "log.txt").read_text()


def test_a_step_that_does_not_compile_runs_eagerly(config, plain, monkeypatch, tmp_path):
    def broken(step, **_):
        def compiled(*arguments):
            raise RuntimeError("cannot lower this step\nand more")

        return compiled

    monkeypatch.setattr("perfed.train.compiler_works", lambda device: None)
    monkeypatch.setattr("perfed.fusion.options", lambda: None)
    monkeypatch.setattr(torch, "compile", broken)
    eager = train.run(config(), tmp_path / "eager")
    done = train.run(config("engine.compile=true"), tmp_path / "compiled")
    assert "warning: not compiled: RuntimeError: cannot lower this step" in (done.folder / "log.txt").read_text()
    assert content(done.folder) == content(eager.folder)


def test_half_a_library_in_the_compilers_cache_is_removed(tmp_path, monkeypatch):
    """A process killed while it compiles leaves one; torch would stumble over it for ever."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    (tmp_path / "cache" / "ab").mkdir(parents=True)
    torn, other = tmp_path / "cache" / "ab" / "x.main.so", tmp_path / "mine.so"
    for path in (torn, other):
        path.write_bytes(b"")

    def call():
        for path in (torn, other):
            if path.exists():
                raise RuntimeError(f"InductorError: ImportError: {path}: file too short")
        return "ran"

    with pytest.raises(RuntimeError, match=r"mine\.so"):  # what does not lie in the cache is not touched
        device.mended(call)
    assert not torn.exists() and other.exists()
    other.unlink()
    assert device.mended(call) == "ran"


@pytest.mark.slow
def test_a_run_compiles_again_over_torn_libraries(tmp_path):
    """The same with the real compiler, in processes of their own."""
    words = ["dataset=synthetic", "partition=iid", "n=4", "rounds=2", "seeds=1", "model.hidden=[6]", "engine.compile=true"]
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(Path(train.__file__).parents[1])}

    def run(*more: str) -> str:
        done = subprocess.run([sys.executable, "-m", "perfed", *words, *more], cwd=tmp_path, env=env, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    assert "not compiled" not in run()
    libraries = list((tmp_path / "cache").rglob("*.so"))
    assert libraries
    for path in libraries:
        path.write_bytes(b"")
    assert "not compiled" not in run("force=true")
    assert any(path.exists() and path.stat().st_size > 0 for path in libraries)


def test_validation_selects_a_round_without_test_data(config, plain):
    """The chosen round is the first with the highest validation accuracy of each seed; its test accuracy is reported."""
    done = train.run(config("split.val=0.25", "eval_every=1", "seeds=2"))
    best, rounds = done.summary["best_on_validation"], done.rounds
    primary = rounds[(rounds["steps"] == 1) & rounds["seen"]]
    expected = []
    for seed, chosen in zip((0, 1), best["rounds"], strict=True):
        mine = primary[primary["seed"] == seed].set_index("round")
        assert chosen == mine["val_accuracy"].idxmax()
        expected.append(mine.loc[chosen, "accuracy"])
    assert best["mean"] == pytest.approx(sum(expected) / 2)


def test_a_validation_share_that_gives_nobody_an_example_is_refused(config):
    with pytest.raises(UserError, match="split.val=0.001: 0, or a share that gives"):
        train.prepare(config("split.val=0.001"))


# ---------------------------------------------------------------- the Python interface


@pytest.mark.parametrize(
    ("words", "more", "line"),
    [
        (["experiment=table1_quick"], {}, "study.name=table1: a study is no single run; use the command line: .* experiment=table1_quick"),
        (["-m", "tau=2,4"], {}, "-m: no flags here; a sweep is a Python loop"),
        (["--anything"], {}, "--anything: no flags here"),
        (["tau=2,4"], {}, "tau=2,4: one value here; a sweep is a Python loop"),
        (["algo=fedavg,local"], {}, "algo=fedavg,local: one value here"),
        (["hydra.sweep.dir=x"], {}, "hydra.sweep.dir=x: for the command line alone; .* hydra.run.dir "),
        (["hydra/launcher=basic"], {}, "hydra/launcher=basic: for the command line alone"),
        (["hydra.mode=MULTIRUN"], {}, "hydra.mode=MULTIRUN: for the command line alone"),
        (["hydra.run.dir=x"], {"folder": "y"}, "folder=y: not beside hydra.run.dir"),
        ([3], {}, "run=3: words of the command line"),
        ([], {"folder": 3}, "folder=3: a folder, as a text or a Path"),
    ],
)
def test_run_refuses_what_is_not_one_run(words, more, line, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "run", lambda *_: pytest.fail("a run was started"))
    with pytest.raises(UserError, match=f"^{line}") as caught:
        perfed.run(*words, **more)
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("folder", [3, None, ""])
def test_load_refuses_what_is_no_path(folder):
    with pytest.raises(UserError, match="^folder=.*: a folder, as a text or a Path$"):
        perfed.load(folder)


def test_folders_from_python_outlive_a_change_of_the_working_folder(tmp_path, plain, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*DATA, *SMALL, "progress=off", f"data_root={tmp_path}", "rounds=1", "eval_every=1"]
    made = perfed.run(*words, "hydra.run.dir=x/here")
    stored, given = perfed.load("x/here"), perfed.run(*words, folder="x/there")
    assert made.folder == stored.folder == tmp_path / "x" / "here" and given.folder == tmp_path / "x" / "there"
    assert not (tmp_path / "outputs").exists()
    (tmp_path / "away").mkdir()
    monkeypatch.chdir("away")
    for result in (made, stored, given):
        assert len(result.users) == 2 * 5 * 2 and result.model(0, 0).params


def test_a_diverged_run_says_so_again(spoilt, plain):
    first, again = train.run(spoilt("seeds=3", "adapt.steps=0")), train.run(spoilt("seeds=3", "adapt.steps=0"))
    stored = perfed.load(first.folder)
    assert (first.status, again.status, stored.status) == ("DIVERGED", "finished before", "DIVERGED")
    assert (first.outcome, again.outcome, stored.outcome) == ("DIVERGED", "finished before (DIVERGED)", "DIVERGED")
    for result in (first, stored):
        with pytest.raises(UserError, match=r"^seed=1: has no model, it diverged in round 8; one of \[0, 2\]$"):
            result.model(1, 0)
        assert all(torch.isfinite(value).all() for value in result.model(0, 0).params.values())


def test_a_model_says_what_it_takes(config, plain):
    done = train.run(config("rounds=1", "eval_every=1"))
    assert done.outcome == "DONE" and train.run(config("rounds=1", "eval_every=1")).outcome == "finished before"
    model = done.model(np.int64(0), np.int64(1))
    assert model(np.zeros((2, 4))).shape == (2, 3) and model([[0, 0, 0, 0]]).shape == (1, 3)
    for x, text in ((np.zeros((5, 7)), "[5, 7]"), (np.zeros(4), "[4]"), (None, "null"), ([[1, 2], [3]], "[[1, 2], [3]]")):
        with pytest.raises(UserError) as caught:
            model(x)
        line = str(caught.value)
        assert line.startswith(f"x={text}: ") and line.endswith("inputs of shape [B, 4], as stored in the data set")
    for bad in ({"user": "1"}, {"user": 1.5}, {"seed": "0"}, {"steps": 0.5}):
        with pytest.raises(UserError, match=f"^{next(iter(bad))}="):
            done.model(**{"seed": 0, "user": 0, **bad})
    wild = train.run(config("rounds=0", "alpha=1e30", "adapt.steps=0"))
    assert wild.status == "DONE"
    with pytest.raises(UserError, match="^steps=9: fewer steps: the adaptation of user 0 diverges$"):
        wild.model(0, 0, steps=9)
