"""The limits that the agents of one attempt have reached, and an end to an agent that keeps asking.

Some frameworks retry every error. An agent that is refused three times for the same limit is ended
a few seconds later instead of at the rollout's deadline; it may still finish by itself until then.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

MOST_REFUSALS = 3
GRACE_SECONDS = 3.0
"""Time in which an agent may end by itself after its last refusal that counts."""
AT_ONCE_SECONDS = 0.25
"""Refusals that come faster count as one: requests that were sent in parallel."""


@dataclass
class _Refused:
    times: int
    counted_at: float


class ReachedLimits:
    """Limits that were reached, by agent."""

    def __init__(self) -> None:
        self._refused: dict[tuple[str, str | None], _Refused] = {}
        self._ends: asyncio.Timeout | None = None
        self.ended_agent = False
        """Whether an agent was ended because it kept asking."""

    @property
    def latest(self) -> str | None:
        """The limit that was reached last; None: no limit holds an agent back."""
        return next((limit for limit, _ in reversed(self._refused)), None)

    def watch(self, ends: asyncio.Timeout | None) -> None:
        """From now on an agent that keeps asking lets `ends` expire; None: nothing any more.

        A timeout holds its task, and that the rollout's record when it has ended: one that stayed
        here would keep it until the next collection of old cycles, some 30,000 rollouts later.
        """
        self._ends = ends

    def refused(self, limit: str, agent: str | None) -> None:
        """Notes that a request of `agent` was refused because of `limit`."""
        now = time.monotonic()
        before = self._refused.pop((limit, agent), None) or _Refused(0, now - AT_ONCE_SECONDS)
        self._refused[limit, agent] = before
        if now - before.counted_at < AT_ONCE_SECONDS:
            return
        before.times, before.counted_at = before.times + 1, now
        if before.times == MOST_REFUSALS and limit != "time" and self._ends is not None:
            self._ends.reschedule(asyncio.get_running_loop().time() + GRACE_SECONDS)

    def answered(self, agent: str | None) -> None:
        """Notes that a call of `agent` was answered: it has shortened its conversation since it
        met the context limit, or asked for what a hook lets through."""
        forgotten = [self._refused.pop((limit, agent), None) for limit in ("context", "refused")]
        ending = any(one is not None and one.times >= MOST_REFUSALS for one in forgotten)
        if not ending or self._ends is None:
            return
        if all(other.times < MOST_REFUSALS for other in self._refused.values()):
            self._ends.reschedule(None)
