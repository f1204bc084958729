"""Converts messages and calls between OpenAI's format and tau2-bench's.

A model's output is never trusted: arguments that are not a JSON object stay text, and the world
answers with an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from envserver_tools.calling import StrictDecoder, check_characters

from envserver import Message

from .domains.toolkit import Requestor
from .tasks import TauMessage, has_text


def calls_of(tool_calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A model's tool calls as an episode takes them: `{"id", "name", "arguments"}`."""
    return [_call(call) for call in tool_calls]


def as_openai(message: TauMessage) -> Message:
    """Converts a message to OpenAI's form, with the requestor of a result added.

    `tasks.message_of_row` reads it back unchanged.
    """
    if message["role"] == "tool":
        told = {"role": "tool", "tool_call_id": message["id"], "content": message["content"]}
        return {**told, "requestor": message["requestor"], "error": message["error"]}
    said: Message = {"role": message["role"], "content": message["content"]}
    if message.get("tool_calls"):
        said["tool_calls"] = [_function_call(call) for call in message["tool_calls"]]
    return said


def seen_by(side: Requestor, messages: Sequence[TauMessage]) -> Iterator[Message]:
    """Returns the conversation as one side sees it: itself as the assistant, only its own calls."""
    for message in messages:
        if message["role"] == "tool":
            if message["requestor"] == side:
                yield result_for_model(message)
        elif message["role"] == side:
            yield {**as_openai(message), "role": "assistant"}
        elif has_text(message) and not message.get("tool_calls"):
            yield {"role": "user", "content": message["content"]}


def result_for_model(result: TauMessage) -> Message:
    """Returns a call's result as its caller reads it."""
    return {"role": "tool", "tool_call_id": result["id"], "content": result["content"]}


def assistant_calls(*calls: tuple[str, Mapping[str, Any]]) -> Message:
    """A model's message that calls tools, each by name and arguments."""
    made = [
        _function_call({"id": f"call_{place}", "name": name, "arguments": arguments})
        for place, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    source = function.get("arguments")
    return {
        "id": str(call.get("id") or ""),
        "name": str(function.get("name") or ""),
        "arguments": _arguments(source if isinstance(source, str) else json.dumps(source)),
    }


def _arguments(source: str) -> dict[str, Any] | str:
    try:
        value = json.loads(source or "{}", cls=StrictDecoder)
        check_characters(source, value)
    except (ValueError, RecursionError):
        return source
    return value if isinstance(value, dict) else source


def _function_call(call: Mapping[str, Any]) -> dict[str, Any]:
    # A text that is not an object is written as a JSON string: it is read back as the text it is.
    source = json.dumps(call["arguments"])
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": call["name"], "arguments": source},
    }
