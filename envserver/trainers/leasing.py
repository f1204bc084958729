"""Leases groups for a trainer: at once, after a wait, or pushed over a stream.

A client that has disconnected is leased nothing; waiting uses no CPU until something changes. A
stream has at most `window` unacknowledged leases, in one of two encodings:

    binary    4-byte length (big-endian), a lease in MessagePack; length 0 is a keep-alive
    events    id: the lease's id, event: lease, data: the lease in JSON; comments as keep-alive"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import suppress
from typing import Final

import structlog
from envserver_records.errors import ConflictError, EnvserverError, NotFoundError
from envserver_records.framing import frame, frame_header
from envserver_records.wire import LEASE_STREAM
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..http.middleware import TooManyRequests
from ..http.requests import Hangup, key_of
from ..http.transfer import accepts
from ..settings.server import ServerConfig
from ..store import UNKNOWN_VERSION, Lease, Store
from ..store.deliveries import DamagedBodies
from .atropos_service import AtroposService
from .bodies import MOST_GROUPS, Limits, StreamRequest
from .encoding import GroupEncoder, zstd_frame
from .policy import PolicyVersion

_MOST_SHOWN: Final = 10


class FilterWarnings:
    def __init__(
        self, store: Store, policy: PolicyVersion, present: Callable[[], Collection[str]]
    ) -> None:
        self._store = store
        self._policy = policy
        self._present = present

    def of_names(self, environments: Collection[str]) -> list[str]:
        if not environments:
            return []
        known = {env for _, env, _ in self._store.tallies} | set(self._present())
        unknown = sorted(set(environments) - known)
        if not unknown:
            return []
        shown = ", ".join(sorted(known)[:_MOST_SHOWN]) or "none"
        more = ", ..." if len(known) > _MOST_SHOWN else ""
        names = ", ".join(map(repr, unknown))
        return [f"No environment is called {names} so far; known: {shown}{more}."]

    def of_limits(self, wanted: Limits) -> list[str]:
        warnings = self.of_names(wanted.environments or ())
        if wanted.max_staleness is not None and self._policy.version == UNKNOWN_VERSION:
            warnings.append(
                "max_staleness has no effect: publish a policy version (POST /v1/policy-version)."
            )
        return warnings


class Leasing:
    """Leases groups for trainers over HTTP, at most `max_open_leases` per run; streams are limited
    by their windows."""

    def __init__(
        self,
        store: Store,
        atropos: AtroposService,
        policy: PolicyVersion,
        filters: FilterWarnings,
        settings: ServerConfig,
    ) -> None:
        self.filters = filters
        self.encoder = GroupEncoder(store)
        self.streams = Streams()
        self._store = store
        self._atropos = atropos
        self._policy = policy
        self._settings = settings
        self._perhaps_open: dict[str, int] = {}

    def changed_all(self, run: str) -> None:
        """Call after all leases of a run were returned."""
        self.streams.run_rewound(run)
        self._atropos.store_changed()

    async def closed(self, run: str, lease_id: str) -> None:
        """Call after a lease was acknowledged or returned."""
        self.streams.lease_closed(run, lease_id)
        await self._atropos.lease_closed(lease_id)

    async def extend(self, lease_id: str, seconds: float) -> float:
        expires_at = await self._store.extend(lease_id, seconds)
        self._atropos.store_changed()
        return expires_at

    async def lease(self, run: str, wanted: Limits, lease_id: str | None = None) -> Lease | None:
        """Leases the groups available now; None if there are too few. If a lease with the id
        `lease_id` is open, it is returned again."""
        bounded = wanted.max_groups or wanted.max_sequences or wanted.max_tokens
        max_groups = wanted.max_groups or MOST_GROUPS
        if not bounded:
            batch_size = (await self._store.get_run(run)).batch_size
            max_groups = max(batch_size, wanted.min_groups)
        lease = await self._store.lease(
            run,
            max_groups=max_groups,
            max_sequences=wanted.max_sequences,
            max_tokens=wanted.max_tokens,
            min_groups=wanted.min_groups,
            environments=wanted.environments or None,
            min_version=self._min_version(wanted),
            seconds=wanted.seconds or self._settings.lease_seconds,
            lease_id=lease_id,
        )
        if lease is not None:
            self._atropos.store_changed()
        return lease

    async def take_back(self, lease_id: str, damaged: DamagedBodies) -> None:
        """Undoes a lease that could not be sent: drops its damaged groups and queues the others
        again."""
        await self._store.drop_damaged(damaged.reasons, undo=lease_id)
        self._atropos.store_changed()

    async def give_back(self, lease_id: str) -> None:
        with suppress(ConflictError, NotFoundError):  # the lease had already ended
            await self._store.nack(lease_id, reason="hang_up")
        self._atropos.store_changed()

    def _min_version(self, wanted: Limits) -> int | None:
        if wanted.max_staleness is None:
            return wanted.min_version
        return max(wanted.min_version or 0, self._policy.version - wanted.max_staleness)

    async def wait(
        self, run: str, wanted: Limits, seconds: float, hangup: Hangup, lease_id: str | None
    ) -> Lease | None:
        """Leases what becomes available within `seconds`; None if nothing does or the client
        disconnects."""
        deadline = time.monotonic() + seconds
        while True:
            seen = self._store.changes
            await self._require_room(run, lease_id)
            lease = await self.lease(run, wanted, lease_id)
            if lease is not None:
                self._perhaps_open[run] = self._perhaps_open.get(run, 0) + 1
                return lease
            left = deadline - time.monotonic()
            if left > 0:
                change = asyncio.create_task(self._store.wait_for_change(left, since=seen))
                await hangup.wait(change, seconds=left)
            if hangup.gone or time.monotonic() >= deadline:
                return None

    async def _require_room(self, run: str, lease_id: str | None) -> None:
        # `_perhaps_open` is an upper bound: query the store only when it reaches the limit.
        if self._perhaps_open.get(run, 0) < self._settings.max_open_leases:
            return
        held = await self._store.open_leases(run)
        self._perhaps_open[run] = len(held)
        ids = {lease.lease_id for lease in held}
        if len(held) >= self._settings.max_open_leases and lease_id not in ids:
            raise TooManyRequests(
                f"The run {run} has {len(held)} open leases, the maximum; ack or nack some.", 1
            )


def lease_id_of(run: str, request: Request) -> str | None:
    """Returns the lease id derived from the request's Idempotency-Key; None without a key."""
    key = key_of(request)
    if key is None:
        return None
    return hashlib.blake2b(f"{run}\0{key}".encode(), digest_size=16).hexdigest()


log = structlog.get_logger(__name__)

EVENTS: Final = "text/event-stream"

_KEEP_ALIVE_SECONDS: Final = 15.0
_AGAIN_SECONDS: Final = 1.0
"""Seconds between checks for expired leases, which make room for another."""
_RETRY_MILLISECONDS: Final = 1000


class Streams:
    def __init__(self) -> None:
        self._open: dict[tuple[str, str], LeaseStream] = {}

    async def enter(self, stream: LeaseStream) -> None:
        """Registers `stream` under its name and ends an older connection of that name, which makes
        no lease any more when this returns."""
        older = self._open.get(stream.key)
        self._open[stream.key] = stream
        if older is not None:
            await older.supersede()

    def leave(self, stream: LeaseStream) -> None:
        if self._open.get(stream.key) is stream:
            del self._open[stream.key]

    def lease_closed(self, run: str, lease_id: str) -> None:
        if stream := self._open.get((run, stream_of(lease_id))):
            stream.forget(lease_id)

    def run_rewound(self, run: str) -> None:
        for (name, _), stream in self._open.items():
            if name == run:
                stream.forget_all()


def stream_of(lease_id: str) -> str:
    """Returns the name of the stream that made the lease; "" if none did."""
    return lease_id.rpartition(".")[0]


class LeaseStream:
    """One connection of a stream. `seen`: id of the last lease that the client received, or ""."""

    def __init__(
        self,
        store: Store,
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
        making is there when this returns, so the newer one sends it."""
        self._superseded = True
        self._room.set()
        async with self._leases:
            pass

    def forget(self, lease_id: str) -> None:
        self._open.discard(lease_id)
        self._room.set()

    def forget_all(self) -> None:
        self._open.clear()
        self._room.set()

    async def take_back(self, lease: Lease, damaged: DamagedBodies) -> None:
        await self._leasing.take_back(lease.lease_id, damaged)
        self.forget(lease.lease_id)

    async def leases(self, hangup: Hangup) -> AsyncIterator[Lease | None]:
        """Yields the leases to send; None means keep-alive. Ends when the client has disconnected,
        the run is closed, or another connection took over."""
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
        changes = self._store.changes
        if changes == self._looked_at:
            return False
        self._looked_at = changes
        self._open &= {facts.lease_id for facts in await self._store.open_leases(self._run)}
        return not self._is_full()

    def _fresh_id(self) -> str:
        """Returns an id greater than all earlier ones, even if the clock goes back."""
        of_seen = self._seen.rpartition(".")[2]
        least = max(
            [self._last_number, *(int(lease_id.rpartition(".")[2]) for lease_id in self._open)]
        )
        if of_seen.isdecimal():
            least = max(least, int(of_seen))
        self._last_number = max(time.time_ns(), least + 1)
        return f"{self._name}.{self._last_number:020d}"

    async def _wait(self, hangup: Hangup, seen: int, seconds: float) -> None:
        room = asyncio.create_task(self._room.wait())
        if self._is_full():
            await hangup.wait(room, seconds=min(_AGAIN_SECONDS, seconds))
        else:
            change = asyncio.create_task(self._store.wait_for_change(seconds, since=seen))
            await hangup.wait(room, change, seconds=seconds)

    async def end(self, hangup: Hangup) -> None:
        client_has_gone = hangup.gone and not hangup.server_ends
        if self._superseded or not client_has_gone or self._wanted.on_hangup != "give_back":
            return
        for lease_id in list(self._open):
            await self._leasing.give_back(lease_id)


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


def _format(encoder: GroupEncoder, headers: Headers) -> _Events | _Frames:
    if EVENTS in headers.get("accept", ""):
        return _Events(encoder)
    return _Frames(encoder, compress=accepts(headers, "zstd"))


class StreamAnswer(Response):
    """Sends a stream's leases for as long as the client listens."""

    def __init__(self, stream: LeaseStream, leasing: Leasing, headers: Headers) -> None:
        self._format = _format(leasing.encoder, headers)
        super().__init__(media_type=self._format.media_type)
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-store"
        self.headers["vary"] = "Accept, Accept-Encoding"
        if self._format.encoding:
            self.headers["content-encoding"] = self._format.encoding
        self._stream = stream
        self._streams = leasing.streams

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

    async def _send_leases(self, hangup: Hangup, write: Callable[[bytes], Awaitable[None]]) -> None:
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
