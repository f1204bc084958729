"""Rules about what is learned from: rewards, answers, lengths, tokens that are not trained."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from .situation import Array, Finding, Situation, counted, duration, of_groups, percent

_LEAST_FALL: Final = 0.15
"""Part of the range of rewards."""
_SIGMAS: Final = 3.5
_GROWTH: Final = 1.5
_SAME_REWARD: Final = 0.02
_QUARTERS: Final = 4
_ROLLOUTS_IN_A_GROUP: Final = 4
_ALWAYS: Final = 0.98
_DIFFERING: Final = 0.05


def reward_fell(at: Situation) -> Iterator[Finding]:
    """The split of the last hours with the largest fall of the mean reward, if that is not chance.

    The standard error takes each group as one draw, with the largest deviation that the range of
    rewards allows.
    """
    curves = at.curves
    for environment in curves.values_of("envserver_reward_count", "environment"):
        of = {"environment": environment}
        low, high = at.reward_range(environment)
        groups = curves.growth("envserver_groups_delivered_total", **of)
        for agent in curves.values_of("envserver_reward_count", "agent", **of):
            sums, counts = curves.sums(
                "envserver_reward_sum", "envserver_reward_count", agent=agent, **of
            )
            about = f"{environment}/{agent}" if agent else environment
            bound = at.bound("reward_fell", about, 1.0)
            found = _fall(sums, counts, groups, high - low, at.config.fewest, bound)
            if found is None:
                continue
            split, before, after = found
            version = int(curves.level("envserver_policy_version")[split + 1])
            ago = duration(float(curves.times[-1] - curves.times[split]))
            since = f"since version {version}" if version >= 0 else f"in the last {ago}"
            whose = f"{environment} ({agent})" if agent else environment
            yield Finding(
                name="reward_fell",
                severity="critical",
                text=f"The reward of {whose} fell from {before:.2f} to {after:.2f} {since}.",
                about=about,
                environment=environment,
                link=of_groups(environment, order="newest"),
                since=float(curves.times[split]),
            )


def _fall(
    sums: Array, counts: Array, groups: Array, width: float, fewest: int, bound: float
) -> tuple[int, float, float] | None:
    """Returns the index of the fall, and the mean rewards before and after it.

    Args:
        sums, counts, groups: growth of the sum of rewards, of their number, and of groups.
        width: of the range of rewards; infinite: twice the standard deviation is not known.
        bound: factor of the thresholds.
    """
    if not math.isfinite(width):
        return None
    inside = np.flatnonzero((groups >= fewest) & (groups[-1] - groups >= fewest))
    if not len(inside):
        return None
    left, right = counts[inside], counts[-1] - counts[inside]
    before = sums[inside] / np.maximum(left, 1)
    after = (sums[-1] - sums[inside]) / np.maximum(right, 1)
    error = width / 2 * np.sqrt(1 / groups[inside] + 1 / (groups[-1] - groups[inside]))
    sigmas = np.where((left > 0) & (right > 0), (before - after) / error, 0.0)
    best = int(np.argmax(sigmas))
    fall = before[best] - after[best]
    if sigmas[best] < bound * _SIGMAS or fall < bound * _LEAST_FALL * width:
        return None
    # It ends when the latest groups are good again.
    start = int(np.searchsorted(groups, groups[-1] - fewest, side="right")) - 1
    latest = (sums[-1] - sums[start]) / max(1.0, counts[-1] - counts[start])
    if latest > before[best] - fall / 2:
        return None
    return int(inside[best]), float(before[best]), float(after[best])


def longer_answers(at: Situation) -> Iterator[Finding]:
    """Tokens per rollout grow from quarter to quarter of the last hours, the reward does not."""
    curves = at.curves
    for environment in curves.values_of("envserver_tokens_total", "environment"):
        of = {"environment": environment}
        ended = sum(
            curves.growth("envserver_rollouts_total", end=end, **of)
            for end in curves.values_of("envserver_rollouts_total", "end", **of)
            if end not in ("lost", "stale")
        )
        if np.max(ended) < _QUARTERS * _ROLLOUTS_IN_A_GROUP * at.config.fewest:
            continue
        assert isinstance(ended, np.ndarray)
        tokens = curves.growth("envserver_tokens_total", kind="completion", **of)
        places = np.searchsorted(ended, ended[-1] * np.linspace(0, 1, _QUARTERS + 1))
        # Of several times without an end between them the last one counts at the beginning.
        places[0] = np.searchsorted(ended, 0, side="right") - 1
        if len(set(places.tolist())) <= _QUARTERS:
            continue
        lengths = np.diff(tokens[places]) / np.diff(ended[places])
        sums, counts = curves.sums("envserver_reward_sum", "envserver_reward_count", **of)
        rewarded = np.diff(counts[places])
        if not rewarded[0] or not rewarded[-1] or np.any(lengths[1:] < 0.95 * lengths[:-1]):
            continue
        rewards = np.diff(sums[places])[[0, -1]] / rewarded[[0, -1]]
        low, high = at.reward_range(environment)
        width = high - low if math.isfinite(high - low) else max(1.0, abs(rewards[0]))
        growth = 1 + at.bound("longer_answers", environment, _GROWTH - 1)
        if lengths[-1] < growth * lengths[0] or rewards[1] - rewards[0] > _SAME_REWARD * width:
            continue
        yield Finding(
            name="longer_answers",
            severity="warning",
            text=(
                f"The answers of {environment} grow longer, from {lengths[0]:,.0f} to "
                f"{lengths[-1]:,.0f} tokens a rollout, while its reward does not: "
                f"{rewards[0]:.2f}, then {rewards[1]:.2f}."
            ),
            environment=environment,
            link=of_groups(environment, order="longest"),
        )


def alike_groups(at: Situation) -> Iterator[Finding]:
    """Groups that teach nothing: rewards always at a bound, all equal, or answers all the same."""
    for environment in at.curves.values_of("envserver_groups_delivered_total", "environment"):
        of = {"environment": environment}
        groups = at.grown("envserver_groups_delivered_total", **of) + at.grown(
            "envserver_groups_dropped_total", reason="zero_variance", **of
        )
        if groups < at.config.fewest:
            continue
        share = {
            alike: at.grown("envserver_groups_alike_total", alike=alike, **of) / groups
            for alike in ("lowest", "highest", "answers")
        }
        share["rewards"] = at.grown("envserver_groups_equal_total", **of) / groups
        at_bound = [
            _always(at, environment, bound, groups)
            for bound in ("lowest", "highest")
            if share[bound] >= at.bound(f"reward_always_{bound}", environment, _ALWAYS)
        ]
        yield from at_bound
        equal, same = at.config.equal_share, at.config.same_share
        if not at_bound and share["rewards"] >= at.bound("equal_rewards", environment, equal):
            yield Finding(
                name="equal_rewards",
                severity="warning",
                text=(
                    f"In {percent(share['rewards'])} of the groups of {environment} "
                    f"({counted(groups, 'group')} {at.recently()}) all rewards are equal: there "
                    "is nothing to learn."
                ),
                environment=environment,
                link=of_groups(environment, order="newest"),
            )
        if share["answers"] >= at.bound("same_answers", environment, same):
            yield Finding(
                name="same_answers",
                severity="warning",
                text=(
                    f"In {percent(share['answers'])} of the groups of {environment} "
                    f"({counted(groups, 'group')} {at.recently()}) all rollouts say the same: is "
                    "the temperature 0, or has the policy collapsed?"
                ),
                environment=environment,
                link=of_groups(environment, order="newest"),
            )


def _always(at: Situation, environment: str, bound: str, groups: float) -> Finding:
    low, high = at.reward_range(environment)
    value = low if bound == "lowest" else high
    why = (
        "the environment is broken, or its tasks are too hard"
        if bound == "lowest"
        else "its tasks are too easy, or the reward is cheated"
    )
    return Finding(
        name=f"reward_always_{bound}",
        severity="critical" if bound == "lowest" else "warning",
        text=(
            f"The reward of {environment} is always {value:g} "
            f"({counted(groups, 'group')} {at.recently()}): {why}."
        ),
        environment=environment,
        link=of_groups(environment, order="newest"),
    )


def untrained_tokens(at: Situation) -> Iterator[Finding]:
    """Flags keep a large share of the sampled tokens from training."""
    for environment in at.curves.values_of("envserver_untrained_share", "environment"):
        of = {"environment": environment}
        groups = at.grown("envserver_groups_delivered_total", **of) + at.grown(
            "envserver_groups_dropped_total", **of
        )
        share = at.curves.now("envserver_untrained_share", **of)
        bound = at.bound("untrained_tokens", environment, at.config.untrained_share)
        if groups < at.config.fewest or share < bound:
            continue
        flags = at.curves.values_of("envserver_untrained_tokens_total", "flag", **of)
        most = max(
            flags,
            key=lambda flag: at.grown("envserver_untrained_tokens_total", flag=flag, **of),
            default="",
        )
        yield Finding(
            name="untrained_tokens",
            severity="warning",
            text=(
                f"{percent(share)} of the sampled tokens of {environment} are not trained"
                f"{f', most because of {most}' if most else ''}."
            ),
            environment=environment,
            link=of_groups(environment, **({"flag": most} if most else {})),
        )


def logprobs_differ(at: Situation) -> Iterator[Finding]:
    """The audit computes other logprobs than were delivered."""
    rows, differing = at.facts.audited, at.facts.differing
    if rows < at.config.fewest or differing < at.bound("logprobs_differ", "", _DIFFERING) * rows:
        return
    yield Finding(
        name="logprobs_differ",
        severity="critical",
        text=(
            f"The logprobs of {percent(differing / rows)} of the audited rows ({differing} of "
            f"{rows}) differ from what the engine computes again."
        ),
        link="#/engines",
    )
