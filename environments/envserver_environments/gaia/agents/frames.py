"""JSON objects over a socket, each behind its length: between an agent and its interpreter."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

MAX_BYTES = 8_000_000
_LENGTH = struct.Struct(">I")


class BrokenFrame(Exception):
    """What came is no frame, or the other side is gone."""


def send(channel: socket.socket, frame: dict[str, Any]) -> None:
    """Raises OSError where the other side is gone. What JSON has no form for is sent as text."""
    body = json.dumps(frame, default=str).encode()
    channel.sendall(_LENGTH.pack(len(body)) + body)


def receive(channel: socket.socket) -> dict[str, Any]:
    """The next frame; waits for it, no longer than the socket's timeout.

    Raises:
        BrokenFrame: there is none.
    """
    try:
        (length,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size))
        if length > MAX_BYTES:
            raise BrokenFrame(f"a frame of {length} bytes")
        frame = json.loads(_exactly(channel, length))
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenFrame(str(error)) from error
    if not isinstance(frame, dict):
        raise BrokenFrame("no object")
    return frame


def _exactly(channel: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(min(size - len(parts), 1 << 16))
        if not part:
            raise BrokenFrame("the other side is gone")
        parts += part
    return bytes(parts)
