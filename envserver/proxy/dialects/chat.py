"""OpenAI's chat completions, which is also the common form, so there is little to translate."""

from __future__ import annotations

from typing import Any

from envserver_records.errors import EnvserverError
from envserver_records.records import Dialect

from ..asgi import DONE, error_body, event
from ..model_request import ModelRequest
from .base import Memory
from .chat_messages import chat_messages, chat_tool_choice, chat_tools
from .fields import response_format
from .reading import bad, count
from .tables import CHAT

CHECKED = "checked"
"""How many of the messages were in an earlier request of the attempt, and need no check."""


class ChatDialect:
    """See DialectAdapter."""

    name: Dialect = "chat"
    table = CHAT

    def read(self, body: dict[str, Any], memory: Memory) -> ModelRequest:
        messages = chat_messages(body, memory.pop(CHECKED, 0))
        fields, tools = _fields_and_tools(body)
        options = body.get("stream_options")
        wanted = [count(body, name) for name in ("max_completion_tokens", "max_tokens")]
        return ModelRequest(
            dialect="chat",
            body=body,
            messages=messages,
            tools=tools,
            fields=fields,
            choices=count(body, "n") or 1,
            wanted_tokens=min((n for n in wanted if n is not None), default=None),
            tokens_field="max_tokens" if wanted[0] is None else "max_completion_tokens",
            stream=bool(body.get("stream")),
            wants_usage=isinstance(options, dict) and bool(options.get("include_usage")),
            wants_logprobs=bool(body.get("logprobs")),
            wants_token_ids=bool(body.get("return_token_ids")),
            wants_reasoning=body.get("include_reasoning") is not False,
        )

    def whole(
        self, request: ModelRequest, answer: dict[str, Any], memory: Memory
    ) -> dict[str, Any]:
        return answer

    def writer(self, request: ModelRequest, memory: Memory) -> ChatWriter:
        return ChatWriter()

    def error(self, error: EnvserverError) -> dict[str, Any]:
        return error_body(error)


def _fields_and_tools(body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the fields that are sent to the engine, and the tools."""
    fields = {name: value for name, value in body.items() if name in CHAT.engine}
    tools = chat_tools(body)
    if "tool_choice" in fields:
        fields["tool_choice"], tools = chat_tool_choice(fields["tool_choice"], tools)
    if not tools:
        fields.pop("parallel_tool_calls", None)
        if fields.pop("tool_choice", "auto") not in ("auto", "none"):
            raise bad("tool_choice", "needs tools")
    if "response_format" in fields:
        fields["response_format"] = response_format(fields["response_format"], "response_format")
    return fields, tools


class ChatWriter:
    """See EventWriter."""

    def begin(self) -> bytes:
        return b""

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        return event(chunk)

    def end(self) -> bytes:
        return DONE

    def fail(self, error: EnvserverError) -> bytes:
        return event(error_body(error))
