"""Replicas of an engine that die, hang, slow down, fail and come back: no call is lost."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from envserver_records.errors import EngineError, EngineGarbage, EngineTimeout, EngineUnavailable
from structlog.testing import capture_logs
from support.fake_vllm import FakeVllm, fake_vllm
from support.waiting import PATIENCE, settled, until

from envserver import OpenAIConfig
from envserver.models import FLOOR, OpenAIEngine, ReplicaHealth

CHAT = "/v1/chat/completions"
SELDOM_SECONDS = 60.0
"""Between health checks where they do not matter: one that is late would set a replica aside."""
ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def engine(
    *fakes: FakeVllm,
    tries: int = 6,
    check_seconds: float = 1.0,
    measure_seconds: float = 0.02,
    **config: Any,
) -> AsyncIterator[OpenAIEngine]:
    async with OpenAIEngine(
        OpenAIConfig(base_url=[fake.url for fake in fakes], **config),
        tries=tries,
        pause_seconds=0.01,
        check_seconds=check_seconds,
        measure_seconds=measure_seconds,
    ) as opened:
        yield opened


async def ask(opened: OpenAIEngine, rollout_id: str, seconds: float = 60.0) -> dict[str, Any]:
    return await opened.post(CHAT, ASK, rollout_id=rollout_id, timeout_seconds=seconds)


async def stream(opened: OpenAIEngine, rollout_id: str) -> list[dict[str, Any]]:
    body = {**ASK, "stream": True}
    async with opened.stream(CHAT, body, rollout_id=rollout_id, timeout_seconds=60) as chunks:
        return [chunk async for chunk in chunks]


async def both(opened: OpenAIEngine, rollout_id: str) -> None:
    """A whole answer and a streamed one."""
    assert (await ask(opened, rollout_id))["choices"]
    assert len(await stream(opened, rollout_id)) > 2


async def crowd(opened: OpenAIEngine, size: int, turns: int = 1) -> None:
    """`size` rollouts at a time; fails unless every call is answered."""

    async def rollout(number: int) -> None:
        for _ in range(turns):
            await both(opened, f"rollout-{number}")

    async with asyncio.TaskGroup() as group:
        for number in range(size):
            group.create_task(rollout(number))


async def homed(opened: OpenAIEngine, fake: FakeVllm) -> str:
    """A rollout whose calls go to `fake`."""
    async with asyncio.timeout(PATIENCE):
        for number in itertools.count():
            before = len(fake.requests)
            await ask(opened, f"homed-{number}")
            if len(fake.requests) > before:
                return f"homed-{number}"
    raise AssertionError("no rollout goes there")


async def health_of(opened: OpenAIEngine, fake: FakeVllm) -> ReplicaHealth:
    return next(entry for entry in await opened.health() if entry.base_url == fake.url)


def replica_of(opened: OpenAIEngine, fake: FakeVllm) -> ReplicaHealth:
    """What is known of `fake` now; it is not asked."""
    return next(entry for entry in opened.replicas() if entry.base_url == fake.url)


# Replicas that die, hang and come back


async def test_a_replica_that_is_killed_under_load_loses_no_call() -> None:
    async with (
        fake_vllm(slow_seconds=0.02) as one,
        fake_vllm(slow_seconds=0.02) as two,
        engine(one, two) as opened,
    ):
        calls = asyncio.create_task(crowd(opened, 30, turns=4))
        await until(lambda: len(one.requests) > 40)
        await one.kill()
        await calls
        assert len(two.requests) > len(one.requests)
        await until(lambda: replica_of(opened, one).state == "open")


async def test_a_replica_that_is_back_is_used_again_and_each_change_is_logged_once() -> None:
    with capture_logs() as lines:
        async with fake_vllm() as one, fake_vllm() as two, engine(one, two) as opened:
            home = await homed(opened, one)
            await one.kill()
            await crowd(opened, 10)
            await until(lambda: lines)
            port = int(one.url.rpartition(":")[2])
            async with fake_vllm(port) as again:
                await until(lambda: len(lines) == 2)
                await ask(opened, home)
                assert len(again.requests) == 1
                assert (await health_of(opened, again)).state == "closed"
    assert [line["event"] for line in lines] == [
        "engine_replica_set_aside",
        "engine_replica_is_back",
    ]
    assert all(line["base_url"] == one.url for line in lines)


async def test_calls_at_a_replica_that_hangs_are_answered_by_another() -> None:
    async with (
        fake_vllm() as one,
        fake_vllm() as two,
        engine(one, two, check_seconds=0.5) as opened,
    ):
        one.hung = True
        await crowd(opened, 20)
        state = await health_of(opened, one)
        assert (state.healthy, state.state, state.in_flight) == (False, "open", 0)
        assert one.requests == []


async def test_calls_in_flight_when_a_replica_begins_to_hang_are_sent_elsewhere() -> None:
    held = asyncio.Event()
    async with (
        fake_vllm(held=held) as one,
        fake_vllm() as two,
        engine(one, two, check_seconds=0.5) as opened,
    ):
        held.set()
        home = await homed(opened, one)
        held.clear()
        before = len(one.requests) + len(two.requests)
        calls = [asyncio.create_task(ask(opened, home)) for _ in range(5)]
        body = {**ASK, "stream": True}
        async with opened.stream(CHAT, body, rollout_id=home, timeout_seconds=60) as chunks:
            assert await anext(chunks)
            await until(lambda: len(one.requests) + len(two.requests) == before + 6)
            elsewhere = len(two.requests)
            one.hung = True
            for answer in await asyncio.gather(*calls):
                assert answer["choices"]
            # Of this stream something was given out: it waits for its own replica.
            held.set()
            assert len([chunk async for chunk in chunks]) > 1
        assert len(two.requests) >= elsewhere + 5


async def test_the_only_replica_is_never_given_up_however_silent_it_is() -> None:
    held = asyncio.Event()
    async with fake_vllm(held=held) as fake, engine(fake, check_seconds=0.02, tries=5) as opened:
        fake.health = 503
        fake.faults = deque([503] * 5)
        with pytest.raises(EngineError):
            await ask(opened, "r")
        assert replica_of(opened, fake).state == "open"
        fake.requests.clear()
        calls = [asyncio.create_task(ask(opened, "r")) for _ in range(3)]
        await until(lambda: len(fake.requests) == 3)
        seen = fake.checks
        await until(lambda: fake.checks > seen + 1)
        held.set()
        assert all(answer["choices"] for answer in await asyncio.gather(*calls))
        assert len(fake.requests) == 3


@pytest.mark.parametrize("fault", ["half", "close", 503, "garbage", "error_body", "html_stream"])
async def test_what_is_no_answer_is_asked_for_elsewhere(fault: Any) -> None:
    async with fake_vllm() as one, fake_vllm() as two, engine(one, two) as opened:
        home = await homed(opened, one)
        one.faults = deque([fault, fault])
        await both(opened, home)


async def test_a_replica_whose_health_fails_gets_no_calls() -> None:
    async with fake_vllm() as one, fake_vllm() as two, engine(one, two) as opened:
        one.health = 503
        await until(lambda: replica_of(opened, one).state == "open")
        before = len(one.requests)
        await crowd(opened, 10)
        assert len(one.requests) == before
        one.health = 200
        await until(lambda: replica_of(opened, one).state == "closed")
        await homed(opened, one)


async def test_a_slow_replica_shares_its_calls_with_one_that_has_room() -> None:
    held = asyncio.Event()
    held.set()
    async with (
        fake_vllm(held=held) as one,
        fake_vllm() as two,
        engine(one, two, check_seconds=SELDOM_SECONDS, num_max_requests_at_once=2) as opened,
    ):
        home = await homed(opened, one)
        before = len(two.requests)
        held.clear()
        calls = []
        for _ in range(30):
            calls.append(asyncio.create_task(ask(opened, home)))
            await settled()
            await until(lambda: not replica_of(opened, two).in_flight)
        held.set()
        await asyncio.gather(*calls)
        assert len(two.requests) - before == 28


async def test_a_replica_that_keeps_failing_is_set_aside_until_a_call_succeeds_there() -> None:
    async with fake_vllm() as one, fake_vllm() as two, engine(one, two) as opened:
        home = await homed(opened, one)
        for _ in range(20):
            await ask(opened, home)
        before = len(one.requests)
        one.faults = deque([500] * 100)
        for _ in range(50):
            await ask(opened, home)
        assert len(one.requests) - before < 30
        one.faults.clear()
        before = len(one.requests)
        async with asyncio.timeout(PATIENCE):
            while (await health_of(opened, one)).state != "closed":
                await ask(opened, home)
                await asyncio.sleep(0.02)
        assert len(one.requests) > before


async def test_refused_requests_say_nothing_against_a_replica() -> None:
    async with fake_vllm(faults=deque([400] * 30)) as fake, engine(fake) as opened:
        for _ in range(30):
            with pytest.raises(EngineError):
                await ask(opened, "r")
        assert (await health_of(opened, fake)).state == "closed"


async def test_an_engine_that_asks_for_patience_is_left_alone() -> None:
    async with fake_vllm(faults=deque([429]), retry_after="1") as fake, engine(fake) as opened:
        began = time.monotonic()
        await ask(opened, "r")
        assert time.monotonic() - began >= 1
        fake.faults = deque([503])
        fake.retry_after = "3600"
        before = len(fake.requests)
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(EngineUnavailable):
                await ask(opened, "r")
        assert len(fake.requests) == before + 1
    async with (
        fake_vllm() as one,
        fake_vllm() as two,
        engine(one, two, check_seconds=SELDOM_SECONDS) as opened,
    ):
        home = await homed(opened, one)
        one.faults, one.retry_after = deque([503]), "30"
        before = len(one.requests)
        for _ in range(10):
            await ask(opened, home)
        assert len(one.requests) == before + 1
        assert (await health_of(opened, one)).state == "closed"


async def test_a_cancelled_call_is_aborted_and_leaves_no_slot_taken() -> None:
    async with (
        fake_vllm(held=asyncio.Event()) as fake,
        engine(fake, num_max_requests_at_once=1) as opened,
    ):
        calls = [asyncio.create_task(ask(opened, "r")) for _ in range(3)]
        await until(lambda: fake.requests)
        state = await health_of(opened, fake)
        assert (state.in_flight, state.waiting, state.limit) == (1, 2, 1)
        for call in calls:
            call.cancel()
        await until(lambda: fake.aborted == 1)
        await asyncio.gather(*calls, return_exceptions=True)
        state = await health_of(opened, fake)
        assert (state.in_flight, state.waiting) == (0, 0)
        assert len(fake.requests) == 1


async def test_a_call_that_gets_no_slot_in_time_says_so() -> None:
    async with (
        fake_vllm(held=asyncio.Event()) as fake,
        engine(fake, num_max_requests_at_once=1) as opened,
    ):
        first = asyncio.create_task(ask(opened, "r"))
        await until(lambda: fake.requests)
        with pytest.raises(EngineTimeout, match="no free slot"):
            await ask(opened, "r", seconds=0.05)
        first.cancel()


async def test_a_stream_that_fails_after_its_first_chunk_counts_against_its_replica() -> None:
    async with fake_vllm(faults=deque(["reset"] * 5)) as fake, engine(fake) as opened:
        for _ in range(5):
            with pytest.raises(EngineGarbage):
                await stream(opened, "r")
        assert (await health_of(opened, fake)).state != "closed"


async def test_fewer_calls_are_sent_while_calls_wait_in_the_engine() -> None:
    busy = 'vllm:num_requests_running{engine="0"} 8.0\nvllm:num_requests_waiting{engine="0"} 9.0\n'
    idle = busy.replace("9.0", "0.0")
    async with (
        fake_vllm(metrics=busy, slow_seconds=0.005) as fake,
        engine(fake, measure_seconds=0.01, num_max_requests_at_once=32) as opened,
    ):

        async def rollout() -> None:
            while True:
                await ask(opened, "r")

        calls = [asyncio.create_task(rollout()) for _ in range(64)]
        limits = set()

        def limit() -> int:
            limits.add(replica_of(opened, fake).limit)
            return replica_of(opened, fake).limit

        await until(lambda: limit() == FLOOR)
        fake.metrics = idle
        await until(lambda: limit() >= FLOOR + 5)
        fake.metrics = None
        await until(lambda: limit() == 32)
        assert len(limits) > 3
        for call in calls:
            call.cancel()
