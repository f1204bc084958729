"""Requests of a worker or of a remote client, performed in a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec
from envserver_records.errors import EnvserverError, InputError
from envserver_records.sandboxes import ExecResult, SandboxLimits

from .maker import InteractiveSandbox, StartedProgram
from .requests import Received, Start, checked, perform

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
    """A sandbox whose input is not trusted, with one interactive program.

    Args:
        most: limits of a program are cut down to these.
    """

    def __init__(self, sandbox: InteractiveSandbox, most: SandboxLimits) -> None:
        self.sandbox = sandbox
        self._most = most
        self._has_begun = False
        self._program: StartedProgram | None = None
        self._running = contextlib.AsyncExitStack()
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._reading = asyncio.Lock()
        self._ending: asyncio.Task[None] | None = None

    async def perform(self, action: str, body: Any) -> Any:
        if action == "send":
            self._check_started()
            return await write_to(self._writer, body.data)
        if action == "receive":
            return await self._receive()
        return await perform(self.sandbox, action, checked(body, self._most))

    async def start(self, body: Start, seconds: float) -> None:
        if self._has_begun:
            raise InputError("A program was started in this sandbox before.")
        if not body.argv:
            raise InputError("An empty command cannot be run.")
        body = checked(body, self._most)
        self._has_begun = True
        starting = self.sandbox.start(body.argv, env=body.env, wall_seconds=seconds)
        program = await self._running.enter_async_context(starting)
        self._reader, self._writer = await asyncio.open_unix_connection(sock=program.stdio)
        self._running.callback(self._writer.close)
        self._program = program

    async def end(self) -> ExecResult:
        """Ends the program, unless it has ended or is about to; returns how it ended."""
        program = self._check_started()
        await self._end()
        assert program.result is not None
        return program.result

    async def close(self) -> None:
        """Ends the program, if there is one, before its sandbox."""
        with contextlib.suppress(EnvserverError):  # the sandbox is lost
            await self._end()

    async def _end(self) -> None:
        if self._ending is None:
            self._ending = asyncio.create_task(self._running.aclose())
        await asyncio.shield(self._ending)

    def _check_started(self) -> StartedProgram:
        if self._program is None:
            raise InputError("No program was started in this sandbox.")
        return self._program

    async def _receive(self) -> Received:
        program = self._check_started()
        async with self._reading:
            data = await read_from(self._reader)
        if data:
            return Received(data)
        program.hung_up = True
        return Received(result=await self.end())


async def write_to(writer: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError, RuntimeError):  # the program is gone
        writer.write(data)
        await writer.drain()


async def read_from(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(PIECE_BYTES)
    except ConnectionError:
        return b""
