"""The engine over HTTP: addresses, replicas that die, hang, slow down and come back, typed errors.

No call is lost while one replica is left. What the client makes of any bytes is in
`test_engine_fuzz.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from envserver_records.errors import (
    ConfigError,
    EngineError,
    EngineGarbage,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
)
from structlog.testing import capture_logs
from support.engine_stand_in import FakeVllm, fake_vllm
from support.waiting import PATIENCE, settled, until

from envserver import OpenAIConfig
from envserver.models import FLOOR, OpenAIEngine, ReplicaHealth
from envserver.models.sse import SseParser

CHAT = "/v1/chat/completions"
SELDOM_SECONDS = 60.0
"""Between health checks where they do not matter: one that is late would set a replica aside."""
ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**ASK, "return_token_ids": True, "logprobs": True, "stream": True}


@asynccontextmanager
async def engine(
    *urls: str,
    tries: int = 6,
    check_seconds: float = 1.0,
    measure_seconds: float = 0.02,
    **config: Any,
) -> AsyncIterator[OpenAIEngine]:
    async with OpenAIEngine(
        OpenAIConfig(base_url=list(urls), **config),
        tries=tries,
        pause_seconds=0.01,
        check_seconds=check_seconds,
        measure_seconds=measure_seconds,
    ) as opened:
        yield opened


@asynccontextmanager
async def alone(
    *faults: Any, how: dict[str, Any] | None = None, **fake: Any
) -> AsyncIterator[tuple[FakeVllm, OpenAIEngine]]:
    """One fake with these faults, and the engine before it, which is made as `how` says."""
    async with (
        fake_vllm(faults=deque(faults), **fake) as made,
        engine(made.url, **(how or {})) as opened,
    ):
        yield made, opened


@asynccontextmanager
async def pair(
    how: dict[str, Any] | None = None, **fake: Any
) -> AsyncIterator[tuple[FakeVllm, FakeVllm, OpenAIEngine]]:
    """Two replicas (the first as `fake` says), and the engine before them."""
    async with (
        fake_vllm(**fake) as one,
        fake_vllm() as two,
        engine(one.url, two.url, **(how or {})) as opened,
    ):
        yield one, two, opened


async def ask(opened: OpenAIEngine, rollout_id: str = "r", seconds: float = 60.0) -> dict[str, Any]:
    return await opened.post(CHAT, ASK, rollout_id=rollout_id, timeout_seconds=seconds)


async def stream(opened: OpenAIEngine, rollout_id: str = "r", seconds: float = 60.0) -> list[Any]:
    about: Any = {"rollout_id": rollout_id, "timeout_seconds": seconds}
    async with opened.stream(CHAT, STREAM, **about) as chunks:
        return [chunk async for chunk in chunks]


async def both(opened: OpenAIEngine, rollout_id: str = "r") -> None:
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


def dead_url() -> str:
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


# Addresses and names


async def test_an_address_may_end_in_v1_and_stand_with_others_behind_commas() -> None:
    async with fake_vllm() as one, fake_vllm() as two:
        for tail in ("", "/", "/v1", "/v1/"):
            async with engine(one.url + tail) as opened:
                assert (await ask(opened))["choices"][0]["message"]["content"] == "Hëllo."
                assert await opened.model_name() == "tiny"
        async with OpenAIEngine(OpenAIConfig(base_url=f"{one.url}/v1, {two.url}")) as opened:
            assert [r.base_url for r in await opened.health()] == [one.url, two.url]


async def test_what_is_set_is_not_asked_for_and_credentials_in_an_address_are_not_told() -> None:
    async with engine(dead_url(), model_name="mine", server_type="openai") as opened:
        assert await opened.model_name() == "mine"
        assert not opened.exact
    with pytest.raises(ConfigError) as caught:
        OpenAIEngine(OpenAIConfig(base_url="http://user:pass@host/v1"))
    assert "pass" not in str(caught.value)


# Repetitions and errors


async def test_passing_failures_are_repeated_and_any_is_asked_for_elsewhere() -> None:
    async with alone() as (fake, opened):
        for fault in (500, 502, 503, 429, 408, "close"):
            fake.requests.clear()
            fake.faults.extend([fault, fault])
            assert (await ask(opened))["choices"]
            assert len(fake.requests) == 3
            fake.faults.append(fault)
            assert len(await stream(opened)) > 2
    for fault in ("half", "close", 503, "garbage", "error_body", "html_stream"):
        async with pair() as (one, _, opened):
            home = await homed(opened, one)
            one.faults = deque([fault, fault])
            await both(opened, home)


async def test_a_refusal_is_not_repeated_and_tells_the_engines_words_without_the_key() -> None:
    secret, statuses = "sk-very-secret", (400, 401, 404, 422) * 8
    async with alone(*statuses, how={"api_key": secret}) as (fake, opened):
        for number, status in enumerate(statuses, start=1):
            with pytest.raises(EngineRefused, match=r"told Bearer \*\*\*") as caught:
                await ask(opened)
            assert caught.value.detail["status"] == status
            assert len(fake.requests) == number
            assert secret not in repr(caught.value.failure())
        assert fake.headers[0]["Authorization"] == f"Bearer {secret}"
        assert (await health_of(opened, fake)).state == "closed"  # it says nothing against it


async def test_a_slow_answer_times_out_and_is_aborted() -> None:
    async with alone(held=asyncio.Event()) as (fake, opened):
        for way in (ask, stream):
            with pytest.raises(EngineTimeout):
                await way(opened, seconds=0.1)
        await until(lambda: fake.aborted == 2)


async def test_an_error_of_the_consumer_leaves_a_stream_as_it_is() -> None:
    async with alone() as (_, opened):
        with pytest.raises(ConnectionResetError, match="mine"):
            async with opened.stream(CHAT, STREAM, rollout_id="r", timeout_seconds=60):
                raise ConnectionResetError("mine")


async def test_an_engine_that_asks_for_patience_is_left_alone() -> None:
    async with alone(429, retry_after="1") as (fake, opened):
        began = time.monotonic()
        await ask(opened)
        assert time.monotonic() - began >= 1
        fake.faults, fake.retry_after = deque([503]), "3600"
        before = len(fake.requests)
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(EngineUnavailable):
                await ask(opened)
        assert len(fake.requests) == before + 1
    async with pair({"check_seconds": SELDOM_SECONDS}) as (one, _, opened):
        home = await homed(opened, one)
        one.faults, one.retry_after = deque([503]), "30"
        before = len(one.requests)
        for _ in range(10):
            await ask(opened, home)
        assert len(one.requests) == before + 1
        assert (await health_of(opened, one)).state == "closed"


# Replicas that die, hang and come back


async def test_a_replica_that_is_killed_under_load_loses_no_call() -> None:
    async with pair({"check_seconds": SELDOM_SECONDS}, slow_seconds=0.02) as (one, two, opened):
        two.slow_seconds = 0.02
        calls = asyncio.create_task(crowd(opened, 30, turns=4))
        await until(lambda: len(one.requests) > 40)
        await one.kill()
        await calls
        assert len(two.requests) > len(one.requests)
        await until(lambda: replica_of(opened, one).state == "open")


@pytest.mark.parametrize("trouble", ["killed", "hung", "unwell"])
async def test_a_replica_in_trouble_gets_no_calls_until_it_is_well_and_changes_are_logged_once(
    trouble: str,
) -> None:
    with capture_logs() as lines:
        async with pair({"check_seconds": 0.5}) as (one, _, opened), AsyncExitStack() as again:
            home = await homed(opened, one)
            if trouble == "killed":
                await one.kill()
            one.hung, one.health_status = trouble == "hung", 503 if trouble == "unwell" else 200
            before = len(one.requests)
            if trouble != "unwell":  # no call is lost before that is known, either
                await crowd(opened, 20)
            await until(lambda: replica_of(opened, one).state == "open")
            await crowd(opened, 10)
            state = await health_of(opened, one)
            assert (state.state, state.in_flight) == ("open", 0)
            assert not state.healthy or trouble == "unwell"  # which still answers
            assert len(one.requests) == before
            one.hung, one.health_status, well = False, 200, one
            if trouble == "killed":
                well = await again.enter_async_context(fake_vllm(int(one.url.rpartition(":")[2])))
            await until(lambda: replica_of(opened, well).state == "closed")
            before = len(well.requests)
            await ask(opened, home)
            assert len(well.requests) == before + 1
    events = ["engine_replica_set_aside", "engine_replica_is_back"]
    # A busy machine may be late with the other's check.
    assert [line["event"] for line in lines if line["base_url"] == one.url] == events


async def test_calls_in_flight_when_a_replica_begins_to_hang_are_sent_elsewhere() -> None:
    held = asyncio.Event()
    async with pair({"check_seconds": 0.5}, held=held) as (one, two, opened):
        held.set()
        home = await homed(opened, one)
        held.clear()
        before = len(one.requests) + len(two.requests)
        calls = [asyncio.create_task(ask(opened, home)) for _ in range(5)]
        async with opened.stream(CHAT, STREAM, rollout_id=home, timeout_seconds=60) as chunks:
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
    how = {"check_seconds": 0.02, "tries": 5}
    async with alone(*[503] * 5, how=how, held=held, health_status=503) as (fake, opened):
        with pytest.raises(EngineError):
            await ask(opened)
        assert replica_of(opened, fake).state == "open"
        fake.requests.clear()
        calls = [asyncio.create_task(ask(opened)) for _ in range(3)]
        await until(lambda: len(fake.requests) == 3)
        seen = fake.checks
        await until(lambda: fake.checks > seen + 1)
        held.set()
        assert all(answer["choices"] for answer in await asyncio.gather(*calls))
        assert len(fake.requests) == 3


async def test_a_slow_replica_shares_its_calls_with_one_that_has_room() -> None:
    held = asyncio.Event()
    held.set()
    how = {"check_seconds": SELDOM_SECONDS, "num_max_requests_at_once": 2}
    async with pair(how, held=held) as (one, two, opened):
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


# Calls in flight


async def test_calls_wait_for_a_slot_are_aborted_when_cancelled_and_leave_none_taken() -> None:
    held = asyncio.Event()
    async with alone(how={"num_max_requests_at_once": 2}, held=held) as (fake, opened):
        calls = [asyncio.create_task(ask(opened, str(number))) for number in range(5)]
        await until(lambda: len(fake.requests) == 2)
        with pytest.raises(EngineTimeout, match="no free slot"):
            await ask(opened, seconds=0.05)
        await opened.get("/v1/models")
        state = await health_of(opened, fake)
        assert (state.in_flight, state.waiting, state.limit) == (2, 3, 2)
        for call in calls:
            call.cancel()
        await until(lambda: fake.aborted == 2)
        await asyncio.gather(*calls, return_exceptions=True)
        state = await health_of(opened, fake)
        assert (state.in_flight, state.waiting) == (0, 0)
        assert len(fake.requests) == 2
        held.set()
        await asyncio.gather(*(ask(opened, str(number)) for number in range(5)))
        assert len(fake.requests) == 7


async def test_fewer_calls_are_sent_while_calls_wait_in_the_engine() -> None:
    busy = 'vllm:num_requests_running{engine="0"} 8.0\nvllm:num_requests_waiting{engine="0"} 9.0\n'
    how = {"measure_seconds": 0.01, "num_max_requests_at_once": 32}
    async with alone(how=how, metrics=busy, slow_seconds=0.005) as (fake, opened):

        async def rollout() -> None:
            while True:
                await ask(opened)

        calls = [asyncio.create_task(rollout()) for _ in range(64)]
        limits = set()

        def limit() -> int:
            limits.add(replica_of(opened, fake).limit)
            return replica_of(opened, fake).limit

        await until(lambda: limit() == FLOOR)
        fake.metrics = busy.replace("9.0", "0.0")
        await until(lambda: limit() >= FLOOR + 5)
        fake.metrics = None
        await until(lambda: limit() == 32)
        assert len(limits) > 3
        for call in calls:
            call.cancel()


# Server-sent events


@pytest.mark.parametrize("piece", [b"data: xxxx", b"data: xxxx\n"])
def test_an_event_without_end_is_garbage(piece: bytes) -> None:
    parser = SseParser(max_event_bytes=100)
    with pytest.raises(EngineGarbage):
        for _ in range(50):
            parser.feed(piece)
