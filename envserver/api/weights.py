"""Pauses model calls during weight updates.

POST /v1/policy/pause    stops new calls; the request chooses what happens to running calls
POST /v1/policy/resume   lets calls continue; with `version`, publishes the new version first
GET  /v1/policy          whether calls are paused, running and waiting calls, policy version

What holds: calls stay paused until a trainer resumes them, also when the server restarts or
another one takes over in the midst of an update.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any, Final

import structlog
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..proxy.gate import Gate, InFlight
from ..store import GroupStore
from .bodies import key_of, read_body, request_body
from .native.answers import answers
from .native.models import VERSION_LIMIT
from .native.policy import HeldOutEvaluations, PolicyVersion
from .runners.registry import RunnerRegistry

log = structlog.get_logger(__name__)

_LONGEST_WAIT_SECONDS: Final = 3600.0
_KEPT_KEYS: Final = 256
_STORED: Final = "policy_pause"
"""Key of the choice for running calls while calls are paused."""


class PauseRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    in_flight: InFlight = "drain"
    """What happens to running calls: drain (they finish first), keep (they continue), abort (they
    are cancelled and retried later).
    """
    timeout_seconds: float = Field(default=60.0, gt=0, le=_LONGEST_WAIT_SECONDS)
    """Maximum wait for them; then the response has `"idle": false` and calls stay paused."""


class ResumeRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: int | None = Field(default=None, ge=0, le=VERSION_LIMIT, strict=True)
    """The policy version that the engine serves now; unset: unchanged."""


class PolicyAnswer(BaseModel):
    paused: bool
    in_flight: int
    """Number of calls running at the engine."""
    waiting: int
    version: int


class PausedAnswer(PolicyAnswer):
    idle: bool
    """Whether no call is running at the engine (always true with keep)."""


_PAUSE: Final = TypeAdapter(PauseRequest)
_RESUME: Final = TypeAdapter(ResumeRequest)


class WeightPause:
    """The pause of the calls behind `gate` and of those of runners; durable."""

    def __init__(self, store: GroupStore, gate: Gate, environments: RunnerRegistry) -> None:
        self._store = store
        self.gate = gate
        self._news = environments.news

    async def load(self) -> None:
        """Pauses calls if they were paused when the server ended."""
        in_flight = await self._store.get_value(_STORED)
        if in_flight is not None:
            log.warning("calls_are_paused", why="A trainer paused them and has not resumed them.")
            await asyncio.gather(self.gate.pause("keep", 0.0), self._news.pause(in_flight, 0.0))

    async def pause(self, in_flight: InFlight, timeout_seconds: float) -> bool:
        """Stops new calls; returns whether no call is running, see `Gate.pause`."""
        await self._store.set_value(_STORED, in_flight)
        how = (in_flight, timeout_seconds)
        return all(await asyncio.gather(self.gate.pause(*how), self._news.pause(*how)))

    async def resume(self) -> None:
        """Lets calls continue."""
        if await self._store.get_value(_STORED) is not None:
            await self._store.set_value(_STORED, None)
        self.gate.resume()
        self._news.resume()


def weight_routes(
    pausing: WeightPause, policy: PolicyVersion, evaluations: HeldOutEvaluations | None
) -> APIRouter:
    """Returns the routes that pause and resume calls.

    Args:
        evaluations: what a pause may wait for (`evaluate.hold_seconds`).
    """
    gate = pausing.gate
    router = APIRouter(tags=["native"])
    handled: deque[str | None] = deque(maxlen=_KEPT_KEYS)

    @router.post(
        "/v1/policy/pause",
        openapi_extra=request_body(PauseRequest),
        responses=answers(PausedAnswer, body=True, what="Calls are paused."),
    )
    async def pause(request: Request) -> Response:
        """Stops new calls to the engine. Pausing again replaces the choice made before. A copy of a
        request with an `Idempotency-Key` does not pause again what was resumed in the meantime.
        """
        wanted = await read_body(request, _PAUSE)
        key = key_of(request)
        if key is not None and key in handled and not gate.paused:
            return JSONResponse({**_state(gate, policy), "idle": False})
        handled.append(key)
        began = time.monotonic()
        if evaluations is not None and not gate.paused:
            await evaluations.hold(wanted.timeout_seconds / 2)
        left = wanted.timeout_seconds - (time.monotonic() - began)
        idle = await pausing.pause(wanted.in_flight, left)
        return JSONResponse({**_state(gate, policy), "idle": idle})

    @router.post(
        "/v1/policy/resume",
        openapi_extra=request_body(ResumeRequest),
        responses=answers(PolicyAnswer, 409, body=True, what="Calls were resumed."),
    )
    async def resume(request: Request) -> Response:
        """Lets calls continue; repeating is allowed. Refuses a lower version (409). A copy of a
        request with an `Idempotency-Key` does not resume what was paused in the meantime.
        """
        wanted = await read_body(request, _RESUME)
        key = key_of(request)
        if key is not None and key in handled:
            return JSONResponse(_state(gate, policy))
        if wanted.version is not None:
            await policy.publish(wanted.version)
        await pausing.resume()
        handled.append(key)
        return JSONResponse(_state(gate, policy))

    @router.get("/v1/policy", responses=answers(PolicyAnswer, what="The state of the calls."))
    async def state() -> Response:
        """Returns whether calls are paused, how many are running and how many wait."""
        return JSONResponse(_state(gate, policy))

    return router


def _state(gate: Gate, policy: PolicyVersion) -> dict[str, Any]:
    return {
        "paused": gate.paused,
        "in_flight": gate.in_flight,
        "waiting": gate.waiting,
        "version": policy.version,
    }
