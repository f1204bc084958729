"""Keeps a forkserver alive and tracks every worker that it forked.

`fork` returns handles; when the forkserver dies, its workers die too, and a new one is started.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import socket
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import structlog
from envserver_records.backoff import Backoff
from envserver_records.errors import EnvserverError, WorkerDied

from . import linux
from .deaths import ProcessEnd
from .forkserver_process import ForkserverProcess
from .frames import BEATS_PER_SILENCE
from .handle import WorkerHandle
from .sandboxed import WorkerSandbox

Listen = Callable[[socket.socket], Coroutine[Any, Any, asyncio.AbstractServer]]

KILL_SECONDS = 5.0
"""Seconds for the forkserver to report the exit of a killed worker."""
_BACKOFF = Backoff(first_seconds=0.1, max_seconds=5.0)

_log = structlog.get_logger("envserver.workers")


class Supervisor:
    """Manages the processes of one pool.

    Args:
        references: environments to import once.
        on_gone: called once for every worker, when it is gone.
        sandbox: sandbox of every worker; None: no sandbox.
        most_workers: maximum number of live workers.
        memory_mb: a worker that the kernel kills above it is itself the cause, not the machine.
        listen: serves the proxy on a listening socket, until the returned server is closed.
    """

    def __init__(
        self,
        references: list[str],
        *,
        heartbeat_seconds: float,
        kill_grace_seconds: float,
        on_gone: Callable[[WorkerHandle], None],
        sandbox: WorkerSandbox | None = None,
        most_workers: int = 1,
        memory_mb: float = math.inf,
        listen: Listen | None = None,
    ) -> None:
        self.handles: dict[str, WorkerHandle] = {}
        self._references = references
        self._heartbeat_seconds = heartbeat_seconds
        self._kill_grace_seconds = kill_grace_seconds
        self._on_gone = on_gone
        self._sandbox = sandbox
        self._most_workers = most_workers
        self._memory_mb = memory_mb
        self._listen = listen
        self._listening: dict[str, asyncio.Task[asyncio.AbstractServer]] = {}
        self._ids = itertools.count(1)
        self._up = asyncio.Event()
        self._lost = asyncio.Event()

    async def start(self) -> None:
        """Starts the forkserver.
        Raises ConfigError, NotFoundError: an environment cannot be found or imported.
        """
        self._lost.clear()
        self._nursery = ForkserverProcess(
            self._references,
            heartbeat_seconds=self._heartbeat_seconds,
            sandbox=self._sandbox,
            most_workers=self._most_workers,
            on_message=self._hear,
            on_gone=self._nursery_gone,
        )
        await self._nursery.start()
        if not self._lost.is_set():
            self._up.set()

    async def keep(self) -> None:
        """Restarts the forkserver whenever it is gone, until cancelled."""
        failures = 0
        while True:
            await self._lost.wait()
            await self._nursery.close()
            await asyncio.sleep(_BACKOFF.seconds(failures))
            try:
                await self.start()
                failures = 0
            except EnvserverError as error:
                _log.error("forkserver_failed", error=str(error))
                failures += 1
                self._lost.set()

    async def watch(self) -> None:
        """Checks the heartbeats of all workers, until cancelled."""
        while True:
            await asyncio.sleep(self._heartbeat_seconds / BEATS_PER_SILENCE)
            for handle in list(self.handles.values()):
                handle.tick()

    async def fork(self) -> WorkerHandle:
        """Forks a worker that takes rollouts at once; waits while there is no forkserver.
        Raises WorkerDied: the server may open no more files.
        """
        handle = WorkerHandle(
            f"worker-{next(self._ids)}",
            kill_grace_seconds=self._kill_grace_seconds,
            heartbeat_seconds=self._heartbeat_seconds,
            kill=self._kill,
            on_gone=self._gone,
        )
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
        self.handles[handle.id] = handle
        self._nursery.fork(handle.id, theirs)
        return handle

    async def stop(self) -> None:
        """Stops all workers, gracefully at first, and the forkserver; returns when all are gone."""
        self._up.clear()
        handles = list(self.handles.values())
        for handle in handles:
            handle.stop()
        try:
            async with asyncio.timeout(self._kill_grace_seconds + KILL_SECONDS):
                for handle in handles:
                    await handle.gone.wait()
        except TimeoutError:
            _log.warning("workers_do_not_end", workers=list(self.handles))
        finally:
            await self._nursery.close()
            self._end_all("the pool was closed")

    def _hear(self, message: list[Any]) -> None:
        kind, worker_id, *facts = message
        handle = self.handles.get(worker_id)
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
                starved = end.out_of_memory and end.peak_memory_mb < self._memory_mb
                handle.ended(replace(end, out_of_memory=starved))

    def _serve_on(self, worker_id: str, listener: socket.socket) -> None:
        if self._listen is None:
            listener.close()
            return
        listener.setblocking(False)
        self._listening[worker_id] = asyncio.create_task(self._listen(listener))

    def _stop_serving(self, worker_id: str) -> None:
        task = self._listening.pop(worker_id, None)
        if task is None:
            return
        if not task.cancel():
            task.result().close()

    def _kill(self, handle: WorkerHandle) -> None:
        if handle.gone.is_set():
            return
        self._nursery.kill(handle.id)
        asyncio.get_running_loop().call_later(KILL_SECONDS, self._insist, handle, self._nursery)

    def _insist(self, handle: WorkerHandle, forkserver: ForkserverProcess) -> None:
        if handle.end is None:
            _log.error("forkserver_does_not_answer", worker=handle.id)
            forkserver.abandon()

    def _gone(self, handle: WorkerHandle) -> None:
        del self.handles[handle.id]
        self._stop_serving(handle.id)
        self._on_gone(handle)

    def _nursery_gone(self) -> None:
        self._up.clear()
        self._lost.set()
        _log.error("forkserver_ended", workers=len(self.handles))
        self._end_all("the parent process of the workers ended")

    def _end_all(self, reason: str) -> None:
        for handle in list(self.handles.values()):
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
