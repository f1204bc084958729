"""Metrics of the evaluations of a held-out split."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric

from ..telemetry.families import by_key, counter, gauge, single
from .held_out import Evaluations


class EvaluationNumbers:
    """Metrics of the last complete evaluation, and how all of them ended."""

    def __init__(self, evaluations: Evaluations) -> None:
        self._evaluations = evaluations

    async def families(self) -> Iterable[Metric]:
        """See `api.metrics.Source`."""
        of, latest = self._evaluations, self._evaluations.latest
        results = {} if latest is None else latest.results
        values = [
            ((environment, measure), value)
            for name, value in results.items()
            for environment, _, measure in [name.removeprefix("evaluate/").rpartition("/")]
        ]
        return [
            gauge(
                "envserver_evaluation", "Results of the last evaluation of the held-out split",
                ("environment", "measure"), values,
            ),
            gauge(
                "envserver_evaluation_policy_version",
                "Policy version at the start of the last evaluation, -1 before any", (),
                single(-1.0 if latest is None else float(latest.version)),
            ),
            gauge(
                "envserver_evaluation_other_versions",
                "Rollouts of the last evaluation with tokens of another version", (),
                single(0.0 if latest is None else float(latest.other_versions)),
            ),
            gauge(
                "envserver_evaluation_running", "1 while an evaluation runs", (),
                single(float(of.busy)),
            ),
            counter(
                "envserver_evaluations", "Evaluations by how they ended; skipped: not begun",
                ("end",), by_key({end: float(count) for end, count in of.ends.items()}),
            ),
        ]  # fmt: skip
