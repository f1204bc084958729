"""The simulated engine in process: exact tokens, consistent logprobs, streams, refusals."""

import asyncio
import json
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np
import openai
import pytest
from envserver_local.simulated import ASSETS
from envserver_local.simulated.engine import SimEngine
from envserver_local.simulated.make_tokenizer import build_tokenizer, tokenizer_config
from envserver_local.simulated.policy import (
    REFUSALS,
    RolloutSolver,
    Solution,
    TextSolver,
    spoiled_answer,
)
from envserver_local.simulated.server import serve_sim
from envserver_records.errors import ConfigError, EngineGarbage, EngineRefused, EngineUnavailable
from envserver_records.records import Task
from hypothesis import given, settings
from hypothesis import strategies as st
from support.beside import beside
from support.cases import cases_of
from support.commands import running
from support.extent import examples
from support.sim import (
    CHAT,
    COMPLETIONS,
    DEMONSTRATION,
    QUESTION,
    TOKENIZER,
    TOOLS,
    ask,
    call,
    engine,
    logprobs_of,
    post,
    said,
    tool,
    user,
)
from support.waiting import PATIENCE

from envserver import OpenAIConfig, SimConfig, aio
from envserver.cli import main
from envserver.environment import Environment
from envserver.models.engine import EngineRequest
from envserver.models.openai import OpenAIEngine
from envserver.running.simulated_server import demonstration_solver, question_text

CASES = cases_of(__file__)

WRONG = cases_of(__file__, "sim_wrong_requests.json")
"""A path, what makes a request wrong, and the field that is named."""

# --- tokens -----------------------------------------------------------------------------------


def test_the_tokenizer_can_be_made_again_from_its_corpus() -> None:
    shipped = json.loads((ASSETS / "tokenizer.json").read_text())["model"]
    made = json.loads(build_tokenizer().to_str())["model"]
    assert made["vocab"] == shipped["vocab"]
    assert made["merges"] == shipped["merges"]
    assert tokenizer_config() == json.loads((ASSETS / "tokenizer_config.json").read_text())


async def test_the_ids_of_an_answer_are_the_ids_of_its_text() -> None:
    answer = await post(engine(), ask())
    choice = answer["choices"][0]
    assert choice["token_ids"][-1] == TOKENIZER.im_end
    assert TOKENIZER.encode(choice["message"]["content"]) == choice["token_ids"][:-1]
    assert TOKENIZER.decode(answer["prompt_token_ids"], special=True) == (
        f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert answer["usage"] == {
        "prompt_tokens": len(answer["prompt_token_ids"]),
        "completion_tokens": len(choice["token_ids"]),
        "total_tokens": len(answer["prompt_token_ids"]) + len(choice["token_ids"]),
    }


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from(
    ["\n", " ", "<tool_call>\n",
     '\n<tool_call>\n{"name": "calculate", "arguments": {}}\n</tool_call>', "<|im_end|>",
     "\r\n", "é<|im_<|im_end|>start|>"]
)  # fmt: skip
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
turns = st.builds(
    lambda content, calls: said(content, *calls),
    words,
    st.lists(
        st.builds(call, st.sampled_from(["calculate", "finish"]),
                  st.dictionaries(words, values, max_size=3)),
        max_size=2,
    ),
)  # fmt: skip


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(turns, min_size=1, max_size=3), st.lists(words, min_size=4, max_size=4), words)
async def test_a_conversation_that_goes_on_begins_with_the_tokens_so_far(
    demonstration: list[dict[str, Any]], results: list[str], system: str
) -> None:
    sim = engine(demonstration)
    messages = [{"role": "system", "content": system}, *user(), *user(results[3])]
    before: list[int] = []
    for result in results[:3]:
        answer = await post(sim, ask(tools=TOOLS) | {"messages": messages})
        choice = answer["choices"][0]
        assert answer["prompt_token_ids"][: len(before)] == before
        before = answer["prompt_token_ids"] + choice["token_ids"]
        messages.append(choice["message"])
        for one in choice["message"].get("tool_calls", []):
            assert isinstance(json.loads(one["function"]["arguments"]), dict)
            messages.append({"role": "tool", "tool_call_id": one["id"], "content": result})
        messages += user(result)


# --- logprobs ---------------------------------------------------------------------------------


async def test_logprobs_are_the_same_bits_when_scored_again() -> None:
    sim = engine(DEMONSTRATION)
    answer = await post(sim, ask(tools=TOOLS, n=3, top_logprobs=4))
    for choice in answer["choices"]:
        logprobs = logprobs_of(choice)
        assert all(value < 0 and float(np.float32(value)) == value for value in logprobs)
        ids = answer["prompt_token_ids"] + choice["token_ids"]
        again = await post(
            sim, {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 3}, path=COMPLETIONS
        )
        rows = again["choices"][0]["prompt_logprobs"]
        assert rows[0] is None
        start = len(answer["prompt_token_ids"])
        scored = [
            row[str(token)]["logprob"]
            for row, token in zip(rows[start:], choice["token_ids"], strict=True)
        ]
        assert scored == logprobs
        for entry in choice["logprobs"]["content"]:
            ranked = [top["logprob"] for top in entry["top_logprobs"]]
            assert ranked[0] == entry["logprob"]
            assert ranked == sorted(ranked, reverse=True)
            assert 1 <= len(ranked) <= 4
    body = {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 1}
    (alone,) = (await post(sim, body, path=COMPLETIONS))["choices"]
    assert {len(row) for row in alone["prompt_logprobs"][1:]} == {1}


# --- where an answer ends ---------------------------------------------------------------------


async def test_a_stop_token_is_sampled_and_silent() -> None:
    sim = engine()
    whole = (await choices(sim, seed=3))[0]["token_ids"]
    (choice,) = await choices(sim, seed=3, stop_token_ids=[whole[4]])
    kept = whole[: whole.index(whole[4]) + 1]
    assert (choice["token_ids"], choice["stop_reason"]) == (kept, whole[4])
    assert choice["message"]["content"] == TOKENIZER.decode(kept[:-1])


# --- streams ----------------------------------------------------------------------------------


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What a client makes of the chunks (a whole answer is one), by choice."""
    choices: dict[int, dict[str, Any]] = {}
    for part in (part for chunk in chunks for part in chunk["choices"]):
        fresh = {"text": "", "calls": [], "ids": [], "logprobs": [], "prompt": [], "finish": None}
        whole = choices.setdefault(part["index"], fresh)
        delta = part.get("delta") or part.get("message") or {"content": part.get("text")}
        whole["text"] += delta.get("content") or ""
        for place, piece in enumerate(delta.get("tool_calls", [])):
            place = piece.get("index", place)
            if place == len(whole["calls"]):
                whole["calls"].append([piece["id"], piece["function"]["name"], ""])
            whole["calls"][place][2] += piece["function"]["arguments"]
        whole["ids"] += part.get("token_ids", [])
        scored = part["logprobs"] or {}
        whole["logprobs"] += scored.get("content") or scored.get("token_logprobs") or []
        whole["prompt"] += part.get("prompt_token_ids") or []
        whole["finish"] = part["finish_reason"] or whole["finish"]
    return choices


async def streamed(sim: SimEngine, body: dict[str, Any], path: str = CHAT) -> list[dict[str, Any]]:
    async with sim.stream(EngineRequest(path, body, "", 30)) as stream:
        return [chunk async for chunk in stream]


@pytest.mark.parametrize(
    "fields", [{}, {"stop": "e"}, {"max_tokens": 7}, {"tools": TOOLS, "n": 2}], ids=str
)
async def test_a_streamed_answer_is_the_same_answer(fields: dict[str, Any]) -> None:
    demonstration = [said("Überall 🙂", *DEMONSTRATION[0]["tool_calls"] * 2)]
    body = ask(seed=1, top_logprobs=2, **fields)
    answer = await post(engine(demonstration), body)
    options = {"stream_options": {"include_usage": True}}
    chunks = await streamed(engine(demonstration), body | options)
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["usage"] == answer["usage"]
    assert joined(chunks) == joined([answer])
    assert {len(one["token_ids"]) for one in answer["choices"]} != {0}
    if "tools" in fields:
        assert len(answer["choices"][0]["message"]["tool_calls"]) == 2


async def test_streamed_completions_are_the_same_too() -> None:
    sim = engine()
    body = {"prompt": ["One", "Two"], "n": 2, "seed": 4, "return_token_ids": True, "logprobs": 0}
    whole = joined([await post(sim, body, path=COMPLETIONS)])
    assert joined(await streamed(sim, body, COMPLETIONS)) == whole
    assert len(whole) == 4 and all(one["ids"] and one["prompt"] for one in whole.values())


# --- what goes wrong --------------------------------------------------------------------------


async def test_faults_come_as_often_as_asked() -> None:
    sim = engine(error_rate=0.3, disconnect_rate=0.3, truncate_rate=0.5)
    seen: dict[str, int] = {}
    for _ in range(300):
        try:
            finish = (await choices(sim))[0]["finish_reason"]
        except (EngineUnavailable, EngineGarbage) as error:
            finish = error.kind
        seen[finish] = seen.get(finish, 0) + 1
    assert 60 < seen["engine_unavailable"] < 125
    assert 35 < seen["engine_garbage"] < 95
    assert abs(seen["length"] - seen["stop"]) < 60


LONG = [CHAT, {"messages": user("word " * 2_000)}, "prompt"]


@pytest.mark.parametrize(("path", "body", "param"), [*WRONG, LONG])
async def test_wrong_requests_are_refused_with_their_place(
    path: str, body: dict[str, Any], param: str | None
) -> None:
    with pytest.raises(EngineRefused) as caught:
        asked = ask() if path == CHAT and body else {}
        await post(engine(context_tokens=1024), asked | body, path=path)
    assert caught.value.detail["param"] == param
    assert 400 <= caught.value.detail["status"] < 500


# The simulated policy: correct as often as configured, wrong at declared rates, valid calls

SIZES = tool(
    "choose",
    size={"enum": ["small", "large"]},
    count={"type": "integer", "minimum": 1},
    day={"type": "string", "format": "date"},
)


def playing(turns: list[dict[str, Any]], **config: Any) -> SimEngine:
    """An engine whose rollout `r` has these turns."""
    solver = RolloutSolver()
    solver.assign("r", turns, exact=True)
    return SimEngine(SimConfig(latency_seconds=0, **config), solver)


async def choices(
    sim: SimEngine, rollout_id: str = "r", messages: Any = None, **fields: Any
) -> list[dict[str, Any]]:
    body = ask(**fields) | ({"messages": messages} if messages else {})
    found: list[dict[str, Any]] = (await post(sim, body, rollout_id=rollout_id))["choices"]
    return found


async def message(sim: SimEngine, rollout_id: str = "r", **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = (await choices(sim, rollout_id, **fields))[0]["message"]
    return found


def arguments_of(message: dict[str, Any]) -> list[Any]:
    return [json.loads(one["function"]["arguments"]) for one in message["tool_calls"]]


async def play(sim: SimEngine, rollout_id: str) -> tuple[str, int]:
    """The answer an agent with tools is given in the end, and how many tokens it took."""
    messages, tokens = user(), 0
    for _ in range(3):
        answer = await post(sim, ask(tools=TOOLS) | {"messages": messages}, rollout_id=rollout_id)
        message = answer["choices"][0]["message"]
        tokens += answer["usage"]["completion_tokens"]
        messages.append(message)
        for one in message["tool_calls"]:
            if one["function"]["name"] == "finish":
                return json.loads(one["function"]["arguments"])["answer"], tokens
            messages.append({"role": "tool", "tool_call_id": one["id"], "content": "36"})
    raise AssertionError("the demonstration ends after two turns")


async def test_the_same_seed_answers_alike_and_samples_differ() -> None:
    first, second, third = engine(seed=1), engine(seed=1), engine(seed=2)
    texts = [
        [(await message(sim, ""))["content"] for _ in range(20)] for sim in (first, second, third)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) > 15
    seeded, again = [await choices(first, seed=7, n=2) for _ in range(2)]
    assert [c["token_ids"] for c in seeded] == [c["token_ids"] for c in again]


async def test_rollouts_are_solved_as_often_as_asked_and_differ_in_length() -> None:
    solver = RolloutSolver()
    sim = SimEngine(SimConfig(latency_seconds=0, solve_probability=0.3), solver)
    played = []
    for number in range(400):
        solver.assign(f"rollout-{number}", DEMONSTRATION)
        played.append(await play(sim, f"rollout-{number}"))
        solver.forget(f"rollout-{number}")
    assert 80 < sum(answer == "36" for answer, _ in played) < 160
    assert all(answer.isdigit() for answer, _ in played)
    assert len({tokens for _, tokens in played}) > 10
    assert solver.solve([], "rollout-1") is None


@given(st.one_of(st.integers().map(str), st.sampled_from(
    ["B", "yes", "True", "\\frac{1}{2}", "(1,2)", "\\pi", "Paris", "x", "0.50", "1,234", "", "∅"])),
    st.integers())  # fmt: skip
def test_a_spoiled_answer_is_never_the_answer(answer: str, seed: int) -> None:
    spoiled = spoiled_answer(answer, random.Random(seed))
    assert spoiled.strip().lower() != answer.strip().lower()
    if answer.lstrip("-").isdigit():
        assert int(spoiled) != int(answer)


async def test_babbled_calls_obey_the_schema() -> None:
    parameters = CASES["measure"]
    measure = {"type": "function", "function": {"name": "measure", "parameters": parameters}}
    sim = engine()
    for choice in await choices(sim, "", tools=[measure], n=60, tool_choice="required"):
        assert choice["finish_reason"] == "tool_calls"
        for arguments in arguments_of(choice["message"]):
            jsonschema.validate(arguments, parameters)
    free = await choices(sim, "", tools=[measure], n=60)
    assert {choice["finish_reason"] for choice in free} == {"stop", "tool_calls"}


async def test_a_spoiled_call_is_wrong_and_still_one_of_the_tool() -> None:
    right = {"size": "small", "count": 3, "day": "2024-05-17"}
    sim = engine([said(None, call("choose", right))], solve_probability=0.0)
    for choice in await choices(sim, "", tools=[SIZES], n=40):
        arguments = arguments_of(choice["message"])[0]
        jsonschema.validate(arguments, SIZES["function"]["parameters"])
        assert arguments != right
    for choice in await choices(engine(), "", tools=[SIZES], n=10, tool_choice="required"):
        assert date.fromisoformat(arguments_of(choice["message"])[0]["day"])


async def test_rates_of_one_make_every_answer_go_wrong() -> None:
    turns = [said('{"answer": 36}')]
    assert (await message(playing(turns, refusal_rate=1.0)))["content"] in REFUSALS
    answer = await post(playing(turns, repetition_rate=1.0), ask(max_tokens=500), rollout_id="r")
    choice = answer["choices"][0]
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 500)
    assert len(set(choice["token_ids"])) < 40
    for seed in range(20):
        text = (await message(playing(turns, broken_json_rate=1.0, seed=seed)))["content"]
        with pytest.raises(json.JSONDecodeError):
            json.loads(text)


async def test_malformed_calls_are_cut_off_unknown_or_incomplete() -> None:
    kinds = set()
    for seed in range(30):
        sim = playing(DEMONSTRATION, malformed_call_rate=1.0, seed=seed)
        answer = await message(sim, tools=TOOLS)
        calls = answer.get("tool_calls") or []
        if not calls:
            assert answer["content"].startswith("<tool_call>")
            kinds.add("cut off")
        elif calls[0]["function"]["name"] != "calculate":
            kinds.add("unknown")
        else:
            assert arguments_of(answer)[0] == {}
            kinds.add("incomplete")
        forced = await message(sim, tools=TOOLS, tool_choice="required")
        assert forced["tool_calls"][0]["function"]["name"] == "calculate"
    assert kinds == {"cut off", "unknown", "incomplete"}


async def test_a_transcript_is_played_turn_by_turn(tmp_path: Path) -> None:
    first = [*user(), said(None, call("calculate", {"expression": "3*12"})), said("It is 36.")]
    first.insert(2, {"role": "tool", "tool_call_id": "call_1", "content": "36"})
    recorded = [first, [*user(), said("No idea.")]]
    path = tmp_path / "recorded.jsonl"
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in recorded))
    sim = SimEngine(SimConfig(latency_seconds=0, transcript=path))
    turn = await message(sim, "a", tools=TOOLS)
    assert turn["tool_calls"][0]["function"]["name"] == "calculate"
    assert (await message(sim, "b", tools=TOOLS))["content"] == "No idea."  # the other rollout
    assert (await message(sim, "a", tools=TOOLS))["tool_calls"]  # its retry: the same again
    history = [*user(), turn, {"role": "tool", "tool_call_id": "x", "content": "36.0"}]
    # A tool may answer differently now; without a rollout (HTTP) what was said so far decides.
    for rollout_id in ("a", ""):
        told = await message(sim, rollout_id, messages=history, tools=TOOLS)
        assert told["content"] == "It is 36."
    with pytest.raises(EngineRefused, match="no turn 3"):
        await message(sim, "a", messages=[*history, said("It is 36."), *user("More?")])
    with pytest.raises(EngineRefused, match="begins like this: 'Who"):
        await message(sim, "c", text="Who are you?")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds no conversation"),
        ('{"messages": []}\n{"messages"', "line 2: it is not JSON"),
        ('{"messages": [{"content": "no role"}]}', "role"),
        (None, "cannot be read"),
    ],
)
def test_a_transcript_without_answers_is_refused_with_its_place(
    tmp_path: Path, content: str | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=words):
        SimEngine(SimConfig(transcript=tmp_path / "bad.jsonl"))


@pytest.mark.thorough
async def test_a_file_of_process_is_its_own_transcript(tmp_path: Path) -> None:
    """Every rollout says again what it said, with several agents, and has the same rewards."""

    async def rewards(**sim: Any) -> list[Any]:
        out = tmp_path / f"{len(sim)}.jsonl"
        done = await aio.process(
            "kuhn",
            model="sim",
            env={"total_steps": 3, "group_size": 2, "data_path_to_save_groups": out},
            sim={"latency_seconds": 0, **sim},
        )
        return [
            sorted(trajectory.score.reward for trajectory in group.trajectories)
            for group in sorted(done.groups, key=lambda group: group.index)
        ]

    recorded = await rewards(seed=5)
    assert await rewards(seed=6, transcript=tmp_path / "1.jsonl") == recorded


# The simulated engine over HTTP, used by the OpenAI SDK, this project's client and a person

ASKED = "What is 6 times 7?"
FINISH: Any = tool("finish", answer={"type": "string"})
MESSAGES: list[Any] = [{"role": "user", "content": f"Answer this. {ASKED}"}]
ASK: dict[str, Any] = {"model": "sim", "messages": MESSAGES, "seed": 1}
HAS = "The engine has sim: set openai.model_name."


@contextmanager
def served(**config: Any) -> Iterator[httpx.Client]:
    """A client of a running server that knows the answer; it is ended in an orderly way."""
    urls: list[str] = []
    turns = [said(None, call("finish", {"answer": "42"}))]

    async def serve(started: threading.Event, ended: asyncio.Event) -> None:
        def listening(url: str) -> None:
            urls.append(url)
            started.set()

        await serve_sim(
            SimConfig(latency_seconds=0, **config),
            "127.0.0.1",
            0,
            TextSolver([(ASKED, turns)]),
            listening=listening,
            stop=ended,
        )

    with (
        beside(serve),
        httpx.Client(base_url=urls[0].removesuffix("/v1"), timeout=PATIENCE) as http,
    ):
        yield http


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with served(solve_probability=1.0) as client:
        yield client


@pytest.fixture
def url(http: httpx.Client) -> str:
    return str(http.base_url.join("/v1"))


def test_the_openai_sdk_plain_and_streamed(url: str) -> None:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        plain = client.chat.completions.create(
            **ASK, tools=[FINISH], logprobs=True, extra_body={"return_token_ids": True}
        )
        message = plain.choices[0].message
        assert message.tool_calls is not None
        assert json.loads(message.tool_calls[0].function.arguments) == {"answer": "42"}
        assert plain.usage is not None
        raw = plain.model_dump()
        assert len(raw["choices"][0]["token_ids"]) == plain.usage.completion_tokens
        assert len(raw["prompt_token_ids"]) == plain.usage.prompt_tokens
        with client.chat.completions.stream(**ASK, tools=[FINISH]) as stream:
            final = stream.get_final_completion().choices[0].message
        assert final.content == message.content
        assert final.tool_calls is not None
        streamed_over_http, whole = final.tool_calls[0].function, message.tool_calls[0].function
        assert streamed_over_http.arguments == whole.arguments


def test_it_never_pretends_to_be_a_model(http: httpx.Client) -> None:
    models = http.get("/v1/models")
    card = models.json()["data"][0]
    assert (card["id"], card["owned_by"]) == ("sim", "envserver-simulated")
    answer = http.post(CHAT, json={"messages": MESSAGES})
    assert answer.headers["server"] == models.headers["server"] == "envserver-sim"
    assert answer.json()["system_fingerprint"] == "envserver-sim"
    assert answer.json()["model"] == "sim"
    assert "sim" in http.get("/version").json()["version"]
    assert http.get("/health").status_code == 200


def test_tokenize_detokenize_and_generate(http: httpx.Client) -> None:
    def post(path: str, **body: Any) -> dict[str, Any]:
        response = http.post(path, json=body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    rendered = post("/tokenize", messages=MESSAGES, tools=[FINISH])
    chat = post(CHAT, messages=MESSAGES, tools=[FINISH], return_token_ids=True)
    assert chat["prompt_token_ids"] == rendered["tokens"]
    assert rendered["count"] == len(rendered["tokens"])
    text = post("/detokenize", tokens=rendered["tokens"])["prompt"]
    assert post("/tokenize", prompt=text)["tokens"] == rendered["tokens"]
    prompt = {"prompt_token_ids": rendered["tokens"]}
    answer = post("/generate", prompt=prompt, logprobs=0, n=2, max_tokens=4)
    assert answer["prompt"] == text
    told = [[int(*position[0]) for position in positions] for positions in answer["logprobs"]]
    assert told == answer["token_ids"] and [len(ids) for ids in told] == [4, 4]


def test_wrong_requests_get_openais_errors_and_pages_in_browser_none(http: httpx.Client) -> None:
    for payload in (b"{", b"[]", b"\xff", b'{"messages": 3}', b""):
        response = http.post(CHAT, content=payload)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("BadRequestError", 400)
    assert http.post("/v1/nothing", json={}).json()["error"]["code"] == 404
    assert http.get(CHAT).status_code == 405
    own = str(http.base_url)
    for told in ({"origin": own}, {"origin": "null"}, {"sec-fetch-site": "same-origin"}):
        foreign = told | {"content-type": "text/plain"}
        asked = http.post(CHAT, content=json.dumps(ASK), headers=foreign)
        assert (asked.status_code, http.get("/v1/models", headers=told).status_code) == (403, 403)
        assert "pages in a browser" in asked.json()["error"]["message"]
    assert http.get("/v1/models", headers={"sec-fetch-site": "none"}).status_code == 200


async def streamed_over_http(engine: OpenAIEngine, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with engine.stream(EngineRequest(CHAT, body | {"stream": True}, "r", PATIENCE)) as chunks:
        return [chunk["choices"][0] async for chunk in chunks]


async def test_simulated_errors_are_http_500_and_a_disconnect_breaks_the_body() -> None:
    with served(error_rate=1.0) as http:
        assert http.post(CHAT, json=ASK).status_code == 500
    with served(disconnect_rate=1.0) as http:
        for stream in (False, True):
            with pytest.raises(httpx.RemoteProtocolError):
                http.post(CHAT, json={"messages": MESSAGES, "stream": stream})
        async with OpenAIEngine(OpenAIConfig(base_url=str(http.base_url)), tries=1) as engine:
            with pytest.raises(EngineGarbage):
                await streamed_over_http(engine, ASK)


def test_a_wrong_model_name_says_which_exist(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "probe", url, "--openai.model_name", "Qwen/Qwen3-4B"]) == 1
    assert f"The model 'Qwen/Qwen3-4B' does not exist. {HAS}" in capsys.readouterr().err


async def test_a_taken_port_is_a_clear_error(http: httpx.Client) -> None:
    with pytest.raises(ConfigError, match=str(http.base_url.port)):
        await serve_sim(SimConfig(), "127.0.0.1", http.base_url.port or 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    with running("models", "sim", "--port", 0, folder=tmp_path) as command:
        url = command.wait_for(r"no language model.*?(http\S+)\n")[1]
        assert httpx.get(f"{url}/models", timeout=PATIENCE).status_code == 200
        command.send(number)
        assert command.end() == 0


def test_demonstrations_of_an_environment_are_found_by_their_question() -> None:
    class Sums(Environment):
        """Sums, of which every second has a demonstration."""

        def tasks(self, split: str) -> Any:
            number = 0
            while True:
                number += 1
                yield Task(str(number), {"kind": "a sum", "question": f"What is {number} + 1?"})

        async def rollout(self, task: Any, run: Any) -> None:
            return None

        def score(self, task: Any, result: Any) -> Any:
            raise NotImplementedError

        def demonstration(self, task: Task) -> list[dict[str, Any]] | None:
            number = int(task.id)
            return None if number % 2 else [{"role": "assistant", "content": str(number + 1)}]

    solver = demonstration_solver(Sums(), max_tasks=50)
    solved = {
        number: solver.solve([{"role": "user", "content": f"Hello. What is {number} + 1?"}], "")
        for number in (3, 4, 52)
    }
    assert solved == {3: None, 4: Solution([{"role": "assistant", "content": "5"}]), 52: None}
    assert question_text(Task("t", {"a": "short", "b": "much longer"})) == "much longer"
