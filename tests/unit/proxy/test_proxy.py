"""What the proxy sends to the engine, records and shows, over HTTP with OpenAI's own client."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.fake_vllm import EOS, ids_of, logprob
from support.proxy_house import (
    ASK,
    TOOL_CALLS,
    TOOLS,
    House,
    assert_exact,
    chat,
    house,
)

from envserver import TokensConfig
from envserver.tokens import build
from envserver.tokens.flags import Actions

IMAGE = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAf"


@pytest.fixture
async def home() -> AsyncIterator[House]:
    async with house() as made:
        yield made


# Recording


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_call_is_recorded_exactly_and_the_answer_shows_nothing_of_it(
    home: House, streamed: bool
) -> None:
    attempt, client = home.open()
    home.proxy.publish_version(7)
    raw = await client.chat.completions.with_raw_response.create(
        model="any", messages=ASK, stream=streamed
    )
    text = (await raw.http_response.aread()).decode()
    assert "token_ids" not in text
    assert '"logprob"' not in text
    (call,) = attempt.calls
    assert_exact(call)
    assert (call.index, call.model, call.finish_reason) == (0, "tiny", "stop")
    assert call.message == {"role": "assistant", "content": "Hëllo."}
    assert call.messages == ASK
    assert call.versions[0].version == 7
    assert (call.flags, call.delivered, call.streamed) == ([], "full", streamed)


@pytest.mark.parametrize("group", [1, 2, 3, 100])
@pytest.mark.parametrize("cut_bytes", [None, 1, 13])
async def test_a_stream_gives_the_same_call_however_it_is_chunked(
    home: House, group: int, cut_bytes: int | None
) -> None:
    home.fake.text = "€🙂 naïve"
    home.fake.group, home.fake.cut_bytes = group, cut_bytes
    attempt, client = home.open()
    assert await chat(client, streamed=True) == ("€🙂 naïve", "stop")
    assert_exact(attempt.calls[0], "€🙂 naïve")
    assert attempt.calls[0].message["content"] == "€🙂 naïve"


@pytest.mark.parametrize("streamed", [False, True])
async def test_each_of_n_answers_is_a_call(home: House, streamed: bool) -> None:
    attempt, client = home.open()
    await chat(client, streamed, n=3)
    assert [call.choice for call in attempt.calls] == [0, 1, 2]
    assert [call.index for call in attempt.calls] == [0, 1, 2]
    for call in attempt.calls:
        assert_exact(call)


async def test_tools_are_asked_for_whole_and_streamed_to_the_agent(home: House) -> None:
    home.fake.tool_calls, home.fake.finish = TOOL_CALLS, "tool_calls"
    attempt, client = home.open()
    stream = await client.chat.completions.create(
        model="any",
        messages=ASK,
        tools=TOOLS,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert not home.fake.requests[0].get("stream")
    calls = [c for k in chunks for x in k.choices for c in x.delta.tool_calls or ()]
    assert [(c.index, c.id) for c in calls] == [(0, "c1"), (1, "c2")]
    assert [c.function.arguments for c in calls] == ['{"a":1}', '{"a":2}']
    assert [x.finish_reason for k in chunks for x in k.choices][-1] == "tool_calls"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == len(ids_of("Hëllo."))
    (call,) = attempt.calls
    assert_exact(call)
    assert call.message["tool_calls"] == TOOL_CALLS
    assert call.tools == TOOLS


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_agent_that_asks_for_logprobs_gets_them(home: House, streamed: bool) -> None:
    _, client = home.open()
    answer = await client.chat.completions.create(
        model="any", messages=ASK, logprobs=True, stream=streamed
    )
    if streamed:
        held = [
            c.logprobs.content for k in [k async for k in answer] for c in k.choices if c.logprobs
        ]
        got = [entry.logprob for content in held for entry in content]
    else:
        got = [entry.logprob for entry in answer.choices[0].logprobs.content]
    assert got == [logprob(token) for token in ids_of("Hëllo.")]


@pytest.mark.parametrize("wanted", [False, True])
async def test_a_stream_tells_its_usage_only_when_asked(home: House, wanted: bool) -> None:
    _, client = home.open()
    stream = await client.chat.completions.create(
        model="any", messages=ASK, stream=True, stream_options={"include_usage": wanted}
    )
    usages = [chunk.usage for chunk in [chunk async for chunk in stream] if chunk.usage]
    assert [usage.completion_tokens for usage in usages] == ([8] if wanted else [])


async def test_reasoning_that_the_agent_refuses_is_sampled_but_not_shown(home: House) -> None:
    home.fake.reasoning = "hm"
    attempt, client = home.open()
    choice = await chat(client, extra_body={"include_reasoning": False})
    assert home.fake.requests[0]["include_reasoning"] is True
    assert "reasoning" not in choice.message.model_dump()
    assert_exact(attempt.calls[0])


async def test_agents_of_one_attempt_have_names(home: House) -> None:
    attempt, client = home.open(agents=["solver", "critic", "judge"])
    await chat(client)
    await chat(home.client(attempt.key, "/a/critic"))
    await chat(client, extra_headers={"x-agent": "judge"})
    assert [call.agent for call in attempt.calls] == ["solver", "critic", "judge"]


# What is asked of the engine


async def test_sampling_is_the_runs_and_the_protocol_is_the_agents(home: House) -> None:
    attempt, client = home.open(temperature=0.5, top_p=0.9, max_tokens=50)
    await chat(
        client,
        temperature=0.0,
        top_p=0.1,
        stop=["x"],
        seed=3,
        frequency_penalty=1.5,
        max_tokens=20,
        extra_body={"top_k": 1, "min_p": 0.5, "watermarking": True},
    )
    sent = home.fake.requests[0]
    assert "watermarking" not in sent
    assert (sent["model"], sent["temperature"], sent["top_p"]) == ("tiny", 0.5, 0.9)
    assert (sent["stop"], sent["seed"], sent["max_tokens"]) == (["x"], 3, 20)
    assert (sent["top_k"], sent["min_p"], sent["frequency_penalty"]) == (-1, 0.0, 0.0)
    assert (sent["return_token_ids"], sent["logprobs"]) == (True, True)
    assert attempt.calls[0].sampling["temperature"] == 0.5
    assert attempt.calls[0].flags == ["top_p_active"]
    (row,) = build(attempt.calls)
    assert [(span.temperature, span.altered) for span in row.sampling] == [(0.5, ("top_p",))]


STRICT = [{"type": "function", "function": {"name": "add", "strict": True}}]


@pytest.mark.parametrize(
    "more",
    [
        {"response_format": {"type": "json_object"}},
        {"tools": TOOLS, "tool_choice": "required"},
        {"logit_bias": {"5": 1}},
        {"extra_body": {"structured_outputs": {"choice": ["a", "b"]}}},
        {"extra_body": {"thinking_token_budget": 16}},
        {"tools": STRICT},
    ],
)
async def test_constrained_sampling_is_flagged_and_masked(more: dict[str, Any]) -> None:
    tokens = TokensConfig(constraints="all", strict_tools="keep")
    async with house(tokens=tokens) as home:
        attempt, client = home.open()
        await chat(client, **more)
        assert attempt.calls[0].flags == ["structured_output_masked"]
        assert build(attempt.calls) == []
        trained = build(attempt.calls, Actions({"structured_output_masked": "train"}))
        assert trained[0].flags == ["structured_output_masked"]


async def test_strict_is_taken_off_tools_where_it_alone_constrains_a_trained_call() -> None:
    async with house() as home:
        attempt, client = home.open()
        await chat(client, tools=STRICT)
        await chat(client, tools=STRICT, tool_choice="required")
        free, forced = home.fake.requests
        assert [tool["function"]["strict"] for tool in free["tools"]] == [False]
        assert [tool["function"]["strict"] for tool in forced["tools"]] == [True]
        assert [call.flags for call in attempt.calls] == [
            ["strict_dropped"],
            ["structured_output_masked"],
        ]
        assert attempt.calls[0].tools == free["tools"]
        assert len(build(attempt.calls)) == 1


async def test_what_a_run_passes_on_unchecked_is_flagged() -> None:
    async with house(tokens=TokensConfig(extra_fields=["custom"])) as home:
        attempt, client = home.open()
        await chat(client, extra_body={"custom": 1})
        assert home.fake.requests[0]["custom"] == 1
        assert "unchecked_fields" in build(attempt.calls)[0].flags


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": "hi"},
        {"messages": ["hi"]},
        {"messages": ASK, "max_tokens": 0},
        {"messages": ASK, "n": "2"},
        {"messages": ASK, "n": 1000},
        {"messages": ASK, "truncate_prompt_tokens": 5},
        {"messages": ASK, "use_beam_search": True},
        {"messages": ASK, "chat_template_kwargs": "thinking"},
        [],
        b"{",
        b"\xff",
        b'{"messages": NaN}',
        b"[" * 100_000,
    ],
)
async def test_a_request_that_cannot_be_recorded_is_refused(home: House, body: Any) -> None:
    attempt, _ = home.open(max_turns=1)
    status, answer = await home.post(attempt.key, "v1/chat/completions", body)
    assert status == 400
    assert answer["error"]["code"] == "input"
    assert not home.fake.requests
    assert (await home.post(attempt.key, "v1/chat/completions", {"messages": ASK}))[0] == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("v1/chat/completions", '{"messages": [{"role": "user", "content": "hi"}], "stop": %s}'),
        ("v1/completions", '{"prompt": "hi", "stop": %s}'),
        ("v1/responses", '{"input": "hi", "metadata": {"deep": %s}}'),
        (
            "v1/messages",
            '{"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}],'
            ' "tools": [{"name": "add", "input_schema": {"deep": %s}}]}',
        ),
    ],
)
@pytest.mark.parametrize(("levels", "statuses"), [(90, {200, 400}), (120, {413}), (1000, {413})])
async def test_a_body_that_nests_too_deep_is_refused(
    home: House, path: str, body: str, levels: int, statuses: set[int]
) -> None:
    attempt, _ = home.open()
    sent = (body % ("[" * levels + "]" * levels)).encode()
    status, answer = await home.post(attempt.key, path, sent)
    assert status in statuses
    assert bool(answer.get("error")) == (status != 200)


async def test_gzip_is_read_and_bounded_when_inflated(home: House) -> None:
    attempt, _ = home.open()
    path = "v1/chat/completions"
    packed = gzip.compress(json.dumps({"messages": ASK}).encode())
    encoding = {"content-encoding": "gzip"}
    assert (await home.post(attempt.key, path, packed, **encoding))[0] == 200
    bomb = gzip.compress(b'{"messages": "' + b"x" * 10_000_000)
    assert (await home.post(attempt.key, path, bomb, **encoding))[0] == 413
    assert (await home.post(attempt.key, path, packed[:-5], **encoding))[0] == 400
    assert (await home.post(attempt.key, path, b"{}", **encoding))[0] == 400
    assert (await home.post(attempt.key, path, b"{}", **{"content-encoding": "br"}))[0] == 400
    assert (await home.post(attempt.key, path, b"x" * 100_001))[0] == 413


# Flags


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("how", "flag"),
    [
        ({"omit": frozenset({"token_ids"})}, "missing_token_ids"),
        ({"omit": frozenset({"prompt_token_ids"})}, "missing_token_ids"),
        ({"omit": frozenset({"logprobs"})}, "missing_logprobs"),
        ({"miscount": 1}, "logprob_count_mismatch"),
    ],
)
async def test_what_the_engine_leaves_out_is_flagged_and_not_exact(
    how: dict[str, Any], flag: str, streamed: bool
) -> None:
    async with house(**how) as home:
        attempt, client = home.open()
        await chat(client, streamed)
        assert attempt.calls[0].flags == [flag]
        assert not attempt.calls[0].exact


async def test_a_logprob_that_stands_for_minus_infinity_is_flagged_and_not_trained(
    home: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = home.fake.answer

    def extreme(body: Any) -> Any:
        made = answer(body)
        made["choices"][0]["logprobs"]["content"][-1]["logprob"] = -9999.0  # vLLM's stand-in
        return made

    monkeypatch.setattr(home.fake, "answer", extreme)
    attempt, client = home.open()
    await chat(client)
    (call,) = attempt.calls
    assert call.exact
    assert call.flags == ["extreme_logprob"]
    assert build(attempt.calls) == []


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("told", [[], None])
async def test_nothing_is_missing_where_nothing_was_sampled(
    home: House, monkeypatch: pytest.MonkeyPatch, told: list[int] | None, streamed: bool
) -> None:
    nothing = {"finish_reason": "abort", "token_ids": told, "logprobs": None}
    answer, chunks = home.fake.answer, home.fake.chunks

    def empty_answer(body: Any) -> Any:
        made = answer(body) | {"usage": {"completion_tokens": 0}}
        made["choices"][0] |= nothing
        return made

    def empty_chunks(body: Any) -> Any:
        *_, last, usage = chunks(body)
        yield next(chunks(body))
        last["choices"][0] |= nothing
        yield last
        yield usage | {"usage": {"completion_tokens": 0}}

    monkeypatch.setattr(home.fake, "answer", empty_answer)
    monkeypatch.setattr(home.fake, "chunks", empty_chunks)
    attempt, client = home.open()
    await chat(client, streamed)
    (call,) = attempt.calls
    assert call.exact
    assert call.completion_ids.size == call.logprobs.size == 0
    assert call.flags == ["finish_abort"]


async def test_an_engine_without_token_ids_is_recorded_as_text(home: House) -> None:
    async with house(server_type="openai") as plain:
        attempt, client = plain.open()
        await chat(client)
        assert not {"return_token_ids", "logprobs", "top_k"} & set(plain.fake.requests[0])
        assert not attempt.calls[0].exact
        assert "missing_token_ids" in attempt.calls[0].flags
        assert attempt.calls[0].message["content"] == "Hëllo."


@pytest.mark.parametrize("streamed", [False, True])
async def test_how_an_answer_ended_is_kept(home: House, streamed: bool) -> None:
    home.fake.finish, home.fake.stop_reason = "abort", EOS
    attempt, client = home.open()
    await chat(client, streamed)
    await chat(client, streamed, max_tokens=3)
    aborted, cut = attempt.calls
    assert (aborted.finish_reason, aborted.stop_reason) == ("abort", EOS)
    assert aborted.flags == ["finish_abort"]
    assert (cut.finish_reason, cut.flags) == ("length", ["truncated_length"])


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
    url = f"{home.url}/r/{attempt.key}/v1/chat/completions"
    async with home.http.post(url, json=body) as answer:
        lines = [await answer.content.readuntil(b"\n\n") for _ in range(3)]
        assert set(lines) == {b": keep-alive\n\n"}
        if fails:
            home.proxy.seal(attempt)
        home.proxy.gate.resume()
        rest = await answer.text()
    assert ("This attempt has ended." in rest) == fails
    assert rest.endswith("data: [DONE]\n\n") != fails
    assert len(attempt.calls) == (0 if fails else 1)


async def test_images_pass_and_are_not_continued_by_tokens(home: House) -> None:
    image = {"type": "image_url", "image_url": {"url": IMAGE}}
    attempt, client = home.open()
    await chat(client, messages=[{"role": "user", "content": [image]}])
    assert home.fake.requests[0]["messages"][0]["content"] == [image]
    (call,) = attempt.calls
    assert (call.edge, call.exact, call.flags) == (
        "root",
        True,
        ["multimodal_unstitched", "images_unplaced"],
    )


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ('<tool_call>\n{"name": "add", "argu', ["truncated_length", "truncated_in_tool_call"]),
        ("I will add these two num", ["truncated_length"]),
    ],
)
async def test_a_call_that_is_cut_off_says_so(home: House, text: str, flags: list[str]) -> None:
    home.fake.text = text + "x" * 100
    attempt, client = home.open()
    await chat(client, tools=TOOLS, max_tokens=len(text))
    assert attempt.calls[0].flags == flags
