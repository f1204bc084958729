"""What the recording proxy adds to a call, at 64 calls in flight, against the engine alone.

    python tests/benchmarks/bench_proxy.py [calls]

The engine is the simulated one over HTTP, without latency; engine, proxy and client are a process
each. Without the proxy the client sends the engine the very fields that the proxy would. On a
machine with few cores the three compete for them, so the CPU time of each call is the number to
look at: rates show what is left of the engine's when nobody has to wait for a core.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import orjson
import uvloop
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.commands import Running, running
from support.serving import attempt_spec

from envserver.api.server import serve_api
from envserver.config import OpenAIConfig
from envserver.models.openai import OpenAIEngine
from envserver.proxy import Proxy

AT_A_TIME = 64
WARM_UP = 5
"""Calls of each client before the clock starts."""
ASK = {"model": "sim", "messages": [{"role": "user", "content": "How many is 17 times 3?" * 20}]}
EXACT = {"return_token_ids": True, "logprobs": True, "max_tokens": 1000}
USAGE = {"stream_options": {"include_usage": True}}


async def serve_proxy(engine_url: str) -> None:
    """The proxy as a process: prints the addresses of its attempts, runs until it is ended."""
    config = OpenAIConfig(base_url=engine_url)
    async with OpenAIEngine(config) as engine:
        proxy = Proxy(engine)
        async with await serve_api(proxy.asgi(), "127.0.0.1", 0) as server:
            spec = attempt_spec(max_turns=10**9, seconds=3600.0)
            spec = msgspec.structs.replace(spec, model=await engine.model_name())
            keys = [proxy.open(spec).key for _ in range(AT_A_TIME)]
            urls = [f"{server.url}/r/{key}/v1/chat/completions" for key in keys]
            print("attempts", orjson.dumps(urls).decode(), flush=True)
            await server.wait()


async def load(urls: list[str], body: dict[str, Any], calls: int) -> None:
    """`calls` calls, one client for each of `urls`; every answer is read to its end."""
    left = iter(range(calls))
    payload = orjson.dumps(body)
    headers = {"content-type": "application/json"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def client(url: str) -> None:
            for _ in left:
                async with http.post(url, data=payload, headers=headers) as answer:
                    answer.raise_for_status()
                    await answer.read()

        async with asyncio.TaskGroup() as clients:
            for url in urls:
                clients.create_task(client(url))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measured(
    urls: list[str], body: dict[str, Any], calls: int, pids: list[int]
) -> tuple[float, list[float]]:
    """Calls per second, and the CPU milliseconds per call of each of `pids`."""
    await load(urls, body, WARM_UP * AT_A_TIME)
    before = [cpu_seconds(pid) for pid in pids]
    began = time.perf_counter()
    await load(urls, body, calls)
    seconds = time.perf_counter() - began
    used = [cpu_seconds(pid) - start for pid, start in zip(pids, before, strict=True)]
    return calls / seconds, [1000 * each / calls for each in used]


async def compare(engine: Running, proxy: Running, engine_url: str, calls: int) -> Table:
    table = Table(title=f"{calls} calls, {AT_A_TIME} at a time")
    for column in ("answers", "calls/s alone", "through proxy", "of it", "CPU ms: engine", "proxy"):
        table.add_column(column, justify="left" if column == "answers" else "right")
    alone = [f"{engine_url}/chat/completions"] * AT_A_TIME
    urls = orjson.loads(proxy.wait_for(r"attempts (\[.*\])\n")[1])
    for name, asked, sent in (
        ("whole", ASK, ASK | EXACT),
        ("streamed", ASK | {"stream": True}, ASK | EXACT | USAGE | {"stream": True}),
    ):
        bare, _ = await measured(alone, sent, calls, [engine.pid])
        with_proxy, (engine_ms, proxy_ms) = await measured(
            urls, asked, calls, [engine.pid, proxy.pid]
        )
        share = f"{with_proxy / bare:.0%}"
        cells = (f"{bare:,.0f}", f"{with_proxy:,.0f}", share, f"{engine_ms:.2f}", f"{proxy_ms:.2f}")
        table.add_row(name, *cells)
    return table


def main() -> None:
    if sys.argv[1:2] == ["--proxy"]:
        uvloop.run(serve_proxy(sys.argv[2]))
        return
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 3000
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sim = ("models", "sim", "--port", 0, "--sim.latency_seconds", 0)
        with running(*sim, folder=folder) as engine:
            engine_url = engine.wait_for(r"(http://\S+/v1)")[1]
            python = Path(sys.executable)
            with running(__file__, "--proxy", engine_url, folder=folder, program=python) as proxy:
                Console().print(uvloop.run(compare(engine, proxy, engine_url, calls)))


if __name__ == "__main__":
    main()
