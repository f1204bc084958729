"""Whatever an engine answers, the agent gets an answer or a typed error, and what is recorded as
exact is exact."""

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson
import pytest
from envserver_records.errors import EngineGarbage
from envserver_records.sampling import LOGPROB_ROUNDING
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import cases_of
from support.engine_stand_in import FakeVllm, ScaleOut
from support.extent import examples
from support.proxy_house import asgi_answer
from support.serving import attempt_spec
from support.templates import OWN, chat_format, user

from envserver.models.engine import EngineRequest
from envserver.models.probe import EngineMode, ProbeResult
from envserver.proxy.attempts import ProxyAttempt
from envserver.proxy.endpoint import Capabilities, EngineEndpoint
from envserver.proxy.server import Proxy
from envserver.tokens.invariants import check_calls

Json = dict[str, Any]

CALLS = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
TOOL = {"name": "add", "description": "adds", "parameters": {"type": "object"}}
CASES = cases_of(__file__, "requests.toml")
REQUESTS: dict[str, Json] = CASES["with_tools"]


@dataclass
class Scripted:
    """An engine that answers what it is told to."""

    kind = "openai"
    exact = True

    answer: Json
    chunks: list[Json]
    cut: bool

    async def post(self, request: EngineRequest) -> Json:
        return copy.deepcopy(self.answer)

    @asynccontextmanager
    async def stream(self, request: EngineRequest) -> AsyncIterator[AsyncIterator[Json]]:
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
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
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


def with_calls(body: Json) -> Json:
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


ASKED: Json = CASES["asked"]


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


def choices_of(part: Json) -> list[tuple[int, Json]]:
    """The choices in an answer or a chunk, with the index that each has or stands for."""
    told = part["choices"] if isinstance(part.get("choices"), list) else ()
    choices = [choice for choice in told if isinstance(choice, dict)]
    indexes = [choice.get("index", 0) for choice in choices]
    return [(i if is_ids([i]) else 0, choice) for i, choice in zip(indexes, choices, strict=True)]


def count_of(part: Json) -> Any:
    usage = part.get("usage")
    return usage.get("completion_tokens") if isinstance(usage, dict) else None


def exact_in(answer: Json) -> set[int]:
    """`may_be_exact` of a whole answer."""
    given = {}
    for index, choice in choices_of(answer):
        own = choice.get("prompt_token_ids")
        given[index] = {
            "prompt": own if isinstance(own, list) else answer.get("prompt_token_ids"),
            "ids": choice.get("token_ids"),
            "logprobs": told_logprobs(choice),
        }
    return may_be_exact(given, count_of(answer))


def exact_in_stream(parts: list[Json]) -> set[int]:
    prompts = [part.get("prompt_token_ids") for part in parts]
    counts = [count for part in parts if (count := count_of(part)) is not None]
    given: Given = {}
    for index, choice in (pair for part in parts for pair in choices_of(part)):
        held = given.setdefault(index, {"prompt": None, "ids": [], "logprobs": []})
        told = {"ids": choice.get("token_ids"), "logprobs": told_logprobs(choice)}
        for name, values in told.items():
            held[name] += values if isinstance(values, list) else []
        if isinstance(choice.get("prompt_token_ids"), list) and held["prompt"] is None:
            held["prompt"] = choice["prompt_token_ids"]
    for held in given.values():
        if held["prompt"] is None:
            held["prompt"] = next((ids for ids in prompts if isinstance(ids, list)), None)
    return may_be_exact(given, counts[-1] if counts else None)


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


class Heard(NamedTuple):
    """What an agent hears."""

    status: int
    body: bytes

    def check(self) -> None:
        """It is JSON, or a stream of it, to the end."""
        assert self.status in (200, 400, 502, 503)
        if self.body.startswith((b"data:", b"event:", b":")):
            for line in self.body.decode().split("\n"):
                if line.startswith("data:") and line != "data: [DONE]":
                    assert isinstance(orjson.loads(line[5:]), dict)
        else:
            assert bool(orjson.loads(self.body).get("error")) == (self.status != 200)


async def asked(
    engine: Any, path: str, *requests: Json, endpoint: EngineEndpoint | None = None
) -> tuple[Heard, ProxyAttempt]:
    """What came of the last of an attempt's requests, and of all."""
    proxy = Proxy(engine, endpoint=endpoint)
    attempt = proxy.open(attempt_spec())
    answers = [await asgi_answer(proxy, attempt.key, one, path=path) for one in requests]
    return Heard(*answers[-1]), attempt


Spoil = Callable[[str, Json], None]


async def by_endpoints(
    mode: EngineMode, spoil: Spoil, *requests: Json, texts: tuple[str, ...] = ("Hello.",)
) -> tuple[Heard, ProxyAttempt]:
    """As `asked`, of an engine that is asked in `mode`, and whose answers `spoil` changes."""
    engine, endpoint = before_an_engine(mode, spoil, *texts)
    return await asked(engine, "v1/chat/completions", *requests, endpoint=endpoint)


def before_an_engine(mode: EngineMode, spoil: Spoil, *texts: str) -> tuple[Any, EngineEndpoint]:
    format = chat_format(OWN["chatml"])
    engine = ScaleOut(format, *texts, spoil=spoil)
    probe_result = ProbeResult(mode=mode, model="tiny", tools=True)

    async def find() -> Capabilities:
        return Capabilities(probe_result=probe_result, format=format)

    return engine, EngineEndpoint(engine, find=find)


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
many = settings(max_examples=examples(160), deadline=None)


WHOLE = spoiled(fake.answer, ASKED) | spoiled(with_calls, {**ASKED, "n": 2})


@many
@given(
    asked_for=st.tuples(PATHS, WHOLE, st.booleans())
    | st.tuples(st.just("v1/completions"), spoiled(completion, ASKED), st.just(False))
)
def test_a_whole_answer_with_anything_changed_in_it(asked_for: tuple[str, Any, bool]) -> None:
    path, answer, streams = asked_for
    if not isinstance(answer, dict):
        return
    engine = Scripted(answer, [], cut=False)
    heard, attempt = ask(engine, path, {**REQUESTS[path], "stream": streams, "model": "m"})
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

    request = {"messages": ASKED["messages"], "model": "m", "stream": streams, **more}
    heard, attempt = asyncio.run(by_endpoints("tokens", change, request, texts=("Hello.", CALL)))
    heard.check()
    assert attempt.calls or attempt.engine_failure
    check_calls(attempt.calls)


# One thing that is wrong

BIG = 2**70
GENERATE = "/generate"
ALL: Json = {"logprobs": True, "return_token_ids": True}
HI: Json = {"model": "m", "messages": [user("hi")]}


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


def of(path: str, change: Callable[[Json], Any]) -> Spoil:
    def spoil(asked: str, answer: Json) -> None:
        if asked.endswith(path):
            change(answer)

    return spoil


def each_choice(**fields: Any) -> Callable[[Json], None]:
    return lambda answer: [choice.update(fields) for choice in answer["choices"]] and None


def first_id(value: Any) -> Callable[[Json], None]:
    def change(answer: Json) -> None:
        for holder in answer.get("choices", [answer]):
            holder["token_ids"][0] = value

    return change


async def check(mode: EngineMode, spoil: Spoil, *requests: Json, failed: bool) -> None:
    """Nothing is called exact and delivered, and an error is the engine's."""
    heard, attempt = await by_endpoints(mode, spoil, *requests)
    assert (b'"engine_garbage"' in heard.body) == failed
    assert attempt.engine_failures == failed
    assert not any(call.exact and call.delivered == "full" for call in attempt.calls)
    assert failed or [call.delivered for call in attempt.calls] == ["full"]


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        (first_id(BIG), False),
        (first_id(-1), False),
        (first_id(1.0), False),
        (each_choice(stop_reason=BIG), True),
        (each_choice(index=1), True),
        (each_choice(text="\ud800"), True),
        (lambda answer: answer.update(request_id=deep(300)), True),
    ],
)
async def test_numbers_that_are_no_ids_or_cannot_be_rewritten(change: Any, failed: bool) -> None:
    for stream in (False, True):
        for wanted in ({}, ALL):
            request = {**HI, "stream": stream, **wanted}
            await check("tokens", of(GENERATE, change), request, failed=failed)


@pytest.mark.parametrize("path", [GENERATE, "/render"])
@pytest.mark.parametrize("value", [BIG, -1, "x", True])
async def test_what_is_not_an_id_is_not_sent_to_the_engine_again(path: str, value: Any) -> None:
    tools = REQUESTS["v1/chat/completions"]["tools"]
    await check("tokens", of(path, first_id(value)), {**HI, "tools": tools}, failed=True)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("top_logprobs", lambda _: 5),
        ("top_logprobs", lambda tops: [*tops, {}]),
        ("token_logprobs", lambda values: [*values, -1.0]),
        ("tokens", lambda tokens: [None] * len(tokens)),
        ("tokens", lambda tokens: ["token_id:5"] * len(tokens)),
        ("tokens", lambda tokens: ["token_id:" + "9" * 5000] * len(tokens)),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_a_completion_that_are_not_those_of_its_tokens(
    name: str, change: Callable[[Any], Any], stream: bool
) -> None:
    def put(answer: Json) -> None:
        for choice in answer["choices"]:
            if name in (choice["logprobs"] or {}):
                choice["logprobs"][name] = change(choice["logprobs"][name])

    messages = [user("hi"), {"role": "assistant", "content": "Hello."}, user("more")]
    more = {"model": "m", "messages": messages, "stream": stream}
    heard, attempt = await by_endpoints("completions", of("v1/completions", put), HI, more)
    assert b'"engine_garbage"' in heard.body
    first, *others = attempt.calls
    assert first.exact
    assert [call.delivered for call in others] == ["none"] * stream


@pytest.mark.parametrize(
    ("place", "finish", "failed"),
    [(2, "stop", True), (5, "length", True), (None, "", True), (2, "", False)],
)
async def test_choices_end_once_with_a_reason(place: int | None, finish: str, failed: bool) -> None:
    seen: list[Json] = []

    def change(chunk: Json) -> None:
        seen.append(chunk)
        if place is None or len(seen) == place + 1:
            chunk["choices"][0]["finish_reason"] = finish

    request = {**HI, "stream": True}
    if failed:
        await check("tokens", of(GENERATE, change), request, failed=True)
    else:
        _, attempt = await by_endpoints("tokens", of(GENERATE, change), request)
        assert attempt.calls[0].exact


async def test_a_prompt_that_the_engine_renders_otherwise_splits_its_own_rollout_only() -> None:
    odd = True

    def spoil(path: str, answer: Json) -> None:
        if odd and path.endswith("/render"):
            answer["token_ids"] += answer["token_ids"][-1:]

    engine, endpoint = before_an_engine("tokens", spoil, "Hello.")
    proxy = Proxy(engine, endpoint=endpoint)
    split, other = (proxy.open(attempt_spec(rollout_id=name)) for name in ("a", "b"))
    for attempt in (split, other):
        first = user(f"hi from {attempt.spec.rollout_id}")
        more = [first, {"role": "assistant", "content": "Hello."}, user("more")]
        for messages in ([first], more):
            body = {"model": "m", "messages": messages}
            await asgi_answer(proxy, attempt.key, body, path="v1/chat/completions")
            odd = False
    assert [(call.planned_parent, call.flags) for call in split.calls] == [
        (None, ["render_mismatch"])
    ] * 2
    assert [(call.planned_parent, call.flags) for call in other.calls] == [(None, []), (0, [])]
    told = "messages[0], role user, content: str (rollout a)"
    assert proxy.engine_described()["differs_at"] == told


async def test_a_call_that_the_agent_was_not_shown_is_not_in_its_next_prompt() -> None:
    engine, endpoint = before_an_engine("tokens", of("", lambda answer: None), CALL * 2)
    proxy = Proxy(engine, endpoint=endpoint)
    attempt = proxy.open(attempt_spec())
    body = {**HI, "tools": REQUESTS["v1/chat/completions"]["tools"], "parallel_tool_calls": False}
    _, text = await asgi_answer(proxy, attempt.key, body, path="v1/chat/completions")
    said = json.loads(text)["choices"][0]["message"]
    (shown,) = said["tool_calls"]
    result = {"role": "tool", "tool_call_id": shown["id"], "content": "1"}
    body["messages"] = [*HI["messages"], said, result]
    await asgi_answer(proxy, attempt.key, body, path="v1/chat/completions")
    first, second = attempt.calls
    assert "parallel_calls_dropped" in first.flags
    assert first.sampled_message is not None and len(first.sampled_message["tool_calls"]) == 2
    assert (second.planned_parent, second.refusal) == (None, "assistant_edited")
