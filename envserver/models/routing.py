"""Chooses the replica that serves a call, and sends failed calls again.

A rollout has a home: the replica of its first call, so that the engine's prefix cache serves its
later turns. It leaves its home while that is unhealthy or full, and for good if it is removed,
paused or has old weights. A new rollout's home is chosen by a rendezvous hash of its id (with one
replica more, 1/N of the new rollouts go there), or is the replica with the least load.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from contextvars import ContextVar, Token
from typing import Final, Literal, TypeVar

from envserver_records.errors import EngineError, EngineRefused, EngineTimeout, EngineUnavailable
from envserver_records.waiting import Backoff

from .connections import RetryableError
from .replicas import Origin, Replica, ReplicaRequest

Routing = Literal["prefix", "least"]
Standing = Literal[
    "used", "checking", "unreachable", "refused", "old", "paused", "draining", "drained"
]

T = TypeVar("T")

_MAX_PAUSE_SECONDS = 5.0
_PATIENCE = 0.9
"""Share of a call's time for which it waits until some replica may have it. It fails before its
rollout's time is over, so that the lack of an engine is not taken for the model's slowness."""
_SAMPLING_PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate")


class SampledVersions:
    """The policy versions that the sampling replica had at the start and at the end of a call
    within the block. Both None: it has the versions that are published for all engines."""

    __slots__ = ("_token", "first", "last")

    def __init__(self) -> None:
        self.first: int | None = None
        self.last: int | None = None
        self._token: Token[SampledVersions | None]

    def __enter__(self) -> SampledVersions:
        self._token = _noted.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _noted.reset(self._token)


_noted: ContextVar[SampledVersions | None] = ContextVar("envserver_sampled_versions", default=None)


def versions_noted(path: str) -> SampledVersions | None:
    """Where to note the versions of the replica that a call to `path` is sent to, if anywhere."""
    return _noted.get() if path in _SAMPLING_PATHS else None


class Replicas:
    """The replicas of one engine, which learn how each call went.

    A call is tried on another replica at once, on the same one after a pause that doubles, with
    jitter, and is never shorter than the engine asks for.

    Args:
        max_lag: policy versions that a replica may be behind the published one.
        version: returns the version that was published for all engines; -1: none.
    """

    def __init__(
        self,
        urls: Sequence[str],
        max_in_flight: int,
        *,
        routing: Routing = "prefix",
        max_lag: int = 0,
        tries: int = 1,
        pause_seconds: float = 0.0,
    ) -> None:
        self.all = [Replica(url, max_in_flight) for url in urls]
        self.version: Callable[[], int] = lambda: -1
        self._max_in_flight = max_in_flight
        self._routing = routing
        self._max_lag = max_lag
        self._tries = tries
        self._backoff = Backoff(pause_seconds, _MAX_PAUSE_SECONDS, jitter=(0.5, 1.5))
        self._homes: dict[str, Replica | None] = {}
        self._change = asyncio.Event()

    def add(self, url: str, origin: Origin) -> Replica:
        replica = Replica(url, self._max_in_flight, origin=origin)
        self.all.append(replica)
        return replica

    def remove(self, replica: Replica) -> None:
        """Removes a replica: it gets no new calls; current ones end there."""
        self.all.remove(replica)
        replica.give_up_requests(sent=False)
        self.changed()

    def changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def wait_for_change(self) -> None:
        """Waits until a replica is added, removed or used differently, or a rollout ends."""
        await self._change.wait()

    def version_of(self, replica: Replica) -> int | None:
        if replica.version is not None:
            return replica.version if replica.is_sure else None
        return self.version() if replica.follows else None

    def is_current(self, replica: Replica) -> bool:
        """Whether its weights are new enough; all are before a version is published."""
        published, version = self.version(), self.version_of(replica)
        if version is None:
            return published < 0 and replica.version is None
        return version >= published - self._max_lag

    def standing(self, replica: Replica) -> tuple[Standing, str]:
        """How `replica` is used, and why it is not."""
        if not replica.admitted:
            if replica.is_refused:
                return "refused", replica.refusal
            return ("unreachable" if replica.refusal else "checking"), replica.refusal
        if replica.draining:
            is_left = not replica.rollouts and not replica.slots.used
            return ("drained" if is_left else "draining"), replica.reason
        if replica.paused:
            return "paused", replica.reason
        if not self.is_current(replica):
            return "old", self._age(replica)
        return "used", replica.reason

    def _age(self, replica: Replica) -> str:
        version, published = self.version_of(replica), self.version()
        if version is not None:
            return f"it has version {version}, and {published} is published"
        if replica.version is not None:
            return "it was unreachable, and its version has been unknown since"
        return "its policy version is not known"

    async def next(
        self, rollout_id: str, avoid: Collection[Replica], patience_until: float
    ) -> Replica:
        """Waits for a replica that may have the call until the loop's time `patience_until`."""
        if (replica := self.pick(rollout_id, avoid)) is not None:
            return replica
        with suppress(TimeoutError):
            async with asyncio.timeout_at(patience_until):
                while not self._is_hopeless:
                    await self._change.wait()
                    if (replica := self.pick(rollout_id, avoid)) is not None:
                        return replica
        hint = "Register one with POST /v1/engines, or report its version."
        if self._is_hopeless:
            hint = "Start the engine that the run began with, or start a new run."
        raise EngineUnavailable(self.missing(), hint=hint)

    @property
    def _is_hopeless(self) -> bool:
        """Whether all engines are of the settings, and others than they were."""
        return bool(self.all) and all(
            replica.is_refused and replica.origin == "setting" for replica in self.all
        )

    def missing(self) -> str:
        if not self.all:
            return "No engine is known."
        standings = Counter(self.standing(replica)[0] for replica in self.all)
        counts = ", ".join(f"{count} {standing}" for standing, count in sorted(standings.items()))
        why = next((f": {replica.refusal}" for replica in self.all if replica.is_refused), ".")
        return f"No engine can be used: {counts}{why}"

    def pick(self, rollout_id: str, avoid: Collection[Replica] = ()) -> Replica | None:
        """The replica for `rollout_id`: usable, not in `avoid`, and its home if possible.

        A full replica loses its calls to less loaded ones, counted in multiples of its limit:
        otherwise a slow replica would keep calls that it has no time for. None: no replica may have
        the call.
        """
        home = self._homes.get(rollout_id)
        takers = [each for each in self.all if self._takes(each, is_home=each is home)]
        if not takers:
            return None
        if home is None or home not in takers:
            home = self._settle(rollout_id, takers)
        if home.usable and not home.slots.rounds and home not in avoid:
            return home
        ranked = [home, *(each for each in _ranked(rollout_id, takers) if each is not home)]
        usable = [replica for replica in ranked if replica.usable]
        if not usable:
            return min(ranked, key=lambda replica: (replica in avoid, replica.aside_until))
        return min(usable, key=lambda replica: (replica in avoid, replica.slots.rounds))

    def begun(self, rollout_id: str) -> None:
        """Registers a rollout, which has a home until it ends. Other calls are routed by a hash."""
        self._homes.setdefault(rollout_id, None)

    def ended(self, rollout_id: str) -> None:
        home = self._homes.pop(rollout_id, None)
        if home is not None:
            home.rollouts -= 1
            if home.draining and not home.rollouts:
                self.changed()

    def home(self, rollout_id: str) -> Replica | None:
        return self._homes.get(rollout_id)

    def other_usable(self, avoid: Collection[Replica]) -> bool:
        return any(
            replica.usable and self._takes(replica, is_home=False) and replica not in avoid
            for replica in self.all
        )

    def _takes(self, replica: Replica, *, is_home: bool) -> bool:
        return (
            replica.admitted
            and not replica.paused
            and (is_home or not replica.draining)
            and self.is_current(replica)
        )

    def _settle(self, rollout_id: str, takers: list[Replica]) -> Replica:
        ranked = _ranked(rollout_id, takers)
        load = _load if self._routing == "least" else (lambda replica: not replica.usable)
        home = min(ranked, key=load)
        if rollout_id in self._homes:
            self.ended(rollout_id)
            self._homes[rollout_id] = home
            home.rollouts += 1
        return home

    # Calls that fail

    async def until_answered(
        self, once: Callable[[ReplicaRequest], Awaitable[T]], rollout_id: str, deadline: float
    ) -> T:
        """Runs `once` on one replica after another until it succeeds or the loop's time is
        `deadline`.

        `once` raises RetryableError or an EngineError; only EngineRefused is final.
        """
        now = asyncio.get_running_loop().time
        patience_until = now() + _PATIENCE * (deadline - now())
        tried: list[Replica] = []
        while True:
            replica = await self.next(rollout_id, tried, patience_until)
            try:
                with ReplicaRequest(replica) as request:
                    return await _try(once, request, deadline)
            except RetryableError as retryable:
                if not replica.admitted or (
                    request.given_up and (replica.paused or replica not in self.all)
                ):
                    continue  # it was moved, and did not fail
                tried.append(replica)
                pause = self._pause(retryable, tried)
                if len(tried) >= self._tries or pause is None or now() + pause >= deadline:
                    raise retryable.error from None
            await asyncio.sleep(pause)

    def _pause(self, retryable: RetryableError, tried: list[Replica]) -> float | None:
        """Seconds until the next try, or None if there should be none."""
        if self.other_usable(tried):
            return 0.0
        if retryable.other_replica:
            return None
        return max(self._backoff.seconds(len(tried), random.random()), retryable.wait_seconds)


def _ranked(rollout_id: str, replicas: Sequence[Replica]) -> list[Replica]:
    return sorted(replicas, key=lambda replica: _weight(rollout_id, replica.url))


def _load(replica: Replica) -> tuple[bool, float, float]:
    """Its calls and its rollouts, as shares of its limit."""
    slots = replica.slots
    calls = slots.used + slots.waiting
    return (not replica.usable, calls / slots.limit, replica.rollouts / slots.limit)


def _weight(rollout_id: str, url: str) -> bytes:
    return hashlib.blake2b(f"{rollout_id}\0{url}".encode(), digest_size=8).digest()


async def _try(
    once: Callable[[ReplicaRequest], Awaitable[T]], request: ReplicaRequest, deadline: float
) -> T:
    try:
        async with asyncio.timeout_at(deadline) as request.scope:
            try:
                result = await once(request)
            finally:
                request.scope = None
    except TimeoutError:
        raise _overdue(request) from None
    except RetryableError as retryable:
        if retryable.fault == "refused":
            request.replica.refused(retryable.error.message)
        elif retryable.fault == "failed":
            request.failed(retryable.error.message)
        raise
    except EngineRefused:
        request.answered()
        raise
    except EngineError as error:
        request.failed(error.message)
        raise RetryableError(error, other_replica=True) from None
    request.answered()
    return result


def _overdue(request: ReplicaRequest) -> Exception:
    replica = request.replica
    if request.given_up:
        message = f"The engine at {replica.url} no longer responds: {replica.reason}."
        return RetryableError(EngineUnavailable(message, base_url=replica.url), "busy")
    request.timed_out()
    if request.sent_at is None and replica.slots.used >= replica.slots.limit:
        message = "The engine had no free slot for the call in time."
        hint = "Lower --rollouts.max_concurrent."
        return EngineTimeout(message, hint=hint, base_url=replica.url)
    return late(replica, replica.clock() - (request.sent_at or request.begun_at))


def late(replica: Replica, seconds: float) -> EngineTimeout:
    message = f"The engine at {replica.url} did not answer within {round(seconds, 1):g} s."
    return EngineTimeout(message, base_url=replica.url)
