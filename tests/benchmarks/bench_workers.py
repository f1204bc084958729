"""Isolated agents per second.

    python tests/benchmarks/bench_workers.py [rollouts]

The agent makes no model call; the proxy is a stand-in in this process. Prints rates, the CPU time
per rollout (the workers' and ours) and memory per worker.
"""

import asyncio
import os
import resource
import sys
import time
from typing import Any

import uvloop
from api_load import megabytes
from support.process_tree import cpu_seconds, parents
from support.worker_standin import ZOO, StandIn, serving

from envserver import WorkersConfig
from envserver.workers import LocalPool


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


def memory(pid: int) -> dict[str, float]:
    kinds = {"private MB": "Private_", "proportional MB": "Pss:"}
    return {name: round(megabytes(kind, pid), 1) for name, kind in kinds.items()}


def _workers_cpu_seconds(pool: LocalPool) -> float:
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
        print("dedicated", await rate(pool, proxy, "dedicated", max(1, rollouts // 20)))


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 4000))
