"""The APIs in which agents ask: each reads requests into an Ask, and tells answers in its own form.

Pure. Answers come in OpenAI's chat form, whole or as chunks, with nothing in them that the agent
did not ask for.
"""

from __future__ import annotations

from .base import DialectAdapter, EventWriter, Memory
from .chat import ChatDialect
from .completions import CompletionsDialect
from .messages import MessagesDialect
from .responses import ResponsesDialect

__all__ = ["DIALECTS", "DialectAdapter", "EventWriter", "Memory"]

DIALECTS: dict[str, DialectAdapter] = {
    "v1/chat/completions": ChatDialect(),
    "v1/completions": CompletionsDialect(),
    "v1/responses": ResponsesDialect(),
    "v1/messages": MessagesDialect(),
}
"""By path, as it stands behind the key of an attempt."""
