"""Requests of a worker or of a remote client, performed in a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
from envserver_records.errors import InputError
from envserver_records.sandboxes import ExecResult, SandboxLimits

from .maker import InteractiveSandbox, StartedProgram
from .requests import (
    Exec,
    Read,
    Received,
    RunPython,
    Send,
    Start,
    Write,
    cut_down,
    plain,
    variables,
)

_MOST_READ_BYTES = 64 << 20
PIECE_BYTES = 1 << 16


def decoded(action: str, raw: bytes, bodies: Mapping[str, Any]) -> Any:
    """The body of a request; None for an action that `bodies` does not have."""
    if action not in bodies:
        return None
    try:
        return msgspec.msgpack.decode(raw, type=bodies[action])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"This is not a valid sandbox request: {error}.") from None


class ServedSandbox:
    """A sandbox whose input is not trusted.

    Args:
        most: limits of a program are cut down to these.
        life: the task that is the life of the interactive program, once one was started.
    """

    def __init__(self, sandbox: InteractiveSandbox, most: SandboxLimits) -> None:
        self.sandbox = sandbox
        self.life: list[asyncio.Task[None]] = []
        self._most = most
        self._program: InteractiveProgram | None = None

    @property
    def program(self) -> InteractiveProgram:
        if self._program is None:
            raise InputError("No program was started in this sandbox.")
        return self._program

    async def start(self, body: Start, seconds: float) -> None:
        if self._program is not None:
            raise InputError("A program was started in this sandbox before.")
        if not body.argv:
            raise InputError("An empty command cannot be run.")
        argv, env = [plain(text) for text in body.argv], variables(body.env)
        self._program = program = InteractiveProgram()
        starting = self.sandbox.start(argv, env=env, wall_seconds=seconds)
        self.life.append(asyncio.create_task(program.live(starting)))
        await program.started()

    async def perform(self, action: str, body: Any) -> Any:
        sandbox = self.sandbox
        match action, body:
            case "exec", Exec():
                return await sandbox.exec(
                    [plain(text) for text in body.argv],
                    stdin=body.stdin,
                    cwd=plain(body.cwd),
                    env=None if body.env is None else variables(body.env),
                    limits=None if body.limits is None else cut_down(body.limits, self._most),
                )
            case "python", RunPython():
                return await sandbox.run_python(
                    body.code,
                    argv=[plain(text) for text in body.argv],
                    stdin=body.stdin,
                    cwd=plain(body.cwd),
                    limits=None if body.limits is None else cut_down(body.limits, self._most),
                )
            case "read", Read():
                if not 0 <= body.max_bytes <= _MOST_READ_BYTES:
                    raise InputError(f"max_bytes must be from 0 to {_MOST_READ_BYTES}.")
                return await sandbox.read(plain(body.path), body.max_bytes)
            case "write", Write():
                return await sandbox.write(plain(body.path), body.data)
            case "total", None:
                return await sandbox.total()
            case "send", Send():
                return await self.program.send(body.data)
            case "receive", None:
                return await self.program.receive()
        raise InputError(f"A sandbox cannot {action[:40]!r}.")


class InteractiveProgram:
    """`live` is its whole life, in a task of its own; the rest is for requests."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._streams: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
        self._streams = loop.create_future()
        self._reading = asyncio.Lock()
        self._over = asyncio.Event()
        self._hung_up = False
        self._result: asyncio.Future[ExecResult] = loop.create_future()

    async def live(self, starting: AbstractAsyncContextManager[StartedProgram]) -> None:
        """Runs the program until it ends, or this task is cancelled; requests raise its errors."""
        try:
            async with starting as program:
                streams = await asyncio.open_unix_connection(sock=program.stdio)
                self._streams.set_result(streams)
                try:
                    await self._over.wait()
                    program.hung_up = self._hung_up
                finally:
                    streams[1].close()
            assert program.result is not None
            self._result.set_result(program.result)
        except BaseException as error:
            is_cancelled = not isinstance(error, Exception)
            for future in (self._streams, self._result):
                if not future.done():
                    future.set_exception(InputError("It was ended.") if is_cancelled else error)
                    future.exception()  # mark as retrieved: there may be no waiter
            if is_cancelled:
                raise

    async def started(self) -> None:
        """Waits until the program is ready; raises as `InteractiveSandbox.start`."""
        await asyncio.shield(self._streams)

    async def send(self, data: bytes) -> None:
        """What a program that has ended does not take is dropped."""
        _, writer = await asyncio.shield(self._streams)
        await write_to(writer, data)

    async def receive(self) -> Received:
        reader, _ = await asyncio.shield(self._streams)
        async with self._reading:
            data = await read_from(reader)
        if data:
            return Received(data)
        self._hung_up = True
        return Received(result=await self.end())

    async def end(self) -> ExecResult:
        """Ends the program, unless it has ended or is about to; returns how it ended."""
        self._over.set()
        return await asyncio.shield(self._result)


async def write_to(writer: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError, RuntimeError):  # the program is gone
        writer.write(data)
        await writer.drain()


async def read_from(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(PIECE_BYTES)
    except ConnectionError:
        return b""
