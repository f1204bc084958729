"""What the store keeps when everything around it fails, and what it refuses to open."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from envserver_records.errors import ConfigError, ConflictError, StoreError, StoreFull
from envserver_records.extras import install_command
from sqlalchemy import Engine, event
from support.stores import group, ids, noise
from support.waiting import PATIENCE

from envserver.store import open_store


async def test_one_process_at_a_time(where: str, tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _WRITER, where, "1"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline()
        with pytest.raises(ConflictError, match="open in another process"):
            async with open_store(where):
                pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    async with open_store(where) as store:
        assert (await store.counts())["queued"] >= 1
        with pytest.raises(ConflictError):
            async with open_store(where):
                pass


_WRITER = textwrap.dedent(
    """
    import asyncio, hashlib, sys
    from envserver.store import GroupPut, open_store

    def body(name):
        return hashlib.shake_128(name.encode()).digest(20_000) + name.encode() * 2_000

    async def write(store, writer):
        for index in range(100_000):
            name = f"w{writer}-{index}"
            await store.put([GroupPut(group_id=name, env="e", format="group", body=body(name),
                                      size=1, tokens=1, max_length=1)])
            print("put", name, flush=True)

    async def train(store):
        await store.create_run("trainer", batch_size=1)
        while True:
            lease = await store.lease("trainer", max_groups=1, seconds=3600)
            if lease is not None:
                print("leased", lease.groups[0].group_id, flush=True)
                await store.ack(lease.lease_id)
                print("acked", lease.groups[0].group_id, flush=True)
            await asyncio.sleep(0.005)

    async def main():
        async with open_store(sys.argv[1]) as store:
            writers = [write(store, writer) for writer in range(int(sys.argv[2]))]
            await asyncio.gather(train(store), *writers)

    if __name__ == "__main__":
        asyncio.run(main())
    """
)


async def test_kill_9_loses_nothing_that_was_accepted(where: str) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, where, "6"], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    said: dict[str, set[str]] = {"put": set(), "leased": set(), "acked": set()}
    printed = [writer.stdout.readline() for _ in range(300)]
    writer.send_signal(signal.SIGKILL)
    rest, _ = writer.communicate()
    for line in [*printed, *rest.splitlines(keepends=True)]:
        if "\n" in line:
            word, name = line.split()
            said[word].add(name)
    assert len(said["put"]) >= 100
    assert said["acked"]

    makers: dict[str, Any] = {"__name__": "writer"}
    exec(_WRITER, makers)
    async with open_store(where) as store:
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


async def test_a_closed_store_refuses(tmp_path: Path) -> None:
    async with open_store(tmp_path / "store.db") as store:
        waiting = asyncio.create_task(store.put([group("last")]))
        await asyncio.sleep(0)
    with pytest.raises(StoreError):
        await store.put([group("late")])
    # What was under way at the end was either stored or refused, and its caller was told which.
    [result] = await asyncio.gather(waiting, return_exceptions=True)
    async with open_store(tmp_path / "store.db") as store:
        assert await store.existing(["last"]) == ({"last"} if result == [True] else set())


@contextmanager
def at_most_pages(pages: int) -> Iterator[None]:
    """Every SQLite file opened meanwhile is full at so many pages."""

    def limit(connection: Any, record: object) -> None:
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA max_page_count={pages}")
        cursor.close()

    event.listen(Engine, "connect", limit)
    try:
        yield
    finally:
        event.remove(Engine, "connect", limit)


async def test_a_full_file_refuses_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    accepted: dict[str, bytes] = {}
    with at_most_pages(64):
        async with open_store(path) as store:
            await store.create_run("trainer", batch_size=1)
            await store.put([group("first")])
            for index in range(100):
                name, body = f"g{index}", noise(100_000, index)
                try:
                    await store.put([group(name, body)])
                except StoreFull:
                    break
                accepted[name] = body
            else:
                pytest.fail("it never got full")
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
    async with open_store(path) as store:
        assert await store.counts() == counts
        assert ids(await store.pending()) == [*accepted, "small"]
        assert await store.bodies(list(accepted)) == list(accepted.values())
        assert await store.put([group("large", noise(500_000))]) == [True]


_FILL = textwrap.dedent(
    """
    import asyncio, os, sys
    from pathlib import Path
    from envserver_records.errors import StoreFull
    from envserver.store import GroupPut, open_store

    def group(name):
        return GroupPut(group_id=name, env="e", format="group", body=os.urandom(50_000),
                        size=1, tokens=1, max_length=1)

    async def fill(store, accepted):
        for index in range(1_000):
            bodies = [group(f"g{index}-{part}") for part in range(4)]
            results = await asyncio.gather(*[store.put([one]) for one in bodies],
                                           return_exceptions=True)
            accepted |= {one.group_id: one.body
                         for one, result in zip(bodies, results) if result == [True]}
            wrong = [r for r in results if r != [True] and not isinstance(r, StoreFull)]
            assert not wrong, wrong
            if any(isinstance(result, StoreFull) for result in results):
                return
        raise AssertionError("the disk never got full")

    async def check(store, accepted):
        names = [row.group_id for row in await store.pending()]
        assert set(names) == set(accepted), (len(names), len(accepted))
        assert await store.bodies(names) == [accepted[name] for name in names]
        assert (await store.counts())["queued"] == len(accepted)

    async def main(folder):
        ballast = folder / "ballast"
        ballast.write_bytes(bytes(4_000_000))
        accepted = {}
        async with open_store(folder / "store.db") as store:
            await fill(store, accepted)
            await check(store, accepted)
            ballast.unlink()
            later = group("later")
            assert await store.put([later]) == [True]
            accepted["later"] = later.body
        async with open_store(folder / "store.db") as store:
            await check(store, accepted)
        print("whole", len(accepted))

    asyncio.run(main(Path(sys.argv[1])))
    """
)


def test_a_full_disk_refuses_and_goes_on_when_there_is_space(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=16m tmpfs {disk}"
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec"]
    if shutil.which("unshare") is None or subprocess.run([*inside, mount]).returncode:
        pytest.skip("A small disk: needs user namespaces that may mount tmpfs")
    done = subprocess.run(
        [*inside, f'{mount}; exec "$0" -c "$1" "$2"', sys.executable, _FILL, str(disk)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("whole ")


@pytest.mark.parametrize("body", [b"token " * 10_000, b"token " * 100, noise(10_000)])
@pytest.mark.parametrize(
    "harm", ["substr(body, 1, 20)", "CAST(body || 'x' AS BLOB)", "zeroblob(length(body))"]
)
async def test_a_damaged_body_is_said_to_be_damaged(tmp_path: Path, body: bytes, harm: str) -> None:
    path = tmp_path / "store.db"
    async with open_store(path) as store:
        await store.put([group("a", body)])
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE bodies SET body = {harm}")
    connection.close()
    async with open_store(path) as store:
        with pytest.raises(StoreError, match="damaged"):
            await store.bodies(["a"])
        # Who puts it again is told that it was stored, and others are not held up.
        both = await asyncio.gather(store.put([group("a", body)]), store.put([group("b")]))
        assert both == [[False], [True]]


# What it refuses to open


async def refusal(where: str | Path) -> str:
    with pytest.raises(ConfigError) as refused:
        async with open_store(where):
            pass
    return str(refused.value)


async def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary\n" * 100)
    assert "not an SQLite database" in await refusal(path)
    assert path.read_text() == "dear diary\n" * 100


async def test_a_database_of_another_program_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.close()
    before = path.read_bytes()
    assert "bookmarks" in await refusal(path)
    assert path.read_bytes() == before


async def test_a_store_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with open_store(path):
        pass
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE schema_version SET version = 1000")
    connection.close()
    assert "newer envserver" in await refusal(path)


async def test_places_where_no_store_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    assert "folder" in await refusal(tmp_path)
    assert "folder" in await refusal(tmp_path / "file" / "store.db")
    assert "folder" in await refusal("/proc/nowhere/store.db")
    assert "mysql" in await refusal("mysql://localhost/groups")
    assert "in-memory" in await refusal("sqlite://")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert install_command("postgres") in await refusal("postgresql://user:secret@localhost/groups")


async def test_urls_and_paths_name_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with open_store("data/store.db") as store:
        await store.put([group("a")])
    for same in ("sqlite:///data/store.db", f"sqlite:///{tmp_path}/data/store.db"):
        async with open_store(same) as store:
            assert ids(await store.pending()) == ["a"]


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
    assert "another program" in await refusal(postgres_url)
    assert await connection.fetchval("SELECT count(*) FROM groups") == 1
    await connection.close()
    with pytest.raises(StoreError) as unreachable:
        async with open_store("postgresql://someone:secret@127.0.0.1:1/none"):
            pass
    assert "secret" not in str(unreachable.value)
