"""The work of `envserver run-api`: `serving` without rollouts. Groups come from remote
environments."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..api.app import create_api
from ..proxy.gate import Gate
from ..rollouts.policy import Bounds
from ..runners.registry import RunnerRegistry
from ..settings.server import DeliveryConfig, ServerConfig
from ..store.demand import Demand, Staleness
from ..trainers.status import AlarmWatch
from .bootstrap import BootstrapServer, bootstrap_server
from .metrics import Deliveries
from .run_settings import RunApiSettings
from .stopping import beside

if TYPE_CHECKING:
    from ..store import Store


@dataclass(frozen=True)
class ApiServer:
    url: str
    bootstrap: BootstrapServer
    delivery: Delivery
    watch: AlarmWatch


@contextlib.asynccontextmanager
async def api_server(settings: RunApiSettings) -> AsyncIterator[ApiServer]:
    starting = bootstrap_server(
        settings.server, settings.telemetry, settings.store, (), shared=settings.store_shared
    )
    async with starting as server:
        delivery = Delivery(server.store, settings.rollouts, settings.server)
        watch = AlarmWatch(
            settings.alarms, partial(server.alarm_facts, delivery.demand, settings.store)
        )
        server.metrics.add(Deliveries(server.store, lambda: delivery.version).read)
        api = create_api(
            server.store,
            settings=settings.server,
            status=lambda: (
                delivery.status() | {"stale_groups": delivery.staleness.dropped} | server.facts()
            ),
            on_policy_version=delivery.publish,
            runners=delivery.runners,
            gate=Gate(),  # this server has no engine: environments on other machines pause with it
            metrics=server.metrics,
            alarms=watch,
            health=server.health,
            retention=settings.retention,
            live=server.live,
        )
        await server.open(api)
        async with delivery.in_order():
            yield ApiServer(server.url, server, delivery, watch)
        server.health.drain()


class Delivery:
    """Decides which groups trainers get and how many groups remote runners may make."""

    def __init__(
        self,
        store: Store,
        rules: DeliveryConfig,
        server: ServerConfig,
        *,
        smallest_group: int = 1,
    ) -> None:
        self.version = -1
        """The policy version published last; -1 before any."""
        self.staleness = Staleness(store, rules.most_staleness)
        self.demand = Demand(
            store,
            Bounds(
                most_groups=rules.max_queued_groups,
                most_batches=rules.max_batches_offpolicy,
                max_staleness=rules.most_staleness,
            ),
            smallest_group=smallest_group,
            silent_run_seconds=rules.silent_run_seconds,
        )
        self.runners = RunnerRegistry(
            store,
            self.demand,
            silent_after_seconds=server.silent_after_seconds,
            stretches=rules.most_staleness is None,
        )

    @contextlib.asynccontextmanager
    async def in_order(self) -> AsyncIterator[None]:
        """Drops stale groups and closes silent runs while the block runs."""
        async with (
            beside("stale-groups", self.staleness.run()),
            beside("silent-runs", self.demand.close_silent_runs()),
        ):
            yield

    def publish(self, version: int) -> None:
        self.version = version
        self.staleness.publish(version)

    def status(self) -> dict[str, Any]:
        return {"closed_silent_runs": dict(self.demand.closed_runs)}
