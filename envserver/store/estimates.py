"""The SQL of task estimates: counted with the groups, in their transaction.

What holds: a stored group counts once, for it counts when it is stored; a group that was scored and
dropped counts once, for its id is kept, too. The arithmetic is `rollouts.estimates`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
from sqlalchemy import bindparam, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ..records import Split
from ..rollouts.estimates import UNTRIED, Estimate, Scored, updated
from .schema import dropped_groups, estimates
from .transaction import Transaction, chunks


class EstimateRow(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate that is kept. `number`: order in which tasks were first scored; `scored_at`: when
    this one was last."""

    number: int
    env: str
    split: Split
    task_id: str
    estimate: Estimate
    scored_at: float


async def count_stored(tx: Transaction, news: Iterable[Scored | None]) -> None:
    """Counts groups that this transaction stores; None says nothing of any task."""
    by_stream: dict[tuple[str, Split], list[Scored]] = {}
    for one in news:
        if one is not None:
            by_stream.setdefault((one.env, one.split), []).append(one)
    for (env, split), of_stream in by_stream.items():
        await _count(tx, env, split, of_stream)


async def count_dropped(tx: Transaction, news: Sequence[Scored]) -> int:
    """Counts groups that were scored and are not stored, each id once; how many were new."""
    known = await counted_drops(tx.connection, [one.group_id for one in news])
    new = {one.group_id: one for one in news if one.group_id not in known}
    if new:
        await tx.connection.execute(
            insert(dropped_groups), [{"group_id": group_id} for group_id in new]
        )
        await count_stored(tx, new.values())
    return len(new)


async def _count(tx: Transaction, env: str, split: Split, news: Sequence[Scored]) -> None:
    numbers: dict[str, int] = {}
    now: dict[str, Estimate] = {}
    for row in await _rows_of(tx.connection, env, split, list({one.task_id for one in news})):
        numbers[row.task_id], now[row.task_id] = row.number, row.estimate
    for one in news:
        now[one.task_id] = updated(now.get(one.task_id, UNTRIED), one, tx.discount)
    new = [task_id for task_id in now if task_id not in numbers]
    if new:
        last = await tx.connection.scalar(select(func.max(estimates.c.number))) or 0
        names = {"env": env, "split": split}
        await tx.connection.execute(
            insert(estimates),
            [
                {"number": number, "task_id": task_id, **names, **_columns(now[task_id], tx.now)}
                for number, task_id in enumerate(new, last + 1)
            ],
        )
    if numbers:
        change = update(estimates).where(estimates.c.number == bindparam("of"))
        await tx.connection.execute(
            change.values({name: bindparam(name) for name in _COLUMNS}),
            [{"of": number, **_columns(now[of], tx.now)} for of, number in numbers.items()],
        )


_COLUMNS: Final = ("attempts", "weight", "solved", "policy_version", "scored_at")


def _columns(estimate: Estimate, now: float) -> dict[str, Any]:
    return {**msgspec.structs.asdict(estimate), "scored_at": now}


def _row(row: Any) -> EstimateRow:
    return EstimateRow(
        number=row.number,
        env=row.env,
        split=row.split,
        task_id=row.task_id,
        estimate=Estimate(
            attempts=row.attempts,
            weight=row.weight,
            solved=row.solved,
            policy_version=row.policy_version,
        ),
        scored_at=row.scored_at,
    )


async def _rows_of(
    connection: AsyncConnection, env: str, split: Split, task_ids: Sequence[str]
) -> list[EstimateRow]:
    found = []
    of_stream = (estimates.c.env == env) & (estimates.c.split == split)
    for part in chunks(task_ids):
        query = select(estimates).where(of_stream, estimates.c.task_id.in_(part))
        found += [_row(row) for row in await connection.execute(query)]
    return found


async def estimates_of(
    connection: AsyncConnection, env: str, split: Split, task_ids: Sequence[str]
) -> dict[str, Estimate]:
    """By task, of those of these tasks that were ever scored."""
    rows = await _rows_of(connection, env, split, task_ids)
    return {row.task_id: row.estimate for row in rows}


async def estimates_after(
    connection: AsyncConnection, number: int, limit: int, env: str | None, split: Split | None
) -> list[EstimateRow]:
    """Up to `limit` estimates behind `number`, in the order in which tasks were first scored."""
    query = select(estimates).where(estimates.c.number > number)
    if env is not None:
        query = query.where(estimates.c.env == env)
    if split is not None:
        query = query.where(estimates.c.split == split)
    query = query.order_by(estimates.c.number).limit(limit)
    return [_row(row) for row in await connection.execute(query)]


async def counted_drops(connection: AsyncConnection, group_ids: Sequence[str]) -> set[str]:
    """Those of these groups that were scored, counted and not stored."""
    found: set[str] = set()
    for part in chunks(group_ids):
        query = select(dropped_groups.c.group_id).where(dropped_groups.c.group_id.in_(part))
        found.update((await connection.execute(query)).scalars())
    return found


async def count_drops_with_prefix(connection: AsyncConnection, prefix: str) -> int:
    """How many groups whose id begins with `prefix` were scored, counted and not stored."""
    is_like = func.substr(dropped_groups.c.group_id, 1, len(prefix)) == prefix
    count = await connection.execute(
        select(func.count()).select_from(dropped_groups).where(is_like)
    )
    return int(count.scalar_one())
