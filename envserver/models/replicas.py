"""The replicas of an engine: which one serves a request, and what requests show about it.

A rollout sticks to one replica (rendezvous hash of its id), so that the engine's prefix cache
serves
its later turns, as long as that replica is healthy and has slots. Results of calls and health
checks
decide through its breaker whether it is used; each change is logged once.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import structlog

from ..telemetry.numbers import SECONDS, Distribution
from .adaptive import AdaptiveLimit, Load
from .breaker import Breaker, State
from .slots import Slots

_FAIR_SECONDS = 5.0
"""A call with a shorter timeout says nothing about its replica when it times out."""

_log = structlog.get_logger("envserver.engine")


class Replica:
    """One address of an engine.

    Args:
        url: with neither `/v1` nor a slash at its end, and without credentials.
        slots: bounds the calls in flight.
        heard_at: when it last answered a call or sent a part of a stream.
        suspected: set when its health should be asked for now.
        seconds: of answered calls, to the first part of a stream.
        errors: number of calls that failed here.
    """

    def __init__(self, url: str, max_in_flight: int, clock: Callable[[], float]) -> None:
        self.url = url
        self.slots = Slots(max_in_flight)
        self.heard_at = float("-inf")
        self.suspected = asyncio.Event()
        self.seconds = Distribution(SECONDS)
        self.errors = 0
        self.clock = clock
        self._breaker = Breaker(clock)
        self._limit = AdaptiveLimit(max_in_flight)
        self._requests: set[ReplicaRequest] = set()
        self._busy_until = float("-inf")

    @property
    def state(self) -> State:
        return self._breaker.state

    @property
    def usable(self) -> bool:
        """Whether calls may be sent to this replica now."""
        return self._breaker.allows and self.clock() >= self._busy_until

    @property
    def aside_until(self) -> float:
        return max(self._breaker.until, self._busy_until)

    @property
    def reason(self) -> str:
        """Why it is set aside, "" if it is not."""
        return "" if self.state == "closed" else self._breaker.reason

    @contextmanager
    def request(self) -> Iterator[ReplicaRequest]:
        """Context of a request to this replica, which reports its result to the ReplicaRequest."""
        request = ReplicaRequest(self)
        tries = self._breaker.begin()
        self._requests.add(request)
        try:
            yield request
        finally:
            self._requests.discard(request)
            self._breaker.end(tries)

    def checked(self, well: bool, reason: str = "") -> None:
        """Registers a health check; an unhealthy replica gets no calls."""
        with self._noted():
            self._breaker.checked(well, reason)

    def measured(self, load: Load | None) -> None:
        """Adapts the limit to the reported load; None: it reports none."""
        if load is None:
            self.slots.resize(self._limit.forget())
        else:
            self.slots.resize(self._limit.observe(load, self.slots.used))

    def give_up_requests(self) -> None:
        """Stops every unanswered request, to be sent elsewhere."""
        for request in self._requests:
            request.give_up()

    def heard(self) -> None:
        """Registers a sign of life that only a working engine gives."""
        self.heard_at = self.clock()

    def answered(self, begun_at: float) -> None:
        self.heard()
        with self._noted():
            self._breaker.succeeded(begun_at)

    def failed(self, begun_at: float, reason: str) -> None:
        self.suspected.set()
        with self._noted():
            self._breaker.failed(begun_at, reason)

    def refused(self, reason: str) -> None:
        self.suspected.set()
        with self._noted():
            self._breaker.refused(reason)

    def busy(self, seconds: float) -> None:
        """Registers the engine's request to wait."""
        self._busy_until = max(self._busy_until, self.clock() + seconds)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        before = self.state
        yield
        if before == "closed" and self.state != "closed":
            _log.warning("engine_replica_set_aside", base_url=self.url, reason=self.reason)
        if before != "closed" and self.state == "closed":
            _log.info("engine_replica_is_back", base_url=self.url)


class ReplicaRequest:
    """One request at a replica, until its answer (or the first chunk of a stream) arrives.

    Only calls take slots and count for the breaker: even an engine that cannot sample answers
        requests
    for its health and models.

    Args:
        sent_at: when it got a slot and was sent; None before.
        given_up: it was stopped because its replica no longer responds.
    """

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.begun_at = replica.clock()
        self.sent_at: float | None = None
        self.given_up = False
        self._scope: asyncio.Timeout | None = None

    @contextmanager
    def within(self, scope: asyncio.Timeout) -> Iterator[None]:
        """Makes `give_up` end `scope` with a TimeoutError."""
        self._scope = scope
        try:
            yield
        finally:
            self._scope = None

    def give_up(self) -> None:
        if self._scope is not None and not self._scope.expired():
            self.given_up = True
            self._scope.reschedule(asyncio.get_running_loop().time())

    def sent(self) -> None:
        """It has its slot, and goes out now."""
        self.sent_at = self.replica.clock()

    def answered(self) -> None:
        """It was answered, be it by a refusal of the request."""
        if self.sent_at is not None:
            self.replica.seconds.add(self.replica.clock() - self.sent_at)
            self.replica.answered(self.begun_at)

    def failed(self, reason: str) -> None:
        """It was answered badly, or the connection broke."""
        if self.sent_at is not None:
            self.replica.errors += 1
            self.replica.failed(self.begun_at, reason)

    def refused(self, reason: str) -> None:
        """The replica took no connection."""
        self.replica.refused(reason)

    def timed_out(self) -> None:
        """Registers a timeout.

        It counts as a failure only if the replica has shown no sign of life since the request was
        sent;
        otherwise the replica is merely slow."""
        if self.sent_at is None:
            return
        waited = self.replica.clock() - self.sent_at
        if waited >= _FAIR_SECONDS and self.replica.heard_at < self.sent_at:
            self.failed("calls get no answer")


class Replicas:
    """The addresses of one engine."""

    def __init__(
        self, urls: Sequence[str], max_in_flight: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.all = [Replica(url, max_in_flight, clock) for url in urls]

    def pick(self, rollout_id: str, avoid: Collection[Replica] = ()) -> Replica:
        """Picks the replica for `rollout_id`: usable, not in `avoid`, and its own if possible.

        A full replica loses its calls to less loaded ones, counted in multiples of its limit:
            otherwise a
        slow replica would keep calls that it has no time for.
        """
        if len(self.all) == 1:
            return self.all[0]
        ranked = sorted(self.all, key=lambda replica: _weight(rollout_id, replica.url))
        usable = [replica for replica in ranked if replica.usable]
        if not usable:
            return min(ranked, key=lambda replica: (replica in avoid, replica.aside_until))
        return min(usable, key=lambda replica: (replica in avoid, replica.slots.rounds))

    def other_usable(self, avoid: Collection[Replica]) -> bool:
        """Returns whether some usable replica is not among `avoid`."""
        return any(replica.usable and replica not in avoid for replica in self.all)


def _weight(rollout_id: str, url: str) -> bytes:
    return hashlib.blake2b(f"{rollout_id}\0{url}".encode(), digest_size=8).digest()
