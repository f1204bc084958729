"""The APIs that agents use: each reads requests into a ModelRequest and writes answers. Pure.

Answers come in OpenAI's chat format, whole or as chunks, without what the agent did not ask for.
"""

from __future__ import annotations

from .base import DialectAdapter, EventWriter, Memory
from .chat import ChatDialect, CompletionsDialect
from .messages import MessagesDialect
from .responses import ResponsesDialect

__all__ = ["DIALECTS", "DialectAdapter", "EventWriter", "Memory"]

DIALECTS: dict[str, DialectAdapter] = {
    "v1/chat/completions": ChatDialect(),
    "v1/completions": CompletionsDialect(),
    "v1/responses": ResponsesDialect(),
    "v1/messages": MessagesDialect(),
}
"""Dialects by path, relative to the attempt's address. Add a dialect here (see base.py)."""
