"""Isolated agents per second, and how fast a killed worker is replaced.

    python tests/benchmarks/bench_workers.py [rollouts]

The agent makes no model call; the proxy is a stand-in in this process. Prints rates, the CPU time
per rollout (the workers' and ours), memory per worker, and the time from a kill to the next result.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).parent.parent))
from api_load import megabytes
from envserver_records.errors import WorkerDied
from support.process_tree import cpu_seconds, parents
from support.waiting import until
from support.worker_standin import ZOO, StandIn, serving

from envserver import WorkersConfig
from envserver.workers import LocalPool

KILLS = 20


async def rate(pool: LocalPool, proxy: StandIn, isolation: str, rollouts: int) -> dict[str, Any]:
    jobs = [proxy.open("echo", isolation=isolation, seconds=600.0) for _ in range(rollouts)]
    before, ours = _workers_cpu_seconds(pool), time.process_time()
    began = time.perf_counter()
    await asyncio.gather(*(pool.run(job) for job in jobs))
    seconds = time.perf_counter() - began
    ours = time.process_time() - ours
    return {
        "rollouts per second": round(rollouts / seconds),
        "workers' CPU ms": round((_workers_cpu_seconds(pool) - before) / rollouts * 1000, 2),
        "server's CPU ms": round(ours / rollouts * 1000, 2),
    }


async def replacement(pool: LocalPool, proxy: StandIn) -> dict[str, Any]:
    seen, replaced = [], []
    for _ in range(KILLS):
        with tempfile.TemporaryDirectory() as directory:
            started = Path(directory) / "started"
            running = asyncio.create_task(pool.run(proxy.open("sleep", started=str(started))))
            await until(started.exists)
        echo = proxy.open("echo")
        os.kill(pool.snapshot()["pids"][0], signal.SIGKILL)
        began = time.perf_counter()
        try:
            await running
        except WorkerDied:
            seen.append(time.perf_counter() - began)
        await pool.run(echo)
        replaced.append(time.perf_counter() - began)
    return {
        "death seen after ms": round(statistics.median(seen) * 1000, 1),
        "next result after ms": round(statistics.median(replaced) * 1000, 1),
    }


def memory(pid: int) -> dict[str, float]:
    kinds = {"private MB": "Private_", "proportional MB": "Pss:"}
    return {name: round(megabytes(kind, pid), 1) for name, kind in kinds.items()}


def _workers_cpu_seconds(pool: LocalPool) -> float:
    """Of the living workers and, through their parent, of those that ended."""
    pids = pool.snapshot()["pids"]
    return cpu_seconds({parents()[pids[0]], *pids})


async def main(rollouts: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    print("load", *os.getloadavg())
    began = time.perf_counter()
    async with serving() as proxy, LocalPool(WorkersConfig(), [f"{ZOO}:Zoo"]) as pool:
        print("up after seconds", round(time.perf_counter() - began, 2))
        await asyncio.gather(*(pool.run(proxy.open("echo")) for _ in range(100)))
        print("fresh worker", memory(pool.snapshot()["pids"][0]))
        print("pooled", await rate(pool, proxy, "pooled", rollouts))
        print("worn worker", memory(pool.snapshot()["pids"][0]))
        print("dedicated", await rate(pool, proxy, "dedicated", max(1, rollouts // 20)))
    one = WorkersConfig(processes=1)
    async with serving() as proxy, LocalPool(one, [f"{ZOO}:Zoo"]) as pool:
        print("replacement", await replacement(pool, proxy))


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 4000))
