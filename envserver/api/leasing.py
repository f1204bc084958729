"""Waiting for groups, and groups as bytes: what stands behind `POST /v1/runs/{run}/lease` and
`GET /v1/groups/{group_id}`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
import orjson

from ..records import Group, unpack
from ..store import GroupRow, Lease, Store
from .atropos.convert import group_to_atropos

MSGPACK: Final = "application/vnd.envserver.groups+msgpack"
"""Media type of a lease whose bodies are bytes."""
GROUP_MSGPACK: Final = "application/vnd.envserver.group+msgpack"
"""Media type of one group whose body is bytes."""

_FIRST_POLL_SECONDS: Final = 0.02
_LONGEST_POLL_SECONDS: Final = 0.25


class TravellingGroup(msgspec.Struct):
    """One group, of a lease or alone, as it travels: `format` says how to read `body`."""

    group_id: str
    env: str
    format: str
    policy_version: int
    body: bytes


class LeaseEnvelope(msgspec.Struct):
    """A lease as it travels, in MessagePack. `expires_at` is seconds of the server's clock."""

    lease_id: str
    expires_at: float
    groups: list[TravellingGroup]


async def wait_for_lease(
    store: Store,
    run: str,
    *,
    max_groups: int,
    min_groups: int,
    seconds: float,
    wait_seconds: float,
    is_gone: Callable[[], Awaitable[bool]],
) -> Lease | None:
    """Leases as soon as `min_groups` groups wait; None when they do not within `wait_seconds`, or
    when the client has gone meanwhile.
    """
    deadline = time.monotonic() + wait_seconds
    pause = _FIRST_POLL_SECONDS
    while True:
        if (await store.counts())["queued"] >= min_groups and not await is_gone():
            lease = await store.lease(run, max_groups=max_groups, seconds=seconds)
            if lease is not None and len(lease.groups) >= min_groups:
                return lease
            if lease is not None:
                await store.nack(lease.lease_id)
        left = deadline - time.monotonic()
        if left <= 0 or await is_gone():
            return None
        await asyncio.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_POLL_SECONDS)


async def lease_as_msgpack(store: Store, lease: Lease) -> bytes:
    """The lease with the bodies as they are stored: nothing is decoded."""
    bodies = await store.bodies([row.group_id for row in lease.groups])
    groups = [_travelling(row, body) for row, body in zip(lease.groups, bodies, strict=True)]
    return msgspec.msgpack.encode(LeaseEnvelope(lease.lease_id, lease.expires_at, groups))


async def lease_as_json(store: Store, lease: Lease) -> bytes:
    """The lease for people and curl: each group with the keys of the Atropos wire."""
    bodies = await store.bodies([row.group_id for row in lease.groups])
    return await asyncio.to_thread(_as_json, lease, bodies)


def _as_json(lease: Lease, bodies: list[bytes]) -> bytes:
    groups = [_json_object(row, body) for row, body in zip(lease.groups, bodies, strict=True)]
    return orjson.dumps(
        {"lease_id": lease.lease_id, "expires_at": lease.expires_at, "groups": groups}
    )


async def group_as_msgpack(store: Store, row: GroupRow) -> bytes:
    """One group with its body as it is stored."""
    (body,) = await store.bodies([row.group_id])
    return msgspec.msgpack.encode(_travelling(row, body))


async def group_as_json(store: Store, row: GroupRow) -> bytes:
    """One group with the keys of the Atropos wire, as in a lease."""
    (body,) = await store.bodies([row.group_id])
    return await asyncio.to_thread(lambda: orjson.dumps(_json_object(row, body)))


def _travelling(row: GroupRow, body: bytes) -> TravellingGroup:
    return TravellingGroup(row.group_id, row.env, row.format, row.policy_version, body)


def _json_object(row: GroupRow, body: bytes) -> dict[str, Any]:
    return {
        "group_id": row.group_id,
        "env": row.env,
        "format": row.format,
        "policy_version": row.policy_version,
        "group": _json_group(row.format, body),
    }


def _json_group(kind: str, body: bytes) -> object:
    if kind == "atropos":
        return orjson.Fragment(body)
    return group_to_atropos(unpack(body, Group), include_messages=True)
