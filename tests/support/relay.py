"""An HTTP relay in front of a real engine that writes down what the engine itself said."""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import orjson
from aiohttp import web

from support.beside import beside
from support.serving import serving_aiohttp
from support.speaking import events_of

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_GENERATE = "/inference/v1/generate"
_SAMPLES = (_CHAT, _COMPLETIONS, _GENERATE)
Held = Callable[[dict[str, Any]], None]
"""Changes what is asked of the engine before it gets it."""
_TEMPERATURE = 1.0
"""Of what rollouts ask here; what is asked at another one only finds out what the engine can do."""


class Echo(NamedTuple):
    """One answer of the engine: the ids and logprobs that stand in it.

    Args:
        sent: the ids that it was asked to continue, None where it was to render its prompt.
        prompt_ids: as the engine echoed them.
        completion_ids, logprobs: as it returned them, up to where the asker hung up.
        versions: which weights sampled what, as it told at the end.
    """

    sent: list[int] | None
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    versions: list[dict[str, Any]]


class Forwarder:
    """A server in front of another one, at `url` once it serves."""

    longest_seconds = 300.0
    """For which an answer may last."""

    def __init__(self, server_url: str, **connections: Any) -> None:
        self.url = ""
        self._server_url = server_url
        self._connections = connections

    async def serve(self, started: threading.Event, ended: asyncio.Event) -> None:
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", self._forward)
        connector = aiohttp.TCPConnector(limit=0, **self._connections)
        timeout = aiohttp.ClientTimeout(total=self.longest_seconds)
        async with (
            aiohttp.ClientSession(
                connector=connector, auto_decompress=False, timeout=timeout
            ) as self._http,
            serving_aiohttp(app, handler_cancellation=True) as server,
        ):
            self.url = server.url
            started.set()
            await ended.wait()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        raise NotImplementedError


class Relay(Forwarder, list[Echo]):
    """The answers so far, of what was asked at temperature 1, in the order in which they ended.

    Args:
        at_once: requests that are forwarded at the same time.
        hold: is called with each request for a sample.
    """

    def __init__(self, engine_url: str, at_once: int, hold: Held | None) -> None:
        super().__init__(engine_url, keepalive_timeout=2)  # vLLM's is 5 seconds
        self._turns = asyncio.Semaphore(at_once)
        self._hold = hold

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._forwarded(request)
        except aiohttp.ClientConnectionError as error:  # the engine is away
            return web.Response(status=502, text=str(error))

    async def _forwarded(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if self._hold is not None and request.path in _SAMPLES:
            asked = orjson.loads(body)
            self._hold(asked)
            body = orjson.dumps(asked)
        headers = {"content-type": "application/json"}
        heard = bytearray()
        async with (
            self._turns,
            self._http.request(
                request.method, self._server_url + request.path_qs, data=body, headers=headers
            ) as answer,
        ):
            told = web.StreamResponse(status=answer.status)
            told.content_type = answer.content_type
            if answer.content_length is not None:
                told.content_length = answer.content_length
            streams = answer.content_type == "text/event-stream"
            try:
                await told.prepare(request)
                async for part in answer.content.iter_any():
                    heard += part
                    await told.write(part)
                await told.write_eof()
            except ConnectionResetError:
                pass  # the asker is gone
            finally:
                if request.path in _SAMPLES and answer.status == 200:
                    whole = answer.content.at_eof() and not streams
                    chunks = [orjson.loads(heard)] if whole else events_of(bytes(heard))
                    self._note(request.path, orjson.loads(body), chunks)
        return told

    def _note(self, path: str, asked: dict[str, Any], chunks: Iterable[dict[str, Any]]) -> None:
        if asked.get("sampling_params", asked).get("temperature", _TEMPERATURE) != _TEMPERATURE:
            return
        sent = asked.get({_GENERATE: "token_ids", _COMPLETIONS: "prompt"}.get(path, ""))
        prompt: list[int] = []
        echoes: dict[int, Echo] = {}
        for chunk in chunks:
            prompt = chunk.get("prompt_token_ids") or prompt
            for choice in chunk["choices"]:
                fresh = Echo(None if isinstance(sent, str) else sent, [], [], [], [])
                echo = echoes.setdefault(choice["index"], fresh)
                echo.prompt_ids.extend(choice.get("prompt_token_ids") or [])
                echo.completion_ids.extend(choice.get("token_ids") or [])
                echo.logprobs.extend(_logprobs(choice))
                echo.versions.extend(choice.get("weight_versions") or [])
        for echo in echoes.values():
            self.append(echo if echo.prompt_ids else echo._replace(prompt_ids=prompt))


def sampled(echoes: Iterable[Echo]) -> Counter[tuple[float, float]]:
    """Every token of the answers with its logprob."""
    return Counter(
        (token, float(np.float32(logprob)))
        for echo in echoes
        for token, logprob in zip(echo.completion_ids, echo.logprobs, strict=True)
    )


def trained(groups: Iterable[dict[str, Any]]) -> Counter[tuple[float, float]]:
    """Every trained token of delivered groups with its logprob."""
    return Counter(
        (token, float(np.float32(logprob)))
        for group in groups
        for tokens, masks, logprobs in zip(
            group["tokens"], group["masks"], group["inference_logprobs"], strict=True
        )
        for token, mask, logprob in zip(tokens, masks, logprobs, strict=True)
        if mask != -100
    )


def begins_a_row(echo: Echo, groups: Iterable[dict[str, Any]]) -> bool:
    """Does a row of the groups hold this call as the engine saw it?"""
    seen = echo.prompt_ids + echo.completion_ids
    return any(row[: len(seen)] == seen for group in groups for row in group["tokens"])


def _logprobs(choice: dict[str, Any]) -> list[float]:
    held = choice.get("logprobs") or {}
    if "token_logprobs" in held:
        return held["token_logprobs"] or []
    return [entry["logprob"] for entry in held.get("content") or []]


@contextlib.contextmanager
def relay(
    engine_url: str, *, at_once: int = 10_000, hold: Held | None = None
) -> Iterator[tuple[str, Relay]]:
    """Forwards to `engine_url` (without /v1); yields the relay's address and the growing list.

    Answers that stream are put together from their chunks as they stand, without any of our code.
    It runs in a thread of its own, so that it serves tests that block.
    """
    made = Relay(engine_url, at_once, hold)
    with beside(made.serve):
        yield made.url, made
