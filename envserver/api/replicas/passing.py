"""Passes HTTP requests on to the leader, bodies streamed both ways.

In: a request that the follower's middlewares let through. Out: the leader's answer, or `no_leader`
(503) when none could be reached, `leader_gone` (502) when it broke off before it answered. An
answer that breaks off later is cut: the client's connection is closed before its end.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Final

import aiohttp
from envserver_records.errors import EnvserverError
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from ..direct import Passed
from ..lifespan import ABORT, SERVER_ENDS
from ..problems import answer_to
from .link import LeaderLink, answer_headers, end, gone, is_disconnect
from .sockets import pass_socket

_ROUTE: Final = Passed("passed on")
"""The route under which passed requests are counted."""
COMPRESSED: Final = "envserver.compressed"
"""Key in a scope: whether a middleware compresses answers, which it can if they are one message."""
_AT_ONCE_BYTES: Final = 512 * 1024
_COMPRESSED_BYTES: Final = 256 * 1024 * 1024
"""Larger answers are streamed as they are."""
_BINARY: Final = "application/vnd."
_END_SECONDS: Final = 1.0
"""For requests that are under way when this server is told to stop."""


class PassedOn:
    """The innermost application of a follower."""

    def __init__(self, link: LeaderLink) -> None:
        self._link = link

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await pass_socket(self._link, scope, receive, send)
            return
        scope["route"] = _ROUTE
        exchange = _Exchange(scope, receive, send)
        try:
            await exchange.run(self._link)
        except EnvserverError as error:
            await exchange.fail(error)


class _Exchange:
    """One request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._body_ended = asyncio.Event()
        self._client_left = False
        self._begun = False

    async def run(self, link: LeaderLink) -> None:
        """Sends the request and passes the answer back, until the client leaves."""
        leader = link.leader_for(self._scope)
        watching: asyncio.Task[None] | None = None
        try:
            async with link.bound(leader) as limit:
                watching = asyncio.create_task(self._watch(limit))
                async with link.sent(leader, self._scope, self._body()) as response:
                    await self._answer(response)
        except TimeoutError as error:  # the client left, this server ends, or another one leads
            if not self._client_left:
                raise gone(error) from None
        finally:
            if watching is not None:
                watching.cancel()

    async def fail(self, error: EnvserverError) -> None:
        """Answers with an error; cuts an answer that has begun."""
        if self._client_left:
            return
        if self._begun:
            self._scope["extensions"][ABORT]["abort"]()
            return
        # A line for each client that waits for a leader would fill the log.
        answer = answer_to(self._scope["path"], error)
        await answer(self._scope, self._receive, self._send)

    def _body(self) -> AsyncIterator[bytes] | None:
        headers = Headers(scope=self._scope)
        if "content-length" in headers or "transfer-encoding" in headers:
            return self._chunks()
        self._body_ended.set()
        return None

    async def _chunks(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self._receive()
            if is_disconnect(message):
                self._client_left = True
                raise ConnectionError("The client left while it sent its request.")
            if message.get("body"):
                yield message["body"]
            more = message.get("more_body", False)
        self._body_ended.set()

    async def _watch(self, limit: asyncio.Timeout) -> None:
        """Ends the exchange when the client leaves: the leader sees it leave, too."""
        await self._body_ended.wait()
        while not is_disconnect(message := await self._receive()):
            pass
        self._client_left = not message.get(SERVER_ENDS)
        end(limit, 0.0 if self._client_left else _END_SECONDS)

    def _most_at_once(self, response: aiohttp.ClientResponse) -> int:
        is_text = not response.content_type.startswith(_BINARY)
        return _COMPRESSED_BYTES if is_text and self._scope.get(COMPRESSED) else _AT_ONCE_BYTES

    async def _answer(self, response: aiohttp.ClientResponse) -> None:
        headers = answer_headers(response)
        start: Message = {
            "type": "http.response.start",
            "status": response.status,
            "headers": headers,
        }
        if (response.content_length or math.inf) <= self._most_at_once(response):
            body = await response.read()
            self._begun = True
            await self._send(start)
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
            return
        self._begun = True
        await self._send(start)
        async for chunk in response.content.iter_any():
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
