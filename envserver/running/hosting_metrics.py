"""Metrics of what only a server with environments has: held-out evaluations, sandbox machines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

from ..settings.config import SandboxConfig
from ..telemetry.numbers import (
    by_key,
    counter,
    gauge,
    single,
)
from .held_out import Evaluations

if TYPE_CHECKING:
    from ..sandbox.remote.machines import Machine


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


class SandboxMachineNumbers:
    """What this process knows of each machine; see `api.metrics.Source`."""

    def __init__(self, config: SandboxConfig) -> None:
        self._machines: tuple[Machine, ...] = ()
        if config.remote_urls:
            from ..sandbox.remote.machines import machines_at

            self._machines = machines_at(config.remote_urls)

    async def families(self) -> Iterable[Metric]:
        of = ("machine",)
        name = "envserver_sandbox_machine"
        known = [(one, one.load) for one in self._machines]
        loads = [((one.url,), load) for one, load in known if load is not None and not one.problem]
        return [
            gauge(
                f"{name}_up", "1 while it answers", of,
                [((one.url,), float(not one.problem)) for one in self._machines],
            ),
            gauge(f"{name}_places", "Maximum sandboxes", of,
                  [(url, float(load.sandboxes)) for url, load in loads]),
            gauge(f"{name}_open", "Its open sandboxes, of all clients", of,
                  [(url, float(load.open)) for url, load in loads]),
            gauge(f"{name}_waiting", "Requests for one, of all clients", of,
                  [(url, float(load.waiting)) for url, load in loads]),
            gauge(
                f"{name}_own", "Sandboxes of this process there, with those that are wanted", of,
                [((one.url,), float(one.open)) for one in self._machines],
            ),
            counter(
                f"{name}_events", "opened: sandboxes; unreachable, lost: failures of the machine",
                (*of, "event"),
                [((one.url, event), float(n)) for one in self._machines
                 for event, n in sorted(one.counts.items())],
            ),
        ]  # fmt: skip
