"""What the proxy sends to the engine, records and shows, over HTTP with OpenAI's own client."""

import asyncio
import contextlib
import gzip
import json
import threading
import time
from collections import deque
from typing import Any

import msgspec
import openai
import pytest
from envserver_records.errors import ConfigError, EngineUnavailable, Outcome
from envserver_records.records import Message
from support.cases import cases_of
from support.engine_stand_in import EOS, ScaleOut, ids_of, logprob
from support.proxy_house import (
    ASK,
    TOOL_CALLS,
    TOOLS,
    House,
    asgi_answer,
    asgi_post,
    assert_exact,
    chat,
    house,
)
from support.serving import attempt_spec
from support.templates import CHATML, chat_format
from support.waiting import settled, until

from envserver import TokensConfig
from envserver.models.probe import ProbeResult
from envserver.proxy.endpoint import Capabilities, EngineEndpoint
from envserver.proxy.server import Proxy
from envserver.tokens.builder import build
from envserver.tokens.flags import Actions
from envserver.tokens.history import History

PATH = "v1/chat/completions"
IMAGE = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAf"
STREAMED = pytest.mark.parametrize("streamed", [False, True])


# Recording


@STREAMED
async def test_a_call_is_recorded_exactly_and_not_shown_so(home: House, streamed: bool) -> None:
    attempt, client = home.open()
    home.proxy.publish_version(7)
    raw = await client.chat.completions.with_raw_response.create(
        model="any", messages=ASK, stream=streamed
    )
    text = (await raw.http_response.aread()).decode()
    assert "token_ids" not in text
    assert '"logprob"' not in text
    assert not streamed or '"completion_tokens"' not in text, "usage is told when asked for"
    (call,) = attempt.calls
    assert_exact(call)
    assert (call.index, call.model, call.finish_reason) == (0, "tiny", "stop")
    assert call.message == {"role": "assistant", "content": "Hëllo."}
    assert call.messages == ASK
    assert call.versions[0].version == 7
    assert (call.flags, call.delivered, call.streamed) == ([], "full", streamed)


@STREAMED
async def test_logprobs_usage_and_n_answers_are_for_whom_asks(home: House, streamed: bool) -> None:
    attempt, client = home.open()
    asked: Any = {"model": "any", "messages": ASK, "n": 3, "logprobs": True, "stream": streamed}
    if streamed:
        asked["stream_options"] = {"include_usage": True}
    answer = await client.chat.completions.create(**asked)
    parts = [part async for part in answer] if streamed else [answer]
    got: list[list[float]] = [[], [], []]
    for choice in (choice for part in parts for choice in part.choices if choice.logprobs):
        got[choice.index] += [entry.logprob for entry in choice.logprobs.content]
    assert got == [[logprob(token) for token in ids_of("Hëllo.")]] * 3
    assert [part.usage.completion_tokens for part in parts if part.usage] == [24]
    assert [(call.choice, call.index) for call in attempt.calls] == [(n, n) for n in range(3)]
    for call in attempt.calls:
        assert_exact(call)


async def test_tools_are_asked_for_whole_and_streamed_to_the_agent(home: House) -> None:
    home.fake.tool_calls, home.fake.finish = TOOL_CALLS, "tool_calls"
    attempt, client = home.open()
    asked: Any = {"model": "any", "messages": ASK, "tools": TOOLS, "stream": True}
    asked["stream_options"] = {"include_usage": True}
    chunks = [chunk async for chunk in await client.chat.completions.create(**asked)]
    assert not home.fake.requests[0].get("stream")
    choices = [choice for chunk in chunks for choice in chunk.choices]
    calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert [(c.index, c.id) for c in calls] == [(0, "c1"), (1, "c2")]
    assert [c.function.arguments for c in calls] == ['{"a":1}', '{"a":2}']
    assert choices[-1].finish_reason == "tool_calls"
    assert choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == len(ids_of("Hëllo."))
    (call,) = attempt.calls
    assert_exact(call)
    assert (call.message["tool_calls"], call.tools) == (TOOL_CALLS, TOOLS)


async def test_reasoning_that_the_agent_refuses_is_sampled_but_not_shown(home: House) -> None:
    home.fake.reasoning = "hm"
    attempt, client = home.open()
    choice = await chat(client, extra_body={"include_reasoning": False})
    assert home.fake.requests[0]["include_reasoning"] is True
    assert "reasoning" not in choice.message.model_dump()
    assert_exact(attempt.calls[0])


async def test_images_pass_and_are_not_continued_by_tokens(home: House) -> None:
    image = {"type": "image_url", "image_url": {"url": IMAGE}}
    attempt, client = home.open()
    await chat(client, messages=[{"role": "user", "content": [image]}])
    assert home.fake.requests[0]["messages"][0]["content"] == [image]
    (call,) = attempt.calls
    assert (call.edge, call.exact) == ("root", True)
    assert call.flags == ["multimodal_unstitched", "images_unplaced"]


TURN: list[Message] = [
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "Two."},
]
LIST = "Look at this list, of course: 2 + 2 = 4. " * 500


@pytest.mark.parametrize(
    ("messages", "aside"),
    [
        ([*TURN, {"role": "user", "content": "More."}], False),
        ([*TURN * 100, {"role": "user", "content": "More."}], True),
        ([*TURN, {"role": "user", "content": LIST}], True),
    ],
)
async def test_a_long_request_is_planned_in_another_thread_with_the_same_result(
    messages: list[Message], aside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []
    plan, format = History.plan, chat_format(CHATML, stops=["<|im_end|>"])
    engine = ScaleOut(format, "Two.")

    def noted(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread() is not threading.main_thread())
        return plan(*args, **kwargs)

    async def find() -> Capabilities:
        return Capabilities(probe_result=ProbeResult(mode="tokens", model="tiny"), format=format)

    async def talk(key: str) -> None:
        """Two calls; the second goes on from the first by as much again."""
        for asked in (messages, [*messages, TURN[1], messages[-1]]):
            status, answer = await asgi_answer(proxy, key, {"model": "tiny", "messages": asked})
            assert status == 200, answer

    monkeypatch.setattr(History, "plan", noted)
    proxy = Proxy(engine, endpoint=EngineEndpoint(engine, find=find))
    attempts = [proxy.open(attempt_spec(seconds=600.0)) for _ in range(4)]
    await asyncio.gather(*(talk(attempt.key) for attempt in attempts))
    assert threads.count(True) == (8 if aside else 0)
    for attempt in attempts:
        root, going_on = attempt.calls
        assert (going_on.planned_parent, going_on.edge) == (0, "exact")
        seen = [*root.prompt_ids.tolist(), *root.completion_ids.tolist()]
        assert going_on.prompt_ids.tolist()[: len(seen)] == seen


# What is asked of the engine


async def test_sampling_is_the_runs_and_the_protocol_is_the_agents(home: House) -> None:
    attempt, client = home.open(temperature=0.5, top_p=0.9, max_tokens=50)
    asked: Any = {"temperature": 0.0, "top_p": 0.1, "frequency_penalty": 1.5}
    kept: Any = {"stop": ["x"], "seed": 3, "max_tokens": 20}
    await chat(client, **asked, **kept, extra_body={"top_k": 1, "min_p": 0.5, "watermarking": True})
    sent = home.fake.requests[0]
    assert "watermarking" not in sent
    assert (sent["model"], sent["temperature"], sent["top_p"]) == ("tiny", 0.5, 0.9)
    assert {name: sent[name] for name in kept} == kept
    assert (sent["top_k"], sent["min_p"], sent["frequency_penalty"]) == (-1, 0.0, 0.0)
    assert (sent["return_token_ids"], sent["logprobs"]) == (True, True)
    assert attempt.calls[0].sampling["temperature"] == 0.5
    assert attempt.calls[0].flags == ["top_p_active"]
    (row,) = build(attempt.calls)
    assert [(span.temperature, span.altered) for span in row.sampling] == [(0.5, ("top_p",))]


async def test_calls_that_the_agent_wants_one_at_a_time_are_sampled_freely_and_flagged() -> None:
    async with house(tool_calls=TOOL_CALLS) as home:
        attempt, client = home.open()
        free = await chat(client, tools=TOOLS)
        single = await chat(client, tools=TOOLS, parallel_tool_calls=False)
        shown = [len(answer.message.tool_calls or []) for answer in (free, single)]
        assert shown == [2, 1]
        assert [call.flags for call in attempt.calls] == [[], ["parallel_calls_dropped"]]
        await chat(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        sent = [request.get("parallel_tool_calls") for request in home.fake.requests]
        assert sent == [None, None, False]


async def test_a_field_without_effect_is_flagged(home: House) -> None:
    attempt, client = home.open()
    await chat(client, extra_body={"usage": {"include": True}, "reasoning": {}})
    (call,) = attempt.calls
    assert (call.flags, call.sampling["ignored"]) == (["fields_ignored"], ["usage", "reasoning"])
    assert not {"usage", "reasoning"} & home.fake.requests[0].keys()


STRICT = [{"type": "function", "function": {"name": "add", "strict": True}}]


async def test_constrained_sampling_is_flagged_and_masked() -> None:
    tokens = TokensConfig(constraints="all", strict_tools="keep", extra_fields=["custom"])
    async with house(tokens=tokens) as home:
        for more in (
            {"response_format": {"type": "json_object"}},
            {"tools": TOOLS, "tool_choice": "required"},
            {"logit_bias": {"5": 1}},
            {"extra_body": {"structured_outputs": {"choice": ["a", "b"]}}},
            {"extra_body": {"thinking_token_budget": 16}},
            {"tools": STRICT},
        ):
            attempt, client = home.open()
            await chat(client, **more)
            assert attempt.calls[0].flags == ["structured_output_masked"], more
            assert build(attempt.calls) == []
            trained = build(attempt.calls, Actions({"structured_output_masked": "train"}))
            assert trained[0].flags == ["structured_output_masked"]
        unchecked, client = home.open()  # what the run passes on as it is
        await chat(client, extra_body={"custom": 1})
        assert home.fake.requests[-1]["custom"] == 1
        assert "unchecked_fields" in build(unchecked.calls)[0].flags


async def test_strict_is_taken_off_tools_where_it_alone_binds_a_trained_call(home: House) -> None:
    attempt, client = home.open()
    await chat(client, tools=STRICT)
    await chat(client, tools=STRICT, tool_choice="required")
    free, forced = home.fake.requests
    assert [request["tools"][0]["function"]["strict"] for request in (free, forced)] == [
        False,
        True,
    ]
    flags = [call.flags for call in attempt.calls]
    assert flags == [["strict_dropped"], ["structured_output_masked"]]
    assert attempt.calls[0].tools == free["tools"]
    assert len(build(attempt.calls)) == 1


async def test_a_request_that_cannot_be_recorded_is_refused_and_takes_no_turn(home: House) -> None:
    attempt, _ = home.open(max_turns=1)
    malformed = [[], b"{", b"\xff", b'{"messages": NaN}', b"[" * 100_000]
    for body in ({"messages": []}, {"messages": ASK, "n": 1000}, *malformed):
        status, answer = await home.post(attempt.key, PATH, body)
        assert (status, answer["error"]["code"]) == (400, "input")
    assert not home.fake.requests
    assert (await home.post(attempt.key, PATH, {"messages": ASK}))[0] == 200


async def test_gzip_is_read_and_bounded_when_inflated(home: House) -> None:
    attempt, _ = home.open()
    packed = gzip.compress(json.dumps({"messages": ASK}).encode())
    for body, encoding, status in (
        (packed, "gzip", 200),
        (gzip.compress(b'{"messages": "' + b"x" * 10_000_000), "gzip", 413),
        (packed[:-5], "gzip", 400),
        (b"{}", "gzip", 400),
        (b"{}", "br", 400),
        (b"x" * 100_001, "identity", 413),
    ):
        headers = {"content-encoding": encoding}
        assert (await home.post(attempt.key, PATH, body, **headers))[0] == status


# Flags


CUT_CALL = '<tool_call>\n{"name": "add", "argu'


@STREAMED
@pytest.mark.parametrize(
    ("how", "asked", "flags"),
    [
        ({"omit": frozenset({"token_ids"})}, {}, ["missing_token_ids"]),
        ({"omit": frozenset({"prompt_token_ids"})}, {}, ["missing_token_ids"]),
        ({"omit": frozenset({"logprobs"})}, {}, ["missing_logprobs"]),
        ({"miscount": 1}, {}, ["logprob_count_mismatch"]),
        ({"finish": "abort", "stop_reason": EOS}, {}, ["finish_abort"]),
        ({}, {"max_tokens": 3}, ["truncated_length"]),
        (
            {"text": CUT_CALL + "x" * 100},
            {"tools": TOOLS, "max_tokens": len(CUT_CALL)},
            ["truncated_length", "truncated_in_tool_call"],
        ),
        (
            {"text": "I will add these two numbers."},
            {"tools": TOOLS, "max_tokens": 23},
            ["truncated_length"],
        ),
    ],
)
async def test_what_an_answer_lacks_and_how_it_ended_is_flagged(
    how: dict[str, Any], asked: dict[str, Any], flags: list[str], streamed: bool
) -> None:
    async with house(**how) as home:
        attempt, client = home.open()
        await chat(client, streamed, **asked)
        (call,) = attempt.calls
        assert call.flags == flags
        assert call.exact == (not ("omit" in how or "miscount" in how))
        if how.get("finish"):
            assert (call.finish_reason, call.stop_reason) == ("abort", EOS)
        if asked:
            assert call.finish_reason == "length"


async def test_logprobs_that_stand_for_minus_infinity_are_flagged_untrained(home: House) -> None:
    def extreme(answer: Any) -> None:
        answer["choices"][0]["logprobs"]["content"][-1]["logprob"] = -9999.0  # vLLM's stand-in

    home.spoil(extreme)
    attempt, client = home.open()
    await chat(client)
    (call,) = attempt.calls
    assert (call.exact, call.flags) == (True, ["extreme_logprob"])
    assert build(attempt.calls) == []


@STREAMED
@pytest.mark.parametrize("told", [[], None])
async def test_nothing_is_missing_where_nothing_was_sampled(
    home: House, monkeypatch: pytest.MonkeyPatch, told: list[int] | None, streamed: bool
) -> None:
    nothing = {"finish_reason": "abort", "token_ids": told, "logprobs": None}
    usage = {"usage": {"completion_tokens": 0}}
    chunks = home.fake.chunks

    def empty_chunks(body: Any) -> Any:
        first, *_, last, end = chunks(body)
        last["choices"][0] |= nothing
        yield from (first, last, end | usage)

    home.spoil(lambda answer: (answer.update(usage), answer["choices"][0].update(nothing)))
    monkeypatch.setattr(home.fake, "chunks", empty_chunks)
    attempt, client = home.open()
    await chat(client, streamed)
    (call,) = attempt.calls
    assert (call.exact, call.flags) == (True, ["finish_abort"])
    assert call.completion_ids.size == call.logprobs.size == 0


async def test_an_engine_without_token_ids_is_recorded_as_text() -> None:
    async with house(server_type="openai") as plain:
        attempt, client = plain.open()
        await chat(client)
        assert not {"return_token_ids", "logprobs", "top_k"} & set(plain.fake.requests[0])
        (call,) = attempt.calls
        assert not call.exact
        assert "missing_token_ids" in call.flags
        assert call.message["content"] == "Hëllo."


# Waiting


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("tools", [[], TOOLS])
async def test_a_client_that_waits_for_a_stream_hears_that_work_goes_on(
    home: House, monkeypatch: pytest.MonkeyPatch, tools: list[Any], fails: bool
) -> None:
    monkeypatch.setattr("envserver.proxy.request_handler.KEEP_ALIVE_SECONDS", 0.02)
    await home.proxy.gate.pause("keep", 1.0)
    home.fake.tool_calls = TOOL_CALLS if tools else None
    attempt, _ = home.open()
    body = {"model": "any", "messages": ASK, "tools": tools, "stream": True}
    async with home.http.post(f"{home.url}/r/{attempt.key}/{PATH}", json=body) as answer:
        lines = [await answer.content.readuntil(b"\n\n") for _ in range(3)]
        assert set(lines) == {b": keep-alive\n\n"}
        if fails:
            home.proxy.seal(attempt)
        home.proxy.gate.resume()
        rest = await answer.text()
    assert ("This attempt has ended." in rest) == fails
    assert rest.endswith("data: [DONE]\n\n") != fails
    assert len(attempt.calls) == (0 if fails else 1)


# How a call through the proxy ends: recorded first, broken off, refused for a limit

BODY = {"messages": ASK}


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
async def test_an_engine_that_fails_in_a_stream_is_recorded(home: House, fault: str) -> None:
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
@pytest.mark.parametrize(("fault", "status", "code"), cases_of(__file__, "requests.toml")["faults"])
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


@STREAMED
async def test_an_attempt_with_calls_waits_for_an_engine_that_is_away(
    home: House, streamed: bool
) -> None:
    attempt, client = home.open()
    await chat(client, streamed)
    home.fake.faults = deque([503] * 4)  # two for each try of the call
    answered = asyncio.create_task(chat(client, streamed))
    await until(lambda: attempt.engine_failure is not None)
    await answered
    assert not home.fake.faults
    assert (attempt.engine_failure, attempt.engine_failures, len(attempt.calls)) == (None, 0, 2)


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
