"""The server's side of one worker process: its frames, its rollouts, its end.

Life: forked -> (ready, beats, done ...) -> killed by the server or ended by itself -> gone.
Rollouts that run in it fail when it is gone, not before: no second attempt begins while the first
may live. Callbacks of the loop drive everything; nothing waits except `run`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from envserver_records.errors import (
    ConflictError,
    WorkerDied,
    WorkerError,
    WorkerGarbage,
    WorkerHung,
)
from envserver_records.framing import FrameReader

from .messages import BEATS_PER_SILENCE, MAX_FRAME_BYTES, decode, encode
from .pool import Assignment

if TYPE_CHECKING:
    from ..settings.config import WorkersConfig

# A single rollout in the process gets the error. Of several, the known culprits get it and the
# others are marked as `mate` in the error's detail. If no culprit is known, all are marked as
# `mate` and `suspect`: each of them runs alone next time, so that a second death leaves no doubt.

EXIT_CRASHED = 70
"""Exit code of a worker whose own code (not an agent's) raised."""


@dataclass(frozen=True)
class KillReason:
    """Why the server killed a worker. `culprits`: the rollouts at fault; empty if unknown."""

    kind: type[WorkerError]
    message: str
    culprits: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ProcessEnd:
    """How a process ended.

    Args:
        status: from `waitpid`; None: its exit was not observed, and `output` says why.
        out_of_memory: the kernel killed some process for lack of memory while it lived, and it
            held no more than `workers.memory_mb` itself.
    """

    status: int | None
    output: str = ""
    out_of_memory: bool = False
    cpu_seconds: float = 0.0
    peak_memory_mb: float = 0.0


def errors_by_rollout(
    rollout_ids: Iterable[str], end: ProcessEnd, reason: KillReason | None
) -> dict[str, WorkerError]:
    running = list(rollout_ids)
    words, detail = describe(end)
    if reason is None:
        reason = KillReason(WorkerDied, f"The worker {words}.")
    else:
        detail.pop("signal", None)  # the server sent it
    alone = len(running) == 1
    errors: dict[str, WorkerError] = {}
    for rollout_id in running:
        if rollout_id in reason.culprits or (not reason.culprits and alone):
            errors[rollout_id] = reason.kind(reason.message, **detail)
        elif not reason.culprits:
            errors[rollout_id] = reason.kind(reason.message, mate=True, suspect=True, **detail)
        else:
            message = "The worker was killed because of another rollout in it."
            errors[rollout_id] = WorkerDied(message, mate=True)
    return errors


def describe(end: ProcessEnd) -> tuple[str, dict[str, Any]]:
    """Describes an end as text that follows "the worker", and as facts for the error."""
    detail: dict[str, Any] = {"output": end.output} if end.output else {}
    if end.status is None:
        return f"is gone: {end.output}", {}
    code = os.waitstatus_to_exitcode(end.status)
    if code >= 0:
        return f"exited with code {code}", {"exit_code": code, **detail}
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    words = f"was killed by {name}"
    if end.out_of_memory and -code == signal.SIGKILL:
        words += ", while the kernel killed processes for lack of memory"
        detail["out_of_memory"] = True
    return words, {"signal": name, **detail}


START_SECONDS = 20.0
"""Start-up timeout in seconds; overloaded machines are slow."""
NEARLY = 0.75
"""Share of the grace after which a cancelled rollout counts as hanging."""
LAST_WORDS_SECONDS = 1.0
"""Seconds between the end of a process and the end of its socket, or the other way round."""


@dataclass(eq=False)
class _RunningRollout:
    assignment: Assignment
    done: asyncio.Future[None]
    timer: asyncio.TimerHandle | None = None
    cancelled_at: float | None = None

    def finish(self, error: Exception | None = None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)
            self.done.exception()  # mark as retrieved: there may be no waiter


class WorkerHandle(asyncio.Protocol):
    """One worker process. `kill`: has the forkserver kill the process and its group; `on_gone`:
    called once, when it is gone and its rollouts have their errors."""

    def __init__(
        self,
        worker_id: str,
        config: WorkersConfig,
        *,
        kill: Callable[[WorkerHandle], None],
        on_gone: Callable[[WorkerHandle], None],
    ) -> None:
        self.id = worker_id
        self.pid: int | None = None
        self.ready = False
        self.end: ProcessEnd | None = None
        self.reason: KillReason | None = None
        self.stopped = False
        self.gone = asyncio.Event()
        self.rollouts: dict[str, _RunningRollout] = {}
        self._grace = config.kill_grace_seconds
        self._patience_ticks = max(
            BEATS_PER_SILENCE, round(START_SECONDS * BEATS_PER_SILENCE / config.heartbeat_seconds)
        )
        self._kill = kill
        self._on_gone = on_gone
        self._silent_ticks = 0
        self._frames = FrameReader(MAX_FRAME_BYTES)
        self._transport: asyncio.WriteTransport | None = None
        self._socket_ended = False

    @property
    def alive(self) -> bool:
        ending = self.end or self.reason or self.stopped or self._socket_ended
        return not ending and not self.gone.is_set()

    async def run(self, assignment: Assignment) -> None:
        if assignment.rollout_id in self.rollouts:
            raise ConflictError(f"Rollout {assignment.rollout_id} is already running here.")
        if not self.alive:
            raise WorkerDied("The worker ended before the rollout began.", mate=True)
        loop = asyncio.get_running_loop()
        rollout = _RunningRollout(assignment, loop.create_future())
        self.rollouts[assignment.rollout_id] = rollout
        self._send("run", assignment.rollout_id, assignment.url, assignment.job.decode())
        seconds_left = max(0.0, assignment.deadline - time.time())
        rollout.timer = loop.call_later(seconds_left, self._cancel, rollout)
        try:
            await asyncio.wait([rollout.done])
        except asyncio.CancelledError:
            self._cancel(rollout)
            await self._wait_until_ended(rollout)
            raise
        finally:
            rollout.timer.cancel()
            del self.rollouts[assignment.rollout_id]
        rollout.done.result()

    def stop(self) -> None:
        """Asks the worker to cancel its rollouts and close its environments; then kills it."""
        self.stopped = True
        self._send("stop")
        asyncio.get_running_loop().call_later(self._grace, self._kill, self)

    def discard(self) -> None:
        self.gone.set()
        if self._transport is not None:
            self._transport.abort()

    def kill_for(self, reason: KillReason) -> None:
        """Kills the worker; the first reason counts."""
        if self.reason is None and not self.gone.is_set():
            self.reason = reason
            self._kill(self)

    def tick(self) -> None:
        """Counts a quarter of `heartbeat_seconds` during which the server itself was responsive: a
        busy server must not blame its workers."""
        self._silent_ticks += 1
        if self.ready and self._silent_ticks > BEATS_PER_SILENCE:
            self.kill_for(
                KillReason(
                    WorkerHung,
                    "The worker's event loop was blocked; it was killed. What waits or computes "
                    "for long belongs into a plain `def rollout`, or into asyncio.to_thread.",
                )
            )
        elif self._silent_ticks > self._patience_ticks:
            self.kill_for(KillReason(WorkerDied, "The worker did not start."))

    def ended(self, end: ProcessEnd) -> None:
        """Notes the end of the process; its last frames may still arrive."""
        self.end = end
        if self._socket_ended:
            self._finish()
        else:
            asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, self._finish)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's class is not a subclass
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self._silent_ticks = 0
        try:
            for body in self._frames.feed(data):
                self._take(decode(body))
        except ValueError as error:
            message = f"The worker sent garbage on its control socket: {error}."
            self.kill_for(KillReason(WorkerGarbage, message))

    def connection_lost(self, exc: Exception | None) -> None:
        self._socket_ended = True
        if self.end is not None:
            self._finish()
        elif not self.gone.is_set():
            message = "The worker closed its control socket."
            reason = KillReason(WorkerGarbage, message)
            asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, self.kill_for, reason)

    def _take(self, frame: list[str]) -> None:
        match frame:
            case ["beat"]:
                return
            case ["ready"]:
                self.ready = True
            case ["done", rollout_id] if rollout_id in self.rollouts:
                self.rollouts[rollout_id].finish()
            case ["done", rollout_id, result] if rollout_id in self.rollouts:
                self.rollouts[rollout_id].assignment.take_result(result.encode())
                self.rollouts[rollout_id].finish()
            case _:
                raise ValueError(f"not expected: {str(frame)[:200]}")

    def _send(self, *parts: str) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(*parts))

    def _cancel(self, rollout: _RunningRollout) -> None:
        if rollout.cancelled_at is not None:
            return
        loop = asyncio.get_running_loop()
        rollout.cancelled_at = loop.time()
        self._send("cancel", rollout.assignment.rollout_id)
        if rollout.timer is not None:
            rollout.timer.cancel()
        rollout.timer = loop.call_later(self._grace, self._overdue, rollout)

    def _overdue(self, rollout: _RunningRollout) -> None:
        """Blames the rollout only if the worker's event loop is responsive."""
        if rollout.done.done():
            return
        blocked = self._silent_ticks > BEATS_PER_SILENCE // 2
        message = "The rollout went on after it was cancelled; its process was killed."
        self.kill_for(KillReason(WorkerHung, message, frozenset() if blocked else self._stubborn()))

    def _stubborn(self) -> frozenset[str]:
        """Returns the rollouts whose grace is nearly over: often a whole group hangs together."""
        since = asyncio.get_running_loop().time() - NEARLY * self._grace
        return frozenset(
            rollout_id
            for rollout_id, rollout in self.rollouts.items()
            if rollout.cancelled_at is not None
            and rollout.cancelled_at <= since
            and not rollout.done.done()
        )

    async def _wait_until_ended(self, rollout: _RunningRollout) -> None:
        try:
            await asyncio.wait([rollout.done])
        except asyncio.CancelledError:
            message = "The rollout was cancelled and did not end in time."
            culprits = frozenset({rollout.assignment.rollout_id})
            self.kill_for(KillReason(WorkerHung, message, culprits))
            raise

    def _finish(self) -> None:
        if self.gone.is_set() or self.end is None:
            return
        self.gone.set()
        if self._transport is not None:
            self._transport.close()
        waiting = [key for key, rollout in self.rollouts.items() if not rollout.done.done()]
        for rollout_id, error in errors_by_rollout(waiting, self.end, self.reason).items():
            self.rollouts[rollout_id].finish(error)
        self._on_gone(self)
