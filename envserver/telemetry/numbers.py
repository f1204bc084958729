"""Counters and distributions that the server's parts keep; `measures.py` says what each measures.
Each is owned by the part that counts and written on its event loop only: no lock, and a fraction of
a microsecond for each update.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

SECONDS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
"""Histogram bounds, from a millisecond to minutes."""
SHORT_SECONDS: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0,
)  # fmt: skip
OTHER: Final = "other"
"""The label value used once a label has too many values."""
Labels = tuple[str, ...]


class Distribution:
    """A histogram with ascending `bounds`; a value on a bound counts as below it."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, share: float) -> float | None:
        """The value below which `share` of the values are, to the width of a bound; None without
        values."""
        left = share * self.count
        lower = 0.0
        for count, upper in zip(self.counts, (*self.bounds, self.bounds[-1]), strict=True):
            if count and left <= count:
                return lower + (upper - lower) * left / count
            left -= count
            lower = upper
        return None


class Labelled(dict[Labels, Distribution]):
    """A Distribution for each of at most `most` label combinations; later ones count as `other`."""

    def __init__(self, bounds: tuple[float, ...], most: int = 200) -> None:
        self._bounds = bounds
        self._most = most

    def add(self, labels: Labels, value: float) -> None:
        found = self.get(labels)
        if found is None:
            if len(self) >= self._most:
                labels = (OTHER,) * len(labels)
            found = self.setdefault(labels, Distribution(self._bounds))
        found.add(value)


class Counts(dict[Labels, float]):
    """A count for each label combination, limited like `Labelled`."""

    def __init__(self, most: int = 500) -> None:
        self._most = most

    def add(self, labels: Labels, count: float = 1) -> None:
        if labels not in self and len(self) >= self._most:
            labels = (OTHER,) * len(labels)
        self[labels] = self.get(labels, 0) + count
