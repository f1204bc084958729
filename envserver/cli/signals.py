"""Stops a run by signals: the first lets its open groups end, the second ends it at once.

The third kills this process and all that it started, and so does `CLOSING_SECONDS` after the end of
a stop: whatever does not answer by then (a stopped process, an engine, a database).
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable

from ..running.stopping import Stop, Stoppable
from ..running.tally import counted
from ..workers.linux import descendants, kill

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
        self.say("Killed what had not ended.")
        for pid in descendants():
            kill(pid)
        os._exit(1)
