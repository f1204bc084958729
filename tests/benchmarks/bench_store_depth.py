"""What a store costs that holds very many groups: opening it, leasing from it, looking after it.

    python tests/benchmarks/bench_store_depth.py [--depths 1000 1000000]

The groups are small and written by SQL. Four environments take turns, and the policy has a new
version every hundredth of the depth. Times are the median of several tries, in milliseconds of the
process's CPU; the last column is what the greatest depth costs against the smallest.
"""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from envserver.store import GroupPut, Store, open_store

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


async def measure(path: Path, depth: int) -> dict[str, float]:
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
            await store.put([small_group(f"new-{next(number)}", depth)])

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


def small_group(group_id: str, depth: int) -> GroupPut:
    return GroupPut(
        group_id=group_id,
        env="math",
        format="group",
        body=b"x",
        size=4,
        tokens=100,
        max_length=50,
        policy_version=depth // max(1, depth // 100),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[1_000, 1_000_000])
    parser.add_argument("--folder", type=Path, help="unset: a temporary one")
    arguments = parser.parse_args()
    columns: list[dict[str, float]] = []
    for depth in arguments.depths:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            columns.append(asyncio.run(measure(Path(folder) / "store.db", depth)))
    table = Table(title="Milliseconds by groups in the store")
    for name in ("what", *(f"{depth:,}" for depth in arguments.depths), "ratio"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for what in columns[0]:
        costs = [column[what] for column in columns]
        table.add_row(what, *(f"{cost:,.2f}" for cost in costs), f"{costs[-1] / costs[0]:,.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
