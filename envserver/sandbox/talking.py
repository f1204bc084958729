"""A program in a sandbox of an attempt that the worker talks to, such as an MCP server.

In: bytes for its input. Out: its output as it comes, then how it ended. What the program writes
waits in a socket until the worker takes it, so nothing piles up here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from envserver_records.errors import InputError
from envserver_records.records import ExecResult

from .maker import TalkingSandbox
from .requests import Received

_PIECE_BYTES = 1 << 16


class TalkingProgram:
    """`live` is its whole life, in a task of its own; the rest is for requests.

    Args:
        seconds: until it is killed.
    """

    def __init__(
        self, sandbox: TalkingSandbox, argv: Sequence[str], env: Mapping[str, str], seconds: float
    ) -> None:
        self._sandbox = sandbox
        self._argv = argv
        self._env = env
        self._seconds = seconds
        self._streams: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
        self._streams = asyncio.get_running_loop().create_future()
        self._reading = asyncio.Lock()
        self._over = asyncio.Event()
        self._hung_up = False
        self._result: asyncio.Future[ExecResult] = asyncio.get_running_loop().create_future()

    async def live(self) -> None:
        """Runs the program until it ends, or this task is cancelled."""
        try:
            async with self._sandbox.start(
                self._argv, env=self._env, wall_seconds=self._seconds
            ) as program:
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
            for waited in (self._streams, self._result):
                if not waited.done():
                    told = error if isinstance(error, Exception) else InputError("It was ended.")
                    waited.set_exception(told)
                    waited.exception()  # mark as retrieved: nobody may wait for it
            raise

    async def started(self) -> None:
        """Waits until the program is ready; raises as `TalkingSandbox.start`."""
        await asyncio.shield(self._streams)

    async def send(self, data: bytes) -> None:
        """Sends input; what a program that has ended does not take is dropped."""
        _, writer = await asyncio.shield(self._streams)
        try:
            writer.write(data)
            await writer.drain()
        except (ConnectionError, RuntimeError):
            return

    async def receive(self) -> Received:
        """Returns output, or how the program ended."""
        reader, _ = await asyncio.shield(self._streams)
        async with self._reading:
            try:
                data = await reader.read(_PIECE_BYTES)
            except ConnectionError:
                data = b""
        if data:
            return Received(data)
        self._hung_up = True
        return Received(result=await self.end())

    async def end(self) -> ExecResult:
        """Ends the program, unless it has ended or is about to; returns how it ended."""
        self._over.set()
        return await asyncio.shield(self._result)
