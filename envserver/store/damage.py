"""Drops groups whose bodies cannot be read, and keeps the reasons.

In: the ids that a reader found damaged, with the reasons. Out: the groups are dropped from every
queue, so that they are never offered again; the other groups of their leases stay leased. What
holds: a damaged group is counted once (`damaged`), its reason is kept for ever, and its body is
kept as long as that of any dropped group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import structlog
from envserver_records.errors import StoreError
from sqlalchemy import delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from . import compression
from .deliveries import advance
from .groups import kept_rows, seqs_of
from .rows import DamagedGroup, GroupRow
from .schema import SHARED, damaged, groups, leases
from .states import SETTLED
from .transaction import Transaction, chunks

log = structlog.get_logger(__name__)

_REASON_CHARACTERS: Final = 200


class DamagedBodies(StoreError):
    """Stored bodies cannot be read. `reasons`: by group id."""

    kind = "damaged_body"

    def __init__(self, reasons: Mapping[str, str]) -> None:
        first = next(iter(reasons))
        super().__init__(
            f"The stored bodies of {len(reasons)} groups are damaged; {first}: {reasons[first]}."
            if len(reasons) > 1
            else f"The stored body of group {first} is damaged: {reasons[first]}.",
            hint="The disk, or a program that wrote to the store's files, damaged it; make the"
            " group again.",
            group_ids=list(reasons),
        )
        self.reasons = dict(reasons)


def decode_all(group_ids: Sequence[str], stored: Sequence[tuple[int, bytes]]) -> list[bytes]:
    """Decodes the bodies of these groups. CPU work: run it in a thread.
    Raises DamagedBodies: some are damaged; it names all of them.
    """
    bodies: list[bytes] = []
    reasons: dict[str, str] = {}
    for group_id, (encoding, data) in zip(group_ids, stored, strict=True):
        try:
            bodies.append(compression.decode(encoding, data))
        except compression.DamagedBody as error:
            reasons[group_id] = str(error)
    if reasons:
        raise DamagedBodies(reasons)
    return bodies


async def drop_damaged(tx: Transaction, reasons: Mapping[str, str], undo: str | None) -> list[str]:
    """Drops groups from every queue in which they wait or are leased.

    Args:
        reasons: by group id; unknown ids are ignored.
        undo: an open lease that no client has received; it is removed as if it had never existed.

    Returns:
        The ids that were not known to be damaged.
    """
    ids = list(reasons)
    numbers = await seqs_of(tx.connection, ids)
    for queue in sorted({SHARED, *(run.queue for run in tx.memory.runs.values())}):
        rows = [
            row
            for row in (await kept_rows(tx.connection, ids, queue)).values()
            if row.state not in SETTLED
        ]
        await _leave_leases(tx, rows)
        await advance(tx, queue, rows, "dropped", "drop_damaged", lease_id=None)
    if undo is not None:
        await _undo(tx, undo)
    known = {numbers[one]: (one, reasons[one]) for one in ids if one in numbers}
    return await _keep_reasons(tx, known)


async def _leave_leases(tx: Transaction, rows: Sequence[GroupRow]) -> None:
    """Removes groups from the leases that hold or held them."""
    lost: dict[str, set[str]] = {}
    for row in rows:
        if row.lease_id is not None:
            lost.setdefault(row.lease_id, set()).add(row.group_id)
    for part in chunks(list(lost)):
        query = select(leases.c.lease_id, leases.c.group_ids).where(leases.c.lease_id.in_(part))
        for lease_id, text in (await tx.connection.execute(query)).all():
            held = msgspec.json.decode(text, type=list[str])
            left = [group_id for group_id in held if group_id not in lost[lease_id]]
            change = update(leases).where(leases.c.lease_id == lease_id)
            await tx.connection.execute(change.values(group_ids=msgspec.json.encode(left).decode()))


async def _undo(tx: Transaction, lease_id: str) -> None:
    """Queues the groups of an open lease again and deletes the lease, which no client has
    received.
    """
    query = select(leases).where(leases.c.lease_id == lease_id, leases.c.state == "open")
    row = (await tx.connection.execute(query)).one_or_none()
    if row is None:  # it expired meanwhile
        return
    queue = tx.memory.runs[row.run].queue
    held = await kept_rows(tx.connection, msgspec.json.decode(row.group_ids), queue)
    await advance(tx, queue, list(held.values()), "queued", "give_back", lease_id=None)
    await tx.connection.execute(delete(leases).where(leases.c.lease_id == lease_id))


async def _keep_reasons(tx: Transaction, found: Mapping[int, tuple[str, str]]) -> list[str]:
    known: set[int] = set()
    for part in chunks(list(found)):
        query = select(damaged.c.seq).where(damaged.c.seq.in_(part))
        known |= set((await tx.connection.execute(query)).scalars())
    new = {seq: (one, why[:_REASON_CHARACTERS]) for seq, (one, why) in found.items()}
    new = {seq: facts for seq, facts in new.items() if seq not in known}
    if not new:
        return []
    rows = [{"seq": seq, "reason": why, "found_at": tx.now} for seq, (_, why) in new.items()]
    await tx.connection.execute(insert(damaged), rows)
    await tx.count("damaged", len(new))
    for group_id, why in new.values():
        log.error("stored_body_is_damaged", group_id=group_id, reason=why)
    return [group_id for group_id, _ in new.values()]


async def list_damaged(connection: AsyncConnection, limit: int) -> list[DamagedGroup]:
    """Returns the damaged groups, latest found first."""
    query = (
        select(groups.c.group_id, damaged.c.reason, damaged.c.found_at)
        .join_from(damaged, groups, damaged.c.seq == groups.c.seq)
        .order_by(damaged.c.found_at.desc(), damaged.c.seq.desc())
        .limit(limit)
    )
    return [DamagedGroup(*row) for row in await connection.execute(query)]
