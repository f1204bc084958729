"""A client's retry gets the answer that was sampled; other equal requests are new samples."""

from __future__ import annotations

import asyncio

import pytest
from support.proxy_house import ASK, TOOL_CALLS, TOOLS, House, house
from support.waiting import until

from envserver.proxy import Capabilities

RETRY = {"x-stainless-retry-count": "1"}
CODEX = {"user-agent": "codex_exec/0.169.0 (Debian 12.0.0; x86_64) unknown (codex_exec; 0.169.0)"}
CLAUDE = {"user-agent": "claude-cli/2.1.197 (external, sdk-cli)", "x-stainless-retry-count": "0"}
PATH = "v1/chat/completions"
BODY = {"model": "any", "messages": ASK}
OTHER = {**BODY, "seed": 1}


async def test_a_marked_retry_gets_the_same_answer_and_takes_no_turn(home: House) -> None:
    attempt, _ = home.open(max_turns=1)
    _, first = await home.post(attempt.key, PATH, BODY)
    assert await home.post(attempt.key, PATH, BODY, **RETRY) == (200, first)
    (call,) = attempt.calls
    assert (call.replayed, call.flags) == (True, ["client_retry_replayed"])
    assert len(home.fake.requests) == 1


async def test_what_is_no_retry_is_a_new_sample(home: House) -> None:
    attempt, _ = home.open(agents=["main", "other"])
    await asyncio.gather(*(home.post(attempt.key, PATH, BODY) for _ in range(4)))
    await home.post(attempt.key, PATH, OTHER, **RETRY)  # it says something else
    await home.post(attempt.key, f"a/other/{PATH}", BODY, **RETRY)
    assert len(attempt.calls) == len(home.fake.requests) == 6
    keyed, _ = home.open()
    for key in ("first", "second"):  # a key that is new names a new request also in a retry
        headers = {"idempotency-key": key, **RETRY}
        assert (await home.post(keyed.key, PATH, BODY, **headers))[0] == 200
    await home.post(keyed.key, PATH, BODY, **RETRY)
    assert len(keyed.calls) == 3
    assert not any(call.replayed for call in [*attempt.calls, *keyed.calls])


async def test_an_idempotency_key_names_one_answer(home: House) -> None:
    attempt, _ = home.open()
    key = {"idempotency-key": "step-1"}
    answers = await asyncio.gather(*(home.post(attempt.key, PATH, BODY, **key) for _ in range(8)))
    assert len({str(answer) for answer in answers}) == 1
    assert len(attempt.calls) == 1
    status, refusal = await home.post(attempt.key, PATH, OTHER, **key)
    assert (status, refusal["error"]["code"]) == (409, "conflict")


@pytest.mark.parametrize("mark", [RETRY, {}])
@pytest.mark.parametrize("streamed", [False, True])
async def test_what_a_client_lost_is_recorded_and_given_to_its_retry(
    home: House, streamed: bool, mark: dict[str, str]
) -> None:
    home.fake.held = asyncio.Event()
    home.fake.tool_calls = TOOL_CALLS
    attempt, _ = home.open()
    body = {**BODY, "tools": TOOLS, "stream": streamed}
    lost = home.asks(attempt.key, PATH, body)
    await until(lambda: home.fake.requests)
    await home.lose(lost)

    async def text() -> str:
        url = f"{home.url}/r/{attempt.key}/{PATH}"
        async with home.http.post(url, json=body, headers=mark) as answer:
            return await answer.text()

    retry = asyncio.create_task(text())
    await home.has_read(2)
    home.fake.held.set()
    assert TOOL_CALLS[1]["function"]["arguments"].replace('"', '\\"') in await retry
    (call,) = attempt.calls
    assert (call.delivered, call.flags) == ("full", ["client_retry_replayed"])
    assert len(home.fake.requests) == 1


@pytest.mark.parametrize("program", [CODEX, CLAUDE])
async def test_what_a_coding_program_asks_again_after_its_answer_is_one_sample(
    home: House, program: dict[str, str]
) -> None:
    attempt, _ = home.open(max_turns=3)
    answers = [await home.post(attempt.key, PATH, BODY, **program) for _ in range(30)]
    assert len({str(answer) for answer in answers}) == 1
    (call,) = attempt.calls
    assert call.flags == ["client_retry_replayed"]
    # It has gone on since.
    await home.post(attempt.key, PATH, OTHER, **program)
    await home.post(attempt.key, PATH, BODY, **program)
    assert len(attempt.calls) == 3


async def test_what_helpers_of_a_coding_program_ask_at_once_are_samples_of_their_own(
    home: House,
) -> None:
    home.fake.held = asyncio.Event()
    attempt, _ = home.open()
    asking = [home.asks(attempt.key, PATH, BODY, **CODEX) for _ in range(2)]
    await until(lambda: len(home.fake.requests) == 2)
    home.fake.held.set()
    await asyncio.gather(*asking)
    assert len(attempt.calls) == 2


async def test_a_request_that_failed_is_made_anew_by_its_retry(home: House) -> None:
    home.fake.faults.extend([500] * 6)
    attempt, _ = home.open(max_turns=1)
    statuses = [(await home.post(attempt.key, PATH, BODY, **CODEX))[0] for _ in range(5)]
    assert statuses == [502, 502, 502, 200, 200]
    assert (len(attempt.calls), attempt.calls[0].replayed) == (1, True)


async def test_of_equal_requests_a_retry_gets_the_answer_that_was_lost(home: House) -> None:
    home.fake.held = asyncio.Event()
    attempt, _ = home.open()
    asking = [home.asks(attempt.key, PATH, BODY) for _ in range(3)]
    await until(lambda: len(home.fake.requests) == 3)
    await home.lose(asking[1])
    home.fake.held.set()
    await asyncio.gather(asking[0], asking[2])
    await until(lambda: len(attempt.calls) == 3)
    assert sorted(call.delivered for call in attempt.calls) == ["full", "full", "none"]
    await home.post(attempt.key, PATH, BODY, **RETRY)
    assert [call.delivered for call in attempt.calls] == ["full"] * 3
    assert sum(call.replayed for call in attempt.calls) == 1


async def test_what_one_request_got_is_delivered_though_another_with_its_key_is_gone(
    home: House,
) -> None:
    home.fake.held = asyncio.Event()
    attempt, _ = home.open()
    first, second = (
        home.asks(attempt.key, PATH, BODY, **{"idempotency-key": "hedged"}) for _ in range(2)
    )
    await until(lambda: home.fake.requests)
    await home.has_read(2)
    await home.lose(first)
    home.fake.held.set()
    assert (await second)[0] == 200
    (call,) = attempt.calls
    assert (call.delivered, call.flags) == ("full", ["client_retry_replayed"])


async def test_a_retry_that_waits_does_not_ask_for_an_attempt_that_has_ended() -> None:
    async def find() -> Capabilities:
        await asyncio.Event().wait()
        raise AssertionError

    async with house(find=find) as home:
        attempt, _ = home.open()
        once = home.asks(attempt.key, PATH, BODY)
        await home.has_read(1)
        again = home.asks(attempt.key, PATH, BODY, **RETRY)
        await home.has_read(2)
        home.proxy.seal(attempt)
        assert [(await once)[0], (await again)[0]] == [409, 409]
        assert home.fake.requests == []
