"""Leasing what a trainer asks for, at once or as soon as it is there, and noticing when nobody
waits for it any more.

What holds: whoever has hung up is leased nothing; who waits costs nothing until something changes.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

from envserver_records.errors import ConflictError, InputError, NotFoundError
from starlette.requests import Request
from starlette.types import Receive

from ...store import GroupStore, Lease
from ...store.damage import DamagedBodies
from ..access.quotas import TooManyRequests
from ..lifespan import SERVER_ENDS
from .models import MOST_GROUPS, Limits
from .policy import PolicyVersion

_LONGEST_KEY: Final = 256


class Hangup:
    """Notices that the client of one request has gone. The request's body must have been read."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.server_ends = False
        """Whether the client is still there, and the server ends."""

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._listen(), name="hang-up")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    @property
    def gone(self) -> bool:
        """Whether it has."""
        return self._task.done()

    async def wait(self, *others: asyncio.Task[Any], seconds: float) -> None:
        """Returns when it has gone, when one of `others` is done, or after `seconds`. Ends them;
        raises what ended one of them.
        """
        try:
            await asyncio.wait(
                {self._task, *others}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for other in others:
                other.cancel()
        for other in others:
            if other.done() and not other.cancelled():
                other.result()

    async def _listen(self) -> None:
        while (message := await self._receive())["type"] != "http.disconnect":
            pass
        self.server_ends = SERVER_ENDS in message


class Leasing:
    """Leases for trainers that ask over HTTP.

    Args:
        default_seconds: how long a lease lasts that names no time.
        most_open: leases of a run at a time, for those who ask; streams have their windows.
        on_change: called when groups were leased or given back.
    """

    def __init__(
        self,
        store: GroupStore,
        policy: PolicyVersion,
        default_seconds: float,
        on_change: Callable[[], None],
        most_open: int,
    ) -> None:
        self._store = store
        self._on_change = on_change
        self._policy = policy
        self._default_seconds = default_seconds
        self._most_open = most_open
        self._perhaps_open: dict[str, int] = {}

    async def lease(self, run: str, wanted: Limits, lease_id: str | None = None) -> Lease | None:
        """What can be leased now.

        Args:
            lease_id: that the lease is to have; the open lease that has it is leased again.

        Raises:
            NotFoundError: no such run.
            ConflictError: the run is closed, or the lease of this id is over.
        """
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
            seconds=wanted.seconds or self._default_seconds,
            lease_id=lease_id,
        )
        if lease is not None:
            self._on_change()
        return lease

    async def take_back(self, lease_id: str, damaged: DamagedBodies) -> None:
        """Of a lease that could not be sent: what is damaged is offered to nobody any more, the
        rest goes back to its place, and the lease is as if it had never been.
        """
        await self._store.drop_damaged(damaged.reasons, undo=lease_id)
        self._on_change()

    async def give_back(self, lease_id: str) -> None:
        """Gives back what was leased for a client that has gone."""
        with suppress(ConflictError, NotFoundError):  # it was over
            await self._store.nack(lease_id, reason="hang_up")
        self._on_change()

    def _min_version(self, wanted: Limits) -> int | None:
        """The lowest policy version that will do now: it grows as versions are published."""
        if wanted.max_staleness is None:
            return wanted.min_version
        return max(wanted.min_version or 0, self._policy.version - wanted.max_staleness)

    async def wait(
        self, run: str, wanted: Limits, seconds: float, hangup: Hangup, lease_id: str | None
    ) -> Lease | None:
        """What can be leased within `seconds`; None when nothing, or when the client has gone.

        Raises:
            TooManyRequests: the run has as many leases open as it may.
        """
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
                await self.changed(seen, hangup, left)
            if hangup.gone or time.monotonic() >= deadline:
                return None

    async def _require_room(self, run: str, lease_id: str | None) -> None:
        # Counted from above: the store is only asked when that many were handed out since.
        if self._perhaps_open.get(run, 0) < self._most_open:
            return
        held = await self._store.open_leases(run)
        self._perhaps_open[run] = len(held)
        if len(held) >= self._most_open and lease_id not in {one.lease_id for one in held}:
            raise TooManyRequests(
                f"The run {run} has {len(held)} leases open; more after an ack or nack.", 1
            )

    async def changed(self, seen: int, hangup: Hangup, seconds: float) -> None:
        """Returns when the store has changed since `seen`, at the latest after `seconds`."""
        change = asyncio.create_task(self._store.wait_for_change(seconds, since=seen))
        await hangup.wait(change, seconds=seconds)


def lease_id_of(run: str, request: Request) -> str | None:
    """The id of the lease that the request's Idempotency-Key stands for; None without a key.

    Raises:
        InputError: the key is too long.
    """
    key = key_of(request)
    if key is None:
        return None
    return hashlib.blake2b(f"{run}\0{key}".encode(), digest_size=16).hexdigest()


def key_of(request: Request) -> str | None:
    """The request's Idempotency-Key. Raises InputError: it is too long."""
    key = request.headers.get("idempotency-key")
    if key and len(key) > _LONGEST_KEY:
        raise InputError("The Idempotency-Key is too long.", place="Idempotency-Key")
    return key or None
