"""Anthropic's messages API.

messages_request    fields of a request -> fields of the chat API
messages_input      turns -> chat messages
messages_answer     a whole chat answer -> the message object
messages_events     a streamed one -> events
    messages_arguments  the arguments of tool calls, in both directions
    messages_errors     errors

Reasoning is shown to agents that ask for it, without a signature.
"""

from __future__ import annotations

from typing import Any

from envserver_records.errors import EnvserverError
from envserver_records.records import Dialect

from ..model_request import ModelRequest
from .base import Memory
from .messages_answer import message_of
from .messages_arguments import Arguments
from .messages_errors import error_of
from .messages_events import MessagesWriter
from .messages_input import messages_of
from .messages_request import fields_of, refuse_impossible, tools_of, wants_thinking
from .reading import bad, boolean, count
from .tables import MESSAGES


class MessagesDialect:
    """See DialectAdapter."""

    name: Dialect = "messages"
    table = MESSAGES

    def read(self, body: dict[str, Any], memory: Memory) -> ModelRequest:
        refuse_impossible(body)
        wanted_tokens = count(body, "max_tokens")
        if wanted_tokens is None:
            raise bad("max_tokens", "is missing")
        tools = tools_of(body)
        messages = messages_of(body, Arguments(memory))
        return ModelRequest(
            dialect="messages",
            body=body,
            messages=messages,
            tools=tools,
            fields=fields_of(body, tools, messages),
            wanted_tokens=wanted_tokens,
            stream=bool(boolean(body, "stream")),
            wants_reasoning=wants_thinking(body),
        )

    def whole(
        self, request: ModelRequest, answer: dict[str, Any], memory: Memory
    ) -> dict[str, Any]:
        return message_of(request, answer, Arguments(memory))

    def writer(self, request: ModelRequest, memory: Memory) -> MessagesWriter:
        return MessagesWriter(request, Arguments(memory))

    def error(self, error: EnvserverError) -> dict[str, Any]:
        return error_of(error)
