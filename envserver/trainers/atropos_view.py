"""An in-memory view of the groups that wait in the store: queue, buffers and formed batches.

The store is the source of truth. The view changes with every post and batch, and is merged with the
store's rows after other changes. A group is in exactly one place."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

import msgspec

from ..store import GroupRow
from .atropos_batches import Registered, Waiting, WaitingQueue
from .atropos_posts import Registration

# An environment may post a group in parts. Parts wait until some of them add up to exactly its
# group size.

_MOST_PARTS: Final = 1024
_LARGEST_TARGET: Final = 65_536


def groups_summing_to(sizes: Sequence[int], target: int) -> list[int]:
    """Returns ascending indices of sizes that add up to exactly `target`; empty if there are none.

    Tries greedily from the oldest, skipping what does not fit; if that fails, finds a subset of the
    oldest 1,024 that fits, preferring older parts. Sizes are positive."""
    return _greedily(sizes, target) or _by_subset(sizes, target)


def _greedily(sizes: Sequence[int], target: int) -> list[int]:
    taken: list[int] = []
    room = target
    for index, size in enumerate(sizes):
        if size <= room:
            taken.append(index)
            room -= size
            if room == 0:
                return taken
    return []


def _by_subset(sizes: Sequence[int], target: int) -> list[int]:
    """Looks at the oldest parts only, and at no huge target: an environment may post any sizes."""
    sizes = sizes[:_MOST_PARTS]
    if not 0 < target <= _LARGEST_TARGET or sum(sizes) < target:
        return []
    # Bit n of reached[i]: some of sizes[:i] add up to n.
    all_bits = (1 << (target + 1)) - 1
    reached = [1]
    for size in sizes:
        before = reached[-1]
        reached.append(before | (before << size) & all_bits if size <= target else before)
    if not reached[-1] >> target & 1:
        return []
    taken: list[int] = []
    room = target
    for index in reversed(range(len(sizes))):
        if not reached[index] >> room & 1:
            taken.append(index)
            room -= sizes[index]
    return taken[::-1]


KEY: Final = "atropos"


class WireState(msgspec.Struct, kw_only=True):
    """The trainer, its environments and its progress: one stored value, which is written whole.

    Args:
        wandb_group .. num_steps: as registered by the trainer.
        registered: whether a trainer has registered since the start or the last reset.
        started: whether it has asked for a batch; until then environments must wait.
        step: number of batches formed, counted from the trainer's starting step.
        ahead: how many of those are not delivered yet.
        environments: by number.
        leases: batches leased to trainers that acknowledge: lease id to group ids.
        latest: the group queued last.
    """

    registered: bool = False
    started: bool = False
    wandb_group: str | None = None
    wandb_project: str | None = None
    batch_size: int = -1
    max_token_len: int = -1
    checkpoint_dir: str = ""
    save_checkpoint_interval: int = -1
    num_steps: int = -1
    step: int = 0
    ahead: int = 0
    environments: list[Registered] = msgspec.field(default_factory=list)
    leases: dict[str, list[str]] = msgspec.field(default_factory=dict)
    latest: Waiting | None = None

    def register(self, registration: Registration) -> None:
        """Starts a new run; registered environments stay."""
        self.registered = True
        self.started = False
        self.wandb_group = registration.wandb_group
        self.wandb_project = registration.wandb_project
        self.batch_size = registration.batch_size
        self.max_token_len = registration.max_token_len
        self.checkpoint_dir = registration.checkpoint_dir
        self.save_checkpoint_interval = registration.save_checkpoint_interval
        self.num_steps = registration.num_steps
        self.step = registration.starting_step
        self.ahead = 0

    def reset(self) -> None:
        """Forgets the run and its environments, but keeps the longest row, the checkpoint settings
        and the latest group, as the protocol does."""
        self.registered = False
        self.started = False
        self.wandb_group = None
        self.wandb_project = None
        self.batch_size = -1
        self.num_steps = -1
        self.step = 0
        self.ahead = 0
        self.environments = []
        self.leases = {}

    def add_environment(self, environment: Registered) -> int:
        self.environments.append(environment)
        return len(self.environments) - 1

    def knows(self, env_id: int | None) -> bool:
        return env_id is not None and 0 <= env_id < len(self.environments)


def to_json_like(state: WireState) -> Any:
    return msgspec.to_builtins(state)


def from_json_like(value: Any) -> WireState:
    return WireState() if value is None else msgspec.convert(value, WireState)


class View:
    """The waiting groups. Performs no I/O and never waits."""

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
        return {group.group_id for group in self._all()}

    def next_order(self) -> float:
        """Returns the order of a group queued now; it increases even if the clock does not."""
        self._last_order = max(time.time(), self._last_order + 1e-6)
        return self._last_order

    def enqueue(self, group: Waiting) -> None:
        self.queue.append(group)
        self.latest = group

    def buffer(self, env_id: int, group: Waiting) -> None:
        self.buffers.setdefault(env_id, []).append(group)

    def buffered_sequences(self, env_id: int) -> int:
        return sum(group.size for group in self.buffers.get(env_id, ()))

    def fitting(self, env_id: int, group_size: int) -> list[Waiting]:
        """Removes and returns buffered parts that make a whole group; empty if there are none."""
        parts = self.buffers.get(env_id, [])
        indices = groups_summing_to([group.size for group in parts], group_size)
        fitting = [parts[index] for index in indices]
        for index in reversed(indices):
            del parts[index]
        return fitting

    def add_formed(self, batches: Iterable[list[Waiting]]) -> None:
        for batch in batches:
            for group in batch:
                self.queue.remove(group.group_id)
            self.formed.append(batch)

    def dissolve_formed(self) -> None:
        """Puts the groups of undelivered batches back in their places in the queue."""
        back = [group for batch in self.formed for group in batch]
        self.formed.clear()
        self.queue.replace([*back, *self.queue])

    def clear(self) -> None:
        self.queue = WaitingQueue()
        self.buffers.clear()
        self.formed.clear()

    def merge(
        self, rows: Sequence[GroupRow], *, before: Collection[str], skip: Collection[str]
    ) -> None:
        """Merges the store's rows into the view.

        Args:
            rows: all waiting groups, oldest first, as read from the store.
            before: ids in the view when the rows were requested. A group of these that is not in
                `rows` is gone; groups added since are newer than the rows and stay.
            skip: ids of groups being stored right now; their posts will add them.
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
        """Puts batches of ended leases first, unchanged and without counting them again."""
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
    native = row.format == "group"
    return Waiting(
        group_id=row.group_id,
        size=row.size,
        env_id=row.env_id,
        lane=row.env if native else row.env_id,
        order=row.created_at,
        native=native,
    )
