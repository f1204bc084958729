"""The condition that a text begins with a prefix, as one that an index can answer."""

from __future__ import annotations

from sqlalchemy import Column, ColumnElement, Dialect, and_, func


def begins_with(column: Column[str], prefix: str, dialect: Dialect) -> ColumnElement[bool]:
    """Returns the condition that `column` begins with `prefix`.

    SQLite orders texts by their bytes, so it needs to look at a part of the column's index only.
    PostgreSQL orders them by the rules of the database's language and looks at all.
    """
    begins = func.substr(column, 1, len(prefix)) == prefix
    if dialect.name != "sqlite" or not prefix:
        return begins
    after = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    return and_(column >= prefix, column < after, begins)
