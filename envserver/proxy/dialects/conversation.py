"""Builds chat messages from the items of other dialects; takes answers apart. Pure.

What always holds: the results of tool calls follow each other, and one answer of the model is one
message, so a history reads as the chat that it was.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import msgspec
import orjson
from envserver_records.records import Message

_REASONING = ("reasoning", "reasoning_content")
_TEXTS = ("content", "refusal")


class TextPart(NamedTuple):
    """A piece of the reasoning or of the text; never empty."""

    kind: Literal["reasoning", "text"]
    text: str


class ToolCall(NamedTuple):
    """A whole tool call; `arguments` as the engine gave them, usually JSON."""

    id: str
    name: str
    arguments: str


class AnswerEnd(msgspec.Struct):
    """How an answer ended, as far as known."""

    finish_reason: str | None = None
    stop_reason: int | str | None = None
    usage: dict[str, Any] = msgspec.field(default_factory=dict)

    def take(self, answer: dict[str, Any]) -> None:
        """Updates it from a whole answer or a chunk."""
        choice = choice_of(answer)
        if choice.get("finish_reason"):  # some engines write "" before the end
            self.finish_reason = choice["finish_reason"]
        if choice.get("stop_reason") is not None:
            self.stop_reason = choice["stop_reason"]
        if isinstance(answer.get("usage"), dict):
            self.usage = answer["usage"]

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer, or None."""
        return self.stop_reason if isinstance(self.stop_reason, str) else None

    def tokens(self, name: str) -> int:
        """Returns the engine's count of `prompt_tokens` or `completion_tokens`; 0 if missing."""
        return self.usage.get(name) or 0

    def detail(self, name: str, detail: str) -> int:
        """Returns a count of `prompt_tokens_details` or `completion_tokens_details`; 0 if
        missing."""
        return (self.usage.get(name) or {}).get(detail) or 0


def ending_of(answer: dict[str, Any]) -> AnswerEnd:
    """Returns how a whole answer ended."""
    ending = AnswerEnd()
    ending.take(answer)
    return ending


def choice_of(answer: dict[str, Any]) -> dict[str, Any]:
    """Returns the only choice of an answer or chunk; {} for a chunk without one."""
    choices = answer.get("choices") or [{}]
    choice: dict[str, Any] = choices[0]
    return choice


def parts_of(message: dict[str, Any]) -> Iterator[TextPart | ToolCall]:
    """Yields the parts of a message or of a chunk's delta: reasoning, text, tool calls."""
    for name in _REASONING:
        if message.get(name):
            yield TextPart("reasoning", message[name])
            break
    for name in _TEXTS:
        if message.get(name):
            yield TextPart("text", message[name])
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        yield ToolCall(
            call.get("id") or new_id("call"),
            function.get("name") or "",
            function.get("arguments") or "",
        )


def new_id(prefix: str) -> str:
    """Returns a unique id."""
    return f"{prefix}_{uuid.uuid4().hex}"


def named_event(data: dict[str, Any]) -> bytes:
    """Formats `data` as one server-sent event, named by its field `type`."""
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), orjson.dumps(data))


Part = dict[str, Any]
"""One part of a chat message's content: text or image_url."""


class Conversation:
    """Collects messages in order; `messages` returns them."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._images: list[Part] = []

    def system(self, parts: list[Part]) -> None:
        """Adds a system message."""
        self._show_images()
        self._messages.append({"role": "system", "content": content_of(parts)})

    def user(self, parts: list[Part]) -> None:
        """Adds a user message, preceded by images that tools returned."""
        parts = [*self._images, *parts]
        self._images = []
        self._messages.append({"role": "user", "content": content_of(parts)})

    def tool(self, call_id: str, parts: list[Part]) -> None:
        """Adds a tool's result.

        It can only hold text in chats: its images follow in a user message.
        """
        texts = [part for part in parts if part["type"] == "text"]
        self._images.extend(part for part in parts if part["type"] != "text")
        content = "\n".join(part["text"] for part in texts)
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def assistant(
        self, *, reasoning: str = "", text: str = "", calls: Iterable[ToolCall] = ()
    ) -> None:
        """Adds one answer of the model."""
        self._show_images()
        self._messages.append(answer_message(reasoning, text, calls))

    def messages(self) -> list[Message]:
        """Returns all messages."""
        self._show_images()
        return self._messages

    def _show_images(self) -> None:
        if self._images:
            self.user([])


def answer_message(reasoning: str, text: str, calls: Iterable[ToolCall]) -> Message:
    """Returns an assistant's chat message."""
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning"] = reasoning
    tool_calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]
    if tool_calls:
        message["content"] = text or None
        message["tool_calls"] = tool_calls
    return message


def content_of(parts: list[Part]) -> str | list[Part]:
    """Returns `parts` as a message's content; a single text part becomes a string."""
    if not parts:
        return ""
    if len(parts) == 1 and parts[0]["type"] == "text":
        text: str = parts[0]["text"]
        return text
    return parts


def text_part(text: str) -> Part:
    """Returns a text part."""
    return {"type": "text", "text": text}


def image_part(url: str, detail: str | None = None) -> Part:
    """Returns an image part; `url` may be a data URL."""
    image = {"url": url} if detail is None else {"url": url, "detail": detail}
    return {"type": "image_url", "image_url": image}
