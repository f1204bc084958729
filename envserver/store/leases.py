"""The SQL of leases. A lease keeps its claim on its groups until another takes one of them.

Each function is one operation inside a transaction of the writer.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from sqlalchemy import insert, literal_column, select, update

from ..errors import ConflictError, NotFoundError
from .groups import advance, oldest_queued, rows_of
from .rows import GroupRow, Lease
from .runs import require_open
from .schema import leases
from .states import LeaseState, check_lease
from .transaction import Transaction


@dataclass(frozen=True)
class Wanted:
    """Which groups a lease is to hold: these, or else the `max_groups` oldest (None: all)."""

    max_groups: int | None
    group_ids: Sequence[str] | None


@dataclass(frozen=True)
class _Known:
    """A lease as the database has it."""

    lease_id: str
    state: LeaseState
    group_ids: list[str]


async def lease(tx: Transaction, run: str, wanted: Wanted, seconds: float) -> Lease | None:
    """Hands groups to `run`; what is overdue is taken back first. None when nothing is queued.

    Raises:
        NotFoundError: no such run or group.
        ConflictError: the run is closed, or a group is not queued.
    """
    await require_open(tx.connection, run)
    await expire(tx, tx.now)
    if wanted.group_ids is None:
        rows = await oldest_queued(tx.connection, wanted.max_groups)
    else:
        rows = await rows_of(tx.connection, wanted.group_ids)
    if not rows:
        return None
    lease_id = uuid.uuid4().hex
    expires_at = tx.now + seconds
    rows = await advance(tx, rows, "leased", "lease", lease_id=lease_id)
    await tx.connection.execute(
        insert(leases).values(
            lease_id=lease_id,
            run=run,
            group_ids=msgspec.json.encode([row.group_id for row in rows]).decode(),
            created_at=tx.now,
            expires_at=expires_at,
            state="open",
        )
    )
    return Lease(lease_id, run, expires_at, rows)


async def ack(tx: Transaction, lease_id: str) -> None:
    """The groups are done with for ever. Late is early enough while nobody else has taken them."""
    known = await _find(tx, lease_id)
    if known.state == "acked":
        return
    rows = await _resume(tx, known)
    await advance(tx, rows, "acked", "ack", lease_id=lease_id)
    await _set_state(tx, lease_id, "open", "acked")


async def nack(tx: Transaction, lease_id: str) -> None:
    """The groups go back to their places in the queue, and the lease loses its claim."""
    known = await _find(tx, lease_id)
    if known.state == "nacked":
        return
    rows = await _resume(tx, known)
    await advance(tx, rows, "queued", "give_back", lease_id=None)
    await _set_state(tx, lease_id, "open", "nacked")


async def extend(tx: Transaction, lease_id: str, seconds: float) -> float:
    """The lease ends `seconds` from now; an expired one with its claim is good again."""
    known = await _find(tx, lease_id)
    await _resume(tx, known)
    expires_at = tx.now + seconds
    change = update(leases).where(leases.c.lease_id == lease_id)
    await tx.connection.execute(change.values(expires_at=expires_at))
    return expires_at


async def expire(tx: Transaction, now: float) -> list[str]:
    """Queues again what overdue leases hold; their ids, soonest due first."""
    overdue = (
        select(leases.c.lease_id, leases.c.state, leases.c.group_ids)
        # Written out for the partial index, as in groups.
        .where(leases.c.state == literal_column("'open'"), leases.c.expires_at <= now)
        .order_by(leases.c.expires_at)
    )
    expired = []
    for row in (await tx.connection.execute(overdue)).all():
        known = _known(row.lease_id, row.state, row.group_ids)
        held = await rows_of(tx.connection, known.group_ids)
        # They keep the lease's id: it is what a late ack is recognised by.
        await advance(tx, held, "queued", "give_back", lease_id=known.lease_id)
        await _set_state(tx, known.lease_id, known.state, "expired")
        expired.append(known.lease_id)
    return expired


def _known(lease_id: str, state: LeaseState, group_ids: str) -> _Known:
    return _Known(lease_id, state, msgspec.json.decode(group_ids, type=list[str]))


async def _find(tx: Transaction, lease_id: str) -> _Known:
    query = select(leases.c.state, leases.c.group_ids).where(leases.c.lease_id == lease_id)
    row = (await tx.connection.execute(query)).one_or_none()
    if row is None:
        raise NotFoundError(f"There is no lease {lease_id}.", lease_id=lease_id)
    return _known(lease_id, row.state, row.group_ids)


async def _resume(tx: Transaction, known: _Known) -> list[GroupRow]:
    """The groups of a lease that is open, or that expired and still has its claim on all of them.

    Raises:
        ConflictError: it is at its end, or others have its groups.
    """
    if known.state != "open":
        check_lease(known.lease_id, known.state, "open")
    rows = await rows_of(tx.connection, known.group_ids)
    if known.state == "open":
        return rows
    lost = [r.group_id for r in rows if (r.state, r.lease_id) != ("queued", known.lease_id)]
    if lost:
        raise ConflictError(
            f"Lease {known.lease_id} expired, and {len(lost)} of its {len(rows)} groups"
            " were handed out again or dropped.",
            lease_id=known.lease_id,
            group_ids=lost,
        )
    await _set_state(tx, known.lease_id, known.state, "open")
    return await advance(tx, rows, "leased", "lease", lease_id=known.lease_id)


async def _set_state(
    tx: Transaction, lease_id: str, source: LeaseState, target: LeaseState
) -> None:
    check_lease(lease_id, source, target)
    change = update(leases).where(leases.c.lease_id == lease_id)
    await tx.connection.execute(change.values(state=target))
