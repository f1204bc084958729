"""The runners of a server: their stored registrations and their current status. Only a runner with
recent heartbeats counts for minimum shares, capacity and pauses."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Hashable
from typing import Any, Final

import msgspec
from envserver_records.errors import StoreFull
from envserver_records.records import Split

from ..rollouts.stream import stream_prefix
from ..store import Store
from .messages import NEXT_SECONDS, Heartbeat, Registration


class Heartbeats:
    def __init__(self, silent_after_seconds: float) -> None:
        self.silent_after_seconds = silent_after_seconds
        self._born = time.monotonic()
        self._seen: dict[Hashable, float] = {}

    def hear(self, who: Hashable) -> None:
        self._seen[who] = time.monotonic()

    def silent_seconds(self, who: Hashable) -> float:
        """Returns the time since the last message; after a restart everyone starts at zero."""
        return time.monotonic() - self._seen.get(who, self._born)

    def is_silent(self, who: Hashable) -> bool:
        return self.silent_seconds(who) > self.silent_after_seconds

    def forget(self, who: Hashable) -> None:
        self._seen.pop(who, None)

    def clear(self) -> None:
        self._seen.clear()


_MOST_HINTS: Final = 4096


class Streams:
    """The streams of all runners; no two runners have the same one."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._taken: Counter[str] = Counter()
        """ID prefixes of the streams that runners have."""
        self._next_seeds: dict[tuple[str, str, int], int] = {}
        """By environment, split and requested seed: all seeds from that one to this are taken."""

    async def choose(self, wanted: Registration, others: Collection[str]) -> int:
        """Returns the requested seed, or the next one with an unused stream, and takes its stream.
        `others`: ID prefixes of the streams of the server's own environments."""
        place = wanted.env, wanted.split, wanted.seed
        seed = self._next_seeds.get(place, wanted.seed)
        while not await self._took(stream_prefix(*place[:2], seed), others):
            seed += 1
        if len(self._next_seeds) >= _MOST_HINTS:
            self._next_seeds.clear()
        self._next_seeds[place] = max(seed, self._next_seeds.get(place, seed))
        return seed

    async def _took(self, prefix: str, others: Collection[str]) -> bool:
        if prefix in self._taken or prefix in others:
            return False
        self.take(prefix)  # before the question: others may register meanwhile
        if await self._store.count_with_prefix(prefix):
            self.give_back(prefix)
            return False
        return True

    def take(self, prefix: str) -> None:
        self._taken[prefix] += 1

    def give_back(self, prefix: str) -> None:
        self._taken[prefix] -= 1
        if self._taken[prefix] <= 0:
            del self._taken[prefix]


SILENT_POLLS: Final = 3
"""A runner counts as silent when it should have asked this often."""
LONGEST_SECONDS: Final = 20.0
_USUAL_SECONDS: Final = 5.0
_BEATS_PER_SECOND: Final = 50.0
"""Idle heartbeats of all runners together: about a tenth of a core."""


def poll_seconds(runners: int, silent_after_seconds: float) -> float:
    """Returns how long a runner should wait for news, so that the server answers about the same
    number of idle heartbeats a second, however many runners there are. News itself is sent at once.
    """
    usual = min(_USUAL_SECONDS, silent_after_seconds / (2 * SILENT_POLLS))
    return max(usual, min(runners / _BEATS_PER_SECOND, LONGEST_SECONDS))


_KEY_PREFIX: Final = "environment:"
_OLD_KEY: Final = "environments"
"""Older servers kept all registrations in one value."""
_MOST_RUNNERS: Final = 4096
_REMEMBERED_SECONDS: Final = 7 * 24 * 3600.0
"""A runner that left is shown, and may have its name back with its stream, for this long."""

_LOST_SECONDS: Final = 24 * 3600.0
"""A runner that did not leave is forgotten after so long a silence, where there are too many."""


class RegisteredRunner(msgspec.Struct, kw_only=True):
    """The stored registration of a runner.

    Args:
        key_hash, instance_hash: SHA-256, in hex.
        asked_seed: the seed the runner was configured with; `seed`: the one it was given.
        gone: whether it has deregistered; `left_at`: when, in seconds since 1970.
        understands: additions to the protocol that it knows; see `runners.messages`.
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
    understands: tuple[str, ...] = ()

    @property
    def prefix(self) -> str:
        return stream_prefix(self.env, self.split, self.seed)


class RunnerStatus:
    def __init__(self) -> None:
        self.beat = Heartbeat()
        self.room = 0
        self.open = 0
        self.counted: int | None = None
        self.drain = False
        self._is_heard = False
        self.poll_seconds = 0.0
        """Seconds that it was last asked to wait for news; 0: none."""
        self.stored: int | None = None
        """Groups of its stream in the store; None: not counted yet."""

    def failed_since(self, beat: Heartbeat) -> tuple[Counter[str], Counter[str]]:
        """Returns how many attempts failed and groups were dropped since the last heartbeat, by
        kind and reason. The first one only sets the base."""
        failures = Counter(beat.failures) - Counter(self.beat.failures)
        drops = Counter(beat.dropped) - Counter(self.beat.dropped)
        was_heard, self._is_heard = self._is_heard, True
        return (failures, drops) if was_heard else (Counter(), Counter())

    @property
    def held(self) -> int:
        """Number of groups it has open, or may open without asking again."""
        return max(self.room, self.open)


class RunnerTable:
    """All runners of a server; call `load` first."""

    def __init__(self, store: Store, silent_after_seconds: float) -> None:
        self._store = store
        self.streams = Streams(store)
        self.heartbeats = Heartbeats(silent_after_seconds)
        self.known: dict[str, RegisteredRunner] = {}
        """By id."""
        self._ids: dict[str, str] = {}
        """By name."""
        self._gone: dict[str, float] = {}
        """When those that have left did so, by id, the first to leave first."""
        self._status: dict[str, RunnerStatus] = {}

    async def load(self) -> None:
        if old := await self._store.get_value(_OLD_KEY):
            keys = {_KEY_PREFIX + facts["id"]: facts for facts in old}
            await self._store.set_values(keys | {_OLD_KEY: None})
        stored = await self._store.values_with_prefix(_KEY_PREFIX)
        runners = msgspec.convert(list(stored.values()), list[RegisteredRunner])
        for runner in sorted(runners, key=lambda runner: (runner.left_at, runner.registered_at)):
            self._remember(runner)

    async def save(self, runner: RegisteredRunner) -> None:
        """Stores a registration. Of the runners that have left, those that left long ago or first
        are forgotten; the store still knows their streams by their groups."""
        self._gone.pop(runner.id, None)
        forgotten = self._forget_gone(runner.id)
        if runner.id not in self.known and len(self.known) >= _MOST_RUNNERS:
            forgotten += self._forget_silent()
        if runner.id not in self.known and len(self.known) >= _MOST_RUNNERS:
            raise StoreFull(f"No more than {_MOST_RUNNERS} environments can register.")
        removed = dict.fromkeys(_KEY_PREFIX + left for left in forgotten)
        await self._store.set_values(
            {**removed, _KEY_PREFIX + runner.id: msgspec.to_builtins(runner)}
        )
        self._remember(runner)

    def _forget_gone(self, but: str) -> list[str]:
        forgotten = []
        new = but not in self.known
        while self._gone:
            first, left_at = next(iter(self._gone.items()))
            is_old = left_at < time.time() - _REMEMBERED_SECONDS
            if not is_old and len(self.known) + new <= _MOST_RUNNERS:
                break
            del self._gone[first]
            self._forget(first)
            forgotten.append(first)
        return forgotten

    def _forget_silent(self) -> list[str]:
        silent = self.heartbeats.silent_seconds
        forgotten = [env_id for env_id in self.known if silent(env_id) > _LOST_SECONDS]
        for env_id in forgotten:
            self._forget(env_id)
        return forgotten

    def _forget(self, env_id: str) -> None:
        left = self.known.pop(env_id)
        del self._ids[left.name]
        self.streams.give_back(left.prefix)
        self._status.pop(env_id, None)
        self.heartbeats.forget(env_id)

    def _remember(self, runner: RegisteredRunner) -> None:
        before = self.known.get(runner.id)
        if before is not None:
            self.streams.give_back(before.prefix)
        self.streams.take(runner.prefix)
        self.known[runner.id] = runner
        self._ids[runner.name] = runner.id
        if runner.gone:
            self._gone[runner.id] = runner.left_at

    def named(self, name: str) -> RegisteredRunner | None:
        return self.known.get(self._ids.get(name, ""))

    def start(self, runner: RegisteredRunner, stored: int) -> None:
        self._status[runner.id] = now = RunnerStatus()
        now.stored = stored
        self.heartbeats.hear(runner.id)

    def status(self, runner: RegisteredRunner) -> RunnerStatus:
        return self._status.get(runner.id) or self._status.setdefault(runner.id, RunnerStatus())

    def is_present(self, runner: RegisteredRunner) -> bool:
        if runner.gone:
            return False
        silent = self.heartbeats.silent_seconds(runner.id)
        return silent <= self.heartbeats.silent_after_seconds or silent <= self.silent_after(runner)

    def silent_after(self, runner: RegisteredRunner) -> float:
        """Returns after how many seconds without a message a runner no longer counts: longer for
        one that waits long for news. It stops its own model calls after half of that."""
        now = self.status(runner)
        longest = max(now.poll_seconds, min(now.beat.wait_seconds, LONGEST_SECONDS))
        shortest = self.heartbeats.silent_after_seconds
        return max(shortest, SILENT_POLLS * longest if NEXT_SECONDS in runner.understands else 0.0)

    def present(self) -> list[tuple[RegisteredRunner, RunnerStatus]]:
        return [
            (runner, self.status(runner))
            for runner in self.known.values()
            if self.is_present(runner)
        ]

    def is_any_present(self) -> bool:
        return any(self.is_present(runner) for runner in self.known.values())

    def presence(self, runner: RegisteredRunner) -> str:
        if runner.gone:
            return "gone"
        return "present" if self.is_present(runner) else "silent"

    def minimums(self) -> dict[str, float]:
        """Returns the minimum shares of the runners that count, by environment name."""
        found: dict[str, float] = {}
        for runner, now in self.present():
            if runner.minimum_share and now.beat.capacity:
                found[runner.env] = min(1.0, found.get(runner.env, 0.0) + runner.minimum_share)
        return found

    async def snapshot(self) -> list[dict[str, Any]]:
        for runner in list(self.known.values()):
            now = self.status(runner)
            if now.stored is None:
                now.stored = await self._store.count_with_prefix(runner.prefix)
        return [self._shown(runner) for runner in self.known.values()]

    def _shown(self, runner: RegisteredRunner) -> dict[str, Any]:
        now = self.status(runner)
        return {
            **{name: getattr(runner, name) for name in _SHOWN},
            "silent": self.presence(runner) == "silent",
            "silent_seconds": round(self.heartbeats.silent_seconds(runner.id), 1),
            "room": now.room,
            "stored": now.stored,
            **now.beat.model_dump(exclude={"seen", "wait_seconds", "quiet"}),
            "open": now.open,
        }


_SHOWN: Final = (
    *("id", "name", "env", "split", "seed", "group_size", "weight", "minimum_share"),
    *("version", "host", "registered_at", "gone"),
)
