"""Groups as bytes: what stands behind a lease's answer, a stream of leases and one group's answer.

In: leases, and bodies as they lie in the store. Out: parts to be written one after the other, never
joined. What holds: a body is read once for all runs that get it at about the same time, and looked
through for damage then, before the first byte of an answer; for clients that take zstd it leaves as
it lies on disk: zstd frames one after the other are one zstd content, so what stands between the
bodies is put into frames of its own.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import orjson
from envserver_records.records import Group, unpack
from envserver_records.wire import WireGroup, WireLease
from envserver_records.zstd import zstd
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..formats.atropos import group_to_atropos
from ..store import GroupRow, GroupStore, Lease
from ..store.compression import RAW, ZSTD, decode
from ..store.damage import DamagedBodies, decode_all
from .cache import Cache
from .transfer import accepts

_MOST_BYTES: Final = 64 * 1024 * 1024
_INLINE_BYTES: Final = 64 * 1024
"""Less than this is inflated on the event loop: it takes less time than a change of threads."""
_LEVEL: Final = 1


def zstd_frame(content: bytes) -> bytes:
    """`content` as one zstd frame."""
    return zstd.compress(content, level=_LEVEL)


@dataclass(frozen=True)
class _Stored:
    """A body as it lies in the database, when it is compressed there; else as it is."""

    encoding: int
    data: bytes

    def size(self) -> int:
        """Bytes when inflated."""
        if self.encoding == ZSTD:
            return zstd.get_frame_info(self.data).decompressed_size or 0
        return len(self.data)


class Packed:
    """A lease or group in MessagePack, ready to be written.

    Args:
        pieces: what stands before each body, and the bodies.
        size: bytes of all, inflated.
    """

    def __init__(self, pieces: Sequence[bytes | _Stored]) -> None:
        self._pieces = pieces
        self.size = sum(len(p) if isinstance(p, bytes) else p.size() for p in pieces)

    async def plain(self) -> AsyncIterator[bytes]:
        """As it is; one body at a time is inflated."""
        for piece in self._pieces:
            if isinstance(piece, bytes):
                yield piece
            elif piece.encoding != ZSTD or len(piece.data) < _INLINE_BYTES:
                yield _plain(piece)
            else:
                yield await asyncio.to_thread(_plain, piece)

    def compressed(self, prefix: bytes = b"") -> list[bytes]:
        """As zstd frames, `prefix` before it."""
        parts: list[bytes] = []
        raw = [prefix]
        for piece in self._pieces:
            if isinstance(piece, bytes):
                raw.append(piece)
            elif piece.encoding != ZSTD:
                raw.append(piece.data)
            else:
                parts += [zstd_frame(b"".join(raw)), piece.data]
                raw = []
        if raw:
            parts.append(zstd_frame(b"".join(raw)))
        return parts


class GroupEncoder:
    """Makes leases and groups into bytes; one for an app.

    Args:
        most_bytes: of the bodies kept for other runs that get the same groups, and as many of
            groups in JSON.
    """

    def __init__(self, store: GroupStore, most_bytes: int = _MOST_BYTES) -> None:
        self._store = store
        self._stored = Cache(self._read, lambda body: len(body.data), most_bytes)
        self._json = Cache(self._encode, len, most_bytes)

    async def lease(self, lease: Lease) -> Packed:
        """The lease with its bodies, in MessagePack. Raises DamagedBodies."""
        start = msgspec.msgpack.encode(WireLease(lease.lease_id, lease.expires_at, []))
        # An empty array is the last byte; in its place comes the length of ours.
        pieces: list[bytes | _Stored] = [start[:-1] + struct.pack(">BI", 0xDD, len(lease.groups))]
        bodies = await self._stored.get([row.group_id for row in lease.groups])
        for row, body in zip(lease.groups, bodies, strict=True):
            pieces += _pieces(row, body)
        return Packed(pieces)

    async def group(self, row: GroupRow) -> Packed:
        """One group with its body, in MessagePack."""
        (body,) = await self._stored.get([row.group_id])
        return Packed(_pieces(row, body))

    async def lease_as_json(self, lease: Lease) -> bytes:
        """The lease for people and curl: each group with the keys of the Atropos wire.

        Raises:
            DamagedBodies: some cannot be read.
        """
        groups = await self._json.get([row.group_id for row in lease.groups])
        found = [_json_object(row, body) for row, body in zip(lease.groups, groups, strict=True)]
        return orjson.dumps(
            {"lease_id": lease.lease_id, "expires_at": lease.expires_at, "groups": found}
        )

    async def group_as_json(self, row: GroupRow) -> bytes:
        """One group with the keys of the Atropos wire, as in a lease."""
        (body,) = await self._json.get([row.group_id])
        return orjson.dumps(_json_object(row, body))

    async def _read(self, group_ids: Sequence[str]) -> list[_Stored]:
        found = await self._store.stored_bodies(group_ids)
        if sum(len(data) for _, data in found) < _INLINE_BYTES:
            return _looked_through(group_ids, found)
        return await asyncio.to_thread(_looked_through, group_ids, found)

    async def _encode(self, group_ids: Sequence[str]) -> list[bytes]:
        rows = await self._store.rows(group_ids)
        bodies = await self._stored.get(group_ids)
        return await asyncio.to_thread(_encode_all, rows, bodies)


def _looked_through(group_ids: Sequence[str], found: Sequence[tuple[int, bytes]]) -> list[_Stored]:
    """What is compressed stays as it is. Raises DamagedBodies: it names all that are damaged."""
    plain = decode_all(group_ids, found)
    return [
        _Stored(encoding, data) if encoding == ZSTD else _Stored(RAW, body)
        for (encoding, data), body in zip(found, plain, strict=True)
    ]


def _plain(stored: _Stored) -> bytes:
    """It was looked through when it was read."""
    return decode(stored.encoding, stored.data)


def _pieces(row: GroupRow, body: _Stored) -> list[bytes | _Stored]:
    group = WireGroup(row.group_id, row.env, row.format, row.policy_version, memoryview(b""))
    # Empty bytes are the last two; in their place come the length and the bytes of the body.
    start = msgspec.msgpack.encode(group)[:-2]
    return [start + struct.pack(">BI", 0xC6, body.size()), body]


def _json_object(row: GroupRow, encoded: bytes) -> dict[str, Any]:
    return {
        "group_id": row.group_id,
        "env": row.env,
        "format": row.format,
        "policy_version": row.policy_version,
        "group": orjson.Fragment(encoded),
    }


def _encode_all(rows: Sequence[GroupRow], bodies: Sequence[_Stored]) -> list[bytes]:
    found: list[bytes] = []
    unreadable: dict[str, str] = {}
    for row, body in zip(rows, bodies, strict=True):
        try:
            found.append(_encoded(row, body))
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            unreadable[row.group_id] = f"it is no group ({error})"
    if unreadable:
        raise DamagedBodies(unreadable)
    return found


def _encoded(row: GroupRow, stored: _Stored) -> bytes:
    body = _plain(stored)
    if row.format == "atropos":
        return body
    return orjson.dumps(group_to_atropos(unpack(body, Group), include_messages=True))


class PackedAnswer(Response):
    """A lease or group in MessagePack, written part by part; zstd for clients that take it."""

    def __init__(self, packed: Packed, media_type: str, request_headers: Headers) -> None:
        super().__init__(media_type=media_type)
        self._packed = packed
        self._compress = accepts(request_headers, "zstd")
        self.headers["vary"] = "Accept, Accept-Encoding"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._compress:
            parts = self._packed.compressed()
            self.headers["content-encoding"] = "zstd"
            self.headers["content-length"] = str(sum(map(len, parts)))
        else:
            self.headers["content-length"] = str(self._packed.size)
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        if self._compress:
            for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        else:
            async for part in self._packed.plain():
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
