"""Turns errors of the database, its driver and the file system into errors of this package."""

from __future__ import annotations

import errno
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from envserver_records.errors import (
    ConfigError,
    ConflictError,
    EnvserverError,
    InputError,
    StoreError,
    StoreFull,
)
from sqlalchemy.exc import DBAPIError, SQLAlchemyError, StatementError

from .compression import DamagedBody

_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_FULL_SQLSTATES: Final = frozenset({"53100"})  # PostgreSQL: disk_full
_UNREACHABLE_SQLSTATES: Final = frozenset(
    {"57P01", "57P02", "57P03", "53300"}
)  # PostgreSQL: shutting down, crashed, starting, or too many clients
_FULL_SQLITE: Final = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE})
_NOT_WRITABLE: Final = {
    sqlite3.SQLITE_BUSY: "Another program has locked its file: end that one.",
    sqlite3.SQLITE_READONLY: "Let this user write the file, or name another one by --store.",
    sqlite3.SQLITE_CANTOPEN: "Let this user write the file's folder, or name another --store.",
}
_SQLITE_PRIMARY: Final = 0xFF
"""The low byte of SQLite's extended error codes is the kind of failure."""


def typed(error: Exception) -> Exception:
    """Returns `error` as StoreFull, InputError, ConfigError or StoreError; unchanged if none fits.

    The text contains no SQL and no values, because they may contain a body.
    """
    cause = (error.orig or error) if isinstance(error, StatementError) else error
    if isinstance(cause, EnvserverError):
        return cause
    if _is_full(cause):
        return StoreFull(
            f"The store has no space left ({cause}).", hint="Free space, then continue."
        )
    if _sqlite_code(cause) & _SQLITE_PRIMARY == sqlite3.SQLITE_NOTADB:
        return ConfigError(
            "The store's file is not an SQLite database.", hint="Name another --store."
        )
    if _is_bad_value(cause):
        return InputError(f"A value cannot be stored ({cause}).", place="value")
    if isinstance(cause, DamagedBody):
        return StoreError(f"A stored body is damaged ({cause}).")
    if hint := _NOT_WRITABLE.get(_sqlite_code(cause) & _SQLITE_PRIMARY):
        return StoreError(f"The store cannot be written ({cause}).", hint=hint)
    if isinstance(error, SQLAlchemyError | sqlite3.Error | OSError):
        return StoreError(f"The store failed ({type(cause).__name__}: {cause}).")
    return error


def is_unreachable(error: Exception) -> bool:
    """Returns whether the database does not answer, as opposed to reporting an error."""
    cause = (error.orig or error) if isinstance(error, StatementError) else error
    sqlstate = getattr(cause, "sqlstate", None) or ""
    return (
        (isinstance(error, DBAPIError) and error.connection_invalidated)
        or isinstance(cause, ConnectionError | TimeoutError | socket.gaierror)
        or sqlstate[:2] == "08"
        or sqlstate in _UNREACHABLE_SQLSTATES
    )


@contextmanager
def typed_failures() -> Iterator[None]:
    """Raises `typed(error)` in place of each exception of the body."""
    try:
        yield
    except Exception as error:
        better = typed(error)
        if better is error:
            raise
        raise better from error


def _sqlite_code(cause: object) -> int:
    return getattr(cause, "sqlite_errorcode", 0)


def _is_full(cause: object) -> bool:
    if isinstance(cause, OSError) and cause.errno in _FULL_ERRNOS:
        return True
    code = _sqlite_code(cause)
    return (
        code in _FULL_SQLITE
        or code & _SQLITE_PRIMARY == sqlite3.SQLITE_FULL
        or getattr(cause, "sqlstate", None) in _FULL_SQLSTATES
    )


def _is_bad_value(cause: object) -> bool:
    """Returns whether a value cannot be stored: not UTF-8, beyond 64 bits, or too large."""
    sqlstate = getattr(cause, "sqlstate", None) or ""
    return (
        isinstance(cause, UnicodeError | OverflowError | sqlite3.DataError) or sqlstate[:2] == "22"
    )


def already_open(name: str, holder: str) -> ConflictError:
    return ConflictError(
        f"The store {name} is open in another process ({holder}).",
        hint="Stop that one first, or name another --store.",
        store=name,
    )
