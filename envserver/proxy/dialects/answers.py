"""The parts of a chat answer or chunk, for the dialects that write them in another format. Pure.

The parts come in one order: reasoning, text, tool calls.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import msgspec
import orjson

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
    """Yields the parts of a message or of a chunk's delta."""
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
