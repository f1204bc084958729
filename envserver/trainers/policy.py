"""The policy version, pauses during weight updates, and evaluations of a version.

The version is durable and never decreases. Calls stay paused until a trainer resumes them, also
when the server restarts or another one takes over in the midst of an update."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

import structlog
from envserver_records.errors import ConflictError, NotFoundError
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..http.answers import json_answer, route
from ..http.requests import key_of, read_body
from ..proxy.gate import Gate, InFlight
from ..runners.registry import RunnerRegistry
from ..settings.section import Described
from ..store import Store
from .bodies import VERSION_LIMIT, PolicyVersionAnswer, PolicyVersionRequest

_POLICY_VERSION: Final = "policy_version"


class PolicyVersion:
    def __init__(self, store: Store, on_change: Callable[[int], None] | None) -> None:
        self._store = store
        self._on_change = on_change
        self._lock = asyncio.Lock()
        self.tell_engines: Callable[[Sequence[str], int], Awaitable[None]] = _no_engines
        """Notes that the named engines serve a version; all of them, or none with NotFoundError."""
        self.version = -1

    async def load(self) -> None:
        stored = await self._store.get_value(_POLICY_VERSION)
        if stored is not None:
            self._set(int(stored))

    async def publish(self, version: int, engines: Sequence[str] = ()) -> None:
        """Makes `version` the current version; publishing the current version again is allowed.
        `engines`: ids or addresses of engines that tell their own versions and serve it."""
        async with self._lock:
            if version < self.version:
                raise ConflictError(
                    f"The policy version is {self.version} already; {version} is lower.",
                    current=self.version,
                )
            if engines:  # first: an engine that has it must not be taken for an old one
                await self.tell_engines(engines, version)
            if version > self.version:
                await self._store.set_value(_POLICY_VERSION, version)
                self._set(version)

    def _set(self, version: int) -> None:
        self.version = version
        if self._on_change is not None:
            self._on_change(version)


async def _no_engines(named: Sequence[str], version: int) -> None:
    raise NotFoundError(f"This server has no engine {named[0][:100]!r}.")


def add_policy_routes(router: APIRouter, policy: PolicyVersion) -> None:
    @router.post(
        "/v1/policy-version",
        **route(
            PolicyVersionAnswer, 404, 409, body=PolicyVersionRequest, what="The current version."
        ),
    )
    async def publish(request: Request) -> Response:
        """Sets the version of the weights that the engine samples with from now on. A version lower
        than the current one is refused (409)."""
        wanted = await read_body(request, PolicyVersionRequest)
        await policy.publish(wanted.version, wanted.engines or ())
        return json_answer({"version": policy.version})

    @router.get("/v1/policy-version", **route(PolicyVersionAnswer, what="The version."))
    async def current() -> Response:
        """Returns the current policy version; -1 if none was published."""
        return json_answer({"version": policy.version})


class HeldOutEvaluations(Protocol):
    """Runs evaluations, one at a time; see `running.held_out`."""

    @property
    def busy(self) -> bool: ...

    def start(self) -> None:
        """Raises ConflictError if an evaluation runs, or if its split is trained on."""

    def listed(self) -> list[dict[str, Any]]: ...

    async def hold(self, most_seconds: float) -> None:
        """Waits until no evaluation runs, at most as long as the settings let a pause wait."""


class EvaluationsAnswer(Described):
    running: bool
    """Whether one runs, or is about to."""
    evaluations: list[dict[str, Any]]
    """For each: `version` (of the policy, at its start), `state` (running, complete, failed,
    interrupted), `folder`, `results` (numbers by name, `evaluate/math/mean_reward`), `rollouts`,
    `other_versions` (how many of these have tokens of another version), `sampled_by` (rollouts by
    version; several: mixed in one), `began_at`, `ended_at` (seconds since 1970), `error`."""


def add_evaluation_routes(router: APIRouter, evaluations: HeldOutEvaluations) -> None:
    @router.post("/v1/evaluations", **route(EvaluationsAnswer, 409, status=202, what="It begins."))
    async def evaluate() -> Response:
        """Evaluates the current policy version on the split of `evaluate.split`, beside the
        training rollouts. 409 while another evaluation runs, and if that split is trained on."""
        evaluations.start()
        return json_answer(_state(evaluations), 202)

    @router.get("/v1/evaluations", **route(EvaluationsAnswer, what="All evaluations."))
    async def listed() -> Response:
        """Returns the evaluations of this store, the oldest first."""
        return json_answer(_state(evaluations))


def _state(evaluations: HeldOutEvaluations) -> dict[str, Any]:
    return {"running": evaluations.busy, "evaluations": evaluations.listed()}


log = structlog.get_logger(__name__)

_LONGEST_WAIT_SECONDS: Final = 3600.0
_KEPT_KEYS: Final = 256
_STORED: Final = "policy_pause"
"""Key of the choice for running calls while calls are paused."""


class PauseRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    in_flight: InFlight = "drain"
    """Running calls finish first (drain), continue (keep), or are cancelled and retried later
    (abort)."""
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


class WeightPause:
    """The pause of the calls behind `gate` and of those of runners; durable."""

    def __init__(self, store: Store, gate: Gate, environments: RunnerRegistry) -> None:
        self._store = store
        self.gate = gate
        self._news = environments.news

    async def load(self) -> None:
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
        if await self._store.get_value(_STORED) is not None:
            await self._store.set_value(_STORED, None)
        self.gate.resume()
        self._news.resume()


def weight_routes(
    pausing: WeightPause, policy: PolicyVersion, evaluations: HeldOutEvaluations | None
) -> APIRouter:
    """Returns the routes that pause and resume calls. `evaluations`: what a pause may wait for
    (`evaluate.hold_seconds`)."""
    gate = pausing.gate
    router = APIRouter(tags=["native"])
    handled: deque[str | None] = deque(maxlen=_KEPT_KEYS)

    def shown(**more: bool) -> Response:
        return JSONResponse(
            {
                "paused": gate.paused,
                "in_flight": gate.in_flight,
                "waiting": gate.waiting,
                "version": policy.version,
                **more,
            }
        )

    @router.post(
        "/v1/policy/pause", **route(PausedAnswer, body=PauseRequest, what="Calls are paused.")
    )
    async def pause(request: Request) -> Response:
        """Stops new calls to the engine. Pausing again replaces the choice made before. A copy of a
        request with an `Idempotency-Key` does not pause again what was resumed in the meantime."""
        wanted = await read_body(request, PauseRequest)
        key = key_of(request)
        if key is not None and key in handled and not gate.paused:
            return shown(idle=False)
        handled.append(key)
        began = time.monotonic()
        if evaluations is not None and not gate.paused:
            await evaluations.hold(wanted.timeout_seconds / 2)
        left = wanted.timeout_seconds - (time.monotonic() - began)
        idle = await pausing.pause(wanted.in_flight, left)
        return shown(idle=idle)

    @router.post(
        "/v1/policy/resume",
        **route(PolicyAnswer, 409, body=ResumeRequest, what="Calls were resumed."),
    )
    async def resume(request: Request) -> Response:
        """Lets calls continue; repeating is allowed. Refuses a lower version (409). A copy of a
        request with an `Idempotency-Key` does not resume what was paused in the meantime."""
        wanted = await read_body(request, ResumeRequest)
        key = key_of(request)
        if key is not None and key in handled:
            return shown()
        if wanted.version is not None:
            await policy.publish(wanted.version)
        await pausing.resume()
        handled.append(key)
        return shown()

    @router.get("/v1/policy", **route(PolicyAnswer, what="The state of the calls."))
    async def state() -> Response:
        """Returns whether calls are paused, how many are running and how many wait."""
        return shown()

    return router
