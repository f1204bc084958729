"""Sends and receives frames over the pieces of a WebSocket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from envserver_records.framing import FrameReader

from .messages import PIECE_BYTES


class Link(Protocol):
    """A connection that carries pieces of bytes, in order."""

    async def send(self, piece: bytes) -> None:
        """Sends a piece, when the connection can take it."""

    async def receive(self) -> bytes:
        """Returns the next piece; b"" at the end of the connection."""


class FramedLink:
    """Frames over a link.

    Args:
        max_bytes: largest frame that is accepted.
    """

    def __init__(self, link: Link, max_bytes: int) -> None:
        self._link = link
        self._reader = FrameReader(max_bytes)
        self._turn = asyncio.Lock()

    def accept_at_most(self, max_bytes: int) -> None:
        """Changes the largest frame that is accepted."""
        self._reader.max_bytes = max_bytes

    async def send(self, frame: bytes) -> None:
        """Sends one frame, whole even if the caller is cancelled; raises ConnectionError."""
        await asyncio.shield(asyncio.ensure_future(self._send(frame)))

    async def _send(self, frame: bytes) -> None:
        async with self._turn:
            for begin in range(0, len(frame), PIECE_BYTES):
                await self._link.send(frame[begin : begin + PIECE_BYTES])

    async def bodies(self) -> AsyncIterator[bytes]:
        """Yields the bodies of the frames that come, until the end of the connection.
        Raises ValueError: a frame is too large.
        """
        while piece := await self._link.receive():
            for body in self._reader.feed(piece):
                yield body
