"""Schedules rollouts, retries failures, scores results and delivers groups.

Tasks flow in, scored groups flow out to a sink. Decisions are pure functions (`policy`); running
one attempt (`attempt`), one group (`group`) and the stream (`scheduler`) each has its module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .attempt import ending_limit
    from .capacity import Bounds
    from .estimates import Scored
    from .group import make_group
    from .mixing import CATCH_UP_GROUPS, Share, Shares, targets
    from .policy import is_stale
    from .staleness import StalenessMonitor
    from .stream import group_id

__all__ = [
    "Bounds",
    "CATCH_UP_GROUPS",
    "Scored",
    "Share",
    "Shares",
    "StalenessMonitor",
    "ending_limit",
    "group_id",
    "is_stale",
    "make_group",
    "targets",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Bounds": "capacity",
        "CATCH_UP_GROUPS": "mixing",
        "Scored": "estimates",
        "Share": "mixing",
        "Shares": "mixing",
        "StalenessMonitor": "staleness",
        "ending_limit": "attempt",
        "group_id": "stream",
        "is_stale": "policy",
        "make_group": "group",
        "targets": "mixing",
    },
)
