"""Full load for as long as one likes: nothing in the server grows but what it has delivered.

`make test-all` holds half a minute of it, `make test-slow` ten minutes, `make soak` an hour.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from envserver_clients.http import EnvClient
from prometheus_client.parser import text_string_to_metric_families
from support.commands import Running, running
from support.process_tree import descendants, open_files, own_megabytes
from support.waiting import PATIENCE

LOOK_SECONDS = 1.0
LAG = "envserver_loop_lag_p99_seconds"
MAX_CONCURRENT = 64
SERVE = [
    "serve", "--env", "math", "--model", "sim", "--sim.latency_seconds", 0, "--server.port", 0,
    "--env.group_size", 4, "--env.ensure_scores_are_not_same", "false",
    "--rollouts.max_concurrent", MAX_CONCURRENT, "--workers.processes", 2,
    "--retention.acked_hours", 0,
]  # fmt: skip


@dataclass
class Look:
    """What the server had at a moment."""

    memory_mb: float
    files: int
    processes: int
    lag_seconds: float

    @staticmethod
    def at(server: Running, metrics: str) -> Look:
        values = {
            sample.name: sample.value
            for family in text_string_to_metric_families(metrics)
            for sample in family.samples
        }
        seen = [_of_process(pid) for pid in (server.pid, *descendants(server.pid))]
        alive = [one for one in seen if one is not None]
        memory, files = (sum(column) for column in zip(*alive, strict=True))
        return Look(memory, int(files), len(alive), values[LAG])


def _of_process(pid: int) -> tuple[float, int] | None:
    """Memory and files; None: it has ended meanwhile, as scorers' helpers do."""
    try:
        return own_megabytes(pid), open_files(pid)
    except OSError:
        return None


async def train(url: str, run: str, until: float) -> int:
    """Groups that one trainer acknowledged."""
    groups = 0
    async with EnvClient(url, run=run, batch_size=8) as client:
        while time.monotonic() < until:
            batch = await client.lease(whole=False, wait_seconds=1)
            if batch is not None:
                groups += len(batch.groups)
                assert all(len(row.tokens) for row in batch.rows)
                await client.ack(batch, checkpoint=f"step-{groups}")
    return groups


async def look(server: Running, url: str, until: float) -> list[Look]:
    looks = []
    async with httpx.AsyncClient(timeout=PATIENCE) as http:
        while time.monotonic() < until:
            metrics = (await http.get(f"{url}/metrics")).text
            looks.append(await asyncio.to_thread(Look.at, server, metrics))
            await asyncio.sleep(LOOK_SECONDS)
    return looks


@pytest.mark.parametrize(
    "minutes",
    [pytest.param(0.3, marks=pytest.mark.thorough), pytest.param(10, marks=pytest.mark.slow)],
)
async def test_nothing_grows_under_full_load(
    minutes: float, tmp_path: Path, tell: Callable[[str], None], request: pytest.FixtureRequest
) -> None:
    long = minutes > 1
    seconds = 60 * (request.config.getoption("--soak-minutes") if long else minutes)
    with running(*SERVE, folder=tmp_path) as server:
        url = server.wait_for(r"Trainers: (http://\S+)")[1]
        until = time.monotonic() + seconds
        looks, *groups = await asyncio.gather(
            look(server, url, until), train(url, "a", until), train(url, "b", until)
        )
    tell(f"soak: {sum(groups):,} groups acknowledged in {seconds:.0f} s")
    assert sum(groups) > 0
    warm = looks[len(looks) // 4 :]
    early, late = warm[: len(warm) // 3], warm[-len(warm) // 3 :]
    # What leaks is there in the calmest moment, too; connections of calls in flight come and go,
    # so the calmest moment of before says little: a pause closes them.
    # In half a minute the pools of connections are still filling: one for each rollout.
    more = 8 if long else MAX_CONCURRENT
    for name in ("files", "processes"):
        before = statistics.median(getattr(x, name) for x in early)
        after = min(getattr(x, name) for x in late)
        assert after <= before + more, (name, before, after)
    if long:
        memory = [statistics.median(x.memory_mb for x in part) for part in (early, late)]
        assert memory[1] < 1.05 * memory[0] + 8, memory
        assert statistics.median(x.lag_seconds for x in warm) < 0.05
