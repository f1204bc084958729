"""The binary stream of leases, taken apart as it comes in.

In: pieces of the stream as the connection gives them. Out: the leases in it, each as the bytes that
`decode_batch` reads. A frame is its length (4 bytes, big-endian) and as many bytes; an empty frame
says that the server is there. With zstd the whole stream is zstd frames one after the other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Final

from envserver_records import InputError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_LENGTH: Final = 4


class Frames:
    """Reads one connection's stream from its beginning.

    Args:
        encoding: the stream's content encoding, "" or "zstd".
    """

    def __init__(self, encoding: str) -> None:
        if encoding not in ("", "identity", "zstd"):
            raise InputError(f"The server's stream is compressed as {encoding}.", place="stream")
        self._inflater = zstd.ZstdDecompressor() if encoding == "zstd" else None
        self._parts: list[bytes] = []
        self._have = 0
        self._length: int | None = None

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The frames that `data` completes, empty ones too.

        Raises:
            InputError: the stream is damaged.
        """
        for part in self._inflated(data):
            self._parts.append(part)
            self._have += len(part)
            yield from self._complete()

    def _inflated(self, data: bytes) -> Iterator[bytes]:
        if self._inflater is None:
            yield data
            return
        while data:
            try:
                part = self._inflater.decompress(data)
            except zstd.ZstdError as error:
                raise InputError(f"The stream is damaged: {error}.", place="stream") from error
            if part:
                yield part
            data = b""
            if self._inflater.eof:
                data = self._inflater.unused_data
                self._inflater = zstd.ZstdDecompressor()

    def _complete(self) -> Iterator[bytes]:
        while True:
            wanted = _LENGTH if self._length is None else self._length
            if self._have < wanted:
                return
            joined = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            found, rest = joined[:wanted], joined[wanted:]
            self._parts = [rest] if rest else []
            self._have = len(rest)
            if self._length is None:
                self._length = int.from_bytes(found, "big")
            else:
                self._length = None
                yield found
