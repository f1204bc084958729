"""Calls to an HTTP server, many at once, and what they took: the benchmark's agents.

Importing this module makes `tests/support` importable.
"""

import asyncio
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import aiohttp

sys.path.insert(0, str(Path(__file__).parent.parent))


def pin(core: int) -> None:
    """Keeps this process on one core, where the system can."""
    if hasattr(os, "sched_setaffinity") and core >= 0:
        os.sched_setaffinity(0, {core})


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, that of its kernel calls and threads too.

    By the clock that clock_getcpuclockid(3) names: /proc counts in hundredths of a second.
    """
    return time.clock_gettime((~pid << 3) | 2)


class Measured(NamedTuple):
    """What some calls took.

    Args:
        rate: calls per second.
        latencies: seconds of each call.
        asked: calls in all, those that were not measured among them.
    """

    rate: float
    latencies: list[float]
    asked: int

    def milliseconds(self, share: float) -> float:
        """The latency under which that share of the calls is."""
        ordered = sorted(self.latencies)
        return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass
class Agent:
    """The requests that one agent sends to `url`, one after the other."""

    http: aiohttp.ClientSession
    url: str
    bodies: Sequence[bytes]

    async def ask(self, turn: int) -> float:
        """Seconds that the request of one turn took; after the last the first comes again.

        Raises:
            ConnectionError: the answer is not HTTP 200, or breaks off.
        """
        began = time.perf_counter()
        body, headers = self.bodies[turn % len(self.bodies)], {"content-type": "application/json"}
        try:
            async with self.http.post(self.url, data=body, headers=headers) as answer:
                text = await answer.read()
        except aiohttp.ClientError as error:
            raise ConnectionError(f"{error!r}") from error
        if answer.status != 200:
            raise ConnectionError(text[:2000].decode())
        return time.perf_counter() - began


@asynccontextmanager
async def agents(urls: Sequence[str], bodies: Sequence[bytes]) -> AsyncIterator[list[Agent]]:
    """An agent for each of `urls`, which sends `bodies` there."""
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        yield [Agent(http, url, bodies) for url in urls]


async def by_turns(all_agents: Sequence[Agent], turns: range) -> Measured:
    """Every agent goes through `turns`, all of them at once."""
    latencies: list[float] = []

    async def go(agent: Agent) -> None:
        for turn in turns:
            latencies.append(await agent.ask(turn))

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for agent in all_agents:
            group.create_task(go(agent))
    return Measured(len(latencies) / (time.perf_counter() - began), latencies, len(latencies))


async def for_a_time(all_agents: Sequence[Agent], call_seconds: float, seconds: float) -> Measured:
    """Agents that begin one after the other within `call_seconds`, as if their answers had many
    lengths; measured are the calls that end once all are at work, for about `seconds`."""
    begin = time.perf_counter() + 2 * call_seconds
    end = begin + seconds
    latencies: list[float] = []
    asked = 0

    async def go(agent: Agent, pause: float) -> None:
        nonlocal asked
        await asyncio.sleep(pause)
        measured = False
        while time.perf_counter() < end or not measured:
            asked += 1
            latency = await agent.ask(0)
            measured = begin <= time.perf_counter()
            if measured:
                latencies.append(latency)

    async with asyncio.TaskGroup() as group:
        for place, agent in enumerate(all_agents):
            group.create_task(go(agent, call_seconds * place / len(all_agents)))
    # Nobody pauses between two calls; to count those of a short time would give whole numbers.
    return Measured(len(all_agents) / statistics.fmean(latencies), latencies, asked)
