"""Converts a chat answer to the response object of OpenAI's responses API. Pure."""

from __future__ import annotations

import time
from typing import Any, Literal

from ..model_request import ModelRequest
from .conversation import AnswerEnd, ToolCall, choice_of, ending_of, new_id, parts_of
from .responses_input import names_of

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
_WHOLE = ("stop", "tool_calls", "function_call")


class Head:
    """The fields shared by all states of one response; `response` builds one state."""

    def __init__(self, request: ModelRequest, answer: dict[str, Any]) -> None:
        """
        Args:
            answer: the answer or its first chunk; empty if the engine gave none.
        """
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
        """Returns the response object; while in progress it has no `ending`."""
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
    """Returns "completed" if the model ended its answer, else "incomplete"."""
    return "completed" if ending.finish_reason in _WHOLE else "incomplete"


def output_of(request: ModelRequest, answer: dict[str, Any]) -> list[Item]:
    """Returns the items of a whole answer; if the answer is incomplete, so is the last item."""
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
    """Returns a reasoning item."""
    return {
        "id": item_id,
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [reasoning_part(text)],
        "encrypted_content": None,
    }


def reasoning_part(text: str) -> dict[str, Any]:
    """Returns the content part of a reasoning item."""
    return {"type": "reasoning_text", "text": text}


def text_item(item_id: str, text: str, logprobs: list[Any]) -> Item:
    """Returns a message item."""
    return {
        "id": item_id,
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [text_part(text, logprobs)],
    }


def text_part(text: str, logprobs: list[Any]) -> dict[str, Any]:
    """Returns the content part of a message item."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def call_item(item_id: str, call: ToolCall, request: ModelRequest) -> Item:
    """Returns a function call item of the answer to `request`."""
    return {
        "id": item_id,
        "type": "function_call",
        "status": "completed",
        "call_id": call.id,
        **names_of(request.body, call.name),
        "arguments": call.arguments,
    }


def logprobs_of(choice: dict[str, Any]) -> list[Any]:
    """Returns the logprobs of an answer's or chunk's choice.

    They cover all sampled tokens, not just the text's, since an engine does not say which tokens
    became what."""
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
