"""What requests may take: space in their attempt's record, time to be read, images."""

import asyncio
import base64
import copy
import io
import json
import pickle
import struct
import time
import zlib
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import msgspec
import numpy as np
import openai
import orjson
import pytest
from envserver_records.errors import EngineGarbage, LimitReached, Outcome, WorkerGarbage
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.engine_stand_in import ids_of, logprob
from support.extent import examples
from support.proxy_house import ASK, House, chat, house
from support.serving import attempt_spec, serving
from support.waiting import until

from envserver import Caller, OpenAIConfig, TokensConfig
from envserver.models.openai import OpenAIEngine
from envserver.proxy import bounds
from envserver.proxy.bounds import AttemptBounds, InFlight, Totals
from envserver.proxy.dialects.base import ModelRequest
from envserver.proxy.recorded import RecordedPrompts, RecordedRequests, size_of
from envserver.proxy.server import Proxy
from envserver.proxy.unrecorded import generate_answer
from envserver.rollouts.attempt import ending_limit
from envserver.tokens import images
from envserver.tokens.images import image_size
from envserver.workers.attempt import _failure

Json = dict[str, Any]
PATH = "v1/chat/completions"
KB = 1000
BOUNDS = AttemptBounds(max_recorded_mb=0.2)


# The record holds what is sent once, counts it and is bounded


@pytest.fixture
async def recorder() -> AsyncIterator[House]:
    async with house(bounds=BOUNDS) as made:
        yield made


def said(number: int, size: int = 45 * KB) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"{number}".ljust(size, "x")}]


async def test_prompts_beyond_the_bound_are_refused_to_their_rollout_only(recorder: House) -> None:
    (attempt, client), (other, neighbour) = recorder.open(), recorder.open()
    for number in range(4):
        await chat(client, streamed=number % 2 == 1, messages=said(number))
    for asked in (
        client.chat.completions.create(model="any", messages=said(4)),  # type: ignore[arg-type]
        client.responses.create(model="any", input=said(5)[0]["content"]),
    ):
        with pytest.raises(openai.BadRequestError, match=r"0\.2 MB .* are used up") as refused:
            await asked
        assert refused.value.code == "limit_reached"
    claude = recorder.claude(attempt.key)
    with pytest.raises(anthropic.BadRequestError) as told:
        await claude.messages.create(model="any", max_tokens=9, messages=said(6))  # type: ignore[arg-type]
    assert told.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]

    assert (attempt.limit, len(attempt.calls)) == ("record", 4)
    assert recorder.proxy.totals.refused["recorded"] == 3
    await chat(neighbour)
    assert (other.limit, other.flags) == (None, set())
    recorder.proxy.seal(attempt)
    recorder.proxy.seal(other)
    assert recorder.proxy.totals.recorded == 0


async def test_a_long_conversation_is_held_once(recorder: House) -> None:
    attempt, client = recorder.open()
    tools = [{"type": "function", "function": {"name": "f", "description": "d" * KB}}]
    talks: list[list[dict[str, Any]]] = [[], []]
    for number in range(40):
        talk = talks[number % 2]  # two conversations that take turns
        talk += said(number, 2 * KB)
        answer = await chat(client, messages=talk, tools=tools)
        talk.append({"role": "assistant", "content": answer.message.content})
    assert len(attempt.calls) == 40
    parts = [part for call in attempt.calls for part in [*call.messages, *call.tools]]
    assert size_of(*{id(part): part for part in parts}.values(), most=10**9) < 200 * KB
    assert [m["content"] for m in attempt.calls[-1].messages] == [m["content"] for m in talk[:-1]]


async def test_recorded_calls_of_services_take_space_too() -> None:
    async def echo(arguments: dict[str, Any], caller: Caller) -> Any:
        return arguments

    async with house(services={"echo": echo}, bounds=BOUNDS) as made:
        for keep, expected in ((False, [200] * 4), (True, [200, 200, 400, 400])):
            attempt = made.proxy.open(msgspec.structs.replace(attempt_spec(), keep_services=keep))
            asked = {"text": "x" * 40 * KB}
            told = [(await made.post(attempt.key, "tools/echo", asked))[0] for _ in range(4)]
            assert told == expected
            assert len(attempt.asked_services) == told.count(200) * keep
            assert attempt.limit == ("record" if keep else None)


async def test_what_the_engine_refuses_takes_no_space(recorder: House) -> None:
    attempt, client = recorder.open()
    await chat(client)
    before = attempt.in_flight.recorded
    for number in range(9):
        recorder.fake.faults.append((400, "This model's maximum context length is 9 tokens."))
        with pytest.raises(openai.BadRequestError, match="context length"):
            await chat(client, messages=said(number, 90 * KB))
    await until(lambda: attempt.in_flight.recorded == before == recorder.proxy.totals.recorded)


def test_all_records_together_are_bounded_but_each_keeps_a_part() -> None:
    most = AttemptBounds(max_recorded_mb=8)
    totals = Totals.of(most)
    many = [InFlight(most, totals) for _ in range(50)]
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
        record.end(record.take(made), recorded=True)
        assert orjson.dumps([made.messages, made.tools, made.fields, made.body]) == as_sent


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 2), max_size=9)), max_size=9))
def test_sharing_changes_no_prompt(steps: list[tuple[int, list[int]]]) -> None:
    record, prompts = RecordedPrompts(), [np.empty(0, np.int32)]
    for earlier, new in steps:
        prompts.append(np.concatenate([prompts[earlier % len(prompts)], np.array(new, np.int32)]))
    shared = [record.share(ids) for ids in prompts]
    for ids, seen in zip(prompts, shared, strict=True):
        np.testing.assert_array_equal(ids, seen)


def test_the_prompts_of_a_conversation_take_the_space_of_a_few() -> None:
    record, whole = RecordedPrompts(), np.arange(100_000, dtype=np.int32)
    shared = [record.share(whole[:size]) for size in range(1000, len(whole) + 1, 1000)]
    arrays = {id(ids.base): ids.base.nbytes for ids in shared}
    assert sum(arrays.values()) < 5 * whole.nbytes


# Reading takes a bounded share of the time that all have

DENSE = b'{"messages": [], "x": [%b[]]}' % (b"[]," * 200_000)
"""A body whose values cost as much to read as a text of a hundred times its size."""


async def test_an_attempt_with_more_than_its_share_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "READING_BURST_SECONDS", 0.01)
    async with house(max_body_bytes=10**6) as home:
        (greedy, _), (other, client) = home.open(), home.open()
        began = time.monotonic()
        for _ in range(4):
            before = greedy.in_flight.reading_seconds
            status, _ = await home.post(greedy.key, PATH, DENSE)
            assert status == 400
            least = (before - bounds.READING_BURST_SECONDS) / bounds.READING_SHARE
            assert time.monotonic() - began >= least
        assert before > bounds.READING_BURST_SECONDS
        assert (await chat(client)).message.content
        assert other.in_flight.reading_seconds < before


# Images: each attack is a clear 400, and the server stays awake


def png(width: int, height: int, body: bytes = b"") -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def part(data: bytes | str, kind: str = "image/png") -> Json:
    if isinstance(data, bytes):
        data = f"data:{kind};base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": data}}


def shows(*parts: Any) -> Json:
    return {"model": "m", "messages": [{"role": "user", "content": [*parts]}]}


SMALL = png(8, 8)
MEGABYTE = png(8, 8, bytes(1 << 20))
GIF = b"GIF89a\1\0\1\0\0\0\0" + b"!\xf9\4\0\0\0\0\0" + b",\0\0\0\0"  # then the frame's size


HOSTILE: list[tuple[list[Any], str]] = [
    ([part(MEGABYTE)] * 3, "images, audio and videos of 3.0 MB together: 2 MB at most"),
    ([part(SMALL), part(png(8, 8, bytes(3 << 19)))], "number 2 with 1.5 MB: 1.25 MB at most"),
    ([part(SMALL)] * 10_000, "hold 10000 images, audio and videos: 256 at most"),
    ([part(SMALL), part(png(60_000, 60_000))], "number 2 with 60000 times 60000 pixels"),
    ([part(png(9_000, 9_000))] * 5, "images of 405 million pixels together: 400 million"),
    ([part(GIF + b"\xff\xff\xff\xff\0", "image/gif")], "65535 times 65535 pixels"),
    ([part(part(MEGABYTE)["image_url"]["url"][:-100] + "!!!!")], "not base64 to its end"),
    ([part(SMALL[:20])], "whose file is damaged"),
    ([part(png(0, 8))], "whose file is damaged"),
    ([part("http://example.com/a.png")], "must begin with data:image/"),
]


async def test_hostile_images_are_refused_with_the_reason() -> None:
    tokens = TokensConfig(max_medium_mb=1.25, max_media_mb=2)
    async with house(max_body_bytes=16_000_000, tokens=tokens) as home:
        for parts, said in HOSTILE:
            attempt, _ = home.open()
            status, answer = await home.post(attempt.key, PATH, shows(*parts))
            assert (status, answer["error"]["code"]) == (400, "input"), said
            assert said in answer["error"]["message"]
            assert home.fake.requests == [] and attempt.calls == []


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "AVIF"])
def test_the_size_of_every_format_is_known(form: str) -> None:
    kept = io.BytesIO()
    exif = {"exif": b"Exif\0\0" + bytes(50_000)} if form == "JPEG" else {}
    Image.new("RGB", (123, 45), "red").save(kept, form, **exif)
    assert picture_size(kept.getvalue()) == (123, 45)
    facts = images.facts_of(images.url_from(kept.getvalue()))
    assert (facts.size, facts.is_base64) == ((123, 45), True)


def test_a_gif_of_millions_of_parts_costs_no_seconds() -> None:
    reads: list[int] = []

    def read(at: int, size: int) -> bytes:
        reads.append(at)
        return (GIF[:13] + b"!\xfe" + b"\1a" * 30_000)[at : at + size]

    assert image_size(read) is None
    assert len(reads) < 20_000


@given(data=st.binary(max_size=300), start=st.sampled_from([b"\xff\xd8", b"GIF89a", b"II*\0", b""]))
@settings(max_examples=examples(100), deadline=None)
def test_no_bytes_break_the_reading_of_sizes(data: bytes, start: bytes) -> None:
    found = picture_size(start + data)
    assert found is None or all(side >= 0 for side in found)


@given(data=st.binary(max_size=3000), cut=st.integers(0, 40))
@settings(max_examples=examples(100), deadline=None)
def test_facts_in_steps_are_those_of_the_whole(data: bytes, cut: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "_STEP", 64)
        url = images.url_from(data)[: -cut or None]
        facts = images._facts(url)
    assert facts.sha256 == images.sha256_of(images.bytes_of(url))
    assert facts.is_base64 == (images.bytes_of(url) != url.encode() or not url)


def picture_size(data: bytes) -> tuple[int, int] | None:
    return image_size(lambda at, size: data[at : at + size])


# Access to the proxy: attempts, their workers, unrecorded clients

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


async def test_a_key_that_code_of_the_model_may_have_sets_no_reward(home: House) -> None:
    reward = [{"value": 1.0, "at": 0.0, "turn": 0, "agent": None}]
    trusted, _ = home.open()
    assert (await home.post(trusted.key, "rewards", reward))[0] == 204
    assert [one.value for one in trusted.turn_rewards] == [1.0]
    sandboxed, client = home.open(isolation="sandboxed")
    await chat(client)
    status, answer = await home.post(sandboxed.key, "rewards", reward)
    assert status == 409
    assert "not available with isolation 'sandboxed'" in answer["error"]["message"]
    assert not sandboxed.turn_rewards


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
    assert attempt.late_calls == 1
    assert (await home.get(attempt.key, "record"))[0] == 409
    home.now = 61.0
    with pytest.raises(openai.NotFoundError):
        await chat(client)
    assert attempt.calls == []


# The worker's routes


async def test_a_posted_failure_means_what_its_kind_means_and_holds_no_key(home: House) -> None:
    for kind, outcome in (
        ("limit_reached", Outcome.SCORE),
        ("agent_error", Outcome.RETRY),
        ("engine_refused", Outcome.DROP),
    ):
        attempt, _ = home.open()
        url = f"{home.url}/r/{attempt.key}/v1"
        failure = {"kind": kind, "message": f"404 for {url}", "detail": {"limit": "time", "u": url}}
        assert (await home.post(attempt.key, "result", {"failure": failure}))[0] == 204
        assert attempt.failure is not None
        assert (attempt.failure.kind, attempt.failure.outcome) == (kind, outcome)
        assert attempt.failure.message == f"404 for {home.url}/r/***/v1"
        assert attempt.failure.detail["limit"] == "time"
        assert attempt.key not in str(attempt.failure.detail)


async def test_a_failure_is_bounded_and_may_bring_what_the_agent_had_so_far(home: House) -> None:
    attempt, _ = home.open()
    error = LimitReached("20 messages", limit="turns", output={"answer": "4\ud800"})
    assert (await home.post(attempt.key, "result", orjson.loads(_failure(error))))[0] == 204
    assert attempt.failure is not None and attempt.failure.detail == {"limit": "turns"}
    assert (attempt.output, attempt.flags) == ({"answer": "4\ufffd"}, {REPLACED})
    assert ending_limit(attempt) == "turns"
    async with house(max_body_bytes=10_000_000) as large:
        attempt, _ = large.open()
        detail = {"limit": "x" * 3_000_000, "deep": [[["\0"]]], **{f"k{n}": n for n in range(9999)}}
        failure = {"kind": "limit_reached", "message": "m\0" * 100_000, "detail": detail}
        assert (await large.post(attempt.key, "result", {"failure": failure}))[0] == 204
        assert attempt.failure is not None
        assert len(json.dumps([attempt.failure.message, attempt.failure.detail])) < 100_000
        assert "\0" not in attempt.failure.message
        assert ending_limit(attempt) == "time"


CUT, REPLACED, LEFT_OUT = "result_cut_off", "result_text_replaced", "metrics_left_out"
DEEP = b'{"output": ' + b"[" * 900 + b"]" * 900 + b"}"


@pytest.mark.parametrize(
    ("body", "flags", "output"),
    [
        ({"output": "an answer", "metrics": {"steps": 3}}, set(), "an answer"),
        ({"output": "x" * 20_000_000}, {CUT}, None),
        ({"output": [["x"] * 2] * 600_000}, {CUT}, ...),
        (DEEP, {CUT}, ...),
        (b'{"output": ' + b"[" * 50_000, {CUT}, None),
        (b'{"output": "a\\ud800b"}', {REPLACED}, "a\ufffdb"),
        (b'{"output": "a\\u0000b"}', {REPLACED}, "a\ufffdb"),
        (b'{"output": {"\\ud800": "\\ud83d\\ude00"}}', {REPLACED}, {"\ufffd": "\U0001f600"}),
        ({"output": 10**30}, {REPLACED}, ...),
        ({"output": "cleaned by the worker", "changes": ["replaced"]}, {REPLACED}, ...),
        ({"output": 1, "metrics": {"x" * 5000: 1, "\x1b[2J": 2}}, {LEFT_OUT}, 1),
    ],
)
async def test_a_result_beyond_bounds_is_flagged(body: Any, flags: set[str], output: Any) -> None:
    async with house(max_body_bytes=10_000_000) as home:
        attempt, _ = home.open()
        status = 413 if output is None and isinstance(body, dict) else 204
        assert (await home.post(attempt.key, "result", body))[0] == status
        assert (await home.post(attempt.key, "result", {"output": "second"}))[0] == 409
    assert attempt.failure is None
    assert ending_limit(attempt) is None  # neither a failure nor worth another try
    assert attempt.flags == flags
    assert output is ... or attempt.output == output
    assert len(json.dumps([attempt.output, attempt.metrics])) < 9_000_000
    # It can be scored, by a process of its own.
    assert orjson.loads(orjson.dumps(attempt.output)) == pickle.loads(pickle.dumps(attempt.output))


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"output": 1, "metrics": {"a": "b"}},
        {"failure": {"kind": "made_up", "message": "m"}},
        b"not JSON",
        b'{"output": NaN}',
        b'{"output": "\\ud800" ',
    ],
)
async def test_a_result_of_no_agreed_form_is_garbage(home: House, body: Any) -> None:
    """It is the model's where its code can post one."""
    attempt, client = home.open()
    await chat(client)
    assert (await home.post(attempt.key, "result", body))[0] == 400
    assert attempt.failure is not None
    assert attempt.failure.kind == "worker_garbage"
    assert ending_limit(attempt, "sandboxed") == "crash"
    with pytest.raises(WorkerGarbage):
        ending_limit(attempt, "pooled")


async def test_log_lines_are_checked(home: House) -> None:
    attempt, _ = home.open()
    assert (await home.post(attempt.key, "log", {"event": "e", "facts": {"event": 1}}))[0] == 204
    assert (await home.post(attempt.key, "log", {"event": 1}))[0] == 400
    assert (await home.post(attempt.key, "log", {"event": "x" * 70_000}))[0] == 413


# Unrecorded clients


async def test_an_unrecorded_client_is_passed_through(home: House) -> None:
    key = home.proxy.open_unrecorded()
    client = home.client(key)
    assert (await chat(client, temperature=0.3)).message.content == "Hëllo."
    assert await chat(client, streamed=True) == ("Hëllo.", "stop")
    sent = home.fake.requests[0]
    assert (sent["temperature"], sent["model"]) == (0.3, "tiny")
    assert "return_token_ids" not in sent
    text = await client.completions.create(model="any", prompt="p", max_tokens=3)
    assert text.choices[0].text == "Hë"
    assert (await home.get(key, "record"))[0] == 404
    assert (await home.get(key, "v1/models"))[1]["data"][0]["id"] == "tiny"
    other = openai.AsyncOpenAI(base_url=str(client.base_url), api_key="x", max_retries=0)
    assert (await chat(other)).message.content == "Hëllo."
    await other.close()


async def test_generate_gives_ids_and_logprobs_for_ids(home: House) -> None:
    key = home.proxy.open_unrecorded()
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
        assert (await home.post(key, "generate", {"prompt": prompt}))[0] == 400


@pytest.mark.parametrize(
    "choices",
    [
        None,
        [None],
        [{"text": "a", "token_ids": [1]}],
        [{"text": "a", "token_ids": [1], "logprobs": {"token_logprobs": [None]}}],
        [{"text": "a", "token_ids": [1, 2], "logprobs": {"token_logprobs": [-1.0]}}],
    ],
)
def test_generate_gives_no_answer_that_is_none(choices: Any) -> None:
    with pytest.raises(EngineGarbage):
        generate_answer({"choices": choices}, {"prompt": "ab"})


async def test_health_says_whether_the_engine_answers(home: House) -> None:
    key = home.proxy.open_unrecorded()
    assert (await home.get(key, "health"))[0] == 200
    asked = len(home.fake.headers)
    await home.get(key, "health")
    assert len(home.fake.headers) == asked
    async with OpenAIEngine(OpenAIConfig(base_url="http://127.0.0.1:9")) as dead:
        proxy = Proxy(dead)
        async with (
            serving(proxy.asgi()) as url,
            home.http.get(f"{url}/r/{proxy.open_unrecorded()}/health") as answer,
        ):
            assert answer.status == 503
