"""Leases: groups are delivered on request, after a wait, or pushed over a stream.

What holds: a lease is delivered once; acknowledging twice is allowed; only the run that holds a
lease can close it.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Annotated, Final

import structlog
from envserver_records.errors import ConflictError, NotFoundError
from envserver_records.wire import GROUPS_MSGPACK, LEASE_STREAM
from fastapi import APIRouter, Query
from pydantic import TypeAdapter
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from ...store import GroupRow, GroupStore, Lease
from ...store.damage import DamagedBodies
from ..atropos.service import AtroposService
from ..bodies import Hangup, read_body, request_body
from ..leasing import GroupEncoder, PackedAnswer
from .answers import answers, json_answer
from .models import (
    Ack,
    ExtendedAnswer,
    LeaseAnswer,
    LeaseExtension,
    LeaseRequest,
    Nack,
    StreamRequest,
)
from .runs import FilterWarnings, warning_headers
from .streams import EVENTS, LeaseStream, StreamAnswer, Streams, stream_of
from .waiting import Leasing, lease_id_of

log = structlog.get_logger(__name__)

SetAside = Callable[[Sequence[GroupRow], str], None]

_LEASE: Final = TypeAdapter(LeaseRequest)
_ACK: Final = TypeAdapter(Ack)
_NACK: Final = TypeAdapter(Nack)
_EXTENSION: Final = TypeAdapter(LeaseExtension)
_LEASE_OF_STREAM: Final = re.compile(r"[A-Za-z0-9_-]{8,64}\.\d{20}")


def add_lease_routes(
    router: APIRouter,
    store: GroupStore,
    atropos: AtroposService,
    leasing: Leasing,
    encoder: GroupEncoder,
    streams: Streams,
    filters: FilterWarnings,
    set_aside: SetAside,
) -> None:
    @router.post(
        "/v1/runs/{run}/lease",
        openapi_extra=request_body(LeaseRequest),
        responses=answers(
            LeaseAnswer, 404, 409, body=True, media_types=(GROUPS_MSGPACK,), what="A lease."
        )
        | {204: {"description": "Nothing that fits came in time."}},
    )
    async def lease(run: str, request: Request) -> Response:
        """Leases the oldest groups that match (200), or none if too few arrive in time (204).

        `{"max_sequences": 512, "environments": ["math"], "max_staleness": 2, "wait_seconds": 60}`
        waits for groups of one environment that are at most two policy versions old.
        MessagePack when `Accept` names `application/vnd.envserver.groups+msgpack`, else JSON.
        With an `Idempotency-Key`, repeating the request returns the same lease while it is open,
        so a lost response can be fetched again. The header `X-Envserver-Warning` says when a
        filter cannot act: no such environment is known, or no policy version is published.
        """
        wanted = await read_body(request, _LEASE)
        lease_id = lease_id_of(run, request)
        deadline = time.monotonic() + wanted.wait_seconds
        headers = warning_headers(filters.of_limits(wanted))
        async with Hangup(request.receive) as hangup:
            while True:
                left = deadline - time.monotonic()
                found = await leasing.wait(run, wanted, left, hangup, lease_id)
                if found is None:
                    return Response(status_code=204, headers=headers)
                if hangup.gone and lease_id is None:
                    await leasing.give_back(found.lease_id)
                    return Response(status_code=204)
                try:
                    answer = await lease_answer(found, encoder, request.headers)
                    answer.headers.update(headers)
                    return answer
                except DamagedBodies as damaged:
                    await leasing.take_back(found.lease_id, damaged)

    @router.get(
        "/v1/runs/{run}/stream",
        response_class=Response,
        responses=answers(
            None,
            404,
            409,
            422,
            media_types=(LEASE_STREAM, EVENTS),
            what="An endless stream of leases.",
        ),
    )
    async def stream(
        run: str, wanted: Annotated[StreamRequest, Query()], request: Request
    ) -> Response:
        """Pushes leases as groups become available, for as long as the client listens. The client
        acknowledges them with the ordinary routes.

        `?window=2&max_groups=16&min_groups=16&environments=math` keeps two leases of 16 groups
        open: when one is acknowledged, the next is sent. With `Accept: text/event-stream` the
        response is server-sent events with JSON (`Last-Event-ID` resumes after a lease).
        Otherwise it is binary: frames of a 4-byte length and a lease in MessagePack, with an
        empty frame as keep-alive.
        """
        await _require_open(store, run)
        seen = request.headers.get("last-event-id", "")
        if not _LEASE_OF_STREAM.fullmatch(seen) or stream_of(seen) != (
            wanted.stream or stream_of(seen)
        ):
            seen = ""
        name = wanted.stream or stream_of(seen) or uuid.uuid4().hex
        pushed = LeaseStream(store, leasing, run, wanted, name, seen)
        return StreamAnswer(pushed, streams, encoder, request.headers)

    @router.post(
        "/v1/runs/{run}/ack",
        status_code=204,
        openapi_extra=request_body(Ack),
        responses=answers(None, 404, 409, status=204, body=True, what="Acknowledged."),
    )
    async def ack(run: str, request: Request) -> Response:
        """Acknowledges a lease: its groups are never delivered again. Acknowledging twice is
        allowed.

        `{"lease_id": "...", "checkpoint": "step-40"}` also records that the trainer's checkpoint of
        this name contains this lease and all leases acknowledged before it; `POST /v1/runs` can
        go back to it.
        """
        wanted = await read_body(request, _ACK)
        await _require_own(store, run, wanted.lease_id)
        await store.ack(wanted.lease_id, checkpoint=wanted.checkpoint)
        await closed(run, wanted.lease_id)
        return Response(status_code=204)

    @router.post(
        "/v1/runs/{run}/nack",
        status_code=204,
        openapi_extra=request_body(Nack),
        responses=answers(None, 404, 409, status=204, body=True, what="Given back."),
    )
    async def nack(run: str, request: Request) -> Response:
        """Returns the groups of a lease to the front of the queue. Repeating the call is allowed.

        `{"lease_id": "...", "reason": "out_of_memory"}`: nacks are counted by reason. With
        `"group_ids": ["..."]` only these groups leave the lease, and they are never delivered
        again: for groups that the trainer cannot use. The others are acknowledged as usual.
        """
        wanted = await read_body(request, _NACK)
        await _require_own(store, run, wanted.lease_id)
        if wanted.group_ids is not None:
            await store.set_aside(wanted.lease_id, wanted.group_ids, reason=wanted.reason)
            log.warning("groups_set_aside", run=run, **wanted.model_dump())
            set_aside(await store.rows(wanted.group_ids), wanted.reason)
            return Response(status_code=204)
        await store.nack(wanted.lease_id, reason=wanted.reason)
        await closed(run, wanted.lease_id)
        return Response(status_code=204)

    @router.post(
        "/v1/runs/{run}/extend",
        openapi_extra=request_body(LeaseExtension),
        responses=answers(ExtendedAnswer, 404, 409, body=True, what="The new expiry time."),
    )
    async def extend(run: str, request: Request) -> Response:
        """Sets the lease to expire in the given time: `{"lease_id": "...", "seconds": 600}`."""
        wanted = await read_body(request, _EXTENSION)
        await _require_own(store, run, wanted.lease_id)
        expires_at = await store.extend(wanted.lease_id, wanted.seconds)
        atropos.store_changed()
        return json_answer({"lease_id": wanted.lease_id, "expires_at": expires_at})

    async def closed(run: str, lease_id: str) -> None:
        streams.lease_closed(run, lease_id)
        await atropos.lease_closed(lease_id)


async def lease_answer(lease: Lease, encoder: GroupEncoder, headers: Headers) -> Response:
    """Encodes the lease in the format that the client accepts.
    Raises DamagedBodies: some groups cannot be read.
    """
    if GROUPS_MSGPACK in headers.get("accept", ""):
        return PackedAnswer(await encoder.lease(lease), GROUPS_MSGPACK, headers)
    return Response(await encoder.lease_as_json(lease), media_type="application/json")


async def _require_open(store: GroupStore, run: str) -> None:
    """Raises NotFoundError if the run does not exist, ConflictError if it is closed."""
    if (await store.get_run(run)).state == "closed":
        raise ConflictError(f"The run {run} is closed.", run=run)


async def _require_own(store: GroupStore, run: str, lease_id: str) -> None:
    """Raises NotFoundError if the run has no such lease."""
    if (await store.find_lease(lease_id)).run != run:
        raise NotFoundError(f"The run {run} has no lease {lease_id}.", lease_id=lease_id)
