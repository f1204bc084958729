"""Length-prefixed frames: 4 bytes of length (big-endian), then as many bytes."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Final

_LENGTH: Final = struct.Struct(">I")
_READ_BYTES: Final = 1 << 16


def frame(body: bytes) -> bytes:
    return frame_header(len(body)) + body


def frame_header(size: int) -> bytes:
    return _LENGTH.pack(size)


class FrameReader:
    """Cuts a stream of bytes into the bodies of its frames, of at most `max_bytes` each."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields the bodies that `data` completes, empty ones too."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            size = _size(self._buffer, self.max_bytes)
            end = _LENGTH.size + size
            if len(self._buffer) < end:
                return
            with memoryview(self._buffer) as view:
                body = bytes(view[_LENGTH.size : end])
            del self._buffer[:end]
            yield body


def receive_frame(channel: socket.socket, max_bytes: int | None = None) -> bytes:
    """Returns the body of the next frame; waits for it, no longer than the socket's timeout."""
    size = _size(_exactly(channel, _LENGTH.size), max_bytes)
    return _exactly(channel, size)


def _size(header: bytes | bytearray, max_bytes: int | None) -> int:
    (size,) = _LENGTH.unpack_from(header)
    if max_bytes is not None and size > max_bytes:
        raise ValueError(f"a frame of {size} bytes is larger than {max_bytes}")
    return int(size)


def _exactly(channel: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(min(size - len(parts), _READ_BYTES))
        if not part:
            raise ConnectionError("the other side is gone")
        parts += part
    return bytes(parts)
