"""Leases: groups are handed out once, and acknowledging twice is fine."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from ...config import ServerConfig
from ...store import Store
from ..atropos.service import AtroposService
from ..bodies import read_body, request_body
from ..leasing import MSGPACK, lease_as_json, lease_as_msgpack, wait_for_lease
from .answers import json_answer
from .models import LeaseExtension, LeaseReference, LeaseRequest

_LEASE: Final = TypeAdapter(LeaseRequest)
_REFERENCE: Final = TypeAdapter(LeaseReference)
_EXTENSION: Final = TypeAdapter(LeaseExtension)


def add_lease_routes(
    router: APIRouter, store: Store, atropos: AtroposService, settings: ServerConfig
) -> None:
    @router.post("/v1/runs/{run}/lease", openapi_extra=request_body(LeaseRequest))
    async def lease(run: str, request: Request) -> Response:
        """Hands out the oldest groups (200), or nothing when too few came in time (204).
        MessagePack when `Accept` asks for `application/vnd.envserver.groups+msgpack`, else JSON.
        """
        wanted = await read_body(request, _LEASE)
        batch_size = (await store.get_run(run)).batch_size
        max_groups = wanted.max_groups or max(batch_size, wanted.min_groups)
        found = await wait_for_lease(
            store,
            run,
            max_groups=max_groups,
            min_groups=wanted.min_groups,
            seconds=wanted.seconds or settings.lease_seconds,
            wait_seconds=wanted.wait_seconds,
            is_gone=request.is_disconnected,
        )
        if found is None:
            return Response(status_code=204)
        atropos.store_changed()
        if MSGPACK in request.headers.get("accept", ""):
            return Response(await lease_as_msgpack(store, found), media_type=MSGPACK)
        return Response(await lease_as_json(store, found), media_type="application/json")

    @router.post("/v1/runs/{run}/ack", openapi_extra=request_body(LeaseReference))
    async def ack(run: str, request: Request) -> Response:
        """The groups of the lease are never delivered again. Twice is fine."""
        lease_id = await _lease_id(run, request)
        await store.ack(lease_id)
        await atropos.lease_closed(lease_id)
        return Response(status_code=204)

    @router.post("/v1/runs/{run}/nack", openapi_extra=request_body(LeaseReference))
    async def nack(run: str, request: Request) -> Response:
        """Gives the groups of the lease back. Twice is fine."""
        lease_id = await _lease_id(run, request)
        await store.nack(lease_id)
        await atropos.lease_closed(lease_id)
        return Response(status_code=204)

    @router.post("/v1/runs/{run}/extend", openapi_extra=request_body(LeaseExtension))
    async def extend(run: str, request: Request) -> Response:
        """Lets the lease end so many seconds from now."""
        wanted = await read_body(request, _EXTENSION)
        await store.get_run(run)
        expires_at = await store.extend(wanted.lease_id, wanted.seconds)
        atropos.store_changed()
        return json_answer({"lease_id": wanted.lease_id, "expires_at": expires_at})

    async def _lease_id(run: str, request: Request) -> str:
        wanted = await read_body(request, _REFERENCE)
        await store.get_run(run)
        return wanted.lease_id
