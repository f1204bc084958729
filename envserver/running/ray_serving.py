"""The work of `envserver serve --ray`: the server here, its environments on a Ray cluster.
Runners join this server as they would from any other machine. Ray only places them; a lost runner's
open groups are made again, its finished ones are in the store here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from envserver_records.errors import ConfigError

from ..ray_cluster.cluster import Cluster, CommandSpec, Fleet, Load, connected
from ..runners.link import Identity, held_identity
from ..settings.config import MixSettings
from ..settings.server import DeliveryConfig
from .api_serving import ApiServer, api_server
from .hosting import Members
from .judging import folder_of
from .mix import Member
from .ray_runners import (
    check_engine,
    config_of_part,
    divided,
    groups_per_runner,
    runner_command,
    url_for_nodes,
)
from .run_settings import RunApiSettings, ServeSettings
from .serving import POLL_SECONDS, Served, ServingBase, check_alike
from .stopping import Stop

_TICK_SECONDS = 1.0
_CANCEL_SECONDS = 3.0


@dataclass
class _Part:
    member: Member[MixSettings]
    most: int
    identities: dict[int, Identity] = field(default_factory=dict)


class RayServing(ServingBase):
    def __init__(
        self,
        server: ApiServer,
        cluster: Cluster,
        parts: list[_Part],
        url: str,
        held: contextlib.ExitStack,
    ) -> None:
        super().__init__(parts[0].member.spec.settings, server.bootstrap, server.watch.book)
        self.runner_url = url
        self._delivery = server.delivery
        self._parts = parts
        self._held = held
        self._draining = False
        self._cluster = cluster
        self._fleets = [self._fleet(cluster, part) for part in parts]

    @property
    def open_groups(self) -> int:
        return sum(runner.open for runner in self._delivery.runners.table.present())

    def drain(self) -> None:
        self._draining = True

    async def run(self, stop: Stop, say: Callable[[str], object]) -> Served:
        overdue = 0
        try:
            ending = await self._stopped(self._run_then_wait(), self, stop)
            overdue = self.open_groups if ending == "overdue" else 0
        finally:
            await self._end()
        cut_off = {self._parts[0].member.share.name: overdue} if overdue else {}
        return Served(ending, await self._waiting(), cut_off, "", "")

    async def _end(self) -> None:
        for fleet in self._fleets:
            await fleet.stop(_CANCEL_SECONDS)
        await self._server.close()

    async def _run_then_wait(self) -> None:
        while not await self._tick():
            await asyncio.sleep(_TICK_SECONDS)
        while not self._draining and await self._waiting():
            await asyncio.sleep(POLL_SECONDS)

    async def _tick(self) -> bool:
        """Returns whether all runners have made what they should."""
        room = await self._cluster.most_runners()
        rooms = divided(room, [part.member.share.weight for part in self._parts])
        for part, fleet, own_room in zip(self._parts, self._fleets, rooms, strict=True):
            if self._draining:
                await fleet.tick(0)
            else:
                await fleet.scale(self._load(part), own_room)
        return all(fleet.is_empty for fleet in self._fleets)

    def _load(self, part: _Part) -> Load:
        member = part.member
        present = [
            runner.beat
            for runner in self._delivery.runners.table.present()
            if runner.env == member.environment.name and runner.capacity
        ]
        capacity = sum(beat.capacity for beat in present) / len(present) if present else 0
        return Load(
            groups=self._delivery.demand.capacity_if_idle(member.environment.name),
            groups_per_runner=capacity
            or groups_per_runner(member.spec.settings, member.environment),
            engine_waits=any(beat.engine.get("waiting") for beat in present),
        )

    def _fleet(self, cluster: Cluster, part: _Part) -> Fleet:
        return Fleet(
            cluster,
            part.member.share.name,
            config_of_part(part.member.spec.settings.ray, part.most),
            make=lambda number: self._command(part, number),
            drain=lambda number: self._drain(part, number),
        )

    def _command(self, part: _Part, number: int) -> CommandSpec:
        member = part.member
        settings, share = member.spec.settings, member.share
        if number not in part.identities:
            part.identities[number] = self._held.enter_context(
                held_identity(
                    folder_of(settings.store) / "joined",
                    name=f"{share.name}@ray-{number}",
                    default="",
                )
            )
        identity, steps = part.identities[number], member.environment.config.total_steps
        more = {
            "name": identity.name,
            "weight": share.weight / part.most,
            "minimum_share": share.minimum / part.most,
        }
        return runner_command(
            settings,
            member.spec.reference,
            member.environment,
            self.runner_url,
            more=more,
            steps=None if steps is None else _part_of(steps, number, part.most),
            instance=identity.instance,
            brings_folder=self._cluster.brings_folder,
            token=settings.ray.token.get_secret_value(),
        )

    def _drain(self, part: _Part, number: int) -> None:
        identity = part.identities.get(number)
        runner = None if identity is None else self._delivery.runners.table.named(identity.name)
        if runner is not None and not runner.registered.gone:
            self._delivery.runners.drain(runner.id)


def _part(member: Member[MixSettings], most: int) -> _Part:
    """A runner makes at least one group."""
    steps = member.environment.config.total_steps
    if steps is not None and member.spec.settings.ray.runners is None:
        raise ConfigError(
            "env.total_steps is divided among the runners, whose number changes.",
            hint="Set --ray.runners, too.",
        )
    return _Part(member, min(most, steps or most))


def _part_of(total: int, number: int, of: int) -> int:
    return total // of + (number < total % of)


@contextlib.asynccontextmanager
async def ray_serving(members: Members) -> AsyncIterator[RayServing]:
    settings = members[0].spec.settings
    check_alike(members)
    check_engine(settings)
    if settings.total_groups is not None:
        raise ConfigError(
            "--total_groups counts the groups of one process, and --ray has several.",
            hint="Set env.total_steps of each environment.",
        )
    if settings.track:
        raise ConfigError(
            "--track follows rollouts of this process, and with --ray there are none.",
            hint="`process --ray` and `evaluate --ray` have it; `serve --ray` has /metrics.",
        )
    if isinstance(settings, ServeSettings) and settings.evaluate.every is not None:
        raise ConfigError(
            "--evaluate.every needs an engine in this server, and with --ray there is none.",
            hint="Evaluate with `envserver evaluate --ray auto`, or serve without --ray.",
        )
    async with connected(settings.ray) as cluster, api_server(_api_settings(settings)) as server:
        await cluster.check_place()
        url = await url_for_nodes(cluster, settings.ray, server.url, settings.server.host)
        shares = divided(await cluster.most_wanted(), [member.share.weight for member in members])
        parts = [_part(member, share) for member, share in zip(members, shares, strict=True)]
        with contextlib.ExitStack() as held:
            yield RayServing(server, cluster, parts, url, held)


def _api_settings(settings: MixSettings) -> RunApiSettings:
    rules = {name: getattr(settings.rollouts, name) for name in DeliveryConfig.model_fields}
    names = RunApiSettings.model_fields.keys() - {"rollouts"}
    kept = {name: getattr(settings, name) for name in names}
    return RunApiSettings(**kept, rollouts=DeliveryConfig(**rules))
