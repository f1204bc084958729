"""Chat messages as Inspect's, and back.

What holds: `message_of(inspect_message(m, ...))` is `m`. Where Inspect's types cannot hold all of a
message (other keys, the spelling of a call's arguments), the message itself is in its metadata.
"""

from __future__ import annotations

import json
from typing import Any, Final

from envserver_records.records import Message, text_of

WHOLE: Final = "envserver"
"""Key of a message's metadata that holds the message itself."""

_ROLES: Final = {"developer": "system", "function": "tool"}


def inspect_message(message: Message, message_id: str) -> Any:
    """Returns `message` as an `inspect_ai.model.ChatMessage`."""
    from inspect_ai.model import (
        ChatMessageAssistant,
        ChatMessageSystem,
        ChatMessageTool,
        ChatMessageUser,
    )

    role = str(message.get("role"))
    shared: dict[str, Any] = {"id": message_id, "content": _content(message)}
    match _ROLES.get(role, role):
        case "system":
            made: Any = ChatMessageSystem(**shared)
        case "assistant":
            calls = [_call(call, number) for number, call in enumerate(calls_of(message))]
            made = ChatMessageAssistant(**shared, tool_calls=calls or None)
        case "tool":
            made = ChatMessageTool(
                **shared,
                tool_call_id=_text(message.get("tool_call_id")),
                function=_text(message.get("name")),
            )
        case _:
            made = ChatMessageUser(**shared)
    if message_of(made) != message:
        made.metadata = {WHOLE: message}
    return made


def message_of(made: Any) -> Message:
    """Returns an Inspect message as a chat message; `made` may be another program's."""
    if made.metadata and isinstance(made.metadata.get(WHOLE), dict):
        return dict(made.metadata[WHOLE])
    message: Message = {"role": made.role}
    if made.role == "tool":
        message["tool_call_id"] = made.tool_call_id or ""
    if isinstance(made.content, str):
        message["content"] = made.content
    else:
        thoughts = [part.reasoning for part in made.content if part.type == "reasoning"]
        rest = [part for part in made.content if part.type != "reasoning"]
        only_text = len(rest) == 1 and rest[0].type == "text"
        message["content"] = rest[0].text if only_text else [_part_of(part) for part in rest]
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
    if made.role == "assistant" and made.tool_calls:
        message["tool_calls"] = [_call_of(call) for call in made.tool_calls]
    if made.role == "tool" and made.function:
        message["name"] = made.function
    return message


def calls_of(message: Message) -> list[dict[str, Any]]:
    """Returns the tool calls of a message that are objects."""
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def arguments_of(call: dict[str, Any]) -> tuple[str, dict[str, Any], str | None]:
    """Returns a call's function, its arguments, and why they cannot be read."""
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments")
    problem = None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            problem = f"The arguments are not JSON: {error}"
    if not isinstance(arguments, dict):
        arguments = {} if arguments is None else {"arguments": arguments}
    return str(function.get("name") or "unnamed"), arguments, problem


def _content(message: Message) -> Any:
    from inspect_ai.model import ContentReasoning, ContentText

    content, thoughts = message.get("content"), message.get("reasoning_content")
    if isinstance(content, list):
        parts = [_part(part) for part in content]
    elif thoughts and isinstance(thoughts, str):
        parts = [ContentText(text=text_of(message))]
    else:
        return text_of(message)
    if thoughts and isinstance(thoughts, str):
        parts.insert(0, ContentReasoning(reasoning=thoughts))
    return parts


def _part(part: Any) -> Any:
    from inspect_ai.model import ContentData, ContentImage, ContentText

    if isinstance(part, dict):
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            return ContentText(text=part["text"])
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else None
        if isinstance(url, str) and url.startswith("data:"):  # Inspect View loads no other
            return ContentImage(image=url)
        return ContentData(data=part)
    return ContentText(text=str(part))


def _part_of(part: Any) -> Any:
    if part.type == "text":
        return {"type": "text", "text": part.text}
    if part.type == "image":
        return {"type": "image_url", "image_url": {"url": part.image}}
    if part.type == "data":
        return part.data
    return part.model_dump(exclude_none=True)


def _call(call: dict[str, Any], number: int) -> Any:
    from inspect_ai.tool import ToolCall

    name, arguments, problem = arguments_of(call)
    return ToolCall(
        id=_text(call.get("id")) or f"call-{number}",
        function=name,
        arguments=arguments,
        parse_error=problem,
    )


def _call_of(call: Any) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function, "arguments": arguments},
    }


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
