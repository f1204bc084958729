"""The table of alarms, and which are active. An alarm begins when it is found twice in a row, and
ends when it was not found three times in a row, so that nothing flaps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import structlog

from .alarm_facts import (
    Alarm,
    AlarmFacts,
    Array,
    Key,
    Severity,
    Situation,
    counted,
    duration,
    percent,
    short,
    without_credentials,
)

# Rules of alarms: what stands still or is lost, and rewards that fall or do not differ.

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
    "context": "the model's context or env.max_token_length",
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


_NOT_ENDED: Final = ("lost", "stale")
"""Values of the label `end` of rollouts without a result."""

Find = Callable[[Situation], Iterable[Alarm]]


class Rule(msgspec.Struct, frozen=True):
    """Finds alarms of a name. `each`: it is asked about each environment of this measurement."""

    name: str
    find: Find
    each: str | None

    def __call__(self, at: Situation) -> Iterator[Alarm]:
        environments = at.whole.values_of(self.each, "environment") if self.each else [None]
        for environment in environments:
            yield from self.find(at.for_rule(self.name, environment))


RULES: Final[list[Rule]] = []


def rule(*names: str, each: str | None = None) -> Callable[[Find], Find]:
    """Adds a rule with its own name, or one for each of some names."""

    def add(find: Find) -> Find:
        RULES.extend(Rule(name, find, each) for name in names or [find.__name__])
        return find

    return add


@rule()
def no_trainer(at: Situation) -> Iterator[Alarm]:
    waiting = at.curves.level("groups", state="queued")
    leased = at.curves.growth("leases", end="leased")
    idle = (waiting >= max(1, at.facts.groups_wanted)) & (leased == leased[-1])
    seconds = at.curves.seconds_since(idle)
    if idle[-1] and seconds >= 60 * at.config.no_trainer_minutes:
        text = (
            f"No trainer has leased for {duration(seconds)}, while "
            f"{counted(waiting[-1], 'group')} wait."
        )
        yield at.alarm("warning", text, "#/runs", held=seconds)


@rule()
def calls_paused(at: Situation) -> Iterator[Alarm]:
    paused = at.curves.level("paused") > 0
    seconds = at.curves.seconds_since(paused)
    if paused[-1] and seconds >= 60 * at.config.paused_minutes:
        waiting = at.curves.now("calls_waiting")
        text = f"Model calls have been paused for {duration(seconds)}; {waiting:g} of them wait."
        yield at.alarm("warning", text, "#/engines", held=seconds)


@rule(each="rollouts_running")
def rollouts_hang(at: Situation) -> Iterator[Alarm]:
    if at.whole.now("paused"):
        return
    running = at.curves.level("rollouts_running")
    ended = at.curves.growth("rollouts")
    failed = at.curves.growth("failed_attempts")
    still = (running > 0) & (ended == ended[-1]) & (failed == failed[-1])
    seconds = at.curves.seconds_since(still)
    took, count = at.curves.total(float("inf"), "rollout_seconds")
    usual = took / count if count else 0.0
    limit = max(60 * at.config.no_rollout_minutes, _ROLLOUT_TIMES * usual)
    # Before the first one has ended, it is unknown how long they take: are there calls?
    if not count and at.whole.grown(limit, "engine_seconds"):
        return
    if still[-1] and seconds >= limit:
        text = (
            f"No rollout of {at.environment} has ended for {duration(seconds)}, while "
            f"{counted(running[-1], 'rollout')} run."
        )
        yield at.alarm("critical", text, "#/workers", held=seconds)


@rule(each="rollouts")
def rollouts_lost(at: Situation) -> Iterator[Alarm]:
    ended, lost = at.grown("rollouts"), at.grown("rollouts", end="lost")
    bound = at.bound(at.config.lost_share)
    if ended < at.config.fewest or lost < max(_FEWEST_LOST, bound * ended):
        return
    count, kind = _largest(at.grown_by("failed_attempts", "kind", without=("stale",)))
    why = f", most to {_whose(kind)} ({kind}, {counted(count, 'attempt')})" if count else ""
    text = (
        f"{percent(lost / ended)} of the rollouts of {at.environment} ({lost:g} of "
        f"{ended:g} {at.recently()}) were lost{why}{_words(at.facts, kind)}."
    )
    yield at.alarm("critical", text, f"#/failures?environment={at.environment}")


def _largest(counts: dict[str, float]) -> tuple[float, str]:
    return max(((count, name) for name, count in counts.items()), default=(0.0, ""))


def _whose(kind: str) -> str:
    return next((whose for part, whose in _WHOSE.items() if kind.startswith(part)), kind)


def _words(facts: AlarmFacts, kind: str) -> str:
    words = short(facts.last_words.get(kind, "")).rstrip(".")
    return f": {words}" if words else ""


@rule(each="worker_deaths")
def workers_die(at: Situation) -> Iterator[Alarm]:
    kinds = at.grown_by("worker_deaths", "kind")
    # What the model's own code ended is no fault of ours: `rollouts_cut` reports it.
    deaths = sum(kinds.values()) - at.grown("rollouts", end="limit_crash")
    least = max(at.config.worker_deaths, at.config.lost_share * at.grown("rollouts"))
    if deaths >= at.bound(least):
        _, kind = _largest(kinds)
        text = (
            f"{counted(deaths, 'worker')} of {at.environment} died {at.recently()} "
            f"({kind}){_words(at.facts, kind)}."
        )
        yield at.alarm("critical", text, "#/workers")


@rule()
def rollouts_cut(at: Situation) -> Iterator[Alarm]:
    everything = cut = 0.0
    for environment in at.whole.values_of("rollouts", "environment"):
        of = at.for_rule(at.rule, environment)
        ends = of.grown_by("rollouts", "end", without=_NOT_ENDED)
        ended = sum(ends.values())
        everything += ended
        at_limit = {end.removeprefix("limit_"): n for end, n in ends.items() if "limit_" in end}
        count = sum(at_limit.values())
        if ended < at.config.fewest or count < of.bound(at.config.cut_share) * ended:
            continue
        limit = max(at_limit, key=lambda name: at_limit[name])
        cut += count
        text = (
            f"{percent(count / ended)} of the rollouts of {environment} ({count:g} of "
            f"{ended:g} {at.recently()}) end at a limit, most at {_LIMITS.get(limit, limit)}."
        )
        yield of.alarm("warning", text, of.groups(end=limit))
    answers = at.grown("flags", flag="truncated_length")
    bound = at.bound(at.config.cut_share, "answers")
    if not cut and everything >= at.config.fewest and answers >= bound * everything:
        text = (
            f"{percent(answers / everything)} of the rollouts ({answers:g} of "
            f"{everything:g} {at.recently()}) have an answer that is cut off at its limit of "
            "tokens (sampling.max_tokens)."
        )
        yield at.alarm("warning", text, "#/groups?flag=truncated_length", about="answers")


@rule()
def conversations_split(at: Situation) -> Iterator[Alarm]:
    ended = at.grown("rollouts")
    split, flag = _largest({flag: at.grown("flags", flag=flag) for flag in _SPLIT})
    if ended < at.config.fewest or split < at.bound(at.config.split_share) * ended:
        return
    first = at.facts.differs_at
    text = (
        f"{percent(split / ended)} of the rollouts ({split:g} of {ended:g} {at.recently()}) have "
        "a row for each call "
        f"({flag}){f'; the engine first rendered differently at {short(first)}' if first else ''}."
    )
    yield at.alarm("warning", text, f"#/groups?flag={flag}")


@rule()
def stale_groups(at: Situation) -> Iterator[Alarm]:
    late = at.grown("groups_dropped", reason="stale")
    waited = at.grown("store_events", event="stale_dropped")
    groups, stale = at.grown("groups_delivered") + late, late + waited
    if groups < at.config.fewest or stale < at.bound(at.config.stale_share) * groups:
        return
    cause = (
        "rollouts take too long for the trainer's versions"
        if late > waited
        else "the trainer takes them too slowly"
    )
    text = (
        f"{counted(stale, 'group')} of {groups:g} were dropped as stale {at.recently()}: {cause}."
    )
    yield at.alarm("warning", text, "#/failures")


@rule()
def engine_down(at: Situation) -> Iterator[Alarm]:
    reason = at.facts.broken.get("engine")
    if reason is not None:
        because = f": {short(reason).rstrip('.')}" if reason else ""
        yield at.alarm("critical", f"The engine does not answer{because}.", "#/engines")
        return
    replicas = at.curves.values_of("replica_breaker", "replica")
    for replica in replicas:
        if at.curves.now("replica_breaker", replica=replica) == _OPEN:
            text = (
                f"The replica {without_credentials(replica)} of the engine is set aside after "
                f"failures (1 of {len(replicas)})."
            )
            severity: Severity = "warning" if len(replicas) > 1 else "critical"
            yield at.alarm(severity, text, "#/engines", about=replica)


@rule()
def engines_unused(at: Situation) -> Iterator[Alarm]:
    curves = at.curves
    if not curves.values_of("engines", "standing"):
        return
    counts = {
        standing: curves.level("engines", standing=standing) for standing in (*_USED, *_UNUSED)
    }
    listed = ", ".join(
        f"{counts[standing][-1]:g} {standing}" for standing in _UNUSED if counts[standing][-1]
    )
    none = ~np.any([counts[standing] > 0 for standing in _USED], axis=0)
    seconds = curves.seconds_since(none)
    if none[-1] and seconds >= _NO_ENGINE_SECONDS:
        text = f"Calls wait, since no engine can be used: {listed or 'none is registered'}."
        yield at.alarm("critical", text, "#/engines", held=seconds)
        return
    seconds = curves.seconds_since(np.any([counts[standing] > 0 for standing in _UNUSED], axis=0))
    if listed and seconds >= 60 * at.config.unused_engine_minutes:
        text = f"Engines have received no calls for {duration(seconds)}: {listed}."
        yield at.alarm("warning", text, "#/engines", held=seconds)


@rule()
def old_weights(at: Situation) -> Iterator[Alarm]:
    if lost := at.grown("flags", flag="weights_lost"):
        version = int(at.curves.now("policy_version"))
        text = (
            f"The engine serves older weights than those of version {version}, which were "
            f"published: it was restarted. {counted(lost, 'rollout')} {at.recently()} are not "
            "delivered."
        )
        yield at.alarm("critical", text, "#/groups?flag=weights_lost")


@rule(each="joined_environments")
def runners_silent(at: Situation) -> Iterator[Alarm]:
    if silent := at.curves.now("joined_environments", standing="silent"):
        where = "another machine is" if silent == 1 else "other machines are"
        text = f"{counted(silent, 'runner')} of {at.environment} on {where} silent."
        yield at.alarm("warning", text, "#/workers")


@rule()
def disk_full(at: Situation) -> Iterator[Alarm]:
    free = at.facts.disk_free_bytes
    left = "" if free is None else f" {free / _GB:.1f} GB are left."
    if "disk" in at.facts.broken:
        yield at.alarm("critical", f"The disk of the store is full: new groups are refused.{left}")
    elif free is not None and free < at.config.disk_free_gb * _GB:
        yield at.alarm("warning", f"The disk of the store is almost full.{left}")


@rule()
def store_slow(at: Situation) -> Iterator[Alarm]:
    took, commits = at.curves.total(at.seconds, "store_commit_seconds")
    if commits >= _FEWEST_COMMITS and took / commits >= at.bound(at.config.store_seconds):
        waiting = at.curves.now("store_waiting")
        text = (
            f"A commit of the store takes {took / commits:.1f} seconds "
            f"({counted(commits, 'commit')} {at.recently()}); {waiting:g} operations wait."
        )
        yield at.alarm("warning", text)


_LEAST_FALL: Final = 0.15
"""Part of the range of rewards."""
_SIGMAS: Final = 3.5
_GROWTH: Final = 1.5
_SAME_REWARD: Final = 0.02
_QUARTERS: Final = 4
_ROLLOUTS_IN_A_GROUP: Final = 4
_ALWAYS: Final = 0.98
_DIFFERING: Final = 0.05


@rule(each="reward")
def reward_fell(at: Situation) -> Iterator[Alarm]:
    """The split of the last hours with the largest fall of the mean reward, if that is not chance.
    The standard error takes each group as one draw, with the largest deviation that the range
    allows."""
    low, high = at.reward_range
    groups, times = at.curves.growth("groups_delivered"), at.curves.times
    for agent in at.curves.values_of("reward", "agent"):
        sums, counts = at.curves.sums("reward", agent=agent)
        about = f"{at.environment}/{agent}" if agent else ""
        found = _fall(sums, counts, groups, high - low, at.config.fewest, at.bound(1.0, about))
        if found is None:
            continue
        split, before, after = found
        version = int(at.whole.level("policy_version")[split + 1])
        seconds = float(times[-1] - times[split])
        since = f"since version {version}" if version >= 0 else f"in the last {duration(seconds)}"
        whose = f"{at.environment} ({agent})" if agent else at.environment
        text = f"The reward of {whose} fell from {before:.2f} to {after:.2f} {since}."
        yield at.alarm("critical", text, at.groups(order="newest"), held=seconds, about=about)


def _fall(
    sums: Array, counts: Array, groups: Array, width: float, fewest: int, bound: float
) -> tuple[int, float, float] | None:
    """Returns the index of the fall, and the mean rewards before and after it. `sums`, `counts`,
    `groups`: growth of the sum of rewards, of their number, and of groups. `width`: of the range of
    rewards; infinite: the deviation is not known. `bound`: factor of the thresholds."""
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


@rule(each="tokens")
def longer_answers(at: Situation) -> Iterator[Alarm]:
    """Tokens per rollout grow from quarter to quarter of the last hours, the reward does not."""
    curves = at.curves
    ended = np.zeros(len(curves.times))
    for end in curves.values_of("rollouts", "end"):
        if end not in _NOT_ENDED:
            ended += curves.growth("rollouts", end=end)
    if ended[-1] < _QUARTERS * _ROLLOUTS_IN_A_GROUP * at.config.fewest:
        return
    tokens = curves.growth("tokens", kind="completion")
    places = np.searchsorted(ended, ended[-1] * np.linspace(0, 1, _QUARTERS + 1))
    # Of several times without an end between them the last one counts at the beginning.
    places[0] = np.searchsorted(ended, 0, side="right") - 1
    if len(set(places.tolist())) <= _QUARTERS:
        return
    lengths = np.diff(tokens[places]) / np.diff(ended[places])
    sums, counts = curves.sums("reward")
    rewarded = np.diff(counts[places])
    if not rewarded[0] or not rewarded[-1] or np.any(lengths[1:] < 0.95 * lengths[:-1]):
        return
    rewards = np.diff(sums[places])[[0, -1]] / rewarded[[0, -1]]
    low, high = at.reward_range
    width = high - low if math.isfinite(high - low) else max(1.0, abs(rewards[0]))
    growth = 1 + at.bound(_GROWTH - 1)
    if lengths[-1] >= growth * lengths[0] and rewards[1] - rewards[0] <= _SAME_REWARD * width:
        text = (
            f"The answers of {at.environment} grow longer, from {lengths[0]:,.0f} to "
            f"{lengths[-1]:,.0f} tokens a rollout, while its reward does not: "
            f"{rewards[0]:.2f}, then {rewards[1]:.2f}."
        )
        yield at.alarm("warning", text, at.groups(order="longest"))


def _share_of_groups(at: Situation, alike: float) -> tuple[float, str]:
    """Returns which share of the recent groups `alike` is (0 of few groups), and the groups in
    words."""
    equal = at.grown("groups_dropped", reason="zero_variance")
    groups = at.grown("groups_delivered") + equal
    share = alike / groups if groups >= at.config.fewest else 0.0
    return share, f"({counted(groups, 'group')} {at.recently()})"


@rule("reward_always_lowest", "reward_always_highest", each="groups_delivered")
def reward_always(at: Situation) -> Iterator[Alarm]:
    bound = at.rule.removeprefix("reward_always_")
    share, groups = _share_of_groups(at, at.grown("groups_alike", alike=bound))
    if share < at.bound(_ALWAYS):
        return
    low, high = at.reward_range
    severity: Severity
    severity, value, why = (
        ("critical", low, "the environment is broken, or its tasks are too hard")
        if bound == "lowest"
        else ("warning", high, "its tasks are too easy, or the policy hacks the reward")
    )
    text = f"The reward of {at.environment} is always {value:g} {groups}: {why}."
    yield at.alarm(severity, text, at.groups(order="newest"))


@rule(each="groups_delivered")
def equal_rewards(at: Situation) -> Iterator[Alarm]:
    """Rewards that are always at a bound have an alarm of their own."""
    share, groups = _share_of_groups(at, at.grown("groups_equal"))
    if share < at.bound(at.config.equal_share) or any(
        [*reward_always(at.for_rule(f"reward_always_{bound}", at.environment))]
        for bound in ("lowest", "highest")
    ):
        return
    text = (
        f"In {percent(share)} of the groups of {at.environment} {groups} all rewards are equal: "
        "there is nothing to learn."
    )
    yield at.alarm("warning", text, at.groups(order="newest"))


@rule(each="groups_delivered")
def same_answers(at: Situation) -> Iterator[Alarm]:
    share, groups = _share_of_groups(at, at.grown("groups_alike", alike="answers"))
    if share >= at.bound(at.config.same_share):
        text = (
            f"In {percent(share)} of the groups of {at.environment} {groups} all rollouts say the "
            "same: is the temperature 0, or has the policy collapsed?"
        )
        yield at.alarm("warning", text, at.groups(order="newest"))


@rule(each="untrained_share")
def untrained_tokens(at: Situation) -> Iterator[Alarm]:
    groups = at.grown("groups_delivered") + at.grown("groups_dropped")
    share = at.curves.now("untrained_share")
    if groups < at.config.fewest or share < at.bound(at.config.untrained_share):
        return
    flags = at.grown_by("untrained_tokens", "flag")
    most = max(flags, key=lambda flag: flags[flag], default="")
    text = (
        f"{percent(share)} of the sampled tokens of {at.environment} are not trained"
        f"{f', most because of {most}' if most else ''}."
    )
    yield at.alarm("warning", text, at.groups(**({"flag": most} if most else {})))


@rule()
def logprobs_differ(at: Situation) -> Iterator[Alarm]:
    rows, differing = at.facts.audited, at.facts.differing
    if rows >= at.config.fewest and differing >= at.bound(_DIFFERING) * rows:
        text = (
            f"The logprobs of {percent(differing / rows)} of the audited rows ({differing} of "
            f"{rows}) differ from what the engine computes again."
        )
        yield at.alarm("critical", text, "#/engines")


NAMES: Final = tuple(rule.name for rule in RULES)


def findings(at: Situation, failed: set[str]) -> list[Alarm]:
    """`failed`: names of rules that raised; such a rule is logged once and keeps no other from
    speaking."""
    found: list[Alarm] = []
    for rule in RULES:
        try:
            found += rule(at)
        except Exception as error:  # noqa: BLE001 (a bug of one rule)
            if rule.name not in failed:
                failed.add(rule.name)
                _log.error("alarm_rule_failed", rule=rule.name, error=repr(error))
    return [finding for finding in found if finding.name not in at.config.off]


_log = structlog.get_logger("envserver.alarms")

_TIMES_TO_BEGIN: Final = 2
_TIMES_TO_END: Final = 3
_MOST: Final = 100
_QUIET_SECONDS: Final = 600.0
"""An alarm that comes back within this time is not logged again."""


Listener = Callable[[Alarm, bool], None]
"""Called with an alarm and whether it begins (True) or ends."""


@dataclass(slots=True)
class _Entry:
    alarm: Alarm
    found: int = 0
    missed: int = 0
    is_active: bool = False
    is_logged: bool = False


class AlarmBook:
    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self.checked_at = 0.0
        """Seconds since 1970; 0: not yet."""
        self._entries: dict[Key, _Entry] = {}
        self._logged_at: dict[Key, float] = {}

    def update(self, now: float, findings: Iterable[Alarm]) -> None:
        self.checked_at = now
        found = {finding.key: finding for finding in findings}
        for key, finding in found.items():
            entry = self._entries.get(key)
            if entry is None:
                if len(self._entries) >= _MOST:
                    continue
                entry = self._entries[key] = _Entry(finding)
            entry.found += 1
            entry.missed = 0
            since = min(entry.alarm.since or now, finding.since or now)
            entry.alarm = msgspec.structs.replace(finding, since=since, about=key[1])
            if not entry.is_active and entry.found >= _TIMES_TO_BEGIN:
                entry.is_active = True
                self._tell(entry.alarm, begins=True)
            if entry.is_active and not entry.is_logged:
                self._log_begin(now, key, entry)
        for key in self._entries.keys() - found.keys():
            entry = self._entries[key]
            entry.missed += 1
            if not entry.is_active or entry.missed >= _TIMES_TO_END:
                del self._entries[key]
                if entry.is_active:
                    self._tell(entry.alarm, begins=False)
                if entry.is_logged:
                    _log.info("alarm_ended", alarm=entry.alarm.name, text=entry.alarm.text)

    @property
    def active(self) -> list[Alarm]:
        alarms = [entry.alarm for entry in self._entries.values() if entry.is_active]
        return sorted(
            alarms, key=lambda alarm: (alarm.severity, alarm.since, alarm.name, alarm.about)
        )

    @property
    def keys(self) -> frozenset[Key]:
        return frozenset(key for key, entry in self._entries.items() if entry.is_active)

    def counts(self) -> dict[str, float]:
        """For every name, also those without an active alarm."""
        counts = dict.fromkeys(NAMES, 0.0)
        for alarm in self.active:
            counts[alarm.name] += 1
        return counts

    def _tell(self, alarm: Alarm, *, begins: bool) -> None:
        for listener in self.listeners:
            listener(alarm, begins)

    def _log_begin(self, now: float, key: Key, entry: _Entry) -> None:
        """Not if it was logged a short time ago; then later, if it stays."""
        logged = {key: at for key, at in self._logged_at.items() if now - at < _QUIET_SECONDS}
        if key not in logged:
            entry.is_logged = True
            logged[key] = now
            _log.warning("alarm_began", alarm=entry.alarm.name, text=entry.alarm.text)
        self._logged_at = logged
