"""The table of alarms, and which are active. An alarm begins when it is found twice in a row, and
ends when it was not found three times in a row, so that nothing flaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec
import structlog

from .alarm_facts import Finding, Key, Rule, Severity, Situation
from .alarm_rules import (
    alike_groups,
    calls_paused,
    conversations_split,
    disk_full,
    engine_down,
    engines_unused,
    logprobs_differ,
    longer_answers,
    no_trainer,
    old_weights,
    reward_fell,
    rollouts_cut,
    rollouts_hang,
    rollouts_lost,
    runners_silent,
    stale_groups,
    store_slow,
    untrained_tokens,
    workers_die,
)

RULES: Final = (
    Rule("no_trainer", "no trainer leases, while groups wait", no_trainer),
    Rule("calls_paused", "a trainer paused model calls and does not resume", calls_paused),
    Rule("rollouts_hang", "rollouts run, and none ends", rollouts_hang),
    Rule("rollouts_lost", "rollouts are lost, not by the model's fault", rollouts_lost),
    Rule("rollouts_cut", "rollouts end at a limit, or answers are cut", rollouts_cut),
    Rule("conversations_split", "conversations become a row a call", conversations_split),
    Rule("stale_groups", "groups are dropped as stale", stale_groups),
    Rule("workers_die", "worker processes die", workers_die),
    Rule("runners_silent", "runners on other machines are silent", runners_silent),
    Rule("engine_down", "the engine or a replica does not answer", engine_down),
    Rule("engines_unused", "engines get no calls", engines_unused),
    Rule("old_weights", "the engine lost the published weights", old_weights),
    Rule("disk_full", "the disk of the store is full, or soon", disk_full),
    Rule("store_slow", "commits of the store take long", store_slow),
    Rule("reward_fell", "the reward fell", reward_fell),
    Rule("longer_answers", "answers grow longer, the reward does not", longer_answers),
    Rule(
        "equal_rewards",
        "rewards in groups are equal (also reward_always_lowest, reward_always_highest), or "
        "rollouts say the same (same_answers)",
        alike_groups,
    ),
    Rule("untrained_tokens", "flags keep tokens from training", untrained_tokens),
    Rule("logprobs_differ", "the audit finds other logprobs", logprobs_differ),
)

NAMES: Final = (
    *(rule.name for rule in RULES),
    *("reward_always_lowest", "reward_always_highest", "same_answers"),
)

NEEDED: Final = frozenset(
    f"envserver_{name}"
    for name in (
        *("groups", "leases_total", "paused", "calls_waiting", "rollouts_running"),
        *("rollouts_total", "failed_attempts_total", "rollout_seconds_sum"),
        *("rollout_seconds_count", "worker_deaths_total", "flags_total", "groups_delivered_total"),
        *("groups_dropped_total", "groups_alike_total", "groups_equal_total", "store_events_total"),
        *("replica_breaker", "engines", "policy_version", "joined_environments", "store_waiting"),
        *("store_commit_seconds_sum", "store_commit_seconds_count", "reward_sum", "reward_count"),
        *("engine_seconds_count", "tokens_total", "untrained_share", "untrained_tokens_total"),
    )
)


def findings(at: Situation, failed: set[str]) -> list[Finding]:
    """`failed`: names of rules that raised; such a rule is logged once and keeps no other from
    speaking.
    """
    found: list[Finding] = []
    for rule in RULES:
        try:
            found += rule.find(at)
        except Exception as error:  # noqa: BLE001 (a bug of one rule)
            if rule.name not in failed:
                failed.add(rule.name)
                _log.error("alarm_rule_failed", rule=rule.name, error=repr(error))
    return [one for one in found if one.name not in at.config.off]


_log = structlog.get_logger("envserver.alarms")

_TIMES_TO_BEGIN: Final = 2
_TIMES_TO_END: Final = 3
_MOST: Final = 100
_QUIET_SECONDS: Final = 600.0
"""An alarm that comes back within this time is not logged again."""


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """An alarm; the fields are those of `GET /v1/alarms`.

    Args:
        since: seconds since 1970.
        environment: None: not of one environment.
        link: the page of the dashboard that shows more.
    """

    name: str
    severity: Severity
    text: str
    since: float
    environment: str | None
    link: str
    about: str = ""

    def facts(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]


Listener = Callable[[Alarm, bool], None]
"""Called with an alarm and whether it begins (True) or ends."""


class _Entry:
    __slots__ = ("alarm", "found", "is_active", "is_logged", "missed")

    def __init__(self, alarm: Alarm) -> None:
        self.alarm = alarm
        self.found = 0
        self.missed = 0
        self.is_active = False
        self.is_logged = False


class AlarmBook:
    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self.checked_at = 0.0
        """Seconds since 1970; 0: not yet."""
        self._entries: dict[Key, _Entry] = {}
        self._logged_at: dict[Key, float] = {}

    def update(self, now: float, findings: Iterable[Finding]) -> None:
        self.checked_at = now
        found = {one.key: one for one in findings}
        for key, finding in found.items():
            entry = self._entries.get(key)
            if entry is None:
                if len(self._entries) >= _MOST:
                    continue
                entry = self._entries[key] = _Entry(_alarm(finding, finding.since or now))
            entry.found += 1
            entry.missed = 0
            entry.alarm = _alarm(finding, min(entry.alarm.since, finding.since or now))
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
        return sorted(alarms, key=lambda one: (one.severity, one.since, one.name, one.about))

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
        logged = {one: at for one, at in self._logged_at.items() if now - at < _QUIET_SECONDS}
        if key not in logged:
            entry.is_logged = True
            logged[key] = now
            _log.warning("alarm_began", alarm=entry.alarm.name, text=entry.alarm.text)
        self._logged_at = logged


def _alarm(finding: Finding, since: float) -> Alarm:
    return Alarm(
        name=finding.name,
        severity=finding.severity,
        text=finding.text,
        since=since,
        environment=finding.environment,
        link=finding.link,
        about=finding.key[1],
    )
