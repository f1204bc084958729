"""A stand-in for vLLM: it answers in the form of vLLM's documented fields, and samples nothing.

What it says and how it misbehaves is set by the test; what it was asked stands in `requests`. It
is asked over HTTP (`fake_vllm`, `in_thread`), or in this process, where it is an Engine. Its quirks
are those measured on vLLM 0.32: a derendered text keeps the token that ended it, its
`finish_reason` stays "stop", it refuses empty answers; a generated answer's logprobs name at least
one alternative. The parser it has is a plain one.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import orjson
from aiohttp import web
from envserver_records.errors import EngineRefused
from envserver_records.tasks import Json

from envserver.models.connections import Decoder
from envserver.models.engine import EngineRequest, ReplicaHealth
from envserver.tokens.chat_format import ChatFormat
from support.beside import in_a_thread
from support.serving import AiohttpServer, serving_aiohttp

EOS = 256
END = "<|im_end|>"
ASK: Json = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 1.0,
    "seed": 3,
    "max_tokens": 200,
    "logprobs": True,
    "return_token_ids": True,
}
SOME = frozenset({"ids", "top", "completions", "tools"})
ALL = SOME | {"scale_out", "versions", "dev"}
"""What vLLM can do with every switch set."""
CHAT: Final = "/v1/chat/completions"
RENDER, DERENDER = f"{CHAT}/render", f"{CHAT}/derender"
GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
_OPENAIS = {"model", "messages", "temperature", "max_tokens", "tools", "tool_choice"}
_DISABLED = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out."
_NO_TOOLS = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
_OWN_LIMIT = 16
"""Of sampling parameters without one; what is rendered leaves it out, and has no limit then."""
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def ids_of(text: str) -> list[int]:
    return [*text.encode(), EOS]


def logprob(token: int) -> float:
    """Exact in float32."""
    return -(token % 7 + 1) / 8


def prompt_ids(messages: list[Json]) -> list[int]:
    return [*json.dumps(messages).encode()]


class Bytes:
    """Tokens are the bytes of a text, and `EOS`.

    Args:
        logits: of the likeliest tokens of each place, the sampled one's first.
        processed: logprobs are those after the temperature.
    """

    end = EOS
    parsed = False
    """Whether calls are read from texts."""

    def __init__(self, *logits: float, processed: bool = False) -> None:
        self._logits, self._processed = logits, processed

    def encode(self, text: str) -> list[int]:
        return [*text.encode()]

    def decode(self, ids: list[int], end: bytes = b"") -> str:
        text = b"".join(end if token == EOS else bytes([token]) for token in ids)
        return text.decode(errors="ignore")

    def whole(self, ids: list[int]) -> str:
        """With the text of special tokens."""
        return self.decode(ids, b"<end>")

    def prompt(self, body: Json) -> list[int]:
        return prompt_ids(body["messages"])

    def name(self, token: int) -> str:
        return f"<{token}>"

    def scored(self, token: int, body: Json) -> Iterator[tuple[int, float]]:
        """Likely tokens with their logprobs, the sampled one first."""
        if not self._logits:
            yield token, logprob(token)
            return
        warmth = (self._processed and body.get("temperature")) or 1.0
        logits = [logit / warmth for logit in self._logits]
        total = math.log(sum(map(math.exp, logits)))
        names = [token, *(number for number in range(65, 70) if number != token)]
        yield from zip(names, (logit - total for logit in logits), strict=False)


class Words(Bytes):
    """The tokens of a real vocabulary."""

    parsed = True

    def __init__(self, format: ChatFormat) -> None:
        self._format = format
        self.end = format.encode(END)[0]

    def encode(self, text: str) -> list[int]:
        return self._format.encode(text)

    def whole(self, ids: list[int]) -> str:
        return self._format.decode(ids)

    decode = whole  # type: ignore[assignment]

    def name(self, token: int) -> str:
        return self._format.decode([token])

    def prompt(self, body: Json) -> list[int]:
        return self._format.prompt_ids(body["messages"], body.get("tools"), {})

    def scored(self, token: int, body: Json) -> Iterator[tuple[int, float]]:
        yield from ((token + place, -(place + 1) / 4) for place in range(20))


@dataclass(eq=False)
class FakeVllm:
    """What it answers, and how.

    Args:
        text: the answer, or those of several choices; None: the last message's content behind
            "re: "; or what makes it of the request.
        words: its tokens.
        can: of `ALL`, and "parser"; `strict`: it refuses fields that OpenAI does not have.
        reasons: it tells reasoning from content.
        spoil: changes an answer before it is given; gets the path and the answer or chunk.
        faults: one for each of the next chat requests: an HTTP status, a status with a message, or
            "garbage", "null", "nothing", "close", "error_body", "html_stream", "half" (breaks off
            within a whole answer, before the first chunk of a stream), or for streams "cut" (no
            `[DONE]`), "error_chunk", "reset".
        omit: fields that are left out of every chat answer.
        held: while set and not `held.is_set()`, answers wait (a stream after its first chunk).
        served: the model that it says it is; None: the one that was asked for.
        group: ids per chunk of a stream.
        retry_after: a header of the answers that faults with a status give.
        slow_seconds: before each answer to a call.
        health_status: of `/health`.
        metrics: what `/metrics` says; None: there is none.
        hung: it takes connections and answers nothing, whatever it is asked.
        key: the only key that it takes.
        checks: how often `/health` was asked for.
        experts: makes `routed_experts` for a number of tokens.
        paths: those of all its requests; `requests`: the bodies of calls.
    """

    text: str | tuple[str, ...] | Callable[[Json], str] | None = "Hëllo."
    words: Bytes = field(default_factory=Bytes)
    can: frozenset[str] = SOME
    strict: bool = False
    reasons: bool = False
    spoil: Callable[[str, Json], object] = lambda path, answer: None
    tool_calls: list[Json] | None = None
    finish: str = "stop"
    stop_reason: str | int | None = None
    reasoning: str | None = None
    faults: deque[int | str | tuple[int, str]] = field(default_factory=deque)
    omit: frozenset[str] = frozenset()
    miscount: int = 0
    held: asyncio.Event | None = None
    served: str | None = None
    group: int = 1
    retry_after: str | None = None
    slow_seconds: float = 0.0
    health_status: int = 200
    metrics: str | None = None
    hung: bool = False
    key: str = ""
    cards: list[Json] = field(default_factory=lambda: [{"id": "tiny"}, {"id": "other"}])
    version: str | None = None
    checks: int = 0
    experts: Callable[[int], str] | None = None
    paths: list[str] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    aborted: int = 0
    url: str = ""
    runner: AiohttpServer | None = None

    # What it answers

    def said(self, body: Json, index: int = 0) -> str:
        if callable(self.text):
            return self.text(body)
        if self.text is None:
            return f"re: {body['messages'][-1].get('content')}"
        return self.text if isinstance(self.text, str) else self.text[index % len(self.text)]

    def sampled(self, body: Json, index: int = 0) -> Json:
        """One choice, without its message: cut at its limit, or behind a stop string."""
        text = self.said(body, index)
        ids = [*self.words.encode(text), self.words.end]
        finish, stop = self.finish, self.stop_reason
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or len(ids)
        if limit < len(ids):
            ids, finish = ids[:limit], "length"
            text = self.words.decode(ids)
        for string in body.get("stop") or []:
            if string in text:
                # The tokens that hold the end of the stop string are sampled as wholes.
                end = text.index(string) + len(string)
                while len(self.words.decode(ids[:-1])) >= end:
                    ids = ids[:-1]
                text, finish, stop = text[: text.index(string)], "stop", string
        choice = {"index": index, "text": text, "token_ids": ids}
        return {**choice, "finish_reason": finish, "stop_reason": stop}

    def all_sampled(self, body: Json) -> list[Json]:
        return [self.sampled(body, index) for index in range(body.get("n") or 1)]

    def message(self, body: Json, text: str) -> Json:
        message: Json = {"role": "assistant", "content": text}
        if self.tool_calls:
            message |= {"content": None, "tool_calls": self.tool_calls}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        if self.reasons:
            thought, closed, rest = text.removeprefix("<think>").partition("</think>")
            message |= {"reasoning": thought or None, "content": rest if closed else None}
        content = message["content"] or ""
        if not (self.words.parsed and body.get("tools") and _OPEN in content):
            return message
        calls = []
        for part in content.split(_OPEN)[1:]:
            call = json.loads(part.partition(_CLOSE)[0])
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            calls.append({"id": "call-1", "type": "function", "function": function})
        return {**message, "content": content.partition(_OPEN)[0] or None, "tool_calls": calls}

    def scored(self, ids: list[int], body: Json, count: int, *, named: bool = True) -> Json:
        def entry(token: int, score: float) -> Json:
            text = self.words.name(token) if named else f"token_id:{token}"
            return {"token": text, "logprob": score, "bytes": [*text.encode()]}

        content = []
        for token in ids:
            entries = [entry(*pair) for pair in islice(self.words.scored(token, body), count or 1)]
            content.append({**entries[0], "top_logprobs": entries[:count]})
        return {"content": content}

    def usage(self, prompt: list[int], choices: list[Json]) -> Json:
        sampled = sum(len(choice["token_ids"]) for choice in choices) + self.miscount
        told = {"prompt_tokens": len(prompt), "completion_tokens": sampled}
        return {**told, "total_tokens": len(prompt) + sampled}

    def answer(self, body: Json) -> Json:
        """A whole chat answer."""
        self._check_chat(body)
        prompt, sampled = self.words.prompt(body), self.all_sampled(body)
        answer = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": self.served or body["model"],
            "choices": [self._choice(body, one) for one in sampled],
            "usage": self.usage(prompt, sampled),
        }
        if "ids" in self.can:
            answer["prompt_token_ids"] = prompt
        return {name: value for name, value in answer.items() if name not in self.omit}

    def _check_chat(self, body: Json) -> None:
        if unknown := body.keys() - _OPENAIS if self.strict else set():
            raise _refused(400, f"Unrecognized request argument supplied: {min(unknown)}")
        if "tools" in body and "tools" not in self.can:
            raise _refused(400, _NO_TOOLS)
        if "top_logprobs" in body and "top" not in self.can:
            raise _refused(400, "Requested sample logprobs of 5, which is greater than 0.")

    def _choice(self, body: Json, sampled: Json) -> Json:
        ids = sampled["token_ids"]
        choice = {**sampled, "message": self.message(body, sampled["text"]), "logprobs": None}
        del choice["text"], choice["token_ids"]
        calls = None if self.tool_calls else choice["message"].get("tool_calls")
        ends = body.get("tool_choice", "auto") == "auto" or choice["finish_reason"] == "stop"
        if calls and ends:
            choice["finish_reason"] = "tool_calls"
        if "ids" in self.can and body.get("logprobs"):
            choice["logprobs"] = self.scored(ids, body, body.get("top_logprobs", 0))
        if "ids" in self.can and body.get("return_token_ids"):
            choice["token_ids"] = ids
        if self.experts is not None:
            choice["routed_experts"] = self.experts(len(self.words.prompt(body)) + len(ids))
        return {name: value for name, value in choice.items() if name not in self.omit}

    def chunks(self, body: Json) -> Iterator[Json]:
        """A streamed chat answer: prompt ids in the first, ids with and without text."""
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1}
        head["model"] = body["model"]
        prompt, sampled = self.words.prompt(body), self.all_sampled(body)
        for one in sampled:
            role = {"index": one["index"], "delta": {"role": "assistant", "content": ""}}
            first = {**head, "choices": [{**role, "finish_reason": None}]}
            if "prompt_token_ids" not in self.omit and body.get("return_token_ids"):
                first["prompt_token_ids"] = prompt
            yield first
        for one in sampled:
            for choice in self._choice_chunks(body, one):
                yield {**head, "choices": [choice]}
        if (body.get("stream_options") or {}).get("include_usage"):
            yield {**head, "choices": [], "usage": self.usage(prompt, sampled)}

    def _choice_chunks(self, body: Json, sampled: Json) -> Iterator[Json]:
        ids = sampled["token_ids"]
        decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
        for start in range(0, len(ids), self.group):
            part = ids[start : start + self.group]
            last = start + self.group >= len(ids)
            text = decoder.decode(bytes(token for token in part if token < EOS), final=last)
            chunk: Json = {
                "index": sampled["index"],
                "delta": {"content": text} if text else {},
                "finish_reason": sampled["finish_reason"] if last else None,
                "logprobs": self.scored(part, body, 0) if body.get("logprobs") else None,
            }
            if last:
                chunk["stop_reason"] = sampled["stop_reason"]
            if body.get("return_token_ids"):
                chunk["token_ids"] = part
            yield {name: value for name, value in chunk.items() if name not in self.omit}

    def completions(self, body: Json) -> Json:
        prompts = body["prompt"]
        if isinstance(prompts, str):
            prompts = self.words.encode(prompts)
        if isinstance(prompts[0], int):
            prompts = [prompts]
        choices: list[Json] = []
        for prompt in prompts:
            for choice in self.all_sampled({"max_tokens": _OWN_LIMIT, **body}):
                ids = choice["token_ids"]
                choice |= {"index": len(choices), "prompt_token_ids": prompt, "logprobs": None}
                if body.get("logprobs") is not None:
                    named = not body.get("return_tokens_as_token_ids")
                    scored = self.scored(ids, body, int(body["logprobs"]), named=named)
                    choice["logprobs"] = _as_completion(scored["content"])
                if body.get("prompt_logprobs") is not None:
                    choice["prompt_logprobs"] = self.prompt_logprobs(body)
                choices.append(choice)
        answer = {"id": "cmpl-1", "choices": choices, "usage": self.usage(prompts[0], choices)}
        if "completions" not in self.can:
            for choice in choices:
                del choice["token_ids"], choice["prompt_token_ids"]
        return answer

    def prompt_logprobs(self, body: Json) -> list[Json | None]:
        return [None, {"7": {"logprob": -0.5}}]

    def render(self, body: Json) -> Json:
        sampling = {name: body[name] for name in ("n", "seed", "stop", "top_p") if name in body}
        limit = body.get("max_tokens", 1000)
        if limit != _OWN_LIMIT:
            sampling["max_tokens"] = limit
        if body.get("logprobs"):
            sampling["logprobs"] = body.get("top_logprobs", 0)
        if body.get("tool_choice") == "required":
            sampling["structured_outputs"] = {"json": "{}"}
        ids = self.words.prompt(body)
        return {"request_id": "r-1", "token_ids": ids, "sampling_params": sampling}

    def generate(self, body: Json) -> Json:
        assert body["return_token_ids"]
        sampling = body["sampling_params"]
        choices = self.all_sampled(sampling)
        for choice in choices:
            ids, wanted = choice["token_ids"], sampling.get("logprobs")
            choice["logprobs"] = None
            if wanted is not None:
                choice["logprobs"] = self.scored(ids, sampling, max(1, wanted))
            if "versions" in self.can:
                spans = [{"version": "7", "start": 0, "end": len(ids)}]
                choice["weight_versions"] = spans if ids else []
        return {
            "request_id": "generate-tokens-1",
            "choices": choices,
            "prompt_token_ids": body["token_ids"],
            "usage": self.usage(body["token_ids"], choices),
        }

    def derender(self, body: Json) -> Json:
        if (self.reasons or "parser" in self.can) and not body.get("chat_request"):
            raise _refused(400, "chat_request is required when a parser is configured.")
        choices = []
        for choice in body["generate_response"]["choices"]:
            if not choice["token_ids"]:
                raise _refused(400, "choice has empty or null token_ids")
            text = self.words.whole(choice["token_ids"])
            message = self.message(body.get("chat_request") or {}, text)
            choices.append({**choice, "message": message})
        return {"choices": choices}

    def made(self, path: str, body: Json) -> Json:
        """The whole answer to a POST."""
        if path in (RENDER, DERENDER, GENERATE) and "scale_out" not in self.can:
            raise _refused(403, _DISABLED)
        ways: dict[str, Callable[[Json], Json]] = {
            CHAT: self.answer,
            RENDER: self.render,
            DERENDER: self.derender,
            GENERATE: self.generate,
            COMPLETIONS: self.completions,
            "/tokenize": lambda body: {"tokens": self.words.encode(body["prompt"])},
        }
        if path not in ways or (path == "/tokenize" and "scale_out" not in self.can):
            raise _refused(404, f"There is no {path}.")
        answer: Json = json.loads(json.dumps(ways[path](body)))
        return answer

    def answered(self, path: str, body: Json) -> Json:
        """The same, spoiled."""
        answer = self.made(path, body)
        self.spoil(path, answer)
        return answer

    def parts(self, path: str, answer: Json) -> Iterator[Json]:
        """An answer other than chat in chunks of one token, spoiled; its text is in the last."""
        shared = {name: answer[name] for name in answer if name not in ("choices", "usage")}
        prompt = shared.pop("prompt_token_ids", None)
        parts = [part for choice in answer["choices"] for part in _parts(choice)]
        for number, part in enumerate(parts):
            chunk = json.loads(json.dumps({**shared, "choices": [part]}))
            if number == 0 and prompt is not None:
                chunk["prompt_token_ids"] = prompt
            self.spoil(path, chunk)
            yield chunk
        yield {**shared, "choices": [], "usage": answer["usage"]}

    # Over HTTP

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path)
        if self.hung:
            await asyncio.Event().wait()
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        try:
            if request.method == "POST":
                await asyncio.sleep(self.slow_seconds)
                return await self.post_over_http(request)
            return self.get_over_http(request)
        except EngineRefused as error:
            status = int(error.detail["status"])
            facts = {"message": error.message, "code": status}
            return web.json_response({"error": facts}, status=status)

    def get_over_http(self, request: web.Request) -> web.Response:
        if request.path == "/health":
            self.checks += 1
            return web.Response(status=self.health_status)
        if request.path == "/metrics" and self.metrics is not None:
            return web.Response(text=self.metrics)
        if request.path == "/v1/models":
            self.headers.append(dict(request.headers))
            cards = [{"object": "model", "owned_by": "vllm", **card} for card in self.cards]
            return web.json_response({"object": "list", "data": cards})
        if request.path == "/version" and self.version is not None:
            return web.json_response({"version": self.version})
        if request.path == "/is_paused" and "dev" in self.can:
            return web.json_response({"is_paused": False})
        raise web.HTTPNotFound

    async def post_over_http(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        fault = None
        if request.path == CHAT:
            self.headers.append(dict(request.headers))
            fault = self.fault()
            wrong = await self._wrong(request, body, fault)
            if wrong is not None:
                return wrong
            if body.get("stream") and fault != "html_stream":
                return await self._stream(request, body, fault)
        try:
            await self._wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        return web.json_response(self.answered(request.path, body))

    def fault(self) -> int | str | tuple[int, str] | None:
        return self.faults.popleft() if self.faults else None

    async def _wrong(self, request: web.Request, body: Json, fault: Any) -> Any:
        assert request.transport is not None
        if isinstance(fault, int | tuple):
            told = f"told {request.headers.get('authorization')}"
            status, message = (fault, told) if isinstance(fault, int) else fault
            headers = {"retry-after": self.retry_after} if self.retry_after else {}
            headers |= {"location": "http://else.where/v1?key=k"} if status == 307 else {}
            error = {"message": message, "code": status}
            return web.json_response({"error": error}, status=status, headers=headers)
        if fault == "close":
            request.transport.abort()
        if fault == "half":
            kind = "text/event-stream" if body.get("stream") else "application/json"
            response = web.StreamResponse(headers={"content-type": kind, "content-length": "100"})
            await response.prepare(request)
            await response.write(b": soon\n\n" if body.get("stream") else b'{"id": ')
            request.transport.abort()
            return response
        others = {"garbage": "<html>not JSON</html>", "null": "null", "nothing": ""}
        others |= {"error_body": '{"error": {"message": "CUDA out of memory", "code": 500}}'}
        if fault not in others:
            return None
        kind = "text/plain" if fault == "garbage" else "application/json"
        return web.Response(text=others[fault], content_type=kind)

    async def _stream(self, request: web.Request, body: Json, fault: Any) -> web.StreamResponse:
        self._check_chat(body)
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

    async def _write(self, response: web.StreamResponse, chunk: Json) -> None:
        await response.write(b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n")

    async def _wait(self) -> None:
        if self.held is not None:
            await self.held.wait()

    async def kill(self) -> None:
        """As when its process is killed: no connection is taken, those that there are break."""
        assert self.runner is not None and self.runner.server is not None
        for site in self.runner.sites:
            await site.stop()
        for connection in self.runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()

    @asynccontextmanager
    async def listening(self, port: int = 0) -> AsyncIterator[Any]:
        """It listens; `url` is its address."""
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self.handle)
        async with serving_aiohttp(app, port, handler_cancellation=True) as self.runner:
            self.url = self.runner.url
            yield self


def fake_vllm(port: int = 0, **how: Any) -> contextlib.AbstractAsyncContextManager[FakeVllm]:
    return FakeVllm(**how).listening(port)


def in_thread(fake: Any) -> contextlib.AbstractContextManager[Any]:
    """`fake` listens, beside tests that block."""
    return in_a_thread(fake.listening)


class ScaleOut(FakeVllm):
    """One with all endpoints for tokens of a real vocabulary, in this process: an Engine.

    `requests` are paths and bodies here, `paths` the last parts of those paths.
    """

    kind = "openai"
    exact = True

    def __init__(
        self,
        format: ChatFormat,
        *texts: str,
        reasons: bool = False,
        spoil: Callable[[str, Json], object] | None = None,
    ) -> None:
        super().__init__(texts, Words(format), can=ALL, reasons=reasons)
        self.spoil = spoil or self.spoil
        self.rollouts: set[str] = set()
        self.seconds: list[float] = []

    async def __aenter__(self) -> ScaleOut:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def model_name(self) -> str:
        return "tiny"

    async def get(self, path: str) -> Json:
        raise _refused(404, "There is nothing to get.")

    async def health(self) -> list[ReplicaHealth]:
        return []

    def replicas(self) -> list[ReplicaHealth]:
        return []

    async def post(self, request: EngineRequest) -> Json:
        return _decoded(self.answered(request.path, self._sent(request)), request.form)

    @asynccontextmanager
    async def stream(self, request: EngineRequest) -> AsyncIterator[AsyncIterator[Json]]:
        answer = self.made(request.path, self._sent(request))

        async def parts() -> AsyncIterator[Json]:
            for chunk in self.parts(request.path, answer):
                yield _decoded(chunk, request.form)

        yield parts()

    def _sent(self, request: EngineRequest) -> Json:
        sent: Json = orjson.loads(orjson.dumps(request.body))
        self.paths.append(request.path.rpartition("/")[2])
        self.requests.append((request.path, sent))
        self.rollouts.add(request.rollout_id)
        self.seconds.append(request.timeout_seconds)
        return sent


def _refused(status: int, message: str) -> EngineRefused:
    return EngineRefused(message, status=status)


def _decoded(answer: Json, form: type | None) -> Json:
    """Returns `answer` as it comes over the wire, whatever numbers and texts are in it."""
    return Decoder("").decode(json.dumps(answer).encode(), form)


def _parts(choice: Json) -> Iterator[Json]:
    """A choice in parts of one token; the last has the text, and how it ended."""
    logprobs = choice.get("logprobs")
    last = len(choice["token_ids"]) - 1
    for place, token in enumerate(choice["token_ids"]):
        part = {"index": choice["index"], "text": "", "token_ids": [token]}
        part |= {"finish_reason": None, "stop_reason": None, "logprobs": None}
        if logprobs is not None:
            part["logprobs"] = {name: [values[place]] for name, values in logprobs.items()}
        if place == 0 and "prompt_token_ids" in choice:
            part["prompt_token_ids"] = choice["prompt_token_ids"]
        if place == last:
            ends = ("text", "finish_reason", "stop_reason", "weight_versions")
            part |= {name: choice[name] for name in ends if name in choice}
        yield part


def _as_completion(content: list[Json]) -> Json:
    return {
        "tokens": [entry["token"] for entry in content],
        "token_logprobs": [entry["logprob"] for entry in content],
        "top_logprobs": [
            {top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in content
        ],
    }
