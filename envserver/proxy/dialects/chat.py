"""OpenAI's chat completions: the form that everything inside has, so little is to be done."""

from __future__ import annotations

from typing import Any

from envserver_records.errors import EnvserverError
from envserver_records.records import Dialect

from ..asgi import DONE, error_body, event
from ..ask import Ask
from .base import Memory
from .reading import choices, count, mapping, objects, refuse_inexact

_NOT_FIELDS = (
    "model",
    "messages",
    "tools",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "stream_options",
    "logprobs",
    "return_token_ids",
)


class ChatApi:
    """See Api."""

    name: Dialect = "chat"

    def read(self, request: dict[str, Any], memory: Memory) -> Ask:
        """See Api."""
        messages = objects(request, "messages", needed=True)
        tools = objects(request, "tools")
        refuse_inexact(request)
        mapping(request, "chat_template_kwargs")
        options = request.get("stream_options")
        wanted = [count(request, name) for name in ("max_completion_tokens", "max_tokens")]
        return Ask(
            dialect="chat",
            request=request,
            messages=messages,
            tools=tools,
            fields={name: value for name, value in request.items() if name not in _NOT_FIELDS},
            choices=choices(request),
            wanted_tokens=min((n for n in wanted if n is not None), default=None),
            tokens_field="max_tokens" if wanted[0] is None else "max_completion_tokens",
            stream=bool(request.get("stream")),
            wants_usage=isinstance(options, dict) and bool(options.get("include_usage")),
            wants_logprobs=bool(request.get("logprobs")),
            wants_token_ids=bool(request.get("return_token_ids")),
            wants_reasoning=request.get("include_reasoning") is not False,
        )

    def whole(self, ask: Ask, answer: dict[str, Any], memory: Memory) -> dict[str, Any]:
        """See Api."""
        return answer

    def writer(self, ask: Ask, memory: Memory) -> ChatWriter:
        """See Api."""
        return ChatWriter()

    def error(self, error: EnvserverError) -> dict[str, Any]:
        """See Api."""
        return error_body(error)


class ChatWriter:
    """See EventWriter."""

    def begin(self) -> bytes:
        """See EventWriter."""
        return b""

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        """See EventWriter."""
        return event(chunk)

    def end(self) -> bytes:
        """See EventWriter."""
        return DONE

    def fail(self, error: EnvserverError) -> bytes:
        """See EventWriter."""
        return event(error_body(error))
