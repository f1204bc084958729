"""Makes the groups of `process` and `evaluate` on a Ray cluster.

In: requests for groups, from the run's own schedulers. Out: groups and events, as if they were made
here. What holds: the run decides which groups are made, in which order and when it ends, so it
makes the same groups as without Ray; runners make what they are dealt (`remote.dealing`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from envserver_records.cancelling import cancel_and_wait
from envserver_records.records import Group

from ..environment import Environment
from ..http.server import serve_api
from ..ray_cluster.cluster import Cluster, CommandSpec, connected
from ..ray_cluster.fleet import Fleet
from ..ray_cluster.scaling import Load, Scaling
from ..rollouts.events import Observer
from ..rollouts.policy import Drop, UntrainedCeiling
from ..rollouts.stream import GroupRequest
from ..runners.dealing import Dealer, Rules, dealing_app
from ..settings.config import MixSettings, RolloutsConfig
from .bootstrap import beside
from .mix import RunSpec
from .ray_serving import (
    bind_host,
    check_engine,
    config_of_part,
    divided,
    groups_per_runner,
    runner_command,
    url_for_nodes,
)

_TICK_SECONDS = 0.5
_STOP_SECONDS = 3.0


class RayMaker:
    """Makes the groups of one environment; a `GroupMaker`."""

    def __init__(
        self,
        environment: Environment,
        rollouts: RolloutsConfig,
        observer: Observer,
        dealer: Dealer,
        tending: asyncio.Task[None],
    ) -> None:
        self.environment = environment
        self.rollouts = rollouts
        self.observer = observer
        self.ceiling = UntrainedCeiling(1.0, 1)  # runners judge it
        self._dealer = dealer
        self._tending = tending

    async def make(self, request: GroupRequest) -> Group | Drop:
        """Has a runner make the group. Raises RunnerFailed: runners cannot start."""
        making = asyncio.create_task(self._dealer.make(request))
        try:
            await asyncio.wait({making, self._tending}, return_when=asyncio.FIRST_COMPLETED)
            if not making.done():
                self._tending.result()
            made = making.result()
        finally:
            await cancel_and_wait(making)
        for failed in made.failed:
            self.observer(failed)
        for scored in made.scored:
            self.observer(scored)
        if made.group is not None:
            return made.group
        return made.drop or Drop("incomplete", "The runner sent no group.", failed=True)


@dataclass(frozen=True)
class RayMakers:
    """A connected cluster that can make groups of several environments.

    Args:
        weights: of the environments that run at the same time.
        runners: the most runners of each of them, in their order.
    """

    settings: MixSettings
    cluster: Cluster
    weights: Sequence[float]
    runners: Sequence[int]

    async def room(self, number: int) -> int:
        """Returns how many runners of an environment the nodes of now have room for."""
        return divided(await self.cluster.most_runners(), self.weights)[number]

    @contextlib.asynccontextmanager
    async def open(
        self,
        number: int,
        spec: RunSpec[Any],
        environment: Environment,
        observer: Observer,
        rules: Rules,
    ) -> AsyncIterator[RayMaker]:
        """Starts runners for an environment; ends them at the end.

        Args:
            number: of the environment in the run.
        """
        config, most = self.settings.ray, self.runners[number]
        token = secrets.token_urlsafe(24)
        host = await bind_host(self.cluster)
        dealer = Dealer(rules)
        server = await serve_api(dealing_app(dealer, token), host, 0, is_guarded=True)
        try:
            url = await url_for_nodes(self.cluster, config, server.url, host)
            rollouts = spec.settings.rollouts

            def command(runner: int) -> CommandSpec:
                return runner_command(
                    spec.settings,
                    spec.reference,
                    environment,
                    url,
                    more={"name": _name(environment, runner), "dealt": True},
                    instance=secrets.token_urlsafe(24),
                    brings_folder=self.cluster.brings_folder,
                    token=token,
                )

            fleet = Fleet(
                self.cluster,
                environment.name,
                wants=config.wants(),
                make=command,
                drain=lambda runner: dealer.drain(_name(environment, runner)),
            )
            dealer.runners = lambda: fleet.young
            async with beside("silent-runners", dealer.watch()):
                scaling = Scaling(config_of_part(config, most))
                per_runner = groups_per_runner(spec.settings, environment)
                tending = asyncio.create_task(
                    _tend(fleet, dealer, scaling, partial(self.room, number), per_runner)
                )
                scaled = rollouts.model_copy(
                    update={"max_concurrent": rollouts.max_concurrent * most}
                )
                try:
                    yield RayMaker(environment, scaled, observer, dealer, tending)
                finally:
                    await cancel_and_wait(tending)
                    await asyncio.shield(fleet.stop(_STOP_SECONDS))
        finally:
            dealer.close()
            await server.close()


def _name(environment: Environment, runner: int) -> str:
    return f"{environment.name}@ray-{runner}"


async def _tend(
    fleet: Fleet,
    dealer: Dealer,
    scaling: Scaling,
    room: Callable[[], Awaitable[int]],
    per_runner: int,
) -> None:
    """Looks after the runners of an environment, until cancelled.

    Args:
        room: returns how many runners the nodes of now have room for.
    """
    while True:
        load = Load(dealer.open_groups, per_runner, dealer.engine_waits)
        await fleet.tick(scaling.wanted(load, await room()))
        await asyncio.sleep(_TICK_SECONDS)


@contextlib.asynccontextmanager
async def ray_makers(
    settings: MixSettings, weights: Sequence[float] = (1.0,)
) -> AsyncIterator[RayMakers]:
    """Connects to the cluster.

    Args:
        weights: of the environments that run at the same time.
    """
    check_engine(settings)
    async with connected(settings.ray) as cluster:
        await cluster.check_place()
        most = settings.ray.runners or settings.ray.max or await cluster.most_runners()
        yield RayMakers(settings, cluster, weights, divided(most, weights))
