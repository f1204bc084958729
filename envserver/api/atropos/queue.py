"""The queue of groups waiting for the trainer, with counts updated on each change, so that status
calls need not scan it.

In: groups as they are queued and removed. Out: the queue, oldest first, and the numbers of a
status call.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from .batching import Waiting, minimum_sequences

_Key = TypeVar("_Key")

_SMALLEST_WEIGHT = 0.01
"""Minimum weight, so that no environment starves."""


class Registered(msgspec.Struct, kw_only=True):
    """A registered environment; its number is its index in the list of environments.

    Args:
        desired_name: the requested name; `real_name`: the same, made unique.
        max_token_length, weight, group_size, min_batch_allocation: as registered; `group_size`
            grows to the environment's largest group seen in the queue.
        connected: False after the environment has disconnected.
    """

    desired_name: str
    real_name: str
    max_token_length: int
    weight: float
    group_size: int
    min_batch_allocation: float | None = None
    connected: bool = True


class WaitingQueue:
    """Groups by id, in the order of `Waiting.order`; all counts are updated incrementally.

    Native groups count for no environment: native environments limit themselves, and an external
    environment that had to wait for their groups might never begin.
    """

    def __init__(self) -> None:
        self._groups: dict[str, Waiting] = {}
        self._sizes: Counter[int] = Counter()
        self._sequences: Counter[int | None] = Counter()
        self._sizes_of: dict[int | None, Counter[int]] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._groups.values())

    def __contains__(self, group_id: object) -> bool:
        return group_id in self._groups

    def append(self, group: Waiting) -> None:
        """Adds a group at the end; does nothing if it is already in the queue."""
        if group.group_id in self._groups:
            return
        self._groups[group.group_id] = group
        self._sizes[group.size] += 1
        if group.native:
            return
        self._sequences[group.env_id] += group.size
        self._sizes_of.setdefault(group.env_id, Counter())[group.size] += 1

    def remove(self, group_id: str) -> None:
        """Removes a group if it is in the queue."""
        group = self._groups.pop(group_id, None)
        if group is None:
            return
        _less(self._sizes, group.size, 1)
        if group.native:
            return
        _less(self._sequences, group.env_id, group.size)
        own = self._sizes_of[group.env_id]
        _less(own, group.size, 1)
        if not own:
            del self._sizes_of[group.env_id]

    def replace(self, groups: Iterable[Waiting]) -> None:
        """Replaces the queue by these groups, sorted by their order."""
        for group_id in list(self._groups):
            self.remove(group_id)
        for group in sorted(groups, key=lambda group: group.order):
            self.append(group)

    @property
    def largest(self) -> int:
        """Number of sequences of the largest group, at least 1."""
        return max(self._sizes, default=1)

    def largest_of(self, env_id: int) -> int:
        """Returns the number of sequences of an environment's largest group; 0 without groups."""
        return max(self._sizes_of.get(env_id, ()), default=0)

    def sequences_of(self, env_id: int | None) -> int:
        """Returns the number of waiting sequences of an environment."""
        return self._sequences[env_id]

    def environments(self) -> list[int | None]:
        """Returns the environments of the waiting groups; None stands for groups without one."""
        return list(self._sequences)


class EnvironmentStatus(msgspec.Struct, frozen=True):
    """Status for an environment; sizes are in groups of the environment that asks."""

    current_step: int
    queue_size: int
    unallocated_fraction: float
    self_queue_size: int
    max_group_size: int
    env_weight: float


def grown_group_size(queue: WaitingQueue, environments: Sequence[Registered], env_id: int) -> int:
    """Returns the environment's group size, or that of its largest waiting group if greater."""
    return max(environments[env_id].group_size, queue.largest_of(env_id))


def environment_status(
    queue: WaitingQueue,
    environments: Sequence[Registered],
    env_id: int,
    *,
    batch_size: int,
    step: int,
) -> EnvironmentStatus:
    """Returns the status of environment `env_id`, which must be registered."""
    connected = [env for env in environments if env.connected]
    group_size = max(1, grown_group_size(queue, environments, env_id))
    own = queue.sequences_of(env_id)
    others = _left_by_others(queue, environments, env_id, batch_size)
    allocated = sum(env.min_batch_allocation or 0.0 for env in connected)
    return EnvironmentStatus(
        current_step=step,
        queue_size=(own + others) // group_size,
        unallocated_fraction=1.0 - min(allocated, 1.0),
        self_queue_size=own // group_size,
        max_group_size=queue.largest,
        env_weight=_weight(environments[env_id], connected),
    )


def _weight(asking: Registered, connected: Sequence[Registered]) -> float:
    total = sum(env.max_token_length * max(0.0, env.weight) for env in connected)
    if total <= 0 or not math.isfinite(total):
        return _SMALLEST_WEIGHT
    return max(_SMALLEST_WEIGHT, asking.max_token_length * asking.weight / total)


def _left_by_others(
    queue: WaitingQueue, environments: Sequence[Registered], env_id: int, batch_size: int
) -> int:
    """Returns the sequences of other environments, rounded up to packs, beyond their minimum
    shares. If all groups have size 1, returns 0, so environments do not count each other's.
    """
    largest = queue.largest
    if largest <= 1:
        return 0
    left = 0
    for other in queue.environments():
        if other == env_id:
            continue
        packs = math.ceil(queue.sequences_of(other) / largest)
        left += max(0, packs * largest - _minimum(environments, other, batch_size))
    return left


def _minimum(environments: Sequence[Registered], env_id: int | None, batch_size: int) -> int:
    if env_id is None or not 0 <= env_id < len(environments):
        return 0
    env = environments[env_id]
    if not env.connected or env.min_batch_allocation is None:
        return 0
    return minimum_sequences(batch_size, env.min_batch_allocation)


def _less(counter: Counter[_Key], key: _Key, by: int) -> None:
    counter[key] -= by
    if counter[key] <= 0:
        del counter[key]
