"""Sums up kept groups by task: how often it was tried, with which rewards, when last.

Read from one index of `group_facts`, without bodies. Groups without a task (posts that do not name
theirs, and groups of older versions) are left out.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
from sqlalchemy import ColumnElement, Float, Select, and_, case, cast, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from .cursors import after, cursor_of, read_cursor
from .schema import group_facts, groups

TaskOrder = Literal["newest", "best", "worst", "widest", "most"]
"""best, worst: by mean reward; widest: by spread; most: by number of groups."""


class SeenTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task and what its kept groups have in common.

    Args:
        groups, rollouts: number of its groups, and of their rollouts with a reward.
        reward_mean: of these rollouts; None without any.
        spread: mean over its groups of the largest less the smallest reward.
        solved_share: share of the rollouts that solved it; None if unknown.
        last_group_id, last_time, last_version: of its last group.
    """

    environment: str
    task_id: str
    groups: int
    rollouts: int
    reward_mean: float | None
    spread: float | None
    solved_share: float | None
    last_group_id: str
    last_time: float
    last_version: int


class TasksPage(msgspec.Struct, frozen=True):
    """Tasks of a list, and the cursor of what follows ("" at the end)."""

    tasks: list[SeenTask]
    cursor: str


async def seen_tasks(
    connection: AsyncConnection,
    order: TaskOrder,
    cursor: str,
    limit: int,
    *,
    environment: str = "",
    text: str = "",
) -> TasksPage:
    """Returns up to `limit` tasks after `cursor` ("": the first ones).

    A task whose groups arrive meanwhile moves, so it may be on two pages or on none.

    Args:
        text: part of the task's id.

    Raises:
        InputError: the cursor is not one of this order.
    """
    found = _summed(environment, text).subquery()
    name, descends = _KEYS[order]
    names = [name, "last"] if name != "last" else ["last"]
    by: list[ColumnElement[Any]] = [found.c[one] for one in names]
    wanted = select(found).where(by[0].is_not(None))
    if cursor:
        wanted = wanted.where(after(by, read_cursor(cursor, order, len(by)), descends))
    wanted = wanted.order_by(*(one.desc() if descends else one.asc() for one in by)).limit(limit)
    rows = (await connection.execute(wanted)).all()
    numbers = [row.last for row in rows]
    last = select(groups.c.seq, groups.c.group_id, groups.c.created_at, groups.c.policy_version)
    last_groups = {
        seq: facts
        for seq, *facts in await connection.execute(last.where(groups.c.seq.in_(numbers)))
    }
    tasks = [SeenTask(**_facts(row), **_last(last_groups[row.last])) for row in rows]
    following = ""
    if len(rows) == limit:
        following = cursor_of(order, [getattr(rows[-1], one) for one in names])
    return TasksPage(tasks, following)


_KEYS: Final[dict[str, tuple[str, bool]]] = {
    "newest": ("last", True),
    "best": ("reward_mean", True),
    "worst": ("reward_mean", False),
    "widest": ("spread", True),
    "most": ("groups", True),
}
"""By order: what it sorts by before the last group, and whether it descends."""


def _summed(environment: str, text: str) -> Select[Any]:
    of = group_facts.c
    known = case((of.solved.is_not(None), of.rated))
    where = [of.task_id != ""]
    if environment:
        where.append(of.env == environment)
    if text:
        where.append(of.task_id.contains(text, autoescape=True))
    return (
        select(
            of.env.label("environment"),
            of.task_id,
            func.count().label("groups"),
            cast(func.sum(of.rated), group_facts.c.rated.type).label("rollouts"),
            (func.sum(of.reward_mean * of.rated) / _share_of(of.rated)).label("reward_mean"),
            func.avg(of.reward_max - of.reward_min).label("spread"),
            (cast(func.sum(of.solved), Float) / _share_of(known)).label("solved_share"),
            func.max(of.seq).label("last"),
        )
        .where(and_(*where))
        .group_by(of.env, of.task_id)
    )


def _share_of(numbers: ColumnElement[Any]) -> ColumnElement[Any]:
    """Returns the sum to divide by; NULL where it is 0."""
    return func.nullif(cast(func.sum(numbers), Float), 0.0)


def _facts(row: Any) -> dict[str, Any]:
    found = dict(row._mapping)
    del found["last"]
    return found


def _last(facts: list[Any]) -> dict[str, Any]:
    group_id, created_at, version = facts
    return {"last_group_id": group_id, "last_time": created_at, "last_version": version}
