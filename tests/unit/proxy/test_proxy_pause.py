"""Calls wait during weight updates; those at the engine finish, continue or are sent again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from envserver_records.records import VersionSpan
from support.fake_vllm import ids_of
from support.proxy_house import ASK, House, chat, house
from support.waiting import settled, until


@pytest.fixture
async def home() -> AsyncIterator[House]:
    async with house() as made:
        made.proxy.publish_version(1)
        yield made


async def paused_within_a_call(
    home: House, in_flight: Any, streamed: bool = False
) -> tuple[Any, asyncio.Task[Any], asyncio.Task[bool]]:
    """An attempt, its call that is at the engine, and the pause that has begun."""
    home.fake.held = asyncio.Event()
    attempt, client = home.open()
    asking = asyncio.create_task(chat(client, streamed))
    await until(lambda: home.fake.requests)
    pausing = asyncio.create_task(home.proxy.gate.pause(in_flight, 60.0))
    await settled()
    return attempt, asking, pausing


async def test_calls_wait_while_paused_and_are_of_the_new_version(home: House) -> None:
    gate = home.proxy.gate
    assert await gate.pause("drain", 60.0)
    attempt, client = home.open()
    asking = [asyncio.create_task(chat(client, streamed)) for streamed in (False, True)]
    await until(lambda: gate.waiting == 2)
    assert home.fake.requests == []
    home.proxy.publish_version(2)
    gate.resume()
    await asyncio.gather(*asking)
    assert [call.versions[0].version for call in attempt.calls] == [2, 2]
    assert all(call.flags == [] for call in attempt.calls)
    gate.resume()


async def test_drain_waits_for_the_calls_at_the_engine(home: House) -> None:
    attempt, asking, pausing = await paused_within_a_call(home, "drain")
    assert not pausing.done()
    home.fake.held.set()  # type: ignore[union-attr]
    assert await pausing
    await asking
    assert attempt.calls[0].versions[0].version == 1


async def test_drain_says_when_calls_do_not_end(home: House) -> None:
    _, asking, pausing = await paused_within_a_call(home, "drain")
    assert not await home.proxy.gate.pause("drain", 0.05)
    home.fake.held.set()  # type: ignore[union-attr]
    await asyncio.gather(asking, pausing)


@pytest.mark.parametrize("streamed", [False, True])
async def test_keep_lets_them_go_on_and_marks_them(home: House, streamed: bool) -> None:
    attempt, asking, pausing = await paused_within_a_call(home, "keep", streamed)
    assert await pausing
    home.proxy.publish_version(2)
    home.proxy.gate.resume()
    home.fake.held.set()  # type: ignore[union-attr]
    await asking
    (call,) = attempt.calls
    assert call.flags == ["mixed_versions"]
    assert call.versions == [VersionSpan(1, 0, len(call.completion_ids))]


async def test_abort_asks_them_again_after_the_pause(home: House) -> None:
    attempt, asking, pausing = await paused_within_a_call(home, "abort")
    assert await pausing
    await until(lambda: home.fake.aborted == 1)
    home.fake.held.set()  # type: ignore[union-attr]
    home.proxy.publish_version(2)
    home.proxy.gate.resume()
    await asking
    (call,) = attempt.calls
    assert call.versions[0].version == 2
    assert call.flags == []
    assert len(home.fake.requests) == 2


async def test_an_end_that_was_held_back_is_not_told_when_the_stream_is_asked_for_again(
    home: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, chunks = asyncio.Event(), home.fake.chunks

    def ends_only(body: Any) -> Any:
        *_, last, usage = chunks(body)
        if not first.is_set():  # it ends at once: only its usage is missing when it is aborted
            first.set()
            yield last
            yield usage | {"choices": []}
        yield from chunks(body)

    monkeypatch.setattr(home.fake, "chunks", ends_only)
    home.fake.held = asyncio.Event()
    attempt, client = home.open()
    finishes = []

    async def ask() -> None:
        stream = await client.chat.completions.create(model="any", messages=ASK, stream=True)
        finishes.extend([chunk.choices[0].finish_reason async for chunk in stream])

    asking = asyncio.create_task(ask())
    await until(lambda: home.fake.requests)
    await settled()
    assert await home.proxy.gate.pause("abort", 60.0)
    home.fake.held.set()
    home.proxy.gate.resume()
    await asking
    assert finishes[-1] == "stop"
    assert finishes.count("stop") == 1
    assert len(home.fake.requests) == 2
    assert [call.completion_ids.tolist() for call in attempt.calls] == [ids_of("Hëllo.")]


async def test_abort_breaks_off_a_stream_that_has_begun(home: House) -> None:
    home.fake.held = asyncio.Event()
    attempt, client = home.open()
    stream = await client.chat.completions.create(model="any", messages=ASK, stream=True)
    with pytest.raises(openai.APIError, match="paused"):
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                await home.proxy.gate.pause("abort", 60.0)
    (call,) = attempt.calls
    assert call.finish_reason == "error"
    assert attempt.engine_failure is not None
    assert attempt.engine_failure.kind == "engine_unavailable"


async def test_many_pauses_lose_and_double_nothing(home: House) -> None:
    home.fake.text = None
    attempt, client = home.open(max_turns=1000)

    async def agent(number: int) -> None:
        for turn in range(5):
            message = {"role": "user", "content": f"{number}-{turn}"}
            await chat(client, streamed=False, messages=[message])

    async def trainer() -> None:
        for version, how in enumerate(["drain", "keep", "abort"] * 4, start=2):
            await home.proxy.gate.pause(how, 60.0)
            home.proxy.publish_version(version)
            home.proxy.gate.resume()
            await asyncio.sleep(0.01)

    await asyncio.gather(trainer(), *(agent(number) for number in range(16)))
    answers = [call.message["content"] for call in attempt.calls]
    assert sorted(answers) == sorted(f"re: {n}-{t}" for n in range(16) for t in range(5))
