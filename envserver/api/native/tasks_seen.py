"""GET /v1/tasks/seen: the tasks of kept groups, with their rewards."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Query
from starlette.responses import Response

from ...described import Described
from ...store.interface import ReadGroups
from ...store.tasks_seen import TaskOrder
from .answers import answers, json_answer
from .models import MOST_GROUPS, TaskId

_PLAIN: Final = r"^[^\x00]*$"


class SeenTask(Described):
    environment: str
    task_id: str
    groups: int
    """Number of its kept groups."""
    rollouts: int
    """Number of their rollouts with a reward."""
    reward_mean: float | None
    """Mean reward of these rollouts; null if there are none."""
    spread: float | None
    """Mean over its groups of the largest less the smallest reward."""
    solved_share: float | None
    """Share of the rollouts that solved it; null: unknown."""
    last_group_id: str
    last_time: float
    """Seconds since 1970 at which its last group arrived."""
    last_version: int
    """Policy version of its last group; -1: unknown."""


class SeenTasksAnswer(Described):
    tasks: list[SeenTask]
    cursor: str
    """Leads to the next page with the same parameters; "" on the last one."""


def add_task_routes(router: APIRouter, store: ReadGroups) -> None:
    @router.get("/v1/tasks/seen", responses=answers(SeenTasksAnswer, 422, what="A page of tasks."))
    async def list_seen_tasks(
        environment: Annotated[
            str, Query(max_length=1024, pattern=_PLAIN, description="only this environment")
        ] = "",
        text: Annotated[TaskId, Query(description="part of the task's id")] = "",
        order: Annotated[
            TaskOrder,
            Query(description="best, worst: by mean reward; widest: spread; most: groups"),
        ] = "newest",
        cursor: Annotated[
            str, Query(max_length=1024, pattern=_PLAIN, description="of the page before")
        ] = "",
        limit: Annotated[int, Query(ge=1, le=MOST_GROUPS, description="maximum number")] = 100,
    ) -> Response:
        """Lists the tasks of kept groups with what their groups have in common. `GET /v1/groups`
        with `environment` and `task` has a task's groups. Tasks without a reward are left out of
        the orders by reward and spread.
        """
        page = await store.seen_tasks(order, cursor, limit, environment=environment, text=text)
        return json_answer(msgspec.to_builtins(page))
