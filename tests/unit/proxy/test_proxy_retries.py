"""A client's retry gets the answer that was sampled; other equal requests are new samples."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from envserver_records.errors import EngineUnavailable
from support.fake_vllm import ids_of
from support.proxy_house import ASK, TOOL_CALLS, TOOLS, House, chat, house
from support.waiting import settled, until

from envserver.models import ProbeResult
from envserver.proxy import Capabilities

RETRY = {"x-stainless-retry-count": "1"}
CODEX = {"user-agent": "codex_exec/0.169.0 (Debian 12.0.0; x86_64) unknown (codex_exec; 0.169.0)"}
CLAUDE = {"user-agent": "claude-cli/2.1.197 (external, sdk-cli)", "x-stainless-retry-count": "0"}
PATH = "v1/chat/completions"


@pytest.fixture
async def home() -> AsyncIterator[House]:
    async with house() as made:
        yield made


def bodies(**more: Any) -> dict[str, Any]:
    return {"model": "any", "messages": ASK, **more}


async def test_a_marked_retry_gets_the_same_answer_and_takes_no_turn(home: House) -> None:
    attempt, _ = home.open(max_turns=1)
    _, first = await home.post(attempt.key, PATH, bodies())
    status, again = await home.post(attempt.key, PATH, bodies(), **RETRY)
    assert (status, again) == (200, first)
    (call,) = attempt.calls
    assert call.replayed
    assert call.flags == ["client_retry_replayed"]
    assert len(home.fake.requests) == 1


async def test_equal_requests_without_a_mark_are_new_samples(home: House) -> None:
    attempt, client = home.open()
    await asyncio.gather(*(chat(client) for _ in range(4)))
    assert len(attempt.calls) == len(home.fake.requests) == 4
    assert not any(call.replayed for call in attempt.calls)


async def test_a_retry_that_says_something_else_is_a_new_sample(home: House) -> None:
    attempt, _ = home.open(agents=["main", "other"])
    await home.post(attempt.key, PATH, bodies())
    await home.post(attempt.key, PATH, bodies(seed=1), **RETRY)
    await home.post(attempt.key, f"a/other/{PATH}", bodies(), **RETRY)
    assert len(attempt.calls) == 3


async def test_an_idempotency_key_names_one_answer(home: House) -> None:
    attempt, _ = home.open()
    headers = {"idempotency-key": "step-1"}
    answers = await asyncio.gather(
        *(home.post(attempt.key, PATH, bodies(), **headers) for _ in range(8))
    )
    assert len({str(answer) for answer in answers}) == 1
    assert len(attempt.calls) == 1
    status, refusal = await home.post(attempt.key, PATH, bodies(seed=1), **headers)
    assert (status, refusal["error"]["code"]) == (409, "conflict")


@pytest.mark.parametrize("mark", [RETRY, {}])
@pytest.mark.parametrize("streamed", [False, True])
async def test_what_a_client_lost_is_recorded_and_given_to_its_retry(
    home: House, streamed: bool, mark: dict[str, str]
) -> None:
    home.fake.held = asyncio.Event()
    home.fake.tool_calls = TOOL_CALLS
    attempt, _ = home.open()
    body = bodies(tools=TOOLS, stream=streamed)
    lost = asyncio.create_task(home.post(attempt.key, PATH, body))
    await until(lambda: home.fake.requests)
    lost.cancel()
    await home.has_lost(1)
    retry = asyncio.create_task(_text(home, attempt.key, body, mark))
    await home.has_read(2)
    home.fake.held.set()
    assert TOOL_CALLS[1]["function"]["arguments"].replace('"', '\\"') in await retry
    (call,) = attempt.calls
    assert (call.delivered, call.flags) == ("full", ["client_retry_replayed"])
    assert len(home.fake.requests) == 1


async def _text(home: House, key: str, body: Any, headers: dict[str, str]) -> str:
    url = f"{home.url}/r/{key}/{PATH}"
    async with home.http.post(url, json=body, headers=headers) as answer:
        return await answer.text()


@pytest.mark.parametrize("program", [CODEX, CLAUDE])
async def test_what_a_coding_program_asks_again_after_its_answer_is_one_sample(
    home: House, program: dict[str, str]
) -> None:
    attempt, _ = home.open(max_turns=3)
    answers = [await home.post(attempt.key, PATH, bodies(), **program) for _ in range(30)]
    assert len({str(answer) for answer in answers}) == 1
    (call,) = attempt.calls
    assert call.flags == ["client_retry_replayed"]
    # It has gone on since.
    await home.post(attempt.key, PATH, bodies(seed=1), **program)
    await home.post(attempt.key, PATH, bodies(), **program)
    assert len(attempt.calls) == 3


async def test_what_helpers_of_a_coding_program_ask_at_once_are_samples_of_their_own(
    home: House,
) -> None:
    home.fake.held = asyncio.Event()
    attempt, _ = home.open()
    asking = [
        asyncio.create_task(home.post(attempt.key, PATH, bodies(), **CODEX)) for _ in range(2)
    ]
    await until(lambda: len(home.fake.requests) == 2)
    home.fake.held.set()
    await asyncio.gather(*asking)
    assert len(attempt.calls) == 2


async def test_what_a_coding_program_asks_again_while_the_engine_fails_is_one_sample(
    home: House,
) -> None:
    home.fake.faults.extend([500] * 6)
    attempt, _ = home.open(max_turns=1)
    statuses = [(await home.post(attempt.key, PATH, bodies(), **CODEX))[0] for _ in range(5)]
    assert statuses == [502, 502, 502, 200, 200]
    assert (len(attempt.calls), attempt.calls[0].replayed) == (1, True)


async def test_a_retry_joins_work_that_does_not_know_yet_how_the_engine_is_asked() -> None:
    async def find() -> Capabilities:
        await found.wait()
        return Capabilities(probe_result=ProbeResult(mode="chat", model="tiny"))

    found = asyncio.Event()
    async with house(find=find) as home:
        attempt, _ = home.open()
        once = asyncio.create_task(home.post(attempt.key, PATH, bodies()))
        await home.has_read(1)
        again = asyncio.create_task(home.post(attempt.key, PATH, bodies(), **RETRY))
        await home.has_read(2)
        found.set()
        assert await again == await once
        assert len(attempt.calls) == 1


async def test_what_a_client_lost_for_good_is_recorded_and_not_trained(home: House) -> None:
    home.fake.held = asyncio.Event()
    attempt, client = home.open()
    asking = asyncio.create_task(chat(client))
    await until(lambda: home.fake.requests)
    asking.cancel()
    await home.has_lost(1)
    home.fake.held.set()
    await until(lambda: attempt.calls)
    await settled()
    (call,) = attempt.calls
    assert (call.delivered, call.flags) == ("none", ["undelivered_completion"])
    assert call.completion_ids.tolist() == ids_of("Hëllo.")


async def test_a_request_that_failed_is_made_anew_by_its_retry(home: House) -> None:
    home.fake.faults.extend([500, 500])
    attempt, _ = home.open()
    status, _ = await home.post(attempt.key, PATH, bodies())
    assert status == 502
    status, _ = await home.post(attempt.key, PATH, bodies(), **RETRY)
    assert (status, len(attempt.calls)) == (200, 1)


async def test_what_fails_after_its_client_is_gone_is_made_anew_by_the_retry(home: House) -> None:
    home.fake.held = asyncio.Event()
    home.fake.omit = frozenset({"choices"})
    attempt, _ = home.open(max_turns=1)
    lost = asyncio.create_task(home.post(attempt.key, PATH, bodies()))
    await until(lambda: home.fake.requests)
    lost.cancel()
    await home.has_lost(1)
    home.fake.held.set()
    await until(lambda: attempt.engine_failures)
    home.fake.omit = frozenset()
    status, _ = await home.post(attempt.key, PATH, bodies(), **RETRY)
    assert (status, len(attempt.calls), attempt.engine_failure) == (200, 1, None)


async def test_retries_that_wait_for_a_request_that_fails_are_one_new_request() -> None:
    finds = 0
    found = asyncio.Event()

    async def find() -> Capabilities:
        nonlocal finds
        finds += 1
        await found.wait()
        if finds == 1:
            raise EngineUnavailable("down")
        return Capabilities(probe_result=ProbeResult(mode="chat", model="tiny"))

    async with house(find=find) as home:
        attempt, _ = home.open(max_turns=1)
        once = asyncio.create_task(home.post(attempt.key, PATH, bodies()))
        await home.has_read(1)
        again = [
            asyncio.create_task(home.post(attempt.key, PATH, bodies(), **RETRY)) for _ in range(3)
        ]
        await home.has_read(4)
        found.set()
        answers = await asyncio.gather(*again)
        assert (await once)[0] == 503
        assert {status for status, _ in answers} == {200}
        assert len(attempt.calls) == 1


async def test_a_key_that_is_new_names_a_new_request_also_in_a_retry(home: House) -> None:
    attempt, _ = home.open()
    for key in ("first", "second"):
        headers = {"idempotency-key": key, **RETRY}
        assert (await home.post(attempt.key, PATH, bodies(), **headers))[0] == 200
    await home.post(attempt.key, PATH, bodies(), **RETRY)
    assert len(attempt.calls) == 3
    assert not any(call.replayed for call in attempt.calls)


async def test_of_equal_requests_a_retry_gets_the_answer_that_was_lost(home: House) -> None:
    home.fake.held = asyncio.Event()
    attempt, _ = home.open()
    asking = [asyncio.create_task(home.post(attempt.key, PATH, bodies())) for _ in range(3)]
    await until(lambda: len(home.fake.requests) == 3)
    asking[1].cancel()
    await home.has_lost(1)
    home.fake.held.set()
    await asyncio.gather(asking[0], asking[2])
    await until(lambda: len(attempt.calls) == 3)
    assert sorted(call.delivered for call in attempt.calls) == ["full", "full", "none"]
    await home.post(attempt.key, PATH, bodies(), **RETRY)
    assert [call.delivered for call in attempt.calls] == ["full"] * 3
    assert sum(call.replayed for call in attempt.calls) == 1


async def test_what_one_request_got_is_delivered_though_another_with_its_key_is_gone(
    home: House,
) -> None:
    home.fake.held = asyncio.Event()
    attempt, _ = home.open()
    headers = {"idempotency-key": "hedged"}
    asking = [
        asyncio.create_task(home.post(attempt.key, PATH, bodies(), **headers)) for _ in range(2)
    ]
    await until(lambda: home.fake.requests)
    await home.has_read(2)
    asking[0].cancel()
    await home.has_lost(1)
    home.fake.held.set()
    assert (await asking[1])[0] == 200
    (call,) = attempt.calls
    assert (call.delivered, call.flags) == ("full", ["client_retry_replayed"])


async def test_a_retry_that_waits_does_not_ask_for_an_attempt_that_has_ended() -> None:
    async def find() -> Capabilities:
        await asyncio.Event().wait()
        raise AssertionError

    async with house(find=find) as home:
        attempt, _ = home.open()
        once = asyncio.create_task(home.post(attempt.key, PATH, bodies()))
        await home.has_read(1)
        again = asyncio.create_task(home.post(attempt.key, PATH, bodies(), **RETRY))
        await home.has_read(2)
        home.proxy.seal(attempt)
        assert [(await once)[0], (await again)[0]] == [409, 409]
        assert home.fake.requests == []


async def test_lost_work_ends_with_its_attempt(home: House) -> None:
    home.fake.held = asyncio.Event()
    attempt, client = home.open()
    asking = asyncio.create_task(chat(client))
    await until(lambda: home.fake.requests)
    asking.cancel()
    await home.has_lost(1)
    home.proxy.seal(attempt)
    await until(lambda: home.fake.aborted == 1)
    home.fake.held.set()
    await settled()
    assert attempt.calls == []


@pytest.mark.parametrize("together", [1, 2, 8, 32])
async def test_retries_of_many_requests_at_once_are_what_they_are_one_by_one(
    home: House, together: int
) -> None:
    home.fake.text = None
    attempt, _ = home.open(max_turns=1000)
    room = asyncio.Semaphore(together)

    def was_asked(number: int) -> bool:
        return any(sent["messages"][0]["content"] == f"{number}" for sent in home.fake.requests)

    async def ask_twice(number: int) -> None:
        async with room:
            body = bodies(messages=[{"role": "user", "content": f"{number}"}])
            once = asyncio.create_task(home.post(attempt.key, PATH, body))
            await (once if number % 3 else until(lambda: was_asked(number)))
            again = await home.post(attempt.key, PATH, body, **(RETRY if number % 2 else {}))
            first = await once
            assert again[1]["choices"] == first[1]["choices"]

    await asyncio.gather(*(ask_twice(number) for number in range(40)))
    wanted = {f"re: {n}": 1 if n % 2 else 2 for n in range(40)}
    sampled = [call.message["content"] for call in attempt.calls]
    assert {text: sampled.count(text) for text in sampled} == wanted
