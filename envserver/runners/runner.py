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

from ..rollouts.scheduler import Share
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


class Stream(msgspec.Struct, kw_only=True):
    env: str
    split: Split
    seed: int

    @property
    def prefix(self) -> str:
        return stream_prefix(self.env, self.split, self.seed)


class RegisteredRunner(Stream, kw_only=True):
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
    asked_seed: int
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


class Runner:
    """A runner with its stored registration and, from its messages, its current status.

    Args:
        stored: groups of its stream in the store; None: not counted yet.
    """

    def __init__(self, registered: RegisteredRunner, stored: int | None = None) -> None:
        self.registered = registered
        self.id, self.name, self.env = registered.id, registered.name, registered.env
        self.share = Share(registered.name, registered.weight, registered.minimum_share)
        self.stored = stored
        self.beat = Heartbeat()
        self.room = 0
        self.open = 0
        self.counted: int | None = None
        self.drain = False
        self._is_heard = False
        self.poll_seconds = 0.0
        """Seconds that it was last asked to wait for news; 0: none."""

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

    @property
    def capacity(self) -> int:
        return self.beat.capacity

    def understands(self, addition: str) -> bool:
        return addition in self.registered.understands


class RunnerTable:
    """All runners of a server; call `load` first."""

    def __init__(self, store: Store, silent_after_seconds: float) -> None:
        self._store = store
        self.streams = Streams(store)
        self.heartbeats = Heartbeats(silent_after_seconds)
        self.known: dict[str, Runner] = {}
        """By id."""
        self._named: dict[str, Runner] = {}

    async def load(self) -> None:
        if old := await self._store.get_value(_OLD_KEY):
            keys = {_KEY_PREFIX + facts["id"]: facts for facts in old}
            await self._store.set_values(keys | {_OLD_KEY: None})
        stored = await self._store.values_with_prefix(_KEY_PREFIX)
        runners = msgspec.convert(list(stored.values()), list[RegisteredRunner])
        for runner in sorted(runners, key=lambda runner: (runner.left_at, runner.registered_at)):
            self._remember(Runner(runner))

    async def save(self, runner: Runner) -> None:
        """Stores a registration. Of the runners that have left, those that left long ago or first
        are forgotten; the store still knows their streams by their groups."""
        forgotten = self._forgotten_for(runner.id)
        if self._is_full_for(runner.id):
            raise StoreFull(f"No more than {_MOST_RUNNERS} environments can register.")
        removed = dict.fromkeys(_KEY_PREFIX + left.id for left in forgotten)
        registered = msgspec.to_builtins(runner.registered)
        await self._store.set_values({**removed, _KEY_PREFIX + runner.id: registered})
        self._remember(runner)

    def _is_full_for(self, env_id: str) -> bool:
        return env_id not in self.known and len(self.known) >= _MOST_RUNNERS

    def _forgotten_for(self, env_id: str) -> list[Runner]:
        """Forgets who left long ago; where there is no room for `env_id`, who left first, and then
        who was lost."""
        others = [runner for runner in self.known.values() if runner.id != env_id]
        gone = sorted(
            (runner for runner in others if runner.registered.gone),
            key=lambda runner: runner.registered.left_at,
        )
        earliest = time.time() - _REMEMBERED_SECONDS
        forgotten = []
        for runner in gone:
            if runner.registered.left_at < earliest or self._is_full_for(env_id):
                self._forget(runner)
                forgotten.append(runner)
        if self._is_full_for(env_id):
            silent = self.heartbeats.silent_seconds
            lost = [runner for runner in self.known.values() if silent(runner.id) > _LOST_SECONDS]
            for runner in lost:
                self._forget(runner)
            forgotten += lost
        return forgotten

    def _forget(self, runner: Runner) -> None:
        del self.known[runner.id], self._named[runner.name]
        self.streams.give_back(runner.registered.prefix)
        self.heartbeats.forget(runner.id)

    def _remember(self, runner: Runner) -> None:
        before = self.known.get(runner.id)
        self.streams.take(runner.registered.prefix)
        if before is not None:
            self.streams.give_back(before.registered.prefix)
        self.known[runner.id] = self._named[runner.name] = runner

    def named(self, name: str) -> Runner | None:
        return self._named.get(name)

    def is_present(self, runner: Runner) -> bool:
        if runner.registered.gone:
            return False
        silent = self.heartbeats.silent_seconds(runner.id)
        return silent <= self.heartbeats.silent_after_seconds or silent <= self.silent_after(runner)

    def silent_after(self, runner: Runner) -> float:
        """Returns after how many seconds without a message a runner no longer counts: longer for
        one that waits long for news. It stops its own model calls after half of that."""
        shortest = self.heartbeats.silent_after_seconds
        if not runner.understands(NEXT_SECONDS):
            return shortest
        longest = max(runner.poll_seconds, min(runner.beat.wait_seconds, LONGEST_SECONDS))
        return max(shortest, SILENT_POLLS * longest)

    def present(self) -> list[Runner]:
        return [runner for runner in self.known.values() if self.is_present(runner)]

    def presence(self, runner: Runner) -> str:
        if runner.registered.gone:
            return "gone"
        return "present" if self.is_present(runner) else "silent"

    def count(self) -> dict[str, int]:
        """Returns how many runners are present, silent and gone."""
        counted = Counter(map(self.presence, self.known.values()))
        return {name: counted[name] for name in ("present", "silent", "gone")}

    def minimums(self) -> dict[str, float]:
        """Returns the minimum shares of the runners that count, by environment name."""
        found: dict[str, float] = {}
        for runner in self.present():
            if runner.capacity and runner.share.minimum:
                found[runner.env] = min(1.0, found.get(runner.env, 0.0) + runner.share.minimum)
        return found

    async def snapshot(self) -> list[dict[str, Any]]:
        for runner in list(self.known.values()):
            if runner.stored is None:
                runner.stored = await self._store.count_with_prefix(runner.registered.prefix)
        return [self._shown(runner) for runner in self.known.values()]

    def _shown(self, runner: Runner) -> dict[str, Any]:
        return {
            **{name: getattr(runner.registered, name) for name in _SHOWN},
            "silent": self.presence(runner) == "silent",
            "silent_seconds": round(self.heartbeats.silent_seconds(runner.id), 1),
            "room": runner.room,
            "stored": runner.stored,
            **runner.beat.model_dump(exclude={"seen", "wait_seconds", "quiet"}),
            "open": runner.open,
        }


_SHOWN: Final = (
    *("id", "name", "env", "split", "seed", "group_size", "weight", "minimum_share"),
    *("version", "host", "registered_at", "gone"),
)
