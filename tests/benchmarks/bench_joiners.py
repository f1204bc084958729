"""Many joiners at one server: CPU, memory and answers, over the real wire with tiny groups.

    python tests/benchmarks/bench_joiners.py [--joiners 10 100 1000] [--posts 500] [--seconds 30]

The server is `envserver run-api` over SQLite with full sync, a process of its own. The joiners are
connections of a second process: each registers, waits for news by long polls and posts groups of
two short rows, evenly in time, `--posts` a second in total. A trainer takes and acknowledges all.
CPU is that of the server's process, in shares of one core; what was posted is compared with what
the trainer got.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.pool import AsyncResult
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))
import api_load as load
from api_peer import Server, ours
from envserver_clients.http import EnvClient
from envserver_records.records import Group, pack, unpack

from envserver.remote import batch
from envserver.remote.messages import GROUP_MSGPACK, KEY_HEADER
from envserver.rollouts.stream import group_id, stream_prefix

POLL_SECONDS = 10.0
MOST_REPEATED = 10_000
REGISTERING = 32
"""Joiners that register at a time."""


class Seen(msgspec.Struct):
    """What the joiners saw."""

    registered_seconds: float = 0.0
    posts: list[float] = []
    """Seconds of each post."""
    heartbeats: int = 0
    ids: list[str] = []
    repeated: int = 0
    errors: list[str] = []


@dataclass
class Joiner:
    """A session of a runner."""

    http: aiohttp.ClientSession
    url: str
    name: str
    seen: Seen
    id: str = ""
    seed: int = 0
    key: dict[str, str] = field(default_factory=dict)
    made: int = 0

    async def register(self) -> None:
        wanted = {
            "name": self.name, "instance": f"the secret of {self.name}", "env": load.ENVIRONMENT,
            "split": "train", "seed": 0, "group_size": 2,
        }  # fmt: skip
        async with self.http.post(f"{self.url}/v1/environments", json=wanted) as answer:
            answer.raise_for_status()
            welcome = await answer.json()
        self.id, self.seed = welcome["id"], welcome["seed"]
        self.key = {KEY_HEADER: welcome["key"]}

    async def listen(self, end: float) -> None:
        """Long polls until `end`."""
        news: dict[str, Any] | None = None
        while (left := end - time.monotonic()) > 0:
            beat = {"open": 1, "capacity": 17, "begun": self.made, "seen": news}
            news = await self._send(
                "heartbeat", json=beat | {"wait_seconds": min(left, POLL_SECONDS)}
            )
            self.seen.heartbeats += 1

    async def post(self, template: bytes, first: float, every: float, end: float) -> None:
        """Posts a group at `first` and every `every` seconds after it, until `end`."""
        at = first
        while at < end:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            at += every
            prefix = stream_prefix(load.ENVIRONMENT, "train", self.seed)
            group = unpack(template, Group)
            group.index, group.seed = self.made, self.seed
            group.group_id = group_id(prefix, self.made, "task")
            self.made += 1
            began = time.monotonic()
            await self._send(
                "groups?open=0",
                data=batch.compressed(pack(group)),
                headers={"content-type": GROUP_MSGPACK},
            )
            self.seen.posts.append(time.monotonic() - began)
            self.seen.ids.append(group.group_id)

    async def _send(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> Any:
        """Sends until an answer comes: a server closes connections that idle, and every request
        may be repeated.
        """
        url = f"{self.url}/v1/environments/{self.id}/{path}"
        while True:
            try:
                async with self.http.post(
                    url, headers=self.key | (headers or {}), **body
                ) as answer:
                    if answer.status != 200:
                        self.seen.errors.append(f"{answer.status} {(await answer.text())[:200]}")
                        return None
                    return await answer.json()
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                self.seen.repeated += 1
                if self.seen.repeated > MOST_REPEATED:
                    raise SystemExit(f"The connection broke too often: {error}") from error


async def join_all(url: str, joiners: int, posts: float, seconds: float) -> Seen:
    """Plays the joiners."""
    seen = Seen()
    template = load.packed(0, 2, 16).body
    connections = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connections, timeout=aiohttp.ClientTimeout(total=60)
    ) as http:
        everyone = [Joiner(http, url, f"{load.ENVIRONMENT}@{n}", seen) for n in range(joiners)]
        began, limit = time.monotonic(), asyncio.Semaphore(REGISTERING)

        async def register(one: Joiner) -> None:
            async with limit:
                await one.register()

        await asyncio.gather(*[register(one) for one in everyone])
        seen.registered_seconds = time.monotonic() - began
        start, every = time.monotonic(), joiners / posts
        end = start + seconds
        await asyncio.gather(
            *[one.listen(end) for one in everyone],
            *[
                one.post(template, start + every * n / joiners, every, end)
                for n, one in enumerate(everyone)
            ],
        )
    return seen


def played(url: str, joiners: int, posts: float, seconds: float) -> bytes:
    """`join_all` in a process of its own; what it saw, packed."""
    return msgspec.msgpack.encode(asyncio.run(join_all(url, joiners, posts, seconds)))


class Taken(NamedTuple):
    """What happened while the joiners played, and until a trainer had all of their groups."""

    seen: Seen
    got: list[str]
    cores: float


async def taken(server: Server, work: AsyncResult[bytes]) -> Taken:
    """Takes groups as a trainer until all that were posted are there."""
    got: list[str] = []
    cpu, began = server.cpu(), time.monotonic()
    async with EnvClient(server.url, run="trainer", batch_size=1) as trainer:

        async def take() -> None:
            leased = await trainer.lease(whole=False, max_groups=256, wait_seconds=1.0)
            if leased is not None:
                got.extend(group.group_id for group in leased.groups)
                await trainer.ack(leased)

        while not work.ready():
            await take()
        seen = msgspec.msgpack.decode(work.get(), type=Seen)
        now = time.monotonic()
        cores = (server.cpu() - cpu) / (now - began)
        while len(got) < len(seen.ids) and time.monotonic() < now + 60:
            await take()
    return Taken(seen, got, cores)


def measured(joiners: int, posts: float, seconds: float) -> list[str]:
    """The row of the table."""
    with ours() as server, get_context("spawn").Pool(1) as pool:
        work = pool.apply_async(played, (server.url, joiners, posts, seconds))
        seen, got, cores = asyncio.run(taken(server, work))
        memory = server.memory_bytes() / 2**20
    if seen.errors:
        print(f"{len(seen.errors)} errors: {seen.errors[0]}", file=sys.stderr)
    lost, doubled = len(set(seen.ids) - set(got)), len(got) - len(set(got))
    quantiles = statistics.quantiles(seen.posts, n=100)
    return [
        f"{joiners:,}", f"{len(seen.ids) / seconds:.0f}", f"{cores:.2f}", f"{memory:.0f}",
        f"{quantiles[49] * 1000:.0f} / {quantiles[98] * 1000:.0f}",
        f"{seen.registered_seconds:.1f}", f"{seen.heartbeats / seconds:.0f}", f"{lost} / {doubled}",
    ]  # fmt: skip


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--joiners", type=int, nargs="+", default=[10, 100, 1000])
    words.add_argument("--posts", type=float, default=500.0, help="posts a second, all together")
    words.add_argument("--seconds", type=float, default=30.0)
    given = words.parse_args()
    table = Table()
    for name in (
        "joiners", "posts/s", "cores", "MB", "post ms p50 / p99", "all registered s", "beats/s",
        "lost / doubled",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for joiners in given.joiners:
        table.add_row(*measured(joiners, given.posts, given.seconds))
    Console().print(table)


if __name__ == "__main__":
    main()
