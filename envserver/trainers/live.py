"""Live state of the server: events, failures, running rollouts, engines.

One `Live` belongs to a server. Parts that run rollouts add themselves to it; the routes read it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any, Final

import msgspec
import structlog
from envserver_records.errors import Fault, StoreError
from fastapi import APIRouter, Query
from starlette.responses import Response

from ..http.answers import answers, json_answer
from ..models.engine import Engine
from ..rollouts.running import RunningRollout
from ..settings.section import Described
from ..store import GroupStore
from ..store.listing import GroupQuery
from ..telemetry.alarms.book import Alarm
from ..telemetry.history import Numbers
from .failures import FailureLog, add_failure_routes
from .groups import summary
from .live_events import Feed, add_event_routes, missed


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


Running = Callable[[str, int], tuple[list[RunningRollout], int]]
"""Returns some rollouts of an environment ("": of all), and how many there are."""


class Live:
    """The live state of one server.

    Attributes:
        feed: events for pages that are open.
        failures: the latest failures, and what was dropped.
        engines: the engines of the server's own rollouts.
        running: its own rollouts in progress.
    """

    def __init__(self) -> None:
        self.feed = Feed()
        self.failures = FailureLog()
        self.engines: list[EngineSource] = []
        self.running: Running = lambda environment, limit: ([], 0)

    def alarmed(self, alarm: Alarm, begins: bool) -> None:
        """Publishes that an alarm begins or ends."""
        self.feed.publish("alarm", alarm.facts() | {"active": begins})

    def sampled(self, now: float, numbers: Numbers) -> None:
        """Publishes the numbers of `/v1/series` as they are now."""
        series = [(one.name, dict(one.labels), value) for one, value in numbers.items()]
        self.feed.publish("sample", {"time": now, "series": series})


# Nothing is looked at while nobody watches; what happened meanwhile is told when somebody comes.
# Many groups or failures at once are told of as one event, so full load costs less than a few
# groups.

log = structlog.get_logger(__name__)

LOOK_SECONDS: Final = 0.5
MOST_ALONE: Final = 10
"""Groups, or failures, of one look that are told of one by one."""
_UNWATCHED_SECONDS: Final = 10.0
_DROPS: Final[tuple[tuple[str, str, Fault, str], ...]] = (
    ("stale_dropped", "stale", "trainer", "Groups that waited became too old for the policy."),
    ("damaged", "damaged", "infrastructure", "Stored groups cannot be read; see /v1/status."),
)
"""Counter of the store, kind, fault, message."""
_TOLD_OF_ENGINES: Final = ("breaker", "weights_version", "ready", "standing")


class Follower:
    """Publishes what changed since the last look; `load` it first."""

    def __init__(self, live: Live, store: GroupStore) -> None:
        self._live = live
        self._feed = live.feed
        self._store = store
        self._lock = asyncio.Lock()
        self._feed.seq = store.last_seq
        self._failures = live.failures.number
        self._runs = set(store.open_runs)
        self._dropped: dict[str, int] = {}
        self._engines: dict[tuple[str, str], tuple[Any, ...]] = {}
        self._changed_engines()

    async def load(self) -> None:
        """Notes what is there already."""
        self._dropped = await self._store.counters()

    async def run(self) -> None:
        """Looks twice a second while somebody watches, until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_UNWATCHED_SECONDS):
                    await self._feed.watched.wait()
            if self._feed.watchers:
                await self.look()
                await asyncio.sleep(LOOK_SECONDS)
            else:
                await self._note_drops()

    async def look(self) -> None:
        """Publishes what changed."""
        async with self._lock:
            try:
                await self._tell_groups()
            except StoreError as error:  # the next look tells of them
                log.warning("groups_not_told", error=str(error))
            await self._note_drops()
            self._tell_failures()
            self._tell_runs()
            for row in self._changed_engines():
                self._feed.publish("engine", row)

    async def _tell_groups(self) -> None:
        seen, last = self._feed.seq, self._store.last_seq
        if last <= seen:
            return
        rows = []
        if last - seen <= MOST_ALONE:
            page = await self._store.list_groups(GroupQuery(after=seen), "", last - seen)
            rows = [one for one in page.groups if one.row.seq <= last]
        if len(rows) < last - seen:  # many, or some were removed already
            self._feed.publish("groups", missed(seen, last), seq=last)
            return
        for one in rows:
            self._feed.publish("group", summary(one), seq=one.row.seq)

    async def _note_drops(self) -> None:
        """Adds the groups that left the queues of the store to the failures."""
        counters = await self._store.counters()
        for counter, kind, fault, message in _DROPS:
            count = counters.get(counter, 0) - self._dropped.get(counter, 0)
            if count > 0:
                self._live.failures.dropped(kind, count, message, fault)
        self._dropped = counters

    def _tell_failures(self) -> None:
        seen, last = self._failures, self._live.failures.number
        self._failures = last
        if last - seen > MOST_ALONE:
            told = {"count": last - seen, "first": seen + 1, "last": last}
            self._feed.publish("failures", told)
            return
        for row in self._live.failures.after(seen):
            self._feed.publish("failure", msgspec.structs.asdict(row))

    def _tell_runs(self) -> None:
        now = set(self._store.open_runs)
        for name in sorted(self._runs ^ now):
            self._feed.publish("run", {"name": name, "state": "open" if name in now else "closed"})
        self._runs = now

    def _changed_engines(self) -> list[dict[str, Any]]:
        """Returns the rows of engines that changed, but for their numbers, and of those that are
        gone."""
        rows = engine_rows(self._live.engines)
        gone = self._engines.keys() - {(row["name"], row["url"]) for row in rows}
        changed: list[dict[str, Any]] = []
        for name, url in gone:
            del self._engines[name, url]
            changed.append({"name": name, "url": url, "standing": "gone"})
        for row in rows:
            place, state = (row["name"], row["url"]), tuple(row[key] for key in _TOLD_OF_ENGINES)
            if self._engines.get(place) != state:
                self._engines[place] = state
                changed.append(row)
        return changed


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
