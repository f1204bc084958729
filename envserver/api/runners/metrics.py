"""Numbers of runners in `/metrics` and `/v1/status`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from prometheus_client.core import Metric

from ...telemetry.families import gauge
from .registry import RunnerRegistry


def count_runners(environments: RunnerRegistry) -> dict[str, int]:
    """Counts the runners that are present, silent and gone."""
    counted = Counter(_presence_of(one) for one in environments.snapshot())
    return {name: counted[name] for name in ("present", "silent", "gone")}


class RunnerMetrics:
    """Metrics of all runners, labelled by environment; runner names would give unbounded labels."""

    def __init__(self, environments: RunnerRegistry) -> None:
        self._environments = environments

    async def families(self) -> Iterable[Metric]:
        """Returns the metrics; a Source of `api.metrics`."""
        how_many: Counter[tuple[str, ...]] = Counter()
        is_open: Counter[tuple[str, ...]] = Counter()
        for one in self._environments.snapshot():
            how_many[(one["env"], _presence_of(one))] += 1
            is_open[(one["env"],)] += one["open"]
        of = ("environment",)
        return [
            gauge(
                "envserver_joined_environments",
                "Environments on other machines: present, silent, gone",
                (*of, "standing"),
                how_many.items(),
            ),
            gauge("envserver_joined_open_groups", "Groups they make", of, is_open.items()),
        ]


def _presence_of(shown: dict[str, Any]) -> str:
    if shown["gone"]:
        return "gone"
    return "silent" if shown["silent"] else "present"
