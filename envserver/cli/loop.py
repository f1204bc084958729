"""Runs a command's coroutine on uvloop, and ends it by SIGTERM as by Ctrl-C: nothing stays behind.

A command that has more to say to signals sets handlers of its own.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


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
    try:
        return uvloop.run(_terminable(coroutine))
    except asyncio.CancelledError:
        raise Terminated from None


async def _terminable(coroutine: Coroutine[Any, Any, T]) -> T:
    task = asyncio.ensure_future(coroutine)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task
