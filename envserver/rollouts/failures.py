"""The failed attempts of one group: reported as events, kept for its record, counted.

In: errors of attempts, as they happen. Out: the group's failures, and why it is dropped if a bug
ended it.
"""

from __future__ import annotations

import time
from collections import Counter

from envserver_records.errors import Failure, RolloutError

from .events import Observer, RolloutFailed
from .policy import Drop, is_bug
from .stream import GroupRequest


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

    def next_attempt(self, number: int) -> int:
        """Returns the number, from 1, of the attempt of rollout `number` that starts now."""
        self._attempts[number] += 1
        return self._attempts[number]

    def add(self, number: int, error: RolloutError, *, final: bool) -> Failure:
        """Notes that an attempt of rollout `number` failed; `final`: it is not retried."""
        failure = error.failure()
        self.seen.append(failure)
        if final:
            self.lost[failure.kind] += 1
            if is_bug(error) and not self.scored:
                bug, missing = error.detail["bug"], "missing" in error.detail
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


def rollout_id_of(request: GroupRequest, number: int) -> str:
    """Returns the id of rollout `number` of a group."""
    return f"{request.group_id}-r{number}"
