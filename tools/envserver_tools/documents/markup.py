"""Converts zipped markup to text: Word documents, books (epub), OpenDocument texts and slides."""

from __future__ import annotations

import io
import posixpath
import re
from collections.abc import Iterator
from typing import Final
from urllib.parse import unquote
from xml.etree import ElementTree

from . import archives
from .bounded import Limits
from .html import html_to_text
from .office import joined, table_row

_TEXT = "{urn:oasis:names:tc:opendocument:xmlns:text:1.0}"
_TABLE = "{urn:oasis:names:tc:opendocument:xmlns:table:1.0}"
_DRAW = "{urn:oasis:names:tc:opendocument:xmlns:drawing:1.0}"
_MOST_NESTING = 100
_WORD: Final = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_MARGIN: Final = re.compile(r"word/(header|footer)\d*\.xml")


def docx(data: bytes, limits: Limits) -> str:
    """Returns headers, paragraphs, lists and tables in order, notes, and footers.

    mammoth makes a page of everything between headers and footers, which it does not read.
    """
    import mammoth

    page = mammoth.convert_to_html(
        io.BytesIO(data), convert_image=mammoth.images.img_element(lambda image: {"src": ""})
    )
    margins: dict[str, list[str]] = {"header": [], "footer": []}
    for name in sorted(archives.names(data)):
        if match := _MARGIN.fullmatch(name):
            margins[match[1]] += _margin(_parsed(data, name, limits), match[1])
    parts = (*margins["header"], html_to_text(page.value)[1], *margins["footer"])
    return joined(parts, limits.characters)


def _margin(part: ElementTree.Element, where: str) -> Iterator[str]:
    for paragraph in part.iter(f"{_WORD}p"):
        text = "".join(piece.text or "" for piece in paragraph.iter(f"{_WORD}t")).strip()
        if text:
            yield f"({where}) {text}"


def epub(data: bytes, limits: Limits) -> tuple[str, str]:
    """Returns a book's title and its chapters in order."""
    names = archives.names(data)
    container = _parsed(data, "META-INF/container.xml", limits)
    package = next((e.get("full-path") for e in container.iter() if _name(e) == "rootfile"), None)
    if not package:
        raise archives.BadArchive("it has no contents.")
    book = _parsed(data, package, limits)
    title = next((e.text or "" for e in book.iter() if _name(e) == "title"), "")
    items = {e.get("id"): e.get("href") or "" for e in book.iter() if _name(e) == "item"}
    order = [items.get(e.get("idref"), "") for e in book.iter() if _name(e) == "itemref"]
    folder = posixpath.dirname(package)
    paths = [posixpath.normpath(posixpath.join(folder, unquote(href))) for href in order if href]
    chapters = (archives.member(data, path, limits) for path in paths if path in names)
    texts = (html_to_text(chapter.decode(errors="replace"))[1] + "\n" for chapter in chapters)
    return title.strip(), joined(texts, limits.characters)


def opendocument(data: bytes, limits: Limits) -> str:
    """Returns headings, paragraphs and tables in order; slides are numbered."""
    return joined(_blocks(_parsed(data, "content.xml", limits), [0], 0), limits.characters)


def _blocks(parent: ElementTree.Element, slides: list[int], level: int) -> Iterator[str]:
    if level > _MOST_NESTING:
        return
    for part in parent:
        if part.tag == f"{_TEXT}h":
            yield f"{'#' * min(6, int(part.get(f'{_TEXT}outline-level') or 1))} {_said(part)}"
        elif part.tag == f"{_TEXT}p":
            text = _said(part)
            if text.strip():
                yield text
        elif part.tag == f"{_TABLE}table-row":
            cells = [cell for cell in part if cell.tag == f"{_TABLE}table-cell"]
            yield table_row("\n".join(_blocks(cell, slides, level + 1)) for cell in cells)
        else:
            if part.tag == f"{_DRAW}page":
                slides[0] += 1
                yield f"\n## Slide {slides[0]}"
            yield from _blocks(part, slides, level + 1)


def _said(part: ElementTree.Element) -> str:
    for mark in part.iter(f"{_TEXT}tab"):
        mark.text = "\t"
    for mark in part.iter(f"{_TEXT}s"):
        mark.text = " " * min(100, int(mark.get(f"{_TEXT}c") or 1))
    for mark in part.iter(f"{_TEXT}line-break"):
        mark.text = "\n"
    return "".join(part.itertext())


def _parsed(data: bytes, name: str, limits: Limits) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(archives.member(data, name, limits))
    except ElementTree.ParseError as error:
        raise archives.BadArchive(f"{name!r} in it is not XML: {error}.") from error


def _name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]
