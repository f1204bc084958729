"""The proxies that are measured, each as a process: `python proxy_servers.py NAME ENGINE CORE`.

    chat, tokens   our proxy before an engine that is asked in this mode
    auto           our proxy before any engine, asked in the best mode that it has
    httpx          the least that FastAPI and httpx can do: bodies in, bodies out

Prints the address. `GET /r/attempts/N` of ours ends the attempts that there are and opens N others.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import msgspec
import orjson
import proxy_calls as calls
from fastapi import FastAPI, Request, Response
from proxy_load import pin
from starlette.responses import StreamingResponse
from support.serving import attempt_spec

from envserver import OpenAIConfig, Settings, TokensConfig
from envserver.cli.loop import run_loop
from envserver.http.proxy_server import serve_proxy
from envserver.http.server import serve_api
from envserver.models.openai import OpenAIEngine
from envserver.models.probe import ProbeResult
from envserver.proxy.asgi import AsgiApp, Receive, Scope, Send, send_json
from envserver.proxy.attempts import ProxyAttempt
from envserver.proxy.bounds import AttemptBounds
from envserver.proxy.endpoint import Capabilities, EngineEndpoint
from envserver.proxy.server import Proxy
from envserver.running import make_endpoint

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
    if name == "httpx":
        async with await serve_api(thin_proxy(engine_url), "127.0.0.1", 0) as served:
            print("serves", served.url, flush=True)
            await served.wait()
        return
    model = "default" if name == "auto" else calls.MODEL
    async with OpenAIEngine(OpenAIConfig(base_url=engine_url, model_name=model)) as engine:
        proxy = make_proxy(engine, name)
        proxy.model = await engine.model_name()
        server = await serve_proxy(proxy)
        print("serves", server.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    run_loop(serve(sys.argv[1], sys.argv[2], int(sys.argv[3])))
