"""The client without asyncio; `envserver_clients.http` shows how a trainer uses it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack
from functools import partial, wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from anyio.from_thread import start_blocking_portal
from envserver_records.http_errors import Urls

from .aio import EnvClient
from .records import Batch

P = ParamSpec("P")
R = TypeVar("R")


def _waiting(
    method: Callable[Concatenate[EnvClient, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[SyncEnvClient, P], R]:
    @wraps(method)
    def call(self: SyncEnvClient, /, *args: P.args, **kwargs: P.kwargs) -> R:
        work: Callable[[], Awaitable[R]] = partial(method, self._client, *args, **kwargs)
        return self._portal.call(work)

    return call


def _iterating(
    method: Callable[Concatenate[EnvClient, P], AsyncGenerator[Batch, None]],
) -> Callable[Concatenate[SyncEnvClient, P], Iterator[Batch]]:
    @wraps(method)
    def call(self: SyncEnvClient, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[Batch]:
        return self._each(method(self._client, *args, **kwargs))

    return call


class SyncEnvClient:
    """Runs an `EnvClient` in a thread, where it reads streams and extends leases during training.

    A context manager that registers its run; works in notebooks, too. Arguments and methods are
    those of `EnvClient`.
    """

    def __init__(self, url: Urls, *, run: str | None, **settings: Any) -> None:
        self._client = EnvClient(url, run=run, **settings)
        self._stack = ExitStack()

    def __repr__(self) -> str:
        return f"Sync{self._client!r}"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal())
            stack.enter_context(self._portal.wrap_async_context_manager(self._client))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def _each(self, batches: AsyncGenerator[Batch, None]) -> Iterator[Batch]:
        try:
            while True:
                try:
                    yield self._portal.call(batches.__anext__)
                except StopAsyncIteration:
                    return
        finally:
            self._portal.call(batches.aclose)

    resume = _waiting(EnvClient.resume)
    checkpoints = _waiting(EnvClient.checkpoints)
    close_run = _waiting(EnvClient.close_run)

    lease = _waiting(EnvClient.lease)
    batches = _iterating(EnvClient.batches)
    stream = _iterating(EnvClient.stream)
    ack = _waiting(EnvClient.ack)
    nack = _waiting(EnvClient.nack)
    set_aside = _waiting(EnvClient.set_aside)
    extend = _waiting(EnvClient.extend)
    list_groups = _waiting(EnvClient.list_groups)
    get_group = _waiting(EnvClient.get_group)

    tasks = _waiting(EnvClient.tasks)
    task_estimates = _waiting(EnvClient.task_estimates)
    rollouts = _waiting(EnvClient.rollouts)

    publish_policy_version = _waiting(EnvClient.publish_policy_version)
    pause_calls = _waiting(EnvClient.pause_calls)
    resume_calls = _waiting(EnvClient.resume_calls)
    register_engine = _waiting(EnvClient.register_engine)
    engines = _waiting(EnvClient.engines)
    pause_engine = _waiting(EnvClient.pause_engine)
    resume_engine = _waiting(EnvClient.resume_engine)
    status = _waiting(EnvClient.status)
