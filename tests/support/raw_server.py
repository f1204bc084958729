"""A TCP server that writes any bytes at all, breaks connections anywhere, or says nothing."""

import asyncio
import contextlib
import itertools
import re
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from typing import Literal

End = Literal["close", "reset", "keep", "hang"]


class RawServer:
    """What it writes to every request, and what it does then.

    Args:
        pieces: written one by one, with a pause for an empty one; the other side may get them cut
            otherwise.
        end: "close" the connection, "reset" it, "keep" it for the next request, or "hang": keep it
            and never answer on it again.
        requests: heads of the requests so far.
        connections: open ones.
        accepted: connections so far.
    """

    def __init__(self) -> None:
        self.pieces: Sequence[bytes] = ()
        self.end: End = "close"
        self.requests: list[bytes] = []
        self.connections: set[asyncio.StreamWriter] = set()
        self.accepted = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.add(writer)
        self.accepted += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._answer(reader, writer):
                    continue
        finally:
            self.connections.discard(writer)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        self.requests.append((await read_request(reader))[0])
        end = self.end
        for piece in self.pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0 if piece else 0.01)
        if end == "reset":
            _reset(writer)
        if end == "hang":
            await reader.read()
        return end == "keep"


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """The head and the body of a request."""
    head = await reader.readuntil(b"\r\n\r\n")
    found = re.search(rb"\r\ncontent-length:\s*(\d+)", head.lower())
    return head, await reader.readexactly(int(found[1]) if found else 0)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Breaks the connection as a killed process does: the other side gets an error, not an end."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextlib.asynccontextmanager
async def raw_server() -> AsyncIterator[RawServer]:
    """A running RawServer; `url` is its address."""
    raw = RawServer()
    server = await asyncio.start_server(raw.serve, "127.0.0.1", 0)
    raw.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield raw
    finally:
        server.close()
        for writer in [*raw.connections]:
            writer.transport.abort()


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    """`data` in pieces, cut at those of `places` that lie within it."""
    edges = [0, *sorted({place for place in places if 0 < place < len(data)}), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


def head(kind: str, length: int | None, *more: str) -> bytes:
    """The head of an answer; `length` None: it has no content-length."""
    lines = ["HTTP/1.1 200 OK", f"content-type: {kind}", *more]
    if length is not None:
        lines.append(f"content-length: {length}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def chunked(pieces: Sequence[bytes]) -> bytes:
    """`pieces` in HTTP's chunked encoding, with its end."""
    return b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces if p) + b"0\r\n\r\n"
