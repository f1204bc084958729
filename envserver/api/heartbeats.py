"""Tracks who was heard from recently. Silent environments do not count until heard from again."""

from __future__ import annotations

import time
from collections.abc import Hashable


class Heartbeats:
    """Time of the last message from each environment.

    Args:
        silent_after_seconds: an environment without a message for longer than this is silent.
    """

    def __init__(self, silent_after_seconds: float) -> None:
        self.silent_after_seconds = silent_after_seconds
        self._born = time.monotonic()
        self._seen: dict[Hashable, float] = {}

    def hear(self, who: Hashable) -> None:
        """Records a message from `who`."""
        self._seen[who] = time.monotonic()

    def silent_seconds(self, who: Hashable) -> float:
        """Returns the time since the last message; after a restart everyone starts at zero."""
        return time.monotonic() - self._seen.get(who, self._born)

    def is_silent(self, who: Hashable) -> bool:
        """Returns whether `who` has been silent for too long."""
        return self.silent_seconds(who) > self.silent_after_seconds

    def forget(self, who: Hashable) -> None:
        """Forgets `who`."""
        self._seen.pop(who, None)

    def clear(self) -> None:
        """Forgets all environments."""
        self._seen.clear()
