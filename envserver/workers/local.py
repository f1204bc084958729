"""The pool of worker processes on this machine: warm pooled ones, and one for a rollout alone.

Invariants: never more than the configured number at a time (the others wait in order); a process
that is gone is replaced at once; nothing survives the pool.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any

import structlog
from envserver_records.errors import WorkerDied, WorkerError
from envserver_records.waiting import Backoff

from .. import registry
from ..settings.config import WorkersConfig
from .handle import WorkerHandle
from .messages import Boot, WorkerSandbox
from .pool import Assignment, Spent
from .supervisor import Listen, Supervisor

MAX_SUSPECTS = 4096
_log = structlog.get_logger("envserver.workers")
_BACKOFF = Backoff(first_seconds=0.05, max_seconds=5.0)
_SPARE_WORKERS = 8
"""Extra processes for workers that are still ending while others start."""


class _Slot:
    """A slot for one pooled process; the process may be replaced, the load stays."""

    def __init__(self) -> None:
        self.load = 0
        self.worker: WorkerHandle | None = None
        self._changed = asyncio.Event()

    def fill(self, worker: WorkerHandle | None) -> None:
        self.worker = worker
        self._changed.set()
        self._changed = asyncio.Event()

    @contextmanager
    def loaded(self) -> Iterator[None]:
        self.load += 1
        try:
            yield
        finally:
            self.load -= 1

    async def live_worker(self) -> WorkerHandle:
        while self.worker is None or not self.worker.alive:
            await self._changed.wait()
        return self.worker


class LocalPool:
    """A WorkerPool of processes forked from one warm parent. `async with` it.

    Args:
        env_references: environments that the parent imports once; others are imported when needed.
        sandbox: sandbox of every process (each then runs one rollout); None: no sandbox.
        listen: with a sandbox, serves the proxy on a listening socket.
    """

    def __init__(
        self,
        config: WorkersConfig,
        env_references: list[str],
        *,
        sandbox: WorkerSandbox | None = None,
        listen: Listen | None = None,
    ) -> None:
        self._config = config
        self._sandbox = sandbox
        self._listen = listen
        self._references = [registry.absolute(reference) for reference in env_references]
        self._slots: list[_Slot] = []
        self._suspects: dict[str, None] = {}
        self._alone: set[WorkerHandle] = set()
        self._waiting: set[asyncio.Timeout] = set()
        self._closing = False
        self._restarts = 0
        self._deaths: Counter[str] = Counter()

    async def __aenter__(self) -> LocalPool:
        config = self._config
        self._pooled_room = asyncio.Semaphore(config.processes * config.rollouts_per_process)
        self._dedicated_room = asyncio.Semaphore(config.dedicated)
        self._slots = [_Slot() for _ in range(0 if self._sandbox else config.processes)]
        boot = Boot(
            references=self._references,
            heartbeat_seconds=config.heartbeat_seconds,
            sandbox=self._sandbox,
            most_workers=config.dedicated + _SPARE_WORKERS,
        )
        self._supervisor = Supervisor(config, boot, self._gone, self._listen)
        await self._supervisor.start()
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        self._tasks = [
            self._group.create_task(self._supervisor.keep()),
            self._group.create_task(self._supervisor.watch()),
            *(self._group.create_task(self._keep_filled(slot)) for slot in self._slots),
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing = True
        for task in self._tasks:
            task.cancel()
        now = asyncio.get_running_loop().time()
        for waiting in self._waiting:
            waiting.reschedule(now)
        try:
            await self._supervisor.stop()
        finally:
            # The group must see a cancellation (it may be its own), not errors of the block.
            if isinstance(error, asyncio.CancelledError):
                await self._group.__aexit__(kind, error, trace)
            else:
                await self._group.__aexit__(None, None, None)

    async def run(self, assignment: Assignment) -> Spent | None:
        rollout_id = assignment.rollout_id
        alone = assignment.isolation != "pooled" or rollout_id in self._suspects
        place = self._own_worker if alone else self._pooled_worker
        try:
            async with place(assignment.deadline) as worker:
                await worker.run(assignment)
        except WorkerError as error:
            if error.detail.get("suspect"):
                self._suspect(rollout_id)
            raise
        self._suspects.pop(rollout_id, None)
        if not alone:
            return None
        await worker.gone.wait()
        end = worker.end
        if end is None or end.status is None:  # its exit was not observed
            return None
        return Spent(cpu_seconds=end.cpu_seconds, peak_memory_mb=end.peak_memory_mb)

    def workers(self) -> dict[str, int]:
        return {
            rollout_id: handle.pid
            for handle in self._supervisor.handles.values()
            if handle.pid is not None
            for rollout_id in handle.rollouts
        }

    def snapshot(self) -> dict[str, Any]:
        handles = self._supervisor.handles.values() if self._slots else []
        return {
            "processes": len(handles),
            "running": sum(len(handle.rollouts) for handle in handles),
            "dedicated": len(self._alone),
            "restarts": self._restarts,
            "deaths": dict(self._deaths),
            "pids": [handle.pid for handle in handles if handle.pid is not None],
        }

    async def _keep_filled(self, slot: _Slot) -> None:
        failures = 0
        while True:
            try:
                worker = await self._supervisor.fork()
            except WorkerDied as error:
                failures += 1
                _log.error("worker_not_started", error=str(error))
                await asyncio.sleep(_BACKOFF.seconds(failures))
                continue
            slot.fill(worker)
            await worker.gone.wait()
            slot.fill(None)
            self._restarts += 1
            # Slow down only for workers that never started up.
            failures = 0 if worker.ready else failures + 1
            await asyncio.sleep(_BACKOFF.seconds(failures))

    @asynccontextmanager
    async def _pooled_worker(self, deadline: float) -> AsyncIterator[WorkerHandle]:
        with ExitStack() as taken:
            async with self._waiting_until(deadline):
                await self._pooled_room.acquire()
                taken.callback(self._pooled_room.release)
                slot = min(self._slots, key=self._fullness)
                taken.enter_context(slot.loaded())
                worker = await slot.live_worker()
            yield worker

    def _fullness(self, slot: _Slot) -> tuple[bool, bool, int]:
        full = slot.load >= self._config.rollouts_per_process
        return full, slot.worker is None or not slot.worker.alive, slot.load

    @asynccontextmanager
    async def _own_worker(self, deadline: float) -> AsyncIterator[WorkerHandle]:
        """Starts a fresh process; its slot is free again when the process is gone."""
        async with self._waiting_until(deadline):
            await self._dedicated_room.acquire()
        try:
            async with self._waiting_until(deadline):
                worker = await self._supervisor.fork()
        except BaseException:
            self._dedicated_room.release()
            raise
        self._alone.add(worker)
        try:
            yield worker
        finally:
            worker.stop()

    @asynccontextmanager
    async def _waiting_until(self, deadline: float) -> AsyncIterator[None]:
        try:
            if self._closing:
                raise TimeoutError
            async with asyncio.timeout(max(0.0, deadline - time.time())) as waiting:
                self._waiting.add(waiting)
                try:
                    yield
                finally:
                    self._waiting.discard(waiting)
        except TimeoutError:
            reason = "The pool was closed" if self._closing else "The deadline came"
            raise WorkerDied(f"{reason} before a worker was free.") from None

    def _gone(self, worker: WorkerHandle) -> None:
        if worker.reason is not None or not worker.stopped:
            kind = worker.reason.kind if worker.reason is not None else WorkerDied
            self._deaths[kind.kind] += 1
        if worker in self._alone:
            self._alone.discard(worker)
            self._dedicated_room.release()

    def _suspect(self, rollout_id: str) -> None:
        """Makes the next attempts of this rollout run alone, until one succeeds."""
        self._suspects[rollout_id] = None
        if len(self._suspects) > MAX_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]
