"""Orders complete groups of rollouts, and picks the row that represents a trajectory.

In: tasks, and the number of rollouts of each. Out: trajectories in that order, each with a reward
and at least one trained token, for trainers that cannot represent missing ones. A rollout lost
without the model's fault never becomes a reward of 0: its whole group is ordered again, so that
rollouts that are compared ran together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from envserver_records import EnvserverError, InputError, Split, Trajectory

from .completions import Completion, completions_of

_MOST_TASKS: Final = 1024
"""Maximum number of tasks in one order."""


class RolloutsLost(EnvserverError):
    """Rollouts failed without the model's fault in all tries."""

    kind = "rollouts_lost"


class Rollouts(Protocol):
    """The part of `envserver_clients.http.EnvClient` that is needed here."""

    async def rollouts(
        self,
        environment: str,
        task_ids: Sequence[str],
        *,
        group_size: int = ...,
        split: Split | None = ...,
        timeout_seconds: float = ...,
    ) -> list[list[Trajectory | None]]: ...


@dataclass(frozen=True)
class GroupOrder:
    """An order of complete groups.

    Args:
        group_size: rollouts of each task.
        split: None: the one that the server serves.
    """

    environment: str
    task_ids: list[str]
    group_size: int = 1
    split: Split | None = None


async def complete_groups(
    client: Rollouts, wish: GroupOrder, *, tries: int = 3, timeout_seconds: float = 3600.0
) -> list[list[Trajectory]]:
    """Returns a complete group for each task, in the order of the tasks.

    Args:
        tries: how often a group is ordered.
        timeout_seconds: time limit of each try.

    Raises:
        RolloutsLost: groups are incomplete after all tries.
    """
    found: list[list[Trajectory]] = [[] for _ in wish.task_ids]
    lacking = list(range(len(wish.task_ids)))
    for _ in range(tries):
        for first in range(0, len(lacking), _MOST_TASKS):
            places = lacking[first : first + _MOST_TASKS]
            groups = await client.rollouts(
                wish.environment,
                [wish.task_ids[place] for place in places],
                group_size=wish.group_size,
                split=wish.split,
                timeout_seconds=timeout_seconds,
            )
            for place, group in zip(places, groups, strict=True):
                found[place] = [one for one in group if one is not None and is_trainable(one)]
        lacking = [place for place in lacking if len(found[place]) < wish.group_size]
        if not lacking:
            return found
    lost = ", ".join(wish.task_ids[place] for place in lacking)
    raise RolloutsLost(
        f"Rollouts of {wish.environment} were lost {tries} times: {lost}.",
        hint="The server's log and /v1/status show why: engine, sandbox or scorer.",
    )


def is_trainable(trajectory: Trajectory) -> bool:
    """Returns whether it has a reward and at least one trained token."""
    return trajectory.score.reward is not None and any(
        sequence.mask.any() for sequence in trajectory.sequences
    )


def completions_of_agent(trajectory: Trajectory, agent: str | None = None) -> list[Completion]:
    """Returns the rows of one of several agents: rewards of different agents must not be compared.

    Args:
        agent: its name; None: the first that has a trained token.
    """
    found = completions_of(trajectory)
    chosen = agent if agent is not None else next((one.agent for one in found), None)
    return [one for one in found if one.agent == chosen]


def main_completion(trajectory: Trajectory, agent: str | None = None) -> Completion:
    """Returns the row with the most trained tokens (of equal ones the last).

    Args:
        agent: see `completions_of_agent`.

    Raises:
        InputError: no token of the trajectory is trained.
    """
    found = completions_of_agent(trajectory, agent)
    if not found:
        raise InputError(f"Rollout {trajectory.rollout_id} has no trained token.", place="mask")
    return max(reversed(found), key=lambda one: sum(one.mask))


def loss_mask(trajectory: Trajectory, completion: Completion) -> list[int]:
    """Returns the mask; all 0 if the trajectory was cut off: only its reward counts."""
    return [0] * len(completion.mask) if trajectory.truncated else completion.mask


def masked_logprobs(completion: Completion, mask: list[int]) -> list[float]:
    """Returns the logprobs, 0.0 where `mask` is 0."""
    return [logprob if one else 0.0 for logprob, one in zip(completion.logprobs, mask, strict=True)]


def reward_of(trajectory: Trajectory, agent: str | None) -> float:
    """Returns the reward of the rows of `agent` (None: the only agent).
    Raises InputError: the trajectory does not have one.
    """
    reward = trajectory.score.of_agent(agent)
    if reward is None:
        raise InputError(f"Rollout {trajectory.rollout_id} has no reward.", place="reward")
    return reward


def turn_rewards(trajectory: Trajectory, row: Completion) -> dict[int, float]:
    """Returns the rewards of the turns of a row, by the place of the last trained token of each."""
    by_call = trajectory.score.call_rewards(row.agent)
    ends = {call: place for place, call in enumerate(row.calls) if row.mask[place]}
    return {place: by_call[call] for call, place in ends.items() if call in by_call}


def named(columns: dict[str, Any], environment: str | None, where: str) -> tuple[str, str]:
    """Returns the environment and the task id that the `columns` of a trainer's row name.

    Args:
        environment: default if they do not name one.
        where: the place of the columns, for the error.

    Raises:
        InputError: the task id or the environment is missing.
    """
    found = columns.get("environment") or environment
    task_id = columns.get("task_id")
    if not found or not task_id:
        missing = "environment" if task_id else "task_id"
        raise InputError(
            f"A row has no {missing} in {where}.",
            hint="Make the data set from `client.tasks(environment)`: one row for each task id.",
            place=where,
        )
    return str(found), str(task_id)
