"""How far each run is behind: what waits for it, for how long, and what it has leased."""

from __future__ import annotations

from collections import Counter

import msgspec
from sqlalchemy import literal_column, select
from sqlalchemy.ext.asyncio import AsyncConnection

from .deliveries import oldest_queued_at
from .schema import leases
from .transaction import Memory


class Backlog(msgspec.Struct, frozen=True):
    """Queued and leased groups of one run.

    Args:
        queued_groups: groups that it may lease now. Shared runs count the same groups.
        lag_seconds: how long the oldest of them has waited; 0.0 if there is none.
        open_leases: leases that it has neither acked nor given back, and that have not expired.
        leased_groups: groups in these leases.
    """

    queued_groups: int
    lag_seconds: float
    open_leases: int
    leased_groups: int


async def backlogs(connection: AsyncConnection, memory: Memory, now: float) -> dict[str, Backlog]:
    """Returns the backlog of each open run.

    Args:
        now: the store's time, in seconds.
    """
    # A literal, because of the partial index; see groups.py.
    is_open = leases.c.state == literal_column("'open'")
    held, open_leases = Counter[str](), Counter[str]()
    for row in await connection.execute(select(leases.c.run, leases.c.group_ids).where(is_open)):
        open_leases[row.run] += 1
        held[row.run] += len(msgspec.json.decode(row.group_ids, type=list[str]))
    lags: dict[tuple[str, frozenset[str]], float] = {}
    found = {}
    for name, run in memory.runs.items():
        if run.state != "open":
            continue
        place = (run.queue, run.environments)
        if place not in lags:
            since = await oldest_queued_at(connection, memory, *place)
            lags[place] = 0.0 if since is None else max(0.0, now - since)
        queued = memory.in_state(run, ("queued",))
        found[name] = Backlog(queued, lags[place], open_leases[name], held[name])
    return found
