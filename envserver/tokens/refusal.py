"""Refusals: the engine renders the prompt instead, and a new sequence begins."""

from __future__ import annotations


class Refused(Exception):
    """A prompt cannot be made exactly.

    Expected, not a failure; `reason` is a counted snake_case word.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
