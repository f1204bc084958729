"""The client without asyncio; `envserver_clients.http` shows how a trainer uses it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack

from anyio.from_thread import start_blocking_portal
from envserver_records import Split, Trajectory
from envserver_records.http_errors import Urls
from envserver_records.wire import GroupSummary

from .aio import EnvClient
from .protocol import BatchLimits, InFlight, TaskEstimate, TaskSummary
from .records import Batch, ClientGroup


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

    # The run

    def resume(self, checkpoint: str | None) -> dict[str, Any]:
        return self._portal.call(self._client.resume, checkpoint)

    def checkpoints(self) -> list[dict[str, Any]]:
        return self._portal.call(self._client.checkpoints)

    def close_run(self) -> None:
        self._portal.call(self._client.close_run)

    # Groups

    def lease(
        self, *, whole: bool = True, wait_seconds: float = 0.0, **wanted: Unpack[BatchLimits]
    ) -> Batch | None:
        """As `EnvClient.lease`."""
        lease = partial(self._client.lease, whole=whole, wait_seconds=wait_seconds, **wanted)
        return self._portal.call(lease)

    def batches(
        self,
        *,
        whole: bool = True,
        idle_seconds: float | None = None,
        **wanted: Unpack[BatchLimits],
    ) -> Iterator[Batch]:
        """As `EnvClient.batches`."""
        return self._each(self._client.batches(whole=whole, idle_seconds=idle_seconds, **wanted))

    def stream(
        self,
        *,
        window: int = 2,
        whole: bool = True,
        give_back: bool = False,
        idle_seconds: float | None = None,
        **wanted: Unpack[BatchLimits],
    ) -> Iterator[Batch]:
        """As `EnvClient.stream`."""
        return self._each(
            self._client.stream(
                window=window,
                whole=whole,
                give_back=give_back,
                idle_seconds=idle_seconds,
                **wanted,
            )
        )

    def _each(self, batches: AsyncGenerator[Batch, None]) -> Iterator[Batch]:
        try:
            while True:
                try:
                    yield self._portal.call(batches.__anext__)
                except StopAsyncIteration:
                    return
        finally:
            self._portal.call(batches.aclose)

    def ack(self, batch: Batch | str, *, checkpoint: str | None = None) -> None:
        """As `EnvClient.ack`."""
        self._portal.call(partial(self._client.ack, batch, checkpoint=checkpoint))

    def nack(self, batch: Batch | str, *, reason: str | None = None) -> None:
        """As `EnvClient.nack`."""
        self._portal.call(partial(self._client.nack, batch, reason=reason))

    def set_aside(self, batch: Batch | str, group_ids: Sequence[str], *, reason: str) -> None:
        """As `EnvClient.set_aside`."""
        self._portal.call(partial(self._client.set_aside, batch, group_ids, reason=reason))

    def extend(self, batch: Batch | str, seconds: float) -> float:
        """As `EnvClient.extend`."""
        return self._portal.call(self._client.extend, batch, seconds)

    def list_groups(self, *, after: int = 0, limit: int = 100) -> list[GroupSummary]:
        """As `EnvClient.list_groups`."""
        return self._portal.call(partial(self._client.list_groups, after=after, limit=limit))

    def get_group(self, group_id: str) -> ClientGroup:
        """As `EnvClient.get_group`."""
        return self._portal.call(self._client.get_group, group_id)

    def task_estimates(
        self,
        *,
        environment: str | None = None,
        split: Split | None = None,
        after: int = 0,
        limit: int | None = None,
    ) -> list[TaskEstimate]:
        """As `EnvClient.task_estimates`."""
        estimates = partial(
            self._client.task_estimates,
            environment=environment,
            split=split,
            after=after,
            limit=limit,
        )
        return self._portal.call(estimates)

    # Rollouts on demand

    def tasks(
        self, environment: str, *, split: Split | None = None, after: int = 0, limit: int = 100
    ) -> list[TaskSummary]:
        """As `EnvClient.tasks`."""
        tasks = partial(self._client.tasks, environment, split=split, after=after, limit=limit)
        return self._portal.call(tasks)

    def rollouts(
        self,
        environment: str,
        task_ids: Sequence[str],
        *,
        group_size: int = 1,
        split: Split | None = None,
        key: str | None = None,
        timeout_seconds: float = 3600.0,
    ) -> list[list[Trajectory | None]]:
        """As `EnvClient.rollouts`."""
        rollouts = partial(
            self._client.rollouts,
            environment,
            task_ids,
            group_size=group_size,
            split=split,
            key=key,
            timeout_seconds=timeout_seconds,
        )
        return self._portal.call(rollouts)

    # The policy, the engine, the server

    def publish_policy_version(self, version: int) -> None:
        """As `EnvClient.publish_policy_version`."""
        self._portal.call(self._client.publish_policy_version, version)

    def pause_calls(self, in_flight: InFlight = "drain", *, timeout_seconds: float = 60.0) -> bool:
        """As `EnvClient.pause_calls`."""
        pause = partial(self._client.pause_calls, in_flight, timeout_seconds=timeout_seconds)
        return self._portal.call(pause)

    def resume_calls(self, version: int | None = None) -> None:
        """As `EnvClient.resume_calls`."""
        self._portal.call(self._client.resume_calls, version)

    def register_engine(
        self, url: str, version: int | None = None, *, wait_seconds: float = 60.0
    ) -> dict[str, Any]:
        """As `EnvClient.register_engine`."""
        register = partial(self._client.register_engine, url, version, wait_seconds=wait_seconds)
        return self._portal.call(register)

    def engines(self) -> list[dict[str, Any]]:
        """As `EnvClient.engines`."""
        return self._portal.call(self._client.engines)

    def pause_engine(self, engine_id: str) -> None:
        """As `EnvClient.pause_engine`."""
        self._portal.call(self._client.pause_engine, engine_id)

    def resume_engine(self, engine_id: str, version: int) -> None:
        """As `EnvClient.resume_engine`."""
        self._portal.call(self._client.resume_engine, engine_id, version)

    def status(self) -> dict[str, Any]:
        """As `EnvClient.status`."""
        return self._portal.call(self._client.status)
