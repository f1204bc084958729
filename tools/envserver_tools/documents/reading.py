"""Chooses the reader for a file, and turns its failures into errors for the model.

The first bytes decide the kind, then the name; a file that is neither known nor text is described
in one line. A member of a zip archive is named `outer.zip!inner/name.csv`.
"""

from __future__ import annotations

import codecs
import importlib
import io
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from envserver_records.extras import install_command

from ..calling import Tool, ToolError, described, integer, toolbox
from . import bounded as archives
from . import html, markup, office
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
_READERS: dict[str, Callable[[bytes, Limits], str]] = {
    "xlsx": office.xlsx,
    "docx": markup.docx,
    "pptx": office.pptx,
    "pdf": office.pdf,
    "zip": archives.listing,
    "xls": office.sheets,
    "xlsb": office.sheets,
    "ods": markup.ods,
    "odt": markup.opendocument,
    "odp": markup.opendocument,
    "eml": lambda data, _: html.eml(data),
    "msg": lambda data, _: html.msg(data),
}
_DESCRIBED = {"doc": "An old Word document. ", "ppt": "An old PowerPoint file. ", "binary": ""}
"""Kinds that are not read, and what is said of them."""
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
    """The message is shown to the model."""


@dataclass(frozen=True)
class Text:
    """A document's text, up to the limit.

    `kind`: "xlsx", "text", "zip" ... `notes`: remarks for the reader, such as what was left out.
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

    Raises DocumentError: the document cannot be read, or exceeds the limits.
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
    """Reads a document in this process, with limits on sizes only; library errors propagate."""
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
    except (archives.BadArchive, BadImage) as error:
        raise DocumentError(f"{name}: {error}") from error
    except ImportError as error:
        raise DocumentError(
            f"{name}: reading {kind} needs a library that is not installed here ({error.name}); "
            f"{install_command('gaia')} brings it."
        ) from error


def kind_of(data: bytes, name: str) -> str:
    """A reader's name, "text" or "binary"."""
    if data.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        names = archives.names(data)
        kind = next((kind for inner, kind in _OFFICE.items() if inner in names), "zip")
        return _open_kind(data) if {"mimetype", "content.xml"} <= names else kind
    if data.startswith(_OLE):
        return _old_kind(data)
    if data[:1024].lstrip().startswith(b"%PDF-"):
        return "pdf"
    picture_or_sound = image_kind(data) or sound_kind(data)
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
    try:
        said = archives.member(data, "mimetype", Limits()).decode("latin-1")
    except archives.BadArchive:
        return "zip"
    return _OPEN.get(said.strip().rpartition(".")[2].removesuffix("-template"), "zip")


def _old_kind(data: bytes) -> str:
    return next(
        (kind for name, kind in _IN_OLE.items() if f"{name}\0".encode("utf-16-le") in data),
        "binary",
    )


def _read(data: bytes, kind: str, base_url: str, limits: Limits) -> Text:
    if kind in (*_OFFICE.values(), *_OPEN.values()):
        archives.check(data, limits)
    if kind == "html":
        title, text = html_to_text(decoded(data), base_url)
        return Text(kind, text, title=title)
    if kind == "epub":
        title, text = markup.epub(data, limits)
        return Text(kind, text, title=title)
    if kind in _READERS:
        return Text(kind, _READERS[kind](data, limits))
    if kind in _DESCRIBED:
        head = data[:32].hex(" ")
        size = f"A binary file of {len(data):,} bytes that begins with {head}."
        return Text(kind, _DESCRIBED[kind] + size)
    if kind in IMAGES:
        return Text(kind, image_facts(data))
    if kind in SOUNDS and _encoding(data) is None:
        return Text(kind, sound_facts(data, kind))
    return Text(kind, decoded(data))


def decoded(data: bytes) -> str:
    r"""By its byte order mark, as UTF-8, or byte by byte; line ends become "\n"."""
    text = data.decode(_encoding(data) or "latin-1", errors="replace")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _encoding(data: bytes) -> str | None:
    """None if `data` is not text."""
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


PAGE_CHARACTERS = 10_000
MOST_PAGE_CHARACTERS = 40_000
_AROUND = 200
_MOST_FOUND = 20
_MOST_KEPT = 8
"""Number of documents whose text is cached for their next pages."""


class DocumentReader:
    """Reads documents below `folder` only. Methods raise ToolError."""

    def __init__(self, folder: Path | str, limits: Limits | None = None) -> None:
        self._folder = Path(folder)
        self._limits = limits or Limits()
        self._kept: dict[tuple[object, ...], Text] = {}

    def read(
        self, path: str, member: str = "", offset: int = 0, limit: int = PAGE_CHARACTERS
    ) -> str:
        return page_of(self.text(path, member), self._name(path, member), offset, limit)

    def find(self, path: str, text: str, member: str = "") -> str:
        return found_in(self.text(path, member), self._name(path, member), text)

    def text(self, path: str, member: str = "") -> Text:
        if MEMBER_MARK in path and not member:
            path, _, member = path.partition(MEMBER_MARK)
        file = self._file(path)
        facts = file.stat()
        key = (str(file), member, facts.st_mtime_ns, facts.st_size)
        if key not in self._kept:
            if facts.st_size > self._limits.input_bytes:
                raise ToolError(f"{path} has {facts.st_size:,} bytes: that is too large to read.")
            try:
                data = file.read_bytes()
            except OSError as error:
                raise ToolError(f"{path} cannot be read: {error.strerror}.") from error
            text = to_text(data, file.name, member=member, limits=self._limits)
            while len(self._kept) >= _MOST_KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = text
        return self._kept[key]

    def _file(self, path: str) -> Path:
        try:
            root = self._folder.resolve()
            file = (root / path).resolve()
            inside = file.is_relative_to(root)
            is_file = inside and file.is_file()
        except (OSError, ValueError, RuntimeError) as error:
            raise ToolError(f"{path[:200]!r} is not a path: {error}.") from error
        if not inside:
            raise ToolError(f"{path[:200]!r} is outside the working folder.")
        if not is_file:
            raise ToolError(f"There is no file {path[:200]!r} here.")
        return file

    def _name(self, path: str, member: str) -> str:
        return f"{path}{MEMBER_MARK}{member}" if member else path


def page_of(text: Text, name: str, offset: int = 0, limit: int = PAGE_CHARACTERS) -> str:
    """The page of `text` that starts at `offset`, below a header line."""
    size = len(text.text)
    if offset and offset >= size:
        raise ToolError(f"{name} ends at character {size:,}; offset {offset:,} is behind that.")
    end = min(size, offset + limit)
    where = "all of it" if (offset, end) == (0, size) else f"{offset:,} to {end:,}"
    facts = [f"{text.kind}, {size:,} characters; shown: {where}", *text.notes]
    if end < size:
        facts.append(f"go on with offset={end}")
    title = f" {text.title!r}" if text.title else ""
    return f"[{name}{title}: {'; '.join(facts)}]\n{text.text[offset:end]}"


def found_in(text: Text, name: str, wanted: str) -> str:
    """The matches of `wanted` in `text`, ignoring case, each with its context."""
    if not wanted.strip():
        raise ToolError("There is nothing to look for.")
    haystack, needle = _folded(text.text), _folded(wanted)
    lines: list[str] = []
    count, at, shown_to = 0, haystack.find(needle), -1
    while at >= 0:
        count += 1
        if len(lines) < _MOST_FOUND and at >= shown_to:
            start, shown_to = max(0, at - _AROUND), at + len(needle) + _AROUND
            excerpt = " ".join(text.text[start:shown_to].split())
            lines.append(f"at {at}: ...{excerpt}...")
        at = haystack.find(needle, at + len(needle))
    if not count:
        return f"[{name}: {wanted[:200]!r} does not occur in its {len(text.text):,} characters]"
    head = f"[{name}: {count} times; offsets into its text]"
    return "\n".join([head, *lines])


def _folded(text: str) -> str:
    small = text.lower()
    if len(small) == len(text):
        return small
    return "".join(low if len(low := letter.lower()) == 1 else letter for letter in text)


def document_tools(folder: Path | str, limits: Limits | None = None) -> dict[str, Tool]:
    """Returns `read_document` and `find_in_document` for the files below `folder`."""
    reader = DocumentReader(folder, limits)
    return toolbox(
        Tool(_READ, reader.read, MOST_PAGE_CHARACTERS + 2000),
        Tool(_FIND, reader.find, MOST_PAGE_CHARACTERS),
    )


_PATH = {"type": "string", "description": "The file, relative to the working folder."}
_MEMBER = {
    "type": "string",
    "description": "For a zip archive: the member to read, as its listing names it; "
    f"for an archive in an archive: inner.zip{MEMBER_MARK}name.",
}
_READ = described(
    "read_document",
    "The text of a file: spreadsheets (with formulas and fill colours), PDF, "
    "text documents, slides, mail, books, CSV, JSON, HTML, code, any other text; the members "
    "of a zip archive; the size of an image and what is noted in it; the length of a sound. "
    "Long texts come in pages.",
    {
        "path": _PATH,
        "member": _MEMBER,
        "offset": integer("The first character of the page; default 0.", minimum=0),
        "limit": integer(
            f"Characters of the page; default {PAGE_CHARACTERS}.", maximum=MOST_PAGE_CHARACTERS
        ),
    },
    ["path"],
)
_FIND = described(
    "find_in_document",
    "Where words stand in a file that read_document can read.",
    {
        "path": _PATH,
        "text": {"type": "string", "description": "The words to look for."},
        "member": _MEMBER,
    },
    ["path", "text"],
)


# Images, audio and video as text: format, size or length, embedded metadata.

_IMAGE_MARKS = {
    b"\x89PNG\r\n\x1a\n": "png",
    b"\xff\xd8\xff": "jpeg",
    b"GIF87a": "gif",
    b"GIF89a": "gif",
    b"II*\0": "tiff",
    b"MM\0*": "tiff",
}
IMAGES = (*dict.fromkeys(_IMAGE_MARKS.values()), "bmp", "webp")
_MOST_CHARACTERS = 4000
_MOST_TEXTS = 20
_MOST_FACTS = 60
_MOST_VALUE = 200
_MOST_PIXELS = 50_000_000
"""Largest PNG whose pixels are read to find the words that stand behind them."""


class BadImage(Exception):
    """The file starts like an image but is not a valid one."""


def image_kind(data: bytes) -> str:
    """One of IMAGES, or "" for other data."""
    if data.startswith(b"BM") and len(data) > 26 and data[6:10] == b"\0\0\0\0":
        return "bmp"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "webp"
    return next((kind for mark, kind in _IMAGE_MARKS.items() if data.startswith(mark)), "")


def image_facts(data: bytes) -> str:
    """Lines that describe the image. Raises BadImage: it cannot be read."""
    from PIL import Image

    kind = image_kind(data)
    Image.MAX_IMAGE_PIXELS = None  # its pixels are not shown: size is no danger here
    try:
        with Image.open(io.BytesIO(data), formats=[kind]) as image:
            lines = [
                f"A {kind.upper()} image, {image.width} x {image.height} pixels (width x height), "
                f"mode {image.mode}.",
                *_texts(image),
                *_taken(image),
            ]
    except Exception as error:  # Pillow has many: its parsers raise what they meet
        raise BadImage(f"it begins like a {kind} image, but cannot be read: {error}.") from error
    lines.append(f"{len(data):,} bytes. What it shows is not in this text.")
    return "\n".join(lines)


def _texts(image: Any) -> list[str]:
    if image.format == "PNG" and image.width * image.height <= _MOST_PIXELS:
        # What stands behind the pixels is found by reading them; a picture that was cut off keeps
        # the words before them.
        with suppress(OSError, SyntaxError, ValueError):
            image.load()
    texts = dict(image.info)
    comment = texts.get("comment")
    if isinstance(comment, bytes):
        texts["comment"] = comment.decode("utf-8", errors="replace")
    lines = [
        f"{str(name)[:80]}: {text[:_MOST_CHARACTERS]}"
        for name, text in texts.items()
        if isinstance(text, str)
    ]
    return lines[:_MOST_TEXTS]


def _taken(image: Any) -> list[str]:
    try:
        return list(_exif(image))[:_MOST_FACTS]
    except Exception:  # noqa: BLE001 - the other facts of a strange file are shown all the same
        return []


def _exif(image: Any) -> Iterator[str]:
    from PIL import ExifTags

    exif = image.getexif()
    fields: dict[str, object] = {}
    for names, facts in (
        (ExifTags.TAGS, exif),
        (ExifTags.TAGS, exif.get_ifd(ExifTags.IFD.Exif)),
        (ExifTags.GPSTAGS, exif.get_ifd(ExifTags.IFD.GPSInfo)),
    ):
        fields |= {names.get(key, str(key)): value for key, value in facts.items()}
    for name, value in fields.items():
        if isinstance(value, str | int | float | tuple) or hasattr(value, "numerator"):
            yield f"{name}: {str(value)[:_MOST_VALUE]}"


_WORDS = (
    *("title", "artist", "album", "albumartist", "composer", "genre", "year", "track", "disc"),
    "comment",
)
_MOST_WORDS = 1000
_MOST_EXTRA = 30


def sound_kind(data: bytes) -> str:
    """ "mp3", "wav", "flac", "ogg", "aiff", "mp4" (also video and m4a), "wma" or ""."""
    marks = {b"ID3": "mp3", b"fLaC": "flac", b"OggS": "ogg", b"\x30\x26\xb2\x75\x8e\x66": "wma"}
    found = next((kind for mark, kind in marks.items() if data.startswith(mark)), "")
    if found:
        return found
    if data[:2] in (b"\xff\xfb", b"\xff\xfa", b"\xff\xf3", b"\xff\xf2", b"\xff\xe3"):
        return "mp3"
    inner = {b"RIFFWAVE": "wav", b"FORMAIFF": "aiff", b"FORMAIFC": "aiff"}
    return inner.get(data[:4] + data[8:12], "mp4" if data[4:8] == b"ftyp" else "")


SOUNDS = ("mp3", "wav", "flac", "ogg", "aiff", "mp4", "wma")


def sound_facts(data: bytes, kind: str) -> str:
    """Lines that describe the file; the library's exceptions propagate."""
    from tinytag import TinyTag

    tag = TinyTag.get(file_obj=io.BytesIO(data))
    parts = [f"A {kind} file (sound or film) of {len(data):,} bytes"]
    if tag.duration:
        parts.append(f"{_clock(tag.duration)} long ({tag.duration:.2f} seconds)")
    for value, unit in ((tag.samplerate, "Hz"), (tag.bitdepth, "bits"), (tag.channels, "channels")):
        if value:
            parts.append(f"{value:,} {unit}")
    if tag.bitrate:
        parts.append(f"{tag.bitrate:.0f} kbit/s")
    facts = {name: getattr(tag, name, None) for name in _WORDS}
    facts |= dict(list(tag.other.items())[:_MOST_EXTRA])
    lines = [f"{name}: {_value(value)}" for name, value in facts.items() if value]
    return "\n".join([", ".join(parts) + ".", *lines, "What is heard in it is not in this text."])


def _value(value: object) -> str:
    words = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return words if len(words) <= _MOST_WORDS else f"{words[:_MOST_WORDS]} ..."


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
