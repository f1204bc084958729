"""Rules of alarms: what stands still or is lost, and rewards that fall or do not differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .alarm_facts import (
    Alarm,
    AlarmFacts,
    Array,
    Situation,
    counted,
    duration,
    of_groups,
    percent,
    short,
    without_credentials,
)

_USED: Final = ("used", "draining")
_UNUSED: Final = ("old", "refused", "unreachable", "checking", "paused")
"""Values of the label `standing` of `envserver_engines`."""
_NO_ENGINE_SECONDS: Final = 60.0
_OPEN: Final = 2.0
"""The value of `envserver_replica_breaker` of a replica that is set aside."""
_FEWEST_LOST: Final = 3
_ROLLOUT_TIMES: Final = 4
_FEWEST_COMMITS: Final = 10
_GB: Final = 1e9
_LIMITS: Final = {
    "turns": "the limit of turns (env.max_turns)",
    "tokens": "the limit of tokens (env.max_completion_tokens)",
    "time": "the limit of time (env.worker_timeout)",
    "context": "the model's context",
    "record": "the limit of the record (workers.max_recorded_mb)",
    "crash": "a crash that the model caused",
}
_SPLIT: Final = ("render_mismatch", "suffix_refused")
"""Flags of conversations that are not continued because their rendering is not known."""
_WHOSE: Final = {
    "engine": "the engine",
    "worker": "the workers",
    "sandbox": "the sandbox",
    "store": "the store",
    "straggler": "the time of their groups",
    "rollout": "the environment's code",
}


Rule = Callable[[Situation], Iterator[Alarm]]
RULES: Final[list[Rule]] = []


def rule(find: Rule) -> Rule:
    RULES.append(find)
    return find


@rule
def no_trainer(at: Situation) -> Iterator[Alarm]:
    curves = at.curves
    waiting = curves.level("envserver_groups", state="queued")
    leased = curves.growth("envserver_leases_total", end="leased")
    idle = (waiting >= max(1, at.facts.groups_wanted)) & (leased == leased[-1])
    seconds = curves.seconds_since(idle)
    if not idle[-1] or seconds < 60 * at.config.no_trainer_minutes:
        return
    text = (
        f"No trainer has leased for {duration(seconds)}, while "
        f"{counted(waiting[-1], 'group')} wait."
    )
    yield Alarm("no_trainer", "warning", text, link="#/runs", since=at.ago(seconds))


@rule
def calls_paused(at: Situation) -> Iterator[Alarm]:
    paused = at.curves.level("envserver_paused") > 0
    seconds = at.curves.seconds_since(paused)
    if not paused[-1] or seconds < 60 * at.config.paused_minutes:
        return
    held = at.curves.now("envserver_calls_waiting")
    text = f"Model calls have been paused for {duration(seconds)}; {held:g} of them wait."
    yield Alarm("calls_paused", "warning", text, link="#/engines", since=at.ago(seconds))


@rule
def rollouts_hang(at: Situation) -> Iterator[Alarm]:
    curves = at.curves
    if curves.now("envserver_paused"):
        return
    for environment in curves.values_of("envserver_rollouts_running", "environment"):
        of = {"environment": environment}
        running = curves.level("envserver_rollouts_running", **of)
        ended = curves.growth("envserver_rollouts_total", **of)
        failed = curves.growth("envserver_failed_attempts_total", **of)
        still = (running > 0) & (ended == ended[-1]) & (failed == failed[-1])
        seconds = curves.seconds_since(still)
        took, count = curves.total(
            float("inf"), "envserver_rollout_seconds_sum", "envserver_rollout_seconds_count", **of
        )
        usual = took / count if count else 0.0
        limit = max(60 * at.config.no_rollout_minutes, _ROLLOUT_TIMES * usual)
        # Before the first one has ended, it is unknown how long they take: are there calls?
        if not count and curves.grown(limit, "envserver_engine_seconds_count"):
            continue
        if not still[-1] or seconds < limit:
            continue
        text = (
            f"No rollout of {environment} has ended for {duration(seconds)}, while "
            f"{counted(running[-1], 'rollout')} run."
        )
        yield Alarm("rollouts_hang", "critical", text, environment, "#/workers", at.ago(seconds))


@rule
def rollouts_lost(at: Situation) -> Iterator[Alarm]:
    for environment in at.curves.values_of("envserver_rollouts_total", "environment"):
        of = {"environment": environment}
        ended = at.grown("envserver_rollouts_total", **of)
        lost = at.grown("envserver_rollouts_total", end="lost", **of)
        bound = at.bound("rollouts_lost", environment, at.config.lost_share)
        if ended < at.config.fewest or lost < max(_FEWEST_LOST, bound * ended):
            continue
        kinds = [
            (at.grown("envserver_failed_attempts_total", kind=kind, **of), kind)
            for kind in at.curves.values_of("envserver_failed_attempts_total", "kind", **of)
            if kind != "stale"
        ]
        count, kind = max(kinds, default=(0.0, ""))
        why = f", most to {_whose(kind)} ({kind}, {counted(count, 'attempt')})" if count else ""
        text = (
            f"{percent(lost / ended)} of the rollouts of {environment} ({lost:g} of "
            f"{ended:g} {at.recently()}) were lost{why}{_words(at.facts, kind)}."
        )
        yield Alarm(
            "rollouts_lost", "critical", text, environment, f"#/failures?environment={environment}"
        )


def _whose(kind: str) -> str:
    return next((whose for part, whose in _WHOSE.items() if kind.startswith(part)), kind)


def _words(facts: AlarmFacts, kind: str) -> str:
    words = short(facts.last_words.get(kind, "")).rstrip(".")
    return f": {words}" if words else ""


@rule
def workers_die(at: Situation) -> Iterator[Alarm]:
    for environment in at.curves.values_of("envserver_worker_deaths_total", "environment"):
        of = {"environment": environment}
        kinds = [
            (at.grown("envserver_worker_deaths_total", kind=kind, **of), kind)
            for kind in at.curves.values_of("envserver_worker_deaths_total", "kind", **of)
        ]
        # What the model's own code ended is no fault of ours: `rollouts_cut` reports it.
        crashes = at.grown("envserver_rollouts_total", end="limit_crash", **of)
        deaths = sum(count for count, _ in kinds) - crashes
        ended = at.grown("envserver_rollouts_total", **of)
        least = max(at.config.worker_deaths, at.config.lost_share * ended)
        if deaths < at.bound("workers_die", environment, least):
            continue
        _, kind = max(kinds)
        text = (
            f"{counted(deaths, 'worker')} of {environment} died {at.recently()} "
            f"({kind}){_words(at.facts, kind)}."
        )
        yield Alarm("workers_die", "critical", text, environment, "#/workers")


@rule
def rollouts_cut(at: Situation) -> Iterator[Alarm]:
    everything = cut = 0.0
    for environment in at.curves.values_of("envserver_rollouts_total", "environment"):
        of = {"environment": environment}
        ends = {
            end: at.grown("envserver_rollouts_total", end=end, **of)
            for end in at.curves.values_of("envserver_rollouts_total", "end", **of)
            if end not in ("lost", "stale")
        }
        ended = sum(ends.values())
        everything += ended
        at_limit = {end.removeprefix("limit_"): n for end, n in ends.items() if "limit_" in end}
        count = sum(at_limit.values())
        bound = at.bound("rollouts_cut", environment, at.config.cut_share)
        if ended < at.config.fewest or count < bound * ended:
            continue
        limit = max(at_limit, key=lambda one: at_limit[one])
        cut += count
        text = (
            f"{percent(count / ended)} of the rollouts of {environment} ({count:g} of "
            f"{ended:g} {at.recently()}) end at a limit, most at "
            f"{_LIMITS.get(limit, limit)}."
        )
        yield Alarm("rollouts_cut", "warning", text, environment, of_groups(environment, end=limit))
    answers = at.grown("envserver_flags_total", flag="truncated_length")
    bound = at.bound("rollouts_cut", "answers", at.config.cut_share)
    if not cut and everything >= at.config.fewest and answers >= bound * everything:
        text = (
            f"{percent(answers / everything)} of the rollouts ({answers:g} of "
            f"{everything:g} {at.recently()}) have an answer that is cut off at its limit of "
            "tokens (sampling.max_tokens)."
        )
        yield Alarm(
            "rollouts_cut", "warning", text, about="answers", link="#/groups?flag=truncated_length"
        )


@rule
def conversations_split(at: Situation) -> Iterator[Alarm]:
    ended = at.grown("envserver_rollouts_total")
    split, flag = max((at.grown("envserver_flags_total", flag=flag), flag) for flag in _SPLIT)
    bound = at.bound("conversations_split", "", at.config.split_share)
    if ended < at.config.fewest or split < bound * ended:
        return
    first = at.facts.differs_at
    text = (
        f"{percent(split / ended)} of the rollouts ({split:g} of {ended:g} {at.recently()}) "
        f"have a row for each call ({flag})"
        f"{f'; the engine first rendered otherwise at {short(first)}' if first else ''}."
    )
    yield Alarm("conversations_split", "warning", text, link=f"#/groups?flag={flag}")


@rule
def stale_groups(at: Situation) -> Iterator[Alarm]:
    made = at.grown("envserver_groups_delivered_total")
    late = at.grown("envserver_groups_dropped_total", reason="stale")
    waited = at.grown("envserver_store_events_total", event="stale_dropped")
    groups, stale = made + late, late + waited
    if groups < at.config.fewest or stale < at.bound("stale_groups", "", at.config.stale_share) * (
        groups
    ):
        return
    cause = (
        "rollouts take too long for the trainer's versions"
        if late > waited
        else "the trainer takes them too slowly"
    )
    text = (
        f"{counted(stale, 'group')} of {groups:g} were dropped as stale {at.recently()}: {cause}."
    )
    yield Alarm("stale_groups", "warning", text, link="#/failures")


@rule
def engine_down(at: Situation) -> Iterator[Alarm]:
    curves = at.curves
    reason = at.facts.broken.get("engine")
    if reason is not None:
        because = f": {short(reason).rstrip('.')}" if reason else ""
        text = f"The engine does not answer{because}."
        yield Alarm("engine_down", "critical", text, link="#/engines")
        return
    replicas = curves.values_of("envserver_replica_breaker", "replica")
    for replica in replicas:
        state = curves.level("envserver_replica_breaker", replica=replica)
        if state[-1] != _OPEN:
            continue
        text = (
            f"The replica {without_credentials(replica)} of the engine is set aside after "
            f"failures (1 of {len(replicas)})."
        )
        yield Alarm(
            "engine_down",
            "warning" if len(replicas) > 1 else "critical",
            text,
            about=replica,
            link="#/engines",
        )


@rule
def engines_unused(at: Situation) -> Iterator[Alarm]:
    curves = at.curves
    if not curves.values_of("envserver_engines", "standing"):
        return
    counts = {one: curves.now("envserver_engines", standing=one) for one in _UNUSED}
    said = ", ".join(f"{count:g} {one}" for one, count in counts.items() if count)
    none = _engines(at, _USED) == 0
    seconds = curves.seconds_since(none)
    if none[-1] and seconds >= _NO_ENGINE_SECONDS:
        text = f"Calls wait, since no engine can be used: {said or 'none is registered'}."
        yield Alarm("engines_unused", "critical", text, link="#/engines", since=at.ago(seconds))
        return
    seconds = curves.seconds_since(_engines(at, _UNUSED) > 0)
    if said and seconds >= 60 * at.config.unused_engine_minutes:
        text = f"Engines have got no calls for {duration(seconds)}: {said}."
        yield Alarm("engines_unused", "warning", text, link="#/engines", since=at.ago(seconds))


def _engines(at: Situation, standings: Sequence[str]) -> NDArray[np.float64]:
    levels = [at.curves.level("envserver_engines", standing=one) for one in standings]
    total: NDArray[np.float64] = np.asarray(levels, dtype=np.float64).sum(axis=0)
    return total


@rule
def old_weights(at: Situation) -> Iterator[Alarm]:
    lost = at.grown("envserver_flags_total", flag="weights_lost")
    if not lost:
        return
    version = int(at.curves.now("envserver_policy_version"))
    text = (
        f"The engine serves older weights than those of version {version}, which were "
        f"published: it was restarted. {counted(lost, 'rollout')} {at.recently()} are not "
        "delivered."
    )
    yield Alarm("old_weights", "critical", text, link="#/groups?flag=weights_lost")


@rule
def runners_silent(at: Situation) -> Iterator[Alarm]:
    for environment in at.curves.values_of("envserver_joined_environments", "environment"):
        silent = at.curves.now(
            "envserver_joined_environments", environment=environment, standing="silent"
        )
        if silent:
            where = "another machine is" if silent == 1 else "other machines are"
            text = f"{counted(silent, 'runner')} of {environment} on {where} silent."
            yield Alarm("runners_silent", "warning", text, environment, "#/workers")


@rule
def disk_full(at: Situation) -> Iterator[Alarm]:
    free = at.facts.disk_free_bytes
    left = "" if free is None else f" {free / _GB:.1f} GB are left."
    if "disk" in at.facts.broken:
        text = f"The disk of the store is full: new groups are refused.{left}"
        yield Alarm("disk_full", "critical", text)
    elif free is not None and free < at.config.disk_free_gb * _GB:
        text = f"The disk of the store fills up.{left}"
        yield Alarm("disk_full", "warning", text)


@rule
def store_slow(at: Situation) -> Iterator[Alarm]:
    took, commits = at.curves.total(
        at.seconds, "envserver_store_commit_seconds_sum", "envserver_store_commit_seconds_count"
    )
    bound = at.bound("store_slow", "", at.config.store_seconds)
    if commits < _FEWEST_COMMITS or took / commits < bound:
        return
    waiting = at.curves.now("envserver_store_waiting")
    text = (
        f"A commit of the store takes {took / commits:.1f} seconds "
        f"({counted(commits, 'commit')} {at.recently()}); {waiting:g} operations wait."
    )
    yield Alarm("store_slow", "warning", text)


_LEAST_FALL: Final = 0.15
"""Part of the range of rewards."""
_SIGMAS: Final = 3.5
_GROWTH: Final = 1.5
_SAME_REWARD: Final = 0.02
_QUARTERS: Final = 4
_ROLLOUTS_IN_A_GROUP: Final = 4
_ALWAYS: Final = 0.98
_DIFFERING: Final = 0.05


@rule
def reward_fell(at: Situation) -> Iterator[Alarm]:
    """The split of the last hours with the largest fall of the mean reward, if that is not chance.
    The standard error takes each group as one draw, with the largest deviation that the range
    allows.
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
            text = f"The reward of {whose} fell from {before:.2f} to {after:.2f} {since}."
            yield Alarm(
                "reward_fell",
                "critical",
                text,
                environment,
                of_groups(environment, order="newest"),
                float(curves.times[split]),
                about,
            )


def _fall(
    sums: Array, counts: Array, groups: Array, width: float, fewest: int, bound: float
) -> tuple[int, float, float] | None:
    """Returns the index of the fall, and the mean rewards before and after it. `sums`, `counts`,
    `groups`: growth of the sum of rewards, of their number, and of groups. `width`: of the range of
    rewards; infinite: the deviation is not known. `bound`: factor of the thresholds.
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


@rule
def longer_answers(at: Situation) -> Iterator[Alarm]:
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
        text = (
            f"The answers of {environment} grow longer, from {lengths[0]:,.0f} to "
            f"{lengths[-1]:,.0f} tokens a rollout, while its reward does not: "
            f"{rewards[0]:.2f}, then {rewards[1]:.2f}."
        )
        yield Alarm(
            "longer_answers", "warning", text, environment, of_groups(environment, order="longest")
        )


@rule
def alike_groups(at: Situation) -> Iterator[Alarm]:
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
            text = (
                f"In {percent(share['rewards'])} of the groups of {environment} "
                f"({counted(groups, 'group')} {at.recently()}) all rewards are equal: there "
                "is nothing to learn."
            )
            yield Alarm(
                "equal_rewards",
                "warning",
                text,
                environment,
                of_groups(environment, order="newest"),
            )
        if share["answers"] >= at.bound("same_answers", environment, same):
            text = (
                f"In {percent(share['answers'])} of the groups of {environment} "
                f"({counted(groups, 'group')} {at.recently()}) all rollouts say the same: is "
                "the temperature 0, or has the policy collapsed?"
            )
            yield Alarm(
                "same_answers", "warning", text, environment, of_groups(environment, order="newest")
            )


def _always(at: Situation, environment: str, bound: str, groups: float) -> Alarm:
    low, high = at.reward_range(environment)
    value = low if bound == "lowest" else high
    why = (
        "the environment is broken, or its tasks are too hard"
        if bound == "lowest"
        else "its tasks are too easy, or the reward is cheated"
    )
    text = (
        f"The reward of {environment} is always {value:g} "
        f"({counted(groups, 'group')} {at.recently()}): {why}."
    )
    return Alarm(
        f"reward_always_{bound}",
        "critical" if bound == "lowest" else "warning",
        text,
        environment,
        of_groups(environment, order="newest"),
    )


@rule
def untrained_tokens(at: Situation) -> Iterator[Alarm]:
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
        text = (
            f"{percent(share)} of the sampled tokens of {environment} are not trained"
            f"{f', most because of {most}' if most else ''}."
        )
        yield Alarm(
            "untrained_tokens",
            "warning",
            text,
            environment,
            of_groups(environment, **({"flag": most} if most else {})),
        )


@rule
def logprobs_differ(at: Situation) -> Iterator[Alarm]:
    rows, differing = at.facts.audited, at.facts.differing
    if rows < at.config.fewest or differing < at.bound("logprobs_differ", "", _DIFFERING) * rows:
        return
    text = (
        f"The logprobs of {percent(differing / rows)} of the audited rows ({differing} of "
        f"{rows}) differ from what the engine computes again."
    )
    yield Alarm("logprobs_differ", "critical", text, link="#/engines")
