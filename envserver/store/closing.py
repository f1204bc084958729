"""Closing a run, and taking it back to one of its checkpoints: both end what it holds."""

from __future__ import annotations

from .checkpoints import forget_after, require_whole
from .leases import revoke_held, take_back_acked
from .rows import Run
from .runs import mark_closed, require_known
from .transaction import Transaction


async def close_run(tx: Transaction, name: str) -> Run:
    """The run leases no more; what its open leases hold is queued again.

    Raises:
        NotFoundError: no such run.
    """
    if require_known(tx, name).state == "open":
        await revoke_held(tx, name, "close")
    return await mark_closed(tx, name)


async def rewind(tx: Transaction, name: str, checkpoint: str | None) -> list[str]:
    """Queues again what the run acked after `checkpoint` (None: all that is kept), oldest first.

    Raises:
        NotFoundError: no such run or checkpoint.
        ConflictError: not all of it is kept; nothing changed.
    """
    require_known(tx, name)
    after = 0 if checkpoint is None else await require_whole(tx, name, checkpoint)
    await revoke_held(tx, name, "rewind")
    taken_back = await take_back_acked(tx, name, after)
    await forget_after(tx, name, after)
    if taken_back:
        await tx.count("rewound", len(taken_back))
    return taken_back
