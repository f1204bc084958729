"""Numbers of runners in `/metrics` and `/v1/status`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import Metric

from ...telemetry.numbers import gauge
from .registry import RunnerRegistry


def count_runners(environments: RunnerRegistry) -> dict[str, int]:
    """Counts the runners that are present, silent and gone."""
    table = environments.table
    counted = Counter(table.presence(one) for one in table.known.values())
    return {name: counted[name] for name in ("present", "silent", "gone")}


class RunnerMetrics:
    """Metrics of all runners, labelled by environment; runner names would give unbounded labels."""

    def __init__(self, environments: RunnerRegistry) -> None:
        self._environments = environments

    async def families(self) -> Iterable[Metric]:
        """Returns the metrics; a Source of `api.metrics`."""
        how_many: Counter[tuple[str, ...]] = Counter()
        is_open: Counter[tuple[str, ...]] = Counter()
        capacity: Counter[tuple[str, ...]] = Counter()
        table, news = self._environments.table, self._environments.news
        for one in table.known.values():
            how_many[(one.env, table.presence(one))] += 1
            now = table.status(one)
            is_open[(one.env,)] += now.open
            capacity[(one.env,)] += now.beat.capacity if table.is_present(one) else 0
        wanted = {(env,): news.wanted(env) for (env,) in is_open}
        of = ("environment",)
        return [
            gauge(
                "envserver_joined_environments",
                "Environments on other machines: present, silent, gone",
                (*of, "standing"),
                how_many.items(),
            ),
            gauge("envserver_joined_open_groups", "Groups they make", of, is_open.items()),
            gauge(
                "envserver_joined_capacity_groups",
                "Groups that those present could make at a time",
                of,
                capacity.items(),
            ),
            gauge(
                "envserver_joined_wanted_groups",
                "Groups that trainers would have them make at a time; scale runners by it",
                of,
                wanted.items(),
            ),
        ]
