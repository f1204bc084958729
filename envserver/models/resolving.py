"""Resolves the names of engines for connections."""

from __future__ import annotations

import socket

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from .addresses import EngineAddresses


class CheckedResolver(AbstractResolver):
    """Resolves names for connections; leaves out addresses that may not be engines."""

    def __init__(self, addresses: EngineAddresses) -> None:
        self._addresses = addresses
        self._resolver = aiohttp.DefaultResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """See AbstractResolver."""
        found = await self._resolver.resolve(host, port, family)
        if not self._addresses.is_checked(host, port):
            return found
        allowed = [one for one in found if self._addresses.may_be(one["host"])]
        if not allowed:
            raise OSError(None, "its address may not be that of an engine")
        return allowed

    async def close(self) -> None:
        """See AbstractResolver."""
        await self._resolver.close()
