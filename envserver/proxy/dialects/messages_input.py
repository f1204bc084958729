"""Converts the turns of Anthropic's messages API to chat messages. Pure.

A user's turn with tool results becomes their messages, in order, followed by the rest of the turn.
An assistant's turn becomes one message. What chats have no place for (signatures, encrypted
reasoning, cache marks) is left out.
"""

from __future__ import annotations

from typing import Any

from envserver_records.records import Message

from .answers import ToolCall
from .conversation import Conversation, Part, answer_message, image_part, text_part
from .media import data_url
from .messages_arguments import Arguments
from .reading import bad, boolean, mapping, objects, string

_BILLING = "x-anthropic-billing-header"
"""Prefix of a system block that clients send for billing, not for the model."""


def messages_of(body: dict[str, Any], arguments: Arguments) -> list[Message]:
    """Returns the messages in fields `system` and `messages`, without an empty turn at the end.
    Raises InputError: a block is not supported; `place` names it.
    """
    conversation = Conversation()
    if body.get("system") is not None:
        _system(conversation, body, "system", "")
    for index, turn in enumerate(objects(body, "messages", needed=True)):
        place = f"messages[{index}]"
        match turn.get("role"):
            case "user":
                _user(conversation, turn, place)
            case "assistant":
                _assistant(conversation, turn, place, arguments)
            case "system":
                _system(conversation, turn, "content", place)
            case role:
                raise bad(f"{place}.role", f"cannot be {str(role)[:80]!r}")
    messages = conversation.messages()
    if len(messages) > 1 and messages[-1] == answer_message("", "", ()):
        messages.pop()
    if not messages:
        raise bad("messages", "must not be empty")
    return messages


def _system(conversation: Conversation, holder: dict[str, Any], name: str, place: str) -> None:
    texts = [string(b, "text", at) for b, at in _blocks(holder, name, place, ("text",))]
    text = "".join(text for text in texts if not text.startswith(_BILLING))
    if text:
        conversation.system([text_part(text)])


def _user(conversation: Conversation, turn: dict[str, Any], place: str) -> None:
    parts = []
    blocks = _blocks(turn, "content", place)
    for block, at in blocks:
        if block.get("type") == "tool_result":
            conversation.tool(string(block, "tool_use_id", at), _result(block, at))
        else:
            parts.append(_part(block, at))
    if parts:
        conversation.user(parts)
    elif not blocks:
        raise bad(f"{place}.content", "must not be empty")


def _result(block: dict[str, Any], place: str) -> list[Part]:
    """Returns a tool's result; a failure gets the prefix "Error: " unless it begins so itself."""
    given = _blocks(block, "content", place) if block.get("content") is not None else []
    parts = [_part(part, at) for part, at in given]
    if not boolean(block, "is_error", place):
        return parts
    first = parts[0].get("text", "") if parts else ""
    said = str(first).lstrip().lower().startswith("error")
    return parts if said else _behind("Error: ", parts)


def _behind(prefix: str, parts: list[Part]) -> list[Part]:
    if parts and parts[0]["type"] == "text":
        return [text_part(prefix + parts[0]["text"]), *parts[1:]]
    return [text_part(prefix.rstrip()), *parts]


def _assistant(
    conversation: Conversation, turn: dict[str, Any], place: str, arguments: Arguments
) -> None:
    reasoning, texts, calls = "", "", []
    for block, at in _blocks(turn, "content", place):
        match block.get("type"):
            case "thinking":
                reasoning += string(block, "thinking", at)
            case "redacted_thinking":
                continue
            case "text":
                texts += string(block, "text", at)
            case "tool_use":
                calls.append(_call(block, at, arguments))
            case kind:
                raise bad(f"{at}.type", f"{str(kind)[:80]!r} is not supported")
    conversation.assistant(reasoning=reasoning, text=texts, calls=calls)


def _call(block: dict[str, Any], place: str, arguments: Arguments) -> ToolCall:
    call_id = string(block, "id", place)
    given = arguments.given(call_id, mapping(block, "input", place))
    return ToolCall(call_id, string(block, "name", place), given)


def _blocks(
    holder: dict[str, Any], name: str, place: str, kinds: tuple[str, ...] = ()
) -> list[tuple[dict[str, Any], str]]:
    """Returns the blocks in field `name` with their places; a string becomes one block."""
    path = f"{place}.{name}" if place else name
    given = holder.get(name)
    if isinstance(given, str):
        return [({"type": "text", "text": given}, path)]
    if not isinstance(given, list):
        raise bad(path, "must be a text or a list of blocks")
    blocks = [(block, f"{path}[{index}]") for index, block in enumerate(given)]
    for block, at in blocks:
        if not isinstance(block, dict):
            raise bad(at, "must be an object")
        if kinds and block.get("type") not in kinds:
            raise bad(f"{at}.type", f"{str(block.get('type'))[:80]!r} is not supported")
    return blocks


def _part(block: dict[str, Any], place: str) -> Part:
    match block.get("type"):
        case "text":
            return text_part(string(block, "text", place))
        case "image":
            return image_part(_image_url(mapping(block, "source", place), f"{place}.source"))
        case "document":
            return text_part(_document(block, place))
        case kind:
            raise bad(f"{place}.type", f"{str(kind)[:80]!r} is not supported")


def _image_url(source: dict[str, Any], place: str) -> str:
    match source.get("type"):
        case "url":
            return data_url(source.get("url"), "image", f"{place}.url")
        case "base64":
            kind, data = (string(source, name, place) for name in ("media_type", "data"))
            return data_url(f"data:{kind};base64,{data}", "image", place)
        case kind:
            raise bad(f"{place}.type", f"{str(kind)[:80]!r} is not supported")


def _document(block: dict[str, Any], place: str) -> str:
    """Returns a document's title, context and text, line by line."""
    source, at = mapping(block, "source", place), f"{place}.source"
    match source.get("type"):
        case "text":
            text = string(source, "data", at)
        case "content":
            given = _blocks(source, "content", at, ("text",))
            text = "\n".join(string(part, "text", where) for part, where in given)
        case kind:
            raise bad(f"{at}.type", f"{str(kind)[:80]!r} is not supported: only text is")
    heads = [string(block, n, place) for n in ("title", "context") if block.get(n) is not None]
    return "\n".join([*heads, text])
