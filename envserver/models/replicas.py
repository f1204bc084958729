"""The replicas of an engine: which one serves a request, and what its requests tell about it.

A rollout sticks to one replica (rendezvous hash of its id) so that the engine's prefix cache serves
its later turns, while that one is well and has room. How its calls and its health checks go decides
by its breaker whether it is used; what changes there is logged once.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import structlog

from .adaptive import AdaptiveLimit, Load
from .breaker import Breaker, State
from .slots import Slots

_FAIR_SECONDS = 5.0
"""A call that was given less tells nothing about its replica when it runs out of time."""

_log = structlog.get_logger("envserver.engine")


class Replica:
    """One address of an engine.

    Args:
        url: with neither `/v1` nor a slash at its end, and without credentials.
        slots: bounds the calls in flight.
        heard_at: when it last answered a call or sent a part of a stream.
        suspected: set when its health should be asked for now.
    """

    def __init__(self, url: str, max_in_flight: int, clock: Callable[[], float]) -> None:
        self.url = url
        self.slots = Slots(max_in_flight)
        self.heard_at = float("-inf")
        self.suspected = asyncio.Event()
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
        """Whether a call may go there now."""
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
        """A request goes there; it tells the Visit how it went, if there is anything to tell."""
        request = ReplicaRequest(self)
        tries = self._breaker.begin()
        self._requests.add(request)
        try:
            yield request
        finally:
            self._requests.discard(request)
            self._breaker.end(tries)

    def checked(self, well: bool, reason: str = "") -> None:
        """Its health was asked for; a replica that is not well takes no calls."""
        with self._noted():
            self._breaker.checked(well, reason)

    def measured(self, load: Load | None) -> None:
        """Adapts the calls in flight to its load; None: it says nothing about that."""
        if load is None:
            self.slots.resize(self._limit.forget())
        else:
            self.slots.resize(self._limit.observe(load, self.slots.used))

    def give_up_requests(self) -> None:
        """Ends every request that is still without an answer, to be sent elsewhere."""
        for request in self._requests:
            request.give_up()

    def heard(self) -> None:
        """It sent something that only a working engine sends."""
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
        """It asks to be left alone for so long."""
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
    """One request at a replica, until it is answered: of a stream, until its first chunk.

    Only calls have slots: questions about health and models are answered by engines that can do
    nothing else, so their answers tell nothing.

    Args:
        sent_at: when it got a slot and was sent, None before.
        given_up: it was ended because its replica does not live any more.
    """

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.begun_at = replica.clock()
        self.sent_at: float | None = None
        self.given_up = False
        self._scope: asyncio.Timeout | None = None

    @contextmanager
    def within(self, scope: asyncio.Timeout) -> Iterator[None]:
        """`scope` is what `give_up` ends, by a TimeoutError."""
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
            self.replica.answered(self.begun_at)

    def failed(self, reason: str) -> None:
        """It was answered badly, or the connection broke."""
        if self.sent_at is not None:
            self.replica.failed(self.begun_at, reason)

    def refused(self, reason: str) -> None:
        """The replica took no connection."""
        self.replica.refused(reason)

    def timed_out(self) -> None:
        """Its time was over. The replica failed if nobody heard of it since the request went out:
        else it is only slow."""
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
        """The best for `rollout_id`: usable, not to be avoided, its own, as far as it can be.

        One that is full loses its calls to others that are less so, by whole limits: else a slow
        replica would keep the calls that it has no time for.
        """
        if len(self.all) == 1:
            return self.all[0]
        ranked = sorted(self.all, key=lambda replica: _weight(rollout_id, replica.url))
        usable = [replica for replica in ranked if replica.usable]
        if not usable:
            return min(ranked, key=lambda replica: (replica in avoid, replica.aside_until))
        return min(usable, key=lambda replica: (replica in avoid, replica.slots.rounds))

    def other_usable(self, avoid: Collection[Replica]) -> bool:
        """Whether some usable replica is not among `avoid`."""
        return any(replica.usable and replica not in avoid for replica in self.all)


def _weight(rollout_id: str, url: str) -> bytes:
    return hashlib.blake2b(f"{rollout_id}\0{url}".encode(), digest_size=8).digest()
