"""Client for vLLM's token endpoints: render, generate, derender.

A call whose prompt the engine renders is rendered first; a continued call brings its ids.
Generating returns ids, logprobs, text, and which weights sampled which tokens. If the text may hold
tool calls or reasoning, derendering returns what the engine's own parsers find in it.

Renderings are cached: calls that differ only in messages, seed and limit share everything but the
prompt, and the first calls of a group's rollouts mostly differ in nothing but the seed.

Images go along with each request, with one placeholder token for each in the prompt. (vLLM 0.32
expands expanded prompts a second time without an error, and /v1/completions ignores images.)
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import orjson
from envserver_records.errors import EngineGarbage, EngineRefused
from envserver_records.records import Message, Tokens

from ...models.probe import ProbeResult
from ...tokens.images import facts_of_all, folded, folds_to, urls_of
from .base import (
    EXPERTS_START,
    ChatAnswer,
    ChatBody,
    ChatClient,
    EngineSession,
    Ids,
    choices_of,
    dumped,
    has_media,
    has_only_images,
    has_tools,
    max_tokens,
    not_streamed,
    require,
    require_ids,
    streamed,
)
from .generated import (
    BareGenerated,
    BareGeneratedChunk,
    GeneratedAnswer,
    Grids,
    SentPrompt,
    chunks_of,
    image_ranges,
)

# An engine has defaults and rules of its own (its generation config, grammars for tools, needs of a
# tool parser). These are not copied here: /v1/chat/completions/render returns the complete request
# for /inference/v1/generate.

_OF_ONE_CALL = frozenset({"messages", "seed", "max_tokens", "max_completion_tokens", EXPERTS_START})
_OF_ONE_SAMPLE = frozenset({"seed"})
_MOST_FRAMES = 256
_MOST_PROMPTS = 1024
_MOST_TOKENS = 2**18
"""The limit for all cached prompts together: about 10 MB."""
_FRESH_SECONDS = 60.0
"""No prompt is used for longer: a template may write the date."""
_PATIENCE_SECONDS = 1.0
"""A request waits no longer for the rendering of another, whose replica may hang."""


class RenderCache:
    """Rendered requests without their prompts; the least recently used is dropped first."""

    def __init__(self) -> None:
        self._cache: OrderedDict[bytes, dict[str, Any]] = OrderedDict()

    def learn(self, body: ChatBody, rendered: ChatAnswer) -> None:
        if rendered["sampling_params"].get("structured_outputs") is not None:
            # Where a grammar starts to apply depends on the end of the prompt.
            return
        self._cache[_key(body, _OF_ONE_CALL)] = {
            name: rendered[name]
            for name in rendered
            if name not in ("request_id", "token_ids", "features")
        }
        if len(self._cache) > _MOST_FRAMES:
            self._cache.popitem(last=False)

    def request(self, body: ChatBody, ids: Tokens) -> ChatBody | None:
        key = _key(body, _OF_ONE_CALL)
        frame = self._cache.get(key)
        if frame is None:
            return None
        self._cache.move_to_end(key)
        return with_prompt(frame, body, ids)


class RenderedPrompts:
    """Rendered requests with their prompts; the oldest is dropped first."""

    def __init__(self) -> None:
        self._cache: OrderedDict[bytes, _Rendering] = OrderedDict()
        self._tokens = 0

    async def get(self, body: ChatBody, render: Callable[[], Awaitable[ChatAnswer]]) -> ChatAnswer:
        """Returns the checked rendering of `body`; bodies may differ in their seeds only."""
        key = _key(body, _OF_ONE_SAMPLE)
        rendering = self._rendering(key)
        if rendering.answer is not None:
            return rendering.answer
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await rendering.turn.acquire()
        except TimeoutError:
            return await render()
        try:
            if rendering.answer is None:
                rendering.answer = await render()
                self._count(key, rendering)
            return rendering.answer
        finally:
            rendering.turn.release()

    def _rendering(self, key: bytes) -> _Rendering:
        now = time.monotonic()
        while self._cache and next(iter(self._cache.values())).since + _FRESH_SECONDS < now:
            self._drop_oldest()
        if key not in self._cache:
            self._cache[key] = _Rendering(now)
        rendering = self._cache[key]
        if len(self._cache) > _MOST_PROMPTS:
            self._drop_oldest()
        return rendering

    def _count(self, key: bytes, rendering: _Rendering) -> None:
        if self._cache.get(key) is rendering:
            self._tokens += rendering.tokens
        while self._tokens > _MOST_TOKENS:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, rendering = self._cache.popitem(last=False)
        self._tokens -= rendering.tokens


class _Rendering:
    """An answer of /render, once there is one; `turn`: held by the call that asks for it."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.turn = asyncio.Lock()
        self.answer: ChatAnswer | None = None

    @property
    def tokens(self) -> int:
        return len(self.answer["token_ids"]) if self.answer else 0


def with_prompt(rendered: ChatAnswer, body: ChatBody, ids: Tokens | list[int]) -> ChatBody:
    """Returns a rendered request with another prompt, and with the seed, limit and so on of `body`.

    The rendered limit is what the rendered prompt leaves of the context. Without it the engine uses
    what the real prompt leaves.
    """
    sampling = dict(rendered["sampling_params"])
    own = {name: body.get(name) for name in ("seed", EXPERTS_START)}
    for name, value in {**own, "max_tokens": max_tokens(body)}.items():
        sampling.pop(name, None)
        if value is not None:
            sampling[name] = value
    request = {**rendered, "token_ids": ids, "sampling_params": sampling}
    request.pop("request_id", None)
    return request


def _key(body: ChatBody, besides: frozenset[str]) -> bytes:
    shared = {name: body[name] for name in body if name not in besides}
    # Names are not sorted: templates write tools with theirs in the order in which they came.
    return hashlib.blake2b(orjson.dumps(shared), digest_size=16).digest()


DERENDER = "/v1/chat/completions/derender"
TOKENIZE = "/tokenize"

_GENERATED = "The engine's generated answer"
_WHERE = "The engine's derendered answer"
_CUT = "The engine's tokenized text"


async def derendered(
    session: EngineSession,
    body: ChatBody,
    prompt_ids: Any,
    choices: Sequence[dict[str, Any]],
    *,
    reasons: bool,
) -> list[Message]:
    """Returns the messages in `choices`, which the engine generated after `prompt_ids`.

    The endpoint decodes all ids that it is given, but a chat answer's text ends before its end
    token and its stop string, so these are removed first. Sets each choice's `finish_reason` to
    that of a chat answer, which the endpoint leaves out. `reasons`: the engine separates reasoning
    from content. Only the last message is sent again: parsers read tools and options, and the
    prompt's ids (vllm/renderers/online_derenderer.py).
    """
    texts = [await _text_ids(session, body, choice) for choice in choices]
    # The endpoint refuses empty answers; in a chat answer their content is null or empty.
    nothing = None if reasons else ""
    messages: list[Message] = [{"role": "assistant", "content": nothing} for _ in choices]
    if said := [place for place, ids in enumerate(texts) if ids]:
        answer = await session.post(
            DERENDER,
            {
                "model": body.get("model"),
                "chat_request": {**body, "messages": body["messages"][-1:]},
                "generate_response": {
                    "prompt_token_ids": prompt_ids,
                    "choices": [
                        {
                            "index": index,
                            "token_ids": texts[place],
                            "finish_reason": choices[place].get("finish_reason"),
                        }
                        for index, place in enumerate(said)
                    ],
                },
            },
        )
        for place, choice in zip(said, choices_of(answer, len(said), _WHERE), strict=True):
            messages[place] = require(choice, "message", dict, _WHERE)
            if not isinstance(messages[place].get("tool_calls"), list | None):
                raise EngineGarbage(f"{_WHERE} holds tool_calls that are not a list.")
    for choice, message in zip(choices, messages, strict=True):
        choice["finish_reason"] = _finish_reason(body, choice, message)
    return messages


async def _text_ids(session: EngineSession, body: ChatBody, choice: dict[str, Any]) -> list[int]:
    ids = require_ids(choice, "token_ids", _GENERATED)
    if choice.get("finish_reason") != "stop":
        return ids
    if not isinstance(choice.get("stop_reason"), str):
        return ids if body.get("include_stop_str_in_output") else ids[:-1]
    if not choice["text"]:
        return []
    # The text was cut, perhaps within a token, so it is tokenised again.
    text = {"model": body.get("model"), "prompt": choice["text"], "add_special_tokens": False}
    return require_ids(await session.post(TOKENIZE, text), "tokens", _CUT)


def _finish_reason(body: ChatBody, choice: dict[str, Any], message: Message) -> str | None:
    reason: str | None = choice.get("finish_reason")
    wanted = body.get("tool_choice", "auto")
    if not has_tools(body):
        return reason
    if wanted in (None, "auto") and message.get("tool_calls"):
        return "tool_calls"
    return "tool_calls" if wanted == "required" and reason == "stop" else reason


RENDER = "/v1/chat/completions/render"
GENERATE = "/inference/v1/generate"

_RENDERED = "The engine's rendered request"
_CHAT_ONLY = (
    "logprob_token_ids",
    "return_tokens_as_token_ids",
    "return_prompt_text",
    "echo",
    "add_special_tokens",
)
"""Fields whose effect on answers or prompts only the chat endpoint has."""


class TokensClient:
    """`image_token`: the placeholder of an image; None: images go through chat."""

    def __init__(self, probe_result: ProbeResult, image_token: int | None = None) -> None:
        self._image_token = image_token
        self._reasons = probe_result.reasoning_parser
        self._chat = ChatClient()
        self._cache = RenderCache()
        self._prompts = RenderedPrompts()
        self._grids = Grids()

    def can_continue(self, body: ChatBody) -> str | None:
        return self._chat_only(body)

    def streams(self, body: ChatBody, ids: Ids) -> bool:
        """Derendering a stream would take quadratic time."""
        if self._chat_only(body):
            return self._chat.streams(body, ids)
        return not self._is_parsed(body)

    async def whole(
        self, session: EngineSession, body: ChatBody, ids: Ids, *, bare: bool = False
    ) -> ChatAnswer:
        if self._chat_only(body):
            return await self._chat.whole(session, body, ids)
        body = not_streamed(body)
        request, sent = await self._request(session, body, ids)
        form = BareGenerated if bare else None
        answer = await session.post(GENERATE, request, form, sent.echo)
        generated = GeneratedAnswer(answer, body, sent, is_bare=bare)
        if self._is_parsed(body):
            messages = await derendered(
                session, body, generated.prompt_json, generated.choices, reasons=self._reasons
            )
            return generated.with_messages(messages)
        texts = [choice["text"] for choice in generated.choices]
        return generated.with_messages([{"role": "assistant", "content": text} for text in texts])

    @asynccontextmanager
    async def stream(
        self, session: EngineSession, body: ChatBody, ids: Ids, *, bare: bool = False
    ) -> AsyncIterator[AsyncIterator[ChatAnswer]]:
        if self._chat_only(body):
            async with self._chat.stream(session, body, ids) as chunks:
                yield chunks
            return
        body = not_streamed(body)
        request, sent = await self._request(session, body, ids)
        form = BareGeneratedChunk if bare else None
        async with session.stream(GENERATE, streamed(request), form, sent.echo) as chunks:
            yield chunks_of(chunks, body, sent, int(time.time()), is_bare=bare)

    def _is_parsed(self, body: ChatBody) -> bool:
        return has_tools(body) or self._reasons

    async def _request(
        self, session: EngineSession, body: ChatBody, planned: Ids
    ) -> tuple[ChatBody, SentPrompt]:
        urls = urls_of(body.get("messages") or [])
        digests = [image.sha256 for image in await facts_of_all(urls)]
        request = None
        if planned is not None and not self._grids.lack(digests):
            request = self._cache.request(body, planned)
        if request is None:
            rendered = await self._rendered(session, body, digests)
            # vLLM omits a limit of 16, its default, from what it renders, and then applies none.
            ids = self._folded(rendered) if planned is None else planned
            request = with_prompt(rendered, body, ids)
        request = {**request, "output_mode": "text", "return_token_ids": True}
        request.pop("features", None)
        if urls:
            request["content_parts"] = [{"type": "image_url", "url": url} for url in urls]
        ids = request["token_ids"]
        json = dumped(ids)
        request["token_ids"] = orjson.Fragment(json)
        sent = SentPrompt(ids, self._image_token, self._grids.of(digests), json)
        return request, sent

    async def _rendered(
        self, session: EngineSession, body: ChatBody, digests: Sequence[str]
    ) -> ChatAnswer:
        async def render() -> ChatAnswer:
            rendered = await session.post(RENDER, body)
            require_ids(rendered, "token_ids", _RENDERED)
            require(rendered, "sampling_params", dict, _RENDERED)
            self._cache.learn(body, rendered)
            self._grids.learn(digests, rendered)
            return rendered

        # What is rendered of images is large, and of use only once.
        return await (render() if digests else self._prompts.get(body, render))

    def _folded(self, rendered: ChatAnswer) -> list[int]:
        ids: list[int] = rendered["token_ids"]
        features = rendered.get("features")
        if self._image_token is None or not isinstance(features, dict):
            return ids
        ranges = image_ranges(features, _RENDERED)
        if not folds_to(ids, ranges, self._image_token):
            raise EngineGarbage(f"{_RENDERED} has images at other places than it says.")
        return folded(ids, ranges, self._image_token)

    def _chat_only(self, body: ChatBody) -> str | None:
        """Returns why `body` needs the chat endpoint, if so."""
        if has_media(body) and (self._image_token is None or not has_only_images(body)):
            return "multimodal"
        return next((f"field_{name}" for name in _CHAT_ONLY if body.get(name)), None)


_FIELDS = ("model", "messages", "tools", "chat_template_kwargs")
_UNKNOWN = (
    HTTPStatus.NOT_FOUND,
    HTTPStatus.METHOD_NOT_ALLOWED,
    HTTPStatus.UNPROCESSABLE_ENTITY,  # it takes texts only
    HTTPStatus.NOT_IMPLEMENTED,
)


async def tokenized(session: EngineSession, body: ChatBody) -> int | None:
    """Returns the number of tokens of the prompt; None: the engine has no such endpoint."""
    request = {name: body[name] for name in _FIELDS if name in body}
    try:
        answer = await session.post(TOKENIZE, request)
    except EngineRefused as error:
        if error.detail.get("status") in _UNKNOWN:
            return None
        raise
    count: int = require(answer, "count", int, "The engine's count")
    return count
