"""Live state of the server: engines, running rollouts, failures and drops; feeds the live events.

One `Live` belongs to a server; parts that run rollouts add themselves to it. `Follower` looks at
the store and the engines only while a page watches, and joins many groups or failures to one event.
A failure's message is short and contains no control characters and nothing that looks like a
secret."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Annotated, Any, Final, Literal

import msgspec
import structlog
from envserver_records.errors import Fault, RolloutError, StoreError, by_kind, fault_of
from fastapi import APIRouter, Query
from starlette.responses import Response

from ..http.answers import json_answer, route
from ..models.engine import Engine
from ..rollouts.events import Event, GroupDropped, Observer, RolloutFailed, RunningRollout
from ..settings.section import Described
from ..store import GroupRow, Store
from ..store.listing import GroupQuery
from ..store.lookups import GroupLookups
from ..telemetry.alarm_facts import Alarm
from ..telemetry.history import Numbers
from ..telemetry.redaction import printable, redacted
from .groups import summary
from .live_events import Feed, add_event_routes, missed

What = Literal["attempt", "rollout", "group", "drop"]

MOST_ROWS: Final = 1000
MOST_ALONE: Final = 10
"""Groups, or failures, of one look that are published one by one."""
_MOST_CHARACTERS: Final = 2000
_MOST_ALIKE: Final = 20
"""Rows for one request of a trainer."""
_LIMIT: Final = 2**63 - 1
_FAULTS_OF_DROPS: Final[Mapping[str, Fault]] = {
    "too_long": "model",
    "stale": "trainer",
    "unscorable": "environment",
    "untrained": "environment",
}
"""By reason. A group that lost too many rollouts is incomplete: see its latest failure."""
_KINDS: Final = by_kind(RolloutError)


class FailureRow(msgspec.Struct, frozen=True, kw_only=True):
    """A failure, or a group that was not delivered.

    Args:
        n: its number, from 1 since the server started.
        time: seconds since 1970.
        kind: of `envserver_records.errors`, or the reason of a drop.
        what: attempt: it is tried again; rollout: it is lost; group: not delivered, a failure;
            drop: not delivered, filtered or set aside.
        count: number of failures that it stands for; joined runners tell only how many.
        runner: name of the runner that reported it.
    """

    n: int
    time: float
    environment: str
    task_id: str = ""
    group_id: str = ""
    rollout: int | None = None
    attempt: int | None = None
    kind: str
    fault: Fault
    message: str
    what: What
    count: int = 1
    runner: str | None = None


class FailuresAnswer(Described):
    failures: list[dict[str, Any]]
    """Newest first: `n`, `time`, `environment`, `task_id`, `group_id`, `rollout`, `attempt`,
    `kind`, `fault` (model, environment, engine, trainer, infrastructure), `message`, `what`
    (attempt: it is tried again; rollout: it is lost; group: not delivered; drop: filtered, stale or
    set aside), `count`, `runner`."""
    counts: dict[str, int]
    """By kind, over the last 1000 that match all filters but `kind` and `before`."""
    next: int | None
    """The `before` of the next page; null on the last one."""


class FailureLog:
    """The last 1,000 failures and drops of a server, of which equal rewards are none. `number`: of
    the latest."""

    def __init__(self) -> None:
        self.number = 0
        self._rows: deque[FailureRow] = deque(maxlen=MOST_ROWS)

    def observer(self, environment: str) -> Observer:
        return partial(self._observe, environment)

    def add(self, *, message: str, **facts: Any) -> None:
        if facts["kind"] == "zero_variance":  # a statistic of `groups_dropped`; often most drops
            return
        self.number += 1
        shown = redacted(printable(message[:_MOST_CHARACTERS], keep="\n"))
        facts = {"time": time.time()} | facts
        self._rows.append(FailureRow(n=self.number, message=shown, **facts))

    def _observe(self, environment: str, event: Event) -> None:
        if isinstance(event, RolloutFailed):
            failure = event.failure
            facts: dict[str, Any] = {
                "rollout": _number(event.rollout_id),
                "attempt": event.attempt,
                "kind": failure.kind,
                "fault": fault_of(failure.kind, failure.blame),
                "message": failure.message,
                "what": "rollout" if event.final else "attempt",
            }
        elif isinstance(event, GroupDropped):
            fault = _FAULTS_OF_DROPS.get(event.reason) or self._fault_of_group(event.group_id)
            facts = {
                "kind": event.reason,
                "fault": fault,
                "message": event.message,
                "what": "group" if event.failed else "drop",
            }
        else:
            return
        of = {"environment": environment, "task_id": event.task_id, "group_id": event.group_id}
        self.add(time=event.at, **of, **facts)

    def _fault_of_group(self, group_id: str) -> Fault:
        latest = islice(reversed(self._rows), MOST_ROWS)
        return next(
            (failure.fault for failure in latest if failure.group_id == group_id), "environment"
        )

    def reported(
        self, environment: str, runner: str, failures: Mapping[str, int], drops: Mapping[str, int]
    ) -> None:
        """Adds how many attempts failed and groups were dropped at a runner since its last report
        of them, by kind and reason."""
        for counts, what, noun in ((failures, "attempt", "attempts"), (drops, "drop", "groups")):
            for kind, count in counts.items():
                known = _KINDS.get(kind, RolloutError)
                fault = fault_of(kind, known.blame)
                self.add(
                    environment=environment,
                    kind=kind,
                    fault=_FAULTS_OF_DROPS.get(kind, fault) if what == "drop" else fault,
                    message=f"{count} {noun} at the runner {runner}; its log says more.",
                    what=what,
                    count=count,
                    runner=runner,
                )

    def set_aside(self, groups: Sequence[GroupRow], reason: str) -> None:
        for group in groups[:_MOST_ALIKE]:
            self.add(
                environment=group.env,
                group_id=group.group_id,
                kind="set_aside",
                fault="trainer",
                message=reason,
                what="drop",
            )

    def after(self, number: int) -> list[FailureRow]:
        newest = islice(reversed(self._rows), max(0, self.number - number))
        return list(newest)[::-1]

    def tell(self, feed: Feed, seen: int) -> int:
        """Publishes the failures after number `seen`; returns the number of the last."""
        if self.number - seen > MOST_ALONE:
            facts = {"count": self.number - seen, "first": seen + 1, "last": self.number}
            feed.publish("failures", facts)
        else:
            for row in self.after(seen):
                feed.publish("failure", msgspec.structs.asdict(row))
        return self.number

    def page(
        self, *, environment: str, kind: str, fault: str, before: int, limit: int
    ) -> tuple[list[FailureRow], dict[str, int], int | None]:
        """Returns up to `limit` matching rows before number `before`, newest first; the counts by
        kind; and the `before` of the next page."""
        alike = [
            row
            for row in reversed(self._rows)
            if environment in ("", row.environment) and fault in ("", row.fault)
        ]
        counts: Counter[str] = Counter()
        for row in alike:
            counts[row.kind] += row.count
        wanted = [row for row in alike if row.n < before and kind in ("", row.kind)]
        shown = wanted[:limit]
        return shown, dict(counts.most_common()), shown[-1].n if len(wanted) > limit else None


def _number(rollout_id: str) -> int | None:
    number = rollout_id.rpartition("-r")[2]
    return int(number) if number.isdecimal() else None


def add_failure_routes(router: APIRouter, failures: FailureLog) -> None:
    @router.get("/v1/failures", **route(FailuresAnswer, 422, what="Failures."))
    async def list_failures(
        environment: Annotated[str, Query(max_length=256)] = "",
        kind: Annotated[str, Query(max_length=256, description="kind, or reason of a drop")] = "",
        fault: Annotated[Fault | Literal[""], Query(description="whose fault")] = "",
        before: Annotated[
            int, Query(ge=0, le=_LIMIT, description="only those of a smaller `n`")
        ] = _LIMIT,
        limit: Annotated[int, Query(ge=1, le=MOST_ROWS)] = 100,
    ) -> Response:
        """Lists the last 1000 failures and drops since the server started, newest first: attempts
        that failed and rollouts that were lost, whose fault it was and in which words; groups that
        were not delivered, and why, except for equal rewards. Joined runners tell only how many."""
        rows, counts, following = failures.page(
            environment=environment, kind=kind, fault=fault, before=before, limit=limit
        )
        shown = [msgspec.structs.asdict(row) for row in rows]
        return json_answer({"failures": shown, "counts": counts, "next": following})


class EngineSource(msgspec.Struct, frozen=True):
    """An engine.

    Args:
        name: "" for the engine of the rollouts, else the agent that has it.
        version: returns the policy version that it serves; -1: none, or unknown.
    """

    name: str
    engine: Engine
    model: str
    version: Callable[[], int]

    def rows(self) -> list[dict[str, Any]]:
        published, now = self.version(), time.time()
        return [
            {
                "id": replica.id,
                "name": self.name,
                "url": replica.base_url,
                "model": self.model,
                "calls": replica.in_flight,
                "waiting": replica.waiting,
                "limit": replica.limit,
                "breaker": replica.state.replace("_", "-"),
                "errors": replica.errors,
                "calls_total": replica.calls,
                "seconds_p50": replica.seconds_p50,
                "seconds_p95": replica.seconds_p95,
                "weights_version": _known(published if replica.follows else replica.version),
                "ready": replica.healthy,
                "reason": replica.reason,
                "origin": replica.origin,
                "standing": replica.standing,
                "rollouts": replica.rollouts,
                "expires_in_seconds": None
                if replica.expires_at is None
                else replica.expires_at - now,
            }
            for replica in self.engine.replicas()
        ]


def _known(version: int | None) -> int | None:
    return None if version is None or version < 0 else version


def engine_rows(sources: Sequence[EngineSource]) -> list[dict[str, Any]]:
    return [row for source in sources for row in source.rows()]


class EnginesAnswer(Described):
    engines: list[dict[str, Any]]
    """A row for each replica: `id` ("": it has none), `name` ("": the engine of the rollouts, else
    the agent that has it), `url`, `model`, `calls` (now), `waiting`, `limit`, `breaker` (closed:
    used; open: set aside; half-open: on trial), `errors` and `calls_total` (since the start),
    `seconds_p50` and `seconds_p95` (until an answer; null: there was none), `weights_version`
    (null: not known), `ready`, `standing` (used, checking, unreachable, refused, old, paused,
    draining, drained), `reason` (why it is not used), `origin` (setting, registered, file,
    server), `rollouts` (those whose calls go there), `expires_in_seconds` (null: never)."""


def add_engine_routes(router: APIRouter, sources: Sequence[EngineSource]) -> None:
    @router.get("/v1/engines", **route(EnginesAnswer, what="The engines."))
    async def list_engines() -> Response:
        """Lists the engines of the server's own rollouts: load, errors, answer times, versions.
        Joined runners have their own, which are listed with them."""
        return json_answer({"engines": engine_rows(sources)})


Running = Callable[[str, int], tuple[list[RunningRollout], int]]
"""Returns some rollouts of an environment ("": of all), and how many there are."""


class Live:
    """The live state of one server. `engines`, `running`: of its own rollouts."""

    def __init__(self) -> None:
        self.feed = Feed()
        self.failures = FailureLog()
        self.engines: list[EngineSource] = []
        self.running: Running = lambda environment, limit: ([], 0)

    def alarmed(self, alarm: Alarm, begins: bool) -> None:
        self.feed.publish("alarm", alarm.facts() | {"active": begins})

    def sampled(self, now: float, numbers: Numbers) -> None:
        series = [(metric.name, dict(metric.labels), value) for metric, value in numbers.items()]
        self.feed.publish("sample", {"time": now, "series": series})


log = structlog.get_logger(__name__)

LOOK_SECONDS: Final = 0.5
_UNWATCHED_SECONDS: Final = 10.0
_DROPS: Final[tuple[tuple[str, str, Fault, str], ...]] = (
    ("stale_dropped", "stale", "trainer", "Groups that waited became too old for the policy."),
    ("damaged", "damaged", "infrastructure", "Stored groups cannot be read; see /v1/status."),
)
"""Counter of the store, kind, fault, message."""
_TOLD_OF_ENGINES: Final = ("breaker", "weights_version", "ready", "standing")


async def tell_groups(feed: Feed, groups: GroupLookups, last: int) -> None:
    """Publishes the groups after `feed.seq` up to `last`, or their number if they are many."""
    seen = feed.seq
    if last <= seen:
        return
    rows = []
    if last - seen <= MOST_ALONE:
        page = await groups.list_groups(GroupQuery(after=seen), "", last - seen)
        rows = [group for group in page.groups if group.row.seq <= last]
    if len(rows) < last - seen:  # many, or some were removed already
        feed.publish("groups", missed(seen, last), seq=last)
        return
    for group in rows:
        feed.publish("group", summary(group), seq=group.row.seq)


class Follower:
    """Publishes what changed since the last look; `load` it first."""

    def __init__(self, live: Live, store: Store) -> None:
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
        self._dropped = await self._store.counters()

    async def run(self) -> None:
        """Looks twice a second while a page watches, until cancelled."""
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
        async with self._lock:
            try:
                await tell_groups(self._feed, self._store, self._store.last_seq)
            except StoreError as error:  # the next look publishes them
                log.warning("groups_not_told", error=str(error))
            await self._note_drops()
            self._failures = self._live.failures.tell(self._feed, self._failures)
            self._tell_runs()
            for row in self._changed_engines():
                self._feed.publish("engine", row)

    async def _note_drops(self) -> None:
        counters = await self._store.counters()
        for counter, kind, fault, message in _DROPS:
            count = counters.get(counter, 0) - self._dropped.get(counter, 0)
            if count > 0:
                self._live.failures.add(
                    environment="",
                    kind=kind,
                    fault=fault,
                    message=message,
                    what="drop",
                    count=count,
                )
        self._dropped = counters

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
    null: none), `state` (waiting, playing, scoring)."""
    total: int


class LeasesAnswer(Described):
    leases: list[dict[str, Any]]
    """A row for each leased group, oldest lease first: `group_id`, `environment`, `leased_at`,
    `age_seconds`, `expires_in_seconds`."""
    total: int


def live_routes(
    live: Live,
    store: Store,
    version: Callable[[], int],
    look: Callable[[], Awaitable[None]],
) -> APIRouter:
    router = APIRouter(tags=["live"])
    add_event_routes(router, live.feed, version, look)
    add_failure_routes(router, live.failures)
    add_engine_routes(router, live.engines)

    @router.get("/v1/rollouts/running", **route(RunningAnswer, 422, what="Some rollouts."))
    async def running(
        environment: Annotated[str, Query(max_length=256)] = "", limit: _Limit = 100
    ) -> Response:
        """Lists the rollouts of groups that this server plays now. Joined runners have their own,
        of which the server knows only how many groups are open."""
        found, total = live.running(environment, limit)
        rows, now = [msgspec.structs.asdict(row) for row in found], time.time()
        for row in rows:
            row["seconds"] = max(0.0, now - row.pop("since"))
        return json_answer({"rollouts": rows, "total": total})

    @router.get("/v1/runs/{run}/leases", **route(LeasesAnswer, 404, 422, what="Leased groups."))
    async def leases(run: str, limit: _Limit = 200) -> Response:
        """Lists the groups that a run has leased and not acknowledged. Ids of leases are not
        shown: who knows one could acknowledge it."""
        found, total = await store.leased_groups(run, limit)
        return json_answer(
            {"leases": [msgspec.structs.asdict(lease) for lease in found], "total": total}
        )

    return router
