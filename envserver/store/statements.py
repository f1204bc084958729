"""INSERT statements that are compiled once for each kind of database.

In: a table, then rows as tuples of its columns. Out: the driver's own call. SQLAlchemy takes
several times as long to compile a statement as SQLite takes to insert a few rows
(tests/benchmarks/bench_api.py), and a transaction of puts has three such statements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Insert, insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.schema import Table


class InsertStatement:
    """Inserts rows into `table`, as tuples of all its columns in order.

    What holds: no column has a type whose values SQLAlchemy converts.
    """

    def __init__(self, table: Table) -> None:
        self._names: Final = [column.name for column in table.columns]
        self._statement: Final[Insert] = insert(table)
        self._texts: dict[str, str] = {}

    async def __call__(self, connection: AsyncConnection, rows: Sequence[tuple[Any, ...]]) -> None:
        text = self._texts.get(connection.dialect.name)
        if text is None:
            text = self._texts[connection.dialect.name] = self._compiled(connection)
        await connection.exec_driver_sql(text, list(rows))

    def _compiled(self, connection: AsyncConnection) -> str:
        made = self._statement.compile(dialect=connection.dialect, column_keys=self._names)
        assert getattr(made, "positiontup", None) == self._names
        return str(made)
