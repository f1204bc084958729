"""Asking an engine, by the best way that it has, in one form: OpenAI's chat with vLLM's ids.

One module for each way: `tokens` (render, generate, derender), `completions` (continue ids), `chat`
(the engine does all); `texts` for agents that complete text themselves. In flow a chat-shaped body
and, where a call continues an earlier one, the ids of its prompt; out flow an answer or chunks.
"""

from __future__ import annotations

from ...models.engine import Engine
from ...models.probe import ProbeResult
from ...tokens.chat_format import ChatFormat
from .base import ChatAnswer, ChatBody, EngineClient, Prompt
from .chat import ChatClient
from .completions import CompletionsClient
from .texts import stream_text, whole_text
from .tokens import TokensClient

__all__ = [
    "ChatAnswer",
    "EngineClient",
    "ChatBody",
    "Prompt",
    "client_for",
    "stream_text",
    "whole_text",
]


def client_for(
    engine: Engine, probe_result: ProbeResult, format: ChatFormat | None
) -> EngineClient:
    """The way in which `engine` is asked.

    Args:
        upstream: what is known of the engine.
        format: the model's template and tokenizer; without it a text cannot be read, so that an
            engine that only continues ids is asked through chat.
    """
    if probe_result.mode == "tokens":
        return TokensClient(engine, probe_result)
    if probe_result.mode == "completions" and format is not None:
        return CompletionsClient(engine, probe_result, format)
    return ChatClient(engine)
