"""The SQL of groups: inserting and finding them. The caller begins the transactions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog
from envserver_records.errors import InputError, NotFoundError
from sqlalchemy import Column, Select, func, literal_column, select
from sqlalchemy.ext.asyncio import AsyncConnection

from . import compression
from .estimates import count_stored
from .facts import facts_row
from .prefixes import begins_with
from .rows import GroupPut, GroupRow
from .schema import SHARED, bodies, deliveries, group_facts, groups
from .statements import ListStatement, insert_into
from .states import FIRST_STATES, SETTLED
from .transaction import Transaction, chunks

log = structlog.get_logger(__name__)

# Written out, not bound: SQLite takes a partial index only when it can read the condition.
QUEUED: Final = deliveries.c.state == literal_column("'queued'")
_BUFFERED: Final = deliveries.c.state == literal_column("'buffered'")
_named: Final = groups.alias("named")


@dataclass(frozen=True)
class EncodedPut:
    """A group to be put, with its body encoded for the database."""

    put: GroupPut
    encoding: int
    stored: bytes


def encode_puts(puts: Sequence[GroupPut]) -> list[EncodedPut]:
    """Checks groups and compresses their bodies. CPU work: run it in a thread.
    Raises InputError: a group has no id, or may not be put in its state.
    """
    for index, put in enumerate(puts):
        if put.state not in FIRST_STATES:
            raise InputError(
                f"A group cannot be put as {put.state}.", place=f"groups[{index}].state"
            )
        if not put.group_id:
            raise InputError("A group needs an id.", place=f"groups[{index}].group_id")
    return [EncodedPut(put, *compression.encode(put.body)) for put in puts]


async def put_all(tx: Transaction, puts: Sequence[EncodedPut]) -> list[bool]:
    """Stores the groups whose id is new; returns for each whether it was stored."""
    known = await seqs_of(tx.connection, list({item.put.group_id for item in puts}))
    new: dict[str, EncodedPut] = {}
    accepted: list[bool] = []
    for item in puts:
        group_id = item.put.group_id
        is_new = group_id not in known and group_id not in new
        accepted.append(is_new)
        if is_new:
            new[group_id] = item
            continue
        first = new[group_id].put.body if group_id in new else None
        if first is None:
            first = await _body(tx.connection, known[group_id])
        if first is not None and first != item.put.body:
            tx.memory.conflicting_puts += 1
            log.warning("group_put_again_with_other_content", group_id=group_id, env=item.put.env)
    if new:
        await _insert(tx, list(new.values()))
        await count_stored(tx, [item.put.scored for item in new.values()])
    return accepted


async def seqs_of(connection: AsyncConnection, group_ids: Sequence[str]) -> dict[str, int]:
    """Returns `seq` by id, for those groups that were ever stored."""
    return {row[0]: row[1] for row in await _SEQS.all(connection, (), group_ids)}


_SEQS: Final = ListStatement(
    lambda ids: select(groups.c.group_id, groups.c.seq).where(groups.c.group_id.in_(ids)), []
)


async def _body(connection: AsyncConnection, seq: int) -> bytes | None:
    """Returns the stored body, or None if it is no longer kept or damaged."""
    query = select(bodies.c.encoding, bodies.c.body).where(bodies.c.seq == seq)
    row = (await connection.execute(query)).one_or_none()
    try:
        return None if row is None else compression.decode(row.encoding, row.body)
    except compression.DamagedBody as error:
        log.error("stored_body_is_damaged", seq=seq, error=str(error))
        return None


async def _insert(tx: Transaction, items: Sequence[EncodedPut]) -> None:
    numbered = list(enumerate(items, tx.memory.next_seq))
    tx.memory.next_seq += len(items)
    await _into_groups.many(
        tx.connection, [_group(seq, item.put, tx.now) for seq, item in numbered]
    )
    facts = [
        facts_row(seq, item.put.env, item.put.facts) for seq, item in numbered if item.put.facts
    ]
    if facts:
        await _into_facts.many(tx.connection, facts)
    await _into_bodies.many(
        tx.connection, [(seq, item.encoding, item.stored) for seq, item in numbered]
    )
    tx.memory.stored_bytes += sum(len(item.stored) for item in items)
    queues = tx.memory.fan_out()
    rows = []
    for seq, item in numbered:
        state = item.put.state
        # Buffered groups are in the shared queue only; `move` adds them to the others.
        for queue in (SHARED, *queues) if state == "queued" else (SHARED,):
            rows.append(_delivery(queue, seq, item, tx.now))
            tx.memory.tally(queue, item.put.env, state, 1)
        if state == "queued":
            tx.memory.queued(seq, item.put.policy_version)
    await _into_deliveries.many(tx.connection, rows)


# Rows are tuples in the order of the table's columns.
_into_groups: Final = insert_into(groups)
_into_bodies: Final = insert_into(bodies)
_into_facts: Final = insert_into(group_facts)
_into_deliveries: Final = insert_into(deliveries)


def _group(seq: int, put: GroupPut, now: float) -> tuple[object, ...]:
    return (
        seq,
        put.group_id,
        put.env,
        put.format,
        put.size,
        put.tokens,
        put.max_length,
        put.policy_version,
        put.env_id,
        now,
    )


def _delivery(queue: str, seq: int, item: EncodedPut, now: float) -> tuple[object, ...]:
    put = item.put
    lease_id, settled_at = None, now if put.state in SETTLED else None
    stored_bytes = len(item.stored)
    return (
        queue,
        seq,
        put.env,
        put.policy_version,
        stored_bytes,
        put.state,
        lease_id,
        settled_at,
    )


def rows_in(queue: str) -> Select[Any]:
    """Selects all groups of a queue, with the columns of a `GroupRow` in order."""
    both = deliveries.join(groups, deliveries.c.seq == groups.c.seq)
    return select(*group_columns()).select_from(both).where(deliveries.c.queue == queue)


def group_columns() -> list[Column[Any]]:
    """Returns the columns of a `GroupRow` in order, of `groups` and `deliveries`."""
    of_group = groups.c
    return [
        of_group.seq,
        of_group.group_id,
        of_group.env,
        of_group.format,
        of_group.size,
        of_group.tokens,
        of_group.max_length,
        of_group.policy_version,
        of_group.env_id,
        deliveries.c.state,
        deliveries.c.lease_id,
        of_group.created_at,
    ]


async def pending(connection: AsyncConnection) -> list[GroupRow]:
    """Returns all queued and buffered groups of the shared queue, in order of arrival."""
    rows: list[GroupRow] = []
    for waiting in (QUEUED, _BUFFERED):
        query = rows_in(SHARED).where(waiting).order_by(deliveries.c.seq)
        rows += [GroupRow(*row) for row in await connection.execute(query)]
    return sorted(rows, key=lambda row: row.seq)


async def arrived_after(connection: AsyncConnection, seq: int, limit: int) -> list[GroupRow]:
    """Returns up to `limit` kept groups that arrived after number `seq`, in order."""
    after = deliveries.c.seq > seq
    query = rows_in(SHARED).where(after).order_by(deliveries.c.seq).limit(limit)
    return [GroupRow(*row) for row in await connection.execute(query)]


async def count_with_prefix(connection: AsyncConnection, prefix: str) -> int:
    """Counts the groups ever stored whose id begins with `prefix`."""
    begins = begins_with(groups.c.group_id, prefix, connection.dialect)
    count = await connection.execute(select(func.count()).select_from(groups).where(begins))
    return int(count.scalar_one())


async def rows_of(
    connection: AsyncConnection, group_ids: Sequence[str], queue: str = SHARED
) -> list[GroupRow]:
    """Returns the groups of a queue with these ids, in order, each once.
    Raises NotFoundError: a group does not exist or is no longer kept.
    """
    wanted = list(dict.fromkeys(group_ids))
    found = await kept_rows(connection, wanted, queue)
    await _require(connection, wanted, found)
    return [found[group_id] for group_id in wanted]


async def kept_rows(
    connection: AsyncConnection, group_ids: Sequence[str], queue: str
) -> dict[str, GroupRow]:
    """Returns by id those of these groups that are kept in a queue."""
    found: dict[str, GroupRow] = {}
    for part in chunks(group_ids):
        # Select by seq: otherwise SQLite may scan every delivery of the queue.
        numbers = select(_named.c.seq).where(_named.c.group_id.in_(part))
        query = rows_in(queue).where(deliveries.c.seq.in_(numbers))
        found.update((row.group_id, GroupRow(*row)) for row in await connection.execute(query))
    return found


async def stored_bodies(
    connection: AsyncConnection, group_ids: Sequence[str]
) -> list[tuple[int, bytes]]:
    """Returns encoding and stored bytes of each group, in the order of `group_ids`.
    Raises NotFoundError: a group does not exist or is no longer kept.
    """
    found: dict[str, tuple[int, bytes]] = {}
    both = select(groups.c.group_id, bodies.c.encoding, bodies.c.body).join_from(
        groups, bodies, groups.c.seq == bodies.c.seq
    )
    for part in chunks(list(dict.fromkeys(group_ids))):
        for row in await connection.execute(both.where(groups.c.group_id.in_(part))):
            found[row.group_id] = (row.encoding, row.body)
    await _require(connection, group_ids, found)
    return [found[group_id] for group_id in group_ids]


async def _require(
    connection: AsyncConnection, wanted: Sequence[str], found: dict[str, Any]
) -> None:
    missing = [group_id for group_id in wanted if group_id not in found]
    if not missing:
        return
    first = missing[0]
    if await seqs_of(connection, [first]):
        raise NotFoundError(
            f"Group {first} is no longer kept: it was delivered long ago.",
            hint="See --retention.acked_hours.",
            group_id=first,
        )
    raise NotFoundError(f"There is no group {first}.", group_id=first)
