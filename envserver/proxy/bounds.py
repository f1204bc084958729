"""Bounds what one attempt may ask of the proxy at once: connections, bytes, requests a second.

An agent may run code of a model, which has the attempt's key: without bounds, one rollout takes the
descriptors, memory or time that all share. Requests over a bound get status 429 and are counted.
While all attempts together are near a bound of the server, each may still have a small reserve.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Literal, Protocol, Self

import msgspec
import structlog
from envserver_records.errors import LimitReached, UsageError

from ..settings.config import WorkersConfig
from ..telemetry.redaction import Bucket

Bound = Literal["connections", "requests", "bytes", "recorded", "idle"]

KEPT_CONNECTIONS = 8
"""Connections of an attempt while the server has few descriptors left."""
OVER_BOUND = "over_bound"
_KEPT_BYTES = 4_000_000
_MEGABYTE = 1_000_000
_SHARES = 8
"""Limit of bytes for all attempts together, as a multiple of the limit for one attempt."""
_RECORD_SHARES = 32
"""The same for the bytes of their records."""
_BURST_SECONDS = 10
READING_SHARE = 0.25
"""Share of one processor that the event loop may spend reading the requests of one attempt."""
READING_BURST_SECONDS = 5.0
_PATIENCE_SECONDS = 0.25
"""How long a request waits for its turn, and how long a refusal is held back."""

_log = structlog.get_logger("envserver.proxy")


class OverBound(UsageError):
    """The attempt asked for more at once than it may; `detail["bound"]` names the bound."""

    kind, status = "over_bound", 429


class AttemptBounds(msgspec.Struct, frozen=True, kw_only=True):
    """See the settings of the same names (`WorkersConfig`)."""

    max_connections: int = 64
    max_request_mb: float = 128
    max_requests_per_second: float = 100
    max_recorded_mb: float = 64

    @property
    def max_bytes(self) -> int:
        return int(self.max_request_mb * _MEGABYTE)

    @property
    def max_recorded_bytes(self) -> int:
        return int(self.max_recorded_mb * _MEGABYTE)

    @classmethod
    def of(cls, settings: WorkersConfig) -> Self:
        return cls(**{name: getattr(settings, name) for name in cls.__struct_fields__})


class Connection(Protocol):
    @property
    def is_answered(self) -> bool:
        """Whether the server is answering a complete request of this connection."""

    def drop(self, error: OverBound) -> None: ...


class Connections:
    """Open connections that share a bound.

    Those that have waited for their clients longest are closed if there are too many: a client that
    holds connections without using them only loses these.
    """

    def __init__(self) -> None:
        self._open: dict[Connection, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Connection, most: int) -> int:
        """Adds `connection`, or makes it the latest; returns how many were closed for `most`."""
        self._open.pop(connection, None)
        self._open[connection] = None
        if (over := len(self._open) - most) <= 0:
            return 0
        # The newcomer itself must go if all others are being answered.
        go = [
            *islice((candidate for candidate in self._open if not candidate.is_answered), over)
        ] or [connection]
        error = over_bound("connections", f"More than {most} connections from one rollout.")
        for dropped in go:
            del self._open[dropped]
            dropped.drop(error)
        return len(go)

    def discard(self, connection: Connection) -> None:
        self._open.pop(connection, None)


class Totals:
    def __init__(self, max_bytes: int, max_recorded: int) -> None:
        self.max_bytes = max_bytes
        self.max_recorded = max_recorded
        self.bytes = 0
        self.recorded = 0
        self.connections = 0
        self.refused: Counter[Bound] = Counter()

    @classmethod
    def of(cls, bounds: AttemptBounds) -> Self:
        return cls(bounds.max_bytes * _SHARES, bounds.max_recorded_bytes * _RECORD_SHARES)


class InFlight:
    """Bytes and connections in flight for one attempt, or for all clients without a valid key."""

    def __init__(
        self,
        bounds: AttemptBounds | None = None,
        totals: Totals | None = None,
        *,
        rollout_id: str = "",
        flags: set[str] | None = None,
    ) -> None:
        self.bounds = bounds or AttemptBounds()
        self.connections = Connections()
        self.bytes = 0
        self.recorded = 0
        self.reading_seconds = 0.0
        self._totals = totals or Totals.of(self.bounds)
        self._rollout_id = rollout_id
        # Not the attempt itself: a cycle would keep its record until the next collection.
        self._flags = set() if flags is None else flags
        rate = self.bounds.max_requests_per_second
        now = time.monotonic()
        self._requests = Bucket(rate, max(1.0, rate * _BURST_SECONDS), now)
        self._reading = Bucket(READING_SHARE, READING_BURST_SECONDS, now)

    def refused(self, bound: Bound, times: int = 1) -> None:
        """Counts refusals, and flags the attempt; the first one is logged."""
        if not times:
            return
        self._totals.refused[bound] += times
        if OVER_BOUND not in self._flags:
            self._flags.add(OVER_BOUND)
            _log.warning("rollout_over_bound", rollout_id=self._rollout_id, bound=bound)

    def claim(self, connection: Connection, *, is_short: bool) -> None:
        """Counts `connection` for this attempt; `is_short`: the server has few descriptors left."""
        most = self.bounds.max_connections
        if is_short:
            most = min(most, KEPT_CONNECTIONS)
        self.refused("connections", self.connections.add(connection, most))

    async def admit(self) -> None:
        """Waits until one more request is within `max_requests_per_second`."""
        now = time.monotonic()
        wait = self._requests.wait_seconds(1, now)
        if wait > _PATIENCE_SECONDS:
            self.refused("requests")
            await asyncio.sleep(_PATIENCE_SECONDS)  # asking again at once must not be free
            rate = self.bounds.max_requests_per_second
            raise over_bound("requests", f"More than {rate:g} requests a second from one rollout.")
        self._requests.take(1, now)
        if wait:
            await asyncio.sleep(wait)

    async def may_read(self) -> None:
        """Waits while reading this attempt's requests has taken more than its share of time."""
        while wait := self._reading.wait_seconds(0, time.monotonic()):
            await asyncio.sleep(wait)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Context in which a request is read; its CPU time is counted."""
        began = time.thread_time()
        try:
            yield
        finally:
            seconds = time.thread_time() - began
            self.reading_seconds += seconds
            self._reading.take(seconds, time.monotonic())

    def take(self, size: int) -> None:
        """Takes bytes, all or none (gives them back, if `size` is negative)."""
        mine, all_bytes = self.bytes + size, self._totals.bytes + size
        is_full = all_bytes > self._totals.max_bytes and mine > _KEPT_BYTES
        if size > 0 and (mine > self.bounds.max_bytes or is_full):
            self.refused("bytes")
            most = self.bounds.max_request_mb
            raise over_bound("bytes", f"More than {most:g} MB of requests from a rollout at once.")
        self.bytes = mine
        self._totals.bytes = all_bytes

    def keep(self, size: int) -> None:
        """Takes bytes of the record (gives them back, if `size` is negative)."""
        mine, everybody = self.recorded + size, self._totals.recorded + size
        if size > 0 and mine > self.bounds.max_recorded_bytes:
            self.refused("recorded")
            raise LimitReached(
                f"All {self.bounds.max_recorded_mb:g} MB that one rollout's requests may leave in"
                " its record are used up.",
                hint="--workers.max_recorded_mb sets the limit.",
                limit="record",
            )
        if size > 0 and everybody > self._totals.max_recorded and mine > _KEPT_BYTES:
            self.refused("recorded")
            raise over_bound("recorded", "The records of all rollouts together are full.")
        self.recorded, self._totals.recorded = mine, everybody


class Hold:
    """Bytes of one request, given back at the end of its block."""

    def __init__(self, in_flight: InFlight) -> None:
        self.may_read = in_flight.may_read
        self._in_flight = in_flight
        self._bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shrink(0)

    def cover(self, size: int) -> None:
        """Takes what is missing to `size` bytes."""
        if size > self._bytes:
            self._in_flight.take(size - self._bytes)
            self._bytes = size

    def shrink(self, size: int) -> None:
        """Gives back what exceeds `size` bytes."""
        if size < self._bytes:
            self._in_flight.take(size - self._bytes)
            self._bytes = size


def over_bound(bound: Bound, message: str) -> OverBound:
    hint = (
        "--workers.max_connections, max_request_mb, max_requests_per_second and max_recorded_mb "
        "set the limits."
    )
    return OverBound(message, hint=hint, bound=bound, retry_after_seconds=1)
