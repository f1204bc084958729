"""Records in the store which process owns it, and the store's time.

After a lost connection is re-established, the owner recorded here shows whether another process
opened the store in between. If so, what this process has in memory is outdated and it must stop.
While the connection lasts, the database's own lock keeps other processes out.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Final

from envserver_records.errors import StoreLost
from sqlalchemy import insert, update
from sqlalchemy.ext.asyncio import AsyncConnection

from .runs import get_value, to_json
from .schema import values

_HOLDER: Final = "store.holder"
_TIME: Final = "store.time"


@dataclass(frozen=True)
class StoreLock:
    """The ownership of an open store.

    Args:
        owner: random id of the owning process; None for SQLite, whose file lock cannot be lost.
        last_time: the latest store time that was saved; 0 for a new store.
    """

    owner: str | None
    last_time: float


async def acquire(connection: AsyncConnection) -> StoreLock:
    """Records this process as the owner. The caller must hold the database's lock."""
    owner = uuid.uuid4().hex
    await _write(connection, _HOLDER, owner)
    return StoreLock(owner, (await read_lock(connection)).last_time)


async def read_lock(connection: AsyncConnection) -> StoreLock:
    """Like `acquire`, but writes nothing: for databases whose lock cannot be lost."""
    return StoreLock(None, float(await get_value(connection, _TIME) or 0.0))


async def is_owner(connection: AsyncConnection, owner: str) -> bool:
    """Returns whether `owner` was the last process to acquire the store."""
    return bool(await get_value(connection, _HOLDER) == owner)


def lock_lost() -> StoreLost:
    """Returns the error for a store that another process has acquired."""
    return StoreLost(
        "Another process has opened the store since its database was last reached.",
        hint="Only one process may have it open; this process stops.",
    )


async def save_time(connection: AsyncConnection, now: float) -> None:
    """Saves the store's time for the next `acquire`."""
    await _write(connection, _TIME, now)


async def _write(connection: AsyncConnection, key: str, value: str | float) -> None:
    text = to_json(value, key)
    changed = await connection.execute(update(values).where(values.c.key == key).values(value=text))
    if not changed.rowcount:
        await connection.execute(insert(values).values(key=key, value=text))
