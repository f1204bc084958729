"""Keeps the registered engines in the store, over a restart of the server.

What holds: a registration, a version, a drain and a pause are on disk before they are answered; of
heartbeats only some are written, so that many engines do not write all the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from ...models.replicas import Registration
from ...store import GroupStore

if TYPE_CHECKING:
    from ...models.fleet import Fleet

_KEY: Final = "engines"
_WRITTEN_SHARE: Final = 0.5
"""Share of its ttl by which the end of a registration moves before that is written."""


class EngineBook:
    """The stored registrations of `fleet`; call `load` first."""

    def __init__(self, fleet: Fleet, store: GroupStore) -> None:
        self.fleet = fleet
        self._store = store
        self._written: list[Registration] = []

    async def load(self) -> None:
        """Registers again what the store has."""
        stored = await self._store.get_value(_KEY)
        self._written = msgspec.convert(stored or [], list[Registration])
        self.fleet.restore(self._written)

    async def save(self) -> None:
        """Writes what has changed."""
        now = self.fleet.registrations()
        if len(now) != len(self._written) or any(map(_differs, self._written, now)):
            await self._store.set_value(_KEY, msgspec.to_builtins(now))
            self._written = now

    async def tell_version(self, named: Sequence[str], version: int) -> None:
        """Notes that the engines with these ids or addresses serve `version`.
        Raises NotFoundError: there is no such engine; then nothing was changed.
        """
        for replica in [self.fleet.named(one) for one in named]:
            self.fleet.tell_version(replica, version)
        await self.save()


def _differs(written: Registration, now: Registration) -> bool:
    if written.expires_at is None or now.expires_at is None or now.ttl_seconds is None:
        return written != now
    moved = now.expires_at - written.expires_at
    same_end = msgspec.structs.replace(now, expires_at=written.expires_at)
    return same_end != written or moved > _WRITTEN_SHARE * now.ttl_seconds
