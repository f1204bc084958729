"""Records in the store which process owns it, and the store's time.

After a lost connection is re-established, the owner recorded here shows whether another process
opened the store in between. If so, what this process has in memory is outdated and it must stop.
While the connection lasts, the database's own lock keeps other processes out. Servers that share a
store read here which of them has it open.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from envserver_records.errors import StoreLost
from sqlalchemy import insert, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from .runs import get_value, to_json
from .schema import values

_HOLDER: Final = "store.holder"
_TIME: Final = "store.time"
_LEADER: Final = "store.leader"
# The condition is looked at again once another owner's change of the row is committed: a process
# that has lost the store never overwrites what its successor says.
_RENEW: Final = text(
    "UPDATE \"values\" SET value = :row WHERE key = :key AND CAST(value AS json)->>'owner' = :owner"
)


@dataclass(frozen=True)
class StoreLock:
    """The ownership of an open store.

    Args:
        owner: random id of the owning process; None for SQLite, whose file lock cannot be lost.
        last_time: the latest store time that was saved; 0 for a new store.
    """

    owner: str | None
    last_time: float


class Leader(msgspec.Struct, frozen=True):
    """What the process that has a PostgreSQL store open tells the servers that wait for it.

    Args:
        owner: its random id. Only who can read the database knows it.
        pid: process id of the session that holds the lock; 0: this process shares the store with
            no other, and no process may end its session.
        beat: grows while the process lives.
        url: where it answers; "" until it does.
        since: when it became the leader, in seconds since the epoch.
    """

    owner: str
    pid: int = 0
    beat: int = 0
    url: str = ""
    since: float = 0.0


async def acquire(connection: AsyncConnection) -> StoreLock:
    """Records this process as the owner. The caller must hold the database's lock."""
    owner = uuid.uuid4().hex
    await _write(connection, _HOLDER, owner)
    await _write(connection, _LEADER, msgspec.to_builtins(Leader(owner)))
    return StoreLock(owner, (await read_lock(connection)).last_time)


async def read_lock(connection: AsyncConnection) -> StoreLock:
    """Like `acquire`, but writes nothing: for databases whose lock cannot be lost."""
    return StoreLock(None, float(await get_value(connection, _TIME) or 0.0))


async def is_owner(connection: AsyncConnection, owner: str) -> bool:
    """Returns whether `owner` was the last process to acquire the store."""
    return bool(await get_value(connection, _HOLDER) == owner)


async def read_leader(connection: AsyncConnection) -> Leader | None:
    """Returns what the latest owner wrote; None if there never was one."""
    found = await get_value(connection, _LEADER)
    return None if found is None else msgspec.convert(found, Leader)


async def renew(connection: AsyncConnection, leader: Leader) -> bool:
    """Writes what this owner has to say; returns False, and writes nothing, if another process has
    acquired the store."""
    row = to_json(msgspec.to_builtins(leader), _LEADER)
    named = {"row": row, "key": _LEADER, "owner": leader.owner}
    return bool((await connection.execute(_RENEW, named)).rowcount)


def lock_lost() -> StoreLost:
    """Returns the error for a store that another process has acquired."""
    return StoreLost(
        "Another process has opened the store since its database was last reached.",
        hint="Only one process may have it open; this process stops.",
    )


async def save_time(connection: AsyncConnection, now: float) -> None:
    """Saves the store's time for the next `acquire`."""
    await _write(connection, _TIME, now)


async def _write(connection: AsyncConnection, key: str, value: Any) -> None:
    text = to_json(value, key)
    changed = await connection.execute(update(values).where(values.c.key == key).values(value=text))
    if not changed.rowcount:
        await connection.execute(insert(values).values(key=key, value=text))
