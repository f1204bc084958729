"""The task that commits all changes; changes that wait during a commit share the next one.

Each caller gets its result after the commit that contains it is durable, or its own error. If an
operation breaks the transaction, all of them are run again one by one. Operations take effect in
the order of arrival. If the database does not answer, waiting operations fail, and the first one
after a pause tries again. After another process has opened the store, every operation fails."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, TypeVar, cast

import msgspec
import structlog
from envserver_records.errors import ConflictError, StoreError, StoreFull, StoreLost, UsageError
from sqlalchemy import insert, text, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from ..rollouts.estimates import DISCOUNT
from .database import Database, DatabaseUnreachable, RetryGate, is_unreachable, typed
from .groups import EncodedPut, put_all
from .leases import get_value, to_json
from .reserve import free_bytes_inside
from .rows import Changes, StoreStatistics
from .schema import values
from .transaction import Memory, Transaction, forget_written, load_memory, write_memory

# After a lost connection is re-established, the owner recorded here shows whether another process
# opened the store in between. If so, what this process has in memory is outdated and it must stop.
# While the connection lasts, the database's own lock keeps other processes out. Servers that share
# a store read here which of them has it open.

_HOLDER: Final = "store.holder"
_TIME: Final = "store.time"
_LEADER: Final = "store.leader"
# The condition is looked at again once another owner's change of the row is committed: a process
# that has lost the store never overwrites what its successor says.
_RENEW: Final = text(
    "UPDATE \"values\" SET value = :row WHERE key = :key AND CAST(value AS json)->>'owner' = :owner"
)


@dataclass(frozen=True)
class StoreLock:
    """The ownership of an open store.

    Args:
        owner: random id of the owning process; None for SQLite, whose file lock cannot be lost.
        last_time: the latest store time that was saved; 0 for a new store.
    """

    owner: str | None
    last_time: float


class Leader(msgspec.Struct, frozen=True):
    """What the process that has a PostgreSQL store open says to the servers that wait for it.

    Args:
        owner: its random id. Only who can read the database knows it.
        pid: process id of the session that holds the lock; 0: this process shares the store with
            no other, and no process may end its session.
        beat: grows while the process lives.
        url: where it answers; "" until it does.
        since: when it became the leader, in seconds since the epoch.
    """

    owner: str
    pid: int = 0
    beat: int = 0
    url: str = ""
    since: float = 0.0


async def acquire(connection: AsyncConnection) -> StoreLock:
    """Records this process as the owner. The caller must hold the database's lock."""
    owner = uuid.uuid4().hex
    await _write(connection, _HOLDER, owner)
    await _write(connection, _LEADER, msgspec.to_builtins(Leader(owner)))
    return StoreLock(owner, (await read_lock(connection)).last_time)


async def read_lock(connection: AsyncConnection) -> StoreLock:
    """Like `acquire`, but writes nothing: for databases whose lock cannot be lost."""
    return StoreLock(None, float(await get_value(connection, _TIME) or 0.0))


async def is_owner(connection: AsyncConnection, owner: str) -> bool:
    return bool(await get_value(connection, _HOLDER) == owner)


async def read_leader(connection: AsyncConnection) -> Leader | None:
    found = await get_value(connection, _LEADER)
    return None if found is None else msgspec.convert(found, Leader)


async def renew(connection: AsyncConnection, leader: Leader) -> bool:
    """Writes `leader`; returns False, and writes nothing, if another process has acquired the
    store."""
    row = to_json(msgspec.to_builtins(leader), _LEADER)
    named = {"row": row, "key": _LEADER, "owner": leader.owner}
    return bool((await connection.execute(_RENEW, named)).rowcount)


def lock_lost() -> StoreLost:
    return StoreLost(
        "Another process has opened the store since its database was last reached.",
        hint="Only one process may have it open; this process stops.",
    )


async def save_time(connection: AsyncConnection, now: float) -> None:
    await _write(connection, _TIME, now)


async def _write(connection: AsyncConnection, key: str, value: Any) -> None:
    text = to_json(value, key)
    changed = await connection.execute(update(values).where(values.c.key == key).values(value=text))
    if not changed.rowcount:
        await connection.execute(insert(values).values(key=key, value=text))


log = structlog.get_logger(__name__)

T = TypeVar("T")
Operation = Callable[[Transaction], Awaitable[T]]

_GATHERING_ROUNDS: Final = 4
"""Rounds of the event loop before a commit. A request on a new connection needs so many to become
an operation: waiting lets it share the commit, which costs more than the request."""
_MAX_BATCH_BYTES: Final = 32 * 1024 * 1024
_MAX_BATCH_ENTRIES: Final = 1024
_SAVE_TIME_SECONDS: Final = 10.0
"""Seconds between saves of the time. Time may go back by this much if the server is killed and the
system clock is set back."""


@dataclass(frozen=True)
class _Put:
    """A put. Adjacent puts become one statement, which functions could not."""

    groups: Sequence[EncodedPut]


@dataclass(frozen=True)
class _Entry:
    """Work, and the future of its caller. `adds`: it stores what is not acknowledged yet, and is
    refused while the disk is full."""

    work: _Put | Operation[Any]
    adds: bool = False
    answer: asyncio.Future[Any] = field(default_factory=asyncio.Future)

    def size_bytes(self) -> int:
        return sum(len(g.stored) for g in self.work.groups) if isinstance(self.work, _Put) else 0


class Writer:
    """Owns the connection that writes. The other methods return only while `run` is running."""

    def __init__(
        self, database: Database, memory: Memory, clock: Callable[[], float], owner: str | None
    ) -> None:
        self.memory = memory
        self.changes = Changes()
        self.activity = Changes()
        self._database = database
        self._clock = clock
        self.owner = owner
        self.statistics = StoreStatistics()
        self.discount = DISCOUNT
        self._queue: deque[_Entry] = deque()
        self._work_came = asyncio.Event()
        self._closed = False
        self._lost: StoreLost | None = None
        self.retry = RetryGate()
        self._memory_is_stale = False
        self._memory_is_written = True
        self._session = database.sessions
        self._time_saved = clock()

    async def put(self, groups: Sequence[EncodedPut]) -> list[bool]:
        accepted = cast(list[bool], await self._submit(_Entry(_Put(groups), adds=True)))
        for item, is_new in zip(groups, accepted, strict=True):
            if is_new:
                self.statistics.stored(item.put.env, item.put.facts)
        return accepted

    async def do(self, operation: Operation[T], *, adds: bool = False) -> T:
        """Runs `operation` in a transaction. It may run more than once; one run is committed.
        `adds`: refuse it while the disk is full, as a put."""
        return cast(T, await self._submit(_Entry(operation, adds)))

    async def _submit(self, entry: _Entry) -> Any:
        self.check_open()
        self.retry.check()
        self._queue.append(entry)
        self._work_came.set()
        return await entry.answer

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def check_open(self) -> None:
        """Raises StoreError if the store is closed or its task ended, and StoreLost as `run`."""
        if self._lost is not None:
            raise StoreLost(self._lost.message, hint=self._lost.hint)
        if self._closed:
            raise StoreError("The store is closed.")

    def close(self) -> None:
        """Refuses new operations; `run` ends when all accepted ones are done."""
        self._closed = True
        self._work_came.set()

    async def run(self) -> None:
        """Commits until closed. However it ends, every waiting caller gets an answer."""
        try:
            while self._queue or not self._closed:
                await self._commit(await self._next_batch())
                if self._lost is not None:
                    raise self._lost
            await self._write_down()
        finally:
            self._closed = True
            self.changes.announce(-1)
            self.activity.announce(-1)
            while self._queue:
                _answer(self._queue.popleft(), self._lost or _too_late())

    async def _next_batch(self) -> list[_Entry]:
        await self._work_came.wait()
        for _ in range(_GATHERING_ROUNDS):
            await asyncio.sleep(0)
        batch: list[_Entry] = []
        size_bytes = 0
        while self._queue and len(batch) < _MAX_BATCH_ENTRIES and size_bytes < _MAX_BATCH_BYTES:
            entry = self._queue.popleft()
            if not entry.answer.cancelled():
                batch.append(entry)
                size_bytes += entry.size_bytes()
        if not (self._queue or self._closed):
            self._work_came.clear()
        return batch

    async def _commit(self, batch: list[_Entry]) -> None:
        if not batch:
            return
        try:
            if not await self._commit_together(batch):
                for entry in batch:
                    # False: the reserve was freed for it.
                    if not await self._commit_together([entry]):
                        await self._commit_together([entry])
        except BaseException:
            for entry in batch:
                _answer(entry, _too_late())
            raise

    async def _commit_together(self, batch: list[_Entry]) -> bool:
        """Commits and answers all; returns False, with no caller answered, if a second try can do
        better: one of several broke the transaction, or the reserve was freed."""
        began = time.perf_counter()
        try:
            if self._lost is not None:
                raise self._lost
            self.retry.check()
            await self._check_space(batch)
            outcomes = await self._transact([entry.work for entry in batch])
        except Exception as error:  # noqa: BLE001 (the caller gets it)
            problem = await self._problem(error)
            again = (
                not isinstance(problem, DatabaseUnreachable | StoreLost)
                if len(batch) > 1
                else self._may_use_reserve(batch[0], problem)
            )
            if not again:
                for entry in batch:
                    _answer(entry, problem)
            return not again
        self.retry.worked()
        self.statistics.committed(len(batch), time.perf_counter() - began)
        for entry, outcome in zip(batch, outcomes, strict=True):
            _answer(entry, outcome)
        return True

    async def _check_space(self, batch: Sequence[_Entry]) -> None:
        """Raises StoreFull if the disk is full and the batch adds more than fits into the space
        that removed groups left in the file."""
        reserve = self._database.reserve
        if reserve is not None and reserve.full:
            await asyncio.to_thread(reserve.look_for_space)
        if reserve is not None and reserve.full and any(entry.adds for entry in batch):
            inside = await self._database.writer.transact(free_bytes_inside)
            if inside < sum(entry.size_bytes() for entry in batch):
                raise reserve.refusal()

    def _may_use_reserve(self, entry: _Entry, problem: Exception) -> bool:
        """Notes that the disk is full; returns whether the reserve was freed for `entry`."""
        reserve = self._database.reserve
        if not isinstance(problem, StoreFull) or reserve is None:
            return False
        reserve.full = True
        return not entry.adds and reserve.use()

    @property
    def disk_problem(self) -> str:
        reserve = self._database.reserve
        return reserve.refusal().message if reserve is not None and reserve.full else ""

    async def _problem(self, error: Exception) -> Exception:
        problem = typed(error)
        if isinstance(problem, ConflictError):  # raised while connecting: the lock is taken
            problem = await self._why_locked()
        elif is_unreachable(error):
            problem = DatabaseUnreachable(str(problem))
        # A failed commit may still have happened (the connection was lost during it).
        self._memory_is_stale |= not isinstance(problem, StoreFull | UsageError)
        if isinstance(problem, StoreLost):
            self._lost = problem
        elif isinstance(problem, DatabaseUnreachable):
            self.retry.failed(problem)
        return problem

    async def _why_locked(self) -> StoreError:
        try:
            async with self._database.reader.connect() as connection:
                await self._require_held(connection)
            await self._database.end_former_session()
        except StoreLost as lost:
            return lost
        except Exception as error:  # noqa: BLE001 (the caller gets it)
            return DatabaseUnreachable(str(typed(error)))
        return DatabaseUnreachable("The database has not yet ended a connection that was lost.")

    async def _require_held(self, connection: AsyncConnection) -> None:
        if self.owner is not None and not await is_owner(connection, self.owner):
            raise lock_lost()

    async def _write_down(self) -> None:
        async def write(connection: AsyncConnection) -> None:
            await self._require_held(connection)
            await save_time(connection, self._clock())
            if not (self._memory_is_written or self._memory_is_stale):
                await write_memory(connection, self.memory)

        try:
            await self._database.writer.transact(write)
        except (SQLAlchemyError, OSError, ConflictError) as error:
            log.warning("write_not_recorded", error=str(typed(error)))

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
        """Loads the memory again if the database may have changed without this process."""
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
    """Returns the result, or the UsageError as a value: it concerns no other operation."""
    try:
        return await operation(tx)
    except UsageError as error:
        return error


def _too_late() -> StoreError:
    return StoreError("The store was closed before this was stored.")


def _answer(entry: _Entry, outcome: Any) -> None:
    if entry.answer.done():  # its caller was cancelled
        return
    if isinstance(outcome, Exception):
        entry.answer.set_exception(outcome)
    else:
        entry.answer.set_result(outcome)
