"""One call, tried on one replica after the other within its time.

Another replica is tried at once, the same one after a pause that doubles, with jitter, and is never
shorter than the engine asks for. How each try went is told to the replica.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from envserver_records.backoff import Backoff
from envserver_records.errors import EngineError, EngineRefused, EngineTimeout, EngineUnavailable

from .connections import RetryableError
from .replicas import Replica, ReplicaRequest
from .routing import Replicas

T = TypeVar("T")

_MAX_PAUSE_SECONDS = 5.0
_PATIENCE = 0.9
"""Share of a call's time for which it waits until some replica may have it. It fails before its
rollout's time is over, so that nobody takes the lack of an engine for the model's slowness."""


class Retrying:
    """Sends calls to `replicas`.

    Args:
        tries: requests sent for one call, over all replicas.
        pause_seconds: before the first repetition on the same replica.
    """

    def __init__(self, replicas: Replicas, *, tries: int, pause_seconds: float) -> None:
        self._replicas = replicas
        self._tries = tries
        self._backoff = Backoff(pause_seconds, _MAX_PAUSE_SECONDS, jitter=(0.5, 1.5))

    async def until_answered(
        self, once: Callable[[ReplicaRequest], Awaitable[T]], rollout_id: str, deadline: float
    ) -> T:
        """Runs `once` on one replica after another until it succeeds.

        Args:
            once: raises RetryableError or an EngineError; only EngineRefused is final.
            deadline: in the time of the loop.

        Raises:
            EngineError: the last try's.
        """
        now = asyncio.get_running_loop().time
        patience_until = now() + _PATIENCE * (deadline - now())
        tried: list[Replica] = []
        while True:
            replica = await self._replicas.next(rollout_id, tried, patience_until)
            try:
                with replica.request() as request:
                    return await _try(once, request, deadline)
            except RetryableError as retryable:
                if not replica.admitted or (
                    request.given_up and (replica.paused or replica not in self._replicas.all)
                ):
                    continue  # it was moved, and did not fail
                tried.append(replica)
                pause = self._pause(retryable, tried)
                if len(tried) >= self._tries or pause is None or now() + pause >= deadline:
                    raise retryable.error from None
            await asyncio.sleep(pause)

    def _pause(self, retryable: RetryableError, tried: list[Replica]) -> float | None:
        """Returns the seconds until the next try, or None if there should be none."""
        if self._replicas.other_usable(tried):
            return 0.0
        if retryable.elsewhere:
            return None
        return max(self._backoff.seconds(len(tried), random.random()), retryable.wait_seconds)


async def _try(
    once: Callable[[ReplicaRequest], Awaitable[T]], request: ReplicaRequest, deadline: float
) -> T:
    """Runs `once` until `deadline` and tells the replica how it went."""
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
            request.refused(retryable.error.message)
        elif retryable.fault == "failed":
            request.failed(retryable.error.message)
        raise
    except EngineRefused:
        request.answered()
        raise
    except EngineError as error:
        request.failed(error.message)
        raise RetryableError(error, elsewhere=True) from None
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
    """Returns the timeout error of `replica`, which was waited for so many seconds."""
    message = f"The engine at {replica.url} did not answer within {round(seconds, 1):g} s."
    return EngineTimeout(message, base_url=replica.url)
