"""The rollouts of a group share one rendering of their first prompt."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest import mock

import pytest
from envserver_records.errors import EngineRefused
from support.fake_scale_out import ASK, ScaleOut
from support.templates import OWN, chat_format, tool, user
from support.vllm_server import VllmServer

from envserver import OpenAIConfig
from envserver.models import OpenAIEngine, ProbeResult
from envserver.models.engine import Engine
from envserver.models.probe import EngineMode
from envserver.proxy.engine_client import EngineClient, client_for
from envserver.proxy.engine_client.base import Prompt
from envserver.tokens import ChatFormat

Json = dict[str, Any]
CACHE = "envserver.proxy.engine_client.render_cache"


class Root(Prompt):
    """A prompt that the engine renders."""

    ids = None


def format() -> ChatFormat:
    return chat_format(OWN["chatml"])


def asking(engine: Engine, format: ChatFormat, mode: EngineMode = "tokens") -> EngineClient:
    return client_for(engine, ProbeResult(mode=mode, model="tiny", tools=True), format)


async def whole(asked: EngineClient, body: Json, rollout_id: str = "r") -> Json:
    answer = await asked.whole(body, Root(), rollout_id=rollout_id, timeout_seconds=60)
    (choice,) = answer["choices"]
    names = ("finish_reason", "token_ids", "logprobs")
    return {"prompt": answer["prompt_token_ids"], **{name: choice[name] for name in names}}


async def first_calls(engine: ScaleOut, *bodies: Json) -> list[Json | BaseException]:
    """The answers to `bodies`, sent at once; each answer is the same when it is asked for again."""
    asked = asking(engine, format())
    answers = await asyncio.gather(*(whole(asked, b) for b in bodies), return_exceptions=True)
    for body, answer in zip(bodies, answers, strict=True):
        assert isinstance(answer, BaseException) or await whole(asked, body) == answer
    return answers


async def test_what_a_group_begins_with_is_rendered_once() -> None:
    engine = ScaleOut(format(), "Hello.")
    for answer in await first_calls(engine, *({**ASK, "seed": seed} for seed in range(8))):
        assert not isinstance(answer, BaseException)
    assert engine.paths.count("render") == 1
    generated = [body for path, body in engine.requests if "generate" in path][:8]
    assert [body["sampling_params"]["seed"] for body in generated] == [*range(8)]


OTHERS: list[Json] = [
    {"messages": [user("ho")]},
    {"temperature": 1},
    {"max_tokens": 100},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"tools": [tool()]},
    {"tools": [dict(reversed(tool().items()))]},
]


async def test_what_begins_otherwise_is_rendered_for_itself() -> None:
    """Even where only the order of names differs: a template writes tools in that order."""
    engine = ScaleOut(format(), "Hello.")
    for answer in await first_calls(engine, ASK, *({**ASK, **other} for other in OTHERS)):
        assert not isinstance(answer, BaseException)
    assert engine.paths.count("render") == 1 + len(OTHERS)


async def test_a_rendering_gets_old(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScaleOut(format(), "Hello.")
    asked = asking(engine, format())
    monkeypatch.setattr(f"{CACHE}._FRESH_SECONDS", -1.0)
    for _ in range(3):
        await whole(asked, ASK)
    assert engine.paths.count("render") == 3


@pytest.mark.parametrize("most", ["_MOST_TOKENS", "_MOST_PROMPTS"])
async def test_few_renderings_are_kept(most: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScaleOut(format(), "Hello.")
    asked = asking(engine, format())
    bodies = [{**ASK, "messages": [user(f"{number}")]} for number in range(9)]
    prompt = len((await whole(asked, bodies[0]))["prompt"])
    monkeypatch.setattr(f"{CACHE}.{most}", 3 * prompt if most == "_MOST_TOKENS" else 3)
    for body in [*bodies, *reversed(bodies)]:
        await whole(asked, body)
    assert engine.paths.count("render") == 9 + 6


async def test_an_engine_that_fails_one_rollout_fails_no_other() -> None:
    rendered: list[str] = []

    def spoil(asked: str, answer: Json) -> None:
        if asked.endswith("/render"):
            rendered.append(asked)
            if len(rendered) == 1:
                raise EngineRefused("no", status=400)

    first, *others = await first_calls(ScaleOut(format(), "Hello.", spoil=spoil), *[ASK] * 4)
    assert isinstance(first, EngineRefused)
    assert not any(isinstance(answer, BaseException) for answer in others)
    assert len(rendered) == 2


async def test_a_rollout_whose_replica_hangs_holds_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{CACHE}._PATIENCE_SECONDS", 0.01)
    engine = ScaleOut(format(), "Hello.")
    asked = asking(engine, format())
    post, let_go = engine.post, asyncio.Event()

    async def hangs(path: str, *args: Any, **options: Any) -> Json:
        if options["rollout_id"] == "hangs" and path.endswith("/render"):
            await let_go.wait()
        return await post(path, *args, **options)

    monkeypatch.setattr(engine, "post", hangs)
    hanging = asyncio.create_task(whole(asked, ASK, "hangs"))
    await asyncio.sleep(0)
    answers = await asyncio.gather(*(whole(asked, ASK) for _ in range(3)))
    assert not hanging.done()
    let_go.set()
    assert await hanging == answers[0]


@pytest.mark.vllm
async def test_a_real_vllm_samples_for_each_as_without_it(vllm_server: VllmServer) -> None:
    real = ChatFormat.load(vllm_server.model_folder)
    bodies = [{**ASK, "seed": seed, "max_tokens": 12} for seed in range(8)]
    async with OpenAIEngine(OpenAIConfig(base_url=[vllm_server.base_url])) as engine:
        chat = asking(engine, real, "chat")
        wanted = [await whole(chat, body) for body in bodies]
        tokens = asking(engine, real)
        with mock.patch.object(engine, "post", wraps=engine.post) as asked:
            assert await asyncio.gather(*(whole(tokens, body) for body in bodies)) == wanted
    assert sum(call.args[0].endswith("/render") for call in asked.call_args_list) == 1
