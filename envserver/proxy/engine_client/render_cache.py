"""Caches what vLLM adds to a chat request: its prompt, and everything besides.

An engine has defaults and rules of its own (its generation config, grammars for tools, needs of a
tool parser). These are not copied here: /v1/chat/completions/render returns the complete request
for /inference/v1/generate. For calls that differ only in messages, seed and limit, everything but
the prompt is the same, so a continued call needs no rendering. The first calls of a group's
rollouts mostly differ in nothing but the seed, so only one of them is rendered.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from .base import EXPERTS_START, ChatAnswer, ChatBody, max_tokens, require, require_ids

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
_WHERE = "The engine's rendered request"


class RenderCache:
    """Rendered requests without their prompts; the least recently used is dropped first."""

    def __init__(self) -> None:
        self._cache: OrderedDict[bytes, dict[str, Any]] = OrderedDict()

    def learn(self, body: ChatBody, rendered: ChatAnswer) -> None:
        """Caches `rendered`, the checked rendering of `body`, for all bodies like it."""
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

    def request(self, body: ChatBody, ids: list[int]) -> ChatBody | None:
        """Returns the request for `body` with the prompt `ids`, or None if no such body is
        cached."""
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
        """Returns the checked rendering of `body`: the cached one, else what `render` returns.

        Bodies may differ in their seeds only.
        Raises Exception: what this call's own `render` raises.
        """
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
    """An answer of /render, once there is one; `turn`: who asks for it."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.turn = asyncio.Lock()
        self.answer: ChatAnswer | None = None

    @property
    def tokens(self) -> int:
        return len(self.answer["token_ids"]) if self.answer else 0


def with_prompt(rendered: ChatAnswer, body: ChatBody, ids: list[int]) -> ChatBody:
    """Returns a rendered request with another prompt, and with the seed, limit and so on of `body`.

    The rendered limit is what the rendered prompt leaves of the context. It is removed, so that the
    engine uses what the real prompt leaves.
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


def check_rendered(rendered: ChatAnswer) -> None:
    """Raises EngineGarbage: `rendered` is not a request with a prompt."""
    require_ids(rendered, "token_ids", _WHERE)
    require(rendered, "sampling_params", dict, _WHERE)


def _key(body: ChatBody, besides: frozenset[str]) -> bytes:
    shared = {name: body[name] for name in body if name not in besides}
    # Names are not sorted: templates write tools with theirs in the order in which they came.
    return hashlib.blake2b(orjson.dumps(shared), digest_size=16).digest()
