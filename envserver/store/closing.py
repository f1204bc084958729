"""Closes a run, and rewinds it to a checkpoint. Both revoke the run's leases."""

from __future__ import annotations

from .checkpoints import forget_after, require_whole
from .leases import revoke_held, take_back_acked
from .rows import Run
from .runs import mark_closed, require_known
from .transaction import Transaction


async def close_run(tx: Transaction, name: str) -> Run:
    """Closes a run: it leases no more, and the groups of its open leases are queued again.
    Raises NotFoundError: the run does not exist.
    """
    if require_known(tx, name).state == "open":
        await revoke_held(tx, name, "close")
    return await mark_closed(tx, name)


async def rewind(tx: Transaction, name: str, checkpoint: str | None) -> list[str]:
    """Queues the groups again that the run acked after `checkpoint`; returns their ids, oldest
    first.

    Args:
        checkpoint: name of a checkpoint; None rewinds as far as groups are kept.

    Raises:
        NotFoundError: the run or the checkpoint does not exist.
        ConflictError: some of these groups are no longer kept; nothing has changed.
    """
    require_known(tx, name)
    after = 0 if checkpoint is None else await require_whole(tx, name, checkpoint)
    await revoke_held(tx, name, "rewind")
    taken_back = await take_back_acked(tx, name, after)
    await forget_after(tx, name, after)
    if taken_back:
        await tx.count("rewound", len(taken_back))
    return taken_back
