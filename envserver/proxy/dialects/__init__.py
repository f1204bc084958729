"""The APIs in which agents ask: each reads requests into an Ask, and tells answers in its own form.

Pure. Answers come in OpenAI's chat form, whole or as chunks, with nothing in them that the agent
did not ask for.
"""

from __future__ import annotations

from .base import Api, EventWriter, Memory
from .chat import ChatApi
from .completions import CompletionsApi
from .messages import MessagesApi
from .responses import ResponsesApi

__all__ = ["APIS", "Api", "EventWriter", "Memory"]

APIS: dict[str, Api] = {
    "v1/chat/completions": ChatApi(),
    "v1/completions": CompletionsApi(),
    "v1/responses": ResponsesApi(),
    "v1/messages": MessagesApi(),
}
"""By path, as it stands behind the key of an attempt."""
