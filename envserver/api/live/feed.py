"""Live events in a ring, for any number of watchers that come, go and come again.

In: events, each encoded once. Out: bytes of server-sent events after a cursor. What holds: memory
is bounded and does not depend on the watchers, who are woken a few times a second at most; a cursor
that the ring still has continues without a gap and without a repetition. A cursor is
`<boot>.<number of the event>.<seq of the last group>`: `boot` changes when the server starts.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final

import msgspec
import orjson

from ...store.statistics import Changes

MOST_EVENTS: Final = 4096
MOST_BYTES: Final = 8 * 1024 * 1024
_WAKE_SECONDS: Final = 0.25
"""Between two times that watchers are woken: a burst of events is one write to each."""
_AT_ONCE_BYTES: Final = 128 * 1024
"""Bytes of one write, unless a single event has more."""
_ID: Final = re.compile(r"([0-9a-f]{8})\.(\d{1,18})\.(\d{1,18})")


class FellBehind(Exception):
    """The ring no longer has the event after a cursor."""


class Start(msgspec.Struct, frozen=True):
    """Where a watcher starts.

    Args:
        number: of the last event that it has, or may miss.
        seq: of the last group that it was told of, or finds in lists.
        told: of the last group before the events that follow; groups between were missed.
        resync: why it cannot just continue: restarted, missed; "": it can.
    """

    number: int
    seq: int
    told: int
    resync: str = ""


class _Event(msgspec.Struct, frozen=True):
    """An event; it tells of the groups after number `before`, up to number `seq`."""

    number: int
    before: int
    data: bytes


class Feed:
    """The events of one server.

    Args:
        boot: names this start of the server; default: a random name.

    Attributes:
        number: of the last event.
        seq: of the last group that was told of. Set it before the first watcher comes.
    """

    def __init__(
        self,
        *,
        most_events: int = MOST_EVENTS,
        most_bytes: int = MOST_BYTES,
        boot: str = "",
    ) -> None:
        self.boot = boot or secrets.token_hex(4)
        self.number = 0
        self.seq = 0
        self.watchers = 0
        self.watched = asyncio.Event()
        """Set while somebody watches."""
        self._ring: deque[_Event] = deque()
        self._bytes = 0
        self._most_events = most_events
        self._most_bytes = most_bytes
        self._told = Changes()
        self._waking: asyncio.TimerHandle | None = None

    def publish(self, name: str, data: Any, *, seq: int | None = None) -> None:
        """Adds an event.

        Args:
            data: JSON-like.
            seq: of the last group that it tells of.
        """
        before = self.seq
        self.number += 1
        self.seq = before if seq is None else max(before, seq)
        event = _Event(self.number, before, self.encoded(name, data, self.number, self.seq))
        self._ring.append(event)
        self._bytes += len(event.data)
        while len(self._ring) > self._most_events or self._bytes > self._most_bytes:
            self._bytes -= len(self._ring.popleft().data)
        if self.watchers and self._waking is None:
            loop = asyncio.get_running_loop()
            self._waking = loop.call_later(_WAKE_SECONDS, self._wake)

    def _wake(self) -> None:
        self._waking = None
        self._told.announce(self.number)

    def encoded(self, name: str, data: Any, number: int, seq: int) -> bytes:
        """Returns an event as bytes, with the cursor after it."""
        cursor = f"{self.boot}.{number}.{seq}"
        line = orjson.dumps(data, default=str, option=orjson.OPT_SERIALIZE_NUMPY)
        return b"id: %s\nevent: %s\ndata: %s\n\n" % (cursor.encode(), name.encode(), line)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Counts a watcher while the block runs."""
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
        """Returns events after `number`, some 100 KB of them, and the number of the last one.
        Raises FellBehind: the next one is no longer there.
        """
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
        """Waits until there are events after `number`."""
        while self.number <= number or self._waking is not None:
            await self._told.wait(self._told.number, None)
