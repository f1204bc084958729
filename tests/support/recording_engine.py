"""An engine that keeps what reaches it, behind the proxy, for tests of what is refused."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from envserver import TokensConfig
from envserver.proxy import EngineEndpoint, Proxy
from support.proxy_house import asgi_answer
from support.serving import attempt_spec

Json = dict[str, Any]

CHAT, TEXT = "v1/chat/completions", "v1/completions"
RESPONSES, MESSAGES = "v1/responses", "v1/messages"
METADATA = "http://169.254.169.254/latest/meta-data"
ANSWER: Json = {
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi."}, "text": "Hi."}],
    "usage": {"completion_tokens": 1, "prompt_tokens": 1},
}
BACKTRACKS = "(a+)+$"
PLAIN: dict[str, Json] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi."}]},
    TEXT: {"prompt": "Hi."},
    RESPONSES: {"input": "Hi."},
    MESSAGES: {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi."}]},
}


class RecordingEngine:
    """Answers the same to everything, and keeps what it was asked."""

    kind = "openai"
    exact = False

    def __init__(self) -> None:
        self.asked: list[Json] = []

    async def post(self, path: str, body: Json, **how: Any) -> Json:
        self.asked.append(body)
        return copy.deepcopy(ANSWER)

    @asynccontextmanager
    async def stream(self, path: str, body: Json, **how: Any) -> AsyncIterator[AsyncIterator[Json]]:
        raise AssertionError("Nothing here is streamed.")
        yield


def send(path: str, body: Json, **allowed: Any) -> tuple[int, Json, list[Json]]:
    """Returns the status and the answer, and what the engine was asked.

    Args:
        allowed: settings of the run, as of TokensConfig.
    """
    engine = RecordingEngine()
    endpoint = EngineEndpoint(engine, tokens=TokensConfig(**allowed))  # type: ignore[arg-type]

    proxy = Proxy(engine, endpoint=endpoint)  # type: ignore[arg-type]
    key = proxy.open(attempt_spec()).key
    status, answer = asyncio.run(asgi_answer(proxy, key, body, path=path))
    return status, json.loads(answer), engine.asked


def refused(path: str, body: Json, *words: str, **allowed: Any) -> None:
    """The request is refused in its dialect's form, and nothing arrives at the engine."""
    status, answer, asked = send(path, body, **allowed)
    assert (status, asked) == (400, [])
    error = answer["error"]
    assert error["type"] == "invalid_request_error" or error["code"] == "input"
    for word in words:
        assert word in error["message"]
