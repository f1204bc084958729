"""The endpoint agents talk to, over real HTTP with OpenAI's own client."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
from openai import AsyncOpenAI
from support.fake_vllm import EOS, FakeVllm, fake_vllm, ids_of, logprob, prompt_ids
from support.serving import attempt_spec, serving

from envserver.config import OpenAIConfig
from envserver.errors import Outcome
from envserver.models.openai import OpenAIEngine
from envserver.proxy import Attempt, Proxy
from envserver.records import Call, VersionSpan

ASK: list[Any] = [{"role": "user", "content": "hi"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
TOOL_CALLS = [
    {"id": f"c{n}", "type": "function", "function": {"name": "add", "arguments": f'{{"a":{n}}}'}}
    for n in (1, 2)
]


class House:
    """A fake vLLM, a proxy before it, and clients."""

    def __init__(self, fake: FakeVllm, proxy: Proxy, url: str, http: aiohttp.ClientSession) -> None:
        self.fake = fake
        self.proxy = proxy
        self.url = url
        self.http = http
        self.now = 0.0

    def open(self, **limits: Any) -> tuple[Attempt, AsyncOpenAI]:
        attempt = self.proxy.open(attempt_spec(**limits))
        return attempt, self.client(attempt.key)

    def client(self, key: str, path: str = "") -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/r/{key}{path}/v1", api_key=key)

    async def post(self, key: str, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = f"{self.url}/r/{key}/{path}"
        async with self.http.post(url, data=data, headers=headers) as answer:
            text = await answer.read()
            return answer.status, json.loads(text) if text else None

    async def get(self, key: str, path: str) -> tuple[int, Any]:
        async with self.http.get(f"{self.url}/r/{key}/{path}") as answer:
            return answer.status, await answer.json()


@asynccontextmanager
async def house(server_type: Any = "vllm", max_body_bytes: int = 100_000, **how: Any) -> Any:
    async with fake_vllm(**how) as fake:
        config = OpenAIConfig(base_url=fake.url, server_type=server_type)
        async with (
            OpenAIEngine(config, tries=2, pause_seconds=0.01) as engine,
            aiohttp.ClientSession() as http,
        ):
            made = House(fake, None, "", http)  # type: ignore[arg-type]
            made.proxy = Proxy(engine, max_body_bytes=max_body_bytes, clock=lambda: made.now)
            async with serving(made.proxy.asgi()) as url:
                made.url = url
                yield made


@pytest.fixture
async def home() -> AsyncIterator[House]:
    async with house() as made:
        yield made


async def chat(client: AsyncOpenAI, streamed: bool = False, **more: Any) -> Any:
    """The answer's message and finish reason, whole or put together from its chunks."""
    more.setdefault("messages", ASK)
    if not streamed:
        answer = await client.chat.completions.create(model="any", **more)
        return answer.choices[0]
    parts: list[str] = []
    finish = None
    stream = await client.chat.completions.create(model="any", stream=True, **more)
    async for chunk in stream:
        for choice in chunk.choices:
            parts.append(choice.delta.content or "")
            finish = choice.finish_reason or finish
    return "".join(parts), finish


async def until(condition: Callable[[], Any]) -> None:
    """Waits until `condition()`; five seconds at most."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def asgi_post(
    proxy: Proxy, key: str, body: Any, send: Any, gone: asyncio.Event | None = None
) -> None:
    """One chat request to the application itself; the client hangs up when `gone` is set."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": f"/r/{key}/v1/chat/completions",
        "headers": [],
    }
    messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    await proxy.asgi()(scope, receive, send)


def assert_exact(call: Call, text: str = "Hëllo.") -> None:
    """`call` holds exactly what the fake sampled."""
    ids = ids_of(text)
    assert call.exact
    assert call.completion_ids.tolist() == ids
    assert call.logprobs.tolist() == [logprob(token) for token in ids]
    assert call.prompt_ids.tolist() == prompt_ids(call.messages)
    assert call.prompt_ids.dtype == call.completion_ids.dtype == np.int32
    assert call.versions == [VersionSpan(call.versions[0].version, 0, len(ids))]


# Recording


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_call_is_recorded_exactly_and_the_answer_shows_nothing_of_it(
    home: House, streamed: bool
) -> None:
    attempt, client = home.open()
    home.proxy.policy_version = 7
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
    assert (call.flags, call.delivered, call.streamed) == ([], True, streamed)


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
    attempt, client = home.open()
    await chat(client)
    await chat(home.client(attempt.key, "/a/critic"))
    await chat(client, extra_headers={"x-agent": "judge"})
    assert [call.agent for call in attempt.calls] == [None, "critic", "judge"]


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
        extra_body={"top_k": 1, "min_p": 0.5, "custom": 1},
    )
    sent = home.fake.requests[0]
    assert (sent["model"], sent["temperature"], sent["top_p"]) == ("tiny", 0.5, 0.9)
    assert (sent["stop"], sent["seed"], sent["custom"], sent["max_tokens"]) == (["x"], 3, 1, 20)
    assert (sent["top_k"], sent["min_p"], sent["frequency_penalty"]) == (-1, 0.0, 0.0)
    assert (sent["return_token_ids"], sent["logprobs"]) == (True, True)
    assert attempt.calls[0].sampling["temperature"] == 0.5
    assert attempt.calls[0].flags == ["temperature_not_one", "top_p_active"]


@pytest.mark.parametrize(
    "more",
    [
        {"response_format": {"type": "json_object"}},
        {"tools": TOOLS, "tool_choice": "required"},
        {"logit_bias": {"5": 1}},
        {"extra_body": {"structured_outputs": {"choice": ["a", "b"]}}},
    ],
)
async def test_constrained_sampling_is_flagged(home: House, more: dict[str, Any]) -> None:
    attempt, client = home.open()
    await chat(client, **more)
    assert attempt.calls[0].flags == ["structured_output_masked"]


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
    assert status == 422
    assert answer["error"]["code"] == "input"
    assert not home.fake.requests
    assert (await home.post(attempt.key, "v1/chat/completions", {"messages": ASK}))[0] == 200


async def test_gzip_is_read_and_bounded_when_inflated(home: House) -> None:
    attempt, _ = home.open()
    path = "v1/chat/completions"
    packed = gzip.compress(json.dumps({"messages": ASK}).encode())
    encoding = {"content-encoding": "gzip"}
    assert (await home.post(attempt.key, path, packed, **encoding))[0] == 200
    bomb = gzip.compress(b'{"messages": "' + b"x" * 10_000_000)
    assert (await home.post(attempt.key, path, bomb, **encoding))[0] == 413
    assert (await home.post(attempt.key, path, packed[:-5], **encoding))[0] == 422
    assert (await home.post(attempt.key, path, b"{}", **encoding))[0] == 422
    assert (await home.post(attempt.key, path, b"{}", **{"content-encoding": "br"}))[0] == 422
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


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_version_that_changes_meanwhile_is_flagged(home: House, streamed: bool) -> None:
    home.fake.held = asyncio.Event()
    home.proxy.policy_version = 3
    attempt, client = home.open()
    asking = asyncio.create_task(chat(client, streamed))
    await until(lambda: home.fake.requests)
    home.proxy.policy_version = 4
    home.fake.held.set()
    await asking
    assert attempt.calls[0].versions == [VersionSpan(3, 0, 8)]
    assert attempt.calls[0].flags == ["mixed_versions"]


# Before the last byte


@pytest.mark.parametrize(("tools", "streamed"), [([], False), ([], True), (TOOLS, True)])
async def test_a_call_is_recorded_before_its_end_can_be_seen(
    home: House, tools: list[Any], streamed: bool
) -> None:
    attempt, _ = home.open()
    body = {"messages": ASK, "tools": tools, "stream": streamed, "n": 2}
    seen: list[tuple[bytes, int]] = []

    async def send(message: Any) -> None:
        seen.append((message.get("body", b""), len(attempt.calls)))

    await asgi_post(home.proxy, attempt.key, body, send)
    assert b"".join(text for text, _ in seen).count(b'"finish_reason":"stop"') == 2
    for text, recorded in seen:
        if b'"finish_reason":"stop"' in text or text == seen[-1][0]:
            assert recorded == 2


async def test_an_agent_that_leaves_a_stream_early_leaves_what_was_sampled(
    home: House,
) -> None:
    home.fake.held = asyncio.Event()
    attempt, client = home.open()
    stream = await client.chat.completions.create(model="any", messages=ASK, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    await until(lambda: attempt.calls)
    (call,) = attempt.calls
    assert not call.delivered
    assert call.flags == ["undelivered_completion"]
    assert call.finish_reason == "disconnect"
    assert call.completion_ids.tolist() == ids_of("Hëllo.")[:1]
    await until(lambda: home.fake.aborted == 1)


# Ends that are none


@pytest.mark.parametrize(("tools", "streamed"), [([], False), (TOOLS, False), (TOOLS, True)])
async def test_a_client_that_hangs_up_leaves_an_undelivered_call(
    home: House, tools: list[Any], streamed: bool
) -> None:
    home.fake.held = asyncio.Event()
    attempt, client = home.open()
    asking = asyncio.create_task(chat(client, streamed, tools=tools))
    await until(lambda: home.fake.requests)
    asking.cancel()
    await until(lambda: attempt.calls)
    (call,) = attempt.calls
    assert not call.delivered
    assert not call.exact
    assert call.flags == ["undelivered_completion"]
    assert call.finish_reason == "disconnect"
    await until(lambda: home.fake.aborted == 1)


async def test_a_client_that_hangs_up_while_it_is_answered_leaves_an_undelivered_call(
    home: House,
) -> None:
    attempt, _ = home.open()
    gone = asyncio.Event()

    async def send(message: Any) -> None:
        gone.set()
        await asyncio.sleep(0.01)

    await asgi_post(home.proxy, attempt.key, {"messages": ASK, "stream": True}, send, gone)
    assert [call.delivered for call in attempt.calls] == [False]
    assert attempt.calls[0].flags == ["undelivered_completion"]


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


@pytest.mark.parametrize("streamed", [False, True])
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
    assert caught.value.status_code == status
    assert caught.value.code == code
    assert attempt.engine_failure is not None
    assert attempt.engine_failure.kind == code
    assert attempt.calls == []
    assert len(home.fake.requests) <= 2


# Limits


@pytest.mark.parametrize("streamed", [False, True])
async def test_turns_are_limited_also_when_asked_for_at_once(home: House, streamed: bool) -> None:
    attempt, client = home.open(max_turns=3)
    results = await asyncio.gather(
        *(chat(client, streamed) for _ in range(8)), return_exceptions=True
    )
    refused = [r for r in results if isinstance(r, openai.BadRequestError)]
    assert len(refused) == 5
    assert {error.code for error in refused} == {"limit_reached"}
    assert len(attempt.calls) == len(home.fake.requests) == 3
    assert attempt.limit == "turns"


async def test_tokens_are_limited_also_when_asked_for_at_once(home: House) -> None:
    home.fake.text = "x" * 100
    attempt, client = home.open(max_completion_tokens=25, max_tokens=10)
    results = await asyncio.gather(*(chat(client) for _ in range(8)), return_exceptions=True)
    assert sum(len(call.completion_ids) for call in attempt.calls) == 25
    assert sorted(sent["max_tokens"] for sent in home.fake.requests) == [5, 10, 10]
    assert sum(isinstance(r, openai.BadRequestError) for r in results) == 5
    assert attempt.limit == "tokens"
    assert attempt.engine_failure is None


async def test_tokens_that_were_reserved_and_not_used_come_back(home: House) -> None:
    home.fake.text = "ab"
    attempt, client = home.open(max_completion_tokens=12, max_tokens=10)
    await asyncio.gather(*(chat(client) for _ in range(4)))
    assert [len(call.completion_ids) for call in attempt.calls] == [3, 3, 3, 3]
    with pytest.raises(openai.BadRequestError):
        await chat(client)


async def test_n_answers_share_what_is_left(home: House) -> None:
    home.fake.text = "x" * 100
    attempt, client = home.open(max_completion_tokens=9)
    await chat(client, n=4)
    assert [len(call.completion_ids) for call in attempt.calls] == [2, 2, 2, 2]


async def test_time_that_is_over_is_a_limit_and_no_failure_of_the_engine(home: House) -> None:
    attempt, client = home.open(seconds=-1)
    with pytest.raises(openai.BadRequestError, match="time"):
        await chat(client)
    assert attempt.limit == "time"
    home.fake.held = asyncio.Event()
    for streamed in (False, True):
        attempt, client = home.open(seconds=0.2)
        with pytest.raises(openai.APIError, match="time"):
            await chat(client, streamed)
        assert attempt.limit == "time"
        assert attempt.engine_failure is None


# Keys


async def test_a_key_that_does_not_fit_is_refused(home: House) -> None:
    attempt, _ = home.open()
    other, _ = home.open()
    body = {"messages": ASK}
    path = "v1/chat/completions"
    for headers in (
        {"authorization": f"Bearer {other.key}"},
        {"authorization": "x"},
        {"x-api-key": other.key},
        {"authorization": f"Bearer {attempt.key}", "x-api-key": "ü"},
    ):
        status, answer = await home.post(attempt.key, path, body, **headers)
        assert (status, answer["error"]["code"]) == (401, "wrong_key")
    for headers in ({}, {"authorization": f"bearer {attempt.key}"}, {"x-api-key": attempt.key}):
        assert (await home.post(attempt.key, path, body, **headers))[0] == 200
    assert (await home.post("nonsense", path, body))[0] == 404
    assert len(attempt.calls) == 3


async def test_after_a_seal_nothing_is_answered_or_recorded(home: House) -> None:
    home.fake.held = asyncio.Event()
    attempt, client = home.open()
    asking = [asyncio.create_task(chat(client, streamed)) for streamed in (False, True)]
    await until(lambda: len(home.fake.requests) == 2)
    home.proxy.seal(attempt)
    plain, streamed = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(plain, openai.ConflictError)
    assert isinstance(streamed, openai.APIError)
    await until(lambda: home.fake.aborted == 2)
    with pytest.raises(openai.ConflictError):
        await chat(client)
    assert (await home.get(attempt.key, "rollout"))[0] == 409
    home.now = 61.0
    with pytest.raises(openai.NotFoundError):
        await chat(client)
    assert attempt.calls == []


async def test_other_endpoints_are_not_offered_to_an_attempt(home: House) -> None:
    attempt, _ = home.open()
    for path in ("v1/completions", "generate", "v1/responses", "", "v1"):
        assert (await home.post(attempt.key, path, {"prompt": "x"}))[0] == 404
    assert (await home.get(attempt.key, "v1/chat/completions"))[0] == 405
    assert home.fake.requests == []


# The worker's routes


async def test_a_worker_gets_its_rollout_and_posts_its_result_once(home: House) -> None:
    attempt, _ = home.open(max_turns=5)
    status, told = await home.get(attempt.key, "rollout")
    assert status == 200
    assert told["task"] == {"id": "add-1", "public": {"question": "1+1?"}}
    assert (told["rollout_id"], told["attempt"], told["max_turns"]) == ("rollout-1", 1, 5)
    assert (told["model"], told["env_config"]) == ("tiny", {"digits": 3})
    assert told["deadline"] == attempt.spec.deadline
    body = {"output": {"answer": 2}, "metrics": {"steps": 3}}
    assert await home.post(attempt.key, "result", body) == (204, None)
    assert (attempt.posted, attempt.output, attempt.metrics) == (True, {"answer": 2}, {"steps": 3})
    assert (await home.post(attempt.key, "result", {"output": 1}))[0] == 409
    assert attempt.output == {"answer": 2}


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        ("limit_reached", Outcome.SCORE),
        ("agent_error", Outcome.RETRY),
        ("engine_refused", Outcome.DROP),
    ],
)
async def test_a_posted_failure_means_what_its_kind_means(
    home: House, kind: str, outcome: Outcome
) -> None:
    attempt, _ = home.open()
    failure = {"kind": kind, "message": "m", "detail": {"limit": "time"}}
    assert (await home.post(attempt.key, "result", {"failure": failure}))[0] == 204
    assert attempt.failure is not None
    assert (attempt.failure.kind, attempt.failure.outcome) == (kind, outcome)
    assert attempt.failure.detail == {"limit": "time"}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"outputs": 1},
        {"output": 1, "failure": {"kind": "agent_error", "message": "m"}},
        {"output": 1, "metrics": {"a": "b"}},
        {"failure": {"kind": "made_up", "message": "m"}},
        {"failure": {"kind": "store_error", "message": "m"}},
        {"failure": "x"},
        b"not JSON",
        b'{"output": NaN}',
        b'{"output": "\xff"}',
        b'{"output": ' + b"[" * 50_000,
    ],
)
async def test_a_result_of_no_agreed_form_is_garbage(home: House, body: Any) -> None:
    attempt, _ = home.open()
    status, _ = await home.post(attempt.key, "result", body)
    assert status == 422
    assert attempt.failure is not None
    assert attempt.failure.kind == "worker_garbage"


async def test_log_lines_are_checked(home: House) -> None:
    attempt, _ = home.open()
    assert (await home.post(attempt.key, "log", {"event": "e", "facts": {"event": 1}}))[0] == 204
    assert (await home.post(attempt.key, "log", {"event": 1}))[0] == 422
    assert (await home.post(attempt.key, "log", {"event": "x" * 70_000}))[0] == 413


async def test_the_model_that_is_listed_is_the_attempts(home: House) -> None:
    _, client = home.open()
    assert [model.id async for model in client.models.list()] == ["tiny"]


# Guests


async def test_a_guest_is_passed_through_and_not_recorded(home: House) -> None:
    key = home.proxy.open_guest()
    client = home.client(key)
    assert (await chat(client, temperature=0.3)).message.content == "Hëllo."
    assert await chat(client, streamed=True) == ("Hëllo.", "stop")
    sent = home.fake.requests[0]
    assert (sent["temperature"], sent["model"]) == (0.3, "tiny")
    assert "return_token_ids" not in sent
    text = await client.completions.create(model="any", prompt="p", max_tokens=3)
    assert text.choices[0].text == "Hë"
    assert (await home.get(key, "rollout"))[0] == 404
    assert (await home.get(key, "v1/models"))[1]["data"][0]["id"] == "tiny"


async def test_generate_gives_ids_and_logprobs_for_ids(home: House) -> None:
    key = home.proxy.open_guest()
    body = {
        "prompt": {"prompt_token_ids": [5, 6]},
        "logprobs": 0,
        "n": 2,
        "max_tokens": 3,
        "temperature": 0.7,
    }
    status, told = await home.post(key, "generate", body)
    assert status == 200
    sent = home.fake.requests[0]
    assert (sent["prompt"], sent["logprobs"], sent["return_token_ids"]) == ([5, 6], 0, True)
    assert (sent["temperature"], sent["n"], sent["model"]) == (0.7, 2, "tiny")
    positions = [[{str(token): logprob(token)}] for token in ids_of("Hëllo.")[:3]]
    assert told["logprobs"] == [positions, positions]
    assert told["finish_reasons"] == ["length", "length"]
    assert told["text"] == ["Hë", "Hë"]
    _, told = await home.post(key, "generate", {"prompt": "ab", "prompt_logprobs": 1})
    assert told["prompt"] == "ab"
    assert told["prompt_logprobs"] == [[None, [{"7": -0.5}]]]
    for prompt in (None, "", [], {"prompt_token_ids": ["a"]}, [-1], [True]):
        assert (await home.post(key, "generate", {"prompt": prompt}))[0] == 422


async def test_health_says_whether_the_engine_answers(home: House) -> None:
    key = home.proxy.open_guest()
    assert (await home.get(key, "health"))[0] == 200
    asked = len(home.fake.headers)
    await home.get(key, "health")
    assert len(home.fake.headers) == asked
    async with OpenAIEngine(OpenAIConfig(base_url="http://127.0.0.1:9")) as dead:
        proxy = Proxy(dead)
        async with (
            serving(proxy.asgi()) as url,
            home.http.get(f"{url}/r/{proxy.open_guest()}/health") as answer,
        ):
            assert answer.status == 503
