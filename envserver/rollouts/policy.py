"""Decisions about rollouts and groups: retry, limit, drop; how many may start. Pure functions."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import numpy as np
import structlog
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
from envserver_records.records import Call, Group, Score, Trajectory
from envserver_records.records import Sequence as Row
from envserver_records.waiting import Backoff

from ..tokens.flags import FLAGS, Actions, flags_of
from .estimates import Scored

if TYPE_CHECKING:
    from ..settings.config import RolloutsConfig
    from ..settings.section import EnvironmentConfig


Alike = Literal["lowest", "highest", "answers"]


def alike(group: Group) -> tuple[Alike, ...]:
    """Returns in what the rollouts of a group are alike: all rewards are at the lowest or highest
    of the range, even of a single rollout; the same tokens (answers) were sampled, or the same
    texts."""
    rollouts = group.trajectories
    found: list[Alike] = []
    rewards = {rollout.score.reward for rollout in rollouts}
    if rewards == {group.reward_range.low}:
        found.append("lowest")
    if rewards == {group.reward_range.high}:
        found.append("highest")
    if len(rollouts) > 1 and all(_says_the_same(rollouts[0], rollout) for rollout in rollouts[1:]):
        found.append("answers")
    return tuple(found)


def _says_the_same(trajectory: Trajectory, other: Trajectory) -> bool:
    if trajectory.sequences and len(trajectory.sequences) == len(other.sequences):
        return all(
            np.array_equal(ours.tokens, theirs.tokens)
            for ours, theirs in zip(trajectory.sequences, other.sequences, strict=True)
        )
    return (
        bool(trajectory.messages)
        and not trajectory.sequences
        and trajectory.messages == other.messages
    )


def all_equal(trajectories: Sequence[Trajectory]) -> bool:
    """Returns whether comparing the trajectories teaches nothing: each trained agent has the same
    rewards, of all and of its turns."""
    scores = [trajectory.score for trajectory in trajectories]
    # Rows are of trained agents; without exact tokens there are none, and all agents count.
    agents = {row.agent for trajectory in trajectories for row in trajectory.sequences}
    agents = agents or {name for score in scores for name in score.rewards} or {None}
    return all(
        len({(score.of_agent(agent), _turns_of(score, agent)) for score in scores}) == 1
        for agent in agents
    )


def _turns_of(score: Score, agent: str | None) -> tuple[tuple[int, float], ...]:
    return tuple(sorted((turn.turn, turn.value) for turn in score.turns if turn.agent == agent))


Missing = Literal["shrink", "drop_group"]
_RETRY = Backoff(first_seconds=0.2, max_seconds=10.0, jitter=(0.5, 1.0))


def is_retried(error: RolloutError, attempts: int, max_attempts: int, *, scored: int = 0) -> bool:
    """Returns whether a failed rollout is retried. Without a scored rollout in its group, a bug is
    final."""
    if is_bug(error) and not scored:
        return False
    return error.outcome is Outcome.RETRY and attempts < max_attempts


def is_bug(error: RolloutError) -> bool:
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
    group would be lost. `spoke`: the model had answered; before that, it can have caused nothing.
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
    return -1 if most is None else max(-1, version - most)


def group_seconds_left(
    rollouts: RolloutsConfig, age_seconds: float, since_enough_seconds: float | None
) -> float | None:
    """Returns how long to wait for a group's unfinished rollouts; None: until they end.
    `since_enough_seconds`: since its minimum number was scored; None: not yet."""
    if rollouts.stragglers == "wait":
        return None
    left = rollouts.group_timeout_seconds - age_seconds
    if rollouts.straggler_grace_seconds is not None and since_enough_seconds is not None:
        left = min(left, rollouts.straggler_grace_seconds - since_enough_seconds)
    return max(0.0, left)


class Drop(msgspec.Struct, frozen=True):
    """Why a group is not delivered; `failed` distinguishes a failure from a filter.

    `scored`: what the group still says about its task; None unless all required were scored. `bug`:
    the group ended at its first failure, a bug of the environment. `hopeless`: a library or a
    setting is missing, so no other group can succeed.
    """

    reason: str
    message: str
    failed: bool
    scored: Scored | None = None
    bug: bool = False
    hopeless: bool = False
    alike: tuple[Alike, ...] = ()


class GroupRules(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions for delivering a group of `size` rollouts, of which at least `least` must be
    left.

    Args:
        failed: shrink or drop a group in which rollouts failed for good.
        late: the same if rollouts were cancelled as stragglers or as stale.
        max_token_length: of a sequence.
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
    rollouts: RolloutsConfig, config: EnvironmentConfig, *, drop_zero_variance: bool
) -> GroupRules:
    size = config.group_size
    least = size if rollouts.min_group_size is None else min(rollouts.min_group_size, size)
    drops = rollouts.stale_groups == "drop"
    return GroupRules(
        size=size,
        least=least,
        failed=rollouts.failed_in_group,
        late=rollouts.late_in_group,
        drop_zero_variance=drop_zero_variance,
        max_token_length=config.max_token_length,
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
    """Returns why a trajectory must not be delivered, or None. `need_exact`: token ids and logprobs
    are required (for RL)."""
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


_log = structlog.get_logger("envserver.untrained")

_REMEDIES: Final = {
    "structured_output_masked": "let agents call the model without response_format and a forced "
    "tool_choice, with --tokens.strict_tools drop",
    "undelivered_completion": "raise the agents' timeouts",
    "finish_abort": "pause the engine by drain or keep, not by abort",
    "mixed_versions": "publish less often, or pause by drain",
}


class Untrained(msgspec.Struct, frozen=True):
    """Counts of the sampled tokens of trained agents, as far as the engine counts them; `by_flag`:
    those that are not trained, by the flag that masks or drops them."""

    sampled: int = 0
    by_flag: dict[str, int] = {}

    @property
    def tokens(self) -> int:
        return sum(self.by_flag.values())

    @property
    def share(self) -> float:
        return self.tokens / self.sampled if self.sampled else 0.0


def untrained_of(
    calls: Iterable[Call],
    rows: Iterable[Row],
    flags: Sequence[str],
    actions: Actions,
    *,
    need_exact: bool,
) -> Untrained:
    """Counts the tokens of one rollout in the `calls` of its trained agents. Text without token ids
    does not count, unless it drops the rollout. `need_exact`: whether a flag can drop it."""
    calls = list(calls)
    if need_exact and actions.worst(flags) == "drop":
        sampled = sum(len(call.completion_ids) or call.told_tokens[1] for call in calls)
        dropping = next(flag for flag in flags if actions.of(flag) == "drop")
        return Untrained(sampled, {dropping: sampled} if sampled else {})
    exact = [call for call in calls if call.exact]
    sampled = sum(len(call.completion_ids) for call in exact)
    masked: Counter[str] = Counter()
    for call in exact:
        worst = actions.worst(flags_of(call))
        if worst != "train":
            flag = next(flag for flag in flags_of(call) if actions.of(flag) == worst)
            masked[flag] += len(call.completion_ids)
    left = sampled - sum(int(np.count_nonzero(row.mask)) for row in rows) - masked.total()
    if left > 0:  # `build` masks the older tokens of a row
        masked["mixed_versions"] += left
    return Untrained(sampled, {flag: count for flag, count in masked.items() if count})


def summed(counts: Iterable[Untrained]) -> Untrained:
    sampled, by_flag = 0, Counter[str]()
    for count in counts:
        sampled += count.sampled
        by_flag.update(count.by_flag)
    return Untrained(sampled, dict(by_flag.most_common()))


class UntrainedCeiling:
    """The largest share `most` of untrained tokens of one environment (1: no ceiling) in a window
    of the latest `groups`; nothing is judged before there are as many."""

    def __init__(self, most: float, groups: int) -> None:
        self.most = most
        self._window: deque[Untrained] = deque(maxlen=groups)
        self._was_over = False

    @property
    def window(self) -> Untrained:
        return summed(self._window)

    @property
    def is_over(self) -> bool:
        return len(self._window) == self._window.maxlen and self.window.share > self.most

    def judge(self, group: Untrained) -> str | None:
        """Adds a finished group; returns why it is not offered, or None."""
        self._window.append(group)
        if self.is_over != self._was_over:
            self._was_over = self.is_over
            tell = _log.warning if self._was_over else _log.info
            tell("untrained_over_ceiling" if self._was_over else "untrained_under_ceiling",
                 message=self.message(), hint=self.hint())  # fmt: skip
        return self.message() if self._was_over and group.share > self.most else None

    def message(self) -> str:
        window = self.window
        flags = ", ".join(
            f"{flag} {count / window.sampled:.0%} ({FLAGS[flag].meaning})"
            for flag, count in window.by_flag.items()
        )
        return (
            f"{window.share:.0%} of the tokens sampled in the last {len(self._window)} groups are "
            f"not trained{f': {flags}' if flags else ''}. The ceiling is {self.most:.0%}."
        )

    def hint(self) -> str:
        by_flag = self.window.by_flag
        advice = [f"For {flag}: {_REMEDIES[flag]}." for flag in by_flag if flag in _REMEDIES]
        flags = ",".join(by_flag)
        return " ".join(
            [
                *advice,
                f"--tokens.train {flags} trains them, --tokens.max_untrained_share raises the "
                "ceiling.",
            ]
        )

    def report(self) -> dict[str, Any]:
        window = self.window
        return {
            "share": window.share,
            "ceiling": self.most,
            "groups": len(self._window),
            "tokens": window.by_flag,
            "over": self.is_over,
            "message": f"{self.message()} {self.hint()}" if self.is_over else "",
        }


# Pure. Two bounds, the lower one counts: what waits is bounded (a slow trainer makes neither memory
# nor the store grow), and where groups may only be so many versions old, so is what waits and is
# made together: a group that is begun is delivered behind all of these, a batch for each version.
#
# Each group that a broadcast run is owed waits in its queue, so the slowest of them decides; of the
# shared runs, one that wants more is enough, and one that takes only some environments counts only
# theirs. An environment of which nothing waits and nothing is made may always begin one, so that
# others that fill the queue never keep it from the trainers.

SHARED = "shared"
"""The queue of all runs that share their groups."""


class Taker(msgspec.Struct, frozen=True, kw_only=True):
    """An open run that draws from `queue`: `SHARED`, or its own.

    Args:
        environments: environments whose groups it takes; empty: all.
        batch: number of groups that it takes between two versions.
        is_hungry: it wants more groups before it publishes; those it has do not count.
    """

    name: str
    queue: str
    batch: int
    environments: frozenset[str] = frozenset()
    is_hungry: bool = False

    def takes(self, env: str) -> bool:
        return not self.environments or env in self.environments


class Depth(msgspec.Struct, frozen=True):
    """Groups of one environment in one queue."""

    queued: int = 0
    leased: int = 0


Depths = Mapping[str, Mapping[str, Depth]]
"""Depths by queue and environment."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on waiting groups.

    Args:
        most_groups: maximum groups waiting in a queue.
        most_batches: maximum batches waiting, if that is less (but at least two).
        max_staleness: versions that a group may be behind at delivery; None: no limit.
    """

    most_groups: int
    most_batches: int
    max_staleness: int | None = None


def free_capacity(
    env: str,
    takers: Iterable[Taker],
    depths: Depths,
    open_groups: Mapping[str, int],
    bounds: Bounds,
) -> int:
    """Returns how many groups of `env` may start now; zero or less: none."""
    runs = list(takers)
    queues = {taker.queue for taker in runs if taker.takes(env)}
    if not queues:
        return _capacity_without_takers(runs, depths, bounds)
    return min(
        _capacity_of_queue(
            env,
            [taker for taker in runs if taker.queue == queue],
            depths.get(queue, {}),
            open_groups,
            bounds,
        )
        for queue in queues
    )


def _capacity_without_takers(takers: list[Taker], depths: Depths, bounds: Bounds) -> int:
    """All groups of environments without runs share one bound."""
    untaken = {
        env: depth
        for env, depth in depths.get(SHARED, {}).items()
        if not any(taker.takes(env) for taker in takers)
    }
    return bounds.most_groups - sum(depth.queued for depth in untaken.values())


def _capacity_of_queue(
    env: str,
    takers: list[Taker],
    queue: Mapping[str, Depth],
    open_groups: Mapping[str, int],
    bounds: Bounds,
) -> int:
    own = queue.get(env, Depth())
    has_none = not (own.queued or own.leased or open_groups.get(env))
    found = [
        _capacity_of_taker(taker, takers, queue, open_groups, bounds)
        for taker in takers
        if taker.takes(env)
    ]
    return max(*found, 1 if has_none else min(found))


def _capacity_of_taker(
    taker: Taker,
    sharing: list[Taker],
    queue: Mapping[str, Depth],
    open_groups: Mapping[str, int],
    bounds: Bounds,
) -> int:
    """Runs that take a subset of a run's environments help to empty its queue."""
    helpers = [helper for helper in sharing if _is_within(helper, taker)]
    batch = sum(helper.batch for helper in helpers)
    seen = [depth for env, depth in queue.items() if taker.takes(env)]
    queued = sum(depth.queued for depth in seen)
    free = most_waiting(batch, bounds) - queued
    if bounds.max_staleness is None:
        return free
    # What is leased is a batch that is trained now: a version later it is gone. Who asks for more
    # before that takes more for one version than it said.
    leased = sum(depth.leased for depth in seen)
    ahead = 0 if any(helper.is_hungry for helper in helpers) else min(leased, batch)
    made = sum(count for env, count in open_groups.items() if taker.takes(env))
    return min(free, (bounds.max_staleness + 1) * batch - ahead - queued - made)


def _is_within(taker: Taker, other: Taker) -> bool:
    return not other.environments or (
        bool(taker.environments) and taker.environments <= other.environments
    )


def most_waiting(batch: int, bounds: Bounds) -> int:
    """Returns how many groups may wait: at least two batches, one is made while the other is
    fetched."""
    return max(2 * batch, min(bounds.most_groups, bounds.most_batches * batch))


class RunActivity(msgspec.Struct, frozen=True, kw_only=True):
    """A run and the seconds since it last leased, held or returned a group, or found none."""

    name: str
    is_broadcast: bool
    silent_seconds: float


def silent_runs(runs: Iterable[RunActivity], seconds: float | None) -> list[str]:
    """Returns the broadcast runs to close: silent for `seconds` while another run is not."""
    if seconds is None:
        return []
    silent, live = [], 0
    for run in runs:
        if run.silent_seconds < seconds:
            live += 1
        elif run.is_broadcast:
            silent.append(run.name)
    return silent if live else []
