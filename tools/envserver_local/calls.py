"""Parses tool calls in a model's text, in the format of its chat template."""

from __future__ import annotations

from typing import Any

from envserver_records.errors import EngineRefused
from envserver_records.records import Message

from envserver.models.parsers import FORMATS, Tools, detect_format

from .bodies import ChatBody
from .text import Text


class CallReader:
    """Reads tool calls from text.

    Attributes:
        known: whether the model writes calls in a known format; if not, all of its answer is text,
            as from an engine without a parser.
    """

    def __init__(self, text: Text) -> None:
        def written(messages: list[Message], tools: Tools) -> str | None:
            try:
                return text.prompt_text(messages, tools, {"add_generation_prompt": False})
            except EngineRefused:
                return None

        self._format = detect_format(written)
        self.known = self._format is not None

    def free(self, body: ChatBody) -> bool:
        """Returns whether the model may call a tool, in a format that can be parsed."""
        return self.known and bool(body.tools) and body.tool_choice in (None, "auto")

    def read(self, text: str, body: ChatBody) -> tuple[str | None, list[dict[str, Any]]]:
        """Returns the content and the calls of a text. Malformed calls are returned as text."""
        if self._format is None:
            return text, []
        found = FORMATS[self._format](text, body.tools or [])
        if found is None:
            return text, []
        calls = found.calls[:1] if body.parallel_tool_calls is False else found.calls
        content = found.content if found.content.strip() else None
        return content, [call.message() for call in calls]
