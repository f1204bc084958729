"""Who was heard of lately. Who is silent too long no longer counts, until it speaks again."""

from __future__ import annotations

import time
from collections.abc import Hashable


class Heartbeats:
    """When each environment was last heard of.

    Args:
        silent_after_seconds: who says nothing for longer is silent.
    """

    def __init__(self, silent_after_seconds: float) -> None:
        self.silent_after_seconds = silent_after_seconds
        self._born = time.monotonic()
        self._seen: dict[Hashable, float] = {}

    def hear(self, who: Hashable) -> None:
        """It has just said something."""
        self._seen[who] = time.monotonic()

    def silent_seconds(self, who: Hashable) -> float:
        """How long it has said nothing; after a restart everyone gets the full time."""
        return time.monotonic() - self._seen.get(who, self._born)

    def is_silent(self, who: Hashable) -> bool:
        """Whether it has said nothing for too long."""
        return self.silent_seconds(who) > self.silent_after_seconds

    def clear(self) -> None:
        """All environments are gone."""
        self._seen.clear()
