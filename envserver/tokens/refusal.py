"""What cannot be said exactly is not said: the engine renders it, or a new sequence begins."""

from __future__ import annotations


class Refused(Exception):
    """An expected outcome, not a failure. `reason` is one snake_case word that is counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
