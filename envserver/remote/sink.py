"""The server as the place where the scheduler's groups go, and the stream of what it lacks."""

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
        known: which of these the server has; it may block.
        stored: number of groups of the stream that the server has; until all of them are met,
            requests are read ahead and asked about in batches.
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
    """Groups on their way to the server; for a stream that `missing_requests` gave.

    Args:
        open_groups: those that are made, or wait to be posted, now.
    """

    def __init__(self, link: Link, open_groups: Callable[[], int]) -> None:
        self._link = link
        self._open_groups = open_groups

    async def put(self, group: Group) -> None:
        """Returns when the server has `group` on disk, however long that takes.

        Raises:
            InputError: the server refuses it for good.
        """
        await self._link.post(await asyncio.to_thread(_packed, group))

    async def known(self, group_ids: list[str]) -> set[str]:
        """None: the server has none of the stream's groups, and nobody else makes them."""
        return set()

    async def wait_for_capacity(self) -> None:
        """Returns when the server has room for another group."""
        await self._link.wait_for_capacity(self._open_groups)


def _packed(group: Group) -> bytes:
    return compressed(pack(group))
