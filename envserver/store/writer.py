"""The one task that writes: what waits while a commit is under way goes into the next one together.

In: operations from any number of callers. Out: to each its own result, after the commit that holds
it is durable; or its own error. When one breaks the transaction, all are run again, each alone, so
that it fails nobody else. Operations take effect in the order in which they were handed in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, TypeVar, cast

from sqlalchemy.ext.asyncio import AsyncEngine

from ..errors import StoreError, UsageError
from .failures import typed
from .groups import EncodedPut, put_all
from .transaction import Memory, Transaction, load_memory

T = TypeVar("T")
Operation = Callable[[Transaction], Awaitable[T]]

_MAX_BATCH_BYTES: Final = 32 * 1024 * 1024
_MAX_BATCH_ENTRIES: Final = 1024


@dataclass(frozen=True)
class _Put:
    """Puts are data, not functions: those that stand side by side become one statement."""

    groups: Sequence[EncodedPut]


@dataclass(frozen=True)
class _Entry:
    work: _Put | Operation[Any]
    answer: asyncio.Future[Any] = field(default_factory=asyncio.Future)

    def size_bytes(self) -> int:
        return sum(len(g.stored) for g in self.work.groups) if isinstance(self.work, _Put) else 0


class Writer:
    """Owns the writing connection. `run` must be running for the others to return."""

    def __init__(self, engine: AsyncEngine, memory: Memory, clock: Callable[[], float]) -> None:
        self.memory = memory
        self._engine = engine
        self._clock = clock
        self._queue: asyncio.Queue[_Entry | None] = asyncio.Queue()
        self._closed = False
        self._memory_is_stale = False

    async def put(self, groups: Sequence[EncodedPut]) -> list[bool]:
        """Stores groups; see `groups.put_all`."""
        return cast(list[bool], await self._submit(_Entry(_Put(groups))))

    async def do(self, operation: Operation[T]) -> T:
        """Runs `operation` in a transaction, perhaps more than once, of which one is committed."""
        return cast(T, await self._submit(_Entry(operation)))

    async def _submit(self, entry: _Entry) -> Any:
        self.check_open()
        self._queue.put_nowait(entry)
        return await entry.answer

    def check_open(self) -> None:
        """Raises StoreError: it is closed, or its task has ended."""
        if self._closed:
            raise StoreError("The store is closed.")

    def close(self) -> None:
        """Takes nothing more; `run` ends when all that was taken is done."""
        if not self._closed:
            self._closed = True
            self._queue.put_nowait(None)

    async def run(self) -> None:
        """Commits until closed. However it ends, nobody is left waiting."""
        try:
            while batch := await self._next_batch():
                await self._commit(batch)
        finally:
            self._closed = True
            while not self._queue.empty():
                entry = self._queue.get_nowait()
                if entry is not None:
                    _answer(entry, StoreError("The store was closed before this was stored."))

    async def _next_batch(self) -> list[_Entry]:
        """Everything that waits, up to a bound; empty after `close`."""
        batch: list[_Entry] = []
        size_bytes = 0
        while not batch or not self._queue.empty():
            entry = await self._queue.get()
            if entry is None:
                self._queue.put_nowait(None)
                break
            if entry.answer.cancelled():
                continue
            batch.append(entry)
            size_bytes += entry.size_bytes()
            if len(batch) >= _MAX_BATCH_ENTRIES or size_bytes >= _MAX_BATCH_BYTES:
                break
        return batch

    async def _commit(self, batch: list[_Entry]) -> None:
        try:
            outcomes = await self._transact([entry.work for entry in batch])
        except Exception as error:  # noqa: BLE001 (it goes to whoever asked)
            self._memory_is_stale = True
            if len(batch) == 1:
                _answer(batch[0], typed(error))
                return
            for entry in batch:
                await self._commit([entry])
            return
        except BaseException:
            for entry in batch:
                _answer(entry, StoreError("The store was closed before this was stored."))
            raise
        for entry, outcome in zip(batch, outcomes, strict=True):
            _answer(entry, outcome)

    async def _transact(self, works: Iterable[_Put | Operation[Any]]) -> list[Any]:
        async with self._engine.begin() as connection:
            if self._memory_is_stale:
                # A commit that failed may still have happened (a connection lost in the middle).
                self.memory = await load_memory(connection, self.memory.conflicting_puts)
                self._memory_is_stale = False
            tx = Transaction(connection, self.memory.copy(), self._clock())
            outcomes: list[Any] = []
            for is_put, side_by_side in groupby(works, key=lambda work: isinstance(work, _Put)):
                if is_put:
                    outcomes += await _put_together(tx, cast("Iterable[_Put]", side_by_side))
                else:
                    for operation in cast("Iterable[Operation[Any]]", side_by_side):
                        outcomes.append(await _outcome(tx, operation))
        self.memory = tx.memory
        return outcomes


async def _put_together(tx: Transaction, puts: Iterable[_Put]) -> list[list[bool]]:
    parts = list(puts)
    accepted = iter(await put_all(tx, [group for part in parts for group in part.groups]))
    return [[next(accepted) for _ in part.groups] for part in parts]


async def _outcome(tx: Transaction, operation: Operation[Any]) -> Any:
    """Its result, or the caller's mistake as a value: that concerns no other operation."""
    try:
        return await operation(tx)
    except UsageError as error:
        return error


def _answer(entry: _Entry, outcome: Any) -> None:
    if entry.answer.done():  # its caller was cancelled and no longer listens
        return
    if isinstance(outcome, Exception):
        entry.answer.set_exception(outcome)
    else:
        entry.answer.set_result(outcome)
