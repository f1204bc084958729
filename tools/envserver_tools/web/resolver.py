"""Resolves the names of pages for the HTTP client, to public addresses only."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp.abc import AbstractResolver, ResolveResult

from .addresses import PrivateAddress, is_public

_LOOK_UPS = 8
"""Maximum number of concurrent name look-ups."""


class PublicResolver(AbstractResolver):
    """Resolves names; one with any private address is refused.

    It uses separate threads: slow look-ups must not delay the rest of the server.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_LOOK_UPS, thread_name_prefix="web-names")

    async def resolve(
        self, host: str, port: int = 0, family: Any = socket.AF_INET
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads, look_up, host, port, family)
        for result in found:
            if not is_public(ipaddress.ip_address(result["host"].partition("%")[0])):
                raise PrivateAddress(f"{host} leads to a private address")
        return found

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def look_up(host: str, port: int, family: int) -> list[ResolveResult]:
    """The addresses of a name, as numbers. Raises OSError."""
    kind = socket.SOCK_STREAM
    found = socket.getaddrinfo(host, port, family, kind, flags=socket.AI_ADDRCONFIG)
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    return [
        ResolveResult(
            hostname=host, host=str(place[0]), port=port, family=kind, proto=proto, flags=flags
        )
        for kind, _, proto, _, place in found
    ]
