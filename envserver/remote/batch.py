"""Encodes several groups in one request from a runner to the server.

A MessagePack array of binaries. Each is a group as packed by `records.pack`, or the same as one
zstd frame with its size and checksum, which the server stores unchanged: what the runner has
compressed is not compressed again. One request for many groups costs the server much less than
many requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from envserver_records.zstd import zstd

GROUP_LIST_MSGPACK: Final = "application/vnd.envserver.group-list+msgpack"
"""Media type of a post of several groups."""
MOST_GROUPS: Final = 64
"""Maximum number of groups in one request."""
MOST_BYTES: Final = 16 * 1024 * 1024
"""Maximum total size of a runner's request; a single group may be larger."""

_MIN_BYTES: Final = 4096
_OPTIONS: Final[dict[int, int]] = {
    zstd.CompressionParameter.compression_level: 1,
    zstd.CompressionParameter.checksum_flag: 1,
}


def compressed(packed: bytes) -> bytes:
    """Compresses a packed group into one zstd frame, if that is smaller. CPU work."""
    if len(packed) < _MIN_BYTES:
        return packed
    frame = zstd.compress(packed, options=_OPTIONS)
    return frame if len(frame) <= 0.9 * len(packed) else packed


def encode_batch(bodies: Sequence[bytes]) -> bytes:
    """Encodes the body of a request with these groups, each compressed or not."""
    return msgspec.msgpack.encode(bodies)
