"""Chooses the reader for a file, and turns its failures into errors for the model.

The first bytes decide the kind, then the name; a file that is neither known nor text is described
in one line. A member of a zip archive is named `outer.zip!inner/name.csv`.
"""

from __future__ import annotations

import codecs
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from ..calling import ToolError
from . import archives, images, mail, markup, media, office, sheets
from .bounded import Limits, PassedLimits, bounded
from .html import html_to_text

MEMBER_MARK = "!"
MOST_NESTING = 3
"""Maximum nesting depth of archives."""

_LIBRARIES = ("openpyxl", "mammoth", "pptx", "pypdf", "PIL.Image")
_OFFICE = {
    "xl/workbook.xml": "xlsx",
    "word/document.xml": "docx",
    "ppt/presentation.xml": "pptx",
    "xl/workbook.bin": "xlsb",
    "META-INF/container.xml": "epub",
}
_NO_TEXTS = frozenset(
    (*_OFFICE.values(), *("pdf", "zip", "xls", "ods", "odt", "odp", "msg", "doc", "ppt", "binary"))
)
"""Kinds that a text file never is, whatever its name."""
_OPEN = {"spreadsheet": "ods", "text": "odt", "presentation": "odp"}
_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_IN_OLE = {
    "__properties_version1.0": "msg",
    "Workbook": "xls",
    "Book": "xls",
    "WordDocument": "doc",
    "PowerPoint Document": "ppt",
}
"""Stream names that identify the kind of older office files."""
_TEXT_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


class DocumentError(ToolError):
    """The document cannot be read; the message is shown to the model."""


@dataclass(frozen=True)
class Text:
    """A document's text.

    Args:
        kind: "xlsx", "text", "zip" ...
        text: the whole text, up to the limit.
        notes: remarks for the reader, such as what was left out.
        title: the document's title, if it has one.
    """

    kind: str
    text: str
    notes: list[str] = field(default_factory=list)
    title: str = ""


def preload() -> None:
    """Imports the installed libraries once, so that reading processes need not."""
    for name in _LIBRARIES:
        try:
            importlib.import_module(name)
        except ImportError:
            continue


def to_text(
    data: bytes,
    name: str,
    *,
    member: str = "",
    kind: str = "",
    base_url: str = "",
    limits: Limits | None = None,
) -> Text:
    """Reads a document in a process with limits.

    Args:
        name: the file's name; its suffix counts if the first bytes are ambiguous.
        member: member of a zip archive to read; nested archives end with MEMBER_MARK.
        kind: the kind, if the caller knows it ("html").
        base_url: a page's address, for its relative links.

    Raises:
        DocumentError: the document cannot be read, or exceeds the limits.
    """
    limits = limits or Limits()
    if len(data) > limits.input_bytes:
        raise DocumentError(f"{name} has {len(data):,} bytes; the most is {limits.input_bytes:,}.")

    def work() -> list[object]:
        text = read_bytes(data, name, member=member, kind=kind, base_url=base_url, limits=limits)
        notes = list(text.notes)
        if len(text.text) > limits.characters:
            notes.append(f"only the first {limits.characters:,} characters of it were read")
        shown = text.text[: limits.characters].encode(errors="replace").decode()
        return [text.kind, shown, notes, text.title[:500]]

    try:
        outcome = bounded(work, limits)
    except PassedLimits as error:
        raise DocumentError(f"{name} cannot be read: {error}.") from error
    if "error" in outcome:
        kind_of_error, message = outcome["error"]
        if kind_of_error == DocumentError.__name__:
            raise DocumentError(message)
        raise DocumentError(f"{name} cannot be read: {kind_of_error}: {message}")
    return Text(*outcome["value"])


def read_bytes(
    data: bytes,
    name: str,
    *,
    member: str = "",
    kind: str = "",
    base_url: str = "",
    limits: Limits | None = None,
) -> Text:
    """Reads a document in this process, with limits on sizes only; library errors propagate.

    Raises:
        DocumentError: the document cannot be read.
    """
    limits = limits or Limits()
    steps = [step for step in member.split(MEMBER_MARK) if step] if member else []
    if len(steps) > MOST_NESTING:
        raise DocumentError(f"Archives are opened {MOST_NESTING} deep at most.")
    for step in steps:
        try:
            data = archives.member(data, step, limits)
        except archives.BadArchive as error:
            raise DocumentError(f"{name}: {error}") from error
        name, kind = f"{name}{MEMBER_MARK}{step}", ""
    kind = kind or kind_of(data, name)
    try:
        return _read(data, kind, base_url, limits)
    except (archives.BadArchive, images.BadImage) as error:
        raise DocumentError(f"{name}: {error}") from error
    except ImportError as error:
        raise DocumentError(
            f"{name}: reading {kind} needs a library that is not installed here ({error.name}); "
            "pip install 'envserver[gaia]' brings it."
        ) from error


def kind_of(data: bytes, name: str) -> str:
    """Returns the kind of a file: a reader's name, "text" or "binary"."""
    if data.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        names = archives.names(data)
        kind = next((kind for inner, kind in _OFFICE.items() if inner in names), "zip")
        return _open_kind(data) if {"mimetype", "content.xml"} <= names else kind
    if data.startswith(_OLE):
        return _old_kind(data)
    if data[:1024].lstrip().startswith(b"%PDF-"):
        return "pdf"
    picture_or_sound = images.kind_of(data) or media.kind_of(data)
    if picture_or_sound:
        return picture_or_sound
    if _encoding(data) is None:
        return "binary"
    ending = PurePosixPath(name.lower()).suffix
    if ending in (".html", ".htm", ".xhtml"):
        return "html"
    is_of_texts = ending[1:].isalnum() and len(ending) <= 8 and ending[1:] not in _NO_TEXTS
    return ending[1:] if is_of_texts else "text"


def _open_kind(data: bytes) -> str:
    """Returns the kind of an OpenDocument file; "zip" for other archives."""
    try:
        said = archives.member(data, "mimetype", Limits()).decode("latin-1")
    except archives.BadArchive:
        return "zip"
    return _OPEN.get(said.strip().rpartition(".")[2].removesuffix("-template"), "zip")


def _old_kind(data: bytes) -> str:
    """Returns the kind of an older, unzipped office file."""
    return next(
        (kind for name, kind in _IN_OLE.items() if f"{name}\0".encode("utf-16-le") in data),
        "binary",
    )


def _read(data: bytes, kind: str, base_url: str, limits: Limits) -> Text:
    readers: dict[str, Callable[[], Text]] = {
        "xlsx": lambda: _office(office.xlsx, data, "xlsx", limits),
        "docx": lambda: _word(data, limits),
        "pptx": lambda: _office(office.pptx, data, "pptx", limits),
        "pdf": lambda: Text("pdf", office.pdf(data, limits.characters)),
        "zip": lambda: Text("zip", archives.listing(data, limits)),
        "html": lambda: _html(data, base_url),
        "xls": lambda: Text("xls", sheets.sheets(data, limits.characters)),
        "xlsb": lambda: _office(sheets.sheets, data, "xlsb", limits),
        "ods": lambda: _open_sheets(data, limits),
        "odt": lambda: Text("odt", markup.opendocument(data, limits)),
        "odp": lambda: Text("odp", markup.opendocument(data, limits)),
        "epub": lambda: _book(data, limits),
        "eml": lambda: Text("eml", mail.eml(data)),
        "msg": lambda: Text("msg", mail.msg(data)),
        "doc": lambda: Text("doc", f"An old Word document. {_described(data)}"),
        "ppt": lambda: Text("ppt", f"An old PowerPoint file. {_described(data)}"),
        "binary": lambda: Text("binary", _described(data)),
    }
    if kind in readers:
        return readers[kind]()
    if kind in images.KINDS:
        return Text(kind, images.facts(data))
    if kind in media.KINDS and _encoding(data) is None:
        return Text(kind, media.facts(data, kind))
    return Text(kind, decoded(data))


def _office(reader: Callable[[bytes, int], str], data: bytes, kind: str, limits: Limits) -> Text:
    archives.check(data, limits)
    return Text(kind, reader(data, limits.characters))


def _open_sheets(data: bytes, limits: Limits) -> Text:
    tables = _office(sheets.sheets, data, "ods", limits).text
    return Text("ods", "\n".join((tables, *markup.beside_cells(data, limits))))


def _word(data: bytes, limits: Limits) -> Text:
    archives.check(data, limits)
    return Text("docx", markup.docx(data, limits))


def _book(data: bytes, limits: Limits) -> Text:
    archives.check(data, limits)
    title, text = markup.epub(data, limits)
    return Text("epub", text, title=title)


def _html(data: bytes, base_url: str) -> Text:
    title, text = html_to_text(decoded(data), base_url)
    return Text("html", text, title=title)


def decoded(data: bytes) -> str:
    """Decodes text by its byte order mark, as UTF-8, or byte by byte; line ends become "\\n"."""
    text = data.decode(_encoding(data) or "latin-1", errors="replace")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _encoding(data: bytes) -> str | None:
    """Returns the encoding; None if `data` is not text."""
    for mark, encoding in _TEXT_MARKS:
        if data.startswith(mark):
            return encoding
    if b"\0" in data[: 1 << 16]:
        return None
    try:
        data.decode()
    except UnicodeDecodeError:
        head = data[: 1 << 16]
        controls = sum(byte < 9 or 13 < byte < 32 for byte in head)
        return "cp1252" if controls * 50 <= len(head) else None
    return "utf-8"


def _described(data: bytes) -> str:
    return f"A binary file of {len(data):,} bytes that begins with {data[:32].hex(' ')}."
