"""Finds groups whose rollouts do not differ, so that comparing them teaches nothing. Pure.

In: trajectories of one task. Out: in what they are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from envserver_records.records import Group, Score, Trajectory

Alike = Literal["lowest", "highest", "answers"]


def alike(group: Group) -> tuple[Alike, ...]:
    """Returns in what the rollouts of a group are alike: there is nothing to compare.

    lowest, highest: all rewards are at that bound of the range, even of a single rollout; answers:
    the same tokens were sampled, or the same texts.
    """
    rollouts = group.trajectories
    found: list[Alike] = []
    rewards = {one.score.reward for one in rollouts}
    if rewards == {group.reward_range.low}:
        found.append("lowest")
    if rewards == {group.reward_range.high}:
        found.append("highest")
    if len(rollouts) > 1 and all(_says_the_same(rollouts[0], one) for one in rollouts[1:]):
        found.append("answers")
    return tuple(found)


def _says_the_same(one: Trajectory, other: Trajectory) -> bool:
    if one.sequences and len(one.sequences) == len(other.sequences):
        return all(
            np.array_equal(ours.tokens, theirs.tokens)
            for ours, theirs in zip(one.sequences, other.sequences, strict=True)
        )
    return bool(one.messages) and not one.sequences and one.messages == other.messages


def all_equal(trajectories: Sequence[Trajectory]) -> bool:
    """Returns whether each trained agent has the same rewards, of all and of its turns, in all
    trajectories, so that comparing them teaches nothing."""
    scores = [trajectory.score for trajectory in trajectories]
    # Rows are of trained agents; without exact tokens there are none, and all agents count.
    agents = {row.agent for trajectory in trajectories for row in trajectory.sequences}
    agents = agents or {name for score in scores for name in score.rewards} or {None}
    return all(
        len({(score.of_agent(agent), _turns_of(score, agent)) for score in scores}) == 1
        for agent in agents
    )


def _turns_of(score: Score, agent: str | None) -> tuple[tuple[int, float], ...]:
    return tuple(sorted((one.turn, one.value) for one in score.turns if one.agent == agent))
