"""Metrics of the sandbox machines that a server uses (`--sandbox.remote`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

from ..config import SandboxConfig
from ..telemetry.families import counter, gauge

if TYPE_CHECKING:
    from ..sandbox.remote.machines import Machine


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
