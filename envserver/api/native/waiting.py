"""Leases groups for a trainer, at once or after a wait, and detects disconnected clients.

What holds: a client that has disconnected is leased nothing; waiting uses no CPU until something
changes.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from contextlib import suppress

from envserver_records.errors import ConflictError, NotFoundError
from starlette.requests import Request

from ...store import GroupStore, Lease
from ...store.damage import DamagedBodies
from ..access.quotas import TooManyRequests
from ..bodies import Hangup, key_of
from .models import MOST_GROUPS, Limits
from .policy import PolicyVersion


class Leasing:
    """Leases groups for trainers over HTTP.

    Args:
        default_seconds: duration of a lease that sets none.
        most_open: maximum number of open leases per run; streams are limited by their windows.
        on_change: called after groups were leased or returned.
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
        """Leases the groups available now; None if there are too few.

        Args:
            lease_id: id for the lease; if a lease with this id is open, it is returned again.
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
        """Undoes a lease that could not be sent: drops its damaged groups and puts the others back
        in their places.
        """
        await self._store.drop_damaged(damaged.reasons, undo=lease_id)
        self._on_change()

    async def give_back(self, lease_id: str) -> None:
        """Returns the groups leased for a client that has disconnected."""
        with suppress(ConflictError, NotFoundError):  # the lease had already ended
            await self._store.nack(lease_id, reason="hang_up")
        self._on_change()

    def _min_version(self, wanted: Limits) -> int | None:
        """Lowest acceptable policy version now; it increases as versions are published."""
        if wanted.max_staleness is None:
            return wanted.min_version
        return max(wanted.min_version or 0, self._policy.version - wanted.max_staleness)

    async def wait(
        self, run: str, wanted: Limits, seconds: float, hangup: Hangup, lease_id: str | None
    ) -> Lease | None:
        """Leases what becomes available within `seconds`; None if nothing does or the client
        disconnects.
        Raises TooManyRequests: the run has its maximum number of open leases.
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
        # `_perhaps_open` is an upper bound: query the store only when it reaches the limit.
        if self._perhaps_open.get(run, 0) < self._most_open:
            return
        held = await self._store.open_leases(run)
        self._perhaps_open[run] = len(held)
        if len(held) >= self._most_open and lease_id not in {one.lease_id for one in held}:
            raise TooManyRequests(
                f"The run {run} has {len(held)} leases open; more after an ack or nack.", 1
            )

    async def changed(self, seen: int, hangup: Hangup, seconds: float) -> None:
        """Waits until the store has changed since `seen`, for at most `seconds`."""
        change = asyncio.create_task(self._store.wait_for_change(seconds, since=seen))
        await hangup.wait(change, seconds=seconds)


def lease_id_of(run: str, request: Request) -> str | None:
    """Returns the lease id derived from the request's Idempotency-Key; None without a key.
    Raises InputError: the key is too long.
    """
    key = key_of(request)
    if key is None:
        return None
    return hashlib.blake2b(f"{run}\0{key}".encode(), digest_size=16).hexdigest()
