"""Settings of the choice of tasks (`--curriculum.*`); part of the tree in `config`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .described import Section


class CurriculumConfig(Section):
    """Chooses the next task by how often each was solved."""

    sampler: Literal["uniform", "difficulty", "replay"] = "uniform"
    """uniform: the environment's own order; difficulty: repeats tasks that are neither too easy nor
    too hard; replay: gives a share of the groups to unsolved tasks."""
    discount: float = Field(default=0.98, gt=0, le=1)
    """Weight of a result per policy version since it was made; lower values forget faster."""
    target: float = Field(default=0.5, gt=0, lt=1)
    """difficulty: success probability of the most wanted tasks."""
    sharpness: float = Field(default=2.0, gt=0, le=100)
    """difficulty: how fast the preference falls off; 2 with a target of 0.5 is p(1 - p)."""
    explore: float = Field(default=0.2, gt=0, le=1)
    """difficulty: minimum share of the groups that follow the environment's own order."""
    replay_share: float = Field(default=0.25, ge=0, le=0.9)
    """replay: share of the groups for unsolved tasks, while there are any."""
    replay_order: Literal["oldest", "weighted"] = "oldest"
    """replay: oldest: the task not tried for longest; weighted: random, uncertain ones first."""
    unsolved_below: float = Field(default=0.05, ge=0, le=1)
    """replay: a task with at most this mean reward counts as unsolved."""
    solved_above: float | None = Field(default=None, gt=0, lt=1)
    """Mostly skip tasks that are solved more often than this, with any sampler; unset: never."""
    solved_attempts: int = Field(default=8, ge=1)
    """Scored rollouts required before a task can be skipped."""
    solved_share: float = Field(default=0.1, gt=0, le=1)
    """Share of the times that such a task is not skipped."""
    unsolved_share: float = Field(default=1.0, gt=0, le=1)
    """Share of the times that a task is not skipped that was lately never solved (a mean reward of
    at most `unsolved_below` after `solved_attempts` rollouts), with any sampler; 1: never skip."""
    memory: int = Field(default=2048, ge=1, le=65536)
    """Tasks remembered per environment, to be repeated."""
