"""Sections of tables, pictures and text -> one HTML file that needs nothing else: no script, no other file, no network.

The elements are built as a tree and written by its serialiser, so no name from a configuration or an error text can become markup.
Links are relative to the page, so that it can move together with what it links to.
"""

from __future__ import annotations

import base64
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree.ElementTree import Element, tostring

from perfed import figures, results, tables
from perfed.errors import require, show
from perfed.tables import STAR, Grid

SHORT = 28
"""A cell of up to so many letters is not broken into lines."""
WIDE = 720
"""From so many pixels of the page on, a picture has a row of its own."""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""What the page allows a browser to load: nothing but itself."""
STYLE = """
:root { color-scheme: light dark; --line: color-mix(in srgb, CanvasText 18%, Canvas); --soft: color-mix(in srgb, CanvasText 70%, Canvas) }
body { margin: 0 auto; padding: 1rem; max-width: 78rem; font: 1rem/1.5 system-ui, sans-serif; background: Canvas; color: CanvasText }
h1, h2, h3 { line-height: 1.25; overflow-wrap: anywhere }
h2 { margin-top: 2.5rem; padding-top: .5rem; border-top: 1px solid var(--line) }
p, li, figcaption { max-width: 60rem; overflow-wrap: anywhere }
figure { margin: 1rem 0 }
figcaption { margin-top: .4rem; font-size: .85rem; color: var(--soft) }
figcaption p { margin: .3rem 0 }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top }
th:first-child, .pairs td { text-align: left }
thead th { border-bottom: 2px solid; vertical-align: bottom }
tbody th { font-weight: normal; min-width: 12rem; max-width: 24rem; overflow-wrap: anywhere }
.pairs td { overflow-wrap: anywhere }
.short { white-space: nowrap }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem; align-items: flex-start }
img { max-width: 100%; height: auto; background: white }
img:not(.wide) { max-width: min(100%, 37.5rem) }
summary { cursor: pointer; padding: .3rem 0 }
@media (prefers-color-scheme: dark) { img { filter: brightness(.88) } }
@media (max-width: 40rem) {
  body { padding: .7rem } tbody th { min-width: 7rem; max-width: 45vw } th, td { padding: .3rem .45rem }
  .pictures { flex-direction: column; overflow-x: auto } .pictures img { min-width: 28rem }
}
@media print {
  body { max-width: none; padding: 0; font-size: 10pt } nav { display: none } .scroll { overflow: visible }
  table { font-size: 8pt } tr, img { break-inside: avoid } h2, h3 { break-after: avoid }
  details::details-content { content-visibility: visible; block-size: auto }
}
"""


@dataclass(frozen=True)
class Picture:
    """A PNG file, and what it shows in words. A picture 150 pixels wide is shown one inch wide."""

    path: Path
    alt: str


@dataclass(frozen=True)
class Links:
    """Texts and the files or folders that they lead to."""

    items: Sequence[tuple[str, Path]]


@dataclass(frozen=True)
class Folded:
    """Parts that are shown when the reader opens ``summary``, and in print."""

    summary: str
    parts: Sequence[Part]


Part = str | Grid | Picture | Links | Folded | Mapping[str, Any]
"""A paragraph of text, a table, a picture, links, folded parts, or names with their values."""


@dataclass(frozen=True)
class Section:
    """``level`` 2 stands in the table of contents; 3 is a part of the section of level 2 before it."""

    heading: str
    parts: Sequence[Part]
    level: int = 2


def write_page(path: Path | str, title: str, sections: Sequence[Section]) -> None:
    """Write one self-contained HTML file, atomically; equal contents give equal bytes. The first section has level 2.

    Raises OSError where a picture cannot be read or the page not be written.
    """
    path = Path(path)
    anchors = _anchors([section.heading for section in sections])
    body = [_e("h1", title), _contents(sections, anchors)]
    for section, anchor in zip(sections, anchors, strict=True):
        assert section.level in (2, 3), section.level
        body.append(_e(f"h{section.level}", section.heading, id=anchor))
        body += _parts(section.parts, section.heading, path.parent)
    head = _e(
        "head",
        _e("meta", charset="utf-8"),
        _e("meta", {"http-equiv": "Content-Security-Policy", "content": POLICY}),
        _e("meta", name="viewport", content="width=device-width, initial-scale=1"),
        _e("meta", name="color-scheme", content="light dark"),
        _e("link", rel="icon", href="data:,"),
        _e("title", title),
        _e("style", STYLE),
    )
    page = _e("html", head, "\n", _e("body", _e("main", *_lines(body))), lang="en")
    results.write_text(path, "<!DOCTYPE html>\n" + tostring(page, encoding="unicode", method="html") + "\n")


def _e(tag: str, *content: Element | str | Mapping[str, str], **attributes: str) -> Element:
    """An element with text and elements inside; attributes whose names are no Python names stand in a map."""
    element = Element(tag)
    last: Element | None = None
    for item in content:
        if isinstance(item, Mapping):
            attributes |= item
        elif isinstance(item, str):
            text = _clean(item)
            if last is None:
                element.text = (element.text or "") + text
            else:
                last.tail = (last.tail or "") + text
        else:
            element.append(item)
            last = item
    for name, value in attributes.items():
        element.set(name.rstrip("_"), _clean(value))
    return element


def _clean(text: str) -> str:
    """Without the control characters and halves of pairs that no HTML file may hold."""
    return re.sub(r"[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufdcf\ufdf0-\ufffd\U00010000-\U0001fffd]", "\ufffd", text)


def _lines(items: Sequence[Element]) -> list[Element | str]:
    """Each on a line of its own."""
    return ["\n", *(piece for item in items for piece in (item, "\n"))]


def _anchors(headings: Sequence[str]) -> list[str]:
    found: list[str] = []
    for heading in headings:
        name = re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-") or "section"
        count = next(i for i in range(1, len(found) + 2) if (name if i == 1 else f"{name}-{i}") not in found)
        found.append(name if count == 1 else f"{name}-{count}")
    return found


def _contents(sections: Sequence[Section], anchors: Sequence[str]) -> Element:
    """Sections of level 2, each with those of level 3 in it."""
    top = _e("ul")
    for section, anchor in zip(sections, anchors, strict=True):
        link = _e("li", _e("a", section.heading, href=f"#{anchor}"))
        if section.level == 2:
            top.append(link)
            continue
        if top[-1].find("ul") is None:
            top[-1].append(_e("ul"))
        top[-1].find("ul").append(link)
    return _e("nav", top, {"aria-label": "contents"})


def _parts(parts: Sequence[Part], heading: str, home: Path) -> list[Element]:
    """Elements of the parts; neighbouring pictures stand side by side where there is room."""
    found: list[Element] = []
    for part in parts:
        if isinstance(part, Picture):
            if not len(found) or found[-1].get("class") != "pictures":
                found.append(_e("div", class_="pictures"))
            found[-1].append(_picture(part))
        elif isinstance(part, str):
            found += [_e("p", text) for text in part.split("\n\n") if text.strip()]
        elif isinstance(part, Grid):
            found.append(_table(part, heading))
        elif isinstance(part, Links):
            found.append(_e("ul", *(_e("li", _e("a", text, href=_href(target, home))) for text, target in part.items)))
        elif isinstance(part, Folded):
            found.append(_e("details", _e("summary", part.summary), *_lines(_parts(part.parts, part.summary, home))))
        else:
            found.append(_pairs(part, heading))
    return found


def _href(target: Path, home: Path) -> str:
    """``target`` as seen from the folder ``home``; a folder ends in a slash."""
    way = Path(os.path.relpath(target.resolve(), home.resolve()))
    return quote(way.as_posix()) + ("/" if target.is_dir() else "")


def _scrolled(table: Element, heading: str) -> Element:
    """A table that is wider than the screen moves in its own frame, by keyboard too."""
    return _e("div", table, {"class": "scroll", "role": "region", "tabindex": "0", "aria-label": f"table: {heading}"})


def _table(table: Grid, heading: str) -> Element:
    head = _e("tr", *(_e("th", name, scope="col") for name in table.columns))
    rows = []
    for row in table.rows:
        names, others = row[: table.labels], row[table.labels :]
        cells = [_e("th", *_cell(cell), scope="row") for cell in names]
        cells += [_e("td", *_cell(cell), {"class": "short"} if len(cell.text) <= SHORT else {}) for cell in others]
        rows.append(_e("tr", *cells))
    whole = _e("table", _e("thead", head), "\n", _e("tbody", *_lines(rows)))
    below = [_e("p", text.replace(STAR, "")) for text in (table.caption, *table.notes) if text]
    return _e("figure", _scrolled(whole, heading), *([_e("figcaption", *below)] if below else []))


def _cell(cell: tables.Cell) -> list[Element | str]:
    return [*([_e("strong", cell.text)] if cell.bold else [cell.text]), cell.mark]


def _pairs(values: Mapping[str, Any], heading: str) -> Element:
    rows = [_e("tr", _e("th", name, scope="row"), _e("td", typed(value))) for name, value in values.items()]
    return _scrolled(_e("table", _e("tbody", *_lines(rows)), class_="pairs"), heading)


def typed(value: Any) -> str:
    """A value of a configuration in full."""
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(typed, value)) + "]"
    return show(value) if value is None or isinstance(value, bool) else str(value)


def _picture(picture: Picture) -> Element:
    data = picture.path.read_bytes()
    require(data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 24, "picture", picture.path, "a PNG file")
    width, height = (round(96 * pixels / figures.DPI) for pixels in struct.unpack(">II", data[16:24]))
    source = "data:image/png;base64," + base64.b64encode(data).decode("ascii")
    wide = {"class": "wide"} if width > WIDE else {}
    return _e("img", wide, width=str(width), height=str(height), alt=picture.alt, src=source)
