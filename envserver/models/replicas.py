"""A replica of an engine: its health, its load and its calls. `routing` chooses among several.

Its breaker decides by calls and health checks whether it is used; each change is logged once. An
engine that was registered while the server runs also has a check, a policy version, and may be
paused or drained.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Literal

import msgspec
import structlog
from envserver_records.waiting import Backoff

from ..telemetry.numbers import SECONDS, Distribution

State = Literal["closed", "open", "half_open"]

_WINDOW_SECONDS = 30.0
_RECENT = 10
_FAILURES = 5
"""Failures among the last calls, within the window, that open it."""
_ASIDE = Backoff(first_seconds=0.5, max_seconds=30.0)


FLOOR = 4
"""Minimum limit, so that the engine keeps reporting its load."""

_SHRINK = 0.85
_QUEUED_POLLS = 2
"""Polls in a row that must show a queue: calls that have just arrived wait, too."""
_FULL = 0.95

_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_PREEMPTED = ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total")
_CACHE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_LINE = re.compile(
    rf"^({'|'.join((*_RUNNING, *_WAITING, *_PREEMPTED, *_CACHE))})(?:\{{.*\}})? +(\S+)",
    re.MULTILINE,
)


class Load(msgspec.Struct, frozen=True):
    """The load that an engine reports, over all its schedulers.

    Args:
        running, waiting: number of requests, from any client.
        preempted: requests stopped for lack of memory since its start.
        cache: share of the KV cache in use, 0 to 1.
    """

    running: float
    waiting: float
    preempted: float = 0.0
    cache: float = 0.0


def read_load(text: str) -> Load | None:
    """Reads vLLM's or SGLang's load from Prometheus text; None if it is missing.

    Only a few of some hundred lines matter and they are read every second: no full parser.
    """
    found: dict[str, list[float]] = {}
    for name, value in _LINE.findall(text):
        try:
            number = float(value)
        except ValueError:
            return None
        if not 0 <= number < float("inf"):
            return None
        found.setdefault(name, []).append(number)
    running, waiting = _first(found, _RUNNING), _first(found, _WAITING)
    if not running or not waiting:
        return None
    return Load(
        running=sum(running),
        waiting=sum(waiting),
        preempted=sum(_first(found, _PREEMPTED)),
        cache=max(_first(found, _CACHE), default=0.0),
    )


def _first(found: dict[str, list[float]], names: tuple[str, ...]) -> list[float]:
    return next((found[name] for name in names if name in found), [])


# A call that waits inside an engine holds memory there and may be preempted and repeated; a call
# that waits here may still go to another replica. So the limit grows by a step while the engine
# works on all its calls and more want to go there, and shrinks by a share when calls wait in the
# engine or are preempted (additive increase, multiplicative decrease).


class Slots:
    """The slots of one replica, taken with `async with`, first come, first served.

    Their number is from min(FLOOR, most) to `most`, where it begins. After it was lowered, `used`
    may exceed it for a time.
    """

    def __init__(self, most: int) -> None:
        self.limit = most
        self.used = 0
        self._most = most
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._queued_polls = 0
        self._preempted: float | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def rounds(self) -> int:
        """Number of full releases of all slots before a call that arrives now gets one."""
        return (self.used + len(self._waiting)) // self.limit

    def observe(self, load: Load | None) -> None:
        """Adapts the limit to the engine's load; None: it reports none."""
        if load is None:
            self._queued_polls, self._preempted = 0, None
            self.resize(self._most)
            return
        preempted = self._preempted is not None and load.preempted > self._preempted
        self._preempted = load.preempted
        self._queued_polls = self._queued_polls + 1 if load.waiting else 0
        if preempted or self._queued_polls >= _QUEUED_POLLS:
            # Calls in flight are never stopped: wait until the last step has taken effect. If
            # hardly any calls are ours, other clients cause the queue.
            floor = min(FLOOR, self._most)
            if floor <= self.used <= self.limit:
                self._queued_polls = 0
                self.resize(max(floor, int(_SHRINK * max(self.used, self.limit // 2))))
        elif not load.waiting and self.used >= self.limit and load.cache < _FULL:
            self.resize(min(self._most, self.limit + max(1, self._most // 64)))

    def resize(self, limit: int) -> None:
        self.limit = limit
        self._hand_out()

    async def __aenter__(self) -> None:
        if not self.rounds:
            self.used += 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place in self._waiting:
                self._waiting.remove(place)
            elif not place.cancelled():
                await self.__aexit__()
            raise

    async def __aexit__(self, *exc: object) -> None:
        self.used -= 1
        self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting and self.used < self.limit:
            place = self._waiting.popleft()
            if not place.done():
                self.used += 1
                place.set_result(None)


_FAIR_SECONDS = 5.0
"""A call with a shorter timeout says nothing about its replica when it times out."""

Origin = Literal["setting", "registered", "file", "server"]
"""How a replica became known: by `openai.base_url`, by POST /v1/engines, by a watched file,
or by the server that a runner has joined."""

_log = structlog.get_logger("envserver.engine")


class Registration(msgspec.Struct, kw_only=True):
    """An engine's address and what the store keeps with it.

    Args:
        ttl_seconds: seconds after a heartbeat at which it ends; None: never.
        expires_at: in seconds since 1970.
        version, follows, draining, paused: see `Replica`.
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
    """One address of an engine, with its circuit breaker. Times are those of `clock`, in seconds.

    Closed: calls go there. Open: none do, because it refused a connection, missed a health check,
    or failed half of its recent calls. Half-open: one call at a time tests it; a success closes the
    breaker, a failure opens it for twice as long. Results of calls that began before it opened are
    ignored. A request that is itself at fault (HTTP 4xx) counts as a success: the replica answered.

    Args:
        url: without `/v1`, a slash at its end, or credentials.
        heard_at: when it last answered a call or sent a part of a stream.
        suspected: set when its health should be checked now.
        seconds: of answered calls, to the first part of a stream.
        admitted: whether it was found to be the same engine as the others; `refusal` says why not.
        is_refused: whether it is another engine; else it is not checked yet, or did not answer.
        version: the policy version reported for this replica, if any.
        follows: whether it has each version that is published for all engines.
        is_sure: whether `version` is still true: not after its process has gone away.
        tells: whether its heartbeats report its version, so that a doubt does not last.
        paused: it gets no calls; draining: it gets no new rollouts.
        on_lost: called when it accepts no connection.
        generation: of the connections over which its engine was last confirmed to be the same.
        served: the models and fingerprints of its answers, by the requested model.
    """

    def __init__(
        self,
        url: str,
        max_in_flight: int,
        clock: Callable[[], float] = time.monotonic,
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
        self.ttl_seconds: float | None = None
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
        self.reason = ""
        self.requests: set[ReplicaRequest] = set()
        self.trying = 0
        """Requests that test an open breaker."""
        self._busy_until = self._aside_until = float("-inf")
        self._failed_at: deque[float | None] = deque(maxlen=_RECENT)
        self._opened_at: float | None = None
        self._openings = 0
        self._unwell = self._by_calls = False

    @property
    def state(self) -> State:
        if self._opened_at is None:
            return "closed"
        return "open" if self._unwell or self.clock() < self._aside_until else "half_open"

    @property
    def usable(self) -> bool:
        state = self.state
        allows = state == "closed" or (state == "half_open" and not self.trying)
        return allows and self.clock() >= self._busy_until

    @property
    def aside_until(self) -> float:
        return max(self._aside_until, self._busy_until)

    def checked(self, well: bool, reason: str = "") -> None:
        """Registers a health check. A healthy result closes the breaker unless calls opened it."""
        self._unwell = not well
        if self._opened_at is None:
            if not well:
                self._open(reason, by_calls=False)
        elif well and not self._by_calls:
            self._close()

    def give_up_requests(self, *, sent: bool = True) -> None:
        """Stops unanswered requests, to be sent elsewhere; `sent`: also those at the engine."""
        for request in self.requests:
            if sent or request.sent_at is None:
                request.give_up()

    def heard(self) -> None:
        """Registers a sign of life that only a working engine gives."""
        self.heard_at = self.clock()

    def answered(self, begun_at: float) -> None:
        self.heard()
        if self._opened_at is None:
            self._failed_at.append(None)
        elif begun_at >= self._opened_at:
            self._close()

    def failed(self, begun_at: float, reason: str) -> None:
        self.suspected.set()
        if self._opened_at is None:
            now = self.clock()
            self._failed_at.append(now)
            since = now - _WINDOW_SECONDS
            if sum(at is not None and at >= since for at in self._failed_at) >= _FAILURES:
                self._open(reason, by_calls=True)
        elif begun_at >= self._opened_at and self.state == "half_open":
            self._open(reason, by_calls=True)

    def refused(self, reason: str) -> None:
        self.suspected.set()
        if self.state != "open":
            self._open(reason, by_calls=False)
        self.lost()

    def lost(self) -> None:
        """Registers a refused connection: when it is back, it may have other weights."""
        if self.version is not None:
            self.losses += 1
            self.is_sure = False
        if self.on_lost is not None:
            self.on_lost()

    def busy(self, seconds: float) -> None:
        self._busy_until = max(self._busy_until, self.clock() + seconds)

    def _open(self, reason: str, *, by_calls: bool) -> None:
        if self._opened_at is None:
            _log.warning("engine_replica_set_aside", base_url=self.url, reason=reason)
        self._openings += 1
        self._opened_at = self.clock()
        self._aside_until = self._opened_at + _ASIDE.seconds(self._openings)
        self._by_calls = by_calls
        self.reason = reason

    def _close(self) -> None:
        _log.info("engine_replica_is_back", base_url=self.url)
        self._opened_at = None
        self._openings = 0
        self._unwell = self._by_calls = False
        self._failed_at.clear()
        self.reason = ""


class ReplicaRequest:
    """One request at a replica, until its answer (or the first chunk of a stream) arrives.

    Only calls take slots and count for the breaker: even an engine that cannot sample answers
    requests for its health and models.

    Args:
        sent_at: when it got a slot and was sent; None before.
        given_up: it was stopped because its replica no longer responds.
        scope: `give_up` ends it with a TimeoutError.
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
        self.replica.requests.add(self)
        self._tries = self.replica.state != "closed"
        self.replica.trying += self._tries
        return self

    def __exit__(self, *_: object) -> None:
        self.replica.requests.discard(self)
        self.replica.trying -= self._tries

    def give_up(self) -> None:
        if self.scope is not None and not self.scope.expired():
            self.given_up = True
            self.scope.reschedule(asyncio.get_running_loop().time())

    @property
    def was_lost(self) -> bool:
        """Whether the replica went away since the request began."""
        return self.replica.losses != self._losses

    def sent(self) -> None:
        self.sent_at = self.replica.clock()

    def answered(self) -> None:
        """The answer may be a refusal of the request."""
        if self.sent_at is not None:
            self.replica.seconds.add(self.replica.clock() - self.sent_at)
            self.replica.answered(self.begun_at)

    def failed(self, reason: str) -> None:
        if self.sent_at is not None:
            self.replica.errors += 1
            self.replica.failed(self.begun_at, reason)
            if self.replica.tells:
                self.replica.lost()

    def timed_out(self) -> None:
        """A failure only if the replica showed no sign of life since the request was sent."""
        if self.sent_at is None:
            return
        waited = self.replica.clock() - self.sent_at
        if waited >= _FAIR_SECONDS and self.replica.heard_at < self.sent_at:
            self.failed("calls get no answer")


def replica_id(url: str) -> str:
    """The same in every process."""
    return f"e-{hashlib.blake2b(url.encode(), digest_size=6).hexdigest()}"
