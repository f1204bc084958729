"""The name that a TLS client asks for, from its first message. Pure.

A tunnel to a listed host must not lead to another name at the same address: so its first message is
a ClientHello that names this host (RFC 8446, section 4.1.2; RFC 6066, section 3).
"""

from __future__ import annotations

MOST_HELLO_BYTES = 1 << 16
_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 22, 1, 0, 0
_MOST_RECORDS = 8
"""A message in tiny records would be read again and again, for each of their bytes."""
_BEFORE_SESSION = 2 + 32
"""Bytes of version and random."""


class NotTls(Exception):
    """The bytes are no ClientHello with a name."""


class _Cursor:
    """Reads numbers and vectors; raises NotTls at the end of the bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise NotTls("A ClientHello is malformed.")
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def vector(self, size: int) -> _Cursor:
        """Returns what follows a length of `size` bytes."""
        return _Cursor(self.take(self.number(size)))


def server_name(first: bytes) -> str | None:
    """Returns the name in the ClientHello that `first` begins with; None: more bytes are needed.
    Raises NotTls: it begins with something else, or names no host.
    """
    hello = _hello(first)
    if hello is None:
        return None
    cursor = _Cursor(hello)
    cursor.take(_BEFORE_SESSION)
    cursor.vector(1)  # session
    cursor.vector(2)  # cipher suites
    cursor.vector(1)  # compression
    extensions = cursor.vector(2)
    while extensions.left:
        kind, extension = extensions.number(2), extensions.vector(2)
        if kind != _SERVER_NAME:
            continue
        names = extension.vector(2)
        while names.left:
            is_host, name = names.number(1) == _HOST_NAME, names.vector(2)
            if is_host:
                return name.take(name.left).decode("ascii", "replace").lower()
    raise NotTls("A ClientHello names no host.")


def _hello(first: bytes) -> bytes | None:
    """Returns the body of the ClientHello, which may come in several records."""
    message = b""
    at = 0
    for _ in range(_MOST_RECORDS + 1):
        if message[:1] not in (b"", bytes([_CLIENT_HELLO])):
            raise NotTls("What comes is not a ClientHello.")
        if len(message) >= 4 and len(message) >= (end := 4 + int.from_bytes(message[1:4])):
            return message[4:end]
        if len(first) > MOST_HELLO_BYTES:
            raise NotTls("A ClientHello is too long.")
        if first[at : at + 1] not in (b"", bytes([_HANDSHAKE])):
            raise NotTls("What comes is not TLS.")
        head, size = first[at : at + 5], int.from_bytes(first[at + 3 : at + 5])
        if len(head) < 5 or len(first) < at + 5 + size:
            return None
        if not size:
            raise NotTls("A record is empty.")
        message += first[at + 5 : at + 5 + size]
        at += 5 + size
    raise NotTls("A ClientHello is in too many records.")
