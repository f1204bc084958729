"""What the alarms of a server know beside its numbers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..store.demand import Demand
from ..telemetry.alarms import AlarmFacts

if TYPE_CHECKING:
    from .bootstrap import BootstrapServer
    from .hosting import Hosted


def alarm_facts(server: BootstrapServer, host: Hosted, store: str) -> AlarmFacts:
    """Returns the facts of a server with environments."""
    ranges = {one.environment.name: one.scorer.rules.range for one in host.parts}
    audit = host.auditor.report()
    described = [one.proxy.engine_described() for one in host.parts]
    return msgspec.structs.replace(
        delivery_facts(server, host.demand, store),
        reward_ranges={name: (one.low, one.high) for name, one in ranges.items()},
        last_words=dict(host.tally.last_words),
        differs_at=next((one["differs_at"] for one in described if "differs_at" in one), ""),
        audited=audit["rows"],
        differing=audit["rows_over_tolerance"],
    )


def delivery_facts(server: BootstrapServer, demand: Demand, store: str) -> AlarmFacts:
    """Returns the facts of any server."""
    return AlarmFacts(
        broken={
            name: part.reason
            for name, part in server.health.parts.items()
            if part.state in ("down", "limited")
        },
        groups_wanted=demand.smallest_batch(),
        disk_free_bytes=_free_bytes(store),
    )


def _free_bytes(store: str) -> int | None:
    """Returns the bytes that are left for a file; None for a database on another machine."""
    if "://" in store:
        return None
    try:
        disk = os.statvfs(Path(store).parent)
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize
