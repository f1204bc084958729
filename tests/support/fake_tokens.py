"""A small HTTP server with vLLM's ways to ask for tokens, of which a test takes some away.

Its "tokens" are the bytes of the text, plus `EOS`; prompts are the JSON of messages and tools. It
follows a distribution: at each place five tokens have logits, and the likeliest is sampled.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

EOS = 256
ALL = frozenset({"ids", "top", "completions", "scale_out", "tools", "versions", "dev", "metrics"})
"""What vLLM can do with every switch set."""
_LOGITS = (3.0, 2.0, 1.0, 0.0, -1.0)
_OPENAIS = {"model", "messages", "temperature", "max_tokens", "tools", "tool_choice"}
_DISABLED = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out."
_NO_TOOLS = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'

Json = dict[str, Any]


class Refuse(Exception):
    """An HTTP error in vLLM's form."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class FakeEngine:
    """What it can do, and where it lies.

    Args:
        can: of `ALL`, and "parser", "reasoning" (a parser for it).
        strict: it refuses fields that OpenAI does not have.
        processed: logprobs after the temperature.
        lies: an endpoint ("generate", "completions", "render", "derender") that gives other tokens,
            or "echo": the prompt is not what was sent.
        tie: "generate" gives another token, as likely as the right one.
        key: the only key that it takes.
        slow: it never answers.
    """

    def __init__(
        self,
        can: frozenset[str] = ALL,
        *,
        strict: bool = False,
        processed: bool = False,
        lies: str = "",
        tie: bool = False,
        key: str = "",
        slow: bool = False,
        text: str = "Yes, it is.",
        cards: list[Json] | None = None,
    ) -> None:
        self.can = can
        self.strict = strict
        self.processed = processed
        self.lies = lies
        self.tie = tie
        self.key = key
        self.slow = slow
        self.text = text
        self.cards = cards or [{"id": "tiny", "root": "/models/tiny", "max_model_len": 2048}]
        self.requests: list[str] = []
        self.url = ""

    def app(self) -> web.Application:
        routes: dict[str, Callable[[Json], Json]] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completions,
            "/v1/chat/completions/render": self._render,
            "/inference/v1/generate": self._generate,
            "/v1/chat/completions/derender": self._derender,
        }
        app = web.Application(middlewares=[self._guarded])
        for path, answer in routes.items():
            app.router.add_post(path, _posted(answer))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        if "dev" in self.can:
            app.router.add_get("/is_paused", self._is_paused)
        if "metrics" in self.can:
            app.router.add_get("/metrics", self._metrics)
        return app

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        self.requests.append(request.path)
        if self.slow:
            await asyncio.sleep(60)
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        try:
            return await handler(request)
        except Refuse as error:
            facts = {"message": str(error), "code": error.status}
            return web.json_response({"error": facts}, status=error.status)

    async def _models(self, request: web.Request) -> web.Response:
        cards = [{"object": "model", "owned_by": "vllm", **card} for card in self.cards]
        return web.json_response({"object": "list", "data": cards})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": False})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text="# HELP vllm:num_requests_running Running.\n")

    def _chat(self, body: Json) -> Json:
        if body["model"] not in [card["id"] for card in self.cards]:
            raise Refuse(404, f"The model `{body['model']}` does not exist.")
        if unknown := body.keys() - _OPENAIS if self.strict else set():
            raise Refuse(400, f"Unrecognized request argument supplied: {min(unknown)}")
        if "tools" in body and "tools" not in self.can:
            raise Refuse(400, _NO_TOOLS)
        if "top_logprobs" in body and "top" not in self.can:
            raise Refuse(400, "Requested sample logprobs of 5, which is greater than 0.")
        ids = self._sampled(body)
        choice = {"index": 0, "message": self._message(ids), "finish_reason": _finish(ids)}
        answer: Json = {"object": "chat.completion", "choices": [choice]}
        if "ids" in self.can and body.get("return_token_ids"):
            choice |= {"token_ids": ids, "logprobs": self._logprobs(ids, body)}
            answer["prompt_token_ids"] = _prompt(body)
        return answer

    def _completions(self, body: Json) -> Json:
        ids = self._sampled(body, lie=self.lies == "completions")
        choice: Json = {"index": 0, "text": "", "finish_reason": _finish(ids)}
        if "completions" in self.can:
            scores = [entry["logprob"] for entry in self._logprobs(ids, body)["content"]]
            choice |= {"token_ids": ids, "prompt_token_ids": self._echo(body["prompt"])}
            choice["logprobs"] = {"token_logprobs": scores}
        return {"object": "text_completion", "choices": [choice]}

    def _render(self, body: Json) -> Json:
        self._check_scale_out()
        prompt = _prompt(body) + ([7] if self.lies == "render" else [])
        return {"token_ids": prompt, "sampling_params": {"max_tokens": body["max_tokens"]}}

    def _generate(self, body: Json) -> Json:
        self._check_scale_out()
        ids = self._sampled(body["sampling_params"], lie=self.lies == "generate")
        scored = self._logprobs(ids, {})
        if self.tie:
            ids = [*ids[:1], 33, *ids[2:]]
        choice: Json = {"index": 0, "token_ids": ids, "logprobs": scored}
        if "versions" in self.can:
            choice["weight_versions"] = [{"version": "default", "start": 0, "end": len(ids)}]
        return {"choices": [choice], "prompt_token_ids": self._echo(body["token_ids"])}

    def _derender(self, body: Json) -> Json:
        self._check_scale_out()
        if self.can & {"parser", "reasoning"} and not body.get("chat_request"):
            raise Refuse(400, "chat_request is required when a parser is configured.")
        choices = [
            {"index": index, "message": self._message(choice["token_ids"], raw=True)}
            for index, choice in enumerate(body["generate_response"]["choices"])
        ]
        return {"choices": choices}

    def _echo(self, prompt: list[int]) -> list[int]:
        return prompt[1:] if self.lies == "echo" else prompt

    def _check_scale_out(self) -> None:
        if "scale_out" not in self.can:
            raise Refuse(403, _DISABLED)

    def _sampled(self, body: Json, *, lie: bool = False) -> list[int]:
        text = self.text.swapcase() if lie else self.text
        ids = [*text.encode(), EOS]
        return ids[: body.get("max_tokens", 16)]

    def _message(self, ids: list[int], *, raw: bool = False) -> Json:
        """`raw`: the end of the turn stays in the text, as in vLLM's derender with a parser."""
        end = "<end>" if raw else ""
        text = "".join(end if token == EOS else chr(token) for token in ids)
        if raw and self.lies == "derender":
            text = text.upper()
        thought, closes, rest = text.partition("</think>")
        if "reasoning" in self.can and (closes or self.text.startswith("<think>")):
            return {"role": "assistant", "content": rest, "reasoning": thought}
        return {"role": "assistant", "content": text}

    def _logprobs(self, ids: list[int], body: Json) -> Json:
        warmth = body.get("temperature") or 1.0
        logits = [_LOGITS[0], *_LOGITS[:-1]] if self.tie else [*_LOGITS]
        if self.processed:
            logits = [logit / warmth for logit in logits]
        total = math.log(sum(map(math.exp, logits)))
        scores = [logit - total for logit in logits]
        entries = []
        for token in ids:
            names = [token, *(number for number in range(65, 70) if number != token)]
            tops = [
                {"token": chr(name), "bytes": [name], "logprob": score}
                for name, score in zip(names, scores, strict=False)
            ]
            tops = tops[: body.get("top_logprobs", 0)]
            entries.append({"token": chr(token), "logprob": scores[0], "top_logprobs": tops})
        return {"content": entries}


@asynccontextmanager
async def fake_engine(engine: FakeEngine, port: int = 0) -> AsyncIterator[FakeEngine]:
    """A running FakeEngine; `url` is its address."""
    runner = web.AppRunner(engine.app(), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield engine
    finally:
        await runner.cleanup()


def _posted(answer: Callable[[Json], Json]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        return web.json_response(answer(await request.json()))

    return handle


def _prompt(body: Json) -> list[int]:
    return [*json.dumps([body["messages"], body.get("tools")]).encode()]


def _finish(ids: list[int]) -> str:
    return "stop" if ids[-1] == EOS else "length"
