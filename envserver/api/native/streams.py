"""Pushes leases to a trainer as groups become available: server-sent events or binary frames.

In: a run, the limits of its leases, and how many may be open at a time. Out: one event or frame
per lease. What holds: a stream has at most `window` open leases, so neither side buffers more;
lease ids begin with the stream's name and increase, so a client that reconnects gets exactly the
open leases it has not seen, even after the server was killed; when a stream has two connections,
the older one ends.

    binary    4-byte length (big-endian), a lease in MessagePack; length 0 is a keep-alive
    events    id: the lease's id, event: lease, data: the lease in JSON; comments as keep-alive
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Final, Protocol

import structlog
from envserver_records.errors import EnvserverError
from envserver_records.framing import frame, frame_header
from envserver_records.wire import LEASE_STREAM
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...store import GroupStore, Lease
from ...store.damage import DamagedBodies
from ..bodies import Hangup
from ..leasing import GroupEncoder, zstd_frame
from ..transfer import accepts
from .models import StreamRequest
from .waiting import Leasing

log = structlog.get_logger(__name__)

EVENTS: Final = "text/event-stream"

_KEEP_ALIVE_SECONDS: Final = 15.0
_AGAIN_SECONDS: Final = 1.0
"""Seconds between checks for expired leases, which make room for another."""
_RETRY_MILLISECONDS: Final = 1000


class Streams:
    """The open streams of an app."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], LeaseStream] = {}

    async def enter(self, stream: LeaseStream) -> None:
        """Registers `stream` under its name and ends an older connection of that name, which makes
        no lease any more when this returns.
        """
        older = self._open.get(stream.key)
        self._open[stream.key] = stream
        if older is not None:
            await older.supersede()

    def leave(self, stream: LeaseStream) -> None:
        """Removes a stream that has ended."""
        if self._open.get(stream.key) is stream:
            del self._open[stream.key]

    def lease_closed(self, run: str, lease_id: str) -> None:
        """Tells the stream that one of its leases was acknowledged or returned."""
        if stream := self._open.get((run, stream_of(lease_id))):
            stream.forget(lease_id)

    def run_rewound(self, run: str) -> None:
        """Tells the run's streams that all its leases were returned."""
        for (name, _), stream in self._open.items():
            if name == run:
                stream.forget_all()


def stream_of(lease_id: str) -> str:
    """Returns the name of the stream that made the lease; "" if none did."""
    return lease_id.rpartition(".")[0]


class LeaseStream:
    """One connection of a stream.

    Args:
        name: name of the stream.
        seen: id of the last lease that the client received; "" if none.
    """

    def __init__(
        self,
        store: GroupStore,
        leasing: Leasing,
        run: str,
        wanted: StreamRequest,
        name: str,
        seen: str,
    ) -> None:
        self.key = (run, name)
        self._store = store
        self._leasing = leasing
        self._run = run
        self._name = name
        self._wanted = wanted
        self._seen = seen
        self._open: set[str] = set()
        self._looked_at = -1
        self._last_number = 0
        self._room = asyncio.Event()
        self._superseded = False
        self._leases = asyncio.Lock()

    async def supersede(self) -> None:
        """Ends this connection because a newer one has taken over the stream. A lease that it is
        making is there when this returns, so the newer one sends it.
        """
        self._superseded = True
        self._room.set()
        async with self._leases:
            pass

    def forget(self, lease_id: str) -> None:
        """Removes a lease that is no longer open."""
        self._open.discard(lease_id)
        self._room.set()

    def forget_all(self) -> None:
        """Removes all leases: none is open any more."""
        self._open.clear()
        self._room.set()

    async def take_back(self, lease: Lease, damaged: DamagedBodies) -> None:
        """Withdraws a lease that could not be sent; later leases get its undamaged groups."""
        await self._leasing.take_back(lease.lease_id, damaged)
        self.forget(lease.lease_id)

    async def leases(self, hangup: Hangup) -> AsyncIterator[Lease | None]:
        """Yields the leases to send; None means keep-alive. Ends when the client has disconnected,
        the run is closed, or another connection took over.
        """
        for unseen in await self._unseen():
            yield unseen
        heard = time.monotonic()
        while not (hangup.gone or self._superseded):
            seen = self._store.changes
            lease = await self._next()
            if lease is None:
                silent = heard + _KEEP_ALIVE_SECONDS - time.monotonic()
                await self._wait(hangup, seen, max(silent, 0.0))
            if lease is not None or time.monotonic() - heard >= _KEEP_ALIVE_SECONDS:
                yield lease
                heard = time.monotonic()

    async def _unseen(self) -> list[Lease]:
        """Returns the open leases of this stream that the client has not received."""
        unseen = []
        for facts in await self._store.open_leases(self._run):
            if stream_of(facts.lease_id) != self._name:
                continue
            self._open.add(facts.lease_id)
            if facts.lease_id > self._seen:
                rows = await self._store.rows(facts.group_ids)
                unseen.append(Lease(facts.lease_id, self._run, facts.expires_at, rows))
        return sorted(unseen, key=lambda lease: lease.lease_id)

    async def _next(self) -> Lease | None:
        self._room.clear()
        if self._is_full() and not await self._some_ended():
            return None
        async with self._leases:
            if self._superseded:
                return None
            lease = await self._leasing.lease(self._run, self._wanted, self._fresh_id())
        if lease is not None:
            self._open.add(lease.lease_id)
        return lease

    def _is_full(self) -> bool:
        return len(self._open) >= self._wanted.window

    async def _some_ended(self) -> bool:
        """Returns whether an open lease has ended; queries the store only after a change."""
        changes = self._store.changes
        if changes == self._looked_at:
            return False
        self._looked_at = changes
        self._open &= {facts.lease_id for facts in await self._store.open_leases(self._run)}
        return not self._is_full()

    def _fresh_id(self) -> str:
        """Returns an id greater than all earlier ones, even if the clock goes back."""
        of_seen = self._seen.rpartition(".")[2]
        least = max([self._last_number, *(int(one.rpartition(".")[2]) for one in self._open)])
        if of_seen.isdecimal():
            least = max(least, int(of_seen))
        self._last_number = max(time.time_ns(), least + 1)
        return f"{self._name}.{self._last_number:020d}"

    async def _wait(self, hangup: Hangup, seen: int, seconds: float) -> None:
        """Waits until another lease may be possible, for at most `seconds`."""
        room = asyncio.create_task(self._room.wait())
        if self._is_full():
            await hangup.wait(room, seconds=min(_AGAIN_SECONDS, seconds))
        else:
            change = asyncio.create_task(self._store.wait_for_change(seconds, since=seen))
            await hangup.wait(room, change, seconds=seconds)

    async def end(self, hangup: Hangup) -> None:
        """Returns the open leases if the client asked for it."""
        client_has_gone = hangup.gone and not hangup.server_ends
        if self._superseded or not client_has_gone or self._wanted.on_hangup != "give_back":
            return
        for lease_id in list(self._open):
            await self._leasing.give_back(lease_id)


class _Format(Protocol):
    """Encoding of a lease stream."""

    media_type: str
    encoding: str
    keep_alive: bytes

    def lease(self, lease: Lease) -> AsyncIterator[bytes]: ...


class _Events:
    media_type = EVENTS
    encoding = ""
    keep_alive = b":\n\n"

    def __init__(self, encoder: GroupEncoder) -> None:
        self._encoder = encoder

    async def lease(self, lease: Lease) -> AsyncIterator[bytes]:
        data = await self._encoder.lease_as_json(lease)
        # Posted JSON may contain line ends between values, but never within them.
        line = data.replace(b"\r", b" ").replace(b"\n", b" ")
        yield b"id: %s\nevent: lease\ndata: %s\n\n" % (lease.lease_id.encode(), line)


class _Frames:
    media_type = LEASE_STREAM

    def __init__(self, encoder: GroupEncoder, *, compress: bool) -> None:
        self._encoder = encoder
        self._compress = compress
        self.encoding = "zstd" if compress else ""
        keep_alive = frame(b"")
        self.keep_alive = zstd_frame(keep_alive) if compress else keep_alive

    async def lease(self, lease: Lease) -> AsyncIterator[bytes]:
        packed = await self._encoder.lease(lease)
        length = frame_header(packed.size)
        if self._compress:
            for part in packed.compressed(length):
                yield part
            return
        yield length
        async for part in packed.plain():
            yield part


def _format(encoder: GroupEncoder, headers: Headers) -> _Format:
    if EVENTS in headers.get("accept", ""):
        return _Events(encoder)
    return _Frames(encoder, compress=accepts(headers, "zstd"))


class StreamAnswer(Response):
    """Sends a stream's leases for as long as the client listens."""

    def __init__(
        self, stream: LeaseStream, streams: Streams, encoder: GroupEncoder, headers: Headers
    ) -> None:
        self._format = _format(encoder, headers)
        super().__init__(media_type=self._format.media_type)
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-store"
        self.headers["vary"] = "Accept, Accept-Encoding"
        if self._format.encoding:
            self.headers["content-encoding"] = self._format.encoding
        self._stream = stream
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(part: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": part, "more_body": more})

        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        async with Hangup(receive) as hangup:
            try:
                await self._streams.enter(self._stream)
                await send(start)
                if self._format.media_type == EVENTS:
                    await write(b"retry: %d\n\n" % _RETRY_MILLISECONDS)
                await write(self._format.keep_alive)
                await self._send_leases(hangup, write)
            finally:
                self._streams.leave(self._stream)
            await self._stream.end(hangup)
        await write(b"", more=False)

    async def _send_leases(self, hangup: Hangup, write: _Write) -> None:
        try:
            async for lease in self._stream.leases(hangup):
                if lease is None:
                    await write(self._format.keep_alive)
                    continue
                try:
                    async for part in self._format.lease(lease):
                        await write(part)
                except DamagedBodies as damaged:  # no byte of the lease was sent
                    await self._stream.take_back(lease, damaged)
        except EnvserverError as error:
            # The client reconnects and gets an error that says what to do.
            log.info("stream_ended", stream=self._stream.key, why=str(error))


class _Write(Protocol):
    async def __call__(self, part: bytes, *, more: bool = True) -> None: ...
