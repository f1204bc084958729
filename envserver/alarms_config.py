"""`--alarms.*`: when a server says that something is wrong; part of the tree in `config`."""

from __future__ import annotations

from pydantic import Field

from .described import Section


class AlarmsConfig(Section):
    """Alarms of a running server: `GET /v1/alarms`, the log, the live tables."""

    off: list[str] = []
    """Names of alarms that are not raised: no_trainer,equal_rewards."""
    span_minutes: float = Field(default=10.0, gt=0)
    """Minutes over which shares and counts are taken."""
    fewest: int = Field(default=20, ge=1)
    """Groups or rollouts below which no share is judged."""
    no_trainer_minutes: float = Field(default=10.0, ge=0)
    """Minutes without a lease while enough groups wait for a batch."""
    no_rollout_minutes: float = Field(default=10.0, ge=0)
    """Minutes without an end of a rollout while rollouts run; at least four times as long as a
    rollout takes on average."""
    paused_minutes: float = Field(default=10.0, ge=0)
    """Minutes in which model calls are paused."""
    unused_engine_minutes: float = Field(default=10.0, ge=0)
    """Minutes in which an engine gets no calls: it is refused, unreachable, or has old weights."""
    lost_share: float = Field(default=0.05, gt=0, le=1)
    """Share of rollouts that are lost, not by the model's fault."""
    stale_share: float = Field(default=0.2, gt=0, le=1)
    """Share of groups that are dropped as stale."""
    cut_share: float = Field(default=0.25, gt=0, le=1)
    """Share of rollouts that a limit ends or cuts."""
    split_share: float = Field(default=0.1, gt=0, le=1)
    """Share of rollouts whose conversations are not continued: each of their calls is a row."""
    equal_share: float = Field(default=0.8, gt=0, le=1)
    """Share of groups whose rewards are all equal."""
    same_share: float = Field(default=0.5, gt=0, le=1)
    """Share of groups whose rollouts all say the same."""
    untrained_share: float = Field(default=0.1, gt=0, le=1)
    """Share of sampled tokens that flags mask or drop."""
    worker_deaths: int = Field(default=3, ge=1)
    """Deaths of worker processes."""
    disk_free_gb: float = Field(default=1.0, ge=0)
    """GB that are left on the disk of the store."""
    store_seconds: float = Field(default=1.0, gt=0)
    """Mean seconds of a commit of the store."""
