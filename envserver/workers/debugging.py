"""Runs an agent in this process, for the debugger: no worker, no sandbox, no heartbeat."""

from __future__ import annotations

import inspect
import pdb
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ..registry import find
from .attempt import Instances, WorkerAttempt, WorkerResources
from .pool import Assignment
from .run import AttemptRun, HttpClient, Job


class DebugPool:
    """A WorkerPool for one assignment at a time. `stops`: the debugger stops before the first line
    of `rollout`; otherwise where the environment calls `breakpoint()`."""

    def __init__(self, *, stops: bool = True) -> None:
        self._stops = stops
        self.error: Exception | None = None
        """What the agent raised, with its traceback."""

    async def run(self, assignment: Assignment) -> None:
        instances = Instances(nullcontext)
        async with HttpClient() as http:
            with ThreadPoolExecutor() as threads:
                shop = WorkerResources(http, instances, threads, own_process=False)
                try:
                    with self._stopping(assignment.env_reference):
                        job = assignment.job.decode()
                        attempt = _Attempt(assignment.rollout_id, assignment.url, job, shop)
                        await attempt.run()
                        if attempt.result is not None:
                            assignment.take_result(attempt.result)
                        self.error = attempt.error
                finally:
                    await instances.close()

    def _stopping(self, env_reference: str) -> AbstractContextManager[None]:
        return _stopped_in(find(env_reference).rollout) if self._stops else nullcontext()

    def workers(self) -> dict[str, int]:
        return {}

    def snapshot(self) -> dict[str, Any]:
        return {"processes": 0}


class _Attempt(WorkerAttempt):
    error: Exception | None = None

    async def _output(self, job: Job, run: AttemptRun) -> Any:
        try:
            return await super()._output(job, run)
        except Exception as error:
            self.error = error
            raise


@contextmanager
def _stopped_in(function: Callable[..., Any]) -> Iterator[None]:
    """Within: each call of `function`, in any thread, stops at its first line."""
    code = inspect.unwrap(function).__code__
    numbers = [number for _, _, number in code.co_lines() if number is not None]
    first = min(number for number in numbers if number > code.co_firstlineno)
    debugger = pdb.Pdb(nosigint=True)
    debugger.reset()
    debugger.botframe = sys._getframe()
    debugger.set_break(code.co_filename, first, temporary=True)
    debugger.set_continue()
    threading.settrace(debugger.trace_dispatch)
    sys.settrace(debugger.trace_dispatch)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)
