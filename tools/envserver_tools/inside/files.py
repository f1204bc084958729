"""Reading and changing files of the workspace."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from typing import IO, Any

from .paths import PROBE_BYTES, Refused, opened, shown, target

MAX_WRITE_BYTES = 1_000_000
MAX_EDIT_BYTES = 4_000_000
MAX_SCAN_BYTES = 64_000_000
MAX_LINE_CHARACTERS = 2000
MAX_READ_CHARACTERS = 16_000
MAX_PLACES = 100


def read_file(path: str, start: int = 1, lines: int = 200) -> dict[str, Any]:
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if b"\0" in file.read(PROBE_BYTES):
            return {"text": f"[binary file, {size} bytes]"}
        file.seek(0)
        shown_lines: list[str] = []
        characters = number = 0
        for number, (head, length) in enumerate(_lines(file), 1):
            if number < start or len(shown_lines) >= lines or characters > MAX_READ_CHARACTERS:
                continue
            text = f"{number:6}\t{_line_text(head, length)}"
            characters += len(text) + 1
            if characters <= MAX_READ_CHARACTERS or not shown_lines:
                shown_lines.append(text)
        unread = size - file.tell()
    if not size:
        return {"text": "[the file is empty]"}
    if not shown_lines:
        part = f"only the first {MAX_SCAN_BYTES} bytes are read, " if unread else ""
        raise Refused(f"{part}{shown(path)} has {number} lines; start is {start}.")
    left = number - (start + len(shown_lines) - 1)
    if left or unread:
        more = "more than " if unread else ""
        goes_on = f"go on with start={start + len(shown_lines)}"
        shown_lines.append(f"[{more}{left} more line{'s' * (left != 1)}; {goes_on}]")
    return {"text": "\n".join(shown_lines)}


def _lines(file: IO[bytes]) -> Iterator[tuple[bytes, int]]:
    """The head and the length of each line, of the first 64 MB; no line is ever held whole."""
    head, length, left = b"", 0, MAX_SCAN_BYTES
    while left > 0 and (piece := file.readline(65536)):
        left -= len(piece)
        head += piece[: 4 * MAX_LINE_CHARACTERS + 4 - len(head)]
        length += len(piece)
        if piece.endswith(b"\n"):
            yield head, length
            head, length = b"", 0
    if length:
        yield head, length


def _line_text(head: bytes, length: int) -> str:
    text = head.removesuffix(b"\n").decode("utf-8", "replace")
    if len(text) <= MAX_LINE_CHARACTERS and length == len(head):
        return text
    return f"{text[:MAX_LINE_CHARACTERS]} [cut: the line has {length} bytes]"


def write_file(path: str, content: str) -> dict[str, Any]:
    data = _bounded(content)
    place = target(path)
    new = not os.path.exists(place)
    os.makedirs(os.path.dirname(place), exist_ok=True)
    _replace(place, data)
    return {"text": f"{'Made' if new else 'Replaced'} {shown(path)}: {_size(data)}."}


def append_file(path: str, content: str) -> dict[str, Any]:
    data = _bounded(content)
    place = target(path)
    os.makedirs(os.path.dirname(place), exist_ok=True)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(place, flags, 0o644)
    try:
        before = os.fstat(descriptor).st_size
        try:
            _write_all(descriptor, data)
        except OSError:
            os.ftruncate(descriptor, before)
            raise
    finally:
        os.close(descriptor)
    return {
        "text": f"Appended {_size(data)} to {shown(path)}, which has {before + len(data)} bytes."
    }


def edit(path: str, old: str, new: str) -> dict[str, Any]:
    place = target(path)
    if old == new:
        raise Refused("old and new are the same.")
    with opened(path) as file:
        data = file.read(MAX_EDIT_BYTES + 1)
    if len(data) > MAX_EDIT_BYTES:
        raise Refused(f"{shown(path)} is over {MAX_EDIT_BYTES} bytes.")
    found = _places(data, old.encode())
    if not found:
        hint = ""
        if b"\r\n" in data and _places(data, old.replace("\n", "\r\n").encode()):
            hint = " Its lines end with \\r\\n."
        raise Refused(f"old occurs 0 times in {shown(path)}; it must occur exactly once.{hint}")
    if len(found) > 1:
        numbers = ", ".join(str(_line_number(data, at)) for at in found[:5])
        count = f"{MAX_PLACES} or more" if len(found) == MAX_PLACES else str(len(found))
        raise Refused(
            f"old occurs {count} times in {shown(path)} (lines {numbers}"
            f"{' ...' if len(found) > 5 else ''}); it must occur exactly once: give more of it."
        )
    at = found[0]
    changed = data[:at] + new.encode() + data[at + len(old.encode()) :]
    _replace(place, changed)
    first, last = _line_number(data, at), _line_number(changed, at + len(new.encode()))
    where = f"line {first}" if first == last else f"lines {first} to {last}"
    return {"text": f"Replaced the one occurrence in {shown(path)}, now at {where}."}


def _bounded(content: str) -> bytes:
    data = content.encode()
    if len(data) > MAX_WRITE_BYTES:
        raise Refused(f"the content has {len(data)} bytes; at most {MAX_WRITE_BYTES} are allowed.")
    return data


def _places(data: bytes, part: bytes) -> list[int]:
    """Returns the positions of `part`, overlapping ones included; the first hundred."""
    found: list[int] = []
    at = data.find(part)
    while at >= 0 and len(found) < MAX_PLACES:
        found.append(at)
        at = data.find(part, at + 1)
    return found


def _line_number(data: bytes, at: int) -> int:
    return data.count(b"\n", 0, at) + 1


def _size(data: bytes) -> str:
    lines = data.count(b"\n") + (not data.endswith(b"\n") and bool(data))
    return f"{len(data)} byte{'s' * (len(data) != 1)}, {lines} line{'s' * (lines != 1)}"


# Not `envserver_records.files`: this module runs in sandboxes, where only plain Python is.
def _replace(place: str, data: bytes) -> None:
    """Replaces the file's content completely or not at all; keeps its mode."""
    mode = stat.S_IMODE(os.lstat(place).st_mode) if os.path.lexists(place) else 0o644
    beside = os.path.join(os.path.dirname(place), f".{secrets.token_hex(8)}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            _write_all(descriptor, data)
            os.fchmod(descriptor, mode)
        finally:
            os.close(descriptor)
        os.rename(beside, place)
    except OSError:
        os.unlink(beside)
        raise


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
