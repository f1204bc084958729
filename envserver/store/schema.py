"""The tables, the same for SQLite and PostgreSQL, and how those of older versions are updated.

Rows of `groups` and `bodies` never change: an update of a row with a body would write the body
again. What changes is small: `deliveries` has one row for each group in each queue. `seq` joins the
tables. Waiting and removable groups are found through partial indexes, so their cost does not
depend on the size of the tables. A group without a delivery is no longer kept: only its id is
known. A change of a table needs a step for older databases and a higher SCHEMA_VERSION."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec
from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Connection,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    text,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from .rows import GROUP_STATES, LEASE_STATES, RUN_STATES

SCHEMA_VERSION: Final = 8
"""Version of the tables; a store with a higher version is refused."""

SHARED: Final = "shared"
"""The queue of all shared runs."""

metadata = MetaData()
_text = partial(Column, type_=Text, nullable=False)
_whole = partial(Column, type_=BigInteger, nullable=False)
_real = partial(Column, type_=Double, nullable=False)
_partial: dict[Index, str] = {}

# A 64-bit key that SQLite uses as its row id.
_Seq = BigInteger().with_variant(Integer(), "sqlite")


def _one_of(column: str, values: tuple[str, ...]) -> CheckConstraint:
    listed = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({listed})", name=f"known_{column}")


def _partial_index(name: str, *columns: str, where: str) -> Index:
    index = Index(name, *columns)
    _partial[index] = where
    return index


def create_tables(connection: Connection) -> None:
    """Creates the tables; `connection` is to an empty SQLite or PostgreSQL."""
    for index, where in _partial.items():  # a dialect that is named is imported
        index.dialect_kwargs[f"{connection.dialect.name}_where"] = text(where)
    metadata.create_all(connection, checkfirst=False)


schema_version = Table("schema_version", metadata, Column("version", Integer, nullable=False))

groups = Table(
    "groups",
    metadata,
    Column("seq", _Seq, primary_key=True, autoincrement=False),
    _text("group_id", unique=True),
    _text("env"),
    _text("format"),
    _whole("size"),
    _whole("tokens"),
    _whole("max_length"),
    _whole("policy_version"),
    Column("env_id", BigInteger),
    _real("created_at"),
)

bodies = Table(
    "bodies",
    metadata,
    Column("seq", _Seq, ForeignKey(groups.c.seq), primary_key=True, autoincrement=False),
    Column("encoding", SmallInteger, nullable=False),
    Column("body", LargeBinary, nullable=False),
)

group_facts = Table(
    "group_facts",
    metadata,
    # What lists of groups show, see `facts`; removed with the body.
    Column("seq", _Seq, ForeignKey(groups.c.seq), primary_key=True, autoincrement=False),
    _text("task_id"),
    _text("split"),
    _text("model"),
    _text("rewards"),  # A JSON list.
    Column("reward_mean", Double),
    Column("reward_min", Double),
    Column("reward_max", Double),
    Column("turns", BigInteger),
    Column("completion_tokens", BigInteger),
    _whole("truncated"),
    Column("seconds", Double),
    _text("flags"),  # A JSON list.
    _text("ends"),  # A JSON object.
    _whole("rated"),
    Column("solved", BigInteger),
    # Copied from the group, so that one index has all that is summed up by task.
    _text("env"),
    Index(
        "group_facts_tasks",
        *("env", "task_id", "seq", "rated", "solved"),
        *("reward_mean", "reward_min", "reward_max"),
    ),
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("queue", Text, primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    # Copied from the group, so that one index finds what a run wants.
    _text("env"),
    _whole("policy_version"),
    _whole("stored_bytes"),
    _text("state"),
    # Its current or last lease; NULL after a nack.
    Column("lease_id", Text),
    # When it was acked or dropped.
    Column("settled_at", Double),
    _one_of("state", GROUP_STATES),
    _partial_index("deliveries_queued", "queue", "seq", where="state = 'queued'"),
    _partial_index("deliveries_queued_env", "queue", "env", "seq", where="state = 'queued'"),
    _partial_index("deliveries_buffered", "queue", "seq", where="state = 'buffered'"),
    _partial_index("deliveries_settled", "settled_at", "seq", where="settled_at IS NOT NULL"),
    sqlite_with_rowid=False,
)

leases = Table(
    "leases",
    metadata,
    Column("lease_id", Text, primary_key=True),
    _text("run"),
    _text("group_ids"),  # A JSON list.
    _real("created_at"),
    _real("expires_at"),
    _text("state"),
    # Order of acks in the store, from 1; NULL unless acked.
    Column("ack_number", BigInteger),
    # When it ended.
    Column("ended_at", Double),
    _one_of("state", LEASE_STATES),
    _partial_index("leases_open", "expires_at", where="state = 'open'"),
    _partial_index("leases_expired", "run", where="state = 'expired'"),
    _partial_index("leases_acked", "run", "ack_number", where="ack_number IS NOT NULL"),
    _partial_index("leases_ended", "ended_at", "lease_id", where="ended_at IS NOT NULL"),
)

runs = Table(
    "runs",
    metadata,
    Column("name", Text, primary_key=True),
    _real("created_at"),
    _whole("batch_size"),
    _text("settings"),  # A JSON object.
    _whole("policy_version"),
    _text("state"),
    _text("delivery"),
    _text("environments"),  # A JSON list; empty: all.
    # Groups acked and not rewound.
    _whole("acked_groups"),
    # The latest of its acks with a group that is no longer kept.
    _whole("gone_ack_number"),
    _one_of("state", RUN_STATES),
    _one_of("delivery", ("shared", "broadcast")),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("run", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    _whole("ack_number"),  # holds this and all earlier acks
    _whole("acked_groups"),
    _real("created_at"),
)

counters = Table(
    "counters",
    metadata,
    Column("name", Text, primary_key=True),
    _whole("value"),
)

gone = Table(
    "gone",
    metadata,
    # Counts of deliveries that were removed with their groups.
    Column("queue", Text, primary_key=True),
    Column("env", Text, primary_key=True),
    Column("state", Text, primary_key=True),
    _whole("removed"),
)

estimates = Table(
    "estimates",
    metadata,
    # One row for each task that was ever scored; see `rollouts.estimates`.
    Column("number", _Seq, primary_key=True, autoincrement=False),
    _text("env"),
    _text("split"),
    _text("task_id"),
    _whole("attempts"),
    _real("weight"),
    _real("solved"),
    _whole("policy_version"),
    _real("scored_at"),
    UniqueConstraint("env", "split", "task_id"),
    Index("estimates_env", "env", "number"),
)

dropped_groups = Table(
    "dropped_groups",
    metadata,
    # Groups that count in an estimate but were not stored.
    Column("group_id", Text, primary_key=True),
    sqlite_with_rowid=False,
)

damaged = Table(
    "damaged",
    metadata,
    # Groups whose bodies could not be read, once each; never removed.
    Column("seq", _Seq, primary_key=True, autoincrement=False),
    _text("reason"),
    _real("found_at"),
)

history = Table(
    "history",
    metadata,
    # The server's numbers by the minute; see `trainers.status`.
    Column("minute", _Seq, primary_key=True, autoincrement=False),
    _text("numbers"),  # JSON
)

values = Table(
    "values",
    metadata,
    Column("key", Text, primary_key=True),
    _text("value"),  # JSON
)


# Each step is plain SQL that does not depend on the tables above: it contains what its version had
# and what the next one has. A step that fails or is killed leaves the store unchanged.


async def migrate(connection: AsyncConnection, version: int) -> None:
    """Updates the tables from `version` to the current one, inside the caller's transaction."""
    for step_from in range(version, SCHEMA_VERSION):
        step = STEPS[step_from]
        await (_run(connection, step) if isinstance(step, tuple) else step(connection))
        await connection.execute(update(schema_version).values(version=step_from + 1))


async def _run(connection: AsyncConnection, statements: Sequence[str]) -> None:
    is_sqlite = connection.dialect.name == "sqlite"
    kinds = {
        "key": "INTEGER" if is_sqlite else "BIGINT",
        "double": "DOUBLE" if is_sqlite else "DOUBLE PRECISION",
        "without_rowid": "WITHOUT ROWID" if is_sqlite else "",
    }
    for statement in statements:
        await connection.execute(text(statement.format(**kinds)))


async def _from_1_to_2(connection: AsyncConnection) -> None:
    """Moves the state of groups into `deliveries`, one for each queue."""
    await _run(connection, _NEW_TABLES)
    await connection.execute(
        text(
            "INSERT INTO deliveries (queue, seq, env, policy_version, stored_bytes, state,"
            " lease_id, settled_at)"
            " SELECT 'shared', groups.seq, env, policy_version, length(body), state, lease_id,"
            " CASE WHEN state IN ('acked', 'dropped') THEN CAST(:now AS DOUBLE PRECISION) END"
            " FROM groups JOIN bodies ON bodies.seq = groups.seq ORDER BY groups.seq"
        ),
        {"now": time.time()},
    )
    is_sqlite = connection.dialect.name == "sqlite"
    await _run(connection, _REBUILD_IN_SQLITE if is_sqlite else _CHANGE_IN_POSTGRESQL)
    await _run(connection, _NEW_COLUMNS_AND_INDEXES)
    await _number_acks(connection)


async def _number_acks(connection: AsyncConnection) -> None:
    acked = text(
        "SELECT lease_id, run, group_ids FROM leases WHERE state = 'acked'"
        " ORDER BY created_at, lease_id"
    )
    totals = Counter[str]()
    numbered = []
    for number, row in enumerate(await connection.execute(acked), 1):
        numbered.append({"number": number, "of": row.lease_id})
        totals[row.run] += len(msgspec.json.decode(row.group_ids, type=list[str]))
    set_number = text("UPDATE leases SET ack_number = :number WHERE lease_id = :of")
    set_total = text("UPDATE runs SET acked_groups = :total WHERE name = :of")
    if numbered:
        await connection.execute(set_number, numbered)
        await connection.execute(
            set_total, [{"total": total, "of": run} for run, total in totals.items()]
        )
    ended = text("UPDATE leases SET ended_at = :now WHERE state <> 'open'")
    await connection.execute(ended, {"now": time.time()})


_NEW_TABLES: Final = (
    """CREATE TABLE deliveries (
        queue TEXT NOT NULL,
        seq BIGINT NOT NULL,
        env TEXT NOT NULL,
        policy_version BIGINT NOT NULL,
        stored_bytes BIGINT NOT NULL,
        state TEXT NOT NULL,
        lease_id TEXT,
        settled_at DOUBLE PRECISION,
        PRIMARY KEY (queue, seq),
        CONSTRAINT known_state
            CHECK (state IN ('buffered', 'queued', 'leased', 'acked', 'dropped'))
    ) {without_rowid}""",
    """CREATE TABLE checkpoints (
        run TEXT NOT NULL,
        name TEXT NOT NULL,
        ack_number BIGINT NOT NULL,
        acked_groups BIGINT NOT NULL,
        created_at DOUBLE PRECISION NOT NULL,
        PRIMARY KEY (run, name)
    )""",
    "CREATE TABLE counters (name TEXT NOT NULL, value BIGINT NOT NULL, PRIMARY KEY (name))",
    """CREATE TABLE gone (
        queue TEXT NOT NULL,
        env TEXT NOT NULL,
        state TEXT NOT NULL,
        removed BIGINT NOT NULL,
        PRIMARY KEY (queue, env, state)
    )""",
)

# SQLite cannot drop a column that a constraint names, nor change a constraint.
_REBUILD_IN_SQLITE: Final = (
    "DROP INDEX groups_queued",
    "DROP INDEX groups_buffered",
    """CREATE TABLE groups_2 (
        seq INTEGER NOT NULL,
        group_id TEXT NOT NULL,
        env TEXT NOT NULL,
        format TEXT NOT NULL,
        size BIGINT NOT NULL,
        tokens BIGINT NOT NULL,
        max_length BIGINT NOT NULL,
        policy_version BIGINT NOT NULL,
        env_id BIGINT,
        created_at DOUBLE NOT NULL,
        PRIMARY KEY (seq),
        UNIQUE (group_id)
    )""",
    """INSERT INTO groups_2 SELECT seq, group_id, env, format, size, tokens, max_length,
        policy_version, env_id, created_at FROM groups ORDER BY seq""",
    "DROP TABLE groups",
    "ALTER TABLE groups_2 RENAME TO groups",
    "DROP INDEX leases_open",
    """CREATE TABLE leases_2 (
        lease_id TEXT NOT NULL,
        run TEXT NOT NULL,
        group_ids TEXT NOT NULL,
        created_at DOUBLE NOT NULL,
        expires_at DOUBLE NOT NULL,
        state TEXT NOT NULL,
        PRIMARY KEY (lease_id),
        CONSTRAINT known_state
            CHECK (state IN ('open', 'expired', 'acked', 'nacked', 'revoked'))
    )""",
    """INSERT INTO leases_2 SELECT lease_id, run, group_ids, created_at, expires_at, state
        FROM leases""",
    "DROP TABLE leases",
    "ALTER TABLE leases_2 RENAME TO leases",
    "CREATE INDEX leases_open ON leases (expires_at) WHERE state = 'open'",
)

_CHANGE_IN_POSTGRESQL: Final = (
    "ALTER TABLE groups DROP COLUMN state, DROP COLUMN lease_id",
    """ALTER TABLE leases DROP CONSTRAINT known_state, ADD CONSTRAINT known_state
        CHECK (state IN ('open', 'expired', 'acked', 'nacked', 'revoked'))""",
)

_NEW_COLUMNS_AND_INDEXES: Final = (
    "ALTER TABLE leases ADD COLUMN ack_number BIGINT",
    "ALTER TABLE leases ADD COLUMN ended_at DOUBLE PRECISION",
    """ALTER TABLE runs ADD COLUMN delivery TEXT NOT NULL DEFAULT 'shared'
        CONSTRAINT known_delivery CHECK (delivery IN ('shared', 'broadcast'))""",
    "ALTER TABLE runs ADD COLUMN environments TEXT NOT NULL DEFAULT '[]'",
    "ALTER TABLE runs ADD COLUMN acked_groups BIGINT NOT NULL DEFAULT 0",
    "ALTER TABLE runs ADD COLUMN gone_ack_number BIGINT NOT NULL DEFAULT 0",
    "CREATE INDEX deliveries_queued ON deliveries (queue, seq) WHERE state = 'queued'",
    "CREATE INDEX deliveries_queued_env ON deliveries (queue, env, seq) WHERE state = 'queued'",
    "CREATE INDEX deliveries_buffered ON deliveries (queue, seq) WHERE state = 'buffered'",
    "CREATE INDEX deliveries_settled ON deliveries (settled_at, seq) WHERE settled_at IS NOT NULL",
    "CREATE INDEX leases_expired ON leases (run) WHERE state = 'expired'",
    "CREATE INDEX leases_acked ON leases (run, ack_number) WHERE ack_number IS NOT NULL",
    "CREATE INDEX leases_ended ON leases (ended_at, lease_id) WHERE ended_at IS NOT NULL",
)


_Step = tuple[str, ...] | Callable[[AsyncConnection], Awaitable[None]]

STEPS: Final[Mapping[int, _Step]] = {
    1: _from_1_to_2,
    # Task estimates. They start empty: earlier scores are in the bodies only.
    2: (
        """CREATE TABLE estimates (
            number {key} NOT NULL,
            env TEXT NOT NULL,
            split TEXT NOT NULL,
            task_id TEXT NOT NULL,
            attempts BIGINT NOT NULL,
            weight {double} NOT NULL,
            solved {double} NOT NULL,
            policy_version BIGINT NOT NULL,
            scored_at {double} NOT NULL,
            PRIMARY KEY (number),
            UNIQUE (env, split, task_id)
        )""",
        "CREATE INDEX estimates_env ON estimates (env, number)",
        "CREATE TABLE dropped_groups (group_id TEXT NOT NULL, PRIMARY KEY (group_id))"
        " {without_rowid}",
    ),
    # The table of damaged groups. It starts empty: earlier findings were not kept.
    3: (
        "CREATE TABLE damaged (seq {key} NOT NULL, reason TEXT NOT NULL,"
        " found_at {double} NOT NULL, PRIMARY KEY (seq))",
    ),
    # The facts that lists show. They start empty: those of earlier groups are in the bodies only.
    4: (
        """CREATE TABLE group_facts (
            seq {key} NOT NULL,
            task_id TEXT NOT NULL,
            split TEXT NOT NULL,
            model TEXT NOT NULL,
            rewards TEXT NOT NULL,
            reward_mean {double},
            reward_min {double},
            reward_max {double},
            turns BIGINT,
            completion_tokens BIGINT,
            truncated BIGINT NOT NULL,
            seconds {double},
            flags TEXT NOT NULL,
            ends TEXT NOT NULL,
            PRIMARY KEY (seq),
            FOREIGN KEY(seq) REFERENCES groups (seq)
        )""",
    ),
    # The numbers by the minute. They start empty.
    5: (
        "CREATE TABLE history (minute {key} NOT NULL, numbers TEXT NOT NULL, PRIMARY KEY (minute))",
    ),
    # What is summed up by task. How many rollouts of earlier groups had a reward is taken to be all
    # of them; how many solved their task is in the bodies only.
    6: (
        "ALTER TABLE group_facts ADD COLUMN rated BIGINT NOT NULL DEFAULT 0",
        "ALTER TABLE group_facts ADD COLUMN solved BIGINT",
        "ALTER TABLE group_facts ADD COLUMN env TEXT NOT NULL DEFAULT ''",
        """UPDATE group_facts SET
            env = (SELECT groups.env FROM groups WHERE groups.seq = group_facts.seq),
            rated = CASE WHEN reward_mean IS NULL THEN 0
                ELSE (SELECT groups.size FROM groups WHERE groups.seq = group_facts.seq) END""",
        """CREATE INDEX group_facts_tasks ON group_facts
            (env, task_id, seq, rated, solved, reward_mean, reward_min, reward_max)""",
    ),
    # Changes no table: bodies may now be as they were posted, which older versions cannot read.
    7: (),
}
"""Steps by the version from which they start; each leads to the next version."""
