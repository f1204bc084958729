"""Converts a chat answer to the message object of Anthropic's messages API. Pure."""

from __future__ import annotations

from typing import Any

from ..model_request import ModelRequest
from .answers import AnswerEnd, ToolCall, choice_of, ending_of, new_id, parts_of
from .messages_arguments import Arguments, as_object

Block = dict[str, Any]

_STOPS = {"length": "max_tokens", "content_filter": "refusal"}
"""Stop reasons of answers that ended early, by the engine's finish reason."""
_WHOLE = ("stop", "tool_calls", "function_call")


def message_of(
    request: ModelRequest, answer: dict[str, Any], arguments: Arguments
) -> dict[str, Any]:
    """Returns the message object of a whole answer."""
    content = []
    called = False
    for part in parts_of(choice_of(answer)["message"]):
        if isinstance(part, ToolCall):
            called = True
            arguments.keep(part.id, part.arguments)
            content.append(call_block(part))
        elif part.kind == "reasoning":
            content.append(thinking_block(part.text))
        else:
            content.append(text_block(part.text))
    ending = ending_of(answer)
    message = head_of(request, answer) | {"content": content} | stop_of(ending, called=called)
    return message | {"usage": usage_of(ending)}


def head_of(request: ModelRequest, answer: dict[str, Any]) -> dict[str, Any]:
    """Returns an empty message that answers `request`.

    Args:
        answer: the answer or its first chunk; empty if the engine gave none.
    """
    return {
        "id": new_id("msg"),
        "type": "message",
        "role": "assistant",
        "model": answer.get("model") or str(request.body.get("model") or ""),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "usage": usage_of(AnswerEnd()),
    }


def text_block(text: str) -> Block:
    """Returns a text block."""
    return {"type": "text", "text": text, "citations": None}


def thinking_block(text: str) -> Block:
    """Returns a block of reasoning, unsigned."""
    return {"type": "thinking", "thinking": text, "signature": ""}


def call_block(call: ToolCall) -> Block:
    """Returns a tool call block."""
    value = as_object(call.arguments)
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": value}


def stop_of(ending: AnswerEnd, *, called: bool) -> dict[str, Any]:
    """Returns why the model stopped.

    Any other interruption (such as a halted engine) is reported as `max_tokens`: the agent then
    knows that the answer may be incomplete.

    Args:
        called: whether the model called a tool.
    """
    reason, sequence = _STOPS.get(ending.finish_reason or "", "max_tokens"), None
    if ending.finish_reason in _WHOLE:
        reason = "tool_use" if called else "end_turn"
        if not called and ending.stop_string is not None:
            reason, sequence = "stop_sequence", ending.stop_string
    return {"stop_reason": reason, "stop_sequence": sequence}


def usage_of(ending: AnswerEnd) -> dict[str, Any]:
    """Returns the engine's token counts; cached tokens count as input."""
    return {
        "input_tokens": ending.tokens("prompt_tokens"),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": ending.tokens("completion_tokens"),
    }
