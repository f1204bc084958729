"""The binary stream of leases, taken apart as it comes in.

In: pieces of the stream as the connection gives them. Out: the leases in it, each as the bytes that
`decode_batch` reads. An empty frame says that the server is there. With zstd the whole stream is
zstd frames one after the other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from envserver_records import InputError
from envserver_records.framing import FrameReader

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


class Frames:
    """Reads one connection's stream from its beginning.

    Args:
        encoding: the stream's content encoding, "" or "zstd".
    """

    def __init__(self, encoding: str) -> None:
        if encoding not in ("", "identity", "zstd"):
            raise InputError(f"The server's stream is compressed as {encoding}.", place="stream")
        self._inflater = zstd.ZstdDecompressor() if encoding == "zstd" else None
        self._reader = FrameReader()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields the bodies of the frames that `data` completes, empty ones too.

        Raises:
            InputError: the stream is damaged.
        """
        for part in self._inflated(data):
            yield from self._reader.feed(part)

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
