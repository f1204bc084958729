"""Heartbeats that wait for news: only those with news are woken.

In: changes, however many. Out: one look at all that wait for many changes. What holds: a heartbeat
is answered once; what it is told was decided for it alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from starlette.types import Receive

from ...remote.messages import Heartbeat, News
from ..native.waiting import Hangup

Waiting = asyncio.Future[News | None]
"""A heartbeat that waits; done when it is answered, or when its wait has ended without news."""


class WaitingHeartbeats:
    """The heartbeats that wait.

    Args:
        look: called soon after changes; calls `tell` for each of `all` for which there is news.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._waiting: dict[Waiting, tuple[str, Heartbeat]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def wait(
        self, env_id: str, beat: Heartbeat, seconds: float, receive: Receive
    ) -> News | None:
        """Waits for news for a runner at most `seconds` long; None: there was none, or the client
        has disconnected.

        Args:
            receive: of the request.
        """
        loop = asyncio.get_running_loop()
        answer: Waiting = loop.create_future()
        self._waiting[answer] = env_id, beat
        timer = loop.call_later(seconds, _end, answer)
        try:
            async with Hangup(receive) as hangup:
                hangup.then(partial(_end, answer))
                return await answer
        finally:
            timer.cancel()
            del self._waiting[answer]

    def end(self, env_id: str) -> None:
        """Ends the waits for a runner without news."""
        for one, (whose, _) in self._waiting.items():
            if whose == env_id:
                _end(one)

    def all(self) -> list[tuple[Waiting, str, Heartbeat]]:
        """Returns the heartbeats without an answer, with the runner's id and what it said."""
        return [(one, *whose) for one, whose in self._waiting.items() if not one.done()]

    def tell(self, waiting: Waiting, news: News) -> None:
        """Answers a heartbeat."""
        if not waiting.done():
            waiting.set_result(news)

    def look_after(self, seconds: float) -> None:
        """Looks once in `seconds` (0 or less: at once), unless a look is already due."""
        if self._timer is None and self._waiting:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, seconds), self._look_now)

    def _look_now(self) -> None:
        self._timer = None
        self._look()


def _end(waiting: Waiting) -> None:
    if not waiting.done():
        waiting.set_result(None)
