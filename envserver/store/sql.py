"""The store: groups in, leases out, and nothing that was accepted is lost.

    async with open_store("data/envserver.db") as store:
        await store.put([GroupPut(...)])
        lease = await store.lease("trainer", max_groups=16, seconds=600)
        bodies = await store.bodies([group.group_id for group in lease.groups])
        await store.ack(lease.lease_id)

What holds: when a method that changes something returns, the change is on disk; when it raises,
nothing changed. Any method may raise StoreError (nothing was accepted; asking again is safe), those
that write StoreFull. The store goes on working after either.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection

from ..errors import InputError
from . import compression, groups, leases, runs
from .database import Database, open_database
from .failures import typed_failures
from .groups import encode_puts
from .rows import GroupPut, GroupRow, Lease, Run
from .states import GroupState, RunState
from .transaction import load_memory
from .writer import Writer

A = TypeVar("A")
T = TypeVar("T")

_THREADS: Final = 2
"""For compressing and inflating bodies."""
_INLINE_BYTES: Final = 32 * 1024
"""Less than this is compressed on the event loop: it takes less time than a change of threads."""


@asynccontextmanager
async def open_store(
    where: str | Path, *, clock: Callable[[], float] = time.time
) -> AsyncIterator[Store]:
    """Opens, and creates where missing, the store at `where`; at most one process has it open.

    Args:
        where: a path (its folder is made), `sqlite:///path` or `postgresql://user@host/name`.
        clock: seconds; leases expire by it.

    Raises:
        ConfigError: no such kind of store, not one of ours, or one of a newer version.
        ConflictError: another process has it open.
        StoreError: it cannot be reached.
    """
    async with open_database(where) as database:
        with typed_failures():
            async with database.reader.connect() as connection:
                memory = await load_memory(connection)
        writer = Writer(database.writer, memory, clock)
        task = asyncio.create_task(writer.run(), name="store-writer")
        with ThreadPoolExecutor(_THREADS, "store") as threads:
            try:
                yield Store(database, writer, threads, clock)
            finally:
                writer.close()
                await task


class Store:
    """An open store, made by `open_store`, for any number of concurrent callers of one loop."""

    def __init__(
        self,
        database: Database,
        writer: Writer,
        threads: ThreadPoolExecutor,
        clock: Callable[[], float],
    ) -> None:
        self.name = database.name
        self._reader = database.reader
        self._writer = writer
        self._threads = threads
        self._clock = clock

    @property
    def conflicting_puts(self) -> int:
        """Puts since opening of an id that was there with another body (the first one stays)."""
        return self._writer.memory.conflicting_puts

    async def put(self, groups: Sequence[GroupPut]) -> list[bool]:
        """Stores groups, all or none; durable on return.

        Returns:
            For each: True when stored, False when its id was already there (nothing changed).

        Raises:
            InputError: a field cannot be stored.
        """
        if not groups:
            return []
        is_small = sum(len(group.body) for group in groups) < _INLINE_BYTES
        encoded = encode_puts(groups) if is_small else await self._in_thread(encode_puts, groups)
        return await self._writer.put(encoded)

    async def pending(self) -> list[GroupRow]:
        """Queued and buffered groups, oldest first."""
        async with self._reading() as connection:
            return await groups.pending(connection)

    async def arrived_after(self, seq: int, limit: int) -> list[GroupRow]:
        """Up to `limit` groups of any state behind number `seq`, oldest first; takes none."""
        async with self._reading() as connection:
            return await groups.arrived_after(connection, seq, limit)

    async def rows(self, group_ids: Sequence[str]) -> list[GroupRow]:
        """What is known of these groups, in this order, each once.

        Raises:
            NotFoundError: one does not exist.
        """
        async with self._reading() as connection:
            return await groups.rows_of(connection, group_ids)

    async def existing(self, group_ids: Sequence[str]) -> set[str]:
        """Those of these ids that were ever stored, whatever became of them."""
        async with self._reading() as connection:
            return set(await groups.seqs_of(connection, list(set(group_ids))))

    async def count_with_prefix(self, prefix: str) -> int:
        """How many groups whose id begins with `prefix` were ever stored."""
        async with self._reading() as connection:
            return await groups.count_with_prefix(connection, prefix)

    async def bodies(self, group_ids: Sequence[str]) -> list[bytes]:
        """The bodies of these groups, in this order.

        Raises:
            NotFoundError: one does not exist.
        """
        async with self._reading() as connection:
            stored = await groups.stored_bodies(connection, group_ids)
        with typed_failures():
            return await self._in_thread(_decode_all, stored)

    async def move(self, group_ids: Sequence[str], to: GroupState) -> None:
        """Takes waiting groups from buffered to queued, or from either to dropped; all or none.

        Raises:
            NotFoundError: one does not exist.
            ConflictError: one is in a state that forbids it.
        """
        await self._writer.do(partial(groups.move, group_ids=list(group_ids), target=to))

    async def lease(
        self,
        run: str,
        *,
        max_groups: int | None = None,
        group_ids: Sequence[str] | None = None,
        seconds: float,
    ) -> Lease | None:
        """Hands queued groups to `run` for `seconds`; those of overdue leases count as queued.

        Args:
            max_groups: so many of the oldest; unset: all.
            group_ids: exactly these, in this order, instead.

        Returns:
            None when nothing is queued.

        Raises:
            NotFoundError: no such run or group.
            ConflictError: the run is closed, or one of `group_ids` is not queued.
        """
        if max_groups is not None and (group_ids is not None or max_groups < 1):
            raise InputError("Give max_groups (at least 1) or group_ids.", place="max_groups")
        _check_seconds(seconds)
        wanted = leases.Wanted(max_groups, None if group_ids is None else list(group_ids))
        return await self._writer.do(partial(leases.lease, run=run, wanted=wanted, seconds=seconds))

    async def ack(self, lease_id: str) -> None:
        """The lease's groups are never delivered again. Twice is fine; late is, until taken over.

        Raises:
            NotFoundError: no such lease.
            ConflictError: it was given back, or expired and others have taken its groups.
        """
        await self._writer.do(partial(leases.ack, lease_id=lease_id))

    async def nack(self, lease_id: str) -> None:
        """Gives the lease's groups back to the queue, where they keep their places. Twice is fine.

        Raises:
            NotFoundError: no such lease.
            ConflictError: it was acked, or expired and others have taken its groups.
        """
        await self._writer.do(partial(leases.nack, lease_id=lease_id))

    async def extend(self, lease_id: str, seconds: float) -> float:
        """Lets the lease end `seconds` from now; when that is.

        Raises:
            NotFoundError: no such lease.
            ConflictError: it was acked or given back, or expired and others have taken its groups.
        """
        _check_seconds(seconds)
        return await self._writer.do(partial(leases.extend, lease_id=lease_id, seconds=seconds))

    async def expire(self, now: float | None = None) -> list[str]:
        """Queues again what leases hold that are due at `now` (unset: now); the leases' ids."""
        at = self._clock() if now is None else now
        return await self._writer.do(partial(leases.expire, now=at))

    async def counts(self) -> dict[GroupState, int]:
        """Groups in each state. Kept in memory: costs nothing at any depth."""
        return dict(self._writer.memory.counts)

    async def create_run(
        self, name: str, *, batch_size: int, settings: dict[str, Any] | None = None
    ) -> Run:
        """A new open run; asking again with the same settings gives the same run.

        Raises:
            ConflictError: there is one of this name with other settings.
        """
        text = runs.to_json(settings or {}, "settings")
        return await self._writer.do(
            partial(runs.create_run, name=name, batch_size=batch_size, settings=text)
        )

    async def get_run(self, name: str) -> Run:
        """Raises NotFoundError: there is none."""
        async with self._reading() as connection:
            return await runs.get_run(connection, name)

    async def list_runs(self) -> list[Run]:
        """All runs, oldest first."""
        async with self._reading() as connection:
            return await runs.list_runs(connection)

    async def set_run(
        self,
        name: str,
        *,
        batch_size: int | None = None,
        settings: dict[str, Any] | None = None,
        policy_version: int | None = None,
        state: RunState | None = None,
    ) -> Run:
        """Changes what is given. Raises NotFoundError: there is none."""
        given = {
            "batch_size": batch_size,
            "settings": None if settings is None else runs.to_json(settings, "settings"),
            "policy_version": policy_version,
            "state": state,
        }
        changes = {column: value for column, value in given.items() if value is not None}
        return await self._writer.do(partial(runs.set_run, name=name, changes=changes))

    async def get_value(self, key: str) -> Any:
        """The JSON-like value of `key`; None when it was never set."""
        async with self._reading() as connection:
            return await runs.get_value(connection, key)

    async def set_value(self, key: str, json_value: Any) -> None:
        """Raises InputError: it is not JSON-like."""
        text = runs.to_json(json_value, "value")
        await self._writer.do(partial(runs.set_value, key=key, value=text))

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[AsyncConnection]:
        self._writer.check_open()
        with typed_failures():
            async with self._reader.connect() as connection:
                yield connection

    async def _in_thread(self, function: Callable[[A], T], argument: A) -> T:
        self._writer.check_open()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, function, argument)


def _check_seconds(seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds > 0):
        raise InputError("seconds must be a number above 0.", place="seconds")


def _decode_all(stored: Sequence[tuple[int, bytes]]) -> list[bytes]:
    return [compression.decode(encoding, body) for encoding, body in stored]
