"""The frames that the server and a worker exchange on their control socket.

A frame (`envserver_records.framing`) holds a non-empty list of strings as MessagePack:

    server -> worker    ["run", rollout_id, url]   ["cancel", rollout_id]   ["stop"]
    worker -> server    ["ready"]   ["beat"]   ["done", rollout_id]

Everything else goes over HTTP, so frames stay tiny, and the first bytes show what is not one.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from envserver_records import framing

MAX_FRAME_BYTES = 64 * 1024
BEATS_PER_SILENCE = 4
"""Beats in the time after which a silent worker counts as hung."""

_decoder = msgspec.msgpack.Decoder(list[str])


def encode(*parts: str) -> bytes:
    """Returns one frame."""
    return framing.frame(msgspec.msgpack.encode(parts))


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._reader = framing.FrameReader(MAX_FRAME_BYTES)

    def feed(self, data: bytes) -> Iterator[list[str]]:
        """Yields the frames that `data` completes.

        Raises:
            ValueError: what came is not a frame; nothing that follows can be read.
        """
        for body in self._reader.feed(data):
            parts = _decoder.decode(body)
            if not parts:
                raise ValueError("a frame cannot be empty")
            yield parts
