"""The server as the place where the scheduler's groups go, and the stream of what it lacks."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator

from envserver_records.records import Group, pack

from ..rollouts.stream import Ticket
from .link import Link
from .several import compressed

_ASKED_AT_ONCE = 1024


def lacking(
    tickets: Iterator[Ticket], known: Callable[[list[str]], set[str]], stored: int
) -> Iterator[Ticket]:
    """Those of `tickets` whose groups the server has not, in their order.

    Args:
        known: which of these the server has; it may block.
        stored: how many of the stream it has: as long as not all of them were met, tickets are read
            ahead to ask for many at once.
    """
    while stored > 0:
        ahead = list(itertools.islice(tickets, min(_ASKED_AT_ONCE, stored)))
        if not ahead:
            return
        found = known([ticket.group_id for ticket in ahead])
        stored -= len(found)
        yield from (ticket for ticket in ahead if ticket.group_id not in found)
    yield from tickets


class RemoteSink:
    """Groups on their way to the server; for a stream that `lacking` gave.

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

    async def wait_for_room(self) -> None:
        """Returns when the server has room for another group."""
        await self._link.wait_for_room(self._open_groups)


def _packed(group: Group) -> bytes:
    return compressed(pack(group))
