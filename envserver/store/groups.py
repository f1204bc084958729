"""The SQL of groups: putting, finding, changing their state. Transactions are begun elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import structlog
from sqlalchemy import func, insert, literal_column, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ..errors import InputError, NotFoundError
from . import compression
from .rows import GroupPut, GroupRow
from .schema import bodies, groups
from .states import FIRST_STATES, GroupEvent, GroupState, check_group
from .transaction import Transaction, chunks

log = structlog.get_logger(__name__)

# Written out, not bound: SQLite takes a partial index only when it can read the condition.
_QUEUED: Final = groups.c.state == literal_column("'queued'")
_BUFFERED: Final = groups.c.state == literal_column("'buffered'")


@dataclass(frozen=True)
class EncodedPut:
    """A group to be put and its body as it is to lie in the database."""

    put: GroupPut
    encoding: int
    stored: bytes


def encode_puts(puts: Sequence[GroupPut]) -> list[EncodedPut]:
    """Checks and compresses; CPU work for a thread.

    Raises:
        InputError: a group's first state is not one in which it may be put, or it has no id.
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
    """Stores those whose id is new, the first of each; True where it was stored."""
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
        if first != item.put.body:
            tx.memory.conflicting_puts += 1
            log.warning("put_with_another_body", group_id=group_id, env=item.put.env)
    if new:
        await _insert(tx, list(new.values()))
    return accepted


async def seqs_of(connection: AsyncConnection, group_ids: Sequence[str]) -> dict[str, int]:
    """`seq` by id, of those that exist."""
    found: dict[str, int] = {}
    for part in chunks(group_ids):
        query = select(groups.c.group_id, groups.c.seq).where(groups.c.group_id.in_(part))
        found.update((group_id, seq) for group_id, seq in await connection.execute(query))
    return found


async def _body(connection: AsyncConnection, seq: int) -> bytes:
    query = select(bodies.c.encoding, bodies.c.body).where(bodies.c.seq == seq)
    encoding, stored = (await connection.execute(query)).one()
    return compression.decode(encoding, stored)


async def _insert(tx: Transaction, items: Sequence[EncodedPut]) -> None:
    start = tx.memory.next_seq
    metas = [_meta(start + index, item.put, tx.now) for index, item in enumerate(items)]
    raws = [
        {"seq": start + index, "encoding": item.encoding, "body": item.stored}
        for index, item in enumerate(items)
    ]
    await tx.connection.execute(insert(groups), metas)
    await tx.connection.execute(insert(bodies), raws)
    tx.memory.next_seq += len(items)
    for item in items:
        tx.memory.counts[item.put.state] += 1


def _meta(seq: int, put: GroupPut, now: float) -> dict[str, Any]:
    fields = {name: getattr(put, name) for name in put.__struct_fields__ if name != "body"}
    return {**fields, "seq": seq, "created_at": now, "lease_id": None}


async def pending(connection: AsyncConnection) -> list[GroupRow]:
    """All queued and buffered groups, in order of arrival."""
    rows: list[GroupRow] = []
    for waiting in (_QUEUED, _BUFFERED):
        query = select(groups).where(waiting).order_by(groups.c.seq)
        rows += [GroupRow(*row) for row in await connection.execute(query)]
    return sorted(rows, key=lambda row: row.seq)


async def arrived_after(connection: AsyncConnection, seq: int, limit: int) -> list[GroupRow]:
    """Up to `limit` groups of any state that arrived after the one numbered `seq`, in order."""
    query = select(groups).where(groups.c.seq > seq).order_by(groups.c.seq).limit(limit)
    return [GroupRow(*row) for row in await connection.execute(query)]


async def count_with_prefix(connection: AsyncConnection, prefix: str) -> int:
    """How many groups were ever stored whose id begins with `prefix`."""
    is_like = groups.c.group_id.startswith(prefix, autoescape=True)
    count = await connection.execute(select(func.count()).where(is_like))
    return int(count.scalar_one())


async def oldest_queued(connection: AsyncConnection, limit: int | None) -> list[GroupRow]:
    """Up to `limit` queued groups (None: all), in order of arrival."""
    query = select(groups).where(_QUEUED).order_by(groups.c.seq).limit(limit)
    return [GroupRow(*row) for row in await connection.execute(query)]


async def rows_of(connection: AsyncConnection, group_ids: Sequence[str]) -> list[GroupRow]:
    """The groups with these ids, in this order, each once.

    Raises:
        NotFoundError: one does not exist.
    """
    wanted = list(dict.fromkeys(group_ids))
    found: dict[str, GroupRow] = {}
    for part in chunks(wanted):
        for row in await connection.execute(select(groups).where(groups.c.group_id.in_(part))):
            found[row.group_id] = GroupRow(*row)
    _require(wanted, found)
    return [found[group_id] for group_id in wanted]


async def stored_bodies(
    connection: AsyncConnection, group_ids: Sequence[str]
) -> list[tuple[int, bytes]]:
    """Encoding and stored bytes of each group, in the order of `group_ids`.

    Raises:
        NotFoundError: one does not exist.
    """
    found: dict[str, tuple[int, bytes]] = {}
    both = select(groups.c.group_id, bodies.c.encoding, bodies.c.body).join_from(
        groups, bodies, groups.c.seq == bodies.c.seq
    )
    for part in chunks(list(dict.fromkeys(group_ids))):
        for row in await connection.execute(both.where(groups.c.group_id.in_(part))):
            found[row.group_id] = (row.encoding, row.body)
    _require(group_ids, found)
    return [found[group_id] for group_id in group_ids]


def _require(wanted: Sequence[str], found: dict[str, Any]) -> None:
    for group_id in wanted:
        if group_id not in found:
            raise NotFoundError(f"There is no group {group_id}.", group_id=group_id)


async def advance(
    tx: Transaction,
    rows: Sequence[GroupRow],
    target: GroupState,
    event: GroupEvent,
    *,
    lease_id: str | None,
) -> list[GroupRow]:
    """Takes `rows`, as they are in the database now, to `target`, all or none.

    Raises:
        ConflictError: the table of transitions forbids it for one of them.
    """
    for row in rows:
        check_group(row.group_id, row.state, target, event)
    for part in chunks([row.seq for row in rows]):
        change = update(groups).where(groups.c.seq.in_(part))
        await tx.connection.execute(change.values(state=target, lease_id=lease_id))
    tx.memory.move(rows, target)
    return [msgspec.structs.replace(row, state=target, lease_id=lease_id) for row in rows]


async def move(tx: Transaction, group_ids: Sequence[str], target: GroupState) -> None:
    """Takes groups that wait to `target`: from buffered to queued, from either to dropped.

    Raises:
        NotFoundError: one does not exist. ConflictError: one is in a state that forbids it.
    """
    await advance(tx, await rows_of(tx.connection, group_ids), target, "move", lease_id=None)
