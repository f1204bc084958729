"""The trainer API against PyPI's atroposlib on the same machine: CPU of the server, side by side.

    python tests/benchmarks/bench_api.py [--quick] [--output FILE] [--alone]

Both servers get the same bytes from the same clients in another process. What counts is CPU of the
server process (its threads and kernel calls too) for each post, fetch and status call, the best of
several rounds. Ours answers a post when the group is on disk; theirs keeps it in memory.

Exits with 1 when a budget is missed. --alone measures ours without the other one, and judges
nothing.
"""

import asyncio
import gzip
import os
import statistics
import sys
from collections.abc import Awaitable, Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import api_load as load
from api_load import GROUP_SIZE, HOW_TO_GET_PEER, PEER_PYTHON, Server, ours, theirs
from envserver_clients.http import EnvClient
from rich.table import Table

from envserver.store import GroupPut

SHORT, LONG = 256, 2048
NATIVE = "native lease + ack"
PACKED = "packed post"
GOALS = {"post": 10.0, PACKED: 10.0, "fetch": 3.0, NATIVE: 20.0}
"""How many times less CPU than theirs ours is meant to take; a lease is held against their batch,
and a packed post against their post."""
BUDGETS = {"fetch": 3.0, NATIVE: 20.0}
"""What is held: a run that finds less fails. Where it differs from the goal, the goal is not
reached yet.
"""
AT_ONCE = (1, 16, 64)
"""Groups in one request of a packed post: a joiner that is idle, and those that make many."""
LISTED = 16
"""Groups in one post of the Atropos API as a list."""
GROWTH = 3.0
"""How many times more CPU a status call may take with a hundred times as many groups waiting."""


class Size(NamedTuple):
    """How much is measured.

    Args:
        short_posts: groups in each round, of 8 x 256.
        packed_posts: requests in each round.
        fetches: sequences of a batch.
        kept: groups of 8 x 2048 for which memory is measured.
        waiting: groups that wait when a status call is measured.
        calls: such calls.
    """

    rounds: int
    short_posts: int
    packed_posts: int
    fetches: tuple[int, ...]
    kept: int
    waiting: tuple[int, int]
    calls: int


FULL = Size(3, 256, 24, (64, 512), 256, (100, 10_000), 200)
QUICK = Size(2, 64, 16, (64, 256), 128, (100, 2_000), 100)


class Costs(load.Costs):
    bytes_per_token: float | None = None


async def measure_wire(server: Server, size: Size) -> Costs:
    """Posts, batches and status calls over the Atropos API."""
    costs = Costs(server)
    some = [load.posted(GROUP_SIZE, SHORT, seed) for seed in range(LISTED)]
    listed = [gzip.compress(b"[" + b",".join(some) + b"]")]
    async with load.Wire(server.url) as wire:
        for tokens in (SHORT, LONG):
            await load.post_and_fetch(wire, load.Costs(server), tokens, 16)
        for _ in range(size.rounds):
            await load.post_and_fetch(wire, costs, SHORT, size.short_posts)
            await wire.start(10**6)
            posting = wire.post_all(listed, size.short_posts // LISTED, "/scored_data_list")
            await costs.measure(f"post 8 x {SHORT}, {LISTED} at once", size.short_posts, posting)
            for sequences in size.fetches:
                await load.post_and_fetch(wire, costs, LONG, sequences // GROUP_SIZE)
        await wire.start(10**6)
        before = server.megabytes()
        await wire.post_all(load.bodies(LONG), size.kept, "/scored_data")
        grown = (server.megabytes() - before) * 2**20
        costs.bytes_per_token = grown / (size.kept * GROUP_SIZE * LONG)
        await _status_calls(wire, costs, size)
    return costs


async def _status_calls(wire: load.Wire, costs: Costs, size: Size) -> None:
    tiny = [gzip.compress(b"[" + b",".join([load.posted(1, 8, env_id=0)] * 100) + b"]")]
    await wire.start(10**6)
    env_id = await wire.add_environment(1)
    there = 0

    async def repeat(call: Callable[[], Awaitable[object]]) -> None:
        for _ in range(size.calls):
            await call()

    for waiting in size.waiting:
        await wire.post_all(tiny, (waiting - there) // 100, "/scored_data_list")
        there = waiting
        for path, call in (
            ("/status", lambda: wire.get("/status")),
            ("/status-env", lambda: wire.status_env(env_id)),
        ):
            for _ in range(size.rounds):
                await costs.measure(f"{path}, {waiting:,} wait", size.calls, repeat(call))


async def measure_native(server: Server, size: Size) -> load.Costs:
    """Leases with their acknowledgement, by our client, from a store that holds enough for it."""
    costs = load.Costs(server)
    for sequences in size.fetches:
        groups = sequences // GROUP_SIZE
        case = f"{NATIVE} {sequences} x {LONG}"
        async with EnvClient(server.url, run="bench", batch_size=groups) as client:

            async def take(client: EnvClient = client) -> Any:
                batch = await client.lease()
                assert batch is not None, "the store does not hold enough groups"
                await client.ack(batch)
                return batch.rows

            for _ in range(size.rounds):
                rows = await costs.measure(case, 1, take())
                if len(rows) != sequences or any(len(row.tokens) != LONG for row in rows):
                    raise RuntimeError("the lease holds other rows than were stored")
    return costs


async def measure_packed(server: Server, size: Size) -> load.Costs:
    """Posts of packed groups, as environments of ours make them on other machines."""
    costs = load.Costs(server)
    async with load.Wire(server.url) as wire:
        await wire.join()
        first = 0
        for tokens, at_once in product((SHORT, LONG), AT_ONCE * size.rounds):
            count = size.packed_posts * at_once
            posts = load.posts(tokens, first, count)
            first += count
            case = f"{PACKED} 8 x {tokens}, {at_once} at once"
            await costs.measure(case, count, wire.post_packed(posts, at_once))
    return costs


def native_groups(size: Size) -> list[GroupPut]:
    """What `measure_native` takes."""
    count = size.rounds * sum(sequences // GROUP_SIZE for sequences in size.fetches)
    return [load.packed(number, GROUP_SIZE, LONG) for number in range(count)]


def shown(ours_: Costs, theirs_: Costs | None) -> Table:
    title = "CPU of the server, milliseconds: best (median)"
    table = load.table(title, "", "ours", "atroposlib", "ratio", "goal", "held")
    for case in ours_.of:
        row = [case, _cell(ours_, case)]
        other = _held_against(case)
        if theirs_ is not None and other in theirs_.of:
            row += [_cell(theirs_, other), f"{ratio(ours_, theirs_, case):,.1f}"]
        else:
            row += ["", ""]
        table.add_row(*row, *[_number(limits.get(_kind(case))) for limits in (GOALS, BUDGETS)])
    memory = [costs.bytes_per_token for costs in (ours_, theirs_) if costs is not None]
    cells = ["" if value is None else f"{value:,.1f}" for value in memory]
    table.add_row("memory of a queued token, bytes", *cells)
    return table


def _cell(costs: Costs, case: str) -> str:
    tries = [one for (one,) in costs.of[case]]
    return f"{min(tries):,.2f} ({statistics.median(tries):,.2f})"


def _held_against(case: str) -> str:
    if case.startswith(PACKED):  # their environments post one group at a time
        case = case.partition(", ")[0]
    return case.replace(NATIVE, "fetch").replace(PACKED, "post")


def _kind(case: str) -> str:
    return case.rpartition(" x ")[0].rpartition(" ")[0]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def ratio(ours_: Costs, theirs_: Costs, case: str) -> float:
    """How many times as much CPU theirs takes."""
    return theirs_.best(_held_against(case))[0] / ours_.best(case)[0]


def missed(ours_: Costs, theirs_: Costs, size: Size) -> list[str]:
    """What is over its budget, in words."""
    found = []
    for case in ours_.of:
        budget = BUDGETS.get(_kind(case))
        if budget is not None and (times := ratio(ours_, theirs_, case)) < budget:
            found.append(f"{case}: {times:.1f} times less CPU, {budget:g} are wanted")
    few, many = size.waiting
    for call in ("/status", "/status-env"):
        first, last = (ours_.best(f"{call}, {each:,} wait")[0] for each in (few, many))
        growth = last / first
        if growth > GROWTH:
            found.append(f"{call} takes {growth:.1f} times more CPU where more groups wait")
    mine, other = ours_.bytes_per_token, theirs_.bytes_per_token
    if mine is not None and other is not None and mine > other:
        found.append(f"a queued token takes {mine:.0f} bytes, theirs {other:.0f}")
    return found


def main() -> None:
    arguments = load.asked(__doc__, quick=False, output=Path, alone=False)
    size = QUICK if arguments.quick else FULL
    if not arguments.alone and not PEER_PYTHON.exists():
        sys.exit(HOW_TO_GET_PEER)
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    with ours() as server:
        mine = asyncio.run(measure_wire(server, size))
    with ours() as server:
        mine.of |= asyncio.run(measure_packed(server, size)).of
    with ours(native_groups(size)) as server:
        mine.of |= asyncio.run(measure_native(server, size)).of
    other = None
    if not arguments.alone:
        with theirs() as server:
            other = asyncio.run(measure_wire(server, size))
    load.show(shown(mine, other), arguments.output)
    load.judge([] if other is None else missed(mine, other, size))


if __name__ == "__main__":
    main()
