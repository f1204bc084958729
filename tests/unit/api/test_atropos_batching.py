"""Atropos batches, compared with a literal reading of the rules."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from envserver.api.atropos.batching import Waiting, form_batches
from envserver.api.atropos.buffer import groups_summing_to

ENV_IDS = st.one_of(st.none(), st.integers(0, 3))
QUEUES = st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 8]), ENV_IDS), max_size=40)
MINIMUMS = st.dictionaries(st.integers(0, 3), st.floats(0, 1), max_size=4)


def waiting(sizes: list[tuple[int, int | None]]) -> list[Waiting]:
    return [Waiting(f"g{i}", size, env, env, float(i)) for i, (size, env) in enumerate(sizes)]


def ids(groups: list[Waiting]) -> list[str]:
    return [group.group_id for group in groups]


@given(QUEUES, st.integers(-1, 24), MINIMUMS)
def test_nothing_is_lost_doubled_or_over_the_batch_size_and_minimum_shares_are_met(
    sizes: list[tuple[int, int | None]], batch_size: int, minimums: dict[Any, float]
) -> None:
    queue = waiting(sizes)
    formed = form_batches(queue, batch_size, minimums)
    wanted = {env: int(batch_size * share) for env, share in minimums.items()}
    for batch in formed.batches:
        assert sum(group.size for group in batch) == batch_size
        if minimums and sum(wanted.values()) <= batch_size and batch_size >= 4:
            assert all(group.env_id is not None for group in batch)
            for env, sequences in wanted.items():
                own = sum(group.size for group in batch if group.env_id == env)
                # A pack may be too large for the room that is left.
                assert own >= sequences or own + 8 > sequences
    out = [group_id for batch in formed.batches for group_id in ids(batch)]
    assert sorted(out + ids(formed.left)) == sorted(ids(queue))
    assert ids(formed.left) == [i for i in ids(queue) if i not in set(out)]
    assert formed.reason


@given(QUEUES, st.integers(1, 24))
def test_plain_batches_are_those_of_the_rule_applied_again_and_again(
    sizes: list[tuple[int, int | None]], batch_size: int
) -> None:
    queue = waiting(sizes)
    expected = []
    while (batch := one_plain_batch(queue, batch_size)) is not None:
        expected.append(ids(batch))
        queue = [group for group in queue if group.group_id not in ids(batch)]
    assert [ids(b) for b in form_batches(waiting(sizes), batch_size).batches] == expected


def one_plain_batch(queue: list[Waiting], batch_size: int) -> list[Waiting] | None:
    """Piles of M sequences become candidates; candidates are taken in order until full."""
    largest = max((group.size for group in queue), default=0)
    piles: dict[int, list[Waiting]] = defaultdict(list)
    candidates: list[Waiting] = []
    for group in queue:
        piles[group.size].append(group)
        if len(piles[group.size]) * group.size == largest:
            candidates += piles.pop(group.size)
    for end in range(len(candidates) + 1):
        if sum(group.size for group in candidates[:end]) == batch_size:
            return candidates[:end]
    return None


@given(st.lists(st.integers(1, 9), max_size=9), st.integers(1, 20))
def test_buffered_parts_that_make_a_whole_are_found(sizes: list[int], target: int) -> None:
    found = groups_summing_to(sizes, target)
    possible = any(
        sum(part) == target for n in range(len(sizes) + 1) for part in combinations(sizes, n)
    )
    assert bool(found) == possible
    assert found == sorted(set(found))
    assert not found or sum(sizes[i] for i in found) == target


def test_parts_that_never_make_a_whole_take_no_time() -> None:
    assert groups_summing_to([2] * 50_001, 50_001) == []
    assert groups_summing_to([2] * 50_001, 100_001) == []
    assert groups_summing_to([3, *[2] * 1023], 1024) == [*range(1, 513)]
