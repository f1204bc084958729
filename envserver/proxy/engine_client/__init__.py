"""Clients for an engine: one interface, OpenAI's chat format with vLLM's token ids.

One client for each mode: `tokens` (render, generate, derender), `completions` (continue ids, and
whole text completions), `base.ChatClient` (the engine does everything).
"""

from __future__ import annotations

from ...models.probe import ProbeResult
from ...tokens.chat_format import ChatFormat
from .base import ChatClient, EngineClient, EngineSession
from .completions import CompletionsClient, TextClient
from .tokens import TokensClient

__all__ = ["EngineClient", "EngineSession", "TextClient", "client_for"]


def client_for(probe_result: ProbeResult, format: ChatFormat | None) -> EngineClient:
    """Returns the client for the engine's mode.

    Without a `format`, sampled text cannot be parsed: an engine that only continues ids is then
    used through its chat API.
    """
    if probe_result.mode == "tokens":
        return TokensClient(probe_result, None if format is None else format.image_token)
    if probe_result.mode == "completions" and format is not None:
        return CompletionsClient(probe_result, format)
    return ChatClient()
