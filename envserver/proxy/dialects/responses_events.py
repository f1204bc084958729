"""Converts a streamed chat answer to the events of OpenAI's responses API. Pure."""

from __future__ import annotations

from typing import Any

from envserver_records.errors import EnvserverError
from envserver_records.http_errors import CONTEXT_IS_FULL

from ..context_length import is_context_limit
from ..model_request import ModelRequest
from .answers import AnswerEnd, TextPart, ToolCall, choice_of, named_event, parts_of
from .base import Memory
from .responses_answer import Head, Item, Status, logprobs_of, status_of
from .responses_items import Event, OpenCall, OpenItem, OpenReasoning, OpenText
from .responses_memory import remember


class ResponsesWriter:
    """See EventWriter. At most one item is open at a time; the last stays open until the end."""

    def __init__(self, request: ModelRequest, memory: Memory) -> None:
        self._request = request
        self._memory = memory
        self._head: Head | None = None
        self._events = 0
        self._items: list[Item] = []
        self._open: OpenItem | None = None
        self._logprobs: list[Any] = []
        self._said: list[TextPart | ToolCall] = []
        self._ending = AnswerEnd()

    def begin(self) -> bytes:
        """See EventWriter. The first events need the first chunk."""
        return b""

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        _, events = self._begun(chunk)
        self._ending.take(chunk)
        choice = choice_of(chunk)
        self._logprobs += logprobs_of(choice)
        for part in parts_of(choice.get("delta") or {}):
            self._said.append(part)
            events += self._call(part) if isinstance(part, ToolCall) else self._text(part)
        return events

    def end(self) -> bytes:
        head, events = self._begun({})
        if self._open is None:
            events += self._opened(OpenText(self._logprobs))
        status = status_of(self._ending)
        events += self._closed(status)
        response = head.response(status, self._items, self._ending)
        remember(self._memory, self._request, response, self._said)
        return events + self._tell({"type": f"response.{status}", "response": response})

    def fail(self, error: EnvserverError) -> bytes:
        head, events = self._begun({})
        events += self._closed("incomplete")
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        if is_context_limit(error):
            code = CONTEXT_IS_FULL
        said = {"code": code, "message": str(error)}
        response = head.response("failed", self._items, error=said)
        return events + self._tell({"type": "response.failed", "response": response})

    def _begun(self, chunk: dict[str, Any]) -> tuple[Head, bytes]:
        """Returns the response's head, with its first events if it has just begun."""
        if self._head is not None:
            return self._head, b""
        self._head = Head(self._request, chunk)
        response = self._head.response("in_progress", [])
        kinds = ("response.created", "response.in_progress")
        return self._head, self._tell(*({"type": kind, "response": response} for kind in kinds))

    def _text(self, text_part: TextPart) -> bytes:
        events = b""
        growing = self._open
        wanted = OpenReasoning if text_part.kind == "reasoning" else OpenText
        if not isinstance(growing, wanted):
            growing = OpenReasoning() if wanted is OpenReasoning else OpenText(self._logprobs)
            events = self._closed("completed") + self._opened(growing)
        return events + self._tell_of_item(growing.grow(text_part.text))

    def _call(self, call: ToolCall) -> bytes:
        return self._closed("completed") + self._opened(OpenCall(call, self._request))

    def _opened(self, item: OpenItem) -> bytes:
        self._open = item
        return self._tell_of_item(*item.begin())

    def _closed(self, status: Status) -> bytes:
        if self._open is None:
            return b""
        last = list(self._open.end(status))
        events = self._tell_of_item(*last)
        self._items.append(last[-1]["item"])
        self._open = None
        return events

    def _tell_of_item(self, *events: Event) -> bytes:
        """Numbers events of the item that comes after those in `_items`."""
        index = len(self._items)
        return self._tell(*(event | {"output_index": index} for event in events))

    def _tell(self, *events: Event) -> bytes:
        first = self._events
        self._events += len(events)
        numbered = (e | {"sequence_number": first + n} for n, e in enumerate(events))
        return b"".join(named_event(event) for event in numbered)
