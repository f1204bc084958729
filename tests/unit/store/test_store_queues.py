"""Runs, their queues and leases: who gets which group, and what can be undone."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from envserver_records.errors import ConflictError, InputError, NotFoundError
from sqlalchemy import Engine, event
from support.stores import group, ids
from support.waiting import PATIENCE

from envserver.store import Lease, Store, deliveries, open_store
from envserver.store.listing import GroupQuery


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(where: str, clock: Clock) -> AsyncIterator[Store]:
    async with open_store(where, clock=clock) as opened:
        await opened.create_run("trainer", batch_size=4)
        yield opened


async def taken(store: Store, run: str = "trainer", **wanted: Any) -> list[str]:
    """What a lease gives; it stays leased."""
    lease = await store.lease(run, seconds=60, **wanted)
    return [] if lease is None else ids(lease.groups)


async def leased(store: Store, run: str = "trainer", **wanted: Any) -> Lease:
    lease = await store.lease(run, seconds=60, **wanted)
    assert lease is not None
    return lease


# Limits and filters


async def test_a_lease_stops_before_a_limit_is_passed(store: Store) -> None:
    sizes = {"a": 3, "b": 4, "c": 9, "d": 1, "e": 1, "f": 1}
    await store.put([group(name, size=n, tokens=100 * n) for name, n in sizes.items()])
    assert await taken(store, max_sequences=8) == ["a", "b"]
    assert await taken(store, max_sequences=8) == ["c"]  # at least one
    assert await taken(store, max_tokens=250) == ["d", "e"]
    assert await taken(store, max_tokens=10_000, max_groups=1) == ["f"]


async def test_too_few_groups_are_left_for_later(store: Store) -> None:
    await store.put([group(name) for name in "abc"])
    assert await taken(store, min_groups=4) == []
    # Whether enough wait is asked of the filters, not of what a limit leaves of it.
    assert await taken(store, min_groups=3, max_sequences=8) == ["a", "b"]
    assert await taken(store, min_groups=2) == []
    await store.put([group("d")])
    assert await taken(store, min_groups=2, max_groups=2) == ["c", "d"]


async def test_what_a_filter_leaves_stays_queued(store: Store) -> None:
    puts = [
        group(f"{env}-{version}", env=env, policy_version=version)
        for version in (-1, 0, 1, 2)
        for env in ("math", "code", "games")
    ]
    await store.put(puts)
    assert await taken(store, environments=["code"], max_groups=2) == ["code--1", "code-0"]
    assert await taken(store, environments=["math", "games"], max_groups=3) == [
        "math--1",
        "games--1",
        "math-0",
    ]
    assert await taken(store, environments=["chess"]) == []
    assert await taken(store, min_version=2, max_groups=1) == ["math-2"]
    await store.put([group("unknown", env="code")])
    assert await taken(store, min_version=2) == ["code-2", "games-2", "unknown"]
    assert await taken(store, min_version=3) == []
    assert await taken(store) == ["games-0", "math-1", "code-1", "games-1"]


async def test_a_run_has_its_environments(store: Store) -> None:
    await store.create_run("coder", batch_size=1, environments=["code", "games"])
    await store.put([group(f"{env}-{n}", env=env) for n in (1, 2) for env in ("math", "code")])
    assert await store.depths() == {"trainer": 4, "coder": 2}
    with pytest.raises(ConflictError, match="math-1 is of environment math"):
        await store.lease("coder", group_ids=["math-1"], seconds=60)
    assert await taken(store, "coder", environments=["math", "code"], max_groups=1) == ["code-1"]
    assert await taken(store, "coder") == ["code-2"]
    assert await store.depths() == {"trainer": 4, "coder": 2}  # leased ones still wait
    assert await taken(store) == ["math-1", "math-2"]


async def test_limits_that_cannot_be(store: Store) -> None:
    for wanted in (
        {"max_groups": 0},
        {"max_sequences": 0},
        {"max_tokens": -1},
        {"min_groups": 0},
        {"group_ids": ["a"], "max_tokens": 1},
        {"group_ids": ["a"], "environments": ["math"]},
    ):
        with pytest.raises(InputError):
            await store.lease("trainer", seconds=60, **wanted)  # type: ignore[arg-type]


# Every run its own


async def test_a_broadcast_run_gets_every_group(store: Store) -> None:
    await store.put([group(name) for name in "abc"] + [group("later", state="buffered")])
    await store.move(["b"], "dropped")
    await store.ack((await leased(store, max_groups=1)).lease_id)
    await store.create_run("watcher", batch_size=1, delivery="broadcast")
    assert await store.depths() == {"trainer": 1, "watcher": 2}
    await store.move(["later"], "queued")
    await store.put([group("d")])
    all_of_it = await leased(store, "watcher")
    assert ids(all_of_it.groups) == ["a", "c", "later", "d"]
    assert {row.state for row in all_of_it.groups} == {"leased"}
    assert {row.state for row in await store.rows(["c", "later", "d"])} == {"queued"}
    await store.nack(all_of_it.lease_id)
    assert await taken(store) == ["c", "later", "d"]
    await store.ack((await leased(store, "watcher", max_groups=3)).lease_id)
    assert await store.depths() == {"trainer": 3, "watcher": 1}
    assert (await store.counts())["acked"] == 1


async def test_the_same_arguments_give_the_same_run(store: Store) -> None:
    arguments: dict[str, Any] = {"delivery": "broadcast", "environments": ["math", "code"]}
    run = await store.create_run("w", batch_size=1, **arguments)
    assert (run.delivery, run.environments) == ("broadcast", ["code", "math"])
    assert await store.create_run("w", batch_size=1, **arguments) == run
    for other in ({"delivery": "shared"}, {"environments": []}):
        with pytest.raises(ConflictError):
            await store.create_run("w", batch_size=1, **(arguments | other))


async def test_closing_gives_back_and_opening_goes_on(store: Store) -> None:
    await store.create_run("watcher", batch_size=1, delivery="broadcast")
    await store.put([group(name) for name in "abc"])
    done = await leased(store, "watcher", max_groups=1)
    held = await leased(store, "watcher")
    await store.ack(done.lease_id)
    assert (await store.close_run("watcher")).state == "closed"
    assert (await store.close_run("watcher")).state == "closed"
    assert await store.depths() == {"trainer": 3}
    for refused in (store.ack(held.lease_id), store.extend(held.lease_id, 5)):
        with pytest.raises(ConflictError, match="closed"):
            await refused
    with pytest.raises(ConflictError):
        await store.lease("watcher", seconds=60)
    await store.put([group("d")])
    assert (await store.create_run("watcher", batch_size=1, delivery="broadcast")).state == "open"
    assert await taken(store, "watcher") == ["b", "c", "d"]
    with pytest.raises(NotFoundError):
        await store.close_run("nobody")


# Checkpoints


async def test_back_to_a_checkpoint(where: str, clock: Clock) -> None:
    async with open_store(where, clock=clock) as store:
        await store.create_run("trainer", batch_size=1)
        await store.put([group(name) for name in "abcdefgh"])
        acked = [await leased(store, max_groups=1) for _ in range(5)]
        await store.ack(acked[0].lease_id)
        await store.ack(acked[1].lease_id, checkpoint="one")
        await store.ack(acked[1].lease_id, checkpoint="one")  # twice is once
        clock.now += 1
        await store.ack(acked[3].lease_id)
        await store.ack(acked[2].lease_id)
        late = acked[4]
        clock.now += 100
        assert await store.expire() == [late.lease_id]
        held = await leased(store, max_groups=1)
        assert ids(held.groups) == ["e"]
        await store.nack(held.lease_id)
        expired = await leased(store, max_groups=1)
        clock.now += 100
        await store.expire()
        held = await leased(store, group_ids=["f"])
        [one] = await store.checkpoints("trainer")
        assert (one.name, one.acked_groups, one.created_at) == ("one", 2, 1000)
    async with open_store(where, clock=clock) as store:
        assert await store.rewind("trainer", "one") == ["c", "d"]
        assert await store.depths() == {"trainer": 6}
        # Nothing that was said before counts after it.
        for lease in (acked[2], acked[3], late, expired, held):
            with pytest.raises(ConflictError):
                await store.ack(lease.lease_id)
        assert await store.rewind("trainer", "one") == []
        again = await leased(store)
        assert ids(again.groups) == list("cdefgh")
        await store.ack(again.lease_id, checkpoint="two")
        assert [(c.name, c.acked_groups) for c in await store.checkpoints("trainer")] == [
            ("one", 2),
            ("two", 8),
        ]
        assert await store.rewind("trainer", None) == list("abcdefgh")
        assert await store.checkpoints("trainer") == []
        for missing in (store.rewind("trainer", "two"), store.rewind("nobody", None)):
            with pytest.raises(NotFoundError):
                await missing
        assert (await store.counters())["rewound"] == 10


async def test_others_keep_what_they_acked(store: Store) -> None:
    await store.create_run("other", batch_size=1)
    await store.create_run("watcher", batch_size=1, delivery="broadcast")
    await store.put([group(name) for name in "abc"])
    for run in ("trainer", "other", "watcher"):
        lease = await leased(store, run, max_groups=1)
        await store.ack(lease.lease_id, checkpoint="same name")
    assert await store.rewind("trainer", None) == ["a"]
    assert await store.rewind("watcher", "same name") == []
    assert (await store.counts())["acked"] == 1
    assert await store.depths() == {"trainer": 2, "other": 2, "watcher": 2}


async def test_a_checkpoint_moves_on_with_its_name(store: Store) -> None:
    await store.put([group(name) for name in "abc"])
    first, second = [await leased(store, max_groups=1) for _ in range(2)]
    await store.ack(first.lease_id, checkpoint="latest")
    await store.ack(second.lease_id, checkpoint="latest")
    await store.ack(first.lease_id, checkpoint="latest")  # an old word does not move it back
    assert [(c.name, c.acked_groups) for c in await store.checkpoints("trainer")] == [("latest", 2)]
    assert await store.rewind("trainer", "latest") == []


# Stale groups, counters, waiting


async def test_stale_groups_are_dropped_and_counted(store: Store) -> None:
    await store.create_run("watcher", batch_size=1, delivery="broadcast")
    await store.put(
        [group(f"g{n}", policy_version=version) for n, version in enumerate((1, 3, -1, 2, 1, 5))]
    )
    held = await leased(store, max_groups=1)
    assert await store.drop_stale(3) == 2 + 3
    assert await store.drop_stale(3) == 0
    await store.nack(held.lease_id, reason="too long")
    assert await store.drop_stale(3) == 1
    assert ids(await store.pending()) == ["g1", "g2", "g5"]
    assert await taken(store, "watcher") == ["g1", "g2", "g5"]
    counters = await store.counters()
    assert (counters["stale_dropped"], counters["nacked: too long"]) == (6, 1)


async def test_reasons_are_counted_but_not_without_end(store: Store) -> None:
    await store.put([group(f"g{n}") for n in range(70)])
    held = await asyncio.gather(*[leased(store, max_groups=1) for _ in range(70)])
    await asyncio.gather(
        *[
            store.nack(lease.lease_id, reason=f"reason {n} {'x' * 1000}")
            for n, lease in enumerate(held)
        ]
    )
    counters = await store.counters()
    reasons = {name: n for name, n in counters.items() if name.startswith("nacked")}
    assert sum(reasons.values()) == 70
    assert (len(reasons), reasons["nacked: other"]) == (65, 6)
    assert max(map(len, reasons)) < 100


async def test_who_waits_is_woken(store: Store, clock: Clock) -> None:
    async def woken(act: Any) -> bool:
        waiting = asyncio.create_task(store.wait_for_change(30))
        await asyncio.sleep(0)
        before = store.changes
        await act
        return await asyncio.wait_for(waiting, PATIENCE) == store.changes > before

    assert await woken(store.put([group("a"), group("b", state="buffered")]))
    assert await woken(store.move(["b"], "queued"))
    lease = await leased(store)
    assert await woken(store.nack(lease.lease_id))
    lease = await leased(store)
    clock.now += 100
    assert await woken(store.expire())
    await store.ack(lease.lease_id)
    assert await woken(store.rewind("trainer", None))
    seen = store.changes
    assert await store.wait_for_change(0.01) == seen  # nothing happens
    assert await woken(store.close_run("trainer"))
    # What came between looking and waiting is not missed.
    assert await store.wait_for_change(30, since=seen) == store.changes


# Large stores


async def test_a_deep_store_is_never_read_from_end_to_end(tmp_path: Path) -> None:
    """Every statement finds its rows through an index, however many groups there are."""
    path = tmp_path / "store.db"
    async with open_store(path) as store:
        await store.create_run("trainer", batch_size=4)
        await store.create_run("one", batch_size=4, environments=["env-1"])
    fill(path, 20_000)
    asked: dict[str, Any] = {}

    def note(_connection: object, _cursor: object, statement: str, parameters: Any, *_: object):
        asked.setdefault(statement, parameters[0] if isinstance(parameters, list) else parameters)

    async with open_store(path) as store:
        await store.set_run("trainer", policy_version=1)  # deliveries were counted at opening
        event.listen(Engine, "before_cursor_execute", note)
        try:
            assert await store.counts() == {
                "buffered": 0,
                "queued": 20_000,
                "leased": 0,
                "acked": 0,
                "dropped": 0,
            }
            assert await store.depths() == {"trainer": 20_000, "one": 5000}
            assert await taken(store, max_groups=2) == ["g1", "g2"]
            assert await taken(store, environments=["env-0", "env-1"], max_groups=1) == ["g4"]
            assert await taken(store, min_version=9, max_groups=1) == ["g18000"]
            assert len(await taken(store, max_tokens=60_000)) == 600
            lease = await leased(store, "one", max_groups=1)
            await store.extend(lease.lease_id, 60)
            await store.ack(lease.lease_id, checkpoint="one")
            await store.nack((await leased(store, max_groups=1)).lease_id)
            await store.put([group("new"), group("g1")])
            await store.bodies(["g1", "g19999"])
            await store.list_groups(GroupQuery(after=19_000), "", 10)
            await store.rewind("one", None)
            assert await store.drop_stale(1) == 1999 - 3 - 600
            await store.expire()
            await store.compact(acked_hours=0)
        finally:
            event.remove(Engine, "before_cursor_execute", note)
    plans = explain(path, asked)
    assert len(plans) > 30
    reads_all = re.compile(
        r"(SCAN (deliveries|waiting|groups|named|bodies|leases)\b(?! USING INDEX leases_open))"
        r"|KEY \(queue=\?\)$"
    )
    for statement, steps in plans.items():
        assert not [step for step in steps if reads_all.search(step)], (statement, steps)


def fill(path: Path, depth: int) -> None:
    """Queued groups g1, g2 ...: four environments in turn, ten policy versions in a row."""
    numbers = range(1, depth + 1)
    facts = [(n, f"g{n}", f"env-{n % 4}", n * 10 // depth) for n in numbers]
    with sqlite3.connect(path) as connection:
        connection.executemany(
            "INSERT INTO groups VALUES (?, ?, ?, 'group', 4, 100, 50, ?, NULL, 0)", facts
        )
        connection.executemany("INSERT INTO bodies VALUES (?, 0, 'x')", [(n,) for n in numbers])
        connection.executemany(
            "INSERT INTO deliveries (queue, seq, env, policy_version, stored_bytes, state)"
            " VALUES ('shared', ?, ?, ?, 1, 'queued')",
            [(n, env, version) for n, _, env, version in facts],
        )
        # As after a kill: what the store wrote down when it was closed is no longer true.
        connection.execute("DELETE FROM \"values\" WHERE key = 'store.memory'")
    connection.close()


def explain(path: Path, asked: dict[str, Any]) -> dict[str, list[str]]:
    connection = sqlite3.connect(path)
    plans = {}
    for statement, parameters in asked.items():
        if statement.startswith(("SELECT", "UPDATE", "DELETE", "INSERT")):
            found = connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)
            plans[statement] = [row[3] for row in found]
    connection.close()
    return plans


# Opening a broadcast run whose queue lacks very many


async def test_while_a_run_is_opened_others_go_on_and_it_gets_all_in_order(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries, "FILLED_AT_ONCE", 4)
    first = [f"first-{index}" for index in range(100)]
    async with open_store(where) as store:
        await store.put([group("part", state="buffered"), *(group(name) for name in first)])
        opening = asyncio.create_task(store.create_run("all", batch_size=1, delivery="broadcast"))
        await store.put([group("second")])
        await store.move(["part"], "queued")
        assert not opening.done()
        with pytest.raises(ConflictError, match="closed"):
            await store.lease("all", seconds=60)
        assert (await opening).state == "open"
        await store.put([group("third")])
        lease = await store.lease("all", seconds=60)
        assert lease is not None
        assert ids(lease.groups) == ["part", *first, "second", "third"]


_OPENED_AND_KILLED = """
import asyncio, os, sys
from envserver.store import deliveries, open_store
deliveries.FILLED_AT_ONCE = 4
async def main():
    async with open_store(sys.argv[1]) as store:
        opening = asyncio.create_task(store.create_run("all", batch_size=1, delivery="broadcast"))
        for _ in range(6):
            await store.wait_for_activity(5, since=store.activity)
        assert not opening.done()
        os._exit(9)
asyncio.run(main())
"""


async def test_killed_while_a_run_is_opened_nothing_is_lost_or_doubled(where: str) -> None:
    names = [f"group-{index}" for index in range(100)]
    async with open_store(where) as store:
        await store.put([group(name) for name in names])
    command = [sys.executable, "-c", _OPENED_AND_KILLED, where]
    process = await asyncio.create_subprocess_exec(*command)
    assert await process.wait() == 9
    async with open_store(where) as store:
        assert (await store.get_run("all")).state == "closed"
        await store.put([group("late")])
        await store.create_run("all", batch_size=1, delivery="broadcast")
        assert (await store.depths())["all"] == 101
        lease = await store.lease("all", seconds=60)
        assert lease is not None
        assert ids(lease.groups) == [*names, "late"]
