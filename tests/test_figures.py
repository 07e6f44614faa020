"""Pictures: readable at every size of input, in grey too; PDFs with embedded fonts; drawn without a display, and never at a run's cost."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
import zlib
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb

from perfed import figures, results

ROOT = Path(__file__).parents[1]
LONG = "a rather long name of a method or of a setting, algo.some_option=0.001, algo.another_option=[layer1,layer3], "
METHODS = [f"method{k}" for k in range(27)]
AXES = {"seconds": "seconds of training", "rounds": "rounds", "gradients": "gradient evaluations", "floats": "floats sent"}


def progress(lines, panels=("rounds",), points=21, half=0.02, top=0.9, unit=None):
    """Rows for ``lines``: accuracy from .1 to ``top`` against x, the methods a little apart."""
    rows = []
    for panel in panels:
        scale = (unit or {"seconds": 3.7, "rounds": 50, "gradients": 4e5, "floats": 3.1e8}).get(panel, 1)
        for i, line in enumerate(lines):
            for k in range(points):
                mean = top - (top - 0.1) * np.exp(-k / (3 + i)) if top > 0.1 else top
                rows.append({"panel": panel, "line": line, "x": k * scale, "mean": mean, "half_width": half})
    return pd.DataFrame(rows)


def rounds_csv(seeds=5, rounds=20, steps=(0, 1), value=None, new_users=False):
    rows = []
    for seed in range(seeds):
        for k in range(rounds + 1):
            for step in steps:
                for seen in (True, False) if new_users else (True,):
                    accuracy = 0.5 + 0.1 * step - 0.4 * np.exp(-k / 5) + 0.01 * seed if value is None else value
                    rows.append({"seed": seed, "round": k, "model": "global", "steps": step, "seen": seen, "accuracy": accuracy})
    return pd.DataFrame(rows)


def users_csv(n=20, seeds=3, groups=("classes 0-4", "classes 5-9: pairs"), value=None, steps=(0, 1), new=0):
    """``new``: in seed s the users s to s + new - 1 are new ones."""
    rng, rows = np.random.default_rng(1), []
    for seed in range(seeds):
        for user in range(n):
            for step in steps:
                correct = 25 * (min(1, 0.5 + 0.2 * step + rng.uniform(0, 0.3)) if value is None else value)
                row = {"seed": seed, "user": user, "group": groups[user * len(groups) // n], "model": "global", "steps": step}
                rows.append({**row, "seen": not 0 <= user - seed < new, "correct": correct, "n_test": 25})
    return pd.DataFrame(rows)


def spread(lines, users=50, seeds=5, value=None):
    """Two groups of users, as Table 2's partition has them, test sizes of 25."""
    rng, parts = np.random.default_rng(2), []
    for i, line in enumerate(lines):
        share = rng.binomial(25, np.where(np.arange(users) % 2, 0.95, 0.6 + 0.01 * i), (seeds, users)) / 25
        parts.append(pd.DataFrame({"line": line, "accuracy": share.ravel() if value is None else np.full(share.size, value)}))
    return pd.concat(parts)


def against(names, groups=2, users=40, value=None):
    """Users of each method against themselves under local training, on 25 test images each."""
    rng = np.random.default_rng(3)
    at = rng.binomial(25, 0.9, (len(names), users, 2)) / 25 if value is None else np.full((len(names), users, 2), value)
    return {n: [{"x": x, "y": y, "group": f"{k % groups}: group"} for k, (x, y) in enumerate(p)] for n, p in zip(names, at, strict=True)}


def cell(model, steps, mean, half=0.03, seen=True):
    per_seed = {"0": mean} if half is None else {"0": mean - 0.01, "1": mean + 0.01}
    return {"model": model, "steps": steps, "mean": mean, "half_width": half, "seen": seen, "per_seed": per_seed}


def broken(frame, lines, after=300):
    frame.loc[frame["line"].isin(lines) & (frame["x"] > after), "mean"] = np.nan
    return frame


ONE = {"rounds": "rounds"}
DATA = ("MNIST", "CIFAR")
SWEEP = pd.concat([progress(METHODS[:4], ("",), 6).assign(panel=panel, x=lambda f: 10.0 ** (f["x"] - 4)) for panel in DATA])
PARTLY = spread(["half"]).assign(accuracy=lambda f: f["accuracy"].where(f["accuracy"] > 0.7))
GROUPS = ("classes 0-4", "classes 5-9")
CASES = {
    "lines": lambda p: figures.lines(progress(METHODS[:5], AXES), p, "Fig. 1: five methods", xlabels=AXES, majority=0.5),
    "lines-27-long": lambda p: figures.lines(
        progress([m + LONG for m in METHODS], AXES), p, LONG * 3, xlabels={k: v + LONG for k, v in AXES.items()}, bands=False
    ),
    "lines-log": lambda p: figures.lines(SWEEP, p, "alpha sweep", xlabels=dict.fromkeys(DATA, "alpha L"), log=DATA),
    "lines-within-a-decade": lambda p: figures.lines(
        progress(["a"], ["x"]).assign(x=lambda f: 0.01 + f["x"] / 300), p, xlabels={"x": "alpha L"}, log=["x"]
    ),
    "lines-one-point": lambda p: figures.lines(progress(METHODS[:3], points=1), p, xlabels=ONE),
    "lines-five-panels": lambda p: figures.lines(progress(["a", "b"], "vwxyz"), p, xlabels=dict.fromkeys("vwxyz", "round")),
    "lines-all-100": lambda p: figures.lines(progress(METHODS[:9], top=1.0, half=0.0).assign(mean=1.0), p, xlabels=ONE, majority=1.0),
    "lines-all-0": lambda p: figures.lines(progress(METHODS[:2], top=0.0, half=np.nan), p, xlabels=ONE),
    "lines-diverged": lambda p: figures.lines(broken(progress(METHODS[:3], AXES), METHODS[1:2]), p, "diverged", xlabels=AXES),
    "lines-many-diverged": lambda p: figures.lines(broken(progress(METHODS), METHODS[:20]), p, "diverged", xlabels=ONE),
    "lines-odd-names": lambda p: figures.lines(progress(["_private", "a $x", "$\\frac$ <b>", "ü & é"]), p, "$\\alpha_$", xlabels=ONE),
    "learning": lambda p: figures.learning_curve(rounds_csv(), p, "perfedavg_hf, mnist5k, table2, mlp; protocol clean", majority=0.5),
    "learning-1-seed": lambda p: figures.learning_curve(rounds_csv(1), p, LONG * 4, diverged=(7,)),
    "learning-1-round": lambda p: figures.learning_curve(rounds_csv(rounds=0, new_users=True), p, "one round"),
    "learning-diverged": lambda p: figures.learning_curve(rounds_csv(), p, "seeds", diverged=(0, 1, 2)),
    "learning-100-%": lambda p: figures.learning_curve(rounds_csv(value=1.0), p, "all right", majority=1.0),
    "learning-many-steps": lambda p: figures.learning_curve(rounds_csv(steps=range(12), new_users=True), p),
    "users": lambda p: figures.per_user(users_csv(), p, "perfedavg_hf, mnist5k, table2, mlp; protocol clean"),
    "users-1": lambda p: figures.per_user(users_csv(1, 1, ("all",)), p, "one user"),
    "users-200": lambda p: figures.per_user(users_csv(200), p, "two hundred users"),
    "users-6-long-groups": lambda p: figures.per_user(users_csv(200, groups=[f"{k}: {LONG}" for k in range(6)]), p, LONG * 2),
    "users-unequal-groups": lambda p: figures.per_user(users_csv(60, groups=["a"] * 57 + ["b", "c", "d"]), p),
    "users-new": lambda p: figures.per_user(users_csv(new=4), p, "perfedavg_hf, mnist5k, table2, mlp; protocol clean"),
    "users-0-%": lambda p: figures.per_user(users_csv(value=0.0), p, "all wrong"),
    "spread": lambda p: figures.distributions(spread(METHODS[:6]), p, "mnist5k, table2, tau=10", majority=0.5),
    "spread-27-long": lambda p: figures.distributions(spread([m + LONG for m in METHODS]), p, LONG * 3, majority=0.5),
    "spread-1-user": lambda p: figures.distributions(spread(["local"], 1, 1), p, "one user"),
    "spread-200": lambda p: figures.distributions(spread(METHODS[:3], 200), p),
    "spread-100-%": lambda p: figures.distributions(spread(METHODS[:3], value=1.0), p, majority=0.0),
    "spread-diverged": lambda p: figures.distributions(
        pd.concat([spread(["good"]), spread(["bad"], value=np.nan), PARTLY]), p
    ),
    "scatter": lambda p: figures.user_scatter(against(METHODS[:4]), p, "Users against themselves under local training; mnist5k"),
    "scatter-27-long": lambda p: figures.user_scatter(against([m + LONG for m in METHODS], 9), p, LONG * 3),
    "scatter-1": lambda p: figures.user_scatter(against(["fedavg"], 1, 1), p, "Users; protocol clean\n1 seed of 1 user, no interval"),
    "scatter-100-%": lambda p: figures.user_scatter(against(METHODS[:2], value=1.0), p, "all right"),
    "map": lambda p: figures.heat_map([[34] * 5 + [0] * 5, [0] * 5 + [17] * 5], GROUPS, [*"0123456789"], p, "mnist5k"),
    "map-100-rows": lambda p: figures.heat_map(np.arange(1000).reshape(100, 10), [f"user {k}" for k in range(100)], [*"0123456789"], p),
    "map-300-rows": lambda p: figures.heat_map(np.ones((300, 10)), [f"user {k}" for k in range(300)], [*"0123456789"], p),
    "map-100-classes": lambda p: figures.heat_map(
        np.eye(5, 100), [LONG + str(k) for k in range(5)], [f"class {k}" for k in range(100)], p, LONG * 2
    ),
    "map-long-names": lambda p: figures.heat_map([[123456, 1], [0, 20]], [LONG, "b"], [LONG, "$a$"], p, "counts"),
    "map-means": lambda p: figures.heat_map([[1234.25, 8 / 3], [0.0, 20.0]], GROUPS, ["0", "1"], p, "train examples\nseed 0"),
    "map-empty": lambda p: figures.heat_map([[0]], ["all"], ["0"], p),
    "steps": lambda p: figures.adaptation_curve([cell("global", j, 0.5 + 0.04 * j) for j in (0, 1, 5, 10)], p, "adaptation", majority=0.2),
    "steps-many": lambda p: figures.adaptation_curve(
        [cell(m, j, 1.0, None, seen) for m in METHODS[:8] for seen in (True, False) for j in (0, 10)], p, LONG
    ),
}  # fmt: skip
FAST = {"lines-odd-names", "scatter-1", "learning-1-seed", "users-unequal-groups", "spread-diverged", "map-long-names", "users-new"}


@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_no_text_overlaps_or_leaves_the_picture(name, monkeypatch, tmp_path):
    (figure,) = drawn(monkeypatch, CASES[name], tmp_path)
    assert faults(figure) == []


def test_the_check_finds_faults():
    figure = figures._figure(4, 3, "")
    ax = figure.subplots()
    ax.text(0.5, 0.5, "one two")
    ax.text(0.52, 0.5, "three")
    figure.text(0.95, 0.95, "too far right")
    assert faults(figure) == ["'too far right' leaves the picture", "'one two' lies on 'three'"]
    figure = figures._figure(1.2, 2, "title")
    figure.subplots().set_ylabel("label")
    assert [fault.split()[0] for fault in faults(figure)] == ["axes"]


def faults(figure):
    """What a reader would find wrong: texts that are cut or lie on one another, and axes squeezed below 0.8 x 0.4 inches."""
    boxes = texts(figure)
    assert boxes, "nothing is written"
    width, height = FigureCanvasAgg(figure).get_width_height()
    found = [f"{t!r} leaves the picture" for t, box in boxes if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height]
    for (one, a), (other, b) in combinations(boxes, 2):
        across, down = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        if across > 1 and down > 1:
            found.append(f"{one!r} lies on {other!r}")
    sizes = [ax.get_window_extent() for ax in figure.axes if ax.get_label() != "<colorbar>"]
    small = [size for size in sizes if size.width < 0.8 * figures.DPI or size.height < 0.4 * figures.DPI]
    return found + [f"axes of {size.width / figures.DPI:.2f} x {size.height / figures.DPI:.2f} inches" for size in small]


def drawn(monkeypatch, draw, folder):
    """The figures that ``draw`` would save; a warning of matplotlib's is an error."""
    found = []
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(figures, "_save", lambda figure, path: found.append(figure))
        draw(folder / "x.png")
        for figure in found:
            FigureCanvasAgg(figure).draw()
    return found


def texts(figure):
    """Text and extent of everything that is written when the figure is drawn."""
    canvas = FigureCanvasAgg(figure)
    renderer, found = canvas.get_renderer(), {}
    write = renderer.draw_text

    def draw_text(gc, x, y, s, prop, angle, ismath=False, mtext=None):
        if mtext is not None and s.strip():
            found[id(mtext)] = mtext
        return write(gc, x, y, s, prop, angle, ismath, mtext)

    renderer.draw_text = draw_text
    figure.draw(renderer)
    return [(text.get_text(), text.get_window_extent(renderer)) for text in found.values()]


# ---------------------------------------------------------------- grey


def lightness(colour):
    """CIE L*, 0 (black) to 100 (white), of an sRGB colour."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    y = float(np.dot(linear, (0.2126, 0.7152, 0.0722)))
    return 116 * np.cbrt(y) - 16 if y > 0.008856 else 903.3 * y


def test_lightness():
    assert lightness("white") == pytest.approx(100, abs=1e-3) and lightness("black") == 0
    assert lightness("0.5") == pytest.approx(53.39, abs=0.01)  # sRGB 127.5: Y = .2140


def test_lines_can_be_told_apart_in_grey():
    looks = [figures.style(i) for i in range(81)]
    pairs = {(str(look["linestyle"]), look["marker"]) for look in looks}
    assert len(pairs) == 81, "two lines have the same dash and marker"
    first = looks[: len(figures.STYLES)]
    assert len(first) >= 8
    assert len({str(look["linestyle"]) for look in first}) == len({look["marker"] for look in first}) == len(first)
    light = [lightness(look["color"]) for look in first]
    assert min(abs(a - b) for a, b in combinations(light[:5], 2)) > 9  # five methods: by their lightness alone
    assert max(light) < 80  # visible on white


def test_lines_keep_their_looks_in_all_panels_and_leave_out_what_is_not_finite(monkeypatch, tmp_path):
    frame = progress(["a", "b", "c"], ("rounds", "seconds"))
    frame = frame[~((frame["panel"] == "rounds") & (frame["line"] == "b"))]
    frame.loc[(frame["line"] == "c") & (frame["x"] >= 20), "mean"] = np.inf
    draw = lambda p: figures.lines(frame, p, xlabels={"rounds": "rounds", "seconds": "s"}, log=["seconds"])  # noqa: E731
    (figure,) = drawn(monkeypatch, draw, tmp_path)
    left, right = figure.axes
    looks = [{line.get_label(): (line.get_color(), line.get_marker()) for line in ax.lines} for ax in (left, right)]
    assert all(looks[0][name] == looks[1][name] for name in (" a", " c")) and " b" not in looks[0] and len(looks[1]) == 3
    assert (left.get_title(), right.get_title()) == ("not finite to the end: c", "seconds\nnot finite to the end: c")
    assert [len(line.get_xdata()) for line in right.lines] == [20, 5, 20]  # x = 3.7 k: 0 has no logarithm; c below 20: k = 1..5
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "c", "b"]  # as they appear
    np.testing.assert_allclose(left.lines[0].get_ydata(), 100 * frame["mean"][:21])
    with pytest.raises(ValueError, match="no finite mean"):
        figures.lines(frame.assign(mean=np.nan), tmp_path / "x.png", xlabels={"rounds": "", "seconds": ""})


def test_distributions_show_the_quartiles(monkeypatch, tmp_path):
    frame = pd.DataFrame({"line": "a", "accuracy": [*np.linspace(0, 1, 101), np.nan]})
    (figure,) = drawn(monkeypatch, lambda p: figures.distributions(frame, p), tmp_path)
    whiskers, box, median, *_ = (line.get_xdata() for line in figure.axes[0].lines)
    np.testing.assert_allclose([*whiskers, *box, *median], [5, 95, 25, 75, 50])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["a\n(1 not finite)"]
    assert figure.axes[0].get_xlabel() == "accuracy of a user, % (a point is one user in one seed; 101 per row)"
    with pytest.raises(ValueError, match="no finite accuracy"):
        figures.distributions(frame.assign(accuracy=np.nan), tmp_path / "x.png")


def test_a_learning_curve_shows_the_primary_steps_and_new_users_of_the_primary_model(monkeypatch, tmp_path):
    parts = [rounds_csv(3, 4, steps=(0, 1, 2, 5), new_users=True).assign(model=model) for model in ("personal", "adapted", "global")]
    frame = pd.concat(parts)
    (figure,) = drawn(monkeypatch, lambda p: figures.learning_curve(frame, p, "t", primary={"model": "personal", "steps": 2}), tmp_path)
    both = ("after 2 steps", "before adaptation")
    wanted = [f"{model}, {when}" for model in ("adapted", "global", "personal") for when in both]
    wanted += [f"new users: personal, {when}" for when in both]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == wanted
    assert figure.get_suptitle() == "t\n8 of 24 curves; the others are in rounds.csv"
    assert figures.shown_curves(frame)[0][0] == (True, "adapted", 5)  # by default after the most steps
    assert figures.shown_curves(rounds_csv(steps=(0,))) == ([(True, "global", 0)], 0)


def test_pictures_say_their_seeds_interval_and_step_size(monkeypatch, tmp_path):
    def labels(draw):
        (figure,) = drawn(monkeypatch, draw, tmp_path)
        return figure.axes[0].get_ylabel().replace("\n", " "), figure.axes[0].get_xlabel()

    assert labels(CASES["learning"])[0] == "accuracy, % (mean over 5 seeds, 95 % band)"
    assert labels(CASES["learning-1-seed"])[0] == "accuracy, % (1 seed, no interval)"
    assert labels(CASES["users-1"])[0] == "accuracy of a user, % (1 seed)"
    own = labels(lambda p: figures.adaptation_curve([cell("global", 0, 0.5), cell("global", 1, 0.6)], p))
    assert own == ("accuracy, % (mean over 2 seeds, 95 % interval)", "adaptation steps of the method's own size")
    alone = labels(lambda p: figures.adaptation_curve([cell("global", j, 0.5, None) for j in (0, 1)], p, lr=0.01))
    assert alone == ("accuracy, % (1 seed, no interval)", "adaptation steps of size 0.01")


def test_lines_of_adaptation_are_set_apart_and_few(monkeypatch, tmp_path):
    cells = [cell(model, j, 0.5, 0.1, seen) for model in ("personal", "global") for seen in (True, False) for j in (0, 20)]
    (figure,) = drawn(monkeypatch, lambda p: figures.adaptation_curve(cells, p, primary="personal"), tmp_path)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["personal", "new users: personal", "global"]
    starts = [bars[0].get_xdata()[0] for bars in figure.axes[0].containers]
    assert starts == pytest.approx([-0.14, 0.0, 0.14])  # 0.7 % of 20 steps apart, about the number


def test_new_users_are_no_points_of_the_picture_of_users(monkeypatch, tmp_path):
    """Of 6 users, 0 and 1 are new in seed 0, 1 and 2 in seed 1: user 1 has no point, 0 and 2 that of the one seed that trained them."""
    frame = users_csv(6, 2, ("all",), new=2)
    (figure,) = drawn(monkeypatch, lambda p: figures.per_user(frame, p, "t"), tmp_path)
    after = frame[frame["seen"] & (frame["steps"] == 1)]
    want = sorted(100 * (after["correct"] / 25).groupby(after["user"]).mean())
    points = figure.axes[0].collections[-1].get_offsets()
    assert len(want) == 5
    np.testing.assert_allclose(points[:, 1], want)
    said = " ".join(figure.get_suptitle().split())
    left_out = "users seen in training; new users (2 a seed) are left out"
    assert said == f"t {left_out}; a point is the mean over the seeds in which its user took part"
    assert figure.axes[0].get_ylabel() == "accuracy of a user, %\n(mean over up to 2 seeds)"


def test_a_count_table_is_of_one_user(monkeypatch, tmp_path):
    (figure,) = drawn(monkeypatch, CASES["map-means"], tmp_path)
    assert [text.get_text() for text in figure.axes[0].texts] == ["1234.25", "2.67", "0", "20"]
    assert figure.axes[1].get_ylabel() == "train examples a user"


# ---------------------------------------------------------------- files


def test_files_are_atomic_dateless_and_hold_their_fonts(tmp_path):
    for name in ("one", "two"):
        figures.heat_map([[1, 2]], ["a"], ["0", "1"], tmp_path / f"{name}.png", "title")
    assert {p.name for p in tmp_path.iterdir()} == {"one.png", "one.pdf", "two.png", "two.pdf"}
    png, pdf = ((tmp_path / f"one.{kind}").read_bytes() for kind in ("png", "pdf"))
    assert png == (tmp_path / "two.png").read_bytes() and pdf == (tmp_path / "two.pdf").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n") and b"tEXt" not in png and b"tIME" not in png
    assert pdf.startswith(b"%PDF-") and b"Date" not in pdf
    content = pdf + b"".join(inflated(pdf))
    assert content.count(b"/FontFile2") == len(re.findall(rb"/Subtype /CIDFontType2|/Subtype /TrueType", content)) == 1
    assert b"/Type3" not in content and b"/Type1" not in content


def inflated(pdf):
    """The contents of a PDF's compressed streams."""
    for stream in re.findall(rb"stream\r?\n(.*?)\r?\nendstream", pdf, re.S):
        try:
            yield zlib.decompress(stream)
        except zlib.error:
            continue


def test_a_pdf_that_fails_leaves_the_old_files(tmp_path, monkeypatch):
    before = {f"x.{kind}": kind.encode() for kind in ("png", "pdf")}
    for name, content in before.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(FigureCanvasAgg, "print_figure", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        figures.heat_map([[3, 4]], ["a"], ["0", "1"], tmp_path / "x.png")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


# ---------------------------------------------------------------- row B27: no display

KINDS = """
import sys, matplotlib
sys.path.insert(0, "tests")
import pandas as pd
from perfed import figures
before, path = dict(matplotlib.rcParams), sys.argv[1]
frame = pd.DataFrame({"panel": "p", "line": "a", "x": [1, 2], "mean": [0.1, 0.2], "half_width": 0.1, "accuracy": 0.5})
figures.distributions(frame, path)
for i in range(int(sys.argv[2])):
    figures.lines(frame, path, xlabels={"p": "round"})
assert "matplotlib.pyplot" not in sys.modules and dict(matplotlib.rcParams) == before
"""
NO_DISPLAY = {"absent": None, "stale": "localhost:64.0", "empty": ""}


def without_display(kind):
    env = {**os.environ, "MPLBACKEND": "TkAgg"}
    env.pop("DISPLAY", None)
    return env if NO_DISPLAY[kind] is None else {**env, "DISPLAY": NO_DISPLAY[kind]}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(("kind", "count"), [("absent", 1), pytest.param("stale", 100, marks=SLOW), pytest.param("empty", 1, marks=SLOW)])
def test_pictures_without_a_display(tmp_path, kind, count):
    """A backend that needs a display is asked for; with pyplot, matplotlib would warn from the 21st open figure on."""
    command = [sys.executable, "-W", "error", "-c", KINDS, tmp_path / "x.png", str(count)]
    done = subprocess.run(command, cwd=ROOT, env=without_display(kind), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "x.pdf").is_file()


TINY = ["dataset=synthetic", "partition=iid", "n=4", "rounds=1", "model.hidden=[4]", "progress=off", "device=cpu", "engine.compile=false"]


@pytest.mark.slow
def test_a_sweep_with_a_hundred_pictures_without_a_display(tmp_path):
    alphas = ",".join(f"0.{k:03}" for k in range(1, 35))  # 34 runs of three pictures
    command = [sys.executable, "-m", "perfed", "-m", *TINY, "seeds=1", f"alpha={alphas}", f"outputs={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, env=without_display("stale"), capture_output=True, text=True)
    assert done.returncode == 0 and "arning" not in done.stderr and "could not be drawn" not in done.stderr, done.stderr
    assert len(list(tmp_path.glob("*/*.png"))) >= 100 and len(list(tmp_path.glob("*/*.pdf"))) >= 100


@pytest.mark.parametrize("error", [OSError(28, "No space left"), *(pytest.param(e(), marks=SLOW) for e in (ImportError, MemoryError))])
def test_a_plotting_error_never_loses_results(tmp_path, monkeypatch, error):
    """What cannot be drawn is said; the numbers were on disk before."""
    from perfed import train
    from perfed.config import parse
    from perfed.frontdoor import compose

    monkeypatch.setattr("perfed.train.provenance", lambda prepared: {})
    monkeypatch.setattr("perfed.stats.binomial_floor", lambda accuracy, sizes: 0.0)
    there = []

    def save(figure, path):
        there.append({p.name for p in Path(path).parent.iterdir()} >= {"result.json", "rounds.csv", "users.csv"})
        raise error

    monkeypatch.setattr(figures, "_save", save)
    done = train.run(parse(compose([*TINY, f"outputs={tmp_path}"])))
    assert done.status == "DONE" and results.finished(done.folder).complete
    assert there and all(there) and not list(tmp_path.glob("*/*.png"))
    assert f"could not be drawn: {type(error).__name__}" in (done.folder / "report.md").read_text()
