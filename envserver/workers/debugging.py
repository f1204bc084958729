"""Runs an agent in this process, stopped by the debugger at its first line.

A WorkerPool for one person: no process, no sandbox, no heartbeat. The agent is the environment's
own code, and speaks to the proxy over HTTP as everywhere.
"""

from __future__ import annotations

import inspect
import pdb
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import aiohttp

from ..registry import find
from .attempt import WorkerAttempt, WorkerResources
from .instances import Instances
from .pool import Assignment


class DebugPool:
    """See WorkerPool; one assignment at a time."""

    async def run(self, assignment: Assignment) -> None:
        """Runs it; the debugger stops in the environment's `rollout`, before its first line."""
        instances = Instances(nullcontext)
        unlimited = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=unlimited, trust_env=False) as http:
            with ThreadPoolExecutor() as threads:
                shop = WorkerResources(http, instances, threads, nullcontext)
                try:
                    with _stopped_in(find(assignment.env_reference).rollout):
                        await WorkerAttempt(assignment.rollout_id, assignment.url, shop).run()
                finally:
                    await instances.close()

    def snapshot(self) -> dict[str, Any]:
        """See WorkerPool."""
        return {"processes": 0}


@contextmanager
def _stopped_in(function: Callable[..., Any]) -> Iterator[None]:
    """Within: whoever calls `function`, in whatever thread, is stopped at its first line."""
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
