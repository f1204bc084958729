"""Who has the store open and how late it was there last, kept in the store itself.

A connection that was lost and made again finds here whether another process came between: then what
this one remembers is worth nothing, and it must end. (While the connection lasts, the lock keeps
others out.)
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
    """A store that was taken.

    Args:
        owner: who has it now; None where its lock cannot be lost.
        last_time: how late it was there last; 0 when it is new.
    """

    owner: str | None
    last_time: float


async def acquire(connection: AsyncConnection) -> StoreLock:
    """Makes this process the one that has the store; for who has its lock."""
    owner = uuid.uuid4().hex
    await _write(connection, _HOLDER, owner)
    return StoreLock(owner, (await read_lock(connection)).last_time)


async def read_lock(connection: AsyncConnection) -> StoreLock:
    """As `acquire`, where nothing has to be written because the lock cannot be lost."""
    return StoreLock(None, float(await get_value(connection, _TIME) or 0.0))


async def is_owner(connection: AsyncConnection, owner: str) -> bool:
    """Whether `owner` is the last that took the store."""
    return bool(await get_value(connection, _HOLDER) == owner)


def lock_lost() -> StoreLost:
    """What to say when another process has taken the store."""
    return StoreLost(
        "Another process has opened the store since its database was last reached.",
        hint="Only one process may have it open; this one ends.",
    )


async def save_time(connection: AsyncConnection, now: float) -> None:
    """The next `acquire` finds `now`."""
    await _write(connection, _TIME, now)


async def _write(connection: AsyncConnection, key: str, value: str | float) -> None:
    text = to_json(value, key)
    changed = await connection.execute(update(values).where(values.c.key == key).values(value=text))
    if not changed.rowcount:
        await connection.execute(insert(values).values(key=key, value=text))
