"""Joins the small writes of an answer: its head and its body, or the chunks of a stream that came
together. A system call takes more time than making a chunk.

What is written in one turn of the event loop goes out at its end, or as soon as it is 64 KB. The
order of what is written, and of closing, stays.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MOST_BYTES: Final = 64 * 1024


class JoinedWrites:
    """A transport that joins writes; everything else is done by the transport that it is given."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> None:
        """Writes `data` at the end of this turn of the loop."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)
        self._size += len(data)
        if self._size > _MOST_BYTES:
            self._flush()

    def writelines(self, parts: list[bytes]) -> None:
        """See `write`."""
        self.write(b"".join(parts))

    def write_eof(self) -> None:
        """Ends what is written."""
        self._flush()
        self._transport.write_eof()

    def close(self) -> None:
        """Closes the connection once all is written."""
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _flush(self) -> None:
        parts, self._parts, self._size = self._parts, [], 0
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts))


class JoinedHttp(HttpToolsProtocol):
    """uvicorn's protocol with joined writes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        joined = JoinedWrites(cast(asyncio.Transport, transport), self.loop)
        super().connection_made(cast(asyncio.Transport, joined))
