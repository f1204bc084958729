"""How batches are formed from what waits: pure functions of the queue.

In: the waiting groups, oldest first, the trainer's batch size in sequences, the minimum shares of
the environments that are alive. Out: batches of exactly `batch_size` sequences, oldest first, and
why no further one could be formed. Always: no group is in two batches, groups keep their order
within a batch, no group is changed or lost.

The rule is that of the Atropos wire. With M the largest waiting group, groups of one size are piled
up until a pile makes M sequences (a pack); only packs leave. So batch_size must be a multiple of M
and every size must divide M, or nothing comes out; the reason then says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

WORK_LIMIT: Final = 2_000_000
"""Group visits of one `form_batches`: what is left then is formed by the next call."""

_LARGEST_MINIMUM: Final = 2**62

Lane = int | str | None
"""Whose a group is: the number of a registered environment, the name of one of ours, or nobody's.
"""


class Waiting(msgspec.Struct, frozen=True):
    """A group that waits.

    Args:
        group_id: its id in the store.
        size: sequences it counts for.
        env_id: the environment number that it was posted with.
        lane: under which minimum it counts: `env_id`, or the name of an environment of ours.
        order: when it entered the queue (`time.time()` seconds); the queue is sorted by it.
        native: made by an environment of ours: its body is a packed `records.Group`.
    """

    group_id: str
    size: int
    env_id: int | None
    lane: Lane
    order: float
    native: bool = False


class Formed(msgspec.Struct, frozen=True):
    """Batches, oldest first, what is left of the queue, and why there is no further batch."""

    batches: list[list[Waiting]]
    left: list[Waiting]
    reason: str


def minimum_sequences(batch_size: int, share: float) -> int:
    """The whole sequences of a batch that a minimum share comes to."""
    return int(min(batch_size * share, _LARGEST_MINIMUM))


def form_batches(
    queue: Sequence[Waiting], batch_size: int, minimums: Mapping[Lane, float] | None = None
) -> Formed:
    """Forms batches until none can be formed (or `WORK_LIMIT` is reached).

    Args:
        queue: oldest first.
        batch_size: sequences per batch.
        minimums: smallest share of each batch by lane, in order of registration, for the
            environments that are connected and alive; empty: plain forming.
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
    """Piles of one size that make `largest` sequences, in the order of their completion."""
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
    """As many batches as follow from one look at the queue: while whole packs leave and a group of
    the largest size stays, the packs of what is left are the packs not yet taken.
    """
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
    """A batch from the first packs, how many packs it touched, and whether it used all of them."""
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
        return f"batch_size {batch_size} is no multiple of the largest group, {largest} sequences"
    return f"{packed} of {batch_size} sequences wait in complete packs of {largest}"


def _with_minimums(
    queue: Sequence[Waiting], batch_size: int, minimums: Mapping[Lane, float]
) -> tuple[list[list[Waiting]], str]:
    """One batch that gives each lane its minimum, or the reason why there is none."""
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
    """Minimums that ask for more than a batch are scaled to it, but never below one group each."""
    asked = sum(wanted.values())
    if asked <= batch_size:
        return
    for lane, sequences in wanted.items():
        smallest = min(group.size for group in packed[lane])
        wanted[lane] = max(smallest, int(sequences * (batch_size / asked)))


def _fill(
    queue: Sequence[Waiting],
    packed: Mapping[Lane, Sequence[Waiting]],
    wanted: Mapping[Lane, int],
    batch_size: int,
) -> list[Waiting]:
    """First each lane's minimum, in order of registration; then, oldest first, what still fits."""
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
