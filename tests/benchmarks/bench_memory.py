"""Memory of what there may be many of: a pooled agent, a walled agent, a group that waits.

    python tests/benchmarks/bench_memory.py

Of a process it is what it shares with nobody (private pages); a fork shares with its parent what it
has not written to. Agents are measured while all are in a rollout. Pooled ones wait; what an agent
itself keeps comes on top. Walled ones, smolagents' CodeAgent, are in their second step, whose code
runs in an interpreter of its own: counted is by how much the memory of all processes together (PSS)
has grown for each. Exits with 1 when a budget is missed.
"""

import asyncio
import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import uvloop
from api_load import judge, megabytes
from support import gaia_standin, worker_standin
from support.process_tree import descendants
from support.stores import group
from support.waiting import until

from envserver import WorkersConfig
from envserver.store import Store, open_store
from envserver.workers import Assignment, LocalPool, WorkerSandbox

POOLED, WALLED, GROUPS = 128, 8, 20_000
POOLED_BUDGET_MB, WALLED_BUDGET_MB, GROUP_BUDGET_KB = 2.0, 12.0, 1.0
_CODES = ("x = 6", "import time\nopen('up', 'w')\ntime.sleep(60)")


private_mb = functools.partial(megabytes, "Private_")


def pool_mb() -> float:
    """Megabytes of all processes below this one, what they share counted once."""
    return megabytes("Pss:", *descendants(os.getpid()))


async def grown(
    pool: LocalPool, jobs: list[Assignment], held: Callable[[], float], up: Callable[[], bool]
) -> float:
    """Memory that each of `jobs` adds to `held` once all are `up`."""
    before = held()
    running = [asyncio.create_task(pool.run(job)) for job in jobs]
    await until(up)
    more = held() - before
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return more / len(jobs)


async def pooled(folder: Path) -> float:
    """Megabytes of each of many agents in one process."""
    one = WorkersConfig(processes=1, rollouts_per_process=POOLED)
    async with (
        worker_standin.serving() as proxy,
        LocalPool(one, [f"{worker_standin.ZOO}:Zoo"]) as pool,
    ):
        await pool.run(proxy.open("chat"))
        [pid] = pool.snapshot()["pids"]
        jobs = [proxy.open("sleep", started=str(folder / f"{n}")) for n in range(POOLED)]

        def are_up() -> bool:
            return len(list(folder.iterdir())) == POOLED

        return await grown(pool, jobs, lambda: private_mb(pid), are_up)


async def walled() -> float:
    """Megabytes of each of several agents, with its interpreter."""
    config = WorkersConfig(processes=1, dedicated=WALLED)
    async with gaia_standin.scripted() as proxy:
        sandbox = WorkerSandbox(backend="namespace", port=proxy.port, memory_mb=600, disk_mb=32)
        environments = [f"{gaia_standin.ZOO}:GaiaZoo"]
        async with LocalPool(config, environments, sandbox=sandbox, listen=proxy.also_on) as pool:
            jobs = [proxy.ask(*_CODES, seconds=600, step_seconds=90) for _ in range(WALLED)]
            await pool.run(proxy.ask("x = 6"))
            processes = 2 * WALLED  # a worker and its interpreter see the same folder

            def are_up() -> bool:
                return sum(map(_sleeps, descendants(os.getpid()))) == processes

            return await grown(pool, jobs, pool_mb, are_up)


def _sleeps(pid: int) -> bool:
    return Path(f"/proc/{pid}/root/work/up").exists()


async def queued(folder: Path) -> float:
    """Kilobytes that the store's process holds for each group that waits."""
    async with open_store(folder / "groups.db") as store:
        await store.create_run("bench", batch_size=16)
        await _put(store, "warm", 4096)
        before = private_mb("self")
        await _put(store, "queued", GROUPS)
        return (private_mb("self") - before) * 1024 / GROUPS


async def _put(store: Store, name: str, count: int) -> None:
    for start in range(0, count, 256):
        numbers = range(start, min(start + 256, count))
        await store.put([group(f"{name}-{number}", os.urandom(4096)) for number in numbers])


async def main() -> None:
    missed = []
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        for what, value, budget, unit in (
            ("a pooled agent", await pooled(Path(first)), POOLED_BUDGET_MB, "MB"),
            ("a walled agent", await walled(), WALLED_BUDGET_MB, "MB"),
            ("a group that waits", await queued(Path(second)), GROUP_BUDGET_KB, "KB"),
        ):
            missed += [what] if value > budget else []
            print(f"{what}: {value:.2f} {unit} (budget {budget:g} {unit})", flush=True)
    judge(missed)


if __name__ == "__main__":
    uvloop.run(main())
