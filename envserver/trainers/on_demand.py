"""Makes rollouts of tasks that the caller names, in that order, and lists the tasks.

Repeating a request with the same key returns the same rollouts, even after the server was killed in
between. The hidden part of a task is never sent."""

from __future__ import annotations

import asyncio
import uuid
from typing import Annotated, Any, Final

from envserver_records.errors import ConflictError, InputError
from envserver_records.records import Split
from envserver_records.wire import GROUPS_MSGPACK
from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from ..http.answers import json_answer, route
from ..http.middleware import TooManyRequests
from ..http.requests import Hangup, key_of, read_body
from ..rollouts.ordered import GroupsOrder, Orders
from ..store import Lease, Store
from ..store.deliveries import DamagedBodies
from .bodies import LONGEST_WAIT_SECONDS, MOST_GROUPS, Body, LeaseAnswer, Name, TaskId
from .encoding import GroupEncoder
from .runs import lease_answer

_MOST_ROLLOUTS: Final = 16 * MOST_GROUPS
"""Maximum number of rollouts in progress, over all orders."""
_AGAIN_SECONDS: Final = 5.0
_MOST_TASKS: Final = 1024
_LAST_TASK: Final = 2**31


class RolloutsRequest(Body):
    """Rollouts to make."""

    environment: Name
    task_ids: list[TaskId] = Field(min_length=1, max_length=MOST_GROUPS)
    """Each entry gets its own group, even if a task is named several times."""
    group_size: int = Field(default=1, ge=1, le=MOST_GROUPS)
    """Rollouts per task."""
    split: Split | None = None
    """Split of the tasks; unset: the split that the server serves."""
    wait_seconds: float = Field(default=0.0, ge=0, le=LONGEST_WAIT_SECONDS)
    """Maximum time to wait for them."""


class RolloutsProgress(BaseModel):
    """Progress of the order; repeat the request with the same key to wait on."""

    groups_done: int
    groups: int


class TaskAnswer(BaseModel):
    task_id: str
    public: dict[str, Any]
    """The public part of the task: what running a rollout needs."""


class TasksAnswer(BaseModel):
    tasks: list[TaskAnswer]
    next: int | None
    """The `after` of the following page; null on the last page."""


def add_on_demand_routes(
    router: APIRouter, orders: Orders, store: Store, encoder: GroupEncoder
) -> None:
    @router.post(
        "/v1/rollouts",
        **route(
            LeaseAnswer,
            404,
            409,
            body=RolloutsRequest,
            media_types=(GROUPS_MSGPACK,),
            what="All of the groups.",
            also={202: {"model": RolloutsProgress, "description": "Not all of them are made yet."}},
        ),
    )
    async def order_rollouts(request: Request) -> Response:
        """Makes rollouts of the named tasks: one group per task, in this order (200).

        `{"environment": "math", "task_ids": ["a", "b"], "group_size": 4, "wait_seconds": 60}`.
        If they are not finished in time (202), repeat the request with the same `Idempotency-Key`
        to wait on; without a key, each request starts over. Groups are not filtered: a group
        lacks only rollouts that failed through no fault of the model, and the rollout ids
        (`...-r0`, `...-r1`) show which. An order that no request waits for is abandoned after ten
        minutes; finished rollouts are kept. The response has the form of a lease, but needs no
        acknowledgement."""
        wanted = await read_body(request, RolloutsRequest)
        order = _order_of(wanted, key_of(request) or uuid.uuid4().hex, orders)
        _require_room(orders, order)
        async with Hangup(request.receive) as hangup:
            waiting = asyncio.create_task(orders.wait(order, wanted.wait_seconds))
            await hangup.wait(waiting, seconds=wanted.wait_seconds + _AGAIN_SECONDS)
        done = waiting.result() if waiting.done() and not waiting.cancelled() else 0
        if done < len(order.task_ids):
            return json_answer({"groups_done": done, "groups": len(order.task_ids)}, 202)
        rows = await store.rows(order.group_ids())
        found = Lease(lease_id=order.key, run="", expires_at=0.0, groups=rows)
        try:
            return await lease_answer(found, encoder, request.headers)
        except DamagedBodies as damaged:
            await store.drop_damaged(damaged.reasons)
            raise ConflictError(
                damaged.message,
                hint="Order its task again with another Idempotency-Key.",
                group_ids=list(damaged.reasons),
            ) from damaged

    @router.get("/v1/tasks", **route(TasksAnswer, 404, 422, what="A page of tasks."))
    async def list_tasks(
        environment: Annotated[str, Query(description="name of the environment")],
        split: Annotated[Split | None, Query(description="default: the split served")] = None,
        after: Annotated[
            int, Query(ge=0, le=_LAST_TASK, description="number of tasks to skip")
        ] = 0,
        limit: Annotated[
            int, Query(ge=1, le=_MOST_TASKS, description="maximum number of tasks")
        ] = 100,
    ) -> Response:
        """Lists the tasks of an environment in order, without the hidden part that scoring uses.
        Only the first 100000 tasks of a split can be listed and named."""
        where = split or orders.environment(environment).config.split
        found = await orders.book(environment).after(where, after, limit)
        tasks = [{"task_id": task.id, "public": task.public} for task in found]
        following = after + len(found) if len(found) == limit else None
        return json_answer({"tasks": tasks, "next": following})


def _order_of(wanted: RolloutsRequest, key: str, orders: Orders) -> GroupsOrder:
    split = wanted.split or orders.environment(wanted.environment).config.split
    order = GroupsOrder(
        key=key,
        environment=wanted.environment,
        split=split,
        task_ids=tuple(wanted.task_ids),
        group_size=wanted.group_size,
    )
    if order.rollouts > _MOST_ROLLOUTS:
        raise InputError(
            f"{order.rollouts} rollouts are too many for one order.",
            hint=f"At most {_MOST_ROLLOUTS}.",
            place="task_ids",
        )
    return order


def _require_room(orders: Orders, order: GroupsOrder) -> None:
    if orders.is_open(order) or not orders.open_rollouts:
        return
    if orders.open_rollouts + order.rollouts > _MOST_ROLLOUTS:
        raise TooManyRequests(
            f"{orders.open_rollouts} ordered rollouts are in progress; wait until some are done.",
            _AGAIN_SECONDS,
        )
