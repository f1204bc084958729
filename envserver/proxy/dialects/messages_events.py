"""Converts a streamed chat answer to the events of Anthropic's messages API. Pure."""

from __future__ import annotations

from typing import Any

from envserver_records.errors import EnvserverError

from ..model_request import ModelRequest
from .answers import AnswerEnd, TextPart, ToolCall, choice_of, named_event, parts_of
from .messages_answer import (
    Block,
    call_block,
    head_of,
    stop_of,
    text_block,
    thinking_block,
    usage_of,
)
from .messages_arguments import Arguments, as_json
from .messages_errors import error_of


class MessagesWriter:
    """See EventWriter. At most one content block is open at a time."""

    def __init__(self, request: ModelRequest, arguments: Arguments) -> None:
        self._request = request
        self._arguments = arguments
        self._begun = False
        self._blocks = 0
        self._open = ""
        self._called = False
        self._ending = AnswerEnd()

    def begin(self) -> bytes:
        """See EventWriter. The first event needs the first chunk."""
        return b""

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        events = self._beginning(chunk)
        self._ending.take(chunk)
        for part in parts_of(choice_of(chunk).get("delta") or {}):
            events += self._call(part) if isinstance(part, ToolCall) else self._text(part)
        return events

    def end(self) -> bytes:
        events = self._beginning({}) + self._close()
        usage = usage_of(self._ending)
        stop = stop_of(self._ending, called=self._called)
        events += named_event({"type": "message_delta", "delta": stop, "usage": usage})
        return events + named_event({"type": "message_stop"})

    def fail(self, error: EnvserverError) -> bytes:
        return named_event(error_of(error))

    def _beginning(self, chunk: dict[str, Any]) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        message = head_of(self._request, chunk)
        return named_event({"type": "message_start", "message": message}) + _PING

    def _text(self, text_part: TextPart) -> bytes:
        thinks = text_part.kind == "reasoning"
        block = thinking_block("") if thinks else text_block("")
        events = b""
        if self._open != block["type"]:
            events = self._close() + self._start(block)
        if thinks:
            return events + self._delta("thinking_delta", thinking=text_part.text)
        return events + self._delta("text_delta", text=text_part.text)

    def _call(self, call: ToolCall) -> bytes:
        self._called = True
        self._arguments.keep(call.id, call.arguments)
        events = self._close() + self._start(call_block(call) | {"input": {}})
        return events + self._delta("input_json_delta", partial_json=as_json(call.arguments))

    def _start(self, block: Block) -> bytes:
        self._open = block["type"]
        start = {"type": "content_block_start", "index": self._blocks, "content_block": block}
        return named_event(start)

    def _delta(self, kind: str, **more: str) -> bytes:
        delta = {"type": kind, **more}
        return named_event({"type": "content_block_delta", "index": self._blocks, "delta": delta})

    def _close(self) -> bytes:
        """Returns the last events of the open block, if any."""
        if not self._open:
            return b""
        events = b""
        if self._open == "thinking":
            events = self._delta("signature_delta", signature="")
        events += named_event({"type": "content_block_stop", "index": self._blocks})
        self._open = ""
        self._blocks += 1
        return events


_PING = named_event({"type": "ping"})
