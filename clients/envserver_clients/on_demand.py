"""Orders rollouts of tasks that the trainer chooses, and reads how often each task is solved.

In: task ids. Out: trajectories in the same order. What always holds: each task has `group_size`
places; a lost rollout leaves its place empty.
"""

from __future__ import annotations

import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlencode

import msgspec
from envserver_records import Group, InputError, Split, Trajectory, unpack
from envserver_records.wire import GROUPS_MSGPACK

from .protocol import LONGEST_WAIT_SECONDS, Answer, Call, ServerUnreachable
from .records import decode_batch, decoded

_PAGE: Final = 1024
_NUMBER: Final = re.compile(r"-r(\d+)$")


class TaskSummary(msgspec.Struct, frozen=True):
    """A task without its hidden part; `public` is what a rollout needs."""

    task_id: str
    public: dict[str, Any]


class _TaskPage(msgspec.Struct):
    """`next` is the `after` of the next page, None on the last one."""

    tasks: list[TaskSummary]
    next: int | None


class TaskEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """The success rate of one task.

    Args:
        number: order in which tasks were first scored.
        attempts: rollouts so far, without those of evaluations.
        mean_reward: their mean, weighted towards recent policies; None if all are out of date.
        success: probability that the next rollout solves the task, in (0, 1); 0.5 if unknown.
        weight: attempts that still count.
        policy_version: the last one that tried the task; -1 if unknown.
        scored_at: seconds of the server's clock.
    """

    number: int
    task_id: str
    environment: str
    split: str
    attempts: int
    mean_reward: float | None
    success: float
    weight: float
    policy_version: int
    scored_at: float


class _EstimatePage(msgspec.Struct):
    estimates: list[TaskEstimate]
    next: int | None


class OnDemand(ABC):
    """The methods of a client that are about tasks."""

    @abstractmethod
    async def _send(self, call: Call) -> Answer:
        """Returns the answer to `call`, repeated where that may help; raises the server's error."""

    async def tasks(
        self, environment: str, *, split: Split | None = None, after: int = 0, limit: int = 100
    ) -> list[TaskSummary]:
        """Returns the tasks of an environment in their order, without their hidden parts.

        Args:
            split: default: the one that the server serves.
            after: number of tasks to skip.
            limit: maximum number of tasks.

        Raises:
            NotFoundError: the server does not have the environment.
        """
        found: list[TaskSummary] = []
        following: int | None = after
        while following is not None and len(found) < limit:
            most = min(limit - len(found), _PAGE)
            call = _page_call("/v1/tasks", environment, split, following, most)
            page = decoded((await self._send(call)).content, _TaskPage, "a page of tasks")
            found += page.tasks
            following = page.next
        return found

    async def task_estimates(
        self,
        *,
        environment: str | None = None,
        split: Split | None = None,
        after: int = 0,
        limit: int | None = None,
    ) -> list[TaskEstimate]:
        """Returns how often each task is solved; tasks that were never scored are left out.

        Args:
            environment, split: only tasks of these. Default: all.
            after: only tasks with a larger `number`.
            limit: maximum number of tasks. Default: all.
        """
        found: list[TaskEstimate] = []
        following: int | None = after
        while following is not None and (limit is None or len(found) < limit):
            most = _PAGE if limit is None else min(limit - len(found), _PAGE)
            call = _page_call("/v1/tasks/estimates", environment, split, following, most)
            answer = await self._send(call)
            page = decoded(answer.content, _EstimatePage, "a page of estimates")
            found += page.estimates
            following = page.next
        return found

    async def rollouts(
        self,
        environment: str,
        task_ids: Sequence[str],
        *,
        group_size: int = 1,
        split: Split | None = None,
        key: str | None = None,
        timeout_seconds: float = 3600.0,
    ) -> list[list[Trajectory | None]]:
        """Runs `group_size` rollouts of each task now; returns them in the order of the tasks.

        None stands for a rollout that failed after all its tries without the model's fault.

        Args:
            task_ids: at most 1024; a repeated id gets several groups.
            split: the tasks' split. Default: the one that the server serves.
            key: a repeated request with the same key and tasks returns the same rollouts, as long
                as the server keeps them. Default: a new key.
            timeout_seconds: for all rollouts together.

        Raises:
            NotFoundError: the server does not have the environment or a task.
            ServerUnreachable: the rollouts were not finished in time, or the server is gone.
        """
        if not task_ids:
            return []
        key = key or uuid.uuid4().hex
        order = RolloutOrder(environment, task_ids, group_size, split, timeout_seconds, key)
        while True:
            found = rollouts_in(await self._send(order.call()), order)
            if found is not None:
                return found
            if not order.seconds_left():
                raise ServerUnreachable(
                    f"The rollouts were not all finished within {timeout_seconds:g} s.",
                    hint="Allow more time; GET /v1/status shows what the server does.",
                )


@dataclass(frozen=True)
class RolloutOrder:
    """An order of rollouts, with its time limit."""

    environment: str
    task_ids: Sequence[str]
    group_size: int
    split: Split | None
    timeout_seconds: float
    key: str
    begun_at: float = field(default_factory=time.monotonic)

    def seconds_left(self) -> float:
        return max(0.0, self.begun_at + self.timeout_seconds - time.monotonic())

    def call(self) -> Call:
        """Returns the request; repeating it continues to wait."""
        wait_seconds = min(LONGEST_WAIT_SECONDS, self.seconds_left())
        body: dict[str, Any] = {
            "environment": self.environment,
            "task_ids": list(self.task_ids),
            "group_size": self.group_size,
            "wait_seconds": wait_seconds,
        }
        if self.split is not None:
            body["split"] = self.split
        key = {"idempotency-key": self.key}
        return Call("POST", "/v1/rollouts", body, GROUPS_MSGPACK, wait_seconds, key)


def rollouts_in(answer: Answer, order: RolloutOrder) -> list[list[Trajectory | None]] | None:
    """Returns all rollouts in the order of the tasks; None if they are not finished."""
    if answer.status == 202:
        return None
    batch = decode_batch(answer.content)
    try:
        groups = [unpack(one.body, Group) for one in batch.groups]
    except msgspec.DecodeError as error:
        raise InputError(
            f"The server's answer does not hold groups: {error}.", place="body"
        ) from error
    if [group.task_id for group in groups] != list(order.task_ids):
        raise InputError("The server answered with other tasks than the order named.", place="body")
    return [_by_number(group, order.group_size) for group in groups]


def _by_number(group: Group, size: int) -> list[Trajectory | None]:
    found: list[Trajectory | None] = [None] * size
    for trajectory in group.trajectories:
        number = _NUMBER.search(trajectory.rollout_id)
        if number is None or int(number[1]) >= size:
            raise InputError(
                f"{trajectory.rollout_id} has no number in its group.", place=group.group_id
            )
        trajectory.images = {
            span.sha256: group.images[span.sha256]
            for sequence in trajectory.sequences
            for span in sequence.images
            if span.sha256 in group.images
        }
        found[int(number[1])] = trajectory
    return found


def _page_call(
    path: str, environment: str | None, split: Split | None, after: int, limit: int
) -> Call:
    query = {"environment": environment, "split": split, "after": after, "limit": limit}
    given = {name: value for name, value in query.items() if value is not None}
    return Call("GET", f"{path}?{urlencode(given)}")
