"""Runs: one trainer's (or one export's) subscription each. Creating is idempotent by the name."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from fastapi import APIRouter
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from ...errors import ConflictError, NotFoundError
from ...store import ATROPOS_RUN, Run, Store
from ..bodies import read_body, request_body
from .answers import json_answer
from .models import RunRequest

_RUN: Final = TypeAdapter(RunRequest)


def add_run_routes(router: APIRouter, store: Store) -> None:
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
            return json_answer(_run(run), 201)
        run = await store.set_run(
            wanted.name, batch_size=wanted.batch_size, settings=wanted.settings
        )
        return json_answer(_run(run))

    @router.get("/v1/runs")
    async def list_runs() -> Response:
        """All runs, oldest first."""
        return json_answer({"runs": [_run(run) for run in await store.list_runs()]})

    @router.get("/v1/runs/{run}")
    async def get_run(run: str) -> Response:
        """One run."""
        return json_answer(_run(await store.get_run(run)))


def _run(run: Run) -> dict[str, Any]:
    return msgspec.structs.asdict(run)
