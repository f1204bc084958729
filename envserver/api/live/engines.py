"""GET /v1/engines: one row for each replica of the engines of the server's own rollouts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from ...models.engine import Engine
from ...settings.section import Described
from ..native.answers import answers, json_answer


class EngineSource(msgspec.Struct, frozen=True):
    """An engine.

    Args:
        name: "" for the engine of the rollouts, else the agent that has it.
        model: name of the model there.
        version: returns the policy version that it serves; -1: none, or unknown.
    """

    name: str
    engine: Engine
    model: str
    version: Callable[[], int]

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row for each replica."""
        published, now = self.version(), time.time()
        return [
            {
                "id": one.id,
                "name": self.name,
                "url": one.base_url,
                "model": self.model,
                "calls": one.in_flight,
                "waiting": one.waiting,
                "limit": one.limit,
                "breaker": one.state.replace("_", "-"),
                "errors": one.errors,
                "calls_total": one.calls,
                "seconds_p50": one.seconds_p50,
                "seconds_p95": one.seconds_p95,
                "weights_version": _known(published if one.follows else one.version),
                "ready": one.healthy,
                "reason": one.reason,
                "origin": one.origin,
                "standing": one.standing,
                "rollouts": one.rollouts,
                "expires_in_seconds": None if one.expires_at is None else one.expires_at - now,
            }
            for one in self.engine.replicas()
        ]


def _known(version: int | None) -> int | None:
    return None if version is None or version < 0 else version


def engine_rows(sources: Sequence[EngineSource]) -> list[dict[str, Any]]:
    """Returns the rows of all engines."""
    return [row for source in sources for row in source.rows()]


class EnginesAnswer(Described):
    engines: list[dict[str, Any]]
    """A row for each replica: `id` ("": it has none), `name` ("": the engine of the rollouts, else
    the agent that has it), `url`, `model`, `calls` (now), `waiting`, `limit`, `breaker` (closed:
    used; open: set aside; half-open: on trial), `errors` and `calls_total` (since the start),
    `seconds_p50` and `seconds_p95` (until an answer; null: there was none), `weights_version`
    (null: not known), `ready`, `standing` (used, checking, unreachable, refused, old, paused,
    draining, drained), `reason` (why it is not used), `origin` (setting, registered, file,
    server), `rollouts` (those whose calls go there), `expires_in_seconds` (null: never).
    """


def add_engine_routes(router: APIRouter, sources: Sequence[EngineSource]) -> None:
    @router.get("/v1/engines", responses=answers(EnginesAnswer, what="The engines."))
    async def list_engines() -> Response:
        """Lists the engines of the server's own rollouts: load, errors, answer times, versions.
        Joined runners have their own, which are listed with them.
        """
        return json_answer({"engines": engine_rows(sources)})
