"""How many runners a load wants; pure."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import msgspec

from ..settings.runs import RayConfig


class Load(msgspec.Struct, frozen=True):
    """The load that decides how many runners there are.

    Args:
        groups: groups that may be open now, those that are open included.
        groups_per_runner: groups that a runner can have open.
        engine_waits: calls wait for the engine: more runners would only wait, too.
    """

    groups: int
    groups_per_runner: float
    engine_waits: bool = False


class Scaling:
    """The number of runners over time: up at once, down only after a while.

    Args:
        clock: returns seconds; any clock.
    """

    def __init__(self, config: RayConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._now = config.runners or config.min
        self._enough_since: float | None = None
        self._enough = 0

    def wanted(self, load: Load, room: int) -> int:
        """Returns how many runners there should be.

        Args:
            room: number of runners that the cluster has room for now.
        """
        config = self._config
        if config.runners is not None:
            return config.runners
        most = max(config.min, config.max or room)
        needed = math.ceil(load.groups / max(1e-9, load.groups_per_runner))
        target = min(most, max(config.min, needed))
        if target >= self._now:
            self._enough_since = None
            if not load.engine_waits:
                self._now = target
        else:
            self._shrink(target)
        self._now = min(self._now, most)
        return self._now

    def _shrink(self, target: int) -> None:
        """Takes the largest number that was needed in the last `ray.idle_seconds`."""
        now = self._clock()
        if self._enough_since is None:
            self._enough_since, self._enough = now, target
        self._enough = max(self._enough, target)
        if now - self._enough_since >= self._config.idle_seconds:
            self._now, self._enough_since = self._enough, None
