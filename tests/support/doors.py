"""Doors before one server: each looks to clients like a server of its own, and fails when told to.

What several equal servers on one store are to a client: whatever is asked at one door is known at
the others.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Literal

from .raw_server import read_request
from .waiting import PATIENCE

State = Literal["open", "closed", "loses answers", "frozen"] | int
"""A number: answers with this status, without asking the server."""


class Door:
    """Made by `doors`.

    Attributes:
        state: of the connections and requests from now on.
        losing: a word: only requests with it lose their answers.
        came: first lines of the requests that came to an open door, or lost their answers.
        late: requests whose answers were lost, to send again.
    """

    def __init__(self, server_port: int) -> None:
        self.state: State = "open"
        self.losing = b""
        self.came: list[str] = []
        self.late: list[bytes] = []
        self.url = ""
        self._server_port = server_port
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def shut(self, state: State = "closed") -> None:
        """Changes the state, and cuts all connections; from any thread."""
        self.state = state
        if threading.get_ident() == self._thread:
            self._cut()
        else:
            cut = threading.Event()
            self._loop.call_soon_threadsafe(lambda: (self._cut(), cut.set()))
            assert cut.wait(PATIENCE)

    def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def come_late(self) -> None:
        """Sends what lost its answer once more, as a server does that was frozen meanwhile."""
        for data in self.late:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._server_port)
            writer.write(data)
            await reader.read(65_536)
            writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._pass_on(reader, writer):
                continue
        self._writers.discard(writer)
        writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Passes a request on; returns whether another one may come on its connection."""
        if self.state == "closed":
            return False
        request = await _request(reader)
        state = self.state
        if state == "frozen":
            await reader.read()
            return False
        if isinstance(state, int):
            body = b'{"type": "urn:envserver:error:no_leader", "detail": "Nobody leads."}'
            head = f"HTTP/1.1 {state} No\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            return True
        if state == "closed":
            return False
        self.came.append(request.partition(b"\r\n")[0].decode())
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        far_writer.write(request)
        hangup = asyncio.create_task(_hang_up_with(reader, far_writer))
        try:
            if state == "loses answers" and self.losing in request:
                await far_reader.read(65_536)  # the server has done it
                self.late.append(request)
                return False
            while part := await far_reader.read(65_536):
                if self.state == "frozen":
                    await hangup
                    return False
                writer.write(part)
                await writer.drain()
        finally:
            hangup.cancel()
            far_writer.transport.abort()
        return False


async def _hang_up_with(reader: asyncio.StreamReader, far_writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        await reader.read()
    far_writer.transport.abort()


async def _request(reader: asyncio.StreamReader) -> bytes:
    """Reads one request, which asks the server to close the connection after it."""
    head, body = await read_request(reader)
    return head.replace(b"onnection: keep-alive", b"onnection: close") + body


@contextlib.asynccontextmanager
async def doors(server_url: str) -> AsyncIterator[list[Door]]:
    """Two open doors before the server."""
    port = int(server_url.rpartition(":")[2])
    made = [Door(port) for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        for door in made:
            server = await asyncio.start_server(door.serve, "127.0.0.1", 0)
            stack.callback(server.close)
            stack.callback(door.shut)
            door.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield made
