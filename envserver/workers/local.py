"""The pool of worker processes on this machine: warm pooled ones, and one for a rollout alone.

Invariants: never more than the configured number at a time (the others wait in order); a process
that is gone is replaced at once; nothing survives the pool. When the forkserver dies, its workers
die too, and a new one is started.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

import structlog
from envserver_records.errors import EnvserverError, WorkerDied, WorkerError
from envserver_records.waiting import Backoff

from .. import registry
from ..settings.config import WorkersConfig
from . import linux
from .handle import ProcessEnd, WorkerHandle
from .messages import BEATS_PER_SILENCE, Boot, WorkerSandbox
from .pool import Assignment, Spent
from .supervisor import ForkserverProcess

Listen = Callable[[socket.socket], Coroutine[Any, Any, asyncio.AbstractServer]]

MAX_SUSPECTS = 4096
KILL_SECONDS = 5.0
"""Seconds for the forkserver to report the exit of a killed worker."""
_log = structlog.get_logger("envserver.workers")
_BACKOFF = Backoff(first_seconds=0.05, max_seconds=5.0)
_FORKSERVER_BACKOFF = Backoff(first_seconds=0.1, max_seconds=5.0)
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
        listen: with a sandbox, serves the proxy on a listening socket, until the returned server is
            closed.
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
        self._handles: dict[str, WorkerHandle] = {}
        self._listening: dict[str, asyncio.Task[asyncio.AbstractServer]] = {}
        self._ids = itertools.count(1)
        self._up = asyncio.Event()
        self._lost = asyncio.Event()
        self._closing = False
        self._restarts = 0
        self._deaths: Counter[str] = Counter()

    async def __aenter__(self) -> LocalPool:
        config = self._config
        self._pooled_room = asyncio.Semaphore(config.processes * config.rollouts_per_process)
        self._dedicated_room = asyncio.Semaphore(config.dedicated)
        self._slots = [_Slot() for _ in range(0 if self._sandbox else config.processes)]
        self._boot = Boot(
            references=self._references,
            heartbeat_seconds=config.heartbeat_seconds,
            sandbox=self._sandbox,
            most_workers=config.dedicated + _SPARE_WORKERS,
        )
        await self._start_forkserver()
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        self._tasks = [
            self._group.create_task(self._keep_forkserver()),
            self._group.create_task(self._watch()),
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
            await self._stop()
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
            for handle in self._handles.values()
            if handle.pid is not None
            for rollout_id in handle.rollouts
        }

    def snapshot(self) -> dict[str, Any]:
        handles = self._handles.values() if self._slots else []
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
                worker = await self._fork()
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
                worker = await self._fork()
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
        del self._handles[worker.id]
        task = self._listening.pop(worker.id, None)
        if task is not None and not task.cancel():
            task.result().close()
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

    # The forkserver and its workers

    async def _start_forkserver(self) -> None:
        self._lost.clear()
        self._forkserver = ForkserverProcess(self._boot, self._hear, self._forkserver_gone)
        await self._forkserver.start()
        if not self._lost.is_set():
            self._up.set()

    async def _keep_forkserver(self) -> None:
        failures = 0
        while True:
            await self._lost.wait()
            await self._forkserver.close()
            await asyncio.sleep(_FORKSERVER_BACKOFF.seconds(failures))
            try:
                await self._start_forkserver()
                failures = 0
            except EnvserverError as error:
                _log.error("forkserver_failed", error=str(error))
                failures += 1
                self._lost.set()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._config.heartbeat_seconds / BEATS_PER_SILENCE)
            for handle in list(self._handles.values()):
                handle.tick()

    async def _fork(self) -> WorkerHandle:
        """Forks a worker that takes rollouts at once; waits while there is no forkserver."""
        name = f"worker-{next(self._ids)}"
        handle = WorkerHandle(name, self._config, kill=self._kill, on_gone=self._gone)
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            hint = "Raise the limit of open files (ulimit -n), or let fewer rollouts run at a time."
            raise WorkerDied(f"No worker could be started: {error.strerror}.", hint=hint) from error
        try:
            loop = asyncio.get_running_loop()
            await loop.create_unix_connection(lambda: handle, sock=ours)
            await self._up.wait()
        except BaseException:
            ours.close()
            theirs.close()
            handle.discard()
            raise
        self._handles[handle.id] = handle
        self._forkserver.fork(handle.id, theirs)
        return handle

    async def _stop(self) -> None:
        """Stops all workers, gracefully at first, and the forkserver; returns when all are gone."""
        self._up.clear()
        handles = list(self._handles.values())
        for handle in handles:
            handle.stop()
        try:
            async with asyncio.timeout(self._config.kill_grace_seconds + KILL_SECONDS):
                for handle in handles:
                    await handle.gone.wait()
        except TimeoutError:
            _log.warning("workers_do_not_end", workers=list(self._handles))
        finally:
            await self._forkserver.close()
            self._end_all("the pool was closed")

    def _hear(self, message: list[Any]) -> None:
        kind, worker_id, *facts = message
        handle = self._handles.get(worker_id)
        if handle is None:
            if kind == "listening":
                facts[0].close()
            return
        match kind:
            case "forked":
                (handle.pid,) = facts
            case "lines":
                _log_output(handle, *facts)
            case "listening":
                self._serve_on(worker_id, *facts)
            case "exit":
                end = ProcessEnd(*facts)
                # One that the kernel kills above its limit is itself the cause, not the machine.
                starved = end.out_of_memory and end.peak_memory_mb < self._config.memory_mb
                handle.ended(replace(end, out_of_memory=starved))

    def _serve_on(self, worker_id: str, listener: socket.socket) -> None:
        if self._listen is None:
            listener.close()
            return
        listener.setblocking(False)
        self._listening[worker_id] = asyncio.create_task(self._listen(listener))

    def _kill(self, handle: WorkerHandle) -> None:
        if handle.gone.is_set():
            return
        self._forkserver.kill(handle.id)
        asyncio.get_running_loop().call_later(KILL_SECONDS, self._insist, handle, self._forkserver)

    def _insist(self, handle: WorkerHandle, forkserver: ForkserverProcess) -> None:
        if handle.end is None:
            _log.error("forkserver_does_not_answer", worker=handle.id)
            forkserver.abandon()

    def _forkserver_gone(self) -> None:
        self._up.clear()
        self._lost.set()
        _log.error("forkserver_ended", workers=len(self._handles))
        self._end_all("the parent process of the workers ended")

    def _end_all(self, reason: str) -> None:
        for handle in list(self._handles.values()):
            if handle.end is None:
                if handle.pid is not None:
                    linux.kill_group(handle.pid)
                handle.ended(ProcessEnd(None, reason))


def _log_output(handle: WorkerHandle, lines: list[str], dropped_bytes: int) -> None:
    rollout_ids = list(handle.rollouts)
    whose = {"rollout_id": rollout_ids[0]} if len(rollout_ids) == 1 else {}
    for line in lines:
        _log.info("worker_output", worker=handle.id, pid=handle.pid, line=line, **whose)
    if dropped_bytes:
        _log.warning("worker_output_dropped", worker=handle.id, bytes=dropped_bytes, **whose)
