"""Runners of a Ray cluster: their commands, their number, and the groups that they make for a run.
The run decides which groups are made, in which order and when it ends, as without Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
from envserver_records.errors import ConfigError
from envserver_records.records import Group
from envserver_records.waiting import cancel_and_wait
from pydantic import BaseModel, SecretStr

from ..environment import Environment
from ..http.server import serve_api
from ..ray_cluster.cluster import Cluster, CommandSpec, Fleet, Load, Node, connected
from ..registry import absolute
from ..rollouts.events import Observer
from ..rollouts.policy import Drop, UntrainedCeiling
from ..rollouts.stream import GroupRequest
from ..runners.dealing import Dealer, Rules, dealing_app
from ..settings.config import MixSettings, RolloutsConfig, Settings
from ..settings.runs import RayConfig
from ..settings.server import is_loopback
from .engines import SIMULATED
from .mix import RunSpec
from .stopping import beside

_OF_SERVER = {"server", "store", "retention", "alarms", "environment", "env"}
_DRAIN_SECONDS = 5.0
"""A runner that gets SIGTERM has been drained, or its actor has ended."""


def check_engine(settings: Settings) -> None:
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
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return value


async def url_for_nodes(cluster: Cluster, config: RayConfig, url: str, host: str) -> str:
    if config.url:
        return config.url
    own, nodes = await cluster.own_address(), await cluster.nodes()
    others = _other_machines(own, nodes)
    if not others:
        return url
    if is_loopback(host):
        raise ConfigError(
            f"The Ray nodes {', '.join(others)} cannot reach {url}.",
            hint="Listen at an address of this machine, with access tokens: --server.host 0.0.0.0 "
            "--server.tokens_file FILE, and ENVSERVER_RAY__TOKEN for the runners.",
        )
    parts = urlsplit(url)
    return f"{parts.scheme}://{own}:{parts.port}"


async def bind_host(cluster: Cluster) -> str:
    """Returns an address that all nodes reach: loopback if all are on this machine."""
    own = await cluster.own_address()
    return own if _other_machines(own, await cluster.nodes()) else "127.0.0.1"


def _other_machines(own: str, nodes: Sequence[Node]) -> list[str]:
    return sorted({node.address for node in nodes} - {own, "127.0.0.1"})


def config_of_part(config: RayConfig, most: int) -> RayConfig:
    return config.model_copy(
        update={
            "runners": most if config.runners else None,
            "min": min(config.min, most),
            "max": most if config.max else None,
        }
    )


def groups_per_runner(settings: Settings, environment: Environment) -> int:
    size: int = environment.config.group_size
    return max(1, settings.rollouts.max_concurrent // size)


def divided(total: int, weights: Sequence[float]) -> list[int]:
    """Each share is at least 1."""
    whole = sum(weights)
    shares = [max(1, math.floor(total * weight / whole)) for weight in weights]
    order = sorted(range(len(weights)), key=lambda n: shares[n] - total * weights[n] / whole)
    for number in order[: max(0, total - sum(shares))]:
        shares[number] += 1
    return shares


_TICK_SECONDS = 0.5
_STOP_SECONDS = 3.0


class RayMaker:
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
        """Raises RunnerFailed: runners cannot start."""
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
    settings: MixSettings
    cluster: Cluster
    weights: Sequence[float]
    runners: Sequence[int]

    async def room(self, number: int) -> int:
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
        most = self.runners[number]
        config = config_of_part(self.settings.ray, most)
        token = secrets.token_urlsafe(24)
        host = await bind_host(self.cluster)
        dealer = Dealer(rules)
        server = await serve_api(dealing_app(dealer, token), host, 0, is_guarded=True)
        try:
            url = await url_for_nodes(self.cluster, config, server.url, host)

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
                config,
                make=command,
                drain=lambda runner: dealer.drain(_name(environment, runner)),
            )
            dealer.runners = lambda: fleet.young
            rollouts = spec.settings.rollouts
            scaled = rollouts.model_copy(update={"max_concurrent": rollouts.max_concurrent * most})
            per_runner = groups_per_runner(spec.settings, environment)

            async def tend() -> None:
                while True:
                    load = Load(dealer.open_groups, per_runner, dealer.engine_waits)
                    await fleet.scale(load, await self.room(number))
                    await asyncio.sleep(_TICK_SECONDS)

            async with beside("silent-runners", dealer.watch()):
                try:
                    async with beside("runners", tend()) as tending:
                        yield RayMaker(environment, scaled, observer, dealer, tending)
                finally:
                    await asyncio.shield(fleet.stop(_STOP_SECONDS))
        finally:
            dealer.close()
            await server.close()


def _name(environment: Environment, runner: int) -> str:
    return f"{environment.name}@ray-{runner}"


@contextlib.asynccontextmanager
async def ray_makers(
    settings: MixSettings, weights: Sequence[float] = (1.0,)
) -> AsyncIterator[RayMakers]:
    check_engine(settings)
    async with connected(settings.ray) as cluster:
        await cluster.check_place()
        runners = divided(await cluster.most_wanted(), weights)
        yield RayMakers(settings, cluster, weights, runners)
