"""How fast the store takes and hands out groups, against the limit of the disk in the same run;
with --depths, what it costs when it holds very many.

    python tests/benchmarks/bench_store.py [--groups 512] [--kilobytes 128] [--store PATH_OR_URL]
    python tests/benchmarks/bench_store.py --depths 1000 1000000

The limit is appending the same bytes to a file with one fdatasync for each group, or for each 16.
Rates on a shared machine swing; the ratios of one run are what to compare. `noise` bodies do not
compress; `tokens` bodies look like groups: ids, logprobs, masks and text.

Groups of deep stores are small and written by SQL. Four environments take turns, and the policy has
a new version every hundredth of the depth. Times are the median of several tries, in milliseconds
of the process's CPU; the last column is what the greatest depth costs against the smallest.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))
from api_load import table as columned

from envserver.store import GroupPut, Store, open_store

AT_A_TIME = 16


def noise_bodies(count: int, size_bytes: int) -> list[bytes]:
    return [os.urandom(size_bytes) for _ in range(count)]


def token_bodies(count: int, size_bytes: int) -> list[bytes]:
    """Two thirds arrays as in a packed group, one third words."""
    random_numbers = np.random.default_rng(0)
    words = [f"word{index:x} " for index in range(3000)]
    length = size_bytes * 2 // 3 // 9
    bodies = []
    for _ in range(count):
        ids = (random_numbers.zipf(1.3, length) % 150_000).astype(np.int32)
        logprobs = -random_numbers.exponential(0.6, length) * (random_numbers.random(length) < 0.6)
        mask = (np.arange(length) % 2048 > 500).astype(np.uint8)
        arrays = ids.tobytes() + (logprobs * mask).astype(np.float32).tobytes() + mask.tobytes()
        text = "".join(random.choices(words, k=size_bytes // 12)).encode()
        bodies.append((arrays + text)[:size_bytes].ljust(size_bytes, b" "))
    return bodies


class Meter:
    """Wall clock and CPU seconds of a block."""

    def __enter__(self) -> Meter:
        self._start = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *exception: object) -> None:
        self.wall_seconds = time.perf_counter() - self._start[0]
        self.cpu_seconds = time.process_time() - self._start[1]


def append(folder: Path, bodies: list[bytes], at_a_time: int) -> Meter:
    with (folder / "limit").open("wb", buffering=0) as file, Meter() as meter:
        for start in range(0, len(bodies), at_a_time):
            file.write(b"".join(bodies[start : start + at_a_time]))
            os.fdatasync(file.fileno())
    (folder / "limit").unlink()
    return meter


def group(group_id: str, body: bytes, **more: Any) -> GroupPut:
    facts = {"env": "bench", "format": "group", "size": 8, "tokens": 1, "max_length": 1}
    return GroupPut(group_id=group_id, body=body, **(facts | more))


async def put(store: Store, name: str, bodies: list[bytes], at_a_time: int) -> Meter:
    """`at_a_time` callers, each waiting for its group to be durable before it puts the next."""
    waiting = iter([group(f"{name}-{index}", body) for index, body in enumerate(bodies)])

    async def caller() -> None:
        for one in waiting:
            await store.put([one])

    with Meter() as meter:
        await asyncio.gather(*[caller() for _ in range(at_a_time)])
    return meter


async def drain(store: Store) -> Meter:
    """Leases of 16, their bodies, acks."""
    with Meter() as meter:
        while lease := await store.lease("bench", max_groups=AT_A_TIME, seconds=60):
            await store.bodies([row.group_id for row in lease.groups])
            await store.ack(lease.lease_id)
    return meter


async def measure(where: str, folder: Path, count: int, size_bytes: int) -> Table:
    columns = ("bodies", "what", "groups/s", "of the limit", "MB/s", "CPU us/group")
    table = columned(f"{count} groups of {size_bytes // 1024} KiB", *columns, left=2)

    def row(kind: str, what: str, meter: Meter, limit: Meter | None) -> None:
        rate = count / meter.wall_seconds
        share = "" if limit is None else f"{limit.wall_seconds / meter.wall_seconds:.2f}"
        megabytes = f"{rate * size_bytes / 1e6:,.0f}"
        cpu = f"{meter.cpu_seconds / count * 1e6:,.0f}"
        table.add_row(kind, what, f"{rate:,.0f}", share, megabytes, cpu)

    makers: dict[str, Callable[[int, int], list[bytes]]] = {
        "noise": noise_bodies,
        "tokens": token_bodies,
    }
    async with open_store(where) as store:
        await store.create_run("bench", batch_size=AT_A_TIME)
        for kind, make in makers.items():
            bodies = make(count, size_bytes)
            for at_a_time in (1, AT_A_TIME):
                limit = append(folder, bodies, at_a_time)
                row(kind, f"file append, {at_a_time} at a time", limit, None)
                name = f"{kind}-{at_a_time}-{time.time_ns()}"
                meter = await put(store, name, bodies, at_a_time)
                row(kind, f"put, {at_a_time} at a time", meter, limit)
                meter = await drain(store)
            row(kind, f"lease {AT_A_TIME} + bodies + ack", meter, None)
    return table


# Very deep stores


ENVIRONMENTS = ("math", "code", "games", "tools")
LEAST_COMMON = "rare"
TRIES = 20


async def fill(path: Path, depth: int) -> None:
    """A store of `depth` queued groups, one in a thousand of the least common environment."""
    async with open_store(path) as store:
        await store.create_run("all", batch_size=16)
        await store.create_run("one", batch_size=16, environments=[LEAST_COMMON])
    connection = sqlite3.connect(path)
    connection.executescript("PRAGMA synchronous=OFF; PRAGMA cache_size=-500000")
    names = "CASE WHEN n % 1000 = 999 THEN 'rare' ELSE CASE n % 4 WHEN 0 THEN 'math'"
    names += " WHEN 1 THEN 'code' WHEN 2 THEN 'games' ELSE 'tools' END END"
    version = f"n / {max(1, depth // 100)}"
    numbers = "WITH RECURSIVE counted(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM counted"
    numbers += f" WHERE n < {depth - 1})"
    connection.executescript(
        f"""
        {numbers} INSERT INTO groups SELECT n + 1, 'group-' || n, {names}, 'group', 4, 100, 50,
            {version}, NULL, 0.0 FROM counted;
        {numbers} INSERT INTO bodies SELECT n + 1, 0, x'00' FROM counted;
        {numbers} INSERT INTO deliveries SELECT 'shared', n + 1, {names}, {version}, 1, 'queued',
            NULL, NULL FROM counted;
        DELETE FROM "values" WHERE key = 'store.memory';
        """
    )
    connection.close()


async def milliseconds(action: Callable[[], Awaitable[Any]], tries: int = TRIES) -> float:
    """CPU of the median try."""
    times = []
    for _ in range(tries):
        start = time.process_time()
        await action()
        times.append(time.process_time() - start)
    return statistics.median(times) * 1e3


async def costs_at(path: Path, depth: int) -> dict[str, float]:
    await fill(path, depth)
    costs = {}

    async def open_and_close() -> None:
        async with open_store(path):
            pass

    costs["open after a kill (counts)"] = await milliseconds(open_and_close, 1)
    async with open_store(path) as store:
        await store.set_run("all", policy_version=0)
    costs["open after a close"] = await milliseconds(open_and_close, 3)
    async with open_store(path) as store:
        number = iter(range(10**9))

        async def put() -> None:
            facts: Any = {"env": "math", "size": 4, "tokens": 100, "max_length": 50}
            facts["policy_version"] = depth // max(1, depth // 100)
            await store.put([group(f"new-{next(number)}", b"x", **facts)])

        async def lease(run: str = "all", **wanted: Any) -> None:
            found = await store.lease(run, seconds=600, **wanted)
            assert found is not None, wanted
            await store.nack(found.lease_id)

        async def lease_and_ack() -> None:
            found = await store.lease("all", max_groups=16, seconds=600)
            assert found is not None
            await store.ack(found.lease_id)

        costs["put one"] = await milliseconds(put)
        costs["lease 16 + nack"] = await milliseconds(lambda: lease(max_groups=16))
        costs["lease 16 of a rare environment + nack"] = await milliseconds(
            lambda: lease("one", max_groups=1)
        )
        costs["lease 16 of two environments + nack"] = await milliseconds(
            lambda: lease(max_groups=16, environments=["code", "tools"])
        )
        costs["lease 16 of the last versions + nack"] = await milliseconds(
            lambda: lease(max_groups=8, min_version=99)
        )
        costs["lease 50000 tokens + nack"] = await milliseconds(lambda: lease(max_tokens=50_000))
        costs["lease 16 + ack"] = await milliseconds(lease_and_ack)
        costs["depths and counts"] = await milliseconds(lambda: both(store))
        costs["compact: nothing to do"] = await milliseconds(lambda: store.compact())
        costs["compact: 320 groups"] = await milliseconds(lambda: store.compact(acked_hours=0), 1)
        costs["open a broadcast run (gets all)"] = await milliseconds(
            lambda: store.create_run("every", batch_size=1, delivery="broadcast"), 1
        )
        costs["drop one stale version"] = await milliseconds(lambda: store.drop_stale(1), 1)
    return costs


async def both(store: Store) -> None:
    await store.depths()
    await store.counts()


def compare_depths(depths: list[int], place: Path | None) -> Table:
    columns: list[dict[str, float]] = []
    for depth in depths:
        with tempfile.TemporaryDirectory(dir=place) as folder:
            columns.append(asyncio.run(costs_at(Path(folder) / "store.db", depth)))
    names = ("what", *(f"{depth:,}" for depth in depths), "ratio")
    table = columned("Milliseconds by groups in the store", *names)
    for what in columns[0]:
        costs = [column[what] for column in columns]
        table.add_row(what, *(f"{cost:,.2f}" for cost in costs), f"{costs[-1] / costs[0]:,.1f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=512)
    parser.add_argument("--kilobytes", type=int, default=128)
    parser.add_argument("--store", help="a new file, or a database; unset: a file that is removed")
    parser.add_argument("--depths", type=int, nargs="*", help="of very deep stores, instead")
    parser.add_argument("--folder", type=Path, help="for these; unset: a temporary one")
    arguments = parser.parse_args()
    if arguments.depths is not None:
        depths = arguments.depths or [1_000, 1_000_000]
        Console().print(compare_depths(depths, arguments.folder))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        where = arguments.store or str(folder / "store.db")
        size_bytes = arguments.kilobytes * 1024
        Console().print(asyncio.run(measure(where, folder, arguments.groups, size_bytes)))


if __name__ == "__main__":
    main()
