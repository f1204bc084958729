"""Encodes groups as JSON for responses, and caches the result.

In: ids and how their bodies are stored. Out: one JSON object each. Posted groups are stored in
exactly the form that is sent; native groups are converted in a thread. The cache holds batches that
were formed and are not delivered yet, not what waits: that is as large as the disk.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import msgspec
import orjson
from envserver_records.errors import StoreError
from envserver_records.records import Group, unpack

from ...formats.atropos import ScoreRange, group_to_atropos
from ...store import GroupStore
from .batching import Waiting

_MOST_BYTES: Final = 64 * 1024 * 1024


class BrokenBody(StoreError):
    """A stored native group that cannot be sent to trainers; `detail["group_id"]` names it."""

    kind = "broken_body"


class EncodedGroups:
    """Reads bodies through a cache of `most_bytes` that evicts the least recently used."""

    def __init__(
        self,
        store: GroupStore,
        *,
        include_messages: bool,
        score_range: ScoreRange,
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        self._store = store
        self._include_messages = include_messages
        self._score_range: ScoreRange = score_range
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    def _keep(self, group_id: str, encoded: bytes) -> None:
        """Caches an encoded group if there is room."""
        self.forget(group_id)
        if len(encoded) > self._most_bytes:
            return
        self._kept[group_id] = encoded
        self._bytes += len(encoded)
        while self._bytes > self._most_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= len(oldest)

    def forget(self, group_id: str) -> None:
        """Removes a delivered group from the cache."""
        self._bytes -= len(self._kept.pop(group_id, b""))

    async def get(self, groups: Sequence[Waiting]) -> list[bytes]:
        """Returns one JSON object per group, in this order."""
        found = {g.group_id: self._kept[g.group_id] for g in groups if g.group_id in self._kept}
        missing = [group for group in groups if group.group_id not in found]
        if missing:
            bodies = await self._store.bodies([group.group_id for group in missing])
            for group, body in zip(missing, bodies, strict=True):
                encoded = body
                if group.native:
                    encoded = await asyncio.to_thread(self._encode, group.group_id, body)
                found[group.group_id] = encoded
                self._keep(group.group_id, encoded)
        return [found[group.group_id] for group in groups]

    def _encode(self, group_id: str, body: bytes) -> bytes:
        try:
            group = unpack(body, Group)
        except (msgspec.DecodeError, ValueError, TypeError) as error:
            message = f"Group {group_id} cannot be read: {error}."
            raise BrokenBody(message, group_id=group_id) from error
        wire = group_to_atropos(
            group, include_messages=self._include_messages, score_range=self._score_range
        )
        if not all(wire["tokens"]) or not wire["tokens"]:
            raise BrokenBody(f"Group {group_id} has no row to train on.", group_id=group_id)
        return orjson.dumps(wire)
