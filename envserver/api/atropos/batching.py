"""Forms batches from the queue of waiting groups. Pure functions.

In: the waiting groups, oldest first, the trainer's batch size in sequences, the minimum shares of
the environments that are alive. Out: batches of exactly `batch_size` sequences, oldest first, and
why no further batch could be formed. What holds: no group is in two batches, groups keep their
order within a batch, no group is changed or lost.

The rule is that of the Atropos protocol. With M the size of the largest waiting group, groups of
equal size are collected until they add up to M sequences (a pack); batches consist of whole packs.
So batch_size must be a multiple of M and every group size must divide M, or no batch forms; the
reason then says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

WORK_LIMIT: Final = 2_000_000
"""Maximum number of group visits in one `form_batches`; the next call forms the rest."""

_LARGEST_MINIMUM: Final = 2**62

Lane = int | str | None
"""Owner of a group: number of a registered environment, name of a local one, or None."""


class Waiting(msgspec.Struct, frozen=True):
    """A waiting group.

    Args:
        group_id: its id in the store.
        size: number of sequences it counts for.
        env_id: the environment number it was posted with.
        lane: the owner whose minimum it counts for: `env_id`, or the name of a native
            environment.
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
    """Returns the minimum number of whole sequences in a batch for a minimum share."""
    return int(min(batch_size * share, _LARGEST_MINIMUM))


def form_batches(
    queue: Sequence[Waiting], batch_size: int, minimums: Mapping[Lane, float] | None = None
) -> Formed:
    """Forms batches until none can be formed or `WORK_LIMIT` is reached.

    Args:
        queue: waiting groups, oldest first.
        batch_size: sequences per batch.
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
    taken.
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
    """Returns one batch that gives each lane its minimum, or the reason why there is none."""
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
