"""Joins the times of an attempt: its model calls with their tokens, tools, programs, scoring. Pure.

In: the recorded calls, the training rows, and what the proxy noted. Out: `Timing`s in order of
start. What holds: each trained token is in the range of exactly one call; the ranges of one row do
not overlap; there are at most `MOST_TIMINGS`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from envserver_records.records import Call, Sequence
from envserver_records.timings import MOST_TIMINGS, Timing

from ..proxy.timeline import Timeline


def timings_of(timeline: Timeline, calls: list[Call], rows: list[Sequence]) -> list[Timing]:
    """Returns the times of an attempt. Where there are too many, its model calls come first."""
    places = _places(rows)
    found = [_of_call(timeline, call, places.get(call.index, _NOWHERE)) for call in calls]
    noted = sorted(timeline.timings, key=lambda timing: timing.started)
    kept = [*found, *noted][:MOST_TIMINGS]
    return sorted(kept, key=lambda timing: timing.started)


def with_scoring_times(timings: list[Timing], timeline: Timeline) -> list[Timing]:
    """Returns the times of an attempt with those of its scoring, which came last."""
    scoring = [timing for timing in timeline.timings if timing.kind == "scoring"]
    return [*timings[: MOST_TIMINGS - len(scoring)], *scoring]


class _Place(NamedTuple):
    row: int | None
    start: int | None
    end: int | None
    trained: bool


_NOWHERE = _Place(None, None, None, trained=False)


def _places(rows: list[Sequence]) -> dict[int, _Place]:
    """Returns where the tokens of each call are: in the row that trains them, else in the first."""
    found: dict[int, _Place] = {}
    for number, row in enumerate(rows):
        edges = [0, *(np.flatnonzero(np.diff(row.calls)) + 1).tolist(), row.calls.size]
        for start, end in pairwise(edges):
            call = int(row.calls[start]) if end > start else -1
            if call >= 0 and not found.get(call, _NOWHERE).trained:
                place = _Place(number, start, end, bool(row.mask[start:end].any()))
                if place.trained or call not in found:
                    found[call] = place
    return found


def _of_call(timeline: Timeline, call: Call, place: _Place) -> Timing:
    first = call.seconds_to_first
    return Timing(
        kind="engine",
        name=call.served_model or call.model,
        agent=call.agent,
        started=timeline.since_start(call.started_at),
        seconds=round(call.seconds, 4),
        first=None if first is None else round(first, 4),
        call=call.index,
        row=place.row,
        start=place.start,
        end=place.end,
    )
