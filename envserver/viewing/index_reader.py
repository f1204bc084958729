"""Reads groups through an index: lists from its tables, bodies from the files that it is of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from envserver_records.errors import InputError, NotFoundError
from envserver_records.records import Group, pack, unpack
from msgspec.structs import replace
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from ..store.compression import RAW, decode
from ..store.failures import typed_failures
from ..store.listing import GroupQuery, Page
from ..store.lookups import GroupLookups
from ..store.reading import only_reading, sqlite_url
from ..store.rewards import RewardCounts
from .lines import group_of_line
from .searching import TextSearch

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
        """Returns the packed groups, in order.

        Raises:
            NotFoundError: there is no such group.
            InputError: what is in the file is not a group, or has changed meanwhile.
        """
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
