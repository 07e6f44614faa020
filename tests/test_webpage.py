"""The page of a sweep: valid, self-contained, escaped, complete; the links survive a move; opened in a real browser where there is one."""

from __future__ import annotations

import base64
import json
import re
import shutil
import struct
import subprocess
import zlib
from html import unescape
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest
from test_report import fake_run

from perfed import compare, figures, report, results, tables, webpage
from perfed.htmlpage import POLICY, Folded, Links, Picture, Section, write_page
from perfed.report import find

EVIL = "<script>alert('x')</script> & \"quoted\" \x1b[31m\x00"
VOID = {"meta", "link", "img", "br"}


class Page(HTMLParser):
    """Tags with their attributes, text by tag, and what is wrong with the markup."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.text, self.wrong = [], [], [], []
        self.feed(text)
        self.close()
        self.wrong += [f"<{tag}> is never closed" for tag in self.open]

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if len({name for name, _ in attrs}) < len(attrs):
            self.wrong.append(f"<{tag}> has an attribute twice")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> closes nothing")

    def handle_data(self, data):
        self.text.append((self.open[-1] if self.open else "", data))

    def of(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]

    def said(self, *tags):
        return ["".join(data) for tag, data in self.text if tag in tags and data.strip()]


def faults(text):
    """What a validator and a reader with a screen reader would complain about, and all that would be loaded."""
    page = Page(text)
    found = list(page.wrong)
    ids = [a["id"] for _, a in page.tags if "id" in a]
    found += [f"id {name} twice" for name in set(ids) if ids.count(name) > 1]
    found += [f"no {a['href']}" for a in page.of("a") if a["href"].startswith("#") and a["href"][1:] not in ids]
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    if levels[:1] != [1] or levels.count(1) != 1 or any(b > a + 1 for a, b in zip(levels, levels[1:], strict=False)):
        found.append(f"headings {levels}")
    found += ["image without alt or size" for a in page.of("img") if not a.get("alt") or not {"width", "height"} <= set(a)]
    found += ["th without scope" for a in page.of("th") if a.get("scope") not in ("col", "row")]
    found += [f"loads {a['src'][:30]}" for _, a in page.tags if "src" in a and not a["src"].startswith("data:image/png;base64,")]
    found += [f"loads {a['href']}" for a in page.of("link") if a["href"] != "data:,"]
    found += [f"a link away, {a['href']}" for a in page.of("a") if re.match(r"\w+:|/", a["href"])]
    found += [f"<{tag}>" for tag in ("script", "iframe", "object") if page.of(tag)]
    found += [f"{name}=" for _, a in page.tags for name in a if name.startswith("on") or name == "style"]
    if page.of("html") != [{"lang": "en"}] or not text.startswith("<!DOCTYPE html>\n") or not page.of("title"):
        found.append("no doctype, language or title")
    if any(ord(letter) < 32 and letter not in "\n\t" for letter in text):
        found.append("a control character")
    return found


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Seven runs of two protocols: a best and a marked one, a diverged, a failed and an interrupted one, with names full of markup."""
    root = tmp_path_factory.mktemp("a b&c") / "outputs"
    best, extra = [0.80, 0.81, 0.82, 0.83, 0.84], ", kind: '<b>&amp;', own: 3"
    near = [b + d for b, d in zip(best, (0.01, -0.02, 0.01, -0.01, 0.0), strict=True)]  # as in test_report's test of marks
    fake_run(root / "hf", seeds=5, per_seed=best, extra=extra)
    fake_run(root / "fedavg", "fedavg", seeds=5, per_seed=near)
    fake_run(root / "ditto", "ditto", seeds=5, diverged=(2,), status="DIVERGED")
    fake_run(root / "local", "local", seeds=5, status="FAILED")
    results.write_status(root / "local", "FAILED", traceback=f"Traceback\nValueError: {EVIL}")
    fake_run(root / "l2gd", "l2gd", status="RUNNING")
    fake_run(root / "paper-hf", protocol="paper", extra=extra)
    fake_run(root / "paper-fedavg", "fedavg", protocol="paper", shift=-0.1)
    for name, commit in (("hf", "abc"), ("fedavg", "abd")):
        results.write_json(root / name / "provenance.json", {"commit": commit, "torch": "2.14.1"})
    (root / "hf" / "partition.png").write_bytes(png(600, 300))
    (root / "report").mkdir()
    with pytest.MonkeyPatch.context() as patch:  # what pictures look like is tested with them
        patch.setattr(figures, "_save", lambda figure, path: path.write_bytes(png(960, 600)))
        webpage.write_html(root / "report" / "page.html", find([root]))
    return root


def png(width, height):
    """A white picture."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head, rows = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0), zlib.compress((b"\x00" + b"\xff" * width) * height)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.fixture(scope="module")
def text(sweep):
    return (sweep / "report" / "page.html").read_text(encoding="utf-8")


def test_page_is_valid_self_contained_and_accessible(text):
    assert faults(text) == []
    page = Page(text)
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.of("meta")
    assert {"http-equiv": "Content-Security-Policy", "content": POLICY} in page.of("meta")
    assert "http://" not in text and "https://" not in text and "url(" not in text and "@import" not in text


def test_the_checker_finds_faults():
    bad = "<html><h1>a</h1><h3 id='x' onclick='y'>b</h3><p id='x'><img src='http://a'><a href='#z'>c</a><th>d</th></p><script></script>"
    found = " ".join(faults(bad))
    for words in ("is never closed", "id x twice", "no #z", "headings", "without alt", "th without", "loads http", "<script>", "onclick="):
        assert words in found


def test_page_holds_the_tables_of_both_protocols(text, sweep):
    page = Page(text)
    assert page.said("h1") == ["5 methods on mnist5k"]
    heads = page.said("h2")
    assert heads == ["Results, protocol clean", "Results, protocol paper", "Costs", "Configuration", "Made with", "Runs"]
    assert page.said("h3") == sorted(p.name for p in sweep.iterdir() if p.name != "report")
    table = compare.sweep_table([run for run in find([sweep]) if "paper" not in run.folder.name])
    assert [cell.text for cell in table.rows[0] if cell.bold] == ["82.00 ± 1.96"] and any(cell.mark for cell in table.rows[0])
    words = page.said("td", "th", "strong", "p")
    assert all(cell.text + cell.mark in words or cell.bold for row in table.rows for cell in row)
    assert table.caption.replace(tables.STAR, "") in words and "plain text" not in text
    assert page.said("strong") == ["82.00 ± 1.96"] and "81.80 ± 2.39†" in words
    assert all(note.replace("\x1b", "\ufffd").replace("\x00", "\ufffd") in words for note in table.notes)
    assert "82.00 ± 4.97" in words and "72.00 ± 4.97" in words  # the other protocol: three seeds, as in test_report
    costs = words[words.index("gradients") - 2 :]
    assert costs[:6] == ["run", "rounds", "gradients", "Hessian-vector products", "floats down", "floats up"]
    assert costs[6:12] == ["ditto", "20", "600", "0", "18,000", "18,000"]


def test_what_has_no_result_is_named(text):
    said = Page(text).said("p")
    assert said[0] == "7 runs: 1 DIVERGED, 4 DONE, 1 INTERRUPTED, 1 FAILED."
    assert said[1:4] == [
        "ditto: DIVERGED, seed 2 at round 9.",
        "l2gd: INTERRUPTED.",
        "local: FAILED, ValueError: " + EVIL.replace("\x1b", "\ufffd").replace("\x00", "\ufffd") + ".",
    ]


def test_configurations_and_versions(text):
    page = Page(text)
    words = page.said("td", "th", "summary")
    at = words.index("algo.name")
    assert words[at - 1 : at + 4] == ["run", "algo.name", "protocol.name", "seeds", "ditto"]
    # n rounds tau alpha seed device, dataset.name and norm, partition.name and a, engine.dtype; algo.alpha
    assert "Common to all runs (12 keys)" in words
    assert words.count("<b>&amp;") == 2  # as it stands in the file, among the runs' own keys
    assert words[words.index("torch") + 1] == "2.14.1" and "abd" in words


def test_pictures(text):
    images = Page(text).of("img")
    alts = [image["alt"] for image in images]
    assert alts == [
        "Accuracy against rounds. dataset=mnist5k, tau=10, alpha=0.01: ditto, fedavg, perfedavg_hf.",
        "Distribution of the users' accuracies. dataset=mnist5k, tau=10, alpha=0.01: ditto, fedavg, perfedavg_hf.",
        "Accuracy against rounds. dataset=mnist5k, tau=10, alpha=0.01: fedavg, perfedavg_hf.",
        "Distribution of the users' accuracies. dataset=mnist5k, tau=10, alpha=0.01: fedavg, perfedavg_hf.",
        "hf: partition",
    ]
    for image in images:
        data = base64.b64decode(image["src"].partition(",")[2], validate=True)
        width, height = struct.unpack(">II", data[16:24])
        assert data.startswith(b"\x89PNG") and (int(image["width"]), int(image["height"])) == (round(0.64 * width), round(0.64 * height))


def test_links_lead_to_the_folders_also_after_a_move(sweep, text, tmp_path):
    shutil.copytree(sweep, tmp_path / "else where")
    page = tmp_path / "else where" / "report" / "page.html"
    links = [a["href"] for a in Page(text).of("a") if not a["href"].startswith("#")]
    targets = [(page.parent / unquote(link)).resolve() for link in links]
    assert [target.name for target in targets] == Page(text).said("h3") and all((t / "status.json").is_file() for t in targets)
    assert all(target.is_relative_to(tmp_path) for target in targets)


def test_equal_runs_give_equal_bytes(sweep, monkeypatch):
    monkeypatch.setattr(figures, "_save", lambda figure, path: path.write_bytes(png(4, 3)))
    runs = find([sweep])
    pages = []
    for _ in range(2):
        webpage.write_html(sweep / "report" / "again.html", runs)
        pages.append((sweep / "report" / "again.html").read_bytes())
    assert pages[0] == pages[1] and not list((sweep / "report").glob(".tmp*"))


def test_one_method_has_a_line_for_each_setting(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(figures, "lines", lambda frame, path, *_, **__: drawn.update(curves=frame))
    monkeypatch.setattr(figures, "distributions", lambda frame, path, *_, **__: drawn.update(users=frame))
    runs = [results.load(fake_run(tmp_path / f"r{tau}", tau=tau, seeds=2)) for tau in (4, 10)]
    runs.append(results.load(fake_run(tmp_path / "more", tau=4, seeds=3, diverged=(2,), status="DIVERGED")))
    webpage._drawn(runs, tmp_path / "drawn")
    curves = drawn["curves"]
    # seed 2 of tau=4 diverged; seeds 0 and 1 are in two runs and count once
    assert list(dict.fromkeys(curves["line"])) == ["tau=4 (2 of 3 seeds)", "tau=10"] and set(curves.groupby("line").size()) == {11}
    assert drawn["users"].groupby("line").size().to_dict() == {"tau=10": 16, "tau=4": 16}
    (tmp_path / "r4" / "rounds.csv").unlink()  # as in a folder of perfed-eval
    assert [part.alt for part in webpage._drawn(runs[:2], tmp_path / "again")] == [
        "Accuracy against rounds. perfedavg_hf: tau=4, tau=10.",
        "Distribution of the users' accuracies. perfedavg_hf: tau=4, tau=10.",
    ]
    assert len(webpage._drawn(runs[:1], tmp_path / "once")) == 1


def test_a_picture_that_fails_costs_only_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "lines", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(figures, "distributions", lambda frame, path, *_, **__: path.write_bytes(png(4, 3)))
    webpage.write_html(tmp_path / "x.html", [results.load(fake_run(tmp_path / "a"))], "a <title>")
    page = Page((tmp_path / "x.html").read_text())
    of = "dataset=mnist5k, tau=10, alpha=0.01: perfedavg_hf"
    assert f"Accuracy against rounds. {of}. Not drawn: ZeroDivisionError: division by zero" in page.said("p")
    assert len(page.of("img")) == 1 and "82.00 ± 4.97" in page.said("td") and page.said("title", "h1") == ["a <title>"] * 2


def test_a_page_without_any_mean(tmp_path):
    folders = [fake_run(tmp_path / "a", status="FAILED"), fake_run(tmp_path / "b", "fedavg", diverged=(0, 1, 2), status="DIVERGED")]
    webpage.write_html(tmp_path / "x.html", [results.load(folder) for folder in folders])
    text = (tmp_path / "x.html").read_text()
    page = Page(text)
    assert faults(text) == [] and "a: FAILED, RuntimeError: out of memory." in page.said("p") and "div 3/3" in page.said("td")
    assert not page.of("img") and "Not drawn" not in text


def test_sections_of_a_study(tmp_path):
    (tmp_path / "p.png").write_bytes(png(1500, 300))
    (tmp_path / "run").mkdir()
    grid = tables.grid(["a|b", "c"], [["<x>", tables.Cell("1", True, "†")]], "A caption.", ["A note."])
    sections = [
        Section("One & two", ["first\n\nsecond", grid, Picture(tmp_path / "p.png", "a 'quoted' \"alt\"")]),
        Section("Part", [Folded("more", [{"key": [1, None, True]}])], level=3),
        Section("One & two", [Links([("the run", tmp_path / "run"), ("a file", tmp_path / "p.png")])]),
    ]
    write_page(tmp_path / "x.html", "Study", sections)
    text = (tmp_path / "x.html").read_text()
    page = Page(text)
    assert faults(text) == []
    assert [a.get("id") for tag, a in page.tags if tag in ("h2", "h3")] == ["one-two", "part", "one-two-2"]
    assert page.said("p") == ["first", "second", "A caption.", "A note."] and page.said("td") == ["†", "[1, null, true]"]
    assert [a["href"] for a in page.of("a")] == ["#one-two", "#part", "#one-two-2", "run/", "p.png"]
    assert page.of("img")[0] | {"src": ""} == {"class": "wide", "width": "960", "height": "192", "alt": "a 'quoted' \"alt\"", "src": ""}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent", "html=x.html"], "run=absent: no such folder"),
        (["a", "html=b"], "html=b: a name that ends in .html"),
        (["a", "--html", "no/x.html"], "html=no/x.html: a file in a folder that exists"),
        (["a", "html=x.html", "rows=tau"], "rows=tau: says nothing with html"),
        (["a", "html=x.html", "list=true"], "html=x.html: not together with list"),
    ],
)
def test_command_line_refuses_in_one_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fake_run(tmp_path / "a", status="FAILED")
    assert report.main(words) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("perfed: ") and message in err and err.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fake_run(tmp_path / "outputs" / "a", status="FAILED")
    assert report.main(["outputs", "--html", "x.html"]) == 0
    assert capsys.readouterr().out == "x.html\n" and len(Page((tmp_path / "x.html").read_text()).said("h1")) == 1


# ---------------------------------------------------------------- a real browser

CHECK = """<script>
addEventListener("load", () => parent.postMessage({
  images: [...document.images].map(i => i.complete && i.naturalWidth > 0),
  loaded: performance.getEntriesByType("resource").map(e => e.name).filter(n => !n.startsWith("data:")),
  wider: document.documentElement.scrollWidth - innerWidth, width: innerWidth, color: getComputedStyle(document.body).color,
  tables: [...document.querySelectorAll("table")].filter(t => t.checkVisibility()).map(t => t.getBoundingClientRect().height > 10),
}, "*"));
</script></body>"""
FRAME = """<!DOCTYPE html><html><body><pre id="check"></pre><iframe src="seen.html" width="{width}" height="900" style="border: 0"></iframe>
<script>addEventListener("message", event => document.getElementById("check").textContent = JSON.stringify(event.data));</script>
</body></html>"""
BROWSER = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)


def browse(page, folder, dark):
    """What the page became, and the lines of the console."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--window-size=1400,1000"]
    command += ["--enable-logging=stderr", f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--virtual-time-budget=5000"]
    done = subprocess.run([*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium")
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, False), (390, True)])
def test_page_in_a_browser(text, tmp_path, width, dark):
    """The page itself says nothing on the console. In a copy that lets a script look, all images are there, nothing was loaded, every
    table is visible and the page is no wider than the window."""
    (tmp_path / "page.html").write_text(text)
    dom, console = browse(tmp_path / "page.html", tmp_path / "profile", dark)
    assert console == [] and dom.count("<table") == text.count("<table") > 8
    (tmp_path / "seen.html").write_text(text.replace(POLICY, POLICY + "; script-src 'unsafe-inline'").replace("</body>", CHECK))
    (tmp_path / "frame.html").write_text(FRAME.format(width=width))  # a window is never narrower than 500 pixels
    dom, console = browse(tmp_path / "frame.html", tmp_path / "profile", dark)
    found = json.loads(unescape(re.search(r'<pre id="check">(.*?)</pre>', dom)[1]))
    assert console == [] and found["width"] == width and found["wider"] <= 0
    assert found["images"] == [True] * 5 and found["loaded"] == [] and found["tables"] and all(found["tables"])
    assert found["color"] == ("rgb(255, 255, 255)" if dark else "rgb(0, 0, 0)")
