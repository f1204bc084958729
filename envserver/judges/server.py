"""The server's side of the judge: answers scorers over a Unix socket; only it has the engine's key.

Equal calls are made once, also side by side; no more than `max_concurrent` are at the engine; a
failed call is tried again by the engine's client, then it is a JudgeError; nothing here is recorded
as a call of a rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self
from weakref import WeakValueDictionary

import msgspec
import structlog
from envserver_records.costs import JudgeUsage
from envserver_records.errors import (
    ConfigError,
    EngineError,
    EngineRefused,
    EnvserverError,
    JudgeError,
)
from envserver_records.waiting import cancel_and_wait

from ..judge_interface import JudgeReply
from ..models.engine import Engine, EngineRequest
from ..sandbox.places import folder_for_sockets
from ..settings.runs import JudgeConfig
from .client import LENGTH_BYTES, MOST_BYTES, JudgeAddress, JudgeAnswer, JudgeRequest, framed

_BUSY_SECONDS = 30.0
_CHECK_EVERY = 256
"""Answers written between two looks at the file's size."""
_SCHEMA = "CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, answer BLOB NOT NULL)"

_log = structlog.get_logger("envserver.judges")
_decoder = msgspec.msgpack.Decoder(JudgeReply)


class AnswerCache:
    """A cache on disk, of which the oldest tenth is dropped at `most_bytes`; its methods block."""

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
                hint="Delete it (its answers are then requested again), or set --judge.cache.",
            ) from error

    def get(self, key: bytes) -> JudgeReply | None:
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
        """A full disk is logged and costs only the cache."""
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


_NOT_SAMPLING = {"messages", "model", "n", "stream"}
_request = msgspec.json.Decoder(JudgeRequest)

Pause = Callable[[], AbstractContextManager[None]]
"""Stops a scorer's clock while the judge is asked."""


class JudgeCounts(msgspec.Struct):
    """Counts of judge calls since the start; `calls` were answered, `cached` by the cache.

    `again`: calls after an answer that could not be read; tokens: of the engine's answers alone.
    """

    calls: int = 0
    cached: int = 0
    again: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class JudgeServer:
    def __init__(self, engine: Engine, config: JudgeConfig, cache_path: Path) -> None:
        self.counts = JudgeCounts()
        self.config = config
        self.cache_path = cache_path
        self._engine = engine
        self._cache: AnswerCache | None = None
        self._folder = ""
        self._listener: asyncio.Server | None = None
        self._places = asyncio.Semaphore(config.max_concurrent)
        self._scorers: dict[str, Pause] = {}
        self._used: dict[str, JudgeUsage] = {}
        self._asking: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._answering: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._cache = await asyncio.to_thread(
            AnswerCache, self.cache_path, self.config.cache_mb << 20
        )
        self._folder = tempfile.mkdtemp(prefix="envserver-judge-", dir=folder_for_sockets())
        self._listener = await asyncio.start_unix_server(self._connected, self._socket)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None and self._cache is not None
        self._listener.close()
        await cancel_and_wait(*self._answering)
        shutil.rmtree(self._folder, ignore_errors=True)
        await asyncio.to_thread(self._cache.close)

    def register(self, pause: Pause) -> JudgeAddress:
        key = secrets.token_hex(24)
        self._scorers[key] = pause
        return JudgeAddress(self._socket, key)

    def take_usage(self, address: JudgeAddress) -> JudgeUsage | None:
        return self._used.pop(address.key, None)

    @property
    def _socket(self) -> str:
        return f"{self._folder}/socket"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            length = int.from_bytes(await reader.readexactly(LENGTH_BYTES))
            if length > MOST_BYTES:
                return
            request = _request.decode(await reader.readexactly(length))
            pause = self._scorers.get(request.key)
            if pause is None:
                return
            with pause():
                answer = await _unless_closed(reader, self._answer(request))
            if answer is not None:
                writer.write(framed(msgspec.json.encode(answer)))
                await writer.drain()
        except (OSError, EOFError, msgspec.MsgspecError):
            return  # the scorer is gone, or it is not one
        finally:
            self._answering.discard(task)
            writer.close()

    async def _answer(self, request: JudgeRequest) -> JudgeAnswer:
        try:
            return JudgeAnswer(reply=await self.chat(request))
        except EnvserverError as error:
            return JudgeAnswer(failure=error.failure())

    async def chat(self, request: JudgeRequest) -> JudgeReply:
        assert self._cache is not None
        started = time.monotonic()
        try:
            body = await self._body(request)
            key = _key(body, request.attempt)
            lock = self._asking.setdefault(key, asyncio.Lock())
            async with lock:  # an equal call that runs already answers this one, too
                reply = await asyncio.to_thread(self._cache.get, key)
                if reply is None:
                    reply = await self._asked(body)
                    await asyncio.to_thread(self._cache.put, key, reply)
                    self.counts.prompt_tokens += reply.prompt_tokens
                    self.counts.completion_tokens += reply.completion_tokens
                else:
                    reply = msgspec.structs.replace(reply, cached=True)
                    self.counts.cached += 1
        except EnvserverError:
            self.counts.failed += 1
            raise
        self.counts.calls += 1
        self.counts.again += request.attempt > 0
        used = JudgeUsage(
            calls=1,
            cached=int(reply.cached),
            prompt_tokens=0 if reply.cached else reply.prompt_tokens,
            completion_tokens=0 if reply.cached else reply.completion_tokens,
            seconds=time.monotonic() - started,
        )
        self._used[request.key] = self._used.get(request.key, JudgeUsage()) + used
        return reply

    async def _body(self, request: JudgeRequest) -> dict[str, Any]:
        if wrong := _NOT_SAMPLING & set(request.sampling):
            raise ConfigError(f"A judge has no parameter {min(wrong)!r}.")
        with _typed():
            model = await self._engine.model_name()
        return {
            "model": model,
            "messages": request.messages,
            "temperature": self.config.temperature,
            "max_tokens": self.config.max_tokens,
            **request.sampling,
        }

    async def _asked(self, body: dict[str, Any]) -> JudgeReply:
        async with self._places:
            with _typed():
                path, seconds = "/v1/chat/completions", self.config.timeout
                answer = await self._engine.post(EngineRequest(path, body, "judge", seconds))
        return _read(answer, str(body["model"]))


async def _unless_closed(reader: asyncio.StreamReader, work: Any) -> JudgeAnswer | None:
    """Returns the result of `work`; None, and cancels it, if the scorer closes its connection."""
    working: asyncio.Task[JudgeAnswer] = asyncio.ensure_future(work)
    closing = asyncio.ensure_future(reader.read(1))
    try:
        await asyncio.wait({working, closing}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await cancel_and_wait(working, closing)


@contextlib.contextmanager
def _typed() -> Any:
    """Turns failures of the judge's engine into ours: the policy's engine is not to blame."""
    try:
        yield
    except EngineError as error:
        refused = isinstance(error, EngineRefused)
        hint = "See --judge.base_url, --judge.model_name and --judge.api_key." if refused else ""
        raise JudgeError(f"The judge's engine: {error.message}", hint=hint or error.hint) from error


def _key(body: dict[str, Any], attempt: int) -> bytes:
    content = msgspec.json.encode([body, attempt], order="deterministic")
    return hashlib.blake2b(content, digest_size=32).digest()


def _read(answer: dict[str, Any], model: str) -> JudgeReply:
    try:
        content = answer["choices"][0]["message"].get("content") or ""
        usage = answer.get("usage") or {}
        return msgspec.convert(
            {
                "content": content,
                "model": model,
                "prompt_tokens": usage.get("prompt_tokens") or 0,
                "completion_tokens": usage.get("completion_tokens") or 0,
            },
            JudgeReply,
        )
    except (LookupError, TypeError, AttributeError, msgspec.ValidationError) as error:
        raise JudgeError(f"The judge's engine gave no chat answer: {error}.") from error
