"""An agent's request to the model, whatever dialect it used.

The common form is OpenAI's chat API: every dialect is translated to it, and every answer from it.
"""

from __future__ import annotations

from typing import Any

import msgspec
from envserver_records.records import Dialect, Message


class ModelRequest(msgspec.Struct, kw_only=True):
    """One request of an agent.

    Args:
        dialect: the API that the agent used.
        body: the fields of the request body that the dialect knows, as received.
        messages, tools: in OpenAI's chat format; no messages for a text completion.
        prompt: for a text completion its text, its token ids, or a list of either; else None.
        fields: further fields for the engine, under their names in its chat API: stop, seed, n,
            tool_choice, response_format, top_logprobs, ...
        choices: number of answers.
        wanted_tokens: the agent's own limit per choice, or None.
        tokens_field: the name of that limit in the engine's request.
        stream: whether the agent wants a stream.
        unchecked: whether `fields` hold some that the run passes on unchecked.
        ignored: names of the agent's fields that have no effect here.
        strict_dropped: whether `tools` were strict (see `body.without_strict`).
        may_be_side: see `retries.SideCalls`.
        wants_*: the agent's options on what its answer shows.
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
    unchecked: bool = False
    ignored: list[str] = msgspec.field(default_factory=list)
    strict_dropped: bool = False
    may_be_side: bool = False
