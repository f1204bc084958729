"""The work of `envserver serve --ray`: the server here, its environments on a Ray cluster.

In: environments and their shares. Out: groups for trainers, made by runners that join this server
as they would from any other machine. Ray only places runners; a lost runner's open groups are made
again, its finished ones are in the store here.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
from envserver_records.cancelling import cancel_and_wait
from envserver_records.errors import ConfigError
from envserver_records.records import Group
from pydantic import BaseModel, SecretStr

from ..environment import Environment
from ..http.server import serve_api
from ..ray_cluster.cluster import Cluster, CommandSpec, Node, connected
from ..ray_cluster.fleet import Fleet
from ..ray_cluster.scaling import Load, Scaling
from ..registry import absolute
from ..rollouts.agents import check_sampling
from ..rollouts.events import Observer
from ..rollouts.policy import Drop, UntrainedCeiling
from ..rollouts.stream import GroupRequest
from ..runners.dealing import Dealer, Rules, dealing_app
from ..runners.link import Identity, held_identity
from ..runners.runner import RegisteredRunner
from ..settings.config import MixSettings, RolloutsConfig, Settings
from ..settings.runs import RayConfig
from ..settings.server import DeliveryConfig, is_loopback
from ..telemetry.history import Name, numbers_of
from .api_serving import ApiServer, api_server
from .bootstrap import beside
from .engines import SIMULATED
from .hosting import Members
from .judging import folder_of
from .mix import Member, RunSpec
from .run_settings import RunApiSettings, ServeSettings
from .serving import POLL_SECONDS, Served, check_alike
from .stopping import Stop, run_until_stopped

_OF_SERVER = {"server", "store", "retention", "alarms", "environment", "env"}
_DRAIN_SECONDS = 5.0
"""A runner that gets SIGTERM has been drained, or its actor has ended."""


def check_engine(settings: Settings) -> None:
    """Raises ConfigError if the runners would each start an engine."""
    if settings.model not in (None, SIMULATED):
        raise ConfigError(
            f"--model {settings.model} starts an engine, and every runner of --ray would start "
            "one.",
            hint="Start it once (`envserver models start`, vLLM), and name it with "
            "--openai.base_url http://HOST:PORT/v1.",
        )


def runner_command(
    settings: MixSettings,
    reference: str,
    environment: Environment,
    url: str,
    *,
    more: Mapping[str, Any],
    steps: int | None = None,
    instance: str,
    brings_folder: bool,
    token: str = "",
) -> CommandSpec:
    """Returns the command of a runner."""
    kept = {name: getattr(settings, name) for name in Settings.model_fields.keys() - _OF_SERVER}
    tree = {
        **plain(kept),
        "environment": reference if brings_folder else absolute(reference),
        "env": {
            **plain(environment.config),
            "data_path_to_save_groups": None,
            "total_steps": steps,
        },
        "server": {"drain_seconds": _DRAIN_SECONDS},
        **more,
    }
    variables = {"ENVSERVER_INSTANCE": instance}
    if token:
        variables["ENVSERVER_TOKEN"] = token
    return CommandSpec(("join", url), orjson.dumps(tree).decode(), variables)


def plain(value: Any) -> Any:
    """Returns settings as JSON has them, with secrets in the clear; only what is not a default."""
    if isinstance(value, BaseModel):
        return {
            name: plain(given)
            for name, field in type(value).model_fields.items()
            if (given := getattr(value, name)) != field.default
        }
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(one) for one in value]
    return value


async def url_for_nodes(cluster: Cluster, config: RayConfig, url: str, host: str) -> str:
    """Returns the address at which the nodes reach this process's server."""
    if config.url:
        return config.url
    own, nodes = await cluster.own_address(), await cluster.nodes()
    elsewhere = _elsewhere(own, nodes)
    if not elsewhere:
        return url
    if is_loopback(host):
        raise ConfigError(
            f"The Ray nodes {', '.join(elsewhere)} cannot reach {url}.",
            hint="Listen at an address of this machine, with access tokens: --server.host 0.0.0.0 "
            "--server.tokens_file FILE, and ENVSERVER_RAY__TOKEN for the runners.",
        )
    parts = urlsplit(url)
    return f"{parts.scheme}://{own}:{parts.port}"


async def bind_host(cluster: Cluster) -> str:
    """Returns the address to listen at that all nodes reach: loopback if all are on this
    machine."""
    own = await cluster.own_address()
    return own if _elsewhere(own, await cluster.nodes()) else "127.0.0.1"


def _elsewhere(own: str, nodes: Sequence[Node]) -> list[str]:
    return sorted({one.address for one in nodes} - {own, "127.0.0.1"})


def config_of_part(config: RayConfig, most: int) -> RayConfig:
    """Returns the bounds of one of several environments, which may have `most` runners."""
    return config.model_copy(
        update={
            "runners": most if config.runners else None,
            "min": min(config.min, most),
            "max": most if config.max else None,
        }
    )


def groups_per_runner(settings: Settings, environment: Environment) -> int:
    """Returns about how many groups a runner has open at a time."""
    size: int = environment.config.group_size
    return max(1, settings.rollouts.max_concurrent // size)


def divided(total: int, weights: Sequence[float]) -> list[int]:
    """Divides `total` by weights, at least one each."""
    whole = sum(weights)
    shares = [max(1, math.floor(total * weight / whole)) for weight in weights]
    order = sorted(range(len(weights)), key=lambda n: shares[n] - total * weights[n] / whole)
    for number in order[: max(0, total - sum(shares))]:
        shares[number] += 1
    return shares


_TICK_SECONDS = 1.0
_CANCEL_SECONDS = 3.0


@dataclass
class _Part:
    """One environment: its member, its most runners, and their identities by number."""

    member: Member[MixSettings]
    most: int
    scaling: Scaling
    identities: dict[int, Identity] = field(default_factory=dict)


class RayServing:
    """A running server with runners on a cluster; made by `ray_serving`."""

    def __init__(
        self,
        server: ApiServer,
        cluster: Cluster,
        parts: list[_Part],
        url: str,
        held: contextlib.ExitStack,
    ) -> None:
        self.url = server.url
        """Address for trainers."""
        self.model_url = ""
        """This server has no engine of its own."""
        self.runner_url = url
        """Address for runners."""
        self._server = server
        self._settings = parts[0].member.spec.settings
        self._parts = parts
        self._held = held
        self._draining = False
        self._cluster = cluster
        self._fleets = [self._fleet(cluster, part) for part in parts]

    async def numbers(self) -> dict[Name, float]:
        """Returns the numbers of now that `/v1/series` shows."""
        return numbers_of(await self._server.bootstrap.metrics.families())

    def alarms(self) -> list[str]:
        """Returns what is wrong now, in sentences."""
        return [one.text for one in self._server.watch.book.active]

    @property
    def open_groups(self) -> int:
        """Number of groups that are being made now."""
        table = self._server.runners.table
        return sum(now.open for _, now in table.present())

    def drain(self) -> None:
        """Lets no runner begin another group."""
        self._draining = True

    async def run(self, stop: Stop, say: Callable[[str], object]) -> Served:
        """Makes groups until asked to stop, or until all wanted groups are made and delivered."""
        seconds = self._settings.server.drain_seconds
        overdue = 0
        try:
            ending = await run_until_stopped(
                self._run_then_wait(),
                self,
                stop,
                on_stop=self._server.bootstrap.health.drain,
                drain_seconds=seconds,
            )
            overdue = self.open_groups if ending == "overdue" else 0
        finally:
            await self._end()
        cut_off = {self._parts[0].member.share.name: overdue} if overdue else {}
        return Served(ending, await self._waiting(), cut_off, "", "")

    async def _end(self) -> None:
        for fleet in self._fleets:
            await fleet.stop(_CANCEL_SECONDS)
        await self._server.bootstrap.close()

    async def _run_then_wait(self) -> None:
        while not await self._tick():
            await asyncio.sleep(_TICK_SECONDS)
        while not self._draining and await self._waiting():
            await asyncio.sleep(POLL_SECONDS)

    async def _tick(self) -> bool:
        """Looks after all runners once; returns whether all have made what they should."""
        room = await self._cluster.most_runners()
        rooms = divided(room, [part.member.share.weight for part in self._parts])
        for part, fleet, own_room in zip(self._parts, self._fleets, rooms, strict=True):
            wanted = 0 if self._draining else part.scaling.wanted(self._load(part), own_room)
            await fleet.tick(wanted)
        return all(fleet.is_empty for fleet in self._fleets)

    def _load(self, part: _Part) -> Load:
        member = part.member
        present = [
            now.beat
            for one, now in self._server.runners.table.present()
            if one.env == member.environment.name and now.beat.capacity
        ]
        capacity = sum(beat.capacity for beat in present) / len(present) if present else 0
        return Load(
            groups=self._server.demand.capacity_if_idle(member.environment.name),
            groups_per_runner=capacity
            or groups_per_runner(member.spec.settings, member.environment),
            engine_waits=any(beat.engine.get("waiting") for beat in present),
        )

    def _fleet(self, cluster: Cluster, part: _Part) -> Fleet:
        return Fleet(
            cluster,
            part.member.share.name,
            wants=self._settings.ray.wants(),
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
        one = self._registered(part, number)
        if one is not None and not one.gone:
            self._server.runners.drain(one.id)

    def _registered(self, part: _Part, number: int) -> RegisteredRunner | None:
        identity = part.identities.get(number)
        return None if identity is None else self._server.runners.table.named(identity.name)

    async def _waiting(self) -> int:
        counts = await self._server.bootstrap.store.counts()
        return counts["queued"] + counts["buffered"] + counts["leased"]


def _part(member: Member[MixSettings], most: int) -> _Part:
    """Returns an environment with its bounds; a runner makes at least one group."""
    config, steps = member.spec.settings.ray, member.environment.config.total_steps
    if steps is not None and config.runners is None:
        raise ConfigError(
            "env.total_steps is divided among the runners, whose number changes.",
            hint="Set --ray.runners, too.",
        )
    most = min(most, steps or most)
    return _Part(member, most, Scaling(config_of_part(config, most)))


def _part_of(total: int, number: int, of: int) -> int:
    return total // of + (number < total % of)


@contextlib.asynccontextmanager
async def ray_serving(members: Members) -> AsyncIterator[RayServing]:
    """Connects to the cluster and opens the server; `RayServing.run` starts the runners."""
    settings = members[0].spec.settings
    check_alike(members)
    check_engine(settings)
    for one in members:
        check_sampling(one.environment, settings.sampling)
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
        config = settings.ray
        most = config.runners or config.max or await cluster.most_runners()
        shares = divided(most, [one.share.weight for one in members])
        parts = [_part(one, share) for one, share in zip(members, shares, strict=True)]
        with contextlib.ExitStack() as held:
            yield RayServing(server, cluster, parts, url, held)


def _api_settings(settings: MixSettings) -> RunApiSettings:
    rules = {name: getattr(settings.rollouts, name) for name in DeliveryConfig.model_fields}
    return RunApiSettings(
        server=settings.server,
        store=settings.store,
        store_shared=settings.store_shared,
        log_level=settings.log_level,
        log_format=settings.log_format,
        telemetry=settings.telemetry,
        alarms=settings.alarms,
        retention=settings.retention,
        rollouts=DeliveryConfig(**rules),
    )


_MAKING_TICK_SECONDS = 0.5
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
    """A connected cluster that can make groups of several environments."""

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
        """Starts runners for an environment; ends them at the end."""
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
    """Looks after the runners of an environment, until cancelled."""
    while True:
        load = Load(dealer.open_groups, per_runner, dealer.engine_waits)
        await fleet.tick(scaling.wanted(load, await room()))
        await asyncio.sleep(_MAKING_TICK_SECONDS)


@contextlib.asynccontextmanager
async def ray_makers(
    settings: MixSettings, weights: Sequence[float] = (1.0,)
) -> AsyncIterator[RayMakers]:
    """Connects to the cluster."""
    check_engine(settings)
    async with connected(settings.ray) as cluster:
        await cluster.check_place()
        most = settings.ray.runners or settings.ray.max or await cluster.most_runners()
        yield RayMakers(settings, cluster, weights, divided(most, weights))
