"""GET /v1/events: what happens at the server, as server-sent events with resume.

    id: <boot>.<number>.<seq>     the cursor; browsers send it back as Last-Event-ID
    event: group                  the kinds are listed in this room's README
    data: {...}                   JSON in one line

What holds: a connection begins with `hello`; groups of its `seq` or less are in the lists, and each
later one is told of exactly once, also over broken connections and restarts of the server. What a
watcher costs does not grow with what is watched: events are encoded once for all, and who reads too
slowly is disconnected.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final

import structlog
from fastapi import APIRouter, Header
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..access.quotas import TooManyRequests
from ..bodies import ABORT, Hangup
from ..native.answers import answers
from .feed import Feed, FellBehind, Start

log = structlog.get_logger(__name__)

EVENTS: Final = "text/event-stream"
MOST_WATCHERS: Final = 1000
_RETRY: Final = b"retry: 1000\n\n"
_KEEP_ALIVE: Final = b":\n\n"
_KEEP_ALIVE_SECONDS: Final = 15.0
_SLOW_SECONDS: Final = 30.0
"""A client that reads nothing for this long is disconnected."""
_AGAIN_SECONDS: Final = 5.0


async def _nothing() -> None:
    """Looks for nothing."""


def add_event_routes(
    router: APIRouter,
    feed: Feed,
    version: Callable[[], int] = lambda: -1,
    look: Callable[[], Awaitable[None]] = _nothing,
) -> None:
    """Adds GET /v1/events.

    Args:
        version: returns the current policy version.
        look: publishes what has happened since it was called last.
    """

    @router.get(
        "/v1/events",
        response_class=Response,
        responses=answers(None, media_types=(EVENTS,), what="An endless stream of events."),
    )
    async def events(last_event_id: Annotated[str, Header(max_length=100)] = "") -> Response:
        """Pushes what happens as server-sent events: groups, samples of the numbers, failures,
        policy versions, runs, engines, alarms. With `Last-Event-ID` the stream continues after
        that event; if it cannot, because the server was restarted or too much happened since,
        `resync` says that lists must be read again.
        """
        if feed.watchers >= MOST_WATCHERS:
            message = f"The server has {feed.watchers} watchers already."
            raise TooManyRequests(message, _AGAIN_SECONDS)
        return EventsAnswer(feed, last_event_id, version, look)


class EventsAnswer(Response):
    """Sends events for as long as the client listens."""

    media_type = EVENTS

    def __init__(
        self,
        feed: Feed,
        last_id: str,
        version: Callable[[], int],
        look: Callable[[], Awaitable[None]],
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
            # A first watcher must not be told of all groups that came while nobody watched.
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
        """Returns the first events of a connection."""

        def event(name: str, data: dict[str, Any], seq: int) -> bytes:
            return feed.encoded(name, data, start.number, seq)

        feed, first = self._feed, b""
        if start.resync:
            first += event("resync", {"reason": start.resync}, start.seq)
        hello = {"boot": feed.boot, "time": time.time(), "policy_version": self._version()}
        first += event("hello", hello | {"seq": start.seq}, start.seq)
        if start.seq < start.told:
            first += event("groups", missed(start.seq, start.told), start.told)
        return first

    async def _send_events(self, number: int, hangup: Hangup, write: Callable[..., Any]) -> None:
        """Sends events after `number` until the client or the server ends, or it falls behind."""
        while not hangup.gone:
            try:
                part, number = self._feed.after(number)
            except FellBehind:
                return  # the client connects again, and is told to read lists again
            if part:
                await write(part)
                continue
            more = asyncio.create_task(self._feed.more(number))
            await hangup.wait(more, seconds=_KEEP_ALIVE_SECONDS)
            if self._feed.number == number and not hangup.gone:
                await write(_KEEP_ALIVE)


def missed(seen: int, last: int) -> dict[str, int]:
    """Returns the event `groups` of those after number `seen`, up to number `last`."""
    return {"count": last - seen, "first_seq": seen + 1, "last_seq": last}


def _abort(scope: Scope) -> None:
    """Closes the connection without waiting for what the client does not take."""
    abort = scope.get("extensions", {}).get(ABORT)
    if abort is not None:
        abort["abort"]()
