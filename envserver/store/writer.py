"""The one task that writes: what waits while a commit is under way goes into the next one together.

In: operations from any number of callers. Out: to each its own result, after the commit that holds
it is durable; or its own error. When one breaks the transaction, all are run again, each alone, so
that it fails nobody else. Operations take effect in the order in which they were handed in.

A database that does not answer fails what waits, and is asked again by whoever comes when the next
try is due. Once the store is another process's, or its files are gone, nothing is done any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, TypeVar, cast

import structlog
from envserver_records.errors import ConflictError, StoreError, StoreFull, StoreLost, UsageError
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from ..rollouts.estimates import DISCOUNT
from .changes import Changes
from .database import Database
from .failures import is_unreachable, typed
from .groups import EncodedPut, put_all
from .lock import is_owner, lock_lost, save_time
from .retry import DatabaseUnreachable, RetryGate
from .statistics import StoreStatistics
from .transaction import Memory, Transaction, forget_written, load_memory, write_memory

log = structlog.get_logger(__name__)

T = TypeVar("T")
Operation = Callable[[Transaction], Awaitable[T]]

_MAX_BATCH_BYTES: Final = 32 * 1024 * 1024
_MAX_BATCH_ENTRIES: Final = 1024
_SAVE_TIME_SECONDS: Final = 10.0
"""Time may go back by so much when the server is killed and the wall's clock is set back."""


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

    def __init__(
        self, database: Database, memory: Memory, clock: Callable[[], float], owner: str | None
    ) -> None:
        self.memory = memory
        self.changes = Changes()
        self.activity = Changes()
        self._database = database
        self._clock = clock
        self._owner = owner
        self.statistics = StoreStatistics()
        self.discount = DISCOUNT
        self._queue: asyncio.Queue[_Entry | None] = asyncio.Queue()
        self._closed = False
        self._lost: StoreLost | None = None
        self._retry = RetryGate()
        self._memory_is_stale = False
        self._memory_is_written = True
        self._session = database.sessions
        self._time_saved = clock()

    async def put(self, groups: Sequence[EncodedPut]) -> list[bool]:
        """Stores groups; see `groups.put_all`."""
        return cast(list[bool], await self._submit(_Entry(_Put(groups))))

    async def do(self, operation: Operation[T]) -> T:
        """Runs `operation` in a transaction, perhaps more than once, of which one is committed."""
        return cast(T, await self._submit(_Entry(operation)))

    async def _submit(self, entry: _Entry) -> Any:
        self.check_open()
        self._retry.check()
        self._queue.put_nowait(entry)
        return await entry.answer

    @property
    def waiting(self) -> int:
        """Operations that no commit has taken up yet."""
        return self._queue.qsize()

    def check_open(self) -> None:
        """Raises StoreError: it is closed, or its task has ended. StoreLost: see `run`."""
        if self._lost is not None:
            raise StoreLost(self._lost.message, hint=self._lost.hint)
        if self._closed:
            raise StoreError("The store is closed.")

    def close(self) -> None:
        """Takes nothing more; `run` ends when all that was taken is done."""
        if not self._closed:
            self._closed = True
            self._queue.put_nowait(None)

    async def run(self) -> None:
        """Commits until closed. However it ends, nobody is left waiting.

        Raises:
            StoreLost: another process has opened the store, or its files are gone.
        """
        try:
            while batch := await self._next_batch():
                await self._commit(batch)
                if self._lost is not None:
                    raise self._lost
            await self._write_down()
        finally:
            self._closed = True
            self.changes.announce(-1)
            self.activity.announce(-1)
            while not self._queue.empty():
                entry = self._queue.get_nowait()
                if entry is not None:
                    _answer(entry, self._lost or _too_late())

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
            if not await self._commit_together(batch):
                for entry in batch:
                    await self._commit_together([entry])
        except BaseException:
            for entry in batch:
                _answer(entry, _too_late())
            raise

    async def _commit_together(self, batch: list[_Entry]) -> bool:
        """Answers all; or nobody, and is False, when one of several has broken the transaction."""
        began = time.perf_counter()
        try:
            self._check_way()
            outcomes = await self._transact([entry.work for entry in batch])
        except Exception as error:  # noqa: BLE001 (it goes to whoever asked)
            problem = await self._problem(error)
            is_one_of_them = len(batch) > 1 and not isinstance(
                problem, DatabaseUnreachable | StoreLost
            )
            if not is_one_of_them:
                for entry in batch:
                    _answer(entry, problem)
            return not is_one_of_them
        self._retry.worked()
        self.statistics.committed(len(batch), time.perf_counter() - began)
        for entry, outcome in zip(batch, outcomes, strict=True):
            _answer(entry, outcome)
        return True

    def _check_way(self) -> None:
        """Raises StoreError: the next try is not due. StoreLost: there will be none."""
        if self._lost is not None:
            raise self._lost
        self._retry.check()

    async def _problem(self, error: Exception) -> Exception:
        """`error` as one of ours, and what follows from it for those that come next."""
        problem = typed(error)
        if isinstance(problem, ConflictError):  # from connecting: the lock is not to be had
            problem = await self._why_locked()
        elif is_unreachable(error):
            problem = DatabaseUnreachable(str(problem))
        # A commit that failed may still have happened (a connection lost in the middle).
        self._memory_is_stale |= not isinstance(problem, StoreFull | UsageError)
        if isinstance(problem, StoreLost):
            self._lost = problem
        elif isinstance(problem, DatabaseUnreachable):
            self._retry.failed(problem)
        return problem

    async def _why_locked(self) -> StoreError:
        """Either another process has the store, or a lost connection of ours has not ended yet."""
        try:
            async with self._database.reader.connect() as connection:
                await self._require_held(connection)
            await self._database.end_former_session()
        except StoreLost as lost:
            return lost
        except Exception as error:  # noqa: BLE001 (it goes to whoever asked)
            return DatabaseUnreachable(str(typed(error)))
        return DatabaseUnreachable("The database has not yet ended a connection that was lost.")

    async def _require_held(self, connection: AsyncConnection) -> None:
        """Raises StoreLost: another process has opened the store since our last connection."""
        if self._owner is not None and not await is_owner(connection, self._owner):
            raise lock_lost()

    async def _write_down(self) -> None:
        """The next who opens the store does not begin before now, and need not count."""

        async def write(connection: AsyncConnection) -> None:
            await self._require_held(connection)
            await save_time(connection, self._clock())
            if not (self._memory_is_written or self._memory_is_stale):
                await write_memory(connection, self.memory)

        try:
            await self._database.writer.transact(write)
        except (SQLAlchemyError, OSError, ConflictError) as error:
            log.warning("not_written_down", error=str(typed(error)))

    async def _transact(self, works: Sequence[_Put | Operation[Any]]) -> list[Any]:
        async def work(connection: AsyncConnection) -> tuple[Transaction, list[Any]]:
            await self._know_again(connection)
            if self._memory_is_written:
                await forget_written(connection)
            tx = Transaction(connection, self.memory.copy(), self._clock(), self.discount)
            outcomes = await _outcomes(tx, works)
            if self._is_time_due(tx):
                await save_time(connection, tx.now)
            return tx, outcomes

        self._database.check_files()
        tx, outcomes = await self._database.writer.transact(work)
        self._database.check_files()
        self.memory = tx.memory
        self._memory_is_written = False
        self.changes.announce(self.memory.changes)
        self.activity.announce(self.memory.activity)
        if self._is_time_due(tx):
            self._time_saved = tx.now
        return outcomes

    def _is_time_due(self, tx: Transaction) -> bool:
        return tx.now >= self._time_saved + _SAVE_TIME_SECONDS

    async def _know_again(self, connection: AsyncConnection) -> None:
        """Reads what is remembered from the database, where that may have changed behind us."""
        is_new = self._session != self._database.sessions
        if is_new:
            await self._require_held(connection)
        if is_new or self._memory_is_stale:
            loaded = await load_memory(connection, trust_written=False)
            loaded.conflicting_puts = self.memory.conflicting_puts
            loaded.changes = self.memory.changes + 1
            loaded.activity = self.memory.activity + 1
            self.memory = loaded
            self._memory_is_stale = False
            self._session = self._database.sessions


async def _outcomes(tx: Transaction, works: Sequence[_Put | Operation[Any]]) -> list[Any]:
    outcomes: list[Any] = []
    for is_put, side_by_side in groupby(works, key=lambda work: isinstance(work, _Put)):
        if is_put:
            outcomes += await _put_together(tx, cast("Iterable[_Put]", side_by_side))
        else:
            for operation in cast("Iterable[Operation[Any]]", side_by_side):
                outcomes.append(await _outcome(tx, operation))
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


def _too_late() -> StoreError:
    return StoreError("The store was closed before this was stored.")


def _answer(entry: _Entry, outcome: Any) -> None:
    if entry.answer.done():  # its caller was cancelled and no longer listens
        return
    if isinstance(outcome, Exception):
        entry.answer.set_exception(outcome)
    else:
        entry.answer.set_result(outcome)
