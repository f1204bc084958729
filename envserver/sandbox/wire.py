"""How the ends of a sandbox's socket talk: a length (4 bytes, big-endian), then MessagePack.

Requests and answers are arrays that begin with a word. Both ends bound what they take: the inside
holds programs of a model, so nothing from there is ever unpickled or believed to be short.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

MAX_FRAME_BYTES = 96 * 2**20
"""A request (an archive may be large) or an answer; `SandboxSpec` and limits keep below it."""

MAX_MESSAGE_BYTES = 65536
"""Of one message between clients, supervisor and zygotes."""
WHOLE_WALLS = ("namespace", "bubblewrap")
"""Behind these, the end of the server inside is the end of all its programs."""

_length = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()


def encode(*parts: Any) -> bytes:
    """One frame."""
    body = _encoder.encode(parts)
    return _length.pack(len(body)) + body


class Frames:
    """Collects bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[list[Any]]:
        """The frames that `data` completes.

        Raises:
            ValueError: the other end breaks the protocol.
        """
        self._buffer += data
        found = []
        while len(self._buffer) >= _length.size:
            (size,) = _length.unpack_from(self._buffer)
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {size} bytes")
            end = _length.size + size
            if len(self._buffer) < end:
                break
            frame = _decoder.decode(memoryview(self._buffer)[_length.size : end])
            del self._buffer[:end]
            if not isinstance(frame, list) or not frame or not isinstance(frame[0], str):
                raise ValueError("a frame that is no message")
            found.append(frame)
        return found
