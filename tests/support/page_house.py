"""What pages are served by: a real `envserver serve` with the simulated engine, small servers in a
thread (the trainer API, a proxy with a path prefix), and a store with the numbers of a day.
"""

import asyncio
import contextlib
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx
from aiohttp import web
from envserver_clients.http import SyncEnvClient

from envserver.http.health import Metrics
from envserver.store import open_store
from envserver.telemetry.history import Name, as_json

from .api import Api, native_group, put_native, running_api
from .beside import in_a_thread as in_a_thread
from .commands import Running, free_port, running, until
from .serving import serving_aiohttp
from .waiting import PATIENCE

_SERVE = (
    "serve", "--env", "math=2,code,video", "--model", "sim", "--sim.latency_seconds", 0,
    "--env.group_size", 4, "--env.ensure_scores_are_not_same", "false", "--workers.processes", 1,
    "--store", "groups.db",
)  # fmt: skip


class PageHouse:
    """A server at `url` that is killed and started again as a test likes.

    Args:
        words: further arguments of `serve`.
    """

    def __init__(self, folder: Path, *words: object) -> None:
        self.folder = folder
        self._words = (*_SERVE, *words)
        self._port = free_port()
        self._stack = ExitStack()
        self.url = f"http://127.0.0.1:{self._port}/"
        self.server: Running

    def start(self) -> None:
        """Starts the server; returns when trainers may come."""
        command = running(*self._words, "--port", self._port, folder=self.folder)
        self.server = self._stack.enter_context(command)
        self.server.wait_for("Trainers: ")

    def kill(self) -> None:
        self.server.kill()

    def get(self, path: str, **parameters: Any) -> Any:
        """JSON of a route: get("v1/status")."""
        answer = httpx.get(self.url + path, params=parameters, timeout=PATIENCE)
        answer.raise_for_status()
        return answer.json()

    def made(self) -> int:
        """Number of groups in the store."""
        return int(sum(self.get("v1/status")["groups"].values()))

    def wait_for(self, groups: int) -> None:
        """Waits until so many groups were made."""
        until(lambda: self.made() >= groups, self.server.output, alive=self.server.process)

    def consume(self, groups: int) -> None:
        """Is a trainer that takes so many groups, and publishes a version."""
        with SyncEnvClient(self.url.rstrip("/"), run="trainer", batch_size=2) as client:
            taken = 0
            while taken < groups:
                batch = next(client.batches(idle_seconds=PATIENCE))
                taken += len(batch.groups)
                client.ack(batch)

    def close(self) -> None:
        self._stack.close()


@contextmanager
def page_house(folder: Path, *words: object, groups: int = 12) -> Iterator[PageHouse]:
    """A server that makes so many groups, then waits for trainers.

    Args:
        words: further arguments of `serve`.
        groups: how many it makes in all; 0: no bound (it makes more while a trainer takes them).
    """
    house = PageHouse(folder, *(("--total_groups", groups) if groups else ()), *words)
    try:
        house.start()
        if groups:
            house.wait_for(groups)
        yield house
    finally:
        house.close()


# Small servers


_BY_CONNECTION = {"connection", "transfer-encoding", "keep-alive", "content-length"}


@contextlib.asynccontextmanager
async def small_api(folder: Path, tokens_file: Path | None = None) -> AsyncIterator[Api]:
    """The trainer API over a store with three groups."""
    server = {} if tokens_file is None else {"tokens_file": tokens_file}
    async with running_api(folder / "groups.db", server=server, metrics=Metrics()) as api:
        for number in range(3):
            await put_native(api.store, native_group(f"group-{number}"))
        yield api


@contextlib.asynccontextmanager
async def prefix_proxy(target: str, prefix: str) -> AsyncIterator[str]:
    """A reverse proxy that serves `target` at `prefix` ("/lab/one") and takes the prefix off.

    Yields the address of the page.
    """

    async def forward(request: web.Request) -> web.StreamResponse:
        path = request.raw_path.removeprefix(prefix)
        async with http.request(
            request.method,
            target + path,
            headers=request.headers,  # with the browser's Host, as a proxy should
            data=await request.read() or None,
            allow_redirects=False,
        ) as answer:
            kept = [
                (name, value)
                for name, value in answer.headers.items()
                if name.lower() not in _BY_CONNECTION
            ]
            sent = web.StreamResponse(status=answer.status)
            sent.headers.extend(kept)
            with contextlib.suppress(ConnectionError):  # the browser left
                await sent.prepare(request)
                async for chunk in answer.content.iter_any():
                    await sent.write(chunk)
                await sent.write_eof()
            return sent

    async with (
        aiohttp.ClientSession(auto_decompress=False) as http,
        site([web.route("*", prefix + "/{path:.*}", forward)]) as url,
    ):
        yield url + prefix + "/"


@contextlib.asynccontextmanager
async def site(routes: list[web.RouteDef]) -> AsyncIterator[str]:
    """A web site on a free port of this machine; yields its address."""
    app = web.Application()
    app.add_routes(routes)
    async with serving_aiohttp(app, handler_cancellation=True) as server:
        yield server.url


# The numbers of a day, as if a server had run: for the page's charts


_SPEED = {"math": 6, "code": 4, "video": 2}
"""Groups a minute of each environment."""
_SIZE = 8


def put_history(path: Path, hours: float) -> None:
    """Puts the minutes of the last `hours` into a new store.

    The server starts anew after half of the time; see `rows`.
    """
    with ThreadPoolExecutor(1) as thread:  # this one may have the event loop of a browser
        thread.submit(asyncio.run, _put_history(path, hours)).result()


async def _put_history(path: Path, hours: float) -> None:
    now = int(time.time() // 60)
    minutes = int(hours * 60)
    async with open_store(str(path)) as store:
        for number, numbers in enumerate(rows(minutes)):
            await store.put_minute(now - minutes + number, as_json(numbers), 0)


def rows(minutes: int, bad_minutes: int = 6) -> Iterator[dict[Name, float]]:
    """Yields the numbers of each minute. In the last `bad_minutes` the reward falls, calls fail."""
    rng = random.Random(0)
    counts: Counter[Name] = Counter()
    for minute in range(minutes):
        if minute == minutes // 2:
            counts.clear()
        done, falls = minute / minutes, minute > minutes - bad_minutes
        for environment, speed in _SPEED.items():
            _environment(counts, rng, environment, speed, done, falls)
        _count(counts, "engine_seconds_sum", 240 * (0.8 + done), path="/v1/chat/completions")
        _count(counts, "engine_seconds_count", 240, path="/v1/chat/completions")
        _count(counts, "engine_errors_total", rng.randrange(3) + 30 * falls, kind="unavailable")
        _count(counts, "staleness_versions_sum", 12 * rng.random() * 3)
        _count(counts, "staleness_versions_count", 12)
        for end in ("leased", "acked"):
            _count(counts, "leases_total", 6, end=end)
        counts[_name("process_cpu_seconds_total", prefix="")] += 20
        yield dict(counts) | _gauges(rng, minute, done)


def _environment(
    counts: Counter[Name], rng: random.Random, name: str, speed: int, done: float, falls: bool
) -> None:
    of = {"environment": name}
    share = {"math": 0.35 + 0.4 * done, "code": 0.2 + 0.4 * done, "video": 0.5}[name]
    share = 0.05 if falls and name == "code" else share
    rollouts = speed * _SIZE
    solved = sum(rng.random() < share for _ in range(rollouts))
    lost = rng.random() < 0.15
    was_equal, was_dropped = rng.random() < share, rng.random() < 0.3
    for number, by, labels in (
        ("rollouts_total", rollouts - 2, {"end": "scored"}),
        ("rollouts_total", 2 * (1 - done), {"end": "limit_tokens"}),
        ("rollouts_total", lost, {"end": "lost"}),
        ("failed_attempts_total", lost + 9 * falls, {"kind": "engine_unavailable"}),
        ("reward_sum", solved, {"agent": ""}),
        ("reward_count", rollouts, {"agent": ""}),
        ("groups_dropped_total", was_dropped, {"reason": "zero_variance"}),
        ("tokens_total", rollouts * (300 + 250 * done), {"kind": "completion"}),
        ("tokens_total", rollouts * 900, {"kind": "prompt"}),
    ):
        _count(counts, number, by, **labels, **of)
    for number, by in {
        "group_deviation_sum": speed * math.sqrt(share * (1 - share)),
        "group_deviation_count": speed,
        "groups_equal_total": was_equal,
        "groups_delivered_total": speed,
        "stored_groups_total": speed,
        "stored_reward_sum": solved,
        "stored_reward_count": rollouts,
        "rollout_turns_sum": rollouts * (1 if name == "code" else 3),
        "rollout_turns_count": rollouts,
        "rollout_seconds_sum": rollouts * (4 + 3 * rng.random()),
        "rollout_seconds_count": rollouts,
    }.items():
        _count(counts, number, by, **of)


def _gauges(rng: random.Random, minute: int, done: float) -> dict[Name, float]:
    found = {
        _name("policy_version"): float(minute // 15),
        _name("queue_depth", run="trainer"): 10 + 6 * math.sin(minute / 9),
        _name("engine_calls"): 20.0 + rng.randrange(10),
        _name("replica_calls", replica="http://a:8000/v1"): 12.0 + rng.randrange(6),
        _name("replica_calls", replica="http://b:8000/v1"): 10.0 + rng.randrange(6),
        _name("loop_lag_p99_seconds"): 0.004 + 0.004 * rng.random(),
        _name("process_resident_memory_bytes", prefix=""): 3e8 + 5e7 * done,
    }
    for state, value in (("queued", 12), ("leased", 4)):
        found[_name("groups", state=state)] = value + rng.randrange(5)
    for environment in _SPEED:
        found[_name("workers", environment=environment)] = 2.0
        found[_name("rollouts_running", environment=environment)] = 16.0 + rng.randrange(8)
        found[_name("sandboxes", environment=environment)] = float(environment == "code") * 9
        found[_name("tasks_solved_share", environment=environment)] = 0.3 + 0.4 * done
        found[_name("untrained_share", environment=environment)] = 0.01
    return found


def _count(counts: Counter[Name], name: str, by: float, **labels: str) -> None:
    counts[_name(name, **labels)] += by  # type: ignore[assignment]  # counters hold floats, too


def _name(name: str, prefix: str = "envserver_", **labels: str) -> Name:
    return Name(prefix + name, tuple(sorted(labels.items())))
