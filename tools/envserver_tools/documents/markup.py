"""Converts zipped markup to text: Word documents, books (epub), OpenDocument texts and slides."""

from __future__ import annotations

import io
import posixpath
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import unquote
from xml.etree import ElementTree

from . import bounded
from .bounded import Limits
from .html import html_to_text, marked
from .office import address, bare, described, joined, sheets, table_row

_MOST_NESTING = 100
_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_MATH = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"
_OTHERS = re.compile(r"word/(charts/chart|diagrams/data|embeddings/)")
_BACK = re.compile(r'<a href="#(?:comment|footnote|endnote)-ref-[^"]*">↑</a>')
"""mammoth's links from notes to where they belong."""
_MARGIN = re.compile(r"word/(header|footer)\d*\.xml")


def docx(data: bytes, limits: Limits) -> str:
    """Headers, paragraphs, lists and tables in order, notes, comments, and footers; then what is
    not shown.

    mammoth makes a page of everything between headers and footers, which it does not read.
    """
    import mammoth

    page = mammoth.convert_to_html(
        io.BytesIO(data),
        convert_image=mammoth.images.img_element(
            lambda image: {"src": "", "alt": image.alt_text or "a picture"}
        ),
        style_map="comment-reference => span",
    )
    margins: dict[str, list[str]] = {"header": [], "footer": []}
    for name in sorted(bounded.names(data)):
        if match := _MARGIN.fullmatch(name):
            margins[match[1]] += _margin(_parsed(data, name, limits), match[1])
    text = html_to_text(_BACK.sub("", page.value))[1]
    parts = (*margins["header"], text, *margins["footer"], *_unseen(data, limits))
    return joined(parts, limits.characters)


def _unseen(data: bytes, limits: Limits) -> Iterator[str]:
    body = _parsed(data, "word/document.xml", limits)
    count = Counter(part.tag for part in body.iter())
    put_in, taken_out = count[f"{_WORD}ins"], count[f"{_WORD}del"]
    if put_in or taken_out:
        yield _changes(put_in, taken_out)
    for run in body.iter(f"{_WORD}r"):
        for name, what in (("dstrike", "struck"), ("vanish", "hidden")):
            mark = run.find(f"{_WORD}rPr/{_WORD}{name}")
            if mark is not None and mark.get(f"{_WORD}val") not in ("0", "false"):
                yield f"({what}: {''.join(run.itertext())})"
    for formula in body.iter(f"{_MATH}oMath"):
        yield f"(a formula, not shown in its place: {''.join(formula.itertext())})"
    named = filter(None, map(_OTHERS.match, bounded.names(data)))
    others = Counter(name[1].partition("/")[0] for name in named)
    if others:
        shown = ", ".join(f"{number} of {kind}" for kind, number in sorted(others.items()))
        yield f"(not shown: {shown})"


def _changes(put_in: int, taken_out: int) -> str:
    return f"(tracked changes: {put_in} insertions, shown; {taken_out} deletions, not shown)"


def _margin(part: ElementTree.Element, where: str) -> Iterator[str]:
    for paragraph in part.iter(f"{_WORD}p"):
        text = "".join(piece.text or "" for piece in paragraph.iter(f"{_WORD}t")).strip()
        if text:
            yield f"({where}) {text}"


def epub(data: bytes, limits: Limits) -> tuple[str, str]:
    """A book's title and its chapters in order."""
    names = bounded.names(data)
    container = _parsed(data, "META-INF/container.xml", limits)
    package = next((e.get("full-path") for e in container.iterfind(".//{*}rootfile")), None)
    if not package:
        raise bounded.BadArchive("it has no contents.")
    book = _parsed(data, package, limits)
    title = next((e.text or "" for e in book.iterfind(".//{*}title")), "")
    items = {e.get("id"): e.get("href") or "" for e in book.iterfind(".//{*}item")}
    order = [items.get(e.get("idref"), "") for e in book.iterfind(".//{*}itemref")]
    folder = posixpath.dirname(package)
    paths = [posixpath.normpath(posixpath.join(folder, unquote(href))) for href in order if href]
    chapters = (bounded.member(data, path, limits) for path in paths if path in names)
    texts = (html_to_text(chapter.decode(errors="replace"))[1] + "\n" for chapter in chapters)
    return title.strip(), joined(texts, limits.characters)


@dataclass
class _Open:
    """An OpenDocument file that is read: the marks of its styles, the slides so far."""

    marks: dict[str, str] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=set)
    slides: int = 0


def opendocument(data: bytes, limits: Limits) -> str:
    """Headings, paragraphs, tables, notes and comments in order; slides are numbered."""
    content, reading = _parsed(data, "content.xml", limits), _Open()
    others = ["styles.xml"] if "styles.xml" in bounded.names(data) else []
    for root in (content, *(_parsed(data, name, limits) for name in others)):
        for style in root.iterfind(".//{*}style"):
            facts = {name: value for part in style for name, value in _facts(part).items()}
            name, position = _facts(style).get("name", ""), facts.get("text-position", "")
            if facts.get("text-line-through-style", "none") != "none":
                reading.marks[name] = "~~"
            elif position and not position.startswith("0%"):
                reading.marks[name] = "_" if position.startswith(("sub", "-")) else "^"
            if facts.get("visibility") == "hidden":
                reading.hidden.add(name)
    return joined(_blocks(content, reading, 0), limits.characters)


def _blocks(parent: ElementTree.Element, reading: _Open, level: int) -> Iterator[str]:
    if level > _MOST_NESTING:
        return
    for part in parent:
        facts = _facts(part)
        match bare(part.tag):
            case "h":
                marks = "#" * min(6, int(facts.get("outline-level") or 1))
                yield f"{marks} {_said(part, reading.marks)}"
            case "p":
                if (text := _said(part, reading.marks)).strip():
                    yield text
            case "table-row":
                cells = part.findall("{*}table-cell")
                yield table_row("\n".join(_blocks(cell, reading, level + 1)) for cell in cells)
            case "tracked-changes":
                count = Counter(bare(change.tag) for change in part.iter())
                yield _changes(count["insertion"], count["deletion"])
            case "frame" if picture := _picture(part):
                yield picture
            case "notes":
                yield f"Notes: {' '.join(_blocks(part, reading, level + 1))}"
            case name:
                if name == "page":
                    reading.slides += 1
                    is_hidden = facts.get("style-name") in reading.hidden
                    yield f"\n## Slide {reading.slides}{' (hidden)' if is_hidden else ''}"
                yield from _blocks(part, reading, level + 1)


def _picture(frame: ElementTree.Element) -> str:
    if next(frame.iterfind(".//{*}p"), None) is not None:
        return ""
    words = [part.text or "" for part in frame if bare(part.tag) in ("title", "desc")]
    return f"(a picture: {described(_facts(frame).get('name'), ' '.join(words))})"


def _said(part: ElementTree.Element, marks: dict[str, str]) -> str:
    texts = [part.text or ""]
    for inner in part:
        facts = _facts(inner)
        match bare(inner.tag):
            case "tab":
                text = "\t"
            case "s":
                text = " " * min(100, int(facts.get("c") or 1))
            case "line-break":
                text = "\n"
            case "note" | "annotation" as kind:
                body = " ".join(_said(paragraph, marks) for paragraph in inner.iterfind(".//{*}p"))
                text = f"[{'comment' if kind == 'annotation' else kind}: {body}]"
            case "span":
                text = marked(_said(inner, marks), marks.get(facts.get("style-name", ""), ""))
            case "a":
                text = f"[{_said(inner, marks)}]({facts.get('href')})"
            case "frame":
                text = _picture(inner) or _said(inner, marks)
            case _:
                text = _said(inner, marks)
        texts += text, inner.tail or ""
    return "".join(texts)


def ods(data: bytes, limits: Limits) -> str:
    """Every sheet as a table, then merged cells, comments and links."""
    return "\n".join((sheets(data, limits), *_beside_cells(data, limits)))


def _beside_cells(data: bytes, limits: Limits) -> Iterator[str]:
    for table in _parsed(data, "content.xml", limits).iterfind(".//{*}table"):
        sheet, row_number = _facts(table).get("name"), 1
        for row in table.iterfind(".//{*}table-row"):
            column = 1
            for cell in row:
                across, down = (_count(cell, f"{n}-spanned") for n in ("columns", "rows"))
                place = address(row_number, column)
                if across * down > 1:
                    end = address(row_number + down - 1, column + across - 1)
                    yield f"Merged cells of {sheet!r}: {place}:{end}"
                for note in cell.iterfind(".//{*}annotation"):
                    text = " ".join(_said(paragraph, {}) for paragraph in note.iterfind(".//{*}p"))
                    yield f"Comment at {place} of {sheet!r}: {text}"
                for link in cell.iterfind(".//{*}a"):
                    yield f"Link at {place} of {sheet!r}: {_facts(link).get('href')}"
                column += _count(cell, "columns-repeated")
            row_number += _count(row, "rows-repeated")


def _count(part: ElementTree.Element, name: str) -> int:
    return int(_facts(part).get(f"number-{name}") or 1)


def _parsed(data: bytes, name: str, limits: Limits) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(bounded.member(data, name, limits))
    except ElementTree.ParseError as error:
        raise bounded.BadArchive(f"{name!r} in it is not XML: {error}.") from error


def _facts(element: ElementTree.Element) -> dict[str, str]:
    return {bare(name): value for name, value in element.items()}
