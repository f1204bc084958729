"""Decisions about rollouts and groups: retry, limit, drop. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

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

from ..tokens.flags import Actions
from .equal_rollouts import Alike, alike, all_equal
from .estimates import Scored

if TYPE_CHECKING:
    from ..config import RolloutsConfig

Missing = Literal["shrink", "drop_group"]
_RETRY = Backoff(first_seconds=0.2, max_seconds=10.0, jitter=(0.5, 1.0))


def is_retried(error: RolloutError, attempts: int, max_attempts: int, *, scored: int = 0) -> bool:
    """Returns whether a failed rollout is retried after `attempts` counted attempts.

    Args:
        scored: number of scored rollouts of its group. Without any, a bug is final.
    """
    if is_bug(error) and not scored:
        return False
    return error.outcome is Outcome.RETRY and attempts < max_attempts


def is_bug(error: RolloutError) -> bool:
    """Returns whether the environment's code or setup failed in a way that no retry can avoid."""
    return "bug" in error.detail


def counts_as_attempt(error: RolloutError) -> bool:
    """Whether a failure counts as an attempt. It does not if another rollout ended the process.

    Only the pool knows that; what an agent reports about its own failure is not considered.
    """
    return not (isinstance(error, WorkerError) and error.detail.get("mate", False))


class Tries(msgspec.Struct):
    """The failed attempts of a rollout: those that count, and those that ended their worker."""

    counted: int = 0
    deaths: int = 0

    def add(self, error: RolloutError) -> None:
        """Counts a failed attempt."""
        self.counted += counts_as_attempt(error)
        self.deaths += _ended_own_worker(error)


def blames_model(rollouts: RolloutsConfig, deaths: int) -> bool:
    """Returns whether an attempt is scored if it ends its worker after `deaths` that did so."""
    most = rollouts.worker_deaths
    return most is not None and deaths + 1 >= min(most, rollouts.max_attempts)


def limit_of_death(error: WorkerError, *, spoke: bool, overdue: bool) -> str | None:
    """Returns the limit that the model exceeded by ending its own worker, or None.

    It may end the worker, break its protocol or block it ("crash"), or keep it from ending in time
    ("time"). If such a rollout were retried and dropped, the model would pay nothing for it and the
    group would be lost.

    Args:
        spoke: whether the model had answered; before that, it can have caused nothing.
        overdue: whether the rollout's deadline had passed.
    """
    if not spoke or not _ended_own_worker(error):
        return None
    return "time" if overdue and isinstance(error, WorkerHung) else "crash"


def _ended_own_worker(error: RolloutError) -> bool:
    if not isinstance(error, WorkerError) or error.detail.get("mate"):
        return False
    seen = "signal" in error.detail or "exit_code" in error.detail
    starved = error.detail.get("out_of_memory")
    return not isinstance(error, WorkerDied) or (seen and not starved)


def retry_delay_seconds(attempts: int, jitter: float) -> float:
    """Pause before the next attempt: 0.2 s doubling up to 10 s, spread by `jitter` in [0, 1]."""
    return _RETRY.seconds(attempts, jitter)


def is_stale(oldest: int, version: int, most: int | None) -> bool:
    """Whether version `oldest` is more than `most` versions behind `version`; -1 is never stale."""
    return most is not None and oldest >= 0 and version - oldest > most


def oldest_deliverable(version: int, most: int | None) -> int:
    """Returns the lowest version of a group that may be delivered while `version` is published."""
    return -1 if most is None else max(-1, version - most)


def group_seconds_left(
    rollouts: RolloutsConfig, age_seconds: float, since_enough_seconds: float | None
) -> float | None:
    """Returns how long to wait for a group's unfinished rollouts; None: until they end.

    Args:
        age_seconds: seconds since the group started.
        since_enough_seconds: seconds since its minimum number was scored; None: not yet.
    """
    if rollouts.stragglers == "wait":
        return None
    left = rollouts.group_timeout_seconds - age_seconds
    if rollouts.straggler_grace_seconds is not None and since_enough_seconds is not None:
        left = min(left, rollouts.straggler_grace_seconds - since_enough_seconds)
    return max(0.0, left)


class Drop(msgspec.Struct, frozen=True):
    """Why a group is not delivered; `failed` distinguishes a failure from a filter.

    `scored`: what the group still tells about its task; None unless all required were scored.
    `bug`: the group ended at its first failure, a bug of the environment. `hopeless`: a library or
    a setting is missing, so no other group can succeed. `alike`: see `rewards.alike`.
    """

    reason: str
    message: str
    failed: bool
    scored: Scored | None = None
    bug: bool = False
    hopeless: bool = False
    alike: tuple[Alike, ...] = ()


class GroupRules(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions for delivering a group.

    Args:
        size: number of rollouts started for it.
        least: minimum number of rollouts left.
        failed: shrink or drop a group in which rollouts failed for good.
        late: shrink or drop a group in which rollouts were cancelled as stragglers or as stale.
        max_token_length: maximum length of a sequence, in tokens.
        max_staleness: maximum versions that its oldest token may be behind; None: no limit.
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
    """Returns the rules for an environment's groups."""
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
    """Returns why a group with these losses (counts by kind of failure) is dropped, or None.

    More losses never make a group deliverable again, so the rest need not be made.
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
    if causes == [Stale.kind]:  # nothing failed: trainers were fast
        return Drop("stale", message, False)
    return Drop("incomplete", message, True)


def judge_trajectory(
    trajectory: Trajectory, *, need_exact: bool, actions: Actions
) -> RolloutError | None:
    """Returns why a trajectory must not be delivered, or None.

    Args:
        need_exact: whether token ids and logprobs are required (for RL), or text is enough.
        actions: what to do about each flag.
    """
    if trajectory.score.reward is None:
        return Unscorable("The score has no reward.")
    if trajectory.others and not trajectory.turns:
        return TokensError("None of the trained agents produced an answer.")
    if need_exact and not trajectory.sequences:
        masking = [flag for flag in trajectory.flags if actions.of(flag) == "mask"]
        if masking and actions.worst(trajectory.flags) == "mask":
            return TokensError(f"All of its tokens are masked ({', '.join(masking)}).")
        return TokensError("No tokens were recorded.")
    if need_exact and actions.worst(trajectory.flags) == "drop":
        return TokensError(f"The tokens are not exact ({', '.join(trajectory.flags)}).")
    return None


def judge_group(group: Group, rules: GroupRules, version: int) -> Drop | None:
    """Returns why `group` (of deliverable trajectories only) is dropped, or None.

    Args:
        version: the published policy version; -1: none yet.
    """
    if (drop := judge_losses(group.lost, rules)) is not None:
        return drop
    if is_stale(group.policy_version, version, rules.max_staleness):
        behind = f"sampled by version {group.policy_version}, version {version} is published"
        setting = "--rollouts.max_staleness_at_delivery"
        return Drop("stale", f"The group is stale: {behind} ({setting}).", False)
    longest = max(
        (len(row.tokens) for trajectory in group.trajectories for row in trajectory.sequences),
        default=0,
    )
    if longest > rules.max_token_length:
        return Drop(
            "too_long",
            f"A sequence has {longest:,} tokens; the maximum is {rules.max_token_length:,} "
            "(--env.max_token_length).",
            False,
        )
    if rules.drop_zero_variance and len(group.trajectories) > 1 and all_equal(group.trajectories):
        reward = group.trajectories[0].score.reward
        message = f"All rewards are equal (mean {reward}): --env.ensure_scores_are_not_same."
        return Drop("zero_variance", message, False, alike=alike(group))
    return None
