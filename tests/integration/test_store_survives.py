"""The store while everything around it fails: the table in docs/store.md, row by row.

What always holds: acknowledged groups are kept, nothing is delivered twice while a lease holds,
every refusal is a typed StoreError, and the event loop stays responsive. What PostgreSQL alone can
do to it is in test_store_database_gone.py.
"""

import asyncio
import contextlib
import importlib.util
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from envserver_records.errors import ConfigError, ConflictError, StoreError, StoreFull, StoreLost
from envserver_records.extras import install_command
from sqlalchemy import Engine, event
from support.cases import cases_of
from support.stores import group, ids, noise
from support.waiting import PATIENCE, settled, until

from envserver.store import Store, database, open_store
from envserver.store.database import SteadyClock

CASES = cases_of(__file__)

# Killed

_WRITER = CASES["writer"]


async def test_kill_9_loses_nothing_that_was_accepted(where: str) -> None:
    command = [sys.executable, "-c", _WRITER, where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        try:
            printed = [writer.stdout.readline()]
            with pytest.raises(ConflictError, match="open in another process"):
                async with open_store(where):
                    pass
            printed += [writer.stdout.readline() for _ in range(150)]
        finally:
            writer.kill()
        rest, _ = writer.communicate()
    said: dict[str, set[str]] = {"put": set(), "leased": set(), "acked": set()}
    for line in [*printed, *rest.splitlines(keepends=True)]:
        if "\n" in line:
            word, name = line.split()
            said[word].add(name)
    assert len(said["put"]) >= 50
    assert said["acked"]
    makers: dict[str, Any] = {"__name__": "writer"}
    exec(_WRITER, makers)
    async with open_store(where) as store:
        with pytest.raises(ConflictError):
            async with open_store(where):
                pass
        waiting = set(ids(await store.pending()))
        counts = await store.counts()
        # The kill may have cut off the answer of one lease; its group is leased then, not lost.
        assert len(said["put"] - waiting - said["leased"]) <= counts["leased"] <= 1
        assert not waiting & said["leased"]  # and so none that was acked
        there = [*waiting, *said["put"]]
        assert await store.bodies(there) == [makers["body"](name) for name in there]
        assert counts["queued"] == len(waiting)
        # A lease and an ack may have happened without their answer.
        assert len(said["acked"]) <= counts["acked"] <= len(said["acked"]) + 1
        assert await store.put([group("after")]) == [True]


# Full


def limit_pages(connection: Any, record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA max_page_count=64")
    cursor.close()


async def test_a_full_file_refuses_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    accepted: dict[str, bytes] = {}
    event.listen(Engine, "connect", limit_pages)
    try:
        async with open_store(path) as store:
            await store.create_run("trainer", batch_size=1)
            await store.put([group("first")])
            with pytest.raises(StoreFull):
                for index in range(100):
                    name, body = f"g{index}", noise(100_000, index)
                    await store.put([group(name, body)])
                    accepted[name] = body
            # A put that does not fit takes nothing with it: neither a part of itself nor others.
            lease, small, large, mixed = await asyncio.gather(
                store.lease("trainer", max_groups=1, seconds=60),
                store.put([group("small")]),
                store.put([group("large", noise(500_000))]),
                store.put([group("half"), group("other half", noise(500_000))]),
                return_exceptions=True,
            )
            assert (small, type(large), type(mixed)) == ([True], StoreFull, StoreFull)
            assert ids(lease.groups) == ["first"]  # type: ignore[union-attr]
            await store.ack(lease.lease_id)  # type: ignore[union-attr]
            counts = await store.counts()
            assert (counts["queued"], counts["acked"]) == (len(accepted) + 1, 1)
    finally:
        event.remove(Engine, "connect", limit_pages)
    async with open_store(path) as store:
        assert await store.counts() == counts
        assert ids(await store.pending()) == [*accepted, "small"]
        assert await store.bodies(list(accepted)) == list(accepted.values())
        assert await store.put([group("large", noise(500_000))]) == [True]


@pytest.mark.parametrize(
    ("program", "megabytes"),
    [
        pytest.param(CASES["fill"], 16, id="store"),
        pytest.param(CASES["drain"], 128, id="server", marks=pytest.mark.thorough),
    ],
)
def test_a_full_disk_refuses_is_drained_and_takes_groups_when_there_is_space(
    tmp_path: Path, program: str, megabytes: int
) -> None:
    mount = f"mount -t tmpfs -o size={megabytes}m tmpfs {tmp_path}"
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec"]
    if shutil.which("unshare") is None or subprocess.run([*inside, mount]).returncode:
        pytest.skip("A small disk: needs user namespaces that may mount tmpfs")
    done = subprocess.run(
        [*inside, f'{mount}; exec "$0" -c "$1" "$2"', sys.executable, program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "whole"


# Damaged, removed, locked


@pytest.mark.parametrize("body", [b"token " * 10_000, b"token " * 100, noise(10_000)])
async def test_a_damaged_body_is_said_to_be_damaged(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "store.db"
    harms = ["substr(body, 1, 20)", "CAST(body || 'x' AS BLOB)", "zeroblob(length(body))"]
    async with open_store(path) as store:
        await store.put([group(harm, body) for harm in harms])
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        for seq, harm in enumerate(harms, 1):
            connection.execute(f"UPDATE bodies SET body = {harm} WHERE seq = {seq}")
    async with open_store(path) as store:
        for harm in harms:
            with pytest.raises(StoreError, match="damaged"):
                await store.bodies([harm])
            # Who puts it again is told that it was stored, and others are not held up.
            other = store.put([group(f"beside {harm}")])
            assert await asyncio.gather(store.put([group(harm, body)]), other) == [[False], [True]]


async def test_a_corrupt_file_is_an_error_each_time_and_no_wrong_answer(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    bodies = {f"g{index}": noise(40_000, index) for index in range(40)}
    async with open_store(path) as store:
        await store.put([group(name, body) for name, body in bodies.items()])
    whole = path.read_bytes()
    with path.open("r+b") as file:
        for name in list(bodies)[10:20]:  # in the midst of what these have
            file.seek(whole.index(bodies[name][20_000:20_100]))
            file.write(noise(3_000))
    right = failed = 0
    async with open_store(path) as store:
        for name, body in bodies.items():
            try:
                right += await store.bodies([name]) == [body]
            except StoreError:
                failed += 1
    assert (right, failed) == (30, 10)


def rename(path: Path) -> None:
    path.rename(path.with_name("aside.db"))


def replace(path: Path) -> None:
    path.with_name("other.db").rename(path)


@pytest.mark.parametrize(
    ("ending", "harm", "what"),
    [
        ("", rename, "removed"),
        ("", replace, "replaced"),
        ("-wal", Path.unlink, "removed"),
        (".lock", Path.unlink, "removed"),
    ],
)
async def test_a_file_that_is_removed_or_replaced_ends_the_store(
    tmp_path: Path, ending: str, harm: Callable[[Path], None], what: str
) -> None:
    path, harmed = tmp_path / "store.db", tmp_path / f"store.db{ending}"
    async with open_store(tmp_path / "other.db") as other:
        await other.put([group("other")])

    async def serve() -> None:
        async with open_store(path) as store:
            await store.put([group(name) for name in "ab"])
            harm(harmed)
            with pytest.raises(StoreLost, match=f"{harmed.name} has been {what}"):
                await store.put([group("into nowhere")])
            with pytest.raises(StoreLost):
                await store.pending()
            await asyncio.Event().wait()  # the body is cancelled

    with pytest.raises(StoreLost, match=what):
        await asyncio.wait_for(serve(), PATIENCE)
    if harm is replace:
        return
    if harm is rename:
        # Who puts it back finds all that was acknowledged: the log was written into it at the end.
        path.with_name("aside.db").rename(path)
    async with open_store(path) as store:
        found = ids(await store.pending())
    assert found == ["a", "b"] if harm is rename else set(found) >= {"a", "b"}


async def test_another_program_that_keeps_the_file_locked_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.db"
    monkeypatch.setattr(database, "_BUSY_TIMEOUT_MS", 200)
    async with open_store(path) as store:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreError, match="locked"):
                await store.put([group("meanwhile")])
            assert await store.pending() == []
        assert await store.put([group("after")]) == [True]


# Time


async def test_a_lease_lasts_as_long_as_it_was_given_whatever_the_wall_says(where: str) -> None:
    wall, passed = 1_000_000.0, 50.0

    def opened() -> Any:
        return open_store(where, clock=SteadyClock(lambda: wall, lambda: passed))

    async def lease(store: Store) -> str:
        found = await store.lease("trainer", seconds=60)
        assert found is not None
        return found.lease_id

    async with opened() as store:
        await store.create_run("trainer", batch_size=1)
        await store.put([group("a")])
        first = await lease(store)
        wall += 100_000  # set forward, then far back
        assert await store.expire() == []
        wall -= 900_000
        passed += 59
        assert await store.expire() == []
        passed += 2
        assert await store.expire() == [first]
        again = await lease(store)
    # A restart with a wall clock that went back: time goes on from where it was.
    async with opened() as store:
        assert await store.expire() == []
        passed += 61
        assert await store.expire() == [again]
        await store.put([group("later")])
        times = [row.created_at for row in await store.pending()]
        assert times == sorted(times)
    wall += 2_000_000
    async with opened() as store:
        await store.put([group("wall")])
        assert (await store.rows(["wall"]))[0].created_at == pytest.approx(wall)


# Slow


@contextlib.contextmanager
def held_commits() -> Iterator[tuple[threading.Event, threading.Event]]:
    """Yields (reached, released): a commit of SQLite's sets the first and waits for the second.

    It waits in the thread that writes, and does not wait for ever: the event loop may be held up.
    """
    reached, released = threading.Event(), threading.Event()
    released.set()

    def hold(statement: str) -> None:
        if statement == "COMMIT":
            reached.set()
            released.wait(PATIENCE)

    def set_up(connection: Any, record: object) -> None:
        if isinstance(connection, sqlite3.Connection):  # only what writes is a plain one
            connection.set_trace_callback(hold)

    event.listen(Engine, "connect", set_up)
    try:
        yield reached, released
    finally:
        released.set()
        event.remove(Engine, "connect", set_up)


async def test_a_slow_disk_makes_callers_wait_but_not_the_loop(tmp_path: Path) -> None:
    names = [f"g{index}" for index in range(300)]
    with held_commits() as (reached, released):
        async with open_store(tmp_path / "store.db") as store:
            before = store.changes
            reached.clear()
            released.clear()
            first = asyncio.create_task(store.put([group("first")]))
            await until(reached.is_set)
            assert await store.pending() == []  # others read meanwhile
            puts = [asyncio.create_task(store.put([group(name)])) for name in names]
            await settled()
            assert not any(task.done() for task in (first, *puts))
            assert store.changes == before
            released.set()
            assert await asyncio.gather(first, *puts) == [[True]] * 301
            assert ids(await store.pending()) == ["first", *names]


async def test_more_readers_than_connections_wait_and_none_is_lost(where: str) -> None:
    async with open_store(where) as store:
        names = [f"g{index}" for index in range(20)]
        await store.put([group(name, noise(5_000, index)) for index, name in enumerate(names)])
        readers = [asyncio.create_task(store.bodies(names)) for _ in range(200)]
        await asyncio.sleep(0.01)
        for reader in readers[::2]:
            reader.cancel()  # callers that give up give their connections back
        assert all(len(result) == 20 for result in await asyncio.gather(*readers[1::2]))
        async with asyncio.timeout(PATIENCE):
            assert all(await asyncio.gather(*[store.pending() for _ in range(20)]))


# What it refuses to open


async def test_what_is_no_store_is_refused_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, others, newer = (tmp_path / name for name in ("notes.txt", "other.db", "store.db"))
    notes.write_text("dear diary\n" * 100)
    with contextlib.closing(sqlite3.connect(others)) as connection, connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    async with open_store(newer):
        pass
    with contextlib.closing(sqlite3.connect(newer)) as connection, connection:
        connection.execute("UPDATE schema_version SET version = 1000")
    before = [path.read_bytes() for path in (notes, others)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for place, words in (
        (notes, "not an SQLite database"),
        (others, "bookmarks"),
        (newer, "newer envserver"),
        (tmp_path, "folder"),
        (notes / "store.db", "folder"),
        ("/proc/nowhere/store.db", "folder"),
        ("mysql://localhost/groups", "mysql"),
        ("sqlite://", "in-memory"),
        ("postgresql://user:secret@localhost/groups", install_command("postgres")),
    ):
        with pytest.raises(ConfigError) as refused:
            async with open_store(place):
                pass
        assert words in str(refused.value)
    assert [path.read_bytes() for path in (notes, others)] == before
