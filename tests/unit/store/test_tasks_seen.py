"""Tasks of kept groups: what lists show of them is what a plain program would sum up."""

from __future__ import annotations

import asyncio
import math
import sqlite3
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, get_args

import pytest
from envserver_records.errors import InputError
from envserver_records.scores import RewardRange
from hypothesis import given, settings
from hypothesis import strategies as st
from support.api import running_api
from support.extent import examples
from support.stores import group

from envserver.store import GroupPut, Store, open_store
from envserver.store.facts import facts_of_rewards
from envserver.store.tasks_seen import SeenTask, TaskOrder

REWARDS = st.lists(st.sampled_from([0.0, 0.25, 1.0, 2.0, None]), max_size=4)
RANGES = st.none() | st.sampled_from([RewardRange(), RewardRange(0.0, 2.0, 2.0)])
TASKS = st.sampled_from(["task_1", "taskX1", "%", "", None])
FACTS = st.builds(facts_of_rewards, REWARDS, TASKS, RANGES)
PUTS = st.lists(
    st.fixed_dictionaries(
        {"facts": st.none() | FACTS, "env": st.sampled_from(["math", "code"])},
        optional={"policy_version": st.integers(-1, 2)},
    ),
    max_size=14,
)
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


async def walk(store: Store, order: TaskOrder, limit: int, **filters: str) -> list[SeenTask]:
    found: list[SeenTask] = []
    cursor = ""
    while True:
        page = await store.seen_tasks(order, cursor, limit, **filters)
        found += page.tasks
        cursor = page.cursor
        if not cursor:
            return found


def alike(one: Any, other: Any) -> bool:
    both = isinstance(one, float) and isinstance(other, float)
    return math.isclose(one, other) if both else bool(one == other)


@settings(max_examples=examples(40), deadline=None)
@given(PUTS, st.integers(1, 3), st.sampled_from(["", "math"]), st.sampled_from(["", "", "_1", "%"]))
def test_tasks_are_what_their_groups_sum_up_to(
    fields: list[dict[str, Any]], limit: int, environment: str, text: str
) -> None:
    puts = [group(f"g{index}", **one) for index, one in enumerate(fields)]
    numbers = {put.group_id: index for index, put in enumerate(puts)}
    expected = summed(puts, environment, text)

    async def check(folder: str) -> None:
        async with open_store(f"{folder}/store.db") as store:
            await store.put(puts)
            for order in ORDERS:
                found = await walk(store, order, limit, environment=environment, text=text)
                key = KEYS.get(order)
                known = {(one.environment, one.task_id): one for one in found}
                assert len(known) == len(found)
                wanted = {
                    name: facts
                    for name, facts in expected.items()
                    if key is None
                    or facts[{"reward_mean": 2, "spread": 3, "groups": 0}[key]] is not None
                }
                assert set(known) == set(wanted)
                for name, facts in wanted.items():
                    one = known[name]
                    said = (one.groups, one.rollouts, one.reward_mean, one.spread)
                    said += (one.solved_share, one.last_group_id)
                    assert all(map(alike, said, facts)), (said, facts)
                    assert one.last_version == puts[numbers[one.last_group_id]].policy_version
                keys = [(getattr(one, key or "groups") if key else 0) for one in found]
                ranks = list(zip(keys, (numbers[one.last_group_id] for one in found), strict=True))
                assert ranks == sorted(ranks, reverse=order != "worst")

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        asyncio.run(check(folder))


async def test_pages_of_tasks_have_cursors_of_their_order(where: str) -> None:
    async with open_store(where) as store:
        facts = [facts_of_rewards([0.1 * k, 1.0], f"t{k}", RewardRange()) for k in range(5)]
        await store.put([group(f"g{k}", facts=one) for k, one in enumerate(facts)])
        names = [one.task_id for one in await walk(store, "best", 2)]
        assert names == ["t4", "t3", "t2", "t1", "t0"]
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
        assert (await api.http.get("/v1/tasks/seen?order=odd")).status_code == 422


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
