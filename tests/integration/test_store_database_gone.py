"""What the store does while PostgreSQL is gone, silent, full or another's.

What holds is what test_store_survives.py says.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from envserver_records.errors import ConfigError, ConflictError, StoreError, StoreFull, StoreLost
from support.commands import free_port, running
from support.postgres import Postgres
from support.stores import group, ids, noise, patiently
from support.waiting import PATIENCE

from envserver.store import database, open_store

thorough = pytest.mark.thorough


@thorough
async def test_a_server_waits_for_a_database_that_is_started_after_it(
    postgres: Postgres, postgres_url: str, tmp_path: Path
) -> None:
    await asyncio.to_thread(postgres.stop)
    with pytest.raises(StoreError, match="Refused"):
        async with open_store(postgres_url, wait_seconds=0.3):  # no longer than that
            pass
    port = free_port()
    with running("run-api", "--store", postgres_url, "--port", port, folder=tmp_path) as server:
        await asyncio.to_thread(server.wait_for, "waiting_for_database.*Refused")
        await asyncio.to_thread(postgres.start)
        await asyncio.to_thread(server.wait_for, "Trainers and environments: ")
    await asyncio.to_thread(postgres.stop)
    with running("run-api", "--store", postgres_url, "--port", port, folder=tmp_path) as server:
        await asyncio.to_thread(server.wait_for, "waiting_for_database")
        server.send(signal.SIGTERM)
        assert server.end() == 128 + signal.SIGTERM  # it does not wait for the database first


@thorough
async def test_another_process_between_ends_this_one(postgres: Postgres, postgres_url: str) -> None:
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
        await asyncio.wait_for(serve(), PATIENCE)
    assert len(refused) == 1
    async with open_store(postgres_url) as third:
        assert ids(await third.pending()) == ["first's", "second's"]


@thorough
async def test_a_connection_that_hangs_is_given_up_and_the_lock_taken_again(
    postgres: Postgres, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "COMMAND_SECONDS", 3.0)
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
    `cuts`, and hangs up when it was understood."""

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


@thorough
async def test_a_commit_with_a_lost_answer_is_one(postgres: Postgres, postgres_url: str) -> None:
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


# While it goes on


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


async def test_a_halted_database_makes_callers_wait(postgres: Postgres, postgres_url: str) -> None:
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


async def test_postgresql_may_cut_the_connections(postgres_url: str) -> None:
    cut_others = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    connection = await asyncpg.connect(postgres_url)
    async with open_store(postgres_url) as store:
        await store.put([group("before")])
        await connection.execute(cut_others)
        results = await asyncio.gather(
            *[store.put([group(f"g{index}")]) for index in range(5)], return_exceptions=True
        )
        assert all(result == [True] or isinstance(result, StoreError) for result in results)
        await store.put([group("after")])
        assert (await store.counts())["queued"] == len(await store.pending())
        with pytest.raises(ConflictError):  # the lock came back with the connection
            async with open_store(postgres_url):
                pass
    await connection.close()


async def test_postgresql_tables_of_others_are_left_alone(postgres_url: str) -> None:
    connection = await asyncpg.connect(postgres_url)
    await connection.execute("CREATE TABLE bookmarks (url TEXT)")
    async with open_store(postgres_url) as store:
        assert await store.put([group("a")]) == [True]
    await connection.execute("DROP TABLE schema_version")
    with pytest.raises(ConfigError, match="another program"):
        async with open_store(postgres_url):
            pass
    assert await connection.fetchval("SELECT count(*) FROM groups") == 1
    await connection.close()
    with pytest.raises(StoreError) as unreachable:
        async with open_store("postgresql://someone:secret@127.0.0.1:1/none"):
            pass
    assert "secret" not in str(unreachable.value)
