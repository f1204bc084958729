"""Lists of groups and of their tasks: filtered, sorted, page by page, and summed up, as a plain
program would make them.
"""

from __future__ import annotations

import asyncio
import base64
import math
import sqlite3
import tempfile
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, get_args

import pytest
from envserver_records.errors import InputError
from envserver_records.scores import RewardRange
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.api import running_api
from support.extent import examples
from support.stores import group

from envserver.store import GroupPut, Store, open_store
from envserver.store.facts import GroupFacts, facts_of_rewards
from envserver.store.listing import GroupQuery, ListedGroup
from envserver.store.rewards import RewardCounts
from envserver.store.tasks_seen import SeenTask, TaskOrder

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


async def pages(ask: Callable[[str], Awaitable[Any]], part: str) -> list[Any]:
    """All that stands on the pages."""
    found: list[Any] = []
    cursor = ""
    while True:
        page = await ask(cursor)
        found += getattr(page, part)
        if not (cursor := page.cursor):
            return found


def on_a_store(check: Callable[[Store], Awaitable[None]]) -> None:
    async def opened(folder: str) -> None:
        async with open_store(f"{folder}/store.db") as store:
            await check(store)

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        asyncio.run(opened(folder))


# Groups


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
    return await pages(lambda cursor: store.list_groups(query, cursor, limit), "groups")


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


@settings(max_examples=examples(60))
@given(PUTS, st.lists(QUERIES, min_size=1, max_size=8), st.integers(1, 5))
def test_pages_are_the_filtered_and_sorted_groups(
    fields: list[dict[str, Any]], queries: list[GroupQuery], limit: int
) -> None:
    puts = [group(f"g{index}", **one) for index, one in enumerate(fields)]

    async def check(store: Store) -> None:
        await store.put(puts)
        for query in queries:
            listed = await walk(store, query, limit)
            assert names(listed) == expected(puts, query)
            facts = {put.group_id: put.facts for put in puts}
            assert all(one.facts == facts[one.row.group_id] for one in listed)
            every = await walk(store, replace(query, order="oldest"), 100)
            assert await store.reward_counts(query) == counted(every)

    on_a_store(check)


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


# Tasks

TASK_REWARDS = st.lists(st.sampled_from([0.0, 0.25, 1.0, 2.0, None]), max_size=4)
RANGES = st.none() | st.sampled_from([RewardRange(), RewardRange(0.0, 2.0, 2.0)])
TASKS = st.sampled_from(["task_1", "taskX1", "%", "", None])
TASK_FACTS = st.builds(facts_of_rewards, TASK_REWARDS, TASKS, RANGES)
TASK_PUTS = st.lists(
    st.fixed_dictionaries(
        {"facts": st.none() | TASK_FACTS, "env": st.sampled_from(["math", "code"])},
        optional={"policy_version": st.integers(-1, 2)},
    ),
    max_size=14,
)
TEXTS = st.sampled_from(["", "", "_1", "%"])
ORDERS = get_args(TaskOrder)
KEYS = {"best": "reward_mean", "worst": "reward_mean", "widest": "spread", "most": "groups"}


def summed(puts: list[GroupPut], environment: str, text: str) -> dict[tuple[str, str], Any]:
    """Returns groups, rollouts, mean, spread, solved share and last group, by task."""
    found: defaultdict[tuple[str, str], list[GroupPut]] = defaultdict(list)
    for put in puts:
        task = put.facts.task_id if put.facts else ""
        if task and environment in ("", put.env) and text in task:
            found[put.env, task].append(put)
    tasks = {}
    for key, some in found.items():
        facts = [put.facts for put in some if put.facts is not None]
        rated = sum(one.rated for one in facts)
        rewards = [(one.reward_mean, one.rated) for one in facts if one.reward_mean is not None]
        spreads = [one.reward_max - one.reward_min for one in facts if one.reward_max is not None]  # type: ignore[operator]
        known = sum(one.rated for one in facts if one.solved is not None)
        tasks[key] = (
            len(some), rated, _over(sum(mean * count for mean, count in rewards), rated),
            _over(sum(spreads), len(spreads)), _over(sum(one.solved or 0 for one in facts), known),
            some[-1].group_id,
        )  # fmt: skip
    return tasks


def _over(total: float, count: int) -> float | None:
    return total / count if count else None


async def walk_tasks(store: Store, order: TaskOrder, limit: int, **by: str) -> list[SeenTask]:
    return await pages(lambda cursor: store.seen_tasks(order, cursor, limit, **by), "tasks")


def alike(one: Any, other: Any) -> bool:
    both = isinstance(one, float) and isinstance(other, float)
    return math.isclose(one, other) if both else bool(one == other)


@settings(max_examples=examples(40))
@given(
    TASK_PUTS,
    st.integers(1, 3),
    st.sampled_from(["", "math"]),
    st.sampled_from(["", "", "_1", "%"]),
)
def test_tasks_are_what_their_groups_sum_up_to(
    fields: list[dict[str, Any]], limit: int, environment: str, text: str
) -> None:
    puts = [group(f"g{index}", **one) for index, one in enumerate(fields)]
    numbers = {put.group_id: index for index, put in enumerate(puts)}
    expected = summed(puts, environment, text)

    async def check(store: Store) -> None:
        await store.put(puts)
        for order in ORDERS:
            found = await walk_tasks(store, order, limit, environment=environment, text=text)
            key = KEYS.get(order)
            place = {"reward_mean": 2, "spread": 3}.get(key or "", 0)
            known = {(one.environment, one.task_id): one for one in found}
            assert len(known) == len(found)
            wanted = {name: facts for name, facts in expected.items() if facts[place] is not None}
            assert set(known) == set(wanted)
            for name, facts in wanted.items():
                one = known[name]
                said = (one.groups, one.rollouts, one.reward_mean, one.spread)
                said += (one.solved_share, one.last_group_id)
                assert all(map(alike, said, facts)), (said, facts)
                assert one.last_version == puts[numbers[one.last_group_id]].policy_version
            keys = [getattr(one, key) if key else 0 for one in found]
            ranks = list(zip(keys, (numbers[one.last_group_id] for one in found), strict=True))
            assert ranks == sorted(ranks, reverse=order != "worst")

    on_a_store(check)


async def test_pages_of_tasks_have_cursors_of_their_order(where: str) -> None:
    async with open_store(where) as store:
        facts = [facts_of_rewards([0.1 * k, 1.0], f"t{k}", RewardRange()) for k in range(5)]
        await store.put([group(f"g{k}", facts=one) for k, one in enumerate(facts)])
        found = [one.task_id for one in await walk_tasks(store, "best", 2)]
        assert found == ["t4", "t3", "t2", "t1", "t0"]
        page = await store.seen_tasks("worst", "", 2)
        assert [one.solved_share for one in page.tasks] == [0.5, 0.5]
        with pytest.raises(InputError, match="does not belong to the order 'newest'"):
            await store.seen_tasks("newest", page.cursor, 2)


async def test_the_api_lists_tasks_that_were_seen(tmp_path: Path) -> None:
    async with running_api(tmp_path / "store.db") as api:
        facts = facts_of_rewards([0.0, 1.0], "add-1", RewardRange())
        await api.store.put([group("a", facts=facts, env="math"), group("b", env="math")])
        found = await api.get("/v1/tasks/seen?environment=math&order=widest&text=add")
        (task,) = found["tasks"]
        assert found["cursor"] == ""
        assert (task["task_id"], task["groups"], task["rollouts"]) == ("add-1", 1, 2)
        assert (task["reward_mean"], task["spread"], task["solved_share"]) == (0.5, 1.0, 0.5)
        assert await api.status("GET", "/v1/tasks/seen?order=odd") == 422


async def test_tasks_are_read_from_one_index(tmp_path: Path) -> None:
    """A hundred thousand groups are summed up without reading their rows."""
    path = tmp_path / "store.db"
    async with open_store(str(path)) as store:
        await store.put([group("a", facts=facts_of_rewards([1.0], "t"))])
    with sqlite3.connect(path) as connection:
        plan = connection.execute(
            "EXPLAIN QUERY PLAN SELECT env, task_id, sum(rated), sum(solved), max(seq),"
            " sum(reward_mean * rated), avg(reward_max - reward_min) FROM group_facts"
            " WHERE task_id <> '' GROUP BY env, task_id"
        ).fetchall()
    assert "USING COVERING INDEX group_facts_tasks" in str(plan)
