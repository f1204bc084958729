"""Parses a patch in git's form, from a sandbox under the model's control, decides which changes
count, and applies it to a tree in memory, without a disk or git.

Refused as a whole: absolute paths, `..`, links, submodules, binary changes, a patch that is too
large or that contradicts itself. Dropped, so that it cannot raise a reward: changes of tests, of
test configuration, of files that an interpreter reads at its start, and of `.git`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from envserver_environments.demonstrations import table_beside

from .trees import Entry, Tree

MAX_PATCH_BYTES = 2**20
MAX_CHANGES = 1000
MAX_HUNKS = 10_000
MAX_OFFSET = 2000
"""Lines that a hunk may be away from where it says it is."""
_MAX_PATH = 400
_MAX_PART = 200
_MAX_DEPTH = 20

_PROTECTED = table_beside(__file__)
PROTECTED_NAMES = tuple(_PROTECTED["names"])
PROTECTED_FOLDERS = frozenset(_PROTECTED["folders"])


class PatchError(Exception):
    """The patch is refused; `reason`, for a metric, is "size", "path", "link", "submodule",
    "binary", "malformed" or "conflict", the message is for people."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Hunk:
    """One block: its first line in the old file (from 1), the old lines, and the new ones."""

    start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]


@dataclass(frozen=True)
class Change:
    """A change of one file."""

    old: str | None  # its path before, None if it is new
    new: str | None  # its path after, None if it is deleted
    hunks: tuple[Hunk, ...] = ()
    program: bool | None = None  # whether it is made executable; None: unchanged
    copied: bool = False  # `old` is kept

    @property
    def paths(self) -> set[str]:
        return {path for path in (self.old, self.new) if path is not None}


def read_patch(text: str) -> list[Change]:
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise PatchError("malformed", "the patch is not Unicode text") from error
    if len(data) > MAX_PATCH_BYTES:
        raise PatchError("size", f"the patch has {len(data)} bytes, over {MAX_PATCH_BYTES}")
    if _CRLF.fullmatch(data):
        # The whole patch has these line ends; in a patch of such files, the headers end otherwise.
        data = data.replace(b"\r\n", b"\n")
    sections = _sections(data.split(b"\n"))
    if len(sections) > MAX_CHANGES:
        raise PatchError("size", f"the patch changes {len(sections)} files, over {MAX_CHANGES}")
    changes = [_read_section(section) for section in sections]
    if sum(len(change.hunks) for change in changes) > MAX_HUNKS:
        raise PatchError("size", f"the patch has over {MAX_HUNKS} hunks")
    return changes


def is_protected(path: str) -> bool:
    return any(
        part in PROTECTED_FOLDERS or any(fnmatchcase(part, name) for name in PROTECTED_NAMES)
        for part in PurePosixPath(path.lower()).parts
    )


def split_protected(
    changes: Iterable[Change], also: frozenset[str] = frozenset(), patterns: Sequence[str] = ()
) -> tuple[list[Change], list[Change]]:
    """Changes that count, and those that do not: of protected files, of those in `also`, with the
    places of the folders that they are in, and of `patterns`: `docs/**`, `*.lock`,
    `**/data.json`."""
    kept: list[Change] = []
    dropped: list[Change] = []
    for change in changes:
        protected = any(
            is_protected(path) or _in_the_way(path, also) or _matches(path, patterns)
            for path in change.paths
        )
        (dropped if protected else kept).append(change)
    return kept, dropped


def _matches(path: str, patterns: Sequence[str]) -> bool:
    """`**` matches any number of folders, including none."""
    return any(
        fnmatchcase(path, pattern) or fnmatchcase(f"/{path}", pattern.replace("**/", "*/"))
        for pattern in patterns
    )


def _in_the_way(path: str, files: frozenset[str]) -> bool:
    return any(
        path == file or path.startswith(f"{file}/") or file.startswith(f"{path}/") for file in files
    )


def apply_changes(tree: Tree, changes: Iterable[Change]) -> Tree:
    result = dict(tree)
    for change in changes:
        entry = Entry(b"")
        if change.old is not None:
            if change.old not in result or result[change.old].kind == "link":
                raise PatchError("conflict", f"there is no file {change.old}")
            entry = result[change.old] if change.copied else result.pop(change.old)
        elif change.new in result:
            raise PatchError("conflict", f"{change.new} is there already")
        data = _patched(entry.data, change)
        if change.new is None:
            if data:
                raise PatchError("conflict", f"{change.old} holds more than what is deleted")
            continue
        _check_place(result, change.new)
        kind = entry.kind if change.program is None else "program" if change.program else "file"
        result[change.new] = replace(entry, data=data, kind=kind)
    return result


def _check_place(tree: Tree, path: str) -> None:
    parents = [str(parent) for parent in PurePosixPath(path).parents]
    if path in tree or any(parent in tree for parent in parents):
        raise PatchError("conflict", f"{path} cannot stand there")
    if any(other.startswith(f"{path}/") for other in tree):
        raise PatchError("conflict", f"{path} is a folder")


_CRLF = re.compile(rb"(?:[^\n]*\r\n)+[^\n]*")
_HEADER = b"diff --git "


def _sections(lines: list[bytes]) -> list[list[bytes]]:
    sections: list[list[bytes]] = []
    left_old = left_new = 0
    for number, line in enumerate(lines):
        if left_old > 0 or left_new > 0:
            sections[-1].append(line)
            left_old -= line[:1] in (b" ", b"-", b"")
            left_new -= line[:1] in (b" ", b"+", b"")
            continue
        following = lines[number + 1] if number + 1 < len(lines) else b""
        bare = line.startswith(b"--- ") and following.startswith(b"+++ ")
        if line.startswith(_HEADER) or (bare and not _in_header(sections)):
            sections.append([])
        if not sections:
            continue
        sections[-1].append(line)
        counts = _HUNK.match(line)
        if counts:
            left_old = int(counts[2] if counts[2] is not None else 1)
            left_new = int(counts[4] if counts[4] is not None else 1)
    return sections


def _in_header(sections: list[list[bytes]]) -> bool:
    """Returns whether the current section has not yet named its files by `---` and `+++`."""
    if not sections or not sections[-1][0].startswith(_HEADER):
        return False
    return not any(line.startswith((b"--- ", b"@@ ")) for line in sections[-1])


_HUNK = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")
_MODE = re.compile(rb"(?:(?:new|old) mode|(?:new|deleted) file mode) (\d+)")
_INDEX_MODE = re.compile(rb"index [0-9a-f]+\.\.[0-9a-f]+ (\d+)")


@dataclass
class _Header:
    old: str | None = None
    new: str | None = None
    both: str | None = None
    created: bool = False
    deleted: bool = False
    copied: bool = False
    program: bool | None = None


def _read_section(lines: list[bytes]) -> Change:
    header = _Header()
    place = 0
    while place < len(lines) and not lines[place].startswith(b"@@ "):
        _read_header_line(lines[place], header)
        place += 1
    hunks = _read_hunks(lines[place:])
    old, new = header.old or header.both, header.new or header.both
    old_path = None if header.created or old == "/dev/null" else old
    new_path = None if header.deleted or new == "/dev/null" else new
    if None in (old, new) or (old_path is None and new_path is None):
        raise PatchError("malformed", "a change names no file")
    if header.both is not None and not {old_path, new_path} <= {header.both, None}:
        raise PatchError("malformed", "a change contradicts its header")
    if old_path is None and any(hunk.old for hunk in hunks):
        raise PatchError("malformed", f"{new_path} is new but has lines before")
    return Change(old_path, new_path, tuple(hunks), header.program, header.copied)


def _read_header_line(line: bytes, header: _Header) -> None:
    mode = _MODE.fullmatch(line) or _INDEX_MODE.fullmatch(line)
    if mode:
        _check_mode(mode[1])
    if line.startswith(_HEADER):
        header.both = _same_path(line.removeprefix(_HEADER))
    elif line.startswith((b"new file mode ", b"deleted file mode ", b"new mode ")):
        header.created = header.created or line.startswith(b"new file")
        header.deleted = header.deleted or line.startswith(b"deleted")
        header.program = line.endswith(b"755") if line.startswith(b"new") else None
    elif line.startswith((b"rename from ", b"copy from ")):
        header.old = _path(line.split(b" from ", 1)[1])
        header.copied = line.startswith(b"copy")
    elif line.startswith((b"rename to ", b"copy to ")):
        header.new = _path(line.split(b" to ", 1)[1])
    elif line.startswith(b"--- "):
        _name(header, "old", _side(line[4:], b"a/"))
    elif line.startswith(b"+++ "):
        _name(header, "new", _side(line[4:], b"b/"))
    elif line.startswith((b"GIT binary patch", b"Binary files ")):
        raise PatchError("binary", "changes of binary files are not taken")


def _name(header: _Header, side: str, path: str) -> None:
    said = getattr(header, side)
    if said is not None and path != said:
        raise PatchError("malformed", "a change names its file in two ways")
    setattr(header, side, path)


def _check_mode(mode: bytes) -> None:
    if mode == b"120000":
        raise PatchError("link", "symbolic links are not taken")
    if mode == b"160000":
        raise PatchError("submodule", "submodules are not taken")
    if mode not in (b"100644", b"100755"):
        raise PatchError("malformed", "a file has an unknown mode")


def _same_path(rest: bytes) -> str | None:
    """Returns the path in `a/PATH b/PATH`, or None if the two differ, as in a rename."""
    if rest.startswith(b'"'):
        first, _, second = rest.partition(b'" ')
        first += b'"'
    else:
        half = (len(rest) - 1) // 2
        first, second = rest[:half], rest[half + 1 :]
    if first.lstrip(b'"')[:2] != b"a/" or second.lstrip(b'"')[:2] != b"b/":
        return None
    old, new = _side(first, b"a/"), _side(second, b"b/")
    return old if old == new else None


def _side(name: bytes, prefix: bytes) -> str:
    """The path in a `---` or `+++` line, which may be quoted and followed by a tab and a time."""
    name = name.split(b"\t", 1)[0].rstrip(b"\r")
    if name == b"/dev/null":
        return "/dev/null"
    bare = _unquoted(name)
    return _path(bare.removeprefix(prefix), quoted=False)


def _path(name: bytes, *, quoted: bool = True) -> str:
    try:
        path = (_unquoted(name) if quoted else name).decode()
    except UnicodeDecodeError as error:
        raise PatchError("path", "a path is not Unicode text") from error
    parts = path.split("/")
    if (
        path.startswith("/")
        or any(part in ("", ".", "..") or len(part.encode()) > _MAX_PART for part in parts)
        or any(ord(character) < 32 or character in '\\:\x7f"' for character in path)
        or len(path) > _MAX_PATH
        or len(parts) > _MAX_DEPTH
    ):
        raise PatchError("path", f"the path {path[:100]!r} is not allowed")
    return path


def _unquoted(name: bytes) -> bytes:
    """git writes unusual names as C strings."""
    if not name.startswith(b'"'):
        return name
    try:
        return name[1:].removesuffix(b'"').decode("unicode_escape").encode("latin-1")
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise PatchError("path", "a quoted path cannot be read") from error


_IN_HUNK = re.compile(rb"[+ ]|-(?!- )")


def _read_hunks(lines: list[bytes]) -> list[Hunk]:
    hunks = []
    place = 0
    while place < len(lines):
        match = _HUNK.match(lines[place])
        if match is None:
            # As in git: lines after the hunks that belong to none of them are comments.
            if lines[place].strip() and _IN_HUNK.match(lines[place]):
                raise PatchError("malformed", "there is a line outside of every hunk")
            place += 1
            continue
        start, old_count, _, new_count = (
            int(part) if part is not None else 1 for part in match.groups()
        )
        hunk, place = _read_hunk(lines, place + 1, start, old_count, new_count)
        hunks.append(hunk)
    return hunks


def _read_hunk(
    lines: list[bytes], place: int, start: int, old_count: int, new_count: int
) -> tuple[Hunk, int]:
    old: list[bytes] = []
    new: list[bytes] = []
    last: list[list[bytes]] = []
    while place < len(lines):
        mark, text = lines[place][:1], lines[place][1:] + b"\n"
        if mark == b"\\":
            for side in last:
                side[-1] = side[-1].removesuffix(b"\n")
            last = []
        elif len(old) == old_count and len(new) == new_count:
            break
        elif mark in (b" ", b"-", b"+", b""):
            last = [side for side, marks in ((old, b" -"), (new, b" +")) if (mark or b" ") in marks]
            for side in last:
                side.append(text)
        else:
            raise PatchError("malformed", "a hunk has a line of no known kind")
        place += 1
    if (len(old), len(new)) != (old_count, new_count):
        raise PatchError("malformed", "a hunk has not as many lines as it says")
    return Hunk(start, tuple(old), tuple(new)), place


def _patched(data: bytes, change: Change) -> bytes:
    # Lines end with a newline only: other line ends belong to them.
    lines = [part for part in re.split(rb"(?<=\n)", data) if part]
    result: list[bytes] = []
    done = 0
    for hunk in change.hunks:
        wanted = hunk.start - 1 if hunk.old else hunk.start
        at = _find(lines, hunk.old, wanted, done)
        if at is None:
            raise PatchError("conflict", f"a hunk does not fit {change.old or change.new}")
        result += lines[done:at]
        result += hunk.new
        done = at + len(hunk.old)
    return b"".join(result + lines[done:])


def _find(lines: list[bytes], old: tuple[bytes, ...], wanted: int, least: int) -> int | None:
    """Returns the position of `old` nearest to `wanted` and not before `least`."""
    if not old:
        return wanted if least <= wanted <= len(lines) else None
    block = list(old)
    last = len(lines) - len(block)
    for offset in range(MAX_OFFSET):
        for place in {wanted + offset, wanted - offset}:
            if (
                least <= place <= last
                and lines[place] == block[0]
                and lines[place : place + len(block)] == block
            ):
                return place
    return None
