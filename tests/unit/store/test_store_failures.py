"""The store while its database fails: the table in envserver/store/README.md, row by row.

What always holds: acknowledged groups are kept, nothing is delivered twice while a lease holds,
every refusal is a typed StoreError, and the event loop stays responsive.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from envserver_records.errors import StoreError, StoreFull, StoreLost
from sqlalchemy import Engine, event
from support.commands import free_port
from support.postgres import Postgres
from support.stores import group, ids, noise, patiently
from support.waiting import PATIENCE, settled, until

from envserver.store import Store, database, open_store
from envserver.store.clock import ForwardClock, SteadyClock

# Full


async def test_a_full_tablespace_refuses_and_goes_on(postgres: Postgres, postgres_url: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        try:
            stack.enter_context(postgres.small_disk(8))
        except PermissionError:
            pytest.skip("A small disk for PostgreSQL: needs a root that may mount tmpfs")
        stack.callback(postgres.emptied)
        store = await stack.enter_async_context(open_store(postgres_url))
        accepted: dict[str, bytes] = {}
        with pytest.raises(StoreFull):
            for index in range(200):
                name, body = f"g{index}", noise(100_000, index)
                await store.put([group(name, body)])
                accepted[name] = body
        assert accepted
        assert ids(await store.pending()) == list(accepted)
        assert await store.bodies(list(accepted)) == list(accepted.values())
        assert (await store.counts())["queued"] == len(accepted)
        postgres.execute("ALTER TABLE bodies SET TABLESPACE pg_default")
        assert await store.put([group("after", noise(100_000))]) == [True]


# SQLite's files


async def lost(store: Store, path: Path, what: str) -> None:
    with pytest.raises(StoreLost, match=f"{path.name} has been {what}"):
        await store.put([group("into nowhere")])
    with pytest.raises(StoreLost):
        await store.pending()
    await asyncio.Event().wait()  # the body is cancelled


async def serve_until_lost(path: Path, harm: Callable[[], object], harmed: Path, what: str) -> None:
    async def serve() -> None:
        async with open_store(path) as store:
            await store.put([group(name) for name in "ab"])
            harm()
            await lost(store, harmed, what)

    with pytest.raises(StoreLost, match=what):
        await asyncio.wait_for(serve(), PATIENCE)


async def test_a_file_that_is_removed_ends_the_store(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    aside = tmp_path / "aside.db"
    await serve_until_lost(path, lambda: path.rename(aside), path, "removed")
    # Who puts it back finds all that was acknowledged: the log was written into it at the end.
    aside.rename(path)
    async with open_store(path) as store:
        assert ids(await store.pending()) == ["a", "b"]


async def test_a_file_that_is_replaced_ends_the_store(tmp_path: Path) -> None:
    path, other = tmp_path / "store.db", tmp_path / "other.db"
    async with open_store(other) as store:
        await store.put([group("other")])
    await serve_until_lost(path, lambda: other.rename(path), path, "replaced")


@pytest.mark.slow
def test_a_server_whose_file_is_removed_ends_and_says_why(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    argv = ["run-api", "--store", str(path), "--server.port", str(free_port())]
    command = [str(Path(sys.executable).with_name("envserver")), *argv]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            assert "Trainers" in server.stderr.readline()
            path.unlink()
            _, said = server.communicate(timeout=PATIENCE)  # it looks for overdue leases by itself
        finally:
            server.kill()
    assert server.returncode == 1
    assert f"{path} has been removed" in said.splitlines()[-1]


@pytest.mark.parametrize("ending", ["-wal", ".lock"])
async def test_a_file_beside_it_that_is_removed_ends_the_store(tmp_path: Path, ending: str) -> None:
    path, harmed = tmp_path / "store.db", tmp_path / f"store.db{ending}"
    await serve_until_lost(path, harmed.unlink, harmed, "removed")
    async with open_store(path) as store:
        assert set(ids(await store.pending())) >= {"a", "b"}


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
                found = await store.bodies([name])
            except StoreError:
                failed += 1
            else:
                right += found == [body]
    assert (right, failed) == (30, 10)


async def test_another_program_that_keeps_the_file_locked_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_BUSY_TIMEOUT_MS", 200)
    path = tmp_path / "store.db"
    async with open_store(path) as store:
        await store.put([group("before")])
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreError, match="locked"):
                await store.put([group("meanwhile")])
            assert ids(await store.pending()) == ["before"]
    monkeypatch.setattr(database, "_BUSY_TIMEOUT_MS", 600_000)
    async with open_store(path) as store:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            waiting = asyncio.create_task(store.put([group("waiting")]))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            other.execute("ROLLBACK")
            assert await waiting == [True]
        assert ids(await store.pending()) == ["before", "waiting"]


# Time


async def test_a_lease_lasts_as_long_as_it_was_given_whatever_the_wall_says(where: str) -> None:
    wall, passed = 1_000_000.0, 50.0

    def steady() -> SteadyClock:
        return SteadyClock(lambda: wall, lambda: passed)

    async with open_store(where, clock=steady()) as store:
        await store.create_run("trainer", batch_size=1)
        await store.put([group("a")])
        lease = await store.lease("trainer", seconds=60)
        assert lease is not None
        wall += 100_000  # set forward, then far back
        assert await store.expire() == []
        wall -= 900_000
        passed += 59
        assert await store.expire() == []
        passed += 2
        assert await store.expire() == [lease.lease_id]
        again = await store.lease("trainer", seconds=60)
        assert again is not None
    # A restart with a wall clock that went back: time goes on from where it was.
    async with open_store(where, clock=steady()) as store:
        assert await store.expire() == []
        passed += 61
        assert await store.expire() == [again.lease_id]
        await store.put([group("later")])
        rows = await store.pending()
        assert [row.created_at for row in rows] == sorted(row.created_at for row in rows)
    wall += 2_000_000
    async with open_store(where, clock=steady()) as store:
        await store.put([group("wall")])
        assert (await store.rows(["wall"]))[0].created_at == pytest.approx(wall)


def test_time_never_goes_back() -> None:
    times = iter([10.0, 11.0, 5.0, 12.0])
    clock = ForwardClock(lambda: next(times), 20.0)  # the first is asked for at its making
    assert [clock() for _ in range(3)] == [21.0, 21.0, 22.0]


async def test_time_is_kept_while_the_store_works(tmp_path: Path) -> None:
    now = 1000.0
    async with open_store(tmp_path / "store.db", clock=lambda: now) as store:
        for now in (1000.0, 1030.0, 1035.0):
            await store.put([group(f"at {now}")])
        # As another process would find it had this one been killed now.
        with sqlite3.connect(tmp_path / "store.db") as connection:
            [(kept,)] = connection.execute("SELECT value FROM \"values\" WHERE key = 'store.time'")
        connection.close()
        assert float(kept) == 1030.0


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


async def test_a_database_that_stands_still_makes_callers_wait(
    postgres: Postgres, postgres_url: str
) -> None:
    async with open_store(postgres_url) as store:
        await store.put([group("before")])
        with postgres.paused():
            waiting = [asyncio.create_task(store.put([group(f"g{index}")])) for index in range(50)]
            reading = asyncio.create_task(store.pending())
            await asyncio.sleep(0.2)
            assert not any(task.done() for task in [*waiting, reading])
            assert (await store.counts())["queued"] == 1  # from memory
        assert all(result == [True] for result in await asyncio.gather(*waiting))
        assert "before" in ids(await reading)
        assert (await store.counts())["queued"] == 51


async def test_a_database_that_stands_still_does_not_keep_the_store_open(
    postgres: Postgres, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "COMMAND_SECONDS", 5.0)
    monkeypatch.setattr(database, "CLOSE_SECONDS", 0.5)
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_store(postgres_url))
        await store.put([group("before")])
        with postgres.paused():
            await asyncio.wait_for(stack.aclose(), PATIENCE)
    async with open_store(postgres_url) as store:
        assert ids(await store.pending()) == ["before"]


# More readers than connections


async def test_more_readers_than_connections_wait_and_none_is_lost(where: str) -> None:
    async with open_store(where) as store:
        names = [f"g{index}" for index in range(20)]
        await store.put([group(name, noise(5_000, index)) for index, name in enumerate(names)])
        readers = [asyncio.create_task(store.bodies(names)) for _ in range(200)]
        await asyncio.sleep(0.01)
        for reader in readers[::2]:
            reader.cancel()  # callers that give up give their connections back
        results = await asyncio.gather(*readers[1::2])
        assert all(len(result) == 20 for result in results)
        async with asyncio.timeout(PATIENCE):
            assert all(await asyncio.gather(*[store.pending() for _ in range(20)]))


async def test_postgresql_without_a_connection_left_refuses_reads_and_recovers(
    postgres: Postgres, postgres_url: str
) -> None:
    async with open_store(postgres_url) as store:
        await store.put([group("a")])
        others: list[Any] = []
        try:
            with contextlib.suppress(asyncpg.PostgresError):
                while True:
                    others.append(await asyncpg.connect(postgres_url))
            results = await asyncio.gather(
                *[store.pending() for _ in range(10)], return_exceptions=True
            )
            assert any(isinstance(result, StoreError) for result in results)
            assert await store.put([group("b")]) == [True]  # its connection is its own
        finally:
            for connection in others:
                await connection.close()
        assert ids(await patiently(store.pending)) == ["a", "b"]
