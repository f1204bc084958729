"""The native routes under /v1: runs, leases, groups, policy versions, status; and health.

What holds: creating a run is idempotent by its name, a lease is handed out once, acknowledging
twice is fine, a policy version never goes down. Errors are problem details.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec
import orjson
from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator
from starlette.requests import Request
from starlette.responses import Response

from .. import __version__
from ..config import ServerConfig
from ..errors import ConflictError, NotFoundError
from ..store import ATROPOS_RUN, GroupRow, Run, Store
from .atropos.service import AtroposService
from .bodies import read_body, request_body
from .leasing import (
    GROUP_MSGPACK,
    MSGPACK,
    group_as_json,
    group_as_msgpack,
    lease_as_json,
    lease_as_msgpack,
    wait_for_lease,
)

_POLICY_VERSION: Final = "policy_version"
_LONGEST_WAIT_SECONDS: Final = 60.0
_MOST_GROUPS: Final = 1024
_LONGEST_LEASE_SECONDS: Final = 7 * 24 * 3600.0
VERSION_LIMIT: Final = 2**31 - 1
_SEQ_LIMIT: Final = 2**63 - 1

Seconds = Annotated[float, Field(gt=0, le=_LONGEST_LEASE_SECONDS, allow_inf_nan=False)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RunRequest(_Body):
    """A run to be created, or resumed when there is one of this name."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    batch_size: int | None = Field(default=None, ge=1, le=_MOST_GROUPS)
    """Groups per lease where the lease names no number; 8 for a new run."""
    settings: dict[str, Any] | None = None
    """Anything the trainer wants to find again."""


class LeaseRequest(_Body):
    max_groups: int | None = Field(default=None, ge=1, le=_MOST_GROUPS)
    """Most groups; unset: the run's batch size."""
    min_groups: int = Field(default=1, ge=1, le=_MOST_GROUPS)
    """Wait until so many are there."""
    wait_seconds: float = Field(default=0.0, ge=0, le=_LONGEST_WAIT_SECONDS)
    seconds: Seconds | None = None
    """How long the lease lasts; unset: as the server is set."""

    @model_validator(mode="after")
    def _in_order(self) -> LeaseRequest:
        if self.max_groups is not None and self.min_groups > self.max_groups:
            raise ValueError("min_groups is more than max_groups")
        return self


class LeaseReference(_Body):
    lease_id: str


class LeaseExtension(LeaseReference):
    seconds: Seconds


class PolicyVersionRequest(_Body):
    version: int = Field(ge=0, le=VERSION_LIMIT, strict=True)


_RUN: Final = TypeAdapter(RunRequest)
_LEASE: Final = TypeAdapter(LeaseRequest)
_REFERENCE: Final = TypeAdapter(LeaseReference)
_EXTENSION: Final = TypeAdapter(LeaseExtension)
_VERSION: Final = TypeAdapter(PolicyVersionRequest)


class PolicyVersion:
    """The policy version that trainers publish: durable, never going down.

    Args:
        on_change: called with each new version, and with the stored one after a restart.
    """

    def __init__(self, store: Store, on_change: Callable[[int], None] | None) -> None:
        self._store = store
        self._on_change = on_change
        self._lock = asyncio.Lock()
        self.version = -1

    async def load(self) -> None:
        """Takes up the stored version."""
        stored = await self._store.get_value(_POLICY_VERSION)
        if stored is not None:
            self._set(int(stored))

    async def publish(self, version: int) -> None:
        """Makes `version` the current one; the current one again is fine.

        Raises:
            ConflictError: it is lower than the current one.
        """
        async with self._lock:
            if version < self.version:
                raise ConflictError(
                    f"The policy version is {self.version} already; {version} is lower.",
                    current=self.version,
                )
            if version > self.version:
                await self._store.set_value(_POLICY_VERSION, version)
                self._set(version)

    def _set(self, version: int) -> None:
        self.version = version
        if self._on_change is not None:
            self._on_change(version)


def native_routes(
    store: Store,
    atropos: AtroposService,
    policy: PolicyVersion,
    *,
    settings: ServerConfig,
    status: Callable[[], dict[str, Any]] | None,
) -> APIRouter:
    """All native routes."""
    router = APIRouter(tags=["native"])
    _add_run_routes(router, store)
    _add_lease_routes(router, store, atropos, settings)
    _add_group_routes(router, store)
    _add_policy_routes(router, policy)
    _add_status_routes(router, store, atropos, policy, status)
    return router


def _add_run_routes(router: APIRouter, store: Store) -> None:
    @router.post("/v1/runs", openapi_extra=request_body(RunRequest))
    async def create_run(request: Request) -> Response:
        """Creates a run (201), or resumes the one of this name, changed as asked (200)."""
        wanted = await read_body(request, _RUN)
        if wanted.name == ATROPOS_RUN:
            raise ConflictError(f"The name {ATROPOS_RUN} is taken by the Atropos wire.")
        try:
            await store.get_run(wanted.name)
        except NotFoundError:
            run = await store.create_run(
                wanted.name, batch_size=wanted.batch_size or 8, settings=wanted.settings or {}
            )
            return _json(_run(run), 201)
        run = await store.set_run(
            wanted.name, batch_size=wanted.batch_size, settings=wanted.settings
        )
        return _json(_run(run))

    @router.get("/v1/runs")
    async def list_runs() -> Response:
        """All runs, oldest first."""
        return _json({"runs": [_run(run) for run in await store.list_runs()]})

    @router.get("/v1/runs/{run}")
    async def get_run(run: str) -> Response:
        """One run."""
        return _json(_run(await store.get_run(run)))


def _add_lease_routes(
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
        return _json({"lease_id": wanted.lease_id, "expires_at": expires_at})

    async def _lease_id(run: str, request: Request) -> str:
        wanted = await read_body(request, _REFERENCE)
        await store.get_run(run)
        return wanted.lease_id


def _add_group_routes(router: APIRouter, store: Store) -> None:
    @router.get("/v1/groups")
    async def list_groups(
        after: Annotated[int, Query(ge=0, le=_SEQ_LIMIT, description="`seq` behind which")] = 0,
        limit: Annotated[int, Query(ge=1, le=_MOST_GROUPS, description="most groups")] = 100,
    ) -> Response:
        """What is known of the groups that arrived after number `after`, whatever their state,
        oldest first; `next` is the `after` of the following page, null behind the last group.
        Nothing is leased or consumed.
        """
        rows = await store.arrived_after(after, limit)
        following = rows[-1].seq if len(rows) == limit else None
        return _json({"groups": [_summary(row) for row in rows], "next": following})

    @router.get(
        "/v1/groups/{group_id:path}",
        responses={200: {"content": {"application/json": {}, GROUP_MSGPACK: {}}}},
    )
    async def get_group(group_id: str, request: Request) -> Response:
        """One whole group, whatever its state; it is neither leased nor consumed.
        MessagePack when `Accept` asks for `application/vnd.envserver.group+msgpack`, else JSON.
        """
        (row,) = await store.rows([group_id])
        if GROUP_MSGPACK in request.headers.get("accept", ""):
            return Response(await group_as_msgpack(store, row), media_type=GROUP_MSGPACK)
        return Response(await group_as_json(store, row), media_type="application/json")


def _add_policy_routes(router: APIRouter, policy: PolicyVersion) -> None:
    @router.post("/v1/policy-version", openapi_extra=request_body(PolicyVersionRequest))
    async def publish(request: Request) -> Response:
        """Says with which weights the engine samples from now on. Lower than before: 409."""
        await policy.publish((await read_body(request, _VERSION)).version)
        return _json({"version": policy.version})

    @router.get("/v1/policy-version")
    async def current() -> Response:
        """The version published last, -1 before any."""
        return _json({"version": policy.version})


def _add_status_routes(
    router: APIRouter,
    store: Store,
    atropos: AtroposService,
    policy: PolicyVersion,
    status: Callable[[], dict[str, Any]] | None,
) -> None:
    @router.get("/v1/status")
    async def get_status() -> Response:
        """How things stand: groups by state, the Atropos wire, what the server itself reports."""
        return _json(
            {
                "version": __version__,
                "policy_version": policy.version,
                "groups": await store.counts(),
                "atropos": atropos.snapshot(),
                "server": status() if status is not None else {},
            }
        )

    @router.get("/healthz", tags=["health"])
    async def healthz() -> Response:
        """The process answers."""
        return _json({"status": "ok"})

    @router.get("/readyz", tags=["health"])
    async def readyz() -> Response:
        """The store answers too."""
        await store.get_value(_POLICY_VERSION)
        return _json({"status": "ok"})


def _summary(row: GroupRow) -> dict[str, Any]:
    facts = msgspec.structs.asdict(row)
    del facts["lease_id"]  # whoever has it could acknowledge for its owner
    return facts


def _run(run: Run) -> dict[str, Any]:
    return msgspec.structs.asdict(run)


def _json(value: Any, status: int = 200) -> Response:
    body = orjson.dumps(value, default=str, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, status, media_type="application/json")
