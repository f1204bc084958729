"""What an agent asks of the model, whatever the dialect it asked in.

The common form is OpenAI's chat: every dialect is read into it, and every answer is told from it.
"""

from __future__ import annotations

from typing import Any

import msgspec
from envserver_records.records import Dialect, Message


class ModelRequest(msgspec.Struct, kw_only=True):
    """One request of an agent.

    Args:
        dialect: the API in which it came.
        request: the decoded body as it came.
        messages, tools: in OpenAI's chat shape; no messages for a text completion.
        prompt: the text, the ids, or a list of either, of a text completion; else None.
        fields: what else the engine is to be sent, in the names of its chat API: stop, seed, n,
            tool_choice, response_format, top_logprobs, ...
        choices: how many answers.
        wanted_tokens: the agent's own limit per choice, None without one.
        tokens_field: the name under which the engine is sent that limit.
        stream: the agent wants a stream.
        wants_*: what the agent asked for and may therefore see.
    """

    dialect: Dialect
    body: dict[str, Any]
    messages: list[Message]
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    prompt: Any = None
    fields: dict[str, Any] = msgspec.field(default_factory=dict)
    choices: int = 1
    wanted_tokens: int | None = None
    tokens_field: str = "max_tokens"
    stream: bool = False
    wants_usage: bool = True
    wants_logprobs: bool = False
    wants_token_ids: bool = False
    wants_reasoning: bool = True
