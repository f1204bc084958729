"""What a server says of its part among those that share its store."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

from ...telemetry.families import gauge, single

if TYPE_CHECKING:  # the database library is imported where a store is shared
    from ...store.leadership import Leadership


def role(leadership: Leadership) -> dict[str, object]:
    """Returns what `/readyz` says of this server's part."""
    if leadership.leads:
        return {"role": "leader", "leader": leadership.url}
    leader = leadership.leader
    return {"role": "follower", "leader": None if leader is None else leader.url}


async def leads_metric(leadership: Leadership) -> Iterable[Metric]:
    """Returns whether this server leads, and how many follow it."""
    words = "1 if this server leads those that share its store, 0 if it follows"
    found = [gauge("envserver_leader", words, (), single(leadership.leads))]
    if leadership.leads:
        count = single(len(leadership.followers))
        found.append(gauge("envserver_followers", "Servers that follow this one", (), count))
    return found
