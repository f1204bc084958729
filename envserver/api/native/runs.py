"""Runs: each is the subscription of one trainer or export. Creating is idempotent by name."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final

import msgspec
from envserver_records.errors import ConflictError, NotFoundError
from fastapi import APIRouter
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from ...store import ATROPOS_RUN, UNKNOWN_VERSION, GroupStore, Run
from ..atropos.service import AtroposService
from ..bodies import read_body, request_body
from .answers import answers, json_answer
from .models import CheckpointsAnswer, Limits, ResumedAnswer, RunAnswer, RunRequest, RunsAnswer
from .policy import PolicyVersion
from .streams import Streams

WARNING_HEADER: Final = "x-envserver-warning"
_MOST_SHOWN: Final = 10
_LONGEST_HEADER: Final = 1000


class FilterWarnings:
    """The warnings of one server.

    Args:
        present: returns the names of the environments that are registered or local.
    """

    def __init__(
        self, store: GroupStore, policy: PolicyVersion, present: Callable[[], Collection[str]]
    ) -> None:
        self._store = store
        self._policy = policy
        self._present = present

    def of_names(self, environments: Collection[str]) -> list[str]:
        """Returns a warning for the names that no environment has or had."""
        if not environments:
            return []
        known = {env for _, env, _ in self._store.tallies} | set(self._present())
        unknown = sorted(set(environments) - known)
        if not unknown:
            return []
        shown = ", ".join(sorted(known)[:_MOST_SHOWN]) or "none"
        more = ", ..." if len(known) > _MOST_SHOWN else ""
        names = ", ".join(map(repr, unknown))
        return [f"No environment is called {names} so far; known: {shown}{more}."]

    def of_limits(self, wanted: Limits) -> list[str]:
        """Returns the warnings for the filters of a lease."""
        warnings = self.of_names(wanted.environments or ())
        if wanted.max_staleness is not None and self._policy.version == UNKNOWN_VERSION:
            warnings.append(
                "max_staleness filters nothing: no policy version is published"
                " (POST /v1/policy-version)."
            )
        return warnings


def warning_headers(warnings: Collection[str]) -> dict[str, str]:
    """Returns the warnings as a header. Names in them may hold any characters, and be long."""
    text = " ".join(warnings).encode("ascii", "backslashreplace").decode()
    shown = "".join(letter if letter.isprintable() else "?" for letter in text[:_LONGEST_HEADER])
    return {WARNING_HEADER: shown.strip()} if warnings else {}


_RUN: Final = TypeAdapter(RunRequest)
_BATCH_SIZE: Final = 8
MOST_OPEN_RUNS: Final = 4096


def add_run_routes(
    router: APIRouter,
    store: GroupStore,
    atropos: AtroposService,
    streams: Streams,
    filters: FilterWarnings,
) -> None:
    def facts_of(run: Run) -> dict[str, Any]:
        return msgspec.structs.asdict(run) | {"warnings": filters.of_names(run.environments)}

    @router.post(
        "/v1/runs",
        status_code=201,
        openapi_extra=request_body(RunRequest),
        responses=answers(RunAnswer, 409, status=201, body=True, what="The run was created.")
        | answers(
            ResumedAnswer,
            404,
            409,
            body=True,
            what="The run existed; it was resumed with these changes.",
        ),
    )
    async def create_run(request: Request) -> Response:
        """Creates a run (201), or resumes and updates the run of this name (200).

        `{"name": "my-run", "checkpoint": "step-40"}` goes back to a checkpoint that an ack named:
        groups acknowledged after it are delivered again, and the run's open leases are returned.
        With an `Idempotency-Key`, repeating the request does not go back a second time.
        A closed run is reopened. `warnings` names environments of the filter that nobody knows.
        """
        wanted = await read_body(request, _RUN)
        _require_native(wanted.name)
        created, run = await _created(store, wanted)
        facts = facts_of(run)
        headers = warning_headers(facts["warnings"])
        status = 201 if created else 200
        if wanted.checkpoint is None and not wanted.from_start:
            return json_answer(facts, status, headers)
        again = await _go_back(store, wanted, request.headers.get("idempotency-key"))
        streams.run_rewound(run.name)
        atropos.store_changed()
        return json_answer(facts | {"redelivered": again}, status, headers)

    @router.get("/v1/runs", responses=answers(RunsAnswer, what="All runs."))
    async def list_runs() -> Response:
        """Lists all runs, oldest first: `{"runs": [{"name": "my-run", ...}]}`."""
        return json_answer({"runs": [facts_of(run) for run in await store.list_runs()]})

    @router.get("/v1/runs/{run}", responses=answers(RunAnswer, 404, 422, what="The run."))
    async def get_run(run: str) -> Response:
        """Returns one run with its settings."""
        return json_answer(facts_of(await store.get_run(run)))

    @router.post(
        "/v1/runs/{run}/close",
        responses=answers(RunAnswer, 404, 409, body=True, what="The run is closed."),
    )
    async def close_run(run: str) -> Response:
        """Closes a run: it can lease nothing more, its open leases are returned, and no groups are
        kept for it. Closing twice is allowed; creating the run again reopens it.
        """
        _require_native(run)
        closed = await store.close_run(run)
        streams.run_rewound(run)
        atropos.store_changed()
        return json_answer(facts_of(closed))

    @router.get(
        "/v1/runs/{run}/checkpoints",
        responses=answers(CheckpointsAnswer, 404, 422, what="The run's checkpoints."),
    )
    async def checkpoints(run: str) -> Response:
        """Lists the checkpoints that the run's acks named, oldest first, each with the number of
        groups acknowledged up to it.
        """
        await store.get_run(run)
        found = [msgspec.structs.asdict(one) for one in await store.checkpoints(run)]
        return json_answer({"checkpoints": found})


def _require_native(name: str) -> None:
    if name == ATROPOS_RUN:
        raise ConflictError(f"The name {ATROPOS_RUN} is reserved for Atropos trainers.")


async def _created(store: GroupStore, wanted: RunRequest) -> tuple[bool, Run]:
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
            hint="Take another name.",
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


def _require_room(store: GroupStore) -> None:
    if len(store.open_runs) >= MOST_OPEN_RUNS:
        raise ConflictError(
            f"{MOST_OPEN_RUNS} runs are open, and each costs time with every group.",
            hint="POST /v1/runs/NAME/close closes those that no trainer uses.",
        )


async def _go_back(store: GroupStore, wanted: RunRequest, key: str | None) -> int:
    """Goes back as requested and returns how many groups will be delivered again.

    Returns 0 if a request with this key was already handled: a delayed duplicate would undo what
    the trainer has acknowledged since.
    """
    place = f"resumed:{wanted.name}"
    if key is not None and await store.get_value(place) == key:
        return 0
    again = await store.rewind(wanted.name, wanted.checkpoint)
    if key is not None:
        await store.set_value(place, key)
    return len(again)
