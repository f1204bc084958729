"""Drops rows whose reference solution fails its own tests: they cannot be solved.

The references run in sandboxes, some at a time, as a model's programs would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from envserver import Sandboxes, Task

from .hoisting import hoisted
from .running import SPEC, Trial, Verdict, run_trial
from .scoring import all_tests, judged, judged_program, program_of

BATCH = 8


def checked(tasks: Iterable[Task], sandboxes: Sandboxes) -> Iterator[tuple[Task, str | None]]:
    """Yields each task with the fault of its reference, or None if it passes.

    Raises:
        SandboxError: a sandbox failed.
    """
    waiting = iter(tasks)
    # The first alone, so that a first task is there soon.
    size = 1
    while batch := list(islice(waiting, size)):
        size = BATCH
        # In a thread: the caller may itself be in an event loop.
        with ThreadPoolExecutor(1, thread_name_prefix="references") as thread:
            reasons = thread.submit(asyncio.run, _why_wrong_all(batch, sandboxes)).result()
        yield from zip(batch, reasons, strict=True)


async def _why_wrong_all(tasks: list[Task], sandboxes: Sandboxes) -> list[str | None]:
    return await asyncio.gather(*(why_wrong(task, sandboxes) for task in tasks))


async def why_wrong(task: Task, sandboxes: Sandboxes) -> str | None:
    """Returns the fault of the reference of `task`, or None if it passes all tests."""
    code = task.hidden.get("code")
    if not code:
        return "it has no reference solution (--env.check_references false keeps it)"
    if task.public["entry_point"]:
        verdicts = await _judged_function(task, code, sandboxes)
    else:
        verdicts = await judged_program(task, code, sandboxes)
    passed = all(verdict.passed for verdict in verdicts)
    return None if passed else "the reference fails its own tests"


async def _judged_function(task: Task, code: str, sandboxes: Sandboxes) -> list[Verdict]:
    tests = [hoisted(source, task.public["entry_point"]) for source in all_tests(task)]
    calls = [call for test in tests for call in test.calls]
    async with sandboxes.open(SPEC) as sandbox:
        trial = await run_trial(Trial(program_of(task.public, code, tests), calls), sandbox)
    return judged(tests, trial)
