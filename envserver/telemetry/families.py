"""Converts numbers to Prometheus metric families."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from .numbers import Distribution

Labels = tuple[str, ...]


def counter(
    name: str, words: str, labels: Labels, values: Iterable[tuple[Labels, float]]
) -> Metric:
    """Returns a counter family; its samples end in `_total`."""
    family = CounterMetricFamily(name, words, labels=labels)
    for of, value in values:
        family.add_metric(of, value)
    return family


def gauge(name: str, words: str, labels: Labels, values: Iterable[tuple[Labels, float]]) -> Metric:
    """Returns a gauge family."""
    family = GaugeMetricFamily(name, words, labels=labels)
    for of, value in values:
        family.add_metric(of, value)
    return family


def histogram(
    name: str, words: str, labels: Labels, values: Iterable[tuple[Labels, Distribution]]
) -> Metric:
    """Returns a histogram family; its samples end in `_bucket`, `_sum`, `_count`."""
    family = HistogramMetricFamily(name, words, labels=labels)
    for of, one in values:
        family.add_metric(of, _buckets(one), one.total)
    return family


def single(value: float) -> list[tuple[Labels, float]]:
    """Returns the values of a family without labels."""
    return [((), value)]


def by_key(values: Mapping[str, float]) -> list[tuple[Labels, float]]:
    """Returns the values of a family with one label."""
    return [((key,), value) for key, value in sorted(values.items())]


def info(name: str, words: str, facts: dict[str, str]) -> Metric:
    """Returns an info family for facts that do not change."""
    return InfoMetricFamily(name, words, value=facts)


def _buckets(one: Distribution) -> list[tuple[str, float]]:
    buckets, below = [], 0
    for bound, count in zip((*one.bounds, float("inf")), one.counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), float(below)))
    return buckets
