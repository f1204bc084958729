"""Stores written by an older version keep all their contents."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asyncpg
import msgspec
import pytest
from envserver_records.errors import ConflictError, InputError
from envserver_records.tasks import RewardRange
from envserver_records.wire import GROUPS_MSGPACK
from msgspec.structs import replace
from support.api import Api, running_api, wire_group
from support.postgres import Postgres
from support.stores import group, ids

from envserver.rollouts.ordered import GroupsOrder
from envserver.store import open_store, schema
from envserver.store.listing import GroupQuery, Page
from envserver.store.packed import facts_of_rewards

# id, state, lease
_GROUPS = [
    ("acked-1", "acked", "L1"),
    ("acked-2", "acked", "L1"),
    ("leased", "leased", "L2"),
    ("expired", "queued", "L3"),
    ("queued", "queued", None),
    ("buffered", "buffered", None),
    ("dropped", "dropped", None),
]
_LEASES = [
    ("L1", '["acked-1","acked-2"]', "acked"),
    ("L2", '["leased"]', "open"),
    ("L3", '["expired"]', "expired"),
]


def script() -> str:
    """SQL that makes a store of version 1 with a group in each state."""
    lines = [Path(__file__).with_name("version_1.sql").read_text()]
    for seq, (group_id, state, lease_id) in enumerate(_GROUPS, 1):
        held = "NULL" if lease_id is None else f"'{lease_id}'"
        lines += [
            f"INSERT INTO groups VALUES ({seq}, '{group_id}', 'math', 'group', 4, 100, 50, 2, 3,"
            f" '{state}', {held}, 950.0);",
            f"INSERT INTO bodies VALUES ({seq}, 0, CAST('of {group_id}' AS BLOB));",
        ]
    for lease_id, group_ids, state in _LEASES:
        lines.append(
            f"INSERT INTO leases VALUES ('{lease_id}', 'trainer', '{group_ids}', 960.0, 2000.0,"
            f" '{state}');"
        )
    return "\n".join(lines)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A store of version 1."""
    path = tmp_path / "store.db"
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.executescript(script())
    return path


async def check(path: Path | str) -> None:
    """Everything is as it was, and goes on as it would have."""
    async with open_store(path, clock=lambda: 1000.0) as store:
        counts = await store.counts()
        assert counts == {"buffered": 1, "queued": 2, "leased": 1, "acked": 2, "dropped": 1}
        names = [group_id for group_id, _, _ in _GROUPS]
        rows = await store.rows(names)
        assert [(row.group_id, row.state, row.lease_id) for row in rows] == _GROUPS
        assert {(row.env, row.policy_version, row.env_id, row.created_at) for row in rows} == {
            ("math", 2, 3, 950.0)
        }
        assert await store.bodies(names) == [f"of {name}".encode() for name in names]
        runs = {run.name: run for run in await store.list_runs()}
        assert (runs["trainer"].settings, runs["trainer"].policy_version) == ({"max_length": 5}, 7)
        assert (runs["trainer"].delivery, runs["trainer"].environments) == ("shared", [])
        assert runs["done"].state == "closed"
        assert await store.get_value("registration") == {"uuid": 1}
        assert await store.task_estimates(0, 10) == []
        assert await store.depths() == {"trainer": 3}
        await store.ack("L2")
        await store.ack("L3", checkpoint="first")  # late, and nobody else has taken it
        assert [c.acked_groups for c in await store.checkpoints("trainer")] == [4]
        with pytest.raises(ConflictError):
            await store.nack("L1")
        assert await store.rewind("trainer", "first") == []
        assert await store.put([group("new"), group("acked-1", b"of acked-1")]) == [True, False]
        lease = await store.lease("trainer", seconds=60)
        assert lease is not None
        assert ids(lease.groups) == ["queued", "new"]


async def test_so_is_one_in_postgresql(postgres_url: str) -> None:
    connection = await asyncpg.connect(postgres_url)
    as_here = script().replace(" BLOB", " BYTEA").replace("DOUBLE", "DOUBLE PRECISION")
    await connection.execute(as_here.replace("seq INTEGER", "seq BIGINT"))
    await check(postgres_url)
    query = (
        "SELECT table_name, column_name, data_type, is_nullable FROM information_schema.columns"
        " WHERE table_schema = 'public' UNION ALL"
        " SELECT tablename, indexname, indexdef, '' FROM pg_indexes WHERE schemaname = 'public'"
    )
    migrated = set(map(tuple, await connection.fetch(query)))
    await connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    async with open_store(postgres_url):
        pass
    assert migrated == set(map(tuple, await connection.fetch(query)))
    await connection.close()


async def test_a_store_of_version_1_is_brought_up_to_date(old: Path, tmp_path: Path) -> None:
    await check(old)
    async with open_store(tmp_path / "new.db"):
        pass
    assert shape(old) == shape(tmp_path / "new.db")


@pytest.mark.parametrize("version", ["0.1", "0.2"])
async def test_what_a_released_version_stored_is_delivered_as_it_was(
    where: str, version: str
) -> None:
    """`older/` has stores that these versions wrote, and what they leased of them."""

    def kept(name: str) -> bytes:
        return gzip.decompress(
            Path(__file__).with_name("older").joinpath(f"{name}.gz").read_bytes()
        )

    if where.startswith("postgresql"):
        connection = await asyncpg.connect(where)
        await connection.execute(kept(f"store_of_{version}.sql").decode())
        await connection.close()
    else:
        Path(where).parent.mkdir()
        Path(where).write_bytes(kept(f"store_of_{version}.db"))
    (then,) = json.loads(kept(f"leased_from_{version}.json"))["groups"]
    async with running_api(where, clock=lambda: 2e9) as api:  # their leases have expired
        known = {row["group_id"] for row in (await api.get("/v1/groups"))["groups"]}
        found = set()
        while batch := await api.leased("t"):
            found |= set(batch)
        assert found == known >= {then["group_id"]}
        now = await api.get(f"/v1/groups/{then['group_id']}")
        assert {name: now["group"][name] for name in then["group"]} == then["group"]


def shape(path: Path) -> dict[str, Any]:
    connection = sqlite3.connect(path)

    def ask(query: str) -> list[Any]:
        return connection.execute(query).fetchall()

    found = {}
    for (table,) in ask("SELECT name FROM sqlite_master WHERE type = 'table'"):
        columns = [(row[1], row[3], row[5]) for row in ask(f'PRAGMA table_info("{table}")')]
        indexes = {
            (row[1], row[2], row[4], tuple(c[2] for c in ask(f'PRAGMA index_info("{row[1]}")')))
            for row in ask(f'PRAGMA index_list("{table}")')
        }
        found[table] = (columns, indexes, ask(f'PRAGMA foreign_key_list("{table}")'))
    connection.close()
    return found


_KILLED = textwrap.dedent(
    """
    import asyncio, os, sys
    from envserver.store import open_store, schema

    async def die(connection):
        os._exit(9)

    schema._number_acks = die

    async def main():
        async with open_store(sys.argv[1]):
            pass

    asyncio.run(main())
    """
)


async def test_where_a_step_fails_or_is_killed_it_is_as_it_was(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(connection: object) -> None:
        raise RuntimeError("no")

    before = dump(old)
    assert subprocess.run([sys.executable, "-c", _KILLED, str(old)], check=False).returncode == 9
    assert dump(old) == before
    with monkeypatch.context() as patched:
        patched.setattr(schema, "_number_acks", fail)
        with pytest.raises(RuntimeError):
            async with open_store(old):
                pass
    assert dump(old) == before
    await check(old)


def dump(path: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


# Groups whose stored bodies are damaged: a trainer gets all others and never waits for these

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
async def test_a_trainer_gets_whole_groups_at_once(api: Api, harm: Harm, packed: bool) -> None:
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


async def test_an_order_with_a_damaged_group_says_what_to_do(where: str, harm: Harm) -> None:
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


# Lists of groups and of their tasks: filtered, sorted, page by page, and summed up


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
