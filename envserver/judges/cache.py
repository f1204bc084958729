"""Answers of judges by content, in one SQLite file that several commands may share.

In: a key, which is a digest of all that the answer depends on. Out: the answer, if it is there. The
questions are not stored. Losing the file loses no group: it costs the judge's calls again.
"""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import msgspec
import structlog
from envserver_records.errors import ConfigError

from ..judge_interface import JudgeReply

_BUSY_SECONDS = 30.0
_CHECK_EVERY = 256
"""Answers written between two looks at the file's size."""
_SCHEMA = "CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, answer BLOB NOT NULL)"

_log = structlog.get_logger("envserver.judges")
_decoder = msgspec.msgpack.Decoder(JudgeReply)


class AnswerCache:
    """A cache on disk; its methods block and may run in any thread.

    Args:
        path: of the file; it is made when it is missing.
        most_bytes: size at which the oldest tenth is dropped.

    Raises:
        ConfigError: the file cannot be opened, or is something else.
    """

    def __init__(self, path: Path, most_bytes: int) -> None:
        self.path = path
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._written = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"The judge's cache {path} cannot be opened: {error}.",
                hint="Delete it (its answers are then asked for again), or set --judge.cache.",
            ) from error

    def get(self, key: bytes) -> JudgeReply | None:
        """Returns the answer, or None; one that cannot be read counts as missing."""
        with self._lock:
            try:
                row = self._db.execute(
                    "SELECT answer FROM answers WHERE key = ?", (key,)
                ).fetchone()
                return None if row is None else _decoder.decode(row[0])
            except (sqlite3.Error, msgspec.MsgspecError) as error:
                _log.warning("judge_cache_not_read", path=str(self.path), reason=str(error))
                return None

    def put(self, key: bytes, answer: JudgeReply) -> None:
        """Stores an answer; a full disk is told in the log and costs only the cache."""
        values = key, msgspec.msgpack.encode(answer)
        with self._lock:
            try:
                self._db.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", values)
                self._written += 1
                if self._written % _CHECK_EVERY == 0:
                    self._bound()
            except sqlite3.Error as error:
                _log.warning("judge_cache_not_written", path=str(self.path), reason=str(error))

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _bound(self) -> None:
        (pages,), (size,), (free,) = (
            self._db.execute(f"PRAGMA {name}").fetchone()
            for name in ("page_count", "page_size", "freelist_count")
        )
        if (pages - free) * size > self._most_bytes:
            self._db.execute(
                "DELETE FROM answers WHERE rowid IN (SELECT rowid FROM answers ORDER BY rowid "
                "LIMIT (SELECT 1 + count(*) / 10 FROM answers))"
            )
