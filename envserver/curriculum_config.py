"""What can be set of the choice of tasks: a part of the tree of settings, see `config`."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

SECTION: Final = ConfigDict(
    extra="forbid",
    use_attribute_docstrings=True,
    validate_default=True,
    populate_by_name=True,
    protected_namespaces=(),
)
"""Of every part of the tree."""


class CurriculumConfig(BaseModel):
    """Which task comes next, by what is known of how often each is solved."""

    model_config = SECTION

    sampler: Literal["uniform", "difficulty", "replay"] = "uniform"
    """uniform: the environment's own order; difficulty: tasks that are neither too easy nor too
    hard come again; replay: a share of the groups goes to tasks that were not solved."""
    discount: float = Field(default=0.98, gt=0, le=1)
    """What a result counts less for each policy version since: estimates follow the policy."""
    target: float = Field(default=0.5, gt=0, lt=1)
    """difficulty: chance of success of the tasks that are wanted most."""
    sharpness: float = Field(default=2.0, gt=0, le=100)
    """difficulty: how much less others are wanted; 2 with a target of 0.5 is p(1 - p)."""
    explore: float = Field(default=0.2, gt=0, le=1)
    """difficulty: least share of the groups that goes on in the environment's own order."""
    replay_share: float = Field(default=0.25, ge=0, le=0.9)
    """replay: share of the groups that goes to unsolved tasks, as long as there are any."""
    replay_order: Literal["oldest", "weighted"] = "oldest"
    """replay: the one that was not tried for longest, or by chance: the less is known, the more."""
    unsolved_below: float = Field(default=0.05, ge=0, le=1)
    """replay: a task of at most this mean reward is unsolved."""
    solved_above: float | None = Field(default=None, gt=0, lt=1)
    """Where the environment's order comes to a task that is solved more often than this, it is
    mostly passed over, whatever the sampler; unset: never."""
    solved_attempts: int = Field(default=8, ge=1)
    """Rollouts that must have been scored before a task can be passed over."""
    solved_share: float = Field(default=0.1, gt=0, le=1)
    """How often such a task is given a group all the same."""
    memory: int = Field(default=2048, ge=1, le=65536)
    """Tasks of each environment that are remembered, to come again."""
