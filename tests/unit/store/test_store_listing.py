"""Lists of groups: filtered, sorted, page by page, as a plain program would make them."""

from __future__ import annotations

import asyncio
import base64
import math
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from envserver_records.errors import InputError
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.extent import examples
from support.stores import group

from envserver.store import GroupPut, Store, open_store
from envserver.store.facts import GroupFacts, facts_of_rewards
from envserver.store.listing import GroupQuery, ListedGroup
from envserver.store.rewards import RewardCounts

REWARD = st.sampled_from([0.0, 0.25, 1.0, 0.3, -1.0, 3.0, None])
FLAGS = st.lists(st.sampled_from(['od"d%', "a", "ab"]), unique=True)
FACTS = st.builds(
    lambda rewards, flags, task: replace(
        facts_of_rewards(rewards, task), flags=flags, ends={"agent": 1, **dict.fromkeys(flags, 2)}
    ),
    st.lists(REWARD, max_size=3),
    FLAGS,
    st.sampled_from(["task_1", "taskX1", "%"]),
)
PUTS = st.lists(
    st.builds(
        lambda facts, **fields: fields | {"facts": facts},
        st.none() | FACTS,
        env=st.sampled_from(["math", "code"]),
        max_length=st.integers(1, 3),
        policy_version=st.integers(-1, 2),
    ),
    max_size=12,
)
QUERIES = st.builds(
    GroupQuery,
    order=st.sampled_from(["newest", "oldest", "best", "worst", "widest", "longest"]),
    after=st.integers(0, 2),
    environment=st.sampled_from(["", "", "math"]),
    task=st.sampled_from(["", "", "task_1"]),
    min_reward=st.none() | st.just(0.25),
    max_reward=st.none() | st.just(0.5),
    spread_above=st.none() | st.just(0.0),
    version_from=st.none() | st.just(0),
    version_to=st.none() | st.just(1),
    min_length=st.none() | st.just(2),
    max_length=st.none() | st.just(2),
    flag=st.sampled_from(["", "", "a", 'od"d%']),
    end=st.sampled_from(["", "", "agent", "ab"]),
    text=st.sampled_from(["", "", "_1", "g1", "%"]),
)


def matches(put: GroupPut, query: GroupQuery) -> bool:
    facts = put.facts
    given = facts or GroupFacts()
    mean, spread = given.reward_mean, spread_of(given)
    low, high = query.min_reward, query.max_reward
    return (
        query.environment in ("", put.env)
        and query.task in ("", given.task_id)
        and (low is None or (mean is not None and mean >= low))
        and (high is None or (mean is not None and mean <= high))
        and (query.spread_above is None or (spread is not None and spread > query.spread_above))
        and put.policy_version >= (-math.inf if query.version_from is None else query.version_from)
        and put.policy_version <= (math.inf if query.version_to is None else query.version_to)
        and put.max_length >= (query.min_length or 0)
        and put.max_length <= (query.max_length or math.inf)
        and (not query.flag or query.flag in given.flags)
        and (not query.end or query.end in given.ends)
        and (query.text in put.group_id or query.text in given.task_id)
    )


def spread_of(facts: GroupFacts) -> float | None:
    high, low = facts.reward_max, facts.reward_min
    return None if high is None or low is None else high - low


def expected(puts: list[GroupPut], query: GroupQuery) -> list[str]:
    def key(numbered: tuple[int, GroupPut]) -> tuple[float, int]:
        number, put = numbered
        facts = put.facts or GroupFacts()
        by: dict[str, float | None] = {
            "best": facts.reward_mean,
            "worst": facts.reward_mean,
            "widest": spread_of(facts),
            "longest": put.max_length,
        }
        value = by.get(query.order, 0.0)
        return (math.nan if value is None else value, number)

    found = [one for one in enumerate(puts, 1) if one[0] > query.after and matches(one[1], query)]
    found = [one for one in found if not math.isnan(key(one)[0])]
    found.sort(key=key, reverse=query.order not in ("oldest", "worst"))
    return [put.group_id for _, put in found]


async def walk(store: Store, query: GroupQuery, limit: int) -> list[ListedGroup]:
    listed: list[ListedGroup] = []
    cursor = ""
    while True:
        page = await store.list_groups(query, cursor, limit)
        listed += page.groups
        cursor = page.cursor
        if not cursor:
            return listed


def names(listed: Iterable[ListedGroup]) -> list[str]:
    return [one.row.group_id for one in listed]


def counted(listed: list[ListedGroup]) -> RewardCounts:
    means = [one.facts.reward_mean for one in listed if one.facts is not None]
    given = [mean for mean in means if mean is not None]
    unscored = len(listed) - len(given)
    if not given:
        return RewardCounts(groups=len(listed), unscored=unscored, low=None, high=None, counts=[])
    inside = min(given) >= 0 and max(given) <= 1
    low, high = (0.0, 1.0) if inside else (min(given), max(given))
    starts = [float(f"{low + (high - low) * n / 20:.9g}") for n in range(1, 20)]
    bins = Counter(bisect_right(starts, mean) for mean in given)
    counts = [bins[n] for n in range(20)]
    return RewardCounts(groups=len(listed), unscored=unscored, low=low, high=high, counts=counts)


@settings(max_examples=examples(60), deadline=None)
@given(PUTS, st.lists(QUERIES, min_size=1, max_size=8), st.integers(1, 5))
def test_pages_are_the_filtered_and_sorted_groups(
    fields: list[dict[str, Any]], queries: list[GroupQuery], limit: int
) -> None:
    puts = [group(f"g{index}", **one) for index, one in enumerate(fields)]

    async def check(folder: str) -> None:
        async with open_store(f"{folder}/store.db") as store:
            await store.put(puts)
            for query in queries:
                listed = await walk(store, query, limit)
                assert names(listed) == expected(puts, query)
                facts = {put.group_id: put.facts for put in puts}
                assert all(one.facts == facts[one.row.group_id] for one in listed)
                every = await walk(store, replace(query, order="oldest"), 100)
                assert await store.reward_counts(query) == counted(every)

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        asyncio.run(check(folder))


async def test_groups_that_arrive_between_two_pages_move_nothing(where: str) -> None:
    async with open_store(where) as store:
        first = [group(f"g{index}", facts=facts_of_rewards([0.5], None)) for index in range(4)]
        await store.put(first)
        page = await store.list_groups(GroupQuery(order="best"), "", 2)
        await store.put([group("best", facts=facts_of_rewards([1.0], None))])
        rest = await store.list_groups(GroupQuery(order="best"), page.cursor, 10)
        assert names([*page.groups, *rest.groups]) == ["g3", "g2", "g1", "g0"]
        large = base64.urlsafe_b64encode(b'["newest",[1e19]]').decode()
        for cursor in (page.cursor, "no cursor", "W10=", large):
            with pytest.raises(InputError, match="does not belong to the order 'newest'"):
                await store.list_groups(GroupQuery(order="newest"), cursor, 1)
