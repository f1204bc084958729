"""Statements that are compiled once for each kind of database.

In: a statement, then the values of its parameters as tuples. Out: the driver's own call. SQLAlchemy
takes several times as long to prepare a statement as SQLite takes to run it
(tests/benchmarks/bench_api.py), and a transaction of puts has five such statements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from sqlalchemy import Insert, Select, insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.schema import Table


class Statement:
    """A statement whose parameters are given as a tuple, in the order of `names`.

    What holds: no parameter has a type whose values SQLAlchemy converts.
    """

    def __init__(self, statement: Insert | Select[Any], names: Sequence[str]) -> None:
        self._names: Final = list(names)
        self._statement: Final = statement
        self._texts: dict[str, str] = {}

    async def one(self, connection: AsyncConnection, values: tuple[Any, ...]) -> Iterable[Any]:
        """Runs it once; returns the rows."""
        return await connection.exec_driver_sql(self._text(connection), values)

    async def many(self, connection: AsyncConnection, values: Sequence[tuple[Any, ...]]) -> None:
        """Runs it for each of `values`."""
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


def insert_into(table: Table) -> Statement:
    """Returns the statement that inserts rows as tuples of all columns of `table` in order."""
    return Statement(insert(table), [column.name for column in table.columns])
