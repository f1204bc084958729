"""Client for /v1/chat/completions: the engine renders, samples and parses.

Calls cannot be continued by ids this way. It serves engines that offer nothing better, and calls
that only the engine can render.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ...models.engine import Engine
from .base import ChatAnswer, ChatBody, EngineSession, Prompt, has_tools

PATH = "/v1/chat/completions"


class ChatClient:
    """See EngineClient. `prompt.ids` must be None."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def can_continue(self, body: ChatBody) -> str | None:
        return "engine_renders"

    def streams(self, body: ChatBody, prompt: Prompt) -> bool:
        """See EngineClient. With tools, a parsed stream may differ from the whole answer."""
        return not has_tools(body)

    async def whole(
        self,
        body: ChatBody,
        prompt: Prompt,
        *,
        rollout_id: str,
        timeout_seconds: float,
        bare: bool = False,
    ) -> ChatAnswer:
        session = EngineSession(self._engine, rollout_id, timeout_seconds)
        return await session.post(PATH, not_streamed(body))

    @asynccontextmanager
    async def stream(
        self,
        body: ChatBody,
        prompt: Prompt,
        *,
        rollout_id: str,
        timeout_seconds: float,
        bare: bool = False,
    ) -> AsyncIterator[AsyncIterator[ChatAnswer]]:
        session = EngineSession(self._engine, rollout_id, timeout_seconds)
        async with session.stream(PATH, streamed(body)) as chunks:
            yield chunks


def not_streamed(body: ChatBody) -> ChatBody:
    """Returns `body` for a whole answer."""
    return {name: body[name] for name in body if name not in ("stream", "stream_options")}


def streamed(body: ChatBody) -> ChatBody:
    """Returns `body` for a stream that ends with the usage."""
    return {**body, "stream": True, "stream_options": {"include_usage": True}}
