"""Records web answers by their content: the same request gets the same answer again.

    live    ask the web; equal requests of one group share one answer, nothing is kept on disk
    record  recorded answers are used, others are requested and recorded
    replay  recorded answers only; anything else is NotRecorded
    off     no web at all

In the folder: `index/ab/{key}.json` describes the answer to a request, `blobs/cd/{sha256}` is the
raw body. The key is the SHA-256 of the request's canonical JSON with the epoch. Files are written
atomically, and many processes may use one folder at once: one of them sends a request, the others
wait for it. Temporary failures are kept for replays only.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import io
import json
import os
import re
import tarfile
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from envserver_records.files import replace_file, replacing
from envserver_records.waiting import cancel_and_wait

from .fetching import Raw

Mode = Literal["live", "record", "replay", "off"]

_LOCK_SECONDS = 180.0
_LOOK_SECONDS = 0.02
_MOST_REMEMBERED_BYTES = 256 << 20
_MOST_GROUPS = 10_000
"""Maximum number of unfinished groups."""
_INDEX_NAME = re.compile(r"index/[0-9a-f]{2}/([0-9a-f]{64})\.json")
_BLOB_NAME = re.compile(r"blobs/[0-9a-f]{2}/([0-9a-f]{64})")
_MOST_MEMBER_BYTES = 256 << 20


class NotRecorded(Exception):
    """The request is not in the recording, and the web may not be asked."""


@dataclass
class Metrics:
    """Counts since the start.

    `joined`: requests that shared another one's answer. `credits`: the provider's reported charges.
    `leaks_dropped`, `leaks_seen`: leaks that were hidden, or shown.
    """

    hits: int = 0
    joined: int = 0
    misses: int = 0
    stored: int = 0
    failures: int = 0
    upstream_calls: int = 0
    upstream_seconds: float = 0.0
    upstream_bytes: int = 0
    credits: float = 0.0
    leaks_dropped: int = 0
    leaks_seen: int = 0

    def as_dict(self) -> dict[str, float]:
        return {each.name: getattr(self, each.name) for each in fields(self)}


class Recorder:
    """Answers requests in one of the modes.

    `folder`: needed to record and to replay. `epoch`: names one state of the web; another epoch
    shares nothing with it.
    """

    def __init__(self, mode: Mode, folder: Path | str | None = None, epoch: str = "1") -> None:
        if mode in ("record", "replay") and folder is None:
            raise ValueError(f"mode {mode} needs a folder")
        self.mode = mode
        self.epoch = epoch
        self.metrics = Metrics()
        self._store = Store(Path(folder)) if folder is not None else None
        self._flights: dict[str, asyncio.Task[Raw]] = {}
        self._seen: OrderedDict[str, Raw] = OrderedDict()
        self._seen_bytes = 0
        self._shown: OrderedDict[str, dict[str, str]] = OrderedDict()

    async def get(
        self,
        request: Mapping[str, Any],
        fetch: Callable[[], Awaitable[Raw]],
        *,
        group: str = "",
    ) -> Raw:
        """The answer to `request`: JSON-like, in a canonical form, with everything that it depends
        on.

        Errors of `fetch` go to every waiter, and are not kept. `group`: in mode live its equal
        requests get one answer.
        """
        if self.mode == "off":
            raise NotRecorded("there is no web here")
        key = key_of(request, self.epoch)
        try:
            raw = await self._got(key, request, fetch, group)
        except NotRecorded:
            self._showed(group, key, "nothing")
            raise
        self._showed(group, key, raw.digest)
        return raw

    def shown(self, group: str) -> tuple[int, str]:
        """The number of a group's answered requests, and a digest of them with their answers,
        whatever their order. The group is then forgotten."""
        answers = self._shown.pop(group, {})
        lines = "\n".join(f"{key} {digest}" for key, digest in sorted(answers.items()))
        return len(answers), hashlib.sha256(lines.encode()).hexdigest()

    def _showed(self, group: str, key: str, digest: str) -> None:
        if not group:
            return
        self._shown.setdefault(group, {})[key] = digest
        while len(self._shown) > _MOST_GROUPS:
            self._shown.popitem(last=False)

    async def _got(
        self,
        key: str,
        request: Mapping[str, Any],
        fetch: Callable[[], Awaitable[Raw]],
        group: str,
    ) -> Raw:
        place = key if self.mode != "live" else f"{group}/{key}"
        if place in self._seen:
            self.metrics.hits += 1
            self._seen.move_to_end(place)
            return self._seen[place]
        flight = self._flights.get(place)
        if flight is None:
            flight = asyncio.create_task(self._answer(key, request, fetch))
            self._flights[place] = flight
            flight.add_done_callback(lambda task: self._landed(place, group, task))
        else:
            self.metrics.joined += 1
        # One that asks no more must not end it for the others.
        return await asyncio.shield(flight)

    async def aclose(self) -> None:
        flights = list(self._flights.values())
        await cancel_and_wait(*flights)

    def _landed(self, place: str, group: str, flight: asyncio.Task[Raw]) -> None:
        del self._flights[place]
        if flight.cancelled() or flight.exception() is not None:
            return
        raw = flight.result()
        if (self.mode == "live" and not group) or (self.mode == "record" and not raw.lasting):
            return
        self._seen[place] = raw
        self._seen_bytes += len(raw.body)
        while self._seen_bytes > _MOST_REMEMBERED_BYTES or len(self._seen) > 10_000:
            _, old = self._seen.popitem(last=False)
            self._seen_bytes -= len(old.body)

    async def _answer(
        self, key: str, request: Mapping[str, Any], fetch: Callable[[], Awaitable[Raw]]
    ) -> Raw:
        if self._store is None or self.mode == "live":
            return await self._fetched(fetch)
        found = await asyncio.to_thread(self._store.load, key)
        if self.mode == "replay":
            if found is None:
                self.metrics.misses += 1
                raise NotRecorded("this is not in the recorded web")
            self.metrics.hits += 1
            return found
        if found is not None and found.lasting:
            self.metrics.hits += 1
            return found
        async with self._store.alone(key):
            found = await asyncio.to_thread(self._store.load, key)
            if found is not None and found.lasting:
                self.metrics.joined += 1
                return found
            self.metrics.misses += 1
            raw = await self._fetched(fetch)
            self.metrics.stored += 1
            return await asyncio.to_thread(self._store.save, key, request, self.epoch, raw)

    async def _fetched(self, fetch: Callable[[], Awaitable[Raw]]) -> Raw:
        started = time.monotonic()
        self.metrics.upstream_calls += 1
        try:
            raw = await fetch()
        except Exception:
            self.metrics.failures += 1
            raise
        finally:
            self.metrics.upstream_seconds += time.monotonic() - started
        self.metrics.upstream_bytes += len(raw.body)
        return raw


def key_of(request: Mapping[str, Any], epoch: str) -> str:
    whole = {"epoch": epoch, "request": request}
    canonical = json.dumps(whole, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode(errors="surrogatepass")).hexdigest()


class Store:
    """A folder of recorded answers; the methods block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, key: str) -> Raw | None:
        """None if there is no answer under `key`, or its files are damaged."""
        try:
            facts = json.loads(self._index(key).read_bytes())
            body = self._blob(facts["blob"]).read_bytes()
            if hashlib.sha256(body).hexdigest() != facts["blob"]:
                return None
            return Raw(body=body, **facts["answer"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            return None

    def save(self, key: str, request: Mapping[str, Any], epoch: str, raw: Raw) -> Raw:
        """Keeps `raw` under `key` unless a lasting answer is there; returns the kept one."""
        digest = hashlib.sha256(raw.body).hexdigest()
        if not self._is_whole(digest):
            _replace(self._blob(digest), raw.body)
        there = self.load(key)
        if there is not None and there.lasting:
            return there
        answer = {name: value for name, value in asdict(raw).items() if name != "body"}
        facts = {
            "request": dict(request),
            "epoch": epoch,
            "answer": answer,
            "blob": digest,
            "fetched_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        _replace(self._index(key), json.dumps(facts, ensure_ascii=True, indent=1).encode())
        return raw

    @asynccontextmanager
    async def alone(self, key: str) -> AsyncIterator[None]:
        """Locks `key` across processes; a process that dies releases it."""
        path = self._folder / "locks" / key[:2] / key
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            until = time.monotonic() + _LOCK_SECONDS
            while time.monotonic() < until:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(_LOOK_SECONDS)
            yield
        finally:
            os.close(lock)

    def export(self, path: Path) -> int:
        """Writes all of it to a tar archive, the same bytes for the same recording; returns how
        many answers."""
        count = 0
        with replacing(path, sync=False) as out, tarfile.open(fileobj=out, mode="w") as archive:
            for part, pattern in (("blobs", _BLOB_NAME), ("index", _INDEX_NAME)):
                for file in sorted((self._folder / part).glob("*/*")):
                    name = file.relative_to(self._folder).as_posix()
                    if not pattern.fullmatch(name):
                        continue
                    content = file.read_bytes()
                    facts = tarfile.TarInfo(name)
                    facts.size = len(content)
                    archive.addfile(facts, io.BytesIO(content))
                    count += part == "index"
        return count

    def take_in(self, path: Path) -> int:
        """Adds the new answers of an `export` archive; returns their number."""
        count = 0
        with tarfile.open(path, "r:") as archive:
            for facts in archive:
                stream = archive.extractfile(facts) if facts.isreg() else None
                if stream is None or facts.size > _MOST_MEMBER_BYTES:
                    raise ValueError(f"{facts.name[:200]!r} is not part of a recording")
                content = stream.read()
                blob, index = _BLOB_NAME.fullmatch(facts.name), _INDEX_NAME.fullmatch(facts.name)
                if blob and hashlib.sha256(content).hexdigest() == blob[1]:
                    if not self._is_whole(blob[1]):
                        _replace(self._blob(blob[1]), content)
                elif index and _key_in(content) == index[1]:
                    if self.load(index[1]) is None:
                        _replace(self._index(index[1]), content)
                        count += 1
                else:
                    raise ValueError(f"{facts.name[:200]!r} is not part of a recording")
        return count

    def _is_whole(self, digest: str) -> bool:
        try:
            return hashlib.sha256(self._blob(digest).read_bytes()).hexdigest() == digest
        except FileNotFoundError:
            return False

    def _index(self, key: str) -> Path:
        return self._folder / "index" / key[:2] / f"{key}.json"

    def _blob(self, digest: str) -> Path:
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise ValueError("no name of a body")
        return self._folder / "blobs" / digest[:2] / digest


def _key_in(content: bytes) -> str:
    """The key that an index file must have; "" if it has none."""
    try:
        facts = json.loads(content)
        return key_of(facts["request"], facts["epoch"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content)
