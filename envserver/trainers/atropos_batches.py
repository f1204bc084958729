"""Waiting groups of the Atropos protocol: the view of them in memory, batches, and their JSON.

Batches have exactly `batch_size` sequences, oldest first; no group is in two. The rule is that of
the protocol. With M the size of the largest waiting group, groups of equal size are collected until
they add up to M sequences (a pack); batches consist of whole packs. So batch_size must be a
multiple of M and every group size must divide M, or no batch forms; the reason then says so.

The store is the source of truth. The view changes with every post and batch, and is merged with the
store's rows after other changes. A group is in exactly one place."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

import msgspec
import orjson
from envserver_records.errors import StoreError
from envserver_records.records import Group, unpack
from envserver_records.wire import NATIVE

from ..formats.atropos import ScoreRange, group_to_atropos
from ..store import GroupRow, Store
from .atropos_posts import Registration
from .encoding import Cache

WORK_LIMIT: Final = 2_000_000
"""Maximum number of group visits in one `form_batches`; the next call forms the rest."""

_LARGEST_MINIMUM: Final = 2**62

Lane = int | str | None
"""Owner of a group: number of a registered environment, name of a local one, or None."""


class Waiting(msgspec.Struct, frozen=True):
    """A waiting group.

    Args:
        size: number of sequences it counts for.
        env_id: the environment number it was posted with.
        lane: the owner whose minimum it counts for.
        order: time it entered the queue (`time.time()` seconds); the queue is sorted by it.
        native: made by an environment of this server: its body is a packed `records.Group`.
    """

    group_id: str
    size: int
    env_id: int | None
    lane: Lane
    order: float
    native: bool = False


class Formed(msgspec.Struct, frozen=True):
    """Batches, oldest first, the groups left in the queue, and why there is no further batch."""

    batches: list[list[Waiting]]
    left: list[Waiting]
    reason: str


def minimum_sequences(batch_size: int, share: float) -> int:
    return int(min(batch_size * share, _LARGEST_MINIMUM))


def form_batches(
    queue: Sequence[Waiting], batch_size: int, minimums: Mapping[Lane, float] | None = None
) -> Formed:
    """Forms batches until none can be formed or `WORK_LIMIT` is reached.

    Args:
        queue: waiting groups, oldest first.
        minimums: minimum share of each batch by lane, in order of registration, for the
            environments that are connected and alive; empty: no minimum shares.
    """
    left = list(queue)
    batches: list[list[Waiting]] = []
    if batch_size < 1:
        return Formed(batches, left, f"the trainer's batch_size is {batch_size}")
    work = 0
    while work <= WORK_LIMIT:
        work += max(1, len(left))
        if minimums:
            found, reason = _with_minimums(left, batch_size, minimums)
        else:
            found, reason = _plain(left, batch_size)
        if not found:
            return Formed(batches, left, reason)
        batches.extend(found)
        gone = {group.group_id for batch in found for group in batch}
        left = [group for group in left if group.group_id not in gone]
    return Formed(batches, left, "more batches are about to be formed")


def _packs(groups: Sequence[Waiting], largest: int) -> list[list[Waiting]]:
    """Collects groups of one size into packs of `largest` sequences, in order of completion."""
    piles: dict[int, list[Waiting]] = defaultdict(list)
    packs: list[list[Waiting]] = []
    for group in groups:
        pile = piles[group.size]
        pile.append(group)
        if len(pile) * group.size == largest:
            packs.append(pile)
            piles[group.size] = []
    return packs


def _plain(queue: Sequence[Waiting], batch_size: int) -> tuple[list[list[Waiting]], str]:
    """Forms as many batches as one scan of the queue allows. While whole packs are taken and a
    group of the largest size remains, the packs of the remaining groups are simply those not yet
    taken."""
    if not queue:
        return [], "no group waits"
    total = sum(group.size for group in queue)
    if total < batch_size:
        return [], f"{total} of {batch_size} sequences wait"
    largest = max(group.size for group in queue)
    of_largest_size = sum(group.size == largest for group in queue)
    packs = _packs(queue, largest)
    packed = len(packs) * largest
    batches: list[list[Waiting]] = []
    position = 0
    while packed - position * largest >= batch_size and (of_largest_size or not batches):
        batch, used, whole = _take(packs[position:], batch_size)
        if batch is None:
            break
        batches.append(batch)
        if not whole:
            break
        position += used
        of_largest_size -= sum(group.size == largest for group in batch)
    return batches, _why_not(queue, batch_size, largest, packed)


def _take(
    packs: Sequence[list[Waiting]], batch_size: int
) -> tuple[list[Waiting] | None, int, bool]:
    """Returns a batch, the number of packs it uses, and whether the last is used up."""
    batch: list[Waiting] = []
    taken = 0
    for number, pack in enumerate(packs, 1):
        for place, group in enumerate(pack, 1):
            batch.append(group)
            taken += group.size
            if taken == batch_size:
                return batch, number, place == len(pack)
            if taken > batch_size:
                return None, number, False
    return None, len(packs), False


def _why_not(queue: Sequence[Waiting], batch_size: int, largest: int, packed: int) -> str:
    odd = sorted({group.size for group in queue if largest % group.size})
    if odd:
        return f"groups of {odd[:4]} never fill up to the largest group, {largest} sequences"
    if batch_size % largest:
        return (
            f"batch_size {batch_size} is not a multiple of the largest group, {largest} sequences"
        )
    return f"{packed} of {batch_size} sequences wait in complete packs of {largest}"


def _with_minimums(
    queue: Sequence[Waiting], batch_size: int, minimums: Mapping[Lane, float]
) -> tuple[list[list[Waiting]], str]:
    if not queue:
        return [], "no group waits"
    packed = _packed_by_lane(queue)
    wanted: dict[Lane, int] = {}
    for lane, share in minimums.items():
        sequences = minimum_sequences(batch_size, share)
        if sequences <= 0:
            continue
        if not packed.get(lane):
            return [], f"environment {lane} has a minimum share and no complete pack waits of it"
        wanted[lane] = sequences
    _scale_down(wanted, packed, batch_size)
    batch = _fill(queue, packed, wanted, batch_size)
    there = sum(group.size for group in batch)
    if there != batch_size:
        return [], f"{there} of {batch_size} sequences fit together under the minimum shares"
    return [batch], ""


def _packed_by_lane(queue: Sequence[Waiting]) -> dict[Lane, list[Waiting]]:
    largest = max(group.size for group in queue)
    lanes: dict[Lane, list[Waiting]] = defaultdict(list)
    for group in queue:
        if group.lane is not None:
            lanes[group.lane].append(group)
    return {
        lane: [group for pack in _packs(groups, largest) for group in pack]
        for lane, groups in lanes.items()
    }


def _scale_down(
    wanted: dict[Lane, int], packed: Mapping[Lane, Sequence[Waiting]], batch_size: int
) -> None:
    """Scales minimums that exceed a batch down to it, but never below one group each."""
    total = sum(wanted.values())
    if total <= batch_size:
        return
    for lane, sequences in wanted.items():
        smallest = min(group.size for group in packed[lane])
        wanted[lane] = max(smallest, int(sequences * (batch_size / total)))


def _fill(
    queue: Sequence[Waiting],
    packed: Mapping[Lane, Sequence[Waiting]],
    wanted: Mapping[Lane, int],
    batch_size: int,
) -> list[Waiting]:
    """Takes each lane's minimum in order of registration; then, oldest first, what still fits."""
    batch: list[Waiting] = []
    room = batch_size
    for lane, minimum in wanted.items():
        taken = 0
        for group in packed[lane]:
            if taken >= minimum:
                break
            if group.size <= room:
                batch.append(group)
                taken += group.size
                room -= group.size
    inside = {group.group_id for group in batch}
    complete = {group.group_id for groups in packed.values() for group in groups}
    for group in queue:
        if room == 0:
            break
        if group.group_id in complete and group.group_id not in inside and group.size <= room:
            batch.append(group)
            room -= group.size
    return batch


_Key = TypeVar("_Key")

_SMALLEST_WEIGHT = 0.01
"""Minimum weight, so that no environment starves."""


class Registered(msgspec.Struct, kw_only=True):
    """A registered environment; its number is its index in the list of environments.

    Args:
        real_name: `desired_name`, made unique.
        group_size: as registered; grows to the environment's largest group seen in the queue.
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
    """Groups by id, in the order of `Waiting.order`; all counts are updated incrementally. Native
    groups count for no environment: native environments limit themselves, and an external
    environment that had to wait for their groups might never begin."""

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
        for group_id in list(self._groups):
            self.remove(group_id)
        for group in sorted(groups, key=lambda group: group.order):
            self.append(group)

    @property
    def largest(self) -> int:
        """Number of sequences of the largest group, at least 1."""
        return max(self._sizes, default=1)

    def largest_of(self, env_id: int) -> int:
        return max(self._sizes_of.get(env_id, ()), default=0)

    def sequences_of(self, env_id: int | None) -> int:
        return self._sequences[env_id]

    def environments(self) -> list[int | None]:
        return list(self._sequences)


def grown_group_size(queue: WaitingQueue, environments: Sequence[Registered], env_id: int) -> int:
    return max(environments[env_id].group_size, queue.largest_of(env_id))


def environment_status(
    queue: WaitingQueue,
    environments: Sequence[Registered],
    env_id: int,
    *,
    batch_size: int,
    step: int,
) -> dict[str, float]:
    """Returns the answer of `/status-env`; sizes are in groups of the environment that asks."""
    connected = [env for env in environments if env.connected]
    group_size = max(1, grown_group_size(queue, environments, env_id))
    own = queue.sequences_of(env_id)
    others = _left_by_others(queue, environments, env_id, batch_size)
    allocated = sum(env.min_batch_allocation or 0.0 for env in connected)
    return {
        "current_step": step,
        "queue_size": (own + others) // group_size,
        "unallocated_fraction": 1.0 - min(allocated, 1.0),
        "self_queue_size": own // group_size,
        "max_group_size": queue.largest,
        "env_weight": _weight(environments[env_id], connected),
    }


def _weight(asking: Registered, connected: Sequence[Registered]) -> float:
    total = sum(env.max_token_length * max(0.0, env.weight) for env in connected)
    if total <= 0 or not math.isfinite(total):
        return _SMALLEST_WEIGHT
    return max(_SMALLEST_WEIGHT, asking.max_token_length * asking.weight / total)


def _left_by_others(
    queue: WaitingQueue, environments: Sequence[Registered], env_id: int, batch_size: int
) -> int:
    """Returns the sequences of other environments, rounded up to packs, beyond their minimum
    shares. If all groups have size 1, returns 0, so environments do not count each other's."""
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
        facts = registration.model_dump()
        self.step = facts.pop("starting_step")
        for name, value in facts.items():
            setattr(self, name, value)
        self.registered, self.started, self.ahead = True, False, 0

    def after_reset(self, latest: Waiting | None) -> WireState:
        """Returns the state without the run and its environments; it keeps the longest row and the
        checkpoint settings, as the protocol does."""
        return WireState(
            max_token_len=self.max_token_len,
            checkpoint_dir=self.checkpoint_dir,
            save_checkpoint_interval=self.save_checkpoint_interval,
            latest=latest,
        )

    def knows(self, env_id: int | None) -> bool:
        return env_id is not None and 0 <= env_id < len(self.environments)


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
    native = row.format in NATIVE
    return Waiting(
        group_id=row.group_id,
        size=row.size,
        env_id=row.env_id,
        lane=row.env if native else row.env_id,
        order=row.created_at,
        native=native,
    )


_MOST_BYTES: Final = 64 * 1024 * 1024


class BrokenBody(StoreError):
    """A stored native group that cannot be sent to trainers; `detail["group_id"]` names it."""

    kind = "broken_body"


class EncodedGroups:
    """The JSON of groups, through a bounded cache that evicts the least recently used."""

    def __init__(self, store: Store, *, include_messages: bool, score_range: ScoreRange) -> None:
        self._store = store
        self._include_messages = include_messages
        self._score_range: ScoreRange = score_range
        self._kept = Cache(self._load, len, _MOST_BYTES, idle_seconds=math.inf)

    async def get(self, groups: Sequence[Waiting]) -> list[bytes]:
        return await self._kept.get([(group.group_id, group.native) for group in groups])

    def forget(self, group: Waiting) -> None:
        self._kept.forget((group.group_id, group.native))

    async def _load(self, keys: Sequence[tuple[str, bool]]) -> list[bytes]:
        bodies = await self._store.bodies([group_id for group_id, _ in keys])
        return [
            await asyncio.to_thread(self._encode, group_id, body) if native else body
            for (group_id, native), body in zip(keys, bodies, strict=True)
        ]

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
