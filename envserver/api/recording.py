"""Records a server's numbers: the last two hours in memory, thirty days in the store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Final

import structlog
from envserver_records.errors import StoreError
from prometheus_client.core import Metric

from ..settings.server import AlarmsConfig, RetentionConfig
from ..store import GroupStore
from ..telemetry.alarms import NEEDED, AlarmBook, AlarmFacts, Finding, Situation, findings
from ..telemetry.alarms.situation import Curves
from ..telemetry.history import History, Numbers, Row, as_json, from_json, numbers_of
from ..telemetry.numbers import by_key, gauge

if TYPE_CHECKING:
    from .metrics import Metrics


log = structlog.get_logger(__name__)

SECONDS: Final = 10.0
"""Between two rows in memory."""
_ROWS: Final = 720
_DAYS: Final = 30
_MINUTES: Final = _DAYS * 24 * 60


class Recorder:
    """The history of one server.

    Args:
        clock: seconds since 1970.
        then: called after each record with the time and the rows in memory.
        tell: called with each row in memory.
    """

    def __init__(
        self,
        metrics: Metrics,
        store: GroupStore,
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
        """Records the numbers of now."""
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
        """Returns the rows from `start` to `end` in order: by the minute, then what memory has.

        Args:
            points: number of rows that are wanted; of long spans every n-th minute is read.
        """
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
    """The alarms of one server.

    Args:
        facts: what is known beside the numbers; called on the event loop, so it must be fast.
    """

    def __init__(self, config: AlarmsConfig, facts: Callable[[], AlarmFacts] = AlarmFacts) -> None:
        self.book = AlarmBook()
        self._config = config
        self._facts = facts
        self._failed: set[str] = set()

    async def check(self, now: float, history: History) -> None:
        """Finds what is wrong now."""
        found = await asyncio.to_thread(self._find, now, history, self._facts())
        self.book.update(now, found)

    def _find(self, now: float, history: History, facts: AlarmFacts) -> list[Finding]:
        times, columns = history.columns(now - _ALARM_SECONDS, NEEDED)
        at = Situation(Curves(times, columns), facts, self._config, self.book.keys)
        return findings(at, self._failed)

    async def families(self) -> Iterable[Metric]:
        """See `api.metrics.Source`."""
        counts = by_key(self.book.counts())
        return [gauge("envserver_alarms", "Active alarms by name", ("name",), counts)]


_UPKEEP_SECONDS: Final = 300.0
_FULL_SECONDS: Final = 5.0
"""Seconds between looks at a full disk."""


async def remove_old(store: GroupStore, retention: RetentionConfig) -> None:
    """Deletes groups that were delivered long ago, every few minutes until cancelled; retries when
    the store fails. While the disk is full, deletes at once all that no run can go back to.
    """
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
