"""Many joiners at one server: CPU, memory and answers, over the real wire with tiny groups.

    python tests/benchmarks/bench_joiners.py                       # both tables: some six minutes
    python tests/benchmarks/bench_joiners.py --joiners 1000 --seconds 600 --databases sqlite

The server is `envserver run-api` over SQLite with full sync, or over a PostgreSQL with fsync, each
a process of its own. The joiners are connections of a further process: each registers, waits for
news by long polls as long as the server says, and posts groups of two short rows, evenly in time:
each one every `--every` seconds, or with `--posts` so many a second in total. A trainer takes and
acknowledges all. CPU is that of the server's process and of PostgreSQL's processes, in shares of
one core; what was posted is compared with what the trainer got. The table is Markdown.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.pool import AsyncResult
from typing import Any, NamedTuple

import aiohttp
import api_load as load
import msgspec
from api_load import Server, ours
from envserver_clients.http import EnvClient
from envserver_records.records import Group, Json, pack, unpack
from proxy_load import cpu_seconds
from support import process_tree
from support.api import registration

from envserver.rollouts.stream import group_id, stream_prefix
from envserver.runners import messages
from envserver.runners.messages import GROUP_MSGPACK, KEY_HEADER, NEXT_SECONDS

POLL_SECONDS = 5.0
"""As a joiner waits that is told nothing else."""
MOST_REPEATED = 10_000
REGISTERING = 32
"""Joiners that register at a time."""


class Seen(msgspec.Struct):
    """What the joiners saw."""

    registered_seconds: float = 0.0
    start: float = 0.0
    end: float = 0.0
    """Of the time in which they posted, by the machine's monotonic clock."""
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
        wanted = registration(self.name, env=load.ENVIRONMENT)
        place = f"{self.url}/v1/environments?understands={NEXT_SECONDS}"
        async with self.http.post(place, json=wanted) as answer:
            answer.raise_for_status()
            welcome = await answer.json()
        self.id, self.seed = welcome["id"], welcome["seed"]
        self.key = {KEY_HEADER: welcome["key"]}

    async def listen(self, end: float) -> None:
        """Long polls until `end`."""
        news: Json | None = None
        poll_seconds = 0.0
        while (left := end - time.monotonic()) > 0:
            beat = {"open": 1, "capacity": 17, "begun": self.made, "seen": news}
            news = await self._send(
                "heartbeat", json=beat | {"wait_seconds": min(left, poll_seconds)}
            )
            self.seen.heartbeats += 1
            if news is not None:
                poll_seconds = news.pop("next_seconds", POLL_SECONDS)

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
                data=messages.compressed(pack(group)),
                headers={"content-type": GROUP_MSGPACK},
            )
            self.seen.posts.append(time.monotonic() - began)
            self.seen.ids.append(group.group_id)

    async def _send(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> Any:
        """Sends until an answer comes: a server closes connections that idle, and every request
        may be repeated."""
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
    seen = Seen()
    template = load.packed(0, 2, 16).body
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=60)
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
        seen.start, seen.end = start, time.monotonic()
    return seen


def played(url: str, joiners: int, posts: float, seconds: float) -> bytes:
    """`join_all` in a process of its own; what it saw, packed."""
    return msgspec.msgpack.encode(asyncio.run(join_all(url, joiners, posts, seconds)))


class Taken(NamedTuple):
    """What happened while the joiners played, and until a trainer had all of their groups."""

    seen: Seen
    got: list[str]
    cores: float
    database_cores: float


async def taken(server: Server, database: Sequence[int], work: AsyncResult[bytes]) -> Taken:
    """Takes groups as a trainer until all that were posted are there."""
    got: list[str] = []

    looks: list[tuple[float, float, float]] = []

    def look() -> None:
        looks.append((time.monotonic(), server.cpu(), sum(map(cpu_seconds, _tree(database)))))

    async with EnvClient(server.url, run="trainer", batch_size=1) as trainer:

        async def take() -> None:
            leased = await trainer.lease(whole=False, max_groups=256, wait_seconds=1.0)
            if leased is not None:
                got.extend(group.group_id for group in leased.groups)
                await trainer.ack(leased)
            look()

        while not work.ready():
            await take()
        seen = msgspec.msgpack.decode(work.get(), type=Seen)
        end = time.monotonic() + 60
        while len(got) < len(seen.ids) and time.monotonic() < end:
            await take()
    first = min(looks, key=lambda one: abs(one[0] - seen.start))
    last = min(looks, key=lambda one: abs(one[0] - seen.end))
    seconds, cpu, of_database = (late - early for early, late in zip(first, last, strict=True))
    return Taken(seen, got, cpu / seconds, of_database / seconds)


def _tree(pids: Sequence[int]) -> list[int]:
    return [one for pid in pids for one in (pid, *process_tree.descendants(pid))]


COLUMNS = (
    "store", "joiners", "posts/s", "beats/s", "server, cores", "server, MB", "database, cores",
    "database, MB", "post ms p50 / p99", "commit ms", "all registered, s", "lost / doubled",
)  # fmt: skip


def measured(kind: str, joiners: int, posts: float, seconds: float) -> list[str]:
    """The row of the table."""
    with ExitStack() as stack:
        postgres = stack.enter_context(load.postgres()) if kind != "sqlite" else None
        database = [postgres.pid] if postgres else []
        server = stack.enter_context(ours(store=postgres.url() if postgres else None))
        pool = stack.enter_context(get_context("spawn").Pool(1))
        print(f"{kind}, {joiners} joiners: the server is process {server.pid}", file=sys.stderr)
        work = pool.apply_async(played, (server.url, joiners, posts, seconds))
        seen, got, cores, database_cores = asyncio.run(taken(server, database, work))
        memory = server.megabytes()
        of_database = f"{sum(map(process_tree.own_megabytes, _tree(database))):.0f}"
        name = "envserver_store_commit_seconds"
        commit = 1000 * server.metric(f"{name}_sum") / max(1, server.metric(f"{name}_count"))
    if seen.errors:
        print(f"{len(seen.errors)} errors: {seen.errors[0]}", file=sys.stderr)
    lost, doubled = len(set(seen.ids) - set(got)), len(got) - len(set(got))
    took = seen.end - seen.start
    quantiles = statistics.quantiles(seen.posts, n=100)
    return [
        kind, f"{joiners:,}", f"{len(seen.ids) / took:.0f}", f"{seen.heartbeats / took:.0f}",
        f"{cores:.2f}", f"{memory:.0f}", f"{database_cores:.2f}", of_database,
        f"{quantiles[49] * 1000:.0f} / {quantiles[98] * 1000:.0f}", f"{commit:.1f}",
        f"{seen.registered_seconds:.1f}", f"{lost} / {doubled}",
    ]  # fmt: skip


def main() -> None:
    wanted = {"joiners": [10, 100, 1000], "every": 10.0, "posts": float, "seconds": 30.0}
    given = load.asked(__doc__, databases=["sqlite", "postgresql"], **wanted)
    print("| " + " | ".join(COLUMNS) + " |\n|---|" + "---:|" * (len(COLUMNS) - 1), flush=True)
    for kind in given.databases:
        for joiners in given.joiners:
            row = measured(kind, joiners, given.posts or joiners / given.every, given.seconds)
            print("| " + " | ".join(row) + " |", flush=True)
    print(f"\n{os.cpu_count()} cores; load of the machine: {os.getloadavg()}")


if __name__ == "__main__":
    main()
