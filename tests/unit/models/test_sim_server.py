"""The simulated engine over HTTP, used by the OpenAI SDK, this project's client and a person."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from envserver_records.errors import ConfigError, EngineGarbage
from envserver_records.records import Task
from support.beside import beside
from support.commands import running
from support.sim import CHAT, call, said, tool
from support.waiting import PATIENCE

from envserver import OpenAIConfig, SimConfig
from envserver.cli import main
from envserver.environment import Environment
from envserver.models import OpenAIEngine, TextSolver
from envserver.models.sim import Solution, serve_sim
from envserver.running.simulated_server import demonstration_solver, question_text

QUESTION = "What is 6 times 7?"
FINISH: Any = tool("finish", answer={"type": "string"})
MESSAGES: list[Any] = [{"role": "user", "content": f"Answer this. {QUESTION}"}]
ASK: dict[str, Any] = {"model": "sim", "messages": MESSAGES, "seed": 1}
ABOUT: dict[str, Any] = {"rollout_id": "r", "timeout_seconds": PATIENCE}
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
            TextSolver([(QUESTION, turns)]),
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
        streamed, whole = final.tool_calls[0].function, message.tool_calls[0].function
        assert streamed.arguments == whole.arguments


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


def test_wrong_requests_get_openais_errors_and_pages_in_browser_none(
    http: httpx.Client,
) -> None:
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


async def streamed(engine: OpenAIEngine, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with engine.stream(CHAT, body | {"stream": True}, **ABOUT) as chunks:
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
                await streamed(engine, ASK)


def test_a_command_with_a_wrong_model_name_says_which_there_are(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
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
