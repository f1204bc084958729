"""The engine over HTTP, with vLLM's paths and response formats.

What always holds: a wrong request gets an OpenAI-style error with HTTP 4xx, and a client that hangs
up frees its place in the batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson
from envserver_records.cancelling import cancel_and_wait
from envserver_records.errors import EngineRefused, NotFoundError, UsageError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from envserver_local.simulated.conversation import DetokenizeBody, read
from envserver_local.simulated.engine import ProgramsOnly

from .answers import CallReader
from .bodies import ChatBody, CompletionBody, GenerateBody, TokenizeBody, refuse_foreign
from .routes_completions import Chat, Completions
from .routes_control import Control
from .routes_tokens import Tokens
from .row_requests import Asking

Json = dict[str, Any]
Answering = Callable[[Request, Any], Awaitable[Response]]

_STATUS_NAMES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}


def local_app(asking: Asking, *, lora: bool) -> Starlette:
    """Makes the ASGI application.

    Args:
        lora: whether adapters may be loaded at run time.
    """
    calls = CallReader(asking.text)
    chat = Chat(asking, calls)
    completions = Completions(asking)
    tokens = Tokens(asking, chat, calls)
    control = Control(asking, lora=lora)

    async def chat_answer(request: Request, body: Any) -> Response:
        asked = read(body, ChatBody)
        if asked.stream:
            return _events(chat.chunks(asked, chat.rows(asked)))
        return await _whole(request, chat.whole(asked))

    async def completion(request: Request, body: Any) -> Response:
        asked = read(body, CompletionBody)
        if asked.stream:
            return _events(completions.chunks(asked, completions.rows(asked)))
        return await _whole(request, completions.whole(asked))

    async def generate(request: Request, body: Any) -> Response:
        asked = read(body, GenerateBody)
        if asked.stream:
            return _events(tokens.chunks(asked, tokens.rows(asked)))
        return await _whole(request, tokens.whole(asked))

    async def render(request: Request, body: Any) -> Response:
        return _json(tokens.render(read(body, ChatBody)))

    async def derender(request: Request, body: Any) -> Response:
        return _json(tokens.derender(body))

    async def tokenize(request: Request, body: Any) -> Response:
        return _json(tokens.tokenize(read(body, TokenizeBody)))

    async def detokenize(request: Request, body: Any) -> Response:
        return _json(tokens.detokenize(read(body, DetokenizeBody)))

    posts: dict[str, Answering] = {
        "/v1/chat/completions": chat_answer,
        "/v1/chat/completions/render": render,
        "/v1/chat/completions/derender": derender,
        "/v1/completions": completion,
        "/inference/v1/generate": generate,
        "/tokenize": tokenize,
        "/detokenize": detokenize,
    }
    return Starlette(
        routes=[
            *(Route(path, _decoding(answer), methods=["POST"]) for path, answer in posts.items()),
            *control.routes(),
        ],
        exception_handlers={
            404: _missing,
            405: _missing,
            EngineRefused: _refused,
            UsageError: _unusable,
        },
        middleware=[Middleware(ProgramsOnly)],
    )


def _decoding(answer: Answering) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            body = orjson.loads(await request.body())
        except orjson.JSONDecodeError as error:
            raise EngineRefused(f"The body is not JSON: {error}.", status=400) from error
        refuse_foreign(body)
        return await answer(request, body)

    return endpoint


async def _whole(request: Request, answer: Awaitable[Json]) -> Response:
    """Returns the answer; cancels the work if the client hangs up first."""
    answering = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return _json(answering.result())
        return Response(status_code=499)
    finally:
        await cancel_and_wait(answering, leaving)


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _events(chunks: AsyncIterator[Json]) -> Response:
    async def lines() -> AsyncIterator[bytes]:
        try:
            async for chunk in chunks:
                yield b"data: " + orjson.dumps(chunk) + b"\n\n"
        except EngineRefused as error:
            yield b"data: " + orjson.dumps(_told(error)) + b"\n\n"
        yield b"data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


def _json(payload: Json) -> Response:
    return Response(orjson.dumps(payload), media_type="application/json")


def _told(error: EngineRefused) -> Json:
    status = int(error.detail.get("status", 400))
    return {
        "error": {
            "message": error.message,
            "type": _STATUS_NAMES.get(status, "BadRequestError"),
            "param": error.detail.get("param"),
            "code": status,
        }
    }


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, EngineRefused)
    payload = _told(error)
    return Response(orjson.dumps(payload), payload["error"]["code"], media_type="application/json")


async def _unusable(request: Request, error: Exception) -> Response:
    status = 404 if isinstance(error, NotFoundError) else 400
    return await _refused(request, EngineRefused(str(error), status=status))


async def _missing(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    words = f"There is no {request.method} {request.url.path}."
    return await _refused(request, EngineRefused(words, status=status))
