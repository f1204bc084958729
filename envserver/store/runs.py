"""The SQL of runs and of small values."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from envserver_records.errors import ConflictError, InputError, NotFoundError
from sqlalchemy import Row, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from .deliveries import fill
from .rows import Delivery, Run
from .schema import runs, values
from .transaction import KnownRun, Transaction, queue_of


def to_json(value: Any, place: str) -> str:
    """`value` as JSON.

    Raises:
        InputError: it is not JSON-like.
    """
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
    """A new run, or the one of this name when it was made with the same. A shared one is open; one
    that is broadcast may be closed: `open_some` opens it.

    Raises:
        ConflictError: there is one of this name with others.
    """
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
            f"There is a run {name} with other settings.",
            hint="Take another name, or change the run.",
            run=name,
        )
    return run if run.state == "open" else await _begin_to_open(tx, name, delivery)


async def _begin_to_open(tx: Transaction, name: str, delivery: Delivery) -> Run:
    if delivery == "shared":
        return await _change(tx, name, {"state": "open"})
    return await _change(tx, name, {})


async def open_some(tx: Transaction, name: str) -> Run:
    """Opens a run. One that is broadcast first gets what it lacks, so much in each transaction that
    nobody waits for long: it is to be called until the run is open. Until then nothing is leased
    from it, and what comes is copied when it is its turn: the order is that of arrival.

    How far it is, is known in memory only: after a `kill -9` it is looked through again from the
    beginning, and what is there already is passed over.

    Raises:
        NotFoundError: there is none.
    """
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
    """Raises NotFoundError: there is none."""
    row = (await connection.execute(select(runs).where(runs.c.name == name))).one_or_none()
    if row is None:
        raise NotFoundError(f"There is no run {name}.", run=name)
    return _run(row)


async def list_runs(connection: AsyncConnection) -> list[Run]:
    """All runs, oldest first."""
    query = select(runs).order_by(runs.c.created_at, runs.c.name)
    return [_run(row) for row in await connection.execute(query)]


async def set_run(tx: Transaction, name: str, changes: dict[str, Any]) -> Run:
    """Changes columns of a run. Raises NotFoundError: there is none."""
    run = await _change(tx, name, changes)
    if changes.get("environments") is not None:
        tx.memory.changes += 1
    return run


async def mark_closed(tx: Transaction, name: str) -> Run:
    """Raises NotFoundError: there is none."""
    run = await _change(tx, name, {"state": "closed"})
    # Who waits for groups of it learns that there will be none.
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
    """Each name once, as they lie in the database."""
    return to_json(sorted(set(environments)), "environments")


async def add_acked(tx: Transaction, name: str, count: int) -> None:
    """The run has acked so many groups more (fewer where negative)."""
    change = update(runs).where(runs.c.name == name)
    await tx.connection.execute(change.values(acked_groups=runs.c.acked_groups + count))


def require_known(tx: Transaction, name: str) -> KnownRun:
    """Raises NotFoundError: no such run."""
    known = tx.memory.runs.get(name)
    if known is None:
        raise NotFoundError(f"There is no run {name}.", run=name)
    return known


def require_open(tx: Transaction, name: str) -> KnownRun:
    """Raises NotFoundError: no such run. ConflictError: it is closed."""
    known = require_known(tx, name)
    if known.state != "open":
        raise ConflictError(f"The run {name} is {known.state}.", run=name)
    return known


async def get_value(connection: AsyncConnection, key: str) -> Any:
    """The value of `key`, None when it was never set."""
    stored = await connection.scalar(select(values.c.value).where(values.c.key == key))
    return None if stored is None else msgspec.json.decode(stored)


async def set_value(tx: Transaction, key: str, value: str) -> None:
    """Sets `key` to JSON."""
    query = select(values.c.key).where(values.c.key == key)
    if (await tx.connection.execute(query)).one_or_none() is None:
        await tx.connection.execute(insert(values).values(key=key, value=value))
    else:
        await tx.connection.execute(update(values).where(values.c.key == key).values(value=value))
