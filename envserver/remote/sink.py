"""The server as the place where the scheduler's groups go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..records import Group, pack
from .link import Link


class RemoteSink:
    """Groups on their way to the server.

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
        await self._link.post(await asyncio.to_thread(pack, group))

    async def known(self, group_ids: list[str]) -> set[str]:
        """Those that the server ever stored, delivered or not."""
        return await self._link.known(group_ids)

    async def wait_for_room(self) -> None:
        """Returns when the server has room for another group."""
        await self._link.wait_for_room(self._open_groups)
