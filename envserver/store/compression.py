"""How a body lies in the database: as it came, or zstd-compressed where that makes it smaller.

Token ids and logprobs shrink by two to four, which saves more time in the database's writes than
compressing takes. Either form has a checksum, for a disk may damage what SQLite does not look at.
`encode` and `decode` are inverse and pure; both release the interpreter's lock while they work.
"""

from __future__ import annotations

import zlib
from typing import Final

from envserver_records.errors import TooLargeError
from envserver_records.zstd import zstd

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
_FRAME: Final = b"\x28\xb5\x2f\xfd"
_CHECKSUM_BIT: Final = 0x04
"""In the byte after those four."""


class DamagedBody(Exception):
    """What is stored is not what was."""


def encode(body: bytes) -> tuple[int, bytes]:
    """`body` as (encoding, bytes to store). Small or incompressible bodies are not compressed."""
    if len(body) >= _MIN_BYTES:
        packed = zstd.compress(body, options=_OPTIONS)
        if len(packed) <= 0.9 * len(body):
            return ZSTD, packed
    return CHECKED, zlib.crc32(body).to_bytes(_SUM_BYTES, "little") + body


def is_frame(body: bytes) -> bool:
    """Whether it begins as a zstd frame does; no packed record begins so."""
    return body.startswith(_FRAME)


def has_checksum(frame: bytes) -> bool:
    """Whether damage of a zstd frame is seen when it is inflated, so that it may be stored."""
    return bool(frame[len(_FRAME)] & _CHECKSUM_BIT)


def inflate_frame(frame: bytes, most: int) -> bytes:
    """The content of what somebody else compressed: one zstd frame that says how much it holds.

    Raises:
        DamagedBody: it is not that.
        TooLargeError: it says that it holds more than `most` bytes; none of them was read.
    """
    try:
        size = zstd.get_frame_info(frame).decompressed_size
        if size is None:
            raise DamagedBody("a zstd frame does not say how much it holds")
        if size > most:
            raise TooLargeError(f"It inflates to more than {most} bytes.", max_body_bytes=most)
        stream = zstd.ZstdDecompressor()
        content = stream.decompress(frame, max_length=size + 1)
    except zstd.ZstdError as error:
        raise DamagedBody(str(error)) from error
    if not stream.eof or stream.unused_data or len(content) != size:
        raise DamagedBody("it is no single zstd frame")
    return content


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
