"""HTTP requests to the replicas of an engine, and what their failures mean.

The HTTP client's errors leave this module as `RetryableError`. TCP keep-alive detects a peer whose
machine has vanished, however long an answer may take.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from envserver_records.errors import EngineError, EngineGarbage, EngineUnavailable
from envserver_records.urls import TRUST_HINT

from ..telemetry.tracing import current
from .addresses import EngineAddresses
from .decoding import MAX_REFUSAL_BYTES, Decoder, is_refusal, retry_after
from .http_client import (
    HttpError,
    HttpPool,
    NoConnection,
    NotHttp,
    NotTrusted,
    Response,
    header,
    origin_of,
)
from .replicas import Replica
from .resolving import CheckedResolver

T = TypeVar("T")

Fault = Literal["refused", "failed", "busy"]
"""refused: no connection; failed: a bad answer or a broken connection; busy: the engine asks to
wait."""

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
    """The connections to all replicas; use with `async with`.

    Args:
        key: sent to the replicas that may have it.
        addresses: which addresses names may have.
    """

    def __init__(self, key: str, decoder: Decoder, addresses: EngineAddresses) -> None:
        self._headers = b"content-type: application/json\r\n"
        authorization = header("authorization", f"Bearer {key}") if key else b""
        self._headers_with_key = self._headers + authorization
        self._addresses = addresses
        self._decoder = decoder
        self._pool: HttpPool | None = None

    async def __aenter__(self) -> Connections:
        self._pool = HttpPool(CheckedResolver(self._addresses).resolve, watchful_socket)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def open(
        self, replica: Replica, method: str, path: str, payload: bytes | None = None
    ) -> Exchange:
        """Opens the answer to one request, whatever its status; use with `async with`.
        Raises EngineUnavailable: the connections are closed.
        """
        if self._pool is None:
            raise EngineUnavailable("The engine's connections are closed.")
        headers = self._headers_with_key if replica.gets_key else self._headers
        if traceparent := current().traceparent:
            headers += header("traceparent", traceparent)
        return Exchange(self._pool, replica, (method, path, headers, payload))

    async def check(self, replica: Replica, response: Response) -> None:
        """Returns if the status of `response` is 2xx.

        Raises:
            RetryableError: a retry may succeed.
            EngineRefused: no retry will.
            EngineUnavailable: it is a redirect.
        """
        status = response.status
        if 200 <= status < 300:
            return
        if 300 <= status < 400:
            where = self._decoder.words(response.headers.get("location", "").encode())
            raise EngineUnavailable(
                f"The engine's address {replica.url} redirects (HTTP {status}) to {where}.",
                hint="Set openai.base_url to the engine's own address: no redirect is followed.",
                status=status,
                base_url=replica.url,
            )
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


class Exchange:
    """One request, and its answer while it is read.

    Raises:
        RetryableError: there is no answer, or it breaks off while it is read.
    """

    def __init__(
        self, pool: HttpPool, replica: Replica, request: tuple[str, str, bytes, bytes | None]
    ) -> None:
        self._pool = pool
        self._replica = replica
        self._request = request
        self._response: Response

    async def __aenter__(self) -> Response:
        try:
            self._response = await self._pool.send(origin_of(self._replica.url), *self._request)
        except HttpError as error:
            raise _retryable(self._replica, error) from None
        return self._response

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._response.release()
        if isinstance(error, HttpError):
            raise _retryable(self._replica, error) from None


async def whole(response: Response, max_bytes: int = _MAX_ANSWER_BYTES) -> bytes:
    """Reads the whole body. Raises EngineGarbage: it exceeds `max_bytes`."""
    parts: list[bytes] = []
    size = 0
    while part := await response.read():
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            raise EngineGarbage(f"The engine's answer is over {max_bytes} bytes.")
    return parts[0] if len(parts) == 1 else b"".join(parts)


@contextmanager
def typed(replica: Replica) -> Iterator[None]:
    """Turns the HTTP client's errors into `RetryableError`."""
    try:
        yield
    except HttpError as error:
        raise _retryable(replica, error) from None


def _retryable(replica: Replica, error: HttpError) -> RetryableError:
    at = f"The engine at {replica.url}"
    if isinstance(error, NoConnection):
        message = f"{at} accepts no connection: {error}."
        hint = TRUST_HINT if isinstance(error, NotTrusted) else ""
        return RetryableError(
            EngineUnavailable(message, hint=hint, base_url=replica.url), "refused"
        )
    if isinstance(error, NotHttp):
        message = f"{at} does not speak HTTP: {error}."
        return RetryableError(EngineGarbage(message, base_url=replica.url), elsewhere=True)
    message = f"{at} closed the connection before its answer."
    return RetryableError(EngineGarbage(message, base_url=replica.url))


async def in_time(deadline: float, work: Awaitable[T]) -> T:
    """Awaits `work` until the loop's time is `deadline`.
    Raises TimeoutError: it did not end by then.
    """
    async with asyncio.timeout_at(deadline):
        return await work


@contextmanager
def read_by(deadline: float, response: Response) -> Iterator[None]:
    """Makes reads of the body raise TimeoutError from the loop's time `deadline` on.

    This takes one timer for a whole stream, which may have thousands of reads.
    """
    loop = asyncio.get_running_loop()
    timer = loop.call_at(deadline, response.fail, TimeoutError())
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


async def _beginning(response: Response) -> bytes:
    """Reads enough of an error's body."""
    data = b""
    while part := await response.read():
        data += part
        if len(data) > MAX_REFUSAL_BYTES:
            break
    return data
