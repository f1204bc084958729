"""Resolves the names of engines for connections."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from .addresses import EngineAddresses


class CheckedResolver:
    """Resolves names for connections; leaves out addresses that may not be engines."""

    def __init__(self, addresses: EngineAddresses) -> None:
        self._addresses = addresses

    async def resolve(self, host: str, port: int) -> list[Any]:
        """Returns the entries of getaddrinfo for `host`.
        Raises OSError: it has no address, or none that may be an engine's.
        """
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        if not self._addresses.is_checked(host, port):
            return found
        allowed = [one for one in found if self._addresses.may_be(str(one[4][0]))]
        if not allowed:
            raise OSError(None, "its address may not be that of an engine")
        return allowed
