"""Sends the scheduler's groups to the server, and skips requests for groups it already has."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator

from envserver_records.records import Group, pack

from ..rollouts.stream import GroupRequest
from .batch import compressed
from .link import Link

_ASKED_AT_ONCE = 1024


def missing_requests(
    requests: Iterator[GroupRequest], known: Callable[[list[str]], set[str]], stored: int
) -> Iterator[GroupRequest]:
    """Yields the requests whose groups the server does not have, in order.

    Args:
        known: returns which of these groups the server has; may block.
        stored: number of groups of the stream that the server has; until all of them have been
            found, requests are read ahead and looked up in batches.
    """
    while stored > 0:
        ahead = list(itertools.islice(requests, min(_ASKED_AT_ONCE, stored)))
        if not ahead:
            return
        found = known([request.group_id for request in ahead])
        stored -= len(found)
        yield from (request for request in ahead if request.group_id not in found)
    yield from requests


class RemoteSink:
    """Sends groups to the server; for a stream made by `missing_requests`.

    Args:
        open_groups: returns the number of groups in progress or waiting to be posted.
    """

    def __init__(self, link: Link, open_groups: Callable[[], int]) -> None:
        self._link = link
        self._open_groups = open_groups

    async def put(self, group: Group) -> None:
        """Waits until the server has `group` on disk, however long that takes.
        Raises InputError: the server refuses the group permanently.
        """
        await self._link.post(await asyncio.to_thread(_packed, group))

    async def known(self, group_ids: list[str]) -> set[str]:
        """Returns an empty set: `missing_requests` skipped all groups that the server has."""
        return set()

    async def wait_for_capacity(self) -> None:
        """Waits until the server has capacity for another group."""
        await self._link.wait_for_capacity(self._open_groups)


def _packed(group: Group) -> bytes:
    return compressed(pack(group))
