"""Several groups in one request: how they travel from a joiner to the server.

A MessagePack array of binaries, each one group as `records.pack` made it, or that as one zstd
frame with its size and its checksum, which the server stores as it came: what the joiner compressed
is not compressed again. One request for what is ready costs the server a fraction of as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from envserver_records.zstd import zstd

GROUP_LIST_MSGPACK: Final = "application/vnd.envserver.group-list+msgpack"
"""Media type of several posted groups."""
MOST_GROUPS: Final = 64
"""In one request."""
MOST_BYTES: Final = 16 * 1024 * 1024
"""A joiner puts no more together than this; one group alone may be larger."""

_MIN_BYTES: Final = 4096
_OPTIONS: Final[dict[int, int]] = {
    zstd.CompressionParameter.compression_level: 1,
    zstd.CompressionParameter.checksum_flag: 1,
}


def compressed(packed: bytes) -> bytes:
    """A packed group as it travels: as one zstd frame where that is smaller. CPU work."""
    if len(packed) < _MIN_BYTES:
        return packed
    frame = zstd.compress(packed, options=_OPTIONS)
    return frame if len(frame) <= 0.9 * len(packed) else packed


def encode_batch(bodies: Sequence[bytes]) -> bytes:
    """The body of a request with these groups, compressed or not."""
    return msgspec.msgpack.encode(bodies)
