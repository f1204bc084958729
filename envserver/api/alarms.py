"""Checks after each record of the numbers whether something is wrong: `GET /v1/alarms`, the metric.

In: the rows of the recorder and facts of the server. Out: a book of active alarms. What holds: the
event loop only reads the facts; the rules run in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from prometheus_client.core import Metric

from ..alarms_config import AlarmsConfig
from ..telemetry.alarms import (
    NEEDED,
    AlarmBook,
    AlarmFacts,
    Finding,
    Situation,
    findings,
)
from ..telemetry.alarms.curves import Curves
from ..telemetry.families import by_key, gauge
from ..telemetry.history import History

_SECONDS = 2 * 3600.0


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
        times, columns = history.columns(now - _SECONDS, NEEDED)
        at = Situation(Curves(times, columns), facts, self._config, self.book.keys)
        return findings(at, self._failed)

    async def families(self) -> Iterable[Metric]:
        """See `api.metrics.Source`."""
        counts = by_key(self.book.counts())
        return [gauge("envserver_alarms", "Active alarms by name", ("name",), counts)]
