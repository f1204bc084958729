"""How fast the store takes and hands out groups, against the limit of the disk in the same run.

    python tests/benchmarks/bench_store.py [--groups 512] [--kilobytes 128] [--store PATH_OR_URL]

The limit is appending the same bytes to a file with one fdatasync for each group, or for each 16.
Rates on a shared machine swing; the ratios of one run are what to compare. `noise` bodies do not
compress; `tokens` bodies look like groups: ids, logprobs, masks and text.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

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


def group(group_id: str, body: bytes) -> GroupPut:
    return GroupPut(
        group_id=group_id, env="bench", format="group", body=body, size=8, tokens=1, max_length=1
    )


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
    table = Table(title=f"{count} groups of {size_bytes // 1024} KiB")
    for column in ("bodies", "what", "groups/s", "of the limit", "MB/s", "CPU us/group"):
        table.add_column(column, justify="left" if column in ("bodies", "what") else "right")

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=512)
    parser.add_argument("--kilobytes", type=int, default=128)
    parser.add_argument("--store", help="a new file, or a database; unset: a file that is removed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        where = arguments.store or str(folder / "store.db")
        size_bytes = arguments.kilobytes * 1024
        Console().print(asyncio.run(measure(where, folder, arguments.groups, size_bytes)))


if __name__ == "__main__":
    main()
