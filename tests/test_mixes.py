"""Several environments in one run: whose turn it is, what ends, what is written where."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envserver import ConfigError
from envserver.rollouts.mixing import CATCH_UP_GROUPS, Ending, Share, Shares, Turns, targets

NAMES = "abcde"
MIX = st.lists(
    st.tuples(st.floats(0.1, 10), st.floats(0, 0.2)), min_size=1, max_size=len(NAMES)
).map(lambda said: [Share(name, *one) for name, one in zip(NAMES, said, strict=False)])


@given(MIX)
def test_targets_are_whole_and_keep_minima_and_proportions(mix: list[Share]) -> None:
    parts = targets(mix)
    assert sum(parts.values()) == pytest.approx(1)
    assert all(parts[one.name] >= one.minimum - 1e-9 for one in mix)
    by_weight = [one for one in mix if parts[one.name] > one.minimum + 1e-9]
    rates = {round(parts[one.name] / one.weight, 9) for one in by_weight}
    assert max(rates, default=0) == pytest.approx(min(rates, default=0), rel=1e-6)


@given(MIX, st.integers(1, 300))
def test_in_the_long_run_each_has_its_share(mix: list[Share], groups: int) -> None:
    parts = targets(mix)
    shares = Shares(parts)
    begun: Counter[str] = Counter()
    for _ in range(groups):
        name = shares.next(list(parts))
        shares.begin(name)
        begun[name] += 1
    for name, part in parts.items():
        assert abs(begun[name] - part * groups) <= len(mix)


@given(MIX, st.data())
def test_who_was_away_catches_up_a_little_and_nobody_waits_long(
    mix: list[Share], data: st.DataObject
) -> None:
    parts = targets(mix)
    shares = Shares(parts)
    away = data.draw(st.sampled_from(sorted(parts)))
    others = [name for name in parts if name != away]
    for _ in range(200 if others else 0):
        shares.begin(shares.next(others))
    shares.asks(away)
    in_a_row = 0
    while shares.next(list(parts)) == away and in_a_row < 1000 and others:
        shares.begin(away)
        in_a_row += 1
    longest = max((1 / parts[name] for name in others), default=0) * parts[away]
    assert in_a_row <= CATCH_UP_GROUPS + 2 * longest + 2


@settings(max_examples=40)
@given(
    MIX,
    st.integers(1, 12),
    st.lists(st.integers(1, 5), min_size=5, max_size=5),
    st.lists(st.integers(0, 30), min_size=5, max_size=5),
    st.sampled_from([None, 7, 40]),
    st.lists(st.sampled_from(["delivered", "filtered", "failed"]), min_size=1, max_size=9),
)
def test_no_order_of_events_blocks_or_overfills(
    mix: list[Share],
    room: int,
    sizes: list[int],
    tasks: list[int],
    wanted: int | None,
    endings: list[Ending],
) -> None:
    asyncio.run(_run(mix, room, sizes, tasks, wanted, endings))


async def _run(
    mix: list[Share],
    room: int,
    sizes: list[int],
    tasks: list[int],
    wanted: int | None,
    endings: list[Ending],
) -> None:
    """Each environment asks as often as it has tasks; groups end in some order."""
    turns = Turns(Shares(targets(mix)), room=room, wanted=wanted)
    running = done = most = delivered = 0

    async def environment(number: int, share: Share) -> None:
        nonlocal done
        lane, size = turns.lane(share.name), sizes[number]
        groups = []
        for task in range(tasks[number]):
            if not await lane.take(size):
                break
            groups.append(asyncio.create_task(group(lane, size, number + task)))
        await asyncio.gather(*groups)
        done += 1

    async def group(lane: Any, size: int, number: int) -> None:
        nonlocal running, most, delivered
        running += size
        most = max(most, running)
        for _ in range(number % 4):
            await asyncio.sleep(0)
        running -= size
        how = endings[number % len(endings)]
        delivered += how == "delivered"
        lane.ended(size, how)

    async with asyncio.timeout(20):
        await asyncio.gather(*(environment(number, one) for number, one in enumerate(mix)))
    assert done == len(mix)
    assert most <= max(room, *sizes)
    assert wanted is None or delivered <= wanted


async def test_a_turn_that_is_given_up_is_another_s() -> None:
    turns = Turns(Shares(targets([Share("a"), Share("b")])), room=2)
    a, b = turns.lane("a"), turns.lane("b")
    assert await a.take(2)
    waiting = [asyncio.create_task(lane.take(2)) for lane in (a, b)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    a.ended(2, "delivered")
    assert await waiting[0]
    again = asyncio.create_task(b.take(2))
    await asyncio.sleep(0)
    a.ended(2, "delivered")
    again.cancel()  # its turn was given, but it has not heard of it
    await asyncio.gather(again, return_exceptions=True)
    assert await asyncio.wait_for(a.take(2), 1)


@pytest.mark.parametrize(
    ("mix", "words"),
    [
        ([Share("a", weight=0)], "a weight must be positive"),
        ([Share("a", minimum=1.5)], "a minimum share from 0 to 1"),
        ([Share("a", minimum=0.7), Share("b", minimum=0.7)], "more than 1 together"),
        ([Share("a"), Share("a")], "named twice"),
    ],
)
def test_a_mix_that_cannot_be_is_refused(mix: list[Share], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        targets(mix)
