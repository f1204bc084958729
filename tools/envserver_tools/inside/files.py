"""Reading, searching and changing files of the workspace; no path leads outside it."""

from __future__ import annotations

import fnmatch
import heapq
import os
import re
import secrets
import stat
from collections.abc import Iterator
from typing import IO, Any

PROBE_BYTES = 8192
"""Read to see whether a file is text."""


class Refused(Exception):
    """The request cannot be carried out; the message is for the model."""


def root() -> str:
    return os.path.realpath(os.getcwd())


def resolve(path: str, called: str = "") -> str:
    """Returns the real path; raises Refused, naming `called`, if it is outside of the workspace."""
    top = root()
    if path == "/work" or path.startswith("/work/"):
        path = f".{path.removeprefix('/work')}"
    place = os.path.realpath(os.path.join(top, path))
    if place != top and not place.startswith(f"{top}/"):
        name = shown(called or path)
        raise Refused(f"{name} is outside of /work; only paths below /work are allowed.")
    return place


def target(path: str) -> str:
    """Returns the real path of a file to write: not a link, a directory, or a file of git's."""
    parent, name = os.path.split(path)
    if name in ("", ".", ".."):
        raise Refused(f"{shown(path)} names a directory, not a file.")
    place = os.path.join(resolve(parent or ".", path), name)
    below = os.path.relpath(place, root())
    if any(part.lower() == ".git" for part in below.split("/")):
        raise Refused(f"{shown(path)} belongs to git; .git cannot be written.")
    try:
        mode = os.lstat(place).st_mode
    except FileNotFoundError:
        return place
    if not stat.S_ISREG(mode):
        raise Refused(f"{shown(path)} is a {kind(mode)}; only regular files can be written.")
    return place


def opened(path: str) -> IO[bytes]:
    """A regular file for reading."""
    return opened_place(resolve(path), path)


def opened_place(place: str, called: str) -> IO[bytes]:
    """As `opened`, for a resolved path. Never waits for a FIFO, never opens a device."""
    mode = os.lstat(place).st_mode
    if not stat.S_ISREG(mode):
        raise Refused(f"{shown(called)} is a {kind(mode)}, not a regular file.")
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(place, flags), "rb")


def kind(mode: int) -> str:
    for test, word in (
        (stat.S_ISDIR, "directory"),
        (stat.S_ISLNK, "link"),
        (stat.S_ISFIFO, "FIFO"),
        (stat.S_ISSOCK, "socket"),
        (stat.S_ISCHR, "device"),
        (stat.S_ISBLK, "device"),
    ):
        if test(mode):
            return word
    return "file"


def shown(text: str) -> str:
    """A name as text: bytes that are not UTF-8 and control characters are escaped."""
    plain = os.fsencode(text) if _encodable(text) else text.encode("utf-8", "backslashreplace")
    readable = plain.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in readable)


def _encodable(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


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
    """The positions of `part`, overlapping ones included; the first hundred."""
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


MAX_ENTRIES = 200
MAX_GREP_BYTES = 8_000_000
MAX_GREP_CHARACTERS = 250


def list_dir(path: str = ".", depth: int = 1) -> dict[str, Any]:
    top = resolve(path)
    lines: list[str] = []
    whole = _list_into(lines, top, "", depth)
    if not lines:
        return {"text": "[the directory is empty]"}
    if not whole:
        lines.append(f"[cut: the first {MAX_ENTRIES} entries; there are more]")
    return {"text": "\n".join(lines)}


def _list_into(lines: list[str], directory: str, prefix: str, depth: int) -> bool:
    """Adds entries to `lines`; returns whether all are there now."""
    with os.scandir(directory) as entries:
        # One more than is shown, to know whether there are more.
        first = heapq.nsmallest(MAX_ENTRIES + 1, entries, key=lambda entry: entry.name)
    for entry in first:
        if len(lines) >= MAX_ENTRIES:
            return False
        name = shown(prefix + entry.name)
        status = entry.stat(follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            lines.append(f"{name}/")
            if depth > 1 and entry.name != ".git":
                try:
                    below = _list_into(lines, entry.path, f"{prefix}{entry.name}/", depth - 1)
                except OSError:
                    lines[-1] += "  (cannot be read)"
                    continue
                if not below:
                    return False
        elif stat.S_ISREG(status.st_mode):
            lines.append(f"{name}  {status.st_size} bytes")
        elif stat.S_ISLNK(status.st_mode):
            lines.append(f"{name} -> {shown(os.readlink(entry.path))}")
        else:
            lines.append(f"{name}  ({kind(status.st_mode)})")
    return True


def grep(pattern: str, path: str = ".", glob: str = "", max: int = 100) -> dict[str, Any]:
    try:
        search = re.compile(pattern).search
    except (re.error, RecursionError, OverflowError) as error:
        raise Refused(f"the pattern is not a regular expression: {error}.") from error
    top = resolve(path)
    glob = glob.replace("**/", "*")  # a star means any number of directories here
    found: list[str] = []
    skipped: dict[str, int] = {}
    for place in _files(top, skipped):
        name = os.path.relpath(place, top) if "/" in glob else os.path.basename(place)
        if glob and not fnmatch.fnmatchcase(name, glob):
            continue
        for number, line in enumerate(_text_lines(place, skipped), 1):
            match = search(line)
            if match is None:
                continue
            if len(found) == max:
                return {
                    "text": "\n".join([*found, f"[cut: the first {max} lines, there are more]"])
                }
            where = shown(os.path.relpath(place, root()))
            found.append(f"{where}:{number}: {_around(line, match.start())}")
    if not found:
        found.append("[no line matches]")
    if skipped:
        found.append(f"[skipped: {', '.join(f'{n} {why}' for why, n in skipped.items())}]")
    return {"text": "\n".join(found)}


def _files(top: str, skipped: dict[str, int]) -> Iterator[str]:
    """Regular files from `top` on, in order; links are not followed, .git is left out."""
    if not os.path.isdir(top):
        yield top
        return
    waiting = [top]
    while waiting:
        place = waiting.pop()
        try:
            if not os.path.isdir(place) or os.path.islink(place):
                yield place
                continue
            with os.scandir(place) as entries:
                below = sorted(
                    (entry.path for entry in entries if _is_searched(entry)), reverse=True
                )
        except OSError:
            skipped["unreadable"] = skipped.get("unreadable", 0) + 1
            continue
        waiting += below


def _is_searched(entry: os.DirEntry[str]) -> bool:
    plain = entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)
    return plain and entry.name != ".git"


def _text_lines(place: str, skipped: dict[str, int]) -> list[str]:
    try:
        with opened_place(place, os.path.basename(place)) as file:
            data = file.read(MAX_GREP_BYTES + 1)
    except OSError:
        reason = "unreadable"
    else:
        if len(data) <= MAX_GREP_BYTES and b"\0" not in data[:PROBE_BYTES]:
            lines = data.removesuffix(b"\n").decode("utf-8", "replace").split("\n")
            return [line.removesuffix("\r") for line in lines] if data else []
        reason = "binary" if b"\0" in data[:PROBE_BYTES] else "too large"
    skipped[reason] = skipped.get(reason, 0) + 1
    return []


def _around(line: str, at: int) -> str:
    if len(line) <= MAX_GREP_CHARACTERS:
        return line
    start = 0 if at < MAX_GREP_CHARACTERS - 50 else at - 50
    part = line[start : start + MAX_GREP_CHARACTERS]
    return f"{'[...] ' * bool(start)}{part}{' [cut]' * (start + len(part) < len(line))}"
