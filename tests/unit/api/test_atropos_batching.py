"""Atropos batches and the answers to environments, compared with a literal reading of the rules."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from itertools import combinations
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.cpu import cpu_limit

from envserver.api.atropos.batching import Waiting, form_batches
from envserver.api.atropos.buffer import groups_summing_to
from envserver.api.atropos.queue import Registered, WaitingQueue, environment_status

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


@given(st.sampled_from([1, 2, 4, 8]), st.integers(0, 60), st.integers(1, 4))
def test_groups_of_one_size_leave_oldest_first_and_none_is_kept_back(
    size: int, count: int, per_batch: int
) -> None:
    formed = form_batches(waiting([(size, None)] * count), size * per_batch)
    out = [group_id for batch in formed.batches for group_id in ids(batch)]
    assert out == [f"g{i}" for i in range(count - count % per_batch)]


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


def test_why_there_is_no_batch_is_said() -> None:
    formed = form_batches(waiting([(2, 0)] * 8), 4, {0: 0.5, 1: 0.5})
    assert formed.batches == []
    assert "environment 1" in formed.reason
    assert "4 sequences" in form_batches(waiting([(4, None)] * 20), 10).reason
    assert "[3]" in form_batches(waiting([(8, None)] + [(3, None)] * 6), 16).reason


def test_a_hundred_thousand_groups_are_batched_at_once() -> None:
    formed = form_batches(waiting([(4, None)] * 100_000), 32)
    assert len(formed.batches) == 12_500


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
    began = time.process_time()
    assert groups_summing_to([2] * 50_001, 50_001) == []
    assert groups_summing_to([2] * 50_001, 100_001) == []
    assert groups_summing_to([3, *[2] * 1023], 1024) == [*range(1, 513)]
    assert time.process_time() - began < cpu_limit(2)


def test_parts_leave_in_the_order_they_came_in() -> None:
    assert groups_summing_to([1, 1, 1, 1, 1], 4) == [0, 1, 2, 3]
    assert groups_summing_to([1, 5, 3], 4) == [0, 2]
    assert groups_summing_to([3, 2, 2], 4) == [1, 2]


@given(
    st.lists(
        st.tuples(
            st.integers(1, 4096),
            st.floats(-2, 2),
            st.integers(1, 8),
            st.one_of(st.none(), st.floats(0, 1)),
            st.booleans(),
        ),
        min_size=1,
        max_size=4,
    ),
    QUEUES,
    st.lists(st.integers(0, 39), max_size=20),
    st.integers(-1, 64),
)
def test_status_numbers_follow_the_formulas(
    registered: list[tuple[Any, ...]],
    sizes: list[tuple[int, int | None]],
    leaving: list[int],
    batch_size: int,
) -> None:
    environments = [
        Registered(
            desired_name="env",
            real_name=f"env_{i}",
            max_token_length=length,
            weight=weight,
            group_size=group_size,
            min_batch_allocation=minimum,
            connected=connected,
        )
        for i, (length, weight, group_size, minimum, connected) in enumerate(registered)
    ]
    queue = WaitingQueue()
    for group in waiting(sizes):
        queue.append(group)
    for index in leaving:
        queue.remove(f"g{index}")
    left = [(s, e) for i, (s, e) in enumerate(sizes) if i not in leaving]
    status = environment_status(queue, environments, 0, batch_size=batch_size, step=5)

    largest = max((size for size, _ in left), default=1)
    own = [size for size, env in left if env == 0]
    group_size = max([environments[0].group_size, *own])
    connected = [env for env in environments if env.connected]
    others = 0
    for env_id in {env for _, env in left if env != 0} if largest > 1 else ():
        there = sum(size for size, env in left if env == env_id)
        minimum = 0
        if env_id is not None and env_id < len(environments) and environments[env_id].connected:
            minimum = int(batch_size * (environments[env_id].min_batch_allocation or 0))
        others += max(0, math.ceil(there / largest) * largest - minimum)
    total = sum(env.max_token_length * max(0, env.weight) for env in connected)
    weight = environments[0].max_token_length * environments[0].weight / total if total else 0.0
    allocated = sum(env.min_batch_allocation or 0 for env in connected)

    assert status.current_step == 5
    assert status.max_group_size == largest
    assert status.self_queue_size == sum(own) // group_size
    assert status.queue_size == (sum(own) + others) // group_size
    assert math.isclose(status.unallocated_fraction, 1 - min(1, allocated), abs_tol=1e-9)
    assert math.isclose(status.env_weight, max(0.01, weight), rel_tol=1e-9)
