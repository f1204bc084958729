"""Converts mail to text: internet messages (eml) and Outlook messages (msg)."""

from __future__ import annotations

import email.policy
import io
import re
import struct
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.message import EmailMessage
from typing import Any

from .html import html_to_text

_HEADERS = ("From", "To", "Cc", "Date", "Subject")
_OF_MSG = {"From": "0C1A", "Address": "5D01", "To": "0E04", "Cc": "0E03", "Subject": "0037"}
"""Outlook's property numbers."""
_SENT, _RECEIVED = 0x0039, 0x0E06
_BODY, _HTML, _NAME, _SHORT_NAME, _DATA = "1000", "1013", "3707", "3704", "3701"
_MOST_FILES = 100


def eml(data: bytes) -> str:
    """Converts an internet message: headers, text, names of attachments."""
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
    """Converts an Outlook message: headers, text, names of attachments."""
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
    """Returns the times among the mail's fixed properties, by property number."""
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
