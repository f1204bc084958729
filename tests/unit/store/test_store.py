"""What every store promises: the stories of stories.txt, and what takes more than a line to say."""

import asyncio
import re
import shlex
import sqlite3
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
from envserver_records.errors import InputError, NotFoundError, StoreError, UsageError
from sqlalchemy import Engine, event
from support.extent import first_of
from support.stores import group, ids, noise
from support.waiting import PATIENCE

from envserver.store import Lease, Store, open_store
from envserver.store.listing import GroupQuery

STORIES = {
    title: lines.splitlines()
    for title, _, lines in (
        story.partition("\n")
        for story in Path(__file__).with_name("stories.txt").read_text().split("\n# ")[1:]
    )
}
UNITS = {"h": 3600, "s": 1}


class Story:
    """Says the lines of a story to a store. Each method is a line's first word, and returns what
    stands after the arrow."""

    store: Store

    def __init__(self, where: str) -> None:
        self.where = where
        self.now = 1000.0
        self.held: dict[str, Lease] = {}

    async def play(self, lines: list[str]) -> None:
        for number, part in enumerate("\n".join(lines).split("\nreopen\n")):
            async with open_store(self.where, clock=lambda: self.now) as self.store:
                if number == 0 and lines[0] != "without trainer":
                    await self.run("trainer", "shared")
                for line in part.removeprefix("without trainer").split("\n"):
                    if line:
                        await self.say(line)

    async def say(self, line: str) -> None:
        told, arrow, expected = line.partition(" ->")
        expected = expected.strip()
        word, *args = shlex.split(told)
        options = dict(arg.split("=", 1) for arg in args if "=" in arg)
        names = [arg for arg in args if "=" not in arg]
        try:
            said = str(await getattr(self, word)(*names, **options))
        except UsageError as error:
            kind, _, words = expected.partition(" ")
            assert type(error).__name__ == kind, (line, error)
            assert words in f"{error} {error.detail}", (line, error, error.detail)
        else:
            assert not arrow or said == expected, f"{line!r} answered {said!r}"

    def lease_of(self, name: str) -> str:
        return self.held[name].lease_id if name in self.held else name

    async def wait(self, time: str) -> None:
        self.now += float(time.rstrip("h")) * UNITS["h" if "h" in time else "s"]

    async def put(self, *names: str, **facts: str) -> str:
        """The groups that are new."""
        state: Any = facts.pop("state", "queued")
        env, size = facts.pop("env", "math"), int(facts.pop("noise", 0))
        numbers: Any = {
            {"version": "policy_version"}.get(key, key): int(value) for key, value in facts.items()
        }
        puts = []
        for index, name in enumerate(names):
            group_id, _, body = name.partition(":")
            stored = noise(size, index) if size else (body or group_id).encode()
            puts.append(group(group_id, stored, env=env, state=state, **numbers))
        accepted = await self.store.put(puts)
        return " ".join(put.group_id for put, new in zip(puts, accepted, strict=True) if new)

    async def take(self, run: str, **wanted: str) -> str:
        name, seconds = wanted.pop("as", ""), float(wanted.pop("seconds", 60))
        limits: Any = {
            key: value.split(",") if key in ("environments", "group_ids") else int(value)
            for key, value in wanted.items()
        }
        lease = await self.store.lease(run, seconds=seconds, **limits)
        if lease is None:
            return ""
        assert (lease.run, lease.expires_at) == (run, self.now + seconds)
        assert {row.state for row in lease.groups} == {"leased"}
        self.held[name] = lease
        return " ".join(ids(lease.groups))

    async def ack(self, lease: str, checkpoint: str | None = None) -> None:
        await self.store.ack(self.lease_of(lease), checkpoint=checkpoint)

    async def nack(self, lease: str, reason: str = "") -> None:
        await self.store.nack(self.lease_of(lease), reason=reason)

    async def extend(self, lease: str, seconds: str) -> float:
        return await self.store.extend(self.lease_of(lease), float(seconds))

    async def expire(self) -> str:
        known = {lease.lease_id: name for name, lease in self.held.items()}
        return " ".join(known[lease_id] for lease_id in await self.store.expire())

    async def move(self, state: Any, *names: str) -> None:
        await self.store.move(list(names), state)

    async def drop_stale(self, below: str) -> int:
        return await self.store.drop_stale(int(below))

    async def run(self, name: str, delivery: Any, environments: str = "") -> str:
        wanted = [one for one in environments.split(",") if one]
        run = await self.store.create_run(
            name, batch_size=4, delivery=delivery, environments=wanted
        )
        return " ".join([run.state, run.delivery, ",".join(run.environments)]).strip()

    async def close(self, run: str) -> str:
        return (await self.store.close_run(run)).state

    async def rewind(self, run: str, checkpoint: str | None = None) -> str:
        return " ".join(await self.store.rewind(run, checkpoint))

    async def checkpoints(self, run: str) -> str:
        return " ".join(
            f"{one.name}={one.acked_groups}@{one.created_at:g}"
            for one in await self.store.checkpoints(run)
        )

    async def compact(self, **limits: str) -> str:
        done = await self.store.compact(**{key: float(value) for key, value in limits.items()})
        megabytes = f" {done.stored_bytes / 1e6:.3f} MB" if done.stored_bytes > 1e5 else ""
        return f"{done.groups} groups {done.leases} leases{megabytes}"

    # What is looked at

    async def counts(self) -> str:
        return _sums(await self.store.counts())

    async def depths(self) -> str:
        return _sums(dict(sorted((await self.store.depths()).items())))

    async def counters(self) -> str:
        found = dict(sorted((await self.store.counters()).items()))
        return _sums({"conflicting_puts": 0} | found, every=True)

    async def pending(self) -> str:
        return " ".join(ids(await self.store.pending()))

    async def kept(self) -> str:
        listed = (await self.store.list_groups(GroupQuery(), "", 1000)).groups
        return " ".join(ids(one.row for one in listed))

    async def existing(self, *names: str) -> str:
        return " ".join(sorted(await self.store.existing(list(names))))

    async def prefix(self, start: str) -> int:
        return await self.store.count_with_prefix(start)

    async def bodies(self, *names: str) -> str:
        return " ".join(body.decode() for body in await self.store.bodies(list(names)))

    async def rows(self, *names: str) -> str:
        return " ".join(
            f"{row.group_id}:{row.env}:{row.size}:{row.tokens}:{row.max_length}:"
            f"{row.policy_version}:{row.env_id}:{row.state}"
            for row in await self.store.rows(list(names))
        )


def _sums(found: Any, *, every: bool = False) -> str:
    shown = (f"{name}={count}" for name, count in found.items() if count or every)
    return " ".join(f'"{one}"' if " " in one else one for one in shown)


@pytest.mark.parametrize("title", STORIES)
@pytest.mark.parametrize("where", first_of("sqlite", "postgresql"), indirect=True)
async def test_a_store_does_what_its_stories_say(where: str, title: str) -> None:
    await Story(where).play(STORIES[title])


# What takes more than a line


@pytest.fixture
async def store(where: str) -> AsyncIterator[Store]:
    async with open_store(where) as opened:
        await opened.create_run("trainer", batch_size=4)
        yield opened


async def taken(store: Store, run: str = "trainer", **wanted: Any) -> Lease:
    lease = await store.lease(run, seconds=60, **wanted)
    assert lease is not None
    return lease


async def test_bodies_of_any_size_and_many_groups_come_back_as_they_were(store: Store) -> None:
    bodies = {"empty": b"", "compressible": b"token " * 50_000, "noise": noise(100_000)}
    bodies |= {f"group-{index}": str(index).encode() for index in range(1700)}
    puts = [group(name, body) for name, body in bodies.items()]
    assert all(await store.put(puts))
    assert not any(await store.put(puts))
    rows = await store.pending()
    assert ids(rows) == list(bodies)
    assert [row.seq for row in rows] == sorted(row.seq for row in rows)
    lease = await taken(store)
    assert ids(lease.groups) == list(bodies)
    assert await store.bodies(list(reversed(bodies))) == list(reversed(bodies.values()))
    await store.ack(lease.lease_id)
    counts = await store.counts()
    assert counts == {"buffered": 0, "queued": 0, "leased": 0, "acked": 1703, "dropped": 0}


async def test_neither_a_failing_put_nor_a_caller_that_gives_up_harms_others(store: Store) -> None:
    good = [store.put([group(f"good-{index}")]) for index in range(5)]
    bad = [
        store.put([group("half of a bad put"), group("\ud800")]),
        store.put([group("too-large-a-number", tokens=2**70)]),
        store.ack("no such lease"),
    ]
    results = await asyncio.gather(*good[:2], *bad, *good[2:], return_exceptions=True)
    errors = [InputError, InputError, NotFoundError]
    assert [type(result) for result in results] == [list, list, *errors, list, list, list]
    assert sorted(ids(await store.pending())) == [f"good-{index}" for index in range(5)]

    impatient = [asyncio.create_task(store.put([group(f"i{index}")])) for index in range(20)]
    patient = [asyncio.create_task(store.put([group(f"p{index}")])) for index in range(20)]
    await asyncio.sleep(0)
    for task in impatient:
        task.cancel()
    assert await asyncio.gather(*patient) == [[True]] * 20
    assert len(await store.existing([f"p{index}" for index in range(20)])) == 20
    assert (await store.counts())["queued"] == len(await store.pending())


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


async def test_runs_and_values_survive(where: str) -> None:
    async with open_store(where) as store:
        run = await store.create_run("one", batch_size=8, settings={"max_length": 2048})
        assert (run.policy_version, run.state) == (-1, "open")
        await store.create_run("two", batch_size=1)
        await store.set_run("one", policy_version=3, batch_size=16)
        await store.set_run("two", state="closed")
        await store.set_value("registration", {"uuid": 1, "envs": [{"name": "gsm8k"}]})
        await store.set_value("registration", {"uuid": 2, "envs": [None, 0.5, "é"]})
        with pytest.raises(InputError):
            await store.set_value("registration", object())
    async with open_store(where) as store:
        one, two = await store.list_runs()
        assert one == await store.get_run("one")
        assert await store.get_value("registration") == {"uuid": 2, "envs": [None, 0.5, "é"]}
    assert (one.batch_size, one.policy_version, one.settings) == (16, 3, {"max_length": 2048})
    assert (two.name, two.state) == ("two", "closed")


async def test_reasons_are_counted_but_not_without_end(store: Store) -> None:
    await store.put([group(f"g{n}") for n in range(70)])
    for n in range(70):
        lease = await taken(store, group_ids=[f"g{n}"])
        await store.nack(lease.lease_id, reason=f"reason {n} {'x' * 1000}")
    reasons = {name: n for name, n in (await store.counters()).items() if "nacked" in name}
    assert sum(reasons.values()) == 70
    assert (len(reasons), reasons["nacked: other"]) == (65, 6)
    assert max(map(len, reasons)) < 100


async def test_who_waits_is_woken(where: str) -> None:
    now = 1000.0

    async def woken(act: Any) -> bool:
        waiting = asyncio.create_task(store.wait_for_change(30))
        await asyncio.sleep(0)
        before = store.changes
        await act
        return await asyncio.wait_for(waiting, PATIENCE) == store.changes > before

    async with open_store(where, clock=lambda: now) as store:
        await store.create_run("trainer", batch_size=4)
        assert await woken(store.put([group("a"), group("b", state="buffered")]))
        assert await woken(store.move(["b"], "queued"))
        assert await woken(store.nack((await taken(store)).lease_id))
        lease = await taken(store)
        now += 100
        assert await woken(store.expire())
        await store.ack(lease.lease_id)
        assert await woken(store.rewind("trainer", None))
        seen = store.changes
        assert await store.wait_for_change(0.01) == seen  # nothing happens
        assert await woken(store.close_run("trainer"))
        # What came between looking and waiting is not missed.
        assert await store.wait_for_change(30, since=seen) == store.changes


async def test_a_store_that_is_closed_refuses(tmp_path: Path) -> None:
    async with open_store(tmp_path / "store.db") as store:
        waiting = asyncio.create_task(store.put([group("last")]))
        await asyncio.sleep(0)
    with pytest.raises(StoreError):
        await store.put([group("late")])
    # What was under way at the end was either stored or refused, and its caller was told which.
    [result] = await asyncio.gather(waiting, return_exceptions=True)
    async with open_store(tmp_path / "store.db") as store:
        assert await store.existing(["last"]) == ({"last"} if result == [True] else set())


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
            assert _sums(await store.counts()) == "queued=20000"
            assert await store.depths() == {"trainer": 20_000, "one": 5000}
            for wanted, found in (
                ({"max_groups": 2}, ["g1", "g2"]),
                ({"environments": ["env-0", "env-1"], "max_groups": 1}, ["g4"]),
                ({"min_version": 9, "max_groups": 1}, ["g18000"]),
            ):
                assert ids((await taken(store, **wanted)).groups) == found
            assert len((await taken(store, max_tokens=60_000)).groups) == 600
            lease = await taken(store, "one", max_groups=1)
            await store.extend(lease.lease_id, 60)
            await store.ack(lease.lease_id, checkpoint="one")
            await store.nack((await taken(store, max_groups=1)).lease_id)
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


def named(count: int) -> Iterable[str]:
    return (f"group-{index}" for index in range(count))


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
    async with open_store(where) as store:
        await store.put(list(map(group, named(100))))
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _OPENED_AND_KILLED, where)
    assert await process.wait() == 9
    async with open_store(where) as store:
        assert (await store.get_run("all")).state == "closed"
        await store.put([group("late")])
        await store.create_run("all", batch_size=1, delivery="broadcast")
        assert (await store.depths())["all"] == 101
        assert ids((await taken(store, "all")).groups) == [*named(100), "late"]
