"""Live state of the server: events, failures, running rollouts, engines.

One `Live` belongs to a server. Parts that run rollouts add themselves to it; the routes read it.
"""

from __future__ import annotations

from collections.abc import Callable

from ...rollouts.running import RunningRollout
from ...telemetry.alarms.book import Alarm
from ...telemetry.history import Numbers
from .engines import EngineSource
from .failures import FailureLog
from .feed import Feed

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
