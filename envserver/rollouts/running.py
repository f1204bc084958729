"""Which rollouts are in progress, for people to see: waiting, playing or scoring."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import msgspec

from .failures import rollout_id_of
from .stream import GroupRequest

if TYPE_CHECKING:
    from .group import RolloutContext


class RunningRollout(msgspec.Struct):
    """An attempt at a rollout, in progress.

    Args:
        rollout: its number in the group.
        attempt: from 1; 0 while it waits for a place.
        since: when it began to wait, later when its agent began; seconds since 1970.
        turns, tokens: sampled so far.
        worker: process id of its worker; None while it has none.
    """

    environment: str
    group_id: str
    task_id: str
    rollout: int
    since: float
    attempt: int = 0
    state: Literal["waiting", "playing", "scoring"] = "waiting"
    turns: int = 0
    tokens: int = 0
    worker: int | None = None

    def plays(self, attempt: int) -> None:
        """Notes that it has its place."""
        self.state, self.since, self.attempt = "playing", time.time(), attempt

    def is_scored(self) -> None:
        """Notes that its agent has ended."""
        self.state = "scoring"


class RunningRollouts:
    """The rollouts of one environment that are in progress, by id, oldest first."""

    def __init__(self) -> None:
        self.by_id: dict[str, RunningRollout] = {}

    @contextmanager
    def shown(self, request: GroupRequest, number: int) -> Iterator[RunningRollout]:
        """Shows rollout `number` of a group while the block runs."""
        rollout_id = rollout_id_of(request, number)
        shown = RunningRollout(
            request.env, request.group_id, request.task.id, number, since=time.time()
        )
        self.by_id[rollout_id] = shown
        try:
            yield shown
        finally:
            del self.by_id[rollout_id]


def running_rollouts(
    contexts: Iterable[RolloutContext], environment: str, limit: int
) -> tuple[list[RunningRollout], int]:
    """Returns up to `limit` rollouts in progress, oldest first of each environment, and how many
    there are.

    Args:
        environment: "": all.
    """
    found: list[RunningRollout] = []
    total = 0
    for context in contexts:
        if environment not in ("", context.environment.name):
            continue
        total += len(context.running.by_id)
        attempts, workers = context.proxy.running(), context.pool.workers()
        for rollout_id, shown in list(context.running.by_id.items())[: limit - len(found)]:
            worker = workers.get(rollout_id)
            if (attempt := attempts.get(rollout_id)) is not None:
                shown.turns = sum(call.choice == 0 for call in attempt.calls)
                shown.tokens = sum(len(call.completion_ids) for call in attempt.calls)
            waits = shown.state == "playing" and worker is None  # for a process
            state = "waiting" if waits else shown.state
            found.append(msgspec.structs.replace(shown, state=state, worker=worker))
    return found, total
