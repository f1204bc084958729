"""The table of alarms, and which are active. An alarm begins when it is found twice in a row, and
ends when it was not found three times in a row, so that nothing flaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import msgspec
import structlog

from .alarm_facts import Alarm, Key, Situation
from .alarm_rules import RULES

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
