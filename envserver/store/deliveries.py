"""The SQL of deliveries: which groups of a queue are next, and how their states change.

Every change of a delivery goes through `advance`, which checks the table of transitions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import Any, Final

import msgspec
import structlog
from envserver_records.errors import StoreError
from sqlalchemy import (
    ColumnElement,
    Select,
    delete,
    func,
    insert,
    literal,
    literal_column,
    or_,
    select,
    union_all,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from . import packed
from .groups import QUEUED, kept_rows, rows_in, rows_of, seqs_of
from .rows import (
    SETTLED,
    UNKNOWN_VERSION,
    DamagedGroup,
    GroupEvent,
    GroupRow,
    GroupState,
    check_group,
)
from .schema import SHARED, damaged, deliveries, groups, leases
from .transaction import Memory, Transaction, chunks

_PAGE: Final = 256
"""Groups read at a time when it is not known how many are needed."""
FILLED_AT_ONCE = 2048
"""Groups copied into a run's queue in one transaction; other transactions wait that long."""


@dataclass(frozen=True)
class GroupSelection:
    """A filter for queued groups, and limits; see `Store.lease`. None: no limit."""

    environments: frozenset[str] | None = None
    min_version: int | None = None
    max_groups: int | None = None
    max_sequences: int | None = None
    max_tokens: int | None = None
    min_groups: int = 1

    def of(self, environments: frozenset[str]) -> GroupSelection:
        """Returns this selection, restricted to these environments (empty: unchanged)."""
        if not environments:
            return self
        names = environments if self.environments is None else self.environments & environments
        return replace(self, environments=names)


async def advance(
    tx: Transaction,
    queue: str,
    rows: Sequence[GroupRow],
    target: GroupState,
    event: GroupEvent,
    *,
    lease_id: str | None,
) -> list[GroupRow]:
    """Changes the state of `rows`, given as they are in the queue now, to `target`; all or none."""
    for row in rows:
        check_group(row.group_id, row.state, target, event)
    settled_at = tx.now if target in SETTLED else None
    for part in chunks([row.seq for row in rows]):
        await tx.connection.execute(
            update(deliveries)
            .where(deliveries.c.queue == queue, deliveries.c.seq.in_(part))
            .values(state=target, lease_id=lease_id, settled_at=settled_at)
        )
    for row in rows:
        tx.memory.tally(queue, row.env, row.state, -1)
        tx.memory.tally(queue, row.env, target, 1)
        if target == "queued":
            tx.memory.queued(row.seq, row.policy_version)
    return [msgspec.structs.replace(row, state=target, lease_id=lease_id) for row in rows]


async def move(tx: Transaction, group_ids: Sequence[str], to: GroupState) -> None:
    """Moves groups of the shared queue from buffered to queued, or from either to dropped; all
    or none. Broadcast runs get the queued ones as well. Raises ConflictError: a group's state
    does not allow it."""
    rows = await rows_of(tx.connection, group_ids)
    await advance(tx, SHARED, rows, to, "move", lease_id=None)
    if to == "queued":
        for queue in tx.memory.fan_out():
            await _fill(tx, queue, [row.seq for row in rows])
        for queue, last in tx.memory.filled.items():
            await _fill(tx, queue, [row.seq for row in rows if row.seq <= last])


async def fill(tx: Transaction, queue: str, first: int) -> int | None:
    """Copies the next groups, from number `first` on, into `queue`, but those that are buffered,
    dropped or already there. Returns the number to continue with; None if these were the last."""
    of = deliveries.c
    numbers = select(of.seq).where(of.queue == SHARED, of.seq >= first)
    looked_at = numbers.order_by(of.seq).limit(FILLED_AT_ONCE).subquery()
    query = select(func.count(), func.max(looked_at.c.seq))
    count, last = (await tx.connection.execute(query)).one()
    if count:
        await _fill_from(tx, queue, lambda seq: seq.between(first, last))
    return None if count < FILLED_AT_ONCE else last + 1


async def _fill(tx: Transaction, queue: str, seqs: Sequence[int]) -> None:
    for part in chunks(seqs):
        await _fill_from(tx, queue, methodcaller("in_", part))


async def _fill_from(
    tx: Transaction, queue: str, chosen_by: Callable[[ColumnElement[int]], ColumnElement[bool]]
) -> None:
    shared, there = deliveries.alias("shared"), deliveries.alias("there")
    of = shared.c
    is_there = select(there.c.seq).where(there.c.queue == queue, there.c.seq == of.seq).exists()
    is_wanted = of.state.not_in(("buffered", "dropped"))
    chosen = (of.queue == SHARED, chosen_by(of.seq), is_wanted, ~is_there)
    span = (func.count(), func.min(of.seq), func.max(of.seq))
    kinds = select(of.env, of.policy_version, *span).where(*chosen)
    kinds = kinds.group_by(of.env, of.policy_version)
    for env, version, count, first, last in (await tx.connection.execute(kinds)).all():
        tx.memory.tally(queue, env, "queued", count)
        tx.memory.queued(first, version)
        tx.memory.queued(last, version)
    copied = (of.seq, of.env, of.policy_version, of.stored_bytes)
    queued = select(literal(queue), literal("queued"), *copied).where(*chosen)
    names = ["queue", "state", *(column.name for column in copied)]
    await tx.connection.execute(insert(deliveries).from_select(names, queued))


async def choose(tx: Transaction, queue: str, wanted: GroupSelection) -> list[GroupRow]:
    chosen: list[GroupRow] = []
    seen = sequences = tokens = 0
    is_full = False
    async for row in _candidates(tx, queue, wanted):
        seen += 1
        sequences += row.size
        tokens += row.tokens
        is_full = is_full or (
            bool(chosen)
            and (
                len(chosen) == wanted.max_groups
                or (wanted.max_sequences is not None and sequences > wanted.max_sequences)
                or (wanted.max_tokens is not None and tokens > wanted.max_tokens)
            )
        )
        if not is_full:
            chosen.append(row)
        elif seen >= wanted.min_groups:
            break
    return chosen if seen >= wanted.min_groups else []


async def _candidates(
    tx: Transaction, queue: str, wanted: GroupSelection
) -> AsyncIterator[GroupRow]:
    queued = tx.memory.queued_environments(queue)
    names = queued if wanted.environments is None else queued & wanted.environments
    there = sum(tx.memory.tallies[queue, name, "queued"] for name in names)
    span = _span(tx.memory, wanted.min_version)
    if there < wanted.min_groups or span is None:
        return
    first, last = span
    limit = _page_size(wanted)
    while first <= last:
        query = _page(queue, names if names != queued else None, wanted.min_version, first, limit)
        rows = [GroupRow(*row) for row in await tx.connection.execute(query)]
        for row in rows:
            yield row
        if limit is None or len(rows) < limit:
            return
        first = rows[-1].seq + 1


def _page_size(wanted: GroupSelection) -> int | None:
    """Groups to read at a time; None reads all at once, where no limit is set."""
    if wanted.max_sequences is not None or wanted.max_tokens is not None:
        return _PAGE
    # No more than this many are ever needed.
    return None if wanted.max_groups is None else max(wanted.max_groups, wanted.min_groups)


def _span(memory: Memory, min_version: int | None) -> tuple[int, int] | None:
    """Returns (min, max) seq of queued groups with an acceptable version, or None."""
    spans = [
        span
        for version, span in memory.versions.items()
        if min_version is None or version >= min_version or version == UNKNOWN_VERSION
    ]
    if not spans:
        return None
    return min(first for first, _ in spans), max(last for _, last in spans)


def _page(
    queue: str, names: set[str] | None, min_version: int | None, first: int, limit: int | None
) -> Select[Any]:
    """Selects the next page. Each environment has its own subquery, so that an index has it in
    order."""
    waiting = deliveries.alias("waiting")
    of = waiting.c
    where = [of.queue == queue, of.state == literal_column("'queued'"), of.seq >= first]
    if min_version is not None:
        fits = of.policy_version >= min_version
        where.append(or_(fits, of.policy_version == UNKNOWN_VERSION))
    oldest = select(of.seq).where(*where).order_by(of.seq).limit(limit)
    if names is not None:
        parts = [select(oldest.where(of.env == name).subquery().c.seq) for name in sorted(names)]
        united = union_all(*parts).subquery()
        oldest = select(united.c.seq).order_by(united.c.seq).limit(limit)
    chosen = oldest.subquery("chosen")
    return (
        rows_in(queue).where(deliveries.c.seq.in_(select(chosen.c.seq))).order_by(deliveries.c.seq)
    )


async def oldest_queued_at(
    connection: AsyncConnection, memory: Memory, queue: str, environments: frozenset[str]
) -> float | None:
    """Returns when the oldest queued group of these environments (empty: of all) was accepted."""
    queued = memory.queued_environments(queue)
    names = queued & environments if environments else queued
    if not names:
        return None
    query = _page(queue, names if names != queued else None, None, 0, 1)
    row = (await connection.execute(query)).one_or_none()
    return None if row is None else float(row.created_at)


async def drop_stale(tx: Transaction, below_version: int, limit: int) -> int:
    versions = tx.memory.versions
    stale = [v for v in versions if v != UNKNOWN_VERSION and v < below_version]
    if not stale:
        return 0
    first = min(versions[version][0] for version in stale)
    last = max(versions[version][1] for version in stale)
    dropped = 0
    for queue in {queue for queue, _, state in tx.memory.tallies if state == "queued"}:
        query = (
            rows_in(queue)
            .where(
                QUEUED,
                deliveries.c.seq.between(first, last),
                deliveries.c.policy_version < below_version,
                deliveries.c.policy_version != UNKNOWN_VERSION,
            )
            .order_by(deliveries.c.seq)
            .limit(limit - dropped)
        )
        rows = [GroupRow(*row) for row in await tx.connection.execute(query)]
        await advance(tx, queue, rows, "dropped", "drop_stale", lease_id=None)
        dropped += len(rows)
        if dropped == limit:
            break
    if dropped:
        await tx.count("stale_dropped", dropped)
    if dropped < limit:
        for version in stale:
            del versions[version]
    return dropped


class Backlog(msgspec.Struct, frozen=True):
    """Queued and leased groups of one run.

    Args:
        queued_groups: groups that it may lease now. Shared runs count the same groups.
        lag_seconds: how long the oldest of them has waited; 0.0 if there is none.
        open_leases: leases that it has neither acked nor given back, and that have not expired.
        leased_groups: groups in these leases.
    """

    queued_groups: int
    lag_seconds: float
    open_leases: int
    leased_groups: int


async def waiting_bytes(connection: AsyncConnection, queues: Collection[str]) -> int:
    """Returns the size of the bodies that wait, or are leased, in the largest of these queues."""
    of = deliveries.c
    where = (of.queue.in_(sorted(queues)), of.settled_at.is_(None))
    query = select(func.sum(of.stored_bytes)).where(*where).group_by(of.queue)
    return max((int(size) for size in await connection.scalars(query)), default=0)


async def backlogs(connection: AsyncConnection, memory: Memory, now: float) -> dict[str, Backlog]:
    # A literal, because of the partial index; see groups.py.
    is_open = leases.c.state == literal_column("'open'")
    held, open_leases = Counter[str](), Counter[str]()
    for row in await connection.execute(select(leases.c.run, leases.c.group_ids).where(is_open)):
        open_leases[row.run] += 1
        held[row.run] += len(listed_ids(row.group_ids))
    lags: dict[tuple[str, frozenset[str]], float] = {}
    found = {}
    for name, run in memory.runs.items():
        if run.state != "open":
            continue
        place = (run.queue, run.environments)
        if place not in lags:
            since = await oldest_queued_at(connection, memory, *place)
            lags[place] = 0.0 if since is None else max(0.0, now - since)
        queued = memory.in_state(run, ("queued",))
        found[name] = Backlog(queued, lags[place], open_leases[name], held[name])
    return found


log = structlog.get_logger(__name__)

_REASON_CHARACTERS: Final = 200


class DamagedBodies(StoreError):
    """Stored bodies cannot be read. `reasons`: by group id."""

    kind = "damaged_body"

    def __init__(self, reasons: Mapping[str, str]) -> None:
        first = next(iter(reasons))
        super().__init__(
            f"The stored bodies of {len(reasons)} groups are damaged; {first}: {reasons[first]}."
            if len(reasons) > 1
            else f"The stored body of group {first} is damaged: {reasons[first]}.",
            hint="The disk, or a program that wrote to the store's files, damaged it; make the"
            " group again.",
            group_ids=list(reasons),
        )
        self.reasons = dict(reasons)


def decode_all(group_ids: Sequence[str], stored: Sequence[tuple[int, bytes]]) -> list[bytes]:
    """Decodes the bodies of these groups. CPU work: run it in a thread. Raises DamagedBodies, which
    names all that are damaged."""
    bodies: list[bytes] = []
    reasons: dict[str, str] = {}
    for group_id, (encoding, data) in zip(group_ids, stored, strict=True):
        try:
            bodies.append(packed.decode(encoding, data))
        except packed.DamagedBody as error:
            reasons[group_id] = str(error)
    if reasons:
        raise DamagedBodies(reasons)
    return bodies


async def drop_damaged(
    tx: Transaction, reasons: Mapping[str, str], *, undo: str | None = None
) -> list[str]:
    """Drops groups whose bodies cannot be read from every queue where they wait or are leased,
    and keeps the reasons (by group id). Returns the ids that were not known to be damaged.

    Args:
        undo: id of an open lease that no client has received yet: its other groups are queued
            again, and the id can be used again.
    """
    ids = list(reasons)
    numbers = await seqs_of(tx.connection, ids)
    for queue in sorted({SHARED, *(run.queue for run in tx.memory.runs.values())}):
        rows = [
            row
            for row in (await kept_rows(tx.connection, ids, queue)).values()
            if row.state not in SETTLED
        ]
        await _leave_leases(tx, rows)
        await advance(tx, queue, rows, "dropped", "drop_damaged", lease_id=None)
    if undo is not None:
        await _undo(tx, undo)
    return await _keep_reasons(tx, numbers, reasons)


def listed_ids(text: str) -> list[str]:
    """Returns the ids in a lease's column `group_ids`."""
    return msgspec.json.decode(text, type=list[str])


async def keep_only(tx: Transaction, lease_id: str, group_ids: Sequence[str]) -> None:
    change = update(leases).where(leases.c.lease_id == lease_id)
    text = msgspec.json.encode(group_ids).decode()
    await tx.connection.execute(change.values(group_ids=text))


async def _leave_leases(tx: Transaction, rows: Sequence[GroupRow]) -> None:
    lost = defaultdict[str, set[str]](set)
    for row in rows:
        if row.lease_id is not None:
            lost[row.lease_id].add(row.group_id)
    for part in chunks(list(lost)):
        query = select(leases.c.lease_id, leases.c.group_ids).where(leases.c.lease_id.in_(part))
        for lease_id, text in (await tx.connection.execute(query)).all():
            left = [group_id for group_id in listed_ids(text) if group_id not in lost[lease_id]]
            await keep_only(tx, lease_id, left)


async def _undo(tx: Transaction, lease_id: str) -> None:
    query = select(leases).where(leases.c.lease_id == lease_id, leases.c.state == "open")
    row = (await tx.connection.execute(query)).one_or_none()
    if row is None:  # it expired meanwhile
        return
    queue = tx.memory.runs[row.run].queue
    held = await kept_rows(tx.connection, listed_ids(row.group_ids), queue)
    await advance(tx, queue, list(held.values()), "queued", "give_back", lease_id=None)
    await tx.connection.execute(delete(leases).where(leases.c.lease_id == lease_id))


async def _keep_reasons(
    tx: Transaction, numbers: Mapping[str, int], reasons: Mapping[str, str]
) -> list[str]:
    known: set[int] = set()
    for part in chunks(list(numbers.values())):
        known.update(
            await tx.connection.scalars(select(damaged.c.seq).where(damaged.c.seq.in_(part)))
        )
    new = {
        group_id: why[:_REASON_CHARACTERS]
        for group_id, why in reasons.items()
        if group_id in numbers and numbers[group_id] not in known
    }
    if not new:
        return []
    rows = [
        {"seq": numbers[group_id], "reason": why, "found_at": tx.now}
        for group_id, why in new.items()
    ]
    await tx.connection.execute(insert(damaged), rows)
    await tx.count("damaged", len(new))
    for group_id, why in new.items():
        log.error("stored_body_is_damaged", group_id=group_id, reason=why)
    return list(new)


async def list_damaged(connection: AsyncConnection, limit: int) -> list[DamagedGroup]:
    """Returns up to `limit` groups whose bodies are damaged, latest found first."""
    query = (
        select(groups.c.group_id, damaged.c.reason, damaged.c.found_at)
        .join_from(damaged, groups, damaged.c.seq == groups.c.seq)
        .order_by(damaged.c.found_at.desc(), damaged.c.seq.desc())
        .limit(limit)
    )
    return [DamagedGroup(*row) for row in await connection.execute(query)]
