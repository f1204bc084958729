"""The index of what is looked at: a SQLite file with the tables of a store that lists read.

What holds: it can always be made again, so nothing in it is precious.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec
from envserver_records.files import storing, user_folder
from sqlalchemy import create_engine
from sqlalchemy.schema import CreateIndex, CreateTable

from ..store.compression import encode
from ..store.facts import facts_row
from ..store.schema import SCHEMA_VERSION, SHARED, bodies, deliveries, group_facts, groups
from .scanning import Found

# A file that another program made is never overwritten. The index lies beside what it is of, or in
# the user's cache where that cannot be written.

APPLICATION: Final = 0x656E7649
"""Marks a SQLite file as an index ("envI")."""
_SQLITE: Final = b"SQLite format 3\0"


def index_path(places: Sequence[str]) -> Path:
    """Returns where the index of these places is, or is to be made."""
    path = Path(places[0])
    if len(places) == 1 and (path.is_file() or path.is_dir()):
        beside = path / ".view.index" if path.is_dir() else path.with_name(f"{path.name}.index")
        if is_index(beside) or (not _exists(beside) and os.access(beside.parent, os.W_OK)):
            return beside
    named = "\n".join(os.path.abspath(one) for one in places)  # noqa: PTH100 - globs, too
    digest = hashlib.blake2b(named.encode(errors="surrogateescape"), digest_size=12).hexdigest()
    folder = user_folder("XDG_CACHE_HOME", ".cache") / "envserver" / "view"
    with storing(folder, "XDG_CACHE_HOME names another place."):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder / f"{digest}.index"


def is_index(path: Path) -> bool:
    """Returns whether `path` is an index, or an empty file, that can be written."""
    try:
        if path.is_symlink() or not path.is_file():
            return False
        with path.open("rb") as file:
            head = file.read(100)
    except OSError:
        return False
    mark = int.from_bytes(head[68:72], "big")
    is_ours = head.startswith(_SQLITE) and mark == APPLICATION
    return (is_ours or not head) and os.access(path, os.W_OK)


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()


VERSION: Final = 1000 * SCHEMA_VERSION + 1
"""Of the index and of the tables; an index of another version is made again."""
_HASHED_BYTES: Final = 65_536
_OURS: Final = """
CREATE TABLE files (
  number INTEGER PRIMARY KEY, path TEXT NOT NULL UNIQUE, run TEXT NOT NULL, part TEXT NOT NULL,
  baseline TEXT NOT NULL, state TEXT NOT NULL);
CREATE TABLE places (
  seq INTEGER PRIMARY KEY, file INTEGER NOT NULL, start INTEGER NOT NULL, length INTEGER NOT NULL,
  line INTEGER NOT NULL);
CREATE INDEX places_of_files ON places (file);
CREATE TABLE problems (message TEXT NOT NULL);
"""
_TABLES: Final = (groups, deliveries, group_facts, bodies)


class FileState(msgspec.Struct, frozen=True):
    """What is known of a file: its identity when it was read, and how far it was read.

    Args:
        head, tail: digests of the first bytes, and of the last ones before `offset`.
    """

    inode: int = 0
    size: int = -1
    mtime_ns: int = 0
    offset: int = 0
    line: int = 0
    head: str = ""
    tail: str = ""


def state_of(path: Path, offset: int, line: int) -> FileState:
    """Returns the state of a file of which `offset` bytes were read.
    Raises OSError: it cannot be read.
    """
    is_whole = path.name.endswith((".json", ".gz", ".zst"))
    with path.open("rb") as file:
        facts = os.fstat(file.fileno())
        head = tail = ""
        if not is_whole:
            head = _digest(file.read(min(_HASHED_BYTES, offset)))
            file.seek(max(0, offset - _HASHED_BYTES))
            tail = _digest(file.read(min(_HASHED_BYTES, offset)))
    return FileState(facts.st_ino, facts.st_size, facts.st_mtime_ns, offset, line, head, tail)


def may_continue(path: Path, known: FileState) -> bool:
    """Returns whether a file is what it was, or has only grown."""
    try:
        now = state_of(path, known.offset, known.line)
    except OSError:
        return False
    if now == known:
        return True
    can_grow = not path.name.endswith((".json", ".gz", ".zst")) and now.size > known.size
    same = (now.inode, now.head, now.tail) == (known.inode, known.head, known.tail)
    return can_grow and same


class Index:
    """An index that is written. One process at a time writes it (`flock` by the caller)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sql = _opened(path)
        self.next_seq = self._sql.execute(
            "SELECT coalesce(max(seq), 0) + 1 FROM groups"
        ).fetchone()[0]

    def close(self) -> None:
        self._sql.close()

    def clear(self) -> None:
        """Removes everything."""
        for table in ("places", "files", "problems", *(one.name for one in _TABLES)):
            self._sql.execute(f'DELETE FROM "{table}"')
        self._sql.commit()
        self.next_seq = 1

    def files(self) -> dict[str, tuple[int, FileState]]:
        """Returns number and state of each file, by path."""
        rows = self._sql.execute("SELECT path, number, state FROM files")
        return {path: (number, _read(state)) for path, number, state in rows}

    def put_file(
        self, number: int, path: str, names: tuple[str, str, str], state: FileState
    ) -> None:
        """Notes how far a file was read. `names`: run, part, baseline."""
        self._sql.execute(
            "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)",
            (number, path, *names, msgspec.json.encode(state).decode()),
        )

    def add(self, number: int, run: str, found: Iterable[Found]) -> None:
        """Adds groups of file `number`. Ids begin with the run where there are several, and end
        with a number where an id comes again."""
        for one in found:
            seq, facts = self.next_seq, one.facts
            self.next_seq += 1
            group_id = self._unique(f"{run}/{facts.group_id}" if run else facts.group_id)
            put = self._sql.execute
            sizes = (facts.size, facts.tokens, facts.max_length)
            origin = (facts.policy_version, None, facts.created_at)
            put(_INTO_GROUPS, (seq, group_id, facts.env, "group", *sizes, *origin))
            put(_INTO_FACTS, facts_row(seq, facts.env, facts.facts))
            delivery = (facts.env, facts.policy_version, one.length, "acked", None, None)
            put(_INTO_DELIVERIES, (SHARED, seq, *delivery))
            put(_INTO_PLACES, (seq, number, one.start, one.length, one.line))
            if one.body is not None:
                put(_INTO_BODIES, (seq, *encode(one.body)))

    def add_problem(self, message: str) -> None:
        """Notes something that is not a group, with its place."""
        self._sql.execute("INSERT INTO problems VALUES (?)", (message[:1000],))

    def problems(self) -> tuple[int, list[str]]:
        """Returns the number of problems, and the first ones."""
        (count,) = self._sql.execute("SELECT count(*) FROM problems").fetchone()
        first = self._sql.execute("SELECT message FROM problems ORDER BY rowid LIMIT 5")
        return int(count), [message for (message,) in first]

    def commit(self) -> None:
        self._sql.commit()

    def _unique(self, group_id: str) -> str:
        number, unique = 2, group_id
        while self._sql.execute(_EXISTS, (unique,)).fetchone():
            unique, number = f"{group_id}~{number}", number + 1
        return unique


def _into(table: str, columns: int) -> str:
    return f"INSERT INTO {table} VALUES ({', '.join('?' * columns)})"


_INTO_GROUPS: Final = _into("groups", len(groups.columns))
_INTO_FACTS: Final = _into("group_facts", len(group_facts.columns))
_INTO_DELIVERIES: Final = _into("deliveries", len(deliveries.columns))
_INTO_BODIES: Final = _into("bodies", len(bodies.columns))
_INTO_PLACES: Final = _into("places", 5)
_EXISTS: Final = "SELECT 1 FROM groups WHERE group_id = ?"


def _opened(path: Path) -> sqlite3.Connection:
    """Opens an index; makes it anew where it is of another version, or damaged."""
    if is_index(path):
        connection = sqlite3.connect(path, timeout=10)
        try:
            _prepare(connection)
            if connection.execute("PRAGMA user_version").fetchone()[0] == VERSION:
                return connection
        except sqlite3.DatabaseError:
            pass
        connection.close()
        path.unlink()
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # it may hold what others may not read
    connection = sqlite3.connect(path, timeout=10)
    _prepare(connection)
    engine = create_engine("sqlite://")
    made = [str(CreateTable(table).compile(engine)) for table in _TABLES]
    indexes = [str(CreateIndex(one).compile(engine)) for table in _TABLES for one in table.indexes]
    connection.executescript(";".join([*made, *indexes, _OURS]))
    connection.execute(f"PRAGMA application_id = {APPLICATION}")
    connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.commit()
    return connection


def _prepare(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA trusted_schema = OFF")
    # What is lost with the machine is made again.
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("PRAGMA cache_size = -16000")


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def _read(state: str) -> FileState:
    try:
        return msgspec.json.decode(state, type=FileState)
    except msgspec.DecodeError:
        return FileState()
