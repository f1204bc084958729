"""Stops a run by signals: the first lets its open groups end, the second ends it at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from ..running.stopping import Stop, Stoppable
from ..running.tally import counted


class SignalStop(Stop):
    """Stops a run on SIGINT or SIGTERM.

    Args:
        say: shows one line.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        super().__init__()
        self.say = say

    def attach(
        self, scheduler: Stoppable, drain: Callable[[], None], cancel: Callable[[], object]
    ) -> None:
        super().attach(scheduler, drain, cancel)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def detach(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)
        super().detach()

    def _on_signal(self) -> None:
        if self.asked:
            self.at_once()
            return
        self.say(f"Finishing {counted(self.open_groups, 'open group')}; again stops at once.")
        self.finish()
