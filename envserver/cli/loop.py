"""Runs a command's coroutine on uvloop, and ends it by SIGTERM as by Ctrl-C: nothing stays behind.

A command that has more to say to signals sets handlers of its own.
"""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")

_YOUNG_OBJECTS = 20_000
"""New lists, dicts and the like before the collector looks at them; an answer of 64 tokens with
logprobs has some hundred."""


class Terminated(KeyboardInterrupt):
    """SIGTERM ended the command."""

    status = 128 + signal.SIGTERM
    """What the shell shows of a command that a signal ended."""


def run_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result.

    Raises:
        KeyboardInterrupt: Ctrl-C cancelled it.
        Terminated: SIGTERM did.
    """
    spare_collector()
    try:
        return uvloop.run(_terminable(coroutine))
    except asyncio.CancelledError:
        raise Terminated from None


def spare_collector() -> None:
    """Has Python's collector of cycles look at less, less often: it takes a fifth of the time of
    a call otherwise, and now and then many milliseconds at once.

    What there is now stays as long as the process. Of what a call makes nearly all goes without
    the collector, but not before there is more of it than Python waits for by default.
    """
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)


async def _terminable(coroutine: Coroutine[Any, Any, T]) -> T:
    task = asyncio.ensure_future(coroutine)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task
