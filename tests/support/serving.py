"""Applications over real HTTP, and what tests of the proxy need."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from aiohttp import web
from envserver_records.records import Task

from envserver.environment import Isolation
from envserver.proxy.attempts import AgentRoute, AttemptSpec, Limits


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """`app` on a free port of this machine; gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve([listener]))
        while not server.started and not running.done():
            await asyncio.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await running


class AiohttpServer(web.AppRunner):
    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.addresses[0][1]}"


@asynccontextmanager
async def serving_aiohttp(
    app: web.Application, port: int = 0, **how: Any
) -> AsyncIterator[AiohttpServer]:
    """`app` on a free port of this machine, or this one. `how`: as of AppRunner."""
    runner = AiohttpServer(app, access_log=None, **({"shutdown_timeout": 0.1} | how))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield runner
    finally:
        await runner.cleanup()


def attempt_spec(
    *,
    max_turns: int = 100,
    max_completion_tokens: int | None = None,
    seconds: float = 60.0,
    max_tokens: int = 1000,
    temperature: float = 1.0,
    top_p: float = 1.0,
    agents: Sequence[str] = (),
    rollout_id: str = "rollout-1",
    isolation: Isolation = "pooled",
) -> AttemptSpec:
    """An attempt at a task whose model is called "tiny". `agents`: those that are declared."""
    sampling = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
    return AttemptSpec(
        rollout_id=rollout_id,
        attempt=1,
        env="addition",
        env_reference="addition",
        env_config={"digits": 3},
        task=Task("add-1", {"question": "1+1?"}),
        model="tiny",
        deadline=time.time() + seconds,
        limits=Limits(max_turns, max_completion_tokens),
        sampling=sampling,
        agents={name: AgentRoute(model="tiny", sampling=sampling) for name in agents},
        isolation=isolation,
    )
