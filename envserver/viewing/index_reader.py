"""Reads groups through an index: lists from its tables, bodies from the files that it is of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import orjson
from envserver_records.errors import InputError, NotFoundError
from envserver_records.records import Group, pack, unpack
from msgspec.structs import replace
from sqlalchemy import text
from sqlalchemy import text as sql
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from ..store.compression import RAW, decode
from ..store.failures import typed_failures
from ..store.listing import GroupQuery, Page
from ..store.lookups import GroupLookups, RewardCounts
from ..store.reading import only_reading, sqlite_url
from .lines import group_of_line

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


_PLACE = text(
    "SELECT f.path, p.start, p.length, p.line, b.encoding, b.body FROM groups g"
    " JOIN places p ON p.seq = g.seq LEFT JOIN files f ON f.number = p.file"
    " LEFT JOIN bodies b ON b.seq = g.seq WHERE g.group_id = :group_id"
)


class IndexReader(GroupLookups):
    """The groups of an index; `ReadGroups` for the routes."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._search = TextSearch()

    async def list_groups(self, query: GroupQuery, cursor: str, limit: int) -> Page:
        """Returns a page of groups; `query.text` is also looked for in their texts."""
        return await super().list_groups(await self._with_found(query), cursor, limit)

    async def reward_counts(self, query: GroupQuery) -> RewardCounts:
        """Counts the groups of such a list by mean reward."""
        return await super().reward_counts(await self._with_found(query))

    async def _with_found(self, query: GroupQuery) -> GroupQuery:
        if not query.text:
            return query
        async with self._reading() as connection:
            found = await self._search.matching(connection, query.text)
        return replace(query, found=found)

    async def bodies(self, group_ids: Sequence[str]) -> list[bytes]:
        """Returns the packed groups, in order."""
        return [await self._body(group_id) for group_id in group_ids]

    async def stored_bodies(self, group_ids: Sequence[str]) -> list[tuple[int, bytes]]:
        """Like `bodies`, with their encoding: none."""
        return [(RAW, body) for body in await self.bodies(group_ids)]

    async def groups_of_tasks(self, run: str, part: str) -> dict[str, str]:
        """Returns the first group of each task in a part of a run, by the task's id."""
        query = (
            "SELECT t.task_id, g.group_id FROM files f JOIN places p ON p.file = f.number"
            " JOIN groups g ON g.seq = p.seq JOIN group_facts t ON t.seq = p.seq"
            " WHERE f.run = :run AND f.baseline = '' AND (f.part = :part OR"
            " (f.part = '' AND g.env = :part)) ORDER BY g.seq DESC"
        )
        async with self._reading() as connection:
            rows = await connection.execute(text(query), {"run": run, "part": part})
            return {row.task_id: row.group_id for row in rows}

    async def _body(self, group_id: str) -> bytes:
        async with self._reading() as connection:
            found = (await connection.execute(_PLACE, {"group_id": group_id})).one_or_none()
        if found is None:
            raise NotFoundError(f"There is no group {group_id}.", group_id=group_id)
        return await asyncio.to_thread(_packed, group_id, *found)

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[AsyncConnection]:
        with typed_failures():
            async with self._engine.connect() as connection:
                yield connection


@asynccontextmanager
async def open_index(path: Path) -> AsyncIterator[IndexReader]:
    """Opens an index for reading; another process may be writing it."""
    async with only_reading(sqlite_url(path)) as engine:
        yield IndexReader(engine)


def _packed(
    group_id: str,
    path: str | None,
    start: int,
    length: int,
    line: int,
    encoding: int | None,
    body: Any,
) -> bytes:
    """Returns a packed group under the id that it has here."""
    place = f"{path}, line {line}" if line else str(path)
    data = _read(Path(path or ""), start, length) if encoding is None else decode(encoding, body)
    packed = pack(replace(group_of_line(data, place), group_id=group_id))
    try:
        unpack(packed, Group)  # a file may hold anything
    except msgspec.DecodeError as error:
        raise InputError(f"{place} is not a group: {error}.", place=place) from error
    return packed


def _read(path: Path, start: int, length: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(length)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
