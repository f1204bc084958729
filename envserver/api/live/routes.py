"""The routes that show a server as it is now. None of them changes anything or names a lease."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Query
from starlette.responses import Response

from ...settings.section import Described
from ...store import GroupStore
from ..native.answers import answers, json_answer
from . import Live
from .engines import add_engine_routes
from .events import add_event_routes
from .failures import add_failure_routes

_MOST: Final = 1000
_Limit = Annotated[int, Query(ge=1, le=_MOST)]


class RunningAnswer(Described):
    rollouts: list[dict[str, Any]]
    """Oldest first: `environment`, `group_id`, `task_id`, `rollout`, `attempt`, `seconds` (since
    its agent began, or since it waits), `turns`, `tokens` (sampled so far), `worker` (process id;
    null: none), `state` (waiting, playing, scoring).
    """
    total: int


class LeasesAnswer(Described):
    leases: list[dict[str, Any]]
    """A row for each leased group, oldest lease first: `group_id`, `environment`, `leased_at`,
    `age_seconds`, `expires_in_seconds`.
    """
    total: int


def live_routes(
    live: Live,
    store: GroupStore,
    version: Callable[[], int],
    look: Callable[[], Awaitable[None]],
) -> APIRouter:
    """Returns the routes of this room; `version`, `look`: see `add_event_routes`."""
    router = APIRouter(tags=["live"])
    add_event_routes(router, live.feed, version, look)
    add_failure_routes(router, live.failures)
    add_engine_routes(router, live.engines)

    @router.get(
        "/v1/rollouts/running", responses=answers(RunningAnswer, 422, what="Some rollouts.")
    )
    async def running(
        environment: Annotated[str, Query(max_length=256)] = "", limit: _Limit = 100
    ) -> Response:
        """Lists the rollouts of groups that this server plays now. Joined runners have their own,
        of which the server knows only how many groups are open.
        """
        found, total = live.running(environment, limit)
        now = time.time()
        return json_answer({"rollouts": [_shown(one, now) for one in found], "total": total})

    @router.get(
        "/v1/runs/{run}/leases", responses=answers(LeasesAnswer, 404, 422, what="Leased groups.")
    )
    async def leases(run: str, limit: _Limit = 200) -> Response:
        """Lists the groups that a run has leased and not acknowledged. Ids of leases are not
        shown: who knows one could acknowledge it.
        """
        found, total = await store.leased_groups(run, limit)
        return json_answer(
            {"leases": [msgspec.structs.asdict(one) for one in found], "total": total}
        )

    return router


def _shown(one: msgspec.Struct, now: float) -> dict[str, Any]:
    facts = msgspec.structs.asdict(one)
    facts["seconds"] = max(0.0, now - facts.pop("since"))
    return facts
