"""Groups whose stored bodies are damaged: a trainer gets all others and never waits for these."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from envserver_records.wire import GROUPS_MSGPACK
from support.api import Api, running_api, wire_group
from support.postgres import Postgres

from envserver.rollouts.ordered import GroupsOrder

Harm = Callable[..., None]


@pytest.fixture
def harm(where: str, request: pytest.FixtureRequest) -> Harm:
    """Does to the bodies of groups what a disk may do."""

    def by_sql(*group_ids: str) -> None:
        chosen = ", ".join(f"'{group_id}'" for group_id in group_ids)
        of = f"WHERE seq IN (SELECT seq FROM groups WHERE group_id IN ({chosen}))"
        if where.startswith("postgresql"):
            postgres: Postgres = request.getfixturevalue("postgres")
            postgres.execute(f"UPDATE bodies SET body = 'harmed by a disk'::bytea {of}")
            return
        with contextlib.closing(sqlite3.connect(where)) as connection, connection:
            connection.execute(f"UPDATE bodies SET body = CAST('harmed by a disk' AS BLOB) {of}")

    return by_sql


@pytest.fixture
async def api(where: str) -> AsyncIterator[Api]:
    async with running_api(where) as running:
        await running.run(batch_size=2)
        await running.run("all", batch_size=2, delivery="broadcast")
        yield running


async def put(api: Api, *group_ids: str) -> None:
    for group_id in group_ids:
        # Large enough that some are compressed.
        await api.put(group_id, trajectories=200 if group_id > "c" else 2)


async def leased(api: Api, run: str = "run", *, packed: bool = False, **wanted: Any) -> list[str]:
    """The ids of the groups of a lease."""
    if not packed:
        return await api.leased(run, **wanted)
    headers = {"accept": GROUPS_MSGPACK, "idempotency-key": wanted.pop("key", "")}
    answer = await api.http.post(f"/v1/runs/{run}/lease", json=wanted, headers=headers)
    if answer.status_code == 204:
        return []
    assert answer.status_code == 200, answer.text
    return [group["group_id"] for group in msgspec.msgpack.decode(answer.content)["groups"]]


@pytest.mark.parametrize("packed", [False, True])
async def test_a_trainer_gets_the_groups_that_are_whole_at_once(
    api: Api, harm: Harm, packed: bool
) -> None:
    await put(api, "a", "b", "c", "d", "e")
    harm("a", "d")
    for _ in range(2):
        found = await leased(api, packed=packed, max_groups=2, key="first")
        assert found == ["b", "c"]
    assert await leased(api, packed=packed, max_groups=9) == ["e"]
    assert await leased(api, packed=packed) == []
    # They left the queue of every run, and the lease can be acknowledged.
    assert await leased(api, "all", packed=packed, max_groups=9) == ["b", "c", "e"]
    assert await api.end("ack", await api.lease(key="first", max_groups=2)) == 204


async def test_what_was_damaged_is_counted_once_and_can_be_seen(api: Api, harm: Harm) -> None:
    await put(api, "a", "b")
    harm("a")
    assert await leased(api, min_groups=2) == []  # one is left, which stays for whoever takes one
    assert await leased(api, "all") == await leased(api) == ["b"]
    status = await api.get("/v1/status")
    (one,) = status["damaged"]
    assert (one["group_id"], "checksum" in one["reason"]) == ("a", True)
    assert status["groups"]["dropped"] == 1
    assert (await api.store.counters())["damaged"] == 1
    (row, _) = (await api.get("/v1/groups"))["groups"]
    assert (row["group_id"], row["state"]) == ("a", "dropped")
    assert await api.status("GET", "/v1/groups/a") == 503


async def test_a_stream_goes_on_without_them(api: Api, harm: Harm) -> None:
    await put(api, "a", "b", "c")
    harm("a", "b")
    headers = {"accept": "text/event-stream"}
    query = {"max_groups": 1, "window": 1}
    async with api.http.stream("GET", "/v1/runs/run/stream", params=query, headers=headers) as got:
        async for line in got.aiter_lines():
            if line.startswith("data: "):
                (found,) = json.loads(line[6:])["groups"]
                assert found["group_id"] == "c"
                break


async def test_the_atropos_wire_goes_on_without_them(where: str, harm: Harm) -> None:
    async with running_api(where) as api:
        await api.start(batch_size=4)
        for mark in range(3):
            await api.post("/scored_data", wire_group(mark=mark))
        rows = await api.store.pending()
    harm(rows[0].group_id)
    async with running_api(where) as api:
        assert await api.batch_marks() == [1, 2]
        assert await api.batch_marks() is None
        assert (await api.store.counters())["damaged"] == 1
        assert await api.get("/status") is not None


class MadeOrders:
    """Orders of which all groups are made already."""

    def __init__(self) -> None:
        self.open_rollouts = 0
        self.config = SimpleNamespace(split="train")

    def environment(self, name: str) -> MadeOrders:
        return self

    async def wait(self, order: GroupsOrder, seconds: float) -> int:
        return len(order.task_ids)

    def is_open(self, order: GroupsOrder) -> bool:
        return False


async def test_an_order_of_which_a_group_was_damaged_says_what_to_do(
    where: str, harm: Harm
) -> None:
    order = GroupsOrder(
        key="key", environment="math", split="train", task_ids=("a", "b"), group_size=2
    )
    wanted = {"environment": "math", "task_ids": ["a", "b"], "group_size": 2, "wait_seconds": 1}
    async with running_api(where, orders=MadeOrders()) as api:
        await api.put(*order.group_ids())
        harm(order.group_ids()[1])
        headers = {"idempotency-key": "key"}
        refused = await api.http.post("/v1/rollouts", json=wanted, headers=headers)
        assert refused.status_code == 409, refused.text
        assert "another Idempotency-Key" in refused.text
        assert (await api.store.counters())["damaged"] == 1
