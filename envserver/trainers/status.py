"""The server's status, alarms, series, source and estimates; the tasks that record them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
import structlog
from envserver_records.errors import StoreError
from envserver_records.records import Split
from fastapi import APIRouter, Query
from starlette.responses import Response

from ..http.answers import json_answer, route
from ..settings.section import Described
from ..settings.server import AlarmsConfig, RetentionConfig
from ..store import DamagedGroup, Store
from ..store.groups import EstimateRow
from ..telemetry.alarm_facts import Alarm, AlarmFacts, Curves, Situation
from ..telemetry.alarms import AlarmBook, findings
from ..telemetry.history import History, Numbers, Row, as_json, curves, from_json, numbers_of
from ..telemetry.measures import Reading
from ..version import __version__
from .atropos_service import AtroposService
from .bodies import MOST_GROUPS, EstimatesAnswer, StatusAnswer
from .policy import PolicyVersion

if TYPE_CHECKING:
    from ..http.health import Metrics


log = structlog.get_logger(__name__)

SECONDS: Final = 10.0
"""Between two rows in memory."""
_ROWS: Final = 720
_DAYS: Final = 30
_MINUTES: Final = _DAYS * 24 * 60


class Recorder:
    """The history of one server.

    Args:
        then: called after each record with the time and the rows in memory.
        tell: called with each row in memory.
    """

    def __init__(
        self,
        metrics: Metrics,
        store: Store,
        clock: Callable[[], float] = time.time,
        then: Callable[[float, History], Awaitable[None]] | None = None,
        tell: Callable[[float, Numbers], None] = lambda now, numbers: None,
    ) -> None:
        self._metrics = metrics
        self._store = store
        self._clock = clock
        self._then = then
        self._tell = tell
        self._history = History(_ROWS)
        self._minute = -1

    async def run(self) -> None:
        """Records until cancelled. When the store fails, the minute is in memory only."""
        await self.load()
        while True:
            await self.record()
            await asyncio.sleep(SECONDS)

    async def load(self) -> None:
        """Reads what the store has of the last two hours: alarms go on after a restart."""
        last = int(self._clock() // 60)
        try:
            stored = await self._store.minutes_between(last - _ROWS // 6, last - 1, 1)
        except StoreError as error:
            log.warning("history_not_read", error=str(error))
            return
        for at, numbers in await asyncio.to_thread(_read, stored):
            self._history.add(at, numbers)

    async def record(self) -> None:
        now = self._clock()
        numbers = numbers_of(await self._metrics.families())
        self._history.add(now, numbers)
        self._tell(now, numbers)
        await self._store_minute(now, numbers)
        if self._then is not None:
            await self._then(now, self._history)

    async def _store_minute(self, now: float, numbers: Numbers) -> None:
        minute = int(now // 60)
        if minute == self._minute:
            return
        self._minute = minute
        try:
            await self._store.put_minute(minute, as_json(numbers), minute - _MINUTES)
        except StoreError as error:
            log.warning("history_not_stored", error=str(error))

    async def between(self, start: float, end: float, points: int) -> list[Row]:
        """Returns the rows from `start` to `end` in order: by the minute, then what memory has. Of
        spans with more than `points` rows every n-th minute is read."""
        recent = await asyncio.to_thread(self._history.between, start, end)
        # The first row in memory is its minute's in the store, too.
        last = min(end, self._history.begins - 60)
        start = max(start, self._clock() - 60 * _MINUTES)
        if start > last:
            return recent
        step = max(1, int((end - start) / 60 / points))
        minutes = await self._store.minutes_between(int(start // 60), int(last // 60), step)
        older = await asyncio.to_thread(_read, minutes)
        return [*(row for row in older if start <= row[0] <= last), *recent]


def _read(minutes: list[tuple[int, str]]) -> list[Row]:
    return [(60.0 * minute, from_json(text)) for minute, text in minutes]


_ALARM_SECONDS = 2 * 3600.0


class AlarmWatch:
    """The alarms of one server. `facts`: what is known beside the numbers; called on the event
    loop, so it must be fast."""

    def __init__(self, config: AlarmsConfig, facts: Callable[[], AlarmFacts] = AlarmFacts) -> None:
        self.book = AlarmBook()
        self._config = config
        self._facts = facts
        self._failed: set[str] = set()

    async def check(self, now: float, history: History) -> None:
        found = await asyncio.to_thread(self._find, now, history, self._facts())
        self.book.update(now, found)

    def _find(self, now: float, history: History, facts: AlarmFacts) -> list[Alarm]:
        times, columns = history.columns(now - _ALARM_SECONDS)
        curves = Curves(times, columns)
        at = Situation(curves, curves, facts, self._config, self.book.keys)
        return findings(at, self._failed)

    async def read(self) -> Reading:
        return {"alarms": self.book.counts()}


_UPKEEP_SECONDS: Final = 300.0
_FULL_SECONDS: Final = 5.0
"""Seconds between looks at a full disk."""


async def remove_old(store: Store, retention: RetentionConfig) -> None:
    """Deletes groups that were delivered long ago, every few minutes until cancelled; retries when
    the store fails. While the disk is full, deletes at once all that no run can go back to."""
    due = time.monotonic() + _UPKEEP_SECONDS
    while True:
        await asyncio.sleep(_FULL_SECONDS)
        is_full = bool(store.disk_problem)
        if not is_full and time.monotonic() < due:
            continue
        due = time.monotonic() + _UPKEEP_SECONDS
        try:
            removed = await store.compact(
                acked_hours=retention.acked_hours, max_gb=0.0 if is_full else retention.max_gb
            )
        except StoreError as error:
            log.error("retention_failed", error=str(error))
            continue
        if removed.groups or removed.leases:
            log.info(
                "store_compacted",
                groups=removed.groups,
                stored_bytes=removed.stored_bytes,
                leases=removed.leases,
            )


_DAMAGED_SHOWN: Final = 20


def add_status_routes(
    router: APIRouter,
    store: Store,
    atropos: AtroposService,
    policy: PolicyVersion,
    joined: Callable[[], dict[str, int]],
    status: Callable[[], dict[str, Any]] | None,
) -> None:
    async def damaged() -> list[DamagedGroup]:
        # The count is kept in memory; query the store only if it is not zero.
        return await store.damaged(_DAMAGED_SHOWN) if "damaged" in await store.counters() else []

    @router.get("/v1/status", **route(StatusAnswer, what="The server's status."))
    async def get_status() -> Response:
        """Returns groups by state, what waits for each open run, the state of the Atropos
        protocol, and the server's counters."""
        return json_answer(
            {
                "version": __version__,
                "policy_version": policy.version,
                "groups": await store.counts(),
                "runs": {
                    name: msgspec.structs.asdict(backlog)
                    for name, backlog in (await store.backlogs()).items()
                },
                "damaged": [msgspec.structs.asdict(group) for group in await damaged()],
                "atropos": atropos.snapshot(),
                "joined": joined(),
                "server": status() if status is not None else {},
            }
        )


class AlarmsAnswer(Described):
    alarms: list[dict[str, Any]]
    """The active ones, critical ones first: `name`, `severity` (warning or critical), `text` (a
    sentence), `since` (seconds since 1970), `environment` (null: not of one), `link` (the page of
    the dashboard), `about` (the environment, agent or replica, or "")."""
    checked_at: float
    """Seconds since 1970; 0: not yet."""


def add_alarm_routes(router: APIRouter, book: AlarmBook) -> None:
    @router.get("/v1/alarms", **route(AlarmsAnswer, what="The active alarms."))
    async def alarms() -> Response:
        """Returns what is wrong now. It is checked every ten seconds."""
        listed = [alarm.facts() for alarm in book.active]
        return json_answer({"alarms": listed, "checked_at": book.checked_at})


_MOST_POINTS: Final = 2000


class SeriesAnswer(Described):
    times: list[float]
    """Seconds since 1970."""
    series: list[dict[str, Any]]
    """`name` and `labels` as in `/metrics`, and `values`, one for each time (null: there was none).
    Counters begin at 0 again when the server starts."""


def add_series_routes(router: APIRouter, recorder: Recorder) -> None:
    @router.get("/v1/series", **route(SeriesAnswer, 422, what="Curves."))
    async def series(
        names: Annotated[
            str, Query(max_length=4096, description="names of samples, by commas; empty: all")
        ] = "",
        start: Annotated[
            float,
            Query(ge=-1e11, le=1e11, description="seconds since 1970; negative: before `end`"),
        ] = -3600,
        end: Annotated[
            float | None,
            Query(ge=0, le=1e11, description="seconds since 1970; unset: now"),
        ] = None,
        points: Annotated[
            int, Query(ge=1, le=_MOST_POINTS, description="maximum number of times")
        ] = 300,
    ) -> Response:
        """Returns some numbers of `/metrics` over time: each ten seconds of the last two hours,
        each minute of the last thirty days. Without parameters, all numbers of the last hour."""
        last = time.time() if end is None else end
        first = start if start >= 0 else last + start
        rows = await recorder.between(first, last, points)
        wanted = frozenset(filter(None, (name.strip() for name in names.split(","))))
        # Of many names, this takes a tenth of a second: not on the event loop.
        return json_answer(await asyncio.to_thread(curves, rows, points, wanted))


_PARTS: Final = ("overview", "groups", "tasks", "runs", "workers", "failures", "alarms")
_OF_ROLLOUTS: Final = ("engines",)
_OF_EVALUATIONS: Final = ("held_out",)
_MOST_NAMED: Final = 3


class SourceAnswer(Described):
    kind: Literal["server", "file", "folder", "store", "evaluation", "comparison"]
    title: str
    """Its title: the environments, or the name of a file."""
    live: bool
    """Whether there is more to come, sent by `/v1/events`."""
    parts: list[str]
    """Pages that have something to show."""
    version: str
    """Version of envserver."""
    replay_source: str | None
    """The SOURCE for `envserver replay`; null: this server's own address."""


def add_source_routes(
    router: APIRouter,
    names: Callable[[], Iterable[str]],
    *,
    makes_rollouts: bool,
    evaluated: Callable[[], bool],
) -> None:
    @router.get("/v1/source", **route(SourceAnswer, what="What the page can show."))
    async def source() -> Response:
        """Returns what this server shows: the page has a menu of these parts."""
        return json_answer(
            {
                "kind": "server",
                "title": _title(sorted(names())),
                "live": True,
                "parts": [
                    *_PARTS,
                    *(_OF_ROLLOUTS if makes_rollouts else ()),
                    *(_OF_EVALUATIONS if evaluated() else ()),
                ],
                "version": __version__,
                "replay_source": None,
            }
        )


def _title(names: list[str]) -> str:
    if not names:
        return "envserver"
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


_NUMBER_LIMIT = 2**63 - 1


def add_estimate_routes(router: APIRouter, store: Store) -> None:
    @router.get("/v1/tasks/estimates", **route(EstimatesAnswer, 422, what="A page of estimates."))
    async def list_estimates(
        after: Annotated[
            int, Query(ge=0, le=_NUMBER_LIMIT, description="`number` of the last estimate seen")
        ] = 0,
        limit: Annotated[
            int, Query(ge=1, le=MOST_GROUPS, description="maximum number of estimates")
        ] = 100,
        environment: Annotated[
            str | None,
            Query(max_length=256, pattern=r"^[^\x00]*$", description="only this environment"),
        ] = None,
        split: Annotated[Split | None, Query(description="only this split")] = None,
    ) -> Response:
        """Lists how often the policy solves each task that was ever scored. Stored groups count,
        and so do groups dropped for their rewards or their age; evaluations do not. Tasks come in
        the order in which they were first scored; `next` is the `after` of the following page, null
        on the last page."""
        rows = await store.task_estimates(after, limit, env=environment, split=split)
        following = rows[-1].number if len(rows) == limit else None
        return json_answer({"estimates": [_shown(row) for row in rows], "next": following})


def _shown(row: EstimateRow) -> dict[str, Any]:
    estimate = row.estimate
    return {
        "number": row.number,
        "task_id": row.task_id,
        "environment": row.env,
        "split": row.split,
        "attempts": estimate.attempts,
        "mean_reward": estimate.mean_reward,
        "success": estimate.success,
        "weight": estimate.weight,
        "policy_version": estimate.policy_version,
        "scored_at": row.scored_at,
    }
