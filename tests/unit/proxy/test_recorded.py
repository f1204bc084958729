"""What an attempt's requests leave in its record is held once, counted and bounded."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import anthropic
import msgspec
import openai
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import examples
from support.proxy_house import House, chat, house
from support.serving import attempt_spec, serving
from support.waiting import until

from envserver import Caller, OpenAIConfig
from envserver.models import OpenAIEngine
from envserver.proxy import Proxy
from envserver.proxy.bounds import AttemptBounds, InFlight, Totals
from envserver.proxy.model_request import ModelRequest
from envserver.proxy.recorded import RecordedRequests, size_of

KB = 1000
BOUNDS = AttemptBounds(max_recorded_mb=0.2)


@pytest.fixture
async def home() -> AsyncIterator[House]:
    async with house(bounds=BOUNDS) as made:
        yield made


def said(number: int, size: int = 45 * KB) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"{number}".ljust(size, "x")}]


async def test_prompts_beyond_the_bound_are_refused_to_their_rollout_only(home: House) -> None:
    (attempt, client), (other, neighbour) = home.open(), home.open()
    for number in range(4):
        await chat(client, streamed=number % 2 == 1, messages=said(number))
    for asked in (
        client.chat.completions.create(model="any", messages=said(4)),  # type: ignore[arg-type]
        client.responses.create(model="any", input=said(5)[0]["content"]),
    ):
        with pytest.raises(openai.BadRequestError, match=r"0\.2 MB .* are used up") as refused:
            await asked
        assert refused.value.code == "limit_reached"
    claude = home.claude(attempt.key)
    with pytest.raises(anthropic.BadRequestError) as told:
        await claude.messages.create(model="any", max_tokens=9, messages=said(6))  # type: ignore[arg-type]
    assert told.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]

    assert (attempt.limit, len(attempt.calls)) == ("record", 4)
    assert home.proxy.totals.refused["recorded"] == 3
    await chat(neighbour)
    assert (other.limit, other.flags) == (None, set())
    home.proxy.seal(attempt)
    home.proxy.seal(other)
    assert home.proxy.totals.recorded == 0


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_long_conversation_is_held_once(home: House, streamed: bool) -> None:
    attempt, client = home.open()
    tools = [{"type": "function", "function": {"name": "f", "description": "d" * KB}}]
    talks: list[list[dict[str, Any]]] = [[], []]
    for number in range(40):
        talk = talks[number % 2]  # two conversations that take turns
        talk += said(number, 2 * KB)
        answer = await chat(client, streamed, messages=talk, tools=tools)
        talk.append(
            {"role": "assistant", "content": answer.message.content if not streamed else "a"}
        )
    assert len(attempt.calls) == 40
    parts = [part for call in attempt.calls for part in [*call.messages, *call.tools]]
    held = size_of(*{id(part): part for part in parts}.values(), most=10**9)
    assert held < 200 * KB
    assert [m["content"] for m in attempt.calls[-1].messages] == [m["content"] for m in talk[:-1]]


async def test_only_what_equals_an_earlier_message_is_not_checked_again(home: House) -> None:
    attempt, client = home.open()

    def talk(a: Any) -> list[dict[str, Any]]:
        function = {"name": "f", "arguments": {"a": a, "b": 2}}
        calls = [{"id": "c", "type": "function", "function": function}]
        return [
            *said(1, 9),
            {"role": "assistant", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c", "content": "4"},
        ]

    for a in (1, True, 1.0, 1):
        await chat(client, messages=talk(a))
    arguments = [c.messages[1]["tool_calls"][0]["function"]["arguments"] for c in attempt.calls]
    assert [repr(one["a"]) for one in arguments] == ["1", "True", "1.0", "1"]
    for wrong in ({"role": "user", "content": [{"type": "x"}]}, {"content": "no role"}, "text"):
        with pytest.raises(openai.BadRequestError, match="messages"):
            await chat(client, messages=[*talk(1), wrong])
    assert len(attempt.calls) == 4


async def test_recorded_calls_of_services_take_space_too() -> None:
    async def echo(arguments: dict[str, Any], caller: Caller) -> Any:
        return arguments

    async with OpenAIEngine(OpenAIConfig(base_url="http://127.0.0.1:9")) as engine:
        proxy = Proxy(engine, services={"echo": echo}, bounds=BOUNDS)
        async with serving(proxy.asgi()) as url, aiohttp.ClientSession() as http:
            for keep, expected in ((False, [200] * 4), (True, [200, 200, 400, 400])):
                attempt = proxy.open(msgspec.structs.replace(attempt_spec(), keep_services=keep))
                told = []
                for _ in range(4):
                    asked = {"text": "x" * 40 * KB}
                    path = f"{url}/r/{attempt.key}/tools/echo"
                    async with http.post(path, json=asked) as answer:
                        told.append(answer.status)
                assert told == expected
                assert len(attempt.asked_services) == told.count(200) * keep
                assert attempt.limit == ("record" if keep else None)


async def test_what_the_engine_refuses_takes_no_space(home: House) -> None:
    attempt, client = home.open()
    await chat(client)
    before = attempt.in_flight.recorded
    for number in range(9):
        home.fake.faults.append((400, "This model's maximum context length is 9 tokens."))
        with pytest.raises(openai.BadRequestError, match="context length"):
            await chat(client, messages=said(number, 90 * KB))
    await until(lambda: attempt.in_flight.recorded == before == home.proxy.totals.recorded)


def test_all_records_together_are_bounded_but_each_keeps_a_part() -> None:
    bounds = AttemptBounds(max_recorded_mb=8)
    totals = Totals.of(bounds)
    many = [InFlight(bounds, totals) for _ in range(50)]
    for one in many[:42]:
        one.keep(6 * 10**6)
    with pytest.raises(Exception, match="all rollouts together"):
        many[44].keep(6 * 10**6)
    many[45].keep(4 * 10**6)
    many[0].keep(-6 * 10**6)


VALUES = st.recursive(
    st.sampled_from(["a", "b", 1, 1.0, True, 0, -0.0, None]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("xy"), inner),
    max_leaves=4,
)
TALK = st.lists(st.fixed_dictionaries({"content": VALUES}), max_size=4)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(TALK, TALK, VALUES), min_size=2, max_size=4))
def test_sharing_changes_no_request(requests: list[tuple[Any, Any, Any]]) -> None:
    record = RecordedRequests(InFlight())
    for messages, tools, value in requests:
        made = ModelRequest(
            dialect="chat", body={"v": value}, messages=messages, tools=tools, fields={"v": value}
        )
        as_sent = orjson.dumps(copy.deepcopy([made.messages, made.tools, made.fields, made.body]))
        record.take(made).end(recorded=True)
        assert orjson.dumps([made.messages, made.tools, made.fields, made.body]) == as_sent
