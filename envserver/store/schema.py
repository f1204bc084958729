"""The tables, the same for SQLite and PostgreSQL.

`groups` is small and changes; `bodies` is large and never changes: a row that holds a body is never
updated, or the database would write the body again. `seq` joins them. What is waiting is found
through partial indexes, so that it does not matter how much lies behind it.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    text,
)

from .states import GROUP_STATES, LEASE_STATES, RUN_STATES

SCHEMA_VERSION: Final = 1
"""Grows with every change of the tables; a store with a higher one is refused."""

metadata = MetaData()

# A 64-bit key that SQLite takes as its row id.
_Seq = BigInteger().with_variant(Integer(), "sqlite")


def _one_of(column: str, values: tuple[str, ...]) -> CheckConstraint:
    listed = ", ".join(f"'{value}'" for value in values)
    return CheckConstraint(f"{column} IN ({listed})", name=f"known_{column}")


def _partial_index(name: str, column: Column[Any], where: str) -> None:
    Index(name, column, sqlite_where=text(where), postgresql_where=text(where))


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
    Column("state", Text, nullable=False),
    Column("lease_id", Text),
    Column("created_at", Double, nullable=False),
    _one_of("state", GROUP_STATES),
)
_partial_index("groups_queued", groups.c.seq, "state = 'queued'")
_partial_index("groups_buffered", groups.c.seq, "state = 'buffered'")

bodies = Table(
    "bodies",
    metadata,
    Column("seq", _Seq, ForeignKey(groups.c.seq), primary_key=True, autoincrement=False),
    Column("encoding", SmallInteger, nullable=False),
    Column("body", LargeBinary, nullable=False),
)

leases = Table(
    "leases",
    metadata,
    Column("lease_id", Text, primary_key=True),
    Column("run", Text, nullable=False),
    Column("group_ids", Text, nullable=False),  # JSON list
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("state", Text, nullable=False),
    _one_of("state", LEASE_STATES),
)
_partial_index("leases_open", leases.c.expires_at, "state = 'open'")

runs = Table(
    "runs",
    metadata,
    Column("name", Text, primary_key=True),
    Column("created_at", Double, nullable=False),
    Column("batch_size", BigInteger, nullable=False),
    Column("settings", Text, nullable=False),  # JSON object
    Column("policy_version", BigInteger, nullable=False),
    Column("state", Text, nullable=False),
    _one_of("state", RUN_STATES),
)

values = Table(
    "values",
    metadata,
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),  # JSON
)
