"""The SQL of runs, their checkpoints, and small values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from envserver_records.errors import ConflictError, InputError, NotFoundError
from sqlalchemy import Row, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from .deliveries import fill
from .rows import Checkpoint, Delivery, Run
from .schema import checkpoints, history, runs, values
from .transaction import KnownRun, Transaction, queue_of


def to_json(value: Any, place: str) -> str:
    """Returns `value` as JSON text. Raises InputError: it is not JSON-like."""
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InputError(f"{place} is not JSON-like ({error}).", place=place) from error


def _run(row: Row[Any]) -> Run:
    return Run(
        row.name,
        row.created_at,
        row.batch_size,
        msgspec.json.decode(row.settings),
        row.policy_version,
        row.state,
        row.delivery,
        msgspec.json.decode(row.environments),
    )


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
        return await _begin_to_open(tx, name, delivery)
    run = _run(row)
    was = (run.batch_size, run.settings, run.delivery, set(run.environments))
    if was != (batch_size, msgspec.json.decode(settings), delivery, set(environments)):
        raise ConflictError(
            f"A run {name} with other settings exists.",
            hint="Choose another name, or change the run.",
            run=name,
        )
    return run if run.state == "open" else await _begin_to_open(tx, name, delivery)


async def _begin_to_open(tx: Transaction, name: str, delivery: Delivery) -> Run:
    if delivery == "shared":
        return await _change(tx, name, {"state": "open"})
    return await _change(tx, name, {})


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
    return _run(row)


async def list_runs(connection: AsyncConnection) -> list[Run]:
    """Returns all runs, oldest first."""
    query = select(runs).order_by(runs.c.created_at, runs.c.name)
    return [_run(row) for row in await connection.execute(query)]


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
    tx.memory.runs[name] = KnownRun(
        run.state,
        run.delivery,
        queue_of(name, run.delivery),
        frozenset(run.environments),
        run.batch_size,
    )
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
            f"The run {run} cannot rewind to the checkpoint {name}: groups that it acked after"
            " it are no longer kept.",
            hint=f"It can rewind to: {', '.join(possible)}." if possible else "",
            run=run,
            checkpoint=name,
            possible=possible,
        )
    return int(number)


async def forget_after(tx: Transaction, run: str, ack_number: int) -> None:
    of = checkpoints.c
    await tx.connection.execute(
        delete(checkpoints).where(of.run == run, of.ack_number > ack_number)
    )


async def last_but_one(connection: AsyncConnection) -> dict[str, int]:
    """Returns the ack number of each run's second newest checkpoint; 0 if it has only one."""
    of = checkpoints.c
    found: dict[str, int] = {}
    numbers: dict[str, list[int]] = {}
    for row in await connection.execute(select(of.run, of.ack_number).order_by(of.ack_number)):
        numbers.setdefault(row.run, []).append(row.ack_number)
    for run, all_of_run in numbers.items():
        found[run] = all_of_run[-2] if len(all_of_run) > 1 else 0
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
