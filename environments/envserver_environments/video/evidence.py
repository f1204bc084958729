"""Decides whether an answer names a time at which its evidence is visible. Pure.

Times are `h:mm:ss` or `m:ss`, alone or as a range `0:00:12-0:00:20`. Naming the whole video does
not count: more than a few times, or a long range, count as none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_CITED = 3
MAX_RANGE_SECONDS = 20.0

_TIME = r"(?:(\d{1,2}):)?(\d{1,2}):(\d{2})"
_CITED = re.compile(rf"(?<![\d:]){_TIME}(?:\s*(?:-|–|to)\s*{_TIME})?(?![\d:])")


def cites_evidence(text: str, spans: Iterable[Iterable[float]]) -> bool:
    """Returns whether a time in `text` is in one of `spans` (pairs of seconds)."""
    cited = [_range(found.groups()) for found in _CITED.finditer(text)]
    if not 0 < len(cited) <= MAX_CITED:
        return False
    if any(not 0 <= end - start <= MAX_RANGE_SECONDS for start, end in cited):
        return False
    return any(
        start <= last and first <= end for first, last in map(tuple, spans) for start, end in cited
    )


def _range(parts: tuple[str | None, ...]) -> tuple[float, float]:
    start = _seconds(parts[:3])
    return start, start if parts[4] is None else _seconds(parts[3:])


def _seconds(parts: tuple[str | None, ...]) -> float:
    hours, minutes, seconds = (int(part or 0) for part in parts)
    return float(3600 * hours + 60 * minutes + seconds)
