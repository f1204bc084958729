"""Decisions about rollouts and groups, as pure functions."""

from __future__ import annotations

import msgspec

from ..environment import Isolation
from ..errors import (
    Outcome,
    RolloutError,
    TokensError,
    Unscorable,
    WorkerDied,
    WorkerError,
    WorkerHung,
)
from ..records import Group, Trajectory
from ..tokens.flags import Actions
from ..workers.child import EXIT_CRASHED


def is_retried(error: RolloutError, attempts: int, max_attempts: int) -> bool:
    """Whether a rollout that failed after `attempts` counted tries gets another one."""
    return error.outcome is Outcome.RETRY and attempts < max_attempts


def counts_as_attempt(error: RolloutError) -> bool:
    """A rollout that died because another one in its process did has not been tried.

    Only the pool knows that: what an agent says of its own failure does not count.
    """
    return not (isinstance(error, WorkerError) and error.detail.get("mate", False))


def limit_of_death(
    error: WorkerError, isolation: Isolation, *, spoke: bool, overdue: bool
) -> str | None:
    """The limit that the model passed by ending its own worker; None: the death may be ours.

    Only where `isolation` is "sandboxed" does code of the model run in reach of its worker. It may
    end it by exit or by any signal ("crash"), or keep it from ending in time ("time"). If that were
    retried until it is dropped, it would cost the model nothing, and its whole group us.

    Args:
        spoke: the model had answered: before that there is no code of it.
        overdue: the rollout's deadline had passed.
    """
    if isolation != "sandboxed" or not spoke or error.detail.get("mate"):
        return None
    if isinstance(error, WorkerHung):
        return "time" if overdue else None
    if not isinstance(error, WorkerDied) or error.detail.get("out_of_memory"):
        return None
    code = error.detail.get("exit_code", EXIT_CRASHED)  # with which our own failures end
    return "crash" if "signal" in error.detail or code != EXIT_CRASHED else None


def retry_delay_seconds(attempts: int, jitter: float) -> float:
    """Pause before the next try: 0.2 s doubling to at most 10 s, spread by `jitter` in [0, 1]."""
    # Bounded before it is a power: a server outlives its engine for any number of attempts.
    return min(10.0, 0.2 * 2.0 ** min(attempts - 1, 16)) * (0.5 + jitter / 2)


class Drop(msgspec.Struct, frozen=True):
    """Why a group is not delivered; `failed` tells a failure from a filter."""

    reason: str
    message: str
    failed: bool


def judge_trajectory(
    trajectory: Trajectory, *, need_exact: bool, actions: Actions
) -> RolloutError | None:
    """Why this trajectory may not be delivered, None if it may.

    Args:
        need_exact: whether token ids and logprobs must be there (for RL), or text will do.
        actions: what is done about each flag.
    """
    if trajectory.score.reward is None:
        return Unscorable("Its score has no reward.")
    if trajectory.others and not trajectory.turns:
        return TokensError("None of its trained agents said anything.")
    if need_exact and not trajectory.sequences:
        return TokensError("No token of it was recorded.")
    if need_exact and actions.worst(trajectory.flags) == "drop":
        return TokensError(f"Its tokens are not exact ({', '.join(trajectory.flags)}).")
    return None


def judge_group(
    group: Group,
    *,
    group_size: int,
    min_group_size: int | None,
    drop_zero_variance: bool,
    max_token_length: int,
) -> Drop | None:
    """Why `group` (of deliverable trajectories only) is not delivered, None if it is."""
    size = len(group.trajectories)
    need = group_size if min_group_size is None else min(min_group_size, group_size)
    if size < need:
        causes = ", ".join(sorted({failure.kind for failure in group.failures})) or "unscorable"
        return Drop("incomplete", f"{size} of {group_size} rollouts are usable ({causes}).", True)
    longest = max(
        (len(row.tokens) for trajectory in group.trajectories for row in trajectory.sequences),
        default=0,
    )
    if longest > max_token_length:
        return Drop(
            "too_long", f"A sequence has {longest} tokens, {max_token_length} are allowed.", False
        )
    rewards = {trajectory.score.reward for trajectory in group.trajectories}
    if drop_zero_variance and size > 1 and len(rewards) == 1:
        return Drop("zero_variance", f"All rewards are {rewards.pop()}.", False)
    return None
