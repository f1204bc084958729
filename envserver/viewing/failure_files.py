"""The failures that `envserver process` writes beside its groups, as a server tells its own.

In: `*.failures.jsonl` of what is looked at. Out: rows of GET /v1/failures. What holds: of a long
file only the end is read; what is appended is reported.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from envserver_records.errors import Failure

from ..export.jsonl import failures_path
from ..rollouts.events import GroupDropped, RolloutFailed
from ..trainers.failures import FailureLog
from ..trainers.live_events import Feed
from .sources import Viewed

_MOST_BYTES: Final = 4 << 20
_MOST_ALONE: Final = 10
"""New failures that are reported one by one."""
_POLL_SECONDS: Final = 2.0
_ENDING: Final = ".failures.jsonl"
_ENVIRONMENT: Final = re.compile(r"(.+)-(?:train|validation|test)-\d")
"""The beginning of a group's id."""


class _Line(msgspec.Struct):
    event: str


class _Failed(Failure, frozen=True, kw_only=True):
    """A failed attempt: the failure, and where it happened."""

    group_id: str
    index: int
    task_id: str
    rollout_id: str
    attempt: int
    final: bool
    at: float


class FailureFiles:
    """The failures of what is looked at; `log` has the latest of them."""

    def __init__(self, viewed: Viewed) -> None:
        self._viewed = viewed
        self._read: dict[Path, int] = {}
        self.log = FailureLog()

    @property
    def are_there(self) -> bool:
        """Whether something failed, or was dropped."""
        return self.log.number > 0

    async def read_new(self) -> None:
        """Reads what was appended."""
        for event in await asyncio.to_thread(lambda: list(self._events())):
            found = _ENVIRONMENT.match(event.group_id)
            self.log.observer(found[1] if found else "")(event)

    async def follow(self, feed: Feed) -> None:
        """Tells watchers of what is appended, until cancelled."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            seen = self.log.number
            await self.read_new()
            last = self.log.number
            if last - seen > _MOST_ALONE:
                feed.publish("failures", {"count": last - seen, "first": seen + 1, "last": last})
            elif last > seen:
                for row in self.log.after(seen):
                    feed.publish("failure", msgspec.structs.asdict(row))

    def _events(self) -> Iterator[RolloutFailed | GroupDropped]:
        for path in self._paths():
            try:
                size = path.stat().st_size
                before = self._read.get(path, max(0, size - _MOST_BYTES))
                if size < before:  # it was begun anew
                    before = 0
                with path.open("rb") as file:
                    file.seek(before)
                    data = file.read(_MOST_BYTES)
            except OSError:
                continue
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = before + len(whole)
            for line in whole.splitlines():
                yield from _event(line)

    def _paths(self) -> Iterator[Path]:
        for place in map(Path, self._viewed.places):
            if place.is_dir():
                yield from sorted(place.rglob(f"*{_ENDING}"))
            elif (path := failures_path(place)).is_file():
                yield path


def _event(line: bytes) -> Iterator[RolloutFailed | GroupDropped]:
    """Yields the event of a line; none of a line that was cut off, or of another kind."""
    try:
        kind = msgspec.json.decode(line, type=_Line).event
        if kind == "group_dropped":
            yield msgspec.json.decode(line, type=GroupDropped)
        elif kind == "rollout_failed":
            told = msgspec.json.decode(line, type=_Failed)
            of_failure = {name: getattr(told, name) for name in Failure.__struct_fields__}
            facts = {n: getattr(told, n) for n in RolloutFailed.__struct_fields__ if n != "failure"}
            yield RolloutFailed(failure=Failure(**of_failure), **facts)
    except msgspec.DecodeError:
        return
