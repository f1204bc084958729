"""A replica of an engine, and what requests show about it; `routing` chooses among several.

Results of calls and health checks decide through its breaker whether it is used; each change is
logged once. An engine that was registered while the server runs has more to say: whether it was
checked, which policy version it serves, and whether it is paused or drained.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import msgspec
import structlog

from ..telemetry.numbers import SECONDS, Distribution
from .adaptive import AdaptiveLimit, Load
from .breaker import Breaker, State
from .slots import Slots

_FAIR_SECONDS = 5.0
"""A call with a shorter timeout says nothing about its replica when it times out."""

Origin = Literal["setting", "registered", "file", "server"]
"""How a replica became known: by `openai.base_url`, by POST /v1/engines, by a watched file,
or by the server that a runner has joined."""

_log = structlog.get_logger("envserver.engine")


class Registration(msgspec.Struct, kw_only=True):
    """Facts about an engine besides its address; the store keeps it for registered ones.

    Args:
        version: see `Replica.version`.
        ttl_seconds: seconds after a heartbeat at which it ends; None: never.
        expires_at: in seconds since 1970.
        follows, draining, paused: see `Replica`.
    """

    url: str
    origin: Origin = "registered"
    version: int | None = None
    ttl_seconds: float | None = None
    expires_at: float | None = None
    follows: bool = False
    draining: bool = False
    paused: bool = False


class Replica:
    """One address of an engine.

    Args:
        url: with neither `/v1` nor a slash at its end, and without credentials.
        slots: bounds the calls in flight.
        heard_at: when it last answered a call or sent a part of a stream.
        suspected: set when its health should be asked for now.
        seconds: of answered calls, to the first part of a stream.
        errors: number of calls that failed here.
        admitted: whether it was found to be the same engine as the others; `refusal` says why not.
        is_refused: whether it is another engine; else it is not checked yet, or did not answer.
        version: the policy version that was told for this replica; None: none was.
        follows: whether it has each version that is published for all engines.
        is_sure: whether `version` is still true: not after its process has gone away.
        tells: whether its heartbeats tell its version, so that a doubt does not last.
        paused: whether it gets no calls; draining: whether it gets no new rollouts.
        rollouts: number of rollouts whose calls go here.
        expires_at: when its registration ends, in seconds since 1970; None: never.
        gets_key: whether it gets the engines' key.
        on_lost: called when it accepts no connection.
        generation: of the connections over which its engine was last confirmed to be the same.
        served: the models and fingerprints that it answers with, by the requested model.
    """

    def __init__(
        self,
        url: str,
        max_in_flight: int,
        clock: Callable[[], float],
        origin: Origin = "setting",
    ) -> None:
        self.url = url
        self.id = replica_id(url)
        self.origin: Origin = origin
        self.admitted = self.follows = origin == "setting"
        self.is_refused = False
        self.refusal = ""
        self.version: int | None = None
        self.is_sure = True
        self.tells = False
        self.losses = 0
        self.paused = self.draining = False
        self.rollouts = 0
        self.expires_at: float | None = None
        self.gets_key = True
        self.on_lost: Callable[[], None] | None = None
        self.generation = 0
        self.served: defaultdict[str, set[str]] = defaultdict(set)
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

    def request(self) -> ReplicaRequest:
        """Context of a request to this replica, which reports its result to the ReplicaRequest."""
        return ReplicaRequest(self)

    def begin(self, request: ReplicaRequest) -> bool:
        """A request begins. Returns whether it tries out a replica that was set aside."""
        self._requests.add(request)
        return self._breaker.begin()

    def end(self, request: ReplicaRequest, *, tries: bool) -> None:
        """A request ends; `tries`: what `begin` returned."""
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

    def give_up_requests(self, *, sent: bool = True) -> None:
        """Stops unanswered requests, to be sent elsewhere; `sent`: those at the engine, too."""
        for request in self._requests:
            if sent or request.sent_at is None:
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
        self.lost()

    def lost(self) -> None:
        """Registers that it accepts no connection: when it is back, it may have other weights."""
        if self.version is not None:
            self.losses += 1
            self.is_sure = False
        if self.on_lost is not None:
            self.on_lost()

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

    A context manager. Only calls take slots and count for the breaker: even an engine that cannot
    sample answers requests for its health and models.

    Args:
        sent_at: when it got a slot and was sent; None before.
        given_up: it was stopped because its replica no longer responds.
        scope: what `give_up` ends with a TimeoutError, while it is entered.
    """

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.begun_at = replica.clock()
        self.sent_at: float | None = None
        self.given_up = False
        self.scope: asyncio.Timeout | None = None
        self._losses = replica.losses
        self._tries = False

    def __enter__(self) -> ReplicaRequest:
        self._tries = self.replica.begin(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.replica.end(self, tries=self._tries)

    def give_up(self) -> None:
        if self.scope is not None and not self.scope.expired():
            self.given_up = True
            self.scope.reschedule(asyncio.get_running_loop().time())

    @property
    def was_lost(self) -> bool:
        """Whether the replica went away since the request began."""
        return self.replica.losses != self._losses

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
            if self.replica.tells:
                self.replica.lost()

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


def replica_id(url: str) -> str:
    """Returns the id of the replica at `url`: the same in every process."""
    return f"e-{hashlib.blake2b(url.encode(), digest_size=6).hexdigest()}"
