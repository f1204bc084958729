"""What pages that are open cost a server: its CPU with 0, 1 and 20 watchers.

    python tests/benchmarks/bench_watchers.py [--quick] [--output FILE]

`envserver run-api` over a SQLite file, a process of its own, gets packed groups from clients in
another process, which also hold the watchers: each reads `/v1/events`; a *page* also reads the
newest 50 groups every two seconds and the histogram of rewards every thirty, as the page of groups
does.
Two loads: as many groups as the server takes from eight clients, one in each post, and 15 a second,
each of which is told of by itself. What counts is CPU seconds of the server process in a second.
Cases take turns, forth and back, so that the growing store and whatever else the machine does meet
all of them alike; shown are medians of the rounds, and what watchers took beyond the case without
any in the same round.

At full load many groups are told of as one event, so watchers take less there; but 1 % of a busy
core is less than what busy cores differ by. So the smaller load is judged: exits with 1 if one
watcher takes more than 2 % of a core there, or 20 more than 4 %.
"""

import asyncio
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import NamedTuple

import aiohttp
import api_load as load
from api_load import Server, ours
from rich.table import Table

TOKENS = 256
GROUP_SIZE = 8
RATE = 15.0
"""Groups a second of the smaller load."""


class Case(NamedTuple):
    """How many watch, and whether they read lists as a page does."""

    watchers: int
    is_page: bool = False

    def __str__(self) -> str:
        kind = "page" if self.is_page else "watcher"
        return f"{self.watchers} {kind}{'' if self.watchers == 1 else 's'}"


BUDGETS = {Case(1): 0.02, Case(20): 0.04}
"""What watchers may take of a core at the smaller load."""
CASES = (Case(0), Case(1), Case(20), Case(1, is_page=True), Case(20, is_page=True))


class Watchers:
    """Pages that are open. `bytes`, `events`: what they were sent."""

    def __init__(self, url: str, case: Case) -> None:
        self._url = url
        self._case = case
        self.bytes = self.events = 0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Watches while the block runs."""
        unlimited = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=unlimited, connector=connector) as http:
            opened = [asyncio.Event() for _ in range(self._case.watchers)]
            tasks = [asyncio.create_task(self._watch(http, one)) for one in opened]
            if self._case.is_page:
                lists = {"/v1/groups?order=newest&limit=50": 2.0, "/v1/rewards": 30.0}
                for path, seconds in [*lists.items()] * self._case.watchers:
                    tasks.append(asyncio.create_task(self._read(http, path, seconds)))
            await asyncio.gather(*(one.wait() for one in opened))
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, http: aiohttp.ClientSession, opened: asyncio.Event) -> None:
        async with http.get(self._url + "/v1/events") as answer:
            answer.raise_for_status()
            async for part in answer.content.iter_any():
                opened.set()
                self.bytes += len(part)
                self.events += part.count(b"\nevent: ")

    async def _read(self, http: aiohttp.ClientSession, path: str, seconds: float) -> None:
        await asyncio.sleep(seconds * random.random())  # pages do not ask together
        while True:
            async with http.get(self._url + path) as answer:
                answer.raise_for_status()
                await answer.read()
            await asyncio.sleep(seconds)


class Cost(NamedTuple):
    """CPU seconds of the server in a second; CPU milliseconds for each group; groups a second."""

    share: float
    each: float
    rate: float


class Load:
    """Posts groups without end."""

    def __init__(self, wire: load.Wire) -> None:
        self._wire = wire
        self._bodies = [load.packed(n, GROUP_SIZE, TOKENS).body for n in range(16)]
        self._count = 0

    def _next(self, count: int) -> list[bytes]:
        first, self._count = self._count, self._count + count
        return [load.renumbered(self._bodies[n % 16], first + n) for n in range(count)]

    async def full(self, server: Server, count: int) -> Cost:
        """Posts `count` groups as fast as the server takes them."""
        return await _cost(server, count, self._wire.post_packed(self._next(count), 1))

    async def steady(self, server: Server, seconds: float) -> Cost:
        """Posts `RATE` groups a second, one by one."""
        count = int(seconds * RATE)
        posts = self._next(count)

        async def post_slowly() -> None:
            started = time.perf_counter()
            for number, post in enumerate(posts):
                await asyncio.sleep(max(0.0, started + number / RATE - time.perf_counter()))
                await self._wire.post_packed([post], 1)

        return await _cost(server, count, post_slowly())


async def _cost(server: Server, groups: int, work: Awaitable[None]) -> Cost:
    _, wall, (cpu,) = await load.cost_of(work, server)
    return Cost(cpu / wall, 1000 * cpu / groups, groups / wall)


class Size(NamedTuple):
    """How much is measured.

    Args:
        groups: of each slice at full load; short slices, so that what else runs meets all cases.
    """

    rounds: int
    groups: int
    steady_rounds: int
    steady_seconds: float


FULL = Size(24, 500, 4, 8.0)
QUICK = Size(8, 400, 2, 4.0)

Costs = dict[tuple[str, Case], list[Cost]]


async def measure(server: Server, size: Size) -> Costs:
    """Measures each case in each round."""
    found: Costs = {}
    async with load.Wire(server.url) as wire:
        await wire.join()
        posting = Load(wire)
        await posting.full(server, size.groups)  # imports, caches, a first commit
        for number in range(size.rounds):
            for case in CASES if number % 2 else CASES[::-1]:
                watchers = Watchers(server.url, case)
                async with watchers.open():
                    cost = await posting.full(server, size.groups)
                    found.setdefault(("full", case), []).append(cost)
                    if number < size.steady_rounds:
                        cost = await posting.steady(server, size.steady_seconds)
                        found.setdefault(("steady", case), []).append(cost)
                if case.watchers and not watchers.events:
                    raise RuntimeError("the watchers were told of nothing")
    return found


def beyond(found: Costs, kind: str, case: Case) -> float:
    """What watchers take of a core: CPU beyond the same groups without them, by the second."""
    pairs = zip(found[kind, case], found[kind, CASES[0]], strict=True)
    return statistics.median((one.each - none.each) / 1000 * one.rate for one, none in pairs)


def shown(found: Costs) -> Table:
    columns = ("", "watchers", "of a core", "ms a group", "groups/s", "watchers' share")
    table = load.table("CPU of the server", *columns, left=2)
    for kind, case in product(("full", "steady"), CASES):
        middle = [statistics.median(values) for values in zip(*found[kind, case], strict=True)]
        share, each, rate = middle
        extra = f"{100 * beyond(found, kind, case):+.2f} %" if case.watchers else ""
        table.add_row(kind, str(case), f"{100 * share:.1f} %", f"{each:.3f}", f"{rate:.0f}", extra)
    return table


def main() -> None:
    arguments = load.asked(__doc__, quick=False, output=Path)
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    with ours() as server:
        found = asyncio.run(measure(server, QUICK if arguments.quick else FULL))
    load.show(shown(found), arguments.output)
    over = [case for case, most in BUDGETS.items() if beyond(found, "steady", case) > most]
    load.judge([f"{case} may take {BUDGETS[case]:.0%} of a core" for case in over])


if __name__ == "__main__":
    main()
