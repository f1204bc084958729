"""Removes groups that were delivered long ago, in small transactions.

A group may be removed when:
    - it waits in no queue that a run draws from,
    - it was acked or dropped in all other queues before the time limit, and
    - no run acked it after its last checkpoint but one. So a run with checkpoints can always rewind
      to its two newest; a run without any can rewind as far as groups are kept.

The body and the deliveries are removed. The id is kept for ever, and counts still include the
group.

No run draws from the queue of a closed broadcast run, nor from the shared queue if all runs are
broadcast runs: groups that wait there may be removed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Final

import msgspec
from sqlalchemy import ColumnElement, Row, delete, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from .groups import kept_rows
from .leases import last_but_one
from .rows import Compacted, GroupState, check_group
from .schema import SHARED, bodies, deliveries, gone, group_facts, leases, runs
from .transaction import Memory, Transaction
from .writer import Writer

_READ_AT_ONCE: Final = 400
_REMOVED_AT_ONCE: Final = 64
_EMPTY: Final = Compacted(0, 0, 0)
Reading = Callable[[], AbstractAsyncContextManager[AsyncConnection]]


async def compact(
    writer: Writer, reading: Reading, *, now: float, acked_hours: float, max_bytes: int | None
) -> Compacted:
    """Removes groups that were settled `acked_hours` ago. While all bodies take more than
    `max_bytes` (None: no limit), removes groups that were settled later, oldest first."""
    before = now - acked_hours * 3600
    old = await _remove_groups(writer, reading, before, None)
    over = _EMPTY if max_bytes is None else await _remove_groups(writer, reading, now, max_bytes)
    return _sum(old, over, await _remove_leases(writer, reading, before))


def _sum(*parts: Compacted) -> Compacted:
    return Compacted(*map(sum, zip(*map(msgspec.structs.astuple, parts), strict=True)))


async def _remove_groups(
    writer: Writer, reading: Reading, before: float, over_bytes: int | None
) -> Compacted:
    removed = _EMPTY
    of = deliveries.c
    oldest = select(of.settled_at, of.seq).order_by(of.settled_at, of.seq).limit(_READ_AT_ONCE)
    last: tuple[float, int] | None = None
    while over_bytes is None or writer.memory.stored_bytes > over_bytes:
        page = oldest.where(*_settled(of.settled_at, of.seq, before, last))
        async with reading() as connection:
            found = (await connection.execute(page)).all()
            seqs = [row.seq for row in found]
            removable = list(await _removable(connection, writer.memory, seqs, before))
        for start in range(0, len(removable), _REMOVED_AT_ONCE):
            part = removable[start : start + _REMOVED_AT_ONCE]
            remove = partial(_remove_some, seqs=part, before=before, over_bytes=over_bytes)
            removed = _sum(removed, await writer.do(remove))
        if len(found) < _READ_AT_ONCE:
            break
        last = (found[-1].settled_at, found[-1].seq)
    return removed


def _settled(
    at: ColumnElement[float], key: ColumnElement[Any], before: float, last: tuple[float, Any] | None
) -> list[ColumnElement[bool]]:
    """Returns conditions: settled by `before`, and after `last` in the order of `at` and `key`."""
    where = [at.is_not(None), at <= before]
    if last is not None:
        where += [at >= last[0], or_(at > last[0], key > last[1])]
    return where


async def _remove_some(
    tx: Transaction, seqs: Sequence[int], before: float, over_bytes: int | None
) -> Compacted:
    """Removes those of these groups that may be removed, checked again in this transaction."""
    chosen: dict[int, Sequence[Row[Any]]] = {}
    left = tx.memory.stored_bytes
    for seq, rows in (await _removable(tx.connection, tx.memory, seqs, before)).items():
        if over_bytes is not None and left <= over_bytes:
            break
        chosen[seq] = rows
        left -= rows[0].stored_bytes
    size_bytes = tx.memory.stored_bytes - left
    await _remove(tx, chosen)
    return Compacted(len(chosen), size_bytes, 0)


async def _removable(
    connection: AsyncConnection, memory: Memory, seqs: Sequence[int], before: float
) -> dict[int, Sequence[Row[Any]]]:
    of = deliveries.c
    queues = {SHARED, *(run.queue for run in memory.runs.values())}
    acked_by = (leases.c.run, leases.c.ack_number)
    query = (
        select(deliveries, *acked_by)
        .select_from(deliveries.outerjoin(leases, leases.c.lease_id == of.lease_id))
        .where(of.queue.in_(sorted(queues)), of.seq.in_(seqs))
    )
    by_group: dict[int, list[Row[Any]]] = {seq: [] for seq in seqs}
    for row in await connection.execute(query):
        by_group[row.seq].append(row)
    drawn_from = memory.drawn_from()
    can_go_back_to = await last_but_one(connection)

    def may_go(row: Row[Any]) -> bool:
        if row.settled_at is None:
            return row.queue not in drawn_from and row.state == "queued"
        if row.state == "acked" and row.run in can_go_back_to:
            return bool(row.ack_number <= can_go_back_to[row.run] and row.settled_at <= before)
        return bool(row.settled_at <= before)

    return {seq: rows for seq, rows in by_group.items() if rows and all(map(may_go, rows))}


async def _remove(tx: Transaction, chosen: dict[int, Sequence[Row[Any]]]) -> None:
    if not chosen:
        return
    rows = [row for rows in chosen.values() for row in rows]
    of = deliveries.c
    await tx.connection.execute(delete(bodies).where(bodies.c.seq.in_(chosen)))
    await tx.connection.execute(delete(group_facts).where(group_facts.c.seq.in_(chosen)))
    await tx.connection.execute(
        delete(deliveries).where(of.queue.in_({row.queue for row in rows}), of.seq.in_(chosen))
    )
    counted = Counter[tuple[str, str, GroupState]]()
    last_acks: dict[str, int] = {}
    for row in rows:
        state: GroupState = row.state
        if row.settled_at is None:
            check_group(f"number {row.seq}", state, "dropped", "compact")
            tx.memory.tally(row.queue, row.env, state, -1)
            tx.memory.tally(row.queue, row.env, "dropped", 1)
            state = "dropped"
        counted[row.queue, row.env, state] += 1
        if row.ack_number is not None:
            last_acks[row.run] = max(last_acks.get(row.run, 0), row.ack_number)
    for (queue, env, state), count in counted.items():
        where = (gone.c.queue == queue, gone.c.env == env, gone.c.state == state)
        change = update(gone).where(*where).values(removed=gone.c.removed + count)
        if (await tx.connection.execute(change)).rowcount == 0:
            kind = {"queue": queue, "env": env, "state": state, "removed": count}
            await tx.connection.execute(insert(gone).values(kind))
    for run, number in last_acks.items():
        later = update(runs).where(runs.c.name == run, runs.c.gone_ack_number < number)
        await tx.connection.execute(later.values(gone_ack_number=number))
    tx.memory.stored_bytes -= sum(rows[0].stored_bytes for rows in chosen.values())
    await tx.count("removed", len(chosen))


async def _remove_leases(writer: Writer, reading: Reading, before: float) -> Compacted:
    """Removes leases that ended by `before`; acked ones stay until all their groups are removed,
    because a rewind needs them."""
    removed = _EMPTY
    of = leases.c
    oldest = select(leases).order_by(of.ended_at, of.lease_id).limit(_READ_AT_ONCE)
    last: tuple[float, str] | None = None
    while True:
        page = oldest.where(*_settled(of.ended_at, of.lease_id, before, last))
        async with reading() as connection:
            found = (await connection.execute(page)).all()
            needed = await _needed(connection, writer.memory, found)
        removable = [row.lease_id for row in found if row.lease_id not in needed]
        if removable:
            remove = partial(_remove_ended, lease_ids=removable, before=before)
            removed = _sum(removed, await writer.do(remove))
        if len(found) < _READ_AT_ONCE:
            return removed
        last = (found[-1].ended_at, found[-1].lease_id)


async def _needed(
    connection: AsyncConnection, memory: Memory, found: Sequence[Row[Any]]
) -> set[str]:
    needed: set[str] = set()
    for queue in {memory.runs[row.run].queue for row in found}:
        held = {
            row.lease_id: msgspec.json.decode(row.group_ids, type=list[str])
            for row in found
            if row.state == "acked" and memory.runs[row.run].queue == queue
        }
        all_ids = [group_id for group_ids in held.values() for group_id in group_ids]
        kept = await kept_rows(connection, all_ids, queue)
        needed |= {lease_id for lease_id, group_ids in held.items() if kept.keys() & set(group_ids)}
    return needed


async def _remove_ended(tx: Transaction, lease_ids: Sequence[str], before: float) -> Compacted:
    of = leases.c
    where = (of.lease_id.in_(lease_ids), of.ended_at <= before)
    done = await tx.connection.execute(delete(leases).where(*where))
    return Compacted(0, 0, done.rowcount)
