"""Stores an attempt's responses for requests that refer to them.

The conversation up to each response is kept under the response's id, without the instructions,
which hold for one response only; so is the response itself, and each output item under its id. What
the agent asked not to `store` is not kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from envserver_records.records import Message

from ..model_request import ModelRequest
from .answers import TextPart, ToolCall
from .base import Memory
from .conversation import answer_message
from .reading import bad, string

_RESPONSES = "responses"
_ITEMS = "items"
_WHOLE = "whole"


def earlier_messages(memory: Memory, body: dict[str, Any]) -> list[Message]:
    """Returns the conversation that `previous_response_id` names, or [].
    Raises InputError: no such response was stored.
    """
    if body.get("previous_response_id") is None:
        return []
    previous = string(body, "previous_response_id")
    kept: list[Message] | None = memory.get(_RESPONSES, {}).get(previous)
    if kept is None:
        raise bad(
            "previous_response_id",
            f"does not name a stored response of this attempt: {previous[:80]!r}",
        )
    return kept


def find_item(memory: Memory, item_id: str) -> dict[str, Any] | None:
    """Returns the output item with this id, or None."""
    item: dict[str, Any] | None = memory.get(_ITEMS, {}).get(item_id)
    return item


def find_response(memory: Memory, response_id: str) -> dict[str, Any] | None:
    """Returns the response with this id, or None."""
    response: dict[str, Any] | None = memory.get(_WHOLE, {}).get(response_id)
    return response


def remember(
    memory: Memory,
    request: ModelRequest,
    response: dict[str, Any],
    said: Iterable[TextPart | ToolCall],
) -> None:
    """Stores `response` to `request`; `said` is the model's part of it."""
    if request.body.get("store") is False:
        return
    instructed = bool(request.body.get("instructions"))
    messages = [*request.messages[instructed:], _message(list(said))]
    memory.setdefault(_RESPONSES, {})[response["id"]] = messages
    memory.setdefault(_WHOLE, {})[response["id"]] = response
    memory.setdefault(_ITEMS, {}).update({item["id"]: item for item in response["output"]})


def _message(said: list[TextPart | ToolCall]) -> Message:
    text_part = [part for part in said if isinstance(part, TextPart)]
    return answer_message(
        "".join(part.text for part in text_part if part.kind == "reasoning"),
        "".join(part.text for part in text_part if part.kind == "text"),
        [part for part in said if isinstance(part, ToolCall)],
    )
