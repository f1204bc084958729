"""Each engine client gives what the engine's chat API gives, or says why it cannot.

The rollouts of a group share one rendering of their first prompt.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from envserver_records.errors import EngineGarbage, EngineRefused, EngineTimeout
from support.engine_clients import Asking
from support.engine_stand_in import ASK, ScaleOut
from support.templates import OWN, chat_format, tool, user
from support.vllm_server import VllmServer

from envserver import OpenAIConfig
from envserver.models.engine import Engine, EngineRequest
from envserver.models.openai import OpenAIEngine
from envserver.models.probe import EngineMode, ProbeResult
from envserver.proxy.engine_answer import parse_answer
from envserver.proxy.engine_client import EngineSession, TextClient, client_for
from envserver.tokens.chat_format import ChatFormat

Json = dict[str, Any]
CACHE = "envserver.proxy.engine_client.tokens"
HERMES = '<tool_call>{"name": "calculate", "arguments": {"expression": "1"}}</tool_call>'
TOOLS: Json = {**ASK, "tools": [tool()]}
CASES = yaml.safe_load((Path(__file__).parent / "engine_client_cases.yaml").read_text())


def asks(fields: Json) -> Json:
    """A request with these fields of a case."""
    return {**ASK, **fields, **({"tools": [tool()]} if "tools" in fields else {})}


@dataclass
class Prompt:
    ids: list[int] | None = None


ROOT = Prompt()


@cache
def format() -> ChatFormat:
    return chat_format(OWN["chatml"])


def asking(engine: Engine, mode: EngineMode, *, reasons: bool = False) -> Asking:
    probe_result = ProbeResult(mode=mode, model="tiny", tools=True, reasoning_parser=reasons)
    return Asking(engine, client_for(probe_result, format()))


def told(answer: Json) -> Json:
    """All of an answer that matters to anybody; ids of calls are the engine's own business."""
    choices = []
    for choice in answer["choices"]:
        message = choice["message"]
        functions = [call["function"] for call in message.get("tool_calls") or []]
        texts = [message.get("content"), message.get("reasoning")]
        names = ("index", "finish_reason", "stop_reason", "token_ids", "logprobs")
        choices.append({**{n: choice.get(n) for n in names}, "texts": texts, "calls": functions})
    return {
        "prompt": answer["prompt_token_ids"],
        "tokens": answer["usage"]["completion_tokens"],
        "choices": choices,
    }


async def whole(asked: Asking, body: Json, prompt: Prompt = ROOT, rollout_id: str = "r") -> Json:
    return told(await asked.whole(body, prompt, rollout_id=rollout_id, timeout_seconds=60))


async def collected(asked: Asking, body: Json, prompt: Prompt = ROOT) -> Json:
    """A stream put together again; the first chunk of each choice has only a role."""
    choices: dict[int, Json] = {}
    answer: Json = {}
    async with asked.stream(body, prompt, rollout_id="r", timeout_seconds=60) as chunks:
        async for chunk in chunks:
            for name in ("prompt_token_ids", "usage"):
                if chunk.get(name) is not None:
                    answer[name] = chunk[name]
            for part in chunk["choices"]:
                if part["index"] not in choices:
                    assert part["delta"] == {"role": "assistant", "content": ""}
                    assert "prompt_token_ids" in answer
                _add(choices.setdefault(part["index"], {"index": part["index"]}), part)
    return told({**answer, "choices": [choices[index] for index in sorted(choices)]})


def _add(choice: Json, part: Json) -> None:
    message = choice.setdefault("message", {"content": ""})
    message["content"] += part["delta"].get("content") or ""
    choice.setdefault("token_ids", []).extend(part.get("token_ids") or [])
    entries = choice.setdefault("logprobs", {"content": []})["content"]
    entries.extend((part.get("logprobs") or {}).get("content") or [])
    for name in ("finish_reason", "stop_reason"):
        if part.get(name) is not None:
            choice[name] = part[name]


@pytest.mark.parametrize("case", CASES["same"])
async def test_every_way_gives_what_chat_gives(case: str) -> None:
    texts, fields, reasons = CASES["same"][case]
    body = asks(fields)
    engine = ScaleOut(format(), *texts, reasons=reasons)
    wanted = await whole(asking(engine, "chat"), body)
    for mode in ("tokens", "completions"):
        asked = asking(engine, mode, reasons=reasons)
        for prompt in (ROOT, Prompt(wanted["prompt"])):
            if prompt.ids is not None and asked.can_continue(body):
                assert mode == "completions"
                continue
            assert await whole(asked, body, prompt) == wanted
            if asked.streams(body, prompt) and not (mode == "completions" and prompt.ids is None):
                assert await collected(asked, body, prompt) == wanted
    assert engine.rollouts == {"r"}


async def test_versions_stand_in_whole_answers_and_in_last_chunks() -> None:
    asked = asking(ScaleOut(format(), "Hello."), "tokens")
    answer = await asked.whole(ASK, ROOT, rollout_id="r", timeout_seconds=9)
    choice = answer["choices"][0]
    spans = [{"version": "7", "start": 0, "end": len(choice["token_ids"])}]
    assert choice["weight_versions"] == spans
    async with asked.stream(ASK, ROOT, rollout_id="r", timeout_seconds=9) as chunks:
        parts = [part async for chunk in chunks for part in chunk["choices"]]
    assert [part.get("weight_versions") for part in parts][-1] == spans
    assert not any(part.get("weight_versions") for part in parts[:-1])


async def test_where_a_grammar_begins_is_asked_for_each_prompt() -> None:
    engine = ScaleOut(format(), HERMES)
    asked = asking(engine, "tokens")
    for text in ("hi", "ho"):
        body = {**TOOLS, "tool_choice": "required", "messages": [user(text)]}
        await whole(asked, body, Prompt([5]))
    assert engine.paths == ["render", "generate", "derender"] * 2
    assert engine.requests[1][1]["token_ids"] == [5]


Spoil = Callable[[str, Json], None]


def spoiled(path: str, change: Callable[[Json], Any], *, choice: bool = False) -> Spoil:
    """Changes the answers of one endpoint, or their first choices."""

    def spoil(asked: str, answer: Json) -> None:
        if asked.endswith(path):
            change(answer["choices"][0] if choice and answer["choices"] else answer)

    return spoil


def drop(path: str, name: str, *, choice: bool = False) -> Spoil:
    return spoiled(path, lambda holder: holder.pop(name, None), choice=choice)


def refuse(holder: Json) -> None:
    raise EngineRefused("no", status=400)


@pytest.mark.parametrize(("mode", "fields", "path", "whole", "choice", "words"), CASES["garbage"])
async def test_garbage_says_what_is_missing(
    mode: EngineMode, fields: Json, path: str, whole: Json, choice: Json, words: str
) -> None:
    def change(holder: Json) -> None:
        for name, value in (choice or whole).items():
            if value is None:
                holder.pop(name, None)
            else:
                holder[name] = value

    spoil = spoiled(path, change, choice=bool(choice))
    body, prompt = asks(fields), ROOT if mode == "tokens" else Prompt([5])
    asked = asking(ScaleOut(format(), "Hello.", spoil=spoil), mode)
    for bare in (False, True):
        with pytest.raises(EngineGarbage, match=words):
            await asked.whole(body, prompt, rollout_id="r", timeout_seconds=60, bare=bare)
    if asked.streams(body, prompt) and words != "a different prompt" and "usage" not in words:
        with pytest.raises(EngineGarbage):
            await collected(asked, body, prompt)


@pytest.mark.parametrize("body", [ASK, {**TOOLS, "n": 2}])
async def test_a_bare_answer_is_recorded_like_a_full_one(body: Json) -> None:
    asked = asking(ScaleOut(format(), "Hello.", HERMES), "tokens")
    full, bare = [
        await asked.whole(body, ROOT, rollout_id="r", timeout_seconds=60, bare=bare)
        for bare in (False, True)
    ]
    assert parse_answer(bare) == parse_answer(full)
    assert "token_logprobs" in bare["choices"][0]["logprobs"]


@pytest.mark.parametrize("path", ["render", "generate", "derender"])
async def test_what_an_endpoint_refuses_is_refused(path: str) -> None:
    with pytest.raises(EngineRefused):
        engine = ScaleOut(format(), HERMES, spoil=spoiled(path, refuse))
        await whole(asking(engine, "tokens"), TOOLS)


async def test_all_requests_of_a_call_share_its_time() -> None:
    engine = ScaleOut(format(), HERMES)
    asked = asking(engine, "tokens")
    await asked.whole(TOOLS, ROOT, rollout_id="r", timeout_seconds=5)
    render, generate, derender = engine.seconds
    assert 5 >= render > generate > derender
    with pytest.raises(EngineTimeout):
        await asked.whole(TOOLS, ROOT, rollout_id="r", timeout_seconds=0)


@pytest.mark.parametrize(("fields", "tokens", "completions"), CASES["continued"])
def test_what_cannot_be_continued_is_known_before(
    fields: Json, tokens: str | None, completions: str | None
) -> None:
    body = asks(fields)
    engine = ScaleOut(format(), "")
    assert asking(engine, "tokens").can_continue(body) == tokens
    assert asking(engine, "completions").can_continue(body) == completions
    assert asking(engine, "chat").can_continue(body) == "engine_renders"


async def test_images_and_unusual_logprobs_are_left_to_chat() -> None:
    engine = ScaleOut(format(), "Hello.")
    asked = asking(engine, "tokens")
    body = {**ASK, "return_tokens_as_token_ids": True}
    await whole(asked, body)
    assert await collected(asking(engine, "tokens"), ASK) == await whole(asked, ASK)
    assert asked.streams(body, ROOT)
    assert engine.paths == ["completions", "render", "generate", "render", "generate"]


async def test_one_answer_read_otherwise_by_the_engine_ends_the_trust() -> None:
    engine = ScaleOut(format(), f"So: {HERMES}", "No call.")
    asked = asking(engine, "completions")
    await whole(asked, {**TOOLS, "n": 2})
    assert asked.can_continue(TOOLS) is None

    def spoil(path: str, answer: Json) -> None:
        answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] = "another"

    engine.spoil = spoil
    await whole(asked, {**TOOLS, "tool_choice": "required", "skip_special_tokens": False})
    assert asked.can_continue(TOOLS) is None
    await whole(asked, TOOLS)
    assert asked.can_continue(TOOLS) == "parser_differs"
    assert asked.can_continue(ASK) is None


async def test_a_model_whose_calls_we_cannot_read_is_continued_without_tools() -> None:
    silent = chat_format("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    probe_result = ProbeResult(mode="completions", model="tiny")
    asked = client_for(probe_result, silent)
    assert asked.can_continue(TOOLS) == "tool_format_unknown"
    assert asked.can_continue(ASK) is None


# Text completions in the form of a chat


async def test_texts_are_completed_in_the_form_of_a_chat() -> None:
    engine = ScaleOut(format(), "Hello.")
    session = EngineSession(engine, "r", 9)
    body = {"model": "tiny", "prompt": [[5], [6, 7]], "logprobs": 0, "return_token_ids": True}
    answer = await TextClient().whole(session, body)
    assert "prompt_token_ids" not in answer
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[5], [6, 7]]
    for choice in answer["choices"]:
        assert choice["message"] == {"role": "assistant", "content": "Hello."}
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
    alone = await TextClient().whole(session, {**body, "prompt": [5]})
    assert alone["prompt_token_ids"] == [5]
    texts, ids = "", []
    alone_body = {**body, "prompt": [5], "logprobs": None}
    async with TextClient().stream(session, alone_body) as chunks:
        async for chunk in chunks:
            for part in chunk["choices"]:
                texts += part["delta"]["content"]
                ids += part["token_ids"]
    assert (texts, ids) == ("Hello.", alone["choices"][0]["token_ids"])
    engine.spoil = drop("completions", "text", choice=True)
    with pytest.raises(EngineGarbage, match="holds no text"):
        await TextClient().whole(session, body)


# Renderings


async def first_calls(engine: ScaleOut, *bodies: Json) -> list[Json | BaseException]:
    """The answers to `bodies`, sent at once; each answer is the same when it is asked for again."""
    asked = asking(engine, "tokens")
    answers = await asyncio.gather(*(whole(asked, b) for b in bodies), return_exceptions=True)
    for body, answer in zip(bodies, answers, strict=True):
        assert isinstance(answer, BaseException) or await whole(asked, body) == answer
    return answers


OTHERS: list[Json] = [
    {"messages": [user("ho")]},
    {"temperature": 1},
    {"max_tokens": 100},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"tools": [tool()]},
    {"tools": [dict(reversed(tool().items()))]},
]


async def test_what_a_group_begins_with_is_rendered_once() -> None:
    """What begins otherwise is rendered for itself, even where only the order of names differs: a
    template writes tools in that order."""
    engine = ScaleOut(format(), "Hello.")
    answers = await first_calls(engine, *({**ASK, "seed": seed} for seed in range(8)))
    assert engine.paths.count("render") == 1
    generated = [body for path, body in engine.requests if "generate" in path][:8]
    assert [body["sampling_params"]["seed"] for body in generated] == [*range(8)]
    answers += await first_calls(engine, ASK, *({**ASK, **other} for other in OTHERS))
    assert engine.paths.count("render") == 2 + len(OTHERS)
    assert not any(isinstance(answer, BaseException) for answer in answers)


async def test_few_renderings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScaleOut(format(), "Hello.")
    asked = asking(engine, "tokens")
    bodies = [{**ASK, "messages": [user(f"{number}")]} for number in range(9)]
    monkeypatch.setattr(f"{CACHE}._MOST_TOKENS", 3 * len((await whole(asked, bodies[0]))["prompt"]))
    for body in [*bodies, *reversed(bodies)]:
        await whole(asked, body)
    assert engine.paths.count("render") == 9 + 6


async def test_an_engine_that_fails_one_rollout_fails_no_other() -> None:
    def refuse_once(answer: Json) -> None:
        if engine.paths.count("render") == 1:
            refuse(answer)

    engine = ScaleOut(format(), "Hello.", spoil=spoiled("/render", refuse_once))
    first, *others = await first_calls(engine, *[ASK] * 4)
    assert isinstance(first, EngineRefused)
    assert not any(isinstance(answer, BaseException) for answer in others)
    assert engine.paths.count("render") == 2


async def test_a_rollout_on_a_hung_replica_holds_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{CACHE}._PATIENCE_SECONDS", 0.01)
    engine = ScaleOut(format(), "Hello.")
    asked = asking(engine, "tokens")
    post, let_go = engine.post, asyncio.Event()

    async def hangs(request: EngineRequest) -> Json:
        if request.rollout_id == "hangs" and request.path.endswith("/render"):
            await let_go.wait()
        return await post(request)

    monkeypatch.setattr(engine, "post", hangs)
    hanging = asyncio.create_task(whole(asked, ASK, rollout_id="hangs"))
    await asyncio.sleep(0)
    answers = await asyncio.gather(*(whole(asked, ASK) for _ in range(3)))
    assert not hanging.done()
    let_go.set()
    assert await hanging == answers[0]


# On a real vLLM

BODIES = 30
NOTHING_FORCED = ("tool_choice", "stop_token_ids", "min_tokens", "ignore_eos", "logit_bias")
WRITTEN = [
    *(
        HERMES,
        HERMES,
        HERMES.removesuffix("</tool_call>"),
        "<tool_call>{bad}</tool_call>",
        "Sure.\n",
    ),
    *("\n", '<tool_call>{"name": "f", "arguments": {"é": [1.0, null]}}</tool_call>'),
    '<tool_call>{"name": "calculate"}</tool_call>',
]


def random_body(chance: random.Random) -> Json:
    """A request with any of the fields that change what is sampled, or how it is told."""
    body = {
        **ASK,
        "seed": chance.randrange(10**9),
        "temperature": chance.choice([1.0, 0.7]),
        "messages": [user(f"Ann has {chance.randrange(99)} apples.")],
        "max_tokens": chance.choice([1, 16, 24, 64]),
    }
    choices: list[tuple[float, str, Any]] = [
        (0.3, "n", 3),
        (0.4, "top_logprobs", chance.choice([1, 5])),
        (0.4, "stop", chance.sample([" the", "er", "in", "a", "</tool_call>"], 2)),
        (0.2, "include_stop_str_in_output", True),
        (0.2, "stop_token_ids", chance.sample(range(4096), 400)),
        (0.2, "min_tokens", 1),
        (0.1, "ignore_eos", True),
        (0.2, "skip_special_tokens", False),
        (0.1, "bad_words", ["the"]),
        (0.3, "logit_bias", {"2": 8.0, "1": 6.0}),
        (0.1, "response_format", {"type": "json_object"}),
    ]
    body |= {name: value for share, name, value in choices if chance.random() < share}
    if chance.random() < 0.6:
        body["tools"] = [tool()]
        forced = {"type": "function", "function": {"name": "calculate"}}
        body["tool_choice"] = chance.choice(["auto", "none", "required", forced])
    if chance.random() < 0.6 and "tools" in body:
        # Nothing else makes a random model write calls, sound or broken.
        for name in (*NOTHING_FORCED, "response_format"):
            body.pop(name, None)
        if chance.random() < 0.7:
            body.pop("stop", None)
        texts = ["".join(chance.choices(WRITTEN, k=chance.choice([1, 1, 2]))) for _ in range(3)]
        body |= {"structured_outputs": {"choice": texts}, "max_tokens": chance.choice([20, 400])}
    return body


@pytest.mark.vllm
async def test_every_way_gives_what_chat_gives_on_a_real_vllm(vllm_server: VllmServer) -> None:
    real = ChatFormat.load(vllm_server.model_folder)
    seen = {"refused": 0, "calls": 0, "continued": 0, "streamed": 0}
    async with OpenAIEngine(OpenAIConfig(base_url=[vllm_server.base_url])) as engine:

        async def compare(body: Json) -> None:
            try:
                wanted = await whole(Asking(engine, client_for(probe_result("chat"), real)), body)
            except EngineRefused:
                seen["refused"] += 1
                return
            seen["calls"] += sum(bool(choice["calls"]) for choice in wanted["choices"])
            for mode in ("tokens", "completions"):
                asked = Asking(engine, client_for(probe_result(mode), real))
                for prompt in (ROOT, Prompt(wanted["prompt"])):
                    if prompt.ids is not None and asked.can_continue(body):
                        assert mode == "completions"
                        continue
                    got = await whole(asked, body, prompt)
                    assert strict(got, prompt, mode) == strict(wanted, prompt, mode)
                    seen["continued"] += prompt.ids is not None
                    if asked.streams(body, prompt):
                        again = await collected(asked, body, prompt)
                        assert again == got
                        seen["streamed"] += 1

        for number in range(BODIES):
            await compare(random_body(random.Random(number)))
    assert seen["refused"] < BODIES / 5
    assert seen["calls"] > 1
    assert seen["continued"] > BODIES
    assert seen["streamed"] > BODIES


def probe_result(mode: EngineMode) -> ProbeResult:
    return ProbeResult(mode=mode, model="tiny", tools=True, has_parser=True)


def strict(answer: Json, prompt: Prompt, mode: str) -> Json:
    """`answer`, without the texts of parts of characters where we decode them ourselves."""
    if mode == "tokens" or prompt.ids is None:
        return answer
    choices = []
    for choice in answer["choices"]:
        entries = [
            (entry["logprob"], [top["logprob"] for top in entry["top_logprobs"]])
            for entry in choice["logprobs"]["content"]
        ]
        choices.append({**choice, "logprobs": entries})
    return {**answer, "choices": choices}
