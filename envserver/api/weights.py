"""Pausing the agents' model calls while a trainer changes the engine's weights.

POST /v1/policy/pause    no new call reaches the engine; what becomes of those there is chosen
POST /v1/policy/resume   calls go on; with `version`, the new policy version is published first
GET  /v1/policy          whether it is paused, calls at the engine, calls waiting, the version
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..proxy.gate import Gate, InFlight
from .bodies import read_body, request_body
from .native import VERSION_LIMIT, PolicyVersion
from .native.answers import answers
from .runners.registry import RunnerRegistry

_LONGEST_WAIT_SECONDS: Final = 3600.0


class PauseRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    in_flight: InFlight = "drain"
    """Calls at the engine: drain (they end first), keep (they go on), abort (asked again later)."""
    timeout_seconds: float = Field(default=60.0, gt=0, le=_LONGEST_WAIT_SECONDS)
    """How long to wait for them; then the answer says `"idle": false`, and it stays paused."""


class ResumeRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: int | None = Field(default=None, ge=0, le=VERSION_LIMIT, strict=True)
    """The policy version that the engine serves now; unset: as before."""


class PolicyAnswer(BaseModel):
    paused: bool
    in_flight: int
    """Calls at the engine."""
    waiting: int
    version: int


class PausedAnswer(PolicyAnswer):
    idle: bool
    """Whether no call is left at the engine (always with keep)."""


_PAUSE: Final = TypeAdapter(PauseRequest)
_RESUME: Final = TypeAdapter(ResumeRequest)


def weight_routes(gate: Gate, policy: PolicyVersion, environments: RunnerRegistry) -> APIRouter:
    """The routes, for the calls behind `gate`, and those of environments on other machines."""
    router = APIRouter(tags=["native"])

    @router.post(
        "/v1/policy/pause",
        openapi_extra=request_body(PauseRequest),
        responses=answers(PausedAnswer, body=True, what="It is paused."),
    )
    async def pause(request: Request) -> Response:
        """Lets no new call reach the engine. Pausing again chooses anew."""
        wanted = await read_body(request, _PAUSE)
        how = (wanted.in_flight, wanted.timeout_seconds)
        idle = await asyncio.gather(gate.pause(*how), environments.pause(*how))
        return JSONResponse({**_state(gate, policy), "idle": all(idle)})

    @router.post(
        "/v1/policy/resume",
        openapi_extra=request_body(ResumeRequest),
        responses=answers(PolicyAnswer, 409, body=True, what="Calls go on."),
    )
    async def resume(request: Request) -> Response:
        """Lets calls go on; twice is fine. A version lower than before: 409."""
        wanted = await read_body(request, _RESUME)
        if wanted.version is not None:
            await policy.publish(wanted.version)
        gate.resume()
        environments.resume()
        return JSONResponse(_state(gate, policy))

    @router.get("/v1/policy", responses=answers(PolicyAnswer, what="How calls stand."))
    async def state() -> Response:
        """Whether calls are paused, how many are at the engine and how many wait."""
        return JSONResponse(_state(gate, policy))

    return router


def _state(gate: Gate, policy: PolicyVersion) -> dict[str, Any]:
    return {
        "paused": gate.paused,
        "in_flight": gate.in_flight,
        "waiting": gate.waiting,
        "version": policy.version,
    }
