"""The model as smolagents uses it: turns are sent back as they were sampled.

smolagents rewrites the model's messages before it sends them again. Here a message may carry its
original wire form (`raw`), which is sent instead; so each prompt extends the last one and its
answer, and the proxy records one sequence.
"""

from __future__ import annotations

from typing import Any

from envserver_tools.visible import visible_text
from smolagents.models import (
    ChatMessage,
    ChatMessageToolCall,
    ChatMessageToolCallFunction,
    MessageRole,
    Model,
    TokenUsage,
)

from envserver import Message

from .endpoint import Endpoint

END_OF_PLAN = "<end_plan>"
_ROLES = {MessageRole.SYSTEM: "system", MessageRole.ASSISTANT: "assistant"}
_NOTHING = " "
"""smolagents takes an empty turn for code that does nothing; this is no code to it."""


class ProxyModel(Model):  # type: ignore[misc]  # a class of a library without types
    """smolagents' model. Raises the errors of `Endpoint.turn`."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(model_id=endpoint.model)
        self._endpoint = endpoint

    def generate(self, messages: list[ChatMessage], **options: Any) -> ChatMessage:
        """A turn in which it acts; what smolagents would ask for beside it does not count."""
        return self._turn(messages)

    def plan(self, messages: list[ChatMessage]) -> ChatMessage:
        """A turn in which it only plans."""
        return self._turn(messages, stop=[END_OF_PLAN])

    def parse_tool_calls(self, message: ChatMessage) -> ChatMessage:
        """Accepts native calls only."""
        raise ValueError("no tool was called")

    def _turn(self, messages: list[ChatMessage], **fields: Any) -> ChatMessage:
        turn = self._endpoint.turn(merged(messages), **fields)
        return ChatMessage(
            role=MessageRole.ASSISTANT,
            content=visible_text(turn.message.get("content") or "") or _NOTHING,
            tool_calls=[_call(call) for call in turn.calls] or None,
            raw=turn.message,
            token_usage=TokenUsage(*turn.tokens),
        )


def merged(messages: list[ChatMessage]) -> list[Message]:
    """Converts to OpenAI's form and merges consecutive user messages: templates need turns."""
    wire: list[Message] = []
    for message in messages:
        if isinstance(message.raw, dict):
            wire.append(message.raw)
            continue
        role = _ROLES.get(message.role, "user")
        text = _text(message.content)
        if role == "user" and wire and wire[-1]["role"] == "user":
            wire[-1] = {"role": "user", "content": f"{wire[-1]['content']}\n\n{text}"}
        else:
            wire.append({"role": role, "content": text})
    return wire


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content)
    return str(content or "")


def _call(call: dict[str, Any]) -> ChatMessageToolCall:
    function = call["function"]
    made = ChatMessageToolCallFunction(name=function["name"], arguments=function["arguments"])
    return ChatMessageToolCall(function=made, id=call["id"], type="function")
