"""The parts that decide about a replica, without a network: its breaker, its slots, its limit."""

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.extent import examples
from support.raw_server import RawServer, head, raw_server
from support.waiting import until

from envserver.models.connections import watchful_socket
from envserver.models.http_client import BrokenOff, HttpPool, NoConnection, Response, origin_of
from envserver.models.replicas import FLOOR, Load, Replica, ReplicaRequest, Slots, read_load

calm = settings(deadline=None, max_examples=examples(60))

# The breaker


def test_calls_that_began_before_a_replica_was_set_aside_do_not_bring_it_back() -> None:
    now = 0.0
    replica = Replica("http://a", 1, lambda: now)
    with ReplicaRequest(replica) as old:
        old.sent()
        now = 1.0
        replica.refused("down")
        now = 1.6
        old.answered()
        assert replica.state == "half_open"
        old.failed("gone")
        assert replica.state == "half_open"
    with ReplicaRequest(replica) as new:
        new.sent()
        new.failed("gone")
    assert replica.state == "open"


@pytest.mark.parametrize(
    ("waited", "heard", "counts"), [(10.0, False, True), (10.0, True, False), (1.0, False, False)]
)
def test_timeouts_count_where_nobody_is_answered(waited: float, heard: bool, counts: bool) -> None:
    now = 0.0
    replica = Replica("http://a", 1, lambda: now)
    for _ in range(8):
        with ReplicaRequest(replica) as request:
            request.sent()
            now += waited / 10
            if heard:
                replica.heard()
            now += waited
            request.timed_out()
        now -= waited
    assert (replica.state != "closed") is counts


EVENTS = st.sampled_from(["begin", "good", "bad", "refused", "silent", "well", "unwell", "wait"])


@calm
@given(st.lists(st.tuples(EVENTS, st.floats(0, 40)), max_size=80))
def test_a_breaker_opens_tries_one_call_and_closes(events: list[tuple[str, float]]) -> None:
    now = 0.0
    replica = Replica("http://a", 1, lambda: now)
    calls: list[ReplicaRequest] = []
    for event, number in events:
        if event == "wait":
            now += number
        elif event == "begin" and replica.usable:
            calls.append(ReplicaRequest(replica).__enter__())
        elif event in ("well", "unwell"):
            replica.checked(event == "well", "asked")
        elif calls:
            request = calls.pop(int(number) % len(calls))
            if event == "good":
                replica.answered(request.begun_at)
            elif event == "bad":
                replica.failed(request.begun_at, "bad")
            elif event == "refused":
                replica.refused("no connection")
            request.__exit__()
        trying = sum(request._tries for request in calls)
        assert replica.usable == (
            replica.state == "closed" or (replica.state == "half_open" and not trying)
        )
        assert replica.aside_until <= now + 30
        assert bool(replica.reason) == (replica.state != "closed")
        if event == "unwell":
            assert replica.state == "open"
    # Whatever it went through, a replica that is well again is used again.
    replica.checked(True)
    for request in calls:
        request.__exit__()
    now += 31
    assert replica.usable
    with ReplicaRequest(replica):
        replica.answered(now)
    assert replica.state == "closed"


# Slots


STEPS = st.sampled_from(["enter", "leave", "cancel", "resize", "turn"])


# Cancelled when its slot was just given to it.
@example(1, [("enter", 0), ("enter", 0), ("leave", 0), ("enter", 0), ("cancel", 1)])
@calm
@given(st.integers(1, 3), st.lists(st.tuples(STEPS, st.integers(0, 7)), min_size=10, max_size=40))
def test_never_too_many_calls_and_no_slot_lost(limit: int, steps: list[tuple[str, int]]) -> None:
    async def work() -> None:
        slots = Slots(limit)
        order: list[int] = []
        ended: list[int] = []
        ends: list[asyncio.Event] = []
        open_tasks: list[asyncio.Task[None]] = []
        tasks: list[asyncio.Task[None]] = []

        async def use(number: int) -> None:
            async with slots:
                # A call with a slot may begin a turn of the loop later than another with one.
                assert not any(other > number for other in ended), "whoever came first"
                order.append(number)
                await ends[number].wait()
            ended.append(number)

        for step, number in steps:
            if step == "enter":
                ends.append(asyncio.Event())
                tasks.append(asyncio.create_task(use(len(tasks))))
                open_tasks.append(tasks[-1])
                await asyncio.sleep(0)
            elif step == "leave" and order:
                ends[order[number % len(order)]].set()
            elif step == "cancel" and open_tasks:
                open_tasks.pop(number % len(open_tasks)).cancel()
            elif step == "resize":
                before = slots.used
                slots.resize(number % 4 + 1)
                assert slots.used <= max(before, slots.limit)
            elif step == "turn":
                await asyncio.sleep(0)
            assert not slots.waiting or slots.rounds
        for end in ends:
            end.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(got, asyncio.CancelledError | None) for got in results)
        assert (slots.used, slots.waiting) == (0, 0)
        assert len(order) == len(set(order))

    asyncio.run(work())


# Calls in flight


LOADS = st.builds(
    Load,
    running=st.integers(0, 1000),
    waiting=st.integers(0, 50),
    preempted=st.integers(0, 10),
    cache=st.floats(0, 1),
)


@calm
@given(st.integers(1, 2000), st.lists(st.tuples(LOADS, st.integers(0, 3000)), max_size=60))
def test_the_limit_keeps_its_bounds(most: int, polls: list[tuple[Load, int]]) -> None:
    slots = Slots(most)
    assert slots.limit == most
    for load, slots.used in polls:
        before = slots.limit
        slots.observe(load)
        assert min(FLOOR, most) <= slots.limit <= most
        if load.waiting:
            assert slots.limit <= before
    slots.observe(None)
    assert slots.limit == most


def test_vllm_and_sglang_say_how_loaded_they_are() -> None:
    vllm, sglang = (
        Path(__file__).with_name(f"{name}_metrics.txt").read_text() for name in ("vllm", "sglang")
    )
    assert read_load(vllm) == Load(running=7, waiting=2, preempted=10, cache=0.5)
    assert read_load(sglang) == Load(running=5, waiting=1, cache=0.75)
    assert read_load("python_gc_objects_collected_total 1\n") is None


# Connections


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux has them all")
def test_a_peer_that_is_gone_is_noticed_within_minutes() -> None:
    with watchful_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 80))) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle = made.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        between = made.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
        assert idle + made.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) * between <= 120
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 120_000


# The HTTP client of engines: connections that are kept, that end, and whose reader is slow

LARGE = 32_000_000


async def resolve(host: str, port: int) -> list[Any]:
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)


@asynccontextmanager
async def server_and_pool() -> AsyncIterator[tuple[RawServer, HttpPool]]:
    async with raw_server() as raw:
        pool = HttpPool(resolve, watchful_socket)
        yield raw, pool
        pool.close()
        await until(lambda: not raw.connections)


async def ask(pool: HttpPool, raw: RawServer, method: str = "POST") -> Response:
    payload = b"{}" if method == "POST" else None
    return await pool.send(origin_of(raw.url), method, "/x", b"", payload)


async def read(response: Response) -> bytes:
    parts = []
    while part := await response.read():
        parts.append(part)
    response.release()
    return b"".join(parts)


HI = head("text/plain", 2) + b"hi"
NO = head("text/plain", 2) + b"no"


@pytest.mark.parametrize(
    ("answer", "body", "kept"),
    [
        (HI, b"hi", True),
        (HI + b"\0", b"hi", False),  # what follows an answer does not change it
        (HI + NO, b"hi", False),
        (b"HTTP/1.1 101 Else\r\n\r\n", b"", False),
    ],
)
async def test_whole_answers_keep_connections(answer: bytes, body: bytes, kept: bool) -> None:
    async with server_and_pool() as (raw, pool):
        raw.pieces, raw.end = [answer], "keep"
        for count in (1, 2, 3):
            assert await read(await ask(pool, raw)) == body
            assert raw.accepted == (1 if kept else count)
        accepted = raw.accepted
        raw.pieces = [head("text/plain", 4), b"hi"]
        (await ask(pool, raw)).release()
        raw.pieces = [HI]
        assert await read(await ask(pool, raw)) == b"hi"
        assert raw.accepted == accepted + (1 if kept else 2)


async def test_a_get_on_a_connection_that_has_ended_is_sent_again_and_a_post_is_not() -> None:
    async with server_and_pool() as (raw, pool):
        raw.pieces, raw.end = [HI], "keep"
        await read(await ask(pool, raw))
        # It answers once more, and then ends: with nothing.
        raw.pieces, raw.end = [], "close"
        with pytest.raises(BrokenOff):
            await ask(pool, raw)
        raw.pieces, raw.end = [HI], "keep"
        await read(await ask(pool, raw))
        raw.pieces, raw.end = [], "close"
        asking = asyncio.create_task(ask(pool, raw, "GET"))
        await until(lambda: raw.accepted == 3)
        with pytest.raises(BrokenOff):
            await asking


async def test_a_peer_waits_for_a_slow_reader() -> None:
    async with server_and_pool() as (raw, pool):
        raw.pieces, raw.end = [head("text/plain", LARGE), bytes(LARGE)], "keep"
        response = await ask(pool, raw)
        await asyncio.sleep(0.2)
        first = len(await response.read())
        assert first < LARGE / 10
        assert first + len(await read(response)) == LARGE
        assert raw.accepted == 1 and response.complete


@pytest.mark.parametrize("late", ["answer", "end"])
async def test_a_kept_connection_on_which_something_came_is_not_used(late: str) -> None:
    async with server_and_pool() as (raw, pool):
        raw.pieces, raw.end = [HI], "keep"
        await read(await ask(pool, raw))
        (writer,) = raw.connections
        # It is there before the next request, and the client's loop has not read it yet.
        if late == "answer":
            writer.write(NO)
        else:
            writer.write_eof()
        assert await read(await ask(pool, raw)) == b"hi"
        assert raw.accepted == 2


@pytest.mark.parametrize(
    "field",
    [
        "transfer-encoding: gzip\r\ntransfer-encoding: chunked",
        "transfer-encoding: chunked;x",
        "content-encoding: gzip",
    ],
)
async def test_a_body_that_is_damaged_or_has_no_end_is_cut_off(field: str) -> None:
    async with server_and_pool() as (raw, pool):
        raw.pieces = [head("text/plain", None, field), b"2\r\nhi\r\n"]
        response = await ask(pool, raw)
        with pytest.raises(BrokenOff):
            await read(response)
        response.release()


async def test_a_body_zipped_in_parts_is_read_whole_and_others_have_their_turn_meanwhile() -> None:
    async with server_and_pool() as (raw, pool):
        zipped = gzip.compress(b"one ") + gzip.compress(b"two")
        raw.pieces, raw.end = [head("", len(zipped), "content-encoding: gzip"), zipped], "keep"
        assert await read(await ask(pool, raw)) == b"one two"
        zipped = gzip.compress(bytes(LARGE)) + gzip.compress(b"") * 1000
        raw.pieces, raw.end = [head("", len(zipped), "content-encoding: gzip"), zipped], "keep"
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        response = await ask(pool, raw)
        await until(lambda: response.complete)
        turning = asyncio.create_task(other())
        assert len(await read(response)) == LARGE
        turning.cancel()
        assert turns > 1000 + LARGE / 1_000_000


async def test_a_closed_pool_makes_no_connection() -> None:
    async def slowly(host: str, port: int) -> list[Any]:
        pool.close()
        return await resolve(host, port)

    async with raw_server() as raw:
        pool = HttpPool(slowly, watchful_socket)
        with pytest.raises(NoConnection):
            await ask(pool, raw)
        await until(lambda: not raw.connections)
