"""What can be set of delivery, in `serve` and `run-api`: a part of the tree of settings."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from .curriculum_config import SECTION


class DeliveryConfig(BaseModel):
    """Which groups go to trainers, and how many may wait for them."""

    model_config = SECTION

    max_staleness_at_delivery: int | None = Field(default=None, ge=0)
    """Policy versions that the first token of a group may be behind when a trainer gets
    it; unset: any. No group is begun that would be older by then."""
    stale_groups: Literal["drop", "deliver"] = "drop"
    """What becomes of older groups, finished or waiting: dropped and counted, or delivered."""
    silent_run_seconds: float | None = Field(default=3600.0, gt=0)
    """A broadcast run that leases nothing for so long, while others do, is closed, so that
    its queue does not hold them up; it goes on when it registers again. Unset: never."""
    max_queued_groups: int = Field(default=256, ge=0)
    """Groups waiting for a trainer before new rollouts wait too; 0: while no run is
    registered, nothing is made but what is ordered."""
    max_batches_offpolicy: int = Field(default=3, ge=1)
    """Batches (of the registered trainer) waiting before new rollouts wait too."""

    @property
    def most_staleness(self) -> int | None:
        """Of a group at its delivery; None: any."""
        return self.max_staleness_at_delivery if self.stale_groups == "drop" else None
