"""What runs on the nodes of a Ray cluster for `serve`, `process` and `evaluate`: commands.

In: the settings of the run. Out: the command and the settings of a runner, in a form that another
machine understands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
from envserver_records.errors import ConfigError
from pydantic import BaseModel, SecretStr

from ..environment import Environment
from ..ray_cluster.cluster import Cluster, CommandSpec, Node
from ..registry import absolute
from ..settings.config import MixSettings, Settings
from ..settings.runs import RayConfig
from ..settings.server import is_loopback
from .engines import SIMULATED

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
    """Returns the command of a runner.

    Args:
        reference: the environment as the user named it.
        url: of the server, as the nodes reach it.
        more: further settings of `join`.
        steps: number of groups that it makes; None: until it is drained.
        instance: see `JoinSettings`.
        brings_folder: see `Cluster`; a relative path of the environment is then one in there.
    """
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
    """Returns the address at which the nodes reach this process's server.

    Args:
        url: its address on this machine.
        host: what it listens at.
    """
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
