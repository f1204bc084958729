"""The local engine as a process: asked over HTTP as agents, the proxy and trainers ask it."""

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from support.commands import Running, envserver, running
from support.foreign_trainers import random_model
from support.odd_prompts import assert_renders_as_we_do
from support.waiting import PATIENCE

from envserver import OpenAIConfig
from envserver.models.openai import OpenAIEngine
from envserver.models.probe import probe
from envserver.settings.config import Mode

SAY = [{"role": "user", "content": "Say something."}]
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"properties": {"word": {"type": "string"}}}},
}
CALL = 'Well. <tool_call>{"name": "look_up", "arguments": {"word": "x"}}</tool_call>'
PROMPT = list(range(300, 330))


@dataclass(frozen=True)
class Local:
    """A running engine."""

    process: Running
    base_url: str
    model_folder: Path

    @property
    def root_url(self) -> str:
        return self.base_url.removesuffix("/v1")


@pytest.fixture(scope="module")
def engine(learn_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    """An engine with a tiny random model, up in some seconds; it must end in order, too."""
    folder = tmp_path_factory.mktemp("local")
    model = random_model(learn_python, folder / "model", "padded")
    command = ("-m", "envserver_local", "--model", model, "--served-model-name", "tiny")
    options = ("--port", 0, "--max-batch-size", 4, "--enable-lora", "--threads", 1)
    with running(*command, *options, folder=folder, program=learn_python) as process:
        base_url = process.wait_for(r"http://127\.0\.0\.1:\d+/v1").group()
        yield Local(process, base_url, model)
        with httpx.stream(
            "POST", f"{base_url}/completions", json=endless(stream=True), timeout=PATIENCE
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send(signal.SIGTERM)
            *_, last, end = [line for line in lines if line]
            assert '"finish_reason":"abort"' in last and end == "data: [DONE]"
        assert process.end() == 0, process.output()
        assert "Traceback" not in process.output()


@pytest.fixture
async def http(engine: Local) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=engine.root_url, timeout=PATIENCE) as client:
        yield client


def test_it_renders_any_conversation_as_we_do(engine: Local) -> None:
    assert_renders_as_we_do(engine.root_url, "tiny", engine.model_folder)


async def test_no_page_in_a_browser_asks_the_engine(http: httpx.AsyncClient) -> None:
    told = {"origin": "http://evil.example", "content-type": "text/plain"}
    for path in ("/v1/load_lora_adapter", "/v1/completions"):
        assert (await http.post(path, content=b"{}", headers=told)).status_code == 403


def endless(**more: Any) -> dict[str, Any]:
    """A completion that goes on until the context is full."""
    return {"model": "tiny", "prompt": PROMPT, "ignore_eos": True, "max_tokens": 4000, **more}


async def test_agents_speak_with_it(engine: Local) -> None:
    async with AsyncOpenAI(base_url=engine.base_url, api_key="none") as client:
        asked: dict[str, Any] = {"model": "tiny", "messages": SAY, "seed": 3, "max_tokens": 24}
        whole = await client.chat.completions.create(**asked, n=2, logprobs=True, top_logprobs=3)
        first, second = whole.choices
        assert first.message.content != second.message.content
        assert first.logprobs and first.logprobs.content and whole.usage
        told = sum(
            len(choice.logprobs.content or ()) for choice in whole.choices if choice.logprobs
        )
        assert told == whole.usage.completion_tokens
        assert all(len(one.top_logprobs) == 3 for one in first.logprobs.content)
        for tools in ({}, {"tools": [TOOL]}):
            stream = await client.chat.completions.create(
                **asked, **tools, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            alone = await client.chat.completions.create(**asked, **tools)
            pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
            assert "".join(pieces) == (alone.choices[0].message.content or "")
            assert chunks[-1].usage == alone.usage
        on = {"ignore_eos": True}
        text = await client.completions.create(
            model="tiny", prompt="Once", max_tokens=5, seed=1, extra_body=on
        )
        stop = text.choices[0].text[2:5]
        cut = await client.completions.create(
            model="tiny", prompt="Once", max_tokens=5, seed=1, stop=[stop], extra_body=on
        )
        assert cut.choices[0].text == text.choices[0].text.partition(stop)[0]
        assert cut.choices[0].finish_reason == "stop"


async def test_ids_go_in_and_come_out(http: httpx.AsyncClient) -> None:
    asked = {"model": "tiny", "prompt": PROMPT, "seed": 4, "max_tokens": 20, "logprobs": 0}
    answer = await http.post("/v1/completions", json=asked | {"return_token_ids": True})
    (choice,) = answer.json()["choices"]
    assert choice["prompt_token_ids"] == PROMPT
    whole = {"model": "tiny", "prompt": PROMPT + choice["token_ids"], "max_tokens": 1}
    scored = await http.post("/v1/completions", json=whole | {"prompt_logprobs": 0})
    rows = scored.json()["choices"][0]["prompt_logprobs"][len(PROMPT) :]
    again = [
        row[str(index)]["logprob"] for row, index in zip(rows, choice["token_ids"], strict=True)
    ]
    assert again == pytest.approx(choice["logprobs"]["token_logprobs"], abs=5e-5)
    echoed = await http.post("/v1/completions", json=asked | {"echo": True})
    logprobs = echoed.json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert len(logprobs["token_logprobs"]) == len(PROMPT) + len(choice["token_ids"])


async def test_the_proxy_can_ask_it_in_every_way(engine: Local) -> None:
    async with OpenAIEngine(OpenAIConfig(base_url=engine.base_url), tries=1) as asked:
        modes: tuple[Mode, ...] = ("tokens", "completions", "chat")
        for mode in modes:
            assert (await probe(asked, wanted=mode, model="tiny")).mode == mode
        found = await probe(asked, model="tiny")
        assert (found.mode, found.reasons) == ("tokens", {})
        assert all([found.tools, found.metrics, found.pausable, found.has_parser])
        assert found.weight_versions and found.logprobs == "raw"
        assert found.root == str(engine.model_folder)


async def test_what_it_samples_beyond_its_tokenizer_is_a_prompt(http: httpx.AsyncClient) -> None:
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1, "return_token_ids": True}
    asked |= {"logit_bias": {"4100": 100}, "logprobs": 0}
    (choice,) = (await http.post("/v1/completions", json=asked)).json()["choices"]
    assert (choice["token_ids"], choice["text"]) == ([4100], "")
    again = {"model": "tiny", "prompt": [*PROMPT, 4100], "max_tokens": 1, "prompt_logprobs": 0}
    answer = await http.post("/v1/completions", json=again)
    assert answer.status_code == 200, answer.text
    assert (await http.post("/detokenize", json={"tokens": [4100]})).json() == {"prompt": ""}


async def test_calls_of_tools_are_read(http: httpx.AsyncClient) -> None:
    ids = (await http.post("/tokenize", json={"prompt": CALL})).json()["tokens"]
    body = {"chat_request": {"model": "tiny", "messages": SAY, "tools": [TOOL]}}
    body |= {"generate_response": {"choices": [{"index": 0, "token_ids": ids}]}}
    answer = await http.post("/v1/chat/completions/derender", json=body)
    message = answer.json()["choices"][0]["message"]
    assert message["content"].strip() == "Well."
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"word": "x"}


def test_what_is_delivered_is_what_it_sampled(engine: Local, tmp_path: Path) -> None:
    words = ("--openai.base_url", engine.base_url, "--openai.model_name", "tiny")
    ran = envserver(
        "process", "--env", "math", *words, "--env.group_size", 4, "--env.total_steps", 2,
        "--sampling.max_tokens", 16, "--env.data_path_to_save_groups", "out.jsonl",
        "--env.mode", "single", folder=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    ran = envserver("verify", "out.jsonl", *words, "--json", folder=tmp_path)
    report = json.loads(ran.stdout)
    assert (ran.returncode, report["findings"]) == (0, [])
    assert report["compared"]["rows"] == 8


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/chat/completions", {"messages": SAY, "model": "other"}, "does not exist"),
        ("/v1/chat/completions", {"messages": SAY, "tool_choice": "required"}, "cannot force"),
        ("/v1/completions", {"prompt": [99_999]}, "0 to 4159"),
        ("/v1/completions", {"prompt": [5], "max_tokens": 5000}, "maximum context"),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"n": 0}}, "n:"),
        ("/collective_rpc", {"method": "eval"}, "reload_weights"),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"}, "no LoRA adapter"),
        ("/v1/nothing", {}, "There is no POST"),
    ],
)
async def test_wrong_requests_are_told_what_is_wrong(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], words: str
) -> None:
    answer = await http.post(path, json=body)
    assert 400 <= answer.status_code < 500, answer.text
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == answer.status_code


async def test_who_hangs_up_makes_room(http: httpx.AsyncClient) -> None:
    for stream in (False, True):
        task = asyncio.create_task(http.post("/v1/completions", json=endless(stream=stream)))
        await until_running(http, 1)
        task.cancel()
        await until_running(http, 0)


async def test_weights_are_replaced_while_it_runs(engine: Local, http: httpx.AsyncClient) -> None:
    asked = {
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": 300, "ignore_eos": True, "seed": 2},
        "model": "tiny",
    }
    await http.post("/update_weight_version", json={"new_version": "1"})
    before = (await http.post("/inference/v1/generate", json=asked)).json()["choices"][0]
    task = asyncio.create_task(http.post("/inference/v1/generate", json=asked))
    await until_running(http, 1)
    assert (await http.post("/pause?mode=keep")).json() == {"status": "paused"}
    assert (await http.get("/is_paused")).json() == {"is_paused": True}
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(engine.model_folder)}}
    assert (await http.post("/collective_rpc", json=body)).status_code == 200
    await http.post("/reset_prefix_cache")
    await http.post("/update_weight_version", json={"new_version": "2"})
    assert (await http.get("/weight_info")).json() == {"weight_version": "2"}
    await http.post("/resume")
    (choice,) = (await task).json()["choices"]
    first, second = choice["weight_versions"]
    assert (first["version"], second["version"]) == ("1", "2")
    assert (first["start"], first["end"], second["end"]) == (0, second["start"], 300)
    assert choice["token_ids"] == before["token_ids"]


async def until_running(http: httpx.AsyncClient, count: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            found = re.search(
                r"^vllm:num_requests_running\S* (\d+)", (await http.get("/metrics")).text, re.M
            )
            assert found is not None
            if int(found.group(1)) == count:
                return
            await asyncio.sleep(0.02)
