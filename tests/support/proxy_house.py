"""A fake vLLM, the proxy before it over real HTTP, and OpenAI's own client."""

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
from anthropic import AsyncAnthropic
from anthropic import DefaultAsyncHttpxClient as AnthropicHttp
from envserver_records.records import Call, Json, VersionSpan
from openai import AsyncOpenAI
from openai import DefaultAsyncHttpxClient as OpenAIHttp

from envserver import OpenAIConfig
from envserver.models.openai import OpenAIEngine
from envserver.proxy.attempts import ProxyAttempt
from envserver.proxy.endpoint import EngineEndpoint
from envserver.proxy.server import Proxy
from support.engine_stand_in import FakeVllm, fake_vllm, ids_of, logprob, prompt_ids
from support.serving import attempt_spec, serving
from support.waiting import PATIENCE, settled, until

ASK: list[Any] = [{"role": "user", "content": "hi"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
TOOL_CALLS = [
    {"id": f"c{n}", "type": "function", "function": {"name": "add", "arguments": f'{{"a":{n}}}'}}
    for n in (1, 2)
]


@dataclass
class House:
    """A fake vLLM, a proxy before it, and clients.

    Args:
        arrived: requests that the proxy has read.
        gone: clients whose end of the connection the proxy has seen.
    """

    fake: FakeVllm
    proxy: Proxy
    url: str
    http: aiohttp.ClientSession
    clients: list[AsyncOpenAI | AsyncAnthropic] = field(default_factory=list)
    now: float = 0.0
    arrived: int = 0
    gone: int = 0

    async def has_read(self, requests: int) -> None:
        """Waits until the proxy has read so many requests and waits for something else."""
        await until(lambda: self.arrived >= requests)
        await settled()

    async def has_lost(self, clients: int) -> None:
        """Waits until the proxy knows that so many clients are gone."""
        await until(lambda: self.gone >= clients)
        await settled()

    def watched(self, app: Any) -> Any:
        """The ASGI application `app`, whose requests are counted."""

        async def watching(scope: Any, receive: Any, send: Any) -> None:
            async def counted() -> Any:
                message = await receive()
                self.gone += message["type"] == "http.disconnect"
                self.arrived += message["type"] == "http.request" and not message.get("more_body")
                return message

            await app(scope, counted, send)

        return watching

    def open(self, **limits: Any) -> tuple[ProxyAttempt, AsyncOpenAI]:
        attempt = self.proxy.open(attempt_spec(**limits))
        return attempt, self.client(attempt.key)

    def client(self, key: str, path: str = "") -> AsyncOpenAI:
        # Reading all certificates of this machine would take 30 ms for each client.
        http = OpenAIHttp(verify=False)
        made = AsyncOpenAI(base_url=f"{self.url}/r/{key}{path}/v1", api_key=key, http_client=http)
        self.clients.append(made)
        return made

    def claude(self, key: str) -> AsyncAnthropic:
        http = AnthropicHttp(verify=False)
        url = f"{self.url}/r/{key}"
        made = AsyncAnthropic(base_url=url, api_key=key, max_retries=0, http_client=http)
        self.clients.append(made)
        return made

    async def post(self, key: str, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = f"{self.url}/r/{key}/{path}"
        async with self.http.post(url, data=data, headers=headers) as answer:
            text = await answer.read()
            return answer.status, json.loads(text) if text else None

    def asks(self, key: str, path: str, body: Any, **headers: str) -> asyncio.Task[tuple[int, Any]]:
        """A request that is under way."""
        return asyncio.create_task(self.post(key, path, body, **headers))

    async def lose(self, asking: asyncio.Task[Any]) -> None:
        """The client of a request hangs up; returns when the proxy knows."""
        asking.cancel()
        await self.has_lost(self.gone + 1)

    def spoil(self, change: Callable[[Json], Any]) -> None:
        """Changes each whole answer of the fake vLLM."""
        answer = self.fake.answer

        def changed(body: Any) -> Any:
            made = answer(body)
            change(made)
            return made

        self.fake.answer = changed  # type: ignore[method-assign]

    async def get(self, key: str, path: str) -> tuple[int, Any]:
        async with self.http.get(f"{self.url}/r/{key}/{path}") as answer:
            return answer.status, await answer.json()


@asynccontextmanager
async def house(
    server_type: Any = "vllm",
    max_body_bytes: int = 100_000,
    find: Any = None,
    tokens: Any = None,
    bounds: Any = None,
    hooks: Any = None,
    services: Any = None,
    **how: Any,
) -> Any:
    """`find`, `tokens`: as of EngineEndpoint; `bounds`, `hooks`, `services`: as of Proxy; `how`: as
    of FakeVllm."""
    async with fake_vllm(**how) as fake:
        config = OpenAIConfig(base_url=fake.url, server_type=server_type)
        async with (
            OpenAIEngine(config, tries=2, pause_seconds=0.01) as engine,
            aiohttp.ClientSession() as http,
        ):
            made = House(fake, None, "", http)  # type: ignore[arg-type]
            made.proxy = Proxy(
                engine,
                endpoint=EngineEndpoint(engine, find=find, tokens=tokens),
                max_body_bytes=max_body_bytes,
                bounds=bounds,
                hooks=hooks,
                services=services,
                clock=lambda: made.now,
            )
            async with serving(made.watched(made.proxy.asgi())) as url:
                made.url = url
                yield made
                for client in made.clients:
                    await client.close()


async def chat(client: AsyncOpenAI, streamed: bool = False, **more: Any) -> Any:
    """The answer's message and finish reason, whole or put together from its chunks."""
    more.setdefault("messages", ASK)
    if not streamed:
        return (await client.chat.completions.create(model="any", **more)).choices[0]
    parts: list[str] = []
    finish = None
    async for chunk in await client.chat.completions.create(model="any", stream=True, **more):
        for choice in chunk.choices:
            parts.append(choice.delta.content or "")
            finish = choice.finish_reason or finish
    return "".join(parts), finish


async def asgi_post(
    proxy: Proxy,
    key: str,
    body: Any,
    send: Any,
    gone: asyncio.Event | None = None,
    *,
    path: str = "v1/chat/completions",
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    """One request to the application itself; the client hangs up when `gone` is set."""
    scope = {"type": "http", "method": "POST", "path": f"/r/{key}/{path}", "headers": [*headers]}
    messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await (gone or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    await proxy.asgi()(scope, receive, send)


async def asgi_answer(proxy: Proxy, key: str, body: Any, **how: Any) -> tuple[int, bytes]:
    """The status and the whole body of the answer to such a request; `how`: as of `asgi_post`."""
    sent: list[Any] = []

    async def take(message: Any) -> None:
        sent.append(message)

    async with asyncio.timeout(PATIENCE):
        await asgi_post(proxy, key, body, take, **how)
    assert not sent[-1].get("more_body")
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


def assert_exact(call: Call, text: str = "Hëllo.") -> None:
    """`call` holds exactly what the fake sampled."""
    ids = ids_of(text)
    assert call.exact
    assert call.completion_ids.tolist() == ids
    assert call.logprobs.tolist() == [logprob(token) for token in ids]
    assert call.prompt_ids.tolist() == prompt_ids(call.messages)
    assert call.prompt_ids.dtype == call.completion_ids.dtype == np.int32
    assert call.versions == [VersionSpan(call.versions[0].version, 0, len(ids))]
