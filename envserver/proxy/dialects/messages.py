"""Anthropic's messages API.

    messages_request    fields of a request -> fields of the chat API
    messages_input      turns -> chat messages
    messages_answer     a whole chat answer -> the message object
    messages_events     a streamed one -> events
    messages_arguments  the arguments of tool calls, there and back
    messages_errors     errors

What the model thinks is shown to agents that ask for it, without a signature.
"""

from __future__ import annotations

from typing import Any

from envserver_records.errors import EnvserverError
from envserver_records.records import Dialect

from ..ask import Ask
from .base import Memory
from .messages_answer import message_of
from .messages_arguments import Arguments
from .messages_errors import error_of
from .messages_events import MessagesWriter
from .messages_input import messages_of
from .messages_request import fields_of, refuse_impossible, tools_of, wants_thinking
from .reading import bad, boolean, count, refuse_inexact


class MessagesApi:
    """See Api."""

    name: Dialect = "messages"

    def read(self, request: dict[str, Any], memory: Memory) -> Ask:
        """See Api."""
        refuse_inexact(request)
        refuse_impossible(request)
        wanted_tokens = count(request, "max_tokens")
        if wanted_tokens is None:
            raise bad("max_tokens", "is missing")
        tools = tools_of(request)
        messages = messages_of(request, Arguments(memory))
        return Ask(
            dialect="messages",
            request=request,
            messages=messages,
            tools=tools,
            fields=fields_of(request, tools, messages),
            wanted_tokens=wanted_tokens,
            stream=bool(boolean(request, "stream")),
            wants_reasoning=wants_thinking(request),
        )

    def whole(self, ask: Ask, answer: dict[str, Any], memory: Memory) -> dict[str, Any]:
        """See Api."""
        return message_of(ask, answer, Arguments(memory))

    def writer(self, ask: Ask, memory: Memory) -> MessagesWriter:
        """See Api."""
        return MessagesWriter(ask, Arguments(memory))

    def error(self, error: EnvserverError) -> dict[str, Any]:
        """See Api."""
        return error_of(error)
