"""The thread that runs torch: it executes commands between steps and reports results.

In: rows and commands from the event loop. Out: calls of the rows' `told`, all of one step together.
What always holds: only this thread touches the model, its adapters and the batch; a step that fails
ends the rows that were in it, each with the reason, and nothing else.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import structlog

from .generation import Generator
from .rows import PauseMode, Row, Scheduler
from .text import Text

T = TypeVar("T")

_log = structlog.get_logger("envserver_local")


class Runner:
    """Runs the engine's thread; `version`: of the weights, with which tokens are marked."""

    def __init__(
        self, generator: Generator, scheduler: Scheduler, text: Text, version: str
    ) -> None:
        self.generator = generator
        self.scheduler = scheduler
        self.version = version
        self.sampled_tokens = self.read_tokens = self.steps = self.displaced = 0
        self._text = text
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle: list[Future[None]] = []
        """Futures that wait for the running rows to end."""
        self._ended = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    async def __aenter__(self) -> Runner:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.end()
        await asyncio.to_thread(self._thread.join)

    @property
    def alive(self) -> bool:
        """Whether submitted rows are processed."""
        return self._thread.is_alive()

    def end(self) -> None:
        """Ends all rows with the tokens they have, and then the thread."""
        self._commands.put(self._end)

    def submit(self, rows: Sequence[Row]) -> None:
        self._commands.put(lambda: self._submit(rows))

    def abort(self, rows: Sequence[Row]) -> None:
        """Ends those rows that are still running or waiting, with the tokens they have."""
        self._commands.put(lambda: self._abort(rows))

    async def run(self, command: Callable[[], T]) -> T:
        """Runs `command` between two steps and returns its result."""
        future: Future[T] = Future()

        def obey() -> None:
            try:
                future.set_result(command())
            except Exception as error:  # noqa: BLE001  (it is raised where the command was sent)
                future.set_exception(error)

        self._commands.put(obey)
        return await asyncio.wrap_future(future)

    async def pause(self, mode: PauseMode) -> None:
        """Stops sampling: running rows are aborted, finished first, or kept until `resume`."""
        done = await self.run(lambda: self._pause(mode))
        await asyncio.wrap_future(done)

    def resume(self) -> None:
        """Resumes sampling. Call it between steps."""
        self.scheduler.paused = None
        self._tell_idle()

    def set_version(self, version: str) -> None:
        """Sets the version of tokens sampled from now on. Call it between steps."""
        self.version = version
        for row in self.scheduler.running:
            row.mark(version)

    def abort_all(self) -> int:
        """Ends all rows with the tokens they have; returns their number. Call it between steps."""
        rows = [*self.scheduler.running, *self.scheduler.waiting]
        self._abort(rows)
        return len(rows)

    def _work(self) -> None:
        while not self._ended:
            self._obey()
            if self._ended or not self.scheduler.steps:
                continue
            try:
                self._step()
            except Exception as error:  # noqa: BLE001  (whatever torch raises; the engine goes on)
                _log.exception("step_failed", rows=len(self.scheduler.running))
                self._fail(error)

    def _obey(self) -> None:
        """Runs the queued commands; waits for one if there is nothing else to do."""
        while not self._ended:
            try:
                self._commands.get(block=not self.scheduler.steps)()
            except queue.Empty:
                return

    def _step(self) -> None:
        told: list[Row] = []
        for row in self.scheduler.displaced():
            self.displaced += 1
            self.generator.leave(row)
        joining = self.scheduler.admitted()
        for row in joining:
            row.mark(self.version)
            self.read_tokens += len(row.prompt)
            if row.sampling.prompt_logprobs is not None and row.scored is None:
                row.scored = self.generator.score(row)
        if joining:
            self.generator.join(joining)
        self.generator.step()
        self.steps += 1
        self.sampled_tokens += len(self.scheduler.running)
        ended = []
        for row in self.scheduler.running:
            if self._text.ends(row):
                ended.append(row)
            elif row.eager:
                told.append(row)
        for row in ended:
            self._leave(row)
        self._tell(told + ended)

    def _leave(self, row: Row) -> None:
        if self.scheduler.remove(row):
            self.generator.leave(row)
        if not self.scheduler.steps:
            self._tell_idle()

    def _submit(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.scheduler.submit(row)

    def _abort(self, rows: Sequence[Row]) -> None:
        live = [row for row in rows if row.finish is None]
        for row in live:
            row.finish = "abort"
            self._leave(row)
        self._tell(live)

    def _pause(self, mode: PauseMode) -> Future[None]:
        done: Future[None] = Future()
        self.scheduler.paused = mode
        if mode == "abort":
            self.abort_all()
        if mode == "wait" and self.scheduler.steps:
            self._idle.append(done)
        else:
            done.set_result(None)
        return done

    def _fail(self, error: Exception) -> None:
        failed = list(self.scheduler.running)
        self.generator.forget()
        for row in failed:
            row.finish, row.error = "error", f"{type(error).__name__}: {error}"
            self.scheduler.remove(row)
        if not self.scheduler.steps:
            self._tell_idle()
        self._tell(failed)

    def _tell_idle(self) -> None:
        for future in self._idle:
            future.set_result(None)
        self._idle.clear()

    def _end(self) -> None:
        self._ended = True
        self.abort_all()

    def _tell(self, rows: Sequence[Row]) -> None:
        told = [row.told for row in rows if row.told is not None]
        if told and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_call_all, told)


def _call_all(told: list[Callable[[], None]]) -> None:
    for one in told:
        one()
