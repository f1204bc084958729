"""Estimates how often the current policy solves a task: a discounted Beta posterior. Pure.

With the rewards r_i as shares in [0, 1] of the way from the lowest reward to that of a solved task
(`RewardRange.share`), of policy versions v_i, V the last of these, and a discount g in (0, 1] for
each version:

    weight = sum g^(V - v_i)        solved = sum r_i g^(V - v_i)
    success = (solved + 1) / (weight + 2)

so that a task with little current evidence is near 1/2, like one that was never tried. If versions
are unknown (-1), the policy is assumed not to change. Groups of known versions may come in any
order. Discounting the counts of a Beta posterior is what V. Raj and S. Kalyani do for bandits whose
arms change (arXiv:1707.09727, 2017): there for each round, here for each version of the policy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec
from envserver_records.records import Group, Split
from envserver_records.tasks import UNIT_RANGE, RewardRange

DISCOUNT: Final = 0.98
"""Default discount per policy version: half of the weight is left after 34 versions."""
LONGEST_TASK_ID: Final = 512
"""Characters; tasks with longer names have no estimates."""
_LEAST_WEIGHT: Final = 1e-300
"""Below this weight the mean is undefined."""


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one group for its task: `rewards` is the sum over `attempts` rollouts, each as
    a share in [0, 1]; `policy_version`: the lowest that sampled any of it, -1 if unknown."""

    group_id: str
    env: str
    split: Split
    task_id: str
    attempts: int
    rewards: float
    policy_version: int = -1


class Estimate(msgspec.Struct, frozen=True):
    """The estimate of one task, as of `policy_version`, the last that tried it (-1: unknown), from
    `attempts` counted rollouts. `weight`, `solved`: see the module."""

    attempts: int = 0
    weight: float = 0.0
    solved: float = 0.0
    policy_version: int = -1

    @property
    def success(self) -> float:
        """The posterior mean, in (0, 1): the chance that the next rollout solves it."""
        return (self.solved + 1.0) / (self.weight + 2.0)

    @property
    def mean_reward(self) -> float | None:
        """The mean reward, weighted to later versions; None if the weight is too small."""
        return self.solved / self.weight if self.weight > _LEAST_WEIGHT else None

    @property
    def variance(self) -> float:
        """The variance of the posterior, in (0, 1/12]."""
        return self.success * (1.0 - self.success) / (self.weight + 3.0)


UNTRIED: Final = Estimate()


def scored_of(group: Group) -> Scored | None:
    rewards = [
        trajectory.score.reward
        for trajectory in group.trajectories
        if trajectory.score.reward is not None
    ]
    return scored(
        group.group_id,
        group.env,
        group.split,
        group.task_id,
        rewards,
        group.policy_version,
        reward_range=group.reward_range,
    )


def scored(
    group_id: str,
    env: str,
    split: Split,
    task_id: str,
    rewards: Sequence[float],
    policy_version: int = -1,
    *,
    reward_range: RewardRange = UNIT_RANGE,
) -> Scored | None:
    """Returns the result of these rewards, as shares of `reward_range` in [0, 1]; NaN is left out.
    None: there are no rewards, or the task's name cannot be stored."""
    rewards = [reward for reward in rewards if not math.isnan(reward)]
    if not rewards or not task_id or len(task_id) > LONGEST_TASK_ID or "\x00" in task_id:
        return None
    return Scored(
        group_id=group_id,
        env=env,
        split=split,
        task_id=task_id,
        attempts=len(rewards),
        rewards=sum(map(reward_range.share, rewards)),
        policy_version=policy_version,
    )


def as_of(estimate: Estimate, version: int, discount: float) -> Estimate:
    """Returns `estimate` discounted to policy `version`; never back to an earlier version."""
    later = version - estimate.policy_version
    if later <= 0 or estimate.policy_version < 0:
        return estimate
    kept = discount**later
    return Estimate(
        attempts=estimate.attempts,
        weight=estimate.weight * kept,
        solved=estimate.solved * kept,
        policy_version=version,
    )


def updated(estimate: Estimate, news: Scored, discount: float) -> Estimate:
    before = as_of(estimate, news.policy_version, discount)
    last = max(before.policy_version, news.policy_version)
    behind = last - news.policy_version if news.policy_version >= 0 else 0
    kept = discount**behind
    return Estimate(
        attempts=before.attempts + news.attempts,
        weight=before.weight + news.attempts * kept,
        solved=before.solved + news.rewards * kept,
        policy_version=last,
    )
