"""What lists of groups show, sort and filter by, written with each group.

Bodies are never read for a list. Groups of older versions have no facts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

import msgspec
from envserver_records.records import Group
from envserver_records.scores import RewardRange

MOST_REWARDS: Final = 64
"""Rewards that are kept of a group; its mean and bounds are of all."""


class GroupFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a group.

    Args:
        task_id, split, model: as in `records.Group`; "" if unknown.
        rewards: of its rollouts in order, `MOST_REWARDS` at most; None: not scorable.
        reward_mean, reward_min, reward_max: over all rollouts with a reward; None if there is none.
        turns: of its longest rollout.
        completion_tokens: over all rollouts.
        truncated: number of rollouts that a limit of tokens cut off.
        seconds: of its longest rollout.
        flags: those of any rollout, sorted.
        ends: number of rollouts by how they ended: "agent" (by itself), or the limit.
        rated: number of rollouts with a reward.
        solved: number of those that solved the task; None if unknown.
    """

    task_id: str = ""
    split: str = ""
    model: str = ""
    rewards: list[float | None] = []
    reward_mean: float | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    turns: int | None = None
    completion_tokens: int | None = None
    truncated: int = 0
    seconds: float | None = None
    flags: list[str] = []
    ends: dict[str, int] = {}
    rated: int = 0
    solved: int | None = None


def facts_of(group: Group) -> GroupFacts:
    """Returns the facts of a group of this server or of a joined one."""
    rollouts = group.trajectories
    return msgspec.structs.replace(
        facts_of_rewards([one.score.reward for one in rollouts], group.task_id, group.reward_range),
        split=group.split,
        model=group.model,
        turns=max((one.turns for one in rollouts), default=0),
        completion_tokens=sum(one.usage.completion_tokens for one in rollouts),
        truncated=sum(one.truncated for one in rollouts),
        seconds=max((one.usage.seconds for one in rollouts), default=0.0),
        flags=sorted({flag for one in rollouts for flag in one.flags}),
        ends=dict(Counter(one.usage.ended_by for one in rollouts)),
    )


def facts_of_rewards(
    rewards: Iterable[float | None],
    task_id: str | None,
    reward_range: RewardRange | None = None,
) -> GroupFacts:
    """Returns the facts of a group of which only the rewards are known.

    Args:
        reward_range: says which reward solves the task; None: unknown.
    """
    listed = list(rewards)
    given = [one for one in listed if one is not None]
    return GroupFacts(
        task_id=task_id or "",
        rewards=listed[:MOST_REWARDS],
        reward_mean=sum(given) / len(given) if given else None,
        reward_min=min(given, default=None),
        reward_max=max(given, default=None),
        rated=len(given),
        solved=sum(map(reward_range.is_solved, given)) if reward_range is not None else None,
    )


def facts_row(seq: int, env: str, facts: GroupFacts) -> tuple[object, ...]:
    """Returns the row of the table `group_facts` for a group of the environment `env`."""
    return (
        seq,
        facts.task_id,
        facts.split,
        facts.model,
        _json(facts.rewards),
        facts.reward_mean,
        facts.reward_min,
        facts.reward_max,
        facts.turns,
        facts.completion_tokens,
        facts.truncated,
        facts.seconds,
        _json(facts.flags),
        _json(facts.ends),
        facts.rated,
        facts.solved,
        env,
    )


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
