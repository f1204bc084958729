"""The frames that the server and a worker exchange on their control socket.

A frame is a non-empty list of strings, as MessagePack behind its length (4 bytes, big-endian):

    server -> worker    ["run", rollout_id, url]   ["cancel", rollout_id]   ["stop"]
    worker -> server    ["ready"]   ["beat"]   ["done", rollout_id]

Everything else goes over HTTP, so frames stay tiny and what is not one is found at its first bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

MAX_FRAME_BYTES = 64 * 1024
BEATS_PER_SILENCE = 4
"""Beats in the time after which a silent worker counts as hung."""

_LENGTH = struct.Struct(">I")
_decoder = msgspec.msgpack.Decoder(list[str])


def encode(*parts: str) -> bytes:
    """One frame."""
    body = msgspec.msgpack.encode(parts)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._waiting = bytearray()

    def feed(self, data: bytes) -> Iterator[list[str]]:
        """The frames that `data` completes.

        Raises:
            ValueError: what came is no frame; nothing that follows can be read.
        """
        self._waiting += data
        while len(self._waiting) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._waiting)
            if not 0 < size <= MAX_FRAME_BYTES:
                raise ValueError(f"a frame cannot have {size} bytes")
            end = _LENGTH.size + size
            if len(self._waiting) < end:
                return
            body = bytes(self._waiting[_LENGTH.size : end])
            del self._waiting[:end]
            frame = _decoder.decode(body)
            if not frame:
                raise ValueError("a frame cannot be empty")
            yield frame
