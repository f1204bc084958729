"""What a rule of alarms sees, and what it finds."""

from __future__ import annotations

from collections.abc import Container, Mapping
from copy import copy
from typing import Any, Final, Literal
from urllib.parse import urlencode, urlsplit, urlunsplit

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..settings.server import AlarmsConfig
from .history import Name
from .measures import samples_of

Array = NDArray[np.float64]
_Column = tuple[dict[str, str], Array]
_OFF_SECONDS: Final = 150.0
"""Older numbers are kept by the minute."""


class Curves:
    """The samples of some times (at least one, ascending); each column is as long as `times`.

    A name is that of a measurement; of a histogram, its count is meant, but for `sums`, `total`.
    """

    def __init__(self, times: Array, columns: Mapping[Name, Array]) -> None:
        self.times = times
        self._columns: dict[str, list[_Column]] = {}
        for name, values in columns.items():
            self._columns.setdefault(name.name, []).append((dict(name.labels), values))
        self._numbers: dict[str, list[_Column]] = {}
        self._of: dict[str, str] = {}

    def of(self, environment: str) -> Curves:
        """Returns only what is labelled with this environment."""
        own = copy(self)
        own._of = {"environment": environment}
        return own

    def values_of(self, name: str, label: str, **labels: str) -> list[str]:
        matching = self._matching(samples_of(name)[-1], labels)
        return sorted({of[label] for of, _ in matching if label in of})

    def levels(self, name: str, **labels: str) -> list[Array]:
        """The sum at each time; of a histogram, that of its sums and that of its counts."""
        matching = [self._matching(sample, labels) for sample in samples_of(name)]
        return [self._summed([values for _, values in columns]) for columns in matching]

    def level(self, name: str, **labels: str) -> Array:
        return self.levels(name, **labels)[-1]

    def now(self, name: str, **labels: str) -> float:
        return float(self.level(name, **labels)[-1])

    def growth(self, name: str, **labels: str) -> Array:
        """How much counters grew since the first time, at each time."""
        matching = self._matching(samples_of(name)[-1], labels)
        return self._summed([_growth(values) for _, values in matching])

    def grown(self, seconds: float, name: str, **labels: str) -> float:
        growth = self.growth(name, **labels)
        return float(growth[-1] - growth[self.index(seconds)])

    def total(self, seconds: float, name: str) -> tuple[float, float]:
        """The growth of a histogram's sum and count in the last `seconds`."""
        start = self.index(seconds)
        sums, counts = (float(grown[-1] - grown[start]) for grown in self.sums(name))
        return sums, counts

    def sums(self, name: str, **labels: str) -> tuple[Array, Array]:
        """The growth of a histogram's sum, which may fall, and of its count, which shows where both
        began again."""
        sums, counts = [], []
        sum_name, count_name = samples_of(name)
        for of, counted in self._matching(count_name, labels):
            values = next((own for other, own in self._named(sum_name) if other == of), None)
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
        which nothing was recorded is a break: the server was off."""
        if not held[-1]:
            return 0.0
        broken = np.flatnonzero(~held[:-1] | (np.diff(self.times) > _OFF_SECONDS))
        first = int(broken[-1]) + 1 if len(broken) else 0
        return float(self.times[-1] - self.times[first])

    def _named(self, sample: str) -> list[_Column]:
        if sample not in self._numbers:
            listed = self._columns.get(sample, ())
            self._numbers[sample] = [(labels, np.nan_to_num(values)) for labels, values in listed]
        return self._numbers[sample]

    def _matching(self, sample: str, labels: Mapping[str, str]) -> list[_Column]:
        wanted = {**self._of, **labels}.items()
        return [column for column in self._named(sample) if wanted <= column[0].items()]

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
    """What one rule looks at.

    Args:
        whole: the curves of the server.
        curves: of the environment that the rule is asked about; of the server if it is of none.
        rule: the name of the alarms that it finds.
    """

    whole: Curves
    curves: Curves
    facts: AlarmFacts
    config: AlarmsConfig
    active: frozenset[Key] = frozenset()
    rule: str = ""
    environment: str | None = None

    def for_rule(self, rule: str, environment: str | None) -> Situation:
        curves = self.whole if environment is None else self.whole.of(environment)
        return msgspec.structs.replace(self, rule=rule, environment=environment, curves=curves)

    def alarm(
        self,
        severity: Severity,
        text: str,
        link: str = "#/",
        *,
        held: float | None = None,
        about: str = "",
    ) -> Alarm:
        """`held`: for how many seconds it has been so."""
        since = 0.0 if held is None else float(self.whole.times[-1] - held)
        return Alarm(self.rule, severity, text, self.environment, link, since, about)

    @property
    def seconds(self) -> float:
        return self.config.span_minutes * 60

    def bound(self, threshold: float, about: str = "") -> float:
        """Returns a threshold, which is lower while the alarm is active: it does not flap."""
        key = (self.rule, about or self.environment or "")
        return threshold * _EASE if key in self.active else threshold

    @property
    def reward_range(self) -> tuple[float, float]:
        return self.facts.reward_ranges.get(self.environment or "", (0.0, 1.0))

    def grown(self, name: str, **labels: str) -> float:
        return self.curves.grown(self.seconds, name, **labels)

    def grown_by(self, name: str, label: str, without: Container[str] = ()) -> dict[str, float]:
        """Returns the growth by the values of a label."""
        values = self.curves.values_of(name, label)
        return {
            value: self.grown(name, **{label: value}) for value in values if value not in without
        }

    def recently(self) -> str:
        known = float(self.whole.times[-1] - self.whole.times[0])
        return f"in the last {duration(min(self.seconds, known))}"

    def groups(self, **filters: str) -> str:
        """Returns the link to the environment's groups."""
        return f"#/groups?{urlencode({'environment': self.environment, **filters})}"


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


def without_credentials(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
