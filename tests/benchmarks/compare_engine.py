"""An engine for `compare.py`: prints its URL, answers each call after 20 ms (or the seconds of its
argument, up to as many more or less as a second one says, as a share) with exact token ids.

Its tokens are bytes of the text, with one id each for the start and the end of a message, so that a
conversation's prompt begins with what was sampled before.
"""

import asyncio
import logging
import random
import statistics
import sys
import time
from typing import Any

import orjson
from aiohttp import web

SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 0.02
SPREAD = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
START, END = 257, 256
SAID = "Hello, here is an answer of some thirty tokens."
_SAMPLED = [*SAID.encode(), END]
_GAPS: list[float] = []
"""Milliseconds from each answer to the next call: what everything but the engine takes."""
_answered = 0.0
_LOGPROBS = [-(token % 7 + 1) / 8 for token in _SAMPLED]


def prompt_ids(messages: list[dict[str, Any]]) -> list[int]:
    ids: list[int] = []
    for message in messages:
        content = message["content"]
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        ids += [START, *f"{message['role']}\n".encode(), *text.encode(), END]
    return [*ids, START, *b"assistant\n"]


async def sample() -> list[dict[str, Any]]:
    """Returns the logprobs of the answer, after the time that it takes."""
    _GAPS.append((time.perf_counter() - _answered) * 1000)
    await asyncio.sleep(SECONDS * random.uniform(1 - SPREAD, 1 + SPREAD))
    return [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(_SAMPLED, _LOGPROBS, strict=True)
    ]


def answered(answer: dict[str, Any]) -> web.Response:
    global _answered
    body = orjson.dumps(answer)
    _answered = time.perf_counter()
    return web.Response(body=body, content_type="application/json")


async def generate(request: web.Request) -> web.Response:
    """vLLM's route for token ids."""
    await request.read()
    logprobs = {"content": await sample()}
    choice = {"index": 0, "token_ids": _SAMPLED, "logprobs": logprobs, "finish_reason": "stop"}
    return answered({"request_id": "1", "choices": [choice]})


async def chat(request: web.Request) -> web.Response:
    body = orjson.loads(await request.read())
    content = await sample()
    ids = prompt_ids(body["messages"])
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": SAID},
        "finish_reason": "stop",
        "logprobs": {"content": content} if body.get("logprobs") else None,
        "token_ids": _SAMPLED if body.get("return_token_ids") else None,
    }
    usage = {"prompt_tokens": len(ids), "completion_tokens": len(_SAMPLED)}
    answer = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": body["model"],
        "choices": [choice],
        "prompt_token_ids": ids,
        "usage": usage | {"total_tokens": sum(usage.values())},
    }
    return answered(answer)


async def gap(request: web.Request) -> web.Response:
    """The median gap since it was asked last, for conversations that come one at a time."""
    median = statistics.median(_GAPS or [0.0])
    _GAPS.clear()
    return web.json_response(median)


async def models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "m", "max_model_len": 262144}]})


async def health(request: web.Request) -> web.Response:
    return web.Response()


async def main() -> None:
    # A killed caller is what some runs are about, and no error of this engine.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    app = web.Application(client_max_size=2**24)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_post("/inference/v1/generate", generate)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/health", health)
    app.router.add_get("/gap", gap)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
