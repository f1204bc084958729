"""What a client and a sandbox machine send each other: one WebSocket is one sandbox.

Binary messages carry a stream of frames (4 bytes of length, then MessagePack), cut anywhere:

    client     [number, word, body]
    machine    [number, "ok", value]  or  [number, "error", Problem]

    open       SandboxSpec -> Opened    comes first
    start      StartProgram -> None     the only program of this sandbox
    ended      None -> ExecResult       ends the program if it still runs
    lead_out   None -> bool             whether its programs have an HTTP proxy from now on
    accept     None -> int              waits until a program connects to the proxy
    pass       Pass -> None             bytes to such a connection; none: they have ended
    take       int -> bytes             waits for bytes of one; none: they have ended
    close      None -> None             when all its processes are gone
    cancel     int                      gives a request up; that is answered "cancelled"

and exec, python, read, write, total, send, receive: see `requests`. Requests may overlap; each side
sends the next piece of a stream when the one before was answered, so nothing piles up.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, Protocol

import msgspec
from envserver_records.errors import (
    EnvserverError,
    InputError,
    SandboxError,
    SandboxImageMissing,
    SandboxLost,
    SandboxUnavailable,
)
from envserver_records.framing import FrameReader, frame
from envserver_records.packing import ready
from envserver_records.records import ExecResult, SandboxSpec, SandboxUsage
from envserver_records.waiting import cancel_and_wait

from ..proxy.egress import Closable, OnConnection
from ..proxy.egress_rules import MOST_HEAD_BYTES
from . import requests
from .maker import InteractiveSandbox
from .requests import Received, Start
from .served import PIECE_BYTES as PUMPED_BYTES
from .served import read_from, write_to

PROTOCOL: Final = 1
"""Version of these messages; client and machine must have the same."""
PATH: Final = "/v1/sandboxes"
"""The WebSocket; a GET returns the machine's `Load`."""
PIECE_BYTES: Final = 1 << 18
"""Bytes of one WebSocket message."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How busy a machine is.

    Args:
        sandboxes: maximum sandboxes at a time; `open` are taken, `waiting` requests want one.
        room: maximum programs that run at a time; `running` do, `queued` wait.
    """

    protocol: int = PROTOCOL
    backend: str = ""
    sandboxes: int = 0
    open: int = 0
    waiting: int = 0
    room: int = 0
    running: int = 0
    queued: int = 0
    draining: bool = False


class Opened(msgspec.Struct, frozen=True):
    isolation: str
    load: Load


class StartProgram(Start, frozen=True, kw_only=True):
    wall_seconds: float


class Pass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes to connection `number` of a program to its HTTP proxy; b"": no more come."""

    number: int
    data: bytes


class Problem(msgspec.Struct, frozen=True):
    """Why a request failed; `kind`: a key of `_ERRORS`, or "cancelled"."""

    kind: str
    message: str
    hint: str = ""


class MachineBusy(SandboxUnavailable):
    """The machine takes no more sandboxes now; another one may."""


BODIES: Final[dict[str, Any]] = {
    **requests.BODIES,
    "open": SandboxSpec,
    "start": StartProgram,
    "pass": Pass,
    "take": int,
    "cancel": int,
}

_ERRORS: Final[dict[str, type[EnvserverError]]] = {
    "input": InputError,
    "busy": MachineBusy,
    "image": SandboxImageMissing,
    "unavailable": SandboxUnavailable,
    "lost": SandboxLost,
}
Request = tuple[int, str, msgspec.Raw]
Answer = tuple[int, str, msgspec.Raw]

for _kind in (*BODIES.values(), ExecResult, SandboxUsage, Received, Opened, Problem, Load, Request):
    ready(_kind)


def framed(number: int, word: str, body: object) -> bytes:
    return frame(requests.packed(msgspec.msgpack.encode, (number, word, body)))


def problem_of(error: Exception) -> Problem:
    """An untyped error is the machine's fault."""
    if isinstance(error, EnvserverError):
        for kind, known in _ERRORS.items():
            if isinstance(error, known):
                return Problem(kind, error.message, error.hint)
        kind = "lost" if isinstance(error, SandboxError) else "input"
        return Problem(kind, error.message, error.hint)
    return Problem("lost", f"The sandbox failed: {type(error).__name__}: {error}")


def error_of(problem: Problem) -> EnvserverError:
    return _ERRORS.get(problem.kind, SandboxLost)(problem.message, hint=problem.hint)


class Link(Protocol):
    async def send(self, piece: bytes) -> None: ...

    async def receive(self) -> bytes:
        """The next piece; b"" at the end of the connection."""


class FramedLink:
    """Frames of at most `max_bytes` over a link."""

    def __init__(self, link: Link, max_bytes: int) -> None:
        self._link = link
        self._reader = FrameReader(max_bytes)
        self._turn = asyncio.Lock()

    def accept_at_most(self, max_bytes: int) -> None:
        self._reader.max_bytes = max_bytes

    async def send(self, frame: bytes) -> None:
        """Sends one frame, whole even if the caller is cancelled; raises ConnectionError."""
        await asyncio.shield(asyncio.ensure_future(self._send(frame)))

    async def _send(self, frame: bytes) -> None:
        async with self._turn:
            for begin in range(0, len(frame), PIECE_BYTES):
                await self._link.send(frame[begin : begin + PIECE_BYTES])

    async def bodies(self) -> AsyncIterator[bytes]:
        while piece := await self._link.receive():
            for body in self._reader.feed(piece):
                yield body


# On the machine, `Outside` accepts them; the client asks for the next one, takes and passes bytes,
# and ends them. So the egress proxy stays where the attempt is, with its rules and its record.

_MOST_CONNECTIONS = 64
"""Maximum connections of one sandbox; further ones are closed."""

_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Ask = Callable[[str, Any, Any], Awaitable[Any]]


class Outside:
    """On the machine: the connections of one sandbox."""

    def __init__(self) -> None:
        self._server: Closable | None = None
        self._numbers = itertools.count(1)
        self._came: asyncio.Queue[int] = asyncio.Queue()
        self._streams: dict[int, _Streams] = {}

    async def lead_out(self, sandbox: InteractiveSandbox) -> bool:
        if self._server is not None:
            raise InputError("This sandbox already has network access.")
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
        return await self._came.get()

    async def send(self, number: int, data: bytes) -> None:
        """Without any bytes, closes the connection."""
        _, writer = self._streams_of(number)
        if not data:
            del self._streams[number]
            writer.close()
            return
        await write_to(writer, data)

    async def receive(self, number: int) -> bytes:
        """What a program sends; b"" when it has ended."""
        return await read_from(self._streams_of(number)[0])

    def close(self) -> None:
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
    """On the client: serves the connections of the programs of a sandbox, until it is closed."""

    def __init__(self, ask: Ask, serve: OnConnection) -> None:
        self._ask = ask
        self._serve = serve
        self._tasks = {asyncio.create_task(self._accept())}

    def close(self) -> None:
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
        ours, theirs = socket_pair()
        reader, writer = await asyncio.open_unix_connection(sock=theirs, limit=MOST_HEAD_BYTES)
        with ours, contextlib.suppress(EnvserverError, OSError):
            serving = asyncio.ensure_future(self._serve(reader, writer))
            taking = asyncio.create_task(pump_to(ours, lambda: self._ask("take", number, bytes)))
            try:
                await pump_from(
                    ours, lambda data: self._ask("pass", Pass(number=number, data=data), None)
                )
            finally:
                await cancel_and_wait(taking, serving)
                await self._ask("pass", Pass(number=number, data=b""), None)


async def pump_from(ours: socket.socket, send: Callable[[bytes], Awaitable[Any]]) -> None:
    """Sends what comes from a socket, until it ends."""
    while data := await asyncio.get_running_loop().sock_recv(ours, PUMPED_BYTES):
        await send(data)


async def pump_to(ours: socket.socket, receive: Callable[[], Awaitable[bytes]]) -> None:
    """Writes what is received into a socket until there is no more, or the sandbox is gone."""
    with contextlib.suppress(EnvserverError, OSError):
        while data := await receive():
            await asyncio.get_running_loop().sock_sendall(ours, data)
    with contextlib.suppress(OSError):
        ours.shutdown(socket.SHUT_WR)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    return ours, theirs
