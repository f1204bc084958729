"""The SQL of runs, their leases and checkpoints, and of small values; `Store` describes what has
its names. An expired lease keeps its claim until one of its groups is leased again."""

from __future__ import annotations

import math
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec
from envserver_records.errors import ConflictError, InputError, NotFoundError
from sqlalchemy import ColumnElement, delete, func, insert, literal_column, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from .deliveries import GroupSelection, advance, choose, fill, keep_only, listed_ids
from .groups import kept_rows, rows_of
from .rows import (
    Checkpoint,
    Delivery,
    GroupRow,
    Lease,
    LeaseEvent,
    LeaseState,
    Run,
    check_lease,
)
from .schema import checkpoints, history, leases, runs, values
from .transaction import KnownRun, Transaction, known_run, queue_of, run_of

_REASON_CHARACTERS = 80
_MOST_REASONS = 64
"""Trainers choose reasons freely: this many are counted separately, all others together."""


class LeaseFacts(msgspec.Struct, frozen=True):
    """A lease in any state, without its groups' rows."""

    lease_id: str
    run: str
    state: LeaseState
    expires_at: float
    ack_number: int | None
    group_ids: list[str]


async def _found(connection: AsyncConnection, *conditions: ColumnElement[bool]) -> list[LeaseFacts]:
    """Returns the leases that match, soonest due first."""
    of = leases.c
    columns = (of.lease_id, of.run, of.state, of.expires_at, of.ack_number, of.group_ids)
    query = select(*columns).where(*conditions).order_by(of.expires_at)
    return [
        LeaseFacts(*row[:-1], listed_ids(row.group_ids))
        for row in (await connection.execute(query)).all()
    ]


# Written out for the partial index, as in groups.py.
_IS_OPEN: Final = leases.c.state == literal_column("'open'")
_IS_EXPIRED: Final = leases.c.state == literal_column("'expired'")


async def find_lease(connection: AsyncConnection, lease_id: str) -> LeaseFacts:
    found = await _found(connection, leases.c.lease_id == lease_id)
    if not found:
        raise NotFoundError(f"There is no lease {lease_id}.", lease_id=lease_id)
    return found[0]


async def open_leases(connection: AsyncConnection, run: str) -> list[LeaseFacts]:
    """Returns a run's open leases, soonest due first."""
    return await _found(connection, _IS_OPEN, leases.c.run == run)


async def _held(tx: Transaction, lease: LeaseFacts) -> list[GroupRow]:
    return await rows_of(tx.connection, lease.group_ids, _queue(tx, lease))


def _queue(tx: Transaction, lease: LeaseFacts) -> str:
    return tx.memory.runs[lease.run].queue


async def lease(
    tx: Transaction,
    run: str,
    wanted: GroupSelection | Sequence[str],
    seconds: float,
    lease_id: str | None = None,
) -> Lease | None:
    known = require_open(tx, run)
    await expire(tx)
    if lease_id is not None and (again := await _again(tx, run, lease_id)) is not None:
        return again
    if isinstance(wanted, GroupSelection):
        rows = await choose(tx, known.queue, wanted.of(known.environments))
    else:
        rows = await rows_of(tx.connection, wanted, known.queue)
        for row in rows:
            if known.environments and row.env not in known.environments:
                raise ConflictError(
                    f"Group {row.group_id} is of environment {row.env}, which the run {run} does"
                    " not take.",
                    group_id=row.group_id,
                    state=row.state,
                )
    if not rows:
        tx.memory.hungry[run] = (
            wanted.min_groups if isinstance(wanted, GroupSelection) else len(wanted)
        )
        tx.memory.activity += 1
        return None
    tx.memory.hungry.pop(run, None)
    lease_id = lease_id or uuid.uuid4().hex
    expires_at = tx.now + seconds
    rows = await advance(tx, known.queue, rows, "leased", "lease", lease_id=lease_id)
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


async def _again(tx: Transaction, run: str, lease_id: str) -> Lease | None:
    """Returns the lease of this id if it exists: a client that asks again has lost the first
    answer."""
    found = await _found(tx.connection, leases.c.lease_id == lease_id)
    if not found:
        return None
    facts = found[0]
    if facts.run != run or facts.state != "open":
        raise ConflictError(
            f"The lease {lease_id} has ended, or belongs to a run other than {run}.",
            lease_id=lease_id,
        )
    return Lease(lease_id, run, facts.expires_at, await _held(tx, facts))


async def ack(tx: Transaction, lease_id: str, *, checkpoint: str | None = None) -> None:
    """Acknowledges a lease: its groups are delivered. Repeating it has no effect. A late ack
    counts as long as none of the groups was leased again; ConflictError after that, and if the
    lease was given back or its run closed or rewound.

    Args:
        checkpoint: name of the checkpoint that holds this and all earlier acks of the run, to
            which the run can `rewind`. A name that is used again moves.
    """
    known = await find_lease(tx.connection, lease_id)
    number = known.ack_number
    if known.state != "acked":
        rows = await _resume(tx, known)
        await advance(tx, _queue(tx, known), rows, "acked", "ack", lease_id=lease_id)
        number = tx.memory.next_ack
        tx.memory.next_ack += 1
        await _set_state(tx, lease_id, "open", "acked", "ack", ack_number=number)
        await add_acked(tx, known.run, len(rows))
    if checkpoint is not None and number is not None:
        await mark(tx, known.run, checkpoint, number)


async def nack(tx: Transaction, lease_id: str, *, reason: str = "") -> None:
    """Gives a lease back: its groups are queued again in their old places. Repeating it has no
    effect. `counters` has the reason as `nacked: REASON`. Raises as `ack`."""
    known = await find_lease(tx.connection, lease_id)
    if known.state == "nacked":
        return
    rows = await _resume(tx, known)
    await advance(tx, _queue(tx, known), rows, "queued", "give_back", lease_id=None)
    await _set_state(tx, lease_id, "open", "nacked", "nack")
    await _count(tx, "nacked", reason, 1)


async def set_aside(
    tx: Transaction, lease_id: str, group_ids: Sequence[str], *, reason: str
) -> None:
    """Permanently drops some groups of a lease from the queue of its run; the lease keeps the
    others. Repeating it has no effect. `counters` has the reason as `set_aside: REASON`. Raises
    as `ack`, and ConflictError if the lease does not hold a group."""
    known = await find_lease(tx.connection, lease_id)
    rows = await rows_of(tx.connection, group_ids, _queue(tx, known))
    done = {r.group_id for r in rows if (r.state, r.lease_id) == ("dropped", lease_id)}
    wanted = {row.group_id for row in rows} - done
    if others := wanted - set(known.group_ids):
        raise ConflictError(
            f"Lease {lease_id} does not hold the group {min(others)}.",
            lease_id=lease_id,
            group_ids=sorted(others),
        )
    if not wanted:
        return
    held = await _resume(tx, known)
    chosen = [row for row in held if row.group_id in wanted]
    await advance(tx, _queue(tx, known), chosen, "dropped", "set_aside", lease_id=lease_id)
    left = [group_id for group_id in known.group_ids if group_id not in wanted]
    await keep_only(tx, lease_id, left)
    await _count(tx, "set_aside", reason, len(chosen))


async def _count(tx: Transaction, event: str, reason: str, more: int) -> None:
    name = f"{event}: {reason[:_REASON_CHARACTERS]}" if reason else event
    named = sum(counter.startswith(f"{event}: ") for counter in tx.memory.counters)
    if reason and name not in tx.memory.counters and named >= _MOST_REASONS:
        name = f"{event}: other"
    await tx.count(name, more)


async def extend(tx: Transaction, lease_id: str, seconds: float) -> float:
    """Lets a lease expire `seconds` from now; returns that time. Raises as `ack`, and
    ConflictError if the lease was acked."""
    check_seconds(seconds)
    known = await find_lease(tx.connection, lease_id)
    await _resume(tx, known)
    expires_at = tx.now + seconds
    change = update(leases).where(leases.c.lease_id == lease_id)
    await tx.connection.execute(change.values(expires_at=expires_at))
    return expires_at


async def expire(tx: Transaction, now: float | None = None) -> list[str]:
    """Queues the groups of leases that are due at `now` (None: the current time) again; returns
    the ids of these leases."""
    due = tx.now if now is None else now
    expired = []
    for known in await _found(tx.connection, _IS_OPEN, leases.c.expires_at <= due):
        held = await _held(tx, known)
        # The groups keep the lease's id, by which a late ack is recognised.
        await advance(tx, _queue(tx, known), held, "queued", "give_back", lease_id=known.lease_id)
        await _set_state(tx, known.lease_id, known.state, "expired", "expire")
        expired.append(known.lease_id)
    if expired:
        await tx.count("expired", len(expired))
    return expired


async def revoke_held(tx: Transaction, run: str, event: LeaseEvent) -> None:
    """Queues the groups of the run's open leases again and revokes its open and expired leases."""
    for condition in (_IS_OPEN, _IS_EXPIRED):
        for known in await _found(tx.connection, condition, leases.c.run == run):
            if known.state == "open":
                held = await _held(tx, known)
                await advance(tx, _queue(tx, known), held, "queued", "give_back", lease_id=None)
            await _set_state(tx, known.lease_id, known.state, "revoked", event)


async def _take_back_acked(tx: Transaction, run: str, after_ack: int) -> list[str]:
    """Queues the groups again, in their old order, that the run acked after this ack and that are
    still kept; returns their ids. The leases are revoked."""
    rows: list[GroupRow] = []
    acked = 0
    later = (leases.c.run == run, leases.c.ack_number > after_ack)
    for known in await _found(tx.connection, *later):
        kept = await kept_rows(tx.connection, known.group_ids, _queue(tx, known))
        rows += kept.values()
        acked += len(known.group_ids)
        await _set_state(tx, known.lease_id, known.state, "revoked", "rewind")
    rows.sort(key=lambda row: row.seq)
    if rows:
        queue = tx.memory.runs[run].queue
        await advance(tx, queue, rows, "queued", "rewind", lease_id=None)
    await add_acked(tx, run, -acked)
    return [row.group_id for row in rows]


async def _resume(tx: Transaction, known: LeaseFacts) -> list[GroupRow]:
    """Returns the groups of a lease that is open, or expired with its claim on all of them."""
    if known.state != "open":
        check_lease(known.lease_id, known.state, "open", "resume")
    rows = await _held(tx, known)
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
    await _set_state(tx, known.lease_id, known.state, "open", "resume")
    return await advance(tx, _queue(tx, known), rows, "leased", "lease", lease_id=known.lease_id)


async def _set_state(
    tx: Transaction,
    lease_id: str,
    source: LeaseState,
    target: LeaseState,
    event: LeaseEvent,
    *,
    ack_number: int | None = None,
) -> None:
    check_lease(lease_id, source, target, event)
    ended_at = None if target == "open" else tx.now
    await tx.connection.execute(
        update(leases)
        .where(leases.c.lease_id == lease_id)
        .values(state=target, ack_number=ack_number, ended_at=ended_at)
    )


def check_seconds(seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds > 0):
        raise InputError("seconds must be a number above 0.", place="seconds")


async def close_run(tx: Transaction, name: str) -> Run:
    """Closes a run and gives its leases back. `create_run` opens it again; a broadcast run then
    gets what arrived meanwhile and is still kept."""
    if require_known(tx, name).state == "open":
        await revoke_held(tx, name, "close")
    return await mark_closed(tx, name)


async def rewind(tx: Transaction, run: str, checkpoint: str | None) -> list[str]:
    """Takes a run back to a checkpoint (None: its start) and queues again what it acked since;
    returns these groups' ids, oldest first. Its open leases are given back, and its earlier
    leases can no longer be acked. ConflictError, and nothing changes, if such groups are no
    longer kept."""
    require_known(tx, run)
    after = 0 if checkpoint is None else await require_whole(tx, run, checkpoint)
    await revoke_held(tx, run, "rewind")
    taken_back = await _take_back_acked(tx, run, after)
    of = checkpoints.c
    await tx.connection.execute(delete(checkpoints).where(of.run == run, of.ack_number > after))
    if taken_back:
        await tx.count("rewound", len(taken_back))
    return taken_back


class LeasedGroup(msgspec.Struct, frozen=True):
    """A group in an open lease. Times are seconds since 1970; ages are by the store's clock."""

    group_id: str
    environment: str
    leased_at: float
    age_seconds: float
    expires_in_seconds: float


async def leased_rows(
    connection: AsyncConnection, run: str, queue: str, limit: int
) -> tuple[Sequence[Any], int]:
    """Returns (group id, environment, leased at, expires at) of `limit` leased groups of a run,
    oldest lease first, and the number of all."""
    query = select(leases).where(_IS_OPEN, leases.c.run == run).order_by(leases.c.created_at)
    named = [
        (group_id, row.created_at, row.expires_at)
        for row in await connection.execute(query)
        for group_id in listed_ids(row.group_ids)
    ]
    shown = named[:limit]
    rows = await kept_rows(connection, [row[0] for row in shown], queue)
    return [(name, rows[name].env, *times) for name, *times in shown if name in rows], len(named)


def to_json(value: Any, place: str) -> str:
    """Returns `value` as JSON text. Raises InputError: it is not JSON-like."""
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InputError(f"{place} is not JSON-like ({error}).", place=place) from error


async def create_run(
    tx: Transaction,
    name: str,
    batch_size: int,
    settings: str,
    delivery: Delivery,
    environments: Sequence[str],
) -> Run:
    """Creates a run, or returns the run of this name if its settings are the same. A shared run is
    opened; a broadcast run may still be closed: call `open_some`."""
    query = select(runs).where(runs.c.name == name)
    row = (await tx.connection.execute(query)).one_or_none()
    if row is None:
        fresh: dict[str, Any] = {
            "name": name,
            "created_at": tx.now,
            "batch_size": batch_size,
            "settings": settings,
            "policy_version": -1,
            "state": "closed",
            "delivery": delivery,
            "environments": names_json(environments),
            "acked_groups": 0,
            "gone_ack_number": 0,
        }
        await tx.connection.execute(insert(runs).values(fresh))
    else:
        run = run_of(row)
        was = (run.batch_size, run.settings, run.delivery, set(run.environments))
        if was != (batch_size, msgspec.json.decode(settings), delivery, set(environments)):
            raise ConflictError(
                f"A run {name} with other settings exists.",
                hint="Choose another name, or change the run.",
                run=name,
            )
        if run.state == "open":
            return run
    return await _change(tx, name, {"state": "open"} if delivery == "shared" else {})


async def open_some(tx: Transaction, name: str) -> Run:
    """Opens a run, for a broadcast run step by step: call it until the run is open.

    Each call copies a bounded number of groups into the run's queue, so that other transactions do
    not wait long. Until the run is open nothing is leased from it, and new groups are copied in
    turn, so that the order stays that of arrival. The progress is kept in memory only: after a
    `kill -9` copying starts over and skips what is already there."""
    run = await get_run(tx.connection, name)
    if run.state == "open":
        return run
    if run.delivery == "broadcast":
        queue = queue_of(name, run.delivery)
        following = await fill(tx, queue, tx.memory.filled.get(queue, 0) + 1)
        if following is not None:
            tx.memory.filled[queue] = following - 1
            return run
        tx.memory.filled.pop(queue, None)
    return await _change(tx, name, {"state": "open"})


async def get_run(connection: AsyncConnection, name: str) -> Run:
    row = (await connection.execute(select(runs).where(runs.c.name == name))).one_or_none()
    if row is None:
        raise NotFoundError(f"There is no run {name}.", run=name)
    return run_of(row)


async def list_runs(connection: AsyncConnection) -> list[Run]:
    """Returns all runs, oldest first."""
    query = select(runs).order_by(runs.c.created_at, runs.c.name)
    return [run_of(row) for row in await connection.execute(query)]


async def set_run(tx: Transaction, name: str, changes: dict[str, Any]) -> Run:
    run = await _change(tx, name, changes)
    if changes.get("environments") is not None:
        tx.memory.changes += 1
    return run


async def mark_closed(tx: Transaction, name: str) -> Run:
    run = await _change(tx, name, {"state": "closed"})
    # Wakes those who wait for groups of this run.
    tx.memory.changes += 1
    return run


async def _change(tx: Transaction, name: str, changes: dict[str, Any]) -> Run:
    if changes:
        await tx.connection.execute(update(runs).where(runs.c.name == name).values(changes))
    run = await get_run(tx.connection, name)
    tx.memory.runs[name] = known_run(run)
    tx.memory.activity += 1
    return run


def names_json(environments: Collection[str]) -> str:
    return to_json(sorted(set(environments)), "environments")


async def add_acked(tx: Transaction, name: str, count: int) -> None:
    change = update(runs).where(runs.c.name == name)
    await tx.connection.execute(change.values(acked_groups=runs.c.acked_groups + count))


def require_known(tx: Transaction, name: str) -> KnownRun:
    known = tx.memory.runs.get(name)
    if known is None:
        raise NotFoundError(f"There is no run {name}.", run=name)
    return known


def require_open(tx: Transaction, name: str) -> KnownRun:
    known = require_known(tx, name)
    if known.state != "open":
        raise ConflictError(f"The run {name} is {known.state}.", run=name)
    return known


async def get_value(connection: AsyncConnection, key: str) -> Any:
    """Returns the JSON-like value of `key`, or None if it was never set."""
    stored = await connection.scalar(select(values.c.value).where(values.c.key == key))
    return None if stored is None else msgspec.json.decode(stored)


async def values_with_prefix(connection: AsyncConnection, prefix: str) -> dict[str, Any]:
    begins = func.substr(values.c.key, 1, len(prefix)) == prefix
    found = await connection.execute(select(values.c.key, values.c.value).where(begins))
    return {key: msgspec.json.decode(value) for key, value in found}


async def set_values(tx: Transaction, texts: Mapping[str, str | None]) -> None:
    await tx.connection.execute(delete(values).where(values.c.key.in_(texts)))
    rows = [{"key": key, "value": value} for key, value in texts.items() if value is not None]
    if rows:
        await tx.connection.execute(insert(values), rows)


# All acks of a store are numbered; a checkpoint is the number of one of its run's acks.


async def mark(tx: Transaction, run: str, name: str, ack_number: int) -> None:
    """Sets the checkpoint `name` to the ack of this number; a checkpoint never moves back."""
    where = (checkpoints.c.run == run, checkpoints.c.name == name)
    known = await tx.connection.scalar(select(checkpoints.c.ack_number).where(*where))
    if known is not None and known >= ack_number:
        return
    acked = await tx.connection.scalar(select(runs.c.acked_groups).where(runs.c.name == run))
    row = {"ack_number": ack_number, "acked_groups": acked, "created_at": tx.now}
    if known is None:
        await tx.connection.execute(insert(checkpoints).values(run=run, name=name, **row))
    else:
        await tx.connection.execute(update(checkpoints).where(*where).values(row))


async def list_checkpoints(connection: AsyncConnection, run: str) -> list[Checkpoint]:
    await get_run(connection, run)
    query = select(checkpoints).where(checkpoints.c.run == run)
    return [
        Checkpoint(row.name, row.acked_groups, row.created_at)
        for row in await connection.execute(query.order_by(checkpoints.c.ack_number))
    ]


async def require_whole(tx: Transaction, run: str, name: str) -> int:
    """Returns the ack number of a checkpoint to which the run can rewind."""
    of = checkpoints.c
    number = await tx.connection.scalar(select(of.ack_number).where(of.run == run, of.name == name))
    if number is None:
        raise NotFoundError(f"The run {run} has no checkpoint {name}.", run=run, checkpoint=name)
    gone = await tx.connection.scalar(select(runs.c.gone_ack_number).where(runs.c.name == run))
    if number < (gone or 0):
        query = select(of.name).where(of.run == run, of.ack_number >= gone)
        possible = list(await tx.connection.scalars(query.order_by(of.ack_number)))
        raise ConflictError(
            f"The run {run} cannot rewind to the checkpoint {name}: groups that were "
            "acknowledged after it are no longer kept.",
            hint=f"It can rewind to: {', '.join(possible)}." if possible else "",
            run=run,
            checkpoint=name,
            possible=possible,
        )
    return int(number)


async def last_but_one(connection: AsyncConnection) -> dict[str, int]:
    """Returns the ack number of each run's second newest checkpoint; 0 if it has only one."""
    of = checkpoints.c
    found: dict[str, int] = {}
    newest: dict[str, int] = {}
    for row in await connection.execute(select(of.run, of.ack_number).order_by(of.ack_number)):
        found[row.run] = newest.get(row.run, 0)
        newest[row.run] = row.ack_number
    return found


async def put_minute(tx: Transaction, minute: int, numbers: str, keep_from: int) -> None:
    """Stores the server's numbers of a minute (since 1970), as JSON text; removes those before
    the minute `keep_from`."""
    of = history.c.minute
    await tx.connection.execute(delete(history).where((of < keep_from) | (of == minute)))
    await tx.connection.execute(insert(history).values(minute=minute, numbers=numbers))


async def minutes_between(
    connection: AsyncConnection, start: int, end: int, step: int
) -> list[tuple[int, str]]:
    """Returns every `step`-th minute from `start` to `end`, in order, with its numbers."""
    of = history.c
    wanted = (of.minute >= start, of.minute <= end, of.minute % step == 0)
    query = select(of.minute, of.numbers).where(*wanted).order_by(of.minute)
    return [(row.minute, row.numbers) for row in await connection.execute(query)]
