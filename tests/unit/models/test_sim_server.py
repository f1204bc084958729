"""The simulated engine over HTTP, used by the OpenAI SDK, this project's client and a person."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from envserver_records.errors import ConfigError, EngineGarbage, EngineRefused
from envserver_records.records import Task
from support.beside import beside
from support.waiting import PATIENCE

from envserver import OpenAIConfig, SimConfig
from envserver.cli import main
from envserver.environment import Environment
from envserver.models import OpenAIEngine, TextSolver
from envserver.models.sim import Solution, Solver, serve_sim
from envserver.running.simulated_server import demonstration_solver, question_text

QUESTION = "What is 6 times 7?"
TURNS = [
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c", "type": "function",
             "function": {"name": "finish", "arguments": '{"answer": "42"}'}}
        ],
    }
]  # fmt: skip
FINISH = {
    "type": "function",
    "function": {
        "name": "finish",
        "parameters": {"type": "object", "properties": {"answer": {"type": "string"}}},
    },
}
MESSAGES: list[Any] = [{"role": "user", "content": f"Answer this. {QUESTION}"}]


@asynccontextmanager
async def served(solver: Solver | None = None, **config: Any) -> AsyncIterator[str]:
    """The base URL of a running server, ended in an orderly way afterwards."""
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    task = asyncio.create_task(
        serve_sim(
            SimConfig(latency_seconds=0, **config),
            "127.0.0.1",
            0,
            solver,
            listening=url.set_result,
            stop=stop,
        )
    )
    try:
        yield await url
    finally:
        stop.set()
        await asyncio.wait_for(task, PATIENCE)


@asynccontextmanager
async def sdk(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def test_the_openai_sdk_plain_and_streamed() -> None:
    solver = TextSolver([(QUESTION, TURNS)])
    async with served(solver, solve_probability=1.0) as url, sdk(url) as client:
        ask: dict[str, Any] = {"model": "sim", "messages": MESSAGES, "tools": [FINISH], "seed": 1}
        plain = await client.chat.completions.create(
            **ask, logprobs=True, extra_body={"return_token_ids": True}
        )
        message = plain.choices[0].message
        assert message.tool_calls is not None
        assert json.loads(message.tool_calls[0].function.arguments) == {"answer": "42"}
        assert plain.choices[0].finish_reason == "tool_calls"
        assert plain.usage is not None
        raw = plain.model_dump()
        assert len(raw["choices"][0]["token_ids"]) == plain.usage.completion_tokens
        assert len(raw["prompt_token_ids"]) == plain.usage.prompt_tokens
        async with client.chat.completions.stream(
            model="sim", messages=MESSAGES, tools=[FINISH], seed=1
        ) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == message.content
        assert final.choices[0].message.tool_calls is not None
        streamed = final.choices[0].message.tool_calls[0].function
        assert streamed.arguments == message.tool_calls[0].function.arguments
        texts = await client.completions.create(model="sim", prompt="Once", n=3, max_tokens=9)
        assert len({choice.text for choice in texts.choices}) == 3
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            await client.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=-1)
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(model="gpt-4", messages=MESSAGES)


async def test_it_never_pretends_to_be_a_model() -> None:
    async with (
        served() as url,
        httpx.AsyncClient(base_url=url.removesuffix("/v1"), timeout=PATIENCE) as client,
    ):
        models = await client.get("/v1/models")
        card = models.json()["data"][0]
        assert (card["id"], card["owned_by"]) == ("sim", "envserver-simulated")
        answer = await client.post("/v1/chat/completions", json={"messages": MESSAGES})
        assert answer.headers["server"] == models.headers["server"] == "envserver-sim"
        assert answer.json()["system_fingerprint"] == "envserver-sim"
        assert answer.json()["model"] == "sim"
        assert "sim" in (await client.get("/version")).json()["version"]
        assert (await client.get("/health")).status_code == 200


async def test_tokenize_detokenize_and_generate() -> None:
    async with (
        served() as url,
        httpx.AsyncClient(base_url=url.removesuffix("/v1"), timeout=PATIENCE) as client,
    ):

        async def post(path: str, **body: Any) -> dict[str, Any]:
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            return dict(response.json())

        rendered = await post("/tokenize", messages=MESSAGES, tools=[FINISH])
        chat = await post(
            "/v1/chat/completions", messages=MESSAGES, tools=[FINISH], return_token_ids=True
        )
        assert chat["prompt_token_ids"] == rendered["tokens"]
        assert rendered["count"] == len(rendered["tokens"])
        text = (await post("/detokenize", tokens=rendered["tokens"]))["prompt"]
        assert (await post("/tokenize", prompt=text))["tokens"] == rendered["tokens"]
        prompt = {"prompt_token_ids": rendered["tokens"]}
        answer = await post("/generate", prompt=prompt, logprobs=0, n=2, max_tokens=4)
        assert answer["prompt"] == text
        assert [len(positions) for positions in answer["logprobs"]] == [4, 4]
        for positions, ids in zip(answer["logprobs"], answer["token_ids"], strict=True):
            assert [list(position[0]) for position in positions] == [[str(id_)] for id_ in ids]
            assert all(value < 0 for position in positions for value in position[0].values())


async def test_bodies_that_are_no_request_get_openais_errors() -> None:
    async with served() as url, httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
        for payload in (b"{", b"[]", b"\xff", b'{"messages": 3}', b""):
            response = await client.post("/chat/completions", content=payload)
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("BadRequestError", 400)
        assert (await client.post("/nothing", json={})).json()["error"]["code"] == 404
        assert (await client.get("/chat/completions")).status_code == 405


async def test_simulated_errors_are_http_500() -> None:
    async with (
        served(error_rate=0.5) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client,
    ):
        statuses = [
            (await client.post("/chat/completions", json={"messages": MESSAGES})).status_code
            for _ in range(60)
        ]
        assert set(statuses) == {200, 500}
        assert 10 < statuses.count(500) < 50


@pytest.mark.parametrize("stream", [False, True])
async def test_a_simulated_disconnect_breaks_the_body(stream: bool) -> None:
    async with (
        served(disconnect_rate=1.0) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client,
    ):
        body = {"messages": MESSAGES, "stream": stream}
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/chat/completions", json=body)


async def test_our_own_engine_client_sees_what_the_engine_in_process_gives() -> None:
    async with served(seed=3) as url:
        async with OpenAIEngine(OpenAIConfig(base_url=url)) as engine:
            assert await engine.model_name() == "sim"
            body = {"model": "sim", "messages": MESSAGES, "seed": 1, "return_token_ids": True}
            whole = await engine.post(
                "/v1/chat/completions", body, rollout_id="r", timeout_seconds=30
            )
            async with engine.stream(
                "/v1/chat/completions", body | {"stream": True}, rollout_id="r", timeout_seconds=30
            ) as chunks:
                choices = [chunk["choices"][0] async for chunk in chunks]
        ids = [token for choice in choices for token in choice.get("token_ids", [])]
        assert ids == whole["choices"][0]["token_ids"]
    async with (
        served(disconnect_rate=1.0) as url,
        OpenAIEngine(OpenAIConfig(base_url=url), tries=1) as engine,
    ):
        with pytest.raises(EngineGarbage):
            async with engine.stream(
                "/v1/chat/completions", body | {"stream": True}, rollout_id="r", timeout_seconds=30
            ) as chunks:
                async for _ in chunks:
                    pass


async def test_a_taken_port_is_a_clear_error() -> None:
    async with served() as url:
        port = int(url.removesuffix("/v1").rpartition(":")[2])
        with pytest.raises(ConfigError, match=str(port)):
            await serve_sim(SimConfig(), "127.0.0.1", port)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_the_command_cleanly(number: signal.Signals) -> None:
    program = (
        "import asyncio\n"
        "from envserver.running.simulated_server import run_sim\n"
        "from envserver.config import SimConfig\n"
        "asyncio.run(run_sim(SimConfig(), port=0, announce=lambda line: print(line, flush=True)))\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, env=dict(os.environ)
    )
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), PATIENCE)).decode()
        assert "no language model" in line
        async with httpx.AsyncClient(base_url=line.split()[-1], timeout=PATIENCE) as client:
            assert (await client.get("/models")).status_code == 200
        process.send_signal(number)
        assert await asyncio.wait_for(process.wait(), PATIENCE) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


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


HAS = "The engine has sim: set openai.model_name."


async def test_a_call_for_a_model_that_the_engine_does_not_have_hears_which_it_has() -> None:
    async def refused(engine: OpenAIEngine, path: str, model: str, *, stream: bool) -> str:
        body = {"model": model, "messages": MESSAGES, "stream": stream}
        about: dict[str, Any] = {"rollout_id": "r", "timeout_seconds": 9.0}
        with pytest.raises(EngineRefused) as caught:
            if not stream:
                await engine.post(path, body, **about)
            async with engine.stream(path, body, **about):
                pass
        return caught.value.hint

    async with served() as url, OpenAIEngine(OpenAIConfig(base_url=url)) as engine:
        for stream in (False, True):
            assert await refused(engine, "/v1/chat/completions", "sam", stream=stream) == HAS
        other = await refused(engine, "/v1/chat", "sim", stream=False)
        assert "openai.base_url" in other  # its models are not the reason


def test_a_command_with_a_wrong_model_name_says_which_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    urls: list[str] = []

    async def serve(started: threading.Event, ended: asyncio.Event) -> None:
        def listening(url: str) -> None:
            urls.append(url)
            started.set()

        config = SimConfig(latency_seconds=0)
        await serve_sim(config, "127.0.0.1", 0, listening=listening, stop=ended)

    with beside(serve):
        assert main(["models", "probe", urls[0], "--openai.model_name", "Qwen/Qwen3-4B"]) == 1
    assert f"The model 'Qwen/Qwen3-4B' does not exist. {HAS}" in capsys.readouterr().err


async def test_no_page_in_a_browser_asks_an_engine() -> None:
    body = json.dumps({"model": "any", "messages": MESSAGES})
    async with served() as url, httpx.AsyncClient(timeout=PATIENCE) as http:
        for told in ({"origin": url}, {"origin": "null"}, {"sec-fetch-site": "same-origin"}):
            foreign = told | {"content-type": "text/plain"}
            asked = await http.post(f"{url}/chat/completions", content=body, headers=foreign)
            seen = await http.get(f"{url}/models", headers=told)
            assert (asked.status_code, seen.status_code) == (403, 403)
            assert "pages in a browser" in asked.json()["error"]["message"]
        typed = await http.get(f"{url}/models", headers={"sec-fetch-site": "none"})
        assert typed.status_code == 200
