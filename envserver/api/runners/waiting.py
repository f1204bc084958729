"""Heartbeats that wait for news: only those with news are woken.

In: changes, however many. Out: one look at all that wait for many changes. What holds: a heartbeat
is answered once; what it is told was decided for it alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...remote.messages import Heartbeat, News

Waiting = asyncio.Future[News]
"""A heartbeat that waits; done when it is answered."""


class WaitingHeartbeats:
    """The heartbeats that wait.

    Args:
        look: called soon after changes; calls `tell` for each of `all` for which there is news.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._waiting: dict[Waiting, tuple[str, Heartbeat]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, env_id: str, beat: Heartbeat, seconds: float) -> News | None:
        """Waits for news for a runner at most `seconds` long; None: there was none."""
        answer: Waiting = asyncio.get_running_loop().create_future()
        self._waiting[answer] = env_id, beat
        try:
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            return None
        finally:
            del self._waiting[answer]

    def all(self) -> list[tuple[Waiting, str, Heartbeat]]:
        """Returns the heartbeats without an answer, with the runner's id and what it said."""
        return [(one, *whose) for one, whose in self._waiting.items() if not one.done()]

    def tell(self, waiting: Waiting, news: News) -> None:
        """Answers a heartbeat."""
        waiting.set_result(news)

    def look_after(self, seconds: float) -> None:
        """Looks once in `seconds` (0 or less: at once), unless a look is already due."""
        if self._timer is None and self._waiting:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, seconds), self._look_now)

    def _look_now(self) -> None:
        self._timer = None
        self._look()
