"""Statements that are compiled once for each kind of database.

In: a statement, then the values of its parameters as tuples. Out: the driver's own call. SQLAlchemy
takes several times as long to prepare a statement as SQLite takes to run it
(tests/benchmarks/bench_api.py), and a transaction of puts has five such statements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from sqlalchemy import BindParameter, Insert, Select, Update, bindparam, insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.schema import Table

_LENGTHS: Final = (1, 8, 64, 500)
"""Lengths of lists; databases limit a statement's parameters."""


class Statement:
    """A statement whose parameters are given as a tuple, in the order of `names`.

    What holds: no parameter has a type whose values SQLAlchemy converts.
    """

    def __init__(self, statement: Insert | Select[Any] | Update, names: Sequence[str]) -> None:
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


class ListStatement:
    """A query for rows that have one of a list of values, of any length.

    What holds: as for `Statement`. It is compiled for a few lengths; the last value fills up.

    Args:
        query: returns the query, from the parameters for the list.
        names: of its other parameters, which stand before the list.
    """

    def __init__(
        self, query: Callable[[Sequence[BindParameter[Any]]], Select[Any]], names: Sequence[str]
    ) -> None:
        self._query = query
        self._names = names
        self._by_length: dict[int, Statement] = {}

    async def all(
        self, connection: AsyncConnection, values: tuple[Any, ...], listed: Sequence[Any]
    ) -> list[Any]:
        """Returns the rows for all of `listed`; it may be of any length."""
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
            names = [*self._names, *(one.key for one in listed)]
            self._by_length[length] = Statement(self._query(listed), names)
        return self._by_length[length]


def insert_into(table: Table) -> Statement:
    """Returns the statement that inserts rows as tuples of all columns of `table` in order."""
    return Statement(insert(table), [column.name for column in table.columns])
