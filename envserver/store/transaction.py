"""One transaction of the writer, and the counts that it keeps in memory: saved when the store is
closed, loaded when it is opened. If they were not saved (the process was killed) or may be wrong (a
commit failed), the deliveries are counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import msgspec
from sqlalchemy import Row, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ..rollouts.estimates import DISCOUNT
from .rows import GROUP_STATES, Delivery, GroupState, Run, RunState
from .schema import SHARED, checkpoints, counters, deliveries, gone, groups, leases, runs, values

T = TypeVar("T")

_IN_LIST: Final = 500
"""Maximum number of values in one IN (...); databases limit a statement's parameters."""
_MEMORY_KEY: Final = "store.memory"


@dataclass(frozen=True)
class KnownRun:
    """The memory's record of a run. `environments`: empty means all."""

    state: RunState
    delivery: Delivery
    queue: str
    environments: frozenset[str]
    batch_size: int


def queue_of(name: str, delivery: Delivery) -> str:
    return SHARED if delivery == "shared" else f"run/{name}"


def known_run(run: Run) -> KnownRun:
    queue = queue_of(run.name, run.delivery)
    return KnownRun(run.state, run.delivery, queue, frozenset(run.environments), run.batch_size)


def run_of(row: Row[Any]) -> Run:
    return Run(
        row.name,
        row.created_at,
        row.batch_size,
        msgspec.json.decode(row.settings),
        row.policy_version,
        row.state,
        row.delivery,
        msgspec.json.decode(row.environments),
    )


class _DeliveryCount(msgspec.Struct, array_like=True):
    queue: str
    env: str
    state: GroupState
    count: int


class _Written(msgspec.Struct):
    """The part of the memory that is slow to compute, in its saved form."""

    next_seq: int
    tallies: list[_DeliveryCount]
    versions: dict[int, tuple[int, int]]
    stored_bytes: int


@dataclass
class Memory:
    """Facts about the database as of the last commit.

    Args:
        counters: totals of this store, by name.
        next_seq: `seq` of the next group.
        tallies: number of deliveries by queue, environment and state, including removed ones.
        versions: for each policy version, first and last `seq` of a range that holds all its queued
            groups.
        stored_bytes: size of the bodies of all groups that are kept.
        changes: grows when a group is queued or a run is closed.
        activity: grows with every change of a delivery or a run.
        filled: the last `seq` copied into each queue of a broadcast run that is being opened.
            Groups up to it that are queued later are copied at once, all others in turn.
        hungry: `min_groups` by run, for runs whose latest lease found too little.
        conflicting_puts: puts since opening whose id existed with another body.
    """

    runs: dict[str, KnownRun]
    counters: dict[str, int]
    next_seq: int
    next_ack: int
    tallies: dict[tuple[str, str, GroupState], int] = field(default_factory=dict)
    versions: dict[int, tuple[int, int]] = field(default_factory=dict)
    stored_bytes: int = 0
    changes: int = 0
    conflicting_puts: int = 0
    activity: int = 0
    hungry: dict[str, int] = field(default_factory=dict)
    filled: dict[str, int] = field(default_factory=dict)

    def copy(self) -> Memory:
        tables: dict[str, Any] = {
            name: dict(value) for name, value in vars(self).items() if isinstance(value, dict)
        }
        return replace(self, **tables)

    def tally(self, queue: str, env: str, state: GroupState, count: int) -> None:
        """Adds `count` (may be negative) to a number of deliveries."""
        key = (queue, env, state)
        self.tallies[key] = self.tallies.get(key, 0) + count
        self.activity += 1

    def queued(self, seq: int, policy_version: int) -> None:
        first, last = self.versions.get(policy_version, (seq, seq))
        self.versions[policy_version] = (min(first, seq), max(last, seq))
        self.changes += 1

    def counts(self, queue: str) -> dict[GroupState, int]:
        counts: dict[GroupState, int] = dict.fromkeys(GROUP_STATES, 0)
        for (of, _, state), count in self.tallies.items():
            if of == queue:
                counts[state] += count
        return counts

    def in_state(self, run: KnownRun, states: Sequence[GroupState]) -> int:
        return sum(
            count
            for (queue, env, state), count in self.tallies.items()
            if queue == run.queue
            and state in states
            and (not run.environments or env in run.environments)
        )

    def queued_environments(self, queue: str) -> set[str]:
        return {
            env
            for (of, env, state), count in self.tallies.items()
            if of == queue and state == "queued" and count
        }

    def drawn_from(self) -> set[str]:
        """Returns the queues from which a run draws, or may draw when it is opened."""
        # A run without a batch size is the Atropos run before a trainer has registered.
        known = [run for run in self.runs.values() if run.batch_size]
        queues = {run.queue for run in known if run.state == "open"}
        if not known or any(run.delivery == "shared" for run in known):
            queues.add(SHARED)
        return queues

    def fan_out(self) -> list[str]:
        return [
            run.queue
            for run in self.runs.values()
            if run.delivery == "broadcast" and run.state == "open"
        ]


@dataclass(frozen=True)
class Transaction:
    """The connection and memory of one transaction. `memory` becomes the writer's after the commit.
    An operation may raise a UsageError only if what it wrote so far is valid by itself, because the
    transaction continues without it."""

    connection: AsyncConnection
    memory: Memory
    now: float
    discount: float = DISCOUNT

    async def count(self, name: str, more: int = 1) -> None:
        known = self.memory.counters.get(name)
        self.memory.counters[name] = (known or 0) + more
        row = {"name": name, "value": self.memory.counters[name]}
        if known is None:
            await self.connection.execute(insert(counters).values(row))
        else:
            change = update(counters).where(counters.c.name == name)
            await self.connection.execute(change.values(row))


async def load_memory(connection: AsyncConnection, *, trust_written: bool) -> Memory:
    """Loads the memory. Without `trust_written`, or if none was saved, all deliveries are counted,
    which takes longer the more there are."""
    every = map(run_of, await connection.execute(select(runs)))
    known = {run.name: known_run(run) for run in every}
    counted = {row.name: row.value for row in await connection.execute(select(counters))}
    last_seq = await connection.scalar(select(func.max(groups.c.seq))) or 0
    last_acks = [
        await connection.scalar(
            select(func.max(leases.c.ack_number)).where(leases.c.ack_number.is_not(None))
        ),
        await connection.scalar(select(func.max(runs.c.gone_ack_number))),
        await connection.scalar(select(func.max(checkpoints.c.ack_number))),
    ]
    next_ack = 1 + max(number or 0 for number in last_acks)
    memory = Memory(known, counted, last_seq + 1, next_ack)
    written = await _read_written(connection) if trust_written else None
    if written is None or written.next_seq != memory.next_seq:
        await _count_deliveries(connection, memory)
        return memory
    memory.tallies = {(t.queue, t.env, t.state): t.count for t in written.tallies}
    memory.versions = written.versions
    memory.stored_bytes = written.stored_bytes
    return memory


async def _read_written(connection: AsyncConnection) -> _Written | None:
    text = await connection.scalar(select(values.c.value).where(values.c.key == _MEMORY_KEY))
    return None if text is None else msgspec.json.decode(text, type=_Written)


async def _count_deliveries(connection: AsyncConnection, memory: Memory) -> None:
    kind = (
        deliveries.c.queue,
        deliveries.c.env,
        deliveries.c.state,
        deliveries.c.policy_version,
    )
    seq = deliveries.c.seq
    query = select(
        *kind, func.count(), func.min(seq), func.max(seq), func.sum(deliveries.c.stored_bytes)
    ).group_by(*kind)
    rows: Any = await connection.execute(query)
    for queue, env, state, version, count, first, last, size_bytes in rows:
        memory.tally(queue, env, state, count)
        known = memory.versions.get(version, (first, last))
        memory.versions[version] = (min(known[0], first), max(known[1], last))
        # Every group that is kept is in the shared queue.
        memory.stored_bytes += int(size_bytes) if queue == SHARED else 0
    for row in await connection.execute(select(gone)):
        memory.tally(row.queue, row.env, row.state, row.removed)


async def write_memory(connection: AsyncConnection, memory: Memory) -> None:
    await forget_written(connection)
    written = _Written(
        memory.next_seq,
        [_DeliveryCount(*key, count) for key, count in memory.tallies.items()],
        memory.versions,
        memory.stored_bytes,
    )
    row = {"key": _MEMORY_KEY, "value": msgspec.json.encode(written).decode()}
    await connection.execute(insert(values).values(row))


async def forget_written(connection: AsyncConnection) -> None:
    """Deletes the saved memory; the first transaction does this."""
    await connection.execute(delete(values).where(values.c.key == _MEMORY_KEY))


def chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), _IN_LIST):
        yield items[start : start + _IN_LIST]
