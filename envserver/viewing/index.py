"""The index of viewed files: a SQLite file with the tables of a store that lists read.

It can always be rebuilt; bodies are read from the files by offset. It lies beside its source or, if
that cannot be written, in the user's cache, and never replaces a file of another program.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import orjson
from envserver_records.errors import InputError, NotFoundError
from envserver_records.files import storing, user_folder
from envserver_records.records import Group, pack, unpack
from msgspec.structs import replace
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.schema import CreateIndex, CreateTable

from ..store.database import typed_failures
from ..store.listing import GroupQuery, Page, RewardCounts
from ..store.lookups import GroupLookups, only_reading, sqlite_url
from ..store.packed import RAW, decode, encode, facts_row
from ..store.schema import SCHEMA_VERSION, SHARED, bodies, deliveries, group_facts, groups
from .scanning import Found, group_of_line

APPLICATION: Final = 0x656E7649
"""Marks a SQLite file as an index ("envI")."""
_SQLITE: Final = b"SQLite format 3\0"


def index_path(places: Sequence[str]) -> Path:
    path = Path(places[0])
    if len(places) == 1 and (path.is_file() or path.is_dir()):
        beside = path / ".view.index" if path.is_dir() else path.with_name(f"{path.name}.index")
        is_free = not (beside.exists() or beside.is_symlink())
        if is_index(beside) or (is_free and os.access(beside.parent, os.W_OK)):
            return beside
    named = "\n".join(os.path.abspath(place) for place in places)  # noqa: PTH100 - globs, too
    digest = hashlib.blake2b(named.encode(errors="surrogateescape"), digest_size=12).hexdigest()
    folder = user_folder("XDG_CACHE_HOME", ".cache") / "envserver" / "view"
    with storing(folder, "XDG_CACHE_HOME names another place."):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder / f"{digest}.index"


def is_index(path: Path) -> bool:
    """Whether `path` is an index, or an empty file, that can be written."""
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
    """How far a file was read; digests of its first bytes and of the last ones before `offset`."""

    inode: int = 0
    size: int = -1
    mtime_ns: int = 0
    offset: int = 0
    line: int = 0
    head: str = ""
    tail: str = ""


def state_of(path: Path, offset: int, line: int) -> FileState:
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
        for table in ("places", "files", "problems", *(table_of.name for table_of in _TABLES)):
            self._sql.execute(f'DELETE FROM "{table}"')
        self._sql.commit()
        self.next_seq = 1

    def files(self) -> dict[str, tuple[int, FileState]]:
        rows = self._sql.execute("SELECT path, number, state FROM files")
        return {path: (number, _read(state)) for path, number, state in rows}

    def put_file(
        self, number: int, path: str, names: tuple[str, str, str], state: FileState
    ) -> None:
        self._sql.execute(
            "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)",
            (number, path, *names, msgspec.json.encode(state).decode()),
        )

    def add(self, number: int, run: str, found: Found | InputError) -> None:
        """Adds a group of file `number`, or notes a line that is none, with its place.

        Ids begin with the run, if any, and end with a number where one comes again.
        """
        put = self._insert
        if isinstance(found, InputError):
            put("problems", found.message[:1000])
            return
        seq, facts = self.next_seq, found.facts
        self.next_seq += 1
        group_id = self._unique(f"{run}/{facts.group_id}" if run else facts.group_id)
        sizes = (facts.size, facts.tokens, facts.max_length)
        origin = (facts.policy_version, None, facts.created_at)
        put("groups", seq, group_id, facts.env, "group", *sizes, *origin)
        put("group_facts", *facts_row(seq, facts.env, facts.facts))
        delivery = (facts.env, facts.policy_version, found.length, "acked", None, None)
        put("deliveries", SHARED, seq, *delivery)
        put("places", seq, number, found.start, found.length, found.line)
        if found.body is not None:
            put("bodies", seq, *encode(found.body))

    def _insert(self, table: str, *values: Any) -> None:
        self._sql.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", values)

    def problems(self) -> tuple[int, list[str]]:
        (count,) = self._sql.execute("SELECT count(*) FROM problems").fetchone()
        first = self._sql.execute("SELECT message FROM problems ORDER BY rowid LIMIT 5")
        return int(count), [message for (message,) in first]

    def commit(self) -> None:
        self._sql.commit()

    def _unique(self, group_id: str) -> str:
        number, unique = 2, group_id
        exists = "SELECT 1 FROM groups WHERE group_id = ?"
        while self._sql.execute(exists, (unique,)).fetchone():
            unique, number = f"{group_id}~{number}", number + 1
        return unique


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
    indexes = [
        str(CreateIndex(index).compile(engine)) for table in _TABLES for index in table.indexes
    ]
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


MOST_BYTES: Final = 2 << 30
"""Size of all groups above which their texts are not searched."""
_PAGE: Final = 64
_PLACES: Final = text(
    "SELECT p.seq, f.path, p.start, p.length, b.encoding, b.body FROM places p"
    " LEFT JOIN files f ON f.number = p.file LEFT JOIN bodies b ON b.seq = p.seq"
    " WHERE p.seq > :after ORDER BY p.seq LIMIT :most"
)
_SIZE: Final = text("SELECT coalesce(sum(length), 0) FROM places")


class TextSearch:
    """Searches the groups of one index; remembers the last search."""

    def __init__(self) -> None:
        self._text, self._after = "", 0
        self._found: list[int] = []
        self._lock = asyncio.Lock()
        self._wanted = ""

    async def matching(self, connection: AsyncConnection, wanted: str) -> list[int]:
        """Returns the numbers of the groups that have this text; none of too large a file."""
        self._wanted = wanted
        async with self._lock:
            if wanted != self._text:
                self._text, self._after, self._found = wanted, 0, []
            if (await connection.execute(_SIZE)).scalar_one() > MOST_BYTES:
                return []
            needle = orjson.dumps(wanted)[1:-1].lower()
            while self._wanted == wanted:
                values = {"after": self._after, "most": _PAGE}
                rows = (await connection.execute(_PLACES, values)).all()
                if not rows:
                    break
                found = await asyncio.to_thread(_those, rows, needle)
                self._after, self._found = rows[-1].seq, self._found + found
            return self._found


class _Rollout(msgspec.Struct):
    messages: msgspec.Raw = msgspec.Raw()
    output: msgspec.Raw = msgspec.Raw()
    others: msgspec.Raw = msgspec.Raw()


class _Origin(msgspec.Struct):
    rollouts: list[_Rollout] = []


class _Texts(msgspec.Struct):
    """The part of a line that people search."""

    messages: msgspec.Raw = msgspec.Raw()
    envserver: _Origin | None = None


_DECODER: Final = msgspec.json.Decoder(_Texts)


def _has(line: bytes, needle: bytes) -> bool:
    if needle not in line.lower():
        return False
    try:
        texts = _DECODER.decode(line)
    except msgspec.DecodeError:
        return False
    rollouts = texts.envserver.rollouts if texts.envserver is not None else []
    parts = [
        texts.messages,
        *(part for rollout in rollouts for part in msgspec.structs.astuple(rollout)),
    ]
    return any(needle in bytes(part).lower() for part in parts)


def _those(rows: Any, needle: bytes) -> list[int]:
    found = []
    for seq, path, start, length, encoding, body in rows:
        with suppress(OSError):  # it was removed meanwhile
            if _has(_line(path, start, length, encoding, body), needle):
                found.append(seq)
    return found


_PLACE = text(
    "SELECT f.path, p.start, p.length, p.line, b.encoding, b.body FROM groups g"
    " JOIN places p ON p.seq = g.seq LEFT JOIN files f ON f.number = p.file"
    " LEFT JOIN bodies b ON b.seq = g.seq WHERE g.group_id = :group_id"
)


class IndexReader(GroupLookups):
    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._search = TextSearch()

    async def list_groups(self, query: GroupQuery, cursor: str, limit: int) -> Page:
        return await super().list_groups(await self._with_found(query), cursor, limit)

    async def reward_counts(self, query: GroupQuery) -> RewardCounts:
        return await super().reward_counts(await self._with_found(query))

    async def _with_found(self, query: GroupQuery) -> GroupQuery:
        if not query.text:
            return query
        async with self._reading() as connection:
            found = await self._search.matching(connection, query.text)
        return replace(query, found=found)

    async def bodies(self, group_ids: Sequence[str]) -> list[bytes]:
        return [await self._body(group_id) for group_id in group_ids]

    async def stored_bodies(self, group_ids: Sequence[str]) -> list[tuple[int, bytes]]:
        return [(RAW, body) for body in await self.bodies(group_ids)]

    async def groups_of_tasks(self, run: str, part: str) -> dict[str, str]:
        """Returns the first group of each task in a part of a run, by the task's id."""
        query = (
            "SELECT t.task_id, g.group_id FROM files f JOIN places p ON p.file = f.number"
            " JOIN groups g ON g.seq = p.seq JOIN group_facts t ON t.seq = p.seq"
            " WHERE f.run = :run AND f.baseline = '' AND (f.part = :part OR"
            " (f.part = '' AND g.env = :part)) ORDER BY g.seq DESC"
        )
        async with self._reading() as connection:
            rows = await connection.execute(text(query), {"run": run, "part": part})
            return {row.task_id: row.group_id for row in rows}

    async def _body(self, group_id: str) -> bytes:
        async with self._reading() as connection:
            found = (await connection.execute(_PLACE, {"group_id": group_id})).one_or_none()
        if found is None:
            raise NotFoundError(f"There is no group {group_id}.", group_id=group_id)
        return await asyncio.to_thread(_packed, group_id, *found)

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[AsyncConnection]:
        with typed_failures():
            async with self._engine.connect() as connection:
                yield connection


@asynccontextmanager
async def open_index(path: Path) -> AsyncIterator[IndexReader]:
    """Opens an index for reading; another process may be writing it."""
    async with only_reading(sqlite_url(path)) as engine:
        yield IndexReader(engine)


def _packed(
    group_id: str,
    path: str | None,
    start: int,
    length: int,
    line: int,
    encoding: int | None,
    body: Any,
) -> bytes:
    place = f"{path}, line {line}" if line else str(path)
    try:
        data = _line(path, start, length, encoding, body)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    packed = pack(replace(group_of_line(data, place), group_id=group_id))
    try:
        unpack(packed, Group)  # a file may hold anything
    except msgspec.DecodeError as error:
        raise InputError(f"{place} is not a group: {error}.", place=place) from error
    return packed


def _line(path: str | None, start: int, length: int, encoding: int | None, body: Any) -> bytes:
    """Returns the line of a group, from its file or, where that lacks it, from the index."""
    if encoding is not None:
        return decode(encoding, body)
    with Path(path or "").open("rb") as file:
        file.seek(start)
        return file.read(length)
