"""A server without engines of its own, over real HTTP: its API, its proxy, and engines that come.

The answers of `versioned_vllm` name the version of the weights that sampled them, so that a test
can compare what a call says of its version with the truth.
"""

import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from envserver_records.records import Call, Json

from envserver import Settings
from envserver.models.fleet import Fleet
from envserver.models.openai import OpenAIEngine
from envserver.proxy.attempts import ProxyAttempt
from envserver.proxy.server import Proxy
from envserver.running.engine_fleet import fleet_of
from envserver.running.engines import make_endpoint, make_engine
from envserver.trainers.live import EngineSource, Live
from support.api import Api, running_api
from support.engine_stand_in import FakeVllm, fake_vllm
from support.serving import attempt_spec, serving

from .waiting import until

CHAT = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}


class FleetHouse:
    """The parts; made by `fleet_house`."""

    def __init__(
        self, api: Api, proxy: Proxy, url: str, http: aiohttp.ClientSession, fleet: Fleet
    ) -> None:
        self.api, self.proxy, self.fleet = api, proxy, fleet
        self._url = url
        self._http = http

    async def register(self, url: str, status: int = 201, **facts: Any) -> Json:
        """Registers an engine; its row, or the problem."""
        answer = await self.api.http.post("/v1/engines", json={"url": url, **facts})
        assert answer.status_code == status, answer.text
        body: Json = answer.json()
        return body.get("engine", body)

    async def tell(self, url: str, what: str, **body: Any) -> Json:
        """POST /v1/engines/ID/WHAT of the engine at `url`."""
        engine_id = (await self.row(url))["id"]
        answer = await self.api.http.post(f"/v1/engines/{engine_id}/{what}", json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def rows(self) -> list[Json]:
        return list((await self.api.get("/v1/engines"))["engines"])

    async def row(self, url: str) -> Json:
        return next(row for row in await self.rows() if row["url"] == url)

    async def standings(self) -> list[str]:
        return sorted(row["standing"] for row in await self.rows())

    async def until(self, url: str, standing: str) -> None:
        async def stands() -> bool:
            return bool((await self.row(url))["standing"] == standing)

        await until(stands)

    async def publish(self, version: int, **more: Any) -> None:
        await self.api.post("/v1/policy-version", {"version": version, **more})

    def open(self, rollout_id: str) -> ProxyAttempt:
        return self.proxy.open(attempt_spec(rollout_id=rollout_id))

    async def ask(self, attempt: ProxyAttempt) -> Call:
        """A chat call of the attempt, as it was recorded."""
        await self.send(attempt)
        return attempt.calls[-1]

    async def send(self, attempt: ProxyAttempt, status: int = 200, **body: Any) -> None:
        """A chat call of the attempt."""
        url = f"{self._url}/r/{attempt.key}/v1/chat/completions"
        async with self._http.post(url, json=CHAT | body) as answer:
            assert answer.status == status, await answer.text()
            await answer.read()


@asynccontextmanager
async def fleet_house(
    store: Path | str,
    key: str = "",
    *,
    base_url: str = "none",
    trained: bool = True,
    tokenizer: Path | None = None,
    **engines: Any,
) -> AsyncIterator[FleetHouse]:
    """A server whose model is called "tiny".

    Args:
        base_url, tokenizer: `--openai.base_url`, `--tokens.tokenizer`.
        trained: it makes groups for RL.
        key: `--openai.api_key`.
        engines: `--engines.*`.
    """
    openai = {"base_url": base_url, "model_name": "tiny", "api_key": key}
    settings = Settings(openai=openai, engines=engines, tokens={"tokenizer": tokenizer})
    live = Live()
    async with AsyncExitStack() as stack:
        engine, _ = make_engine(settings, settings.openai)
        assert isinstance(engine, OpenAIEngine)
        await stack.enter_async_context(engine)
        endpoint = make_endpoint(settings, engine)
        made = fleet_of(settings, engine, endpoint, need_exact=trained)
        fleet = await stack.enter_async_context(made)
        proxy = Proxy(engine, endpoint=endpoint)
        live.engines.append(EngineSource("", engine, "tiny", lambda: proxy.policy_version))
        api = await stack.enter_async_context(
            running_api(
                store, live=live, fleet=fleet, on_policy_version=proxy.publish_version,
                gate=endpoint.gate,
            )
        )  # fmt: skip
        http = await stack.enter_async_context(aiohttp.ClientSession())
        url = await stack.enter_async_context(serving(proxy.asgi()))
        yield FleetHouse(api, proxy, url, http, fleet)


@asynccontextmanager
async def versioned_vllm(version: int, port: int = 0, **how: Any) -> AsyncIterator[FakeVllm]:
    """An engine with the weights of `version`."""
    async with fake_vllm(port, text=says(version), **how) as fake:
        yield fake


def says(version: int) -> str:
    """What an engine with these weights answers."""
    return f"I am version {version}."


def sampled_by(call: Call) -> int:
    """The version of the weights that sampled a call, as its text says."""
    found = re.search(r"version (\d+)", str(call.message["content"]))
    assert found, call.message
    return int(found[1])


def attributed(call: Call) -> list[int]:
    """The versions that the record says."""
    return [span.version for span in call.versions]
