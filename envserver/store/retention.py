"""What is removed when it was delivered long ago, in small transactions.

A group may go when it waits in no queue that anybody draws from, was acked or dropped in all others
before the limit, and no ack of it belongs to the time after the newest but one checkpoint of a run
that uses checkpoints: such a run can always go back to its two newest. What goes is the body and
the deliveries; the id stays known for ever, and what was delivered stays counted. A run that has
no checkpoint can take back what is still kept.

Nobody draws from the queue of a broadcast run that is closed, or from the shared one where there
are broadcast runs only: what waits there holds nothing back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from sqlalchemy import Row, and_, delete, insert, or_, select, update

from .checkpoints import last_but_one
from .groups import kept_rows
from .schema import SHARED, bodies, deliveries, gone, leases, runs
from .states import GroupState, check_group
from .transaction import Memory, Transaction

_GROUPS_AT_ONCE: Final = 64
_LEASES_AT_ONCE: Final = 64


@dataclass(frozen=True)
class Cursor:
    """Behind which row to go on."""

    at: float
    key: Any


@dataclass(frozen=True)
class Page:
    """What one transaction removed, and where to go on (None: that was the last)."""

    removed: int
    stored_bytes: int
    cursor: Cursor | None


async def remove_groups(
    tx: Transaction, *, before: float, over_bytes: int | None, cursor: Cursor | None
) -> Page:
    """Removes what was settled at `before` or earlier, oldest first.

    Args:
        over_bytes: only while the bodies of all groups take more than this; None: always.
    """
    of = deliveries.c
    where = [of.settled_at.is_not(None), of.settled_at <= before]
    if cursor is not None:
        later = and_(of.settled_at == cursor.at, of.seq > cursor.key)
        where.append(or_(of.settled_at > cursor.at, later))
    query = select(of.settled_at, of.seq).where(*where).order_by(of.settled_at, of.seq)
    found = (await tx.connection.execute(query.limit(_GROUPS_AT_ONCE))).all()
    if not found:
        return Page(0, 0, None)
    removable = await _removable(tx, [row.seq for row in found], before)
    chosen: dict[int, Sequence[Row[Any]]] = {}
    left = tx.memory.stored_bytes
    for seq, rows in removable.items():
        if over_bytes is not None and left <= over_bytes:
            break
        chosen[seq] = rows
        left -= rows[0].stored_bytes
    removed_bytes = tx.memory.stored_bytes - left
    await _remove(tx, chosen)
    is_last = len(found) < _GROUPS_AT_ONCE or (over_bytes is not None and left <= over_bytes)
    last = Cursor(found[-1].settled_at, found[-1].seq)
    return Page(len(chosen), removed_bytes, None if is_last else last)


async def _removable(
    tx: Transaction, seqs: Sequence[int], before: float
) -> dict[int, Sequence[Row[Any]]]:
    """All deliveries of those of these groups that nothing holds back, in this order."""
    of = deliveries.c
    queues = {SHARED, *(run.queue for run in tx.memory.runs.values())}
    acked_by = (leases.c.run, leases.c.ack_number)
    query = (
        select(deliveries, *acked_by)
        .select_from(deliveries.outerjoin(leases, leases.c.lease_id == of.lease_id))
        .where(of.queue.in_(sorted(queues)), of.seq.in_(seqs))
    )
    by_group: dict[int, list[Row[Any]]] = {seq: [] for seq in seqs}
    for row in await tx.connection.execute(query):
        by_group[row.seq].append(row)
    drawn_from = _drawn_from(tx.memory)
    can_go_back_to = await last_but_one(tx.connection)

    def may_go(row: Row[Any]) -> bool:
        if row.settled_at is None:
            return row.queue not in drawn_from and row.state == "queued"
        if row.state == "acked" and row.run in can_go_back_to:
            return bool(row.ack_number <= can_go_back_to[row.run] and row.settled_at <= before)
        return bool(row.settled_at <= before)

    return {seq: rows for seq, rows in by_group.items() if rows and all(map(may_go, rows))}


def _drawn_from(memory: Memory) -> set[str]:
    known = memory.runs.values()
    queues = {run.queue for run in known if run.state == "open"}
    if not known or any(run.delivery == "shared" for run in known):
        queues.add(SHARED)
    return queues


async def _remove(tx: Transaction, chosen: dict[int, Sequence[Row[Any]]]) -> None:
    if not chosen:
        return
    rows = [row for rows in chosen.values() for row in rows]
    of = deliveries.c
    await tx.connection.execute(delete(bodies).where(bodies.c.seq.in_(chosen)))
    await tx.connection.execute(
        delete(deliveries).where(of.queue.in_({row.queue for row in rows}), of.seq.in_(chosen))
    )
    counted: dict[tuple[str, str, GroupState], int] = {}
    last_acks: dict[str, int] = {}
    for row in rows:
        state: GroupState = row.state
        if row.settled_at is None:
            check_group(f"number {row.seq}", state, "dropped", "compact")
            tx.memory.tally(row.queue, row.env, state, -1)
            tx.memory.tally(row.queue, row.env, "dropped", 1)
            state = "dropped"
        key = (row.queue, row.env, state)
        counted[key] = counted.get(key, 0) + 1
        if row.ack_number is not None:
            last_acks[row.run] = max(last_acks.get(row.run, 0), row.ack_number)
    for (queue, env, state), count in counted.items():
        await _count_gone(tx, queue, env, state, count)
    for run, number in last_acks.items():
        change = update(runs).where(runs.c.name == run, runs.c.gone_ack_number < number)
        await tx.connection.execute(change.values(gone_ack_number=number))
    tx.memory.stored_bytes -= sum(rows[0].stored_bytes for rows in chosen.values())
    await tx.count("removed", len(chosen))


async def _count_gone(tx: Transaction, queue: str, env: str, state: GroupState, count: int) -> None:
    of = gone.c
    where = (of.queue == queue, of.env == env, of.state == state)
    change = update(gone).where(*where).values(removed=of.removed + count)
    if (await tx.connection.execute(change)).rowcount == 0:
        row = {"queue": queue, "env": env, "state": state, "removed": count}
        await tx.connection.execute(insert(gone).values(row))


async def remove_leases(tx: Transaction, *, before: float, cursor: Cursor | None) -> Page:
    """Removes leases that ended by `before`; acked ones when all their groups are gone."""
    of = leases.c
    where = [of.ended_at.is_not(None), of.ended_at <= before]
    if cursor is not None:
        later = and_(of.ended_at == cursor.at, of.lease_id > cursor.key)
        where.append(or_(of.ended_at > cursor.at, later))
    query = select(leases).where(*where).order_by(of.ended_at, of.lease_id)
    found = (await tx.connection.execute(query.limit(_LEASES_AT_ONCE))).all()
    removable = [row.lease_id for row in found if not await _is_needed(tx, row)]
    if removable:
        await tx.connection.execute(delete(leases).where(of.lease_id.in_(removable)))
    last = Cursor(found[-1].ended_at, found[-1].lease_id) if found else None
    return Page(len(removable), 0, last if len(found) == _LEASES_AT_ONCE else None)


async def _is_needed(tx: Transaction, row: Row[Any]) -> bool:
    """An acked lease says what its run acked, as long as that can be taken back."""
    if row.state != "acked":
        return False
    group_ids = msgspec.json.decode(row.group_ids, type=list[str])
    return bool(await kept_rows(tx.connection, group_ids, tx.memory.runs[row.run].queue))
