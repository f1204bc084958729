"""The protocol of a sandbox's socket: JSON, with bytes beside it.

A frame is the length of the whole and of its text (4 bytes each, big-endian), the text, and the
bytes. The text is `[message, lengths]`; in the message, `{"$bytes": n}` stands for the n-th bytes.
Messages are arrays that begin with a word. Both ends bound what they take: the inside holds
programs of a model, so nothing from there is ever unpickled or believed to be short.

(JSON, because it is in the standard library: what a zygote imports, every sandbox pays for.)
"""

from __future__ import annotations

import json
import struct
from typing import Any

MAX_FRAME_BYTES = 96 * 2**20
"""A request (an archive may be large) or an answer; `SandboxSpec` and limits keep below it."""
MAX_MESSAGE_BYTES = 65536
"""Maximum size of one message between clients, supervisor and zygotes."""
NAMESPACE_BACKENDS = ("namespace", "bubblewrap")
"""Backends whose programs all end with the in-sandbox server."""

CONTAINER_READY = b"R"
"""What the server in a container says before any frame: it is warm, a spec may come."""
CONTAINER_ENDED = b"\0\0\0\0ENDED"
"""What it says last, when no program is left: the engine takes long to tell that."""

MAX_ANSWER_TEXT_BYTES = 2**20
"""Programs' output comes beside the text."""

# Not `envserver_records.framing`: a frame has two lengths, and a zygote must not import msgspec.
_lengths = struct.Struct(">II")
_MARK = "$bytes"


def encode(*parts: Any) -> bytes:
    attached: list[bytes] = []

    def attach(value: object) -> dict[str, int]:
        if not isinstance(value, (bytes, bytearray)):
            raise TypeError(f"a {type(value).__name__} cannot be sent")
        attached.append(bytes(value))
        return {_MARK: len(attached) - 1}

    message = json.dumps(parts, default=attach, ensure_ascii=False)
    text = f"[{message},{json.dumps([len(data) for data in attached])}]".encode()
    size = _lengths.size + len(text) + sum(map(len, attached))
    return b"".join((_lengths.pack(size, len(text)), text, *attached))


class Frames:
    """Collects bytes into frames. `most_text`: bytes of text in one; it may be a hundred times as
    large when it is read."""

    def __init__(self, most_text: int = MAX_FRAME_BYTES) -> None:
        self._most_text = most_text
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[list[Any]]:
        self._buffer += data
        found = []
        while len(self._buffer) >= _lengths.size:
            size, text_size = _lengths.unpack_from(self._buffer)
            whole = _lengths.size + text_size <= size <= MAX_FRAME_BYTES
            if not whole or text_size > self._most_text:
                raise ValueError(f"a frame of {size} bytes, {text_size} of them text")
            if len(self._buffer) < size:
                break
            found.append(_decode(bytes(self._buffer[_lengths.size : size]), text_size))
            del self._buffer[:size]
        return found


def _decode(body: bytes, text_size: int) -> list[Any]:
    try:
        plain, lengths = json.loads(body[:text_size])
        pieces, start = [], text_size
        for length in lengths:
            if not 0 <= length <= len(body) - start:
                raise ValueError("bytes that are not there")
            pieces.append(body[start : start + length])
            start += length
        message = _restored(plain, pieces) if pieces else plain
    except (ValueError, TypeError, IndexError, RecursionError) as error:
        raise ValueError(f"a frame that is not a message: {error}") from None
    if not isinstance(message, list) or not message or not isinstance(message[0], str):
        raise ValueError("a frame that is not a message")
    return message


def _restored(value: Any, pieces: list[bytes]) -> Any:
    if isinstance(value, list):
        return [_restored(item, pieces) for item in value]
    if isinstance(value, dict):
        index = value.get(_MARK)
        if isinstance(index, int) and len(value) == 1:
            return pieces[index]
        return {name: _restored(item, pieces) for name, item in value.items()}
    return value
