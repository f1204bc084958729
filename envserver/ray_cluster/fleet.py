"""Keeps as many runners on a cluster as are wanted: wanted state against seen state, in ticks.

In: how many runners there should be. Out: actors that are started, drained and removed. What holds:
a runner is asked to finish before its actor is removed; a runner that ends by itself with an error
is started again, and three errors in a row of one runner end the run with its words.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from envserver_records.errors import EnvserverError

from .cluster import Actor, Cluster, CommandSpec

_log = structlog.get_logger("envserver.ray")

_MOST_CRASHES = 3
_LASTING_SECONDS = 120.0
"""A runner that lived this long has not failed in a row."""
_AGAIN_SECONDS = 2.0
_STARTING_SECONDS = 10.0
"""Seconds for an actor to start where there is room; after that it is said that there is none."""
_STOP_SECONDS = 5.0
_BOOT_SECONDS = 60.0
"""Seconds from a place until a runner surely works, or never will."""


class RunnerFailed(EnvserverError):
    """A runner ends with an error whenever it starts."""

    kind, status = "runner_failed", 502


@dataclass
class _Slot:
    """The place of a runner: it is filled by one actor after the other."""

    actor: Actor
    begun_at: float
    draining: bool = False
    waits: bool = False
    host: str = ""
    placed_at: float = 0.0


class Fleet:
    """Runners of one environment, by number from 0.

    Args:
        name: of the environment, for messages.
        wants: what a runner needs of a node, for messages.
        make: returns the command of a runner.
        drain: asks a runner to finish its open groups and leave.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        *,
        wants: str,
        make: Callable[[int], CommandSpec],
        drain: Callable[[int], None],
    ) -> None:
        self._cluster = cluster
        self._name = name
        self._wants = wants
        self._make, self._drain = make, drain
        self._slots: dict[int, _Slot] = {}
        self._crashes: dict[int, int] = {}
        self._not_before: dict[int, float] = {}
        self._done: set[int] = set()
        self.lost = 0
        """Number of runners that were lost with their node or process."""

    @property
    def size(self) -> int:
        """Number of runners that are not told to leave."""
        return sum(not one.draining for one in self._slots.values())

    @property
    def placed(self) -> int:
        """Number of runners that run now."""
        return sum(bool(one.actor.state) for one in self._slots.values())

    @property
    def young(self) -> int:
        """Number of runners that have a place, and may not have asked for work yet."""
        earliest = time.monotonic() - _BOOT_SECONDS
        return sum(bool(one.host) and one.placed_at > earliest for one in self._slots.values())

    @property
    def is_empty(self) -> bool:
        """Whether no runner is left."""
        return not self._slots

    async def tick(self, wanted: int) -> None:
        """Looks at all runners once, and starts or drains some.
        Raises RunnerFailed: a runner cannot start.
        """
        await self._cluster.look([one.actor for one in self._slots.values()])
        for number, one in list(self._slots.items()):
            self._note(number, one)
            if (status := one.actor.state.get("status")) is not None:
                await self._ended(number, one, status)
        await self._resize(wanted)
        await self._drain_leaving()

    async def stop(self, seconds: float) -> None:
        """Ends all runners, their open work within `seconds`."""
        actors = [one.actor for one in self._slots.values()]
        self._slots.clear()
        await self._cluster.stop(actors, seconds)

    async def _resize(self, wanted: int) -> None:
        staying = sorted(number for number, one in self._slots.items() if not one.draining)
        for number in staying[max(0, wanted) :]:
            self._slots[number].draining = True
        number, missing = 0, wanted - len(staying) - len(self._done)
        while missing > 0:
            if number not in self._slots and number not in self._done:
                missing -= 1
                if time.monotonic() >= self._not_before.get(number, 0.0):
                    actor = await self._cluster.start(self._make(number))
                    self._slots[number] = _Slot(actor, time.monotonic())
            number += 1

    async def _drain_leaving(self) -> None:
        """Asks leaving runners to finish, again and again: one may register only now."""
        for number, one in list(self._slots.items()):
            if one.draining and one.actor.state:
                self._drain(number)
            elif one.draining:
                del self._slots[number]
                await self._cluster.stop([one.actor], _STOP_SECONDS)

    def _note(self, number: int, one: _Slot) -> None:
        """Logs where a runner is, when that changes."""
        host = str(one.actor.state.get("host", ""))
        if host and not one.host:
            _log.info("runner_placed", environment=self._name, runner=number, host=host)
            one.host, one.waits, one.placed_at = host, False, time.monotonic()
        elif one.host and one.actor.lost:
            self.lost += 1
            one.host, one.begun_at = "", time.monotonic()
            _log.warning(
                "runner_lost",
                environment=self._name,
                runner=number,
                why="Its node or process has ended; Ray starts it where there is room.",
            )
        elif not host and not one.waits and time.monotonic() > one.begun_at + _STARTING_SECONDS:
            one.waits = True
            _log.warning(
                "runner_waits",
                environment=self._name,
                runner=number,
                why=f"No node has this free, or has its runtime environment ready: {self._wants}.",
            )

    async def _ended(self, number: int, one: _Slot, status: int) -> None:
        del self._slots[number]
        await self._cluster.stop([one.actor], _STOP_SECONDS)
        if one.draining or status == 0:
            if not one.draining:  # it has made all that it was to make
                self._done.add(number)
            return
        lasted = time.monotonic() - one.begun_at
        crashes = 1 if lasted > _LASTING_SECONDS else self._crashes.get(number, 0) + 1
        self._crashes[number] = crashes
        self._not_before[number] = time.monotonic() + _AGAIN_SECONDS * crashes
        said = str(one.actor.state.get("said", ""))
        _log.warning(
            "runner_ended", environment=self._name, runner=number, status=status, said=said[-500:]
        )
        if crashes >= _MOST_CRASHES:
            raise RunnerFailed(
                f"A runner of {self._name!r} on {one.host or 'a node'} ended {crashes} times with "
                f"status {status}: {said[-1000:] or 'it printed nothing'}",
                hint="The log of its actor (`ray logs actor --id ID`) has all that it printed.",
            )
