"""Lists groups and sums them up by task, without their bodies: filtered, sorted, page by page."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from itertools import pairwise
from operator import eq, ge, gt, le
from typing import Any, Final, Literal

import msgspec
from envserver_records.errors import InputError
from sqlalchemy import (
    ColumnElement,
    Float,
    FromClause,
    Integer,
    Row,
    Select,
    and_,
    case,
    cast,
    func,
    or_,
    select,
)
from sqlalchemy import text as sql_text
from sqlalchemy.ext.asyncio import AsyncConnection

from .groups import group_columns
from .packed import GroupFacts
from .rows import GroupRow, GroupState
from .schema import SHARED, deliveries, group_facts, groups

# The last column of every order is a whole number that no two rows share.

_MOST_NUMBER: Final = 2**63


def after(by: list[ColumnElement[Any]], values: list[Any], descends: bool) -> ColumnElement[bool]:
    """Returns the condition that a row follows `values` in the order of the columns `by`."""
    either = []
    for position, column in enumerate(by):
        equal = [column == value for column, value in zip(by[:position], values, strict=False)]
        value = values[position]
        either.append(and_(*equal, column < value if descends else column > value))
    return or_(*either)


def cursor_of(order: str, values: Any) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(_Cursor(order, list(values)))).decode()


def read_cursor(cursor: str, order: str, count: int) -> list[float]:
    """Returns the values in a cursor of `order`, which has `count` columns."""
    try:
        made = msgspec.json.decode(base64.urlsafe_b64decode(cursor), type=_Cursor)
    except (binascii.Error, ValueError):
        made = _Cursor("", [])
    of_order = made.order == order and len(made.values) == count
    if not (of_order and 0 <= made.values[-1] < _MOST_NUMBER):
        raise InputError(
            f"The cursor {cursor[:80]!r} does not belong to the order {order!r}.",
            place="query.cursor",
            hint="Send the `cursor` of the previous page, with the same parameters.",
        )
    return [*made.values[:-1], int(made.values[-1])]


class _Cursor(msgspec.Struct, array_like=True):
    order: str
    values: list[float]


Order = Literal["newest", "oldest", "best", "worst", "widest", "longest"]
"""best, worst: by mean reward; widest: largest difference of rewards first; longest: by tokens of
the longest row."""

_facts = group_facts.c
_SPREAD: Final = _facts.reward_max - _facts.reward_min
_KEYS: Final[dict[str, tuple[ColumnElement[Any] | None, bool]]] = {
    "newest": (None, True),
    "oldest": (None, False),
    "best": (_facts.reward_mean, True),
    "worst": (_facts.reward_mean, False),
    "widest": (_SPREAD, True),
    "longest": (groups.c.max_length, True),
}
"""By order: what it sorts by before the arrival (None: nothing), and whether it descends."""


class GroupQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which groups, in which order. None and "": no filter. Groups without facts (of older
    versions) match no filter of theirs, and are left out of the orders by reward.

    Args:
        after: number of a group: only those that arrived later.
        state: in the shared queue.
        spread_above: largest less smallest reward of the group.
        min_length, max_length: tokens of its longest row.
        flag, end: at least one of its rollouts has that flag, or ended so.
        text: part of its id or of its task's.
        found: numbers of further groups that have `text` in their bodies; SQLite only.
    """

    order: Order = "oldest"
    after: int = 0
    environment: str = ""
    task: str = ""
    split: str = ""
    model: str = ""
    state: GroupState | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    spread_above: float | None = None
    version_from: int | None = None
    version_to: int | None = None
    min_length: int | None = None
    max_length: int | None = None
    flag: str = ""
    end: str = ""
    text: str = ""
    found: list[int] = []


class ListedGroup(msgspec.Struct, frozen=True):
    row: GroupRow
    facts: GroupFacts | None


class Page(msgspec.Struct, frozen=True):
    """Groups of a list, and the cursor of what follows ("" at the end)."""

    groups: list[ListedGroup]
    cursor: str


async def page_of(connection: AsyncConnection, query: GroupQuery, cursor: str, limit: int) -> Page:
    """Returns up to `limit` groups after `cursor` ("": the first ones). Groups that arrive
    meanwhile move nothing: each is on one page at most."""
    key, descends = _KEYS[query.order]
    number: ColumnElement[Any] = deliveries.c.seq
    by = [column for column in (key, number) if column is not None]
    selected = _selected(*by).where(*_filters_of(query))
    if key is not None:
        selected = selected.where(key.is_not(None))
    statement = _page(selected, by, descends, query.order, cursor)
    found = (await connection.execute(statement.limit(limit))).all()
    following = cursor_of(query.order, found[-1][-len(by) :]) if len(found) == limit else ""
    return Page([_listed(row) for row in found], following)


def _page(
    query: Select[Any], by: list[ColumnElement[Any]], descends: bool, order: str, cursor: str
) -> Select[Any]:
    """Returns `query` in the order of the columns `by`, after `cursor` ("": from the beginning)."""
    if cursor:
        query = query.where(after(by, read_cursor(cursor, order, len(by)), descends))
    return query.order_by(*(column.desc() if descends else column.asc() for column in by))


def _selected(*by: ColumnElement[Any]) -> Select[Any]:
    columns = [*group_columns(), *group_facts.c, *(column.label(None) for column in by)]
    return select(*columns).select_from(_joined_tables())


def _joined_tables() -> FromClause:
    both = deliveries.join(groups, deliveries.c.seq == groups.c.seq)
    return both.outerjoin(group_facts, _facts.seq == groups.c.seq)


def _filters_of(query: GroupQuery) -> list[ColumnElement[bool]]:
    """Returns the conditions of `query` on the rows of `_joined_tables`."""
    of = groups.c
    conditions: list[tuple[Callable[[Any, Any], Any], ColumnElement[Any], Any]] = [
        (eq, deliveries.c.queue, SHARED),
        (gt, deliveries.c.seq, query.after),
        (eq, of.env, query.environment),
        (eq, _facts.task_id, query.task),
        (eq, _facts.split, query.split),
        (eq, _facts.model, query.model),
        (eq, deliveries.c.state, query.state),
        (ge, _facts.reward_mean, query.min_reward),
        (ge, of.policy_version, query.version_from),
        (ge, of.max_length, query.min_length),
        (le, _facts.reward_mean, query.max_reward),
        (le, of.policy_version, query.version_to),
        (le, of.max_length, query.max_length),
        (gt, _SPREAD, query.spread_above),
    ]
    wanted: list[ColumnElement[bool]] = [
        compare(column, value) for compare, column, value in conditions if value not in (None, "")
    ]
    # In JSON a name is between quotation marks.
    if query.flag:
        wanted.append(_facts.flags.contains(_json(query.flag), autoescape=True))
    if query.end:
        wanted.append(_facts.ends.contains(f"{_json(query.end)}:", autoescape=True))
    if query.text:
        ids = (of.group_id, _facts.task_id)
        either = [column.contains(query.text, autoescape=True) for column in ids]
        if query.found:  # may be more than there can be parameters
            also = sql_text("SELECT value FROM json_each(:found)").bindparams(
                found=_json(query.found)
            )
            either.append(of.seq.in_(also))
        wanted.append(or_(*either))
    return wanted


def _listed(row: Row[Any]) -> ListedGroup:
    count = _GROUP_COLUMNS
    read = dict(zip(_FACTS, row[count : count + len(_FACTS)], strict=True))
    if read.pop("seq") is None:
        return ListedGroup(GroupRow(*row[:count]), None)
    del read["env"]  # as in the group
    for name, kind in _IN_JSON.items():
        read[name] = msgspec.json.decode(read[name], type=kind)
    return ListedGroup(GroupRow(*row[:count]), GroupFacts(**read))


_GROUP_COLUMNS: Final = len(group_columns())
_FACTS: Final = [column.name for column in group_facts.c]
_IN_JSON: Final[dict[str, Any]] = {
    "rewards": list[float | None],
    "flags": list[str],
    "ends": dict[str, int],
}


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


BINS: Final = 20


class RewardCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Groups by mean reward.

    Args:
        groups: all that match; `unscored` of them have no mean reward.
        low, high: ends of the bins: 0 and 1 if all means lie between, else the least and the
            greatest; None without a mean.
        counts: groups in each of `BINS` equal bins, which have their lower ends; the last has both.
    """

    groups: int
    unscored: int
    low: float | None
    high: float | None
    counts: list[int]


async def reward_counts(connection: AsyncConnection, query: GroupQuery) -> RewardCounts:
    """Counts the kept groups that `query` matches, in two passes over their facts."""
    mean = group_facts.c.reward_mean
    ends = func.count(), func.count(mean), func.min(mean), func.max(mean)
    found = select(*ends).select_from(_joined_tables()).where(*_filters_of(query))
    count, scored, least, greatest = (await connection.execute(found)).one()
    if not scored:
        return RewardCounts(groups=count, unscored=count, low=None, high=None, counts=[])
    low, high = (0.0, 1.0) if least >= 0 and greatest <= 1 else (least, greatest)
    # Rounded, because the bounds become a filter: 3 / 20 belongs to the bin that 0.15 begins.
    bounds = [float(f"{low + (high - low) * n / BINS:.9g}") for n in range(1, BINS)]
    above = [func.sum(cast(case((mean >= bound, 1), else_=0), Integer)) for bound in bounds]
    sums = select(*above).select_from(_joined_tables())
    scored_only = sums.where(mean.is_not(None), *_filters_of(query))
    at_least = [scored, *(await connection.execute(scored_only)).one(), 0]
    return RewardCounts(
        groups=count,
        unscored=count - scored,
        low=low,
        high=high,
        counts=[more - fewer for more, fewer in pairwise(at_least)],
    )


TaskOrder = Literal["newest", "best", "worst", "widest", "most"]
"""best, worst: by mean reward; widest: by spread; most: by number of groups."""


class SeenTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task and what its kept groups have in common, from one index of `group_facts`. Groups
    without a task (posts that do not name theirs, and groups of older versions) are left out.

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
    """Returns a page of tasks, as their kept groups show them."""
    found = _summed(environment, text).subquery()
    name, descends = _TASK_KEYS[order]
    names = [name, "last"] if name != "last" else ["last"]
    by: list[ColumnElement[Any]] = [found.c[name] for name in names]
    some = select(found).where(by[0].is_not(None))
    wanted = _page(some, by, descends, order, cursor)
    rows = (await connection.execute(wanted.limit(limit))).all()
    of = groups.c
    last = select(
        of.seq,
        of.group_id.label("last_group_id"),
        of.created_at.label("last_time"),
        of.policy_version.label("last_version"),
    ).where(of.seq.in_([row.last for row in rows]))
    last_groups = {row.seq: row._mapping for row in await connection.execute(last)}
    every = [{**row._mapping, **last_groups[row.last]} for row in rows]
    names_of_facts = SeenTask.__struct_fields__
    tasks = [SeenTask(**{name: facts[name] for name in names_of_facts}) for facts in every]
    following = ""
    if len(rows) == limit:
        following = cursor_of(order, [getattr(rows[-1], name) for name in names])
    return TasksPage(tasks, following)


_TASK_KEYS: Final[dict[str, tuple[str, bool]]] = {
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
