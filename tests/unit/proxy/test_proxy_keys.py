"""Access to the proxy: attempts, their workers, guests."""

from __future__ import annotations

import asyncio
import json
import pickle
from typing import Any

import msgspec
import openai
import orjson
import pytest
from envserver_records.errors import AgentError, EngineGarbage, LimitReached, Outcome, WorkerGarbage
from support.engine_stand_in import ids_of, logprob
from support.proxy_house import ASK, House, chat, house
from support.serving import serving
from support.waiting import until

from envserver import OpenAIConfig
from envserver.models import OpenAIEngine
from envserver.proxy import Proxy
from envserver.proxy.guest import generate_answer
from envserver.proxy.worker import job_of
from envserver.rollouts import ending_limit
from envserver.workers.attempt import _failure

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


async def test_a_task_that_is_not_json_is_a_bug_of_the_environment(home: House) -> None:
    attempt, _ = home.open()
    task = msgspec.structs.replace(attempt.spec.task, public={"seen": {1, 2}})
    attempt.spec = msgspec.structs.replace(attempt.spec, task=task)
    with pytest.raises(AgentError, match="'add-1' is not JSON") as caught:
        job_of(attempt)
    assert caught.value.detail["bug"].startswith("A bug in the environment")


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


async def test_a_failure_is_bounded_and_may_bring_what_the_agent_had_so_far(
    home: House,
) -> None:
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
    assert (await home.get(key, "record"))[0] == 404
    assert (await home.get(key, "v1/models"))[1]["data"][0]["id"] == "tiny"
    other = openai.AsyncOpenAI(base_url=str(client.base_url), api_key="x", max_retries=0)
    assert (await chat(other)).message.content == "Hëllo."
    await other.close()


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
