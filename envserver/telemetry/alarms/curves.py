"""Numbers over time as arrays: levels of gauges, growth of counters.

In: columns of samples, one value for each time (NaN: the sample did not exist). Out: sums over the
samples with some labels. What holds: a counter that falls began again at 0, so nothing is negative
after a restart of the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..history import Name

Array = NDArray[np.float64]
_OFF_SECONDS: Final = 150.0
"""Older numbers are kept by the minute."""


class Curves:
    """The samples of some times.

    Args:
        times: seconds since 1970, ascending, at least one.
        columns: values by name and labels, each as long as `times`.
    """

    def __init__(self, times: Array, columns: Mapping[Name, Array]) -> None:
        self.times = times
        self._named: dict[str, list[tuple[dict[str, str], Array]]] = {}
        for name, values in columns.items():
            self._named.setdefault(name.name, []).append((dict(name.labels), np.nan_to_num(values)))

    def values_of(self, name: str, label: str, **labels: str) -> list[str]:
        """Returns the values of a label, sorted."""
        return sorted({of[label] for of, _ in self._matching(name, labels) if label in of})

    def level(self, name: str, **labels: str) -> Array:
        """Returns the sum of gauges at each time."""
        return self._summed([values for _, values in self._matching(name, labels)])

    def now(self, name: str, **labels: str) -> float:
        """Returns the sum of gauges at the last time."""
        return float(self.level(name, **labels)[-1])

    def growth(self, name: str, **labels: str) -> Array:
        """Returns how much counters grew since the first time, at each time."""
        return self._summed([_growth(values) for _, values in self._matching(name, labels)])

    def grown(self, seconds: float, name: str, **labels: str) -> float:
        """Returns how much counters grew in the last `seconds`."""
        growth = self.growth(name, **labels)
        return float(growth[-1] - growth[self.index(seconds)])

    def total(self, seconds: float, name: str, count: str, **labels: str) -> tuple[float, float]:
        """Returns the growth of a histogram's sum and count in the last `seconds`."""
        sums, counts = self.sums(name, count, **labels)
        start = self.index(seconds)
        return float(sums[-1] - sums[start]), float(counts[-1] - counts[start])

    def sums(self, name: str, count: str, **labels: str) -> tuple[Array, Array]:
        """Returns the growth of a sum that may fall, and that of its count.

        The count tells where both began again.
        """
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
        """Returns the index of the first time that is at most `seconds` ago."""
        return int(np.searchsorted(self.times, self.times[-1] - seconds))

    def seconds_since(self, held: NDArray[np.bool_]) -> float:
        """Returns for how many seconds `held` has been true without a break; 0: it is not now. A
        time of which nothing was recorded is a break: the server was off.
        """
        if not held[-1]:
            return 0.0
        broken = np.flatnonzero(~held[:-1] | (np.diff(self.times) > _OFF_SECONDS))
        first = int(broken[-1]) + 1 if len(broken) else 0
        return float(self.times[-1] - self.times[first])

    def _matching(self, name: str, labels: Mapping[str, str]) -> list[tuple[dict[str, str], Array]]:
        return [one for one in self._named.get(name, ()) if labels.items() <= one[0].items()]

    def _summed(self, arrays: list[Array]) -> Array:
        return np.sum(arrays, axis=0) if arrays else np.zeros(len(self.times))


def _growth(values: Array) -> Array:
    steps = np.diff(values)
    return _cumulative(np.where(steps < 0, values[1:], steps))


def _cumulative(steps: Array) -> Array:
    return np.concatenate([[0.0], np.cumsum(steps)])
