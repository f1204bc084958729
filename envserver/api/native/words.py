"""Finds the groups of a list in whose conversations words occur.

In: a query and words. Out: a page of those that have them. What holds: a page reads a bounded
number of groups, in a thread, and its cursor leads on from the last one that was read: a page may
have no groups and still not be the last.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec
import orjson
from envserver_records.errors import InputError, NotFoundError
from envserver_records.records import Group, unpack

from ...store.compression import CHECKED, DamagedBody, decode
from ...store.interface import ReadGroups
from ...store.listing import GroupQuery, ListedGroup

_MOST_READ: Final = 256
_AT_A_TIME: Final = 32
_UNREADABLE: Final = (CHECKED, b"\1")
"""Stands for a group that cannot be read: its checksum is wrong."""


class FoundPage(msgspec.Struct):
    """Groups that have the words.

    Args:
        cursor: of the next page; "" on the last one.
        searched: number of groups that were read for this page.
    """

    groups: list[ListedGroup]
    cursor: str
    searched: int


async def find(
    store: ReadGroups, query: GroupQuery, words: str, cursor: str, limit: int
) -> FoundPage:
    """Returns the next page of at most `limit` groups of `query` whose conversations or outputs
    have `words`, upper and lower case alike (of ASCII letters).
    """
    found: list[ListedGroup] = []
    searched = 0
    while len(found) < limit and searched < _MOST_READ:
        most = min(_AT_A_TIME, limit - len(found), _MOST_READ - searched)
        page = await store.list_groups(query, cursor, most)
        bodies = await _bodies(store, [one.row.group_id for one in page.groups])
        found += await asyncio.to_thread(_those, page.groups, bodies, words)
        searched += len(page.groups)
        cursor = page.cursor
        if not cursor:
            break
    return FoundPage(found, cursor, searched)


async def _bodies(store: ReadGroups, group_ids: list[str]) -> list[tuple[int, bytes]]:
    """Returns the stored bodies; an empty one for a group that cannot be read."""
    try:
        return await store.stored_bodies(group_ids)
    except (InputError, NotFoundError):
        if len(group_ids) == 1:
            return [_UNREADABLE]
    return [body for one in group_ids for body in await _bodies(store, [one])]


def _those(
    groups: list[ListedGroup], bodies: list[tuple[int, bytes]], words: str
) -> list[ListedGroup]:
    needle = orjson.dumps(words)[1:-1].lower()
    return [
        one
        for one, (encoding, data) in zip(groups, bodies, strict=True)
        if needle in _texts(one, encoding, data, words.encode().lower()).lower()
    ]


def _texts(one: ListedGroup, encoding: int, data: bytes, words: bytes) -> bytes:
    """Returns the texts of a group as JSON; b"" where there are none, or it is damaged."""
    try:
        body = decode(encoding, data)
    except DamagedBody:
        return b""
    if one.row.format == "atropos":
        return orjson.dumps(orjson.loads(body).get("messages"))
    if words not in body.lower():  # a packed group holds texts as they are
        return b""
    parts: list[Any] = []
    for rollout in unpack(body, Group).trajectories:
        parts += [rollout.messages, rollout.output, [other.messages for other in rollout.others]]
    return orjson.dumps(parts, default=str)
