"""JSON objects in frames over a socket, between an agent and its interpreter."""

from __future__ import annotations

import json
import socket
from typing import Any

from envserver_records import framing

MAX_BYTES = 8_000_000


class BrokenFrame(Exception):
    """The data is not a frame, or the other side is gone."""


def send(channel: socket.socket, message: dict[str, Any]) -> None:
    """Sends one message; what JSON has no form for is sent as text."""
    channel.sendall(framing.frame(json.dumps(message, default=str).encode()))


def receive(channel: socket.socket) -> dict[str, Any]:
    try:
        message = json.loads(framing.receive_frame(channel, MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenFrame(str(error)) from error
    if not isinstance(message, dict):
        raise BrokenFrame("not an object")
    return message
