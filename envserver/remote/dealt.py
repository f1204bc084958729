"""The runner's side of `dealing`: takes requests for groups, and sends what it made of them.

What holds: a request that the server cannot answer now is repeated until it is answered; what is
asked for or sent twice counts once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from collections.abc import AsyncIterator
from typing import Final, TypeVar

import httpx
import msgspec
import structlog
from envserver_records.backoff import Backoff
from envserver_records.errors import ConfigError
from envserver_records.packing import pack, unpack
from envserver_records.servers import AsyncServersClient

from .dealing import MSGPACK, WORK, Dealt, Made, Rules, Take

_log = structlog.get_logger("envserver.remote")

T = TypeVar("T")

_BACKOFF: Final = Backoff(first_seconds=0.4, max_seconds=3.0, jitter=(0.5, 1.0))
_REQUEST_SECONDS: Final = 60.0


class DealtLink:
    """The connection of a runner to the server that deals; made by `dealt_link`."""

    def __init__(self, http: httpx.AsyncClient, name: str) -> None:
        self._http = http
        self._name = name

    async def rules(self) -> Rules:
        """Returns how groups are to be made."""
        return await self._ask("GET", WORK, Rules)

    async def take(self, free: int, holding: list[str], waiting: int) -> Dealt:
        """Returns requests when there are some; see `Take`."""
        body = pack(Take(self._name, free, holding, waiting))
        return await self._ask("POST", f"{WORK}/take", Dealt, body)

    async def send(self, made: Made) -> None:
        """Sends a group; returns when the run has it."""
        body = await asyncio.to_thread(pack, made)
        await self._ask("POST", f"{WORK}/made", type(None), body)

    async def _ask(self, method: str, path: str, kind: type[T], body: bytes = b"") -> T:
        tried = 0
        while True:
            problem = ""
            try:
                answer = await self._http.request(method, path, content=body)
            except httpx.TransportError as error:
                problem = str(error) or type(error).__name__
            else:
                if answer.is_success:
                    return _read(answer, kind)
                problem = f"HTTP {answer.status_code}: {answer.text[:200]}"
                if answer.status_code < 500:
                    raise ConfigError(f"The server refuses this runner: {problem}")
            tried += 1
            if tried == 1:
                _log.warning("server_unreachable", reason=problem)
            await asyncio.sleep(_BACKOFF.seconds(tried, random.random()))


@contextlib.asynccontextmanager
async def dealt_link(
    url: str, name: str, *, token: str, tls: ssl.SSLContext | None
) -> AsyncIterator[DealtLink]:
    """Opens the connection.

    Args:
        name: of this runner.
        tls: how to verify the server's certificate; None: the system's defaults.
    """
    headers = {"authorization": f"Bearer {token}", "content-type": MSGPACK}
    async with AsyncServersClient(
        url, timeout=_REQUEST_SECONDS, headers=headers, verify=tls or True
    ) as http:
        yield DealtLink(http, name)


def _read(answer: httpx.Response, kind: type[T]) -> T:
    try:
        return unpack(answer.content, kind)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"The server's answer is not a {kind.__name__}: {error}.",
            hint="Do both run the same version of envserver?",
        ) from error
