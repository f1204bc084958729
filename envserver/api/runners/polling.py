"""How often runners ask for news: the more there are, the more seldom.

What holds: however many runners wait, the server answers about the same number of idle heartbeats a
second. News never waits for a poll: it is sent at once.
"""

from __future__ import annotations

from typing import Final

SILENT_POLLS: Final = 3
"""A runner counts as silent when it should have asked this often."""
LONGEST_SECONDS: Final = 20.0
_USUAL_SECONDS: Final = 5.0
_BEATS_PER_SECOND: Final = 50.0
"""Idle heartbeats of all runners together: about a tenth of a core."""


def poll_seconds(runners: int, silent_after_seconds: float) -> float:
    """Returns how long a runner should wait for news, if there are this many.

    Args:
        silent_after_seconds: after which a runner is silent that asks often.
    """
    usual = min(_USUAL_SECONDS, silent_after_seconds / (2 * SILENT_POLLS))
    return max(usual, min(runners / _BEATS_PER_SECOND, LONGEST_SECONDS))
