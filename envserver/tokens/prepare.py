"""Prepares a request's messages and tools for the chat template as vLLM 0.32 does.

The template's text depends on it: which fields there are, their order (some templates print whole
objects), arguments as objects instead of JSON, content as one text or as parts. What is out of the
ordinary is refused: the engine knows better.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from envserver_records.records import Message

from .images import digest_of, is_image, url_of


class Refused(Exception):
    """The prompt cannot be made exactly; the engine renders it, and a new sequence begins.

    Expected, not a failure; `reason` is a counted snake_case word.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""The text field of each kind of part."""
_MEDIA = ("image", "audio", "video", "input_image", "input_audio", "prompt_embeds")
_NOT_TEXT = (*_MEDIA, "uuid", "prompt_cache_breakpoint")
_PART_FIELDS = ("type", "text", "refusal", "thinking", "closed", "name", "data", "file")
"""Fields of text parts that are not handed on to the template; unknown ones are."""
Images = Literal["refused", "shown", "named"]
_WITHOUT_CONTENT = ("assistant", "function")
_BILLING = "x-anthropic-billing-header"
"""A line of Claude Code's that differs in every request; engines drop it from system messages."""
RESERVED = (
    *("messages", "conversation", "conversations", "tools", "chat_template", "tokenize", "padding"),
    *("truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
    "return_assistant_tokens_mask",
)
"""Names of the engine's own arguments, which no request may pass to the template."""


def template_kwargs(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the variables that a chat request gives to the template.

    `add_generation_prompt` is among them if the request turns it off.
    """
    if body.get("continue_final_message"):
        raise Refused("continue_final_message")
    kwargs = dict(body.get("chat_template_kwargs") or {})
    for name in ("add_generation_prompt", "continue_final_message"):
        kwargs.pop(name, None)
    if body.get("chat_template") is not None or not kwargs.keys().isdisjoint(RESERVED):
        raise Refused("template_kwargs")
    if body.get("documents") is not None:
        kwargs["documents"] = body["documents"]
    effort = body.get("reasoning_effort")
    if effort is not None:
        kwargs["reasoning_effort"] = effort
        kwargs.setdefault("enable_thinking", effort != "none")
    if body.get("add_generation_prompt") is False:
        kwargs["add_generation_prompt"] = False
    return kwargs


def with_defaults(defaults: Mapping[str, Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `defaults` under a request's variables; like vLLM, ignores null and "auto"."""
    own = {name: value for name, value in kwargs.items() if value is not None and value != "auto"}
    return {**defaults, **own}


def prepare_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    if not isinstance(tools, list):
        raise Refused("unusual_tool")
    return [_prepare_tool(tool) for tool in tools]


def _prepare_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if (
        not isinstance(function, dict)
        or tool.get("type", "function") != "function"
        or tool.get("defer_loading") is not None
        or function.get("defer_loading") is not None
        or not isinstance(function.get("name"), str)
        or not isinstance(function.get("description"), str | None)
        or not isinstance(function.get("parameters"), dict | None)
        or not isinstance(function.get("strict"), bool | None)
    ):
        raise Refused("unusual_tool")
    known = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        known["strict"] = function["strict"]
    return {"type": "function", "function": known}


def prepare(
    messages: list[Message],
    *,
    parts: bool,
    developer: bool = True,
    images: Images = "refused",
    kept: KeptMessages | None = None,
) -> list[Message]:
    """Returns messages as the template gets them; the given ones are left as they are.

    Args:
        parts: the template reads content as parts (see `ChatTemplate`).
        developer: it knows the role `developer`.
        images: `shown`: as the parts that templates write a placeholder for; `named`: by their
            SHA-256, to tell conversations apart.
        kept: those of the conversation's request before.
    """
    prepared = (kept or KeptMessages()).prepare(messages, parts, images)
    if not developer and any(message["role"] == "developer" for message in prepared):
        return _one_system([_as_system(message) for message in prepared])
    return prepared


class KeptMessages:
    """The prepared messages of a request; the next one's are prepared only where they differ.

    Messages are compared by identity. Threads may use it at the same time.
    """

    def __init__(self) -> None:
        self._kept: tuple[Sequence[Message], list[Message], object] = ((), [], None)
        """As given, as prepared, and how: always of one request."""

    def prepare(self, messages: list[Message], parts: bool, images: Images) -> list[Message]:
        how = (parts, images)
        given, prepared, before = self._kept
        same = same_objects(given, messages) if before == how else 0
        new = [_prepare_message(message, parts, images) for message in messages[same:]]
        result = [*prepared[:same], *new]
        self._kept = messages, result, how
        return result


def same_objects(some: Sequence[Any], others: Sequence[Any]) -> int:
    for at, (item, other) in enumerate(zip(some, others, strict=False)):
        if item is not other:
            return at
    return min(len(some), len(others))


def _prepare_message(message: Message, parts: bool, images: Images) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str):
        raise Refused("unusual_message")
    prepared: Message = {"role": role, "content": _content(message, role, parts, images)}
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls is not None and not isinstance(calls, list):
            raise Refused("unusual_message")
        if calls:
            prepared["tool_calls"] = [_call(call) for call in calls]
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            prepared["reasoning"] = prepared["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in message:
        prepared["tool_call_id"] = message["tool_call_id"]
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            prepared[name] = message[name]
    if role == "developer":
        prepared["tools"] = _developer_tools(message.get("tools"))
    return prepared


def _content(
    message: Message, role: str, parts: bool, images: Images
) -> str | list[dict[str, Any]]:
    content = message.get("content")
    if content is None:
        if role not in _WITHOUT_CONTENT:
            raise Refused("unusual_message")
        content = []
    elif isinstance(content, str):
        if (not parts or role == "tool") and not content.startswith(_BILLING):
            return content
        content = [{"type": "text", "text": content}]
    elif not isinstance(content, list):
        raise Refused("unusual_message")
    read = [text for part in content for text in [_part(part, role, images)] if text is not None]
    if (parts and role != "tool") or (images == "named" and any(map(is_image, read))):
        return read
    if any(map(is_image, read)):
        raise Refused("multimodal")
    # vLLM drops empty parts before it joins the others, but not of a tool where it reads parts.
    return "\n".join(part["text"] for part in read if parts or part["text"])


def _part(part: Any, role: str, images: Images) -> dict[str, Any] | None:
    if not isinstance(part, dict):
        raise Refused("unusual_message")
    kind = part.get("type")
    if images != "refused" and is_image(part) and (url := url_of(part)) is not None:
        named = {"sha256": digest_of(url)} if images == "named" else {}
        return {"type": "image", **named}
    if kind not in _TEXT_PARTS:
        media = isinstance(kind, str) and kind.startswith(_MEDIA)
        raise Refused("multimodal" if media else "unusual_message")
    text = part.get(_TEXT_PARTS[kind])
    if text is None:
        return None
    more = {name: value for name, value in part.items() if name not in _PART_FIELDS}
    if not isinstance(text, str) or any(name.startswith(_NOT_TEXT) for name in more):
        raise Refused("unusual_message")
    if role == "system" and kind == "text" and text.startswith(_BILLING):
        text = text.partition("\n")[2]
        if not text:
            return None
    return {"type": "text", "text": text, **more}


def _call(call: Any) -> dict[str, Any]:
    """Returns a tool call with its arguments as an object; anything else becomes an empty one."""
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(function, dict)
        or call.get("type") != "function"
        or not isinstance(call.get("id"), str)
        or not isinstance(function.get("name"), str)
        or not isinstance(function.get("arguments"), str)
    ):
        raise Refused("unusual_message")
    try:
        arguments = json.loads(function["arguments"]) if function["arguments"] else {}
    except json.JSONDecodeError:
        arguments = {}
    except (ValueError, RecursionError):  # a number or a nesting beyond what Python reads
        raise Refused("unusual_message") from None
    if not isinstance(arguments, dict):
        arguments = {}
    ordered = {"arguments": arguments, "name": function["name"]}
    return {
        "id": call["id"],
        "function": {**ordered, **_without(function, "arguments", "name")},
        "type": "function",
        **_without(call, "id", "function", "type"),
    }


def _developer_tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    try:
        return [
            {
                "function": _first(tool["function"], "name", "description", "parameters", "strict"),
                "type": tool["type"],
                **_without(tool, "function", "type"),
            }
            for tool in tools
        ]
    except (TypeError, KeyError, AttributeError):
        raise Refused("unusual_message") from None


def _as_system(message: Message) -> Message:
    if message["role"] != "developer":
        return message
    return {**_without(message, "tools"), "role": "system"}


def _one_system(messages: list[Message]) -> list[Message]:
    """Returns all system messages as one at the front, unless a single one is there already."""
    system = [message for message in messages if message["role"] == "system"]
    if len(system) == 1 and messages[0] is system[0]:
        return messages
    texts = []
    for message in system:
        content = message["content"]
        if isinstance(content, list):
            if any(map(is_image, content)):
                raise Refused("multimodal")
            content = "\n".join(part["text"] for part in content)
        if content:
            texts.append(content)
    merged = {"role": "system", "content": "\n\n".join(texts)}
    return [merged, *(message for message in messages if message["role"] != "system")]


def _without(value: dict[str, Any], *names: str) -> dict[str, Any]:
    if value.keys() <= {*names}:
        return {}
    return {name: item for name, item in value.items() if name not in names}


def _first(value: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value[name] for name in names if name in value} | _without(value, *names)
