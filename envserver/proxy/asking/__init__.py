"""Asking an engine, by the best way that it has, in one form: OpenAI's chat with vLLM's ids.

One module for each way: `tokens` (render, generate, derender), `completions` (continue ids), `chat`
(the engine does all); `texts` for agents that complete text themselves. In flow a chat-shaped body
and, where a call continues an earlier one, the ids of its prompt; out flow an answer or chunks.
"""

from __future__ import annotations

from ...models.engine import Engine
from ...models.upstream import Upstream
from ...tokens.chat_format import ChatFormat
from .base import Answer, Asker, Body, Prompt
from .chat import ChatAsker
from .completions import CompletionsAsker
from .texts import stream_text, whole_text
from .tokens import TokensAsker

__all__ = ["Answer", "Asker", "Body", "Prompt", "asker", "stream_text", "whole_text"]


def asker(engine: Engine, upstream: Upstream, format: ChatFormat | None) -> Asker:
    """The way in which `engine` is asked.

    Args:
        upstream: what is known of the engine.
        format: the model's template and tokenizer; without it a text cannot be read, so that an
            engine that only continues ids is asked through chat.
    """
    if upstream.mode == "tokens":
        return TokensAsker(engine, upstream)
    if upstream.mode == "completions" and format is not None:
        return CompletionsAsker(engine, upstream, format)
    return ChatAsker(engine)
