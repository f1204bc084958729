"""The store's public methods: groups that were put are found, and nothing is delivered twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from envserver_records.errors import ConflictError, InputError, NotFoundError
from sqlalchemy import Engine, event
from support.stores import group, ids, noise

from envserver.store import Store, open_store


@pytest.fixture
async def store(where: str) -> AsyncIterator[Store]:
    async with open_store(where) as opened:
        await opened.create_run("trainer", batch_size=4)
        yield opened


# Putting


async def test_what_is_put_comes_back_as_it_was(store: Store) -> None:
    bodies = {
        "empty": b"",
        "small": b"x",
        "compressible": b"token " * 50_000,
        "noise": noise(100_000),
    }
    accepted = await store.put(
        [group(name, body, policy_version=7, env_id=3) for name, body in bodies.items()]
    )
    assert accepted == [True] * 4
    rows = await store.pending()
    assert ids(rows) == list(bodies)
    assert [row.seq for row in rows] == sorted(row.seq for row in rows)
    first = rows[0]
    assert (first.env, first.format, first.size, first.tokens) == ("math", "group", 4, 100)
    assert (first.max_length, first.policy_version, first.env_id) == (50, 7, 3)
    assert (first.state, first.lease_id) == ("queued", None)
    backwards = list(reversed(bodies))
    assert await store.bodies(backwards) == [bodies[name] for name in backwards]


async def test_an_id_is_stored_once_and_another_body_is_noticed(store: Store) -> None:
    assert await store.put([group("a", b"one"), group("b"), group("a", b"one")]) == [
        True,
        True,
        False,
    ]
    assert await store.put([group("a", b"one"), group("c")]) == [False, True]
    assert store.conflicting_puts == 0
    assert await store.put([group("a", b"two"), group("d"), group("d", b"two")]) == [
        False,
        True,
        False,
    ]
    assert store.conflicting_puts == 2
    assert await store.bodies(["a", "d"]) == [b"one", b"body"]
    assert (await store.counts())["queued"] == 4
    assert await store.existing(["a", "d", "never"]) == {"a", "d"}


async def test_many_groups_at_once(store: Store) -> None:
    names = [f"group-{index}" for index in range(1700)]
    assert all(await store.put([group(name, name.encode()) for name in names]))
    assert not any(await store.put([group(name, name.encode()) for name in names]))
    lease = await store.lease("trainer", seconds=60)
    assert lease is not None
    assert ids(lease.groups) == names
    assert await store.bodies(names) == [name.encode() for name in names]
    await store.ack(lease.lease_id)
    assert await store.counts() == {
        "buffered": 0,
        "queued": 0,
        "leased": 0,
        "acked": 1700,
        "dropped": 0,
    }


async def test_a_put_that_fails_does_not_fail_its_neighbours(store: Store) -> None:
    good = [store.put([group(f"good-{index}")]) for index in range(5)]
    bad = [
        store.put([group("half of a bad put"), group("\ud800")]),
        store.put([group("too-large-a-number", tokens=2**70)]),
        store.ack("no such lease"),
    ]
    results = await asyncio.gather(*good[:2], *bad, *good[2:], return_exceptions=True)
    assert [type(result) for result in results] == [
        list,
        list,
        InputError,
        InputError,
        NotFoundError,
        list,
        list,
        list,
    ]
    assert sorted(ids(await store.pending())) == [f"good-{index}" for index in range(5)]
    assert (await store.counts())["queued"] == 5


async def test_puts_that_wait_are_committed_together(tmp_path: Path) -> None:
    commits = 0

    def count(connection: object) -> None:
        nonlocal commits
        commits += 1

    async with open_store(tmp_path / "store.db") as store:
        event.listen(Engine, "commit", count)
        try:
            await asyncio.gather(*[store.put([group(f"g{index}")]) for index in range(200)])
        finally:
            event.remove(Engine, "commit", count)
        assert 1 <= commits <= 40
        assert (await store.counts())["queued"] == 200


async def test_a_caller_that_gives_up_harms_nobody(store: Store) -> None:
    impatient = [asyncio.create_task(store.put([group(f"i{index}")])) for index in range(20)]
    patient = [asyncio.create_task(store.put([group(f"p{index}")])) for index in range(20)]
    await asyncio.sleep(0)
    for task in impatient:
        task.cancel()
    assert await asyncio.gather(*patient) == [[True]] * 20
    there = await store.existing([f"p{index}" for index in range(20)])
    assert len(there) == 20
    assert (await store.counts())["queued"] == len(await store.pending())


async def test_a_group_needs_an_id_and_a_first_state(store: Store) -> None:
    with pytest.raises(InputError):
        await store.put([group("")])
    with pytest.raises(InputError):
        await store.put([group("a", state="acked")])
    assert await store.pending() == []


# Leasing


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_lease_then_ack_is_the_end(where: str) -> None:
    async with open_store(where) as store:
        await store.create_run("trainer", batch_size=2)
        await store.put([group(name) for name in "abcd"])
        lease = await store.lease("trainer", max_groups=2, seconds=60)
        assert lease is not None
        assert (ids(lease.groups), lease.run) == (["a", "b"], "trainer")
        chosen = await store.lease("trainer", group_ids=["d"], seconds=60)
        assert chosen is not None
        assert {row.state for row in chosen.groups} == {"leased"}
        await store.ack(lease.lease_id)
        await store.ack(lease.lease_id)
        for refused in (store.nack(lease.lease_id), store.extend(lease.lease_id, 60)):
            with pytest.raises(ConflictError):
                await refused
    async with open_store(where) as store:
        assert ids(await store.pending()) == ["c"]
        await store.ack(chosen.lease_id)  # the lease survived
        rest = await store.lease("trainer", max_groups=5, seconds=60)
        assert rest is not None
        assert ids(rest.groups) == ["c"]
        assert await store.lease("trainer", max_groups=5, seconds=60) is None
        counts = await store.counts()
    assert (counts["acked"], counts["leased"], counts["queued"]) == (3, 1, 0)


async def test_an_expired_lease_is_delivered_again(where: str) -> None:
    clock = Clock()
    async with open_store(where, clock=clock) as store:
        await store.create_run("trainer", batch_size=2)
        await store.put([group(name) for name in "abc"])
        late = await store.lease("trainer", max_groups=2, seconds=60)
        assert late is not None
        assert late.expires_at == 1060
    clock.now = 1061
    async with open_store(where, clock=clock) as store:
        # Nobody has to call expire: what is overdue counts as queued.
        again = await store.lease("trainer", max_groups=1, seconds=60)
        assert again is not None
        assert ids(again.groups) == ["a"]
        with pytest.raises(ConflictError) as refused:
            await store.ack(late.lease_id)
        assert refused.value.detail["group_ids"] == ["a"]
        assert (await store.counts())["acked"] == 0
        await store.ack(again.lease_id)


@pytest.mark.parametrize("act", ["ack", "nack", "extend"])
async def test_a_late_word_counts_until_others_have_the_groups(where: str, act: str) -> None:
    clock = Clock()
    async with open_store(where, clock=clock) as store:
        await store.create_run("trainer", batch_size=2)
        await store.put([group(name) for name in "ab"])
        lease = await store.lease("trainer", max_groups=2, seconds=60)
        assert lease is not None
        clock.now = 1061
        assert await store.expire() == [lease.lease_id]
        assert await store.expire() == []
        assert (await store.counts())["queued"] == 2
        if act == "extend":
            assert await store.extend(lease.lease_id, 60) == 1121
        else:
            await getattr(store, act)(lease.lease_id)
        counts = await store.counts()
    expected = {"ack": "acked", "nack": "queued", "extend": "leased"}[act]
    assert counts[expected] == 2  # type: ignore[literal-required]


async def test_extend_keeps_a_lease_and_nack_gives_it_back(where: str) -> None:
    clock = Clock()
    async with open_store(where, clock=clock) as store:
        await store.create_run("trainer", batch_size=2)
        await store.put([group(name) for name in "ab"])
        lease = await store.lease("trainer", max_groups=1, seconds=60)
        assert lease is not None
        clock.now = 1050
        await store.extend(lease.lease_id, 60)
        assert await store.expire(1109.0) == []
        await store.nack(lease.lease_id)
        await store.nack(lease.lease_id)
        assert ids(await store.pending()) == ["a", "b"]  # back in its place
        with pytest.raises(ConflictError):
            await store.ack(lease.lease_id)


async def test_moving_waiting_groups(store: Store) -> None:
    await store.put([group("a", state="buffered"), group("b", state="buffered"), group("c")])
    assert await store.lease("trainer", group_ids=["c"], seconds=60)
    with pytest.raises(ConflictError, match="c is leased"):
        await store.move(["a", "c"], "queued")
    with pytest.raises(NotFoundError):
        await store.move(["a", "never"], "queued")
    assert [row.state for row in await store.pending()] == ["buffered", "buffered"]
    assert await store.lease("trainer", max_groups=3, seconds=60) is None
    await store.move(["a"], "queued")
    await store.move(["b"], "dropped")
    with pytest.raises(ConflictError):
        await store.move(["b"], "queued")
    lease = await store.lease("trainer", max_groups=3, seconds=60)
    assert lease is not None
    assert ids(lease.groups) == ["a"]


async def test_unknown_names_are_not_found(store: Store) -> None:
    await store.put([group("a")])
    for request in (
        store.ack("x"),
        store.nack("x"),
        store.extend("x", 1),
        store.bodies(["a", "x"]),
        store.lease("trainer", group_ids=["x"], seconds=1),
        store.lease("x", max_groups=1, seconds=1),
        store.get_run("x"),
        store.set_run("x", batch_size=1),
    ):
        with pytest.raises(NotFoundError):
            await request
    for seconds in (0, -1, float("nan")):
        with pytest.raises(InputError):
            await store.lease("trainer", max_groups=1, seconds=seconds)
    with pytest.raises(InputError):
        await store.lease("trainer", max_groups=1, group_ids=["a"], seconds=1)


# Runs and values


async def test_runs(where: str) -> None:
    async with open_store(where) as store:
        run = await store.create_run("one", batch_size=8, settings={"max_length": 2048})
        assert (run.policy_version, run.state) == (-1, "open")
        assert await store.create_run("one", batch_size=8, settings={"max_length": 2048}) == run
        with pytest.raises(ConflictError):
            await store.create_run("one", batch_size=9)
        await store.create_run("two", batch_size=1)
        await store.set_run("one", policy_version=3, batch_size=16)
        await store.set_run("two", state="closed")
        await store.put([group("a")])
        with pytest.raises(ConflictError):
            await store.lease("two", max_groups=1, seconds=1)
    async with open_store(where) as store:
        one, two = await store.list_runs()
        assert one == await store.get_run("one")
    assert (one.batch_size, one.policy_version, one.settings) == (16, 3, {"max_length": 2048})
    assert (two.name, two.state) == ("two", "closed")


async def test_values(where: str) -> None:
    async with open_store(where) as store:
        assert await store.get_value("registration") is None
        await store.set_value("registration", {"uuid": 1, "envs": [{"name": "gsm8k"}]})
        await store.set_value("registration", {"uuid": 2, "envs": [None, 0.5, "é"]})
        with pytest.raises(InputError):
            await store.set_value("registration", object())
    async with open_store(where) as store:
        assert await store.get_value("registration") == {"uuid": 2, "envs": [None, 0.5, "é"]}
