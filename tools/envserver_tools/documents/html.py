"""Converts HTML to text for a model: headings, lists, tables and links as Markdown, no scripts.

Uses only the standard library; the same page always gives the same text.
"""

from __future__ import annotations

import email.policy
import io
import re
import struct
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.message import EmailMessage
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urljoin

_SILENT = {"script", "style", "noscript", "template", "svg", "head", "iframe", "object", "select"}
_VOID = {"br", "hr", "img", "input", "meta", "link", "area", "base", "col", "embed", "source"}
_BLOCKS = {
    *("p", "div", "section", "article", "main", "header", "footer", "aside", "nav", "form"),
    *("ul", "ol", "dl", "dt", "dd", "table", "caption", "thead", "tbody", "blockquote", "figure"),
    *("figcaption", "pre", "address", "details", "summary", "fieldset", "title"),
}
_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_MARKS = {"sup": "^", "sub": "_", "del": "~~", "s": "~~", "strike": "~~"}
_SPACES = re.compile(r"[ \t\r\f\v\n\xa0]+")
_ITEM = re.compile(r" *(-|\d+\.) ")
_MOST_DEPTH = 500
_MOST_LINK = 500


def marked(text: str, mark: str) -> str:
    """Text that is raised, `10^6`, lowered, `H_2`, or struck, `~~6~~`; as it is without a mark."""
    if not mark or not text.strip() or text.startswith(mark):
        return text
    if mark == "~~":
        return f"~~{text}~~"
    return f"{mark}{text}" if re.fullmatch(r"[-+−]?\w+|\[\w+\]", text) else f"{mark}({text})"


def html_to_text(source: str, base_url: str = "") -> tuple[str, str]:
    """The title and the text of a page. `base_url`: of relative links."""
    writer = _Writer(base_url)
    writer.feed(source)
    writer.close()
    return writer.title(), writer.text()


class _Writer(HTMLParser):
    def __init__(self, base_url: str) -> None:
        super().__init__(convert_charrefs=True)
        self._base_url = base_url
        self._lines: list[str] = []
        self._line: list[str] = []
        self._title: list[str] = []
        self._in_title = False
        self._silent: list[str] = []
        self._preformatted = 0
        self._link: str | None = None
        self._lists: list[int | None] = []
        self._cells = 0
        self._marks: list[tuple[str, int]] = []

    def title(self) -> str:
        return _SPACES.sub(" ", "".join(self._title)).strip()

    def text(self) -> str:
        self._break()
        text = "\n".join(self._lines)
        return re.sub(r"\n{3,}", "\n\n", text).strip("\n")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "title":
            self._in_title = True
            return
        if tag in _SILENT:
            if len(self._silent) < _MOST_DEPTH:
                self._silent.append(tag)
            return
        if tag == "body":
            self._silent.clear()  # a head that was never closed
        if self._silent:
            return
        facts = dict(attrs)
        if tag in _HEADINGS:
            self._break(blank=True)
            self._line.append("#" * _HEADINGS[tag] + " ")
        elif tag == "li":
            self._item()
        elif tag in ("ul", "ol"):
            self._break()
            if len(self._lists) < _MOST_DEPTH:
                self._lists.append(0 if tag == "ol" else None)
        elif tag in ("tr", "table"):
            self._cells = 0
            self._break(blank=tag == "table")
        elif tag in ("td", "th"):
            self._line.append(" | " if self._cells else "| ")
            self._cells += 1
            for name, what in (("colspan", "columns"), ("rowspan", "rows")):
                if (facts.get(name) or "1").strip() != "1":
                    self._line.append(f"(over {facts[name]} {what}) ")
        elif tag in _MARKS:
            self._marks = [*self._marks[-_MOST_DEPTH:], (tag, len(self._line))]
        elif tag == "br":
            self._break()
        elif tag == "hr":
            self._break(blank=True)
            self._line.append("---")
            self._break(blank=True)
        elif tag == "img":
            words = (facts.get("alt") or "").strip()
            if words:
                self._line.append(f"[image: {words}]")
        elif tag == "a":
            self._open_link(facts.get("href"))
        elif tag in _BLOCKS:
            self._break(blank=tag in ("p", "blockquote", "pre"))
            self._preformatted += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if tag == "title":
            self._in_title = False
            return
        if tag in _SILENT:
            if tag in self._silent:
                while self._silent.pop() != tag:
                    pass
            return
        if self._silent or tag in _VOID:
            return
        if tag in _HEADINGS:
            self._break(blank=True)
        elif tag in ("tr", "table"):
            if self._cells:
                self._line.append(" |")
            self._cells = 0
            self._break(blank=tag == "table")
        elif tag in ("ul", "ol"):
            self._drop_mark()
            self._break(blank=len(self._lists) == 1)
            if self._lists:
                self._lists.pop()
        elif tag == "a":
            self._close_link()
        elif any(tag == opened for opened, _ in self._marks):
            self._mark(tag)
        elif tag in _BLOCKS:
            self._break(blank=tag in ("p", "blockquote", "pre"))
            if tag == "pre":
                self._preformatted = max(0, self._preformatted - 1)

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self._title.append(data)
        elif self._silent:
            return
        elif self._preformatted:
            first, *others = data.split("\n")
            self._line.append(first)
            for line in others:
                self._break(keep=True)
                self._line.append(line)
        else:
            text = _SPACES.sub(" ", data)
            self._line.append(text.replace("|", "\\|") if self._cells else text)

    def _mark(self, tag: str | None = None) -> None:
        """Marks the text since `tag` began; without a tag, that of all that are open."""
        while self._marks:
            opened, start = self._marks.pop()
            text = "".join(self._line[start:])
            self._line[start:] = [marked(text, _MARKS[opened])]
            if opened == tag:
                break

    def _item(self) -> None:
        self._drop_mark()
        self._break()
        indent = "  " * min(10, max(0, len(self._lists) - 1))
        mark = "- "
        if self._lists and self._lists[-1] is not None:
            self._lists[-1] += 1
            mark = f"{self._lists[-1]}. "
        self._line.append(indent + mark)

    def _drop_mark(self) -> None:
        if _ITEM.fullmatch("".join(self._line)):
            self._line.clear()

    def _open_link(self, address: str | None) -> None:
        self._close_link()
        if not address or address.startswith(("#", "javascript:", "data:")):
            return
        try:
            target = urljoin(self._base_url, address.strip())
        except ValueError:
            return
        if len(target) <= _MOST_LINK:
            self._link = target
            self._line.append("[")

    def _close_link(self) -> None:
        if self._link is None:
            return
        if self._line and self._line[-1] == "[":
            self._line.pop()
        else:
            self._line.append(f"]({self._link})")
        self._link = None

    def _break(self, *, blank: bool = False, keep: bool = False) -> None:
        if self._cells:  # a table row stays on one line
            self._line.append(" ")
            return
        if _ITEM.fullmatch("".join(self._line)):  # the first paragraph stands beside its mark
            return
        opened = [(tag, 0) for tag, _ in self._marks]
        self._mark()
        self._marks = opened
        line = "".join(self._line)
        self._line.clear()
        if not (self._preformatted or keep):
            indent = len(line) - len(line.lstrip(" ")) if _ITEM.match(line) else 0
            line = " " * indent + re.sub(r" {2,}", " ", line.strip())
        if line.strip() or keep:
            self._lines.append(line.rstrip())
        if blank and self._lines and self._lines[-1]:
            self._lines.append("")


_HEADERS = ("From", "To", "Cc", "Date", "Subject")
_OF_MSG = {"From": "0C1A", "Address": "5D01", "To": "0E04", "Cc": "0E03", "Subject": "0037"}
"""Outlook's property numbers."""
_SENT, _RECEIVED = 0x0039, 0x0E06
_BODY, _HTML, _NAME, _SHORT_NAME, _DATA = "1000", "1013", "3707", "3704", "3701"
_MOST_FILES = 100


def eml(data: bytes) -> str:
    """An internet message: headers, text, names of attachments."""
    message = email.message_from_bytes(data, policy=email.policy.default)
    lines = [f"{name}: {message[name]}" for name in _HEADERS if message[name]]
    body = message.get_body(("plain", "html")) if isinstance(message, EmailMessage) else None
    lines += ["", _of_part(body) if body is not None else "(no text)"]
    for part in message.iter_attachments():
        content = part.get_payload(decode=True)
        size = len(content) if isinstance(content, bytes) else 0
        lines.append(f"(attached: {part.get_filename() or 'without a name'}, {size:,} bytes)")
    return "\n".join(lines)


def _of_part(part: Any) -> str:
    text = str(part.get_content())
    return html_to_text(text)[1] if part.get_content_subtype() == "html" else text


def msg(data: bytes) -> str:
    """An Outlook message: headers, text, names of attachments."""
    import olefile

    with olefile.OleFileIO(io.BytesIO(data)) as file:
        return "\n".join(_msg_lines(file))


def _msg_lines(file: Any) -> Iterator[str]:
    for name, number in _OF_MSG.items():
        value = _text(file, [], number)
        if value:
            yield f"{name}: {value}"
    sent = _times(file).get(_SENT) or _times(file).get(_RECEIVED)
    if sent:
        yield f"Date: {sent}"
    page = _bytes(file, [], _HTML, "0102")
    yield ""
    yield _text(file, [], _BODY) or html_to_text(page.decode(errors="replace"))[1] or "(no text)"
    folders = {path[0] for path in file.listdir() if path[0].startswith("__attach")}
    for folder in sorted(folders)[:_MOST_FILES]:
        name = _text(file, [folder], _NAME) or _text(file, [folder], _SHORT_NAME)
        size = len(_bytes(file, [folder], _DATA, "0102"))
        yield f"(attached: {name or 'without a name'}, {size:,} bytes)"


def _text(file: Any, folder: list[str], number: str) -> str:
    wide = _bytes(file, folder, number, "001F")
    text = wide.decode("utf-16-le", "replace") if wide else ""
    text = text or _bytes(file, folder, number, "001E").decode("cp1252", "replace")
    return re.sub(r"\r\n?", "\n", text).strip("\0 \n")


def _bytes(file: Any, folder: list[str], number: str, kind: str) -> bytes:
    path = [*folder, f"__substg1.0_{number}{kind}"]
    return bytes(file.openstream(path).read()) if file.exists(path) else b""


def _times(file: Any) -> dict[int, str]:
    """The times among the mail's fixed properties, by property number."""
    if not file.exists("__properties_version1.0"):
        return {}
    data = file.openstream("__properties_version1.0").read()[32:]
    found = {}
    for at in range(0, len(data) - 15, 16):
        kind, number, _, ticks = struct.unpack("<HHIQ", data[at : at + 16])
        if kind == 0x0040 and 0 < ticks < 1 << 62:
            moment = datetime(1601, 1, 1, tzinfo=UTC) + timedelta(microseconds=ticks // 10)
            found[number] = moment.isoformat(" ", "seconds")
    return found
