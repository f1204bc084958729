"""Orders complete groups, and splits trajectories into the prompts and completions of trainers.

Invariants: prompt and completion together are the sequence's tokens (nothing is tokenised again);
logprobs are 0 where the mask is. A rollout lost without the model's fault never becomes a reward of
0: its whole group is ordered again, so that rollouts that are compared ran together. Rows of
another temperature than the trainer's are refused: it would learn from wrong ratios and show
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import numpy as np
from envserver_records import EnvserverError, InputError, Sequence, Split, Trajectory
from envserver_records.experts import Table, row_experts
from envserver_records.images import RowImage, images_of
from envserver_records.sampling import SamplingSpan

_MOST_TASKS: Final = 1024
"""Maximum number of tasks in one order."""


@dataclass(frozen=True)
class Completion:
    """One sequence, split before its first trained token; all lists but `images` are per token.

    Args:
        mask: 1: sampled by the policy and trained, 0: context (the answers of tools and users).
        logprobs: 0.0 where mask is 0.
        versions, calls: the policy version and the call that sampled it, -1 for context.
        continued: it follows another row by compaction, and no row follows it.
        images: those among all the tokens, in order; their places count from the prompt's begin.
        experts: [N, layers, experts per token], that the engine routed the first N tokens to: all
            tokens but the last. None: not recorded.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    versions: list[int]
    calls: list[int]
    agent: str | None = None
    continued: bool = False
    images: list[RowImage] = field(default_factory=list)
    experts: Table | None = None


def completion_of(sequence: Sequence, images: dict[str, bytes]) -> Completion | None:
    """Splits `sequence`; None if none of its tokens is trained. Tokens after the last trained one
    are left out: they teach nothing.

    Raises InputError: the bytes of an image are missing, or routed experts do not fit.
    """
    trained = np.flatnonzero(sequence.mask)
    if not trained.size:
        return None
    first, end = int(trained[0]), int(trained[-1]) + 1
    tokens: list[int] = sequence.tokens.tolist()
    try:
        kept = [span for span in sequence.images if span.end <= end]
        shown = images_of(kept, images, end)
        experts = row_experts(sequence.experts, sequence.mask)
    except ValueError as error:
        raise InputError(f"A row cannot be used: {error}.", place="row") from error
    return Completion(
        prompt_ids=tokens[:first],
        completion_ids=tokens[first:end],
        mask=sequence.mask[first:end].tolist(),
        logprobs=sequence.logprobs[first:end].tolist(),
        versions=sequence.versions[first:end].tolist(),
        calls=sequence.calls[first:end].tolist(),
        agent=sequence.agent,
        images=shown,
        experts=None if experts is None else experts[: end - 1],
    )


def completions_of(trajectory: Trajectory) -> list[Completion]:
    """Splits a trajectory's sequences, in order: one, unless the agent changed its history. Those
    without a share of the reward are left out.

    Raises InputError: rows share their advantage, which these trainers compute by themselves.
    """
    if any(0 < row.share < 1 for row in trajectory.sequences):
        raise InputError(
            "Rows share their advantage by length, and this trainer takes only whole ones.",
            hint="Start the server with --env.compaction_rewards same, or last.",
            place="share",
        )
    followed = {row.follows for row in trajectory.sequences}
    return [
        replace(completion, continued=row.follows is not None and number not in followed)
        for number, row in enumerate(trajectory.sequences)
        if row.share and (completion := completion_of(row, trajectory.images)) is not None
    ]


def check_text_only(completion: Completion, trainer: str) -> Completion:
    """Returns the completion. Raises InputError: it has images, without which its tokens would mean
    something else."""
    if completion.images:
        raise InputError(
            f"A row has images, and {trainer} gets tokens only from this adapter.",
            hint="verl's adapter passes images on; row.images has their bytes and places.",
            place="images",
        )
    return completion


def check_spans(spans: Iterable[SamplingSpan], temperature: float | None, setting: str) -> None:
    """Checks how rows were sampled; rows of older servers do not say it, and have no spans.

    `temperature`: the trainer's; None: it takes that of each token. `setting`: its name, for the
    error. Raises InputError: the trainer would compute another distribution than the sampled one.
    """
    for span in spans:
        if span.altered:
            raise InputError(
                f"Rows were sampled with {', '.join(span.altered)}: the trainer does not know what "
                "was cut off.",
                hint="Start the server with --sampling.top_p 1; the temperature is free.",
                place="sampling",
            )
        if temperature is not None and span.temperature != temperature:
            raise InputError(
                f"Rows were sampled at temperature {span.temperature:g}, but the trainer divides "
                f"by {temperature:g}.",
                hint=f"Set {setting} and the server's --sampling.temperature to the same number.",
                place="sampling",
            )
        if span.is_raw:
            raise InputError(
                f"Rows were sampled at temperature {span.temperature:g}, but the engine's logprobs "
                "are from before it.",
                hint="Start the engine with --logprobs-mode processed_logprobs, or set the "
                "temperature to 1.",
                place="sampling",
            )


def check_trajectories(
    trajectories: Iterable[Trajectory | None], temperature: float | None, setting: str
) -> None:
    for trajectory in trajectories:
        for row in trajectory.sequences if trajectory is not None else ():
            check_spans(row.sampling, temperature, setting)


class RolloutsLost(EnvserverError):
    """Rollouts failed without the model's fault in all tries."""

    kind = "rollouts_lost"


class Rollouts(Protocol):
    """The one method of `EnvClient` that is called."""

    async def rollouts(
        self,
        environment: str,
        task_ids: list[str],
        *,
        group_size: int = ...,
        split: Split | None = ...,
        timeout_seconds: float = ...,
    ) -> list[list[Trajectory | None]]: ...


@dataclass(frozen=True)
class GroupOrder:
    """`group_size` rollouts of each task. `split`: None: the one that the server serves."""

    environment: str
    task_ids: list[str]
    group_size: int = 1
    split: Split | None = None


async def complete_groups(
    client: Rollouts, wish: GroupOrder, *, tries: int = 3, timeout_seconds: float = 3600.0
) -> list[list[Trajectory]]:
    """Returns a complete group for each task, in order; each is ordered up to `tries` times, each
    of `timeout_seconds`.

    Raises RolloutsLost: groups are incomplete after all tries.
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
                found[place] = [
                    trajectory
                    for trajectory in group
                    if trajectory is not None and is_trainable(trajectory)
                ]
        lacking = [place for place in lacking if len(found[place]) < wish.group_size]
        if not lacking:
            return found
    lost = ", ".join(wish.task_ids[place] for place in lacking)
    raise RolloutsLost(
        f"Rollouts of {wish.environment} were lost {tries} times: {lost}.",
        hint="The server's log and /v1/status show why: engine, sandbox or scorer.",
    )


def is_trainable(trajectory: Trajectory) -> bool:
    return trajectory.score.reward is not None and any(
        sequence.mask.any() for sequence in trajectory.sequences
    )


def completions_of_agent(trajectory: Trajectory, agent: str | None = None) -> list[Completion]:
    """The rows of one of several agents; None: the first that has a trained token. Rewards of
    different agents must not be compared."""
    found = completions_of(trajectory)
    chosen = agent if agent is not None else next((completion.agent for completion in found), None)
    return [completion for completion in found if completion.agent == chosen]


def main_completion(trajectory: Trajectory, agent: str | None = None) -> Completion:
    """The row with the most trained tokens (of equal ones the last), among those that end a chain
    of compactions, if there are any.

    Raises InputError: no token of the trajectory is trained.
    """
    found = completions_of_agent(trajectory, agent)
    if not found:
        raise InputError(f"Rollout {trajectory.rollout_id} has no trained token.", place="mask")
    return max(reversed(found), key=lambda row: (row.continued, sum(row.mask)))


def loss_mask(trajectory: Trajectory, completion: Completion) -> list[int]:
    """Returns the mask; all 0 if the trajectory was cut off: only its reward counts."""
    return [0] * len(completion.mask) if trajectory.truncated else completion.mask


def masked_logprobs(completion: Completion, mask: list[int]) -> list[float]:
    return [
        logprob if sampled else 0.0
        for logprob, sampled in zip(completion.logprobs, mask, strict=True)
    ]


def reward_of(trajectory: Trajectory, agent: str | None) -> float:
    """Raises InputError: the trajectory has no reward for `agent` (None: the only one)."""
    reward = trajectory.score.of_agent(agent)
    if reward is None:
        raise InputError(f"Rollout {trajectory.rollout_id} has no reward.", place="reward")
    return reward


def turn_rewards(trajectory: Trajectory, row: Completion) -> dict[int, float]:
    """The rewards of the turns of a row, by the place of the last trained token of each."""
    by_call = trajectory.score.call_rewards(row.agent)
    ends = {call: place for place, call in enumerate(row.calls) if row.mask[place]}
    return {place: by_call[call] for call, place in ends.items() if call in by_call}


def named(columns: dict[str, Any], environment: str | None, where: str) -> tuple[str, str]:
    """The environment (by default `environment`) and the task id that a trainer's row names.

    `where`: the place of the columns, for the InputError.
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
