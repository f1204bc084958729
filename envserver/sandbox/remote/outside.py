"""The way out of a sandbox on another machine: connections of its programs to their HTTP proxy.

On the machine, `Outside` accepts them; the client asks for the next one, takes and passes bytes,
and ends them. So the egress proxy stays where the attempt is, with its rules and its record.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from envserver_records.cancelling import cancel_and_wait
from envserver_records.errors import EnvserverError, InputError

from ...proxy.egress import Closable, OnConnection
from ...proxy.egress_rules import MOST_HEAD_BYTES
from ..maker import TalkingSandbox
from .messages import Pass

_PIECE_BYTES = 1 << 16
_MOST_CONNECTIONS = 64
"""Maximum connections of one sandbox; further ones are closed."""

_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Ask = Callable[[str, Any, Any], Awaitable[Any]]
"""Sends a request (word, body) to the machine and returns its answer as a type."""


class Outside:
    """On the machine: the connections of one sandbox."""

    def __init__(self) -> None:
        self._server: Closable | None = None
        self._numbers = itertools.count(1)
        self._came: asyncio.Queue[int] = asyncio.Queue()
        self._streams: dict[int, _Streams] = {}

    async def lead_out(self, sandbox: TalkingSandbox) -> bool:
        """Accepts connections from now on; returns False if the sandbox cannot have any."""
        if self._server is not None:
            raise InputError("This sandbox has a way out already.")
        self._server = await sandbox.lead_out(self._accept)
        return self._server is not None

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._streams) >= _MOST_CONNECTIONS:
            writer.close()
            return
        number = next(self._numbers)
        self._streams[number] = reader, writer
        self._came.put_nowait(number)

    async def accept(self) -> int:
        """Returns the number of the next connection."""
        return await self._came.get()

    async def send(self, number: int, data: bytes) -> None:
        """Sends bytes to a program; without any, closes the connection."""
        _, writer = self._streams_of(number)
        if not data:
            del self._streams[number]
            writer.close()
            return
        with contextlib.suppress(ConnectionError, RuntimeError):  # the program is gone
            writer.write(data)
            await writer.drain()

    async def receive(self, number: int) -> bytes:
        """Returns what a program sends; b"" when it has ended."""
        reader, _ = self._streams_of(number)
        try:
            return await reader.read(_PIECE_BYTES)
        except ConnectionError:
            return b""

    def close(self) -> None:
        """Ends all connections, and takes no more."""
        if self._server is not None:
            self._server.close()
        for _, writer in self._streams.values():
            writer.close()
        self._streams.clear()

    def _streams_of(self, number: int) -> _Streams:
        if number not in self._streams:
            raise InputError(f"There is no connection {number}.")
        return self._streams[number]


class Arrivals:
    """On the client: serves the connections of the programs of a sandbox, until it is closed.

    Args:
        ask: asks the sandbox's machine.
        serve: serves one connection, and closes it.
    """

    def __init__(self, ask: Ask, serve: OnConnection) -> None:
        self._ask = ask
        self._serve = serve
        self._tasks = {asyncio.create_task(self._accept())}

    def close(self) -> None:
        """Takes no more connections, and ends those that are open."""
        for task in self._tasks:
            task.cancel()

    async def _accept(self) -> None:
        with contextlib.suppress(EnvserverError):  # the sandbox is gone
            while True:
                number = await self._ask("accept", None, int)
                task = asyncio.create_task(self._carry(number))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _carry(self, number: int) -> None:
        """Carries one connection."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket_pair()
        reader, writer = await asyncio.open_unix_connection(sock=theirs, limit=MOST_HEAD_BYTES)
        with ours, contextlib.suppress(EnvserverError, OSError):
            serving = asyncio.ensure_future(self._serve(reader, writer))
            taking = asyncio.create_task(self._take(number, ours))
            try:
                while data := await loop.sock_recv(ours, _PIECE_BYTES):
                    await self._ask("pass", Pass(number=number, data=data), None)
            finally:
                await cancel_and_wait(taking, serving)
                await self._ask("pass", Pass(number=number, data=b""), None)

    async def _take(self, number: int, ours: socket.socket) -> None:
        """Hands on what the program sends."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(EnvserverError, OSError):
            while data := await self._ask("take", number, bytes):
                await loop.sock_sendall(ours, data)
            ours.shutdown(socket.SHUT_WR)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Returns two connected sockets that do not block."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    return ours, theirs
