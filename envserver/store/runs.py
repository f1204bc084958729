"""The SQL of runs and of small values."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import Row, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ..errors import ConflictError, InputError, NotFoundError
from .rows import Run
from .schema import runs, values
from .transaction import Transaction


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
    )


async def create_run(tx: Transaction, name: str, batch_size: int, settings: str) -> Run:
    """A new open run, or the one of this name when it was made with the same settings.

    Raises:
        ConflictError: there is one of this name with others.
    """
    query = select(runs).where(runs.c.name == name)
    row = (await tx.connection.execute(query)).one_or_none()
    if row is None:
        fresh = {"name": name, "batch_size": batch_size, "settings": settings}
        fresh |= {"created_at": tx.now, "policy_version": -1, "state": "open"}
        await tx.connection.execute(insert(runs).values(fresh))
        return await get_run(tx.connection, name)
    run = _run(row)
    if (run.batch_size, run.settings) != (batch_size, msgspec.json.decode(settings)):
        raise ConflictError(
            f"There is a run {name} with other settings.",
            hint="Take another name, or change the run.",
            run=name,
        )
    return run


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
    await get_run(tx.connection, name)
    if changes:
        await tx.connection.execute(update(runs).where(runs.c.name == name).values(changes))
    return await get_run(tx.connection, name)


async def require_open(connection: AsyncConnection, name: str) -> None:
    """Raises NotFoundError: no such run. ConflictError: it is closed."""
    state = await connection.scalar(select(runs.c.state).where(runs.c.name == name))
    if state is None:
        raise NotFoundError(f"There is no run {name}.", run=name)
    if state != "open":
        raise ConflictError(f"The run {name} is {state}.", run=name)


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
