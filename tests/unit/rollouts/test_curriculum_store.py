"""Estimates in the store count each scored group once, despite kills and repeated reports."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from envserver_clients.http import EnvClient
from envserver_records.records import pack
from support.api import running_api, wire_group
from support.joined import join
from support.stores import group

from envserver.rollouts import Scored, group_id
from envserver.rollouts.stream import again_prefix
from envserver.store import GroupPut, open_store


def scored(group_id: str, task_id: str, rewards: float, **fields: object) -> Scored:
    facts = {"env": "math", "split": "train", "attempts": 4, "policy_version": 0}
    return Scored(group_id=group_id, task_id=task_id, rewards=rewards, **(facts | fields))  # type: ignore[arg-type]


def put(group_id: str, task_id: str, rewards: float, **fields: object) -> GroupPut:
    return group(group_id, scored=scored(group_id, task_id, rewards, **fields))


async def test_what_is_scored_counts_once_and_is_there_after_a_restart(where: str) -> None:
    async with open_store(where) as store:
        assert await store.put([put("g-1", "a", 1), put("g-2", "b", 0), put("g-1", "a", 4)])
        assert await store.put([put("g-1", "a", 1)]) == [False]
        # Dropped as of zero variance, told twice: a joiner that got no answer tells it again.
        assert await store.count_dropped([scored("g-3", "b", 4), scored("g-3", "b", 4)]) == 1
        assert await store.count_dropped([scored("g-3", "b", 4), scored("g-4", "c", 4)]) == 1
        assert await store.put([group("of no task")]) == [True]
    async with open_store(where) as store:
        found = await store.estimates_of("math", "train", ["a", "b", "c", "d"])
        assert {name: (one.attempts, one.mean_reward) for name, one in found.items()} == {
            "a": (4, 0.25),
            "b": (8, 0.5),
            "c": (4, 1.0),
        }
        assert await store.made(["g-1", "g-3", "g-9"]) == {"g-1", "g-3"}
        assert await store.count_made("g-") == 4
        assert await store.existing(["g-3"]) == set()  # it may still be made and delivered


async def test_an_estimate_follows_the_policy(where: str) -> None:
    async with open_store(where) as store:
        store.discount = 0.5
        await store.put([put("g-1", "a", 0, policy_version=3)])
        await store.put([put("g-2", "a", 4, policy_version=5)])
        (estimate,) = (await store.estimates_of("math", "train", ["a"])).values()
        assert (estimate.attempts, estimate.policy_version) == (8, 5)
        assert (estimate.weight, estimate.solved) == (4 + 4 * 0.25, 4)
        await store.put([put("g-3", "a", 0, policy_version=3)])  # late: it counts as much as g-1
        (estimate,) = (await store.estimates_of("math", "train", ["a"])).values()
        assert (estimate.weight, estimate.solved) == (4 + 8 * 0.25, 4)


async def test_estimates_are_read_in_pages_and_by_environment_and_split(where: str) -> None:
    puts = [put(f"m-{n}", f"t-{n}", 2) for n in range(5)]
    puts += [put(f"c-{n}", f"t-{n}", 2, env="code") for n in range(3)]
    puts += [put("v-1", "t-1", 2, split="validation")]
    async with open_store(where) as store:
        await store.put(puts)
        await store.put([put("again", "t-0", 4)])
        seen, after = [], 0
        while rows := await store.task_estimates(after, 4):
            after = rows[-1].number
            seen += [(row.env, row.split, row.task_id) for row in rows]
        assert len(seen) == len(set(seen)) == 9
        of_math = await store.task_estimates(0, 10, env="math")
        assert [row.task_id for row in of_math] == ["t-0", "t-1", "t-2", "t-3", "t-4", "t-1"]
        assert of_math[0].estimate.attempts == 8
        (one,) = await store.task_estimates(0, 10, env="math", split="validation")
        assert one.task_id == "t-1"


async def test_nothing_of_a_transaction_that_fails_counts(where: str) -> None:
    async with open_store(where) as store:
        await store.put([put("g-1", "a", 4)])
        too_large = put("g-3", "a", 4, attempts=2**63)
        with pytest.raises(Exception):  # noqa: B017 - each database has its own
            await store.put([put("g-2", "a", 4), too_large])
        assert await store.existing(["g-2", "g-3"]) == set()
        (estimate,) = (await store.estimates_of("math", "train", ["a"])).values()
        assert estimate.attempts == 4
        assert await store.put([put("g-2", "a", 4)]) == [True]


@pytest.mark.parametrize("tasks", [3_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
async def test_however_many_tasks_there_are_each_is_found_by_its_index(
    tmp_path: Path, tasks: int
) -> None:
    path = tmp_path / "store.db"
    async with open_store(path):
        pass
    with sqlite3.connect(path) as file:
        file.executemany(
            "INSERT INTO estimates VALUES (?, 'math', 'train', ?, 4, 4.0, 2.0, 0, 0.0)",
            ((number, f"task-{number}") for number in range(1, tasks + 1)),
        )
    async with open_store(path) as store:
        await store.put([put("g-1", f"task-{tasks // 2}", 4), put("g-2", "new", 0)])
        found = await store.estimates_of("math", "train", [f"task-{tasks // 2}", "new"])
        assert [found[name].attempts for name in (f"task-{tasks // 2}", "new")] == [8, 4]
        (last,) = await store.task_estimates(tasks, 10, env="math")
        assert (last.number, last.task_id) == (tasks + 1, "new")
    with sqlite3.connect(path) as file:
        for query in (
            "SELECT * FROM estimates WHERE env='a' AND split='b' AND task_id IN ('c','d')",
            "SELECT * FROM estimates WHERE number > 5 AND env='a' ORDER BY number LIMIT 5",
        ):
            plan = " ".join(row[3] for row in file.execute(f"EXPLAIN QUERY PLAN {query}"))
            assert "SEARCH" in plan, plan
            assert "SCAN" not in plan, plan


async def test_groups_of_other_machines_count_where_they_name_a_task(tmp_path: Path) -> None:
    async with running_api(tmp_path / "store.db") as api:
        one = await join(api)
        for _ in range(2):
            assert (await one.post(pack(one.group(0)))).status_code == 200
        again = one.group(3)
        again.group_id = group_id(again_prefix("math-train-0-"), 3, "task-1")
        assert (await one.post(pack(again))).status_code == 200
        dropped = {"task_id": "t", "attempts": 4, "rewards": 4.0, "policy_version": 9}
        for _ in range(2):
            told = {"groups": [dropped | {"group_id": "math-train-0-000009-0"}]}
            assert (await one.send("POST", "/scored", json=told)).status_code == 204
        foreign = {"groups": [dropped | {"group_id": "code-train-0-000009-0"}]}
        assert (await one.send("POST", "/scored", json=foreign)).status_code == 422
        await api.start()
        wire = wire_group(2, scores=[1.0, -1.0], group_overrides={"task_id": "w"})
        for posted in (wire, wire_group(), wire | {"group_overrides": {"task_id": "w\x00"}}):
            assert (await api.http.post("/scored_data", json=posted)).status_code == 200
        assert (await join(api)).stored == 2
        async with EnvClient(api.url, run="trainer") as client:
            found = await client.task_estimates(limit=10)
            assert found == await client.task_estimates()
            assert [one.task_id for one in await client.task_estimates(environment="math")] == [
                "task-1",
                "t",
            ]
            assert await client.task_estimates(split="test") == []
        assert [
            (one.environment, one.task_id, one.attempts, one.mean_reward, one.policy_version)
            for one in found
        ] == [
            ("math", "task-1", 4, pytest.approx(0.5), 7),
            ("math", "t", 4, 1.0, 9),
            ("atropos", "w", 2, 0.5, -1),
        ]
