"""What `serve` counts, for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..proxy.server import Proxy
from .progress import Tally


class ServeMetrics(Collector):
    """Read when `/metrics` is asked for; nothing is counted twice."""

    def __init__(self, tally: Tally, proxies: Sequence[Proxy]) -> None:
        self._tally = tally
        self._proxies = proxies

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        tally, proxy = self._tally, self._proxies[0]  # they share the engine
        services: Counter[str] = Counter()
        for one in self._proxies:
            services.update(one.services.counts())
        yield _labelled(
            "envserver_flags",
            "Rollouts by what is odd about their tokens",
            "flag",
            tally.flags,
        )
        yield _labelled(
            "envserver_failed_attempts", "Failed attempts by kind", "kind", tally.failures
        )
        yield _labelled(
            "envserver_groups_dropped", "Groups not delivered by reason", "reason", tally.drops
        )
        yield _labelled(
            "envserver_services",
            "What the environment's services counted",
            "count",
            services,
        )
        for name, words, count in (
            ("envserver_groups_delivered", "Groups made durable", tally.groups),
            ("envserver_rollouts_scored", "Rollouts that have a score", tally.rollouts),
            ("envserver_rollouts_lost", "Rollouts that failed for good", tally.lost),
            ("envserver_completion_tokens", "Tokens sampled", tally.completion_tokens),
        ):
            yield CounterMetricFamily(name, words, value=count)
        for name, words, number in (
            ("envserver_policy_version", "Published last, -1 before any", proxy.policy_version),
            ("envserver_calls_at_engine", "Model calls in flight", proxy.gate.in_flight),
            ("envserver_calls_waiting", "Calls held up by a pause", proxy.gate.waiting),
            ("envserver_paused", "1 while calls are paused", int(proxy.gate.paused)),
            ("envserver_mean_reward", "Of all scored rollouts", tally.rewards.mean or 0.0),
        ):
            yield GaugeMetricFamily(name, words, value=number)


def _labelled(name: str, words: str, label: str, counts: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, words, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family
