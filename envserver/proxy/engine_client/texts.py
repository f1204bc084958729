"""Text completions: the agent sends the prompt as text or ids, and no chat is rendered.

Answers and chunks take the form of a chat whose assistant says the text. Each choice keeps the
completion's own `logprobs` and `prompt_token_ids`, since there may be several prompts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from ...models.engine import Engine
from .base import EXPERTS, ChatAnswer, ChatBody, EngineSession, require
from .chat import not_streamed, streamed

PATH = "/v1/completions"

_WHERE = "The engine's completion"
_CHUNK = "A chunk of the engine's completion"
_KEPT = (
    "index",
    "finish_reason",
    "stop_reason",
    "logprobs",
    "token_ids",
    "prompt_token_ids",
    "prompt_logprobs",
    EXPERTS,
)


async def whole_text(
    engine: Engine, body: ChatBody, *, rollout_id: str, timeout_seconds: float
) -> ChatAnswer:
    """Returns the answer to `body`, a complete request for /v1/completions.
    Raises EngineError: as the engine's `post`; EngineGarbage where a choice has no text.
    """
    session = EngineSession(engine, rollout_id, timeout_seconds)
    answer = await session.post(PATH, not_streamed(body))
    choices = []
    for choice in require(answer, "choices", list, _WHERE):
        message = {"role": "assistant", "content": require(choice, "text", str, _WHERE)}
        choices.append({**_kept(choice), "message": message})
    return _with_text(answer, choices)


@asynccontextmanager
async def stream_text(
    engine: Engine, body: ChatBody, *, rollout_id: str, timeout_seconds: float
) -> AsyncIterator[AsyncIterator[ChatAnswer]]:
    """Streams the answer to `body` as chunks.

    Raises:
        EngineError: as the engine's `stream`; EngineGarbage where a chunk's choice has no text.
    """
    session = EngineSession(engine, rollout_id, timeout_seconds)
    async with session.stream(PATH, streamed(body)) as chunks:
        yield _chunks(chunks)


async def _chunks(stream: AsyncIterator[ChatAnswer]) -> AsyncIterator[ChatAnswer]:
    async for chunk in stream:
        choices = []
        for choice in require(chunk, "choices", list, _CHUNK):
            delta = {"content": require(choice, "text", str, _CHUNK)}
            choices.append({**_kept(choice), "delta": delta})
        yield _with_text(chunk, choices)


def _kept(choice: dict[str, Any]) -> dict[str, Any]:
    return {name: choice[name] for name in _KEPT if name in choice}


def _with_text(answer: ChatAnswer, choices: list[dict[str, Any]]) -> ChatAnswer:
    """Returns `answer` with `choices`, and the prompt's ids at the top if there is only one
    prompt."""
    told = {**answer, "choices": choices}
    prompts = [choice.get("prompt_token_ids") for choice in choices]
    if prompts and isinstance(prompts[0], list) and all(ids == prompts[0] for ids in prompts):
        told["prompt_token_ids"] = prompts[0]
    return told
