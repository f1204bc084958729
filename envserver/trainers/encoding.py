"""Encodes groups: the responses for leases, streams of leases and single groups.

A body is read once for all runs that lease it at about the same time, and is checked for damage
before the first byte of a response. Clients that accept zstd get bodies as stored: concatenated
zstd frames are one zstd content, so the bytes between bodies get frames of their own."""

from __future__ import annotations

import asyncio
import struct
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, TypeVar

import msgspec
import orjson
from envserver_records.records import Group, unpack
from envserver_records.wire import WireGroup, WireLease
from envserver_records.zstd import zstd
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..formats.atropos import expert_rows, group_to_atropos, image_data
from ..http.transfer import accepts
from ..store import GroupRow, Lease
from ..store.deliveries import DamagedBodies, decode_all
from ..store.lookups import GroupLookups
from ..store.packed import RAW, ZSTD, decode

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Cache(Generic[K, V]):
    """A cache of values by key. Concurrent requests for a key load it once; if one caller is
    cancelled or the load fails, the others still get the value, or the same error.

    Args:
        most_bytes: maximum total size of the kept values.
        idle_seconds: values unused for this long are evicted when the next value is added.
    """

    def __init__(
        self,
        load: Callable[[Sequence[K]], Awaitable[Sequence[V]]],
        size_bytes: Callable[[V], int],
        most_bytes: int,
        *,
        idle_seconds: float = 120.0,
    ) -> None:
        self._load = load
        self._size_bytes = size_bytes
        self._most_bytes = most_bytes
        self._idle_seconds = idle_seconds
        self._kept: OrderedDict[K, tuple[float, V]] = OrderedDict()
        self._bytes = 0
        self._loading: dict[K, asyncio.Task[dict[K, V]]] = {}

    async def get(self, keys: Sequence[K]) -> list[V]:
        found: dict[K, V] = {}
        now = time.monotonic()
        for key in keys:
            if key in self._kept:
                _, found[key] = self._kept[key]
                self._kept[key] = (now, found[key])
                self._kept.move_to_end(key)
        missing = [key for key in dict.fromkeys(keys) if key not in found]
        to_load = [key for key in missing if key not in self._loading]
        if to_load:
            task = asyncio.create_task(self._load_all(to_load), name="cache-load")
            self._loading.update(dict.fromkeys(to_load, task))
            task.add_done_callback(partial(self._loaded, to_load))
        for task in {self._loading[key] for key in missing}:
            found |= await asyncio.shield(task)
        return [found[key] for key in keys]

    async def _load_all(self, keys: Sequence[K]) -> dict[K, V]:
        return dict(zip(keys, await self._load(keys), strict=True))

    def _loaded(self, keys: Sequence[K], task: asyncio.Task[dict[K, V]]) -> None:
        for key in keys:
            del self._loading[key]
        if not task.cancelled() and task.exception() is None:
            for key, value in task.result().items():
                self._keep(key, value)

    def forget(self, key: K) -> None:
        if key in self._kept:
            self._bytes -= self._size_bytes(self._kept.pop(key)[1])

    def _keep(self, key: K, value: V) -> None:
        size = self._size_bytes(value)
        if size > self._most_bytes:
            return
        now = time.monotonic()
        self._kept[key] = (now, value)
        self._bytes += size
        while self._bytes > self._most_bytes or self._oldest() < now - self._idle_seconds:
            _, (_, value) = self._kept.popitem(last=False)
            self._bytes -= self._size_bytes(value)

    def _oldest(self) -> float:
        return next(iter(self._kept.values()))[0]


_MOST_BYTES: Final = 64 * 1024 * 1024
_INLINE_BYTES: Final = 64 * 1024
"""Bodies smaller than this are decompressed on the event loop, faster than switching threads."""
_LEVEL: Final = 1


def zstd_frame(content: bytes) -> bytes:
    return zstd.compress(content, level=_LEVEL)


@dataclass(frozen=True)
class _Stored:
    encoding: int
    data: bytes

    def size(self) -> int:
        if self.encoding == ZSTD:
            return zstd.get_frame_info(self.data).decompressed_size or 0
        return len(self.data)


class Packed:
    """A lease or group in MessagePack, ready to write: the bodies, and the bytes before each of
    them. `size`: total bytes when decompressed."""

    def __init__(self, pieces: Sequence[bytes | _Stored]) -> None:
        self._pieces = pieces
        self.size = sum(len(p) if isinstance(p, bytes) else p.size() for p in pieces)

    async def plain(self) -> AsyncIterator[bytes]:
        """Yields the plain bytes, decompressing one body at a time."""
        for piece in self._pieces:
            if isinstance(piece, bytes):
                yield piece
            elif piece.encoding != ZSTD or len(piece.data) < _INLINE_BYTES:
                yield _plain(piece)
            else:
                yield await asyncio.to_thread(_plain, piece)

    def compressed(self, prefix: bytes = b"") -> list[bytes]:
        """Returns zstd frames, with `prefix` in front."""
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
    """Encodes leases and groups; one per app. `most_bytes`: cache size for bodies that other runs
    may also get, and again for groups in JSON."""

    def __init__(self, store: GroupLookups, most_bytes: int = _MOST_BYTES) -> None:
        self._store = store
        self._stored = Cache(self._read, lambda body: len(body.data), most_bytes)
        self._json = Cache(self._encode, len, most_bytes)

    async def lease(self, lease: Lease) -> Packed:
        start = msgspec.msgpack.encode(WireLease(lease.lease_id, lease.expires_at, []))
        # Replace the last byte, an empty array, with an array header of the real length.
        pieces: list[bytes | _Stored] = [start[:-1] + struct.pack(">BI", 0xDD, len(lease.groups))]
        bodies = await self._stored.get([row.group_id for row in lease.groups])
        for row, body in zip(lease.groups, bodies, strict=True):
            pieces += _pieces(row, body)
        return Packed(pieces)

    async def group(self, row: GroupRow) -> Packed:
        (body,) = await self._stored.get([row.group_id])
        return Packed(_pieces(row, body))

    async def lease_as_json(self, lease: Lease) -> bytes:
        """Encodes a lease in JSON; each group has the keys of the Atropos protocol."""
        groups = await self._json.get([row.group_id for row in lease.groups])
        found = [_json_object(row, body) for row, body in zip(lease.groups, groups, strict=True)]
        return orjson.dumps(
            {"lease_id": lease.lease_id, "expires_at": lease.expires_at, "groups": found}
        )

    async def group_as_json(self, row: GroupRow) -> bytes:
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
    """Checks bodies; compressed ones stay so."""
    plain = decode_all(group_ids, found)
    return [
        _Stored(encoding, data) if encoding == ZSTD else _Stored(RAW, body)
        for (encoding, data), body in zip(found, plain, strict=True)
    ]


def _plain(stored: _Stored) -> bytes:
    return decode(stored.encoding, stored.data)


def _pieces(row: GroupRow, body: _Stored) -> list[bytes | _Stored]:
    group = WireGroup(row.group_id, row.env, row.format, row.policy_version, memoryview(b""))
    # Replace the last two bytes, an empty binary, with the header of the body.
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
            unreadable[row.group_id] = f"it is not a group ({error})"
    if unreadable:
        raise DamagedBodies(unreadable)
    return found


def _encoded(row: GroupRow, stored: _Stored) -> bytes:
    body = _plain(stored)
    if row.format == "atropos":
        return body
    group = unpack(body, Group)
    fields = group_to_atropos(group, include_messages=True)
    if group.images:
        fields["image_data"] = image_data(group)
    if (experts := expert_rows(group)) is not None:
        fields["experts"] = experts
    return orjson.dumps(fields)


class PackedAnswer(Response):
    """Sends a lease or group in MessagePack in chunks; zstd for clients that accept it."""

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
