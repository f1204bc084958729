"""Tells watchers what changed: groups of the store, runs, engines, failures.

Nothing is looked at while nobody watches; what happened meanwhile is told when somebody comes. Many
groups or failures at once are told of as one event, so full load costs less than a few groups.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

import msgspec
import structlog
from envserver_records.errors import Fault, StoreError

from ...store import GroupStore
from ...store.listing import GroupQuery
from ..native.groups import summary
from . import Live
from .engines import engine_rows
from .events import missed

log = structlog.get_logger(__name__)

LOOK_SECONDS: Final = 0.5
MOST_ALONE: Final = 10
"""Groups, or failures, of one look that are told of one by one."""
_UNWATCHED_SECONDS: Final = 10.0
_DROPS: Final[tuple[tuple[str, str, Fault, str], ...]] = (
    ("stale_dropped", "stale", "trainer", "Groups that waited became too old for the policy."),
    ("damaged", "damaged", "infrastructure", "Stored groups cannot be read; see /v1/status."),
)
"""Counter of the store, kind, fault, message."""
_TOLD_OF_ENGINES: Final = ("breaker", "weights_version", "ready", "standing")


class Follower:
    """Publishes what changed since the last look; `load` it first."""

    def __init__(self, live: Live, store: GroupStore) -> None:
        self._live = live
        self._feed = live.feed
        self._store = store
        self._lock = asyncio.Lock()
        self._feed.seq = store.last_seq
        self._failures = live.failures.number
        self._runs = set(store.open_runs)
        self._dropped: dict[str, int] = {}
        self._engines: dict[tuple[str, str], tuple[Any, ...]] = {}
        self._changed_engines()

    async def load(self) -> None:
        """Notes what is there already."""
        self._dropped = await self._store.counters()

    async def run(self) -> None:
        """Looks twice a second while somebody watches, until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_UNWATCHED_SECONDS):
                    await self._feed.watched.wait()
            if self._feed.watchers:
                await self.look()
                await asyncio.sleep(LOOK_SECONDS)
            else:
                await self._note_drops()

    async def look(self) -> None:
        """Publishes what changed."""
        async with self._lock:
            try:
                await self._tell_groups()
            except StoreError as error:  # the next look tells of them
                log.warning("groups_not_told", error=str(error))
            await self._note_drops()
            self._tell_failures()
            self._tell_runs()
            for row in self._changed_engines():
                self._feed.publish("engine", row)

    async def _tell_groups(self) -> None:
        seen, last = self._feed.seq, self._store.last_seq
        if last <= seen:
            return
        rows = []
        if last - seen <= MOST_ALONE:
            page = await self._store.list_groups(GroupQuery(after=seen), "", last - seen)
            rows = [one for one in page.groups if one.row.seq <= last]
        if len(rows) < last - seen:  # many, or some were removed already
            self._feed.publish("groups", missed(seen, last), seq=last)
            return
        for one in rows:
            self._feed.publish("group", summary(one), seq=one.row.seq)

    async def _note_drops(self) -> None:
        """Adds the groups that left the queues of the store to the failures."""
        counters = await self._store.counters()
        for counter, kind, fault, message in _DROPS:
            count = counters.get(counter, 0) - self._dropped.get(counter, 0)
            if count > 0:
                self._live.failures.dropped(kind, count, message, fault)
        self._dropped = counters

    def _tell_failures(self) -> None:
        seen, last = self._failures, self._live.failures.number
        self._failures = last
        if last - seen > MOST_ALONE:
            told = {"count": last - seen, "first": seen + 1, "last": last}
            self._feed.publish("failures", told)
            return
        for row in self._live.failures.after(seen):
            self._feed.publish("failure", msgspec.structs.asdict(row))

    def _tell_runs(self) -> None:
        now = set(self._store.open_runs)
        for name in sorted(self._runs ^ now):
            self._feed.publish("run", {"name": name, "state": "open" if name in now else "closed"})
        self._runs = now

    def _changed_engines(self) -> list[dict[str, Any]]:
        """Returns the rows of engines that changed, but for their numbers, and of those that are
        gone."""
        rows = engine_rows(self._live.engines)
        gone = self._engines.keys() - {(row["name"], row["url"]) for row in rows}
        changed: list[dict[str, Any]] = []
        for name, url in gone:
            del self._engines[name, url]
            changed.append({"name": name, "url": url, "standing": "gone"})
        for row in rows:
            place, state = (row["name"], row["url"]), tuple(row[key] for key in _TOLD_OF_ENGINES)
            if self._engines.get(place) != state:
                self._engines[place] = state
                changed.append(row)
        return changed
