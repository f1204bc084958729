"""Reads the groups of a store while another process may have it open; locks and changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from envserver_records.errors import InputError, NotFoundError

from ..store.compression import DamagedBody, decode
from ..store.reading import StoreReader, open_reader
from ..store.rows import GroupRow
from .stored_bodies import line_of
from .stored_raw import RawGroup

_PAGE: Final = 64
_NOT_DELIVERED: Final = ("buffered", "dropped")

_Found = tuple[GroupRow, bytes | Exception, str]
"""A group, its body or why it cannot be read, and the name of the store."""


def of_database(where: str) -> Iterator[RawGroup]:
    """Yields the groups that the store at `where` (path or URL) still keeps, oldest first.

    Raises:
        NotFoundError: there is no such file.
        ConfigError: it is not a store, or one of another version.
        StoreError: it does not answer.
    """
    reading = _reading(where)
    # In a separate thread: the caller may be in an event loop.
    with ThreadPoolExecutor(1) as thread:
        loop = asyncio.new_event_loop()

        def step() -> _Found | None:
            return loop.run_until_complete(anext(reading, None))

        try:
            while (found := thread.submit(step).result()) is not None:
                yield _raw(*found)
        finally:
            thread.submit(loop.run_until_complete, reading.aclose()).result()
            thread.submit(loop.close).result()


def _raw(row: GroupRow, body: bytes | Exception, name: str) -> RawGroup:
    place = f"group {row.group_id} of {name}"

    def decoded() -> Any:
        if isinstance(body, Exception):
            raise InputError(f"{place} is damaged: {body}.", place=place) from body
        return line_of(body, row.format, row.env, row.group_id, place)

    return RawGroup(place, decoded)


async def _reading(where: str) -> AsyncGenerator[_Found, None]:
    async with open_reader(where) as reader:
        after = 0
        while rows := await reader.arrived_after(after, _PAGE):
            for row in rows:
                if row.state not in _NOT_DELIVERED and (found := await _body(reader, row)):
                    yield row, found[0], reader.name
            after = rows[-1].seq


async def _body(reader: StoreReader, row: GroupRow) -> list[bytes | Exception]:
    """Returns the body; none where it was removed meanwhile."""
    try:
        ((encoding, stored),) = await reader.stored_bodies([row.group_id])
    except NotFoundError:
        return []
    try:
        return [decode(encoding, stored)]
    except DamagedBody as error:
        return [error]
