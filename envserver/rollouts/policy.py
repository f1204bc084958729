"""Decisions about rollouts and groups, as pure functions."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from envserver_records.backoff import Backoff
from envserver_records.errors import (
    Outcome,
    RolloutError,
    Stale,
    Straggler,
    TokensError,
    Unscorable,
    WorkerDied,
    WorkerError,
    WorkerHung,
)
from envserver_records.records import Group, Trajectory

from ..config import Missing, RolloutsConfig
from ..environment import Isolation
from ..tokens.flags import Actions
from ..workers.worker_main import EXIT_CRASHED
from .estimates import Scored

_RETRY = Backoff(first_seconds=0.2, max_seconds=10.0, jitter=(0.5, 1.0))


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
    return _RETRY.seconds(attempts, jitter)


def is_stale(oldest: int, version: int, most: int | None) -> bool:
    """Whether a token of version `oldest` (-1: unknown, is never) is more than `most` behind."""
    return most is not None and oldest >= 0 and version - oldest > most


def oldest_deliverable(version: int, most: int | None) -> int:
    """The lowest version of a group that may be delivered while `version` is published."""
    return -1 if most is None else max(-1, version - most)


def group_seconds_left(
    rollouts: RolloutsConfig, age_seconds: float, since_enough_seconds: float | None
) -> float | None:
    """For how long the rollouts of a group that are not done are waited for; None: without end.

    Args:
        age_seconds: since the group was begun.
        since_enough_seconds: since its smallest acceptable number was scored; None: not yet.
    """
    if rollouts.stragglers == "wait":
        return None
    left = rollouts.group_timeout_seconds - age_seconds
    if rollouts.straggler_grace_seconds is not None and since_enough_seconds is not None:
        left = min(left, rollouts.straggler_grace_seconds - since_enough_seconds)
    return max(0.0, left)


class Drop(msgspec.Struct, frozen=True):
    """Why a group is not delivered; `failed` tells a failure from a filter.

    `scored`: what it says of its task all the same; None where not all that it needed was scored.
    """

    reason: str
    message: str
    failed: bool
    scored: Scored | None = None


class GroupRules(msgspec.Struct, frozen=True, kw_only=True):
    """What a group must be to be delivered.

    Args:
        size: rollouts that are begun for it.
        least: of them that must be left.
        failed: whether a group without one that failed for good may be delivered; `late`: without
            one that was cancelled, because its group's time was over or it was too old.
        max_token_length: of its longest sequence.
        max_staleness: versions that its oldest token may be behind; None: any.
    """

    size: int
    least: int
    failed: Missing = "shrink"
    late: Missing = "shrink"
    drop_zero_variance: bool = False
    max_token_length: int = 2**31 - 1
    max_staleness: int | None = None


def rules_of(
    rollouts: RolloutsConfig, *, size: int, drop_zero_variance: bool, max_token_length: int
) -> GroupRules:
    """The rules of an environment's groups."""
    least = size if rollouts.min_group_size is None else min(rollouts.min_group_size, size)
    drops = rollouts.stale_groups == "drop"
    return GroupRules(
        size=size,
        least=least,
        failed=rollouts.failed_in_group,
        late=rollouts.late_in_group,
        drop_zero_variance=drop_zero_variance,
        max_token_length=max_token_length,
        max_staleness=rollouts.max_staleness_at_delivery if drops else None,
    )


_LATE = (Straggler.kind, Stale.kind)


def judge_losses(lost: Mapping[str, int], rules: GroupRules) -> Drop | None:
    """Why a group that has lost so many rollouts, by kind of failure, cannot be delivered any more.

    More losses never make it deliverable again, so that the rest need not be made.
    """
    missing = sum(lost.values())
    late = sum(lost.get(kind, 0) for kind in _LATE)
    refused = (late and rules.late == "drop_group") or (
        missing > late and rules.failed == "drop_group"
    )
    if not refused and rules.size - missing >= rules.least:
        return None
    causes = sorted(kind for kind, count in lost.items() if count)
    message = f"{missing} of {rules.size} rollouts are lost ({', '.join(causes)})."
    if causes == [Stale.kind]:  # nothing failed: trainers were quick
        return Drop("stale", message, False)
    return Drop("incomplete", message, True)


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


def judge_group(group: Group, rules: GroupRules, version: int) -> Drop | None:
    """Why `group` (of deliverable trajectories only) is not delivered, None if it is.

    Args:
        version: of the policy that is published now, -1 for none.
    """
    if (drop := judge_losses(group.lost, rules)) is not None:
        return drop
    if is_stale(group.policy_version, version, rules.max_staleness):
        behind = f"version {group.policy_version} sampled it, {version} is published"
        return Drop("stale", f"It is too old: {behind}.", False)
    longest = max(
        (len(row.tokens) for trajectory in group.trajectories for row in trajectory.sequences),
        default=0,
    )
    if longest > rules.max_token_length:
        return Drop(
            "too_long",
            f"A sequence has {longest} tokens, {rules.max_token_length} are allowed.",
            False,
        )
    rewards = {trajectory.score.reward for trajectory in group.trajectories}
    if rules.drop_zero_variance and len(group.trajectories) > 1 and len(rewards) == 1:
        return Drop("zero_variance", f"All rewards are {rewards.pop()}.", False)
    return None
