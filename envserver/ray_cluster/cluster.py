"""The connection to a Ray cluster, and as many runners on it as the load wants.

Ray's calls block, so they are made in one thread of their own. The actors are this process's, so
Ray ends them when it ends, also by kill -9. A runner is asked to finish before its actor is
removed. One that ends with an error is started again; three errors in a row end the run with its
message.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import structlog
from envserver_records.errors import ConfigError, EnvserverError
from envserver_records.extras import install_command

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
    argv: tuple[str, ...]
    config: str
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Node:
    address: str
    host: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]


class Actor:
    """An actor on the cluster. `state`: see `Command.state`, empty until it has a place."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.reply: Any = None
        self.state: dict[str, Any] = {}
        self.lost = self.draining = self.waits = False
        self.begun_at = time.monotonic()
        self.host = ""
        self.placed_at = 0.0


class Cluster:
    """A connected cluster. Its coroutines run one after the other."""

    def __init__(self, config: RayConfig, thread: ThreadPoolExecutor) -> None:
        self.brings_folder = False
        """Whether runners start in a folder that Ray brings them, of this command or of its job."""
        self._room: tuple[float, int] | None = None
        self._config = config
        self._thread = thread

    async def call(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def nodes(self) -> list[Node]:
        return await self.call(_nodes)

    async def own_address(self) -> str:
        return await self.call(_own_address)

    async def check_place(self) -> None:
        end = time.monotonic() + self._config.place_seconds
        while True:
            nodes = await self.nodes()
            if any(self._fits(node) for node in nodes):
                return
            if time.monotonic() >= end:
                raise ConfigError(
                    f"No node of the Ray cluster has what a runner needs: {self._config.wants()}. "
                    f"There {'is' if len(nodes) == 1 else 'are'} {_described(nodes)}.",
                    hint="Set --ray.cpus, --ray.resources and --ray.labels to what nodes have; "
                    "--ray.place_seconds 600 waits for a node that the cluster adds by itself.",
                )
            await asyncio.sleep(_LOOK_SECONDS)

    async def most_wanted(self) -> int:
        """How many runners there are at most, by the settings or the nodes of now."""
        return self._config.runners or self._config.max or await self.most_runners()

    async def most_runners(self) -> int:
        """How many runners the nodes of now have room for in total, at least one."""
        if self._room is None or time.monotonic() > self._room[0] + _ROOM_SECONDS:
            places = [self._places(node) for node in await self.nodes() if self._fits(node)]
            self._room = time.monotonic(), max(1, sum(places))
        return self._room[1]

    async def start(self, spec: CommandSpec) -> Actor:
        return await self.call(lambda: _start(spec, self._config))

    async def look(self, actors: Sequence[Actor]) -> None:
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
    """A process that is connected already stays so at the end."""
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
    try:
        import ray
    except ImportError as error:
        raise ConfigError("Ray is not installed.", hint=install_command("ray")) from error
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
    """Ray itself would try for a minute."""
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
            address=node["NodeManagerAddress"],
            host=node["NodeManagerHostname"],
            resources=node["Resources"],
            labels=node.get("Labels") or {},
        )
        for node in ray.nodes()
        if node["Alive"]
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

    for actor in actors:
        if actor.reply is None:
            actor.reply = actor.handle.state.remote()
    replies = {actor.reply: actor for actor in actors}
    done, _ = ray.wait(list(replies), num_returns=len(replies), timeout=_LOOK_SECONDS)
    for reference in done:
        actor = replies[reference]
        actor.reply = None
        try:
            actor.state, actor.lost = ray.get(reference), False
        except ray.exceptions.ActorDiedError as error:
            actor.state = _ended_by(error)
        except ray.exceptions.RayActorError:
            # Its node or process is gone; Ray starts it on another node, and it replies again then.
            actor.state, actor.lost = {}, True
        except ray.exceptions.RayError as error:  # its runtime environment cannot be made
            actor.state = _ended_by(error)


def _ended_by(error: Exception) -> dict[str, Any]:
    return {"host": "", "pid": 0, "status": 1, "said": str(error)}


def _stop(actors: Sequence[Actor], seconds: float) -> None:
    import ray

    placed = [actor for actor in actors if actor.state]
    ends = [actor.handle.stop.remote(seconds) for actor in placed]
    if ends:
        ray.wait(ends, num_returns=len(ends), timeout=seconds + _STOP_SECONDS)
    for actor in actors:
        ray.kill(actor.handle)


def _selects(wanted: str, label: str | None) -> bool:
    negated = wanted.startswith("!")
    text = wanted.removeprefix("!")
    listed = text.removeprefix("in(").removesuffix(")").split(",") if text[:3] == "in(" else [text]
    return (label in [choice.strip() for choice in listed]) != negated


def _described(nodes: Sequence[Node]) -> str:
    parts = []
    for node in nodes:
        amounts = (
            f"{name} {amount:g}"
            for name, amount in sorted(node.resources.items())
            if not name.startswith(("node:", "memory", "object_store"))
        )
        labels = (f"{n}={v}" for n, v in node.labels.items() if not n.startswith("ray.io/node"))
        parts.append(f"{node.address} ({', '.join((*amounts, *labels)) or 'nothing'})")
    return "; ".join(parts) or "no node"


_log = structlog.get_logger("envserver.ray")

_MOST_CRASHES = 3
_LASTING_SECONDS = 120.0
"""A runner that lived this long has not failed in a row."""
_AGAIN_SECONDS = 2.0
_STARTING_SECONDS = 10.0
"""Seconds for an actor to start where there is room."""
_DRAINED_STOP_SECONDS = 5.0
_BOOT_SECONDS = 60.0
"""Seconds from a place until a runner surely works, or never will."""


class RunnerFailed(EnvserverError):
    kind, status = "runner_failed", 502


class Fleet:
    """Runners of one environment, by number from 0; `drain` asks one to finish its groups and
    leave."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        config: RayConfig,
        *,
        make: Callable[[int], CommandSpec],
        drain: Callable[[int], None],
    ) -> None:
        self._cluster = cluster
        self._name = name
        self._wants = config.wants()
        self._scaling = Scaling(config)
        self._make, self._drain = make, drain
        self._slots: dict[int, Actor] = {}
        self._crashes: dict[int, int] = {}
        self._not_before: dict[int, float] = {}
        self._done: set[int] = set()

    @property
    def size(self) -> int:
        return sum(not actor.draining for actor in self._slots.values())

    @property
    def young(self) -> int:
        """Number of runners that have a place, and may not have asked for work yet."""
        earliest = time.monotonic() - _BOOT_SECONDS
        return sum(
            bool(actor.host) and actor.placed_at > earliest for actor in self._slots.values()
        )

    @property
    def is_empty(self) -> bool:
        return not self._slots

    async def scale(self, load: Load, room: int) -> None:
        """Has as many runners as `load` needs; `room`: that the nodes have place for."""
        await self.tick(self._scaling.wanted(load, room))

    async def tick(self, wanted: int) -> None:
        await self._cluster.look(list(self._slots.values()))
        for number, actor in list(self._slots.items()):
            self._note(number, actor)
            if (status := actor.state.get("status")) is not None:
                await self._ended(number, actor, status)
        await self._resize(wanted)
        await self._drain_leaving()

    async def stop(self, seconds: float) -> None:
        actors = list(self._slots.values())
        self._slots.clear()
        await self._cluster.stop(actors, seconds)

    async def _resize(self, wanted: int) -> None:
        staying = sorted(number for number, actor in self._slots.items() if not actor.draining)
        for number in staying[max(0, wanted) :]:
            self._slots[number].draining = True
        number, missing = 0, wanted - len(staying) - len(self._done)
        while missing > 0:
            if number not in self._slots and number not in self._done:
                missing -= 1
                if time.monotonic() >= self._not_before.get(number, 0.0):
                    self._slots[number] = await self._cluster.start(self._make(number))
            number += 1

    async def _drain_leaving(self) -> None:
        """Asks again and again: a runner may register only now."""
        for number, actor in list(self._slots.items()):
            if actor.draining and actor.state:
                self._drain(number)
            elif actor.draining:
                del self._slots[number]
                await self._cluster.stop([actor], _DRAINED_STOP_SECONDS)

    def _note(self, number: int, actor: Actor) -> None:
        host = str(actor.state.get("host", ""))
        if host and not actor.host:
            _log.info("runner_placed", environment=self._name, runner=number, host=host)
            actor.host, actor.waits, actor.placed_at = host, False, time.monotonic()
        elif actor.host and actor.lost:
            actor.host, actor.begun_at = "", time.monotonic()
            _log.warning(
                "runner_lost",
                environment=self._name,
                runner=number,
                why="Its node or process has ended; Ray starts it where there is room.",
            )
        elif not host and not actor.waits and time.monotonic() > actor.begun_at + _STARTING_SECONDS:
            actor.waits = True
            _log.warning(
                "runner_waits",
                environment=self._name,
                runner=number,
                why=f"No node has this free, or has its runtime environment ready: {self._wants}.",
            )

    async def _ended(self, number: int, actor: Actor, status: int) -> None:
        del self._slots[number]
        await self._cluster.stop([actor], _DRAINED_STOP_SECONDS)
        if actor.draining or status == 0:
            if not actor.draining:  # it has made all that it was to make
                self._done.add(number)
            return
        lasted = time.monotonic() - actor.begun_at
        crashes = 1 if lasted > _LASTING_SECONDS else self._crashes.get(number, 0) + 1
        self._crashes[number] = crashes
        self._not_before[number] = time.monotonic() + _AGAIN_SECONDS * crashes
        said = str(actor.state.get("said", ""))
        _log.warning(
            "runner_ended", environment=self._name, runner=number, status=status, said=said[-500:]
        )
        if crashes >= _MOST_CRASHES:
            raise RunnerFailed(
                f"A runner of {self._name!r} on {actor.host or 'a node'} ended {crashes} times "
                f"with status {status}: {said[-1000:] or 'it printed nothing'}",
                hint="The log of its actor (`ray logs actor --id ID`) has all that it printed.",
            )


class Load(msgspec.Struct, frozen=True):
    """What decides how many runners there are.
    `groups`: groups that may be open now, with those that are. `engine_waits`: calls wait for the
    engine: more runners would only wait, too."""

    groups: int
    groups_per_runner: float
    engine_waits: bool = False


class Scaling:
    """The number of runners over time: up at once, down only after a while."""

    def __init__(self, config: RayConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._now = config.runners or config.min
        self._enough_since: float | None = None
        self._enough = 0

    def wanted(self, load: Load, room: int) -> int:
        config = self._config
        if config.runners is not None:
            return config.runners
        most = max(config.min, config.max or room)
        needed = math.ceil(load.groups / max(1e-9, load.groups_per_runner))
        target = min(most, max(config.min, needed))
        if target >= self._now:
            self._enough_since = None
            if not load.engine_waits:
                self._now = target
        else:
            self._shrink(target)
        self._now = min(self._now, most)
        return self._now

    def _shrink(self, target: int) -> None:
        """Takes the largest number that was needed in the last `ray.idle_seconds`."""
        now = self._clock()
        if self._enough_since is None:
            self._enough_since, self._enough = now, target
        self._enough = max(self._enough, target)
        if now - self._enough_since >= self._config.idle_seconds:
            self._now, self._enough_since = self._enough, None
