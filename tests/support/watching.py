"""A page that is open: it listens to a server's live events and connects again as browsers do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx
import orjson

from .waiting import PATIENCE


class Event(NamedTuple):
    """A server-sent event."""

    id: str
    name: str
    data: dict[str, Any]


def events_in(text: str) -> list[Event]:
    """The whole events of a stream's text, which may be cut off anywhere."""
    found = []
    for block in text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
        if "data" in fields:
            found.append(Event(fields["id"], fields["event"], orjson.loads(fields["data"])))
    return found


class Page:
    """What was seen over any number of connections.

    Args:
        last_id: cursor of the last event.
        groups: numbers of the groups that it was told of, in order.
    """

    def __init__(self) -> None:
        self.last_id = ""
        self.seq: int | None = None
        self.events: list[Event] = []
        self.groups: list[int] = []

    def see(self, event: Event) -> None:
        """Notes an event.

        Raises:
            AssertionError: a group came twice, or one was left out.
        """
        self.last_id = event.id
        self.events.append(event)
        if event.name == "hello":
            assert self.seq in (None, event.data["seq"])
            self.seq = event.data["seq"]
        if event.name in ("group", "groups"):
            one = event.data.get("seq")
            first, last = event.data.get("first_seq", one), event.data.get("last_seq", one)
            assert first == (self.seq or 0) + 1, event
            assert event.data.get("count", 1) == last - first + 1
            self.seq = last
            self.groups += range(first, last + 1)

    def named(self, name: str) -> list[dict[str, Any]]:
        """The data of the events of a name."""
        return [event.data for event in self.events if event.name == name]


class Connection:
    """One connection of a page."""

    def __init__(self, page: Page, answer: httpx.Response) -> None:
        self._page = page
        self._lines = answer.aiter_lines()
        self.ended = False

    async def next(self) -> Event:
        """The next event.

        Raises:
            EOFError: the server ended the stream.
        """
        block = ""
        async with asyncio.timeout(PATIENCE):
            async for line in self._lines:
                block += f"{line}\n"
                if not line:
                    if found := events_in(block):
                        self._page.see(found[0])
                        return found[0]
                    block = ""
        raise EOFError

    async def until(self, name: str, **facts: Any) -> dict[str, Any]:
        """The data of the next event of this name with these facts."""
        while True:
            event = await self.next()
            if event.name == name and facts.items() <= event.data.items():
                return event.data


@asynccontextmanager
async def watching(
    http: httpx.AsyncClient, page: Page, headers: dict[str, str] | None = None
) -> AsyncIterator[Connection]:
    """A connection, from where the page was; `hello` has come."""
    known = {"last-event-id": page.last_id} if page.last_id else {}
    async with http.stream("GET", "/v1/events", headers=known | (headers or {})) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        connection = Connection(page, answer)
        await connection.until("hello")
        yield connection
