"""The failed attempts of one group: reported as events, kept for its record, counted.

In: errors of attempts, as they happen. Out: the group's failures, and why it is dropped if a bug
ended it.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec
from envserver_records.errors import (
    Failure,
    JudgeError,
    RolloutError,
    ScorerError,
    Straggler,
    Unscorable,
)
from envserver_records.timings import MOST_ATTEMPTS, FailedAttempt

from ..telemetry.redaction import redacted
from .events import Observer, RolloutFailed
from .policy import Drop, is_bug
from .stream import GroupRequest

STRUCK = "[hidden]"
_SHORTEST = 4
_SHORTEST_LINE = 8
_MOST_PIECES = 5000


def without_hidden(text: str, hidden: dict[str, Any]) -> str:
    """Returns `text`, such as a scorer's exception, without the values of `hidden`: every string
    and number that is long enough not to be a common word, also as Python and JSON write it, and
    each longer line of its texts."""
    pieces: set[str] = set()
    for value in _values(hidden):
        if len(pieces) >= _MOST_PIECES:
            return STRUCK  # too much to look for: nothing is shown
        pieces.update(_written(value))
    for piece in sorted(pieces, key=len, reverse=True):
        text = text.replace(piece, STRUCK)
    return text


def _values(value: Any) -> Iterator[str]:
    """Yields the strings and numbers of a JSON-like value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, bytes):
        yield value.decode(errors="replace")
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _values(inner)
    elif isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            yield from _values(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield repr(value)


def _written(value: str) -> Iterator[str]:
    """Yields the ways in which a message may hold a value."""
    lines = [line.strip() for line in value.splitlines()] if "\n" in value else []
    for shortest, part in [(_SHORTEST, value), *((_SHORTEST_LINE, line) for line in lines)]:
        if len(part) >= shortest:
            yield part
            yield repr(part)[1:-1]
            yield json.dumps(part)[1:-1]


_LONGEST_MESSAGE = 1000
_SAW_HIDDEN = (ScorerError, JudgeError, Unscorable)
"""Errors of code that knows the hidden part of the task, and may quote it."""


class GroupFailures:
    """The failed attempts of one group, reported to the observer and kept for the group's record.

    `lost`: number of rollouts lost for good, by kind of their last failure. `scored`: number of
    scored rollouts. `bug`: why the group is dropped, if a bug ended it before any was scored.
    """

    def __init__(self, observer: Observer, request: GroupRequest) -> None:
        self.seen: list[Failure] = []
        self.lost: Counter[str] = Counter()
        self.scored = 0
        self.bug: Drop | None = None
        self._observer = observer
        self._request = request
        self._attempts: Counter[int] = Counter()
        self._began: dict[int, float] = {}
        self._failed: defaultdict[int, list[FailedAttempt]] = defaultdict(list)

    def next_attempt(self, number: int) -> int:
        """Returns the number, from 1, of the attempt of rollout `number` that starts now."""
        self._attempts[number] += 1
        self._began[number] = time.monotonic()
        return self._attempts[number]

    def of(self, number: int) -> list[FailedAttempt]:
        """Returns the failed attempts of rollout `number`, the latest ones in order."""
        return self._failed[number][-MOST_ATTEMPTS:]

    def add(self, number: int, error: RolloutError, *, final: bool) -> Failure:
        """Notes that an attempt of rollout `number` failed; `final`: it is not retried."""
        knows_hidden = isinstance(error, _SAW_HIDDEN)
        failure = _safe(error.failure(), self._request.task.hidden if knows_hidden else {})
        self.seen.append(failure)
        self._failed[number].append(
            FailedAttempt(
                attempt=self._attempts[number],
                kind=failure.kind,
                blame=failure.blame,
                message=failure.message[:_LONGEST_MESSAGE],
                seconds=round(time.monotonic() - self._began.get(number, time.monotonic()), 3),
            )
        )
        if final:
            self.lost[failure.kind] += 1
            if is_bug(error) and not self.scored:
                bug, missing = failure.detail["bug"], "missing" in error.detail
                self.bug = Drop("incomplete", bug, True, bug=True, hopeless=missing)
        self._observer(
            RolloutFailed(
                group_id=self._request.group_id,
                index=self._request.index,
                task_id=self._request.task.id,
                rollout_id=rollout_id_of(self._request, number),
                attempt=self._attempts[number],
                failure=failure,
                final=final,
                at=time.time(),
            )
        )
        return failure


def _safe(failure: Failure, hidden: dict[str, Any]) -> Failure:
    """Returns a failure without secrets and without the values of `hidden`."""

    def safe(text: str) -> str:
        return redacted(without_hidden(text, hidden))

    detail = {
        name: safe(value) if isinstance(value, str) else value
        for name, value in failure.detail.items()
    }
    return msgspec.structs.replace(failure, message=safe(failure.message), detail=detail)


def rollout_id_of(request: GroupRequest, number: int) -> str:
    """Returns the id of rollout `number` of a group."""
    return f"{request.group_id}-r{number}"


def straggler(seconds: float) -> Straggler:
    """Returns the failure of a rollout that was not done when its group was so old."""
    return Straggler(
        f"The rollout was cancelled when its group was {seconds:.1f} s old.",
        hint="See rollouts.group_timeout_seconds and rollouts.straggler_grace_seconds.",
    )
