"""Parses tool calls in a model's text, in the format of its chat template."""

from __future__ import annotations

from typing import Any

from envserver_records.errors import EngineRefused
from envserver_records.records import Message

from ..parsers import FORMATS, Tools, detect_format
from .bodies import ChatBody
from .text import Text


class CallReader:
    """
    Attributes:
        known: whether the model writes calls in a format that is known here; if not, what it says
            is text, as from an engine without a parser.
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
        """Whether the model may call a tool in answer to `body`, and would be understood."""
        return self.known and bool(body.tools) and body.tool_choice in (None, "auto")

    def read(self, text: str, body: ChatBody) -> tuple[str | None, list[dict[str, Any]]]:
        """The content and the calls in a text. Calls that are broken are text."""
        if self._format is None:
            return text, []
        found = FORMATS[self._format](text, body.tools or [])
        if found is None:
            return text, []
        calls = found.calls[:1] if body.parallel_tool_calls is False else found.calls
        content = found.content if found.content.strip() else None
        return content, [call.message() for call in calls]
