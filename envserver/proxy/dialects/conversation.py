"""Builds chat messages from the items of other dialects. Pure.

What always holds: the results of tool calls follow each other, and one answer of the model is one
message, so a history reads as the chat that it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from envserver_records.records import Message

from .answers import ToolCall

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
