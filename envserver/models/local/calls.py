"""Calls of tools in what a model said, in the format that its own chat template writes them in."""

from __future__ import annotations

from typing import Any

from .bodies import ChatBody
from .text import Text


class CallReader:
    """Reads calls; `known`: whether the model's format is."""

    def __init__(self, text: Text) -> None:
        self.known = False

    def free(self, body: ChatBody) -> bool:
        """Whether the model may call a tool in answer to `body`, and would be understood."""
        return self.known and bool(body.tools) and body.tool_choice in (None, "auto")

    def read(self, text: str, body: ChatBody) -> tuple[str | None, list[dict[str, Any]]]:
        """The content and the calls in a text."""
        return text, []
