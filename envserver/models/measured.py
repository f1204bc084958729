"""Wraps an engine to measure its answers' times and failures.

What always holds: bodies and answers pass unchanged; a call that its caller cancelled counts
neither as a failure nor as a time.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar, Token
from typing import Any, Final

import msgspec
from envserver_records.errors import EngineError

from ..telemetry.numbers import SECONDS, Counts, Distribution, Labelled
from .engine import Engine, ReplicaHealth

Json = dict[str, Any]

_MOST_PATHS: Final = 20


class Stopwatch:
    """The time that one request of an agent spent waiting for others than the proxy.

    A context manager: within, and in the tasks started there, what is asked of an engine counts.

    Args:
        calls: number of answers that it waited for.
    """

    __slots__ = ("_token", "calls", "seconds")

    def __init__(self) -> None:
        self.calls = 0
        self.seconds = 0.0
        self._token: Token[Stopwatch | None]

    def __enter__(self) -> Stopwatch:
        self._token = _stopwatch.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _stopwatch.reset(self._token)


_stopwatch: ContextVar[Stopwatch | None] = ContextVar("envserver_stopwatch", default=None)


@contextmanager
def count_as_waiting() -> Iterator[None]:
    """Marks the time within as waiting: it stops the watch, too."""
    watch = _stopwatch.get()
    started = time.perf_counter()
    try:
        yield
    finally:
        if watch is not None:
            watch.seconds += time.perf_counter() - started


class MeasuredEngine:
    """An Engine that is `engine`, and counts.

    Args:
        seconds: of calls that were answered, by path: from the call to the answer's end.
        errors: failed calls by the kind of failure.
        in_flight: calls that are not answered yet, be they waiting for room.
    """

    def __init__(self, engine: Engine) -> None:
        self.kind = engine.kind
        self.exact = engine.exact
        self.seconds = Labelled(SECONDS, _MOST_PATHS)
        self.errors = Counts()
        self.in_flight = 0
        self._engine = engine

    async def __aenter__(self) -> MeasuredEngine:
        await self._engine.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._engine.__aexit__(*exc)

    async def model_name(self) -> str:
        return await self._engine.model_name()

    async def get(self, path: str) -> Json:
        """See Engine; not counted."""
        return await self._engine.get(path)

    async def health(self) -> list[ReplicaHealth]:
        return await self._engine.health()

    def replicas(self) -> list[ReplicaHealth]:
        """See Engine. A single replica that counts nothing has all calls counted here."""
        found = self._engine.replicas()
        if len(found) != 1 or found[0].calls or found[0].errors:
            return found
        return [self._with_counts(found[0])]

    def _with_counts(self, replica: ReplicaHealth) -> ReplicaHealth:
        together = Distribution(SECONDS)
        for _, seconds in self.seconds:
            together.counts = [a + b for a, b in zip(together.counts, seconds.counts, strict=True)]
        return msgspec.structs.replace(
            replica,
            in_flight=replica.in_flight or self.in_flight,
            calls=together.count,
            errors=int(sum(count for _, count in self.errors)),
            seconds_p50=together.quantile(0.5),
            seconds_p95=together.quantile(0.95),
        )

    async def post(
        self,
        path: str,
        body: Json,
        *,
        rollout_id: str,
        timeout_seconds: float,
        form: type | None = None,
    ) -> Json:
        with self._counted(path):
            return await self._engine.post(
                path, body, rollout_id=rollout_id, timeout_seconds=timeout_seconds, form=form
            )

    @asynccontextmanager
    async def stream(
        self,
        path: str,
        body: Json,
        *,
        rollout_id: str,
        timeout_seconds: float,
        form: type | None = None,
    ) -> AsyncIterator[AsyncIterator[Json]]:
        streaming = self._engine.stream(
            path, body, rollout_id=rollout_id, timeout_seconds=timeout_seconds, form=form
        )
        with self._counted(path):
            async with streaming as chunks:
                yield chunks

    @contextmanager
    def _counted(self, path: str) -> Iterator[None]:
        started = time.perf_counter()
        self.in_flight += 1
        try:
            yield
        except EngineError as error:
            self.errors.add((error.kind,))
            raise
        else:
            self.seconds.add((path,), time.perf_counter() - started)
        finally:
            self.in_flight -= 1
            if (watch := _stopwatch.get()) is not None:
                watch.calls += 1
                watch.seconds += time.perf_counter() - started
