"""Counters and distributions that the server's parts keep for `/metrics`, as Prometheus families.
Each is owned by the part that counts and written on its event loop only: no lock, and a fraction of
a microsecond for each update.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

SECONDS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
"""Histogram bounds, from a millisecond to minutes."""
SHORT_SECONDS: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0,
)  # fmt: skip
OTHER: Final = "other"
"""The label value used once a label has too many values."""


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


class Labelled:
    """A Distribution for each of at most `most` label combinations; later ones count as `other`."""

    def __init__(self, bounds: tuple[float, ...], most: int = 200) -> None:
        self._bounds = bounds
        self._most = most
        self._by_labels: dict[tuple[str, ...], Distribution] = {}

    def add(self, labels: tuple[str, ...], value: float) -> None:
        found = self._by_labels.get(labels)
        if found is None:
            if len(self._by_labels) >= self._most:
                labels = (OTHER,) * len(labels)
            found = self._by_labels.setdefault(labels, Distribution(self._bounds))
        found.add(value)

    def __iter__(self) -> Iterator[tuple[tuple[str, ...], Distribution]]:
        return iter(sorted(self._by_labels.items()))


class Counts:
    """A count for each label combination, limited like `Labelled`."""

    def __init__(self, most: int = 500) -> None:
        self._most = most
        self._by_labels: dict[tuple[str, ...], float] = {}

    def add(self, labels: tuple[str, ...], count: float = 1) -> None:
        if labels not in self._by_labels and len(self._by_labels) >= self._most:
            labels = (OTHER,) * len(labels)
        self._by_labels[labels] = self._by_labels.get(labels, 0) + count

    def __iter__(self) -> Iterator[tuple[tuple[str, ...], float]]:
        return iter(sorted(self._by_labels.items()))


Labels = tuple[str, ...]
T = TypeVar("T")


def counter(
    name: str, words: str, labels: Labels, values: Iterable[tuple[Labels, float]]
) -> Metric:
    """Its samples end in `_total`."""
    family = CounterMetricFamily(name, words, labels=labels)
    for of, value in values:
        family.add_metric(of, value)
    return family


def gauge(name: str, words: str, labels: Labels, values: Iterable[tuple[Labels, float]]) -> Metric:
    family = GaugeMetricFamily(name, words, labels=labels)
    for of, value in values:
        family.add_metric(of, value)
    return family


def histogram(
    name: str, words: str, labels: Labels, values: Iterable[tuple[Labels, Distribution]]
) -> Metric:
    """Its samples end in `_bucket`, `_sum`, `_count`."""
    family = HistogramMetricFamily(name, words, labels=labels)
    for of, one in values:
        family.add_metric(of, _buckets(one), one.total)
    return family


def level(name: str, words: str, value: float) -> Metric:
    """A gauge without labels."""
    return gauge(name, words, (), single(value))


def of_each(
    make: Callable[[str, str, Labels, list[tuple[Labels, float]]], Metric],
    name: str,
    words: str,
    label: str,
    items: Iterable[tuple[str, T]],
    value: Callable[[T], float],
) -> Metric:
    """A counter or a gauge with a value of each of the items, by their name as the label."""
    return make(name, words, (label,), [((key,), float(value(one))) for key, one in items])


def single(value: float) -> list[tuple[Labels, float]]:
    return [((), value)]


def by_key(values: Mapping[str, float]) -> list[tuple[Labels, float]]:
    return [((key,), value) for key, value in sorted(values.items())]


def info(name: str, words: str, facts: dict[str, str]) -> Metric:
    return InfoMetricFamily(name, words, value=facts)


def _buckets(one: Distribution) -> list[tuple[str, float]]:
    buckets, below = [], 0
    for bound, count in zip((*one.bounds, float("inf")), one.counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), float(below)))
    return buckets
