"""The proxies that are measured, each as a process: `python proxy_servers.py NAME ENGINE CORE`.

    chat, tokens   our proxy before an engine that is asked in this mode
    auto           our proxy before any engine, asked in the best mode that it has
    httpx          the least that FastAPI and httpx can do: bodies in, bodies out
    floor          the least that a proxy in tokens mode does, see `floor_app`

Prints the address. `GET /r/attempts/N` of ours ends the attempts that there are and opens N others.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import httpx
import msgspec
import numpy as np
import orjson
import proxy_calls as calls
from envserver_records.tasks import Json
from fastapi import FastAPI, Request, Response
from proxy_load import pin
from starlette.responses import StreamingResponse
from support.serving import attempt_spec
from support.templates import CHATML

from envserver import OpenAIConfig, Settings, TokensConfig
from envserver.cli.loop import run_loop
from envserver.http.proxy_server import serve_proxy
from envserver.http.server import serve_api
from envserver.models.connections import Connections, Decoder, EngineAddresses, whole
from envserver.models.openai import OpenAIEngine
from envserver.models.probe import ProbeResult
from envserver.models.replicas import Replica
from envserver.proxy.asgi import AsgiApp, Receive, Scope, Send, send_json
from envserver.proxy.attempts import ProxyAttempt
from envserver.proxy.bounds import AttemptBounds
from envserver.proxy.endpoint import Capabilities, EngineEndpoint
from envserver.proxy.engine_client.generated import BareGenerated
from envserver.proxy.engine_client.tokens import GENERATE, RENDER
from envserver.proxy.request_handler import answer_lifespan
from envserver.proxy.server import Proxy
from envserver.running import make_endpoint
from envserver.tokens.chat_format import ChatTemplate

UNBOUNDED = AttemptBounds(
    max_connections=10**6,
    max_request_mb=10**6,
    max_requests_per_second=10**6,
    max_recorded_mb=10**6,
)


class BenchProxy(Proxy):
    """Our proxy, and a way to have other attempts."""

    def __init__(self, engine: OpenAIEngine, endpoint: EngineEndpoint | None) -> None:
        super().__init__(engine, endpoint=endpoint, bounds=UNBOUNDED)
        self.model = calls.MODEL
        self._asked: list[ProxyAttempt] = []

    def asgi(self) -> AsgiApp:
        inner = super().asgi()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if not scope.get("path", "").startswith("/r/attempts/"):
                await inner(scope, receive, send)
                return
            while self._asked:
                self.seal(self._asked.pop())
            count = int(scope["path"].rpartition("/")[2])
            self._asked = [open_attempt(self, self.model) for _ in range(count)]
            await send_json(send, 200, [attempt.key for attempt in self._asked])

        return app


def make_proxy(engine: OpenAIEngine, mode: str) -> BenchProxy:
    """Our proxy before an engine whose ways are known, or found out."""
    if mode == "auto":
        endpoint = make_endpoint(Settings(tokens=TokensConfig(constraints="all")), engine)
        return BenchProxy(engine, endpoint)
    probe_result = ProbeResult(mode="tokens", model=calls.MODEL, tools=True, has_parser=True)

    async def find() -> Capabilities:
        return Capabilities(probe_result=probe_result, format=calls.FORMAT)

    endpoint = EngineEndpoint(
        engine, find=find if mode == "tokens" else None, tokens=TokensConfig()
    )
    return BenchProxy(engine, endpoint)


def open_attempt(proxy: Proxy, model: str = calls.MODEL) -> ProxyAttempt:
    """An attempt without limits."""
    spec = attempt_spec(max_turns=10**9, seconds=3600.0)
    return proxy.open(msgspec.structs.replace(spec, model=model))


def thin_proxy(engine_url: str) -> FastAPI:
    """A pass-through."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    client = httpx.AsyncClient(base_url=engine_url, limits=limits, timeout=None)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with client:
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/{path:path}")
    async def forward(path: str, request: Request) -> Response:
        body = await request.body()
        headers = {"content-type": "application/json"}
        if not orjson.loads(body).get("stream"):
            answer = await client.post(path, content=body, headers=headers)
            return Response(answer.content, answer.status_code, media_type="application/json")
        asked = client.build_request("POST", path, content=body, headers=headers)
        answer = await client.send(asked, stream=True)

        async def parts() -> AsyncIterator[bytes]:
            try:
                async for part in answer.aiter_raw():
                    yield part
            finally:
                await answer.aclose()

        return StreamingResponse(parts(), answer.status_code, media_type="text/event-stream")

    return app


async def serve(name: str, engine_url: str, core: int) -> None:
    pin(core)
    if name == "floor":
        addresses = EngineAddresses((), [engine_url])
        async with Connections("", Decoder(""), addresses) as connections:
            await _serve(floor_app(engine_url, connections))
        return
    if name == "httpx":
        await _serve(thin_proxy(engine_url))
        return
    model = "default" if name == "auto" else calls.MODEL
    async with OpenAIEngine(OpenAIConfig(base_url=engine_url, model_name=model)) as engine:
        proxy = make_proxy(engine, name)
        proxy.model = await engine.model_name()
        server = await serve_proxy(proxy)
        print("serves", server.url, flush=True)
        await asyncio.Event().wait()


async def _serve(app: Any) -> None:
    async with await serve_api(app, "127.0.0.1", 0) as server:
        print("serves", server.url, flush=True)
        await server.wait()


# The parts of a continued call in tokens mode that every proxy of its kind needs: uvicorn, our HTTP
# client, the chat template, the tokenizer for what is new, and JSON of the payloads that the proxy
# in tokens mode reads and writes. Nothing is checked, planned, limited or recorded.


_DERENDER = "/v1/chat/completions/derender"
_BETWEEN = "\n<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n"


def floor_app(engine_url: str, connections: Connections) -> AsgiApp:
    """Answers continued calls; `GET /r/attempts/N` as of `proxy_servers`."""
    floor = _Floor(engine_url, connections)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await answer_lifespan(receive, send)
        elif scope["path"].startswith("/r/attempts/"):
            floor.prompts = {f"{at}": [] for at in range(int(scope["path"].rpartition("/")[2]))}
            await send_json(send, 200, [*floor.prompts])
        else:
            body = b""
            while (message := await receive()).get("more_body"):
                body += message["body"]
            request = orjson.loads(body + message["body"])
            key = scope["path"].split("/")[2]
            await send_json(send, 200, await floor.answer(floor.prompts[key], request))

    return app


class _Floor:
    """`prompts`: the tokens of each conversation so far."""

    def __init__(self, engine_url: str, connections: Connections) -> None:
        self.prompts: dict[str, list[int]] = {}
        self._connections = connections
        self._replica = Replica(engine_url, 512, time.monotonic)
        self._frames: dict[bool, Any] = {}
        self._template = ChatTemplate(CHATML, {})

    async def answer(self, ids: list[int], request: Json) -> Json:
        messages, tools = request["messages"], request.get("tools")
        text = self._template.render(messages, tools, generation_prompt=True, kwargs={})
        ids += calls.FORMAT.encode(_BETWEEN % messages[-1]["content"] if ids else text)
        if bool(tools) not in self._frames:
            self._frames[bool(tools)] = await self._post(RENDER, orjson.dumps(request))
        asked = {**self._frames[bool(tools)], "token_ids": ids, "return_token_ids": True}
        generated = await self._post(GENERATE, orjson.dumps(asked), BareGenerated)
        [choice] = generated["choices"]
        for recorded in (ids, choice["token_ids"]):
            np.asarray(recorded, np.int32)
        message = {"role": "assistant", "content": choice["text"]}
        if tools:
            made = {"prompt_token_ids": ids, "choices": [{"token_ids": choice["token_ids"]}]}
            parse = orjson.dumps({"chat_request": request, "generate_response": made})
            message = (await self._post(_DERENDER, parse))["choices"][0]["message"]
        ids += choice["token_ids"]
        told = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"id": "1", "model": calls.MODEL, "choices": [told], "usage": generated["usage"]}

    async def _post(self, path: str, payload: bytes, form: type | None = None) -> Any:
        async with self._connections.open(self._replica, "POST", path, payload) as response:
            data = await whole(response)
        return orjson.loads(data) if form is None else _decoder(form).decode(data)


@cache
def _decoder(form: type) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(form)


if __name__ == "__main__":
    run_loop(serve(sys.argv[1], sys.argv[2], int(sys.argv[3])))
