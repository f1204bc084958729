"""Settings of delivery, in `serve` and `run-api`; part of the tree in `config`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .described import Section


class DeliveryConfig(Section):
    """Which groups go to trainers, and how many may wait for them."""

    max_staleness_at_delivery: int | None = Field(default=None, ge=0)
    """Maximum policy versions between a group's first token and its delivery; unset: no limit.
    Groups that would be staler by then are not started."""
    stale_groups: Literal["drop", "deliver"] = "drop"
    """What happens to staler groups, finished or waiting: drop and count them, or deliver them."""
    silent_run_seconds: float | None = Field(default=3600.0, gt=0)
    """Close a broadcast run that leases nothing for this many seconds while others do, so that its
    queue does not block them; it resumes when it registers again. Unset: never."""
    max_queued_groups: int = Field(default=256, ge=0)
    """Groups waiting for a trainer at which new rollouts pause; 0: without a registered run,
    only requested groups are made."""
    max_batches_offpolicy: int = Field(default=3, ge=1)
    """Batches (of the registered trainer) waiting at which new rollouts pause."""

    @property
    def most_staleness(self) -> int | None:
        """Maximum staleness of a group at its delivery; None: no limit."""
        return self.max_staleness_at_delivery if self.stale_groups == "drop" else None
