"""Lists groups by what is known of them without their bodies: filtered, sorted, page by page."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
from sqlalchemy import ColumnElement, FromClause, Row, Select, or_, select
from sqlalchemy import text as sql_text
from sqlalchemy.ext.asyncio import AsyncConnection

from .cursors import after, cursor_of, read_cursor
from .facts import GroupFacts
from .groups import group_columns
from .rows import GroupRow
from .schema import SHARED, deliveries, group_facts, groups
from .states import GroupState

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
    """Which groups, in which order. None and "": no filter.

    Groups without facts (of older versions) do not match a filter of theirs, and are left out of
    the orders by reward.

    Args:
        after: number of a group: only those that arrived later.
        state: in the shared queue.
        spread_above: largest less smallest reward of the group.
        min_length, max_length: tokens of its longest row.
        flag, end: at least one of its rollouts has that flag, or ended so.
        text: part of its id or of its task's.
        found: numbers of further groups that have `text` elsewhere; of a SQLite database only.
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
    """A group of a list; `facts` is None for groups of older versions."""

    row: GroupRow
    facts: GroupFacts | None


class Page(msgspec.Struct, frozen=True):
    """Groups of a list, and the cursor of what follows ("" at the end)."""

    groups: list[ListedGroup]
    cursor: str


async def page_of(connection: AsyncConnection, query: GroupQuery, cursor: str, limit: int) -> Page:
    """Returns up to `limit` groups after `cursor` ("": the first ones).

    Groups that arrive meanwhile move nothing: each is on one page at most.
    Raises InputError: the cursor is not one of this order.
    """
    key, descends = _KEYS[query.order]
    number: ColumnElement[Any] = deliveries.c.seq
    by = [column for column in (key, number) if column is not None]
    statement = _selected(*by).where(*filters_of(query))
    if key is not None:
        statement = statement.where(key.is_not(None))
    if cursor:
        statement = statement.where(after(by, read_cursor(cursor, query.order, len(by)), descends))
    statement = statement.order_by(*(one.desc() if descends else one.asc() for one in by))
    found = (await connection.execute(statement.limit(limit))).all()
    following = cursor_of(query.order, found[-1][-len(by) :]) if len(found) == limit else ""
    return Page([_listed(row) for row in found], following)


def _selected(*by: ColumnElement[Any]) -> Select[Any]:
    columns = [*group_columns(), *group_facts.c, *(one.label(None) for one in by)]
    return select(*columns).select_from(joined_tables())


def joined_tables() -> FromClause:
    """Returns the tables that a filter is about, of which only groups have to be there."""
    both = deliveries.join(groups, deliveries.c.seq == groups.c.seq)
    return both.outerjoin(group_facts, _facts.seq == groups.c.seq)


def filters_of(query: GroupQuery) -> list[ColumnElement[bool]]:
    """Returns the conditions of `query` on the rows of `joined_tables`."""
    of = groups.c
    equal = [
        (of.env, query.environment),
        (_facts.task_id, query.task),
        (_facts.split, query.split),
        (_facts.model, query.model),
        (deliveries.c.state, query.state),
    ]
    at_least = [
        (_facts.reward_mean, query.min_reward),
        (of.policy_version, query.version_from),
        (of.max_length, query.min_length),
    ]
    at_most = [
        (_facts.reward_mean, query.max_reward),
        (of.policy_version, query.version_to),
        (of.max_length, query.max_length),
    ]
    wanted: list[ColumnElement[bool]] = [
        deliveries.c.queue == SHARED,
        deliveries.c.seq > query.after,
    ]
    wanted += [column == value for column, value in equal if value]
    wanted += [column >= value for column, value in at_least if value is not None]
    wanted += [column <= value for column, value in at_most if value is not None]
    if query.spread_above is not None:
        wanted.append(query.spread_above < _SPREAD)
    # In JSON a name is between quotation marks.
    if query.flag:
        wanted.append(_facts.flags.contains(_json(query.flag), autoescape=True))
    if query.end:
        wanted.append(_facts.ends.contains(f"{_json(query.end)}:", autoescape=True))
    if query.text:
        ids = (of.group_id, _facts.task_id)
        either = [one.contains(query.text, autoescape=True) for one in ids]
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
