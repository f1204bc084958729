"""What the store does while its database fails: the table in envserver/store/README.md, row by row.

What holds throughout: what was acknowledged is there, nothing is delivered twice while a lease
holds, every refusal is a typed StoreError, and the event loop goes on.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy import Engine, event
from support.commands import free_port
from support.postgres import Postgres
from support.stores import group, ids, noise

from envserver.errors import StoreError, StoreFull, StoreLost
from envserver.store import Store, database, open_store
from envserver.store.clock import ForwardClock, SteadyClock
from envserver.store.reach import Reach, Unanswered

# The database is gone and comes back


class Load:
    """Producers and trainers that go on through failures; knows what they were promised."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.accepted: dict[str, bytes] = {}
        self.acked: list[str] = []
        self.failures: list[StoreError] = []
        self.stopping = False

    async def produce(self, producer: int) -> None:
        number = 0
        while not self.stopping:
            name, body = f"p{producer}-{number}", noise(2_000, number)
            if await self.asked(self.store.put([group(name, body)])) is not None:
                self.accepted[name] = body
                number += 1
            await asyncio.sleep(0.002)

    async def train(self) -> None:
        while not self.stopping:
            lease = await self.asked(self.store.lease("trainer", max_groups=3, seconds=3600))
            if lease is None:
                await asyncio.sleep(0.01)
                continue
            while await self.asked(self.acknowledge(lease.lease_id)) is None:
                await asyncio.sleep(0.02)
            self.acked += ids(lease.groups)

    async def acknowledge(self, lease_id: str) -> bool:
        await self.store.ack(lease_id)
        return True

    async def asked(self, request: Awaitable[Any]) -> Any:
        """Its answer; None and a pause when the store failed."""
        try:
            return await request
        except StoreLost:
            raise
        except StoreError as error:
            self.failures.append(error)
            await asyncio.sleep(0.02)
            return None

    async def settle(self) -> None:
        """What a lost answer left leased comes back, and is delivered to the end."""
        await self.store.expire(time.time() + 10_000)
        while lease := await self.store.lease("trainer", max_groups=100, seconds=3600):
            await self.store.ack(lease.lease_id)
            self.acked += ids(lease.groups)

    async def check(self) -> None:
        assert set(self.accepted) <= set(self.acked)
        twice = [name for name, times in collections.Counter(self.acked).items() if times > 1]
        assert not twice
        assert await self.store.bodies(list(self.accepted)) == list(self.accepted.values())
        counts = await self.store.counts()
        assert (counts["acked"], counts["queued"], counts["leased"]) == (len(self.acked), 0, 0)


@contextlib.asynccontextmanager
async def under_load(store: Store) -> Any:
    load = Load(store)
    async with asyncio.TaskGroup() as tasks:
        for producer in range(4):
            tasks.create_task(load.produce(producer))
        for _ in range(2):
            tasks.create_task(load.train())
        yield load
        load.stopping = True


async def has_grown(load: Load, by: int = 30) -> None:
    before = len(load.accepted), len(load.acked)
    async with asyncio.timeout(60):
        while len(load.accepted) < before[0] + by or len(load.acked) < before[1] + by:
            await asyncio.sleep(0.02)


async def kills(postgres: Postgres, store: Store, times: int) -> None:
    await store.create_run("trainer", batch_size=1)
    async with under_load(store) as load:
        for _ in range(times):
            await has_grown(load)
            known = len(load.failures)
            await asyncio.to_thread(postgres.kill)
            async with asyncio.timeout(60):
                while len(load.failures) < known + 10:
                    await asyncio.sleep(0.02)
            await asyncio.to_thread(postgres.start)
        await has_grown(load)
    await load.settle()
    await load.check()


async def test_a_database_that_is_killed_comes_back(postgres: Postgres, postgres_url: str) -> None:
    async with open_store(postgres_url) as store:
        await kills(postgres, store, 1)
        with pytest.raises(StoreError, match="open in another process"):
            await refused_as_open(postgres_url)


async def refused_as_open(where: str) -> None:
    try:
        async with open_store(where):
            pass
    except Exception as error:
        raise StoreError(str(error)) from error


@pytest.mark.slow
async def test_a_database_may_be_killed_many_times(postgres: Postgres, postgres_url: str) -> None:
    async with open_store(postgres_url) as store:
        await kills(postgres, store, 12)


async def test_another_process_that_came_between_ends_this_one(
    postgres: Postgres, postgres_url: str
) -> None:
    refused: list[Exception] = []

    async def serve() -> None:
        async with open_store(postgres_url) as first:
            await first.put([group("first's")])
            await asyncio.to_thread(postgres.kill)
            with pytest.raises(StoreError):
                await first.put([group("while it is gone")])
            await asyncio.to_thread(postgres.start)
            # As from another machine: nothing in this process knows of it.
            async with open_store(postgres_url) as second:
                assert ids(await second.pending()) == ["first's"]
                await second.put([group("second's")])
                try:
                    await patiently(lambda: first.put([group("too late")]))
                except StoreLost as error:
                    refused.append(error)
                await asyncio.sleep(60)  # the body is cancelled

    with pytest.raises(StoreLost, match="Another process"):
        await asyncio.wait_for(serve(), 50)
    assert len(refused) == 1
    async with open_store(postgres_url) as third:
        assert ids(await third.pending()) == ["first's", "second's"]


async def patiently(ask: Callable[[], Awaitable[Any]]) -> Any:
    """What it answers once the database is there again."""
    async with asyncio.timeout(40):
        while True:
            try:
                return await ask()
            except StoreLost:
                raise
            except StoreError:
                await asyncio.sleep(0.1)


async def test_a_connection_that_hangs_is_given_up_and_the_lock_taken_again(
    postgres: Postgres, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "COMMAND_SECONDS", 1.0)
    async with open_store(postgres_url) as store:
        await store.put([group("before")])
        watcher = await asyncpg.connect(postgres_url)
        held = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted"
        pid = await watcher.fetchval(held)
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(StoreError):
                await store.put([group("hanging")])
            with pytest.raises(StoreError):  # our own old connection has the lock: no other process
                await asyncio.sleep(0.3)
                await store.put([group("still hanging")])
        finally:
            os.kill(pid, signal.SIGCONT)
        await patiently(lambda: store.put([group("after")]))
        assert await watcher.fetchval(held) not in (None, pid)
        await watcher.close()
        assert {"before", "after"} <= set(ids(await store.pending()))
        assert (await store.counts())["queued"] == len(await store.pending())


@contextlib.asynccontextmanager
async def cut_after(word: bytes, port: int, cuts: list[bytes]) -> AsyncIterator[int]:
    """A port that leads to `port`; says nothing after `word` was sent there, once for each of
    `cuts`, and hangs up when it was understood.
    """

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        back = asyncio.create_task(copy(far_reader, writer))
        while data := await reader.read(65_536):
            if cuts and word in data:
                cuts.pop()
                back.cancel()
                await asyncio.wait([back])
                far_writer.write(data)
                await far_reader.read(100)  # it is done
                break
            far_writer.write(data)
        back.cancel()
        far_writer.close()
        writer.close()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_a_commit_whose_answer_is_lost_has_happened_once(
    postgres: Postgres, postgres_url: str
) -> None:
    cuts: list[bytes] = []
    async with (
        cut_after(b"COMMIT;", postgres.port, cuts) as port,
        open_store(postgres_url.replace(f":{postgres.port}/", f":{port}/")) as store,
    ):
        await store.create_run("trainer", batch_size=1)
        await store.put([group("a"), group("b")])
        cuts.append(b"put")
        with pytest.raises(StoreError):
            await store.put([group("c")])
        assert await patiently(lambda: store.put([group("c")])) == [False]  # it is there
        cuts.append(b"lease")
        with pytest.raises(StoreError):
            await store.lease("trainer", max_groups=1, seconds=60)
        lease = await patiently(lambda: store.lease("trainer", max_groups=1, seconds=60))
        assert ids(lease.groups) == ["b"]  # "a" is leased by whoever did not hear of it
        cuts.append(b"ack")
        with pytest.raises(StoreError):
            await store.ack(lease.lease_id)
        await patiently(lambda: store.ack(lease.lease_id))
        assert not cuts
        counts = await store.counts()
        assert (counts["queued"], counts["leased"], counts["acked"]) == (1, 1, 1)
        assert len(await store.expire(time.time() + 100)) == 1
        assert ids(await store.pending()) == ["a", "c"]


def test_tries_are_further_and_further_apart() -> None:
    now = 0.0
    reach = Reach(lambda: now)
    waits = []
    for _ in range(8):
        reach.check()
        reach.failed(Unanswered("gone"))
        with pytest.raises(StoreError, match="tried again"):
            reach.check()
        begin = now
        while True:
            now += 0.01
            with contextlib.suppress(StoreError):
                reach.check()
                break
        waits.append(round(now - begin, 1))
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    reach.worked()
    reach.failed(Unanswered("gone"))
    now += 0.11
    reach.check()


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
    await asyncio.sleep(60)  # the body is cancelled


async def serve_until_lost(path: Path, harm: Callable[[], object], harmed: Path, what: str) -> None:
    async def serve() -> None:
        async with open_store(path) as store:
            await store.put([group(name) for name in "ab"])
            harm()
            await lost(store, harmed, what)

    with pytest.raises(StoreLost, match=what):
        await asyncio.wait_for(serve(), 30)


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
            _, said = server.communicate(timeout=60)  # it looks for overdue leases by itself
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
            waiting = asyncio.create_task(store.put([group("waiting")]))
            await asyncio.sleep(0.05)
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
def slow_commits(seconds: float) -> Any:
    """Every commit of SQLite's takes so long, in the thread that works for the connection."""

    def slow(statement: str) -> None:
        if statement == "COMMIT":
            time.sleep(seconds)

    def set_up(connection: Any, record: object) -> None:
        connection.driver_connection._conn.set_trace_callback(slow)

    event.listen(Engine, "connect", set_up)
    try:
        yield
    finally:
        event.remove(Engine, "connect", set_up)


async def test_a_slow_disk_makes_callers_wait_but_not_the_loop(tmp_path: Path) -> None:
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.005)
            turns += 1

    with slow_commits(0.3):
        async with open_store(tmp_path / "store.db") as store:
            beside = asyncio.create_task(turn())
            before = store.changes
            names = [f"g{index}" for index in range(300)]
            first = asyncio.create_task(store.put([group("first")]))
            await asyncio.sleep(0.05)
            assert not first.done()
            assert await store.pending() == []  # others read meanwhile
            assert store.changes == before
            puts = [store.put([group(name)]) for name in names]
            assert all(result == [True] for result in await asyncio.gather(*puts))
            assert await first == [True]
            beside.cancel()
            # Two commits of 0.3 s: a loop that they hold up turns a few times only.
            assert turns >= 15
            assert ids(await store.pending()) == ["first", *names]


async def test_a_database_that_stands_still_makes_callers_wait(
    postgres: Postgres, postgres_url: str
) -> None:
    async with open_store(postgres_url) as store:
        await store.put([group("before")])
        with postgres.paused():
            waiting = [asyncio.create_task(store.put([group(f"g{index}")])) for index in range(50)]
            reading = asyncio.create_task(store.pending())
            await asyncio.sleep(0.5)
            assert not any(task.done() for task in [*waiting, reading])
            assert (await store.counts())["queued"] == 1  # from memory
        assert all(result == [True] for result in await asyncio.gather(*waiting))
        assert "before" in ids(await reading)
        assert (await store.counts())["queued"] == 51


async def test_a_database_that_stands_still_does_not_keep_the_store_open(
    postgres: Postgres, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("COMMAND_SECONDS", "CLOSE_SECONDS"):
        monkeypatch.setattr(database, name, 0.5)
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_store(postgres_url))
        await store.put([group("before")])
        with postgres.paused():
            await asyncio.wait_for(stack.aclose(), 40)
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
        async with asyncio.timeout(20):
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
