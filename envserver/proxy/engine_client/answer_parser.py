"""Parses an answer's text into a message, as the engine parses its own answers.

For engines that take a prompt of ids but do not parse the answer.
"""

from __future__ import annotations

import json
from typing import Any

from envserver_records.errors import TemplateRefused
from envserver_records.records import Message, Tokens

from ...models.parsers import FORMATS, ParsedCall, Tools, detect_format
from ...tokens.chat_format import ChatFormat
from ...tokens.prepare import Refused
from .base import ChatAnswer, ChatBody, has_tools

# If the template opened the tag in the prompt, a text without tags is unfinished reasoning; if the
# template closed it there, nothing is reasoning.

OPEN = "<think>"
CLOSE = "</think>"


def parse_reasoning(text: str, prompt_tail: str) -> tuple[str | None, str | None]:
    """Returns the text between `<think>` and `</think>`, and the rest."""
    if prompt_tail.rstrip().endswith(CLOSE):
        return None, text
    before, opened, behind = text.partition(OPEN)
    reasoning, closed, content = (behind if opened else before).partition(CLOSE)
    return reasoning or None, (content or None) if closed else None


_TAIL_TOKENS = 16
"""Last tokens of a prompt: enough to see whether it ends inside or after reasoning."""


class AnswerParser:
    """Parses answers of one model; `reasons`: the engine separates reasoning from content."""

    def __init__(self, format: ChatFormat, *, reasons: bool) -> None:
        self._format = format
        self._reasons = reasons
        self._calls = format_of_calls(format)
        self._differs: str | None = None

    def trouble(self, body: ChatBody) -> str | None:
        """Returns why answers to `body` cannot be parsed, if so."""
        if has_tools(body) and self._calls is None:
            return "tool_format_unknown"
        return self._differs if has_tools(body) or self._reasons else None

    def message(self, text: str, body: ChatBody, prompt_ids: Tokens | list[int]) -> Message:
        content: str | None = text
        message: Message = {"role": "assistant"}
        if self._reasons:
            tail = self._format.decode([*prompt_ids[-_TAIL_TOKENS:]])
            message["reasoning"], content = parse_reasoning(text, tail)
        calls: list[ParsedCall] = []
        if content and self._calls is not None and calls_are_free(body):
            tools = body.get("tools")
            found = FORMATS[self._calls](content, tools if isinstance(tools, list) else [])
            if found is not None:
                calls, content = found.calls, found.content if found.content.strip() else None
        message["content"] = content
        if calls:
            message["tool_calls"] = [call.message() for call in calls]
        return message

    def compare(self, body: ChatBody, answer: ChatAnswer) -> None:
        """Compares this parser's result with the engine's own in a chat answer.

        One difference disables it for good: agents must not see different forms from turn to turn.
        """
        prompt_ids = answer.get("prompt_token_ids")
        if not isinstance(prompt_ids, list) or not (has_tools(body) or self._reasons):
            return
        for choice in answer.get("choices") or []:
            text = self._text(body, choice)
            if text is None or not isinstance(choice.get("message"), dict):
                continue
            if _content_key(self.message(text, body, prompt_ids)) != _content_key(
                choice["message"]
            ):
                self._differs = "parser_differs"

    def _text(self, body: ChatBody, choice: dict[str, Any]) -> str | None:
        """Returns the text that the engine parsed, or None if the ids do not determine it."""
        ids = choice.get("token_ids")
        if not isinstance(ids, list) or isinstance(choice.get("stop_reason"), str):
            return None
        if choice.get("finish_reason") not in ("stop", "tool_calls", "length"):
            return None
        special = self._format.vocabulary.is_special
        ends = isinstance(choice.get("stop_reason"), int) or bool(ids and special(ids[-1]))
        if ends and choice["finish_reason"] != "length":
            # The token that ends a turn is not part of its text.
            ids = ids if body.get("include_stop_str_in_output") else ids[:-1]
        if not keeps_special(body) and any(map(special, ids)):
            return None
        text = self._format.decode(ids)
        return None if "\ufffd" in text else text


def format_of_calls(format: ChatFormat) -> str | None:
    """Returns the name of the format in which `format` writes calls, if it is known."""

    def written(messages: list[Message], tools: Tools) -> str | None:
        try:
            return format.render(messages, tools, {}, generation_prompt=False)
        except (TemplateRefused, Refused):
            return None

    return detect_format(written)


def calls_are_free(body: ChatBody) -> bool:
    return has_tools(body) and body.get("tool_choice", "auto") in (None, "auto")


def keeps_special(body: ChatBody) -> bool:
    """Returns whether the text must keep special tokens: some models mark calls with them."""
    return calls_are_free(body) or body.get("skip_special_tokens") is False


def _content_key(message: Message) -> tuple[Any, ...]:
    """Returns what agents act on, without whitespace around texts."""
    calls = []
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        calls.append((function.get("name"), _value(function.get("arguments"))))
    reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    return (message.get("content") or "").strip(), reasoning.strip(), calls


def _value(arguments: Any) -> Any:
    try:
        return json.loads(arguments)
    except (TypeError, ValueError, RecursionError):
        return arguments
