"""The runners of a server: their stored registrations and their current status.

Durable: who registered, with which stream, under which key (hashed); a restarted server knows all
of them. Not durable: their status, which the next heartbeat reports. What holds: only a runner with
recent heartbeats counts (for minimum shares, capacity and pauses during weight updates).
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, Final

import msgspec
from envserver_records.errors import StoreFull
from envserver_records.records import Split

from ...remote.messages import Heartbeat
from ...rollouts.stream import stream_prefix
from ...store import GroupStore
from ..heartbeats import Heartbeats

_KEY: Final = "environments"
_MOST_RUNNERS: Final = 4096
_REMEMBERED_SECONDS: Final = 7 * 24 * 3600.0
"""A runner that left is shown, and may have its name back with its stream, for this long."""


class RegisteredRunner(msgspec.Struct, kw_only=True):
    """The stored registration of a runner.

    Args:
        key_hash, instance_hash: SHA-256, in hex.
        asked_seed: the seed the runner was configured with; `seed`: the one it was given.
        gone: whether it has deregistered.
        left_at: when it deregistered, in seconds since 1970.
    """

    id: str
    name: str
    key_hash: str
    instance_hash: str
    env: str
    split: Split
    asked_seed: int
    seed: int
    group_size: int
    weight: float
    minimum_share: float
    scoring: dict[str, Any]
    version: str
    host: str
    registered_at: float
    gone: bool = False
    left_at: float = 0.0

    @property
    def prefix(self) -> str:
        """ID prefix of its groups."""
        return stream_prefix(self.env, self.split, self.seed)


class RunnerStatus:
    """Current status of a runner, since the start of this server or of the runner's session."""

    def __init__(self) -> None:
        self.beat = Heartbeat()
        self.room = 0
        self.open = 0
        self.counted: int | None = None
        self.drain = False
        self._is_heard = False
        self.stored = 0

    def failed_since(self, beat: Heartbeat) -> tuple[Counter[str], Counter[str]]:
        """Returns how many attempts failed and groups were dropped since the last heartbeat, by
        kind and reason. The first one only sets the base.
        """
        failures = Counter(beat.failures) - Counter(self.beat.failures)
        drops = Counter(beat.dropped) - Counter(self.beat.dropped)
        was_heard, self._is_heard = self._is_heard, True
        return (failures, drops) if was_heard else (Counter(), Counter())

    @property
    def held(self) -> int:
        """Number of groups it has open, or may open without asking again."""
        return max(self.room, self.open)


class RunnerTable:
    """All runners of a server; call `load` first.

    Args:
        silent_after_seconds: a runner without a heartbeat for this long does not count.
    """

    def __init__(self, store: GroupStore, silent_after_seconds: float) -> None:
        self._store = store
        self.heartbeats = Heartbeats(silent_after_seconds)
        self.known: dict[str, RegisteredRunner] = {}
        """By id."""
        self._status: dict[str, RunnerStatus] = {}

    async def load(self) -> None:
        """Loads the stored registrations."""
        stored = await self._store.get_value(_KEY)
        for one in msgspec.convert(stored or [], list[RegisteredRunner]):
            self.known[one.id] = one

    async def save(self, one: RegisteredRunner) -> None:
        """Stores a registration. Of the runners that have left, those that left long ago or first
        are forgotten; the store still knows their streams by their groups.

        Raises:
            StoreFull: too many runners are registered and have not left.
        """
        known = self.known | {one.id: one}
        gone = sorted((left for left in known.values() if left.gone), key=lambda left: left.left_at)
        earliest = time.time() - _REMEMBERED_SECONDS
        surplus = len(known) - _MOST_RUNNERS
        for number, left in enumerate(gone):
            if left.id != one.id and (number < surplus or left.left_at < earliest):
                del known[left.id]
        if len(known) > _MOST_RUNNERS:
            raise StoreFull(f"No more than {_MOST_RUNNERS} environments can register.")
        await self._store.set_value(_KEY, msgspec.to_builtins(list(known.values())))
        self.known = known
        self._status = {name: now for name, now in self._status.items() if name in known}

    def named(self, name: str) -> RegisteredRunner | None:
        """Returns the runner of this name."""
        return next((one for one in self.known.values() if one.name == name), None)

    def start(self, one: RegisteredRunner) -> None:
        """Begins the status of a new session."""
        self._status[one.id] = RunnerStatus()
        self.heartbeats.hear(one.id)

    def status(self, one: RegisteredRunner) -> RunnerStatus:
        """Returns the current status of a runner."""
        return self._status.setdefault(one.id, RunnerStatus())

    def is_present(self, one: RegisteredRunner) -> bool:
        """Returns whether a runner counts."""
        return not one.gone and not self.heartbeats.is_silent(one.id)

    def present(self) -> list[tuple[RegisteredRunner, RunnerStatus]]:
        """Returns the runners that count."""
        return [(one, self.status(one)) for one in self.known.values() if self.is_present(one)]

    def presence(self, one: RegisteredRunner) -> str:
        """Returns present, silent or gone."""
        if one.gone:
            return "gone"
        return "present" if self.is_present(one) else "silent"

    def minimums(self) -> dict[str, float]:
        """Returns the minimum shares of the runners that count, by environment name."""
        found: dict[str, float] = {}
        for one, now in self.present():
            if one.minimum_share and now.beat.capacity:
                found[one.env] = min(1.0, found.get(one.env, 0.0) + one.minimum_share)
        return found

    def snapshot(self) -> list[dict[str, Any]]:
        """Lists the registered runners and their status, for display."""
        return [self._shown(one) for one in self.known.values()]

    def _shown(self, one: RegisteredRunner) -> dict[str, Any]:
        now = self.status(one)
        beat = now.beat.model_dump(exclude={"seen", "wait_seconds", "quiet"})
        return {
            "id": one.id,
            "name": one.name,
            "env": one.env,
            "split": one.split,
            "seed": one.seed,
            "group_size": one.group_size,
            "weight": one.weight,
            "minimum_share": one.minimum_share,
            "version": one.version,
            "host": one.host,
            "registered_at": one.registered_at,
            "gone": one.gone,
            "silent": self.presence(one) == "silent",
            "silent_seconds": round(self.heartbeats.silent_seconds(one.id), 1),
            "room": now.room,
            "stored": now.stored,
            **beat,
            "open": now.open,
        }
