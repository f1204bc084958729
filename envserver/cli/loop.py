"""Runs a command's coroutine on uvloop; SIGTERM ends it like Ctrl-C, with full clean-up.

`SignalStop` stops a run instead: the first signal lets its open groups end, the second ends it at
once, and the third kills this process and all that it started; so does `CLOSING_SECONDS` after the
end of a stop that does not complete (a stopped process, an engine, a database).
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from ..running.stopping import Stop, Stoppable
from ..telemetry.redaction import counted

T = TypeVar("T")

_THRESHOLDS = 2_000, 5, 200
"""Allocations before the youngest objects are looked through (an answer of 64 tokens with logprobs
makes some hundred), and how often before the next generations are."""


class Terminated(KeyboardInterrupt):
    """SIGTERM ended the command."""

    status = 128 + signal.SIGTERM
    """Exit status that the shell shows for a command ended by SIGTERM."""


def run_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Returns the coroutine's result."""
    spare_collector()
    terminated: list[bool] = []
    try:
        return uvloop.run(_terminable(coroutine, lambda: terminated.append(True)))
    except asyncio.CancelledError as error:
        if terminated:
            raise Terminated from None
        raise RuntimeError("The command was cancelled, though no signal ended it.") from error


def spare_collector() -> None:
    """Tunes the garbage collector, which otherwise takes a fifth of the time of a call and
    sometimes pauses for many milliseconds.

    Objects that exist now live as long as the process. Reference counting frees nearly all objects
    of a call, but only after they exceed Python's default threshold. A pause is as long as what
    is looked through, so the two young generations stay small: 2,000 and 10,000 objects. With
    20,000 and 200,000 it stopped a loop with 1,000 rollouts in flight for 200 and 400 ms.
    """
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


async def _terminable(coroutine: Coroutine[Any, Any, T], on_sigterm: Callable[[], None]) -> T:
    task = asyncio.ensure_future(coroutine)

    def end() -> None:
        on_sigterm()
        task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
    return await task


CLOSING_SECONDS = 15.0


class SignalStop(Stop):
    """Stops a run on SIGINT or SIGTERM.

    Args:
        say: shows one line.
        drain_seconds: seconds after which open groups are cancelled; None: never.
    """

    def __init__(self, say: Callable[[str], object], *, drain_seconds: float | None = None) -> None:
        super().__init__()
        self.say = say
        self._drain_seconds = drain_seconds

    def attach(
        self, scheduler: Stoppable, drain: Callable[[], None], cancel: Callable[[], object]
    ) -> None:
        super().attach(scheduler, drain, cancel)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def detach(self) -> None:
        if not self.asked:
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().remove_signal_handler(number)
        super().detach()

    def _on_signal(self) -> None:
        if self.cancelled:
            self._kill()
        elif self.asked:
            self.say("Stopping at once; again kills what does not end.")
            self.at_once()
            self._kill_after(CLOSING_SECONDS)
        else:
            self.say(f"Finishing {counted(self.open_groups, 'open group')}; again stops at once.")
            self.finish()
            if self._drain_seconds is not None:
                self._kill_after(self._drain_seconds + CLOSING_SECONDS)

    def _kill_after(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._kill)
        timer.daemon = True  # the event loop may be what does not answer
        timer.start()

    def _kill(self) -> None:
        from ..workers.linux import descendants, kill  # `run-api` has no programs to kill

        self.say("Killed what had not ended.")
        for pid in descendants():
            kill(pid)
        os._exit(1)
