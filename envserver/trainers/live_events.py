"""Live events (GET /v1/events) in a ring, for any number of watchers.

Memory is bounded and does not depend on the watchers: events are encoded once for all, and a
watcher that reads too slowly is disconnected. A cursor is `<boot>.<number of the event>.<seq of the
last group>`, which browsers send back as Last-Event-ID; `boot` changes when the server starts. A
cursor that the ring still has continues without a gap and without a repetition."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Annotated, Any, Final

import msgspec
import orjson
import structlog
from fastapi import APIRouter, Header
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..http.answers import route
from ..http.middleware import TooManyRequests
from ..http.requests import ABORT, Hangup
from ..store.rows import Changes

MOST_EVENTS: Final = 4096
MOST_BYTES: Final = 8 * 1024 * 1024
_WAKE_SECONDS: Final = 0.25
"""Between two times that watchers are woken: a burst of events is one write to each."""
_AT_ONCE_BYTES: Final = 128 * 1024
"""Bytes of one write, unless a single event has more."""
_ID: Final = re.compile(r"([0-9a-f]{8})\.(\d{1,18})\.(\d{1,18})")


class FellBehind(Exception): ...


class Start(msgspec.Struct, frozen=True):
    """Where a watcher starts.

    Args:
        number: of the last event that it has, or may miss.
        seq: of the last group that it received, or finds in lists.
        before: of the last group before the events that follow; groups between were missed.
        resync: why it cannot just continue: restarted, missed; "": it can.
    """

    number: int
    seq: int
    before: int
    resync: str = ""


class _Event(msgspec.Struct, frozen=True):
    """An event about the groups after number `before`, up to number `seq`."""

    number: int
    before: int
    data: bytes


class Feed:
    """The events of one server.

    Attributes:
        boot: names this start of the server.
        number: of the last event.
        seq: of the last published group. Set it before the first watcher comes.
    """

    def __init__(self, *, most_events: int = MOST_EVENTS) -> None:
        self.boot = secrets.token_hex(4)
        self.number = 0
        self.seq = 0
        self.watchers = 0
        self.watched = asyncio.Event()
        """Set while there are watchers."""
        self._ring: deque[_Event] = deque()
        self._bytes = 0
        self._most_events = most_events
        self._announced = Changes()
        self._waking: asyncio.TimerHandle | None = None

    def publish(self, name: str, data: Any, *, seq: int | None = None) -> None:
        """Adds an event with JSON-like data; `seq`: of the last group that it is about."""
        before = self.seq
        self.number += 1
        self.seq = before if seq is None else max(before, seq)
        event = _Event(self.number, before, self.encoded(name, data, self.number, self.seq))
        self._ring.append(event)
        self._bytes += len(event.data)
        while len(self._ring) > self._most_events or self._bytes > MOST_BYTES:
            self._bytes -= len(self._ring.popleft().data)
        if self.watchers and self._waking is None:
            loop = asyncio.get_running_loop()
            self._waking = loop.call_later(_WAKE_SECONDS, self._wake)

    def _wake(self) -> None:
        self._waking = None
        self._announced.announce(self.number)

    def encoded(self, name: str, data: Any, number: int, seq: int) -> bytes:
        cursor = f"{self.boot}.{number}.{seq}"
        line = orjson.dumps(data, default=str, option=orjson.OPT_SERIALIZE_NUMPY)
        return b"id: %s\nevent: %s\ndata: %s\n\n" % (cursor.encode(), name.encode(), line)

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.watchers += 1
        self.watched.set()
        try:
            yield
        finally:
            self.watchers -= 1
            if not self.watchers:
                self.watched.clear()

    def start(self, last_id: str) -> Start:
        """Returns where a watcher starts that has seen the cursor `last_id` ("": a new one)."""
        if not last_id:
            return Start(self.number, self.seq, self.seq)
        found = _ID.fullmatch(last_id)
        if found is None:
            return Start(self.number, self.seq, self.seq, "restarted")
        number, seq = int(found[2]), min(int(found[3]), self.seq)
        if found[1] != self.boot:
            return Start(self.number, seq, self.seq, "restarted")
        ahead = self.number - number
        if not 0 <= ahead <= len(self._ring):
            return Start(self.number, seq, self.seq, "missed")
        return Start(number, seq, self._ring[-ahead].before if ahead else self.seq)

    def after(self, number: int) -> tuple[bytes, int]:
        """Returns events after `number`, some 100 KB of them, and the number of the last one."""
        if self.number - number > len(self._ring):
            raise FellBehind
        newest_first = list(islice(reversed(self._ring), self.number - number))
        parts: list[bytes] = []
        size = 0
        while newest_first and (not parts or size + len(newest_first[-1].data) <= _AT_ONCE_BYTES):
            parts.append(newest_first.pop().data)
            size += len(parts[-1])
        return b"".join(parts), number + len(parts)

    async def more(self, number: int) -> None:
        while self.number <= number or self._waking is not None:
            await self._announced.wait(self._announced.number, None)


log = structlog.get_logger(__name__)

EVENTS: Final = "text/event-stream"
MOST_WATCHERS: Final = 1000
_RETRY: Final = b"retry: 1000\n\n"
_KEEP_ALIVE: Final = b":\n\n"
_KEEP_ALIVE_SECONDS: Final = 15.0
_SLOW_SECONDS: Final = 30.0
"""A client that reads nothing for this long is disconnected."""
_AGAIN_SECONDS: Final = 5.0


def add_event_routes(
    router: APIRouter,
    feed: Feed,
    version: Callable[[], int] = lambda: -1,
    look: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Adds GET /v1/events. `look`: publishes what has happened since its last call."""

    @router.get(
        "/v1/events",
        response_class=Response,
        **route(None, media_types=(EVENTS,), what="An endless stream of events."),
    )
    async def events(last_event_id: Annotated[str, Header(max_length=100)] = "") -> Response:
        """Pushes what happens as server-sent events: groups, samples of the numbers, failures,
        policy versions, runs, engines, alarms. With `Last-Event-ID` the stream continues after
        that event; if it cannot, because the server was restarted or too much happened since,
        `resync` says that lists must be read again."""
        if feed.watchers >= MOST_WATCHERS:
            message = f"The server has {feed.watchers} watchers already."
            raise TooManyRequests(message, _AGAIN_SECONDS)
        return EventsAnswer(feed, last_event_id, version, look)


class EventsAnswer(Response):
    media_type = EVENTS

    def __init__(
        self,
        feed: Feed,
        last_id: str,
        version: Callable[[], int],
        look: Callable[[], Awaitable[None]] | None,
    ) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-store"
        self.headers["x-accel-buffering"] = "no"
        self._feed = feed
        self._last_id = last_id
        self._version = version
        self._look = look

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(part: bytes, *, more: bool = True) -> None:
            async with asyncio.timeout(_SLOW_SECONDS):
                await send({"type": "http.response.body", "body": part, "more_body": more})

        with self._feed.watching():
            # A first watcher must not get all groups that came without watchers.
            if self._look is not None:
                await self._look()
            start = self._feed.start(self._last_id)
            async with Hangup(receive) as hangup:
                await send(
                    {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                )
                try:
                    await write(_RETRY + self._first(start))
                    await self._send_events(start.number, hangup, write)
                    await write(b"", more=False)
                except TimeoutError:
                    log.info("watcher_too_slow", seconds=_SLOW_SECONDS)
                    _abort(scope)
                    await hangup.wait(seconds=_AGAIN_SECONDS)

    def _first(self, start: Start) -> bytes:
        def event(name: str, data: dict[str, Any], seq: int) -> bytes:
            return feed.encoded(name, data, start.number, seq)

        feed, first = self._feed, b""
        if start.resync:
            first += event("resync", {"reason": start.resync}, start.seq)
        hello = {"boot": feed.boot, "time": time.time(), "policy_version": self._version()}
        first += event("hello", hello | {"seq": start.seq}, start.seq)
        if start.seq < start.before:
            first += event("groups", missed(start.seq, start.before), start.before)
        return first

    async def _send_events(self, number: int, hangup: Hangup, write: Callable[..., Any]) -> None:
        while not hangup.gone:
            try:
                part, number = self._feed.after(number)
            except FellBehind:
                return  # the client connects again, and reads lists again
            if part:
                await write(part)
                continue
            more = asyncio.create_task(self._feed.more(number))
            await hangup.wait(more, seconds=_KEEP_ALIVE_SECONDS)
            if self._feed.number == number and not hangup.gone:
                await write(_KEEP_ALIVE)


def missed(seen: int, last: int) -> dict[str, int]:
    return {"count": last - seen, "first_seq": seen + 1, "last_seq": last}


def _abort(scope: Scope) -> None:
    """Closes the connection without waiting for what the client does not take."""
    abort = scope.get("extensions", {}).get(ABORT)
    if abort is not None:
        abort["abort"]()
