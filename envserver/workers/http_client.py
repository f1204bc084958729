"""The worker's HTTP client: whole requests and answers, over the connections of an `HttpPool`.

Workers import no general client: that took a third of the start of their parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from ..models.http_client import HttpError, HttpPool, header, origin_of


class RequestFailed(Exception):
    """The server cannot be reached, or closed the connection before its answer. `errno`: of the
    system's error, if there was one."""

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class Answer(NamedTuple):
    status: int
    content: bytes


class HttpClient:
    """A context manager; belongs to the event loop that runs when it is made."""

    def __init__(self) -> None:
        self._pool = HttpPool(_addresses, _new_socket)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._pool.close()

    async def request(
        self,
        method: str,
        url: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        seconds: float,
    ) -> Answer:
        """Sends a request to a quoted URL and returns the whole answer, of whatever status."""
        scheme, _, rest = url.partition("://")
        place, _, path = rest.partition("/")
        lines = b"".join(header(name, value) for name, value in (headers or {}).items())
        try:
            async with asyncio.timeout(seconds):
                response = await self._pool.send(
                    origin_of(f"{scheme}://{place}"), method, f"/{path}", lines, body
                )
                try:
                    parts = []
                    while part := await response.read():
                        parts.append(part)
                finally:
                    response.release()
        except HttpError as error:
            raise RequestFailed(f"{place}: {error}", _errno(error)) from error
        return Answer(response.status, b"".join(parts))


def _errno(error: HttpError) -> int | None:
    cause = error.__cause__
    return cause.errno if isinstance(cause, OSError) else None


async def _addresses(host: str, port: int) -> list[Any]:
    """Returns the entries of getaddrinfo; for an address in numbers without starting threads."""
    with contextlib.suppress(OSError):
        numeric = socket.AI_NUMERICHOST
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=numeric)
    loop = asyncio.get_running_loop()
    return list(await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))


def _new_socket(address: tuple[Any, ...]) -> socket.socket:
    made = socket.socket(*address[:3])
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made
