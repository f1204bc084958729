"""A small HTTP server that answers in the form of vLLM's documented fields; it samples nothing.

Its "tokens" are the bytes of the text, plus `EOS`. What it answers is set by the test, and so is
how it misbehaves. It keeps what it was asked in `requests`.
"""

from __future__ import annotations

import asyncio
import codecs
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

EOS = 256


def ids_of(text: str) -> list[int]:
    return [*text.encode(), EOS]


def logprob(token: int) -> float:
    """Exact in float32."""
    return -(token % 7 + 1) / 8


def prompt_ids(messages: list[dict[str, Any]]) -> list[int]:
    return [*json.dumps(messages).encode()]


def number_of(messages: list[dict[str, Any]]) -> str:
    return str(messages[-1].get("content"))


@dataclass
class FakeVllm:
    """What it answers, and how.

    Args:
        text: the answer; None: the last message's content behind "re: ".
        faults: one for each of the next requests: an HTTP status, a status with a message, or
            "garbage", "list", "close", "error_body", "html_stream", "half" (breaks off within a
            whole answer, before the first chunk of a stream), or for streams "cut" (no `[DONE]`),
            "error_chunk", "reset".
        omit: fields that are left out of every answer.
        held: while set and not `held.is_set()`, answers wait (a stream after its first chunk).
        served: the model that it says it is; None: the one that was asked for.
        group: ids per chunk of a stream.
        cut_bytes: streams are written in pieces of so many bytes.
        retry_after: a header of the answers that faults with a status give.
        slow_seconds: before each answer to a call.
        health: the HTTP status of `/health`.
        metrics: what `/metrics` says; None: there is none.
        hung: it takes connections and answers nothing, whatever it is asked.
        checks: how often `/health` was asked for.
        experts: makes `routed_experts` for a number of tokens.
    """

    text: str | None = "Hëllo."
    tool_calls: list[dict[str, Any]] | None = None
    finish: str = "stop"
    stop_reason: str | int | None = None
    reasoning: str | None = None
    faults: deque[int | str | tuple[int, str]] = field(default_factory=deque)
    omit: frozenset[str] = frozenset()
    miscount: int = 0
    held: asyncio.Event | None = None
    served: str | None = None
    group: int = 1
    cut_bytes: int | None = None
    retry_after: str | None = None
    slow_seconds: float = 0.0
    health: int = 200
    metrics: str | None = None
    hung: bool = False
    checks: int = 0
    experts: Callable[[int], str] | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    aborted: int = 0
    url: str = ""
    site: web.TCPSite | None = None
    server: web.Server[web.Request] | None = None

    async def kill(self) -> None:
        """As when its process is killed: no connection is taken, those that there are break."""
        assert self.site is not None
        assert self.server is not None
        await self.site.stop()
        for connection in self.server.connections:
            if connection.transport is not None:
                connection.transport.abort()

    def ids(self, body: dict[str, Any]) -> list[int]:
        """What it "samples" for a request: cut at max_tokens."""
        text = f"re: {number_of(body['messages'])}" if self.text is None else self.text
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or 10_000
        return ids_of(text)[:limit]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        fault = self.faults.popleft() if self.faults else None
        if isinstance(fault, int):
            error = {"message": f"told {request.headers.get('authorization')}", "code": fault}
            headers = {"retry-after": self.retry_after} if self.retry_after else None
            return web.json_response({"error": error}, status=fault, headers=headers)
        if isinstance(fault, tuple):
            status, message = fault
            return web.json_response({"error": {"message": message}}, status=status)
        if fault == "garbage":
            return web.Response(text="<html>not JSON</html>")
        if fault == "list":
            return web.json_response([1, 2])
        if fault == "error_body":
            return web.json_response({"error": {"message": "CUDA out of memory", "code": 500}})
        if fault == "close" and request.transport is not None:
            request.transport.abort()
        if fault == "half":
            return await self._half(request, body)
        if body.get("stream") and fault != "html_stream":
            return await self._stream(request, body, fault)
        try:
            await self._wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        return web.json_response(self.answer(body))

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        choices = [self._choice(body, index) for index in range(body.get("n", 1))]
        answer = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": self.served or body["model"],
            "choices": choices,
            "usage": self._usage(body),
            "prompt_token_ids": prompt_ids(body["messages"]),
        }
        return {name: value for name, value in answer.items() if name not in self.omit}

    def _usage(self, body: dict[str, Any]) -> dict[str, int]:
        prompt = len(prompt_ids(body["messages"]))
        sampled = len(self.ids(body)) * body.get("n", 1) + self.miscount
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        }

    def _choice(self, body: dict[str, Any], index: int) -> dict[str, Any]:
        ids = self.ids(body)
        message: dict[str, Any] = {"role": "assistant", "content": _text(ids)}
        if self.tool_calls:
            message |= {"content": None, "tool_calls": self.tool_calls}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        choice = {
            "index": index,
            "message": message,
            "finish_reason": self._finish(ids),
            "stop_reason": self.stop_reason,
            "logprobs": _logprobs(ids) if body.get("logprobs") else None,
        }
        if body.get("return_token_ids"):
            choice["token_ids"] = ids
        if self.experts is not None:
            choice["routed_experts"] = self.experts(len(prompt_ids(body["messages"])) + len(ids))
        return {name: value for name, value in choice.items() if name not in self.omit}

    def _finish(self, ids: list[int]) -> str:
        return self.finish if ids[-1:] == [EOS] else "length"

    async def _stream(
        self, request: web.Request, body: dict[str, Any], fault: str | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        chunks = list(self.chunks(body))
        try:
            for number, chunk in enumerate(chunks):
                if number == 2:
                    await self._wait()
                if number == len(chunks) // 2 and fault in ("cut", "error_chunk", "reset"):
                    if fault == "error_chunk":
                        await self._write(response, {"error": {"message": "died", "code": 500}})
                    if fault == "reset" and request.transport is not None:
                        request.transport.abort()
                    return response
                await self._write(response, chunk)
            await response.write(b": done soon\n\ndata: [DONE]\n\n")
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        return response

    async def _half(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        kind = "text/event-stream" if body.get("stream") else "application/json"
        response = web.StreamResponse(headers={"content-type": kind, "content-length": "100"})
        await response.prepare(request)
        await response.write(b": soon\n\n" if body.get("stream") else b'{"id": ')
        assert request.transport is not None
        request.transport.abort()
        return response

    async def _write(self, response: web.StreamResponse, chunk: dict[str, Any]) -> None:
        data = b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"
        size = self.cut_bytes or len(data)
        for start in range(0, len(data), size):
            await response.write(data[start : start + size])

    def chunks(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed answer: prompt ids in the first, ids with and without text."""
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1}
        head["model"] = body["model"]
        for index in range(body.get("n", 1)):
            role = {"index": index, "delta": {"role": "assistant", "content": ""}}
            first = {**head, "choices": [{**role, "finish_reason": None}]}
            if "prompt_token_ids" not in self.omit and body.get("return_token_ids"):
                first["prompt_token_ids"] = prompt_ids(body["messages"])
            yield first
        for index in range(body.get("n", 1)):
            for choice in self._choice_chunks(body, index):
                yield {**head, "choices": [choice]}
        if (body.get("stream_options") or {}).get("include_usage"):
            yield {**head, "choices": [], "usage": self._usage(body)}

    def _choice_chunks(self, body: dict[str, Any], index: int) -> Iterator[dict[str, Any]]:
        ids = self.ids(body)
        decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
        for start in range(0, len(ids), self.group):
            part = ids[start : start + self.group]
            last = start + self.group >= len(ids)
            text = decoder.decode(bytes(token for token in part if token < EOS), final=last)
            chunk: dict[str, Any] = {
                "index": index,
                "delta": {"content": text} if text else {},
                "finish_reason": self._finish(ids) if last else None,
                "logprobs": _logprobs(part) if body.get("logprobs") else None,
            }
            if last:
                chunk["stop_reason"] = self.stop_reason
            if body.get("return_token_ids"):
                chunk["token_ids"] = part
            yield {name: value for name, value in chunk.items() if name not in self.omit}

    async def completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        ids = ids_of(self.text or "")[: body.get("max_tokens", 16)]
        prompt = body["prompt"]
        choices = [
            {
                "index": index,
                "text": _text(ids),
                "finish_reason": self._finish(ids),
                "token_ids": ids if body.get("return_token_ids") else None,
                "prompt_token_ids": [*prompt.encode()] if isinstance(prompt, str) else prompt,
                "logprobs": {"token_logprobs": [logprob(token) for token in ids]},
                "prompt_logprobs": [None, {"7": {"logprob": -0.5}}],
            }
            for index in range(body.get("n", 1))
        ]
        return web.json_response({"choices": choices})

    async def models(self, request: web.Request) -> web.Response:
        self.headers.append(dict(request.headers))
        return web.json_response({"object": "list", "data": [{"id": "tiny"}, {"id": "other"}]})

    async def told_health(self, request: web.Request) -> web.Response:
        self.checks += 1
        return web.Response(status=self.health)

    async def told_metrics(self, request: web.Request) -> web.Response:
        if self.metrics is None:
            raise web.HTTPNotFound
        return web.Response(text=self.metrics)

    async def _wait(self) -> None:
        if self.held is not None:
            await self.held.wait()


@asynccontextmanager
async def fake_vllm(port: int = 0, **how: Any) -> AsyncIterator[FakeVllm]:
    """A running FakeVllm; `url` is its address."""
    fake = FakeVllm(**how)

    @web.middleware
    async def manners(request: web.Request, handler: Any) -> web.StreamResponse:
        if fake.hung:
            await asyncio.Event().wait()
        if request.method == "POST":
            await asyncio.sleep(fake.slow_seconds)
        answer: web.StreamResponse = await handler(request)
        return answer

    app = web.Application(client_max_size=64 * 1024 * 1024, middlewares=[manners])
    app.router.add_post("/v1/chat/completions", fake.chat)
    app.router.add_post("/v1/completions", fake.completions)
    app.router.add_get("/v1/models", fake.models)
    app.router.add_get("/health", fake.told_health)
    app.router.add_get("/metrics", fake.told_metrics)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    fake.site = web.TCPSite(runner, "127.0.0.1", port)
    await fake.site.start()
    fake.server = runner.server
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield fake
    finally:
        await runner.cleanup()


def _text(ids: list[int]) -> str:
    return bytes(token for token in ids if token < EOS).decode(errors="ignore")


def _logprobs(ids: list[int]) -> dict[str, Any]:
    return {
        "content": [
            {"token": f"<{token}>", "logprob": logprob(token), "bytes": None, "top_logprobs": []}
            for token in ids
        ]
    }
