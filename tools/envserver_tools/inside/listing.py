"""Finding things in the workspace. Links are not followed, and .git is not searched."""

from __future__ import annotations

import fnmatch
import heapq
import os
import re
import stat
from collections.abc import Iterator
from typing import Any

from .paths import PROBE_BYTES, Refused, kind, opened_place, resolve, root, shown

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
