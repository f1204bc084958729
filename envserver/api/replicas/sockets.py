"""Passes WebSockets (OpenEnv's sessions) on to the leader, message by message.

A session ends with either connection; it does not survive its leader, as it does not survive a
restart of a server.
"""

from __future__ import annotations

import asyncio
from typing import Final

import aiohttp
from envserver_records.cancelling import cancel_and_wait
from envserver_records.errors import EnvserverError
from starlette.types import Message, Receive, Scope, Send

from ..problems import error_answer
from .link import LeaderLink, headers_of, is_disconnect, no_leader, url_of

_TRY_AGAIN: Final = 1013
_BROKE_OFF: Final = 1011
_HANDSHAKE: Final = ("sec-websocket-", "host")
"""Beginnings of the names of headers that the connection to the leader makes anew."""


async def pass_socket(link: LeaderLink, scope: Scope, receive: Receive, send: Send) -> None:
    """Passes one WebSocket on until either side ends it."""
    await receive()  # websocket.connect
    accepted = False
    try:
        leader = link.leader_for(scope)
        headers = [
            (name, value)
            for name, value in headers_of(leader, scope)
            if not name.startswith(_HANDSHAKE)
        ]
        connecting = link.session.ws_connect(
            url_of(leader, scope),
            headers=headers,
            protocols=scope.get("subprotocols", ()),
            max_msg_size=0,
        )
        async with link.bound(leader), connecting as socket:
            await send({"type": "websocket.accept", "subprotocol": socket.protocol})
            accepted = True
            code = await _both_ways(socket, receive, send)
    except aiohttp.WSServerHandshakeError as refusal:
        await _refuse(refusal.status, refusal.message, send)
        return
    except (EnvserverError, aiohttp.ClientError, OSError):
        if accepted:
            await send({"type": "websocket.close", "code": _TRY_AGAIN})
        else:
            error = no_leader()
            await _refuse(error.status, error.message, send)
        return
    if code is not None:
        await send({"type": "websocket.close", "code": code})


async def _refuse(status: int, message: str, send: Send) -> None:
    """Answers the handshake."""
    answer = error_answer("/v1", status, message, headers={"retry-after": "1"})
    head = {"status": answer.status_code, "headers": answer.raw_headers}
    await send({"type": "websocket.http.response.start", **head})
    await send({"type": "websocket.http.response.body", "body": answer.body})


async def _both_ways(
    socket: aiohttp.ClientWebSocketResponse, receive: Receive, send: Send
) -> int | None:
    """Returns the leader's close code; None if the client ended the session."""
    there = asyncio.create_task(_to_leader(socket, receive))
    back = asyncio.create_task(_to_client(socket, send))
    try:
        await asyncio.wait({there, back}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_and_wait(there, back)
    if there.cancelled():
        return socket.close_code if back.exception() is None else _BROKE_OFF
    there.result()
    return None


async def _to_leader(socket: aiohttp.ClientWebSocketResponse, receive: Receive) -> None:
    while not is_disconnect(message := await receive()):
        if message.get("text") is not None:
            await socket.send_str(message["text"])
        elif message.get("bytes") is not None:
            await socket.send_bytes(message["bytes"])


async def _to_client(socket: aiohttp.ClientWebSocketResponse, send: Send) -> None:
    async for message in socket:
        passed: Message = {"type": "websocket.send"}
        if message.type is aiohttp.WSMsgType.TEXT:
            passed["text"] = message.data
        elif message.type is aiohttp.WSMsgType.BINARY:
            passed["bytes"] = message.data
        else:
            continue
        await send(passed)
