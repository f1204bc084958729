"""The tables, the same for SQLite and PostgreSQL.

Rows of `groups` and `bodies` never change: an update of a row with a body would write the body
again. What changes is small: `deliveries` has one row for each group in each queue. `seq` joins the
tables. Waiting and removable groups are found through partial indexes, so their cost does not
depend on the size of the tables. A group without a delivery is no longer kept: only its id is
known. A change in this file needs a step in `migrations` and a higher SCHEMA_VERSION.
"""

from __future__ import annotations

from typing import Any, Final

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
)

from .states import GROUP_STATES, LEASE_STATES, RUN_STATES

SCHEMA_VERSION: Final = 8
"""Version of the tables; a store with a higher version is refused."""

SHARED: Final = "shared"
"""The queue of all shared runs."""

metadata = MetaData()
_partial: dict[Index, str] = {}
"""The condition of each partial index."""

# A 64-bit key that SQLite uses as its row id.
_Seq = BigInteger().with_variant(Integer(), "sqlite")


def _one_of(column: str, values: tuple[str, ...]) -> CheckConstraint:
    listed = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({listed})", name=f"known_{column}")


def _partial_index(name: str, *columns: Column[Any], where: str) -> None:
    _partial[Index(name, *columns)] = where


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
    Column("group_id", Text, nullable=False, unique=True),
    Column("env", Text, nullable=False),
    Column("format", Text, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("max_length", BigInteger, nullable=False),
    Column("policy_version", BigInteger, nullable=False),
    Column("env_id", BigInteger),
    Column("created_at", Double, nullable=False),
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
    Column("task_id", Text, nullable=False),
    Column("split", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("rewards", Text, nullable=False),  # A JSON list.
    Column("reward_mean", Double),
    Column("reward_min", Double),
    Column("reward_max", Double),
    Column("turns", BigInteger),
    Column("completion_tokens", BigInteger),
    Column("truncated", BigInteger, nullable=False),
    Column("seconds", Double),
    Column("flags", Text, nullable=False),  # A JSON list.
    Column("ends", Text, nullable=False),  # A JSON object.
    Column("rated", BigInteger, nullable=False),
    Column("solved", BigInteger),
    # Copied from the group, so that one index has all that is summed up by task.
    Column("env", Text, nullable=False),
)
_facts: Final = group_facts.c
Index(
    "group_facts_tasks",
    *(_facts.env, _facts.task_id, _facts.seq, _facts.rated, _facts.solved),
    *(_facts.reward_mean, _facts.reward_min, _facts.reward_max),
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("queue", Text, primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    # Copied from the group, so that one index finds what a run wants.
    Column("env", Text, nullable=False),
    Column("policy_version", BigInteger, nullable=False),
    Column("stored_bytes", BigInteger, nullable=False),
    Column("state", Text, nullable=False),
    # Its current or last lease; NULL after a nack.
    Column("lease_id", Text),
    # When it was acked or dropped.
    Column("settled_at", Double),
    _one_of("state", GROUP_STATES),
    sqlite_with_rowid=False,
)
_QUEUED_ONLY: Final = "state = 'queued'"
_partial_index("deliveries_queued", deliveries.c.queue, deliveries.c.seq, where=_QUEUED_ONLY)
_partial_index(
    "deliveries_queued_env",
    deliveries.c.queue,
    deliveries.c.env,
    deliveries.c.seq,
    where=_QUEUED_ONLY,
)
_partial_index(
    "deliveries_buffered", deliveries.c.queue, deliveries.c.seq, where="state = 'buffered'"
)
_partial_index(
    "deliveries_settled",
    deliveries.c.settled_at,
    deliveries.c.seq,
    where="settled_at IS NOT NULL",
)

leases = Table(
    "leases",
    metadata,
    Column("lease_id", Text, primary_key=True),
    Column("run", Text, nullable=False),
    Column("group_ids", Text, nullable=False),  # A JSON list.
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("state", Text, nullable=False),
    # Order of acks in the store, from 1; NULL unless acked.
    Column("ack_number", BigInteger),
    # When it ended.
    Column("ended_at", Double),
    _one_of("state", LEASE_STATES),
)
_partial_index("leases_open", leases.c.expires_at, where="state = 'open'")
_partial_index("leases_expired", leases.c.run, where="state = 'expired'")
_partial_index("leases_acked", leases.c.run, leases.c.ack_number, where="ack_number IS NOT NULL")
_partial_index("leases_ended", leases.c.ended_at, leases.c.lease_id, where="ended_at IS NOT NULL")

runs = Table(
    "runs",
    metadata,
    Column("name", Text, primary_key=True),
    Column("created_at", Double, nullable=False),
    Column("batch_size", BigInteger, nullable=False),
    Column("settings", Text, nullable=False),  # A JSON object.
    Column("policy_version", BigInteger, nullable=False),
    Column("state", Text, nullable=False),
    Column("delivery", Text, nullable=False),
    Column("environments", Text, nullable=False),  # A JSON list; empty: all.
    # Groups acked and not rewound.
    Column("acked_groups", BigInteger, nullable=False),
    # The latest of its acks with a group that is no longer kept.
    Column("gone_ack_number", BigInteger, nullable=False),
    _one_of("state", RUN_STATES),
    _one_of("delivery", ("shared", "broadcast")),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("run", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("ack_number", BigInteger, nullable=False),  # holds this and all earlier acks
    Column("acked_groups", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
)

counters = Table(
    "counters",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", BigInteger, nullable=False),
)

gone = Table(
    "gone",
    metadata,
    # Counts of deliveries that were removed with their groups.
    Column("queue", Text, primary_key=True),
    Column("env", Text, primary_key=True),
    Column("state", Text, primary_key=True),
    Column("removed", BigInteger, nullable=False),
)

estimates = Table(
    "estimates",
    metadata,
    # One row for each task that was ever scored; see `rollouts.estimates`.
    Column("number", _Seq, primary_key=True, autoincrement=False),
    Column("env", Text, nullable=False),
    Column("split", Text, nullable=False),
    Column("task_id", Text, nullable=False),
    Column("attempts", BigInteger, nullable=False),
    Column("weight", Double, nullable=False),
    Column("solved", Double, nullable=False),
    Column("policy_version", BigInteger, nullable=False),
    Column("scored_at", Double, nullable=False),
    UniqueConstraint("env", "split", "task_id"),
)
Index("estimates_env", estimates.c.env, estimates.c.number)

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
    Column("reason", Text, nullable=False),
    Column("found_at", Double, nullable=False),
)

history = Table(
    "history",
    metadata,
    # The server's numbers by the minute; see `api.recording`.
    Column("minute", _Seq, primary_key=True, autoincrement=False),
    Column("numbers", Text, nullable=False),  # JSON
)

values = Table(
    "values",
    metadata,
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),  # JSON
)
