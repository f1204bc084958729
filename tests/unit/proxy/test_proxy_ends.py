"""How a call through the proxy ends: recorded first, broken off, refused for a limit."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from typing import Any

import msgspec
import openai
import pytest
from envserver_records.errors import ConfigError, EngineUnavailable, Outcome
from support.engine_stand_in import ids_of
from support.proxy_house import ASK, TOOLS, House, asgi_post, chat, house
from support.waiting import settled, until

from envserver.models import ProbeResult
from envserver.proxy import Capabilities

PATH = "v1/chat/completions"
BODY = {"messages": ASK}
STREAMED = pytest.mark.parametrize("streamed", [False, True])


# Before the last byte


@pytest.mark.parametrize(("tools", "streamed"), [([], False), ([], True), (TOOLS, True)])
async def test_a_call_is_recorded_before_its_end_can_be_seen(
    home: House, tools: list[Any], streamed: bool
) -> None:
    attempt, _ = home.open()
    seen: list[tuple[bytes, int]] = []

    async def send(message: Any) -> None:
        seen.append((message.get("body", b""), len(attempt.calls)))

    body = {**BODY, "tools": tools, "stream": streamed, "n": 2}
    await asgi_post(home.proxy, attempt.key, body, send)
    assert b"".join(text for text, _ in seen).count(b'"finish_reason":"stop"') == 2
    for text, recorded in seen:
        if b'"finish_reason":"stop"' in text or text == seen[-1][0]:
            assert recorded == 2


async def test_an_agent_that_leaves_a_stream_early_leaves_what_was_sampled(home: House) -> None:
    home.fake.held = asyncio.Event()
    attempt, client = home.open()
    stream = await client.chat.completions.create(model="any", messages=ASK, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    await until(lambda: attempt.calls)
    (call,) = attempt.calls
    assert (call.delivered, call.finish_reason) == ("none", "disconnect")
    assert call.flags == ["undelivered_completion"]
    assert call.completion_ids.tolist() == ids_of("Hëllo.")[:1]
    await until(lambda: home.fake.aborted == 1)


# Ends that are none


async def test_an_answer_that_is_being_sent_at_the_end_stays_undelivered(home: House) -> None:
    attempt, _ = home.open()
    sending, sent = asyncio.Event(), asyncio.Event()

    async def send(message: Any) -> None:
        sending.set()
        with contextlib.suppress(asyncio.CancelledError):
            await sent.wait()

    asking = asyncio.create_task(asgi_post(home.proxy, attempt.key, BODY, send))
    await sending.wait()
    home.proxy.seal(attempt)
    recorded = [(call.delivered, call.flags) for call in attempt.calls]
    sent.set()
    await asking
    assert [(call.delivered, call.flags) for call in attempt.calls] == recorded
    assert recorded == [("none", ["undelivered_completion"])]


@pytest.mark.parametrize("fault", ["cut", "reset", "error_chunk"])
async def test_an_engine_that_fails_within_a_stream_is_told_and_recorded(
    home: House, fault: str
) -> None:
    home.fake.faults = deque([fault])
    attempt, client = home.open()
    with pytest.raises(openai.APIError):
        await chat(client, streamed=True)
    assert attempt.engine_failure is not None
    (call,) = attempt.calls
    assert call.finish_reason == "error"
    assert call.flags == ["finish_abort", "undelivered_completion"]
    assert call.completion_ids.tolist() == ids_of("Hëllo.")[: len(call.completion_ids)]


async def test_calls_find_out_together_how_a_late_engine_is_asked() -> None:
    finds: list[asyncio.Event] = []

    async def find() -> Capabilities:
        finds.append(asyncio.Event())
        await finds[-1].wait()
        if len(finds) == 1:
            raise EngineUnavailable("down")
        return Capabilities(probe_result=ProbeResult(mode="chat", model="tiny"))

    async with house(find=find) as home:
        attempt, _ = home.open(max_turns=4)
        for statuses in ([503] * 3, [200] * 3):
            before = home.arrived
            asking = [home.asks(attempt.key, PATH, BODY) for _ in range(4)]
            await home.has_read(before + 4)
            await home.lose(asking[0])  # it came first
            finds[-1].set()
            assert [(await request)[0] for request in asking[1:]] == statuses
        assert len(finds) == 2
        assert len(attempt.calls) == 3


async def test_an_engine_that_comes_late_and_cannot_be_asked_is_no_doing_of_the_agent() -> None:
    async def find() -> Capabilities:
        raise ConfigError("openai.mode is tokens, but this engine cannot be asked so")

    async with house(find=find) as home:
        attempt, _ = home.open()
        status, answer = await home.post(attempt.key, PATH, BODY)
        assert (status, answer["error"]["code"]) == (502, "engine_error")
        assert attempt.engine_failure is not None
        assert attempt.engine_failure.outcome is Outcome.RETRY


@STREAMED
@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        (400, 400, "engine_refused"),
        (500, 502, "engine_error"),
        (503, 503, "engine_unavailable"),
        ("garbage", 502, "engine_garbage"),
        ("error_body", 502, "engine_error"),
        ("close", 502, "engine_garbage"),
    ],
)
async def test_failures_of_the_engine_keep_their_status_and_are_not_retried_by_the_client(
    home: House, fault: int | str, status: int, code: str, streamed: bool
) -> None:
    home.fake.faults = deque([fault] * 2)
    attempt, client = home.open()
    with pytest.raises(openai.APIStatusError) as caught:
        await chat(client, streamed)
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert attempt.engine_failure is not None
    assert (attempt.engine_failure.kind, attempt.calls) == (code, [])
    assert len(home.fake.requests) <= 2


# Limits


@STREAMED
async def test_turns_are_limited_also_when_asked_for_at_once(home: House, streamed: bool) -> None:
    attempt, client = home.open(max_turns=3)
    asked = (chat(client, streamed) for _ in range(8))
    results = await asyncio.gather(*asked, return_exceptions=True)
    refused = [r for r in results if isinstance(r, openai.BadRequestError)]
    assert [error.code for error in refused] == ["limit_reached"] * 5
    assert len(attempt.calls) == len(home.fake.requests) == 3
    assert attempt.limit == "turns"


async def test_tokens_are_limited_also_when_asked_for_at_once(home: House) -> None:
    home.fake.text = "x" * 100
    attempt, client = home.open(max_completion_tokens=25, max_tokens=10)
    results = await asyncio.gather(*(chat(client) for _ in range(8)), return_exceptions=True)
    assert sum(len(call.completion_ids) for call in attempt.calls) == 25
    assert sorted(sent["max_tokens"] for sent in home.fake.requests) == [5, 10, 10]
    assert sum(isinstance(r, openai.BadRequestError) for r in results) == 5
    assert (attempt.limit, attempt.engine_failure) == ("tokens", None)
    # n answers share what is left
    sharing, client = home.open(max_completion_tokens=9)
    await chat(client, n=4)
    assert [len(call.completion_ids) for call in sharing.calls] == [2, 2, 2, 2]
    # what was reserved and not used comes back
    home.fake.text = "ab"
    short, client = home.open(max_completion_tokens=12, max_tokens=10)
    await asyncio.gather(*(chat(client) for _ in range(4)))
    assert [len(call.completion_ids) for call in short.calls] == [3, 3, 3, 3]
    with pytest.raises(openai.BadRequestError):
        await chat(client)


async def test_time_that_is_over_is_a_limit_and_no_failure_of_the_engine(home: House) -> None:
    attempt, client = home.open(seconds=-1)
    with pytest.raises(openai.BadRequestError, match="time"):
        await chat(client)
    assert (attempt.limit, attempt.engine_failure) == ("time", None)


async def test_work_that_several_wait_for_ends_once_at_the_deadline(home: House) -> None:
    home.fake.held = asyncio.Event()
    attempt, _ = home.open(seconds=600.0)
    asking = [home.asks(attempt.key, PATH, BODY, **{"idempotency-key": "k"}) for _ in range(3)]
    await home.has_read(3)
    await until(lambda: home.fake.requests)
    attempt.spec = msgspec.structs.replace(attempt.spec, deadline=time.time())
    for request in asking:
        request.cancel()
    await until(lambda: attempt.engine_failures)
    await settled()
    assert attempt.engine_failures == 1
    assert [call.finish_reason for call in attempt.calls] == ["disconnect"]
    assert len(home.fake.requests) == 1
