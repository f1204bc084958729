"""What a rule of alarms sees, and what it finds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal
from urllib.parse import urlencode, urlsplit, urlunsplit

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..settings.server import AlarmsConfig
from .history import Name

Array = NDArray[np.float64]
_OFF_SECONDS: Final = 150.0
"""Older numbers are kept by the minute."""


class Curves:
    """The samples of some times (at least one, ascending); each column is as long as `times`."""

    def __init__(self, times: Array, columns: Mapping[Name, Array]) -> None:
        self.times = times
        self._columns: dict[str, list[tuple[dict[str, str], Array]]] = {}
        for name, values in columns.items():
            self._columns.setdefault(name.name, []).append((dict(name.labels), values))
        self._numbers: dict[str, list[tuple[dict[str, str], Array]]] = {}

    def _named(self, name: str) -> list[tuple[dict[str, str], Array]]:
        if name not in self._numbers:
            listed = self._columns.get(name, ())
            self._numbers[name] = [(labels, np.nan_to_num(values)) for labels, values in listed]
        return self._numbers[name]

    def values_of(self, name: str, label: str, **labels: str) -> list[str]:
        return sorted({of[label] for of, _ in self._matching(name, labels) if label in of})

    def level(self, name: str, **labels: str) -> Array:
        """The sum of gauges at each time."""
        return self._summed([values for _, values in self._matching(name, labels)])

    def now(self, name: str, **labels: str) -> float:
        return float(self.level(name, **labels)[-1])

    def growth(self, name: str, **labels: str) -> Array:
        """How much counters grew since the first time, at each time."""
        return self._summed([_growth(values) for _, values in self._matching(name, labels)])

    def grown(self, seconds: float, name: str, **labels: str) -> float:
        growth = self.growth(name, **labels)
        return float(growth[-1] - growth[self.index(seconds)])

    def total(self, seconds: float, name: str, count: str, **labels: str) -> tuple[float, float]:
        """The growth of a histogram's sum and count in the last `seconds`."""
        sums, counts = self.sums(name, count, **labels)
        start = self.index(seconds)
        return float(sums[-1] - sums[start]), float(counts[-1] - counts[start])

    def sums(self, name: str, count: str, **labels: str) -> tuple[Array, Array]:
        """The growth of a sum that may fall, and of its count, which shows where both began
        again."""
        sums, counts = [], []
        for of, counted in self._matching(count, labels):
            values = next((own for other, own in self._matching(name, of) if other == of), None)
            if values is None:
                continue
            steps, restarts = np.diff(values), np.diff(counted) < 0
            sums.append(_cumulative(np.where(restarts, values[1:], steps)))
            counts.append(_growth(counted))
        return self._summed(sums), self._summed(counts)

    def index(self, seconds: float) -> int:
        """The index of the first time that is at most `seconds` ago."""
        return int(np.searchsorted(self.times, self.times[-1] - seconds))

    def seconds_since(self, held: NDArray[np.bool_]) -> float:
        """For how many seconds `held` has been true without a break; 0: it is not now. A time of
        which nothing was recorded is a break: the server was off.
        """
        if not held[-1]:
            return 0.0
        broken = np.flatnonzero(~held[:-1] | (np.diff(self.times) > _OFF_SECONDS))
        first = int(broken[-1]) + 1 if len(broken) else 0
        return float(self.times[-1] - self.times[first])

    def _matching(self, name: str, labels: Mapping[str, str]) -> list[tuple[dict[str, str], Array]]:
        return [one for one in self._named(name) if labels.items() <= one[0].items()]

    def _summed(self, arrays: list[Array]) -> Array:
        return np.sum(arrays, axis=0) if arrays else np.zeros(len(self.times))


def _growth(values: Array) -> Array:
    steps = np.diff(values)
    return _cumulative(np.where(steps < 0, values[1:], steps))


def _cumulative(steps: Array) -> Array:
    return np.concatenate([[0.0], np.cumsum(steps)])


Severity = Literal["warning", "critical"]
Key = tuple[str, str]
"""Name of an alarm, and what it is about: an environment, a replica, or ""."""

_EASE: Final = 0.7
"""An alarm that is active ends below this share of the threshold at which it began."""
_MOST_CHARACTERS: Final = 200


class AlarmFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a server beside its numbers.

    Args:
        reward_ranges: smallest and largest reward by environment.
        last_words: the latest message of each kind of failure.
        broken: the parts that are down or limited, and why; see `http.health`.
        groups_wanted: groups that the least demanding trainer takes at a time; 0: no trainer.
        differs_at: the first message that the engine rendered otherwise than we do.
        audited, differing: rows whose logprobs were computed again; those that differ.
    """

    reward_ranges: Mapping[str, tuple[float, float]] = {}
    last_words: Mapping[str, str] = {}
    broken: Mapping[str, str] = {}
    groups_wanted: int = 0
    disk_free_bytes: int | None = None
    differs_at: str = ""
    audited: int = 0
    differing: int = 0


class Alarm(msgspec.Struct, frozen=True):
    """Something is wrong now; the fields are those of `GET /v1/alarms`.

    Args:
        text: a whole sentence.
        environment: None: not of one environment.
        link: the page of the dashboard that shows more.
        since: seconds since 1970; 0: the numbers do not tell.
        about: a replica, or another part; "": the environment, or the server.
    """

    name: str
    severity: Severity
    text: str
    environment: str | None = None
    link: str = "#/"
    since: float = 0.0
    about: str = ""

    @property
    def key(self) -> Key:
        return (self.name, self.about or self.environment or "")

    def facts(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]


class Situation(msgspec.Struct, frozen=True):
    curves: Curves
    facts: AlarmFacts
    config: AlarmsConfig
    active: frozenset[Key] = frozenset()

    @property
    def seconds(self) -> float:
        return self.config.span_minutes * 60

    def bound(self, name: str, about: str, threshold: float) -> float:
        """Returns a threshold, which is lower while the alarm is active: it does not flap."""
        return threshold * _EASE if (name, about) in self.active else threshold

    def reward_range(self, environment: str) -> tuple[float, float]:
        return self.facts.reward_ranges.get(environment, (0.0, 1.0))

    def grown(self, name: str, **labels: str) -> float:
        return self.curves.grown(self.seconds, name, **labels)

    def ago(self, seconds: float) -> float:
        return float(self.curves.times[-1] - seconds)

    def recently(self) -> str:
        known = float(self.curves.times[-1] - self.curves.times[0])
        return f"in the last {duration(min(self.seconds, known))}"


def duration(seconds: float) -> str:
    """`1 second`, `12 minutes`, `3 hours`."""
    for unit, size in (("hour", 3600), ("minute", 60)):
        if seconds >= 2 * size or (seconds >= size and seconds % size == 0):
            return counted(int(seconds // size), unit)
    return counted(max(1, round(seconds)), "second")


def counted(number: float, noun: str) -> str:
    return f"{number:,.0f} {noun}" if number == 1 else f"{number:,.0f} {noun}s"


def percent(share: float) -> str:
    """Rounded so that 99.9 % is not shown as 100 %."""
    return f"{min(99.0, 100 * share) if share < 1 else 100.0:.0f} %"


def short(text: str) -> str:
    """A message of another program as one bounded line."""
    line = " ".join(text.split())
    return line if len(line) <= _MOST_CHARACTERS else f"{line[: _MOST_CHARACTERS - 3]}..."


def of_groups(environment: str, **filters: str) -> str:
    return f"#/groups?{urlencode({'environment': environment, **filters})}"


def without_credentials(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
