"""Reads one address of the web: bounded in time, size and redirects, public addresses only.

Out: the raw answer (inflated), which recordings keep. An error of the page (gone, too large, not a
document) is lasting; one that may pass in a minute is not.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self
from urllib.parse import urljoin

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from .addresses import BadAddress, PrivateAddress, check_literal, is_public, normal_url
from .providers import FetchLimits, ProviderFailed, Raw

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


_AGENT = "Mozilla/5.0 (compatible; envserver page reader)"
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_LASTING = frozenset((400, 401, 402, 403, 404, 405, 406, 410, 414, 415, 451))
_NO_DOCUMENTS = ("audio/", "video/", "font/")
_TRY_AGAIN = frozenset((408, 425, 429, 500, 502, 503, 504))


class Fetcher:
    """Reads pages for agents and calls search providers. Use with `async with`.

    Args:
        allow_private: allow pages in private networks, for your own sites.
        denies: addresses that are refused, also as targets of redirects.
    """

    def __init__(
        self,
        limits: FetchLimits | None = None,
        *,
        allow_private: bool = False,
        denies: Callable[[str], bool] = lambda url: False,
    ) -> None:
        self._limits = limits or FetchLimits()
        self._allow_private = allow_private
        self._denies = denies

    async def __aenter__(self) -> Self:
        resolver = None if self._allow_private else PublicResolver()
        self._pages = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=resolver, limit=64, limit_per_host=8),
            headers={"user-agent": _AGENT, "accept-encoding": "gzip, deflate"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        self._providers = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pages.close()
        await self._providers.close()

    async def page(self, url: str) -> Raw:
        """Returns the page at `url`; a failure is an answer with `error`."""
        try:
            async with asyncio.timeout(self._limits.seconds):
                return await self._page(url)
        except TimeoutError:
            error = f"the page did not come within {self._limits.seconds:g} seconds"
            return Raw(url, 0, "", b"", error, lasting=False)

    async def _page(self, url: str) -> Raw:
        for _ in range(self._limits.redirects + 1):
            try:
                url = normal_url(url)
                if self._denies(url):
                    return Raw(url, 0, "", b"", "it is not available")
                host = URL(url).host or ""
                if not self._allow_private:
                    check_literal(host)
                async with self._pages.get(url, allow_redirects=False) as answer:
                    if answer.status in _REDIRECTS and answer.headers.get("location"):
                        url = urljoin(url, answer.headers["location"])
                        continue
                    return await self._taken(url, answer)
            except (BadAddress, PrivateAddress) as error:
                return Raw(url, 0, "", b"", str(error))
            except aiohttp.ClientConnectorError as error:
                if isinstance(error.os_error, PrivateAddress):
                    return Raw(url, 0, "", b"", str(error.os_error))
                return Raw(url, 0, "", b"", "the host cannot be reached", lasting=False)
            except aiohttp.InvalidURL:
                return Raw(url, 0, "", b"", "it is not an address")
            except (aiohttp.ClientError, ValueError) as error:
                message = f"the host's answer cannot be read ({type(error).__name__})"
                return Raw(url, 0, "", b"", message, lasting=False)
        return Raw(url, 0, "", b"", f"it redirects more than {self._limits.redirects} times")

    async def _taken(self, url: str, answer: aiohttp.ClientResponse) -> Raw:
        kind = answer.headers.get("content-type", "")[:200]
        if answer.status != 200:
            lasting = answer.status in _LASTING
            return Raw(url, answer.status, kind, b"", f"HTTP status {answer.status}", lasting)
        if kind.startswith(_NO_DOCUMENTS):
            return Raw(url, 200, kind, b"", f"{kind.partition(';')[0]} is not a document")
        body = await _bounded(answer, self._limits.bytes)
        if body is None:
            return Raw(url, 200, kind, b"", f"it has more than {self._limits.bytes:,} bytes")
        return Raw(url, 200, kind, body)

    async def ask(
        self,
        method: str,
        url: str,
        *,
        headers: dict[str, str] | None = None,
        body: Any = None,
        data: dict[str, str] | None = None,
        seconds: float = 60.0,
        tries: int = 3,
    ) -> Raw:
        """Asks a provider, again after a while where that may help.
        Raises ProviderFailed: it does not answer; without any key in its words.
        """
        wait, said = 1.0, ""
        for left in reversed(range(tries)):
            try:
                raw = await self._asked(method, url, headers, body, data, seconds)
            except (aiohttp.ClientError, TimeoutError) as error:
                said = type(error).__name__
            else:
                if raw.status not in _TRY_AGAIN:
                    return raw
                said = f"HTTP status {raw.status}"
            if left:
                await asyncio.sleep(wait)
                wait *= 3
        raise ProviderFailed(f"The provider at {url} does not answer: {said}.")

    async def _asked(
        self,
        method: str,
        url: str,
        headers: dict[str, str] | None,
        body: Any,
        data: dict[str, str] | None,
        seconds: float,
    ) -> Raw:
        timeout = aiohttp.ClientTimeout(total=seconds)
        async with self._providers.request(
            method,
            url,
            headers=headers,
            json=body,
            data=data,
            timeout=timeout,
            allow_redirects=False,
        ) as answer:
            said = bytearray()
            async for piece in answer.content.iter_chunked(1 << 16):
                said += piece
                if len(said) > self._limits.bytes:
                    raise ProviderFailed(f"The answer of {url} is too long.")
            return Raw(url, answer.status, answer.headers.get("content-type", ""), bytes(said))


async def _bounded(answer: aiohttp.ClientResponse, most: int) -> bytes | None:
    """Returns the body, inflated; None if it exceeds `most` bytes, packed or inflated."""
    encoding = answer.headers.get("content-encoding", "").strip().lower()
    inflater = None
    if encoding in ("gzip", "x-gzip", "deflate"):
        inflater = zlib.decompressobj(wbits=47 if "gzip" in encoding else 15)
    elif encoding not in ("", "identity"):
        raise ValueError(f"unknown encoding {encoding[:40]!r}")
    parts: list[bytes] = []
    size = packed = 0
    async for piece in answer.content.iter_chunked(1 << 16):
        packed += len(piece)
        if packed > most:  # also counts data after the end of the compressed stream
            return None
        try:
            part = inflater.decompress(piece, most + 1 - size) if inflater else piece
        except zlib.error as error:
            raise ValueError(str(error)) from error
        size += len(part)
        if size > most or (inflater and inflater.unconsumed_tail):
            return None
        parts.append(part)
    return b"".join(parts)
