"""Whatever an engine answers, the agent gets an answer or a typed error; records stay correct."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from envserver_records.errors import EngineGarbage
from envserver_records.sampling import LOGPROB_ROUNDING
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import examples
from support.fake_scale_out import ScaleOut
from support.fake_vllm import FakeVllm, ids_of, logprob
from support.raw_server import cut, head, raw_server
from support.serving import attempt_spec
from support.templates import OWN, chat_format
from support.waiting import PATIENCE

from envserver import OpenAIConfig
from envserver.models import OpenAIEngine, ProbeResult
from envserver.proxy import EngineEndpoint, Proxy, ProxyAttempt
from envserver.proxy.capabilities import Capabilities
from envserver.tokens.invariants import check_calls

Json = dict[str, Any]

CALLS = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
TOOL = {"name": "add", "description": "adds", "parameters": {"type": "object"}}
REQUESTS: dict[str, Json] = {
    "v1/chat/completions": {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": TOOL}],
    },
    "v1/responses": {"input": "hi", "tools": [{"type": "function", **TOOL}]},
    "v1/messages": {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 100,
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
    },
    "v1/completions": {"prompt": "hi"},
}


class Scripted:
    """An engine that answers what it is told to."""

    kind = "openai"
    exact = True

    def __init__(self, answer: Json, chunks: list[Json], *, cut: bool) -> None:
        self.answer = answer
        self.chunks = chunks
        self.cut = cut

    async def post(self, path: str, body: Json, **how: Any) -> Json:
        return copy.deepcopy(self.answer)

    @asynccontextmanager
    async def stream(self, path: str, body: Json, **how: Any) -> AsyncIterator[AsyncIterator[Json]]:
        async def chunks() -> AsyncIterator[Json]:
            for chunk in self.chunks:
                yield copy.deepcopy(chunk)
            if self.cut:
                raise EngineGarbage("The engine's stream ended before its [DONE].")

        yield chunks()


ODD: list[Any] = [None, True, False, -1, 0, 1, 1.5, 2**31, 2**63, 2**64 - 1, 1e20, -1e300, 1e300]
ODD += ["", "x", [], {}, [None], [[1]], [{}], {"a": 1}, [1, 2, 3], [True], [0.5]]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Each (holder, key) in a JSON value."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        found.append((value, key))
        if isinstance(item, dict | list):
            found += places(item)
    return found


@st.composite
def spoiled(draw: st.DrawFn, make: Callable[[Json], Any], body: Json) -> Any:
    """What `make` gives for `body`, with up to three things changed."""
    value = json.loads(json.dumps(make(body)))
    for _ in range(draw(st.integers(0, 3))):
        spoil(value, lambda options: draw(st.sampled_from(options)))
    return value


def spoil(value: Any, choose: Callable[[list[Any]], Any]) -> None:
    """Changes one thing in a JSON value."""
    named: dict[Any, list[tuple[Any, Any]]] = {}
    for holder, key in places(value):
        # By name: else nearly all that is changed would be one of the many ids.
        named.setdefault(key if isinstance(key, str) else None, []).append((holder, key))
    if not named:
        return
    holder, key = choose(named[choose([*named])])
    what = choose(["put", "put", "drop", "twice", "swap"])
    if what == "put":
        holder[key] = copy.deepcopy(choose(ODD))
    elif what == "drop":
        del holder[key]
    elif what == "twice" and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif what == "swap" and isinstance(holder, list):
        holder.reverse()


fake = FakeVllm(text="Hi.", reasoning="so")
WIDE = "Hé€ 🙂."


def whole(body: Json) -> Json:
    return fake.answer(body)


def whole_with_calls(body: Json) -> Json:
    answer = fake.answer(body)
    for choice in answer["choices"]:
        choice["message"] |= {"content": None, "tool_calls": CALLS}
    return answer


def completion(body: Json) -> Json:
    answer = fake.answer(body)
    answer["object"] = "text_completion"
    for choice in answer["choices"]:
        entries = choice["logprobs"]["content"]
        choice["text"] = choice.pop("message")["content"]
        choice["prompt_token_ids"] = answer["prompt_token_ids"]
        choice["logprobs"] = {"token_logprobs": [entry["logprob"] for entry in entries]}
    return answer


def chunks(body: Json) -> list[Json]:
    return list(fake.chunks(body))


ASKED: Json = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "logprobs": True,
    "return_token_ids": True,
    "stream_options": {"include_usage": True},
}


Given = dict[int, Json]
"""By index of the choice: its prompt, ids and logprobs, as the engine told them."""


def may_be_exact(given: Given, count: Any) -> set[int]:
    """The choices whose calls may be called exact: a check of its own, not the proxy's."""
    for choice in given.values():
        if choice["ids"] is None and type(count) is int and count == 0:
            choice["ids"] = []
        if choice["ids"] == [] and choice["logprobs"] is None:
            choice["logprobs"] = []
    counted = all(isinstance(choice["ids"], list) for choice in given.values())
    total = sum(len(choice["ids"] or ()) for choice in given.values()) if counted else None
    if total is not None and count not in (None, total):
        return set()
    return {
        index
        for index, choice in given.items()
        if is_ids(choice["prompt"])
        and is_ids(choice["ids"])
        and is_logprobs(choice["logprobs"])
        and len(choice["ids"]) == len(choice["logprobs"])
    }


def exact_in(answer: Json) -> set[int]:
    """`may_be_exact` of a whole answer."""
    usage = answer.get("usage")
    given = {}
    for choice in answer["choices"] if isinstance(answer.get("choices"), list) else ():
        if isinstance(choice, dict):
            own = choice.get("prompt_token_ids")
            given[choice.get("index", 0) if is_ids([choice.get("index", 0)]) else 0] = {
                "prompt": own if isinstance(own, list) else answer.get("prompt_token_ids"),
                "ids": choice.get("token_ids"),
                "logprobs": told_logprobs(choice),
            }
    return may_be_exact(given, usage.get("completion_tokens") if isinstance(usage, dict) else None)


def exact_in_stream(parts: list[Json]) -> set[int]:
    """`may_be_exact` of a stream."""
    prompt = count = None
    given: Given = {}
    for part in parts:
        if isinstance(part.get("prompt_token_ids"), list) and prompt is None:
            prompt = part["prompt_token_ids"]
        usage = part.get("usage")
        if isinstance(usage, dict) and usage.get("completion_tokens") is not None:
            count = usage["completion_tokens"]
        for choice in part["choices"] if isinstance(part.get("choices"), list) else ():
            if not isinstance(choice, dict):
                continue
            index = choice.get("index", 0) if is_ids([choice.get("index", 0)]) else 0
            held = given.setdefault(index, {"prompt": None, "ids": [], "logprobs": []})
            if isinstance(choice.get("token_ids"), list):
                held["ids"] += choice["token_ids"]
            told = told_logprobs(choice)
            held["logprobs"] += told if isinstance(told, list) else []
            if isinstance(choice.get("prompt_token_ids"), list) and held["prompt"] is None:
                held["prompt"] = choice["prompt_token_ids"]
    for held in given.values():
        held["prompt"] = prompt if held["prompt"] is None else held["prompt"]
    return may_be_exact(given, count)


def told_logprobs(choice: Json) -> Any:
    held = choice.get("logprobs")
    if not isinstance(held, dict):
        return None
    if isinstance(held.get("content"), list):
        return [e.get("logprob") if isinstance(e, dict) else None for e in held["content"]]
    return held.get("token_logprobs")


def is_ids(ids: Any) -> bool:
    return isinstance(ids, list) and all(type(i) is int and 0 <= i < 2**31 for i in ids)


def is_logprobs(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(v) in (int, float) and -3e38 < v <= LOGPROB_ROUNDING for v in values
    )


class Heard:
    """What an agent hears."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.ended = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message.get("body", b"")
            self.ended = not message.get("more_body", False)

    def check(self) -> None:
        """It is JSON, or a stream of it, to the end."""
        assert self.ended
        assert self.status in (200, 400, 502, 503)
        if self.body.startswith((b"data:", b"event:", b":")):
            for event in self.body.decode().strip().split("\n\n"):
                for line in event.split("\n"):
                    if line.startswith("data:") and line != "data: [DONE]":
                        assert isinstance(orjson.loads(line[5:]), dict)
        else:
            assert bool(orjson.loads(self.body).get("error")) == (self.status != 200)


async def asked(
    engine: Any, path: str, request: Json, endpoint: EngineEndpoint | None = None
) -> tuple[Heard, ProxyAttempt]:
    """One request, and what came of it."""
    proxy = Proxy(engine, endpoint=endpoint)
    attempt = proxy.open(attempt_spec())
    heard = Heard()
    messages = [{"type": "http.request", "body": json.dumps(request).encode()}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        return await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "path": f"/r/{attempt.key}/{path}", "headers": []}
    async with asyncio.timeout(PATIENCE):
        await proxy.asgi()(scope, receive, heard.send)
    return heard, attempt


def ask(engine: Scripted, path: str, request: Json) -> tuple[Heard, ProxyAttempt]:
    """As `asked`, on a loop of its own."""
    return asyncio.run(asked(engine, path, request))


def check_records(attempt: ProxyAttempt, exact: set[int]) -> None:
    """Every call is exact, where that may be said, or says why it is not."""
    assert attempt.calls or attempt.engine_failure
    check_calls(attempt.calls)
    for call in attempt.calls:
        if call.delivered == "none":
            assert "undelivered_completion" in call.flags
        else:
            assert call.choice in exact if call.exact else call.flags


PATHS = st.sampled_from(["v1/chat/completions", "v1/responses", "v1/messages"])
many = settings(max_examples=examples(120), deadline=None)


@many
@given(
    path=PATHS,
    answer=spoiled(whole, ASKED) | spoiled(whole_with_calls, {**ASKED, "n": 2}),
    streams=st.booleans(),
)
def test_a_whole_answer_with_anything_changed_in_it(path: str, answer: Any, streams: bool) -> None:
    if not isinstance(answer, dict):
        return
    engine = Scripted(answer, [], cut=False)
    heard, attempt = ask(engine, path, {**REQUESTS[path], "stream": streams, "model": "m"})
    heard.check()
    check_records(attempt, exact_in(answer))


@many
@given(answer=spoiled(completion, ASKED))
def test_a_text_completion_with_anything_changed_in_it(answer: Any) -> None:
    if not isinstance(answer, dict):
        return
    path = "v1/completions"
    heard, attempt = ask(Scripted(answer, [], cut=False), path, {**REQUESTS[path], "model": "m"})
    heard.check()
    check_records(attempt, exact_in(answer))


@many
@given(path=PATHS, streamed=spoiled(chunks, ASKED), cut=st.booleans())
def test_a_stream_with_anything_changed_in_it(path: str, streamed: Any, cut: bool) -> None:
    if not isinstance(streamed, list):
        return
    parts = [chunk for chunk in streamed if isinstance(chunk, dict)]
    request = {k: v for k, v in REQUESTS[path].items() if k != "tools"}
    heard, attempt = ask(
        Scripted({}, parts, cut=cut), path, {**request, "stream": True, "model": "m"}
    )
    heard.check()
    check_records(attempt, exact_in_stream(parts))
    if cut:
        assert all(call.delivered == "none" for call in attempt.calls)


CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
MORE: list[Json] = [{}, {"n": 2}, {"tools": REQUESTS["v1/chat/completions"]["tools"]}]
MORE += [{**more, "logprobs": True, "top_logprobs": 2, "return_token_ids": True} for more in MORE]


@many
@given(
    data=st.data(),
    odd=st.sampled_from(["generate", "derender"]),
    more=st.sampled_from(MORE),
    streams=st.booleans(),
)
def test_answers_of_the_token_endpoints_with_anything_changed_in_them(
    data: st.DataObject, odd: str, more: Json, streams: bool
) -> None:
    def change(path: str, answer: Json) -> None:
        if path.endswith(odd) and data.draw(st.booleans()):
            spoil(answer, lambda options: data.draw(st.sampled_from(options)))

    format = chat_format(OWN["chatml"])
    engine = ScaleOut(format, "Hello.", CALL, spoil=change)
    probe_result = ProbeResult(mode="tokens", model="tiny", tools=True)

    async def find() -> Capabilities:
        return Capabilities(probe_result=probe_result, format=format)

    request = {"messages": ASKED["messages"], "model": "m", "stream": streams, **more}
    endpoint = EngineEndpoint(engine, find=find)
    heard, attempt = asyncio.run(asked(engine, "v1/chat/completions", request, endpoint))
    heard.check()
    assert attempt.calls or attempt.engine_failure
    check_calls(attempt.calls)


def test_a_stream_with_a_text_without_its_ids_is_not_exact() -> None:
    """Where the engine tells no count either."""
    *parts, _ = chunks(ASKED)
    parts[2]["choices"][0] |= {"token_ids": None, "logprobs": None}
    path = "v1/chat/completions"
    request = {"messages": ASKED["messages"], "stream": True, "model": "m"}
    _, attempt = ask(Scripted({}, parts, cut=False), path, request)
    (call,) = attempt.calls
    assert not call.exact
    assert call.flags == ["missing_token_ids"]


@settings(max_examples=examples(40), deadline=None)
@given(path=PATHS, end=st.sampled_from(["\n", "\r\n", "\r"]), data=st.data())
def test_where_a_stream_is_cut_changes_nothing_in_the_record(
    path: str, end: str, data: st.DataObject
) -> None:
    parts = [json.dumps(part, ensure_ascii=False) for part in FakeVllm(text=WIDE).chunks(ASKED)]
    stream = "".join(f"data: {part}{end}{end}" for part in [*parts, "[DONE]"]).encode()
    cuts = data.draw(st.lists(st.integers(1, len(stream)), max_size=40))
    request = {k: v for k, v in REQUESTS[path].items() if k != "tools"}

    async def work() -> ProxyAttempt:
        async with raw_server() as raw:
            raw.pieces, raw.end = (
                [head("text/event-stream", len(stream)), *cut(stream, cuts)],
                "keep",
            )
            config = OpenAIConfig(base_url=raw.url, server_type="vllm")
            async with OpenAIEngine(config) as engine:
                return (await asked(engine, path, {**request, "stream": True, "model": "m"}))[1]

    (call,) = asyncio.run(work()).calls
    assert call.exact
    assert not call.flags
    assert call.message["content"] == WIDE
    assert call.completion_ids.tolist() == ids_of(WIDE)
    assert call.logprobs.tolist() == [logprob(token) for token in ids_of(WIDE)]


@pytest.mark.parametrize("path", ["v1/chat/completions", "v1/responses", "v1/messages"])
def test_an_unspoiled_answer_is_exact(path: str) -> None:
    engine = Scripted(whole(ASKED), chunks(ASKED), cut=False)
    for streams in (False, True):
        request = {**REQUESTS[path], "stream": streams, "model": "m"}
        heard, attempt = ask(engine, path, request)
        assert heard.status == 200
        assert [call.exact for call in attempt.calls] == [True]
