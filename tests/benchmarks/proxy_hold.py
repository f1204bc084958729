"""How long one call of a long conversation keeps the proxy's event loop: `proxy_hold.py URL CORE`.

A task that runs once in each turn of the loop looks at the CPU time that the whole process has used
since its last turn: threads that hold the interpreter keep the loop as well, and a busy machine
does not change it. Prints, for each kind of call, the most milliseconds of the median call.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

sys.path.insert(0, str(Path(__file__).parent.parent))
import proxy_calls as calls
from proxy_load import pin
from proxy_servers import make_proxy, open_attempt

from envserver import OpenAIConfig
from envserver.cli.loop import run_loop
from envserver.models import OpenAIEngine
from envserver.proxy import Proxy, ProxyAttempt

KINDS: dict[str, dict[str, Any]] = {
    "first call": {"history_tokens": 30_000, "turns": 1},
    "second call": {"history_tokens": 30_000, "turns": 2},
    "of 100 turns": {"history_tokens": 17_500, "turns": 100},
    "of 100 turns with tools": {"history_tokens": 17_500, "turns": 100, "tools": True},
}
RUNS = 5


async def longest(proxy: Proxy, attempt: ProxyAttempt, body: bytes) -> float:
    """Seconds of CPU in the longest turn of the loop during one call."""
    turns: list[float] = []

    async def watch() -> None:
        before = time.process_time()
        while True:
            await asyncio.sleep(0)
            now = time.process_time()
            turns.append(now - before)
            before = now

    watching = asyncio.create_task(watch())
    await ask(proxy, attempt, body)
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    return max(turns)


async def ask(proxy: Proxy, attempt: ProxyAttempt, body: bytes) -> None:
    """One call, given to the application itself."""
    request = [{"type": "http.request", "body": body}]
    path = f"/r/{attempt.key}/v1/chat/completions"
    scope = {"type": "http", "method": "POST", "path": path, "headers": []}

    async def receive() -> dict[str, Any]:
        if not request:
            await asyncio.Event().wait()
        return request.pop()

    async def send(message: Any) -> None:
        assert message.get("status", 200) == 200

    await proxy.asgi()(scope, receive, send)


async def main(engine_url: str, core: int) -> None:
    pin(core)
    holds = []
    config = OpenAIConfig(base_url=engine_url, model_name=calls.MODEL)
    async with OpenAIEngine(config) as engine:
        proxy = make_proxy(engine, "tokens")
        for name, shape in KINDS.items():
            *before, last = calls.requests(**{"tools": False, "streamed": False, **shape})
            attempt = open_attempt(proxy)
            for body in before:
                await ask(proxy, attempt, body)
            found = [await longest(proxy, attempt, last) for _ in range(RUNS)]
            assert (attempt.calls[-1].edge == "root") == (not before)
            holds.append((name, 1000 * statistics.median(found)))
    print("holds", orjson.dumps(holds).decode(), flush=True)


if __name__ == "__main__":
    run_loop(main(sys.argv[1], int(sys.argv[2])))
