"""The SQL of task estimates. They are updated in the transaction that stores the groups.

What always holds: a stored group counts once, because it counts when it is stored. A group that was
scored and dropped counts once, because its id is kept. The arithmetic is in `rollouts.estimates`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
from envserver_records.records import Split
from sqlalchemy import bindparam, func, insert, literal_column, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ..rollouts.estimates import UNTRIED, Estimate, Scored, updated
from .prefixes import begins_with
from .schema import dropped_groups, estimates
from .statements import ListStatement, Statement
from .transaction import Transaction, chunks


class EstimateRow(msgspec.Struct, frozen=True, kw_only=True):
    """A stored estimate. `number` is the order in which tasks were first scored; `scored_at` is
    when this task was last scored."""

    number: int
    env: str
    split: Split
    task_id: str
    estimate: Estimate
    scored_at: float


async def count_stored(tx: Transaction, news: Iterable[Scored | None]) -> None:
    """Counts groups that this transaction stores; None belongs to no task."""
    by_stream: dict[tuple[str, Split], list[Scored]] = {}
    for one in news:
        if one is not None:
            by_stream.setdefault((one.env, one.split), []).append(one)
    for (env, split), of_stream in by_stream.items():
        await _count(tx, env, split, of_stream)


async def count_dropped(tx: Transaction, news: Sequence[Scored]) -> int:
    """Counts scored groups that are not stored, each id once; returns how many were new."""
    known = await counted_drops(tx.connection, [one.group_id for one in news])
    new = {one.group_id: one for one in news if one.group_id not in known}
    if new:
        await tx.connection.execute(
            insert(dropped_groups), [{"group_id": group_id} for group_id in new]
        )
        await count_stored(tx, new.values())
    return len(new)


async def _count(tx: Transaction, env: str, split: Split, news: Sequence[Scored]) -> None:
    """Updates and inserts estimates: two statements if all tasks are known or all are new, else
    three."""
    numbers: dict[str, int] = {}
    now: dict[str, Estimate] = {}
    task_ids = list({one.task_id for one in news})
    for number, task_id, *columns in await _FOUND.all(tx.connection, (env, split), task_ids):
        numbers[task_id], now[task_id] = number, Estimate(*columns)
    for one in news:
        now[one.task_id] = updated(now.get(one.task_id, UNTRIED), one, tx.discount)
    known, new = [], []
    for task_id, estimate in now.items():
        row = (*msgspec.structs.astuple(estimate), tx.now)
        if task_id in numbers:
            known.append((*row, numbers[task_id]))
        else:
            new.append((env, split, task_id, *row))
    if known:
        await _CHANGE.many(tx.connection, known)
    if new:
        await _ADD.many(tx.connection, new)


_COLUMNS: Final = ("attempts", "weight", "solved", "policy_version")
_CHANGED: Final = [*_COLUMNS, "scored_at"]
_ESTIMATE: Final = [estimates.c[name] for name in _COLUMNS]
_FOUND: Final = ListStatement(
    lambda ids: select(estimates.c.number, estimates.c.task_id, *_ESTIMATE).where(
        estimates.c.env == bindparam("of_env"),
        estimates.c.split == bindparam("of_split"),
        estimates.c.task_id.in_(ids),
    ),
    ["of_env", "of_split"],
)
_CHANGE: Final = Statement(
    update(estimates)
    .where(estimates.c.number == bindparam("of_number"))
    .values({name: bindparam(name) for name in _CHANGED}),
    [*_CHANGED, "of_number"],
)
_last: Final = estimates.alias("last")
# Written out: values of its own would be parameters.
_NEXT_NUMBER: Final = func.coalesce(func.max(_last.c.number), literal_column("0")) + literal_column(
    "1"
)
_ADD: Final = Statement(
    insert(estimates).values(number=select(_NEXT_NUMBER).scalar_subquery()),
    ["env", "split", "task_id", *_CHANGED],
)


def _row(row: Any) -> EstimateRow:
    return EstimateRow(
        number=row.number,
        env=row.env,
        split=row.split,
        task_id=row.task_id,
        estimate=Estimate(row.attempts, row.weight, row.solved, row.policy_version),
        scored_at=row.scored_at,
    )


async def estimates_of(
    connection: AsyncConnection, env: str, split: Split, task_ids: Sequence[str]
) -> dict[str, Estimate]:
    """Returns the estimates by task id, for those of these tasks that were ever scored."""
    rows = await _FOUND.all(connection, (env, split), task_ids)
    return {task_id: Estimate(*columns) for _, task_id, *columns in rows}


async def estimates_after(
    connection: AsyncConnection, number: int, limit: int, env: str | None, split: Split | None
) -> list[EstimateRow]:
    """Returns up to `limit` estimates after `number`, in the order in which tasks were first
    scored."""
    query = select(estimates).where(estimates.c.number > number)
    if env is not None:
        query = query.where(estimates.c.env == env)
    if split is not None:
        query = query.where(estimates.c.split == split)
    query = query.order_by(estimates.c.number).limit(limit)
    return [_row(row) for row in await connection.execute(query)]


async def counted_drops(connection: AsyncConnection, group_ids: Sequence[str]) -> set[str]:
    """Returns those of these groups that were scored and counted, but not stored."""
    found: set[str] = set()
    for part in chunks(group_ids):
        query = select(dropped_groups.c.group_id).where(dropped_groups.c.group_id.in_(part))
        found.update((await connection.execute(query)).scalars())
    return found


async def count_drops_with_prefix(connection: AsyncConnection, prefix: str) -> int:
    """Counts the scored groups whose id begins with `prefix` that were not stored."""
    begins = begins_with(dropped_groups.c.group_id, prefix, connection.dialect)
    count = await connection.execute(select(func.count()).select_from(dropped_groups).where(begins))
    return int(count.scalar_one())
