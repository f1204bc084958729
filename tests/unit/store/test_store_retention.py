"""What retention removes, what it keeps, and what is still known afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from envserver_records.errors import ConflictError, NotFoundError
from sqlalchemy import Engine, event
from support.stores import group, ids, noise

from envserver.store import Compacted, Lease, Store, open_store
from envserver.store.listing import GroupQuery

HOUR = 3600.0


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


async def leased(store: Store, run: str = "trainer", max_groups: int | None = None) -> Lease:
    lease = await store.lease(run, max_groups=max_groups, seconds=60)
    assert lease is not None
    return lease


async def acked(
    store: Store, run: str = "trainer", count: int = 1, checkpoint: str | None = None
) -> list[str]:
    lease = await leased(store, run, count)
    await store.ack(lease.lease_id, checkpoint=checkpoint)
    return ids(lease.groups)


async def kept(store: Store) -> list[str]:
    return ids([one.row for one in (await store.list_groups(GroupQuery(), "", 1000)).groups])


async def test_of_what_is_gone_the_id_and_the_number_stay(where: str, clock: Clock) -> None:
    async with open_store(where, clock=clock) as store:
        await store.create_run("trainer", batch_size=4)
        await store.put([group(name, name.encode()) for name in "abcde"])
        await store.put([group("waits", state="buffered")])
        assert await acked(store, count=2) == ["a", "b"]
        await store.move(["c"], "dropped")
        await leased(store, max_groups=1)
        assert await store.compact() == Compacted(0, 0, 0)
        clock.now += 23 * HOUR
        assert await store.compact() == Compacted(0, 0, 0)
        clock.now += HOUR
        counts = await store.counts()
        # The acked lease goes with its groups; the one that is overdue has not expired yet.
        removed = await store.compact()
        assert (removed.groups, removed.leases) == (3, 1)
        assert await store.compact() == Compacted(0, 0, 0)
        assert await store.counts() == counts
    async with open_store(where, clock=clock) as store:
        assert await store.counts() == counts
        assert (await store.counters())["removed"] == 3
        assert await kept(store) == ["d", "e", "waits"]
        assert await store.existing(["a", "c", "never"]) == {"a", "c"}
        assert await store.count_with_prefix("") == 6
        assert await store.put([group("a", b"another"), group("f")]) == [False, True]
        assert await store.bodies(["d", "f"]) == [b"d", b"body"]
        for asked in (store.bodies(["d", "a"]), store.rows(["a"]), store.move(["c"], "dropped")):
            with pytest.raises(NotFoundError, match="no longer kept"):
                await asked
        lease = await leased(store)
        assert ids(lease.groups) == ["d", "e", "f"]


async def test_counts_are_the_same_when_they_are_counted_again(where: str, clock: Clock) -> None:
    with pytest.raises(RuntimeError):
        async with open_store(where, clock=clock) as store:
            await store.create_run("trainer", batch_size=4)
            await store.create_run("watcher", batch_size=4, delivery="broadcast")
            await store.put([group(f"g{n}", env=f"env-{n % 3}") for n in range(200)])
            await acked(store, count=150)
            await acked(store, "watcher", count=150)
            clock.now += 25 * HOUR
            removed = await store.compact()
            assert (removed.groups, removed.leases) == (150, 2)
            await leased(store, max_groups=10)
            counts, depths = await store.counts(), await store.depths()

            def refuse(_connection: object) -> None:
                raise RuntimeError("killed")

            # What the store writes down when it is closed does not get there.
            event.listen(Engine, "commit", refuse)
            try:
                raise RuntimeError("killed")
            finally:
                event.remove(Engine, "commit", refuse)
    async with open_store(where, clock=clock) as store:
        assert await store.counts() == counts
        assert await store.depths() == depths


async def test_every_run_must_have_had_it(store: Store, clock: Clock) -> None:
    await store.create_run("watcher", batch_size=4, delivery="broadcast")
    await store.put([group(name) for name in "abcd"])
    await acked(store, count=3)
    await acked(store, "watcher", count=1)
    clock.now += 25 * HOUR
    assert (await store.compact()).groups == 1
    assert await kept(store) == ["b", "c", "d"]
    await acked(store, "watcher", count=1)
    assert (await store.compact()).groups == 0  # the watcher had it just now
    clock.now += 25 * HOUR
    assert (await store.compact()).groups == 1
    # A run that is closed holds nothing up; open again, it gets what is still kept.
    await store.close_run("watcher")
    assert (await store.compact()).groups == 1
    await store.create_run("watcher", batch_size=4, delivery="broadcast")
    assert ids((await leased(store, "watcher")).groups) == ["d"]


async def test_a_shared_run_that_is_closed_loses_nothing(store: Store, clock: Clock) -> None:
    await store.create_run("watcher", batch_size=4, delivery="broadcast")
    await store.put([group(name) for name in "ab"])
    await acked(store, "watcher", count=2)
    await store.close_run("trainer")
    clock.now += 25 * HOUR
    assert (await store.compact()).groups == 0
    await store.create_run("trainer", batch_size=4)
    assert await acked(store, count=2) == ["a", "b"]


async def test_where_nobody_shares_the_broadcast_runs_decide(where: str, clock: Clock) -> None:
    async with open_store(where, clock=clock) as store:
        await store.put([group("before")])
        clock.now += 25 * HOUR
        assert (await store.compact()).groups == 0  # there is no run at all
        await store.create_run("watcher", batch_size=4, delivery="broadcast")
        await store.put([group("a"), group("b")])
        await acked(store, "watcher", count=2)
        clock.now += 25 * HOUR
        assert (await store.compact()).groups == 2
        assert await kept(store) == ["b"]
        counts = await store.counts()
        assert (counts["queued"], counts["dropped"]) == (1, 2)


async def test_a_run_can_always_go_back_to_its_two_newest_checkpoints(
    store: Store, clock: Clock
) -> None:
    await store.put([group(f"g{n}", noise(1000, n)) for n in range(10)])
    await acked(store, count=1)
    for name in ("one", "two", "three"):
        await acked(store, count=1)
        await acked(store, count=1, checkpoint=name)
    await acked(store, count=1)
    clock.now += 1000 * HOUR
    removed = await store.compact(max_gb=1e-9)
    assert removed.groups == 5  # up to and with checkpoint two
    assert await store.compact() == Compacted(0, 0, 0)
    with pytest.raises(ConflictError, match="no longer kept") as refused:
        await store.rewind("trainer", "one")
    assert refused.value.detail["possible"] == ["two", "three"]
    assert await store.rewind("trainer", "three") == ["g7"]
    assert await store.rewind("trainer", "two") == ["g5", "g6"]
    assert await acked(store, count=3) == ["g5", "g6", "g7"]
    assert await store.rewind("trainer", None) == ["g5", "g6", "g7"]  # all that is still kept


async def test_without_checkpoints_it_goes_back_as_far_as_groups_are_kept(
    store: Store, clock: Clock
) -> None:
    await store.put([group(name) for name in "abcd"])
    await acked(store, count=2)
    clock.now += 25 * HOUR
    await acked(store, count=1)
    assert (await store.compact()).groups == 2
    assert await store.rewind("trainer", None) == ["c"]
    assert ids((await leased(store)).groups) == ["c", "d"]


async def test_the_oldest_go_first_when_there_is_too_much(store: Store, clock: Clock) -> None:
    await store.put([group(f"g{n}", noise(1_000_000, n)) for n in range(6)])
    for _ in range(4):
        clock.now += 1
        await acked(store)
    assert await store.compact(max_gb=0.0065) == Compacted(0, 0, 0)
    removed = await store.compact(max_gb=0.0045)
    assert removed.groups == 2
    assert 2_000_000 <= removed.stored_bytes < 2_001_000
    assert await kept(store) == ["g2", "g3", "g4", "g5"]
    # What waits is never removed, whatever the limit.
    assert (await store.compact(max_gb=1e-9)).groups == 2
    assert await kept(store) == ["g4", "g5"]


async def test_space_is_used_again(where: str, clock: Clock) -> None:
    if where.startswith("postgresql"):
        pytest.skip("PostgreSQL: its autovacuum frees the space in its own time")
    sizes = []
    for turn in range(5):
        async with open_store(where, clock=clock) as store:
            await store.create_run("trainer", batch_size=4)
            await store.put([group(f"{turn}-{n}", noise(50_000, n)) for n in range(40)])
            await acked(store, count=40)
            clock.now += 25 * HOUR
            assert (await store.compact()).groups == 40
        sizes.append(Path(where).stat().st_size)
    assert sizes[-1] < sizes[0] + 200_000
