"""Finds words in the texts of groups, which no list has.

In: a text. Out: the numbers of the groups in which it occurs, upper and lower case alike (of ASCII
letters, as in lists). What holds: a file is read once for a text, in a thread; a later search ends
an earlier one, whose page nobody waits for any more.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import orjson
from sqlalchemy import text as sql
from sqlalchemy.ext.asyncio import AsyncConnection

from ..store.compression import decode

MOST_BYTES: Final = 2 << 30
"""Size of all groups above which their texts are not searched."""
_PAGE: Final = 64
_PLACES: Final = sql(
    "SELECT p.seq, f.path, p.start, p.length, b.encoding, b.body FROM places p"
    " LEFT JOIN files f ON f.number = p.file LEFT JOIN bodies b ON b.seq = p.seq"
    " WHERE p.seq > :after ORDER BY p.seq LIMIT :most"
)
_SIZE: Final = sql("SELECT coalesce(sum(length), 0) FROM places")


class _Search(NamedTuple):
    """A search: where it has come to, and what it found."""

    text: str
    after: int
    found: list[int]


class TextSearch:
    """Searches the groups of one index; remembers the last search."""

    def __init__(self) -> None:
        self._last = _Search("", 0, [])
        self._lock = asyncio.Lock()
        self._wanted = ""

    async def matching(self, connection: AsyncConnection, text: str) -> list[int]:
        """Returns the numbers of the groups that have `text`; none of too large a file."""
        self._wanted = text
        async with self._lock:
            if text != self._last.text:
                self._last = _Search(text, 0, [])
            if (await connection.execute(_SIZE)).scalar_one() > MOST_BYTES:
                return []
            needle = orjson.dumps(text)[1:-1].lower()
            while self._wanted == text:
                values = {"after": self._last.after, "most": _PAGE}
                rows = (await connection.execute(_PLACES, values)).all()
                if not rows:
                    break
                found = await asyncio.to_thread(_those, rows, needle)
                self._last = _Search(text, rows[-1].seq, self._last.found + found)
            return self._last.found


class _Rollout(msgspec.Struct):
    messages: msgspec.Raw = msgspec.Raw()
    output: msgspec.Raw = msgspec.Raw()
    others: msgspec.Raw = msgspec.Raw()


class _Origin(msgspec.Struct):
    rollouts: list[_Rollout] = []


class _Texts(msgspec.Struct):
    """The part of a line that people search."""

    messages: msgspec.Raw = msgspec.Raw()
    envserver: _Origin | None = None


_DECODER: Final = msgspec.json.Decoder(_Texts)


def _has(line: bytes, needle: bytes) -> bool:
    """Returns whether conversations or outputs of a line have `needle`, which is in lower case."""
    if needle not in line.lower():
        return False
    try:
        texts = _DECODER.decode(line)
    except msgspec.DecodeError:
        return False
    rollouts = texts.envserver.rollouts if texts.envserver is not None else []
    parts = [texts.messages, *(part for one in rollouts for part in msgspec.structs.astuple(one))]
    return any(needle in bytes(part).lower() for part in parts)


def _those(rows: Any, needle: bytes) -> list[int]:
    """Returns the numbers of those of these groups whose text matches."""
    found = []
    for seq, path, start, length, encoding, body in rows:
        if encoding is not None:
            line = decode(encoding, body)
        else:
            try:
                with Path(path or "").open("rb") as file:
                    file.seek(start)
                    line = file.read(length)
            except OSError:  # it was removed meanwhile
                continue
        if _has(line, needle):
            found.append(seq)
    return found
