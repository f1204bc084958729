"""What a chat answer says, whole or in chunks, for the dialects that tell it in other words.

Pure. The parts of an answer are told in one order: reasoning, text, tool calls.
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
    """Some of the reasoning or of the text of an answer; never empty."""

    kind: Literal["reasoning", "text"]
    text: str


class ToolCall(NamedTuple):
    """A whole tool call; `arguments` as the engine gave them, JSON as a rule."""

    id: str
    name: str
    arguments: str


class AnswerEnd(msgspec.Struct):
    """How an answer ended, as far as it is known."""

    finish_reason: str | None = None
    stop_reason: int | str | None = None
    usage: dict[str, Any] = msgspec.field(default_factory=dict)

    def take(self, answer: dict[str, Any]) -> None:
        """Takes over what a whole answer or a chunk tells of it."""
        choice = choice_of(answer)
        if choice.get("finish_reason") is not None:
            self.finish_reason = choice["finish_reason"]
        if choice.get("stop_reason") is not None:
            self.stop_reason = choice["stop_reason"]
        if isinstance(answer.get("usage"), dict):
            self.usage = answer["usage"]

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it."""
        return self.stop_reason if isinstance(self.stop_reason, str) else None

    def tokens(self, name: str) -> int:
        """The engine's own count: `prompt_tokens`, `completion_tokens`; 0 without one."""
        return self.usage.get(name) or 0

    def detail(self, name: str, detail: str) -> int:
        """A count of `prompt_tokens_details` or `completion_tokens_details`; 0 without one."""
        return (self.usage.get(name) or {}).get(detail) or 0


def ending_of(answer: dict[str, Any]) -> AnswerEnd:
    """How a whole answer ended."""
    ending = AnswerEnd()
    ending.take(answer)
    return ending


def choice_of(answer: dict[str, Any]) -> dict[str, Any]:
    """The only choice of a whole answer or of a chunk; empty in a chunk without one."""
    choices = answer.get("choices") or [{}]
    choice: dict[str, Any] = choices[0]
    return choice


def parts_of(message: dict[str, Any]) -> Iterator[TextPart | ToolCall]:
    """What a whole message, or the delta of a chunk, says."""
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
    """An id that nothing else has."""
    return f"{prefix}_{uuid.uuid4().hex}"


def named_event(data: dict[str, Any]) -> bytes:
    """`data` as one server-sent event under the name in its field `type`."""
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), orjson.dumps(data))
