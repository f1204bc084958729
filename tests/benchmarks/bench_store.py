"""How fast the store takes and hands out groups, against the limit of the disk in the same run;
with --depths, what it costs when it holds very many.

    python tests/benchmarks/bench_store.py [--groups 512] [--tokens 2048] [--store PATH_OR_URL]
    python tests/benchmarks/bench_store.py --depths [--smallest 1000] [--greatest 1000000]

The limit is appending the same bytes to a file with one fdatasync for each group, or for each 16.
Rates on a shared machine swing; the ratios of one run are what to compare. The groups
are of 8 x `--tokens`.

Groups of deep stores are small and written by SQL. Four environments take turns, and the policy has
a new version every hundredth of the depth. Times are the median of several tries, in milliseconds
of the process's CPU; the last column is what the greatest depth costs against the smallest.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import api_load as load
from rich.table import Table
from support.stores import group

from envserver.store import Store, open_store

AT_A_TIME = 16


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


async def measure(where: str, folder: Path, count: int, tokens: int) -> Table:
    few = [load.packed(index, 8, tokens).body for index in range(16)]
    bodies = [few[index % 16] for index in range(count)]
    columns = ("what", "groups/s", "of the limit", "MB/s", "CPU us/group")
    table = load.table(f"{count} groups of {len(few[0]) // 1024} KiB", *columns)

    def row(what: str, meter: Meter, limit: Meter | None) -> None:
        rate = count / meter.wall_seconds
        share = "" if limit is None else f"{limit.wall_seconds / meter.wall_seconds:.2f}"
        megabytes = f"{rate * len(few[0]) / 1e6:,.0f}"
        cpu = f"{meter.cpu_seconds / count * 1e6:,.0f}"
        table.add_row(what, f"{rate:,.0f}", share, megabytes, cpu)

    async with open_store(where) as store:
        await store.create_run("bench", batch_size=AT_A_TIME)
        for at_a_time in (1, AT_A_TIME):
            limit = append(folder, bodies, at_a_time)
            row(f"file append, {at_a_time} at a time", limit, None)
            meter = await put(store, f"{at_a_time}-{time.time_ns()}", bodies, at_a_time)
            row(f"put, {at_a_time} at a time", meter, limit)
            meter = await drain(store)
        row(f"lease {AT_A_TIME} + bodies + ack", meter, None)
    return table


# Very deep stores


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
        wanted: tuple[tuple[str, dict[str, Any]], ...] = (
            ("16", {"max_groups": 16}),
            ("one of a rare environment", {"run": "one", "max_groups": 1}),
            ("16 of two environments", {"max_groups": 16, "environments": ["code", "tools"]}),
            ("8 of the last versions", {"max_groups": 8, "min_version": 99}),
            ("50000 tokens", {"max_tokens": 50_000}),
        )
        for name, how in wanted:
            costs[f"lease {name} + nack"] = await milliseconds(partial(lease, **how))
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


def compare_depths(depths: list[int]) -> Table:
    columns: list[dict[str, float]] = []
    for depth in depths:
        with tempfile.TemporaryDirectory() as folder:
            columns.append(asyncio.run(costs_at(Path(folder) / "store.db", depth)))
    names = ("what", *(f"{depth:,}" for depth in depths), "ratio")
    table = load.table("Milliseconds by groups in the store", *names)
    for what in columns[0]:
        costs = [column[what] for column in columns]
        table.add_row(what, *(f"{cost:,.2f}" for cost in costs), f"{costs[-1] / costs[0]:,.1f}")
    return table


def main() -> None:
    arguments = load.asked(
        __doc__, groups=512, tokens=2048, store=str, depths=False, smallest=1000, greatest=10**6
    )
    if arguments.depths:
        load.show(compare_depths([arguments.smallest, arguments.greatest]))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        where = arguments.store or str(folder / "store.db")
        load.show(asyncio.run(measure(where, folder, arguments.groups, arguments.tokens)))


if __name__ == "__main__":
    main()
