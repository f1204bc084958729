"""Lists of groups and of their tasks: filtered, sorted, page by page, and summed up."""

from __future__ import annotations

import base64
from pathlib import Path

import msgspec
import pytest
from envserver_records.errors import InputError
from envserver_records.scores import RewardRange
from msgspec.structs import replace
from support.api import running_api
from support.stores import group

from envserver.store import open_store
from envserver.store.facts import facts_of_rewards
from envserver.store.listing import GroupQuery, Page


def names(*listed: Page) -> list[str]:
    return [one.row.group_id for page in listed for one in page.groups]


async def test_groups_are_filtered_sorted_and_counted(where: str) -> None:
    odd = replace(facts_of_rewards([3, 3], "taskX1"), flags=["a"], ends={"agent": 1, "turns": 1})
    few = replace(facts_of_rewards([0.25], "%"), flags=["ab"])
    seen = [
        group("g0", facts=facts_of_rewards([0, 1], "task_1"), policy_version=0, max_length=1),
        group("g1", facts=odd, env="code", policy_version=1, max_length=2),
        group("g2", facts=few, policy_version=2, max_length=3),
        group("g3", max_length=1),
    ]
    async with open_store(where) as store:
        await store.put(seen)
        for line in Path(__file__).with_name("lists.txt").read_text().splitlines():
            wish, _, expected = line.partition(": ")
            name, _, value = wish.partition("=")
            query = msgspec.convert({name: value}, GroupQuery, strict=False)
            assert names(await store.list_groups(query, "", 10)) == expected.split(), line
        counts = await store.reward_counts(GroupQuery())
        assert (counts.groups, counts.unscored, counts.low, counts.high) == (4, 1, 0.25, 3.0)
        assert counts.counts == [1, 1, *[0] * 17, 1]


async def test_groups_that_arrive_between_two_pages_move_nothing(where: str) -> None:
    async with open_store(where) as store:
        first = [group(f"g{index}", facts=facts_of_rewards([0.5], None)) for index in range(4)]
        await store.put(first)
        page = await store.list_groups(GroupQuery(order="best"), "", 2)
        await store.put([group("best", facts=facts_of_rewards([1.0], None))])
        rest = await store.list_groups(GroupQuery(order="best"), page.cursor, 10)
        assert names(page, rest) == ["g3", "g2", "g1", "g0"]
        large = base64.urlsafe_b64encode(b'["newest",[1e19]]').decode()
        for cursor in (page.cursor, "no cursor", "W10=", large):
            with pytest.raises(InputError, match="does not belong to the order 'newest'"):
                await store.list_groups(GroupQuery(order="newest"), cursor, 1)


async def test_pages_of_tasks_have_cursors_of_their_order(where: str) -> None:
    async with open_store(where) as store:
        facts = [facts_of_rewards([0.1 * k, 1.0], f"t{k}", RewardRange()) for k in range(5)]
        await store.put([group(f"g{k}", facts=one) for k, one in enumerate(facts)])
        found, cursor = list[str](), ""
        for _ in range(3):
            page = await store.seen_tasks("best", cursor, 2)
            found += [one.task_id for one in page.tasks]
            cursor = page.cursor
        assert (found, cursor) == (["t4", "t3", "t2", "t1", "t0"], "")
        page = await store.seen_tasks("worst", "", 2)
        assert [one.solved_share for one in page.tasks] == [0.5, 0.5]
        with pytest.raises(InputError, match="does not belong to the order 'newest'"):
            await store.seen_tasks("newest", page.cursor, 2)


async def test_the_api_lists_tasks_that_were_seen(tmp_path: Path) -> None:
    async with running_api(tmp_path / "store.db") as api:
        facts = facts_of_rewards([0.0, 1.0], "add-1", RewardRange())
        more = facts_of_rewards([1.0] * 4, "add-1", RewardRange())
        await api.store.put([group("a", facts=facts), group("b"), group("c", facts=more)])
        found = await api.get("/v1/tasks/seen?environment=math&order=widest&text=add")
        (task,) = found["tasks"]
        assert found["cursor"] == ""
        assert (task["task_id"], task["groups"], task["rollouts"]) == ("add-1", 2, 6)
        assert task["reward_mean"] == task["solved_share"] == pytest.approx(5 / 6)
        assert task["spread"] == 0.5
        assert await api.status("GET", "/v1/tasks/seen?order=odd") == 422
