"""Rollouts of tasks that the trainer names: the part of the client that asks for them.

In: task ids. Out: trajectories, in the same order. What holds: each task has as many places as were
asked for, and what was lost leaves its place empty.
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
from .records import decode_batch

_MOST_TASKS: Final = 1024
_NUMBER: Final = re.compile(r"-r(\d+)$")


class TaskSummary(msgspec.Struct, frozen=True):
    """A task without what scoring needs. `public`: what running a rollout of it needs."""

    task_id: str
    public: dict[str, Any]


class OnDemand(ABC):
    """The part of a client that orders rollouts."""

    @abstractmethod
    async def _send(self, call: Call) -> Answer:
        """The answer to `call`, asked again where that may help; raises what it says."""

    async def tasks(
        self, environment: str, *, split: Split | None = None, after: int = 0, limit: int = 100
    ) -> list[TaskSummary]:
        """The tasks of an environment in their order, without what scoring needs.

        Args:
            split: unset: the one that the server serves.
            after: so many are left out.
            limit: most of them.

        Raises:
            NotFoundError: the server has no such environment.
        """
        found: list[TaskSummary] = []
        following: int | None = after
        while following is not None and len(found) < limit:
            call = tasks_call(environment, split, following, limit - len(found))
            page = decode_tasks(await self._send(call))
            found += page.tasks
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
        """Rollouts of these tasks, made now: for each task, in this order, `group_size` of them.

        None stands for one that was lost by no fault of the model, after all its tries.

        Args:
            task_ids: at most 1024; one that is named several times gets several groups.
            split: in which they are; unset: the one that the server serves.
            key: asked again with the same key and tasks, the same rollouts come, as long as the
                server keeps them; unset: a new one.
            timeout_seconds: for all of them.

        Raises:
            NotFoundError: the server has no such environment or task.
            ServerUnreachable: they were not all made in time, or the server is gone.
        """
        if not task_ids:
            return []
        order = order_of(environment, task_ids, group_size, split, key, timeout_seconds)
        while True:
            found = rollouts_in(await self._send(order.call()), order)
            if found is not None:
                return found
            if not order.seconds_left():
                raise ServerUnreachable(
                    f"The rollouts were not all made within {timeout_seconds:g} s.",
                    hint="Give them more time; GET /v1/status says how the server fares.",
                )


@dataclass(frozen=True)
class Order:
    """Rollouts of tasks that are asked for, and for how long they are waited for."""

    environment: str
    task_ids: Sequence[str]
    group_size: int
    split: Split | None
    timeout_seconds: float
    key: str = ""
    begun_at: float = field(default_factory=time.monotonic)

    def seconds_left(self) -> float:
        return max(0.0, self.begun_at + self.timeout_seconds - time.monotonic())

    def call(self) -> Call:
        """The request for all of it; the same again waits on."""
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


def order_of(
    environment: str,
    task_ids: Sequence[str],
    group_size: int,
    split: Split | None,
    key: str | None,
    timeout_seconds: float,
) -> Order:
    """An order that begins now; without a `key` it gets one of its own."""
    return Order(environment, task_ids, group_size, split, timeout_seconds, key or uuid.uuid4().hex)


def rollouts_in(answer: Answer, order: Order) -> list[list[Trajectory | None]] | None:
    """All that was ordered, in its order; None: it is not made yet.

    Raises:
        InputError: the answer cannot be read.
    """
    if answer.status == 202:
        return None
    batch = decode_batch(answer.content)
    try:
        groups = [unpack(one.body, Group) for one in batch.groups]
    except msgspec.DecodeError as error:
        raise InputError(f"The server's answer is no groups: {error}.", place="body") from error
    if [group.task_id for group in groups] != list(order.task_ids):
        raise InputError("The server's answer is of other tasks than were named.", place="body")
    return [_by_number(group, order.group_size) for group in groups]


def _by_number(group: Group, size: int) -> list[Trajectory | None]:
    found: list[Trajectory | None] = [None] * size
    for trajectory in group.trajectories:
        number = _NUMBER.search(trajectory.rollout_id)
        if number is None or int(number[1]) >= size:
            raise InputError(f"{trajectory.rollout_id} has no number.", place=group.group_id)
        found[int(number[1])] = trajectory
    return found


def tasks_call(environment: str, split: Split | None, after: int, limit: int) -> Call:
    """The request for a page of tasks."""
    query: dict[str, Any] = {
        "environment": environment,
        "after": after,
        "limit": min(limit, _MOST_TASKS),
    }
    if split is not None:
        query["split"] = split
    return Call("GET", f"/v1/tasks?{urlencode(query)}")


class TaskPage(msgspec.Struct, frozen=True):
    """Some tasks; `next`: the `after` of the following page, None behind the last."""

    tasks: list[TaskSummary]
    next: int | None


def decode_tasks(answer: Answer) -> TaskPage:
    """Raises InputError: it is no page of tasks."""
    try:
        return msgspec.json.decode(answer.content, type=TaskPage)
    except msgspec.DecodeError as error:
        raise InputError(f"The server's answer is no list: {error}.", place="body") from error
