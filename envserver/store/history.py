"""The SQL of a server's numbers by the minute, which a page shows after a restart."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import delete, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from .schema import history
from .transaction import Transaction


async def put_minute(tx: Transaction, minute: int, numbers: str, keep_from: int) -> None:
    """Stores the numbers of a minute, once; removes what is older than the minute `keep_from`.

    Args:
        minute: seconds since 1970, divided by 60.
        numbers: JSON text.
    """
    of = history.c.minute
    await tx.connection.execute(delete(history).where((of < keep_from) | (of == minute)))
    await tx.connection.execute(insert(history).values(minute=minute, numbers=numbers))


async def minutes_between(
    connection: AsyncConnection, start: int, end: int, step: int
) -> Sequence[tuple[int, str]]:
    """Returns every `step`-th minute from `start` to `end`, in order, with its numbers."""
    of = history.c
    wanted = (of.minute >= start, of.minute <= end, of.minute % step == 0)
    query = select(of.minute, of.numbers).where(*wanted).order_by(of.minute)
    return [(row.minute, row.numbers) for row in await connection.execute(query)]
