"""Bodies as they travel: as zstd where this process can read it, else as they are.

The server compresses only what a client says it accepts, so zstd (the extra `zstd` before
Python 3.14) makes transfers smaller and is not needed for them.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator

from envserver_records import InputError
from envserver_records.framing import FrameReader

try:
    from envserver_records.zstd import zstd
except ModuleNotFoundError:
    HAS_ZSTD = False
else:
    HAS_ZSTD = True


def decompress(content: bytes, encoding: str) -> bytes:
    """Returns the content of a body with the content encoding `encoding`.
    Raises InputError: it is damaged, or compressed in another way than was asked for.
    """
    if encoding in ("", "identity"):
        return content
    if encoding == "zstd" and HAS_ZSTD:
        try:
            return zstd.decompress(content)
        except zstd.ZstdError as error:
            raise _damaged(error) from error
    if encoding == "gzip":
        try:
            return gzip.decompress(content)
        except (EOFError, OSError) as error:
            raise _damaged(error) from error
    raise _unknown(encoding)


class LeaseStreamReader:
    """Cuts one connection's stream of leases into their bytes, from its beginning.

    In: pieces of the stream as the connection gives them. Out: the leases, each as the bytes that
    `decode_batch` reads; empty ones say that the server is there. With zstd the whole stream is
    zstd frames one after the other.

    Args:
        encoding: the stream's content encoding, "" or "zstd".
    """

    def __init__(self, encoding: str) -> None:
        if encoding not in ("", "identity", *(["zstd"] if HAS_ZSTD else [])):
            raise _unknown(encoding)
        self._inflater = zstd.ZstdDecompressor() if encoding == "zstd" else None
        self._reader = FrameReader()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields the leases that `data` completes, empty ones too.
        Raises InputError: the stream is damaged.
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
                raise _damaged(error) from error
            if part:
                yield part
            data = b""
            if self._inflater.eof:
                data = self._inflater.unused_data
                self._inflater = zstd.ZstdDecompressor()


def _damaged(error: Exception) -> InputError:
    return InputError(f"The server's answer is damaged: {error}.", place="body")


def _unknown(encoding: str) -> InputError:
    return InputError(f"The server's answer is compressed as {encoding}.", place="body")
