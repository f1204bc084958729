"""Services for agents: called over the proxy, limited, stopped with the attempt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from envserver_records.errors import ConflictError
from envserver_tools.web import WebSettings, services_of
from support.commands import envserver, read_jsonl
from support.serving import attempt_spec, serving
from support.waiting import until
from support.websites import KEY, websites

from envserver import (
    Caller,
    InputError,
    LimitReached,
    OpenAIConfig,
    PublicTask,
    ServiceError,
    Task,
)
from envserver.models import OpenAIEngine
from envserver.proxy import Proxy, ProxyAttempt
from envserver.rollouts import ending_limit
from envserver.workers.http_client import HttpClient
from envserver.workers.run import AttemptRun, Job

ZOO = Path(__file__).parents[2] / "support" / "web_zoo.py"


class Desk:
    """A proxy with services, over HTTP; agents' runs at it."""

    def __init__(
        self, proxy: Proxy, url: str, http: aiohttp.ClientSession, workers: HttpClient
    ) -> None:
        self.proxy = proxy
        self.url = url
        self.http = http
        self.workers = workers

    def open(
        self, seconds: float = 30.0, task: Task | None = None
    ) -> tuple[ProxyAttempt, AttemptRun]:
        spec = attempt_spec(seconds=seconds)
        attempt = self.proxy.open(msgspec.structs.replace(spec, task=task or spec.task))
        job = Job(
            rollout_id=spec.rollout_id,
            attempt=1,
            env_reference="",
            env_config={},
            task=PublicTask("t", {}),
            model="m",
            deadline=spec.deadline,
            max_turns=9,
        )
        return attempt, AttemptRun(job, f"{self.url}/r/{attempt.key}", self.workers, _at_once)


def _at_once() -> Any:
    raise AssertionError("not needed here")


@asynccontextmanager
async def desk(services: Any) -> AsyncIterator[Desk]:
    async with OpenAIEngine(OpenAIConfig(base_url="http://127.0.0.1:9")) as dead:
        proxy = Proxy(dead, services=services)
        async with (
            serving(proxy.asgi()) as url,
            aiohttp.ClientSession() as http,
            HttpClient() as workers,
        ):
            yield Desk(proxy, url, http, workers)


async def test_an_agent_is_told_what_it_did_wrong() -> None:
    async def echo(arguments: dict[str, Any], caller: Caller) -> Any:
        if "bad" in arguments:
            raise InputError("that is bad")
        caller.flag("echoed")
        return [arguments, caller.task.id]

    async with desk({"a/echo": echo}) as house:
        attempt, run = house.open()
        assert await run.call_tool("a/echo", {"x": "ä"}) == [{"x": "ä"}, "add-1"]
        assert attempt.flags == {"echoed"}
        with pytest.raises(InputError, match="that is bad"):
            await run.call_tool("a/echo", {"bad": 1})
        with pytest.raises(InputError, match="Known services: a/echo"):
            await run.call_tool("none", {})
        with pytest.raises(InputError, match="over"):
            await run.call_tool("a/echo", {"x": "y" * (2 << 20)})
        async with house.http.post(f"{run.tools_url}/a/echo", data=b"[1]") as answer:
            assert answer.status == 400
        async with house.http.get(f"{run.tools_url}/a/echo") as answer:
            assert answer.status == 405
        wrong = {"authorization": "Bearer no"}
        async with house.http.post(f"{run.tools_url}/a/echo", json={}, headers=wrong) as answer:
            assert answer.status == 401
        assert attempt.service_failure is None
        attempt.posted = True
        assert ending_limit(attempt) is None


async def test_a_failure_of_ours_is_no_words_and_no_reward() -> None:
    async def fails(arguments: dict[str, Any], caller: Caller) -> Any:
        raise RuntimeError("key=secret")

    async def unsaid(arguments: dict[str, Any], caller: Caller) -> Any:
        return object()

    async with desk({"fails": fails, "unsaid": unsaid}) as house:
        for name in ("fails", "unsaid"):
            attempt, run = house.open()
            with pytest.raises(ServiceError, match=f"'{name}' failed") as caught:
                await run.call_tool(name, {})
            assert "secret" not in str(caught.value)
            attempt.posted = True  # the agent went on as if nothing had been
            with pytest.raises(ServiceError):
                ending_limit(attempt)


async def test_services_say_what_they_counted() -> None:
    async with websites() as sites:
        settings = WebSettings(provider_url=sites.url, allow_private=True)
        async with services_of(settings, key=KEY) as services, desk(services) as house:
            _, run = house.open()
            await run.call_tool("web_search", {"query": "herons"})
            counts = house.proxy.services.counts()  # `/metrics` shows them
    assert (counts["web_upstream_calls"], counts["web_credits"], counts["web_hits"]) == (1, 2, 0)


async def test_a_call_ends_with_its_attempt_and_in_its_time() -> None:
    running: set[int] = set()

    async def hangs(arguments: dict[str, Any], caller: Caller) -> Any:
        running.add(arguments["n"])
        try:
            await asyncio.Event().wait()
        finally:
            running.discard(arguments["n"])

    async with desk({"hangs": hangs}) as house:
        attempt, run = house.open()
        calls = [asyncio.create_task(run.call_tool("hangs", {"n": n})) for n in range(12)]
        await until(lambda: len(running) == 8)  # the others wait
        house.proxy.seal(attempt)
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(error, ServiceError | ConflictError) for error in ended)
        await until(lambda: not running)

        attempt, run = house.open(seconds=0.3)
        with pytest.raises(LimitReached):
            await run.call_tool("hangs", {"n": 1})
        await until(lambda: not running)

        attempt, run = house.open()
        call = asyncio.create_task(run.call_tool("hangs", {"n": 1}))
        await until(lambda: running)
        call.cancel()
        await until(lambda: not running)


async def test_tavilys_own_client_works_against_the_server() -> None:
    tavily = pytest.importorskip("tavily", reason="needs tavily-python of the gaia extra")
    async with websites() as sites:
        settings = WebSettings(provider_url=sites.url, allow_private=True)
        async with services_of(settings, key=KEY) as services, desk(services) as house:
            _, run = house.open()
            client = tavily.TavilyClient(run.api_key, api_base_url=f"{run.tools_url}/tavily")
            found = await asyncio.to_thread(client.search, "herons", max_results=3)
            assert found["results"][0]["url"] == f"{sites.url}/page"
            assert "huggingface" not in str(found)
            urls = [f"{sites.url}/page", f"{sites.url}/none"]
            pages = await asyncio.to_thread(client.extract, urls)
            assert "# Visit 1" in pages["results"][0]["raw_content"]
            assert "404" in pages["failed_results"][0]["error"]
            assert sites.keys == {f"Bearer {KEY}"}


async def test_a_provider_that_fails_is_a_failure_of_ours() -> None:
    async with websites() as sites:
        settings = WebSettings(provider_url=sites.url, allow_private=True)
        async with services_of(settings, key=KEY) as services, desk(services) as house:
            attempt, run = house.open()
            sites.failing = [401]
            with pytest.raises(ServiceError, match="TAVILY_API_KEY"):
                await run.call_tool("web_search", {"query": "x"})
            assert attempt.service_failure is not None


async def test_walled_agents_of_a_group_see_one_web_and_no_key(tmp_path: Path) -> None:
    groups = tmp_path / "groups.jsonl"
    async with websites() as sites:
        done = await asyncio.to_thread(
            envserver,
            *("process", "--env", f"{ZOO}:Looker", "--model", "sim", "--env.site", sites.url),
            *("--env.total_steps", "1", "--env.group_size", "4"),
            *("--env.data_path_to_save_groups", groups),
            folder=tmp_path,
        )
        asked = dict(sites.asked)
    assert done.returncode == 0, done.stderr
    assert asked == {"/search": 1, "/page": 1, "/none": 1}
    (group,) = read_jsonl(groups)
    assert group["scores"] == [1.0] * 4  # the environment checks what its agents saw
    assert "web_leak_dropped" in groups.read_text()
    shown = group["envserver"]["services"]["web"]
    assert (shown["mode"], shown["provider"], shown["answers"]) == ("live", "tavily", 3)
    assert KEY not in groups.read_text()
