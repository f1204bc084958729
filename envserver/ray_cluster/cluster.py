"""The connection to a Ray cluster: the only module of the server that calls Ray.

In: commands to be run, and what each needs of a node. Out: actors that hold them, and what became
of them. What holds: Ray's calls block, so all of them are made in one thread of their own; the
actors are this process's, so Ray ends them when it ends, also by kill -9.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from envserver_records.errors import ConfigError

from ..settings.runs import RayConfig
from .command import Command

T = TypeVar("T")

NAMESPACE = "envserver"
_CONNECT_SECONDS = 5.0
_LOOK_SECONDS = 0.5
_STOP_SECONDS = 10.0
_ROOM_SECONDS = 5.0
"""For how long the number of places counts as that of now."""


@dataclass(frozen=True)
class CommandSpec:
    """A command for an actor; see `Command`."""

    argv: tuple[str, ...]
    config: str
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Node:
    """A living node: its address, what it has in total, and its labels."""

    address: str
    host: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]


class Actor:
    """An actor on the cluster, and what it said last.

    Attributes:
        state: see `Command.state`; empty until it has a place.
        restarts: how often Ray started it anew, on this node or another.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.asked: Any = None
        self.state: dict[str, Any] = {}
        self.restarts = 0
        self.lost = False


class Cluster:
    """A connected cluster; made by `connected`. Its coroutines run one after the other."""

    def __init__(self, config: RayConfig, thread: ThreadPoolExecutor) -> None:
        self.brings_folder = False
        """Whether runners start in a folder that Ray brings them, of this command or of its job."""
        self._room: tuple[float, int] | None = None
        self._config = config
        self._thread = thread

    async def call(self, work: Callable[[], T]) -> T:
        """Runs `work`, which calls Ray, in the thread of the cluster."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def nodes(self) -> list[Node]:
        """Returns the living nodes."""
        return await self.call(_nodes)

    async def own_address(self) -> str:
        """Returns the address under which the cluster's nodes know this machine."""
        return await self.call(_own_address)

    async def check_place(self) -> None:
        """Checks that some node can ever have a runner.
        Raises ConfigError: none has the resources and labels, within `ray.place_seconds`.
        """
        end = time.monotonic() + self._config.place_seconds
        while True:
            nodes = await self.nodes()
            if any(self._fits(one) for one in nodes):
                return
            if time.monotonic() >= end:
                raise ConfigError(
                    f"No node of the Ray cluster has what a runner needs: {self._config.wants()}. "
                    f"There {'is' if len(nodes) == 1 else 'are'} {_described(nodes)}.",
                    hint="Set --ray.cpus, --ray.resources and --ray.labels to what nodes have; "
                    "--ray.place_seconds 600 waits for a node that the cluster adds by itself.",
                )
            await asyncio.sleep(_LOOK_SECONDS)

    async def most_runners(self) -> int:
        """Returns how many runners the nodes of now have room for in total, at least one."""
        if self._room is None or time.monotonic() > self._room[0] + _ROOM_SECONDS:
            places = [self._places(one) for one in await self.nodes() if self._fits(one)]
            self._room = time.monotonic(), max(1, sum(places))
        return self._room[1]

    async def start(self, spec: CommandSpec) -> Actor:
        """Makes an actor that starts when Ray has a place for it."""
        return await self.call(lambda: _start(spec, self._config))

    async def look(self, actors: Sequence[Actor]) -> None:
        """Updates the states of actors, as far as they answer."""
        await self.call(lambda: _look(actors))

    async def stop(self, actors: Iterable[Actor], seconds: float) -> None:
        """Ends commands, their open work within `seconds`, and removes their actors."""
        listed = list(actors)
        if listed:
            await self.call(lambda: _stop(listed, seconds))

    def _fits(self, node: Node) -> bool:
        return self._places(node) > 0 and all(
            _selects(wanted, node.labels.get(name)) for name, wanted in self._config.labels.items()
        )

    def _places(self, node: Node) -> int:
        needs = {"CPU": self._config.cpus, **self._config.resources}
        counts = [int(node.resources.get(name, 0) / need) for name, need in needs.items() if need]
        return min(counts, default=os.cpu_count() or 1)


@contextlib.asynccontextmanager
async def connected(config: RayConfig) -> AsyncIterator[Cluster]:
    """Connects this process to the cluster of `config.address`; it leaves it at the end. A process
    that is connected already stays so.
    Raises ConfigError: Ray is not installed, or there is no such cluster.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="ray") as thread:
        cluster = Cluster(config, thread)
        is_ours = await cluster.call(lambda: _connect(config))
        cluster.brings_folder = await cluster.call(_brings_folder)
        try:
            yield cluster
        finally:
            if is_ours:
                await asyncio.shield(cluster.call(_disconnect))


def _connect(config: RayConfig) -> bool:
    """Connects, unless this process is connected; returns whether it was not."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError("Ray is not installed.", hint="pip install 'envserver[ray]'") from error
    if ray.is_initialized():
        return False
    _check_listens(config.address)
    # It warns that SIGTERM remains ours: it is, in another thread.
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        ray.init(
            address=config.address,
            namespace=NAMESPACE,
            runtime_env=config.environment_of_runners or None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ConfigError(
            f"Ray does not connect to {config.address!r}: {str(error).splitlines()[0]}",
            hint="Is it started (`ray start --head`)? With token authentication set "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN here as well.",
        ) from error
    return True


def _brings_folder() -> bool:
    import ray

    return "working_dir" in ray.get_runtime_context().runtime_env


def _check_listens(address: str) -> None:
    """Asks a given address once: Ray itself would try for a minute."""
    host, colon, port = address.rpartition(":")
    if not colon or "://" in address:
        return
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise ConfigError(f"No Ray cluster at {address!r}: {error}.") from error


def _disconnect() -> None:
    import ray

    ray.shutdown()


def _nodes() -> list[Node]:
    import ray

    return [
        Node(
            address=one["NodeManagerAddress"],
            host=one["NodeManagerHostname"],
            resources=one["Resources"],
            labels=one.get("Labels") or {},
        )
        for one in ray.nodes()
        if one["Alive"]
    ]


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _start(spec: CommandSpec, config: RayConfig) -> Actor:
    import ray

    options: dict[str, Any] = {
        "num_cpus": config.cpus,
        "resources": config.resources or None,
        "label_selector": config.labels or None,
        "max_restarts": -1,
        "scheduling_strategy": "SPREAD",
    }
    actor = ray.remote(Command).options(
        **{name: value for name, value in options.items() if value is not None}
    )
    return Actor(actor.remote(list(spec.argv), spec.config, dict(spec.variables)))


def _look(actors: Sequence[Actor]) -> None:
    import ray

    for one in actors:
        if one.asked is None:
            one.asked = one.handle.state.remote()
    asked = {one.asked: one for one in actors}
    done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_LOOK_SECONDS)
    for reference in done:
        one = asked[reference]
        one.asked = None
        try:
            one.state, one.lost = ray.get(reference), False
        except ray.exceptions.ActorDiedError as error:
            one.state = _ended_by(error)
        except ray.exceptions.RayActorError:
            # Its node or process is gone; Ray starts it elsewhere, and it answers again then.
            one.restarts += not one.lost
            one.state, one.lost = {}, True
        except ray.exceptions.RayError as error:  # its runtime environment cannot be made
            one.state = _ended_by(error)


def _ended_by(error: Exception) -> dict[str, Any]:
    """Returns the state of an actor that Ray does not start again."""
    return {"host": "", "pid": 0, "status": 1, "said": str(error)}


def _stop(actors: Sequence[Actor], seconds: float) -> None:
    import ray

    placed = [one for one in actors if one.state]
    ends = [one.handle.stop.remote(seconds) for one in placed]
    if ends:
        ray.wait(ends, num_returns=len(ends), timeout=seconds + _STOP_SECONDS)
    for one in actors:
        ray.kill(one.handle)


def _selects(wanted: str, label: str | None) -> bool:
    """Returns whether a node's label fits, by the rules of Ray's label selectors."""
    negated = wanted.startswith("!")
    text = wanted.removeprefix("!")
    listed = text.removeprefix("in(").removesuffix(")").split(",") if text[:3] == "in(" else [text]
    return (label in [one.strip() for one in listed]) != negated


def _described(nodes: Sequence[Node]) -> str:
    parts = []
    for one in nodes:
        amounts = (
            f"{name} {amount:g}"
            for name, amount in sorted(one.resources.items())
            if not name.startswith(("node:", "memory", "object_store"))
        )
        labels = (f"{n}={v}" for n, v in one.labels.items() if not n.startswith("ray.io/node"))
        parts.append(f"{one.address} ({', '.join((*amounts, *labels)) or 'nothing'})")
    return "; ".join(parts) or "no node"
