"""The SQL of groups and of task estimates. The caller begins the transactions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

import msgspec
import structlog
from envserver_records.errors import InputError, NotFoundError
from envserver_records.records import Split
from sqlalchemy import (
    BindParameter,
    Column,
    ColumnElement,
    Dialect,
    Insert,
    Select,
    Update,
    and_,
    bindparam,
    func,
    insert,
    literal_column,
    select,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.schema import Table

from ..rollouts.estimates import UNTRIED, Estimate, Scored, updated
from . import packed
from .packed import facts_row
from .rows import FIRST_STATES, SETTLED, GroupPut, GroupRow
from .schema import SHARED, bodies, deliveries, dropped_groups, estimates, group_facts, groups
from .transaction import Transaction, chunks


def begins_with(column: Column[str], prefix: str, dialect: Dialect) -> ColumnElement[bool]:
    """Returns the condition that `column` begins with `prefix`. SQLite orders texts by their bytes,
    so it looks at a part of the column's index only; PostgreSQL, by the language's rules, at all.
    """
    begins = func.substr(column, 1, len(prefix)) == prefix
    if dialect.name != "sqlite" or not prefix:
        return begins
    after = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    return and_(column >= prefix, column < after, begins)


_LENGTHS: Final = (1, 8, 64, 500)
"""Lengths of lists; databases limit a statement's parameters."""


class Statement:
    """A statement whose parameters are given as a tuple, in the order of `names`; none has a type
    whose values SQLAlchemy converts."""

    def __init__(self, statement: Insert | Select[Any] | Update, names: Sequence[str]) -> None:
        self._names: Final = list(names)
        self._statement: Final = statement
        self._texts: dict[str, str] = {}

    async def one(self, connection: AsyncConnection, values: tuple[Any, ...]) -> Iterable[Any]:
        return await connection.exec_driver_sql(self._text(connection), values)

    async def many(self, connection: AsyncConnection, values: Sequence[tuple[Any, ...]]) -> None:
        await connection.exec_driver_sql(self._text(connection), list(values))

    def _text(self, connection: AsyncConnection) -> str:
        text = self._texts.get(connection.dialect.name)
        if text is None:
            text = self._texts[connection.dialect.name] = self._compiled(connection)
        return text

    def _compiled(self, connection: AsyncConnection) -> str:
        keys = self._names if isinstance(self._statement, Insert) else None
        made = self._statement.compile(dialect=connection.dialect, column_keys=keys)
        assert getattr(made, "positiontup", None) == self._names
        return str(made)


class ListStatement:
    """A query for rows that have one of a list of values, of any length. It is compiled for a few
    lengths; the last value fills up. `names`: its other parameters, which stand before the list."""

    def __init__(
        self, query: Callable[[Sequence[BindParameter[Any]]], Select[Any]], names: Sequence[str]
    ) -> None:
        self._query = query
        self._names = names
        self._by_length: dict[int, Statement] = {}

    async def all(
        self, connection: AsyncConnection, values: tuple[Any, ...], listed: Sequence[Any]
    ) -> list[Any]:
        rows: list[Any] = []
        for start in range(0, len(listed), _LENGTHS[-1]):
            part = listed[start : start + _LENGTHS[-1]]
            length = next(length for length in _LENGTHS if length >= len(part))
            filled = (*part, *[part[-1]] * (length - len(part)))
            rows += await self._of(length).one(connection, (*values, *filled))
        return rows

    def _of(self, length: int) -> Statement:
        if length not in self._by_length:
            listed: list[BindParameter[Any]] = [bindparam(f"listed_{n}") for n in range(length)]
            names = [*self._names, *(parameter.key for parameter in listed)]
            self._by_length[length] = Statement(self._query(listed), names)
        return self._by_length[length]


def insert_into(table: Table) -> Statement:
    """Returns the statement that inserts rows as tuples of all columns of `table` in order."""
    return Statement(insert(table), [column.name for column in table.columns])


# A stored group counts once, because it counts when it is stored. A group that was scored and
# dropped counts once, because its id is kept. The arithmetic is in `rollouts.estimates`.


class EstimateRow(msgspec.Struct, frozen=True, kw_only=True):
    """A stored estimate. `number`: order in which tasks were first scored; `scored_at`: the last
    time."""

    number: int
    env: str
    split: Split
    task_id: str
    estimate: Estimate
    scored_at: float


async def count_stored(tx: Transaction, news: Iterable[Scored | None]) -> None:
    by_stream: dict[tuple[str, Split], list[Scored]] = {}
    for scored in news:
        if scored is not None:
            by_stream.setdefault((scored.env, scored.split), []).append(scored)
    for (env, split), of_stream in by_stream.items():
        await _count(tx, env, split, of_stream)


async def count_dropped(tx: Transaction, news: Sequence[Scored]) -> int:
    """Counts scored groups that are not stored in the estimates of their tasks, each id once;
    `put` counts those that it stores. Returns how many are new."""
    known = await counted_drops(tx.connection, [scored.group_id for scored in news])
    new = {scored.group_id: scored for scored in news if scored.group_id not in known}
    if new:
        await tx.connection.execute(
            insert(dropped_groups), [{"group_id": group_id} for group_id in new]
        )
        await count_stored(tx, new.values())
    return len(new)


async def _count(tx: Transaction, env: str, split: Split, news: Sequence[Scored]) -> None:
    numbers: dict[str, int] = {}
    now: dict[str, Estimate] = {}
    task_ids = list({scored.task_id for scored in news})
    for number, task_id, *columns in await _FOUND.all(tx.connection, (env, split), task_ids):
        numbers[task_id], now[task_id] = number, Estimate(*columns)
    for scored in news:
        now[scored.task_id] = updated(now.get(scored.task_id, UNTRIED), scored, tx.discount)
    known, new = [], []
    for task_id, estimate in now.items():
        row = (*msgspec.structs.astuple(estimate), tx.now)
        if task_id in numbers:
            known.append((*row, numbers[task_id]))
        else:
            new.append((env, split, task_id, *row))
    if known:
        await _CHANGE.many(tx.connection, known)
    if new:
        await _ADD.many(tx.connection, new)


_COLUMNS: Final = ("attempts", "weight", "solved", "policy_version")
_CHANGED: Final = [*_COLUMNS, "scored_at"]
_ESTIMATE: Final = [estimates.c[name] for name in _COLUMNS]
_FOUND: Final = ListStatement(
    lambda ids: select(estimates.c.number, estimates.c.task_id, *_ESTIMATE).where(
        estimates.c.env == bindparam("of_env"),
        estimates.c.split == bindparam("of_split"),
        estimates.c.task_id.in_(ids),
    ),
    ["of_env", "of_split"],
)
_CHANGE: Final = Statement(
    update(estimates)
    .where(estimates.c.number == bindparam("of_number"))
    .values({name: bindparam(name) for name in _CHANGED}),
    [*_CHANGED, "of_number"],
)
_last: Final = estimates.alias("last")
# Written out: values of its own would be parameters.
_NEXT_NUMBER: Final = func.coalesce(func.max(_last.c.number), literal_column("0")) + literal_column(
    "1"
)
_ADD: Final = Statement(
    insert(estimates).values(number=select(_NEXT_NUMBER).scalar_subquery()),
    ["env", "split", "task_id", *_CHANGED],
)


async def estimates_of(
    connection: AsyncConnection, env: str, split: Split, task_ids: Sequence[str]
) -> dict[str, Estimate]:
    """Returns the estimates by task id, for those of these tasks that were ever scored."""
    rows = await _FOUND.all(connection, (env, split), task_ids)
    return {task_id: Estimate(*columns) for _, task_id, *columns in rows}


async def estimates_after(
    connection: AsyncConnection,
    after: int,
    limit: int,
    *,
    env: str | None = None,
    split: Split | None = None,
) -> list[EstimateRow]:
    """Returns up to `limit` estimates after number `after`, in order."""
    query = select(estimates).where(estimates.c.number > after)
    if env is not None:
        query = query.where(estimates.c.env == env)
    if split is not None:
        query = query.where(estimates.c.split == split)
    query = query.order_by(estimates.c.number).limit(limit)
    return [
        EstimateRow(
            number=number,
            env=env,
            split=split,
            task_id=task_id,
            estimate=Estimate(*known),
            scored_at=scored_at,
        )
        for number, env, split, task_id, *known, scored_at in await connection.execute(query)
    ]


async def counted_drops(connection: AsyncConnection, group_ids: Sequence[str]) -> set[str]:
    """Returns those of these groups that were scored and counted, but not stored."""
    found: set[str] = set()
    for part in chunks(group_ids):
        query = select(dropped_groups.c.group_id).where(dropped_groups.c.group_id.in_(part))
        found.update((await connection.execute(query)).scalars())
    return found


async def existing(connection: AsyncConnection, group_ids: Sequence[str]) -> set[str]:
    """Returns those of these ids that were ever stored, delivered or not."""
    return set(await seqs_of(connection, list(set(group_ids))))


async def made(connection: AsyncConnection, group_ids: Sequence[str]) -> set[str]:
    """Returns those of these ids that were ever stored or counted as dropped."""
    stored = await seqs_of(connection, group_ids)
    return {*stored, *await counted_drops(connection, group_ids)}


async def count_with_prefix(connection: AsyncConnection, prefix: str, table: Table = groups) -> int:
    """Counts the groups ever stored whose id begins with `prefix`."""
    begins = begins_with(table.c.group_id, prefix, connection.dialect)
    return await connection.scalar(select(func.count()).select_from(table).where(begins)) or 0


async def count_made(connection: AsyncConnection, prefix: str) -> int:
    """Counts the groups that were stored or counted as dropped, by the prefix of their ids."""
    stored = await count_with_prefix(connection, prefix)
    return stored + await count_with_prefix(connection, prefix, dropped_groups)


log = structlog.get_logger(__name__)

# Written out, not bound: SQLite takes a partial index only when it can read the condition.
QUEUED: Final = deliveries.c.state == literal_column("'queued'")
_BUFFERED: Final = deliveries.c.state == literal_column("'buffered'")
_named: Final = groups.alias("named")


@dataclass(frozen=True)
class EncodedPut:
    """A group to be put, with its body encoded for the database."""

    put: GroupPut
    encoding: int
    stored: bytes


def encode_puts(puts: Sequence[GroupPut]) -> list[EncodedPut]:
    """Checks groups and compresses their bodies. CPU work: run it in a thread."""
    for index, put in enumerate(puts):
        if put.state not in FIRST_STATES:
            raise InputError(
                f"A group cannot be put as {put.state}.", place=f"groups[{index}].state"
            )
        if not put.group_id:
            raise InputError("A group needs an id.", place=f"groups[{index}].group_id")
    return [EncodedPut(put, *packed.encode(put.body)) for put in puts]


async def put_all(tx: Transaction, puts: Sequence[EncodedPut]) -> list[bool]:
    """Stores the groups whose id is new; returns for each whether it was stored."""
    known = await seqs_of(tx.connection, list({item.put.group_id for item in puts}))
    new: dict[str, EncodedPut] = {}
    accepted: list[bool] = []
    for item in puts:
        group_id = item.put.group_id
        is_new = group_id not in known and group_id not in new
        accepted.append(is_new)
        if is_new:
            new[group_id] = item
            continue
        first = new[group_id].put.body if group_id in new else None
        if first is None:
            first = await _body(tx.connection, known[group_id])
        if first is not None and first != item.put.body:
            tx.memory.conflicting_puts += 1
            log.warning("group_put_again_with_other_content", group_id=group_id, env=item.put.env)
    if new:
        await _insert(tx, list(new.values()))
        await count_stored(tx, [item.put.scored for item in new.values()])
    return accepted


async def seqs_of(connection: AsyncConnection, group_ids: Sequence[str]) -> dict[str, int]:
    """Returns `seq` by id, for those groups that were ever stored."""
    return {row[0]: row[1] for row in await _SEQS.all(connection, (), group_ids)}


_SEQS: Final = ListStatement(
    lambda ids: select(groups.c.group_id, groups.c.seq).where(groups.c.group_id.in_(ids)), []
)


async def _body(connection: AsyncConnection, seq: int) -> bytes | None:
    query = select(bodies.c.encoding, bodies.c.body).where(bodies.c.seq == seq)
    row = (await connection.execute(query)).one_or_none()
    try:
        return None if row is None else packed.decode(row.encoding, row.body)
    except packed.DamagedBody as error:
        log.error("stored_body_is_damaged", seq=seq, error=str(error))
        return None


async def _insert(tx: Transaction, items: Sequence[EncodedPut]) -> None:
    numbered = list(enumerate(items, tx.memory.next_seq))
    tx.memory.next_seq += len(items)
    await _into_groups.many(
        tx.connection, [(seq, *_group_of(item.put), tx.now) for seq, item in numbered]
    )
    facts = [
        facts_row(seq, item.put.env, item.put.facts) for seq, item in numbered if item.put.facts
    ]
    if facts:
        await _into_facts.many(tx.connection, facts)
    await _into_bodies.many(
        tx.connection, [(seq, item.encoding, item.stored) for seq, item in numbered]
    )
    tx.memory.stored_bytes += sum(len(item.stored) for item in items)
    queues = tx.memory.fan_out()
    rows = []
    for seq, item in numbered:
        state = item.put.state
        # Buffered groups are in the shared queue only; `move` adds them to the others.
        for queue in (SHARED, *queues) if state == "queued" else (SHARED,):
            rows.append(_delivery(queue, seq, item, tx.now))
            tx.memory.tally(queue, item.put.env, state, 1)
        if state == "queued":
            tx.memory.queued(seq, item.put.policy_version)
    await _into_deliveries.many(tx.connection, rows)


# Rows are tuples in the order of the table's columns.
_into_groups: Final = insert_into(groups)
_into_bodies: Final = insert_into(bodies)
_into_facts: Final = insert_into(group_facts)
_into_deliveries: Final = insert_into(deliveries)


_group_of: Final = attrgetter(*map(str, groups.columns.keys()[1:-1]))


def _delivery(queue: str, seq: int, item: EncodedPut, now: float) -> tuple[object, ...]:
    put = item.put
    settled_at = now if put.state in SETTLED else None
    size = len(item.stored)
    return (queue, seq, put.env, put.policy_version, size, put.state, None, settled_at)


def rows_in(queue: str) -> Select[Any]:
    """Selects all groups of a queue, with the columns of a `GroupRow` in order."""
    both = deliveries.join(groups, deliveries.c.seq == groups.c.seq)
    return select(*group_columns()).select_from(both).where(deliveries.c.queue == queue)


def group_columns() -> list[Column[Any]]:
    """Returns the columns of a `GroupRow` in order, of `groups` and `deliveries`."""
    names = GroupRow.__struct_fields__
    return [groups.c[name] if name in groups.c else deliveries.c[name] for name in names]


async def pending(connection: AsyncConnection) -> list[GroupRow]:
    """Returns the queued and buffered groups of the shared queue, oldest first."""
    rows: list[GroupRow] = []
    for waiting in (QUEUED, _BUFFERED):
        query = rows_in(SHARED).where(waiting).order_by(deliveries.c.seq)
        rows += [GroupRow(*row) for row in await connection.execute(query)]
    return sorted(rows, key=lambda row: row.seq)


async def arrived_after(connection: AsyncConnection, seq: int, limit: int) -> list[GroupRow]:
    """Returns up to `limit` kept groups that arrived after number `seq`, in order."""
    after = deliveries.c.seq > seq
    query = rows_in(SHARED).where(after).order_by(deliveries.c.seq).limit(limit)
    return [GroupRow(*row) for row in await connection.execute(query)]


async def rows_of(
    connection: AsyncConnection, group_ids: Sequence[str], queue: str = SHARED
) -> list[GroupRow]:
    """Returns the groups of a queue with these ids, in order, each once."""
    wanted = list(dict.fromkeys(group_ids))
    found = await kept_rows(connection, wanted, queue)
    await _require(connection, wanted, found)
    return [found[group_id] for group_id in wanted]


async def kept_rows(
    connection: AsyncConnection, group_ids: Sequence[str], queue: str
) -> dict[str, GroupRow]:
    found: dict[str, GroupRow] = {}
    for part in chunks(group_ids):
        # Select by seq: otherwise SQLite may scan every delivery of the queue.
        numbers = select(_named.c.seq).where(_named.c.group_id.in_(part))
        query = rows_in(queue).where(deliveries.c.seq.in_(numbers))
        found.update((row.group_id, GroupRow(*row)) for row in await connection.execute(query))
    return found


async def stored_bodies(
    connection: AsyncConnection, group_ids: Sequence[str]
) -> list[tuple[int, bytes]]:
    """Like `bodies`, but returns each body's encoding and encoded bytes (`packed.py`)."""
    found: dict[str, tuple[int, bytes]] = {}
    both = select(groups.c.group_id, bodies.c.encoding, bodies.c.body).join_from(
        groups, bodies, groups.c.seq == bodies.c.seq
    )
    for part in chunks(list(dict.fromkeys(group_ids))):
        for row in await connection.execute(both.where(groups.c.group_id.in_(part))):
            found[row.group_id] = (row.encoding, row.body)
    await _require(connection, group_ids, found)
    return [found[group_id] for group_id in group_ids]


async def _require(
    connection: AsyncConnection, wanted: Sequence[str], found: dict[str, Any]
) -> None:
    missing = [group_id for group_id in wanted if group_id not in found]
    if not missing:
        return
    first = missing[0]
    if await seqs_of(connection, [first]):
        raise NotFoundError(
            f"Group {first} is no longer kept: it was delivered long ago.",
            hint="See --retention.acked_hours.",
            group_id=first,
        )
    raise NotFoundError(f"There is no group {first}.", group_id=first)
