"""The server's picture of what waits in the store: queue, buffers and formed batches, kept in
memory.

The store is the truth; this is what it looks like in the order and the shape that the wire needs.
It changes with every post and batch, and is merged with the store's rows when somebody else (a
native trainer, an environment of ours, an expired lease) has changed the store.

What always holds: a group is in exactly one place: the queue, one buffer, or one formed batch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from ...store import GroupRow
from .batching import Waiting
from .buffer import groups_summing_to
from .queue import WaitingQueue
from .state import WireState


class View:
    """See the module. Nothing here waits or does input and output."""

    def __init__(self) -> None:
        self.queue = WaitingQueue()
        self.buffers: dict[int, list[Waiting]] = {}
        self.formed: deque[list[Waiting]] = deque()
        self.latest: Waiting | None = None
        self._last_order = 0.0

    def __len__(self) -> int:
        formed = sum(len(batch) for batch in self.formed)
        return len(self.queue) + formed + sum(len(parts) for parts in self.buffers.values())

    def ids(self) -> set[str]:
        """Of every group here."""
        return {group.group_id for group in self._all()}

    def next_order(self) -> float:
        """For a group that enters the queue now; grows even when the clock does not."""
        self._last_order = max(time.time(), self._last_order + 1e-6)
        return self._last_order

    def enqueue(self, group: Waiting) -> None:
        """At the end of the queue."""
        self.queue.append(group)
        self.latest = group

    def buffer(self, env_id: int, group: Waiting) -> None:
        """A part of a group; `fitting` says when it is whole."""
        self.buffers.setdefault(env_id, []).append(group)

    def buffered_sequences(self, env_id: int) -> int:
        """Sequences in one environment's buffer."""
        return sum(group.size for group in self.buffers.get(env_id, ()))

    def fitting(self, env_id: int, group_size: int) -> list[Waiting]:
        """Buffered parts that make a whole group, taken out of the buffer; empty when none do."""
        parts = self.buffers.get(env_id, [])
        indices = groups_summing_to([group.size for group in parts], group_size)
        fitting = [parts[index] for index in indices]
        for index in reversed(indices):
            del parts[index]
        return fitting

    def add_formed(self, batches: Iterable[list[Waiting]]) -> None:
        """Takes batches out of the queue, to be delivered in this order."""
        for batch in batches:
            for group in batch:
                self.queue.remove(group.group_id)
            self.formed.append(batch)

    def dissolve_formed(self) -> None:
        """Puts undelivered batches back to where their groups were in the queue."""
        back = [group for batch in self.formed for group in batch]
        self.formed.clear()
        self.queue.replace([*back, *self.queue])

    def clear(self) -> None:
        """Nothing waits any more. The latest group stays."""
        self.queue = WaitingQueue()
        self.buffers.clear()
        self.formed.clear()

    def merge(
        self, rows: Sequence[GroupRow], *, before: Collection[str], skip: Collection[str]
    ) -> None:
        """Takes over what the store says.

        Args:
            rows: all waiting groups, oldest first, as read from the store.
            before: ids that were here when the rows were asked for: where rows lack one, it is
                gone; what came since is younger than the rows and stays.
            skip: ids that are being put right now; their posts will add them.
        """
        there = {row.group_id: row.state for row in rows}
        known = {group.group_id: group for group in self._all()}

        def stays(group: Waiting, state: str) -> bool:
            if group.group_id in there:
                return there[group.group_id] == state
            return group.group_id not in before

        whole = [b for b in self.formed if all(stays(group, "queued") for group in b)]
        in_formed = {group.group_id for batch in whole for group in batch}
        waiting = {g.group_id: g for g in self.queue if stays(g, "queued")}
        buffers = {
            env_id: [part for part in parts if stays(part, "buffered")]
            for env_id, parts in self.buffers.items()
        }
        for row in rows:
            if row.group_id in in_formed or row.group_id in skip:
                continue
            group = known.get(row.group_id)
            if group is None:
                group = as_waiting(row)
                self.latest = group if row.state == "queued" else self.latest
            if row.state == "queued":
                waiting.setdefault(row.group_id, group)
            elif row.env_id is not None:
                parts = buffers.setdefault(row.env_id, [])
                if group not in parts:
                    parts.append(group)
        self.formed = deque(whole)
        self.buffers = {env_id: parts for env_id, parts in buffers.items() if parts}
        self.queue.replace(waiting.values())

    def take_back(self, state: WireState) -> None:
        """Batches of leases that are over come first again, unchanged and not counted twice."""
        again: list[list[Waiting]] = []
        waiting = {group.group_id: group for group in self.queue}
        for lease_id, group_ids in list(state.leases.items()):
            found = [waiting[group_id] for group_id in group_ids if group_id in waiting]
            if found:
                del state.leases[lease_id]
            if found and len(found) == len(group_ids):
                again.append(found)
        for batch in again:
            for group in batch:
                self.queue.remove(group.group_id)
        again.sort(key=lambda batch: min(group.order for group in batch))
        self.formed.extendleft(reversed(again))

    def _all(self) -> Iterable[Waiting]:
        yield from self.queue
        for batch in self.formed:
            yield from batch
        for parts in self.buffers.values():
            yield from parts


def as_waiting(row: GroupRow) -> Waiting:
    """A stored group as the wire sees it."""
    native = row.format == "group"
    return Waiting(
        group_id=row.group_id,
        size=row.size,
        env_id=row.env_id,
        lane=row.env if native else row.env_id,
        order=row.created_at,
        native=native,
    )
