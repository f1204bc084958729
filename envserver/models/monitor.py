"""Checks each replica in the background while an engine is open.

Health: every few seconds, at once after a failed call, and with growing pauses while it is
unhealthy. Load, from its metrics: about once a second while it has calls in flight.

A process that is gone breaks its connections; one that hangs keeps them and answers nothing. So
calls at a replica that missed several checks in a row, without any other sign of life, are stopped
and sent to another one.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from http import HTTPStatus

from envserver_records.backoff import Backoff
from envserver_records.cancelling import cancel_and_wait
from envserver_records.errors import EngineError

from .adaptive import read_load
from .connections import Connections, RetryableError, whole
from .replicas import Replica
from .routing import Replicas

_LONGEST_PAUSE_SECONDS = 30.0
_MISSES = 3
"""Missed checks in a row after which its calls are given up."""
_MAX_METRICS_BYTES = 16 * 1024 * 1024


class ReplicaMonitor:
    """The background checks of an engine; use with `async with`.

    Args:
        check_seconds: between two health checks, and the longest that one may take. An engine's
            only replica is not asked while it is well: there is no choice to be made.
        measure_seconds: between two readings of the load.
    """

    def __init__(
        self,
        replicas: Replicas,
        connections: Connections,
        *,
        check_seconds: float,
        measure_seconds: float,
    ) -> None:
        self._replicas = replicas
        self._connections = connections
        self._check_seconds = check_seconds
        self._measure_seconds = measure_seconds
        self._tasks: dict[Replica, list[asyncio.Task[None]]] = {}

    async def __aenter__(self) -> ReplicaMonitor:
        for replica in self._replicas.all:
            self.watch(replica)
        return self

    def watch(self, replica: Replica) -> None:
        """Begins the checks of one replica."""
        self._tasks[replica] = [
            asyncio.create_task(work, name=f"watch {replica.url}")
            for work in (self._check(replica), self._measure(replica))
        ]

    def unwatch(self, replica: Replica) -> None:
        """Ends the checks of one replica."""
        for task in self._tasks.pop(replica, ()):
            task.cancel()

    async def __aexit__(self, *exc: object) -> None:
        tasks = [task for each in self._tasks.values() for task in each]
        self._tasks.clear()
        ends = await cancel_and_wait(*tasks)
        for end in ends:
            if end is not None and not isinstance(end, asyncio.CancelledError):
                raise end

    async def _check(self, replica: Replica) -> None:
        misses = 0
        missing_since = 0.0
        while True:
            is_alone = replica.origin == "setting" and len(self._replicas.all) == 1
            if replica.state != "closed" or not is_alone:
                began = replica.clock()
                miss, lost = await self._miss(replica)
                if miss and not lost:
                    replica.lost()
                if not miss or replica.heard_at >= began:
                    misses = 0
                    replica.checked(True)
                else:
                    missing_since = missing_since if misses else began
                    misses += 1
                    replica.checked(False, miss)
                if misses >= _MISSES and lost and replica.heard_at < missing_since:
                    self._give_up(replica)
            await self._pause(replica, misses)

    def _give_up(self, replica: Replica) -> None:
        if self._replicas.other_usable([replica]):
            replica.give_up_requests()

    async def _miss(self, replica: Replica) -> tuple[str, bool]:
        """Returns why its check failed ("" if not), and whether its calls may be lost.

        A server without `/health` that answers so is healthy. One that accepts no connections may
        still answer its current calls, as servers do that shut down in order.
        """
        try:
            status, _ = await self._get(replica, "/health")
        except TimeoutError:
            return "no answer to its health check in time", True
        except RetryableError as retryable:
            return retryable.error.message, retryable.fault != "refused"
        except EngineError as error:
            return error.message, True
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return f"its health check says HTTP {status}", True
        return "", False

    async def _pause(self, replica: Replica, misses: int) -> None:
        """Waits until the next check, which a failed call brings forward."""
        seconds = self._check_seconds
        if misses:
            backoff = Backoff(self._check_seconds / 5, _LONGEST_PAUSE_SECONDS)
            seconds = backoff.seconds(misses)
        replica.suspected.clear()
        seconds *= random.uniform(0.8, 1.2)
        if misses:
            await asyncio.sleep(seconds)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await replica.suspected.wait()
            # Calls fail in bursts; one check is enough for all of them.
            await asyncio.sleep(self._check_seconds / 50)

    async def _measure(self, replica: Replica) -> None:
        while True:
            await asyncio.sleep(self._measure_seconds)
            if not replica.slots.used:
                continue
            try:
                status, text = await self._get(replica, "/metrics")
            except (TimeoutError, RetryableError, EngineError):
                # Health is checked elsewhere.
                continue
            if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                continue
            load = read_load(text.decode(errors="replace"))
            replica.measured(load)
            if load is None:
                await asyncio.sleep(_LONGEST_PAUSE_SECONDS)

    async def _get(self, replica: Replica, path: str) -> tuple[int, bytes]:
        async with asyncio.timeout(self._check_seconds):
            async with self._connections.open(replica, "GET", path) as response:
                return response.status, await whole(response, _MAX_METRICS_BYTES)
