"""The SQL of checkpoints: the acks to which a run can rewind.

All acks of a store are numbered; a checkpoint is the number of one of its run's acks.
"""

from __future__ import annotations

from envserver_records.errors import ConflictError, NotFoundError
from sqlalchemy import delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from .rows import Checkpoint
from .runs import get_run
from .schema import checkpoints, runs
from .transaction import Transaction


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
    """Returns a run's checkpoints, oldest first. Raises NotFoundError if the run does not exist."""
    await get_run(connection, run)
    query = select(checkpoints).where(checkpoints.c.run == run)
    return [
        Checkpoint(row.name, row.acked_groups, row.created_at)
        for row in await connection.execute(query.order_by(checkpoints.c.ack_number))
    ]


async def require_whole(tx: Transaction, run: str, name: str) -> int:
    """Returns the ack number of a checkpoint to which the run can rewind.

    Raises:
        NotFoundError: the run has no checkpoint of this name.
        ConflictError: groups that the run acked after it are no longer kept.
    """
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
    """Deletes the checkpoints after this ack: the run has rewound to before them."""
    of = checkpoints.c
    await tx.connection.execute(
        delete(checkpoints).where(of.run == run, of.ack_number > ack_number)
    )


async def last_but_one(connection: AsyncConnection) -> dict[str, int]:
    """Returns for each run with checkpoints the ack number of its second newest; 0 if it has
    one.
    """
    of = checkpoints.c
    found: dict[str, int] = {}
    numbers: dict[str, list[int]] = {}
    for row in await connection.execute(select(of.run, of.ack_number).order_by(of.ack_number)):
        numbers.setdefault(row.run, []).append(row.ack_number)
    for run, all_of_run in numbers.items():
        found[run] = all_of_run[-2] if len(all_of_run) > 1 else 0
    return found
