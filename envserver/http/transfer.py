"""Middlewares that limit, decompress and compress bodies, and shorten the way of posts. A body uses
at most `max_body_bytes` of memory, before or after decompression."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple

from envserver_records.errors import EnvserverError, TooLargeError, UsageError
from isal import isal_zlib
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..proxy.asgi import header_number
from .answers import error_answer, is_native, on_ours

GZIPPED: Final = "envserver.gzipped"
"""Key of a request's scope: its body as one gzip member, as it came; None if it came otherwise."""
_GZIP: Final = 16 + zlib.MAX_WBITS
# The library's type stubs declare this class as an instance.
_NOT_GZIP: Final[type[Exception]] = isal_zlib.IsalError  # type: ignore[assignment]
_SMALLEST_COMPRESSED: Final = 1000
_MOST_MEMBERS: Final = 64
_BINARY: Final = "application/vnd."
_LEVEL: Final = 1
_MOST_AT_ONCE: Final = 512 * 1024
"""Decompressed size up to which switching threads would take longer than the work itself."""


class BadGzip(UsageError):
    kind = "bad_gzip"

    def __init__(self) -> None:
        super().__init__("Invalid gzip payload")


def inflate(body: bytes, most: int) -> bytes:
    parts: list[bytes] = []
    room = most
    for _ in range(_MOST_MEMBERS):
        if not body:
            break
        stream = isal_zlib.decompressobj(_GZIP)
        try:
            part = stream.decompress(body, room + 1)
        except _NOT_GZIP:
            raise BadGzip from None
        if len(part) > room:
            raise _too_large(most)
        if not stream.eof:
            raise BadGzip
        parts.append(part)
        room -= len(part)
        body = stream.unused_data.lstrip(b"\0")
    if body:
        raise BadGzip
    return b"".join(parts)


def _inflate_little(body: bytes, most: int) -> bytes | None:
    """Decompresses a valid gzip body of one member and at most `most` bytes; None for any other."""
    stream = isal_zlib.decompressobj(_GZIP)
    try:
        content = stream.decompress(body, most + 1)
    except _NOT_GZIP:
        return None
    whole = stream.eof and not stream.unused_data and len(content) <= most
    return content if whole else None


def _inflate_any(body: bytes, most: int) -> tuple[bytes, bytes | None]:
    """Decompresses as `inflate`; also returns `body` if it is one member."""
    content = _inflate_little(body, most)
    return (inflate(body, most), None) if content is None else (content, body)


def _too_large(most: int) -> TooLargeError:
    return TooLargeError(f"The body has more than {most} bytes.", max_body_bytes=most)


class RequestBodies:
    """Reads each request's body whole, refuses one that is too large, and decompresses gzip.
    `smaller`: limits of some paths, instead of `max_body_bytes`."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, smaller: Mapping[str, int]) -> None:
        self._app = app
        self._most = max_body_bytes
        self._smaller = smaller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        if "content-length" not in headers and "transfer-encoding" not in headers:
            await self._app(scope, receive, send)
            return
        try:
            most = self._smaller.get(scope["path"], self._most)
            body = await self._read(headers, receive, most)
        except EnvserverError as error:
            await _refuse(error, scope, receive, send)
            return
        if body is not None:
            plain, scope[GZIPPED] = body
            _make_plain(scope, len(plain))
            await self._app(scope, _replay(plain, receive), send)

    async def _read(
        self, headers: Headers, receive: Receive, most: int
    ) -> tuple[bytes, bytes | None] | None:
        """Returns the body, and its gzip form if it came as one member; None if the client has
        left."""
        if header_number(headers.get("content-length", "")) > most:
            raise _too_large(most)
        chunks: list[bytes] = []
        size = 0
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunk = message.get("body", b"")
            chunks.append(chunk)
            size += len(chunk)
            if size > most:
                raise _too_large(most)
            more = message.get("more_body", False)
        body = b"".join(chunks)
        if body and "gzip" in headers.get("content-encoding", "").lower():
            little = _inflate_little(body, min(_MOST_AT_ONCE, most))
            if little is not None:
                return little, body
            return await asyncio.to_thread(_inflate_any, body, most)
        return body, None


async def _refuse(error: EnvserverError, scope: Scope, receive: Receive, send: Send) -> None:
    path = scope["path"]
    if isinstance(error, BadGzip) and not is_native(path):
        answer: Response = PlainTextResponse(error.message, error.status)
    else:
        answer = error_answer(path, error.status, error.message, kind=error.kind)
    # The unread rest of the body would be taken for the next request.
    answer.headers["connection"] = "close"
    await answer(scope, receive, send)


def _make_plain(scope: Scope, length: int) -> None:
    """Describes the decompressed body in the request's scope. Changes the scope itself, because
    outer middlewares read the route from it."""
    kept = [
        (name, value)
        for name, value in scope["headers"]
        if name not in (b"content-encoding", b"content-length", b"transfer-encoding")
    ]
    scope["headers"] = [*kept, (b"content-length", b"%d" % length)]


def _replay(body: bytes, receive: Receive) -> Receive:
    pending = [body]

    async def replayed() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replayed


class CompressedAnswers:
    """Compresses responses of 1000 bytes or more with gzip, level 1, for clients that accept it.
    Streamed and binary responses are sent unchanged."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        compress = accepts(Headers(scope=scope), "gzip")
        held: list[Message] = []

        async def compressing(message: Message) -> None:
            if message["type"] == "http.response.start":
                held.append(message)
                return
            if held:
                start = held.pop()
                if message["type"] == "http.response.body":
                    message = await _fitting(start, message, compress=compress)
                await send(start)
            await send(message)

        await self._app(scope, receive, compressing)


async def _fitting(start: Message, message: Message, *, compress: bool) -> Message:
    body: bytes = message.get("body", b"")
    headers = MutableHeaders(raw=list(start["headers"]))
    if (
        message.get("more_body", False)
        or len(body) < _SMALLEST_COMPRESSED
        or "content-encoding" in headers
        or headers.get("content-type", "").startswith(_BINARY)
    ):
        return message
    headers.add_vary_header("Accept-Encoding")
    if compress:
        body = await _compressed(body)
        headers["content-encoding"] = "gzip"
        headers["content-length"] = str(len(body))
    start["headers"] = headers.raw
    return {**message, "body": body}


async def _compressed(body: bytes) -> bytes:
    if len(body) <= _MOST_AT_ONCE:
        return isal_zlib.compress(body, _LEVEL, _GZIP)
    return await asyncio.to_thread(isal_zlib.compress, body, _LEVEL, _GZIP)


def accepts(headers: Headers, coding: str) -> bool:
    """Returns whether the client accepts `coding`: it is listed with a quality above 0."""
    for offer in headers.get("accept-encoding", "").split(","):
        name, _, parameters = offer.partition(";")
        if name.strip().lower() == coding:
            _, _, quality = parameters.strip().partition("q=")
            return quality.strip() not in ("0", "0.0", "0.00", "0.000")
    return False


Endpoint = Callable[[Request], Awaitable[Response]]

_PLAIN_QUERY: Final = re.compile(rb"(?:[a-z]+=\d{1,9}(?:&|$))*")
"""Matches queries with small integers only, which endpoints need not validate again."""


class Passed(NamedTuple):
    """Stands in for the FastAPI route when requests are counted by route."""

    path: str


class _Post(NamedTuple):
    route: Passed
    form: re.Pattern[str]
    endpoint: Endpoint


class DirectPosts:
    """The innermost middleware. `endpoints`: POST endpoints by the path of their route; path
    parameters in braces become the request's `path_params`."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Endpoint]) -> None:
        self._app = app
        self._posts = [
            _Post(Passed(path), compile_path(path)[0], endpoint)
            for path, endpoint in endpoints.items()
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            for post in self._posts:
                found = post.form.match(scope["path"])
                if found and _PLAIN_QUERY.fullmatch(scope["query_string"]):
                    scope["route"] = post.route
                    scope["path_params"] = found.groupdict()
                    await _answer(post.endpoint, scope, receive, send)
                    return
        await self._app(scope, receive, send)


async def _answer(endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope, receive)
    try:
        answer = await endpoint(request)
    except EnvserverError as error:
        answer = await on_ours(request, error)
    await answer(scope, receive, send)
