"""The server's side of one worker process: its frames, its rollouts, its end.

Life: forked -> (ready, beats, done ...) -> condemned or ended by itself -> gone. Rollouts that run
in it fail when it is gone, not before: no second attempt begins while the first may live.
Everything here is driven by callbacks of the loop; nothing waits except `run`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from envserver_records.errors import ConflictError, WorkerDied, WorkerGarbage, WorkerHung

from .deaths import End, Verdict, errors_by_rollout
from .frames import BEATS_PER_SILENCE, FrameReader, encode
from .pool import Assignment

START_SECONDS = 20.0
"""For a fork to say that it is ready; a machine out of breath may need some."""
NEARLY = 0.75
"""Of the grace: a rollout that was cancelled so long ago has had its chance to obey."""
LAST_WORDS_SECONDS = 1.0
"""Between the end of a process and the end of its socket, and the other way round."""


@dataclass(eq=False)
class _Ticket:
    """A rollout on its way: `done` gets None, or a WorkerError."""

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
            self.done.exception()  # seen, even when nobody awaits it any more


class WorkerHandle(asyncio.Protocol):
    """One worker process.

    Args:
        kill: has the forkserver kill the process and its group.
        on_gone: called once, when it is gone and its rollouts have their errors.
    """

    def __init__(
        self,
        worker_id: str,
        *,
        kill_grace_seconds: float,
        heartbeat_seconds: float,
        kill: Callable[[WorkerHandle], None],
        on_gone: Callable[[WorkerHandle], None],
    ) -> None:
        self.id = worker_id
        self.pid: int | None = None
        self.ready = False
        self.end: End | None = None
        self.verdict: Verdict | None = None
        self.stopped = False
        self.gone = asyncio.Event()
        self.tickets: dict[str, _Ticket] = {}
        self._grace = kill_grace_seconds
        self._patience_ticks = max(
            BEATS_PER_SILENCE, round(START_SECONDS * BEATS_PER_SILENCE / heartbeat_seconds)
        )
        self._kill = kill
        self._on_gone = on_gone
        self._silent_ticks = 0
        self._frames = FrameReader()
        self._transport: asyncio.WriteTransport | None = None
        self._socket_ended = False

    @property
    def alive(self) -> bool:
        """As far as is known: it may take rollouts."""
        ending = self.end or self.verdict or self.stopped or self._socket_ended
        return not ending and not self.gone.is_set()

    async def run(self, assignment: Assignment) -> None:
        """See `pool.WorkerPool.run`."""
        if assignment.rollout_id in self.tickets:
            raise ConflictError(f"Rollout {assignment.rollout_id} is already running here.")
        if not self.alive:
            raise WorkerDied("The worker ended before the rollout began.", mate=True)
        loop = asyncio.get_running_loop()
        ticket = _Ticket(assignment, loop.create_future())
        self.tickets[assignment.rollout_id] = ticket
        self._send("run", assignment.rollout_id, assignment.url)
        seconds_left = max(0.0, assignment.deadline - time.time())
        ticket.timer = loop.call_later(seconds_left, self._cancel, ticket)
        try:
            await asyncio.wait([ticket.done])
        except asyncio.CancelledError:
            self._cancel(ticket)
            await self._see_it_end(ticket)
            raise
        finally:
            ticket.timer.cancel()
            del self.tickets[assignment.rollout_id]
        ticket.done.result()

    def stop(self) -> None:
        """Asks it to end: to cancel what runs and close its environments; then it is killed."""
        self.stopped = True
        self._send("stop")
        asyncio.get_running_loop().call_later(self._grace, self._kill, self)

    def discard(self) -> None:
        """It was never forked."""
        self.gone.set()
        if self._transport is not None:
            self._transport.abort()

    def condemn(self, verdict: Verdict) -> None:
        """Kills it; the first verdict counts."""
        if self.verdict is None and not self.gone.is_set():
            self.verdict = verdict
            self._kill(self)

    def tick(self) -> None:
        """A quarter of `heartbeat_seconds` has passed in which the server itself was awake.

        Counting these, and not the time, keeps a busy server from blaming its workers.
        """
        self._silent_ticks += 1
        if self.ready and self._silent_ticks > BEATS_PER_SILENCE:
            self.condemn(Verdict(WorkerHung, "The worker's event loop was blocked; it was killed."))
        elif self._silent_ticks > self._patience_ticks:
            self.condemn(Verdict(WorkerDied, "The worker did not start."))

    def ended(self, end: End) -> None:
        """The process has ended. What it said before that may still be on its way."""
        self.end = end
        if self._socket_ended:
            self._bury()
        else:
            asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, self._bury)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._silent_ticks = 0
        try:
            for frame in self._frames.feed(data):
                self._take(frame)
        except ValueError as error:
            message = f"The worker sent garbage on its control socket: {error}."
            self.condemn(Verdict(WorkerGarbage, message))

    def connection_lost(self, exc: Exception | None) -> None:
        self._socket_ended = True
        if self.end is not None:
            self._bury()
        elif not self.gone.is_set():
            message = "The worker closed its control socket."
            verdict = Verdict(WorkerGarbage, message)
            asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, self.condemn, verdict)

    def _take(self, frame: list[str]) -> None:
        match frame:
            case ["beat"]:
                return
            case ["ready"]:
                self.ready = True
            case ["done", rollout_id] if rollout_id in self.tickets:
                self.tickets[rollout_id].finish()
            case _:
                raise ValueError(f"not expected: {str(frame)[:200]}")

    def _send(self, *parts: str) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(*parts))

    def _cancel(self, ticket: _Ticket) -> None:
        if ticket.cancelled_at is not None:
            return
        loop = asyncio.get_running_loop()
        ticket.cancelled_at = loop.time()
        self._send("cancel", ticket.assignment.rollout_id)
        if ticket.timer is not None:
            ticket.timer.cancel()
        ticket.timer = loop.call_later(self._grace, self._overdue, ticket)

    def _overdue(self, ticket: _Ticket) -> None:
        """It was cancelled and goes on; that it is at fault, only a living event loop proves."""
        if ticket.done.done():
            return
        blocked = self._silent_ticks > BEATS_PER_SILENCE // 2
        message = "The rollout went on after it was cancelled; its process was killed."
        self.condemn(Verdict(WorkerHung, message, frozenset() if blocked else self._stubborn()))

    def _stubborn(self) -> frozenset[str]:
        """The rollouts that have had nearly all their grace: often a whole group hangs together."""
        since = asyncio.get_running_loop().time() - NEARLY * self._grace
        return frozenset(
            rollout_id
            for rollout_id, ticket in self.tickets.items()
            if ticket.cancelled_at is not None
            and ticket.cancelled_at <= since
            and not ticket.done.done()
        )

    async def _see_it_end(self, ticket: _Ticket) -> None:
        try:
            await asyncio.wait([ticket.done])
        except asyncio.CancelledError:
            message = "The rollout was cancelled and had no time to obey."
            culprits = frozenset({ticket.assignment.rollout_id})
            self.condemn(Verdict(WorkerHung, message, culprits))
            raise

    def _bury(self) -> None:
        if self.gone.is_set() or self.end is None:
            return
        self.gone.set()
        if self._transport is not None:
            self._transport.close()
        waiting = [key for key, ticket in self.tickets.items() if not ticket.done.done()]
        for rollout_id, error in errors_by_rollout(waiting, self.end, self.verdict).items():
            self.tickets[rollout_id].finish(error)
        self._on_gone(self)
