"""How a body lies in the database: as it came, or zstd-compressed where that makes it smaller.

Token ids and logprobs shrink by two to four, which saves more time in the database's writes than
compressing takes. Either form has a checksum, for a disk may damage what SQLite does not look at.
`encode` and `decode` are inverse and pure; both release the interpreter's lock while they work.
"""

from __future__ import annotations

import sys
import zlib
from typing import Final

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

RAW: Final = 0
ZSTD: Final = 1
"""With or without the checksum of its own; decompressing looks at it."""
CHECKED: Final = 2
"""Four bytes CRC-32, then as it came. What is RAW is of older stores."""

_MIN_BYTES: Final = 4096
_OPTIONS: Final[dict[int, int]] = {
    zstd.CompressionParameter.compression_level: 1,
    zstd.CompressionParameter.checksum_flag: 1,
}
_SUM_BYTES: Final = 4


class DamagedBody(Exception):
    """What is stored is not what was."""


def encode(body: bytes) -> tuple[int, bytes]:
    """`body` as (encoding, bytes to store). Small or incompressible bodies are not compressed."""
    if len(body) >= _MIN_BYTES:
        packed = zstd.compress(body, options=_OPTIONS)
        if len(packed) <= 0.9 * len(body):
            return ZSTD, packed
    return CHECKED, zlib.crc32(body).to_bytes(_SUM_BYTES, "little") + body


def decode(encoding: int, stored: bytes) -> bytes:
    """The body that `encode` was given.

    Raises:
        DamagedBody: `stored` is damaged.
    """
    if encoding == RAW:
        return stored
    if encoding == ZSTD:
        try:
            return zstd.decompress(stored)
        except zstd.ZstdError as error:
            raise DamagedBody(str(error)) from error
    body = stored[_SUM_BYTES:]
    if zlib.crc32(body) != int.from_bytes(stored[:_SUM_BYTES], "little"):
        raise DamagedBody("its checksum is wrong")
    return body
