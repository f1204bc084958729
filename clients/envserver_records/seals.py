"""Digests by which a group that was changed, removed or moved is found.

A packed group ends with the digest of all bytes before it. A line of JSONL ends with `chain`: the
digest of the line before it, and its own, which covers its bytes and that of the line before. A
digest shows that data are as they were written; it is not a signature: whoever rewrites a whole
file can make new ones.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final, NamedTuple

import msgspec

from .records import Group, pack

_HEX: Final = 64
_CHAIN: Final = b',"chain":{"previous":"%b","digest":"%b"}}\n'
_END: Final = re.compile(
    rb',"chain":\{"previous":"([0-9a-f]{64}|)","digest":"([0-9a-f]{64})"\}\}\n?\Z'
)
_LONGEST_END: Final = 256


def digest_of(*parts: bytes | memoryview) -> str:
    """Returns the BLAKE2b-256 digest of `parts` in hex."""
    digest = hashlib.blake2b(digest_size=_HEX // 2)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def sealed(group: Group) -> Group:
    """Returns `group` with the digest of its contents."""
    body = pack(msgspec.structs.replace(group, digest="0" * _HEX))
    return msgspec.structs.replace(group, digest=digest_of(body[:-_HEX]))


def is_intact(body: bytes | memoryview) -> bool:
    """Returns whether a packed group that has a digest is as it was sealed."""
    view = memoryview(body)  # a slice of bytes is a copy
    return digest_of(view[:-_HEX]).encode() == view[-_HEX:]


class Link(NamedTuple):
    """A line's place in the chain of its file.

    Args:
        previous: digest of the line before it; "" for the first.
        digest: its own.
        intact: whether the line still has this digest.
    """

    previous: str
    digest: str
    intact: bool


def chained(line: bytes, previous: str) -> bytes:
    """Returns `line` (a JSON object and a newline) with its link.

    Args:
        previous: see `digest_after`; "" for the first line of a file.
    """
    body = line.removesuffix(b"\n").removesuffix(b"}")
    said = previous.encode()
    return body + _CHAIN % (said, digest_of(said, body).encode())


def link_of(line: bytes) -> Link | None:
    """Returns the link at the end of `line`; None if it has none."""
    found = _END.search(line, max(0, len(line) - _LONGEST_END))
    if found is None:
        return None
    previous, digest = found[1], found[2].decode()
    intact = digest_of(previous, line[: found.start()]) == digest
    return Link(previous.decode(), digest, intact)


def digest_after(line: bytes) -> str:
    """Returns the `previous` of the line after `line`, whether or not it has a link itself."""
    link = link_of(line)
    return link.digest if link is not None else digest_of(line.removesuffix(b"\n"))
