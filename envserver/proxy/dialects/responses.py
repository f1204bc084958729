"""OpenAI's responses API: answers, streams, and what later requests of the attempt can refer to.

`responses_input` reads requests. Reasoning is shown unchanged as the content of a reasoning item;
nothing is summarised or encrypted.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from envserver_records.errors import EnvserverError
from envserver_records.http_errors import CONTEXT_IS_FULL
from envserver_records.records import Dialect, Message

from ..asgi import is_context_limit
from .base import RESPONSES, DialectAdapter, Memory, ModelRequest, bad
from .conversation import (
    AnswerEnd,
    TextPart,
    ToolCall,
    answer_message,
    choice_of,
    ending_of,
    named_event,
    new_id,
    parts_of,
)
from .responses_input import (
    fields_of,
    messages_of,
    names_of,
    tools_of,
    wants_logprobs,
)

Status = Literal["in_progress", "completed", "incomplete", "failed"]
Item = dict[str, Any]

_ECHOED = (
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "previous_response_id",
    "prompt_cache_key",
    "reasoning",
    "safety_identifier",
    "temperature",
    "top_logprobs",
    "top_p",
    "user",
)
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Reasons for incomplete answers, by the engine's finish reason."""


class Head:
    """The fields of all states of one response; `answer`: the engine's, or its first chunk."""

    def __init__(self, request: ModelRequest, answer: dict[str, Any]) -> None:
        self._request = request
        self.id = new_id("resp")
        self._model = answer.get("model") or str(request.body.get("model") or "")
        self._created = answer.get("created") or int(time.time())

    def response(
        self,
        status: Status,
        output: list[Item],
        ending: AnswerEnd | None = None,
        error: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        body = self._request.body
        reason = None if ending is None else _INCOMPLETE.get(ending.finish_reason or "")
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": reason} if status == "incomplete" else None,
            "model": self._model,
            "output": output,
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "store": body.get("store") is not False,
            "metadata": body.get("metadata") or {},
            "text": {"format": {"type": "text"}} | (body.get("text") or {}),
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "truncation": "disabled",
            "usage": None if ending is None else _usage(ending),
            **{name: body.get(name) for name in _ECHOED},
        }


def status_of(ending: AnswerEnd) -> Literal["completed", "incomplete"]:
    return "completed" if ending.is_whole else "incomplete"


def output_of(request: ModelRequest, answer: dict[str, Any]) -> list[Item]:
    """Returns the items of a whole answer; if it is incomplete, so is the last item."""
    choice = choice_of(answer)
    logprobs = logprobs_of(choice)
    items = []
    for part in parts_of(choice["message"]):
        if isinstance(part, ToolCall):
            items.append(call_item(new_id("fc"), part, request))
        elif part.kind == "reasoning":
            items.append(reasoning_item(new_id("rs"), part.text))
        else:
            items.append(text_item(new_id("msg"), part.text, logprobs))
    if not items:
        items.append(text_item(new_id("msg"), "", logprobs))
    items[-1]["status"] = status_of(ending_of(answer))
    return items


def reasoning_item(item_id: str, text: str) -> Item:
    return {
        "id": item_id,
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "encrypted_content": None,
    }


def text_item(item_id: str, text: str, logprobs: list[Any]) -> Item:
    return {
        "id": item_id,
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}],
    }


def call_item(item_id: str, call: ToolCall, request: ModelRequest) -> Item:
    return {
        "id": item_id,
        "type": "function_call",
        "status": "completed",
        "call_id": call.id,
        **names_of(request.body, call.name),
        "arguments": call.arguments,
    }


def logprobs_of(choice: dict[str, Any]) -> list[Any]:
    """They cover all sampled tokens: an engine does not say which tokens became what."""
    entries = (choice.get("logprobs") or {}).get("content") or []
    return [
        _logprob(entry)
        | {"top_logprobs": [_logprob(top) for top in entry.get("top_logprobs") or []]}
        for entry in entries
    ]


def _logprob(entry: dict[str, Any]) -> dict[str, Any]:
    raw = entry.get("bytes")
    return {
        "token": entry["token"],
        "bytes": list(entry["token"].encode()) if raw is None else raw,
        "logprob": entry["logprob"],
    }


def _usage(ending: AnswerEnd) -> dict[str, Any]:
    read, written = ending.tokens("prompt_tokens"), ending.tokens("completion_tokens")
    return {
        "input_tokens": read,
        "input_tokens_details": {
            "cached_tokens": ending.detail("prompt_tokens_details", "cached_tokens"),
            "cache_write_tokens": 0,
        },
        "output_tokens": written,
        "output_tokens_details": {
            "reasoning_tokens": ending.detail("completion_tokens_details", "reasoning_tokens")
        },
        "total_tokens": read + written,
    }


Event = dict[str, Any]
"""An event without `output_index` and `sequence_number`, which the writer adds."""


class OpenText:
    """A message or a reasoning item that grows.

    `logprobs`: those that have arrived and are not sent yet; None for reasoning.
    """

    def __init__(self, logprobs: list[Any] | None) -> None:
        self.is_reasoning = logprobs is None
        self._id = new_id("rs" if logprobs is None else "msg")
        self._kind = "reasoning_text" if logprobs is None else "output_text"
        self._texts: list[str] = []
        self._arrived = logprobs
        self._logprobs: list[Any] = []

    def begin(self) -> Iterator[Event]:
        item = self._item("")
        yield _added(item | {"content": []})
        yield self._event("content_part.added", part=item["content"][0])

    def grow(self, text: str) -> Event:
        self._texts.append(text)
        return self._event(f"{self._kind}.delta", delta=text, **self._taken())

    def end(self, status: Status) -> Iterator[Event]:
        """Yields its last events; the very last holds the item."""
        text, more = "".join(self._texts), self._taken()
        if more:
            more["logprobs"] = self._logprobs
        item = self._item(text) | {"status": status}
        yield self._event(f"{self._kind}.done", text=text, **more)
        yield self._event("content_part.done", part=item["content"][0])
        yield _done(item)

    def _item(self, text: str) -> Item:
        if self.is_reasoning:
            return reasoning_item(self._id, text)
        return text_item(self._id, text, self._logprobs)

    def _taken(self) -> dict[str, list[Any]]:
        if self._arrived is None:
            return {}
        taken = [*self._arrived]
        self._arrived.clear()
        self._logprobs += taken
        return {"logprobs": taken}

    def _event(self, kind: str, **more: Any) -> Event:
        return {"type": f"response.{kind}", "item_id": self._id, "content_index": 0, **more}


class OpenCall:
    """A function call, which comes whole."""

    def __init__(self, call: ToolCall, request: ModelRequest) -> None:
        self._item = call_item(new_id("fc"), call, request)

    def begin(self) -> Iterator[Event]:
        yield _added(self._item | {"arguments": ""})
        yield self._event("delta", delta=self._item["arguments"])

    def end(self, status: Status) -> Iterator[Event]:
        yield self._event("done", arguments=self._item["arguments"])
        yield _done(self._item | {"status": status})

    def _event(self, kind: str, **more: Any) -> Event:
        name = f"response.function_call_arguments.{kind}"
        return {"type": name, "item_id": self._item["id"], **more}


OpenItem = OpenText | OpenCall


def _added(item: Item) -> Event:
    return {"type": "response.output_item.added", "item": item | {"status": "in_progress"}}


def _done(item: Item) -> Event:
    return {"type": "response.output_item.done", "item": item}


# The conversation up to each response is kept under the response's id, without the instructions,
# which hold for one response only; so is the response itself, and each output item under its id.
# What the agent asked not to `store` is not kept.

_RESPONSES = "responses"
_ITEMS = "items"
_STORED = "whole"


def earlier_messages(memory: Memory, body: dict[str, Any]) -> list[Message]:
    previous = body.get("previous_response_id")
    if previous is None:
        return []
    kept: list[Message] | None = memory.get(_RESPONSES, {}).get(previous)
    if kept is None:
        raise bad(
            "previous_response_id",
            f"does not name a stored response of this attempt: {previous[:80]!r}",
        )
    return kept


def find_response(memory: Memory, response_id: str) -> dict[str, Any] | None:
    response: dict[str, Any] | None = memory.get(_STORED, {}).get(response_id)
    return response


def remember(
    memory: Memory,
    request: ModelRequest,
    response: dict[str, Any],
    said: Iterable[TextPart | ToolCall],
) -> None:
    """Stores `response`; `said` is the model's part of it."""
    if request.body.get("store") is False:
        return
    instructed = bool(request.body.get("instructions"))
    messages = [*request.messages[instructed:], _message(list(said))]
    memory.setdefault(_RESPONSES, {})[response["id"]] = messages
    memory.setdefault(_STORED, {})[response["id"]] = response
    memory.setdefault(_ITEMS, {}).update({item["id"]: item for item in response["output"]})


def _message(said: list[TextPart | ToolCall]) -> Message:
    text_part = [part for part in said if isinstance(part, TextPart)]
    return answer_message(
        "".join(part.text for part in text_part if part.kind == "reasoning"),
        "".join(part.text for part in text_part if part.kind == "text"),
        [part for part in said if isinstance(part, ToolCall)],
    )


class ResponsesWriter:
    """Has at most one item open at a time; the last stays open until the end."""

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

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        _, events = self._begun(chunk)
        self._ending.take(chunk)
        choice = choice_of(chunk)
        self._logprobs += logprobs_of(choice)
        for part in parts_of(choice.get("delta") or {}):
            self._said.append(part)
            if isinstance(part, ToolCall):
                events += self._closed("completed") + self._opened(OpenCall(part, self._request))
            else:
                events += self._text(part)
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
        growing, thinks = self._open, text_part.kind == "reasoning"
        if not isinstance(growing, OpenText) or growing.is_reasoning != thinks:
            growing = OpenText(None if thinks else self._logprobs)
            events = self._closed("completed") + self._opened(growing)
        return events + self._tell_of_item(growing.grow(text_part.text))

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
        index = len(self._items)
        return self._tell(*(event | {"output_index": index} for event in events))

    def _tell(self, *events: Event) -> bytes:
        first = self._events
        self._events += len(events)
        numbered = (e | {"sequence_number": first + n} for n, e in enumerate(events))
        return b"".join(named_event(event) for event in numbered)


class ResponsesDialect(DialectAdapter):
    name: Dialect = "responses"
    table = RESPONSES

    def read(self, body: dict[str, Any], memory: Memory) -> ModelRequest:
        if body.get("truncation") not in (None, "disabled"):
            raise bad("truncation", "must be disabled: it would cut the prompt silently")
        if body.get("n") not in (None, 1):
            raise bad("n", "must be 1: a response is one answer")
        tools, said = tools_of(body), body.get("instructions")
        instructions = [{"role": "system", "content": said}] if said else []
        return ModelRequest(
            dialect="responses",
            body=body,
            messages=[
                *instructions,
                *earlier_messages(memory, body),
                *messages_of(body.get("input"), memory.get(_ITEMS, {}).get),
            ],
            tools=tools,
            fields=fields_of(body, tools),
            wanted_tokens=body.get("max_output_tokens"),
            stream=body.get("stream", False),
            wants_logprobs=wants_logprobs(body),
        )

    def whole(
        self, request: ModelRequest, answer: dict[str, Any], memory: Memory
    ) -> dict[str, Any]:
        ending = ending_of(answer)
        response = Head(request, answer).response(
            status_of(ending), output_of(request, answer), ending
        )
        remember(memory, request, response, parts_of(choice_of(answer)["message"]))
        return response

    def writer(self, request: ModelRequest, memory: Memory) -> ResponsesWriter:
        return ResponsesWriter(request, memory)
