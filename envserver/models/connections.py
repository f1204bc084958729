"""HTTP requests to the replicas of an engine, and what their failures mean.

aiohttp's errors leave this module as `RetryableError`. TCP keep-alive detects a peer whose machine
has
vanished, however long an answer may take.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal, TypeVar

import aiohttp
from envserver_records.errors import EngineError, EngineGarbage, EngineUnavailable

from ..telemetry.tracing import current
from .addresses import EngineAddresses
from .decoding import MAX_REFUSAL_BYTES, Decoder, is_refusal, retry_after
from .replicas import Replica
from .resolving import CheckedResolver

T = TypeVar("T")

Fault = Literal["refused", "failed", "busy"]
"""refused: no connection; failed: a bad answer or a broken connection; busy: the engine asks to
wait."""

_CONNECT_SECONDS = 10.0
_IDLE_CONNECTION_SECONDS = 4.0
"""Below the five seconds after which uvicorn, and so vLLM, closes an idle connection: otherwise a
request would sometimes use a connection that is just being closed."""
_PEER_SECONDS = 60
"""A peer that acknowledges nothing for so long counts as gone."""
_MAX_ANSWER_BYTES = 512 * 1024 * 1024


class RetryableError(Exception):
    """The request failed with `error`, and a retry may succeed.

    Args:
        fault: what the failure says about the replica.
        wait_seconds: how long the replica asks to wait.
        elsewhere: retry only on another replica.
    """

    def __init__(
        self,
        error: EngineError,
        fault: Fault = "failed",
        *,
        wait_seconds: float = 0.0,
        elsewhere: bool = False,
    ) -> None:
        super().__init__(error.message)
        self.error = error
        self.fault: Fault = fault
        self.wait_seconds = wait_seconds
        self.elsewhere = elsewhere


class Connections:
    """An HTTP session for all replicas; use with `async with`.

    Args:
        key: sent to the replicas that may have it.
        addresses: which addresses names may have.
    """

    def __init__(self, key: str, decoder: Decoder, addresses: EngineAddresses) -> None:
        self._key = key
        self._addresses = addresses
        self._decoder = decoder
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Connections:
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        connector = aiohttp.TCPConnector(
            limit=0,
            keepalive_timeout=_IDLE_CONNECTION_SECONDS,
            socket_factory=watchful_socket,
            resolver=CheckedResolver(self._addresses),
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    @asynccontextmanager
    async def open(
        self, replica: Replica, method: str, path: str, payload: bytes | None = None
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Opens the answer to one request, whatever its status.

        Raises:
            RetryableError: there is none, or it breaks off while it is read.
            EngineUnavailable: the connections are closed.
        """
        if self._session is None:
            raise EngineUnavailable("The engine's connections are closed.")
        with typed(replica):
            headers = {}
            if traceparent := current().traceparent:
                headers["traceparent"] = traceparent
            if self._key and replica.gets_key:
                headers["authorization"] = f"Bearer {self._key}"
            request = self._session.request(
                method,
                replica.url + path,
                data=payload,
                headers=headers,
                allow_redirects=False,
            )
            async with request as response:
                yield response

    async def check(self, replica: Replica, response: aiohttp.ClientResponse) -> None:
        """Returns if the status of `response` is 2xx.

        Raises:
            RetryableError: a retry may succeed.
                EngineRefused: no retry will.
        """
        status = response.status
        if 200 <= status < 300:
            return
        data = await _beginning(response)
        if is_refusal(status):
            raise self._decoder.refused(status, data)
        seconds = retry_after(response.headers)
        # An engine that names a time or a rate limit is working.
        busy = status in (408, 429) or seconds > 0
        if seconds:
            replica.busy(seconds)
        error = self._decoder.failed(status, data)
        raise RetryableError(error, "busy" if busy else "failed", wait_seconds=seconds)


async def whole(response: aiohttp.ClientResponse, max_bytes: int = _MAX_ANSWER_BYTES) -> bytes:
    """Reads the whole body.

    Raises:
        EngineGarbage: it exceeds `max_bytes`.
    """
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            raise EngineGarbage(f"The engine's answer is over {max_bytes} bytes.")
    return b"".join(parts)


@contextmanager
def typed(replica: Replica) -> Iterator[None]:
    """Turns aiohttp's errors into `RetryableError`."""
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        message = f"The engine at {replica.url} accepts no connection: {_reason(error)}."
        raise RetryableError(EngineUnavailable(message, base_url=replica.url), "refused") from None
    except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError, ConnectionError):
        message = f"The engine at {replica.url} closed the connection before its answer."
        raise RetryableError(EngineGarbage(message, base_url=replica.url)) from None
    except aiohttp.ClientError as error:
        message = f"The engine at {replica.url} does not speak HTTP: {type(error).__name__}."
        raise RetryableError(EngineGarbage(message, base_url=replica.url), elsewhere=True) from None


async def in_time(deadline: float, work: Awaitable[T]) -> T:
    """Awaits `work` until the loop's time is `deadline`.

    Raises:
        TimeoutError: it did not end by then.
    """
    async with asyncio.timeout_at(deadline):
        return await work


@contextmanager
def read_by(deadline: float, response: aiohttp.ClientResponse) -> Iterator[None]:
    """Makes reads of the body raise TimeoutError from the loop's time `deadline` on.

    This takes one timer for a whole stream, which may have thousands of reads.
    """
    loop = asyncio.get_running_loop()
    timer = loop.call_at(deadline, response.content.set_exception, TimeoutError())
    try:
        yield
    finally:
        timer.cancel()


def watchful_socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket for `address` (an entry of getaddrinfo) that notices when its peer is gone.

    Needed because a machine that lost power, or a router that dropped an idle connection, sends
    nothing, while a valid answer may also take minutes of silence.
    """
    family, kind, protocol = address[:3]
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": _PEER_SECONDS // 2,
        "TCP_KEEPINTVL": _PEER_SECONDS // 6,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": _PEER_SECONDS * 1000,
    }
    for name, value in options.items():
        # Not every system has all of them.
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


def _reason(error: aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError) -> str:
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "no connection in time"
    return error.os_error.strerror or type(error.os_error).__name__


async def _beginning(response: aiohttp.ClientResponse) -> bytes:
    """Reads enough of an error's body."""
    data = b""
    async for part in response.content.iter_any():
        data += part
        if len(data) > MAX_REFUSAL_BYTES:
            break
    return data
