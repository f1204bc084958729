"""Client for vLLM's token endpoints: render, generate, derender.

A call whose prompt the engine renders is rendered first; a continued call brings its ids.
Generating returns ids, logprobs, text, and which weights sampled which tokens. If the text may hold
tool calls or reasoning, derendering returns what the engine's own parsers find in it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ...models.engine import Engine
from ...models.probe import ProbeResult
from .base import ChatAnswer, ChatBody, EngineSession, Prompt, has_media, has_tools
from .chat import ChatClient, not_streamed
from .derendering import derendered
from .generated import GeneratedAnswer, chunks_of
from .render_cache import RenderCache, check_rendered, with_prompt

RENDER = "/v1/chat/completions/render"
GENERATE = "/inference/v1/generate"

_CHAT_ONLY = (
    "logprob_token_ids",
    "return_tokens_as_token_ids",
    "return_prompt_text",
    "echo",
    "add_special_tokens",
)
"""Fields whose effect on answers or prompts only the chat endpoint has."""


class TokensClient:
    """See EngineClient."""

    def __init__(self, engine: Engine, probe_result: ProbeResult) -> None:
        self._engine = engine
        self._reasons = probe_result.reasoning_parser
        self._chat = ChatClient(engine)
        self._cache = RenderCache()

    def can_continue(self, body: ChatBody) -> str | None:
        """See EngineClient."""
        return _chat_only(body)

    def streams(self, body: ChatBody, prompt: Prompt) -> bool:
        """See EngineClient. Derendering a stream would take quadratic time."""
        if _chat_only(body):
            return self._chat.streams(body, prompt)
        return not self._is_parsed(body)

    async def whole(
        self, body: ChatBody, prompt: Prompt, *, rollout_id: str, timeout_seconds: float
    ) -> ChatAnswer:
        """See EngineClient."""
        if _chat_only(body):
            return await self._chat.whole(
                body, prompt, rollout_id=rollout_id, timeout_seconds=timeout_seconds
            )
        body = not_streamed(body)
        session = EngineSession(self._engine, rollout_id, timeout_seconds)
        request = await self._request(session, body, prompt)
        answer = await session.post(GENERATE, request)
        generated = GeneratedAnswer(answer, body, request["token_ids"])
        if self._is_parsed(body):
            messages = await derendered(
                session, body, request, generated.choices, reasons=self._reasons
            )
            return generated.told(messages)
        texts = [choice["text"] for choice in generated.choices]
        return generated.told([{"role": "assistant", "content": text} for text in texts])

    @asynccontextmanager
    async def stream(
        self, body: ChatBody, prompt: Prompt, *, rollout_id: str, timeout_seconds: float
    ) -> AsyncIterator[AsyncIterator[ChatAnswer]]:
        """See EngineClient."""
        if _chat_only(body):
            async with self._chat.stream(
                body, prompt, rollout_id=rollout_id, timeout_seconds=timeout_seconds
            ) as chunks:
                yield chunks
            return
        body = not_streamed(body)
        session = EngineSession(self._engine, rollout_id, timeout_seconds)
        request = await self._request(session, body, prompt)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async with session.stream(GENERATE, {**request, **options}) as chunks:
            yield chunks_of(chunks, body, request["token_ids"], int(time.time()))

    def _is_parsed(self, body: ChatBody) -> bool:
        return has_tools(body) or self._reasons

    async def _request(self, session: EngineSession, body: ChatBody, prompt: Prompt) -> ChatBody:
        """Returns the request to generate: for text, with the prompt echoed."""
        request = None if prompt.ids is None else self._cache.request(body, prompt.ids)
        if request is None:
            rendered = await session.post(RENDER, body)
            check_rendered(rendered)
            self._cache.learn(body, rendered)
            # vLLM omits a limit of 16, its default, from what it renders, and then applies none.
            ids = rendered["token_ids"] if prompt.ids is None else prompt.ids
            request = with_prompt(rendered, body, ids)
        return {**request, "output_mode": "text", "return_token_ids": True}


def _chat_only(body: ChatBody) -> str | None:
    """Returns why `body` needs the chat endpoint, or None if it does not."""
    if has_media(body):
        return "multimodal"
    return next((f"field_{name}" for name in _CHAT_ONLY if body.get(name)), None)
