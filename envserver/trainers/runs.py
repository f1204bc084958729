"""Runs, each the subscription of one trainer or export, and their leases.

Creating a run is idempotent by name. A lease is delivered once; acknowledging twice is allowed;
only the run that holds a lease can close it."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, Final

import msgspec
import structlog
from envserver_records.errors import ConflictError, NotFoundError
from envserver_records.wire import GROUPS_MSGPACK, LEASE_STREAM
from fastapi import APIRouter, Query
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from ..http.answers import json_answer, route
from ..http.requests import Hangup, read_body
from ..store import ATROPOS_RUN, GroupRow, Lease, Run, Store
from ..store.deliveries import DamagedBodies
from .bodies import (
    Ack,
    CheckpointsAnswer,
    ExtendedAnswer,
    LeaseAnswer,
    LeaseExtension,
    LeaseRequest,
    Nack,
    ResumedAnswer,
    RunAnswer,
    RunRequest,
    RunsAnswer,
    StreamRequest,
)
from .encoding import GroupEncoder, PackedAnswer
from .leasing import EVENTS, LeaseStream, Leasing, StreamAnswer, lease_id_of, stream_of

WARNING_HEADER: Final = "x-envserver-warning"
_LONGEST_HEADER: Final = 1000


def warning_headers(warnings: Collection[str]) -> dict[str, str]:
    """Returns the warnings as a header. Names in them may hold any characters, and be long."""
    text = " ".join(warnings).encode("ascii", "backslashreplace").decode()
    shown = "".join(letter if letter.isprintable() else "?" for letter in text[:_LONGEST_HEADER])
    return {WARNING_HEADER: shown.strip()} if warnings else {}


_BATCH_SIZE: Final = 8
_RESUMED: Final = "The run existed; it was resumed with these changes."
MOST_OPEN_RUNS: Final = 4096


def add_run_routes(router: APIRouter, store: Store, leasing: Leasing) -> None:
    def facts_of(run: Run) -> dict[str, Any]:
        warnings = leasing.filters.of_names(run.environments)
        return msgspec.structs.asdict(run) | {"warnings": warnings}

    @router.post(
        "/v1/runs",
        **route(
            RunAnswer,
            409,
            status=201,
            body=RunRequest,
            what="The run was created.",
            also=route(ResumedAnswer, 404, 409, takes_body=True, what=_RESUMED)["responses"],
        ),
    )
    async def create_run(request: Request) -> Response:
        """Creates a run (201), or resumes and updates the run of this name (200).

        `{"name": "my-run", "checkpoint": "step-40"}` goes back to a checkpoint that an ack named:
        groups acknowledged after it are delivered again, and the run's open leases are returned.
        With an `Idempotency-Key`, repeating the request does not go back a second time.
        A closed run is reopened. `warnings` names unknown environments of the filter."""
        wanted = await read_body(request, RunRequest)
        _require_native(wanted.name)
        created, run = await _created(store, wanted)
        facts = facts_of(run)
        headers = warning_headers(facts["warnings"])
        status = 201 if created else 200
        if wanted.checkpoint is None and not wanted.from_start:
            return json_answer(facts, status, headers)
        again = await _go_back(store, wanted, request.headers.get("idempotency-key"))
        leasing.changed_all(run.name)
        return json_answer(facts | {"redelivered": again}, status, headers)

    @router.get("/v1/runs", **route(RunsAnswer, what="All runs."))
    async def list_runs() -> Response:
        """Lists all runs, oldest first: `{"runs": [{"name": "my-run", ...}]}`."""
        return json_answer({"runs": [facts_of(run) for run in await store.list_runs()]})

    @router.get("/v1/runs/{run}", **route(RunAnswer, 404, 422, what="The run."))
    async def get_run(run: str) -> Response:
        """Returns one run with its settings."""
        return json_answer(facts_of(await store.get_run(run)))

    @router.post(
        "/v1/runs/{run}/close",
        **route(RunAnswer, 404, 409, takes_body=True, what="The run is closed."),
    )
    async def close_run(run: str) -> Response:
        """Closes a run: it can lease nothing more, its open leases are returned, and no groups are
        kept for it. Closing twice is allowed; creating the run again reopens it."""
        _require_native(run)
        closed = await store.close_run(run)
        leasing.changed_all(run)
        return json_answer(facts_of(closed))

    @router.get(
        "/v1/runs/{run}/checkpoints",
        **route(CheckpointsAnswer, 404, 422, what="The run's checkpoints."),
    )
    async def checkpoints(run: str) -> Response:
        """Lists the checkpoints that the run's acks named, oldest first, each with the number of
        groups acknowledged up to it."""
        await store.get_run(run)
        found = [msgspec.structs.asdict(checkpoint) for checkpoint in await store.checkpoints(run)]
        return json_answer({"checkpoints": found})


def _require_native(name: str) -> None:
    if name == ATROPOS_RUN:
        raise ConflictError(f"The name {ATROPOS_RUN} is reserved for Atropos trainers.")


async def _created(store: Store, wanted: RunRequest) -> tuple[bool, Run]:
    """Creates, or reopens and updates, the run; also returns whether it is new."""
    try:
        run = await store.get_run(wanted.name)
    except NotFoundError:
        _require_room(store)
        run = await store.create_run(
            wanted.name,
            batch_size=wanted.batch_size or _BATCH_SIZE,
            settings=wanted.settings or {},
            delivery=wanted.delivery or "shared",
            environments=wanted.environments or (),
        )
        return True, run
    if wanted.delivery not in (None, run.delivery):
        raise ConflictError(
            f"The run {run.name} is {run.delivery}, and cannot become {wanted.delivery}.",
            hint="Choose another name.",
            run=run.name,
        )
    if run.state == "closed":
        _require_room(store)
        await store.create_run(
            run.name,
            batch_size=run.batch_size,
            settings=run.settings,
            delivery=run.delivery,
            environments=run.environments,
        )
    return False, await store.set_run(
        wanted.name,
        batch_size=wanted.batch_size,
        settings=wanted.settings,
        environments=wanted.environments,
    )


def _require_room(store: Store) -> None:
    if len(store.open_runs) >= MOST_OPEN_RUNS:
        raise ConflictError(
            f"{MOST_OPEN_RUNS} runs are open, and each costs time with every group.",
            hint="POST /v1/runs/NAME/close closes those that no trainer uses.",
        )


async def _go_back(store: Store, wanted: RunRequest, key: str | None) -> int:
    """Goes back as requested and returns how many groups will be delivered again: 0 if a request
    with this key was already handled, since a delayed duplicate would undo what the trainer has
    acknowledged in the meantime."""
    place = f"resumed:{wanted.name}"
    if key is not None and await store.get_value(place) == key:
        return 0
    again = await store.rewind(wanted.name, wanted.checkpoint)
    if key is not None:
        await store.set_value(place, key)
    return len(again)


log = structlog.get_logger(__name__)

SetAside = Callable[[Sequence[GroupRow], str], None]

_LEASE_OF_STREAM: Final = re.compile(r"[A-Za-z0-9_-]{8,64}\.\d{20}")


def add_lease_routes(
    router: APIRouter, store: Store, leasing: Leasing, set_aside: SetAside
) -> None:
    @router.post(
        "/v1/runs/{run}/lease",
        **route(
            LeaseAnswer,
            404,
            409,
            body=LeaseRequest,
            media_types=(GROUPS_MSGPACK,),
            what="A lease.",
            also={204: {"description": "No matching groups arrived in time."}},
        ),
    )
    async def lease(run: str, request: Request) -> Response:
        """Leases the oldest groups that match (200), or none if too few arrive in time (204).

        `{"max_sequences": 512, "environments": ["math"], "max_staleness": 2, "wait_seconds": 60}`
        waits for groups of one environment that are at most two policy versions old.
        MessagePack when `Accept` names `application/vnd.envserver.groups+msgpack`, else JSON.
        With an `Idempotency-Key`, repeating the request returns the same lease while it is open,
        so a lost response can be fetched again. The header `X-Envserver-Warning` says when a
        filter cannot act: no such environment is known, or no policy version is published."""
        wanted = await read_body(request, LeaseRequest)
        lease_id = lease_id_of(run, request)
        deadline = time.monotonic() + wanted.wait_seconds
        headers = warning_headers(leasing.filters.of_limits(wanted))
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
                    answer = await lease_answer(found, leasing.encoder, request.headers)
                    answer.headers.update(headers)
                    return answer
                except DamagedBodies as damaged:
                    await leasing.take_back(found.lease_id, damaged)

    @router.get(
        "/v1/runs/{run}/stream",
        response_class=Response,
        **route(
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
        empty frame as keep-alive."""
        await _require_open(store, run)
        seen = request.headers.get("last-event-id", "")
        if not _LEASE_OF_STREAM.fullmatch(seen) or stream_of(seen) != (
            wanted.stream or stream_of(seen)
        ):
            seen = ""
        name = wanted.stream or stream_of(seen) or uuid.uuid4().hex
        pushed = LeaseStream(store, leasing, run, wanted, name, seen)
        return StreamAnswer(pushed, leasing, request.headers)

    @router.post(
        "/v1/runs/{run}/ack", **route(None, 404, 409, status=204, body=Ack, what="Acknowledged.")
    )
    async def ack(run: str, request: Request) -> Response:
        """Acknowledges a lease: its groups are never delivered again. Acknowledging twice is
        allowed.

        `{"lease_id": "...", "checkpoint": "step-40"}` also records that the trainer's checkpoint of
        this name contains this lease and all leases acknowledged before it; `POST /v1/runs` can
        go back to it."""
        wanted = await read_body(request, Ack)
        await _require_own(store, run, wanted.lease_id)
        await store.ack(wanted.lease_id, checkpoint=wanted.checkpoint)
        await leasing.closed(run, wanted.lease_id)
        return Response(status_code=204)

    @router.post(
        "/v1/runs/{run}/nack", **route(None, 404, 409, status=204, body=Nack, what="Given back.")
    )
    async def nack(run: str, request: Request) -> Response:
        """Returns the groups of a lease to the front of the queue. Repeating the call is allowed.

        `{"lease_id": "...", "reason": "out_of_memory"}`: nacks are counted by reason. With
        `"group_ids": ["..."]` only these groups leave the lease, and they are never delivered
        again: for groups that the trainer cannot use. The others are acknowledged as usual."""
        wanted = await read_body(request, Nack)
        await _require_own(store, run, wanted.lease_id)
        if wanted.group_ids is not None:
            await store.set_aside(wanted.lease_id, wanted.group_ids, reason=wanted.reason)
            log.warning("groups_set_aside", run=run, **wanted.model_dump())
            set_aside(await store.rows(wanted.group_ids), wanted.reason)
            return Response(status_code=204)
        await store.nack(wanted.lease_id, reason=wanted.reason)
        await leasing.closed(run, wanted.lease_id)
        return Response(status_code=204)

    @router.post(
        "/v1/runs/{run}/extend",
        **route(ExtendedAnswer, 404, 409, body=LeaseExtension, what="The new expiry time."),
    )
    async def extend(run: str, request: Request) -> Response:
        """Sets the lease to expire in the given time: `{"lease_id": "...", "seconds": 600}`."""
        wanted = await read_body(request, LeaseExtension)
        await _require_own(store, run, wanted.lease_id)
        expires_at = await leasing.extend(wanted.lease_id, wanted.seconds)
        return json_answer({"lease_id": wanted.lease_id, "expires_at": expires_at})


async def lease_answer(lease: Lease, encoder: GroupEncoder, headers: Headers) -> Response:
    if GROUPS_MSGPACK in headers.get("accept", ""):
        return PackedAnswer(await encoder.lease(lease), GROUPS_MSGPACK, headers)
    return Response(await encoder.lease_as_json(lease), media_type="application/json")


async def _require_open(store: Store, run: str) -> None:
    if (await store.get_run(run)).state == "closed":
        raise ConflictError(f"The run {run} is closed.", run=run)


async def _require_own(store: Store, run: str, lease_id: str) -> None:
    if (await store.find_lease(lease_id)).run != run:
        raise NotFoundError(f"The run {run} has no lease {lease_id}.", lease_id=lease_id)
